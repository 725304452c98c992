"""Any loss of this library under the calls of public code bases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import functional
from ..checks import IdsLike, WholeState, as_ids, one_of
from ..losses import MemoryLoss
from ..losses.matryoshka import argument_names, check_scalar, inner_loss
from ..memory import CoupledMemory, empty_memory
from .arguments import as_sets, zero_of
from .regularizers import Parts, Regularizers


class AdaptedLoss(WholeState):
    """A criterion of a code base; :func:`adapt` makes it, and says what it does."""

    def __init__(
        self,
        loss: nn.Module,
        code_base: str,
        score_function: Callable[..., Tensor] | None = None,
    ):
        if score_function is not None and not callable(score_function):
            raise TypeError(
                f"score_function: expected a function of images and texts, got {score_function!r}"
            )
        super().__init__()
        self.loss: Any = loss  # which has further attributes
        self.code_base = code_base
        self.score_function = score_function
        self._hardest: dict[Any, Any] = {}  # the mining that max_violation_on() sets
        for part in self.loss.modules():
            if hasattr(part, "mining"):
                self._hardest[part] = "hardest" if part.mining == "all" else part.mining

    @property
    def margin(self) -> float:
        """The margin of the loss, or that inside of Matryoshka, if it has one."""
        return self._with_margin().margin

    @margin.setter
    def margin(self, margin: float) -> None:
        """Set the margin of the loss, or of that inside of Matryoshka."""
        self._with_margin().margin = margin

    def _with_margin(self) -> Any:
        """Return the loss that has a margin; raise an AttributeError if there is none."""
        for part in self.loss.modules():
            if hasattr(part, "margin"):
                return part
        raise AttributeError(f"margin: expected a loss that has one, got {self.loss!r}")

    @property
    def max_violation(self) -> bool:
        """Whether only the hardest negatives count."""
        return any(part.mining != "all" for part in self._hardest)

    @max_violation.setter
    def max_violation(self, on: bool) -> None:
        """Set ``mining`` of the losses that have it to "all", or back to what it was."""
        for part, hardest in self._hardest.items():
            if not on:
                functional.check_mining("all", getattr(part, "temperature", None))
                part.mining = "all"
            elif part.mining == "all":
                part.mining = hardest

    def max_violation_on(self) -> None:
        """Count each anchor's hardest negative alone."""
        self.max_violation = True

    def max_violation_off(self) -> None:
        """Count all negatives."""
        self.max_violation = False

    def _value(self, *inputs: object, **named: object) -> Tensor:
        """Return the loss, which has to be one number, of what it takes."""
        check_scalar(self.loss)
        return self.loss(*inputs, **named)

    def _of_pairs(self, im: Tensor, s: Tensor, *lengths: object, **ids: object) -> Tensor:
        """Return the loss of images and texts, or of what the score function makes of them."""
        if self.score_function is None:
            return self._value(im, s, **ids)
        return self._value(scores=self.score_function(im, s, *lengths), **ids)

    def extra_repr(self) -> str:
        """Return the code base, and which negatives count, for ``repr``."""
        return f"code_base={self.code_base!r}, max_violation={self.max_violation}"


# The criterion of each code base has the call of its original, with the names of its arguments.


class VSECriterion(AdaptedLoss):
    """The call of VSE++ and VSE∞."""

    def forward(self, im, s) -> Tensor:
        """Return the loss of (B, D) pairs."""
        return self._of_pairs(im, s)


class SCANCriterion(AdaptedLoss):
    """The call of SCAN."""

    def forward(self, im, s, s_l) -> Tensor:
        """Return the loss of the scores of regions and words."""
        return self._of_pairs(im, s, s_l)


class ScoresCriterion(AdaptedLoss):
    """The call of SGRAF, CHAN, CLIP4Clip, NAAF, which passes a length, and of all other losses of
    scores alone.
    """

    def forward(self, scores, length=None) -> Tensor:
        """Return the loss of (B, B) scores."""
        return self._value(scores=scores)


class HREMCriterion(AdaptedLoss):
    """The call of HREM; LAPS passes sets of embeddings and the scores that its model computed of
    them.
    """

    def forward(self, im, s, img_ids=None, sims=None) -> Tensor:
        """Return the loss of (B, D) pairs, or of (B, B) scores."""
        labels = self._labels(img_ids, im)
        if sims is not None:
            return self._value(scores=sims, **labels)
        return self._of_pairs(im, s, **labels)

    def _labels(self, img_ids: IdsLike | None, im: Tensor) -> dict[str, IdsLike | None]:
        """Return what the loss gets of the images' ids."""
        return {"image_ids": img_ids, "text_ids": img_ids}


