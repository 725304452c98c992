"""The losses of PVSE and DivE on sets of embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..checks import one_of
from ..engine.vectors import compute_dtype
from ..similarity import Similarity
from .hinge import HingeLoss, option, required, similarity

Parts = dict[str, Tensor]


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    """Return ``exp(-|a - b| / 2)`` of all rows a and b; these code bases do not square the
    distance.
    """
    distances = torch.cdist(x, y)
    if x is y:  # cdist has the root of a rounding error there, 8e-4 in float32
        distances = distances.masked_fill(torch.eye(len(x), dtype=torch.bool, device=x.device), 0.0)
    return torch.exp(-0.5 * distances)


class Regularizers:
    """The weighted regularisers of PVSE and DivE on the sets of images and of texts, by the
    settings ``opt``.
    """

    def __init__(self, opt: Any, sizes: tuple[int, int], reduction: Any = "mean"):
        one_of("reduction", reduction, "mean", "sum")
        self.sizes, self.reduction, self.unif_residual = (
            sizes,
            reduction,
            bool(option(opt, "unif_residual", False)),
        )
        self.weights = {name: option(opt, f"{name}_weight", 0.0) for name in ("unif", "div", "mmd")}

    @classmethod
    def pvse(cls, opt: Any, reduction: Any = "mean") -> Regularizers:
        """Return those of PVSE, which has no uniformity, and none at all with one embedding."""
        k = option(opt, "num_embeds", 1)
        made = cls(opt, (k, k), reduction)
        made.weights |= {"unif": 0.0} if k > 1 else dict.fromkeys(made.weights, 0.0)
        return made

    @classmethod
    def dive(cls, opt: Any, reduction: Any = "mean") -> Regularizers:
        """Return those of DivE."""
        return cls(opt, (option(opt, "img_num_embeds"), option(opt, "txt_num_embeds")), reduction)

    def total(
        self, parts: Parts, img: Tensor, txt: Tensor, img_r: Any, txt_r: Any
    ) -> tuple[Tensor, Parts]:
        """Return the sum of parts and weighted regularisers, and each of these unweighted and
        detached.
        """
        sides = zip(("img_r", "txt_r"), (img_r, txt_r), (img, txt), self.sizes, strict=True)
        several = [side for side in sides if side[3] > 1]
        zero = img.new_zeros((), dtype=compute_dtype(img))
        if self.weights["unif"] > 0:
            parts["unif"] = zero
            # mean of exp(-2 |a - b|²) over the pairs of members of a set
            for name, r, x, k in several:
                x = (required(name, r) if self.unif_residual else x).to(zero.dtype)
                x = F.normalize(x, dim=-1) if self.unif_residual else x
                x = x.reshape(-1, k, x.shape[-1])
                first, second = torch.triu_indices(k, k, 1, device=x.device)
                parts["unif"] = (
                    parts["unif"]
                    + (-2 * (x[:, first] - x[:, second]).square().sum(-1)).exp().mean()
                )
        if self.weights["div"] > 0:  # the orthogonal loss without slack
            options = None, 0.0, "frobenius", self.reduction
            values = (
                functional.dynamic_orthogonal_loss(required(name, r), *options)
                for name, r, *_ in several
            )
            parts["div"] = sum(values, zero)
        if self.weights["mmd"] > 0:
            x, y = (e.reshape(-1, e.shape[-1]).to(compute_dtype(e)) for e in (img, txt))
            reduce = torch.mean if self.reduction == "mean" else torch.sum
            xx, xy, yy = (reduce(_kernel(a, b)) for a, b in ((x, x), (x, y), (y, y)))
            parts["mmd"] = xx - 2 * xy + yy
        loss = torch.stack([self.weights.get(name, 1.0) * x for name, x in parts.items()]).sum()
        return loss, {f"{name}_loss": x.detach() for name, x in parts.items()}


class PVSELoss(HingeLoss):
    """PVSE (yalesong/pvse, ``loss.py``): hinges on the best of K x K scores, and two regularisers.

    Called as ``criterion(img, txt, img_r, txt_r)``, returns the loss and its parts:
    ``ranking_loss``, ``div_loss`` and ``mmd_loss``. ``opt`` and ``reduction`` are the original's.
    Difference: detached `Parts`_.
    """

    def __init__(self, opt: Any, reduction: Any = "mean"):
        super().__init__(option(opt, "margin", 1.0), option(opt, "max_violation", False))
        self.k, self.order = option(opt, "num_embeds", 1), bool(option(opt, "order", False))
        self.regularizers = Regularizers.pvse(opt, reduction)

    def forward(
        self, img: Tensor, txt: Tensor, img_r: Any = None, txt_r: Any = None
    ) -> tuple[Tensor, Parts]:
        """Return the loss and its parts for (B, K, D) embeddings, or (B, D) if K = 1, and their
        residuals.
        """
        n, k = len(img), self.k
        for name, x in (("img", img), ("txt", txt)):
            if x.shape[:-1].numel() != n * k:
                raise ValueError(f"{name}: expected shape ({n}, {k}, D), got {tuple(x.shape)}")
        sim = similarity(
            img.reshape(n * k, -1), txt.reshape(n * k, -1), ("img", "txt"), order=self.order
        )
        if k > 1:
            sim = Similarity.from_scores(sim.scores().view(n, k, n, k).amax((1, 3)))
        # The mean over n * n also counts the n pairs themselves, whose hinges are 0.
        hinges = 1 if self.regularizers.reduction == "sum" else n if self.max_violation else n * n
        return self.regularizers.total(
            {"ranking": self._hinges(sim) / hinges}, img, txt, img_r, txt_r
        )


class DivELoss(HingeLoss):
    """DivE (kdwonn/DivE, ``loss.py``, ``TripletLoss``): an image's set against the sets of all its
    texts.

    Called as ``criterion(img_embs, txt_embs, img_r, txt_r)``, returns the loss and its parts:
    ``t2i_loss``, ``i2t_loss``, ``div_loss``, ``mmd_loss`` and ``unif_loss``. Arguments are the
    original's; ``similarity_fn=None`` is smooth-Chamfer by
    :func:`itrloss.functional.set_similarity` of inner products, with ``opt.temperature`` as α.
    Differences: detached `Parts`_. Lengths are not recorded, as this would synchronise with an
    accelerator. A single image gives 0, not nan. ``opt.semi_hard_triplet`` raises an error.
    ``opt.qreg_weight`` has no effect, as in DivE's trainer.
    """

    def __init__(
        self,
        img_set_size,
        txt_set_size,
        similarity_fn,
        opt: Any,
        reduction: Any = "mean",
        txt_per_img=5,
    ):
        super().__init__(option(opt, "margin", 1.0), option(opt, "max_violation", False))
        if option(opt, "semi_hard_triplet", False):
            raise ValueError("opt: semi_hard_triplet is not supported")
        if similarity_fn is None and (
            option(opt, "denominator", 2),
            option(opt, "temperature_txt_scale", 1),
        ) != (2, 1):
            raise ValueError(
                "similarity_fn: expected a function for this denominator or text temperature, got None"
            )
        self.set_sizes, self.similarity_fn = (img_set_size, txt_set_size), similarity_fn
        self.regularizers = Regularizers.dive(opt, reduction)
        self.set_per_img = txt_per_img * self.regularizers.sizes[1] // txt_set_size
        self.temperature: Any = option(opt, "temperature") if similarity_fn is None else None

    def forward(
        self, img_embs: Tensor, txt_embs: Tensor, img_r: Any = None, txt_r: Any = None
    ) -> tuple[Tensor, Parts]:
        """Return the loss and its parts for (N, K, D) image embeddings, those of all texts, and
        residuals.
        """
        img, txt = (x.reshape(-1, x.shape[-1]) for x in (img_embs, txt_embs))
        n, m = len(img) // self.set_sizes[0], len(txt) // self.set_sizes[1]
        if m != n * self.set_per_img:
            raise ValueError(
                f"txt_embs: expected {n * self.set_per_img} sets for {n} images, got {m}"
            )
        if self.similarity_fn is not None:
            scores = self.similarity_fn(img, txt)
        else:
            sets = img.unflatten(0, (n, -1)), txt.unflatten(0, (m, -1))
            scores = functional.set_similarity(
                *sets, "smooth_chamfer", self.temperature, normalize=False
            )
        ids = torch.arange(n, device=img.device)
        rows, cols = self._hinges(
            Similarity.from_scores(scores, ids, ids.repeat_interleave(self.set_per_img)), "none"
        )
        of_image, of_text = (
            (1, 1) if self.max_violation else (max(1, m - self.set_per_img), max(1, n - 1))
        )
        parts = {"t2i": cols.sum() / (m * of_text), "i2t": rows.sum() / (m * of_image)}
        return self.regularizers.total(parts, img, txt, img_r, txt_r)
