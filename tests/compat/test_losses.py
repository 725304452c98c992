"""Each class of compat against its code base's formula, implemented again in plain loops or dense
PyTorch.
"""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import itrloss
from itrloss import compat

SIZES = [1, 2, 5, 12]
MODES = [False, True]


def rows(*shape: int, seed: int, unit: bool = True) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (torch.nn.functional.normalize(x, dim=-1) if unit else x).requires_grad_()


def pairs(n: int, d: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated images and texts, so that no positive scores below 0."""
    im = rows(n, d, seed=seed).detach()
    s = torch.nn.functional.normalize(im + 0.5 * rows(n, d, seed=seed + 1).detach(), dim=1)
    assert ((im * s).sum(1) > 0).all()
    return im.requires_grad_(), s.requires_grad_()


def assert_same(
    ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...], tolerance: float = 1e-9
) -> None:
    """Compare values, and gradients of all inputs."""
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    got, wanted = (torch.autograd.grad(3 * x, inputs, **options) for x in (ours, theirs))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------ reference implementations


def hinge_sum(scores: Tensor, margin: float, hardest: bool, masked: Tensor | None = None) -> Tensor:
    """Sum of the hinges of each diagonal entry with its row and its column, without masked
    pairs.
    """
    n = len(scores)
    masked = torch.eye(n, dtype=torch.bool) if masked is None else masked
    total = scores.sum() * 0
    for i in range(n):
        for line in (
            [scores[i, j] for j in range(n) if not masked[i, j]],
            [scores[j, i] for j in range(n) if not masked[j, i]],
        ):
            costs = [(margin + x - scores[i, i]).clamp(min=0) for x in line]
            if costs:
                total = total + (torch.stack(costs).max() if hardest else torch.stack(costs).sum())
    return total


def order_scores(im: Tensor, s: Tensor) -> Tensor:
    return torch.stack(
        [torch.stack([-((y - x).clamp(min=0) ** 2).sum().sqrt() for y in s]) for x in im]
    )


def hal(
    scores: Tensor, scale: float, margin: float, leak: bool = False, relu: bool = False
) -> Tensor:
    """HAL of Liu et al.; with ``leak`` and ``relu``, as in public code, the sums include the pair
    itself as 0.
    """
    n = len(scores)
    total = scores.sum() * 0
    for i in range(n):
        for line in (scores[i], scores[:, i]):
            others = sum(
                (torch.exp(scale * (line[j] - margin)) for j in range(n) if j != i), total * 0
            )
            if leak:
                others = others + torch.exp(torch.tensor(-scale * margin, dtype=scores.dtype))
            total = total + torch.log(1 + others) / scale
        total = total - torch.log(1 + (scores[i, i].clamp(min=0) if relu else scores[i, i]))
    return total / n


def bank_weights(
    scores: Tensor, images: Tensor, texts: Tensor, opt: Namespace
) -> tuple[Tensor, Tensor]:
    """HAL's weights, from the scores of the batch and those with the valid entries of the bank."""
    k = min(opt.mb_k, len(scores))
    near = [x.sort(dim=1, descending=True).values[:, :k] for x in (images, texts)]
    n, m = (torch.exp(opt.global_beta * x - opt.global_ep_nega).sum(1) for x in near)
    own = torch.exp(opt.global_beta * scores.diagonal())
    negative = torch.empty_like(scores)
    for i in range(len(scores)):
        for j in range(len(scores)):
            negative[i, j] = (n[i] + m[j]) / (n[i] + m[j] + own[i] + own[j])
    near_too = sum(torch.exp(opt.global_alpha * (x - opt.global_ep_posi)).sum(1) for x in near)
    own = torch.exp(opt.global_alpha * (scores.diagonal() - opt.global_ep_posi))
    return negative, 1 - own / (own + near_too)


def weighted_hal(
    scores: Tensor, negative: Tensor, positive: Tensor, opt: Namespace, leak: bool = False
) -> Tensor:
    n, total = len(scores), scores.sum() * 0
    for i in range(n):
        row, column = (
            [
                (opt.local_alpha * w * (x - opt.local_ep)).exp()
                for j, (w, x) in enumerate(line)
                if j != i
            ]
            for line in (
                zip(negative[i], scores[i], strict=True),
                zip(negative[:, i], scores[:, i], strict=True),
            )
        )
        for line in (row, column):
            total = total + torch.log(1 + sum(line) + leak) / opt.local_alpha
        total = total - torch.log(1 + positive[i] * scores[i, i])
    return total / n


def set_scores(images: Tensor, texts: Tensor, score) -> Tensor:
    return torch.stack([torch.stack([score(x @ y.T) for y in texts]) for x in images])


def smooth_chamfer(alpha: float, c: Tensor) -> Tensor:
    z = torch.exp(alpha * c)
    return (
        torch.log(z.sum(1)).sum() / (len(c) * alpha)
        + torch.log(z.sum(0)).sum() / (c.shape[1] * alpha)
    ) / 2


def mean_or_sum(x: Tensor, reduction: str) -> Tensor:
    return x.mean() if reduction == "mean" else x.sum()


def frobenius(x: Tensor, reduction: str) -> Tensor:
    found = []
    for members in x:
        u = members / members.norm(dim=1, keepdim=True)
        found.append(
            ((u @ u.T)[~torch.eye(len(u), dtype=torch.bool)] ** 2).sum().sqrt() / len(u) ** 2
        )
    return mean_or_sum(torch.stack(found), reduction)


def mmd(x: Tensor, y: Tensor, reduction: str) -> Tensor:
    kernel = lambda a, b: mean_or_sum(torch.exp(-0.5 * (a[:, None] - b).norm(dim=2)), reduction)  # noqa: E731
    return kernel(x, x) - 2 * kernel(x, y) + kernel(y, y)


def crowding(sets: Tensor) -> Tensor:
    values = [
        torch.exp(-2 * ((a[i] - a[j]) ** 2).sum())
        for a in sets
        for i in range(len(a))
        for j in range(i)
    ]
    return torch.stack(values).mean()


# ----------------------------------------------------------------------------------- triplet losses


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("hardest", MODES)
def test_vsepp_and_vse_infinity(n, hardest):
    # no_imgnorm: unnormalised
    im, s = rows(n, 6, seed=n, unit=False), rows(n, 6, seed=n + 50, unit=False)
    wanted = hinge_sum(im @ s.T, 0.3, hardest)
    assert_same(compat.VSEPPLoss(margin=0.3, max_violation=hardest)(im, s), wanted, (im, s))
    assert_same(compat.VSEInfinityLoss(Namespace(), 0.3, hardest)(im, s), wanted, (im, s))
    assert_same(compat.HREMLoss(Namespace(mask_repeat=False), 0.3, hardest)(im, s), wanted, (im, s))
    assert n == 1 or wanted > 0


@pytest.mark.parametrize("hardest", MODES)
def test_order_embeddings(hardest):
    im, s = (
        rows(5, 4, seed=1).detach().abs().requires_grad_(),
        rows(5, 4, seed=2).detach().abs().requires_grad_(),
    )
    assert_same(
        compat.VSEPPLoss(0.1, "order", hardest)(im, s),
        hinge_sum(order_scores(im, s), 0.1, hardest),
        (im, s),
    )
    # PVSE and HAL have order embeddings, too
    sets = [
        x.detach()[:, None].repeat(1, 2, 1).mul(torch.tensor([[1.0], [0.7]])).requires_grad_()
        for x in (im, s)
    ]
    flat = order_scores(sets[0].flatten(0, 1), sets[1].flatten(0, 1)).view(5, 2, 5, 2)
    best = torch.stack([torch.stack([flat[i, :, j].max() for j in range(5)]) for i in range(5)])
    opt = Namespace(margin=0.1, num_embeds=2, order=True, max_violation=hardest)
    wanted = hinge_sum(best, 0.1, hardest)
    assert_same(compat.PVSELoss(opt, "sum")(sets[0], sets[1], None, None)[0], wanted, tuple(sets))
    opt = Namespace(local_alpha=5.0, local_ep=0.1, measure="order")
    im, s = (0.5 * x.detach() for x in (im, s))  # so that scores are above -1
    im.requires_grad_(), s.requires_grad_()
    assert_same(compat.HALLoss(opt)(im, s), hal(order_scores(im, s), 5.0, 0.1), (im, s))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("hardest", MODES)
def test_score_matrices(n, hardest):
    scores = torch.rand(
        n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64
    ).requires_grad_()
    wanted = hinge_sum(scores, 0.2, hardest)
    assert_same(compat.SGRAFLoss(0.2, hardest)(scores), wanted, (scores,))
    assert_same(compat.CHANLoss(margin=0.2, max_violation=hardest)(scores), wanted, (scores,))
    assert_same(
        compat.CHANLoss(Namespace(margin=0.2, max_violation=hardest), margin=9)(scores),
        wanted,
        (scores,),
    )


def word_scores(im: Tensor, s: Tensor, lengths: list[int], sharpness: float = 1.0) -> Tensor:
    """(B, R, D), (B, L, D) -> (B, B): mean over the words of the best region's similarity."""
    columns = [
        (sharpness * im @ s[j, :length].T).amax(1).mean(1) for j, length in enumerate(lengths)
    ]
    return torch.stack(columns, 1)


@pytest.mark.parametrize("hardest", MODES)
def test_scores_of_the_code_bases_own_function(hardest):
    im, s, lengths = rows(4, 3, 5, seed=0), rows(4, 6, 5, seed=1), [6, 2, 5, 1]
    criterion = compat.SCANLoss(
        partial(word_scores, sharpness=2.0), margin=0.2, max_violation=hardest
    )
    assert_same(
        criterion(im, s, lengths),
        hinge_sum(word_scores(im, s, lengths, 2.0), 0.2, hardest),
        (im, s),
    )


def test_scores_come_with_the_length_that_naaf_passes():
    scores = torch.rand(
        4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    assert_same(compat.SGRAFLoss(0.2, True)(scores, 4), hinge_sum(scores, 0.2, True), (scores,))


def test_a_score_module_is_trained():
    class Scores(torch.nn.Linear):
        def forward(self, im, s, s_l):
            return super().forward(im) @ s.T

    criterion = compat.SCANLoss(Scores(4, 4))
    assert len(list(criterion.parameters())) == 2


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4, 5], [0, 0, 2, 2, 2, 5], [7, 7, 7, 7, 7, 7]])
@pytest.mark.parametrize("hardest", MODES)
def test_texts_of_the_same_image_are_no_negatives(ids, hardest):
    im, s = pairs(6)
    labels = torch.tensor(ids)
    criterion = compat.HREMLoss(Namespace(mask_repeat=True), margin=1.2, max_violation=hardest)
    wanted = hinge_sum(im @ s.T, 1.2, hardest, labels[:, None] == labels)
    alone = hinge_sum(im @ s.T, 1.2, hardest)
    assert (wanted < alone) == (len(set(ids)) < 6)  # the ids have an effect
    assert_same(criterion(im, s, labels), wanted, (im, s))
    assert_same(criterion(im, s, ids), wanted, (im, s))
    # but they are not positives either, unlike in our own loss
    ours = itrloss.TripletLoss(1.2, "hardest" if hardest else "all")(im, s, labels, labels)
    assert torch.isclose(ours, criterion(im, s, labels)) == (len(set(ids)) in (1, 6))