class HALCriterion(AdaptedLoss):
    """The call of HAL."""

    _takes_bank: type[nn.Module] = MemoryLoss  # the kind of loss that does

    def forward(self, im, s, mb_img=None, mb_cap=None, mb_ind=None, indices=None) -> Tensor:
        """Return the loss of (B, D) pairs and, if the loss takes one, of the bank (M, D); entries
        whose number is in ``indices`` are no negatives.
        """
        if mb_img is not None and isinstance(self.loss, self._takes_bank):
            size = len(mb_img)
            if mb_cap is None or len(mb_cap) != size:
                raise ValueError(f"mb_cap: expected {size} entries as in mb_img, got {mb_cap!r}")
            entries = as_ids("mb_ind", mb_ind, size, im.device)
            batch = as_ids("indices", indices, len(im), im.device)
            return self._with_bank(im, s, mb_img, mb_cap, entries, batch)
        if isinstance(self.loss, MemoryLoss):
            return self._value(im, s, im, s, empty_memory(1, im))
        return self._of_pairs(im, s)

    def _with_bank(self, im, s, images, texts, entries, batch) -> Tensor:
        """Return the loss with a bank, whose entries have numbers, as the batch has."""
        return self._value(im, s, im, s, _memory(images, texts, entries), batch, batch)


class USERCriterion(VSECriterion):
    """The calls of USER."""

    def forward(self, im, s) -> Tensor:
        """Return the loss of (B, D) pairs; 0 for a loss with a memory."""
        if isinstance(self.loss, MemoryLoss):
            return zero_of(im)
        return super().forward(im, s)

    def moco_forward(
        self, v_q: Tensor, t_k: Tensor, t_q: Tensor, v_k: Tensor, v_queue: Tensor, t_queue: Tensor
    ) -> Tensor:
        """Return the loss of USER's (B, D) embeddings, keys and (D, K) queues; 0 for a loss of the
        batch alone.

        The queues are copied, as USER's model overwrites them before the backward pass.
        """
        if not isinstance(self.loss, MemoryLoss):
            return zero_of(v_q)
        return self._value(v_q, t_q, v_k, t_k, _memory(v_queue.T, t_queue.T))


class SetsCriterion(AdaptedLoss):
    """A criterion of sets of embeddings, with regularisers."""

    def __init__(
        self,
        loss: nn.Module,
        code_base: str,
        score_function: Callable[..., Tensor] | None,
        opt: object = None,
        reduction: Literal["mean", "sum"] = "mean",
    ):
        super().__init__(loss, code_base, score_function)
        self.regularizers = Regularizers(opt, code_base, reduction)
        self.set_options: dict[str, Any] = {}  # of the score of two sets without a function

    def _scores(self, img: Tensor, txt: Tensor) -> Tensor:
        """Return the (N, M) scores of sets."""
        if self.score_function is not None:
            return self.score_function(img, txt)
        return functional.set_similarity(
            as_sets(img), as_sets(txt), normalize=self.loss.normalize, **self.set_options
        )

    def _parts(self, scores: Tensor, **ids: Tensor) -> Parts:
        """Return the parts of the loss without regularisers, by name."""
        return {"ranking": self._value(scores=scores, **ids)}


class PVSECriterion(SetsCriterion):
    """The call of PVSE."""

    def forward(self, img, txt, img_r=None, txt_r=None) -> tuple[Tensor, Parts]:
        """Return the loss of (B, K, D) sets, or (B, D) embeddings, and its parts."""
        parts = self._parts(self._scores(img, txt))
        return self.regularizers.total(parts, img, txt, img_r, txt_r)


