"""The hinge losses of VSE++, VSE∞, SCAN, SGRAF, CHAN, HREM, PVSE, DivE: one under eight calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from ..checks import IdsLike, as_ids, one_of
from ..losses import TripletLoss
from .adapter import (
    DivECriterion,
    HREMCriterion,
    PVSECriterion,
    SCANCriterion,
    ScoresCriterion,
    VSECriterion,
)
from .arguments import order_scores, setting
from .regularizers import Parts


def hinges(margin: float, max_violation: bool, **options: Any) -> TripletLoss:
    """Return the sum of hinges of inner products over all pairs and both directions, with all
    negatives or each anchor's hardest one.
    """
    mining = "hardest" if max_violation else "all"
    return TripletLoss(margin, mining, normalize=False, **options)


class VSEPPLoss(VSECriterion):
    """VSE++ (fartashf/vsepp, ``model.py``), on inner products, or on ``-|max(0, s - im)|`` for
    ``measure="order"``; called as ``criterion(im, s)``.

    With ``max_violation`` only the hardest negative counts. In all hinge losses it may be changed
    later, by this attribute or by the methods ``max_violation_on()`` and ``max_violation_off()``.
    """

    def __init__(
        self, margin: float = 0, measure: str | bool | None = False, max_violation: bool = False
    ):
        one_of("measure", measure, "cosine", "order", False, None)
        scores = order_scores if measure == "order" else None
        super().__init__(hinges(margin, max_violation), "vsepp", scores)


class VSEInfinityLoss(VSECriterion):
    """VSE∞ (woodfrog/vse_infty, ``lib/loss.py``) and its descendants: :class:`VSEPPLoss` with an
    unused ``opt``.
    """

    def __init__(self, opt: object = None, margin: float = 0, max_violation: bool = False):
        super().__init__(hinges(margin, max_violation), "vse_inf")


class SCANLoss(SCANCriterion):
    """SCAN (kuanghuei/SCAN, ``model.py``), on ``score_function(im, s, s_l)``, (B, B) scores with
    images as rows, of (B, R, D) regions and (B, L, D) words with the lengths ``s_l``.
    """

    def __init__(
        self, score_function: Callable[..., Tensor], margin: float = 0, max_violation: bool = False
    ):
        super().__init__(hinges(margin, max_violation), "scan", score_function)


class SGRAFLoss(ScoresCriterion):
    """SGRAF (Paranioar/SGRAF) and NAAF (CrossmodalGroup/NAAF, which passes the ``length``), on (B,
    B) scores with images as rows. ``opt``, which IMRAM and RCAR pass, has no effect.
    """

    def __init__(self, margin: float = 0, max_violation: bool = False, *, opt: object = None):
        super().__init__(hinges(margin, max_violation), "sgraf")


class CHANLoss(ScoresCriterion):
    """CHAN (ppanzx/CHAN, ``lib/loss.py``), on (B, B) scores with images as rows. Attributes of an
    ``opt`` replace the two arguments.
    """

    def __init__(self, opt: object = None, margin: float = 0.2, max_violation: bool = False):
        if opt is not None:
            margin = setting(opt, "margin")
            max_violation = setting(opt, "max_violation")
        super().__init__(hinges(margin, max_violation), "chan")


class HREMLoss(HREMCriterion):
    """HREM (CrossmodalGroup/HREM, ``lib/loss.py``), called as ``criterion(im, s, img_ids)``.

    With ``opt.mask_repeat`` a text of the same image, by the (B,) integers ``img_ids``, is neither
    a negative nor a positive, as in the original. In :class:`itrloss.TripletLoss` with ids it is a
    positive with its own hinge. A fourth argument ``sims`` has (B, B) scores in place of the inner
    products, as LAPS passes them with its sets.
    """

    def __init__(self, opt: object, margin: float = 0.2, max_violation: bool = False):
        super().__init__(hinges(margin, max_violation, groups="other"), "hrem")
        self.mask_repeat = bool(setting(opt, "mask_repeat"))

    def _labels(self, img_ids: IdsLike | None, im: Tensor) -> dict[str, IdsLike | None]:
        """Return the groups of images that are no negatives of each other."""
        if not self.mask_repeat:
            return {}
        return {"image_groups": as_ids("img_ids", img_ids, len(im), im.device)}


class PVSELoss(PVSECriterion):
    """PVSE (yalesong/pvse, ``loss.py``): hinges on the best of K x K scores, and two regularisers.

    Called as ``criterion(img, txt, img_r, txt_r)`` with (B, K, D) embeddings, or (B, D) if K = 1,
    and their residuals, returns the loss and its parts: ``ranking_loss``, ``div_loss`` and
    ``mmd_loss``. ``opt`` and ``reduction`` are the original's. Difference: detached `Parts`_.
    """

    def __init__(self, opt: object, reduction: Literal["mean", "sum"] = "mean"):
        loss = hinges(setting(opt, "margin", 1.0), setting(opt, "max_violation", False))
        scores = order_scores if setting(opt, "order", False) else None
        super().__init__(loss, "pvse", scores, opt, reduction)
        self.is_mean = reduction == "mean"

    def _parts(self, scores: Tensor, **ids: Tensor) -> Parts:
        """Return the sum of the hinges, or their mean."""
        parts = super()._parts(scores)
        if self.is_mean:
            # This also counts the pairs themselves, whose hinges are 0.
            parts["ranking"] = parts["ranking"] / (
                len(scores) if self.max_violation else scores.numel()
            )
        return parts


class DivELoss(DivECriterion):
    """DivE (kdwonn/DivE, ``loss.py``, ``TripletLoss``): an image's set against the sets of all its
    texts.

    Called as ``criterion(img_embs, txt_embs, img_r, txt_r)`` with (N, K, D) embeddings of images,
    (M, K, D) of all their texts, and residuals, returns the loss and its parts: ``t2i_loss``,
    ``i2t_loss``, ``div_loss``, ``mmd_loss`` and ``unif_loss``. Arguments are the original's; the
    sizes among them have no effect, as the embeddings have them, too.
    ``similarity_fn=None`` is smooth-Chamfer by :func:`itrloss.functional.set_similarity` of inner
    products, with ``opt.temperature`` as α.
    Differences: detached `Parts`_. Lengths are not recorded, as this would synchronise with an
    accelerator. A single image gives 0, not nan. ``opt.semi_hard_triplet`` raises an error.
    ``opt.qreg_weight`` has no effect, as in DivE's trainer.
    """

    def __init__(
        self,
        img_set_size,
        txt_set_size,
        similarity_fn,
        opt: object,
        reduction: Literal["mean", "sum"] = "mean",
        txt_per_img=5,
    ):
        if setting(opt, "semi_hard_triplet", False):
            raise ValueError("opt: semi_hard_triplet is not supported")
        margin = setting(opt, "margin", 1.0)
        loss = hinges(margin, setting(opt, "max_violation", False), reduction="none")
        super().__init__(loss, "dive", similarity_fn, opt, reduction)
        if similarity_fn is None:
            denominator = setting(opt, "denominator", 2)
            if (denominator, setting(opt, "temperature_txt_scale", 1)) != (2, 1):
                expected = "a function for this denominator or text temperature"
                raise ValueError(f"similarity_fn: expected {expected}, got None")
            alpha = setting(opt, "temperature")
            self.set_options = {"aggregation": "smooth_chamfer", "alpha": alpha}

    def _parts(self, scores: Tensor, **ids: Tensor) -> Parts:
        """Return the means of the hinges of the texts and of the images."""
        n, m = scores.shape
        of_images, of_texts = self.loss(scores=scores, **ids)  # (N,) and (M,)
        i2t = of_images.sum() / m
        t2i = of_texts.sum() / m
        if not self.max_violation:
            i2t = i2t / max(1, m - m // n)
            t2i = t2i / max(1, n - 1)
        return {"t2i": t2i, "i2t": i2t}
