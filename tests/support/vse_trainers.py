"""Stand-ins for the trainers of VSE code bases: how they make and call their criterion."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from itrloss import compat

B, D, K, R, L = 10, 6, 2, 3, 4  # pairs, dimensions, elements of a set, regions, words


def xattn_score(im: Tensor, s: Tensor, s_l: Any) -> Tensor:
    """The highest of an image's regions for each of a caption's words, averaged, caption by caption
    as in SCAN.
    """
    return torch.stack([(im @ s[j, :n].T).amax(1).mean(1) for j, n in enumerate(s_l)], 1)


def smooth_chamfer(img_embs: Tensor, txt_embs: Tensor) -> Tensor:
    """A method of DivE's ``SetwiseSimilarity``, whose sets are rows of a matrix."""
    z = torch.exp(4 * img_embs @ txt_embs.T).view(len(img_embs) // K, K, -1, K)
    return z.sum(3).log().sum(1) / (2 * K * 4) + z.sum(1).log().sum(2) / (2 * K * 4)


def hinge_sum(scores: Tensor, margin: float, hardest: bool, masked: Tensor | None = None) -> Tensor:
    """Sum of the hinges of each diagonal entry with its row and its column, without masked
    pairs.
    """
    if masked is None:
        masked = torch.eye(len(scores), dtype=torch.bool)
    own = scores.diagonal()
    of_rows = (margin + scores - own[:, None]).relu().masked_fill(masked, 0)
    of_columns = (margin + scores - own).relu().masked_fill(masked, 0)
    if hardest:
        return of_rows.amax(1).sum() + of_columns.amax(0).sum()
    return of_rows.sum() + of_columns.sum()


class Trainer:
    """Two encoders, and a criterion; HAL has a bank, and USER queues."""

    def __init__(self, name: str, loss: nn.Module):
        self.code_base = CODE_BASES[name]
        self.criterion: Any = compat.adapt(loss, name, **self.code_base.options)
        generator = torch.Generator().manual_seed(0)
        self.inputs: list[Tensor] = []
        self.encoders = nn.ModuleList()
        for shape in (self.code_base.images, self.code_base.texts):
            self.inputs.append(torch.randn(*shape, generator=generator))
            self.encoders.append(nn.Linear(D, D))
        with torch.no_grad():
            for p in self.encoders.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 2)
        self.bank: Any = None, None, None  # in the first epoch
        self.queues = [F.normalize(torch.rand(D, 4 * B), dim=0) for _ in "vt"]
        trained = [*self.encoders.parameters(), *self.criterion.parameters()]
        self.optimizer = torch.optim.Adam(trained, lr=0.03)

    def outputs(self) -> list[Tensor]:
        """The encoders' outputs before they are normalised."""
        return [f(x) for f, x in zip(self.encoders, self.inputs, strict=True)]

    def loss(self) -> Tensor:
        return self.code_base.loss(self, *[F.normalize(x, dim=-1) for x in self.outputs()])

    def train_emb(self) -> float:
        """Train for one step; return the loss."""
        self.optimizer.zero_grad()
        loss = self.loss()
        value = loss.data.item()
        loss.backward()
        nn.utils.clip_grad_norm_(self.encoders.parameters(), 2.0)
        self.optimizer.step()
        return value

    def load_memory_bank(self) -> None:
        """Keep the embeddings of the epoch's beginning, and numbers."""
        images, texts = (F.normalize(x.detach(), dim=-1) for x in self.outputs())
        both = [torch.cat([x, x.flip(1)]) for x in (images, texts)]
        self.bank = *both, tuple(range(2 * B))


def hal(model: Trainer, v: Tensor, w: Tensor) -> Tensor:
    return model.criterion(v, w, *model.bank, tuple(range(3, 3 + B)))


def user(model: Trainer, v: Tensor, w: Tensor) -> Tensor:
    """The queues' term comes first, and the queues are overwritten before the backward pass."""
    keys = [x.detach() + 0.01 for x in (v, w)]
    of_queues = model.criterion.moco_forward(v, keys[1], w, keys[0], *model.queues)
    for queue, x in zip(model.queues, keys, strict=True):
        queue[:, :B] = x.T
    return model.criterion(v, w) * 20 + of_queues


def of_sets(model: Trainer, v: Tensor, w: Tensor) -> Tensor:
    """Of a loss and its parts, whose items are logged, the loss, multiplied in place as by DivE."""
    images, texts = model.outputs()
    loss, parts = model.criterion(v, w, images.sigmoid(), texts)
    assert all(x.dim() == 0 for x in parts.values())
    loss *= 1.0
    return loss


class CodeBase(NamedTuple):
    """How a code base calls its criterion, options of ``adapt``, and the shapes of embeddings."""

    loss: Callable[[Trainer, Tensor, Tensor], Tensor]
    options: Mapping[str, Any] = MappingProxyType({})
    images: tuple[int, ...] = (B, D)
    texts: tuple[int, ...] = (B, D)


LENGTHS = [L, 1, 2, *[3] * (B - 3)]
OF_PVSE = Namespace(num_embeds=K, div_weight=0.1, mmd_weight=0.01)
OF_DIVE = Namespace(
    img_num_embeds=K, txt_num_embeds=K, unif_weight=0.01, mmd_weight=0.01, unif_residual=False
)
CODE_BASES = {
    "vsepp": CodeBase(lambda model, v, w: model.criterion(v, w)),
    "vse_inf": CodeBase(lambda model, v, w: model.criterion(v, w)),
    "scan": CodeBase(
        lambda model, v, w: model.criterion(v, w, LENGTHS),
        {"score_function": xattn_score},
        (B, R, D),
        (B, L, D),
    ),
    "sgraf": CodeBase(lambda model, v, w: model.criterion(torch.sigmoid(v @ w.T))),
    "naaf": CodeBase(lambda model, v, w: model.criterion(v @ w.T, len(v))),
    "chan": CodeBase(lambda model, v, w: model.criterion(v @ w.T)),
    # batches may have several captions of an image, whose ids come by position
    "hrem": CodeBase(lambda model, v, w: model.criterion(v, w, torch.arange(B) // 3)),
    "hal": CodeBase(hal),
    "user": CodeBase(user),
    "pvse": CodeBase(of_sets, {"opt": OF_PVSE}, (B, K, D), (B, K, D)),
    "dive": CodeBase(
        of_sets, {"score_function": smooth_chamfer, "opt": OF_DIVE}, (B, K, D), (5 * B, K, D)
    ),
}
