"""Each class of compat against its code base's formula, implemented again in plain loops or dense
PyTorch.
"""

from __future__ import annotations

import math
from argparse import Namespace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.answers import assert_finite, assert_same_step
from support.cases import sample
from support.oracle_embedders import late_scores
from support.vse_trainers import hinge_sum
from torch import Tensor

import itrloss
from itrloss import compat

of_modes = pytest.mark.parametrize("hardest", [False, True])


def rows(*shape: int, seed: int, unit: bool = True) -> Tensor:
    x = sample(*shape, seed=seed, dtype=torch.float64)
    if unit:
        x = F.normalize(x, dim=-1)
    return x.requires_grad_()


def fixed(*shape: int, seed: int) -> Tensor:
    """Unit vectors without a gradient."""
    return rows(*shape, seed=seed).detach()


def pairs(n: int) -> tuple[Tensor, Tensor]:
    """Correlated images and texts, so that no positive scores below 0."""
    im = fixed(n, 6, seed=0)
    s = F.normalize(im + 0.5 * fixed(n, 6, seed=1), dim=1)
    assert ((im * s).sum(1) > 0).all()
    return im.requires_grad_(), s.requires_grad_()


# ------------------------------------------------------------------------ reference implementations


def order_scores(im: Tensor, s: Tensor) -> Tensor:
    """The lengths by which texts exceed images, negated."""
    return -(s - im[:, None]).relu().norm(dim=2)


def hal(
    scores: Tensor, scale: float, margin: float, leak: bool = False, relu: bool = False
) -> Tensor:
    """HAL of Liu et al.; with ``leak`` and ``relu``, as in public code, the sums include the pair
    itself as 0.
    """
    ones = torch.ones_like(scores)
    of_pair_itself = math.exp(-scale * margin) if leak else 0.0
    return weighted_hal(scores, ones, ones[0], scale, margin, of_pair_itself, relu)


def weighted_hal(
    scores: Tensor,  # (N, N)
    negative: Tensor,  # (N, N) weights
    positive: Tensor,  # (N,) weights
    scale: float,
    margin: float,
    leak: float = 0.0,  # added to the sums of negatives
    relu: bool = False,
) -> Tensor:
    diagonal = torch.eye(len(scores), dtype=torch.bool)
    terms = (scale * negative * (scores - margin)).exp()
    terms = terms.masked_fill(diagonal, 0)
    of_rows = (1 + leak + terms.sum(1)).log()
    of_columns = (1 + leak + terms.sum(0)).log()
    repulsion = (of_rows + of_columns) / scale
    own = scores.diagonal()
    if relu:
        own = own.relu()
    attraction = (1 + positive * own).log()
    return (repulsion - attraction).mean()


def bank_weights(
    scores: Tensor, images: Tensor, texts: Tensor, opt: Namespace
) -> tuple[Tensor, Tensor]:
    """HAL's weights, from the scores of the batch and those with the valid entries of the bank."""
    k = min(opt.mb_k, len(scores))
    near_images = images.sort(dim=1, descending=True).values[:, :k]
    near_texts = texts.sort(dim=1, descending=True).values[:, :k]
    own = scores.diagonal()

    def negative_sum(near: Tensor) -> Tensor:
        return (opt.global_beta * near - opt.global_ep_nega).exp().sum(1)

    hubs = negative_sum(near_images)[:, None] + negative_sum(near_texts)
    weight = (opt.global_beta * own).exp()
    negative = hubs / (hubs + weight[:, None] + weight)

    def positive_sum(near: Tensor) -> Tensor:
        return (opt.global_alpha * (near - opt.global_ep_posi)).exp().sum(1)

    near_too = positive_sum(near_images) + positive_sum(near_texts)
    weight = (opt.global_alpha * (own - opt.global_ep_posi)).exp()
    positive = 1 - weight / (weight + near_too)
    return negative, positive


