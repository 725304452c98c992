"""Stand-ins for the trainers of VSE code bases: how they make, call, switch, log and save their
criterion.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class VSEModel:
    """VSE++: two encoders, and a criterion that is no part of the optimiser. The others change what
    is said.
    """

    name = "vsepp"
    options: ClassVar[dict[str, Any]] = {}  # of ``adapt``
    images, texts = (B, D), (B, D)  # of the encoders' output

    def __init__(self, criterion: Any):
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = (
            torch.randn(*n, D, generator=generator) for n in (self.images[:-1], self.texts[:-1])
        )
        self.img_enc, self.txt_enc = (nn.Linear(D, D, dtype=torch.float32) for _ in range(2))
        with torch.no_grad():
            for p in (*self.img_enc.parameters(), *self.txt_enc.parameters()):
                p.copy_(torch.randn(p.shape, generator=generator) / 2)
        self.criterion, self.logged = criterion, []
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.03)

    def parameters(self) -> list[Any]:
        return [*self.txt_enc.parameters(), *self.img_enc.parameters()]

    def forward_emb(self) -> tuple[Tensor, Tensor]:
        return F.normalize(self.img_enc(self.x), dim=-1), F.normalize(self.txt_enc(self.y), dim=-1)

    def forward_loss(self, img_emb: Tensor, cap_emb: Tensor) -> Tensor:
        return self.criterion(img_emb, cap_emb)

    def loss(self) -> Tensor:
        return self.forward_loss(*self.forward_emb())

    def train_emb(self) -> None:
        self.optimizer.zero_grad()
        loss = self.loss()
        self.logged.append(loss.data.item())
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 2.0)
        self.optimizer.step()

    def set_max_violation(self, max_violation: bool) -> None:
        if max_violation:
            self.criterion.max_violation_on()
        else:
            self.criterion.max_violation_off()


class VSEInfinity(VSEModel):
    name = "vse_inf"


class SCAN(VSEModel):
    name = "scan"
    options: ClassVar = {"score_function": xattn_score}
    images, texts = (B, R, D), (B, L, D)

    def forward_loss(self, img_emb, cap_emb):
        return self.criterion(img_emb, cap_emb, [L, 1, 2, *[3] * (B - 3)])


class SGRAF(VSEModel):
    name = "sgraf"

    def forward_loss(self, img_emb, cap_emb):
        return self.criterion(torch.sigmoid(img_emb @ cap_emb.T))


class NAAF(VSEModel):
    name = "naaf"

    def forward_loss(self, img_emb, cap_emb):
        return self.criterion(img_emb @ cap_emb.T, img_emb.size(0))


class CHAN(VSEModel):
    """It trains the criterion, too."""

    name = "chan"

    def forward_loss(self, img_emb, cap_emb):
        return self.criterion(img_emb @ cap_emb.T)

    def parameters(self):
        return super().parameters() + list(self.criterion.parameters())


class HREM(VSEModel):
    """Batches may have several captions of an image; their ids come by position."""

    name = "hrem"

    def forward_loss(self, img_emb, cap_emb):
        return self.criterion(img_emb, cap_emb, torch.arange(B) // 3)


class HAL(VSEModel):
    """The bank is a list of numbers and embeddings of the epoch's beginning; None in the first
    epoch.
    """

    name = "hal"
    mb_img = mb_cap = mb_ind = None

    def forward_loss(self, img_emb, cap_emb):
        indices = tuple(range(3, 3 + B))
        return self.criterion(img_emb, cap_emb, self.mb_img, self.mb_cap, self.mb_ind, indices)

    def load_memory_bank(self) -> None:
        with torch.no_grad():
            self.mb_img, self.mb_cap = (torch.cat([x, x.flip(1)]) for x in self.forward_emb())
        self.mb_ind = tuple(range(2 * B))


class USER(VSEModel):
    """The queues' term comes first, and the queues are overwritten before the backward pass."""

    name = "user"

    def __init__(self, criterion):
        super().__init__(criterion)
        self.v_queue, self.t_queue = (F.normalize(torch.rand(D, 4 * B), dim=0) for _ in range(2))

    def loss(self):
        img_emb, cap_emb = self.forward_emb()
        v_k, t_k = img_emb.detach() + 0.01, cap_emb.detach() + 0.01
        loss_moco = self.criterion.moco_forward(
            img_emb, t_k, cap_emb, v_k, self.v_queue, self.t_queue
        )
        with torch.no_grad():
            self.v_queue[:, :B], self.t_queue[:, :B] = v_k.T, t_k.T
        return self.forward_loss(img_emb, cap_emb) * 20 + loss_moco


class PVSE(VSEModel):
    """The criterion returns a dictionary, whose items go to the meters that the trainer has."""

    name = "pvse"
    options: ClassVar = {"opt": Namespace(num_embeds=K, div_weight=0.1, mmd_weight=0.01)}
    images, texts, meters = (B, K, D), (B, K, D), ("ranking_loss", "div_loss", "mmd_loss")

    def forward_loss(self, img_emb, cap_emb):
        loss, loss_dict = self.criterion(
            img_emb, cap_emb, self.img_enc(self.x).sigmoid(), self.txt_enc(self.y)
        )
        assert set(loss_dict) <= set(self.meters)
        return loss


class DivE(PVSE):
    """Five captions an image; the loss is multiplied in place, and ``max_violation`` set."""

    name = "dive"
    options: ClassVar = {
        "score_function": smooth_chamfer,
        "opt": Namespace(
            img_num_embeds=K,
            txt_num_embeds=K,
            unif_weight=0.01,
            mmd_weight=0.01,
            unif_residual=False,
        ),
    }
    images, texts, meters = (
        (B, K, D),
        (5 * B, K, D),
        ("t2i_loss", "i2t_loss", "mmd_loss", "unif_loss"),
    )

    def forward_loss(self, img_emb, cap_emb):
        loss = super().forward_loss(img_emb, cap_emb)
        loss *= 1.0
        return loss

    def set_max_violation(self, max_violation):
        self.criterion.max_violation = max_violation


TRAINERS = {
    trainer.name: trainer
    for trainer in (VSEModel, VSEInfinity, SCAN, SGRAF, NAAF, CHAN, HREM, HAL, USER, PVSE, DivE)
}
