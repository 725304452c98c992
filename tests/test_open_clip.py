"""``ClipLoss`` and ``SigLipLoss`` over several processes, beside open_clip's own and beside one process."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import WORLD, both, run
from published import open_clip
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from itrloss import compat

WAYS = [(local_loss, gather_with_grad) for local_loss in (False, True) for gather_with_grad in (False, True)]
EXCHANGES = (None, "bidir", "shift", "reduce", "gather")


class Encoders(nn.Module):
    """Embeddings of images and of texts, with the scale and the bias of their scores."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.images, self.texts = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scale, self.bias = (nn.Parameter(torch.tensor([x])) for x in (9.0, -2.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        embeddings = (F.normalize(x, dim=1) for x in (self.images(images), self.texts(texts)))
        return *embeddings, self.scale, self.bias


def batch(n: int) -> tuple[Tensor, Tensor]:
    images, texts = torch.randn(2, n, 6, generator=torch.Generator().manual_seed(1))
    return images, texts


def outcome(criterion: nn.Module, images: Tensor, texts: Tensor, wrap: Any, dtype=torch.float32) -> dict[str, Tensor]:
    """The value, and the gradients of the model, averaged over the processes by ``wrap``."""
    model = Encoders().to(dtype)
    wrapped = wrap(model)  # it must still exist in the backward pass
    value = criterion(*wrapped(images.to(dtype), texts.to(dtype)))
    value.backward()
    return {"value": value.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=10 * tolerance, atol=tolerance, msg=lambda m, n=name: f"{n} {m}")


# ------------------------------------------------------------------------------- values and gradients beside theirs


def every_way(rank: int) -> dict[str, Any]:
    theirs, own = open_clip(), [x.chunk(WORLD)[rank] for x in batch(4 * WORLD)]
    found = {}
    for source, losses in (("theirs", theirs), ("ours", compat)):
        for way in WAYS:
            criterion = losses.ClipLoss(*way, cache_labels=True, rank=rank, world_size=WORLD)
            found[source, way] = outcome(criterion, *own, DistributedDataParallel)
        for name in EXCHANGES:
            criterion = losses.SigLipLoss(rank=rank, world_size=WORLD, dist_impl=name)
            found[source, name] = outcome(criterion, *own, DistributedDataParallel)
    return found


def as_anchors() -> dict[str, Tensor]:
    """The gradients of one process without those that an embedding gets as a candidate of others."""
    model = Encoders()
    v, w, scale, bias = model(*batch(4 * WORLD))
    labels = torch.arange(len(v))
    logits = scale * v @ w.detach().T + bias, scale * w @ v.detach().T + bias
    (sum(F.cross_entropy(x, labels) for x in logits) / 2).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow
def test_every_way_has_the_values_and_gradients_of_one_process_and_theirs_relate_as_documented(tmp_path):
    first, second = both(every_way, tmp_path)
    clip = outcome(compat.ClipLoss(), *batch(4 * WORLD), nn.Identity())
    siglip = outcome(compat.SigLipLoss(), *batch(4 * WORLD), nn.Identity())
    for way in (*WAYS, *EXCHANGES):
        whole = clip if way in WAYS else siglip
        for found in (first, second):
            assert_same(found["ours", way], whole)
        theirs = [found["theirs", way] for found in (first, second)]
        # The value is that of the whole batch, or its mean over the processes is, which are not the same then.
        local_loss, gather_with_grad = way if way in WAYS else (True, True)
        values = torch.stack([found.pop("value") for found in theirs])
        torch.testing.assert_close(values.mean(), whole["value"])
        assert (abs(values[0] - values[1]) > 1e-3) == local_loss
        # The gradients of all are those of one process with gather_with_grad. Without it, those of encoders are not.
        wanted = {name: grad for name, grad in whole.items() if name != "value"}
        if not gather_with_grad:
            anchors = as_anchors()
            for name in ("images.weight", "images.bias", "texts.weight", "texts.bias"):
                wanted[name] = anchors[name] if local_loss else wanted[name] / WORLD
        for found in theirs:
            assert_same(found, wanted)


