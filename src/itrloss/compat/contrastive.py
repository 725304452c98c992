"""The losses of HAL and USER, with memory banks and queues, and of open_clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import distributed, functional
from ..anchors import Anchors
from ..checks import CheckedModule, Names, check_number, option
from ..similarity import Similarity
from .hinge import VSEPPLoss, required, required_ids, setting, similarity


class HALLoss(CheckedModule):
    """HAL (hardyqr/HAL, ``model.py``), called as ``criterion(im, s, mb_img, mb_cap, mb_ind,
    indices)``.

    It is :class:`itrloss.HubnessAwareLoss`, in which a memory bank weights the pairs, see `Memory
    banks`_. With ``opt.max_violation`` or ``opt.sum_violation`` it is :class:`VSEPPLoss`, as in the
    original.
    Differences: `Masked pairs`_, `Positive term`_; weights do not overflow, and a bank may hold
    fewer than ``mb_k`` other entries. Under ``torch.compile``, ``mb_ind`` and ``indices`` should be
    tensors.
    """

    scale: float = option(above=0)
    margin: float = option()
    alpha: float = option()
    beta: float = option()
    ep_posi: float = option()
    ep_nega: float = option()
    k: int = option(at_least=1)

    def __init__(self, opt: Any):
        super().__init__()
        self.scale = setting(opt, "local_alpha")
        self.margin = setting(opt, "local_ep")
        self.alpha = setting(opt, "global_alpha", 40.0)
        self.beta = setting(opt, "global_beta", 40.0)
        self.ep_posi = setting(opt, "global_ep_posi", 0.2)
        self.ep_nega = setting(opt, "global_ep_nega", 0.1)
        self.k = setting(opt, "mb_k", 250)
        hardest = setting(opt, "max_violation", False)
        triplet = VSEPPLoss(setting(opt, "margin", 0.2), setting(opt, "measure", None), hardest)
        self.order = triplet.order
        replaced = hardest or setting(opt, "sum_violation", False)
        self.triplet = triplet if replaced else None

    def forward(
        self,
        im: Tensor,
        s: Tensor,
        mb_img: Any = None,
        mb_cap: Any = None,
        mb_ind: Any = None,
        indices: Any = None,
    ) -> Tensor:
        """Return the loss of (B, D) pairs; entries of the (M, D) bank whose number is in
        ``indices`` are left out.
        """
        if self.triplet is not None:
            return self.triplet(im, s)
        sim = similarity(im, s, order=self.order)
        if mb_img is None:
            return functional.hubness_aware_loss(sim, self.scale, self.margin)
        for name, x in (("mb_cap", mb_cap), ("mb_ind", mb_ind)):
            if len(required(name, x)) != len(mb_img):
                expected = f"{len(mb_img)} entries as in mb_img"
                raise ValueError(f"{name}: expected {expected}, got {len(x)}")
        entries = required_ids("mb_ind", mb_ind, im.device)  # (M,)
        batch = required_ids("indices", indices, im.device)  # (B,)
        scores = sim.scores()  # (B, B)
        with torch.no_grad():
            excluded = torch.where(torch.isin(entries, batch), -torch.inf, 0.0).to(scores.dtype)
            of_images = self._highest(im, mb_cap, entries, excluded)
            of_texts = self._highest(s, mb_img, entries, excluded)
            weights = self._weights(scores.diagonal(), of_images, of_texts)
        # HAL with margin 0 on this matrix: positives on the diagonal, negatives elsewhere.
        diagonal = torch.eye(len(im), dtype=torch.bool, device=im.device)
        weighted = weights * torch.where(diagonal, scores, scores - self.margin)
        return functional.hubness_aware_loss(Similarity.from_scores(weighted), self.scale, 0.0)

    def _highest(self, x: Tensor, bank: Tensor, entries: Tensor, excluded: Tensor) -> Tensor:
        """Return the (B, k) highest scores with the bank, -inf where there are no more."""
        sim = similarity(x, bank, ("im, s", "mb_cap, mb_img"), (None, entries), self.order)
        return sim.topk(min(self.k, len(x), len(bank)), excluded).values

    def _weights(self, pairs: Tensor, of_images: Tensor, of_texts: Tensor) -> Tensor:
        """Return (B, B) weights from the (B,) scores of pairs and the (B, k) highest ones."""
        # A weight a / (a + b) is the sigmoid of log a - log b.
        image = (self.beta * of_images - self.ep_nega).logsumexp(1)
        text = (self.beta * of_texts - self.ep_nega).logsumexp(1)
        near = torch.logaddexp(image[:, None], text[None])  # (B, B)
        own = self.beta * pairs
        negative = (near - torch.logaddexp(own[:, None], own[None])).sigmoid()
        both = torch.cat([of_images, of_texts], 1)
        near = (self.alpha * (both - self.ep_posi)).logsumexp(1)  # (B,)
        positive = (near - self.alpha * (pairs - self.ep_posi)).sigmoid()
        return negative.diagonal_scatter(positive)


class USERLoss(CheckedModule):
    """USER (zhangy0822/USER, ``lib/loss.py``, ``UTO``): ``criterion(im, s)`` is HAL with scale
    ``mu``, margin ``gama``.

    ``criterion.moco_forward(v_q, t_k, t_q, v_k, v_queue, t_queue)`` returns the terms of the
    queues, which the caller adds. :class:`itrloss.UnifiedTrainingObjective` is the sum of both.
    Differences: `Masked pairs`_, `Positive term`_.
    """

    scale: float = option(above=0)
    margin: float = option()

    def __init__(self, opt: Any):
        super().__init__()
        self.scale = setting(opt, "mu")
        self.margin = setting(opt, "gama")

    def forward(self, im: Tensor, s: Tensor) -> Tensor:
        """Return the loss of (B, D) images and (B, D) texts."""
        return functional.hubness_aware_loss(similarity(im, s), self.scale, self.margin)

    def moco_forward(
        self, v_q: Tensor, t_k: Tensor, t_q: Tensor, v_k: Tensor, v_queue: Tensor, t_queue: Tensor
    ) -> Any:
        """Return the terms of the (D, K) queues, without the batch's, for (B, D) embeddings and
        keys.
        """
        # Copies without a gradient: USER puts the batch into its queues before the backward pass.
        images = v_queue.detach().T.clone()
        texts = t_queue.detach().T.clone()
        no_match = (None, torch.full((len(images),), -1, device=images.device))  # -1 is no row
        queues = Anchors.together(
            similarity(v_q, texts, ("v_q", "t_queue"), no_match),
            similarity(t_q, images, ("t_q", "v_queue"), no_match),
        )
        keys = Anchors.together(
            similarity(v_q, t_k, ("v_q", "t_k")),
            similarity(t_q, v_k, ("t_q", "v_k")),
        )
        return functional.hubness_aware_loss(queues, self.scale, self.margin, positives=keys)


class ClipLoss(nn.Module):
    """open_clip (mlfoundations/open_clip, ``src/open_clip/loss.py``): the mean of two
    cross-entropies.

    It is half of :class:`itrloss.InfoNCELoss`; ``logit_scale`` is the scale itself. With a
    ``world_size`` above 1, the size of the process group, it is the loss of the batches of all
    processes, of which each computes its part, whatever ``local_loss`` and ``gather_with_grad``
    are; see `Several processes`_. Only ``world_size`` has an effect.
    """

    def __init__(
        self,
        local_loss=False,
        gather_with_grad=False,
        cache_labels=False,
        rank=0,
        world_size=1,
        use_horovod=False,
    ):
        super().__init__()
        if world_size not in (1, distributed.world_size()):
            raise ValueError(
                f"world_size: expected 1 or that of torch.distributed's group, got {world_size}"
            )
        self.world_size = world_size

    def forward(
        self,
        image_features,
        text_features,
        logit_scale,
        logit_bias=None,
        output_dict=False,
    ) -> Any:
        """Return the loss of (B, D) pairs, or with ``output_dict`` a dictionary that has it as
        ``contrastive_loss``.
        """
        if not isinstance(logit_scale, Tensor):
            check_number("logit_scale", logit_scale, positive=True)
        options: dict[str, Any] = {
            "normalize": False,
            "names": Names("image_features", "text_features", "", ""),
        }
        if self.world_size == 1:
            sim = Similarity(image_features, text_features, **options)
        else:
            same = type(self).__name__
            for name, x in (("logit_scale", logit_scale), ("logit_bias", logit_bias)):
                value = distributed.digest(x) if isinstance(x, Tensor) else x
                same += f", {name} {type(x).__name__} {value}"
            sim = Similarity.sharded(image_features, text_features, same=same, **options)
        if logit_bias is None:
            logit_bias = 0.0
        loss = self._loss(sim, logit_scale, logit_bias)
        if output_dict:
            return {"contrastive_loss": loss}
        return loss

    def _loss(self, sim: Similarity, scale: Any, bias: Any) -> Tensor:
        """Return the loss of scores times ``scale`` plus ``bias``."""
        if isinstance(scale, Tensor):
            scale = scale.to(sim.dtype)  # 1 / scale would be far off in half
        loss = 0.5 * functional.info_nce_loss(sim, 1 / scale)
        if isinstance(bias, Tensor):
            # A softmax does not depend on it, but distributed training needs each gradient.
            loss = loss + 0 * bias.sum()
        return loss


class SigLipLoss(ClipLoss):
    """open_clip (mlfoundations/open_clip, ``src/open_clip/loss.py``): SigLIP's sum over all pairs,
    divided by B.

    It is :class:`itrloss.SigmoidLoss` with the model's scale and bias, called as :class:`ClipLoss`.
    Here, too, only ``world_size`` has an effect: large matrices are computed in tiles anyway, and
    how processes exchange texts goes by size; see `Several processes`_.
    """

    def __init__(self, cache_labels=False, rank=0, world_size=1, dist_impl=None, chunk_size=0):
        super().__init__(world_size=world_size)

    def _loss(self, sim: Similarity, scale: Any, bias: Any) -> Tensor:
        # with as many images as texts, its mean divides by B
        return functional.sigmoid_loss(sim, scale, bias)
