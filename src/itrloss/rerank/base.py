"""The base class of all re-rankers: their interface, query banks, and ranking without the score
matrix.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checks import Options, all_finite, as_size, check_matrix, from_numpy, takes_queries
from ..checks.warnings import UnfitScalesWarning, are_the_same, warn
from ..engine.ranking import Ranking, Relevance, collected
from ..metrics.labels import with_ids
from ..metrics.matching import Part, existing_part, rows_of
from ..similarity import Similarity, TopK
from .direction import SIDES, Bias, Direction, Rule, against, fitting, no_match, unlabelled

_AT_ONCE = 2**20  # scores that are re-ranked at once, most of them in float64

T = TypeVar("T", Tensor, TopK)
R = TypeVar("R", bound="Reranker")


class Reranked(tuple[T, T], Generic[T]):
    """The pair of results ``(image→text, text→image)``, also as ``i2t`` and ``t2i``.

    ``transductive`` says, for each, whether it depends on which test queries were ranked together.
    """

    transductive: tuple[bool, bool]

    @property
    def i2t(self) -> T:
        """The result of image→text."""
        return self[0]

    @property
    def t2i(self) -> T:
        """The result of text→image."""
        return self[1]


class RerankBiases(NamedTuple):
    """What re-ranking adds to a score: ``texts`` (M,) for image→text, ``images`` (N,) for
    text→image.
    """

    texts: Tensor
    images: Tensor


class Reranker(Options, ABC):
    """The base class of re-rankers.

    A subclass implements :meth:`rule`, and declares its options in its body, as in ``scale: float =
    20.0``; with :func:`itrloss.option` they have bounds. They are checked whenever they are set. A
    constructor of its own stores each argument in an attribute of the same name.

    Attributes:
        needs_bank: whether it requires a bank of queries other than the test queries, see
            :meth:`fit`.
        takes_bank: whether it can use such a bank.
        needs_embeddings: whether a score matrix is not enough, as it compares images with images or
            texts with texts.
        needs_numbers: whether it asks for images and texts by their indices in the input, so that
            metrics may not fold repeated images before.
        cosine_options: names of the options whose defaults are made for cosines. With other scores
            they have to be chosen, and a :class:`itrloss.SuspiciousInputWarning` says so.
    """

    needs_bank: ClassVar[bool] = False
    takes_bank: ClassVar[bool] = True
    needs_embeddings: ClassVar[bool] = False
    needs_numbers: ClassVar[bool] = False
    cosine_options: ClassVar[tuple[str, ...]] = ()

    _images = None  # the banks, tensors (B, D), or (N, M) of scores
    _texts = None

    @abstractmethod
    def rule(self, direction: Direction) -> Rule:
        """Return how the candidates of a direction are ranked: a :class:`Bias`, or a function of
        blocks of scores.

        Called under ``torch.no_grad()``. A bias never forms the score matrix, and :meth:`biases`
        returns it.

        Args:
            direction: the similarities of queries, candidates and references.

        Returns:
            A ``Bias``; or a function of (B, candidates) scores, which it may overwrite, and the
            slice of the queries that they belong to. It returns (B, candidates) scores to rank by,
            higher is better. A bias or scores in float64 are ranked in float64.
        """

    def __repr__(self) -> str:
        """Return the method and its options, as they are passed to it."""
        options = ", ".join(f"{name}={value!r}" for name, value in self._options().items())
        return f"{type(self).__name__}({options})"

    def _options(self) -> dict[str, object]:
        """Return the options by name."""
        return {name: x for name, x in vars(self).items() if not name.startswith("_")}

    @property
    def transductive(self) -> tuple[bool, bool]:
        """Whether results depend on which test queries are ranked together: (image→text,
        text→image).
        """
        return self._images is None, self._texts is None

    @takes_queries
    def fit(self: R, images: Tensor | None = None, texts: Tensor | None = None) -> R:
        """Use a bank of queries as reference instead of the test queries, and return this object.

        A direction without a bank keeps the test queries. Another call replaces both banks.

        Args:
            images: bank of image→text, floating point. To re-rank a ``Similarity`` of embeddings:
                (B, D) image embeddings of the same model. To re-rank scores: (B, n_texts) scores
                with the texts to be ranked.
            texts: bank of text→image: (B, D) embeddings, or (n_images, B) scores with the images to
                be ranked.

        Raises:
            TypeError, ValueError: naming the argument; when re-ranking, if a bank does not fit the
                scores.
        """
        if not self.takes_bank:
            name = type(self).__name__
            raise ValueError(f"images, texts: {name} has no use for a bank of queries")
        banks = []
        for name, bank in zip(SIDES, (images, texts), strict=True):
            if bank is not None:
                bank = from_numpy(bank)
                check_matrix(name, bank, "(N, M)", check_finite=True)
                bank = bank.detach()
            banks.append(bank)
        self._images, self._texts = banks
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return options and banks as a dictionary that ``torch.load(path, weights_only=True)`` can
        read.
        """
        return {
            "method": type(self).__name__,
            "options": self._options(),
            "images": self._images,
            "texts": self._texts,
        }

    def load_state_dict(self: R, state: Mapping[str, Any]) -> R:
        """Restore the options and banks of :meth:`state_dict`, and return this object.

        Raises:
            ValueError: the state is another method's or incomplete; this object is unchanged.
        """
        own = self.state_dict()
        is_alike = state.keys() == own.keys() and state["method"] == own["method"]
        if not is_alike or state["options"].keys() != own["options"].keys():
            got = f"one of {state.get('method')} with the options {state.get('options')}"
            raise ValueError(
                f"state: expected a state of {own['method']}, got {got}; "
                f"it has {', '.join(own)} and the options {', '.join(own['options'])}"
            )
        loaded = type(self)(**self._options() | state["options"])
        if self.takes_bank:
            loaded.fit(state["images"], state["texts"])
        vars(self).update(vars(loaded))
        return self

    @torch.no_grad()
    def rerank(self, scores: Tensor | Similarity) -> Reranked[Tensor]:
        """Return re-ranked scores ``(image→text, text→image)``, both (n_images, n_texts), higher is
        better; 0 for an image or text that does not exist.

        :meth:`topk` and ``retrieval_metrics(sim, reranker=self)`` need no matrix.

        They are rounded to the dtype of the scores. :meth:`topk` and ``retrieval_metrics`` rank
        before that.

        Args:
            scores: (n_images, n_texts), higher is better, or a :class:`itrloss.Similarity` with
                images as rows.

        Raises:
            TypeError, ValueError: naming the argument; for nan and infinity; for a single query
                without a bank; for a missing bank or embeddings that the method needs.
        """
        part = self._part(scores)
        results = []
        for own, direction, rule in self._ruled(part):
            queries = direction.queries
            result = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
            for rows, block in queries.blocks():
                result[rows] = rule(block, rows)
                if isinstance(rule, Bias) and not all_finite(result[rows]):
                    raise ValueError(f"scores: too large for {self!r}")
            if result.shape != own.shape:
                some = result
                result = some.new_zeros(own.shape)
                result[own.rows[:, None], own.cols] = some
            results.append(result.T if direction.side else result)
        return self._pair(results)

    def topk(self, scores: Tensor | Similarity, k: int) -> Reranked[TopK]:
        """Return the k best texts of each image and the k best images of each text, by re-ranked
        score.

        Args:
            scores: (n_images, n_texts), or a :class:`itrloss.Similarity`.
            k: number of candidates.

        Returns:
            ``(image→text, text→image)``, each with ``values`` and ``indices`` of shape (queries,
            k). A direction with fewer than k candidates returns all of them; where fewer exist,
            -inf and -1, as for a query that does not exist. For a tiled ``Similarity`` the matrix
            is never formed.

        Raises:
            TypeError, ValueError: as :meth:`rerank`.
        """
        k = as_size("k", k)
        best = []
        for own, direction, rule in self._ruled(self._part(scores)):
            values, indices = _ranking(direction, rule, k, None, None).top
            width = min(k, own.shape[1])
            values = own.among_all(values, width, -torch.inf)
            best.append(TopK(values, own.among_all(own.cols[indices], width, -1)))
        return self._pair(best)

    def _part(self, scores: Tensor | Similarity) -> Part:
        """Return the images and texts that exist, of checked scores."""
        return existing_part(with_ids("scores", scores, None, None, by_ids=False))

    def _pair(self, results: Iterable[T]) -> Reranked[T]:
        """Return the results of both directions, which say whether they are transductive."""
        pair = Reranked(results)
        pair.transductive = self.transductive
        return pair

    def biases(self, scores: Tensor | Similarity) -> RerankBiases:
        """Return biases to rank by: ``A_ij + texts_j`` for image→text, ``A_ij + images_i`` for
        text→image; 0 for an image or text that does not exist.

        Raises:
            ValueError: as :meth:`rerank`, and for a method that is not a bias per candidate.
        """
        biases = []
        for own, _, rule in self._ruled(self._part(scores)):
            if isinstance(rule, Bias):
                bias = (rule.bias / rule.factor).to(own.sim.dtype)
                biases.append(own.T.among_all(bias[:, None], 1, 0.0)[:, 0])
        if len(biases) < 2:
            raise ValueError(f"biases: {type(self).__name__} is not a bias per candidate")
        return RerankBiases(*biases)

    def ranked(
        self, part: Part, k: int, ties: str | None, relevance: tuple[Relevance, Relevance]
    ) -> list[Ranking]:
        """Return the ranks and the k best candidates of all images, and of all texts, of a part;
        see :meth:`itrloss.Similarity.ranked`.

        ``relevance``, of the images and of the texts, is for the ranks alone: re-ranking sees all
        scores.
        """
        rankings = []
        for (_, direction, rule), right in zip(self._ruled(part), relevance, strict=True):
            rankings.append(_ranking(direction, rule, k, ties, right))
        return rankings

    @torch.no_grad()
    def _ruled(self, part: Part) -> list[tuple[Part, Direction, Rule]]:
        """Return, for both directions, a part with the queries as rows, its similarities and how
        they are re-ranked; raise an error unless the method can re-rank them.
        """
        directions = self._directions(part)
        self._warn_of_banks(directions)
        if has_defaults_for_cosines(self) and go_beyond_cosines(directions[0].queries):
            self._warn_of_units()
        ruled = []
        for own, direction in zip((part, part.T), directions, strict=True):
            rule = self.rule(direction)
            if not callable(rule):
                expected = "a Bias, or a function of scores and rows"
                raise TypeError(f"rule: expected {expected}, got {type(rule).__name__}")
            if isinstance(rule, Bias):
                bias = rule.bias.to(direction.queries.dtype)
                if not bool(bias.isfinite().all()):
                    raise ValueError(f"scores: too large for {self!r}")
            ruled.append((own, direction, rule))
        return ruled

    @torch.no_grad()
    def _directions(self, part: Part) -> list[Direction]:
        """Return image→text and text→image.

        Raises an error unless the method can re-rank the part.
        """
        self._check(part.sim)
        images = unlabelled(part.sim)
        views = images, images.T  # of the same matrix, so that all sums take one product
        banks = []
        for side, bank in enumerate((self._images, self._texts)):
            banks.append(None if bank is None else fitting(bank, side, part))
        directions = []
        for side, own in enumerate((part, part.T)):
            candidates = views[1 - side]
            bank = banks[side]
            if bank is not None:
                candidates = against(candidates, bank)
            gallery = banks[1 - side]
            numbers = own.rows, own.cols
            directions.append(
                Direction(side, views[side], candidates, bank is None, gallery, numbers)
            )
        return directions

    def _warn_of_units(self) -> None:
        """Warn of scores that are no cosines."""
        options = ", ".join(self.cosine_options)
        how = " (calibrate)" if hasattr(self, "calibrate") else ""
        warn(
            f"scores: values beyond -1 to 1, as of logits or distances, where "
            f"{type(self).__name__} has defaults ({options}) for cosine similarities. Divide "
            f"logits by the model's logit scale, or choose {options} on validation pairs{how}",
            UnfitScalesWarning,
        )

    def _warn_of_banks(self, directions: Sequence[Direction]) -> None:
        """Warn if a bank has the queries that are ranked."""
        for name, direction, other in zip(SIDES, directions, directions[::-1], strict=True):
            bank = other.gallery
            if bank is None:
                continue
            if direction.queries.embeddings is None:
                bank = bank.T
            if are_the_same(rows_of(direction.queries), bank):
                warn(
                    f"{name}: the bank has {name} of the test set, so that test queries see one "
                    "another; fit others, such as the training set's, or leave the bank out"
                )

    def _check(self, sim: Similarity) -> None:
        """Raise an error for a missing bank or embeddings."""
        method = type(self).__name__
        if self.needs_embeddings and sim.embeddings is None:
            needed = (
                "a Similarity of embeddings: images are compared with images, or texts with texts"
            )
            raise ValueError(f"scores: {method} needs {needed}; got a matrix of scores")
        for name, transductive, count in zip(SIDES, self.transductive, sim.shape, strict=True):
            advice = f"call fit({name}=...) first"
            if transductive and self.needs_bank:
                raise ValueError(f"{name}: {method} needs a bank of queries; {advice}")
            if transductive and self.takes_bank and count == 1:
                needed = "a single query needs a bank to be compared with"
                raise ValueError(f"scores: {needed}; {advice}")


