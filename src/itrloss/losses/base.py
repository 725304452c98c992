"""What all losses share: options, what processes agree on, and the call forms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..anchors import Anchors
from ..checks import (
    IMAGES_AND_TEXTS,
    CheckedModule,
    IdsLike,
    Names,
    Option,
    as_labels,
    check_embeddings,
    check_matrix,
    from_numpy,
    in_own_words,
    kind_of,
    no_parameter,
    one_of,
    option,
)
from ..checks.warnings import (
    may_be_read,
    warn,
    warn_of_ids,
    warn_of_numbers_in_the_batch,
    warn_of_units,
    warn_of_vectors,
)
from ..distributed import ProcessGroup, consensus, digest, padded, world_size
from ..distributed.collectives import replicated, total
from ..engine.question import Value
from ..engine.related import PassedIds, Related
from ..engine.relation import Rule, missing_mask
from ..functional import Reduction, Values
from ..memory import CoupledMemory, MemorySimilarity
from ..similarity import Directions, Engine, Similarity, as_directions
from ..torch_versions import is_compiling
from .telemetry import describe, describe_memory

Parameter = TypeVar("Parameter", bound=Value)  # of a loss, or what is computed from one
_EMPTY_CALLS = 100  # with an empty memory, until there is a warning
LEAST_LOG = -1e30  # in place of the logarithm of 0, whose gradient would be nan


class Loss(CheckedModule):
    """A module with the options that all losses have.

    Of a loss of this library, parameters are refused that it does not learn: those behind its
    options and in ``learnt``.
    """

    learnt: ClassVar[tuple[str, ...]] = ()

    _: KW_ONLY
    reduction: Reduction = "mean"
    gather: bool = option(default=False, local=True)
    process_group: ProcessGroup = option(default=None, local=True)

    def __post_init__(self) -> None:
        """Make the parameters of the options that are learnt."""
        super().__post_init__()
        if not getattr(self, "learnable", False):
            return
        for declared in self._all_options.values():
            if declared.learnt is not None and not declared.form_of:
                name = declared.learnt.parameter
                number = float(self._number_in(name, declared.name))
                # (1,): FSDP and the like do not shard 0-dim parameters.
                setattr(self, name, nn.Parameter(torch.full((1,), number)))
                self.__dict__["_made"] = self._made | {declared.name}

    def reset_parameters(self) -> None:
        """Give parameters the values that they had first, or of learnt options those that were set
        last, as is needed after ``to_empty``. Parameters that a model shares stay.
        """
        for name in self._made:
            self._fill(name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; raise an AttributeError for a parameter that a loss does not learn."""
        is_ours = type(self).__module__.startswith("itrloss.")
        known = name in self._all_options or name in self.learnt
        if is_ours and isinstance(value, nn.Parameter) and not known:
            options = [x.name for x in self._all_options.values() if x.learnt is not None]
            raise no_parameter(type(self).__name__, name, [*self.learnt, *options])
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy, of the same process group, which cannot be copied."""
        memo[id(self.process_group)] = self.process_group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = self.__reduce_ex__(4)[2]
        twin.__setstate__(copy.deepcopy(state, memo))
        return twin

    @property
    def sharded(self) -> bool:
        """Whether the batch is spread over several processes."""
        return bool(self.gather) and world_size(self.process_group) > 1

    def described(self) -> str:
        """Return what has to be the same in all processes, in words; empty for one process."""
        if not self.sharded or is_compiling():
            return ""
        options = {}
        for name, declared in self._all_options.items():
            value = getattr(self, name)
            if not declared.local and not isinstance(value, Tensor):
                options[name] = value
        trained = [name for name, p in self.named_parameters() if p.requires_grad]
        values = [f"{name} {digest(p)}" for name, p in self.named_parameters()]
        mode = "training" if self.training else "evaluation"
        return (
            f"{type(self).__name__} {options} in {mode} mode, parameters trained {trained}, "
            f"digests of parameters {values}"
        )

    def agree(self, check: Callable[[], str]) -> None:
        """Run a check of the input; in a job of several processes, all raise an error or none.

        They do if the check fails in one of them, or if it returns different texts.
        """
        self._agree(check)

    def _agree(self, check: Callable[[], str], *ids: IdsLike) -> None:
        """Run a check as :meth:`agree` does; it is an error, too, if some processes have strings as
        ids and others integers.
        """
        if not self.sharded or is_compiling():
            check()
            return
        with consensus(self.process_group) as agreed:
            agreed.text = check()
            agreed.kinds = [kind_of(x) for x in ids]

    def shared(self, x: Parameter) -> Parameter:
        """Return a parameter of this loss, or what is computed from one.

        In a job of several processes its gradient is the mean of their gradients. A number is
        returned as it is.
        """
        if not self.gather or not isinstance(x, Tensor) or not x.requires_grad:
            return x
        return replicated(x, self.process_group) if self.sharded else x  # type: ignore[return-value]

    def _of_samples(
        self,
        inputs: Sequence[Tensor | None],  # (B, ...) each
        function: Callable[..., Values],
    ) -> Values:
        """Return the loss of samples that do not depend on one another.

        ``function(*inputs, reduction)`` returns the loss of this process, with ``"none"`` a tensor
        (B,) or a tuple of such tensors.
        """
        if not self.sharded:
            return function(*inputs, self.reduction)
        values: list[Tensor] = []

        def computed() -> str:
            """Compute the values; return what has to be the same in all processes."""
            # a process without samples computes one, which is dropped
            some = [x if x is None or len(x) else padded(x, 1) for x in inputs]
            result = function(*some, "none")
            values.extend(result if isinstance(result, tuple) else [result])
            given = [x is not None for x in inputs]
            kind = f"{values[0].dtype}, gradient {values[0].requires_grad}"
            return f"{kind}, inputs given {given}, {self.described()}"

        self.agree(computed)
        assert inputs[0] is not None
        size = len(inputs[0])
        values = [x[:size] for x in values]
        if self.reduction == "none":
            return tuple(values) if len(values) > 1 else values[0]
        whole = torch.cat(values).sum()
        count = torch.full_like(whole, size)
        loss, samples = total(torch.stack([whole, count]), self.process_group)
        return loss / samples.clamp_min(1) if self.reduction == "mean" else loss


def as_figures(value: bool | dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the figures that ``telemetry`` is set to; none for True and False."""
    if isinstance(value, dict):
        return value
    one_of("telemetry", value, True, False)
    return {}


