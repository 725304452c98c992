"""What all re-rankers share: one interface, query banks, and two ways to do without the matrix."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checks import check_matrix, check_size
from ..distributed import Shares, failing_together, gather_parts, sum_over_processes, world_size
from ..engine.pairs import Pairs
from ..similarity import Similarity, TopK

T = TypeVar("T", Tensor, TopK)
R = TypeVar("R", bound="Reranker")
Ranked = tuple[Tensor, TopK]  # ranks of the queries' positives, and their best candidates

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
    """What a re-ranker may look at when the images, or the texts, are the queries. Labels are not part of it.

    Of several processes, each has its own queries, which choose among the candidates of all, and compares its own
    candidates with all references: where ``shared``, what it finds for them is a part of the whole.
    """

    side: int  # 0: images ask; 1: texts
    queries: Similarity  # (queries, candidates)
    candidates: Similarity  # (candidates, references): the test queries or the bank's
    transductive: bool
    gallery: Tensor | None  # the bank of the candidates' own modality
    shared: bool = False
    first: tuple[int, int] = (0, 0)  # number of the first own query, and of the first own candidate, among those of all

    def of_all(self, x: Tensor) -> Tensor:
        """(B, ...) of each own query, or candidate -> that of all queries, or candidates."""
        return gather_parts(x) if self.shared else x

    def summed(self, x: Tensor) -> Tensor:
        """What all processes have found together; written over."""
        return sum_over_processes(x) if self.shared else x


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
            check_matrix(name, bank, "(N, M)", check_finite=True)
        self._images, self._texts = (None if bank is None else bank.detach() for bank in (images, texts))
        return self

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
        i2t, t2i = self._matrices(as_similarity(scores))
        return Reranked(i2t, t2i, self.transductive)

    def topk(self, scores: Tensor | Similarity, k: int, *, gather: bool = False) -> Reranked[TopK]:
        """The k best texts of each image and the k best images of each text, by re-ranked score.

        Args:
            scores: (n_images, n_texts), or a :class:`itrloss.Similarity`.
            k: how many.
            gather: in a job of several processes (``torch.distributed``), each with its own images and texts as a
                ``Similarity`` of embeddings: rank the candidates of all processes, numbered in the order of the ranks,
                for one's own queries. The results are those of one process with everything, up to rounding and the
                order of equal scores, and each does its share of the work. Every process holds the embeddings of all.
                Parts may differ in size. Banks are whole in each process.

        Returns:
            ``(image→text, text→image)``, each with ``values`` and ``indices`` of shape (queries, k); a direction with
            fewer than k candidates has them all. Of a tiled ``Similarity`` there never is a matrix.

        Raises:
            TypeError, ValueError: as :meth:`rerank`. With ``gather=True``, what is wrong with the embeddings of one
                process, or differs between processes, is raised in all of them.
        """
        check_size("k", k)
        if gather and world_size() > 1:
            found = []
            for direction, _ in self._of_all(Shares(scores, f"{self._question()} {k}")):
                with failing_together(direction.queries.device):
                    found.append(self._best_of(direction, k))
            i2t, t2i = found
        else:
            i2t, t2i = self._best(as_similarity(scores), k)
        return Reranked(i2t, t2i, self.transductive)

    def _best(self, sim: Similarity, k: int) -> tuple[TopK, TopK]:
        """Of all images, and of all texts."""
        i2t, t2i = (self._best_of(direction, k) for direction in self._directions(sim))
        return i2t, t2i

    def _ranked(self, sim: Similarity, k: int, ties: str) -> tuple[Ranked, Ranked]:
        """Of all images, and of all texts."""
        views = zip(self._directions(sim), (sim, sim.T), strict=True)
        i2t, t2i = (self._ranked_of(direction, answers, k, ties) for direction, answers in views)
        return i2t, t2i

    def _ranked_of_all(self, shares: Shares, k: int, ties: str) -> Iterator[Ranked]:
        """Of one's own images among the texts of all processes, and of one's own texts."""
        for direction, answers in self._of_all(shares):
            with failing_together(answers.device):
                ranked = self._ranked_of(direction, answers, k, ties)
            yield ranked

    @abstractmethod
    def _matrices(self, sim: Similarity) -> tuple[Tensor, Tensor]:
        """Both (n_images, n_texts)."""

    @abstractmethod
    def _best_of(self, direction: Direction, k: int) -> TopK:
        """The k best candidates of its queries, by re-ranked score."""

    @abstractmethod
    def _ranked_of(self, direction: Direction, answers: Similarity, k: int, ties: str) -> Ranked:
        """``answers``: the direction's queries with their labels."""

    def _question(self) -> str:
        """What processes have to have in common: the method, its numbers and its banks."""
        return f"{self!r} {[None if bank is None else _fingerprint(bank) for bank in (self._images, self._texts)]}"

    def _of_all(self, shares: Shares, whole: bool = False) -> Iterator[tuple[Direction, Similarity]]:
        """Either direction, checked, and its queries with their labels; ``whole``: with the candidates of all."""
        self._check(shares.sim, (len(shares.every[0]), len(shares.every[1])))
        given = zip(SIDES, (self._images, self._texts), strict=True)
        banks = [None if bank is None else _fitting(bank, name, shares.sim) for name, bank in given]
        own, first = (shares.every, (0, 0)) if whole else (shares.own, shares.first)
        for side, bank in enumerate(banks):
            candidates = shares.beside(own[1 - side], shares.every[side] if bank is None else bank)
            answers = shares.queries(side)
            asked = unlabelled(answers), candidates, bank is None, banks[1 - side]
            yield Direction(side, *asked, not whole, (shares.first[side], first[1 - side])), answers

    def _directions(self, sim: Similarity) -> tuple[Direction, Direction]:
        """Both, checked."""
        self._check(sim)
        sim = unlabelled(sim)
        banks = self._images, self._texts
        found = []
        for side, queries in enumerate((sim, sim.T)):
            bank = banks[side]
            references = queries.T if bank is None else _beside(queries.T, SIDES[side], bank)
            found.append(Direction(side, queries, references, bank is None, banks[1 - side]))
        return found[0], found[1]

    def _check(self, sim: Similarity, queries: tuple[int, int] | None = None) -> None:
        """Whether it has all it needs; ``queries``: how many there are, if not those of ``sim``."""
        if self.needs_embeddings and sim._inputs is None:
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
        for penalty in found:
            self._check_size_of(penalty)
        return found

    def _check_size_of(self, penalty: Tensor) -> None:
        if not bool(penalty.isfinite().all()):
            raise ValueError(f"scores: too large for {self!r}")

    def _matrices(self, sim: Similarity) -> tuple[Tensor, Tensor]:
        texts, images = self._checked(sim)
        with torch.no_grad():
            matrix = sim.detach().scores()
            i2t = torch.add(-texts, matrix, alpha=self._factor(0))
            return i2t, torch.add(-images[:, None], matrix, alpha=self._factor(1))

    def _best(self, sim: Similarity, k: int) -> tuple[TopK, TopK]:
        found = self.biases(sim)
        tops = zip((sim, sim.T), found, strict=True)
        i2t, t2i = (self._top(view, side, bias, k) for side, (view, bias) in enumerate(tops))
        return i2t, t2i

    def _ranked(self, sim: Similarity, k: int, ties: str) -> tuple[Ranked, Ranked]:
        biases = self.biases(sim)
        return sim.ranked(k, biases.texts, ties=ties), sim.T.ranked(k, biases.images, ties=ties)

    def _of_all(self, shares: Shares, whole: bool = False) -> Iterator[tuple[Direction, Similarity]]:
        # Numbers that hang on one another are found by every process for itself.
        return super()._of_all(shares, whole or not self._one_by_one)

    def _best_of(self, direction: Direction, k: int) -> TopK:
        return self._top(direction.queries, direction.side, self._bias(direction), k)

    def _top(self, queries: Similarity, side: int, bias: Tensor, k: int) -> TopK:
        top = queries.topk(min(k, queries.shape[1]), bias)
        return TopK(top.values * self._factor(side), top.indices)

    def _ranked_of(self, direction: Direction, answers: Similarity, k: int, ties: str) -> Ranked:
        return answers.ranked(k, self._bias(direction), ties=ties)

    @torch.no_grad()
    def _bias(self, direction: Direction) -> Tensor:
        """(candidates,)."""
        penalty = direction.of_all(self._penalty(direction))
        self._check_size_of(penalty)
        return -penalty / self._factor(direction.side)

    def biases(self, scores: Tensor | Similarity) -> RerankBiases:
        """Re-ranking as an additive bias: image→text ranks by ``A_ij + texts_j``, text→image by ``A_ij + images_i``."""
        texts, images = self._checked(as_similarity(scores))
        return RerankBiases(-texts / self._factor(0), -images / self._factor(1))


