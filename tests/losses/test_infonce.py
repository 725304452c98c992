"""Forms of InfoNCE, and distillation, next to plain PyTorch and sentence-transformers.

`test_losses` has the hardness and the filter next to loop oracles, `test_sharded` all forms over
processes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import oracle
from support.cases import SHAPES, embeddings, make_ids, upstream
from torch import Tensor, nn

import itrloss
from itrloss import Anchors, Similarity, functional
from itrloss.engine.relation import IGNORE_ID

ENGINES = ("dense", "tiled")
of_engines = pytest.mark.parametrize("engine", ENGINES)


def filtered(temperature=0.05, margin=0.1, relative=False, **options: Any) -> itrloss.InfoNCELoss:
    """InfoNCE without the negatives above a margin."""
    return itrloss.InfoNCELoss(temperature, margin=margin, relative=relative, **options)


# ------------------------------------------------------------------------------------ plain PyTorch


def cosines(v: Tensor, w: Tensor) -> Tensor:
    return F.normalize(v, dim=1) @ F.normalize(w, dim=1).T


def with_gradients(call: Any, leaves: Any, weights: Any) -> list[Tensor]:
    """Values, and the gradients of a sum of them with weights."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    values = call(*leaves)
    total = 0
    for value, weight in zip(values, weights, strict=True):
        total = total + (value * weight.to(value.dtype)).sum()
    return [*values, *torch.autograd.grad(total, leaves, materialize_grads=True)]


def compare(ours: Any, plain: Any, leaves: Any, weights: Any, tolerance: float = 1e-9) -> None:
    found = with_gradients(ours, leaves, weights)
    wanted = with_gradients(plain, leaves, weights)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def given(shape: str) -> tuple[Tensor, Tensor, Any, Any]:
    n, m, kind = SHAPES[shape]
    return *embeddings(n, m), make_ids(kind, n, m), upstream(n, m)


