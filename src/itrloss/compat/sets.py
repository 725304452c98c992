"""The losses of PVSE and DivE on sets of embeddings."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..checks import one_of
from ..engine.vectors import compute_dtype
from ..similarity import Similarity
from .hinge import HingeLoss, required, setting, similarity

Parts = dict[str, Tensor]


def zero_of(x: Tensor) -> Tensor:
    """Return the value of a part that a loss of embeddings ``x`` does not have."""
    return x.new_zeros((), dtype=compute_dtype(x))


def members_of(sets: Tensor) -> Tensor:
    """Return the members (N K, D) of sets (N, K, D)."""
    return sets.reshape(-1, sets.shape[-1])


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    """Return ``exp(-|a - b| / 2)`` of all rows a and b; these code bases do not square the
    distance.
    """
    distances = torch.cdist(x, y)
    if x is y:  # cdist has the root of a rounding error there, 8e-4 in float32
        distances = distances.masked_fill(torch.eye(len(x), dtype=torch.bool, device=x.device), 0.0)
    return torch.exp(-0.5 * distances)


class _Side(NamedTuple):
    """The sets of images or of texts: K members each, and their residuals."""

    members: Tensor  # (N, K, D) or (N K, D)
    residuals: Tensor | None  # (N, K, D)
    size: int  # K
    name: str  # of the argument that holds the residuals

    def required(self) -> Tensor:
        """Return the residuals, which are not None."""
        return required(self.name, self.residuals)


class Regularizers:
    """The weighted regularisers of PVSE and DivE on the sets of images and of texts.

    Args:
        opt: the code base's settings.
        code_base: ``"pvse"``, which has no uniformity, and none at all for one embedding a set; or
            ``"dive"``.
        reduction: of the orthogonal loss and of the kernels, ``"mean"`` or ``"sum"``.
    """

    def __init__(self, opt: Any, code_base: str, reduction: Any = "mean"):
        one_of("reduction", reduction, "mean", "sum")
        self.reduction = reduction
        kinds = ("unif", "div", "mmd")
        if code_base == "dive":
            self.sizes = (setting(opt, "img_num_embeds"), setting(opt, "txt_num_embeds"))
        else:
            k = setting(opt, "num_embeds", 1)
            self.sizes = (k, k)
            kinds = ("div", "mmd") if k > 1 else ()
        weights = {name: setting(opt, f"{name}_weight", 0.0) for name in kinds}
        self.weights = {name: weight for name, weight in weights.items() if weight > 0}
        self.unif_residual = bool(setting(opt, "unif_residual", False))

    def check_sizes(self, img: Tensor, txt: Tensor) -> None:
        """Raise an error unless sets are (N, K, D), or (N, D) for K = 1, with the K of ``opt``."""
        for name, x, k in zip(("img", "txt"), (img, txt), self.sizes, strict=True):
            single = k == 1 and x.dim() == 2
            if x.shape[1:-1] != (k,) and not single:
                expected = f"shape (N, {k}, D), as K is {k} in opt"
                raise ValueError(f"{name}: expected {expected}, got {tuple(x.shape)}")

    def total(
        self, parts: Parts, img: Tensor, txt: Tensor, img_r: Any, txt_r: Any
    ) -> tuple[Tensor, Parts]:
        """Return the sum of parts and weighted regularisers, and each of these unweighted and
        detached.
        """
        images = _Side(img, img_r, self.sizes[0], "img_r")
        texts = _Side(txt, txt_r, self.sizes[1], "txt_r")
        several = [side for side in (images, texts) if side.size > 1]
        zero = zero_of(img)
        if "unif" in self.weights:
            parts["unif"] = sum(map(self._crowding, several), zero)
        if "div" in self.weights:
            parts["div"] = sum(map(self._correlation, several), zero)
        if "mmd" in self.weights:
            parts["mmd"] = self._discrepancy(img, txt)
        loss = torch.stack([self.weights.get(name, 1.0) * x for name, x in parts.items()]).sum()
        return loss, {f"{name}_loss": x.detach() for name, x in parts.items()}

    def _crowding(self, side: _Side) -> Tensor:
        """Return the mean of ``exp(-2 |a - b|²)`` over the pairs of members of a set."""
        x = side.required() if self.unif_residual else side.members
        x = x.to(compute_dtype(side.members))
        if self.unif_residual:
            x = F.normalize(x, dim=-1)
        x = x.reshape(-1, side.size, x.shape[-1])  # (N, K, D)
        first, second = torch.triu_indices(side.size, side.size, 1, device=x.device)
        distances = (x[:, first] - x[:, second]).square().sum(-1)
        return (-2 * distances).exp().mean()

    def _correlation(self, side: _Side) -> Tensor:
        """Return the orthogonal loss without slack, of the residuals."""
        return functional.dynamic_orthogonal_loss(
            side.required(), None, 0.0, "frobenius", self.reduction
        )

    def _discrepancy(self, img: Tensor, txt: Tensor) -> Tensor:
        """Return the maximum mean discrepancy of all images' members and all texts'."""
        x = members_of(img).to(compute_dtype(img))
        y = members_of(txt).to(compute_dtype(txt))
        reduce = torch.mean if self.reduction == "mean" else torch.sum
        within = reduce(_kernel(x, x)) + reduce(_kernel(y, y))
        return within - 2 * reduce(_kernel(x, y))


class PVSELoss(HingeLoss):
    """PVSE (yalesong/pvse, ``loss.py``): hinges on the best of K x K scores, and two regularisers.

    Called as ``criterion(img, txt, img_r, txt_r)``, returns the loss and its parts:
    ``ranking_loss``, ``div_loss`` and ``mmd_loss``. ``opt`` and ``reduction`` are the original's.
    Difference: detached `Parts`_.
    """

    def __init__(self, opt: Any, reduction: Any = "mean"):
        super().__init__(setting(opt, "margin", 1.0), setting(opt, "max_violation", False))
        self.order = bool(setting(opt, "order", False))
        self.regularizers = Regularizers(opt, "pvse", reduction)

    def forward(
        self, img: Tensor, txt: Tensor, img_r: Any = None, txt_r: Any = None
    ) -> tuple[Tensor, Parts]:
        """Return the loss and its parts for (B, K, D) embeddings, or (B, D) if K = 1, and their
        residuals.
        """
        self.regularizers.check_sizes(img, txt)
        n = len(img)
        k, _ = self.regularizers.sizes
        sim = similarity(members_of(img), members_of(txt), ("img", "txt"), order=self.order)
        if k > 1:
            best = sim.scores().view(n, k, n, k).amax((1, 3))  # (N, N)
            sim = Similarity.from_scores(best)
        hinges = 1
        if self.regularizers.reduction == "mean":
            # This also counts the n pairs themselves, whose hinges are 0.
            hinges = n if self.max_violation else n * n
        parts = {"ranking": self._hinges(sim) / hinges}
        return self.regularizers.total(parts, img, txt, img_r, txt_r)


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
        super().__init__(setting(opt, "margin", 1.0), setting(opt, "max_violation", False))
        if setting(opt, "semi_hard_triplet", False):
            raise ValueError("opt: semi_hard_triplet is not supported")
        self.temperature: Any = None
        if similarity_fn is None:
            denominator = setting(opt, "denominator", 2)
            if (denominator, setting(opt, "temperature_txt_scale", 1)) != (2, 1):
                expected = "a function for this denominator or text temperature"
                raise ValueError(f"similarity_fn: expected {expected}, got None")
            self.temperature = setting(opt, "temperature")
        self.similarity_fn = similarity_fn
        self.set_sizes = (img_set_size, txt_set_size)
        self.regularizers = Regularizers(opt, "dive", reduction)
        self.set_per_img = txt_per_img * self.regularizers.sizes[1] // txt_set_size

    def forward(
        self, img_embs: Tensor, txt_embs: Tensor, img_r: Any = None, txt_r: Any = None
    ) -> tuple[Tensor, Parts]:
        """Return the loss and its parts for (N, K, D) embeddings of images, (M, K, D) of all their
        texts, and residuals.
        """
        img = members_of(img_embs)
        txt = members_of(txt_embs)
        n = len(img) // self.set_sizes[0]
        m = len(txt) // self.set_sizes[1]
        per_image = self.set_per_img
        if m != n * per_image:
            raise ValueError(f"txt_embs: expected {n * per_image} sets for {n} images, got {m}")
        if self.similarity_fn is not None:
            scores = self.similarity_fn(img, txt)
        else:
            scores = functional.set_similarity(
                img.unflatten(0, (n, -1)),
                txt.unflatten(0, (m, -1)),
                "smooth_chamfer",
                self.temperature,
                normalize=False,
            )
        ids = torch.arange(n, device=img.device)
        sim = Similarity.from_scores(scores, ids, ids.repeat_interleave(per_image))
        of_images, of_texts = self._hinges(sim, "none")  # (N,) and (M,)
        i2t = of_images.sum() / m
        t2i = of_texts.sum() / m
        if not self.max_violation:
            i2t = i2t / max(1, m - per_image)
            t2i = t2i / max(1, n - 1)
        return self.regularizers.total({"t2i": t2i, "i2t": i2t}, img, txt, img_r, txt_r)