def test_all_negatives_count_unless_asked_otherwise():
    """All negatives are the default, and what ``max_violation=False`` means, in every class; the
    hardest costs less.
    """
    im, s = pairs(6)
    opt = Namespace(mask_repeat=False, margin=1.0, max_violation=False)
    made = {
        (im, s): (
            lambda **given: compat.VSEPPLoss(1.0, **given),
            lambda **given: compat.VSEInfinityLoss(None, 1.0, **given),
            lambda **given: compat.HREMLoss(opt, 1.0, **given),
        ),
        (im, s, None): (lambda **given: compat.SCANLoss(lambda im, s, _: im @ s.T, 1.0, **given),),
        (im @ s.T,): (
            lambda **given: compat.SGRAFLoss(1.0, **given),
            lambda **given: compat.CHANLoss(None, 1.0, **given),
        ),
    }
    for inputs, classes in made.items():
        for make in classes:
            for given, hardest in (
                ({}, False),
                ({"max_violation": False}, False),
                ({"max_violation": True}, True),
            ):
                criterion = make(**given)
                assert criterion.max_violation == hardest and f"max_violation={hardest}" in repr(
                    criterion
                )
                torch.testing.assert_close(criterion(*inputs), hinge_sum(im @ s.T, 1.0, hardest))
    for opt in (Namespace(num_embeds=1), Namespace(num_embeds=1, max_violation=False)):
        assert not compat.PVSELoss(opt).max_violation