class BlockReranker(Reranker):
    """Re-rankers that turn the scores of some queries with all candidates into others, some queries at a time."""

    @abstractmethod
    def _prepare(self, direction: Direction) -> Any:
        """What has to be known of all scores before any is re-ranked."""

    @abstractmethod
    def _apply(self, scores: Tensor, rows: slice, known: Any) -> Tensor:
        """(b, candidates) scores of the queries ``rows``, which may be overwritten -> those to rank by."""

    def _matrices(self, sim: Similarity) -> tuple[Tensor, Tensor]:
        found = []
        for direction in self._directions(sim):
            out = torch.empty(direction.queries.shape, dtype=sim.dtype, device=sim.device)
            for rows, block in self._blocks(direction):
                out[rows] = block
            found.append(out)
        return found[0], found[1].T

    def _best_of(self, direction: Direction, k: int) -> TopK:
        width = min(k, direction.queries.shape[1])
        parts = [block.topk(width, 1) for _, block in self._blocks(direction)]
        return TopK(*(torch.cat(x) for x in zip(*parts, strict=True)))

    def _ranked_of(self, direction: Direction, answers: Similarity, k: int, ties: str) -> Ranked:
        own, others = (_or_numbers(ids, size) for ids, size in zip(answers.ids, answers.shape, strict=True))
        ranks, tops = [], []
        for rows, block in self._blocks(direction):
            rank, top = Similarity.from_scores(block, own[rows], others).ranked(k, ties=ties)
            ranks.append(rank)
            tops.append(top)
        width = max(x.shape[1] for x in ranks)
        padded = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in ranks]
        return torch.cat(padded), TopK(*(torch.cat(x) for x in zip(*tops, strict=True)))

    @torch.no_grad()
    def _blocks(self, direction: Direction) -> Iterator[tuple[slice, Tensor]]:
        known = self._prepare(direction)
        for rows, scores in direction.queries.blocks():
            yield rows, self._apply(scores, rows, known)


