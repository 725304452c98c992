"""The losses of HAL and USER, with their memories and queues."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..engine.answers import log1p_clamp
from ..similarity import Similarity
from ._shared import Ids, apart, given, is_order, option, pairs_of, similarity_of
from .triplets import VSEPPLoss


class HALLoss(nn.Module):
    r"""HAL (hardyqr/HAL, ``model.py``), whose memory bank gives pairs their weights.

    ``self.criterion = itrloss.compat.HALLoss(opt=opt)``; called as ``criterion(im, s, mb_img, mb_cap, mb_ind,
    indices)``. The loss is the mean over i of

    .. math:: \tfrac1\gamma \log\bigl(1 + \sum_{j \ne i} e^{\gamma w_{ij} (S_{ij} - \varepsilon)}\bigr)
        + \tfrac1\gamma \log\bigl(1 + \sum_{j \ne i} e^{\gamma w_{ji} (S_{ji} - \varepsilon)}\bigr)
        - \log(1 + w_{ii} S_{ii})

    Without a bank all w are 1. With one, let :math:`n(a, c)` be the sum of :math:`e^{a S - c}` over the k highest
    scores of an image with the bank's texts, or of a text with its images. Without a gradient,

    .. math:: w_{ij} = \frac{n_i + n_j}{n_i + n_j + e^{\beta S_{ii}} + e^{\beta S_{jj}}}, \quad
        w_{ii} = \frac{p_i}{p_i + e^{\alpha (S_{ii} - \varepsilon_+)}}

    for :math:`n = n(\beta, \varepsilon_-)` of image i and of text j, and the sum :math:`p_i` of
    :math:`n(\alpha, \alpha \varepsilon_+)` of image i and text i.

    Differences: a pair adds nothing to its own sums; there it adds :math:`e^{-\gamma \varepsilon}`, and 1 with a bank.
    A pair with a score below 0 is pulled together, which ``relu`` prevents there. Weights do not overflow. A bank may
    hold fewer than k other entries. ``opt.max_violation`` and ``opt.sum_violation`` give the triplet loss that is
    meant; there they fail. Under ``torch.compile``, ``mb_ind`` and ``indices`` should be tensors.

    Args:
        opt: ``local_alpha`` (γ), ``local_ep`` (ε), ``measure``; for a bank ``global_alpha`` (α), ``global_beta`` (β),
            ``global_ep_posi`` (ε₊), ``global_ep_nega`` (ε₋) and ``mb_k`` (k; at most the size of the batch).
    """

    def __init__(self, opt: Any):
        super().__init__()
        self.scale, self.margin = option(opt, "local_alpha"), option(opt, "local_ep")
        self.order = is_order("opt.measure", option(opt, "measure", None))
        self.alpha, self.beta = option(opt, "global_alpha", 40.0), option(opt, "global_beta", 40.0)
        self.ep_posi, self.ep_nega = option(opt, "global_ep_posi", 0.2), option(opt, "global_ep_nega", 0.1)
        self.k, self.triplet = option(opt, "mb_k", 250), None
        if (hardest := option(opt, "max_violation", False)) or option(opt, "sum_violation", False):
            self.triplet = VSEPPLoss(option(opt, "margin"), "order" if self.order else None, hardest)

    def forward(
        self,
        im: Tensor,  # (B, D)
        s: Tensor,  # (B, D)
        mb_img: Tensor | None = None,  # (M, D), without a gradient
        mb_cap: Tensor | None = None,  # (M, D), likewise
        mb_ind: Ids | None = None,  # M numbers in the data set
        indices: Ids | None = None,  # B of them: entries with these numbers do not count
    ) -> Tensor:
        """The loss of a batch, weighted by the bank where there is one."""
        if self.triplet is not None:
            return self.triplet(im, s)
        sim = pairs_of(im, s, order=self.order)
        if mb_img is None:
            return functional.hubness_aware_loss(sim, self.scale, self.margin)  # type: ignore[return-value]
        bank = given("mb_cap", mb_cap), mb_img
        entries, batch = (
            torch.as_tensor(given(name, x), device=im.device) for name, x in (("mb_ind", mb_ind), ("indices", indices))
        )
        for name, x in (("mb_cap", bank[0]), ("mb_ind", entries)):
            if len(x) != len(mb_img):
                raise ValueError(f"{name}: expected {len(mb_img)} entries as in mb_img, got {len(x)}")
        scores = sim.scores()
        with torch.no_grad():
            left_out = torch.where(torch.isin(entries, batch), -torch.inf, 0.0).to(scores.dtype)
            images, texts = (self._nearest(x, y, left_out) for x, y in zip((im, s), bank, strict=True))
            negative, positive = self._weights(scores.diagonal(), images, texts)
        # HAL without a margin leaves the diagonal of this out of its sums and has it for its positives
        pair = torch.eye(len(im), dtype=torch.bool, device=im.device)
        weighted = torch.where(pair, positive * scores, negative * (scores - self.margin))
        return functional.hubness_aware_loss(Similarity.from_scores(weighted), self.scale, 0.0)  # type: ignore[return-value]

    def _nearest(self, anchors: Tensor, bank: Tensor, left_out: Tensor) -> Tensor:
        """(B, k) highest scores with the bank, -inf where there are no more."""
        sim = similarity_of(anchors, bank, apart(anchors, bank), ("im, s", "mb_cap, mb_img"), self.order)
        return (sim.scores() + left_out).topk(min(self.k, len(anchors), len(bank))).values

    def _weights(self, own: Tensor, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """(B, B) for negatives, (B,) for positives; a / (a + b) is the sigmoid of log a - log b."""
        n, m = ((self.beta * x - self.ep_nega).logsumexp(1) for x in (images, texts))
        p, q = ((self.alpha * (x - self.ep_posi)).logsumexp(1) for x in (images, texts))
        negative = torch.logaddexp(n[:, None], m[None]) - torch.logaddexp(
            self.beta * own[:, None], self.beta * own[None]
        )
        return negative.sigmoid(), (torch.logaddexp(p, q) - self.alpha * (own - self.ep_posi)).sigmoid()


class USERLoss(nn.Module):
    """USER (zhangy0822/USER, ``lib/loss.py``, ``UTO``): HAL in the batch, and the terms of two momentum queues.

    ``self.hal_loss = itrloss.compat.USERLoss(opt=opt)``; called as ``criterion(im, s)`` for HAL, and as
    ``criterion.moco_forward(v_q, t_k, t_q, v_k, v_queue, t_queue)`` for the terms of the queues alone, which the caller
    adds. :class:`itrloss.UnifiedTrainingObjective` is both.

    Differences: a pair adds nothing to its own sums; there it adds ``exp(-mu * gama)``. A pair with a score below 0 is
    pulled together, which ``relu`` prevents there. Nothing overflows in half precision.

    Args:
        opt: ``mu`` (the scale) and ``gama`` (the margin).
    """

    def __init__(self, opt: Any):
        super().__init__()
        self.scale, self.margin = option(opt, "mu"), option(opt, "gama")

    def forward(self, im: Tensor, s: Tensor) -> Tensor:  # (B, D) and (B, D) -> ()
        return functional.hubness_aware_loss(pairs_of(im, s), self.scale, self.margin)  # type: ignore[return-value]

    def moco_forward(
        self,
        v_q: Tensor,  # (B, D) images
        t_k: Tensor,  # (B, D) keys of their texts
        t_q: Tensor,  # (B, D) texts
        v_k: Tensor,  # (B, D) keys of their images
        v_queue: Tensor,  # (D, K) without a gradient
        t_queue: Tensor,  # (D, K) likewise
    ) -> Tensor:
        """The queue terms of the objective, without that of the batch."""
        images = self._queue_term(v_q, t_k, t_queue, ("v_q", "t_k", "t_queue"))
        return images + self._queue_term(t_q, v_k, v_queue, ("t_q", "v_k", "v_queue"))

    def _queue_term(self, anchors: Tensor, keys: Tensor, queue: Tensor, names: tuple[str, str, str]) -> Tensor:
        attraction = pairs_of(anchors, keys, names[:2]).sum_of_positives(log1p_clamp)
        entries = queue.detach().T
        repulsion = similarity_of(anchors, entries, apart(anchors, entries), (names[0], names[2])).logsumexp(self.scale)
        return (F.softplus(repulsion - self.scale * self.margin, threshold=40) / self.scale - attraction).mean()