@pytest.mark.parametrize("measure", ["cosine", "order"])
def test_embeddings_of_another_shape_are_refused_by_name(measure):
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


def test_max_violation_is_switched(capsys):
    im, s = pairs(6)
    opt = Namespace(mask_repeat=False)
    made = compat.VSEInfinityLoss(None, 1.0), compat.CHANLoss(margin=1.0), compat.HREMLoss(opt, 1.0)
    for criterion in made:
        call = (
            criterion
            if not isinstance(criterion, compat.CHANLoss)
            else lambda im, s, c=criterion: c(im @ s.T)
        )
        values = [call(im, s)]
        criterion.max_violation_on()
        values.append(call(im, s))
        criterion.max_violation_off()
        values.append(call(im, s))
        criterion.max_violation = True  # DivE's trainer sets the attribute
        values.append(call(im, s))
        assert values[0] == values[2] > values[1] == values[3] > 0
    assert not capsys.readouterr().out


# --------------------------------------------------------------------- hubness, memories and queues


def hal_options(**changed) -> Namespace:
    opt = dict(
        measure="cosine",
        local_alpha=8.0,
        local_ep=0.3,
        global_alpha=6.0,
        global_beta=5.0,
        global_ep_posi=0.2,
        global_ep_nega=0.1,
        mb_k=3,
        max_violation=False,
        sum_violation=False,
        margin=0.2,
    )
    return Namespace(**{**opt, **changed})


