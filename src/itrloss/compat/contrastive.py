"""The losses of HAL and USER, with memory banks and queues."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import functional
from ..anchors import Anchors
from ..checks import as_size
from ..losses import HubnessAwareLoss
from ..losses.base import log_add_exp
from ..similarity import Similarity
from .adapter import HALCriterion, USERCriterion
from .arguments import inner_products, order_scores, setting, similarity
from .hinge import hinges


class HALLoss(HALCriterion):
    """HAL (hardyqr/HAL, ``model.py``), called as ``criterion(im, s, mb_img, mb_cap, mb_ind,
    indices)``.

    It is :class:`itrloss.HubnessAwareLoss`, in which a memory bank weights the pairs, see `Memory
    banks`_. With ``opt.max_violation`` or ``opt.sum_violation`` it is :class:`VSEPPLoss`, as in the
    original.
    Differences: `Masked pairs`_, `Positive term`_; weights do not overflow, and a bank may hold
    fewer than ``mb_k`` other entries. Under ``torch.compile``, ``mb_ind`` and ``indices`` should be
    tensors.
    """

    _takes_bank = HubnessAwareLoss

    def __init__(self, opt: object):
        scale = setting(opt, "local_alpha")
        loss: nn.Module = HubnessAwareLoss(scale, setting(opt, "local_ep"), normalize=False)
        hardest = setting(opt, "max_violation", False)
        if hardest or setting(opt, "sum_violation", False):
            loss = hinges(setting(opt, "margin", 0.2), hardest)
        scores = order_scores if setting(opt, "measure", None) == "order" else None
        super().__init__(loss, "hal", scores)
        self.alpha = setting(opt, "global_alpha", 40.0)
        self.beta = setting(opt, "global_beta", 40.0)
        self.ep_posi = setting(opt, "global_ep_posi", 0.2)
        self.ep_nega = setting(opt, "global_ep_nega", 0.1)
        self.k = as_size("mb_k", setting(opt, "mb_k", 250))

    def _with_bank(self, im, s, images, texts, entries, batch) -> Tensor:
        """Return the loss of pairs that a bank weights, without the batch's own entries."""
        score = self.score_function or inner_products
        scores = score(im, s)  # (B, B)
        k = min(self.k, len(im), len(images))
        with torch.no_grad():
            excluded = torch.isin(entries, batch)
            near = []  # the (B, k) highest scores with the bank, -inf where there are no more
            for x, bank in ((im, texts), (s, images)):
                near.append(score(x, bank).masked_fill(excluded, -torch.inf).topk(k).values)
            weights = self._weights(scores.diagonal(), *near)
        # HAL with margin 0 on this matrix: positives on the diagonal, negatives elsewhere.
        diagonal = torch.eye(len(im), dtype=torch.bool, device=im.device)
        weighted = weights * torch.where(diagonal, scores, scores - self.margin)
        sim = Similarity.from_scores(weighted)
        return functional.hubness_aware_loss(sim, self.loss.scale, 0.0)

    def _weights(self, pairs: Tensor, of_images: Tensor, of_texts: Tensor) -> Tensor:
        """Return (B, B) weights from the (B,) scores of pairs and the (B, k) highest ones."""
        # A weight a / (a + b) is the sigmoid of log a - log b.
        image = (self.beta * of_images - self.ep_nega).logsumexp(1)
        text = (self.beta * of_texts - self.ep_nega).logsumexp(1)
        near = log_add_exp(image[:, None], text[None])  # (B, B)
        own = self.beta * pairs
        negative = (near - log_add_exp(own[:, None], own[None])).sigmoid()
        both = torch.cat([of_images, of_texts], 1)
        near = (self.alpha * (both - self.ep_posi)).logsumexp(1)  # (B,)
        positive = (near - self.alpha * (pairs - self.ep_posi)).sigmoid()
        return negative.diagonal_scatter(positive)


class USERLoss(USERCriterion):
    """USER (zhangy0822/USER, ``lib/loss.py``, ``UTO``): ``criterion(im, s)`` is HAL with scale
    ``mu``, margin ``gama``.

    ``criterion.moco_forward(v_q, t_k, t_q, v_k, v_queue, t_queue)`` returns the terms of the
    queues, which the caller adds. :class:`itrloss.UnifiedTrainingObjective` is the sum of both.
    Differences: `Masked pairs`_, `Positive term`_.
    """

    def __init__(self, opt: object):
        loss = HubnessAwareLoss(setting(opt, "mu"), setting(opt, "gama"), normalize=False)
        super().__init__(loss, "user")

    def moco_forward(
        self, v_q: Tensor, t_k: Tensor, t_q: Tensor, v_k: Tensor, v_queue: Tensor, t_queue: Tensor
    ) -> Tensor:
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
        return functional.hubness_aware_loss(queues, self.loss.scale, self.margin, positives=keys)
