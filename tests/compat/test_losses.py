"""Each class of compat against its code base's formula, implemented again in plain loops or dense
PyTorch.
"""

from __future__ import annotations

import math
from argparse import Namespace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import itrloss
from itrloss import compat

SIZES = [1, 2, 5, 12]
of_sizes = pytest.mark.parametrize("n", SIZES)
of_modes = pytest.mark.parametrize("hardest", [False, True])


def rows(*shape: int, seed: int, unit: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if unit:
        x = F.normalize(x, dim=-1)
    return x.requires_grad_()


def fixed(*shape: int, seed: int) -> Tensor:
    """Unit vectors without a gradient."""
    return rows(*shape, seed=seed).detach()


def pairs(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated images and texts, so that no positive scores below 0."""
    im = fixed(n, 6, seed=seed)
    s = F.normalize(im + 0.5 * fixed(n, 6, seed=seed + 1), dim=1)
    assert ((im * s).sum(1) > 0).all()
    return im.requires_grad_(), s.requires_grad_()


def random_scores(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.rand(n, n, generator=generator, dtype=torch.float64).requires_grad_()


def assert_same(
    ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...], tolerance: float = 1e-9
) -> None:
    """Compare values, and gradients of all inputs."""
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    found = torch.autograd.grad(3 * ours, inputs, **options)
    wanted = torch.autograd.grad(3 * theirs, inputs, **options)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------ reference implementations


def hinge_sum(scores: Tensor, margin: float, hardest: bool, masked: Tensor | None = None) -> Tensor:
    """Sum of the hinges of each diagonal entry with its row and its column, without masked
    pairs.
    """
    if masked is None:
        masked = torch.eye(len(scores), dtype=torch.bool)
    own = scores.diagonal()
    of_rows = (margin + scores - own[:, None]).relu().masked_fill(masked, 0)
    of_columns = (margin + scores - own).relu().masked_fill(masked, 0)
    if hardest:
        return of_rows.amax(1).sum() + of_columns.amax(0).sum()
    return of_rows.sum() + of_columns.sum()


def order_scores(im: Tensor, s: Tensor) -> Tensor:
    return -(s - im[:, None]).relu().norm(dim=2)


def hal(
    scores: Tensor, scale: float, margin: float, leak: bool = False, relu: bool = False
) -> Tensor:
    """HAL of Liu et al.; with ``leak`` and ``relu``, as in public code, the sums include the pair
    itself as 0.
    """
    ones = torch.ones_like(scores)
    return weighted_hal(
        scores, ones, ones[0], scale, margin, leak * math.exp(-scale * margin), relu
    )


def weighted_hal(
    scores: Tensor,  # (N, N)
    negative: Tensor,  # (N, N) weights
    positive: Tensor,  # (N,) weights
    scale: float,
    margin: float,
    leak: float = 0.0,  # added to the sums of negatives
    relu: bool = False,
) -> Tensor:
    terms = (scale * negative * (scores - margin)).exp()
    terms = terms.masked_fill(torch.eye(len(scores), dtype=torch.bool), 0)
    pushed = (1 + leak + terms.sum(1)).log() + (1 + leak + terms.sum(0)).log()
    own = scores.diagonal()
    if relu:
        own = own.relu()
    return (pushed / scale - (1 + positive * own).log()).mean()


def bank_weights(
    scores: Tensor, images: Tensor, texts: Tensor, opt: Namespace
) -> tuple[Tensor, Tensor]:
    """HAL's weights, from the scores of the batch and those with the valid entries of the bank."""
    k = min(opt.mb_k, len(scores))
    near = [x.sort(dim=1, descending=True).values[:, :k] for x in (images, texts)]
    own = scores.diagonal()
    of_images, of_texts = ((opt.global_beta * x - opt.global_ep_nega).exp().sum(1) for x in near)
    hubs = of_images[:, None] + of_texts
    weight = (opt.global_beta * own).exp()
    negative = hubs / (hubs + weight[:, None] + weight)
    near_too = sum((opt.global_alpha * (x - opt.global_ep_posi)).exp().sum(1) for x in near)
    weight = (opt.global_alpha * (own - opt.global_ep_posi)).exp()
    return negative, 1 - weight / (weight + near_too)


def set_scores(images: Tensor, texts: Tensor, score) -> Tensor:
    return torch.stack([torch.stack([score(x @ y.T) for y in texts]) for x in images])


def smooth_chamfer(alpha: float, c: Tensor) -> Tensor:
    forth = (alpha * c).logsumexp(1).mean()
    back = (alpha * c).logsumexp(0).mean()
    return (forth + back) / (2 * alpha)


def reduced(x: Tensor, reduction: str) -> Tensor:
    return x.mean() if reduction == "mean" else x.sum()


def frobenius(sets: Tensor, reduction: str) -> Tensor:
    size = sets.shape[1]
    units = F.normalize(sets, dim=2)
    cosines = units @ units.mT
    others = cosines[:, ~torch.eye(size, dtype=torch.bool)]
    return reduced(others.square().sum(1).sqrt() / size**2, reduction)


def mmd(x: Tensor, y: Tensor, reduction: str) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return reduced(torch.exp(-0.5 * (a[:, None] - b).norm(dim=2)), reduction)

    x = x.flatten(0, 1)
    y = y.flatten(0, 1)
    return kernel(x, x) - 2 * kernel(x, y) + kernel(y, y)


def crowding(sets: Tensor) -> Tensor:
    squares = (sets[:, :, None] - sets[:, None]).square().sum(3)
    first, second = torch.triu_indices(sets.shape[1], sets.shape[1], 1)
    return torch.exp(-2 * squares[:, first, second]).mean()


# ----------------------------------------------------------------------------------- triplet losses


@of_sizes
@of_modes
def test_vsepp_and_its_followers_are_sums_of_hinges(n, hardest):
    # no_imgnorm: unnormalised
    im = rows(n, 6, seed=n, unit=False)
    s = rows(n, 6, seed=n + 50, unit=False)
    wanted = hinge_sum(im @ s.T, 0.3, hardest)
    assert n == 1 or wanted > 0
    for criterion in (
        compat.VSEPPLoss(margin=0.3, max_violation=hardest),
        compat.VSEInfinityLoss(Namespace(), 0.3, hardest),
        compat.HREMLoss(Namespace(mask_repeat=False), 0.3, hardest),
    ):
        assert_same(criterion(im, s), wanted, (im, s))


def order_embeddings() -> tuple[Tensor, Tensor]:
    im = fixed(5, 4, seed=1).abs()
    s = fixed(5, 4, seed=2).abs()
    return im.requires_grad_(), s.requires_grad_()


@of_modes
def test_order_embeddings_of_vsepp(hardest):
    im, s = order_embeddings()
    wanted = hinge_sum(order_scores(im, s), 0.1, hardest)
    assert_same(compat.VSEPPLoss(0.1, "order", hardest)(im, s), wanted, (im, s))


@of_modes
def test_order_embeddings_of_pvse(hardest):
    lengths = torch.tensor([[1.0], [0.7]])
    images, texts = ((lengths * x.detach()[:, None]).requires_grad_() for x in order_embeddings())
    every = order_scores(images.flatten(0, 1), texts.flatten(0, 1))
    best = every.view(5, 2, 5, 2).amax((1, 3))
    opt = Namespace(margin=0.1, num_embeds=2, order=True, max_violation=hardest)
    loss, _ = compat.PVSELoss(opt, "sum")(images, texts, None, None)
    assert_same(loss, hinge_sum(best, 0.1, hardest), (images, texts))


def test_order_embeddings_of_hal():
    # so short that scores are above -1
    im, s = ((0.5 * x.detach()).requires_grad_() for x in order_embeddings())
    opt = Namespace(local_alpha=5.0, local_ep=0.1, measure="order")
    assert_same(compat.HALLoss(opt)(im, s), hal(order_scores(im, s), 5.0, 0.1), (im, s))


@of_sizes
@of_modes
def test_losses_of_score_matrices_are_sums_of_hinges(n, hardest):
    scores = random_scores(n)
    wanted = hinge_sum(scores, 0.2, hardest)
    opt = Namespace(margin=0.2, max_violation=hardest)
    for criterion in (
        compat.SGRAFLoss(0.2, hardest),
        compat.CHANLoss(margin=0.2, max_violation=hardest),
        compat.CHANLoss(opt, margin=9),
    ):
        assert_same(criterion(scores), wanted, (scores,))


def word_scores(im: Tensor, s: Tensor, lengths: list[int], sharpness: float = 1.0) -> Tensor:
    """(B, R, D), (B, L, D) -> (B, B): mean over the words of the best region's similarity."""
    columns = [
        (sharpness * im @ s[j, :length].T).amax(1).mean(1) for j, length in enumerate(lengths)
    ]
    return torch.stack(columns, 1)


@of_modes
def test_scan_takes_the_scores_of_its_own_function(hardest):
    im = rows(4, 3, 5, seed=0)
    s = rows(4, 6, 5, seed=1)
    lengths = [6, 2, 5, 1]
    function = partial(word_scores, sharpness=2.0)
    criterion = compat.SCANLoss(function, margin=0.2, max_violation=hardest)
    wanted = hinge_sum(function(im, s, lengths), 0.2, hardest)
    assert_same(criterion(im, s, lengths), wanted, (im, s))


def test_scan_trains_a_module_of_scores():
    class Scores(torch.nn.Linear):
        def forward(self, im, s, s_l):
            return super().forward(im) @ s.T

    criterion = compat.SCANLoss(Scores(4, 4))
    assert len(list(criterion.parameters())) == 2


def test_sgraf_takes_the_length_that_naaf_passes():
    scores = random_scores(4)
    assert_same(compat.SGRAFLoss(0.2, True)(scores, 4), hinge_sum(scores, 0.2, True), (scores,))


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4, 5], [0, 0, 2, 2, 2, 5], [7, 7, 7, 7, 7, 7]])
@of_modes
def test_hrem_has_no_texts_of_the_same_image_among_the_negatives(ids, hardest):
    im, s = pairs(6)
    labels = torch.tensor(ids)
    different = len(labels.unique())
    criterion = compat.HREMLoss(Namespace(mask_repeat=True), margin=1.2, max_violation=hardest)
    wanted = hinge_sum(im @ s.T, 1.2, hardest, labels[:, None] == labels)
    alone = hinge_sum(im @ s.T, 1.2, hardest)
    assert (wanted < alone) == (different < 6)  # the ids have an effect
    assert_same(criterion(im, s, labels), wanted, (im, s))
    assert_same(criterion(im, s, ids), wanted, (im, s))
    # but they are not positives either, unlike in our own loss
    mining = "hardest" if hardest else "all"
    ours = itrloss.TripletLoss(1.2, mining)(im, s, labels, labels)
    assert torch.isclose(ours, wanted) == (different in (1, 6))