@pytest.mark.parametrize("n", [2, 5, 12])
def test_hal_and_user_in_the_batch(n):
    im, s = pairs(n)
    wanted = hal(im @ s.T, 8.0, 0.3)
    assert_same(compat.HALLoss(hal_options())(im, s, None, None, None, range(n)), wanted, (im, s))
    assert_same(compat.USERLoss(Namespace(mu=8.0, gama=0.3))(im, s), wanted, (im, s))
    # a deliberate difference: theirs is larger by the pair's own entry in the sums …
    theirs = hal(im @ s.T, 8.0, 0.3, leak=True, relu=True)
    assert 1e-3 < theirs - wanted < 0.1
    # … which is negligible at their settings
    torch.testing.assert_close(
        compat.USERLoss(Namespace(mu=90, gama=0.5))(im, s), hal(im @ s.T, 90, 0.5, True, True)
    )


def test_pairs_that_score_below_zero_are_pulled_together():
    im, s = pairs(4)
    s = (-s).detach().requires_grad_()
    for criterion in (
        compat.USERLoss(Namespace(mu=90, gama=0.5)),
        compat.HALLoss(hal_options(local_alpha=90)),
    ):
        ours = criterion(im, s)
        assert_same(ours, hal(im @ s.T, 90, criterion.margin), (im, s))
        theirs = torch.autograd.grad(hal(im @ s.T, 90, 10.0, True, True), s)[0]
        assert not theirs.any() and (torch.autograd.grad(criterion(im, s), s)[0] != 0).any()


@pytest.mark.parametrize("n, size, k", [(5, 9, 3), (5, 9, 250), (12, 20, 7), (3, 40, 1)])
def test_hal_with_a_memory_bank(n, size, k):
    im, s = pairs(n)
    mb_img, mb_cap = (rows(size, 6, seed=seed).detach() for seed in (7, 8))
    mb_img[0], mb_cap[0] = im[0].detach(), s[0].detach()
    mb_ind = tuple(range(100, 100 + size))
    indices = (100, 103, *range(n - 2))  # entries 0 and 3 have ids of this batch
    kept = [i for i in range(size) if i not in (0, 3)]
    opt = hal_options(mb_k=k)
    with torch.no_grad():
        weights = bank_weights(im @ s.T, im @ mb_cap[kept].T, s @ mb_img[kept].T, opt)
    for convert in (tuple, torch.tensor):
        ours = compat.HALLoss(opt)(im, s, mb_img, mb_cap, convert(mb_ind), convert(indices))
        assert_same(ours, weighted_hal(im @ s.T, *weights, opt), (im, s))
    # theirs has 1 in each sum for the pair itself
    assert weighted_hal(im @ s.T, *weights, opt, leak=True) > ours + 0.01
    with torch.no_grad():  # the entries with ids of this batch would have changed the loss
        others = bank_weights(im @ s.T, im @ mb_cap.T, s @ mb_img.T, opt)
    assert not torch.equal(others[0], weights[0])


