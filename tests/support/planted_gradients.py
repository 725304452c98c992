"""Planted bugs of gradients, of range and of rounding, see :mod:`planted`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from support.planted import InfoNCE, WithBias, planted

# ---------------------------------------------------------------------------------------- gradients


class _Scaled(torch.autograd.Function):
    """Values (N,), whose gradient is scaled by the first upstream gradient alone
    (Liger-Kernel#678).
    """

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad[:1].expand_as(grad)


@planted("uneven_upstream")
class FirstUpstreamForAll(InfoNCE):
    """With reduction "none", all is scaled by the first upstream gradient, for over a year
    (Liger-Kernel).
    """

    def values(self, scores, positive):
        return _Scaled.apply(super().values(scores, positive))


class _Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return torch.ones_like(grad)


@planted("gradcheck")
class UpstreamIgnored(InfoNCE):
    """The gradient is found in the forward pass, and not scaled in the backward pass."""

    def reduced(self, values, exists):
        result = super().reduced(values, exists)
        return result if self.reduction == "none" else _Ones.apply(result)


@planted("gradients_of_parameters")
class BiasDetached(WithBias):
    """The bias gets no gradient (cut-cross-entropy#52)."""

    def values(self, scores, positive):
        return F.softplus(
            InfoNCE.values(self, scores * self.scale.exp(), positive) + self.bias.detach()
        )


@planted("inputs_not_modified")
class NormalisedInPlace(InfoNCE):
    """The caller's embeddings are normalised where they are."""

    def prepared(self, images, texts, image_ids, text_ids):
        texts.data.div_(texts.detach().norm(dim=1, keepdim=True).clamp_min(1e-12))
        return super().prepared(images, texts, image_ids, text_ids)


@planted("inputs_not_modified")
class BackwardInside(InfoNCE):
    """The forward pass runs a backward pass to find hard pairs, and leaves its gradient in
    .grad.
    """

    def scores(self, images, texts):
        scores = super().scores(images, texts)
        if scores.requires_grad and torch.is_grad_enabled():
            scores.amax(1).sum().backward(retain_graph=True)
        return scores


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        ctx.slopes = scores.detach().clone()
        return scores.square()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return ctx.slopes.mul_(2 * grad)


@planted("two_backwards")
class BackwardOverwrites(InfoNCE):
    """The backward pass writes its result over what it saved."""

    def scores(self, images, texts):
        scores = super().scores(images, texts)
        return _InPlace.apply(scores + 2)


@planted("result_is_a_number")
class ValueDetached(InfoNCE):
    """The loss is returned as a new tensor."""

    def reduced(self, values, exists):
        result = super().reduced(values, exists)
        return (
            result
            if self.reduction == "none"
            else torch.tensor(result.item(), dtype=values[0].dtype)
        )


# -------------------------------------------------------------------------------- constant weights


class Hard(InfoNCE):
    """Negatives count the more, the higher they score: a weight that the gradient takes for a
    constant.
    """

    hardness = 0.5  # times the logit

    def log_of_negatives(self, logits, positive):
        return super().log_of_negatives(logits + self.weights(logits), positive)

    def weights(self, logits):
        return self.hardness * logits.detach()


def hard(loss, *inputs):
    """The formula, of a loss's reduction."""
    return Hard(reduction=loss.reduction)(*inputs)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return 2 * grad


@planted("agrees_with_reference", reference=hard)
class NegativesTwice(Hard):
    """The backward pass has a factor too many for negatives, so that the gradient is none of any
    formula.
    """

    def log_of_negatives(self, logits, positive):
        return _Doubled.apply(super().log_of_negatives(logits, positive))


# ---------------------------------------------------------------------------------- range, rounding


@planted("low_temperature")
class NoMaximum(InfoNCE):
    """Exponentials are summed without their maximum (Inf-CLIP's ring form)."""

    def log_of_negatives(self, logits, positive):
        return (logits.exp() * ~positive).sum(1).clamp_min(1e-30).log()


@planted("zero_vectors")
class NoEpsilon(InfoNCE):
    """A vector of zeros is divided by its length."""

    def unit(self, x):
        return x / x.norm(dim=1, keepdim=True)


@planted("zero_vectors_in_half_precision")
class EpsilonOfFloat16(InfoNCE):
    """1e-12, what keeps a length above 0, is 0 in float16."""

    def unit(self, x):
        return F.normalize(x, dim=1).to(torch.promote_types(x.dtype, torch.float32))


@planted("bfloat16_error")
class ScoresInHalf(InfoNCE):
    """Scores are bfloat16: at a temperature of 0.01 they are multiples of 0.5."""

    def unit(self, x):
        return super().unit(x).to(x.dtype)

    def values(self, scores, positive):
        return super().values(scores.float() if scores.dtype != torch.float64 else scores, positive)


@planted("autocast_error")
class AutocastScores(InfoNCE):
    """Autocast runs the product in bfloat16."""

    def scores(self, images, texts):
        scores = images @ texts.T
        return scores if images.dtype == torch.float64 else scores.float()


@planted("short_embeddings")
class LargeEpsilon(InfoNCE):
    """1e-6 is added to lengths."""

    def unit(self, x):
        x = x.double() if x.dtype == torch.float64 else x.float()
        return x / (x.norm(dim=1, keepdim=True) + 1e-8)


@planted("extreme_scores")
class DistanceOfEqual(InfoNCE):
    """The slope of a distance of 0 is infinite (pytorch-metric-learning#233)."""

    def scores(self, images, texts):
        squares = 2 - 2 * super().scores(images, texts)
        # PyTorch 2.14's clamp has slope 0 at 0
        return 1 - torch.maximum(squares, torch.zeros_like(squares)).sqrt()


@planted("float32_error")
class CancelledDistance(InfoNCE):
    """Squared distances of embeddings far from the origin cancel in float32."""

    def scores(self, images, texts):
        v = images + 30
        w = texts + 30
        return 1 - (v.square().sum(1)[:, None] + w.square().sum(1) - 2 * super().scores(v, w)) / 2
