"""The losses of open_clip."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from .. import distributed, functional
from ..checks import Names, check_number
from ..similarity import Similarity


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
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss of (B, D) pairs, or with ``output_dict`` a dictionary that has it as
        ``contrastive_loss``.
        """
        if not isinstance(logit_scale, Tensor):
            check_number("logit_scale", logit_scale, positive=True)
        make = Similarity
        if self.world_size > 1:
            same = type(self).__name__
            for name, x in (("logit_scale", logit_scale), ("logit_bias", logit_bias)):
                value = distributed.digest(x) if isinstance(x, Tensor) else x
                same += f", {name} {type(x).__name__} {value}"
            make = partial(Similarity.sharded, same=same)
        names = Names("image_features", "text_features", "", "")
        sim = make(image_features, text_features, normalize=False, names=names)
        if logit_bias is None:
            logit_bias = 0.0
        loss = self._loss(sim, logit_scale, logit_bias)
        if output_dict:
            return {"contrastive_loss": loss}
        return loss

    def _loss(self, sim: Similarity, scale: float | Tensor, bias: float | Tensor) -> Tensor:
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

    def _loss(self, sim: Similarity, scale: float | Tensor, bias: float | Tensor) -> Tensor:
        # with as many images as texts, its mean divides by B
        return functional.sigmoid_loss(sim, scale, bias)