def _or_numbers(ids: Tensor | None, size: int) -> Tensor:
    return torch.arange(size) if ids is None else ids


def _beside(candidates: Similarity, name: str, bank: Tensor) -> Similarity:
    """The candidates, rows here, and the queries of the bank ``name``."""
    if candidates._inputs is not None:
        return against(candidates, _fitting(bank, name, candidates))
    bank = bank.to(candidates.device, candidates.dtype)
    bank, wanted = bank.T if name == "images" else bank, candidates.shape[0]
    if bank.shape[0] != wanted:
        raise ValueError(f"{name}: expected scores with the {wanted} candidates, got a bank of {bank.shape[0]}")
    return Similarity.from_scores(bank, *_apart(*bank.shape))


def _apart(n: int, m: int) -> Sequence[Tensor]:
    """Return ids by which no row matches a column."""
    return torch.arange(n + m).split((n, m))


def unlabelled(sim: Similarity) -> Similarity:
    """Return the same scores without a gradient, nothing matching, so that every column is a negative."""
    matrix = sim._matrix.detach()
    rows, cols = (x.to(sim.device) for x in _apart(*matrix.shape))
    matrix.pairs = Pairs(matrix.shape, (rows, cols), sim.device)
    return sim._seen(matrix, sim._side)


def against(sim: Similarity, cols: Tensor, more_rows: Tensor | None = None) -> Similarity:
    """Return the same embeddings as rows, with more below them, beside other columns; nothing matches."""
    assert sim._inputs is not None
    rows = sim._inputs[0].detach()
    if more_rows is not None:
        rows = torch.cat([x.to(sim.device, sim.dtype) for x in (rows, more_rows)])  # neither is rounded
    engine: Any = sim.engine if sim.engine in ("tiled", "triton") else "auto"
    ids = _apart(len(rows), len(cols))
    return Similarity(rows, cols, *ids, normalize=sim._matrix.bounded, engine=engine)


def _fingerprint(bank: Tensor) -> tuple[Any, ...]:
    content = bank.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return tuple(bank.shape), bank.dtype, zlib.crc32(content)


def _fitting(bank: Tensor, name: str, sim: Similarity) -> Tensor:
    """The bank ``name`` of embeddings, in the type of scores: half precision would round one of single precision."""
    assert sim._inputs is not None
    wanted = sim._inputs[0].shape[1]
    if bank.shape[1] != wanted:
        raise ValueError(f"{name}: expected embeddings of dimension {wanted}, got a bank of {bank.shape[1]}")
    return bank.to(sim.device, sim.dtype)


def as_similarity(scores: Tensor | Similarity) -> Similarity:
    """Scores without ids: re-ranking never asks who matches whom."""
    if isinstance(scores, Similarity):
        scores.check_finite()
        return scores
    n, m = (scores.shape[0], scores.shape[1]) if isinstance(scores, Tensor) and scores.dim() == 2 else (1, 1)
    ids = (torch.arange(n), torch.arange(m))
    return Similarity.from_scores(scores, *ids, check_finite=True)
