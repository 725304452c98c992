"""The losses of public code bases, under the signatures they have there: a user changes one line.

Each class takes what the original's constructor takes, is called as the original is, and returns what it returns.
Embeddings are scored as they come, because those code bases normalise in their models. Where a value differs from the
original's, the class says so and why. Of all of them: scores and losses are float32 at least, and nothing is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import functional
from ._arguments import check_number
from .engines.tiles import compute_dtype
from .similarity import Similarity

Ids = Tensor | Sequence[int]
Parts = dict[str, Tensor]
MeanOrSum = Literal["mean", "sum"]

# ------------------------------------------------------------------------------------------------ triplet losses


class _HingeLoss(nn.Module):
    """What the triplet losses share: a margin, and whether only the hardest negative counts."""

    def __init__(self, margin: float = 0, max_violation: bool = False):
        super().__init__()
        check_number("margin", margin)
        self.margin, self.max_violation = margin, bool(max_violation)

    def max_violation_on(self) -> None:
        """From now on the hardest negative of each anchor."""
        self.max_violation = True

    def max_violation_off(self) -> None:
        """From now on all negatives."""
        self.max_violation = False

    def _hinges(self, sim: Similarity, reduction: functional.Reduction = "sum") -> Any:
        return functional.triplet_loss(sim, self.margin, "hardest" if self.max_violation else "all", reduction)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"margin={self.margin}, max_violation={self.max_violation}"


class VSEPPLoss(_HingeLoss):
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
        self.order = _is_order("measure", measure)

    def forward(self, im: Tensor, s: Tensor) -> Tensor:  # (B, D) and (B, D) -> ()
        return self._hinges(_pairs(im, s, order=self.order))


class VSEInfinityLoss(_HingeLoss):
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
        return self._hinges(_pairs(im, s))


class SCANLoss(_HingeLoss):
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
        return self._hinges(_square("score_function", self.score_function(im, s, s_l)))


class SGRAFLoss(_HingeLoss):
    """SGRAF (Paranioar/SGRAF, ``model.py``): hinges on a score matrix.

    ``self.criterion = itrloss.compat.SGRAFLoss(margin=opt.margin, max_violation=opt.max_violation)``; called as
    ``criterion(scores)``, images as rows.

    Args:
        margin, max_violation: see :class:`VSEPPLoss`.
    """

    def forward(self, scores: Tensor) -> Tensor:  # (B, B) -> ()
        return self._hinges(_square("scores", scores))


class CHANLoss(_HingeLoss):
    """CHAN (ppanzx/CHAN, ``lib/loss.py``, ``ContrastiveLoss``): hinges on a score matrix.

    In ``get_criterion``: ``return itrloss.compat.CHANLoss(margin=opt.margin)``; called as ``criterion(sims)``.

    Args:
        opt: if given, its ``margin`` and ``max_violation`` count instead of the arguments.
        margin, max_violation: see :class:`VSEPPLoss`.
    """

    def __init__(self, opt: Any = None, margin: float = 0.2, max_violation: bool = False):
        if opt is not None:
            margin, max_violation = _option(opt, "margin"), _option(opt, "max_violation")
        super().__init__(margin, max_violation)

    def forward(self, sims: Tensor) -> Tensor:  # (B, B) -> ()
        return self._hinges(_square("sims", sims))


class HREMLoss(_HingeLoss):
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
        self.mask_repeat = bool(_option(opt, "mask_repeat"))

    def forward(self, im: Tensor, s: Tensor, img_ids: Ids | None = None) -> Tensor:  # (B, D), (B, D), (B,) -> ()
        """The loss; ``img_ids`` say which texts show the same image, and are needed if ``opt.mask_repeat``."""
        pairs = _pairs(im, s)
        if not self.mask_repeat:
            return self._hinges(pairs)
        ids = torch.as_tensor(_given("img_ids", img_ids), device=im.device)
        threshold = self.margin - pairs.positives(sparse=True)  # a pair's own score
        if self.max_violation:
            rows, cols = (h.values for h in _similarity(im, s, (ids, ids)).both.hardest())
            return (threshold + rows).relu().sum() + (threshold + cols).relu().sum()
        # max(threshold + S, 0) is the hinge at -S, which is the score of -im
        rows, cols = _similarity(-im, s, (ids, ids)).both.negatives("hinge", (threshold,), (threshold,))
        return rows.sum() + cols.sum()


# ---------------------------------------------------------------------------------- hubness, memories and queues


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
        self.scale, self.margin = _option(opt, "local_alpha"), _option(opt, "local_ep")
        self.order = _is_order("opt.measure", _option(opt, "measure", None))
        self.alpha, self.beta = _option(opt, "global_alpha", 40.0), _option(opt, "global_beta", 40.0)
        self.ep_posi, self.ep_nega = _option(opt, "global_ep_posi", 0.2), _option(opt, "global_ep_nega", 0.1)
        self.k, self.triplet = _option(opt, "mb_k", 250), None
        if (hardest := _option(opt, "max_violation", False)) or _option(opt, "sum_violation", False):
            self.triplet = VSEPPLoss(_option(opt, "margin"), "order" if self.order else None, hardest)

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
        sim = _pairs(im, s, order=self.order)
        if mb_img is None:
            return functional.hubness_aware_loss(sim, self.scale, self.margin)  # type: ignore[return-value]
        bank = _given("mb_cap", mb_cap), mb_img
        entries, batch = (
            torch.as_tensor(_given(name, x), device=im.device) for name, x in (("mb_ind", mb_ind), ("indices", indices))
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
        sim = _similarity(anchors, bank, _apart(anchors, bank), ("im, s", "mb_cap, mb_img"), self.order)
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
        self.scale, self.margin = _option(opt, "mu"), _option(opt, "gama")

    def forward(self, im: Tensor, s: Tensor) -> Tensor:  # (B, D) and (B, D) -> ()
        return functional.hubness_aware_loss(_pairs(im, s), self.scale, self.margin)  # type: ignore[return-value]

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
        attraction = _pairs(anchors, keys, names[:2]).positives("log1p_clamp", sparse=True)
        entries = queue.detach().T
        repulsion = _similarity(anchors, entries, _apart(anchors, entries), (names[0], names[2])).logsumexp(self.scale)
        return (F.softplus(repulsion - self.scale * self.margin, threshold=40) / self.scale - attraction).mean()


# ------------------------------------------------------------------------------------------------ sets of embeddings


class PVSELoss(_HingeLoss):
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
        super().__init__(_option(opt, "margin", 1.0), _option(opt, "max_violation", False))
        self.k, self.order = _option(opt, "num_embeds", 1), bool(_option(opt, "order", False))
        self.weights = {f"{name}_loss": _option(opt, f"{name}_weight", 0.0) for name in ("div", "mmd")}
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
            sim = _pairs(img, txt, ("img", "txt"), self.order)
        else:
            for name, x in (("img", img), ("txt", txt)):
                if x.dim() != 3 or x.shape[:2] != (n, k):
                    raise ValueError(f"{name}: expected shape ({n}, {k}, D), got {tuple(x.shape)}")
            if self.order:
                scores = _order_scores(img.flatten(0, 1), txt.flatten(0, 1)).view(n, k, n, k).amax((1, 3))
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


class DivELoss(_HingeLoss):
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
        super().__init__(_option(opt, "margin", 1.0), _option(opt, "max_violation", False))
        if _option(opt, "semi_hard_triplet", False):
            raise ValueError("opt: semi_hard_triplet is not supported")
        self.set_sizes, self.similarity_fn = (img_set_size, txt_set_size), similarity_fn
        self.num_embeds = _option(opt, "img_num_embeds"), _option(opt, "txt_num_embeds")
        self.set_per_img = txt_per_img * self.num_embeds[1] // txt_set_size
        self.reduction: MeanOrSum = _mean_or_sum(reduction)
        self.unif_residual = bool(_option(opt, "unif_residual", False))
        self.weights = {f"{name}_loss": _option(opt, f"{name}_weight", 0.0) for name in ("div", "mmd", "unif")}
        if similarity_fn is None:
            self.temperature = _option(opt, "temperature")
            if _option(opt, "denominator", 2) != 2 or _option(opt, "temperature_txt_scale", 1) != 1:
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
                sides = [(name, r, F.normalize(_given(name, r), dim=-1), k) for name, r, _, k in sides]
            parts["unif_loss"] = sum((_crowding(x, k) for _, _, x, k in sides), zero)
        return _weighed(parts, self.weights)


# ------------------------------------------------------------------------------------------------------- open_clip


class _OpenClipLoss(nn.Module):
    """The call form that open_clip's losses share."""

    def __init__(self, world_size: int):
        super().__init__()
        if world_size > 1:
            raise ValueError(f"world_size: expected 1, got {world_size}; more than one process is not supported yet")

    def forward(
        self,
        image_features: Tensor,  # (B, D)
        text_features: Tensor,  # (B, D)
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | Parts:
        """The loss, or with ``output_dict`` a dictionary that has it as ``contrastive_loss``."""
        sim = _pairs(image_features, text_features, ("image_features", "text_features"))
        loss = self._loss(sim, logit_scale, 0.0 if logit_bias is None else logit_bias)
        return {"contrastive_loss": loss} if output_dict else loss

    def _loss(self, sim: Similarity, scale: Any, bias: Any) -> Any:
        raise NotImplementedError


class ClipLoss(_OpenClipLoss):
    """open_clip (mlfoundations/open_clip, ``src/open_clip/loss.py``): the mean of two cross-entropies.

    ``loss = itrloss.compat.ClipLoss(local_loss=args.local_loss, gather_with_grad=args.gather_with_grad,
    cache_labels=True, rank=args.rank, world_size=args.world_size)`` in place of ``create_loss(args)``; called as
    ``loss(image_features, text_features, logit_scale, logit_bias=None, output_dict=False)``, returns the loss or
    ``{"contrastive_loss": loss}``. It is half of :class:`itrloss.InfoNCELoss`. ``logit_scale`` is the scale itself.

    Args:
        world_size: 1; more than one process is not supported yet.
        local_loss, gather_with_grad, cache_labels, rank, use_horovod: as there; without effect in one process.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ):
        super().__init__(world_size)

    def _loss(self, sim: Similarity, scale: Any, bias: Any) -> Any:
        scale = scale.to(sim.dtype) if isinstance(scale, Tensor) else scale  # 1 / scale in half precision is not ours
        loss: Any = 0.5 * functional.info_nce_loss(sim, 1 / scale)  # type: ignore[operator]
        # A softmax does not see a constant, but distributed training wants a gradient for each parameter.
        return loss + 0 * bias.sum() if isinstance(bias, Tensor) else loss


class SigLipLoss(_OpenClipLoss):
    """open_clip (mlfoundations/open_clip, ``src/open_clip/loss.py``): SigLIP's sum over all pairs, divided by B.

    ``loss = itrloss.compat.SigLipLoss(rank=args.rank, world_size=args.world_size, dist_impl=args.loss_dist_impl)`` in
    place of ``create_loss(args)``; called, and returning, as :class:`ClipLoss`. It is :class:`itrloss.SigmoidLoss` with
    the model's scale and bias.

    Args:
        world_size: 1; more than one process is not supported yet.
        cache_labels, rank, dist_impl, chunk_size: as there; without effect. A large matrix is worked through in tiles
            anyway, backward included.
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int = 0,
    ):
        super().__init__(world_size)

    def _loss(self, sim: Similarity, scale: Any, bias: Any) -> Any:
        return functional.sigmoid_loss(sim, scale, bias)