def has_defaults_for_cosines(reranker: Reranker) -> bool:
    """Return whether a method has options for cosines, none of which was chosen."""
    parameters = inspect.signature(type(reranker)).parameters
    for name in reranker.cosine_options:
        if name not in parameters or getattr(reranker, name) != parameters[name].default:
            return False
    return bool(reranker.cosine_options)


@torch.no_grad()
def go_beyond_cosines(sim: Similarity) -> bool:
    """Return whether scores of the first queries are no cosines.

    The host reads one number, of a device that has just answered whether scores are finite.
    """
    if sim.normalizes:
        return False
    like = rows_of(sim)
    largest = 1 + max(1e-3, 2 * torch.finfo(like.dtype).eps)
    _, block = next(sim.blocks(_AT_ONCE), (None, like[:0]))
    return bool((block.abs() > largest).any())


@torch.no_grad()
def _ranking(
    direction: Direction, rule: Rule, k: int, ties: str | None, relevance: Relevance | None
) -> Ranking:
    """Return ranks and best candidates by re-ranked score."""
    queries = direction.queries
    if isinstance(rule, Bias):
        bias = rule.bias / rule.factor
        ranks, top, grades = queries.ranked(k, bias, ties=ties, relevance=relevance)
        return Ranking(ranks, TopK(top.values * rule.factor, top.indices), grades)

    def parts() -> Iterator[tuple[slice, Ranking]]:
        """Yield slices of the queries, each with its ranking."""
        for rows, block in queries.blocks(_AT_ONCE):
            scores = rule(block, rows)
            scored = Similarity.from_scores(scores, *no_match(scores.shape, scores.device))
            own = None if relevance is None else relevance.part(rows)
            yield rows, scored.ranked(k, ties=ties, relevance=own)

    ranks, top, grades = collected(queries.shape[0], parts())
    return Ranking(ranks, TopK(top.values.to(queries.dtype), top.indices), grades)
