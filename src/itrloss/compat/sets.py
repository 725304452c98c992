"""The losses of PVSE and DivE, on sets of embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..engine.scores import compute_dtype
from ..similarity import Similarity
from ._shared import HingeLoss, Parts, given, option, order_scores, pairs_of

MeanOrSum = Literal["mean", "sum"]


class PVSELoss(HingeLoss):
    """PVSE (yalesong/pvse, ``loss.py``): hinges on the best of K x K scores, and two regularisers.

    ``criterion = itrloss.compat.PVSELoss(args)``; called as ``criterion(img, txt, img_r, txt_r)``, returns the loss and
    its parts: ``ranking_loss``, and without their weights ``div_loss`` and ``mmd_loss``.

    Differences: the parts are detached, so that a log of them holds no graph. The members of sets are scaled to unit
    length once more. The discrepancy takes no (BK, BK, D) tensor.

    Args:
        opt: ``margin`` (1 if it has none), ``num_embeds`` (K; 1), ``max_violation``, ``order`` (False), ``div_weight``,
            ``mmd_weight`` (0).
        reduction: ``"mean"``, in which each pair's own hinge of 0 counts, or ``"sum"``.
    """

    def __init__(self, opt: Any, reduction: MeanOrSum = "mean"):
        super().__init__(option(opt, "margin", 1.0), option(opt, "max_violation", False))
        self.k, self.order = option(opt, "num_embeds", 1), bool(option(opt, "order", False))
        self.weights = {f"{name}_loss": option(opt, f"{name}_weight", 0.0) for name in ("div", "mmd")}
        self.reduction: MeanOrSum = _mean_or_sum(reduction)

    def forward(
        self,
        img: Tensor,  # (B, K, D), or (B, D) for K = 1
        txt: Tensor,  # likewise
        img_r: Tensor | None = None,  # (B, K, D) residuals, for div_weight
        txt_r: Tensor | None = None,
    ) -> tuple[Tensor, Parts]:
        """The loss and its parts by name, which are detached."""
        n, k = len(img), self.k
        if k == 1:
            sim = pairs_of(img, txt, ("img", "txt"), self.order)
        else:
            for name, x in (("img", img), ("txt", txt)):
                if x.dim() != 3 or x.shape[:2] != (n, k):
                    raise ValueError(f"{name}: expected shape ({n}, {k}, D), got {tuple(x.shape)}")
            if self.order:
                scores = order_scores(img.flatten(0, 1), txt.flatten(0, 1)).view(n, k, n, k).amax((1, 3))
            else:
                scores = functional.set_similarity(img, txt, "max")
            sim = Similarity.from_scores(scores)
        hinges = 1 if self.reduction == "sum" else n if self.max_violation else n * n
        parts = {"ranking_loss": self._hinges(sim) / hinges}
        if k > 1 and self.weights["div_loss"] > 0:
            parts["div_loss"] = _sameness("img_r", img_r, self.reduction) + _sameness("txt_r", txt_r, self.reduction)
        if k > 1 and self.weights["mmd_loss"] > 0:
            parts["mmd_loss"] = _discrepancy(img.flatten(0, 1), txt.flatten(0, 1), self.reduction)
        return _weighed(parts, self.weights)


class DivELoss(HingeLoss):
    """DivE (kdwonn/DivE, ``loss.py``, ``AsymmetricTripletLoss``): an image's set against the sets of all its texts.

    ``criterion = itrloss.compat.DivELoss(img_set_size=args.img_num_embeds, txt_set_size=args.txt_num_embeds,
    similarity_fn=train_similarity_fn, opt=args, txt_per_img=txt_per_img)``; called as ``criterion(img_embs, txt_embs,
    img_r, txt_r)``, returns the loss and its parts: ``t2i_loss``, ``i2t_loss``, and without their weights ``div_loss``,
    ``mmd_loss`` and ``unif_loss``.

    Differences: the parts are detached, so that a log of them holds no graph. The lengths of the embeddings are not
    recorded, which makes an accelerator wait. One image alone gives 0, not nan. ``opt.semi_hard_triplet`` is refused;
    ``opt.qreg_weight`` has no effect, as there while no queries are passed, which its trainer does not.

    Args:
        img_set_size, txt_set_size: number of embeddings in a set.
        similarity_fn: of (N * img_set_size, D) and (M * txt_set_size, D) to (N, M); or None for smooth-Chamfer by
            :func:`itrloss.functional.set_similarity` with ``opt.temperature`` as α.
        opt: ``img_num_embeds``, ``txt_num_embeds``; ``margin`` (1 if it has none), ``max_violation`` (False),
            ``div_weight``, ``mmd_weight``, ``unif_weight`` (0), ``unif_residual`` (False: embeddings; True: residuals).
        reduction: of diversity and discrepancy, ``"mean"`` or ``"sum"``. Hinges are averaged.
        txt_per_img: texts of an image, consecutive in the batch.
    """

    def __init__(
        self,
        img_set_size: int,
        txt_set_size: int,
        similarity_fn: Callable[[Tensor, Tensor], Tensor] | None,
        opt: Any,
        reduction: MeanOrSum = "mean",
        txt_per_img: int = 5,
    ):
        super().__init__(option(opt, "margin", 1.0), option(opt, "max_violation", False))
        if option(opt, "semi_hard_triplet", False):
            raise ValueError("opt: semi_hard_triplet is not supported")
        self.set_sizes, self.similarity_fn = (img_set_size, txt_set_size), similarity_fn
        self.num_embeds = option(opt, "img_num_embeds"), option(opt, "txt_num_embeds")
        self.set_per_img = txt_per_img * self.num_embeds[1] // txt_set_size
        self.reduction: MeanOrSum = _mean_or_sum(reduction)
        self.unif_residual = bool(option(opt, "unif_residual", False))
        self.weights = {f"{name}_loss": option(opt, f"{name}_weight", 0.0) for name in ("div", "mmd", "unif")}
        if similarity_fn is None:
            self.temperature = option(opt, "temperature")
            if option(opt, "denominator", 2) != 2 or option(opt, "temperature_txt_scale", 1) != 1:
                unlike = "opt.denominator is not 2 or opt.temperature_txt_scale not 1"
                raise ValueError(f"similarity_fn: expected a function where {unlike}, got None")

    def forward(
        self,
        img_embs: Tensor,  # (N, K, D)
        txt_embs: Tensor,  # (N * texts of an image, K, D)
        img_r: Tensor | None = None,  # residuals of the same shapes, for div_weight and unif_residual
        txt_r: Tensor | None = None,
    ) -> tuple[Tensor, Parts]:
        """The loss and its parts by name, which are detached."""
        img, txt = (x.reshape(-1, x.shape[-1]) for x in (img_embs, txt_embs))
        n, m = len(img) // self.set_sizes[0], len(txt) // self.set_sizes[1]
        if m != n * self.set_per_img:
            raise ValueError(f"txt_embs: expected {n * self.set_per_img} sets for {n} images, got {m}")
        if self.similarity_fn is not None:
            scores = self.similarity_fn(img, txt)
        else:
            sets = (x.unflatten(0, (-1, size)) for x, size in zip((img, txt), self.set_sizes, strict=True))
            scores = functional.set_similarity(*sets, "smooth_chamfer", self.temperature)  # type: ignore[misc, arg-type]
        ids = torch.arange(n, device=img.device)
        rows, cols = self._hinges(Similarity.from_scores(scores, ids, ids.repeat_interleave(self.set_per_img)), "none")
        negatives = (1, 1) if self.max_violation else (max(1, m - self.set_per_img), max(1, n - 1))
        parts: Parts = {"t2i_loss": cols.sum() / (m * negatives[1]), "i2t_loss": rows.sum() / (m * negatives[0])}
        residuals, zero = (img_r, txt_r), rows.new_zeros(())
        sides = [x for x in zip(("img_r", "txt_r"), residuals, (img, txt), self.num_embeds, strict=True) if x[3] > 1]
        if self.weights["div_loss"] > 0:
            parts["div_loss"] = sum((_sameness(name, r, self.reduction) for name, r, _, _ in sides), zero)
        if self.weights["mmd_loss"] > 0:
            parts["mmd_loss"] = _discrepancy(img, txt, self.reduction)
        if self.weights["unif_loss"] > 0:
            if self.unif_residual:
                sides = [(name, r, F.normalize(given(name, r), dim=-1), k) for name, r, _, k in sides]
            parts["unif_loss"] = sum((_crowding(x, k) for _, _, x, k in sides), zero)
        return _weighed(parts, self.weights)


def _weighed(parts: Parts, weights: dict[str, float]) -> tuple[Tensor, Parts]:
    """The sum, in which a part without a weight has 1, and the parts without a gradient."""
    loss = torch.stack([weights.get(name, 1.0) * x for name, x in parts.items()]).sum()
    return loss, {name: x.detach() for name, x in parts.items()}


def _sameness(name: str, residuals: Tensor | None, reduction: MeanOrSum) -> Tensor:
    """Frobenius norm of the cosines between a set's members, divided by K²: the orthogonal loss without slack."""
    return functional.dynamic_orthogonal_loss(given(name, residuals), None, 0.0, "frobenius", reduction)


def _discrepancy(x: Tensor, y: Tensor, reduction: MeanOrSum) -> Tensor:  # (N, D) and (M, D) -> ()
    """Maximum mean discrepancy with the kernel ``exp(-|a - b| / 2)``, whose distance these code bases do not square."""
    x, y = (e.to(compute_dtype(e)) for e in (x, y))
    kernels = [torch.exp(-0.5 * torch.cdist(a, b)) for a, b in ((x, x), (x, y), (y, y))]
    xx, xy, yy = (k.mean() if reduction == "mean" else k.sum() for k in kernels)
    return xx - 2 * xy + yy


def _crowding(x: Tensor, k: int) -> Tensor:
    """Mean of ``exp(-2 |a - b|²)`` over the pairs of members of a set."""
    sets = x.reshape(-1, k, x.shape[-1])
    first, second = torch.triu_indices(k, k, 1, device=x.device)
    return torch.exp(-2 * (sets[:, first] - sets[:, second]).square().sum(-1)).mean()


def _mean_or_sum(reduction: Any) -> MeanOrSum:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: expected 'mean' or 'sum', got {reduction!r}")
    return reduction