def reduced(x: Tensor, reduction: str) -> Tensor:
    return x.mean() if reduction == "mean" else x.sum()


def frobenius(sets: Tensor, reduction: str) -> Tensor:
    """The norms of the cosines of different elements of a set."""
    size = sets.shape[1]
    units = F.normalize(sets, dim=2)
    cosines = (units @ units.mT)[:, ~torch.eye(size, dtype=torch.bool)]
    return reduced(cosines.norm(dim=1) / size**2, reduction)


def mmd(x: Tensor, y: Tensor, reduction: str) -> Tensor:
    """The maximum mean discrepancy of the elements of all sets of two sides."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        distances = (a[:, None] - b).norm(dim=2)
        return reduced(torch.exp(-0.5 * distances), reduction)

    x = x.flatten(0, 1)
    y = y.flatten(0, 1)
    return kernel(x, x) - 2 * kernel(x, y) + kernel(y, y)


def crowding(sets: Tensor) -> Tensor:
    """The mean over pairs of elements of a set, large where they are close."""
    size = sets.shape[1]
    first, second = torch.triu_indices(size, size, 1)
    squares = (sets[:, first] - sets[:, second]).square().sum(2)
    return torch.exp(-2 * squares).mean()


# ----------------------------------------------------------------------------------- triplet losses

# Each gets the margin 0.3; unnormalised embeddings, or their scores.
HINGES = {
    "VSE++": lambda **mode: compat.VSEPPLoss(0.3, **mode),
    "VSE-infinity": lambda **mode: compat.VSEInfinityLoss(Namespace(), 0.3, **mode),
    "HREM": lambda **mode: compat.HREMLoss(Namespace(mask_repeat=False), 0.3, **mode),
    "HAL": lambda **mode: compat.HALLoss(hal_options(sum_violation=True, margin=0.3, **mode)),
    "SCAN": lambda **mode: compat.SCANLoss(lambda im, s, s_l: im @ s[:s_l].T, 0.3, **mode),
    "SGRAF": lambda **mode: compat.SGRAFLoss(0.3, **mode),
    "CHAN": lambda **mode: compat.CHANLoss(margin=0.3, **mode),
    "CHAN with options": lambda max_violation=False: compat.CHANLoss(
        Namespace(margin=0.3, max_violation=max_violation), margin=9
    ),
}


def inputs_of(name: str, im: Tensor, s: Tensor) -> tuple[object, ...]:
    """What a class of `HINGES` is called with."""
    if name == "SGRAF":
        return im @ s.T, len(im)  # as NAAF does
    if name.startswith("CHAN"):
        return (im @ s.T,)
    return (im, torch.cat([s, s]), len(s)) if name == "SCAN" else (im, s)


@pytest.mark.parametrize("n", [1, 2, 5, 12])
@pytest.mark.parametrize("name", HINGES)
def test_hinges_of_all_negatives_by_default_and_of_the_hardest_when_switched(name, n, capsys):
    im = rows(n, 6, seed=n, unit=False)
    s = rows(n, 6, seed=n + 50, unit=False)
    wanted = {hardest: hinge_sum(im @ s.T, 0.3, hardest) for hardest in (False, True)}
    assert n == 1 or wanted[True] > 0
    inputs = inputs_of(name, im, s)

    def compare(criterion, hardest):
        assert criterion.max_violation == hardest
        assert f"max_violation={hardest}" in repr(criterion)
        assert_same_step(criterion(*inputs), wanted[hardest], (im, s))

    compare(HINGES[name](max_violation=True), True)
    criterion = HINGES[name]()
    compare(criterion, False)
    criterion.max_violation_on()
    compare(criterion, True)
    criterion.max_violation_off()
    compare(criterion, False)
    criterion.max_violation = True  # DivE's trainer sets the attribute
    compare(criterion, True)
    assert not capsys.readouterr().out


@of_modes
@pytest.mark.parametrize("name", ["VSE++", "PVSE", "HAL"])
def test_order_embeddings(name, hardest):
    # so short that scores are above -1
    im, s = ((0.5 * fixed(5, 4, seed=seed).abs()).requires_grad_() for seed in (1, 2))
    scores = order_scores(im, s)
    wanted = hinge_sum(scores, 0.1, hardest)
    if name == "VSE++":
        loss = compat.VSEPPLoss(0.1, "order", hardest)(im, s)
    elif name == "PVSE":
        images, texts = (torch.stack([x, 0.7 * x], 1) for x in (im, s))
        every = order_scores(images.flatten(0, 1), texts.flatten(0, 1))
        wanted = hinge_sum(every.view(5, 2, 5, 2).amax((1, 3)), 0.1, hardest)
        opt = Namespace(margin=0.1, num_embeds=2, order=True, max_violation=hardest)
        loss, _ = compat.PVSELoss(opt, "sum")(images, texts, None, None)
    else:
        loss = compat.HALLoss(Namespace(local_alpha=5.0, local_ep=0.1, measure="order"))(im, s)
        wanted = hal(scores, 5.0, 0.1)
    assert_same_step(loss, wanted, (im, s))


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4, 5], [0, 0, 2, 2, 2, 5], [7, 7, 7, 7, 7, 7]])
@of_modes
def test_hrem_has_no_texts_of_the_same_image_among_the_negatives(ids, hardest):
    im, s = pairs(6)
    labels = torch.tensor(ids)
    different = len(labels.unique())
    opt = Namespace(mask_repeat=True)
    criterion = compat.HREMLoss(opt, margin=1.2, max_violation=hardest)
    scores = im @ s.T
    same_image = labels[:, None] == labels
    wanted = hinge_sum(scores, 1.2, hardest, same_image)
    alone = hinge_sum(scores, 1.2, hardest)
    assert (wanted < alone) == (different < 6)  # the ids have an effect
    assert_same_step(criterion(im, s, labels), wanted, (im, s))
    assert_same_step(criterion(im, s, ids), wanted, (im, s))
    # but they are not positives either, unlike in our own loss
    mining = "hardest" if hardest else "all"
    own_loss = itrloss.TripletLoss(1.2, mining)
    ours = own_loss(im, s, labels, labels)
    assert torch.isclose(ours, wanted) == (different in (1, 6))


# --------------------------------------------------------------------- hubness, memories and queues

HAL_OPTIONS = {
    "measure": "cosine",
    "local_alpha": 8.0,
    "local_ep": 0.3,
    "global_alpha": 6.0,
    "global_beta": 5.0,
    "global_ep_posi": 0.2,
    "global_ep_nega": 0.1,
    "mb_k": 3,
    "max_violation": False,
    "sum_violation": False,
    "margin": 0.2,
}


def hal_options(**changed) -> Namespace:
    options = {**HAL_OPTIONS, **changed}
    return Namespace(**options)


def user(mu: float = 8.0, gama: float = 0.3) -> compat.USERLoss:
    opt = Namespace(mu=mu, gama=gama)
    return compat.USERLoss(opt)


@pytest.mark.parametrize("n", [2, 5, 12])
@pytest.mark.parametrize("sign", [1, -1])
def test_hal_and_user_in_the_batch(n, sign):
    """Pairs that score below 0 are pulled together, too, which theirs leave alone."""
    im, s = pairs(n)
    s = (sign * s).detach().requires_grad_()
    scores = im @ s.T
    wanted = hal(scores, 8.0, 0.3)
    of_hal = compat.HALLoss(hal_options())
    assert_same_step(of_hal(im, s, None, None, None, range(n)), wanted, (im, s))
    of_user = user()
    assert_same_step(of_user(im, s), wanted, (im, s))
    if sign < 0:
        return
    # a deliberate difference: theirs is larger by the pair's own entry in the sums …
    theirs = hal(scores, 8.0, 0.3, leak=True, relu=True)
    assert 1e-3 < theirs - wanted < 0.1
    # … which is negligible at their settings
    theirs = hal(scores, 90, 0.5, leak=True, relu=True)
    of_user = user(90, 0.5)
    torch.testing.assert_close(of_user(im, s), theirs)


@pytest.mark.parametrize(
    ("n", "size", "k"), [(5, 9, 3), (5, 9, 250), (12, 20, 7), (3, 40, 1), (6, 4, 250)]
)
def test_hal_with_a_memory_bank(n, size, k):
    im, s = pairs(n)
    mb_img = fixed(size, 6, seed=7)
    mb_cap = fixed(size, 6, seed=8)
    mb_img[0] = im[0].detach()
    mb_cap[0] = s[0].detach()
    mb_ind = tuple(range(100, 100 + size))
    indices = (100, 103, *range(n - 2))  # entries 0 and 3 have ids of this batch
    kept = [i for i in range(size) if i not in (0, 3)]
    opt = hal_options(mb_k=k)
    scores = im @ s.T
    with torch.no_grad():
        weights = bank_weights(scores, im @ mb_cap[kept].T, s @ mb_img[kept].T, opt)
        # entries with ids of this batch would have changed the weights
        others = bank_weights(scores, im @ mb_cap.T, s @ mb_img.T, opt)
    assert not torch.equal(others[0], weights[0])
    wanted = weighted_hal(scores, *weights, 8.0, 0.3)
    criterion = compat.HALLoss(opt)
    for convert in (tuple, torch.tensor):
        ours = criterion(im, s, mb_img, mb_cap, convert(mb_ind), convert(indices))
        assert_same_step(ours, wanted, (im, s))
    # theirs has 1 in each sum for the pair itself
    theirs = weighted_hal(scores, *weights, 8.0, 0.3, leak=1.0)
    assert theirs > wanted + 0.01


@pytest.mark.parametrize(
    ("n", "changed", "entries", "indices"),
    [
        (6, {"global_alpha": 900.0, "global_beta": 900.0}, [0, 1, 2, 3], [1, 2, 3, 4, 5, 6]),
        (1, {}, [0], [0]),  # the bank's only entry is the pair itself, which is no negative
        (1, {}, [1], [0]),
    ],
)
def test_weights_of_a_bank_are_finite(n, changed, entries, indices):
    im, s = pairs(n)
    bank = (fixed(len(entries), 6, seed=7), fixed(len(entries), 6, seed=8))
    criterion = compat.HALLoss(hal_options(**changed))
    loss = criterion(im, s, *bank, entries, indices)
    assert_finite(loss, (im, s))


def queue_of(size: int, seed: int) -> Tensor:
    """A queue (6, size), as in USER's code."""
    return fixed(size, 6, seed=seed).T.contiguous()