def test_a_bank_may_hold_less_than_k_entries_and_weights_do_not_overflow():
    im, s = pairs(6)
    mb_img, mb_cap = (rows(4, 6, seed=seed).detach() for seed in (7, 8))
    opt = hal_options(global_alpha=900.0, global_beta=900.0)
    loss = compat.HALLoss(opt)(im, s, mb_img, mb_cap, (0, 1, 2, 3), (1, 2, 3, 4, 5, 6))
    assert loss.isfinite() and all(
        g.isfinite().all() and g.any() for g in torch.autograd.grad(loss, (im, s))
    )
    only = compat.HALLoss(hal_options())(im, s, mb_img, mb_cap, (0, 1, 2, 3), (1, 2, 3, 4, 5, 6))
    one = compat.HALLoss(hal_options())(im, s, mb_img[:1], mb_cap[:1], (0,), (7,))
    torch.testing.assert_close(only, one)


@pytest.mark.parametrize("hardest", MODES)
def test_hal_gives_the_triplet_loss_if_asked(hardest):
    im, s = pairs(6)
    loss = compat.HALLoss(hal_options(margin=0.4, max_violation=hardest, sum_violation=not hardest))
    assert_same(loss(im, s, None, None, None, None), hinge_sum(im @ s.T, 0.4, hardest), (im, s))


@pytest.mark.parametrize("n, size", [(1, 4), (3, 8), (8, 3)])
def test_queues(n, size):
    (v, w), (v_k, w_k) = pairs(n), pairs(n, seed=0)
    v_k, w_k = v_k.detach(), w_k.detach()
    v_queue, w_queue = (rows(size, 6, seed=seed).detach().T.contiguous() for seed in (3, 4))
    wanted = v.sum() * 0
    for x, key, queue in ((v, w_k, w_queue), (w, v_k, v_queue)):
        for i in range(n):
            others = sum(torch.exp(7.0 * (x[i] @ queue[:, q] - 0.2)) for q in range(size))
            wanted = (
                wanted
                + (torch.log(1 + others) / 7.0 - torch.log(1 + (x[i] @ key[i]).clamp(min=0))) / n
            )
    criterion = compat.USERLoss(Namespace(mu=7.0, gama=0.2))
    assert_same(criterion.moco_forward(v, w_k, w, v_k, v_queue, w_queue), wanted, (v, w))


@pytest.mark.parametrize("size", [16, 4096])
def test_queues_may_be_overwritten_before_the_backward_pass(size):
    """USER's model enqueues the batch as soon as it has the loss, before the backward pass."""
    (v, w), (v_k, w_k) = pairs(6), pairs(6, seed=3)
    v_k, w_k = v_k.detach(), w_k.detach()
    queues = [rows(size, 6, seed=seed).detach().T.contiguous() for seed in (4, 5)]
    criterion = compat.USERLoss(Namespace(mu=7.0, gama=0.2))
    wanted = torch.autograd.grad(criterion.moco_forward(v, w_k, w, v_k, *queues), (v, w))
    loss = criterion.moco_forward(v, w_k, w, v_k, *queues)
    for queue, keys in zip(queues, (v_k, w_k), strict=True):
        queue[:, :6] = keys.T
    torch.testing.assert_close(torch.autograd.grad(loss, (v, w)), wanted, rtol=0, atol=0)


def test_queues_and_batch_together_are_the_unified_training_objective():
    (v, w), (v_k, w_k) = pairs(6), pairs(6, seed=0)
    v_queue, w_queue = (rows(12, 6, seed=seed).detach() for seed in (3, 4))
    memory = itrloss.CoupledMemory(12, 6, dtype=torch.float64)
    memory.enqueue(v_queue, w_queue)
    criterion = compat.USERLoss(Namespace(mu=20.0, gama=0.4))
    theirs = 5 * criterion(v, w) + criterion.moco_forward(
        v, w_k.detach(), w, v_k.detach(), v_queue.T, w_queue.T
    )
    ours = itrloss.UnifiedTrainingObjective(20.0, 0.4, batch_weight=5)(v, w, v_k, w_k, memory)
    torch.testing.assert_close(theirs, ours)
    queue = v_queue.T.clone().requires_grad_()
    assert not torch.autograd.grad(
        criterion.moco_forward(v, w_k, w, v_k, queue, queue), queue, allow_unused=True
    )[0]