def others(n: int, m: int, d: int = 9) -> tuple[Tensor, Tensor]:
    """Embeddings by another model, of another dimension."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return images, torch.randn(m, d, generator=generator, dtype=torch.float64)


# ------------------------------------------------------------------------------ hardness, negatives


@of_engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hardness", [1e-20, 200.0])
def test_hardness_may_be_tiny_or_huge(hardness, dtype, engine, small_tiles):
    v, w = (x.to(dtype).requires_grad_() for x in embeddings(9, 9))
    loss = itrloss.InfoNCELoss(hardness=hardness, engine=engine)(v, w)
    own = np.arange(9)
    wanted = oracle.infonce(cosines(v, w).detach().numpy(), own, own, hardness=hardness)
    torch.testing.assert_close(loss.item(), float(wanted), rtol=1e-5, atol=1e-5)
    for gradient in torch.autograd.grad(loss, (v, w)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_temperature_in_half_precision_is_not_rounded_again(dtype):
    sim = Similarity(*embeddings(8, 8, dtype=torch.float32))
    temperature = torch.tensor(1 / 14.3, dtype=dtype)
    found = functional.info_nce_loss(sim, temperature)
    exact = functional.info_nce_loss(sim, temperature.float())
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-7)


def test_weighted_negatives_count_within_the_limits_of_a_guide():
    scores, judged = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    sim = Similarity.from_scores(scores)
    guide = Similarity.from_scores(judged)
    for judge, options in ((scores, {}), (judged, {"guide": guide.both})):
        left = scores.masked_fill((judge >= 0.5) & ~torch.eye(6, dtype=torch.bool), -math.inf)
        found = functional.info_nce_loss(sim, 0.5, hardness=3.0, below=0.5, **options)
        wanted = functional.info_nce_loss(Similarity.from_scores(left), 0.5, hardness=3.0)
        torch.testing.assert_close(found, wanted)


@of_engines
def test_negatives_are_those_of_negclip_in_one_direction(engine):
    """One matrix of the images with all texts, whose targets are the own texts, and one of the
    texts with images.
    """
    v, w = embeddings(6, 6)
    negatives = embeddings(6, 6, seed=5)[0]
    rows = F.cross_entropy(cosines(v, torch.cat([w, negatives])) / 0.07, torch.arange(6))
    cols = F.cross_entropy(cosines(w, v) / 0.07, torch.arange(6))
    torch.testing.assert_close(
        itrloss.InfoNCELoss(engine=engine)(v, w, negatives=negatives), rows + cols
    )


@of_engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(3,), (4, 2)])
def test_zero_vectors_among_negatives(size, dtype, engine):
    negatives = torch.zeros(*size, 8)
    negatives[..., -1:, :] = 1
    negatives[0] = 0
    batch = torch.ones(4, 8), torch.eye(8)[:4], negatives
    x, y, z = (a.to(dtype).requires_grad_() for a in batch)
    criterion = itrloss.InfoNCELoss(hardness=9.0, engine=engine)
    loss = criterion(x, y, negatives=z)
    exact = criterion(x.double(), y.double(), negatives=z.double())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(criterion(x, y, negatives=z), loss)
    gradients = torch.autograd.grad(loss, (x, y, z))
    assert all(a.isfinite().all() for a in gradients)
    assert (gradients[2][0] == 0).all()


# ------------------------------------------------------------------------------- left-out negatives


@pytest.mark.parametrize(("own", "other"), [("dense", "tiled"), ("tiled", "dense")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_guide_and_a_teacher_have_an_engine_and_a_dtype_of_their_own(
    own, other, dtype, small_tiles
):
    v, w, ids, _ = given("five captions")
    x, y = (a.to(dtype) for a in others(len(v), len(w)))
    judge = Similarity(x, y, *ids, engine=other)
    exact = Similarity(x.double(), y.double(), *ids)
    criterion = filtered(margin=0.0, engine=own)
    wanted = criterion(v, w, *ids, guide=exact)
    torch.testing.assert_close(criterion(v, w, *ids, guide=judge), wanted)
    distilling = itrloss.DistillationLoss(engine=own)
    wanted = distilling(v, w, exact, *ids)
    torch.testing.assert_close(distilling(v, w, judge, *ids), wanted, rtol=1e-5, atol=1e-5)


@of_engines
def test_a_guide_gets_no_gradient_and_may_be_scores(engine):
    v, w, ids, weights = given("wide")
    x, y = others(len(v), len(w))
    x.requires_grad_()
    of_scores = Similarity.from_scores(cosines(x, y), *ids, engine=engine)
    of_vectors = Similarity(x, y, *ids, engine=engine)
    criterion = filtered(0.1, reduction="none", engine=engine)
    compare(
        lambda v, w: criterion(Similarity(v, w, *ids), guide=of_scores),
        lambda v, w: criterion(v, w, *ids, guide=of_vectors),
        (v, w),
        weights,
    )
    v.requires_grad_()
    sum(values.sum() for values in criterion(v, w, *ids, guide=of_vectors)).backward()
    assert v.grad.any()
    assert x.grad is None


@of_engines
def test_an_anchor_whose_negatives_are_all_left_out_counts_with_0_and_has_no_gradient(engine):
    v, w = (x.requires_grad_() for x in embeddings(5, 5))
    loss = filtered(margin=-3.0, engine=engine)(v, w)
    loss.backward()
    assert loss == 0
    assert (v.grad == 0).all()
    assert (w.grad == 0).all()
    scores = torch.tensor([[0.5, 0.9], [0.1, 0.2]], dtype=torch.float64)
    rows, _ = filtered(reduction="none", engine=engine)(scores=scores)
    assert rows[0] == 0
    assert rows[1] > 0
    sim = Similarity.from_scores(scores, engine=engine)
    limits = scores.diagonal().repeat(2) + 0.1
    for positives in (None, sim.both):  # also where positives are of other candidates
        mean = functional.info_nce_loss(sim, 0.05, below=limits, positives=positives)
        torch.testing.assert_close(mean, filtered()(scores=scores))


def test_scores_of_the_guide_that_are_equal_to_the_limit_are_left_out():
    scores, judged = torch.zeros(2, 2), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    rows, _ = filtered(margin=0.0, reduction="none")(
        scores=scores, guide=Similarity.from_scores(judged)
    )
    torch.testing.assert_close(rows, torch.tensor([0.0, 2.0]).log().clamp_min(0))


# ------------------------------------------------------------------------------------- distillation


def distilled(S: Tensor, T: Tensor, temperature: float, of_teacher: float) -> list[Tensor]:
    """The cross-entropies of rows and columns, with -sum q log p written out."""
    values = []
    for s, t in ((S, T), (S.T, T.T)):
        taught = (t / of_teacher).softmax(1)
        values.append(-(taught * (s / temperature).log_softmax(1)).sum(1))
    return values


@of_engines
def test_the_temperature_of_distillation_may_be_learnt(engine):
    v, w, ids, grads = given("wide")
    T = 3 * cosines(*others(5, 17))

    def ours(x, y, temperature):
        teacher = Similarity.from_scores(T, *ids)
        return functional.distillation_loss(
            Similarity(x, y, *ids, engine=engine), teacher, temperature, 0.5, "none"
        )

    plain = lambda x, y, temperature: distilled(cosines(x, y), T, temperature, 0.5)  # noqa: E731
    compare(ours, plain, (v, w, torch.tensor(0.3, dtype=v.dtype)), grads)


@of_engines
def test_padding_is_no_candidate_of_the_teacher_either(engine):
    """Neither a teacher's probability nor an overflow of its scores counts."""
    v, w = embeddings(5, 7)
    T = cosines(*others(5, 7))
    T[:, 5:] = 400.0
    ids = torch.arange(5), torch.tensor([0, 1, 2, 3, 4, IGNORE_ID, IGNORE_ID])
    criterion = itrloss.DistillationLoss(reduction="none", engine=engine)
    wanted = distilled(cosines(v, w[:5]), T[:, :5], 0.07, 0.07)
    for dtype in (torch.float64, torch.float32):
        x, y = (z.clone().to(dtype).requires_grad_() for z in (v, w))
        rows, cols = criterion(x, y, T.to(dtype), *ids)
        (rows.sum() + cols.sum()).backward()
        torch.testing.assert_close(rows.double(), wanted[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cols[:5].double(), wanted[1], rtol=1e-4, atol=1e-4)
        assert (cols[5:] == 0).all()
        assert x.grad.isfinite().all()
        assert (y.grad[5:] == 0).all()
    whole = itrloss.DistillationLoss(engine=engine)(v, w, Similarity.from_scores(T, *ids), *ids)
    torch.testing.assert_close(whole, wanted[0].mean() + wanted[1].mean())


ZEROS = torch.cat([torch.zeros(2, 8), torch.ones(3, 8), torch.eye(8)[:3]]).to(torch.bfloat16)


@of_engines
@pytest.mark.parametrize(
    "teacher",
    [Similarity(ZEROS, ZEROS), torch.full((8, 8), 1e4), torch.eye(8).to(torch.bfloat16)],
    ids=["zeros", "large", "half"],
)
def test_distillation_of_zero_vectors_in_half_precision(teacher, engine):
    v = ZEROS.clone().requires_grad_()
    w = ZEROS.flip(0).requires_grad_()
    loss = itrloss.DistillationLoss(0.01, 0.01, engine=engine)(v, w, teacher)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert v.grad.isfinite().all()
    assert w.grad.isfinite().all()
    assert (v.grad[:2] == 0).all()


def test_a_student_like_its_teacher_has_the_entropy_and_no_gradient():
    v, w = (x.requires_grad_() for x in embeddings(6, 9))
    S = cosines(v, w).detach()
    loss = itrloss.DistillationLoss()(v, w, S)
    of_rows = torch.distributions.Categorical(logits=S / 0.07).entropy()
    of_cols = torch.distributions.Categorical(logits=S.T / 0.07).entropy()
    torch.testing.assert_close(loss, of_rows.mean() + of_cols.mean())
    for gradient in torch.autograd.grad(loss, (v, w)):
        assert gradient.abs().amax() < 1e-12


# ------------------------------------------------------------------------------------------- errors


def forward(module: Any, *args: Any, **options: Any) -> Any:
    v, w = (x.float() for x in embeddings(4, 4))
    return lambda: module()(v, w, *args, **options)


FILTERED, DISTILLED, NEGATIVES = (
    partial(forward, x) for x in (filtered, itrloss.DistillationLoss, itrloss.InfoNCELoss)
)


def INFONCE(**options: Any) -> Any:
    return forward(partial(itrloss.InfoNCELoss, **options))


X = embeddings(3, 4, dtype=torch.float32)
Y = embeddings(4, 4, dtype=torch.float32)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: itrloss.InfoNCELoss(hardness=-1),
            ValueError,
            "hardness: expected at least 0, got -1",
        ),
        (
            lambda: itrloss.InfoNCELoss(hardness="9"),
            TypeError,
            "hardness: expected a number, got '9'",
        ),  # type: ignore
        (
            lambda: itrloss.InfoNCELoss(hardness=float("nan")),
            ValueError,
            "hardness: expected a number in the range",
        ),
        (
            NEGATIVES(negatives=torch.randn(3, 7)),
            ValueError,
            "negatives: expected embeddings of dimension 6 like images",
        ),
        (NEGATIVES(negatives=[1.0]), TypeError, "negatives: expected a floating-point tensor"),
        (
            NEGATIVES(negatives=torch.randn(0, 6)),
            ValueError,
            r"negatives: expected shape \(M, D\), each at least 1",
        ),
        (
            NEGATIVES(negatives=torch.randn(3, 6).double()),
            TypeError,
            "negatives: expected the dtype of images, torch.float32, got torch.float64",
        ),
        (
            NEGATIVES(negatives=torch.randn(3, 2, 6)),
            ValueError,
            r"negatives: expected shape \(K, D\) or \(4, K, 6\)",
        ),
        (
            NEGATIVES(negatives=torch.randn(4, 0, 6)),
            ValueError,
            r"negatives: expected shape \(N, K, D\), each at least 1",
        ),
        (
            lambda: itrloss.InfoNCELoss()(Similarity(*Y), negatives=Y[0]),
            ValueError,
            "negatives: expected images with them",
        ),
        (lambda: filtered(margin="0"), ValueError, "margin: expected None or a number"),  # type: ignore
        (
            lambda: filtered(0.0),
            ValueError,
            "temperature: expected a number above 0",
        ),
        (FILTERED(guide=torch.eye(4)), TypeError, "guide: expected a Similarity"),
        (
            FILTERED(guide=Similarity(*X, *map(torch.arange, (3, 4)))),
            ValueError,
            r"guide: .* a matrix of \(3, 4\) with",
        ),
        (
            FILTERED(guide=Similarity(*Y, *[torch.arange(4)] * 2)),
            ValueError,
            "guide: expected the ids of the loss",
        ),
        (
            lambda: itrloss.DistillationLoss(0.1, -1.0),
            ValueError,
            "teacher_temperature: expected a number above 0",
        ),
        (
            DISTILLED(torch.eye(4)[:3]),
            ValueError,
            r"teacher: expected shape \(4, 4\), got \(3, 4\)",
        ),
        (DISTILLED(torch.zeros(4, 4, 2)), ValueError, r"teacher: expected shape \(N, M\)"),
        (
            DISTILLED(torch.eye(4).long()),
            TypeError,
            r"teacher: expected a floating-point tensor \(N, M\)",
        ),
        (DISTILLED(None), TypeError, "teacher: expected a Similarity"),
        (
            DISTILLED(Similarity(*X, *map(torch.arange, (3, 4)))),
            ValueError,
            r"teacher: .* a matrix of \(3, 4\) with",
        ),
        (
            lambda: functional.distillation_loss(Similarity(*Y), Y),
            TypeError,
            "teacher: expected a Similarity",
        ),  # type: ignore
        (
            lambda: itrloss.InfoNCELoss(directions="all"),
            ValueError,
            "directions: expected 'both', 'image-text' or 'text-image', got 'all'",
        ),
        (
            lambda: itrloss.SigmoidLoss(directions="image-text"),
            ValueError,
            "directions: expected 'both'",
        ),
        (lambda: itrloss.InfoNCELoss(joint="yes"), ValueError, "joint: expected True or False"),  # type: ignore
        (
            lambda: itrloss.InfoNCELoss(hardness=(1.0, 2.0, 3.0)),  # type: ignore
            ValueError,
            "hardness: expected a number or a pair of numbers",
        ),
        (INFONCE(joint=True, directions="image-text"), ValueError, "joint: expected False, or dir"),
        (
            INFONCE(in_batch=False),
            ValueError,
            "in_batch: expected True, or directions='image-text'",
        ),
        (
            INFONCE(in_batch=False, directions="image-text"),
            ValueError,
            "in_batch: expected True, or negatives",
        ),
        (
            INFONCE(in_batch=False, directions="image-text", image_image=True),
            ValueError,
            "in_batch: expected True with image_image",
        ),
        (INFONCE(relative=True), ValueError, "relative: expected a margin"),
        (INFONCE(text_text="unfiltered"), ValueError, "text_text: expected a margin with"),
        (FILTERED(negative_ids=torch.arange(4)), ValueError, "negative_ids: expected None without"),
        (
            FILTERED(negatives=torch.randn(3, 6), negative_ids=torch.arange(4)),
            ValueError,
            r"negative_ids: expected shape \(3,\), got \(4,\)",
        ),
        (
            FILTERED(negatives=torch.randn(4, 2, 6), negative_ids=torch.arange(4)),
            ValueError,
            r"negative_ids: expected shape \(4, 2\), got \(4,\)",
        ),
        (
            FILTERED(negatives=torch.randn(3, 6), guide=Similarity(*Y)),
            ValueError,
            "guide: expected embeddings with negatives",
        ),
        (
            FILTERED(negatives=torch.randn(3, 6), guide=Y),
            ValueError,
            r"guide: expected embeddings \(images, texts, negatives\), got 2 tensors",
        ),
        (
            lambda: itrloss.InfoNCELoss()(*Y, guide=Y),
            ValueError,
            "guide: expected None without a margin",
        ),
        (
            lambda: itrloss.InfoNCELoss(image_image=True)(scores=torch.eye(4)),
            ValueError,
            "image_image, text_text: expected False without embeddings",
        ),
        (
            lambda: itrloss.InfoNCELoss()(scores=torch.eye(4), negatives=torch.eye(3)),
            ValueError,
            "negatives: expected a row of scores for each of 4 images",
        ),
    ],
)
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