class SimilarityLoss(Loss):
    """The options that all losses of similarities share, see :class:`PairLoss`."""

    _looked = False  # whether a batch was looked at for what is suspicious
    _observed = False  # whether figures are kept

    _: KW_ONLY
    engine: Engine = option(default="auto", local=True)
    check_finite: bool = option(default=False, local=True)
    # The figures of the last call; empty without the option. It may be set later, to True or False.
    telemetry: dict[str, Tensor] = option(default=False, converter=as_figures, local=True)

    def _set_option(self, declared: Option, value: object) -> None:
        """Check and keep an option; with ``telemetry``, keep whether there are figures."""
        super()._set_option(declared, value)
        if declared.name == "telemetry" and not isinstance(value, dict):
            self._observed = bool(value)

    @property
    def in_cosines(self) -> bool:
        """Whether the options are for scores of the size of cosines; a warning says if given scores
        are larger. A temperature tells it; a loss with a scale or a margin says it itself.
        """
        temperature = getattr(self, "temperature", None)
        return temperature is not None and bool(temperature < 0.5)

    @property
    def active_margin(self) -> float:
        """How far a positive should be ahead of its hardest negative, for the figure ``active``."""
        return 0.0

    def described(self) -> str:
        """Return what has to be the same; telemetry is, as its figures are of all processes."""
        return f"{super().described()}, telemetry {bool(self._observed)}"

    def _between(
        self,
        tensors: Sequence[Tensor],  # embeddings of rows and columns, or scores
        ids: PassedIds,
        names: Names,
        check: Callable[[], str] | None = None,
        **options: Any,
    ) -> Similarity:
        """Return the similarity of embeddings or of scores; in a job, with the columns of all
        processes.

        ``check``: see :meth:`agree`. ``options``: of :class:`Similarity`.
        """
        options |= {"names": names, "engine": self.engine, "check_finite": self.check_finite}
        if self.gather:
            options["process_group"] = self.process_group
            options["same"] = partial(self._same, check)
        elif check is not None:
            check()
        if len(tensors) == 1:
            make = Similarity.sharded_scores if self.gather else Similarity.from_scores
            return make(tensors[0], *ids, **options)
        rows, cols = tensors
        if self.gather:
            return Similarity.sharded(rows, cols, *ids, **options)
        if not (isinstance(rows, Tensor) and isinstance(cols, Tensor)):
            # A Similarity takes NumPy arrays, too, but training on them would train nothing.
            check_embeddings(rows, cols, False, names)
        return Similarity(rows, cols, *ids, **options)

    def _same(self, check: Callable[[], str] | None) -> str:
        """Check the input; return what has to be the same in all processes."""
        words = "" if check is None else check()
        return f"{words} {self.described()}"

    def _with_telemetry(self, loss: Values, sim: Similarity | MemorySimilarity) -> Values:
        """Return a loss; with the option ``telemetry``, keep the figures of its similarities.

        The first batch on the CPU is looked at for what is suspicious. Values of one direction
        alone are a tensor.
        """
        if not self._looked:
            batch = sim.batch if isinstance(sim, MemorySimilarity) else sim
            if self.is_to_look(batch):
                self._look(loss, batch)
        if self._observed and not is_compiling():
            if isinstance(sim, MemorySimilarity):
                self.telemetry = describe_memory(sim, self.process_group)
            else:
                self.telemetry = describe(sim, self.active_margin)
        if isinstance(loss, tuple) and len(loss) == 1:
            return loss[0]
        return loss

    def is_to_look(self, sim: Similarity) -> bool:
        """Return whether no batch was looked at yet, and this one is on the CPU, uncompiled."""
        return not (self._looked or is_compiling()) and may_be_read(sim)

    @torch.no_grad()  # or a checkpoint would find more saved tensors than in the second pass
    def _look(self, loss: Values, sim: Similarity) -> None:
        """Warn of a batch that is probably not what was meant."""
        self._looked = True
        name = type(self).__name__
        if sim.pairs.is_known:
            warn_of_ids(name, loss, sim)
        if sim.share is not None:
            warn_of_numbers_in_the_batch(name, sim.share)
        warn_of_vectors(sim)
        if self.in_cosines:
            warn_of_units(name, sim)


