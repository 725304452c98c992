"""The hinge losses of VSE++, VSE∞, SCAN, SGRAF, CHAN and HREM: one loss under six signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import functional
from ..checks import (
    CheckedModule,
    Names,
    as_id_numbers,
    as_int64,
    check_embeddings,
    check_matrix,
    one_of,
    option,
)
from ..engine.vectors import compute_dtype
from ..similarity import Similarity
from ..suspicious import may_be_read, warn_of_units, warn_of_vectors
from ..terms import excess, identity


def setting(opt: Any, name: str, *default: Any) -> Any:
    """Return an attribute of a code base's settings, or an entry of a dictionary of them; or the
    default; an error without both.
    """
    if isinstance(opt, Mapping):
        opt = SimpleNamespace(**opt)
    try:
        return getattr(opt, name, *default)
    except AttributeError:
        raise ValueError(f"opt: expected an attribute {name!r}, got none") from None


def required(name: str, x: Any) -> Any:
    """Return an argument that is optional in the signature but needed here, so it is not None."""
    if x is None:
        raise ValueError(f"{name}: expected a tensor, got None")
    return x


def required_ids(name: str, ids: Any, device: torch.device) -> Tensor:
    """Return ids of any form, but not None, as integers on the device."""
    return as_int64(name, as_id_numbers(name, required(name, ids))).to(device)


def check_square(name: str, scores: Any) -> None:
    """Raise an error unless scores are a (B, B) floating-point tensor."""
    check_matrix(name, scores, "(B, B)")
    if scores.shape[0] != scores.shape[1]:
        raise ValueError(f"{name}: expected shape (B, B), got {tuple(scores.shape)}")


def similarity(
    x: Tensor,
    y: Tensor,
    names: tuple[str, str] = ("im", "s"),
    ids: tuple[Any, Any] = (None, None),
    order: bool = False,
) -> Similarity:
    """Return the similarity of (N, D) and (M, D) embeddings as they are, not normalised.

    Args:
        x, y: rows and columns.
        names: what errors call them.
        ids: of rows and columns; without column ids, N = M and row i matches column i.
        order: scores are ``-|max(0, y - x)|`` (order embeddings) instead of inner products.
    """
    called = Names(*names, "img_ids", "img_ids")
    check_embeddings(x, y, False, called)
    if ids[1] is None and len(x) != len(y):
        raise ValueError(
            f"{names[1]}: expected shape {tuple(x.shape)} like {names[0]}, got {tuple(y.shape)}"
        )
    if order:
        dtype = compute_dtype(x)
        violations = (y.to(dtype) - x.to(dtype)[:, None]).clamp_min(0)  # (N, M, D)
        return Similarity.from_scores(-torch.linalg.vector_norm(violations, dim=2), *ids)
    return Similarity(x, y, *ids, normalize=False, names=called)


class Switched(CheckedModule):
    """A criterion that code bases switch to the hardest negatives after some epochs."""

    def max_violation_on(self) -> None:
        """Count each anchor's hardest negative alone."""
        self.max_violation = True

    def max_violation_off(self) -> None:
        """Count all negatives."""
        self.max_violation = False


