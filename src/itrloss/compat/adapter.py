"""Any loss of this library under the calls of public code bases."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import functional
from ..checks import Names, as_ids, check_embeddings, one_of
from ..losses import MemoryLoss
from ..losses.matryoshka import check_scalar, inner_loss
from ..memory import CoupledMemory
from .hinge import Switched, check_square, required, required_ids
from .sets import Regularizers, members_of, zero_of


class _Call(NamedTuple):
    """What a code base passes, as inputs of a score function or of a loss."""

    # images, texts and what else a score function takes; or a score matrix alone
    inputs: tuple[Any, ...]
    image_ids: Any = None
    text_ids: Any = None
    more: tuple[Any, ...] = ()  # HAL's bank; the residuals of sets


# How each code base calls its criterion; the arguments have the names of the originals.


def _pairs(im, s):
    return _Call((im, s))


def _words(im, s, s_l):
    return _Call((im, s, s_l))


def _scores(scores, length=None):
    check_square("scores", scores)
    if isinstance(length, Tensor) and length.dim() > 0:
        raise ValueError(
            f"length: expected a number, as there are scores, got {tuple(length.shape)}"
        )
    return _Call((scores,))


def _sims(sims):
    check_square("sims", sims)
    return _Call((sims,))


def _sim_matrix(sim_matrix):
    check_square("sim_matrix", sim_matrix)
    return _Call((sim_matrix,))


def _with_ids(im, s, img_ids=None, sims=None):
    # LAPS passes sets of embeddings and the scores that its model computed of them
    inputs = (im, s) if sims is None else (sims,)
    return _Call(inputs, img_ids, img_ids)


def _with_bank(im, s, mb_img=None, mb_cap=None, mb_ind=None, indices=None):
    return _Call((im, s), more=(mb_img, mb_cap, mb_ind, indices))


def _sets(img, txt, img_r=None, txt_r=None):
    return _Call((img, txt), more=(img_r, txt_r))


def _captions(img_embs, txt_embs, img_r=None, txt_r=None, img_query=None, txt_query=None):
    n = len(img_embs)
    m = len(txt_embs)
    if m % n:
        raise ValueError(f"txt_embs: expected as many texts for each of {n} images, got {m}")
    ids = torch.arange(n, device=img_embs.device)
    return _Call((img_embs, txt_embs), ids, ids.repeat_interleave(m // n), (img_r, txt_r))


_CALLS: dict[str, Callable[..., _Call]] = {
    "vsepp": _pairs,
    "vse_inf": _pairs,
    "scan": _words,
    "sgraf": _scores,
    "naaf": _scores,
    "chan": _sims,
    "clip4clip": _sim_matrix,
    "hrem": _with_ids,
    "hal": _with_bank,
    "user": _pairs,
    "pvse": _sets,
    "dive": _captions,
}
_OF_SCORES = ("sgraf", "naaf", "chan", "clip4clip")
_OF_SETS = ("pvse", "dive")


def _memory(images: Tensor, texts: Tensor, ids: Tensor | None = None) -> CoupledMemory:
    """Return a memory with (M, D) keys and (M,) ids, of this process alone."""
    check_embeddings(images, texts, False, Names("mb_img, v_queue", "mb_cap, t_queue", "", ""))
    if len(images) != len(texts):
        expected = f"{len(images)} entries as of the images"
        raise ValueError(f"mb_cap, t_queue: expected {expected}, got {len(texts)}")
    if ids is not None:
        ids = as_ids("mb_ind", ids, len(images), images.device)
    with images.device:
        memory = CoupledMemory(*images.shape, dtype=images.dtype)
    memory.enqueue_alone(images, texts, ids)
    return memory


def adapt(
    loss: Any, code_base: str, score_function: Callable[..., Tensor] | None = None, opt: Any = None
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
    return AdaptedLoss(loss, code_base, score_function, opt)


class AdaptedLoss(Switched):
    """A criterion of a code base; :func:`adapt` makes it, and says what it does."""

    def __init__(self, loss: Any, code_base: str, score_function: Any, opt: Any):
        super().__init__()
        self.loss = loss
        self.code_base = code_base
        self.score_function = score_function
        self.regularizers = None
        if opt is not None:
            self.regularizers = Regularizers(opt, code_base)

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the code base's criterion does, from its arguments."""
        check_scalar(self.loss)
        call = self._call(args, kwargs)
        if isinstance(self.loss, MemoryLoss):
            if self.code_base == "hal":
                return self._of_bank(*call.inputs, *call.more)
            return zero_of(call.inputs[0])
        if self.regularizers is not None:
            self.regularizers.check_sizes(*call.inputs)
        loss = self._of_batch(call)
        if self.code_base not in _OF_SETS:
            return loss
        total = loss
        parts = {"ranking_loss": loss.detach()}
        if self.regularizers is not None:
            total, parts = self.regularizers.total({"ranking": loss}, *call.inputs, *call.more)
        if self.code_base == "dive":  # whose trainer knows no such part
            del parts["ranking_loss"]
        return total, parts

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Return the arguments of the code base's criterion; raise an error for others."""
        made_of = _CALLS[self.code_base]
        signature = inspect.signature(made_of)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            expected = f"criterion({', '.join(signature.parameters)})"
            raise TypeError(f"code_base {self.code_base!r}: expected {expected}: {error}") from None
        return made_of(*args, **kwargs)

    def _of_batch(self, call: _Call) -> Tensor:
        """Return the loss of the call's embeddings or scores."""
        inputs = call.inputs
        if self.score_function is not None and len(inputs) > 1:
            if self.code_base == "dive":
                inputs = [members_of(x) for x in inputs]
            scores = self.score_function(*inputs)
        elif len(inputs) == 1:
            scores = inputs[0]
        elif self.code_base in _OF_SETS:
            sets = [x if x.dim() == 3 else x[:, None] for x in inputs]
            scores = functional.set_similarity(*sets)
        else:
            return self.loss(*inputs, call.image_ids, call.text_ids)
        return self.loss(image_ids=call.image_ids, text_ids=call.text_ids, scores=scores)

    def _of_bank(
        self, im: Tensor, s: Tensor, mb_img: Any, mb_cap: Any, mb_ind: Any, indices: Any
    ) -> Tensor:
        """Return the loss of (B, D) pairs and HAL's bank (M, D); entries of the same number are no
        negatives.
        """
        if mb_img is None:
            with im.device:
                empty = CoupledMemory(1, im.shape[1], dtype=im.dtype)
            return self.loss(im, s, im, s, empty)
        entries = required_ids("mb_ind", mb_ind, im.device)  # (M,)
        ids = required_ids("indices", indices, im.device)  # (B,)
        memory = _memory(mb_img, required("mb_cap", mb_cap), entries)
        return self.loss(im, s, im, s, memory, ids, ids)

    def moco_forward(
        self, v_q: Tensor, t_k: Tensor, t_q: Tensor, v_k: Tensor, v_queue: Tensor, t_queue: Tensor
    ) -> Any:
        """Return the loss of USER's (B, D) embeddings, keys and (D, K) queues; 0 for a loss of the
        batch alone.

        The queues are copied, as USER's model overwrites them before the backward pass.
        """
        if not isinstance(self.loss, MemoryLoss):
            return zero_of(v_q)
        return self.loss(v_q, t_q, v_k, t_k, _memory(v_queue.T, t_queue.T))

    def extra_repr(self) -> str:
        """Return the code base, for ``repr``."""
        return f"code_base={self.code_base!r}"
