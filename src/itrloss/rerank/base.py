"""What all re-rankers share: one interface, query banks, and two ways to do without the matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._arguments import check_size
from ..distributed import Shares, gather_parts, world_size
from ..similarity import Similarity, TopK, blocks

T = TypeVar("T", Tensor, TopK)
R = TypeVar("R", bound="Reranker")

SIDES = ("images", "texts")  # who asks: image→text, text→image


class Reranked(tuple[T, T], Generic[T]):
    """The pair ``(image→text, text→image)``, which also says where it came from.

    Attributes:
        i2t, t2i: the two parts.
        transductive: (image→text, text→image), whether that part depends on which test queries were asked together;
            False where it came from a query bank.
    """

    transductive: tuple[bool, bool]

    def __new__(cls, i2t: T, t2i: T, transductive: tuple[bool, bool]) -> Reranked[T]:
        pair = super().__new__(cls, (i2t, t2i))
        pair.transductive = transductive
        return pair

    def __getnewargs__(self) -> tuple[T, T, tuple[bool, bool]]:  # for copy and pickle
        return self[0], self[1], self.transductive

    @property
    def i2t(self) -> T:
        """Of the images asking for texts."""
        return self[0]

    @property
    def t2i(self) -> T:
        """Of the texts asking for images."""
        return self[1]


class Direction(NamedTuple):
    """What a re-ranker may look at when the images, or the texts, are the queries. Labels are not part of it."""

    side: int  # 0: images ask; 1: texts
    queries: Similarity  # (queries, candidates)
    candidates: Similarity  # (candidates, references): the test queries or the bank's
    transductive: bool
    gallery: Tensor | None  # the bank of the candidates' own modality


class Reranker(ABC):
    """What every re-ranker can do.

    Attributes:
        uses_labels: whether it looks at which image and text belong together. None does: the ids of a ``Similarity``
            are out of a method's reach.
        needs_bank: whether it takes queries other than the test queries, given by :meth:`fit`.
        needs_embeddings: whether it asks for the similarity of images with images, or texts with texts, so that a
            matrix of scores is not enough.
    """

    uses_labels: bool = False
    needs_bank: bool = False
    needs_embeddings: bool = False

    _ranks_alone: bool = False  # a single query, without a bank
    _images: Tensor | None = None
    _texts: Tensor | None = None

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({given})"

    @property
    def transductive(self) -> tuple[bool, bool]:
        """(image→text, text→image), whether the results depend on which test queries are asked together."""
        return self._images is None, self._texts is None

    def fit(self: R, images: Tensor | None = None, texts: Tensor | None = None) -> R:
        """Look for hubs among a bank of queries instead of the test queries.

        Args:
            images: bank of image→text, floating point. To re-rank a ``Similarity`` of embeddings, (B, D) image
                embeddings of the same model. To re-rank a matrix, the scores (B, n_texts) of the bank's images with
                the texts to be ranked.
            texts: bank of text→image: (B, D) text embeddings, or the scores (n_images, B) of the images to be ranked
                with the bank's texts.

        A direction whose bank is left out keeps to the test queries. Another call replaces both banks.

        Returns:
            This object.

        Raises:
            TypeError, ValueError: naming the argument; here, or when what is re-ranked turns out not to fit the bank.
        """
        for name, bank in (("images", images), ("texts", texts)):
            if bank is None:
                continue
            if isinstance(bank, Similarity):
                raise TypeError(f"{name}: expected a tensor of embeddings or scores, got a Similarity")
            try:
                as_similarity(bank)
            except (TypeError, ValueError) as error:
                raise type(error)(str(error).replace("scores:", f"{name}:", 1)) from None
        self._images, self._texts = (None if bank is None else bank.detach() for bank in (images, texts))
        return self

    @abstractmethod
    def rerank(self, scores: Tensor | Similarity) -> Reranked[Tensor]:
        """Re-ranked scores ``(image→text, text→image)``, both (n_images, n_texts), higher is better.

        The result is two full matrices. From embeddings too many for that, use :meth:`topk`, or
        ``retrieval_metrics(sim, reranker=self)``.

        Args:
            scores: (n_images, n_texts), higher is better, or a :class:`itrloss.Similarity` with images as rows.

        Raises:
            TypeError, ValueError: naming the argument; for nan and infinity; for a single query without a bank; for
                what the method needs and was not given.
        """

    @abstractmethod
    def topk(self, scores: Tensor | Similarity, k: int) -> Reranked[TopK]:
        """The k best texts of each image and the k best images of each text, by re-ranked score.

        Returns:
            ``(image→text, text→image)``, each with ``values`` and ``indices`` of shape (queries, k); a direction with
            fewer than k candidates has them all. Of a tiled ``Similarity`` there never is a matrix.
        """

    @abstractmethod
    def _ranked(self, sim: Similarity, k: int, ties: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Of the images and of the texts, the ranks of their positives and the indices of their k best."""

    def _queries_of_all(self, shares: Shares) -> Iterator[tuple[Similarity, Tensor, float]]:
        """Of either direction: own queries with the candidates of all processes, the bias of these, and the factor."""
        raise ValueError(f"gather: {type(self).__name__} has to see all scores at once")

    def _directions(self, sim: Similarity) -> tuple[Direction, Direction]:
        """Both, checked."""
        self._check(sim)
        sim = sim._unlabelled()
        banks = self._images, self._texts
        found = []
        for side, queries in enumerate((sim, sim.T)):
            bank = banks[side]
            references = queries.T if bank is None else _beside(queries.T, SIDES[side], bank)
            found.append(Direction(side, queries, references, bank is None, banks[1 - side]))
        return found[0], found[1]

    def _check(self, sim: Similarity, queries: tuple[int, int] | None = None) -> None:
        """Whether it has all it needs; ``queries``: how many there are, if not those of ``sim``."""
        if self.needs_embeddings and sim._matrix.cols is None:
            wanted = "a Similarity of embeddings: images are compared with images, or texts with texts"
            raise ValueError(f"scores: {type(self).__name__} needs {wanted}; got a matrix of scores")
        for name, transductive, number in zip(SIDES, self.transductive, queries or sim.shape, strict=True):
            if transductive and self.needs_bank:
                raise ValueError(f"{name}: {type(self).__name__} needs a bank of queries; call fit({name}=...) first")
            if transductive and number == 1 and not self._ranks_alone:
                raise ValueError(
                    f"scores: a single query is compared with no other, so re-ranking cannot rank for it; "
                    f"fit({name}=...) a bank of queries first"
                )