class HingeLoss(Switched):
    """The sum of hinges over all pairs and both directions, with all negatives or each anchor's
    hardest one.
    """

    margin: float = option()
    _looked = False  # whether a batch was looked at for what is suspicious

    def __init__(self, margin: float = 0, max_violation: bool = False):
        super().__init__()
        self.margin = margin
        self.max_violation = bool(max_violation)

    def get_extra_state(self) -> Tensor:
        """Return what ``state_dict`` holds, as :class:`itrloss.TripletLoss` does: (1,) uint8,
        whether only the hardest negatives count.
        """
        return torch.tensor([self.max_violation], dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Restore which negatives count from ``get_extra_state``."""
        self.max_violation = bool(state)

    def _hinges(self, sim: Similarity, reduction: functional.Reduction = "sum") -> Any:
        """Return the loss of a similarity; with reduction "none", the rows' and columns' values."""
        mining = "hardest" if self.max_violation else "all"
        loss = functional.triplet_loss(sim, self.margin, mining, reduction)
        # afterwards, so that the first loss is computed as all others are
        if not torch.compiler.is_compiling() and not self._looked and may_be_read(sim):
            self._looked = True
            self._look(sim)
        return loss

    @torch.no_grad()
    def _look(self, sim: Similarity) -> None:
        """Warn of scores that are no cosines, or embeddings."""
        warn_of_vectors(sim)
        if self.margin < 1 and not getattr(self, "order", False):
            warn_of_units(type(self).__name__, sim)

    def _hinges_of(self, name: str, scores: Tensor) -> Tensor:
        """Return the loss of (B, B) scores, which errors call by ``name``."""
        check_square(name, scores)
        return self._hinges(Similarity.from_scores(scores))

    def extra_repr(self) -> str:
        """Return the options, for ``repr``."""
        return f"margin={self.margin}, max_violation={self.max_violation}"


class VSEPPLoss(HingeLoss):
    """VSE++ (fartashf/vsepp, ``model.py``), on inner products, or on ``-|max(0, s - im)|`` for
    ``measure="order"``.

    With ``max_violation`` only the hardest negative counts. In all hinge losses it may be changed
    later, by this attribute or by the methods ``max_violation_on()`` and ``max_violation_off()``.
    """

    def __init__(
        self, margin: float = 0, measure: str | bool | None = False, max_violation: bool = False
    ):
        super().__init__(margin, max_violation)
        one_of("measure", measure, "cosine", "order", False, None)
        self.order = measure == "order"

    def forward(self, im: Tensor, s: Tensor) -> Tensor:
        """Return the loss of (B, D) images and (B, D) texts."""
        return self._hinges(similarity(im, s, order=self.order))


class VSEInfinityLoss(VSEPPLoss):
    """VSE∞ (woodfrog/vse_infty, ``lib/loss.py``) and its descendants: :class:`VSEPPLoss` with an
    unused ``opt``.
    """

    def __init__(self, opt: Any = None, margin: float = 0, max_violation: bool = False):
        super().__init__(margin, max_violation=max_violation)


class SCANLoss(HingeLoss):
    """SCAN (kuanghuei/SCAN, ``model.py``), on ``score_function(im, s, s_l)``, (B, B) scores with
    images as rows.
    """

    def __init__(
        self, score_function: Callable[..., Tensor], margin: float = 0, max_violation: bool = False
    ):
        super().__init__(margin, max_violation)
        if not callable(score_function):
            raise TypeError(
                f"score_function: expected a function of (im, s, s_l), got {score_function!r}"
            )
        self.score_function = score_function

    def forward(self, im: Tensor, s: Tensor, s_l: Any) -> Tensor:
        """Return the loss of (B, R, D) regions and (B, L, D) words with the lengths ``s_l``."""
        return self._hinges_of("score_function", self.score_function(im, s, s_l))


class SGRAFLoss(HingeLoss):
    """SGRAF (Paranioar/SGRAF) and NAAF (CrossmodalGroup/NAAF, which passes the ``length``), on (B,
    B) scores.
    """

    def forward(self, scores: Tensor, length: int | None = None) -> Tensor:
        """Return the loss of (B, B) scores with images as rows; ``length`` has no effect."""
        return self._hinges_of("scores", scores)


class CHANLoss(HingeLoss):
    """CHAN (ppanzx/CHAN, ``lib/loss.py``), on (B, B) scores. Attributes of an ``opt`` replace the
    two arguments.
    """

    def __init__(self, opt: Any = None, margin: float = 0.2, max_violation: bool = False):
        if opt is not None:
            margin = setting(opt, "margin")
            max_violation = setting(opt, "max_violation")
        super().__init__(margin, max_violation)

    def forward(self, sims: Tensor) -> Tensor:
        """Return the loss of (B, B) scores with images as rows."""
        return self._hinges_of("sims", sims)


class HREMLoss(HingeLoss):
    """HREM (CrossmodalGroup/HREM, ``lib/loss.py``), called as ``criterion(im, s, img_ids)``.

    With ``opt.mask_repeat`` a text of the same image, by the (B,) integers ``img_ids``, is neither
    a negative nor a positive, as in the original. In :class:`itrloss.TripletLoss` with ids it is a
    positive with its own hinge.
    """

    def __init__(self, opt: Any, margin: float = 0.2, max_violation: bool = False):
        super().__init__(margin, max_violation)
        self.mask_repeat = bool(setting(opt, "mask_repeat"))

    def forward(
        self, im: Tensor, s: Tensor, img_ids: Any = None, sims: Tensor | None = None
    ) -> Tensor:
        """Return the loss of (B, D) images and texts; ``img_ids``: (B,) integers.

        ``sims``: (B, B) scores in place of the inner products, as LAPS passes them with its sets.
        """
        if sims is None:
            pairs = similarity(im, s)
        else:
            check_square("sims", sims)
            pairs = Similarity.from_scores(sims)
        if not self.mask_repeat:
            return self._hinges(pairs)
        ids = required_ids("img_ids", img_ids, im.device)
        if sims is None:
            others = similarity(im, s, ids=(ids, ids)).both
        else:
            others = Similarity.from_scores(sims, ids, ids).both
        threshold = self.margin - pairs.both.sum_of_positives(identity)  # (2B,)
        if self.max_violation:
            return (threshold + others.hardest_negatives().values).relu().sum()
        return others.sum(excess, shift=threshold).sum()
