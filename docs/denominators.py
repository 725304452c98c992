"""Pictures of what is in the denominator of one query, as the gradient of its loss shows it."""

from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import itrloss

N, K = 4, 2  # queries with one document each, hard negatives of each query
QUERIES = list(range(N))
DOCUMENTS = list(range(N, 2 * N))
NEGATIVES = list(range(2 * N, 2 * N + N * K))
QUERY = 1  # the one whose loss is drawn
OTHER = 2  # what is too near to it
ROWS = QUERIES + DOCUMENTS
COLUMNS = DOCUMENTS + NEGATIVES + QUERIES
GROUPS = torch.tensor([0, 0, 1, 1])

COLORS = {"positive": "#42a874", "query": "#3a86c8", "document": "#e0783c"}
SIGNS = {"positive": "+", "query": "–", "document": "–"}
FRAME = "#8b919c"

ALT = "Scores that the loss of one query depends on"
LEGEND = (
    "Four queries, their documents and two hard negatives of each query; rows are queries, then "
    "documents. Coloured cells are those that the loss of query 1 depends on, by its gradient: "
    "+ is the pair itself, – are the negatives of its denominator. What is orange is in the "
    "denominator of document 1, the other direction."
)


def items() -> Tensor:
    """Return (16, 16) unit vectors of queries, documents and negatives, which span the space.

    Query 1 is nearer to query 2, document 2 and a negative of its own than to its document.
    """
    draw = torch.Generator().manual_seed(0)
    size = len(QUERIES + DOCUMENTS + NEGATIVES)
    scores = 0.04 * torch.rand(size, size, generator=draw, dtype=torch.float64)
    scores = scores + scores.T
    for i in range(N):
        scores[QUERIES[i], DOCUMENTS[i]] = 0.3
    near = QUERIES[OTHER], DOCUMENTS[OTHER], NEGATIVES[K * QUERY]
    for item in near:
        scores[QUERIES[QUERY], item] = 0.5
    scores = scores.triu(1)
    scores = scores + scores.T + torch.eye(size, dtype=torch.float64)
    return torch.linalg.cholesky(scores)  # rows whose inner products are these scores


class Batch(NamedTuple):
    """Embeddings of queries, documents, and hard negatives as (N K, D) and (N, K, D)."""

    q: Tensor
    d: Tensor
    flat: Tensor
    n: Tensor


class One(itrloss.InfoNCELoss):
    """The values of queries alone, (N,), by inner products."""

    def __init__(self, **options):
        super().__init__(0.2, directions="image-text", normalize=False, reduction="none", **options)


def _plain(x: Batch) -> Tensor:
    return One()(x.q, x.d, negatives=x.flat)[QUERY]


def _own_besides(x: Batch) -> Tensor:
    return One()(x.q, x.d, negatives=x.n)[QUERY]


def _own(x: Batch) -> Tensor:
    return One(in_batch=False)(x.q, x.d, negatives=x.n)[QUERY]


def _margin(x: Batch) -> Tensor:
    return One(margin=0.1)(x.q, x.d, negatives=x.flat)[QUERY]


def _qwen(x: Batch) -> Tensor:
    loss = One(image_image=True, text_text="unfiltered", margin=0.1)
    return loss(x.q, x.d, negatives=x.flat)[QUERY]


def _joint(x: Batch) -> Tensor:
    loss = itrloss.InfoNCELoss(
        0.2, joint=True, image_image=True, text_text=True, normalize=False, reduction="none"
    )
    return loss(x.q, x.d)[QUERY]


def _groups(x: Batch) -> Tensor:
    return One()(x.q, x.d, image_groups=GROUPS)[QUERY]


def _both(x: Batch) -> Tensor:
    return _directions(x)[0][QUERY]


def _both_document(x: Batch) -> Tensor:
    return _directions(x)[1][QUERY]


def _directions(x: Batch) -> tuple[Tensor, Tensor]:
    return itrloss.InfoNCELoss(0.2, normalize=False, reduction="none")(x.q, x.d)


