"""Any loss of this library under the calls of public code bases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..checks import CheckedModule, IdsLike, Names, check_embeddings, one_of
from ..losses import MemoryLoss
from ..losses.matryoshka import check_scalar, inner_loss
from ..memory import CoupledMemory
from .arguments import (
    check_pairs,
    check_square,
    members_of,
    required,
    required_ids,
    zero_of,
)
from .regularizers import Parts, Regularizers


class Call(NamedTuple):
    """What a code base passes, as inputs of a score function or of a loss."""

    # images, texts and what else a score function takes; or a score matrix alone
    inputs: tuple[Tensor, ...]
    # of a loss, by the names of its arguments
    labels: Mapping[str, IdsLike | None] = {}
    more: tuple[Tensor | None, ...] = ()  # HAL's bank; the residuals of sets


# How each code base calls its criterion; the arguments have the names of the originals.


def pairs(im, s):
    """Return the call of VSE++, VSE∞ and USER."""
    return Call((im, s))


def scan(im, s, s_l):
    """Return the call of SCAN."""
    return Call((im, s, s_l))


def sgraf(scores, length=None):
    """Return the call of SGRAF; NAAF passes a length."""
    check_square("scores", scores)
    return Call((scores,))


def chan(sims):
    """Return the call of CHAN."""
    check_square("sims", sims)
    return Call((sims,))


def clip4clip(sim_matrix):
    """Return the call of CLIP4Clip."""
    check_square("sim_matrix", sim_matrix)
    return Call((sim_matrix,))


def hrem(im, s, img_ids=None, sims=None):
    """Return the call of HREM; LAPS passes sets of embeddings and the scores that its model
    computed of them.
    """
    inputs = (im, s) if sims is None else (sims,)
    return Call(inputs, {"image_ids": img_ids, "text_ids": img_ids})


def hal(im, s, mb_img=None, mb_cap=None, mb_ind=None, indices=None):
    """Return the call of HAL."""
    return Call((im, s), more=(mb_img, mb_cap, mb_ind, indices))


def pvse(img, txt, img_r=None, txt_r=None):
    """Return the call of PVSE."""
    return Call((img, txt), more=(img_r, txt_r))


def dive(img_embs, txt_embs, img_r=None, txt_r=None, img_query=None, txt_query=None):
    """Return the call of DivE."""
    n = len(img_embs)
    m = len(txt_embs)
    if m % n:
        raise ValueError(f"txt_embs: expected as many texts for each of {n} images, got {m}")
    ids = torch.arange(n, device=img_embs.device)
    labels = {"image_ids": ids, "text_ids": ids.repeat_interleave(m // n)}
    return Call((img_embs, txt_embs), labels, (img_r, txt_r))


_CALLS: dict[str, Callable[..., Call]] = {
    "vsepp": pairs,
    "vse_inf": pairs,
    "scan": scan,
    "sgraf": sgraf,
    "naaf": sgraf,
    "chan": chan,
    "clip4clip": clip4clip,
    "hrem": hrem,
    "hal": hal,
    "user": pairs,
    "pvse": pvse,
    "dive": dive,
}
_OF_SCORES = ("sgraf", "naaf", "chan", "clip4clip")
_OF_SETS = ("pvse", "dive")


def _memory(images: Tensor, texts: Tensor, ids: Tensor | None = None) -> CoupledMemory:
    """Return a memory with (M, D) keys and (M,) ids, of this process alone."""
    check_embeddings(images, texts, False, Names("mb_img, v_queue", "mb_cap, t_queue", "", ""))
    if len(images) != len(texts):
        expected = f"{len(images)} entries as of the images"
        raise ValueError(f"mb_cap, t_queue: expected {expected}, got {len(texts)}")
    with images.device:
        memory = CoupledMemory(*images.shape, dtype=images.dtype)
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
            ``"clip4clip"``, ``"hrem"``, ``"hal"``, ``"user"``, ``"pvse"`` or ``"dive"``.
        score_function: a function of the call's images and texts, of SCAN also their lengths, that
            returns (N, M) scores; SCAN needs one. It gets DivE's sets as (N K, D), as its own
            functions do. By default, scores are cosines, and the highest one of two sets.
        opt: settings of PVSE or DivE, whose regularisers are added; without, there are none.

    Raises:
        TypeError, ValueError: naming the argument, what it should be and what it was.
    """
    one_of("code_base", code_base, *_CALLS)
    if score_function is not None and not callable(score_function):
        raise TypeError(
            f"score_function: expected a function of images and texts, got {score_function!r}"
        )
    if score_function is not None and code_base in _OF_SCORES:
        raise ValueError(
            f"score_function: expected None, as {code_base!r} passes scores, got {score_function!r}"
        )
    if score_function is None and code_base == "scan":
        raise ValueError(
            "score_function: expected one, such as a partial of SCAN's xattn_score_t2i, got None"
        )
    if opt is not None and code_base not in _OF_SETS:
        raise ValueError(
            f"opt: expected None for {code_base!r}, which has no regularisers, got {opt!r}"
        )
    scored = score_function is not None or code_base in _OF_SETS or code_base in _OF_SCORES
    if isinstance(loss, MemoryLoss):
        if code_base not in ("hal", "user") or scored:
            expected = "one without a memory for scores, and but for 'hal', 'user'"
            raise ValueError(f"loss: expected {expected}, got {loss!r}")
        if loss.reduction == "none":
            raise ValueError("loss: expected reduction 'mean' or 'sum', got 'none'")
    else:
        inner_loss(loss)  # raises an error for losses of other inputs
        if scored and "scores" not in inspect.signature(loss.forward).parameters:
            expected = "one that takes scores, such as itrloss.InfoNCELoss()"
            raise ValueError(f"loss: expected {expected}, got {loss!r}")
    regularizers = None if opt is None else Regularizers(opt, code_base)
    return AdaptedLoss(loss, code_base, score_function, regularizers)