# ----------------------------------------------------------------------------- compiler, call forms


def calls(**options: Any) -> dict[str, Any]:
    v, w = embeddings(8, 8, dtype=torch.float32)
    x, y = (a.float() for a in others(8, 8))
    ids = torch.arange(8) % 5
    every = embeddings(24, 1, dtype=torch.float32)[0]
    return {
        "negatives": (
            itrloss.InfoNCELoss(hardness=9.0, **options),
            (v, w, ids, ids),
            {"negatives": x[:, :6]},
        ),
        "negatives of each": (
            itrloss.InfoNCELoss(**options),
            (v, w),
            {"negatives": every.view(8, 3, 6)},
        ),
        "guide": (
            filtered(**options),
            (v, w, ids, ids),
            {"guide": Similarity(x, y, ids, ids)},
        ),
        "teacher": (itrloss.DistillationLoss(**options), (v, w, x @ y.T / 9), {}),
        "joint": (
            itrloss.InfoNCELoss(joint=True, image_image=True, text_text=True, **options),
            (v, w, ids, ids),
            {},
        ),
        "among": (
            itrloss.InfoNCELoss(image_image=True, text_text=True, margin=0.1, **options),
            (v, w),
            {"negatives": x[:, :6], "guide": (x, y, x)},
        ),
        "own": (
            itrloss.InfoNCELoss(directions="image-text", in_batch=False, **options),
            (v, w),
            {"negatives": every.view(8, 3, 6)},
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_telemetry_gather_in_one_process_and_representation(name):
    wanted = None
    for extra in ({}, {"telemetry": True}, {"gather": True}, {"check_finite": True}):
        criterion, args, options = calls(**extra)[name]
        value = criterion(*args, **options)
        wanted = value if wanted is None else wanted
        torch.testing.assert_close(value, wanted)
        assert bool(criterion.telemetry) == ("telemetry" in extra)
        assert "temperature=" in repr(criterion)
    v, w, *more = args
    bad = v.clone()
    bad[0, 0] = torch.nan
    with pytest.raises(ValueError, match="images: expected finite values"):
        criterion(bad, w, *more, **options)


# ---------------------------------------------------------------------------- sentence-transformers
# Their losses have one direction, from queries to documents. Its part of ours are the values of
# the images.

QUERY_TO_DOC = "query_to_doc"


def ranking(**options: Any) -> Any:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(None, **options)  # type: ignore
    return lambda *columns: loss.compute_loss_from_embeddings(list(columns), None)  # type: ignore


def same(ours: Any, theirs: Any, leaves: Any) -> None:
    compare(lambda *x: [ours(*x)], lambda *x: [theirs(*x)], leaves, [torch.ones(())], 1e-8)


@of_engines
@pytest.mark.parametrize(
    ("directions", "options"),
    [
        ([], {"directions": "image-text"}),
        (["query_to_query"], {"directions": "image-text", "image_image": True}),
        (["doc_to_doc"], {"directions": "image-text", "text_text": True}),
        (["doc_to_query"], {"joint": True}),
        (
            ["doc_to_query", "query_to_query", "doc_to_doc"],
            {"joint": True, "image_image": True, "text_text": True},
        ),
    ],
)
def test_joint_sums_are_those_of_sentence_transformers(directions, options, engine, small_tiles):
    ours = itrloss.InfoNCELoss(0.05, engine=engine, **options)
    same(ours, ranking(directions=(QUERY_TO_DOC, *directions)), embeddings(9, 9))


def test_two_softmaxes_of_sentence_transformers_are_averaged_and_ours_added():
    theirs = ranking(directions=(QUERY_TO_DOC, "doc_to_query"), partition_mode="per_direction")
    same(itrloss.InfoNCELoss(0.05), lambda v, w: 2 * theirs(v, w), embeddings(9, 9))


@of_engines
@pytest.mark.parametrize("further", [0, 1, 3])
def test_hardness_is_that_of_sentence_transformers(further, engine, small_tiles):
    """Their hardness of all negatives, and those of a query are negatives of all."""
    ours = itrloss.InfoNCELoss(0.05, hardness=9.0, reduction="none", engine=engine)
    theirs = ranking(hardness_mode="all_negatives", hardness_strength=9.0)

    def rows(v, w, *negatives):
        return ours(v, w, negatives=torch.cat(negatives) if negatives else None)[0].mean()

    columns = [*embeddings(9, 9), *embeddings(9, 9, seed=1), *embeddings(9, 9, seed=2)]
    same(rows, theirs, columns[: 2 + further])


class Model(nn.Module):
    """What their loss asks of a model, whose features are embeddings."""

    max_seq_length = 1

    def __init__(self, name: str):
        super().__init__()
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        self.name = name
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a"))
        )

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.name]}