# --------------------------------------------------------------------------------------------------------- shared


def _similarity(
    x: Tensor, y: Tensor, ids: Any = (None, None), names: tuple[str, str] = ("im", "s"), order: bool = False
) -> Similarity:
    """Of embeddings as they come; errors name the caller's arguments."""
    try:
        if order:
            return Similarity.from_scores(_order_scores(x, y), *ids)
        return Similarity(x, y, *ids, normalize=False)
    except (TypeError, ValueError) as error:
        message = str(error).replace("row_ids", "img_ids").replace("rows", names[0]).replace("cols", names[1])
        raise type(error)(message) from None


def _pairs(x: Tensor, y: Tensor, names: tuple[str, str] = ("im", "s"), order: bool = False) -> Similarity:
    """Of embeddings as they come, row i matching row i."""
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape != y.shape:
        raise ValueError(f"{names[1]}: expected shape {tuple(x.shape)} like {names[0]}, got {tuple(y.shape)}")
    return _similarity(x, y, names=names, order=order)


def _apart(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Ids by which no row of one matches any of the other."""
    return torch.arange(len(x) + len(y), device=x.device).split([len(x), len(y)])


def _square(name: str, scores: Tensor) -> Similarity:
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[0] != scores.shape[1]:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"{name}: expected scores (B, B), got {got}")
    return Similarity.from_scores(scores)


def _weighed(parts: Parts, weights: dict[str, float]) -> tuple[Tensor, Parts]:
    """The sum, in which a part without a weight has 1, and the parts without a gradient."""
    loss = torch.stack([weights.get(name, 1.0) * x for name, x in parts.items()]).sum()
    return loss, {name: x.detach() for name, x in parts.items()}


def _order_scores(images: Tensor, texts: Tensor) -> Tensor:  # (N, D) and (M, D) -> (N, M)
    return -torch.linalg.vector_norm((texts[None] - images[:, None]).clamp_min(0), dim=2)


def _sameness(name: str, residuals: Tensor | None, reduction: MeanOrSum) -> Tensor:
    """Frobenius norm of the cosines between a set's members, divided by K²: the orthogonal loss without slack."""
    return functional.dynamic_orthogonal_loss(_given(name, residuals), None, 0.0, "frobenius", reduction)


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


def _given(name: str, x: Any) -> Any:
    if x is None:
        raise ValueError(f"{name}: expected a tensor, got None")
    return x


_REQUIRED = object()


def _option(opt: Any, name: str, default: Any = _REQUIRED) -> Any:
    found = getattr(opt, name, default)
    if found is _REQUIRED:
        raise ValueError(f"opt: expected an attribute {name!r}, got none")
    return found


def _is_order(name: str, measure: Any) -> bool:
    if measure not in (False, None, "cosine", "order"):
        raise ValueError(f"{name}: expected 'cosine' or 'order', got {measure!r}")
    return measure == "order"


def _mean_or_sum(reduction: Any) -> MeanOrSum:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: expected 'mean' or 'sum', got {reduction!r}")
    return reduction