class DivECriterion(SetsCriterion):
    """The call of DivE, whose score function gets the members of sets as rows."""

    def forward(
        self, img_embs, txt_embs, img_r=None, txt_r=None, img_query=None, txt_query=None
    ) -> tuple[Tensor, Parts]:
        """Return the loss of (N, K, D) sets of images and (M, K, D) of all their texts, and its
        parts.
        """
        n = len(img_embs)
        m = len(txt_embs)
        if m % n:
            raise ValueError(f"txt_embs: expected as many texts for each of {n} images, got {m}")
        ids = torch.arange(n, device=img_embs.device)
        text_ids = ids.repeat_interleave(m // n)
        scores = self._scores(img_embs, txt_embs)
        parts = self._parts(scores, image_ids=ids, text_ids=text_ids)
        total, parts = self.regularizers.total(parts, img_embs, txt_embs, img_r, txt_r)
        parts.pop("ranking_loss", None)  # which DivE's trainer does not know
        return total, parts

    def _scores(self, img: Tensor, txt: Tensor) -> Tensor:
        """Return the (N, M) scores of sets."""
        if self.score_function is None:
            return super()._scores(img, txt)
        return self.score_function(img.flatten(0, -2), txt.flatten(0, -2))


_CRITERIA: Mapping[str, type[AdaptedLoss]] = {
    "vsepp": VSECriterion,
    "vse_inf": VSECriterion,
    "scan": SCANCriterion,
    "sgraf": ScoresCriterion,
    "naaf": ScoresCriterion,
    "chan": ScoresCriterion,
    "clip4clip": ScoresCriterion,
    "scores": ScoresCriterion,  # of any other one
    "hrem": HREMCriterion,
    "hal": HALCriterion,
    "user": USERCriterion,
    "pvse": PVSECriterion,
    "dive": DivECriterion,
}


def _memory(images: Tensor, texts: Tensor, ids: Tensor | None = None) -> CoupledMemory:
    """Return a memory with (M, D) keys and (M,) ids, of this process alone."""
    memory = empty_memory(len(images), images)
    memory.enqueue_alone(images, texts, ids)
    return memory


def adapt(
    loss: nn.Module,
    code_base: str,
    score_function: Callable[..., Tensor] | None = None,
    opt: object = None,
) -> AdaptedLoss:
    """Return a loss of this library as a criterion of a public code base, with its call, its result
    and its switches.

    The criterion has ``max_violation_on()``, ``max_violation_off()`` and the attribute
    ``max_violation``: they set ``mining`` of a :class:`itrloss.TripletLoss`, and have no effect on
    losses without mining. See `Any other loss`_.

    Args:
        loss: a :class:`itrloss.PairLoss` of images and texts alone, :class:`itrloss.Matryoshka`
            where embeddings are passed, or for ``"hal"`` and ``"user"`` a
            :class:`itrloss.MemoryLoss`; with a mean or a sum.
        code_base: ``"vsepp"``, ``"vse_inf"``, ``"scan"``, ``"sgraf"``, ``"naaf"``, ``"chan"``,
            ``"clip4clip"``, ``"hrem"``, ``"hal"``, ``"user"``, ``"pvse"`` or ``"dive"``; or
            ``"scores"``, whose call is ``loss(scores)``, of (B, B) scores with images as rows.
        score_function: a function of the call's images and texts, of SCAN also their lengths, that
            returns (N, M) scores; SCAN needs one. It gets DivE's sets as (N K, D), as its own
            functions do. By default, scores are cosines, and the highest one of two sets.
        opt: settings of PVSE or DivE, whose regularisers are added; without, there are none.

    Raises:
        TypeError, ValueError: naming the argument, what it should be and what it was.
    """
    one_of("code_base", code_base, *_CRITERIA)
    kind = _CRITERIA[code_base]
    gets_scores = issubclass(kind, ScoresCriterion)
    gets_sets = issubclass(kind, SetsCriterion)
    for name, x, has_use in (
        ("score_function", score_function, not gets_scores),
        ("opt", opt, gets_sets),
    ):
        if x is not None and not has_use:
            raise ValueError(f"{name}: expected None for {code_base!r}, got {x!r}")
    if score_function is None and code_base == "scan":
        raise ValueError(
            "score_function: expected one, such as a partial of SCAN's xattn_score_t2i, got None"
        )
    scored = score_function is not None or gets_sets or gets_scores
    if isinstance(loss, MemoryLoss):
        if code_base not in ("hal", "user") or scored:
            expected = "one without a memory for scores, and but for 'hal', 'user'"
            raise ValueError(f"loss: expected {expected}, got {loss!r}")
        check_scalar(loss)
    else:
        inner_loss(loss)  # raises an error for losses of other inputs
        if scored and "scores" not in argument_names(loss):
            expected = "one that takes scores, such as itrloss.InfoNCELoss()"
            raise ValueError(f"loss: expected {expected}, got {loss!r}")
    if issubclass(kind, SetsCriterion):
        return kind(loss, code_base, score_function, opt)
    return kind(loss, code_base, score_function)