# ------------------------------------------------------------------------------- sets of embeddings


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("hardest", MODES)
@pytest.mark.parametrize("n, k", [(4, 3), (7, 2), (11, 4), (5, 1), (1, 2)])
def test_pvse(n, k, hardest, reduction):
    raw = rows(n, k, 6, seed=0, unit=False), rows(n, k, 6, seed=1, unit=False)
    img_r, txt_r = rows(n, k, 6, seed=2, unit=False), rows(n, k, 6, seed=3, unit=False)
    img, txt = (x / x.norm(dim=-1, keepdim=True) for x in raw)  # as in its model
    opt = Namespace(margin=0.3, num_embeds=k, mmd_weight=0.2, div_weight=0.7, max_violation=hardest)
    total = hinge_sum(set_scores(img, txt, torch.amax), 0.3, hardest)
    parts = {"ranking_loss": total / (1 if reduction == "sum" else n if hardest else n * n)}
    wanted = parts["ranking_loss"]
    if k > 1:
        parts["div_loss"] = frobenius(img_r, reduction) + frobenius(txt_r, reduction)
        parts["mmd_loss"] = mmd(img.flatten(0, 1), txt.flatten(0, 1), reduction)
        wanted = wanted + 0.7 * parts["div_loss"] + 0.2 * parts["mmd_loss"]
    given = (img, txt) if k > 1 else (img[:, 0], txt[:, 0])
    loss, found = compat.PVSELoss(opt, reduction)(*given, img_r, txt_r)
    # including gradients of unnormalised embeddings
    assert_same(loss, wanted, (img, txt, *raw, img_r, txt_r), 1e-6)
    assert found.keys() == parts.keys() and not any(x.requires_grad for x in found.values())
    for name, x in parts.items():
        torch.testing.assert_close(found[name], x.detach(), rtol=1e-6, atol=1e-6)


def test_pvse_has_defaults_for_options_that_are_missing():
    img, txt = pairs(5)
    loss, parts = compat.PVSELoss(Namespace())(img, txt, None, None)
    torch.testing.assert_close(loss, hinge_sum(img @ txt.T, 1.0, False) / 25)
    assert list(parts) == ["ranking_loss"]