class AdaptedLoss(CheckedModule):
    """A criterion of a code base; :func:`adapt` makes it, and says what it does."""

    def __init__(
        self,
        loss: nn.Module,
        code_base: str,
        score_function: Callable[..., Tensor] | None = None,
        regularizers: Regularizers | None = None,
    ):
        super().__init__()
        self.loss: Any = loss  # which has further attributes
        self.code_base = code_base
        self.score_function = score_function
        self.regularizers = regularizers
        # for sets without a score function
        self._scores_of_sets: Callable[..., Tensor] = functional.set_similarity

    @property
    def margin(self) -> float:
        """The margin of the loss, if it has one."""
        return self.loss.margin

    @margin.setter
    def margin(self, margin: float) -> None:
        """Set the margin of the loss."""
        self.loss.margin = margin

    @property
    def max_violation(self) -> bool:
        """Whether only the hardest negatives count."""
        return any(getattr(part, "mining", None) == "hardest" for part in self.loss.modules())

    @max_violation.setter
    def max_violation(self, on: bool) -> None:
        """Set ``mining`` of the losses that have it to "hardest" or "all"."""
        mining = "hardest" if on else "all"
        for part in self.loss.modules():
            if hasattr(part, "mining"):
                part.mining = mining

    def max_violation_on(self) -> None:
        """Count each anchor's hardest negative alone."""
        self.max_violation = True

    def max_violation_off(self) -> None:
        """Count all negatives."""
        self.max_violation = False

    def forward(self, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, Parts]:
        """Return what the code base's criterion does, from its arguments."""
        call = _CALLS[self.code_base](*args, **kwargs)
        if self.regularizers is not None:
            self.regularizers.check_sizes(*call.inputs)
        parts = self._parts(call)
        if self.code_base not in _OF_SETS:
            return parts["ranking"]
        if self.regularizers is not None:
            total, parts = self.regularizers.total(parts, *call.inputs, *call.more)
        else:
            total = parts["ranking"]
            parts = {"ranking_loss": total.detach()}
        if self.code_base == "dive":  # whose trainer knows no such part
            parts.pop("ranking_loss", None)
        return total, parts

    def _parts(self, call: Call) -> Parts:
        """Return the parts of the loss without regularisers, by name."""
        check_scalar(self.loss)
        if not isinstance(self.loss, MemoryLoss):
            loss = self._of_batch(call)
        elif self.code_base == "hal":
            loss = self._of_bank(*call.inputs, *call.more)
        else:
            loss = zero_of(call.inputs[0])
        return {"ranking": loss}

    def _of_batch(self, call: Call) -> Tensor:
        """Return the loss of the call's embeddings or scores."""
        inputs = call.inputs
        if len(inputs) == 1:
            return self.loss(scores=inputs[0], **call.labels)
        if self.code_base == "dive" and self.score_function is not None:
            scores = self.score_function(*map(members_of, inputs))
        elif self.score_function is not None:
            scores = self.score_function(*inputs)
            check_square("score_function", scores)
        elif self.code_base in _OF_SETS:
            sets = [x if x.dim() == 3 else x[:, None] for x in inputs]
            scores = self._scores_of_sets(*sets, normalize=self.loss.normalize)
        else:
            im, s = inputs
            check_pairs(im, s)
            return self.loss(im, s, **call.labels)
        return self.loss(scores=scores, **call.labels)

    def _of_bank(
        self,
        im: Tensor,
        s: Tensor,
        mb_img: Tensor | None,
        mb_cap: Tensor | None,
        mb_ind: IdsLike | None,
        indices: IdsLike | None,
    ) -> Tensor:
        """Return the loss of (B, D) pairs and HAL's bank (M, D); entries of the same number are no
        negatives.
        """
        if mb_img is None:
            with im.device:
                empty = CoupledMemory(1, im.shape[1], dtype=im.dtype)
            return self.loss(im, s, im, s, empty)
        entries = required_ids("mb_ind", mb_ind, len(mb_img), im.device)
        ids = required_ids("indices", indices, len(im), im.device)
        memory = _memory(mb_img, required("mb_cap", mb_cap), entries)
        return self.loss(im, s, im, s, memory, ids, ids)

    def moco_forward(
        self, v_q: Tensor, t_k: Tensor, t_q: Tensor, v_k: Tensor, v_queue: Tensor, t_queue: Tensor
    ) -> Tensor:
        """Return the loss of USER's (B, D) embeddings, keys and (D, K) queues; 0 for a loss of the
        batch alone.

        The queues are copied, as USER's model overwrites them before the backward pass.
        """
        if not isinstance(self.loss, MemoryLoss):
            return zero_of(v_q)
        return self.loss(v_q, t_q, v_k, t_k, _memory(v_queue.T, t_queue.T))

    def extra_repr(self) -> str:
        """Return the code base, and which negatives count, for ``repr``."""
        return f"code_base={self.code_base!r}, max_violation={self.max_violation}"