PANELS = {
    "One(τ)(q, d, negatives=flat)": (_plain, None),
    "InfoNCELoss(τ)(q, d)": (_both, _both_document),
    "One(τ)(q, d, negatives=n)": (_own_besides, None),
    "One(τ, in_batch=False)(q, d, negatives=n)": (_own, None),
    "One(τ, margin=0.1)(q, d, negatives=flat)": (_margin, None),
    'One(τ, image_image=True, text_text="unfiltered", margin=0.1)': (_qwen, None),
    "InfoNCELoss(τ, joint=True, image_image=True, text_text=True)(q, d)": (_joint, None),
    "One(τ)(q, d, image_groups=[0, 0, 1, 1])": (_groups, None),
}


def influence(value) -> Tensor:
    """Return (16, 16): the gradient of a loss by the score of each two items, its sign kept.

    A loss of inner products X X' has the gradient (W + W') X by the embeddings X, if W is the one
    by the scores. Here X has an inverse.
    """
    vectors = items()
    leaf = vectors.clone().requires_grad_()
    negatives = leaf[NEGATIVES]
    batch = Batch(leaf[QUERIES], leaf[DOCUMENTS], negatives, negatives.view(N, K, -1))
    (gradient,) = torch.autograd.grad(value(batch), leaf)
    by_score = torch.linalg.solve(vectors, gradient, left=False)
    by_score[by_score.abs() < 1e-9] = 0.0
    return by_score


def cells(name: str) -> dict[tuple[int, int], str]:
    """Return what is in a panel's cells (row, column), counted from 0: "positive", "query" or
    "document" for a negative of the query or its document; nothing for the rest.
    """
    of_query, of_document = PANELS[name]
    found = {}
    for kind, value in (("document", of_document), ("query", of_query)):
        if value is None:
            continue
        by_score = influence(value)
        for row, item in enumerate(ROWS):
            for column, other in enumerate(COLUMNS):
                if column >= N and item in DOCUMENTS and other in QUERIES:
                    continue  # the scores of the first block again
                gradient = by_score[item, other]
                if gradient < 0:
                    found[row, column] = "positive"
                elif gradient > 0 and _is_first(item, other):
                    found[row, column] = kind
    return found


def _is_first(item: int, other: int) -> bool:
    """Return whether a pair of one kind stands in the row of query 1 or its document."""
    if item in QUERIES and other in QUERIES:
        return item == QUERIES[QUERY]
    if item in DOCUMENTS and other in DOCUMENTS:
        return item == DOCUMENTS[QUERY]
    return True


def figures() -> list[Figure]:
    """Return the pictures of all panels."""
    return [_figure(name) for name in PANELS]


def _figure(name: str) -> Figure:
    found = cells(name)
    height = len(ROWS)
    fig, ax = plt.subplots(figsize=(4.8, 2.9))
    for row in range(height):
        for column in range(len(COLUMNS)):
            if row >= N and column >= N + N * K:
                continue
            kind = found.get((row, column))
            ax.add_patch(
                Rectangle(
                    (column - 0.45, row - 0.45),
                    0.9,
                    0.9,
                    facecolor=COLORS[kind] if kind else "none",
                    edgecolor=FRAME,
                    linewidth=0.5,
                )
            )
            if kind:
                ax.text(column, row, SIGNS[kind], ha="center", va="center", color="white", size=9)
    for edge in (N, N + N * K):
        ax.axvline(edge - 0.5, color=FRAME, linewidth=1.2)
    ax.axhline(N - 0.5, color=FRAME, linewidth=1.2)
    ax.set(xlim=(-0.6, len(COLUMNS) - 0.4), ylim=(height - 0.4, -0.6), aspect="equal")
    ax.set_title(name, size=9)
    ax.set_xticks(range(len(COLUMNS)))
    negatives = [f"n{i}" for i in range(N) for _ in range(K)]
    ax.set_xticklabels([*(f"d{i}" for i in range(N)), *negatives, *(f"q{i}" for i in range(N))])
    ax.set_yticks(range(height))
    ax.set_yticklabels([*(f"q{i}" for i in range(N)), *(f"d{i}" for i in range(N))])
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelsize=8)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return fig
