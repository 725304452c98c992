"""SupCon, MIL-NCE, multi-similarity and circle loss beside plain PyTorch and
pytorch-metric-learning.

`test_losses` has their values beside the loop oracle, hostile input, call forms and the compiler.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import ENGINES, SHAPES, embeddings, make_ids, upstream
from support.losses_registry import REGISTRY, where
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import itrloss
from itrloss import Similarity

# ------------------------------------------------------------------------------------ plain PyTorch
# Of the scores (N, M) of rows, and the mask (N, M) of the positives; one value for each row.


def masked_logsumexp(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(~mask, -torch.inf).logsumexp(1)


def supcon(S: Tensor, positive: Tensor, temperature: float = 0.1, inside: bool = False) -> Tensor:
    log_p = (S / temperature).log_softmax(1)
    if inside:
        return -((log_p.exp() * positive).sum(1) / positive.sum(1)).log()
    return -(log_p * positive).sum(1) / positive.sum(1)


def mil_nce(S: Tensor, positive: Tensor, temperature: float = 0.07) -> Tensor:
    return -((S / temperature).softmax(1) * positive).sum(1).log()


def multi_similarity(
    S: Tensor, positive: Tensor, alpha=2.0, beta=50.0, base=0.5, epsilon: Any = None
) -> Tensor:
    pulled, pushed = positive, ~positive
    if epsilon is not None:
        pulled = positive & (
            S.masked_fill(positive, -torch.inf).amax(1, keepdim=True) + epsilon > S
        )
        pushed = ~positive & (
            S.masked_fill(~positive, torch.inf).amin(1, keepdim=True) - epsilon < S
        )
    pull, push = (-alpha * (S - base)).exp() * pulled, (beta * (S - base)).exp() * pushed
    return pull.sum(1).log1p() / alpha + push.sum(1).log1p() / beta


def circle(S: Tensor, positive: Tensor, margin: float = 0.4, scale: float = 80.0) -> Tensor:
    fixed = S.detach()
    of_positives = -scale * (1 + margin - fixed).relu() * (S - (1 - margin))
    of_negatives = scale * (fixed + margin).relu() * (S - margin)
    # every negative with every positive
    pairs = of_negatives[:, :, None] + of_positives[:, None, :]
    mask = ~positive[:, :, None] & positive[:, None, :]
    # log(1 + sum)
    return F.pad(pairs.masked_fill(~mask, -torch.inf).flatten(1), (0, 1)).logsumexp(1)


PLAIN = {
    itrloss.SupConLoss: supcon,
    itrloss.MILNCELoss: mil_nce,
    itrloss.MultiSimilarityLoss: multi_similarity,
    itrloss.CircleLoss: circle,
}
LOSSES = where(lambda entry: entry.kind in PLAIN)


def plain(name: str, v: Tensor, w: Tensor, ids: tuple[Any, Any]) -> list[Tensor]:
    """The values of rows and of columns, 0 for anchors without a positive or a negative."""
    entry = LOSSES[name]
    function = PLAIN[entry.kind]
    S = F.normalize(v, dim=1) @ F.normalize(w, dim=1).T
    row_ids, col_ids = (
        torch.arange(len(x)) if i is None else i for i, x in zip(ids, (v, w), strict=True)
    )
    positive = row_ids[:, None] == col_ids
    values = []
    for scores, mask in ((S, positive), (S.T, positive.T)):
        valid = mask.any(1) & ~mask.all(1)
        found = scores.sum(1) * 0
        found[valid] = function(scores[valid], mask[valid], **entry.options)
        values.append(found)
    return values


def with_gradients(call: Any, v: Tensor, w: Tensor, grads: Any) -> list[Tensor]:
    x, y = v.clone().requires_grad_(), w.clone().requires_grad_()
    values = call(x, y)
    total = sum((value * g.to(value.dtype)).sum() for value, g in zip(values, grads, strict=True))
    return [*values, *torch.autograd.grad(total, (x, y))]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_plain_pytorch(
    name, shape, engine, small_tiles, poisoned
):
    n, m, kind = SHAPES[shape]
    (v, w), ids, grads = embeddings(n, m), make_ids(kind, n, m), upstream(n, m)
    criterion = LOSSES[name].make(reduction="none")

    def ours(x, y):
        if engine == "scores":
            scores = Similarity(x, y, *ids).scores()
            return criterion(scores=scores, image_ids=ids[0], text_ids=ids[1])
        budget = {"memory_budget": 10**9} if engine == "kept" else {}
        return criterion(
            Similarity(x, y, *ids, engine="dense" if engine == "dense" else "tiled", **budget)
        )

    wanted = with_gradients(lambda x, y: plain(name, x, y, ids), v, w, grads)
    for a, b in zip(with_gradients(ours, v, w, grads), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# -------------------------------------------------------------------------- pytorch-metric-learning


def published(name: str) -> tuple[Any, Any]:
    """The loss of the same name in pytorch-metric-learning, which returns a value for each anchor,
    and its miner.
    """
    theirs = pytest.importorskip("pytorch_metric_learning")
    from pytorch_metric_learning import losses, miners, reducers

    assert theirs.__version__
    options = LOSSES[name].options
    reducer = {"reducer": reducers.DoNothingReducer()}
    if name == "supcon":
        return losses.SupConLoss(temperature=0.1, **reducer), None
    if name.startswith("multi-similarity"):
        miner = (
            miners.MultiSimilarityMiner(epsilon=options["epsilon"])
            if "epsilon" in options
            else None
        )
        return losses.MultiSimilarityLoss(
            alpha=options.get("alpha", 2.0),
            beta=options.get("beta", 50.0),
            base=options.get("base", 0.5),
            **reducer,
        ), miner
    return losses.CircleLoss(
        m=options.get("margin", 0.4), gamma=options.get("scale", 80), **reducer
    ), None


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize(
    "shape", ["primes", "square with duplicates", "five captions", "wide", "tall"]
)
@pytest.mark.parametrize(
    "name", [name for name in LOSSES if name not in ("supcon inside", "mil-nce")]
)
def test_values_and_gradients_are_those_of_pytorch_metric_learning(
    name, shape, engine, small_tiles
):
    n, m, kind = SHAPES[shape]
    (v, w), grads = embeddings(n, m), upstream(n, m)
    ids = tuple(torch.arange(n) if x is None else x for x in make_ids(kind, n, m))
    theirs, miner = published(name)
    positive = ids[0][:, None] == ids[1]
    valid = [mask.any(1) & ~mask.all(1) for mask in (positive, positive.T)]
    assert all(x.any() for x in valid)

    def one_side(x, y, labels, others):
        pairs = None if miner is None else miner(x, labels, y, others)
        return theirs(x, labels, pairs, y, others)["loss"]["losses"].reshape(-1)

    def both_sides(x, y):
        rows, cols = one_side(x, y, *ids), one_side(y, x, *ids[::-1])
        return [torch.where(mask, z, 0.0) for mask, z in zip(valid, (rows, cols), strict=True)]

    criterion = LOSSES[name].make(reduction="none", engine=engine)
    wanted = with_gradients(both_sides, v, w, grads)
    for a, b in zip(
        with_gradients(lambda x, y: criterion(x, y, *ids), v, w, grads), wanted, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["supcon", "multi-similarity", "circle"])
def test_the_means_are_those_of_pytorch_metric_learning_where_all_anchors_count(name):
    pytest.importorskip("pytorch_metric_learning")
    from pytorch_metric_learning import losses

    theirs: Any = vars(losses)[LOSSES[name].public_name]()
    v, w = embeddings(8, 12)
    ids = torch.arange(8) % 4, torch.arange(12) % 4
    wanted = theirs(v, ids[0], None, w, ids[1]) + theirs(w, ids[1], None, v, ids[0])
    torch.testing.assert_close(LOSSES[name].make()(v, w, *ids), wanted)


# ----------------------------------------------------------------------------------------- extremes

SHARP: dict[str, tuple[Any, dict[str, Any]]] = {
    "supcon": (itrloss.SupConLoss, {"temperature": 1 / 256}),
    "supcon inside": (itrloss.SupConLoss, {"temperature": 1 / 256, "inside": True}),
    "mil-nce": (itrloss.MILNCELoss, {"temperature": 1 / 256}),
    "multi-similarity": (itrloss.MultiSimilarityLoss, {"alpha": 256.0, "beta": 256.0}),
    "multi-similarity mined": (
        itrloss.MultiSimilarityLoss,
        {"alpha": 256.0, "beta": 256.0, "epsilon": 0.1},
    ),
    "circle": (itrloss.CircleLoss, {"scale": 256.0}),
    "circle of a wide margin": (itrloss.CircleLoss, {"scale": 256.0, "margin": 0.73}),
    "circle without a margin": (itrloss.CircleLoss, {"scale": 256.0, "margin": 0.0}),
}


def arranged(kind: str) -> tuple[Tensor, Tensor]:
    """Embeddings (12, 6) of images and texts, which are the same, opposite, or all alike but for a
    little.
    """
    v, w = (F.normalize(x, dim=1) for x in embeddings(12, 12))
    near = v + 0.01 * w
    return {
        "random": (v, w),
        "matched": (v, near),
        "opposite": (v, -near),
        "alike": (near[:1] + 1e-3 * v, near),
    }[kind]


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("kind", ["random", "matched", "opposite", "alike"])
@pytest.mark.parametrize("name", SHARP)
def test_a_scale_of_256_in_float32_has_the_values_and_gradients_of_float64(
    name, kind, engine, small_tiles
):
    module, options = SHARP[name]
    v, w = arranged(kind)
    ids, grads = (torch.arange(12) // 2,) * 2, upstream(12, 12)
    criterion = module(**options, reduction="none", engine=engine)
    v, w = v.float(), w.float()  # the same embeddings for both
    exact = with_gradients(lambda x, y: criterion(x, y, *ids), v.double(), w.double(), grads)
    found = with_gradients(lambda x, y: criterion(x, y, *ids), v, w, grads)
    for a, b in zip(found, exact, strict=True):
        assert a.isfinite().all()
        assert (a - b).abs().amax() <= 1e-4 * b.abs().amax().clamp_min(1)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_the_worst_pairs_stay_finite(engine):
    """Positives that score -1 beside negatives that score 1, for which exponents of the circle loss
    add up to 1200.
    """
    v = torch.eye(4).requires_grad_()
    w = -torch.eye(4)
    w[[0, 1, 2]] += 2 * torch.eye(4)[[1, 2, 3]]
    w = w.requires_grad_()
    for module, options in SHARP.values():
        loss = module(**options, engine=engine)(v, w)
        assert loss.isfinite()
        assert all(x.isfinite().all() for x in torch.autograd.grad(loss, (v, w)))


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_scores_beyond_cosines_have_the_circle_loss_of_plain_pytorch(engine):
    """Scores of another model need not lie in [-1, 1]; weights are 0 beyond -m and 1 + m."""
    scores = 3 * torch.randn(7, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = make_ids("random", 7, 9)
    positive = ids[0][:, None] == ids[1]
    valid = positive.any(1) & ~positive.all(1)
    criterion = itrloss.CircleLoss(scale=8.0, reduction="none", engine=engine)
    rows, _ = criterion(scores=scores, image_ids=ids[0], text_ids=ids[1])
    torch.testing.assert_close(
        rows[valid], circle(scores[valid], positive[valid], scale=8.0), rtol=1e-9, atol=1e-9
    )


def test_values_of_mil_nce_near_0_keep_their_digits():
    """The logarithm of a probability of nearly 1."""
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.0, 0.1, 0.7]])
    ids = {"image_ids": torch.tensor([0, 1]), "text_ids": torch.tensor([0, 0, 1])}
    criterion = itrloss.MILNCELoss(0.02, reduction="none")
    exact = criterion(scores=scores.double(), **ids)[0]
    assert 0 < exact.amax() < 1e-12
    torch.testing.assert_close(
        criterion(scores=scores, **ids)[0].double(), exact, rtol=1e-4, atol=0
    )


# ---------------------------------------------------------------------------------------- relations


def test_the_mean_inside_is_mil_nce_but_for_the_number_of_positives():
    (v, w), ids, grads = (
        embeddings(6, 9),
        (torch.arange(6) % 3, torch.arange(9) // 3),
        upstream(6, 9),
    )
    inside, multiple = (
        itrloss.SupConLoss(0.2, inside=True, reduction="none"),
        itrloss.MILNCELoss(0.2, reduction="none"),
    )
    a, b = (
        with_gradients(partial(f, image_ids=ids[0], text_ids=ids[1]), v, w, grads)
        for f in (inside, multiple)
    )
    torch.testing.assert_close(a[0] - b[0], torch.full((6,), 3.0).double().log())
    torch.testing.assert_close(a[1] - b[1], torch.full((9,), 2.0).double().log())
    torch.testing.assert_close(a[2:], b[2:], rtol=1e-12, atol=1e-12)
    outside = itrloss.SupConLoss(0.2, reduction="none")(v, w, *ids)
    assert all((x >= y).all() for x, y in zip(outside, a[:2], strict=True))  # Jensen


def test_with_one_positive_each_three_of_the_losses_are_infonce():
    v, w = embeddings(8, 8)
    wanted = itrloss.InfoNCELoss(0.1)(v, w)
    for criterion in (
        itrloss.SupConLoss(),
        itrloss.SupConLoss(inside=True),
        itrloss.MILNCELoss(0.1),
    ):
        torch.testing.assert_close(criterion(v, w), wanted)


def test_anchors_whose_pairs_are_all_easy_count_in_the_mean_with_0():
    """As in the published code of the multi-similarity loss, which divides by the size of the
    batch.
    """
    scores = torch.full((3, 3), 0.1, dtype=torch.float64).fill_diagonal_(0.6)
    scores[0, 1] = 0.55  # within 0.1 of the positives of image 0 and of text 1
    criterion = itrloss.MultiSimilarityLoss(epsilon=0.1, reduction="none")
    rows, cols = criterion(scores=scores)
    assert rows[0] > 0 and cols[1] > 0
    assert (rows[1:] == 0).all() and (cols[[0, 2]] == 0).all()
    mean = itrloss.MultiSimilarityLoss(epsilon=0.1)(scores=scores)
    torch.testing.assert_close(mean, rows.sum() / 3 + cols.sum() / 3)


def test_pairs_are_mined_by_the_lowest_positive_itself_where_several_score_the_same():
    scores = torch.tensor([[0.5] * 5 + [0.39], [0.0] * 5 + [0.9]])
    ids = {"image_ids": torch.tensor([0, 1]), "text_ids": torch.tensor([0] * 5 + [1])}
    for epsilon, counts in ((0.1, False), (0.12, True)):
        rows, _ = itrloss.MultiSimilarityLoss(epsilon=epsilon, reduction="none")(
            scores=scores, **ids
        )
        assert (rows[0] > 0) == counts


@pytest.mark.parametrize(
    ("name", "kept", "recomputed"),
    [
        ("supcon", 6, 8),
        ("supcon inside", 6, 8),
        ("mil-nce", 6, 8),
        ("sdm", 6, 8),
        ("multi-similarity", 6, 8),
        ("multi-similarity mined", 6, 18),
        ("circle", 6, 10),
    ],
)
def test_work_is_that_of_the_page(name, kept, recomputed):
    v, w = (torch.randn(600, 32, requires_grad=True) for _ in range(2))
    ids = torch.arange(600) // 2
    for budget, work in ((0, recomputed), (10**9, kept)):
        with FlopCounterMode(display=False) as counter:
            sim = Similarity(v, w, ids, ids, engine="tiled", memory_budget=budget)
            REGISTRY[name].make()(sim).backward()
        assert counter.get_total_flops() == work * 600 * 600 * 32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: itrloss.SupConLoss(0.0), "temperature: expected a number above 0"),
        (lambda: itrloss.MILNCELoss("0.1"), "temperature: expected a number, got '0.1'"),  # type: ignore[arg-type]
        (lambda: itrloss.SDMLoss(epsilon=0.0), "epsilon: expected a number above 0"),
        (lambda: itrloss.MultiSimilarityLoss(beta=-1.0), "beta: expected a number above 0"),
        (
            lambda: itrloss.MultiSimilarityLoss(epsilon="0.1"),
            "epsilon: expected None or a number, got '0.1'",
        ),  # type: ignore[arg-type]
        (lambda: itrloss.CircleLoss(scale=0), "scale: expected a number above 0"),
        (lambda: itrloss.CircleLoss(margin=None), "margin: expected a number, got None"),  # type: ignore[arg-type]
    ],
)
def test_options_are_checked(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