# ------------------------------------------------------------------------------------- beyond what theirs can do

SIZES = [[3, 0, 2], [1, 4, 1], [0, 1, 0]]


def several(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in (("clip", compat.ClipLoss), ("siglip", compat.SigLipLoss)):
        criterion = kind(world_size=3)
        for sizes in SIZES:
            own = [x.split(sizes)[rank] for x in batch(sum(sizes))]
            found[name, *sizes] = outcome(criterion, *own, DistributedDataParallel, torch.float64)
        nothing = torch.zeros(0, 4, requires_grad=True)
        loss = criterion(nothing, nothing, 9.0, -2.0)
        loss.backward()
        found[name, "nothing"] = loss.detach()
        features = [x.split([3, 3, 3])[rank].bfloat16().requires_grad_() for x in batch(9)]
        scale, bias = (torch.tensor(x, requires_grad=True) for x in (9.0, -2.0))
        loss = criterion(*features, scale, bias, output_dict=True)["contrastive_loss"]
        loss.backward()
        found[name, "half"] = loss.detach(), *(x.grad for x in (*features, scale, bias))
        compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
        found[name, "compiled"] = outcome(compiled, *(x.split([2, 2, 2])[rank] for x in batch(6)), DistributedDataParallel)
        v, w = (x.split([4, 4, 4])[rank].requires_grad_() for x in batch(12))
        with FlopCounterMode(display=False) as counter:
            criterion(v, w, 9.0, -2.0).backward()
        found[name, "flops"] = counter.get_total_flops()
        torch.testing.assert_close(kind()(v, w, 9.0, -2.0), kind(world_size=1)(v, w, 9.0, -2.0))  # of this process alone
        with pytest.raises(ValueError, match="world_size: expected 1 or"):
            kind(world_size=4)
    x = torch.ones(4, 6)
    for fault, call in {
        "pairs": lambda: compat.ClipLoss(world_size=3)(x, x[rank:], 9.0),
        "shape": lambda: compat.ClipLoss(world_size=3)(x if rank else x[0], x, 9.0),
        "dimension": lambda: compat.SigLipLoss(world_size=3)(x[:, rank:], x[:, rank:], 9.0),
        "loss": lambda: (compat.SigLipLoss if rank else compat.ClipLoss)(world_size=3)(x, x, 9.0),
    }.items():
        with pytest.raises(ValueError) as error:
            call()
        found[fault] = str(error.value)
    return found


@pytest.mark.slow
def test_batches_of_any_size_types_and_faults(tmp_path):
    processes = run(several, tmp_path, world=3)
    for name, criterion in (("clip", compat.ClipLoss()), ("siglip", compat.SigLipLoss())):
        wholes = {tuple(sizes): outcome(criterion, *batch(sum(sizes)), nn.Identity(), torch.float64) for sizes in SIZES}
        compiled = outcome(criterion, *batch(6), nn.Identity())
        v, w = (x.bfloat16().requires_grad_() for x in batch(9))
        scale, bias = (torch.tensor(x, requires_grad=True) for x in (9.0, -2.0))
        loss = criterion(v, w, scale, bias)
        grads = torch.autograd.grad(loss, [v, w, scale, bias])
        for found in processes:
            for sizes, whole in wholes.items():
                assert_same(found[name, *sizes], whole, 1e-10)
            assert_same(found[name, "compiled"], compiled)
            assert found[name, "nothing"] == 0
            torch.testing.assert_close(found[name, "half"][0], loss.detach())  # float32
        halves = list(zip(*(found[name, "half"][1:] for found in processes), strict=True))
        for x, wanted in zip((*map(torch.cat, halves[:2]), sum(halves[2]), sum(halves[3])), grads, strict=True):
            assert (x / 3 - wanted).norm() <= 0.01 * wanted.norm()
        v, w = (x.requires_grad_() for x in batch(12))
        with FlopCounterMode(display=False) as counter:
            criterion(v, w, 9.0, -2.0).backward()
        assert [3 * found[name, "flops"] for found in processes] == [counter.get_total_flops()] * 3 != [0] * 3
    failed = "text_features: expected as many as image_features, 4, got 3"
    assert [found["pairs"] for found in processes[1:]] == [failed, failed.replace("got 3", "got 2")]
    assert processes[0]["pairs"].startswith(f"gather: process 1 failed: ValueError: {failed}")
    assert processes[0]["shape"].startswith("image_features: expected shape (N, D)")
    assert all("process 0 failed: ValueError: image_features" in found["shape"] for found in processes[1:])
    for found in processes:
        assert "float32 (B, 6)" in found["dimension"] and "float32 (B, 5)" in found["dimension"]
        assert "ClipLoss in process 0" in found["loss"] and "SigLipLoss in process 1" in found["loss"]


# ------------------------------------------------------------------------------------------------------ their loop


class Batches(list):
    """A data loader, as their loop uses it."""

    num_batches = property(len)
    num_samples = property(lambda self: sum(len(images) for images, _ in self))
    dataloader = property(lambda self: self)

    def set_epoch(self, epoch: int) -> None:
        pass


class Recorded(nn.Module):
    def __init__(self, loss: nn.Module):
        super().__init__()
        self.loss, self.values = loss, []

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        losses = self.loss(**inputs)
        self.values.append(losses["contrastive_loss"].detach())
        return losses


def trained(rank: int) -> dict[str, Any]:
    theirs, found = open_clip(), {}
    args = Namespace(device="cpu", precision="fp32", distill=False, accum_freq=1, skip_scheduler=True, horovod=False,
                     grad_clip_norm=None, rank=rank, world_size=WORLD, batch_size=4, log_every_n_steps=1, wandb=False)  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    data = Batches(
        (torch.randn(4, 3, 8, 8, generator=generator), torch.randint(1, 11, (4, 5), generator=generator)) for _ in range(3)
    )
    for name, losses in (("theirs", theirs), ("ours", compat)):
        for kind, loss, scale, bias in (
            ("clip", losses.ClipLoss(*((True, True) if name == "theirs" else ()), rank=rank, world_size=WORLD), 14.3, None),
            ("siglip", losses.SigLipLoss(rank=rank, world_size=WORLD), 10.0, -10.0),
        ):
            torch.manual_seed(0)
            vision = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 4, "image_size": 8}
            text = {"context_length": 5, "vocab_size": 11, "width": 16, "heads": 2, "layers": 1}
            clip = theirs.CLIP(
                8, vision, text, init_logit_scale=math.log(scale), init_logit_bias=bias, output_dict=True
            )  # fmt: skip
            before = {key: p.detach().clone() for key, p in clip.named_parameters()}
            model, loss = DistributedDataParallel(clip), Recorded(loss)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # sees the gradient's length
            theirs.train_one_epoch(model, {"train": data}, loss, 0, optimizer, None, None, None, args)
            after = {key: p.detach() for key, p in clip.named_parameters()}
            assert len(loss.values) == 3 and all((after[key] != x).any() for key, x in before.items())
            found[kind, name] = {"values": torch.stack(loss.values), **after}
    return found


@pytest.mark.slow
def test_their_training_loop_ends_with_the_same_model(tmp_path):
    first, second = both(trained, tmp_path)
    for kind in ("clip", "siglip"):
        theirs = [found[kind, "theirs"] for found in (first, second)]
        wanted = {**theirs[0], "values": (theirs[0]["values"] + theirs[1]["values"]) / 2}
        for found in (first, second):
            for name, x in wanted.items():
                torch.testing.assert_close(found[kind, "ours"][name], x, rtol=1e-5, atol=1e-5, msg=f"{kind} {name}")
