"""The losses of HAL and USER, with memory banks and queues, and of open_clip."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import distributed, functional
from ..anchors import Anchors
from ..similarity import Similarity
from .hinge import VSEPPLoss, option, required, similarity


class HALLoss(nn.Module):
    """HAL (hardyqr/HAL, ``model.py``), called as ``criterion(im, s, mb_img, mb_cap, mb_ind, indices)``.

    It is :class:`itrloss.HubnessAwareLoss`, in which a memory bank weights the pairs, see `Memory banks`_. With
    ``opt.max_violation`` or ``opt.sum_violation`` it is :class:`VSEPPLoss`, as in the original.
    Differences: `Masked pairs`_, `Positive term`_; weights do not overflow, and a bank may hold fewer than
    ``mb_k`` other entries. Under ``torch.compile``, ``mb_ind`` and ``indices`` should be tensors.
    """

    def __init__(self, opt: Any):
        super().__init__()
        self.scale, self.margin = option(opt, "local_alpha"), option(opt, "local_ep")
        self.alpha, self.beta = option(opt, "global_alpha", 40.0), option(opt, "global_beta", 40.0)
        self.ep_posi, self.ep_nega = option(opt, "global_ep_posi", 0.2), option(opt, "global_ep_nega", 0.1)
        self.k, hardest = option(opt, "mb_k", 250), option(opt, "max_violation", False)
        triplet = VSEPPLoss(option(opt, "margin", 0.2), option(opt, "measure", None), hardest)
        self.order = triplet.order
        self.triplet = triplet if hardest or option(opt, "sum_violation", False) else None

    def forward(
        self, im: Tensor, s: Tensor, mb_img: Any = None, mb_cap: Any = None, mb_ind: Any = None, indices: Any = None
    ) -> Tensor:
        """Return the loss of (B, D) pairs; entries of the (M, D) bank whose number is in ``indices`` are left out."""
        if self.triplet is not None:
            return self.triplet(im, s)
        sim = similarity(im, s, order=self.order)
        if mb_img is None:
            return functional.hubness_aware_loss(sim, self.scale, self.margin)
        for name, x in (("mb_cap", mb_cap), ("mb_ind", mb_ind)):
            if len(required(name, x)) != len(mb_img):
                raise ValueError(f"{name}: expected {len(mb_img)} entries as in mb_img, got {len(x)}")
        entries, batch = (torch.as_tensor(x, device=im.device) for x in (mb_ind, required("indices", indices)))
        scores = sim.scores()
        with torch.no_grad():
            excluded = torch.where(torch.isin(entries, batch), -torch.inf, 0.0).to(scores.dtype)
            near = []  # (B, k) highest scores with the bank, -inf where there are no more
            for x, bank in ((im, mb_cap), (s, mb_img)):
                bank_sim = similarity(x, bank, ("im, s", "mb_cap, mb_img"), (None, entries), self.order)
                near.append(bank_sim.topk(min(self.k, len(x), len(bank)), excluded).values)
            # a / (a + b) is the sigmoid of log a - log b.
            own = scores.diagonal()
            n, m = ((self.beta * x - self.ep_nega).logsumexp(1) for x in near)
            p, q = ((self.alpha * (x - self.ep_posi)).logsumexp(1) for x in near)
            of_pair = torch.logaddexp(self.beta * own[:, None], self.beta * own[None])
            negative = (torch.logaddexp(n[:, None], m[None]) - of_pair).sigmoid()  # (B, B)
            positive = (torch.logaddexp(p, q) - self.alpha * (own - self.ep_posi)).sigmoid()  # (B,)
        # HAL with margin 0 on this matrix: its diagonal are the positives, the rest are the negatives.
        diagonal = torch.eye(len(im), dtype=torch.bool, device=im.device)
        weighted = torch.where(diagonal, positive * scores, negative * (scores - self.margin))
        return functional.hubness_aware_loss(Similarity.from_scores(weighted), self.scale, 0.0)


class USERLoss(nn.Module):
    """USER (zhangy0822/USER, ``lib/loss.py``, ``UTO``): ``criterion(im, s)`` is HAL with scale ``mu``, margin ``gama``.

    ``criterion.moco_forward(v_q, t_k, t_q, v_k, v_queue, t_queue)`` returns the terms of the queues, which the caller
    adds. :class:`itrloss.UnifiedTrainingObjective` is the sum of both. Differences: `Masked pairs`_, `Positive term`_.
    """

    def __init__(self, opt: Any):
        super().__init__()
        self.scale, self.margin = option(opt, "mu"), option(opt, "gama")

    def forward(self, im: Tensor, s: Tensor) -> Tensor:  # (B, D) and (B, D) -> ()
        return functional.hubness_aware_loss(similarity(im, s), self.scale, self.margin)

    def moco_forward(self, v_q: Tensor, t_k: Tensor, t_q: Tensor, v_k: Tensor, v_queue: Tensor, t_queue: Tensor) -> Any:
        """Return the terms of the (D, K) queues, without that of the batch, for (B, D) embeddings and keys."""
        no_match = None, torch.full(v_queue.shape[1:], -1, device=v_queue.device)  # -1 matches no row
        sides = (v_q, t_queue, ("v_q", "t_queue")), (t_q, v_queue, ("t_q", "v_queue"))
        # Copies without a gradient: USER puts the batch into its queues before the backward pass.
        queues = [similarity(x, queue.detach().T.clone(), names, no_match) for x, queue, names in sides]
        keys = Anchors.together(similarity(v_q, t_k, ("v_q", "t_k")), similarity(t_q, v_k, ("t_q", "v_k")))
        return functional.hubness_aware_loss(Anchors.together(*queues), self.scale, self.margin, positives=keys)


class ClipLoss(nn.Module):
    """open_clip (mlfoundations/open_clip, ``src/open_clip/loss.py``): the mean of two cross-entropies.

    It is half of :class:`itrloss.InfoNCELoss`; ``logit_scale`` is the scale itself. ``world_size`` is 1 or that of
    ``torch.distributed``, with batches of one size and a ``DistributedDataParallel`` model; for ``local_loss`` and
    ``gather_with_grad`` see `Several processes`_. The other arguments have no effect.
    """

    def __init__(
        self, local_loss=False, gather_with_grad=False, cache_labels=False, rank=0, world_size=1, use_horovod=False
    ):
        super().__init__()
        if world_size not in (1, distributed.world_size()):
            raise ValueError(f"world_size: expected 1 or that of torch.distributed's group, got {world_size}")
        self.world_size, self.local_loss, self.gather_with_grad = world_size, local_loss, gather_with_grad

    def forward(self, image_features, text_features, logit_scale, logit_bias=None, output_dict=False) -> Any:
        """Return the loss of (B, D) pairs, or with ``output_dict`` a dictionary that has it as ``contrastive_loss``."""
        loss = self._loss(image_features, text_features, logit_scale, 0.0 if logit_bias is None else logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss

    def _loss(self, images: Tensor, texts: Tensor, scale: Any, bias: Any) -> Tensor:
        anchors = similarity(images, texts, ("image_features", "text_features")).both
        if self.world_size > 1:
            _check_size(images)
            gathered = self._gathered(images), self._gathered(texts)
            if self.local_loss:
                anchors = Anchors.together(_with_all(images, gathered[1]), _with_all(texts, gathered[0]))
            else:
                anchors = similarity(*gathered).both
        scale = scale.to(anchors.dtype) if isinstance(scale, Tensor) else scale  # 1 / scale would be far off in half
        loss = 0.5 * functional.info_nce_loss(anchors, 1 / scale)
        # A softmax does not depend on the bias, but distributed training needs a gradient for each parameter.
        return loss + 0 * bias.sum() if isinstance(bias, Tensor) else loss

    def _gathered(self, x: Tensor) -> Tensor:
        """Return the (world B, D) features of all processes; which of them get a gradient depends on the options."""
        if self.gather_with_grad:
            return distributed.gather(x)
        all_features, first = distributed.gather(x.detach()), dist.get_rank() * len(x)
        return all_features if self.local_loss else all_features.slice_scatter(x, 0, first, first + len(x))


class SigLipLoss(ClipLoss):
    """open_clip (mlfoundations/open_clip, ``src/open_clip/loss.py``): SigLIP's sum over all pairs, divided by B.

    It is :class:`itrloss.SigmoidLoss` with the model's scale and bias, called as :class:`ClipLoss`; see `Several
    processes`_. ``rank``, ``dist_impl`` and ``chunk_size`` have no effect: large matrices are computed in tiles anyway.
    """

    def __init__(self, cache_labels=False, rank=0, world_size=1, dist_impl=None, chunk_size=0):
        super().__init__(world_size=world_size)

    def _loss(self, images: Tensor, texts: Tensor, scale: Any, bias: Any) -> Tensor:
        sim = similarity(images, texts, ("image_features", "text_features"))
        if self.world_size > 1:
            _check_size(images)
            sim = _with_all(images, distributed.gather(texts))
        return functional.sigmoid_loss(sim, scale, bias, "sum") / len(images)


def _check_size(features: Tensor) -> None:
    """Raise an error in all processes unless their batches are of one size, as open_clip's losses need them."""
    if not torch.compiler.is_compiling():
        with distributed.agreement() as agreed:
            agreed.text = f"batches of {len(features)}"


def _with_all(own: Tensor, features: Tensor) -> Similarity:
    """Return the (B, world B) similarity of this process's features with those of all."""
    numbers = torch.arange(len(features), device=features.device)
    own_numbers = numbers.narrow(0, dist.get_rank() * len(own), len(own))
    return similarity(own, features, ids=(own_numbers, numbers))
