"""Forms of InfoNCE, and distillation, next to plain PyTorch and sentence-transformers.

`test_random_cases` has all options next to loops, in one process and in two.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import oracle
from support.cases import SHAPES, embeddings, make_ids, upstream
from torch import Tensor, nn

import itrloss
from itrloss import Similarity, functional

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


# ------------------------------------------------------------------------------- left-out negatives


@of_engines
def test_a_guide_gets_no_gradient_and_may_be_scores(engine):
    v, w, ids, weights = given("wide")
    x, y = others(len(v), len(w))
    x.requires_grad_()
    criterion = filtered(0.1, reduction="none", engine=engine)
    compare(
        lambda v, w: criterion(Similarity(v, w, *ids), guide=cosines(x, y)),
        lambda v, w: criterion(v, w, *ids, guide=(x, y)),
        (v, w),
        weights,
    )
    v.requires_grad_()
    sum(values.sum() for values in criterion(v, w, *ids, guide=(x, y))).backward()
    assert v.grad.any()
    assert x.grad is None


@of_engines
def test_an_anchor_whose_negatives_are_all_left_out_counts_with_0(engine):
    scores = torch.tensor([[0.5, 0.9], [0.1, 0.2]], dtype=torch.float64)
    rows, _ = filtered(reduction="none", engine=engine)(scores=scores)
    assert rows[0] == 0
    assert rows[1] > 0
    sim = Similarity.from_scores(scores, engine=engine)
    limits = scores.diagonal().repeat(2) + 0.1
    for positives in (None, sim.both):  # also where positives are of other candidates
        mean = functional.info_nce_loss(sim, 0.05, below=limits, positives=positives)
        torch.testing.assert_close(mean, filtered()(scores=scores))


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
    ours = filtered(0.05, -margin, relative, reduction="none", engine=engine)
    G = cosines(x, y)
    own = G.diagonal()[:, None]
    limit = own - margin * (own.abs() if relative else 1)
    assert (limit <= G).any()

    def theirs(v, w):
        return loss([{"own": v, "guide": x}, {"own": w, "guide": y}], None)  # type: ignore

    same(lambda v, w: ours(v, w, guide=(x, y))[0].mean(), theirs, embeddings(9, 9))


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