@pytest.mark.parametrize(("n", "size"), [(1, 4), (3, 8), (8, 3), (264, 4096)])
def test_user_contrasts_with_queues(n, size):
    """USER's model enqueues the batch as soon as it has the loss, before the backward pass."""
    v, w = pairs(n)
    v_k, w_k = v.detach(), w.detach()
    # in memory as in USER's code, and the other way round, where nothing copies it
    v_queue = queue_of(size, 3).requires_grad_()
    w_queue = fixed(size, 6, seed=4).T.requires_grad_()

    def of_side(x: Tensor, key: Tensor, queue: Tensor) -> Tensor:
        others = (7.0 * (x @ queue.detach().clone() - 0.2)).exp().sum(1)
        values = (1 + others).log() / 7.0 - (1 + (x * key).sum(1)).log()
        return values.mean()

    wanted = of_side(v, w_k, w_queue) + of_side(w, v_k, v_queue)
    found = user(7.0, 0.2).moco_forward(v, w_k, w, v_k, v_queue, w_queue)
    with torch.no_grad():
        v_queue[:, :3] = 1
        w_queue[:, :3] = 1
    assert_same_step(found, wanted, (v, w))
    found.backward()
    assert v_queue.grad is None is w_queue.grad


# ------------------------------------------------------------------------------- sets of embeddings


