"""The losses of open_clip."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import functional
from ..similarity import Similarity
from ._shared import Parts, pairs_of


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
        sim = pairs_of(image_features, text_features, ("image_features", "text_features"))
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
