"""The hinge losses of VSE++, VSE∞, SCAN, SGRAF, CHAN and HREM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..engine.answers import hinge, identity
from ._shared import HingeLoss, Ids, given, is_order, option, pairs_of, similarity_of, square


class VSEPPLoss(HingeLoss):
    """VSE++ (fartashf/vsepp, ``model.py``): the sum of hinges over all pairs and both directions.

    ``self.criterion = itrloss.compat.VSEPPLoss(margin=opt.margin, measure=opt.measure,
    max_violation=opt.max_violation)``; called as ``criterion(im, s)``.

    Args:
        margin: by how much a pair has to beat its rivals.
        measure: ``"order"`` for order embeddings, ``-|max(0, s - im)|``; else inner products.
        max_violation: the hardest negative instead of all of them.
    """

    def __init__(self, margin: float = 0, measure: str | bool | None = False, max_violation: bool = False):
        super().__init__(margin, max_violation)
        self.order = is_order("measure", measure)

    def forward(self, im: Tensor, s: Tensor) -> Tensor:  # (B, D) and (B, D) -> ()
        return self._hinges(pairs_of(im, s, order=self.order))


class VSEInfinityLoss(HingeLoss):
    """VSE∞ (woodfrog/vse_infty, ``lib/loss.py``) and the code bases that start from it: as :class:`VSEPPLoss`.

    ``self.criterion = itrloss.compat.VSEInfinityLoss(opt=opt, margin=opt.margin, max_violation=opt.max_violation)``;
    called as ``criterion(im, s)``. Its warm-up epoch calls ``max_violation_off()`` and ``max_violation_on()``.

    Args:
        opt: as there; not looked at.
        margin, max_violation: see :class:`VSEPPLoss`.
    """

    def __init__(self, opt: Any = None, margin: float = 0, max_violation: bool = False):
        super().__init__(margin, max_violation)

    def forward(self, im: Tensor, s: Tensor) -> Tensor:  # (B, D) and (B, D) -> ()
        return self._hinges(pairs_of(im, s))


class SCANLoss(HingeLoss):
    """SCAN (kuanghuei/SCAN, ``model.py``): hinges on scores that a function of the code base computes.

    ``self.criterion = itrloss.compat.SCANLoss(functools.partial(xattn_score_t2i, opt=opt), margin=opt.margin,
    max_violation=opt.max_violation)``, or ``xattn_score_i2t`` if ``opt.cross_attn`` is that; called as
    ``criterion(im, s, s_l)``.

    Args:
        score_function: (im, s, s_l) -> (B, B) scores, images as rows. A module's parameters become this one's.
        margin, max_violation: see :class:`VSEPPLoss`.
    """

    def __init__(self, score_function: Callable[..., Tensor], margin: float = 0, max_violation: bool = False):
        super().__init__(margin, max_violation)
        if not callable(score_function):
            got = type(score_function).__name__
            raise ValueError(f"score_function: expected a function of (im, s, s_l), got {got}")
        self.score_function = score_function

    def forward(self, im: Tensor, s: Tensor, s_l: Any) -> Tensor:  # (B, R, D), (B, L, D), lengths -> ()
        return self._hinges(square("score_function", self.score_function(im, s, s_l)))


class SGRAFLoss(HingeLoss):
    """SGRAF (Paranioar/SGRAF, ``model.py``): hinges on a score matrix.

    ``self.criterion = itrloss.compat.SGRAFLoss(margin=opt.margin, max_violation=opt.max_violation)``; called as
    ``criterion(scores)``, images as rows.

    Args:
        margin, max_violation: see :class:`VSEPPLoss`.
    """

    def forward(self, scores: Tensor) -> Tensor:  # (B, B) -> ()
        return self._hinges(square("scores", scores))


class CHANLoss(HingeLoss):
    """CHAN (ppanzx/CHAN, ``lib/loss.py``, ``ContrastiveLoss``): hinges on a score matrix.

    In ``get_criterion``: ``return itrloss.compat.CHANLoss(margin=opt.margin)``; called as ``criterion(sims)``.

    Args:
        opt: if given, its ``margin`` and ``max_violation`` count instead of the arguments.
        margin, max_violation: see :class:`VSEPPLoss`.
    """

    def __init__(self, opt: Any = None, margin: float = 0.2, max_violation: bool = False):
        if opt is not None:
            margin, max_violation = option(opt, "margin"), option(opt, "max_violation")
        super().__init__(margin, max_violation)

    def forward(self, sims: Tensor) -> Tensor:  # (B, B) -> ()
        return self._hinges(square("sims", sims))


class HREMLoss(HingeLoss):
    """HREM (CrossmodalGroup/HREM, ``lib/loss.py``, ``ContrastiveLoss``): a text of the same image is no negative.

    In ``loss_select``: ``criterion = itrloss.compat.HREMLoss(opt=opt, margin=opt.margin,
    max_violation=opt.max_violation)``; called as ``criterion(im, s, img_ids)``. As there, such a text is no positive
    either. In :class:`itrloss.TripletLoss` with ids it is one, with a hinge of its own.

    Args:
        opt: its ``mask_repeat`` says whether ``img_ids`` count; if not, only the pair itself is no negative.
        margin, max_violation: see :class:`VSEPPLoss`.
    """

    def __init__(self, opt: Any, margin: float = 0.2, max_violation: bool = False):
        super().__init__(margin, max_violation)
        self.mask_repeat = bool(option(opt, "mask_repeat"))

    def forward(self, im: Tensor, s: Tensor, img_ids: Ids | None = None) -> Tensor:  # (B, D), (B, D), (B,) -> ()
        """The loss; ``img_ids`` say which texts show the same image, and are needed if ``opt.mask_repeat``."""
        pairs = pairs_of(im, s)
        if not self.mask_repeat:
            return self._hinges(pairs)
        ids = torch.as_tensor(given("img_ids", img_ids), device=im.device)
        threshold = self.margin - pairs.both.sum_of_positives(identity)  # a pair's own score, of image and text
        if self.max_violation:
            return (threshold + similarity_of(im, s, (ids, ids)).both.hardest_negatives().values).relu().sum()
        # max(threshold + S, 0) is the hinge at -S, which is the score of -im
        return similarity_of(-im, s, (ids, ids)).both.sum(hinge, threshold).sum()