HINGES = {
    "VSE++": lambda **mode: compat.VSEPPLoss(1.0, **mode),
    "VSE-infinity": lambda **mode: compat.VSEInfinityLoss(None, 1.0, **mode),
    "HREM": lambda **mode: compat.HREMLoss(Namespace(mask_repeat=False), 1.0, **mode),
    "SCAN": lambda **mode: compat.SCANLoss(lambda im, s, _: im @ s.T, 1.0, **mode),
    "SGRAF": lambda **mode: compat.SGRAFLoss(1.0, **mode),
    "CHAN": lambda **mode: compat.CHANLoss(None, 1.0, **mode),
}


def inputs_of(name: str, im: Tensor, s: Tensor) -> tuple[Tensor | None, ...]:
    if name in ("SGRAF", "CHAN"):
        return (im @ s.T,)
    if name == "SCAN":
        return im, s, None
    return im, s


@pytest.mark.parametrize("name", HINGES)
def test_all_negatives_count_unless_asked_otherwise(name):
    im, s = pairs(6)
    modes = [({}, False), ({"max_violation": False}, False), ({"max_violation": True}, True)]
    for mode, hardest in modes:
        criterion = HINGES[name](**mode)
        assert criterion.max_violation == hardest
        assert f"max_violation={hardest}" in repr(criterion)
        found = criterion(*inputs_of(name, im, s))
        torch.testing.assert_close(found, hinge_sum(im @ s.T, 1.0, hardest))