class DirectedLoss(SimilarityLoss):
    """A loss of images, of texts, or of both as anchors: the option ``directions``, see
    :class:`PairLoss`.
    """

    _: KW_ONLY
    directions: Directions = option(default="both", converter=as_directions)


class Passed(NamedTuple):
    """What a loss of pairs is called with; None for what is not there."""

    images: Tensor | Similarity | None  # or all of the input, or one or two views of one set
    texts: Tensor | None
    image_ids: IdsLike | None
    text_ids: IdsLike | None
    scores: Tensor | None = None
    image_groups: IdsLike | None = None
    text_groups: IdsLike | None = None
    related: Related | None = None  # what else decides who matches or may be a negative

    @property
    def rows(self) -> Any:
        """The images, or the scores in their place."""
        return self.images if self.scores is None else self.scores


class PairLoss(DirectedLoss):
    """A loss of the similarities of images and texts; the base of the losses here and of your own.

    A subclass implements ``compute(sim)`` of a :class:`Similarity` with images as rows: a formula
    of ``self.anchors(sim)``, the anchors whose values count, which ends with their ``reduce(values,
    self.reduction)``. Its options are declared in its body, as in ``margin: float = 0.2``; with
    :func:`itrloss.option` they have bounds. They are attributes, which may be set later, and are
    checked whenever they are set. Parameters of its own are made in ``__post_init__``, which calls
    that of this class first, and read by :meth:`shared`.

    Args:
        directions: ``"both"``, or ``"image-text"`` for the images alone as anchors, with texts as
            candidates (as queries and documents have one direction), or ``"text-image"``. Synonyms
            of the first are ``"i2t"``, ``"v2t"`` of videos in place of images, and
            ``"query-document"``; of the second ``"t2i"``, ``"t2v"`` and ``"document-query"``.
        groups: with ``image_groups`` in the call, ``"same"`` takes negatives of the same group
            alone, ``"other"`` those of other groups.
        normalize: scale embeddings to unit length; False: scores are inner products.
        reduction: ``"mean"`` (over image anchors plus over text anchors), ``"sum"`` or ``"none"``
            (a pair of per-anchor values: images (N,), texts (M,); of one direction, a tensor).
        engine, check_finite: see :class:`Similarity`. One in place of the input keeps its own
            engine, and its own ``normalize``.
        telemetry: keep what :func:`describe` says of each call's similarity in the attribute
            ``telemetry``, a dictionary. It costs a few passes over the scores, and is left out
            under ``torch.compile``.
        gather: in a ``torch.distributed`` job, the loss of the batches of all processes, on each of
            them: every other process's pairs are negatives, too (or positives, where ids are
            equal). Each process does its part of the work, and gets the values of its own anchors
            with ``reduction="none"``, and holds the texts of all. See :doc:`multi_gpu`.
        process_group: the processes that take part; by default, all.
    """

    _: KW_ONLY
    groups: Rule = "same"
    normalize: bool = True

    def anchors(self, sim: Similarity) -> Anchors:
        """Return the anchors whose values count, of a similarity with images as rows."""
        return sim.towards(self.directions)

    def forward(  # noqa: PLR0913 (input, by keyword)
        self,
        images: Tensor | Similarity | None = None,
        texts: Tensor | None = None,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        scores: Tensor | None = None,
        image_groups: IdsLike | None = None,
        text_groups: IdsLike | None = None,
        matches: Tensor | None = None,
        labels: IdsLike | None = None,
        targets: IdsLike | None = None,
        **words: Any,
    ) -> Values:
        """Return the loss of embeddings, of a score matrix, or of a :class:`itrloss.Similarity`.

        Args:
            images: (N, D) embeddings of any length; or a ``Similarity``, images as rows, in place
                of everything else.
            texts: (M, D) embeddings.
            image_ids, text_ids: (N,) and (M,) integers or strings, as tensors, NumPy arrays or
                lists; equal ids are positives. If both are left
                out, image i matches text i. ``text_ids`` alone refer to the images by their number.
                With sets of labels, (N, k) and (M, l), an image and a text match if they share
                one; :data:`itrloss.NO_ID` fills sets up.
            scores: (N, M) similarities from another model, instead of ``images`` and ``texts``.
                Rows are images: pass the transpose, ``scores.T``, of a matrix of texts with videos,
                which a square one does not tell. They are cosines or of that size, not logits,
                unless the loss's temperature or margin are meant for others.
            image_groups, text_groups: (N,) and (M,) integers or strings, such as data sets or
                documents: who matches goes by ids, but an image and a text are negatives only in
                the same group, or with the option ``groups="other"`` only in different ones;
                otherwise they are nothing to each other. :data:`itrloss.NO_ID` is open to all. If
                those of texts are left out, they are the images'.
            matches: (N, M), in place of ids and groups: above 0 where image and text match, 0 where
                they are negatives, and nan where they are neither; bool will do, and so will a
                NumPy array or a sparse matrix of SciPy, of which a dense one is made. Floats other
                than 1 are weights of matches: means over positives are by weights, and sums
                multiply by them, but for log-sum-exps. Integers are 0 or 1.
                ``TripletLoss(mining="all")`` refuses weights.
            labels: (N,) integers or strings, or (N, k) sets, in place of ids, groups and
                ``matches``: all embeddings are of one set, in which equal labels match and an
                item is no pair with itself. ``loss(z, labels=y)`` is of (N, D) embeddings,
                ``loss(z1, z2, labels=y)`` of two views (N, D) of the same items, whose 2 N
                embeddings are one set, and ``loss(scores=s, labels=y)`` of scores (N, N). Each
                item is an anchor once, so that ``"both"`` is one direction. Two views without
                classes, as of SimCLR, have ``labels=range(N)``.
            targets: (N,) integers, in place of ids, groups and ``matches``, as in
                ``torch.nn.functional.cross_entropy``: the number of the text that each image
                matches, a column of ``scores``, or -100 for an image that does not count; no other
                text matches it. Images alone are anchors, so that ``"both"`` is one direction. In a
                job, texts are those of this process, and columns those of all.
            words: ``queries``, ``documents``, ``query_ids``, ``document_ids``, ``query_groups`` and
                ``document_groups`` are other names of images and texts, of their ids and groups.

        The first batch that is on the CPU and not compiled is looked at: a
        :class:`itrloss.SuspiciousInputWarning` says if no image has a positive, if none has a
        negative and the loss is 0, and if scores look like logits or embeddings.

        Returns:
            A 0-dim float32 tensor (float64 for float64 input), or per-anchor values with
            ``reduction="none"``.
        """
        passed = Passed(images, texts, image_ids, text_ids, scores, image_groups, text_groups)
        passed = self._parsed(passed, words, matches, labels, targets)
        sim = self._similarity(passed)
        return self._with_telemetry(self.compute(sim), sim)

    def _parsed(
        self,
        passed: Passed,
        words: Mapping[str, object],
        matches: Tensor | None = None,
        labels: IdsLike | None = None,
        targets: IdsLike | None = None,
    ) -> Passed:
        """Return the input with images and texts by their names, one set as both, and what else
        decides who matches or may be a negative.
        """
        if words:
            own = dict(zip(Passed._fields, passed, strict=True))
            passed = Passed(**in_own_words(self.forward, words, **own))
        groups = passed.image_groups, passed.text_groups
        has_groups = groups[0] is not None or groups[1] is not None
        if has_groups or matches is not None or targets is not None:
            dense = getattr(matches, "toarray", lambda: matches)()  # of a sparse matrix of SciPy
            related = Related(groups, self.groups, from_numpy(dense), targets=targets)
            passed = passed._replace(related=related)
        return passed if labels is None else self._one_set(passed, labels)

    def _one_set(self, passed: Passed, labels: IdsLike) -> Passed:
        """Return one set, of one or two views, as images and as texts, with its labels as ids; or
        scores with these.
        """
        own = passed.rows
        texts = passed.texts
        scores = passed.scores
        numbers: list[Tensor] = []

        def check() -> str:
            """Check the input; return what has to be the same in all processes."""
            check_no_others("labels, which say who matches", passed)
            if scores is not None:
                check_matrix("scores", scores, "(N, N)", empty=self.sharded)
                if not self.sharded and len(scores) != scores.shape[1]:
                    raise ValueError(
                        "scores: expected shape (N, N), as there are labels of one set, got "
                        f"{tuple(scores.shape)}"
                    )
            else:
                second = own if texts is None else texts
                check_embeddings(own, second, False, IMAGES_AND_TEXTS, empty=self.sharded)
                if len(second) != len(own):
                    raise ValueError(
                        f"texts: expected another view of the same {len(own)} items, as there are "
                        f"labels, got {len(second)}"
                    )
            numbers.append(as_labels("labels", labels, len(own), own.device))
            return f"labels of one set, a second view {texts is not None}"

        self._agree(check, labels)
        (known,) = numbers
        related = Related(one_set=True)
        if scores is not None:
            return passed._replace(image_ids=known, text_ids=known, related=related)
        if texts is not None:
            own = torch.cat([own, texts])
            known = torch.cat([known, known])
        return Passed(own, own, known, known, related=related)

    def compute(self, sim: Similarity) -> Values:
        """Return the loss of similarities, with images as rows and texts as columns.

        Every subclass implements it, and applies ``self.reduction``. One whose ``forward`` takes
        further input may add parameters.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement compute(sim)")

    def _similarity(self, passed: Passed, check: Callable[[], str] | None = None) -> Similarity:
        """Return the input as a similarity.

        ``check`` checks what else there is, and returns what has to be the same in all processes.
        """

        def checked() -> str:
            """Check the input; return what has to be the same in all processes."""
            self._check_alone(passed)
            return "" if check is None else check()

        images = passed.images
        ids = passed.image_ids, passed.text_ids
        options: dict[str, Any] = {"related": passed.related}
        if passed.scores is not None:
            return self._between((passed.scores,), ids, IMAGES_AND_TEXTS, checked, **options)
        if isinstance(images, Similarity):
            self.agree(checked)
            if self.check_finite:
                images.check_finite()
            return images
        # Similarity refuses None, which is no tensor, in all processes at once.
        tensors: Any = images, passed.texts
        options["normalize"] = self.normalize
        return self._between(tensors, ids, IMAGES_AND_TEXTS, check, **options)

    def _check_alone(self, passed: Passed) -> None:
        """Raise an error for other input with scores or with a Similarity."""
        if passed.scores is not None:
            if passed.images is not None or passed.texts is not None:
                raise ValueError("scores: expected either scores or images and texts, got both")
            check_matrix("scores", passed.scores, "(N, M)", empty=self.sharded)
            return
        if self.sharded:
            expected = "expected embeddings or scores, as a Similarity cannot be gathered"
            raise ValueError(f"gather: {expected}")
        check_no_others(
            "a Similarity, which stands for all of the input", passed, texts=passed.texts
        )


def check_no_others(there: str, passed: Passed, **others: object) -> None:
    """Raise a ValueError for input beside what says all that it does, and is ``there``."""
    others["image_ids"] = passed.image_ids
    others["text_ids"] = passed.text_ids
    others["image_groups, text_groups, matches, targets"] = passed.related
    for name, x in others.items():
        if x is not None:
            raise ValueError(f"{name}: expected None with {there}")


class MemoryLoss(DirectedLoss):
    """A loss of images, texts, their momentum keys and a :class:`itrloss.CoupledMemory`; a base for
    your own.

    A subclass implements ``compute(sims)`` of a :class:`itrloss.memory.MemorySimilarity`; for
    options and parameters see :class:`PairLoss`. There is no gradient to keys and memory. After the
    backward pass, put the batch into the memory: ``memory.enqueue(image_keys, text_keys, ids)``.

    Args:
        directions: ``"both"``; ``"image-text"`` for images against the memory's texts alone, or
            ``"text-image"``.
        reduction, engine, check_finite: see :class:`PairLoss`. ``engine`` goes by the size of the
            memory.
        telemetry: the same of :func:`itrloss.losses.telemetry.describe_memory`.
        gather, process_group: see :class:`PairLoss`. The memory takes in the keys of all processes
            in any case.
    """

    _empty_calls = 0  # with an empty memory, in training mode

    def forward(
        self,
        images: Tensor = None,  # type: ignore[assignment]
        texts: Tensor = None,  # type: ignore[assignment]
        image_keys: Tensor = None,  # type: ignore[assignment]
        text_keys: Tensor = None,  # type: ignore[assignment]
        memory: CoupledMemory = None,  # type: ignore[assignment]
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        **words: Any,
    ) -> Values:
        """Return the loss of a batch with the memory of former ones, as :meth:`PairLoss.forward`
        does.

        Args:
            images, texts: (N, D) and (M, D) embeddings of any length.
            image_keys, text_keys: (N, D) and (M, D) embeddings of the same by the momentum
                encoders.
            memory: keys of former batches. While it is empty, its terms are 0; there is one warning
                if it still is after 100 calls in training mode.
            image_ids, text_ids: (N,) and (M,) integers or strings, as tensors, NumPy arrays or
                lists; equal ids are positives in the batch, and
                entries of the memory with an anchor's id are no negatives of it. If both are left
                out, image i matches text i; the memory must have been filled without ids, too.
            words: ``queries``, ``documents``, ``query_keys``, ``document_keys``, ``query_ids`` and
                ``document_ids`` are other names of images and texts, of their keys and ids.
        """
        if words:
            images, texts, image_keys, text_keys, image_ids, text_ids = in_own_words(
                self.forward,
                words,
                images=images,
                texts=texts,
                image_keys=image_keys,
                text_keys=text_keys,
                image_ids=image_ids,
                text_ids=text_ids,
            ).values()
        batch = images, texts
        keys = image_keys, text_keys
        ids = image_ids, text_ids
        sims = self._similarities(batch, keys, memory, ids)
        if self.training and memory.is_new and not is_compiling():
            self._count_empty()
        return self._with_telemetry(self._value(sims, keys, memory, ids), sims)

    def _count_empty(self) -> None:
        """Count a call with an empty memory, and warn once if there were many."""
        self._empty_calls += 1
        if self._empty_calls == _EMPTY_CALLS:
            warn(
                f"{type(self).__name__}: nothing was put into the memory before {_EMPTY_CALLS} "
                "calls in training mode, so that its terms are 0. After each backward pass, call "
                "memory.enqueue(image_keys, text_keys, ids), unless it is to begin later"
            )

    def _value(
        self,
        sims: MemorySimilarity,
        keys: tuple[Tensor, Tensor],
        memory: CoupledMemory,
        ids: PassedIds,
    ) -> Values:
        """Return the loss of the similarities; one that needs others, too, makes them here."""
        return self.compute(sims)

    def _similarities(
        self,
        batch: tuple[Tensor, Tensor],
        keys: tuple[Tensor, Tensor],
        memory: CoupledMemory,
        ids: PassedIds,
    ) -> MemorySimilarity:
        """Return the similarities of a batch with itself, with its keys and with the memory."""
        return MemorySimilarity.of(
            *batch,
            *keys,
            memory,
            *ids,
            directions=self.directions,
            engine=self.engine,
            check_finite=self.check_finite,
            gather=self.gather,
            process_group=self.process_group,
            same=self.described,
        )

    def compute(self, sims: MemorySimilarity) -> Values:
        """Return the loss of the similarities with the batch, with its keys and with the memory.

        Every subclass implements it, and applies ``self.reduction``.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement compute(sims)")


def existing(size: int, device: torch.device, **several: IdsLike | None) -> Tensor | None:
    """Return the (size,) bool mask of the items that exist by all of their ids; None: all do.

    An accelerator that has ids has to synchronise for what is made of it. A compiled graph has
    fixed sizes, so that nothing is left out there.
    """
    if is_compiling():
        return None
    missing: list[Tensor] = []
    for name, ids in several.items():
        mask = None if ids is None else missing_mask(as_labels(name, ids, size, device))
        if mask is not None:
            missing.append(mask)
    return ~torch.stack(missing).any(0) if missing else None


def log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    """Return ``log(e^a + e^b)``, twice differentiable.

    The second derivative of ``torch.logaddexp`` is nan where one exponential is so much larger that
    their quotient overflows: e^88 times in float32.
    """
    return torch.stack(torch.broadcast_tensors(a, b)).logsumexp(0)