def dive_wanted(scores: Tensor, per: int, margin: float, hardest: bool) -> tuple[Tensor, Tensor]:
    n, m = scores.shape
    i2t, t2i = [], []
    for j in range(m):
        i = j // per
        of_image = torch.stack(
            [(margin + scores[i, q] - scores[i, j]).clamp(min=0) for q in range(m) if q // per != i]
        )
        of_text = torch.stack(
            [(margin + scores[q, j] - scores[i, j]).clamp(min=0) for q in range(n) if q != i]
        )
        i2t.append(of_image.max() if hardest else of_image.mean())
        t2i.append(of_text.max() if hardest else of_text.mean())
    return torch.stack(i2t).mean(), torch.stack(t2i).mean()


@pytest.mark.parametrize("hardest", MODES)
@pytest.mark.parametrize("n, per, k, l", [(3, 5, 4, 4), (4, 1, 3, 2), (4, 2, 1, 3), (3, 2, 1, 1)])
@pytest.mark.parametrize("residual, own, reduction", [(False, False, "mean"), (True, True, "sum")])
def test_dive(n, per, k, l, hardest, residual, own, reduction):  # noqa: E741
    raw = rows(n, k, 6, seed=0, unit=False), rows(n * per, l, 6, seed=1, unit=False)
    img_r, txt_r = rows(n, k, 6, seed=2, unit=False), rows(n * per, l, 6, seed=3, unit=False)
    img, txt = (x / x.norm(dim=-1, keepdim=True) for x in raw)
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
    scores = set_scores(img, txt, partial(smooth_chamfer, 4.0))

    def similarity(x: Tensor, y: Tensor) -> Tensor:
        assert x.shape == (n * k, 6) and y.shape == (n * per * l, 6)
        return set_scores(x.view(n, k, 6), y.view(n * per, l, 6), partial(smooth_chamfer, 4.0))

    i2t, t2i = dive_wanted(scores, per, 0.2, hardest)
    spread = [x / x.norm(dim=-1, keepdim=True) for x in (img_r, txt_r)] if residual else (img, txt)
    zero, sizes = i2t * 0, (k, l)
    parts = {
        "i2t_loss": i2t,
        "t2i_loss": t2i,
        "div_loss": sum(
            (frobenius(r, reduction) for r, x in zip((img_r, txt_r), sizes, strict=True) if x > 1),
            zero,
        ),
        "mmd_loss": mmd(img.flatten(0, 1), txt.flatten(0, 1), reduction),
        "unif_loss": sum((crowding(e) for e, x in zip(spread, sizes, strict=True) if x > 1), zero),
    }
    wanted = (
        i2t + t2i + 0.3 * parts["div_loss"] + 0.2 * parts["mmd_loss"] + 0.5 * parts["unif_loss"]
    )
    criterion = compat.DivELoss(k, l, similarity if own else None, opt, reduction, txt_per_img=per)
    loss, found = criterion(img, txt, img_r, txt_r)
    assert_same(loss, wanted, (img, txt, *raw, img_r, txt_r), 1e-6)
    assert found.keys() == parts.keys() and not any(x.requires_grad for x in found.values())
    for name, x in parts.items():
        torch.testing.assert_close(found[name], x.detach(), rtol=1e-6, atol=1e-6)


def test_one_image_alone_costs_nothing():
    opt = Namespace(img_num_embeds=2, txt_num_embeds=2, temperature=4.0, max_violation=True)
    for hardest in MODES:
        opt.max_violation = hardest
        loss, _ = compat.DivELoss(2, 2, None, opt)(
            rows(1, 2, 4, seed=0), rows(5, 2, 4, seed=1), None, None
        )
        assert loss == 0


# ---------------------------------------------------------------------------------------- open_clip


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bias", [None, -1.5])
def test_open_clip(n, bias):
    im, s = rows(n, 6, seed=1), rows(n, 6, seed=2)
    scale = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
    offset = None if bias is None else torch.tensor(bias, dtype=torch.float64, requires_grad=True)
    logits = scale * im @ s.T + (0 if offset is None else offset)
    softmaxes = -sum(torch.log_softmax(logits, side).diagonal().mean() for side in (0, 1)) / 2
    signs = 2 * torch.eye(n) - 1
    sigmoids = torch.log(1 + torch.exp(-signs * logits)).sum() / n
    inputs = (im, s, scale) if offset is None else (im, s, scale, offset)
    for criterion, wanted in ((compat.ClipLoss(), softmaxes), (compat.SigLipLoss(), sigmoids)):
        assert_same(criterion(im, s, scale, offset), wanted, inputs)
        given = dict(image_features=im, text_features=s, logit_scale=scale)
        given |= {} if offset is None else {"logit_bias": offset}
        found = criterion(**given, output_dict=True)  # with the call of its trainer
        assert list(found) == ["contrastive_loss"]
        assert_same(found["contrastive_loss"], wanted, inputs)
        torch.testing.assert_close(criterion(im, s, 9.0, bias), wanted)


def test_a_bias_that_a_softmax_does_not_see_has_a_gradient_all_the_same():
    bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    compat.ClipLoss()(*pairs(4), 10.0, bias).backward()
    assert bias.grad is not None and bias.grad == 0


# -------------------------------------------------------------------------------------- all classes


def every_class() -> dict[str, tuple]:
    """Each class by name: the module, and the arguments of a call."""
    im, s = pairs(5)
    sets = [rows(5, 2, 6, seed=i) for i in range(4)]
    texts = [rows(10, 2, 6, seed=i) for i in (4, 5)]
    bank = (
        rows(8, 6, seed=6).detach(),
        rows(8, 6, seed=7).detach(),
        torch.arange(8),
        torch.arange(5) + 6,
    )
    scores = (im @ s.T).detach().requires_grad_()
    opt = Namespace(
        num_embeds=2,
        mmd_weight=0.1,
        div_weight=0.1,
        unif_weight=2.0,
        img_num_embeds=2,
        txt_num_embeds=2,
        temperature=4.0,
        mask_repeat=True,
        mu=20.0,
        gama=0.3,
        **vars(hal_options()),
    )
    dive = compat.DivELoss(2, 2, None, opt, txt_per_img=2)
    return {
        "VSEPPLoss": (compat.VSEPPLoss(0.2), (im, s)),
        "VSEPPLoss order": (compat.VSEPPLoss(0.2, "order", True), (im, s)),
        "VSEInfinityLoss": (compat.VSEInfinityLoss(opt, 0.2, True), (im, s)),
        "SCANLoss": (compat.SCANLoss(word_scores, 0.2, True), (sets[0], sets[1], [2, 1, 2, 2, 1])),
        "SGRAFLoss": (compat.SGRAFLoss(0.2, True), (scores,)),
        "CHANLoss": (compat.CHANLoss(opt), (scores,)),
        "HREMLoss": (compat.HREMLoss(opt), (im, s, torch.tensor([0, 0, 1, 2, 3]))),
        "HREMLoss hardest": (
            compat.HREMLoss(opt, 0.2, True),
            (im, s, torch.tensor([0, 0, 1, 2, 3])),
        ),
        "HALLoss": (compat.HALLoss(opt), (im, s)),
        "HALLoss bank": (compat.HALLoss(opt), (im, s, *bank)),
        "USERLoss": (compat.USERLoss(opt), (im, s)),
        "PVSELoss": (compat.PVSELoss(opt), tuple(sets)),
        "DivELoss": (dive, (sets[0], texts[0], sets[1], texts[1])),
        "ClipLoss": (compat.ClipLoss(), (im, s, torch.tensor(9.0), torch.tensor(-2.0))),
        "SigLipLoss": (compat.SigLipLoss(), (im, s, torch.tensor(9.0), torch.tensor(-2.0))),
    }


def scalar(out) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def test_every_class_is_in_the_list_below():
    public = {name for name, x in vars(compat).items() if isinstance(x, type)}
    assert {name.split()[0] for name in every_class()} == public == set(compat.__all__) - {"adapt"}


@pytest.mark.slow
@pytest.mark.parametrize("name", every_class())
def test_modules_are_copied_pickled_loaded_and_compiled(name):
    module, inputs = every_class()[name]
    wanted = scalar(module(*inputs))
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    fresh = copy.deepcopy(module)
    fresh.load_state_dict(module.state_dict(), strict=True)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh, compiled):
        assert_same(scalar(other(*inputs)), wanted, tuple(leaves))
    assert repr(module)


