"""The losses of HAL and USER, with memory banks and queues, and of open_clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import distributed, functional
from ..anchors import Anchors
from ..checks import Names
from ..similarity import Similarity
from .hinge import VSEPPLoss, option, required, similarity


class HALLoss(nn.Module):
    """HAL (hardyqr/HAL, ``model.py``), called as ``criterion(im, s, mb_img, mb_cap, mb_ind,
    indices)``.

    It is :class:`itrloss.HubnessAwareLoss`, in which a memory bank weights the pairs, see `Memory
    banks`_. With ``opt.max_violation`` or ``opt.sum_violation`` it is :class:`VSEPPLoss`, as in the
    original.
    Differences: `Masked pairs`_, `Positive term`_; weights do not overflow, and a bank may hold
    fewer than ``mb_k`` other entries. Under ``torch.compile``, ``mb_ind`` and ``indices`` should be
    tensors.
    """

    def __init__(self, opt: Any):
        super().__init__()
        self.scale, self.margin = option(opt, "local_alpha"), option(opt, "local_ep")
        self.alpha, self.beta = option(opt, "global_alpha", 40.0), option(opt, "global_beta", 40.0)
        self.ep_posi, self.ep_nega = (
            option(opt, "global_ep_posi", 0.2),
            option(opt, "global_ep_nega", 0.1),
        )
        self.k, hardest = option(opt, "mb_k", 250), option(opt, "max_violation", False)
        triplet = VSEPPLoss(option(opt, "margin", 0.2), option(opt, "measure", None), hardest)
        self.order = triplet.order
        self.triplet = triplet if hardest or option(opt, "sum_violation", False) else None

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
                raise ValueError(
                    f"{name}: expected {len(mb_img)} entries as in mb_img, got {len(x)}"
                )
        entries, batch = (
            torch.as_tensor(x, device=im.device) for x in (mb_ind, required("indices", indices))
        )
        scores = sim.scores()
        with torch.no_grad():
            excluded = torch.where(torch.isin(entries, batch), -torch.inf, 0.0).to(scores.dtype)
            near = []  # (B, k) highest scores with the bank, -inf where there are no more
            for x, bank in ((im, mb_cap), (s, mb_img)):
                bank_sim = similarity(
                    x, bank, ("im, s", "mb_cap, mb_img"), (None, entries), self.order
                )
                near.append(bank_sim.topk(min(self.k, len(x), len(bank)), excluded).values)
            # a / (a + b) is the sigmoid of log a - log b.
            own = scores.diagonal()
            n, m = ((self.beta * x - self.ep_nega).logsumexp(1) for x in near)
            p, q = ((self.alpha * (x - self.ep_posi)).logsumexp(1) for x in near)
            of_pair = torch.logaddexp(self.beta * own[:, None], self.beta * own[None])
            negative = (torch.logaddexp(n[:, None], m[None]) - of_pair).sigmoid()  # (B, B)
            positive = (torch.logaddexp(p, q) - self.alpha * (own - self.ep_posi)).sigmoid()  # (B,)
        # HAL with margin 0 on this matrix: its diagonal are the positives, the rest are the
        # negatives.
        diagonal = torch.eye(len(im), dtype=torch.bool, device=im.device)
        weighted = torch.where(diagonal, positive * scores, negative * (scores - self.margin))
        return functional.hubness_aware_loss(Similarity.from_scores(weighted), self.scale, 0.0)


class USERLoss(nn.Module):
    """USER (zhangy0822/USER, ``lib/loss.py``, ``UTO``): ``criterion(im, s)`` is HAL with scale
    ``mu``, margin ``gama``.

    ``criterion.moco_forward(v_q, t_k, t_q, v_k, v_queue, t_queue)`` returns the terms of the
    queues, which the caller adds. :class:`itrloss.UnifiedTrainingObjective` is the sum of both.
    Differences: `Masked pairs`_, `Positive term`_.
    """

    def __init__(self, opt: Any):
        super().__init__()
        self.scale, self.margin = option(opt, "mu"), option(opt, "gama")

    def forward(self, im: Tensor, s: Tensor) -> Tensor:  # (B, D) and (B, D) -> ()
        return functional.hubness_aware_loss(similarity(im, s), self.scale, self.margin)

    def moco_forward(
        self, v_q: Tensor, t_k: Tensor, t_q: Tensor, v_k: Tensor, v_queue: Tensor, t_queue: Tensor
    ) -> Any:
        """Return the terms of the (D, K) queues, without that of the batch, for (B, D) embeddings
        and keys.
        """
        # -1 matches no row
        no_match = None, torch.full(v_queue.shape[1:], -1, device=v_queue.device)
        sides = (v_q, t_queue, ("v_q", "t_queue")), (t_q, v_queue, ("t_q", "v_queue"))
        # Copies without a gradient: USER puts the batch into its queues before the backward pass.
        queues = [
            similarity(x, queue.detach().T.clone(), names, no_match) for x, queue, names in sides
        ]
        keys = Anchors.together(
            similarity(v_q, t_k, ("v_q", "t_k")), similarity(t_q, v_k, ("t_q", "v_k"))
        )
        return functional.hubness_aware_loss(
            Anchors.together(*queues), self.scale, self.margin, positives=keys
        )


class ClipLoss(nn.Module):
    """open_clip (mlfoundations/open_clip, ``src/open_clip/loss.py``): the mean of two
    cross-entropies.

    It is half of :class:`itrloss.InfoNCELoss`; ``logit_scale`` is the scale itself. With a
    ``world_size`` above 1, that of ``torch.distributed``, it is the loss of the batches of all
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
        self, image_features, text_features, logit_scale, logit_bias=None, output_dict=False
    ) -> Any:
        """Return the loss of (B, D) pairs, or with ``output_dict`` a dictionary that has it as
        ``contrastive_loss``.
        """
        if self.world_size == 1:
            sim = similarity(image_features, text_features, ("image_features", "text_features"))
        else:
            names = Names("image_features", "text_features", "", "")
            same = type(self).__name__
            sim = Similarity.sharded(
                image_features, text_features, normalize=False, names=names, same=same
            )
        loss = self._loss(sim, logit_scale, 0.0 if logit_bias is None else logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss

    def _loss(self, sim: Similarity, scale: Any, bias: Any) -> Tensor:
        # 1 / scale would be far off in half
        scale = scale.to(sim.dtype) if isinstance(scale, Tensor) else scale
        loss = 0.5 * functional.info_nce_loss(sim, 1 / scale)
        # A softmax does not depend on the bias, but distributed training needs a gradient for each
        # parameter.
        return loss + 0 * bias.sum() if isinstance(bias, Tensor) else loss


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
