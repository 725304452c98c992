"""What all re-rankers share: one interface, query banks, and two ways to do without the matrix."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checks import check_matrix, check_size
from ..distributed import Shares, failing_together, world_size
from ..similarity import Similarity, TopK
from .direction import SIDES, Bias, Direction, Rule, as_similarity, fitting, unlabelled, with_bank

T = TypeVar("T", Tensor, TopK)
R = TypeVar("R", bound="Reranker")
Ranked = tuple[Tensor, TopK]  # ranks of the queries' positives, and their best candidates


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
        """The part of the images asking for texts."""
        return self[0]

    @property
    def t2i(self) -> T:
        """The part of the texts asking for images."""
        return self[1]


class RerankBiases(NamedTuple):
    """What re-ranking adds to a score: ``texts`` (M,) when an image asks for texts, ``images`` (N,) the other way."""

    texts: Tensor
    images: Tensor


class Reranker(ABC):
    """What every re-ranker can do. One of your own implements :meth:`rule`, and keeps its options under their names.

    Attributes:
        needs_bank: whether it requires queries other than the test queries, given by :meth:`fit`.
        takes_bank: whether it can use them.
        needs_embeddings: whether it compares images with images, or texts with texts, so that a matrix of scores is not
            enough.
        needs_all_candidates: whether what it computes for a candidate depends on the others, so that processes cannot
            share the work.
    """

    needs_bank: bool = False
    takes_bank: bool = True
    needs_embeddings: bool = False
    needs_all_candidates: bool = False

    _ranks_alone: bool = False  # a single query, without a bank
    _images: Tensor | None = None
    _texts: Tensor | None = None

    @abstractmethod
    def rule(self, direction: Direction) -> Rule:
        """Return what the candidates of a direction are ranked by; called without recording a gradient."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._options().items())})"

    def _options(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

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
        if not self.takes_bank:
            raise ValueError(f"images, texts: {type(self).__name__} has no use for a bank of queries")
        for name, bank in (("images", images), ("texts", texts)):
            if isinstance(bank, Similarity):
                raise TypeError(f"{name}: expected a tensor of embeddings or scores, got a Similarity")
            if bank is not None:
                check_matrix(name, bank, "(N, M)", check_finite=True)
        self._images, self._texts = (None if bank is None else bank.detach() for bank in (images, texts))
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return options and banks, which ``torch.save`` writes and ``torch.load(path, weights_only=True)`` reads."""
        return {"method": type(self).__name__, "options": self._options(), "images": self._images, "texts": self._texts}

    def load_state_dict(self: R, state: Mapping[str, Any]) -> R:
        """Take over the options and banks of :meth:`state_dict`, and return this object.

        Raises:
            ValueError: the state is another method's, or lacks something; nothing is taken over then.
        """
        missing = {"method", "options", "images", "texts"} - set(state)
        if missing or state["method"] != type(self).__name__:
            got = f"one without {', '.join(sorted(missing))}" if missing else f"one of {state['method']}"
            raise ValueError(f"state: expected a state of {type(self).__name__}, got {got}")
        loaded = type(self)(**state["options"])
        if self.takes_bank:
            loaded.fit(state["images"], state["texts"])
        for name, value in vars(loaded).items():
            setattr(self, name, value)
        return self

    # ----------------------------------------------------------------------------------------------- ranking

    def rerank(self, scores: Tensor | Similarity) -> Reranked[Tensor]:
        """Return re-ranked scores ``(image→text, text→image)``, both (n_images, n_texts), higher is better.

        The result is two full matrices. From embeddings too many for that, use :meth:`topk`, or
        ``retrieval_metrics(sim, reranker=self)``.

        Args:
            scores: (n_images, n_texts), higher is better, or a :class:`itrloss.Similarity` with images as rows.

        Raises:
            TypeError, ValueError: naming the argument; for nan and infinity; for a single query without a bank; for
                what the method needs and was not given.
        """
        sim = as_similarity(scores)
        directions = self._directions(sim)
        rules = self._rules(directions)
        results, matrix = [], None
        for direction, rule in zip(directions, rules, strict=True):
            if isinstance(rule, Bias):  # one product for both directions
                matrix = sim.detach().scores() if matrix is None else matrix
                bias = rule.bias[:, None] if direction.side else rule.bias
                results.append(torch.add(bias, matrix, alpha=rule.factor))
                continue
            found = torch.empty(direction.queries.shape, dtype=sim.dtype, device=sim.device)
            for rows, block in _blocks(direction, rule):
                found[rows] = block
            results.append(found.T if direction.side else found)
        return Reranked(results[0], results[1], self.transductive)

    def topk(self, scores: Tensor | Similarity, k: int, *, gather: bool = False) -> Reranked[TopK]:
        """Return the k best texts of each image and the k best images of each text, by re-ranked score.

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
            ranked = self._ranked_of_all(Shares(scores, f"{self._question()} {k}"), k, None)
        else:
            ranked = self._ranked(as_similarity(scores), k, None)
        i2t, t2i = (top for _, top in ranked)
        return Reranked(i2t, t2i, self.transductive)

    def biases(self, scores: Tensor | Similarity) -> RerankBiases:
        """Return re-ranking as biases: image→text ranks by ``A_ij + texts_j``, text→image by ``A_ij + images_i``.

        Raises:
            ValueError: as :meth:`rerank`, and for a method that is not a bias per candidate.
        """
        rules = self._rules(self._directions(as_similarity(scores)))
        texts, images = (rule.bias / rule.factor if isinstance(rule, Bias) else None for rule in rules)
        if texts is None or images is None:
            raise ValueError(f"biases: {type(self).__name__} is not a bias per candidate")
        return RerankBiases(texts, images)

    def _ranked(self, sim: Similarity, k: int, ties: str | None) -> list[Ranked]:
        """Return ranks (none for ``ties=None``) and best candidates of all images, and of all texts."""
        directions = self._directions(sim)
        views = zip(directions, self._rules(directions), (sim, sim.T), strict=True)
        return [_ranks(direction, rule, answers, k, ties) for direction, rule, answers in views]

    def _ranked_of_all(self, shares: Shares, k: int, ties: str | None) -> Iterator[Ranked]:
        """Yield those of one's own images among the texts of all processes, and of one's own texts."""
        for direction, answers in self._of_all(shares):
            with failing_together(answers.device):
                (rule,) = self._rules([direction])
                ranked = _ranks(direction, rule, answers, k, ties)
            yield ranked

    @torch.no_grad()
    def _rules(self, directions: Sequence[Direction]) -> list[Rule]:
        """Return the rule of each direction, with the biases of all candidates."""
        rules = []
        for direction, rule in zip(directions, self._rules_together(directions), strict=True):
            if isinstance(rule, Bias):
                rule = rule._replace(bias=direction.of_all(rule.bias))
                if not bool(rule.bias.isfinite().all()):
                    raise ValueError(f"scores: too large for {self!r}")
            rules.append(rule)
        return rules

    def _rules_together(self, directions: Sequence[Direction]) -> Sequence[Rule]:
        return [self.rule(direction) for direction in directions]

    # -------------------------------------------------------------------------------------------- directions

    def _question(self) -> str:
        """Return what processes have to have in common: the method, its options and its banks."""
        return f"{self!r} {[None if bank is None else _fingerprint(bank) for bank in (self._images, self._texts)]}"

    def _of_all(self, shares: Shares) -> Iterator[tuple[Direction, Similarity]]:
        """Yield either direction, checked, and its queries with their labels."""
        self._check(shares.sim, (len(shares.every[0]), len(shares.every[1])))
        named = zip(SIDES, (self._images, self._texts), strict=True)
        banks = [None if bank is None else fitting(bank, name, shares.sim) for name, bank in named]
        whole = self.needs_all_candidates
        own, first = (shares.every, (0, 0)) if whole else (shares.own, shares.first)
        for side, bank in enumerate(banks):
            candidates = shares.similarity(own[1 - side], shares.every[side] if bank is None else bank)
            answers = shares.queries(side)
            inputs = unlabelled(answers), candidates, bank is None, banks[1 - side]
            yield Direction(side, *inputs, not whole, (shares.first[side], first[1 - side])), answers

    def _directions(self, sim: Similarity) -> list[Direction]:
        """Return both, checked."""
        self._check(sim)
        sim, banks, directions = unlabelled(sim), (self._images, self._texts), []
        for side, queries in enumerate((sim, sim.T)):
            bank = banks[side]
            references = queries.T if bank is None else with_bank(queries.T, SIDES[side], bank)
            directions.append(Direction(side, queries, references, bank is None, banks[1 - side]))
        return directions

    def _check(self, sim: Similarity, queries: tuple[int, int] | None = None) -> None:
        """Raise an error unless it has all it needs; ``queries``: how many there are, if not those of ``sim``."""
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


# ------------------------------------------------------------------------------------------- ranking by a rule


@torch.no_grad()
def _blocks(direction: Direction, rule: Callable[[Tensor, slice], Tensor]) -> Iterator[tuple[slice, Tensor]]:
    for rows, scores in direction.queries.blocks():
        yield rows, rule(scores, rows)


def _ranks(direction: Direction, rule: Rule, answers: Similarity, k: int, ties: str | None) -> Ranked:
    """Return ranks and best candidates by re-ranked score; ``answers``: the direction's queries with their labels."""
    if isinstance(rule, Bias):
        ranks, top = answers.ranked(k, rule.bias / rule.factor, ties=ties)
        return ranks, TopK(top.values * rule.factor, top.indices)
    own, others = (torch.arange(n) if x is None else x for x, n in zip(answers.ids, answers.shape, strict=True))
    blocks = (Similarity.from_scores(block, own[rows], others) for rows, block in _blocks(direction, rule))
    ranks, tops = zip(*(block.ranked(k, ties=ties) for block in blocks), strict=True)
    width = max(x.shape[-1] for x in ranks)
    padded = [torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in ranks]
    return torch.cat(padded), TopK(*(torch.cat(x) for x in zip(*tops, strict=True)))


def _fingerprint(bank: Tensor) -> tuple[Any, ...]:
    content = bank.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return tuple(bank.shape), bank.dtype, zlib.crc32(content)