def test_queue_terms_compile():
    (v, w), queue = pairs(4), rows(8, 6, seed=1).detach().T
    criterion = compat.USERLoss(Namespace(mu=20.0, gama=0.3))
    inputs = v, w.detach(), w, v.detach(), queue, queue
    torch.compiler.reset()
    compiled = torch.compile(criterion.moco_forward, fullgraph=True, backend="eager")
    assert_same(compiled(*inputs), criterion.moco_forward(*inputs), (v, w))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in every_class() if name != "SCANLoss"])
def test_half_precision_gives_float32_losses(name, dtype):
    module, inputs = every_class()[name]
    half = [
        x.detach().to(dtype).requires_grad_()
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in inputs
    ]
    full = [
        x.detach().float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in half
    ]
    loss, wanted = scalar(module(*half)), scalar(module(*full))
    loss.backward()
    assert loss.dtype == torch.float32 and all(x.grad.isfinite().all() for x in half[:1])
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "argument, call",
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_scale_in_half_precision_is_not_inverted_in_it(dtype):
    v, w = (torch.nn.functional.normalize(torch.randn(8, 16), dim=1) for _ in range(2))
    scale = torch.tensor(14.3, dtype=dtype)
    wanted = compat.ClipLoss()(v, w, scale.float())
    torch.testing.assert_close(compat.ClipLoss()(v, w, scale), wanted, rtol=1e-6, atol=1e-7)
    found = itrloss.functional.info_nce_loss(
        itrloss.Similarity(v, w), (1 / scale.float()).to(dtype)
    )
    exact = itrloss.functional.info_nce_loss(
        itrloss.Similarity(v, w), (1 / scale.float()).to(dtype).float()
    )
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------- one pair, and ids beyond


@pytest.mark.parametrize("image", [0, 1])
def test_hal_with_one_pair_and_a_bank_of_one_is_finite(image):
    """The bank's only entry is the pair itself, which is no negative, or another."""
    im, s = rows(1, 6, seed=0), rows(1, 6, seed=1)
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
        (compat.USERLoss(Namespace(mu=8.0, gama=0.3)), "margin", None),
    ],
)
def test_an_option_that_is_set_later_is_checked(criterion, option, value):
    before = getattr(criterion, option)
    with pytest.raises((TypeError, ValueError), match=option):
        setattr(criterion, option, value)
    assert getattr(criterion, option) == before