def raw_sets(n: int, m: int, k: int, l: int) -> list[Tensor]:  # noqa: E741
    """Embeddings of images and texts before normalisation, and their residuals."""
    shapes = [(n, k, 6), (m, l, 6)] * 2
    return [rows(*shape, seed=i, unit=False) for i, shape in enumerate(shapes)]


def assert_same_parts(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Compare the parts of a loss, which get no gradient."""
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert not found[name].requires_grad
        torch.testing.assert_close(found[name], x.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@of_modes
@pytest.mark.parametrize(("n", "k"), [(4, 3), (7, 2), (11, 4), (5, 1), (1, 2)])
def test_pvse(n, k, hardest, reduction):
    raw = raw_sets(n, n, k, k)
    img, txt = (F.normalize(x, dim=2) for x in raw[:2])  # as in its model
    residuals = raw[2:]
    opt = Namespace(margin=0.3, num_embeds=k, mmd_weight=0.2, div_weight=0.7, max_violation=hardest)
    scores = late_scores(img, txt, "max", normalize=False)
    ranking = hinge_sum(scores, 0.3, hardest)
    if reduction == "mean":
        hinges = n if hardest else n * n
        ranking = ranking / hinges
    parts = {"ranking_loss": ranking}
    wanted = ranking
    if k > 1:
        parts["div_loss"] = sum(frobenius(x, reduction) for x in residuals)
        parts["mmd_loss"] = mmd(img, txt, reduction)
        wanted = wanted + 0.7 * parts["div_loss"] + 0.2 * parts["mmd_loss"]
    given = (img, txt) if k > 1 else (img[:, 0], txt[:, 0])
    criterion = compat.PVSELoss(opt, reduction)
    loss, found = criterion(*given, *residuals)
    # including gradients of unnormalised embeddings
    assert_same_step(loss, wanted, (img, txt, *raw), 1e-6)
    assert_same_parts(found, parts)


def test_pvse_has_defaults_for_options_that_are_missing():
    img, txt = pairs(5)
    criterion = compat.PVSELoss(Namespace())
    assert not criterion.max_violation
    loss, parts = criterion(img, txt, None, None)
    total = hinge_sum(img @ txt.T, 1.0, False)
    torch.testing.assert_close(loss, total / 25)
    assert list(parts) == ["ranking_loss"]


def dive_hinges(scores: Tensor, per: int, margin: float, hardest: bool) -> tuple[Tensor, Tensor]:
    """Means over all captions, of hinges with other images' captions and with other images."""
    images, texts = scores.shape
    owners = torch.arange(texts) // per
    of_images = []
    of_texts = []
    for j, i in enumerate(owners.tolist()):
        other_texts = owners != i
        other_images = torch.arange(images) != i
        by_text = (margin + scores[i, other_texts] - scores[i, j]).relu()
        by_image = (margin + scores[other_images, j] - scores[i, j]).relu()
        of_images.append(by_text.max() if hardest else by_text.mean())
        of_texts.append(by_image.max() if hardest else by_image.mean())
    return torch.stack(of_images).mean(), torch.stack(of_texts).mean()


@of_modes
@pytest.mark.parametrize(
    ("n", "per", "k", "l"), [(3, 5, 4, 4), (4, 1, 3, 2), (4, 2, 1, 3), (3, 2, 1, 1)]
)
@pytest.mark.parametrize(
    ("residual", "own", "reduction"), [(False, False, "mean"), (True, True, "sum")]
)
def test_dive(n, per, k, l, hardest, residual, own, reduction):  # noqa: E741
    m = n * per
    raw = raw_sets(n, m, k, l)
    img, txt = (F.normalize(x, dim=2) for x in raw[:2])
    residuals = raw[2:]
    opt = Namespace(
        margin=0.2,
        img_num_embeds=k,
        txt_num_embeds=l,
        max_violation=hardest,
        semi_hard_triplet=False,
        div_weight=0.3,
        mmd_weight=0.2,
        unif_weight=0.5,
        qreg_weight=0.0,
        unif_residual=residual,
        temperature=4.0,
        denominator=2.0,
    )

    def similarity(x: Tensor, y: Tensor) -> Tensor:
        assert x.shape == (n * k, 6)
        assert y.shape == (m * l, 6)
        return dive_scores(x.view(n, k, 6), y.view(m, l, 6))

    i2t, t2i = dive_hinges(dive_scores(img, txt), per, 0.2, hardest)
    spread = [F.normalize(x, dim=2) for x in residuals] if residual else [img, txt]
    parts = {
        "i2t_loss": i2t,
        "t2i_loss": t2i,
        "div_loss": sum_of_sets(residuals, lambda sets: frobenius(sets, reduction)),
        "mmd_loss": mmd(img, txt, reduction),
        "unif_loss": sum_of_sets(spread, crowding),
    }
    wanted = i2t + t2i
    wanted = wanted + 0.3 * parts["div_loss"]
    wanted = wanted + 0.2 * parts["mmd_loss"]
    wanted = wanted + 0.5 * parts["unif_loss"]
    function = similarity if own else None
    criterion = compat.DivELoss(k, l, function, opt, reduction, txt_per_img=per)
    loss, found = criterion(img, txt, *residuals)
    assert_same_step(loss, wanted, (img, txt, *raw), 1e-6)
    assert_same_parts(found, parts)


dive_scores = partial(late_scores, form="smooth_chamfer", alpha=4.0, normalize=False)


def sum_of_sets(sides: list[Tensor], function) -> Tensor:
    """The sum of a function of both sides, without those of one embedding each."""
    total = torch.zeros((), dtype=torch.float64)
    for sets in sides:
        if sets.shape[1] > 1:
            total = total + function(sets)
    return total


@of_modes
def test_one_image_alone_costs_nothing(hardest):
    opt = Namespace(img_num_embeds=2, txt_num_embeds=2, temperature=4.0, max_violation=hardest)
    criterion = compat.DivELoss(2, 2, None, opt)
    image = rows(1, 2, 4, seed=0)
    texts = rows(5, 2, 4, seed=1)
    loss, _ = criterion(image, texts, None, None)
    assert loss == 0


# ---------------------------------------------------------------------------------------- open_clip


@pytest.mark.parametrize("n", [1, 2, 5, 12])
@pytest.mark.parametrize("bias", [None, -1.5])
@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_open_clip(name, n, bias):
    im = rows(n, 6, seed=1)
    s = rows(n, 6, seed=2)
    scale = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
    logits = scale * im @ s.T
    given = {"image_features": im, "text_features": s, "logit_scale": scale}
    if bias is not None:
        given["logit_bias"] = torch.tensor(bias, dtype=torch.float64, requires_grad=True)
        logits = logits + given["logit_bias"]
    if name == "ClipLoss":
        own = torch.arange(n)
        wanted = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    else:
        signs = 2 * torch.eye(n) - 1
        wanted = -F.logsigmoid(signs * logits).sum() / n
    criterion = vars(compat)[name]()
    inputs = tuple(given.values())
    assert_same_step(criterion(*inputs), wanted, inputs)
    found = criterion(**given, output_dict=True)  # with the call of its trainer
    assert list(found) == ["contrastive_loss"]
    assert_same_step(found["contrastive_loss"], wanted, inputs)
    torch.testing.assert_close(criterion(im, s, 9.0, bias), wanted)


def test_a_bias_that_a_softmax_does_not_see_has_a_gradient_all_the_same():
    im, s = pairs(4)
    bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    criterion = compat.ClipLoss()
    criterion(im, s, 10.0, bias).backward()
    assert bias.grad is not None
    assert bias.grad == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_scale_in_half_precision_is_not_inverted_in_it(dtype):
    v, w = (x.detach().float() for x in pairs(8))
    scale = torch.tensor(14.3, dtype=dtype)
    criterion = compat.ClipLoss()
    found = criterion(v, w, scale)
    wanted = criterion(v, w, scale.float())
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("message", "call"),
    {
        "measure": lambda im, s, opt: compat.VSEPPLoss(0.2, measure="euclidean"),
        "5 images and 3 texts": lambda im, s, opt: compat.VSEPPLoss(0.2)(im, s[:3]),
        "s: expected embeddings of dimension 6 like im": lambda im, s, opt: compat.VSEPPLoss(
            0.2, "order"
        )(im, s[:, :4]),
        "score_function": lambda im, s, opt: compat.SCANLoss("t2i"),
        "5 images and 6 texts": lambda im, s, opt: compat.SGRAFLoss()(im),
        "mask_repeat": lambda im, s, opt: compat.HREMLoss(Namespace()),
        "img_ids": lambda im, s, opt: compat.HREMLoss(opt)(im, s),
        "local_alpha": lambda im, s, opt: compat.HALLoss(Namespace(mu=1)),
        "mb_k: expected at least 1": lambda im, s, opt: compat.HALLoss({**opt, "mb_k": 0}),
        "mb_cap": lambda im, s, opt: compat.HALLoss(opt)(im, s, im, None, range(5), range(5)),
        "mb_cap: expected 5": lambda im, s, opt: compat.HALLoss(opt)(
            im, s, im, s[:1], *[range(5)] * 2
        ),
        "mb_ind": lambda im, s, opt: compat.HALLoss(opt)(im, s, im, s, range(4), range(5)),
        "indices": lambda im, s, opt: compat.HALLoss(opt)(im, s, im, s, range(5)),
        "t_queue": lambda im, s, opt: compat.USERLoss(opt).moco_forward(im, s, s, im, im.T, im),
        "v_k": lambda im, s, opt: compat.USERLoss(opt).moco_forward(im, s, s, im[:2], im.T, im.T),
        "reduction": lambda im, s, opt: compat.PVSELoss(opt, "none"),
        "img_r": lambda im, s, opt: compat.PVSELoss(opt)(
            *[x[:, None].repeat(1, 2, 1) for x in (im, s)], None, None
        ),
        "txt_embs": lambda im, s, opt: compat.DivELoss(1, 1, torch.matmul, opt)(
            im[:, None], s[:3, None], None, None
        ),
        "similarity_fn": lambda im, s, opt: compat.DivELoss(1, 1, None, {**opt, "denominator": 1}),
        "semi_hard": lambda im, s, opt: compat.DivELoss(
            1, 1, None, {**opt, "semi_hard_triplet": True}
        ),
        "world_size": lambda im, s, opt: compat.ClipLoss(world_size=4),
        "text_features": lambda im, s, opt: compat.ClipLoss()(im, s[:2], 1.0),
    }.items(),
)
def test_wrong_input_is_named(message, call):
    opt = dict(
        mask_repeat=True,
        mu=9,
        gama=0.5,
        num_embeds=2,
        div_weight=1,
        img_num_embeds=1,
        txt_num_embeds=1,
        temperature=4.0,
        **vars(hal_options()),
    )
    with pytest.raises((ValueError, TypeError), match=message):
        call(*pairs(5), opt)


def test_settings_may_be_a_dictionary():
    im, s = pairs(4)
    opt = hal_options()
    of_dictionary = compat.HALLoss(vars(opt))
    of_namespace = compat.HALLoss(opt)
    assert torch.equal(of_dictionary(im, s), of_namespace(im, s))