class RerankBiases(NamedTuple):
    """What re-ranking adds to a score: ``texts`` (M,) when an image asks for texts, ``images`` (N,) the other way."""

    texts: Tensor
    images: Tensor


class BiasReranker(Reranker):
    """Re-rankers that take one number from all scores of a candidate: ``factor S_qc - penalty_c``."""

    _one_by_one: bool = True  # whether the number of a candidate depends on no other candidate

    @abstractmethod
    def _factor(self, side: int) -> float:
        """What multiplies the scores of a direction."""

    @abstractmethod
    def _penalty(self, direction: Direction) -> Tensor:
        """(candidates,)."""

    def _penalties(self, sim: Similarity) -> tuple[Tensor, Tensor]:
        """(M,) when images ask and (N,) when texts do."""
        texts, images = (self._penalty(direction) for direction in self._directions(sim))
        return texts, images

    def _checked(self, sim: Similarity) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            found = self._penalties(sim)
        if not all(bool(penalty.isfinite().all()) for penalty in found):
            raise ValueError(f"scores: too large for {self!r}")
        return found

    def rerank(self, scores: Tensor | Similarity) -> Reranked[Tensor]:
        sim = as_similarity(scores)
        texts, images = self._checked(sim)
        with torch.no_grad():
            matrix = sim.detach().scores()  # a tiled one would keep it
            i2t = torch.add(-texts, matrix, alpha=self._factor(0))
            t2i = torch.add(-images[:, None], matrix, alpha=self._factor(1))
        return Reranked(i2t, t2i, self.transductive)

    def topk(self, scores: Tensor | Similarity, k: int, *, gather: bool = False) -> Reranked[TopK]:
        """The k best texts of each image and the k best images of each text, by re-ranked score.

        Args:
            scores: (n_images, n_texts), or a :class:`itrloss.Similarity`.
            k: how many.
            gather: in a job of several processes (``torch.distributed``), each with its own images and texts as a
                ``Similarity`` of embeddings: rank the candidates of all processes, numbered in the order of the ranks,
                for one's own queries. The results are those of one process with everything, and each does its share of
                the work. Every process holds the embeddings of all. Parts may differ in size. Banks are the same in
                each process.

        Returns:
            ``(image→text, text→image)``, each with ``values`` and ``indices`` of shape (queries, k); a direction with
            fewer than k candidates has them all. Of a tiled ``Similarity`` there never is a matrix.
        """
        if gather and world_size() > 1:
            check_size("k", k)
            found = []
            for queries, bias, factor in self._queries_of_all(Shares(scores, f"{self!r} {k}")):
                top = queries.topk(min(k, queries.shape[1]), bias)
                found.append(TopK(top.values * factor, top.indices))
            return Reranked(found[0], found[1], self.transductive)
        sim = as_similarity(scores)
        biases = self.biases(sim)
        tops = sim.both.topk(k, biases.images, biases.texts)
        i2t, t2i = (TopK(top.values * self._factor(side), top.indices) for side, top in enumerate(tops))
        return Reranked(i2t, t2i, self.transductive)

    def _queries_of_all(self, shares: Shares) -> Iterator[tuple[Similarity, Tensor, float]]:
        sim, banks = shares.sim, (self._images, self._texts)
        self._check(sim, (len(shares.every[0]), len(shares.every[1])))
        for side in (0, 1):
            bank = banks[side]
            # In the type of scores, as it is in one process: half precision would round a bank of single precision.
            references = shares.every[side] if bank is None else bank.to(sim.device, sim.dtype)
            # Numbers that hang on one another are found whole, by every process for itself.
            candidates = shares.beside((shares.own if self._one_by_one else shares.every)[1 - side], references)
            queries = shares.queries(side)
            direction = Direction(side, queries._unlabelled(), candidates, bank is None, banks[1 - side])
            with torch.no_grad():
                penalty, factor = self._penalty(direction), self._factor(side)
            penalty = gather_parts(penalty) if self._one_by_one else penalty
            if not bool(penalty.isfinite().all()):
                raise ValueError(f"scores: too large for {self!r}")
            yield queries, -penalty / factor, factor

    def biases(self, scores: Tensor | Similarity) -> RerankBiases:
        """Re-ranking as an additive bias: image→text ranks by ``A_ij + texts_j``, text→image by ``A_ij + images_i``."""
        texts, images = self._checked(as_similarity(scores))
        return RerankBiases(-texts / self._factor(0), -images / self._factor(1))

    def _ranked(self, sim: Similarity, k: int, ties: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        biases = self.biases(sim)
        return sim.both._ranked(k, biases.images, biases.texts, ties=ties)


class BlockReranker(Reranker):
    """Re-rankers that turn the scores of some queries with all candidates into others, some queries at a time."""

    @abstractmethod
    def _prepare(self, direction: Direction) -> Any:
        """What has to be known of all scores before any is re-ranked."""

    @abstractmethod
    def _apply(self, scores: Tensor, rows: slice, known: Any) -> Tensor:
        """(b, candidates) scores of the queries ``rows``, which may be overwritten -> those to rank by."""

    def rerank(self, scores: Tensor | Similarity) -> Reranked[Tensor]:
        sim = as_similarity(scores)
        found = []
        for direction in self._directions(sim):
            out = torch.empty(direction.queries.shape, dtype=sim.dtype, device=sim.device)
            for rows, block in self._blocks(direction):
                out[rows] = block
            found.append(out)
        return Reranked(found[0], found[1].T, self.transductive)

    def topk(self, scores: Tensor | Similarity, k: int) -> Reranked[TopK]:
        check_size("k", k)
        found = []
        for direction in self._directions(as_similarity(scores)):
            width = min(k, direction.queries.shape[1])
            parts = [block.topk(width, 1) for _, block in self._blocks(direction)]
            found.append(TopK(*(torch.cat(x) for x in zip(*parts, strict=True))))
        return Reranked(found[0], found[1], self.transductive)

    def _ranked(self, sim: Similarity, k: int, ties: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        ids = [_or_numbers(given, size) for given, size in zip(sim.ids, sim.shape, strict=True)]
        found = []
        for direction in self._directions(sim):
            own, others = ids[direction.side], ids[1 - direction.side]
            ranks, tops = [], []
            for rows, block in self._blocks(direction):
                part = Similarity.from_scores(block, own[rows], others)
                ranks.append(part.ranks(ties=ties))
                tops.append(part.topk(min(k, block.shape[1])).indices)
            width = max(x.shape[1] for x in ranks)
            padded = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in ranks]
            found.append((torch.cat(padded), torch.cat(tops)))
        return found[0], found[1]

    @torch.no_grad()
    def _blocks(self, direction: Direction) -> Iterator[tuple[slice, Tensor]]:
        known = self._prepare(direction)
        for rows, scores in blocks(direction.queries):
            yield rows, self._apply(scores, rows, known)


def _or_numbers(ids: Tensor | None, size: int) -> Tensor:
    return torch.arange(size) if ids is None else ids


def _beside(candidates: Similarity, name: str, bank: Tensor) -> Similarity:
    """The candidates, rows here, and the queries of the bank ``name``."""
    bank = bank.to(candidates.device, candidates.dtype)
    matrix = candidates._matrix
    if matrix.cols is None:
        bank = bank.T if name == "images" else bank
        got, wanted = bank.shape[0], candidates.shape[0]
        what = f"scores with the {wanted} candidates"
    else:
        got, wanted = bank.shape[1], matrix.cols.shape[1]
        what = f"embeddings of dimension {wanted}"
    if got != wanted:
        raise ValueError(f"{name}: expected {what}, got a bank of {got}")
    return candidates._against(bank)


def as_similarity(scores: Tensor | Similarity) -> Similarity:
    """Scores without ids: re-ranking never asks who matches whom."""
    if isinstance(scores, Similarity):
        scores.check_finite()
        return scores
    n, m = (scores.shape[0], scores.shape[1]) if isinstance(scores, Tensor) and scores.dim() == 2 else (1, 1)
    ids = (torch.arange(n), torch.arange(m))
    return Similarity.from_scores(scores, *ids, check_finite=True)