def test_pvse_counts_all_negatives_by_default():
    assert not compat.PVSELoss(Namespace(num_embeds=1)).max_violation


@pytest.mark.parametrize("name", ["VSE-infinity", "CHAN", "HREM"])
def test_max_violation_is_switched(name, capsys):
    im, s = pairs(6)
    criterion = HINGES[name]()
    inputs = inputs_of(name, im, s)
    of_all = hinge_sum(im @ s.T, 1.0, False)
    of_hardest = hinge_sum(im @ s.T, 1.0, True)
    criterion.max_violation_on()
    torch.testing.assert_close(criterion(*inputs), of_hardest)
    criterion.max_violation_off()
    torch.testing.assert_close(criterion(*inputs), of_all)
    criterion.max_violation = True  # DivE's trainer sets the attribute
    torch.testing.assert_close(criterion(*inputs), of_hardest)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("measure", ["cosine", "order"])
def test_vsepp_refuses_embeddings_of_another_shape(measure):
    im, s = pairs(5)
    criterion = compat.VSEPPLoss(0.2, measure)
    for inputs, message in (
        ((im, s[:3]), r"^s: expected shape \(5, 6\) like im, got \(3, 6\)"),
        ((im, s[:, :4]), r"^s: expected embeddings of dimension 6 like im, got shape \(5, 4\)"),
        (
            (im[:, None], s[:, None]),
            r"^im: expected shape \(N, D\), each at least 1, got \(5, 1, 6\)",
        ),
        ((im, s[0]), r"^s: expected shape \(M, D\), each at least 1, got \(6,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            criterion(*inputs)
    with pytest.raises(TypeError, match=r"^s: expected a floating-point tensor"):
        criterion(im, s.tolist())


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
    return Namespace(**(HAL_OPTIONS | changed))


def user(mu: float = 8.0, gama: float = 0.3) -> compat.USERLoss:
    return compat.USERLoss(Namespace(mu=mu, gama=gama))


@pytest.mark.parametrize("n", [2, 5, 12])
def test_hal_and_user_in_the_batch(n):
    im, s = pairs(n)
    wanted = hal(im @ s.T, 8.0, 0.3)
    assert_same(compat.HALLoss(hal_options())(im, s, None, None, None, range(n)), wanted, (im, s))
    assert_same(user()(im, s), wanted, (im, s))
    # a deliberate difference: theirs is larger by the pair's own entry in the sums …
    theirs = hal(im @ s.T, 8.0, 0.3, leak=True, relu=True)
    assert 1e-3 < theirs - wanted < 0.1
    # … which is negligible at their settings
    theirs = hal(im @ s.T, 90, 0.5, leak=True, relu=True)
    torch.testing.assert_close(user(90, 0.5)(im, s), theirs)


@pytest.mark.parametrize("criterion", [user(90, 0.5), compat.HALLoss(hal_options(local_alpha=90))])
def test_pairs_that_score_below_zero_are_pulled_together(criterion):
    im, s = pairs(4)
    s = (-s).detach().requires_grad_()
    ours = criterion(im, s)
    assert_same(ours, hal(im @ s.T, 90, criterion.margin), (im, s))
    (gradient,) = torch.autograd.grad(ours, s)
    assert (gradient != 0).any()
    theirs = hal(im @ s.T, 90, 10.0, leak=True, relu=True)
    (gradient,) = torch.autograd.grad(theirs, s)
    assert not gradient.any()


@pytest.mark.parametrize(("n", "size", "k"), [(5, 9, 3), (5, 9, 250), (12, 20, 7), (3, 40, 1)])
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
    for convert in (tuple, torch.tensor):
        ours = compat.HALLoss(opt)(im, s, mb_img, mb_cap, convert(mb_ind), convert(indices))
        assert_same(ours, wanted, (im, s))
    # theirs has 1 in each sum for the pair itself
    assert weighted_hal(scores, *weights, 8.0, 0.3, leak=1.0) > wanted + 0.01


def test_weights_of_a_bank_do_not_overflow():
    im, s = pairs(6)
    bank = fixed(4, 6, seed=7), fixed(4, 6, seed=8)
    opt = hal_options(global_alpha=900.0, global_beta=900.0)
    loss = compat.HALLoss(opt)(im, s, *bank, (0, 1, 2, 3), (1, 2, 3, 4, 5, 6))
    assert loss.isfinite()
    for gradient in torch.autograd.grad(loss, (im, s)):
        assert gradient.isfinite().all()
        assert gradient.any()


def test_a_bank_may_hold_less_than_k_entries():
    im, s = pairs(6)
    images = fixed(4, 6, seed=7)
    texts = fixed(4, 6, seed=8)
    criterion = compat.HALLoss(hal_options())
    # all but the first are of the batch
    found = criterion(im, s, images, texts, (0, 1, 2, 3), (1, 2, 3, 4, 5, 6))
    torch.testing.assert_close(found, criterion(im, s, images[:1], texts[:1], (0,), (7,)))


@of_modes
def test_hal_gives_the_triplet_loss_if_asked(hardest):
    im, s = pairs(6)
    opt = hal_options(margin=0.4, max_violation=hardest, sum_violation=not hardest)
    found = compat.HALLoss(opt)(im, s, None, None, None, None)
    assert_same(found, hinge_sum(im @ s.T, 0.4, hardest), (im, s))


def queue_of(size: int, seed: int) -> Tensor:
    """A queue (6, size), as in USER's code."""
    return fixed(size, 6, seed=seed).T.contiguous()


@pytest.mark.parametrize(("n", "size"), [(1, 4), (3, 8), (8, 3)])
def test_user_contrasts_with_queues(n, size):
    v, w = pairs(n)
    v_k, w_k = v.detach(), w.detach()
    v_queue, w_queue = queue_of(size, 3), queue_of(size, 4)
    wanted = 0
    for x, key, queue in ((v, w_k, w_queue), (w, v_k, v_queue)):
        others = (7.0 * (x @ queue - 0.2)).exp().sum(1)
        own = (x * key).sum(1).relu()
        wanted = wanted + ((1 + others).log() / 7.0 - (1 + own).log()).mean()
    found = user(7.0, 0.2).moco_forward(v, w_k, w, v_k, v_queue, w_queue)
    assert_same(found, wanted, (v, w))


@pytest.mark.parametrize("size", [16, 4096])
def test_queues_may_be_overwritten_before_the_backward_pass(size):
    """USER's model enqueues the batch as soon as it has the loss, before the backward pass."""
    v, w = pairs(6)
    v_k, w_k = (x.detach() for x in pairs(6, seed=3))
    queues = queue_of(size, 4), queue_of(size, 5)
    criterion = user(7.0, 0.2)
    wanted = torch.autograd.grad(criterion.moco_forward(v, w_k, w, v_k, *queues), (v, w))
    loss = criterion.moco_forward(v, w_k, w, v_k, *queues)
    for queue, keys in zip(queues, (v_k, w_k), strict=True):
        queue[:, :6] = keys.T
    torch.testing.assert_close(torch.autograd.grad(loss, (v, w)), wanted, rtol=0, atol=0)


def test_queues_and_batch_together_are_the_unified_training_objective():
    v, w = pairs(6)
    v_k, w_k = v.detach(), w.detach()
    v_queue = fixed(12, 6, seed=3)
    w_queue = fixed(12, 6, seed=4)
    memory = itrloss.CoupledMemory(12, 6, dtype=torch.float64)
    memory.enqueue(v_queue, w_queue)
    criterion = user(20.0, 0.4)
    of_queues = criterion.moco_forward(v, w_k, w, v_k, v_queue.T, w_queue.T)
    theirs = 5 * criterion(v, w) + of_queues
    ours = itrloss.UnifiedTrainingObjective(20.0, 0.4, batch_weight=5)(v, w, v_k, w_k, memory)
    torch.testing.assert_close(theirs, ours)


def test_queues_get_no_gradient():
    v, w = pairs(6)
    queue = queue_of(12, 3).requires_grad_()
    loss = user().moco_forward(v, w.detach(), w, v.detach(), queue, queue)
    loss.backward()
    assert queue.grad is None


# ------------------------------------------------------------------------------- sets of embeddings


def raw_sets(n: int, m: int, k: int, l: int) -> list[Tensor]:  # noqa: E741
    """Embeddings of images and texts before normalisation, and their residuals."""
    shapes = [(n, k, 6), (m, l, 6)] * 2
    return [rows(*shape, seed=i, unit=False) for i, shape in enumerate(shapes)]


def assert_same_parts(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
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
    ranking = hinge_sum(set_scores(img, txt, torch.amax), 0.3, hardest)
    if reduction == "mean":
        ranking = ranking / (n if hardest else n * n)
    parts = {"ranking_loss": ranking}
    wanted = ranking
    if k > 1:
        parts["div_loss"] = sum(frobenius(x, reduction) for x in residuals)
        parts["mmd_loss"] = mmd(img, txt, reduction)
        wanted = wanted + 0.7 * parts["div_loss"] + 0.2 * parts["mmd_loss"]
    given = (img, txt) if k > 1 else (img[:, 0], txt[:, 0])
    loss, found = compat.PVSELoss(opt, reduction)(*given, *residuals)
    # including gradients of unnormalised embeddings
    assert_same(loss, wanted, (img, txt, *raw), 1e-6)
    assert_same_parts(found, parts)


def test_pvse_has_defaults_for_options_that_are_missing():
    img, txt = pairs(5)
    loss, parts = compat.PVSELoss(Namespace())(img, txt, None, None)
    torch.testing.assert_close(loss, hinge_sum(img @ txt.T, 1.0, False) / 25)
    assert list(parts) == ["ranking_loss"]


def dive_hinges(scores: Tensor, per: int, margin: float, hardest: bool) -> tuple[Tensor, Tensor]:
    """Means over all captions, of hinges with other images' captions and with other images."""
    of_images, of_texts = [], []
    for j in range(scores.shape[1]):
        i = j // per
        other_texts = torch.arange(scores.shape[1]) // per != i
        other_images = torch.arange(scores.shape[0]) != i
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
    chamfer = partial(smooth_chamfer, 4.0)

    def similarity(x: Tensor, y: Tensor) -> Tensor:
        assert x.shape == (n * k, 6)
        assert y.shape == (m * l, 6)
        return set_scores(x.view(n, k, 6), y.view(m, l, 6), chamfer)

    i2t, t2i = dive_hinges(set_scores(img, txt, chamfer), per, 0.2, hardest)
    spread = [F.normalize(x, dim=2) for x in residuals] if residual else [img, txt]
    several = [at for at, size in enumerate((k, l)) if size > 1]  # the sides with sets
    zero = i2t * 0
    parts = {
        "i2t_loss": i2t,
        "t2i_loss": t2i,
        "div_loss": sum((frobenius(residuals[at], reduction) for at in several), zero),
        "mmd_loss": mmd(img, txt, reduction),
        "unif_loss": sum((crowding(spread[at]) for at in several), zero),
    }
    weights = torch.tensor([1.0, 1.0, 0.3, 0.2, 0.5], dtype=torch.float64)
    wanted = weights @ torch.stack([*parts.values()])
    function = similarity if own else None
    criterion = compat.DivELoss(k, l, function, opt, reduction, txt_per_img=per)
    loss, found = criterion(img, txt, *residuals)
    assert_same(loss, wanted, (img, txt, *raw), 1e-6)
    assert_same_parts(found, parts)


@of_modes
def test_one_image_alone_costs_nothing(hardest):
    opt = Namespace(img_num_embeds=2, txt_num_embeds=2, temperature=4.0, max_violation=hardest)
    criterion = compat.DivELoss(2, 2, None, opt)
    loss, _ = criterion(rows(1, 2, 4, seed=0), rows(5, 2, 4, seed=1), None, None)
    assert loss == 0


# ---------------------------------------------------------------------------------------- open_clip


@of_sizes
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
    assert_same(criterion(*inputs), wanted, inputs)
    found = criterion(**given, output_dict=True)  # with the call of its trainer
    assert list(found) == ["contrastive_loss"]
    assert_same(found["contrastive_loss"], wanted, inputs)
    torch.testing.assert_close(criterion(im, s, 9.0, bias), wanted)


def test_a_bias_that_a_softmax_does_not_see_has_a_gradient_all_the_same():
    bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    compat.ClipLoss()(*pairs(4), 10.0, bias).backward()
    assert bias.grad is not None
    assert bias.grad == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_scale_in_half_precision_is_not_inverted_in_it(dtype):
    v, w = (x.detach().float() for x in pairs(8))
    scale = torch.tensor(14.3, dtype=dtype)
    wanted = compat.ClipLoss()(v, w, scale.float())
    torch.testing.assert_close(compat.ClipLoss()(v, w, scale), wanted, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("argument", "call"),
    {
        "margin": lambda im, s, opt: compat.VSEPPLoss(margin="0.2"),
        "measure": lambda im, s, opt: compat.VSEPPLoss(0.2, measure="euclidean"),
        "s:": lambda im, s, opt: compat.VSEPPLoss(0.2)(im, s[:3]),
        "im:": lambda im, s, opt: compat.VSEInfinityLoss()(im[None], s[None]),
        "score_function": lambda im, s, opt: compat.SCANLoss("t2i"),
        "score_function:": lambda im, s, opt: compat.SCANLoss(word_scores)(
            im[:, None], s[:2, None], [1, 1]
        ),
        "scores": lambda im, s, opt: compat.SGRAFLoss()(im),
        "sims": lambda im, s, opt: compat.CHANLoss()(im),
        "mask_repeat": lambda im, s, opt: compat.HREMLoss(Namespace()),
        "img_ids": lambda im, s, opt: compat.HREMLoss(opt)(im, s),
        "img_ids:": lambda im, s, opt: compat.HREMLoss(opt)(im, s, torch.arange(2)),
        "local_alpha": lambda im, s, opt: compat.HALLoss(Namespace(mu=1)),
        "mb_cap": lambda im, s, opt: compat.HALLoss(opt)(im, s, im, None, range(5), range(5)),
        "mb_ind": lambda im, s, opt: compat.HALLoss(opt)(im, s, im, s, range(4), range(5)),
        "indices": lambda im, s, opt: compat.HALLoss(opt)(im, s, im, s, range(5)),
        "gama": lambda im, s, opt: compat.USERLoss(Namespace(mu=1)),
        "t_queue": lambda im, s, opt: compat.USERLoss(opt).moco_forward(im, s, s, im, im.T, im),
        "v_k": lambda im, s, opt: compat.USERLoss(opt).moco_forward(im, s, s, im[:2], im.T, im.T),
        "reduction": lambda im, s, opt: compat.PVSELoss(opt, "none"),
        "txt:": lambda im, s, opt: compat.PVSELoss(opt)(im[:, None].repeat(1, 2, 1), s, None, None),
        "img_r": lambda im, s, opt: compat.PVSELoss(opt)(
            *[x[:, None].repeat(1, 2, 1) for x in (im, s)], None, None
        ),
        "txt_embs": lambda im, s, opt: compat.DivELoss(1, 1, torch.matmul, opt)(im, s, None, None),
        "similarity_fn": lambda im, s, opt: compat.DivELoss(
            1, 1, None, Namespace(**vars(opt), denominator=1)
        ),
        "semi_hard": lambda im, s, opt: compat.DivELoss(
            1, 1, None, Namespace(**vars(opt), semi_hard_triplet=True)
        ),
        "world_size": lambda im, s, opt: compat.ClipLoss(world_size=4),
        "world_size:": lambda im, s, opt: compat.SigLipLoss(rank=1, world_size=2),
        "text_features": lambda im, s, opt: compat.ClipLoss()(im, s[:2], 1.0),
    }.items(),
)
def test_errors_name_the_argument(argument, call):
    opt = Namespace(
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
    with pytest.raises((ValueError, TypeError), match=argument):
        call(*pairs(5), opt)


@pytest.mark.parametrize("image", [0, 1])
def test_hal_with_one_pair_and_a_bank_of_one_is_finite(image):
    """The bank's only entry is the pair itself, which is no negative, or another."""
    im = rows(1, 6, seed=0)
    s = rows(1, 6, seed=1)
    loss = compat.HALLoss(hal_options())(im, s, im.detach(), s.detach(), [image], [0])
    gradients = torch.autograd.grad(loss, (im, s))
    assert loss.isfinite()
    assert all(x.isfinite().all() for x in gradients)


def test_ids_beyond_int64_are_refused():
    im, s = pairs(3)
    ids = np.array([2**63, 2**63 + 1, 2**63 + 2], dtype=np.uint64)
    with pytest.raises(ValueError, match=r"expected ids below 2\*\*63, got larger ones"):
        compat.HREMLoss(Namespace(mask_repeat=True))(im, s, ids)
    with pytest.raises(ValueError, match=r"expected ids below 2\*\*63, got larger ones"):
        compat.HALLoss(hal_options())(im, s, im.detach(), s.detach(), ids, ids)


def test_settings_may_be_a_dictionary():
    im, s = pairs(4)
    found = compat.HALLoss(vars(hal_options()))(im, s)
    assert torch.equal(found, compat.HALLoss(hal_options())(im, s))


@pytest.mark.parametrize(
    ("criterion", "option", "value"),
    [
        (compat.VSEPPLoss(), "margin", "0.2"),
        (compat.HALLoss(hal_options()), "scale", -30.0),
        (compat.HALLoss(hal_options()), "k", 0),
        (user(), "margin", None),
    ],
)
def test_an_option_that_is_set_later_is_checked(criterion, option, value):
    before = getattr(criterion, option)
    with pytest.raises((TypeError, ValueError), match=option):
        setattr(criterion, option, value)
    assert getattr(criterion, option) == before