@of_engines
@pytest.mark.parametrize(
    ("margin", "relative"), [(0.0, False), (0.1, False), (-0.1, False), (0.05, True)]
)
def test_the_guide_is_that_of_sentence_transformers(margin, relative, engine, small_tiles):
    """Their margin has the other sign. Their pairs of queries, and of documents, are left out."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss

    options: dict[str, Any] = {
        "margin": margin,
        "margin_strategy": "relative" if relative else "absolute",
    }
    models: Any = (Model("own"), Model("guide"))
    loss = GISTEmbedLoss(*models, 0.05, contrast_anchors=False, contrast_positives=False, **options)
    x, y = others(9, 9)
    y = x + y
    guide = Similarity(x, y, engine=engine)
    ours = filtered(0.05, -margin, relative, reduction="none", engine=engine)
    G = cosines(x, y)
    own = G.diagonal()[:, None]
    limit = own - margin * (own.abs() if relative else 1)
    assert (limit <= G).any()

    def theirs(v, w):
        return loss([{"own": v, "guide": x}, {"own": w, "guide": y}], None)  # type: ignore

    same(lambda v, w: ours(v, w, guide=guide)[0].mean(), theirs, embeddings(9, 9))


@of_engines
def test_distillation_is_that_of_sentence_transformers(engine):
    """Theirs is the divergence, without the teacher's entropy, times the square of the student's
    temperature.
    """
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss
    from sentence_transformers.util import pairwise_cos_sim

    loss = DistillKLDivLoss(
        None, pairwise_cos_sim, student_temperature=0.2, teacher_temperature=0.1
    )  # type: ignore
    T = cosines(*others(9, 11))
    entropy = torch.distributions.Categorical(logits=T / 0.1).entropy().mean()
    ours = itrloss.DistillationLoss(0.2, 0.1, reduction="none", engine=engine)

    def theirs(v, w):
        return loss.compute_loss_from_embeddings([v, *(text.expand_as(v) for text in w)], T)

    same(lambda v, w: 0.2**2 * (ours(v, w, T)[0].mean() - entropy), theirs, embeddings(9, 11))


def test_candidates_of_another_batch_pool_with_one_of_the_same_anchors_only():
    v, w = embeddings(4, 4)
    with pytest.raises(ValueError, match="anchors: expected as many anchors in each block"):
        Anchors.pooled(Similarity(v, w), Similarity(v[:3], w[:3]))


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
def test_one_pair_without_a_negative_that_exists_is_finite():
    v, w = (x.requires_grad_() for x in embeddings(1, 1))
    no_negative = {"negatives": v[:, None].detach(), "negative_ids": [[itrloss.NO_ID]]}
    value = itrloss.InfoNCELoss()(v, w, [0], [0], **no_negative)
    gradients = torch.autograd.grad(value, (v, w))
    assert all(x.isfinite().all() for x in (value, *gradients))


def test_ids_of_negatives_beyond_int64_are_refused():
    v, w = embeddings(3, 3)
    ids = np.array([[2**63, 2**63 + 1]] * 3, dtype=np.uint64)
    negatives = torch.stack([v, w], 1)
    with pytest.raises(ValueError, match=r"expected ids below 2\*\*63, got larger ones"):
        itrloss.InfoNCELoss()(v, w, range(3), range(3), negatives=negatives, negative_ids=ids)
