"""The losses in open_clip: over several processes, next to one process, and in its place."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import published
from support.losses_registry import REGISTRY, select
from support.processes import WORLD, run
from support.published import open_clip
from support.versions import FlopCounterMode, needs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import itrloss
from itrloss import compat
from itrloss.integrations.open_clip import RetrievalLoss, patch_open_clip

WAYS = [
    (local_loss, gather_with_grad)
    for local_loss in (False, True)
    for gather_with_grad in (False, True)
]
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


def outcome(
    criterion: nn.Module, images: Tensor, texts: Tensor, wrap: Any, dtype=torch.float32
) -> dict[str, Tensor]:
    """The value, and the gradients of the model, averaged over the processes by ``wrap``."""
    model = Encoders().to(dtype)
    wrapped = wrap(model)  # it must still exist in the backward pass
    value = criterion(*wrapped(images.to(dtype), texts.to(dtype)))
    value.backward()
    return {"value": value.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same(
    found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=10 * tolerance, atol=tolerance, msg=name)


# -------------------------------------------------------------------------------- several processes


def every_way(rank: int) -> list[dict[str, Tensor]]:
    """The outcomes with all options by which theirs exchange embeddings."""
    own = [x.chunk(WORLD)[rank] for x in batch(4 * WORLD)]
    options: Any = {"cache_labels": True, "rank": rank, "world_size": WORLD}
    criteria = [compat.ClipLoss(*way, **options) for way in WAYS]
    criteria += [compat.SigLipLoss(**options, dist_impl=name) for name in EXCHANGES]
    return [outcome(criterion, *own, DistributedDataParallel) for criterion in criteria]


@pytest.mark.slow
def test_every_way_has_the_values_and_gradients_of_one_process(tmp_path):
    clip = outcome(compat.ClipLoss(), *batch(4 * WORLD), nn.Identity())
    siglip = outcome(compat.SigLipLoss(), *batch(4 * WORLD), nn.Identity())
    wanted = [clip] * len(WAYS) + [siglip] * len(EXCHANGES)
    for every in run(every_way, tmp_path):
        for found, whole in zip(every, wanted, strict=True):
            assert_same(found, whole)


KINDS = {"clip": compat.ClipLoss, "siglip": compat.SigLipLoss}
SIZES = {"one has none": [3, 0, 2], "unequal": [1, 4, 1], "one pair": [0, 1, 0]}


def parts(rank: int, sizes: list[int]) -> list[Tensor]:
    return [x.split(sizes)[rank] for x in batch(sum(sizes))]


def flops(criterion: nn.Module, features: list[Tensor]) -> int:
    v, w = (x.clone().requires_grad_() for x in features)
    with FlopCounterMode(display=False) as counter:
        criterion(v, w, 9.0, -2.0).backward()
    return counter.get_total_flops()


def of_no_pairs(criterion: nn.Module) -> Tensor:
    """The loss where no process has a pair, which also has a backward pass."""
    nothing = torch.zeros(0, 6, requires_grad=True)
    loss = criterion(nothing, nothing, 9.0, -2.0)
    loss.backward()
    return loss.detach()


def of_a_kind(rank: int, make: Any) -> dict[str, Any]:
    """What one of three processes finds with a loss."""
    criterion = make(world_size=3)
    found: dict[str, Any] = {}
    for name, sizes in SIZES.items():
        part = parts(rank, sizes)
        found[name] = outcome(criterion, *part, DistributedDataParallel, torch.float64)
    found["nothing"] = of_no_pairs(criterion)
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    found["compiled"] = outcome(compiled, *parts(rank, [2, 2, 2]), DistributedDataParallel)
    found["flops"] = flops(criterion, parts(rank, [4, 4, 4]))
    with pytest.raises(ValueError, match="world_size: expected 1 or"):
        make(world_size=4)
    found["alone"] = make()(*parts(rank, [4, 4, 4]), 9.0, -2.0)
    return found


def several(rank: int) -> dict[str, Any]:
    """What one of three processes finds with each loss."""
    return {kind: of_a_kind(rank, make) for kind, make in KINDS.items()}


def assert_batches_of_any_size(processes: list[dict[str, Any]], criterion: nn.Module) -> None:
    """Values and gradients are those of one process with the whole batch."""
    for name, sizes in SIZES.items():
        whole = outcome(criterion, *batch(sum(sizes)), nn.Identity(), torch.float64)
        for found in processes:
            assert_same(found[name], whole, 1e-10)


@needs("torch.compile", 2, 8)
@pytest.mark.slow
def test_batches_of_any_size_and_the_compiler(tmp_path):
    processes = run(several, tmp_path, world=3)
    for kind, make in KINDS.items():
        criterion = make()
        of_kind = [found[kind] for found in processes]
        assert_batches_of_any_size(of_kind, criterion)
        compiled = outcome(criterion, *batch(6), nn.Identity())
        for rank, found in enumerate(of_kind):
            assert found["nothing"] == 0
            assert_same(found["compiled"], compiled)
            own = criterion(*parts(rank, [4, 4, 4]), 9.0, -2.0)
            torch.testing.assert_close(found["alone"], own)
            # of one process with the whole batch
            assert 3 * found["flops"] == flops(criterion, [*batch(12)]) > 0


# -------------------------------------------------------------------------- any loss in their place

LOSSES = {
    **select("infonce learnable", "sigmoid", "dcl", "triplet"),
    "matryoshka": replace(REGISTRY["matryoshka"], options={}),  # without a scale of its own
}


@pytest.mark.parametrize(
    "name, twin, factor",
    [("infonce learnable", compat.ClipLoss(), 2), ("sigmoid", compat.SigLipLoss(), 1)],
)
def test_a_learnable_scale_and_bias_are_those_of_the_model(name, twin, factor):
    whole = outcome(twin, *batch(7), nn.Identity(), torch.float64)
    assert whole["scale"].abs() > 1e-3
    wanted = {name: factor * x for name, x in whole.items()}
    for loss in (LOSSES[name].make(), itrloss.Matryoshka(LOSSES[name].make(), [4])):
        assert_same(
            outcome(RetrievalLoss(loss), *batch(7), nn.Identity(), torch.float64), wanted, 1e-10
        )
    # whose logarithm would be rounded
    half = *map(F.normalize, batch(7)), *torch.tensor([9.0625, -2.0]).bfloat16()
    torch.testing.assert_close(RetrievalLoss(LOSSES[name].make())(*half), factor * twin(*half))


@pytest.mark.parametrize("name", ["dcl", "triplet", "matryoshka"])
def test_other_losses_train_the_encoders_alone(name):
    loss = LOSSES[name].make()
    found, wanted = (
        outcome(f, *batch(7), nn.Identity())
        for f in (RetrievalLoss(loss), lambda v, w, *_: loss(v, w))
    )
    for parameter in ("scale", "bias"):
        assert wanted.pop(parameter) is None and found[parameter] == 0
    assert_same(found, wanted)


def any_loss(rank: int) -> dict[str, Any]:
    own = [x.chunk(WORLD)[rank] for x in batch(8)]
    return {
        name: outcome(RetrievalLoss(entry.make(gather=True)), *own, DistributedDataParallel)
        for name, entry in LOSSES.items()
    }


@pytest.mark.slow
def test_losses_of_two_processes_are_those_of_one_and_each_parameter_has_a_gradient(tmp_path):
    processes = run(any_loss, tmp_path)
    for name, entry in LOSSES.items():
        whole = outcome(RetrievalLoss(entry.make()), *batch(8), nn.Identity())
        for found in processes:
            assert_same(found[name], whole)


class Shifted(itrloss.PairLoss):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    "loss, error",
    [
        (nn.CrossEntropyLoss(), "loss: expected one of images and texts alone"),
        (itrloss.InfoNCELoss(reduction="none"), "loss: expected reduction 'mean' or 'sum'"),
        (Shifted(), "loss: expected a learnable log_scale and bias at most"),
    ],
)
def test_other_losses_are_refused(loss, error):
    for call in (RetrievalLoss, patch_open_clip):
        with pytest.raises((TypeError, ValueError), match=error):
            call(loss)


def test_a_bias_that_is_trained_has_to_be_there():
    v, w = batch(4)
    with pytest.raises(
        ValueError, match="logit_bias: expected that of the model, which SigmoidLoss"
    ):
        RetrievalLoss(itrloss.SigmoidLoss())(v, w, torch.tensor(9.0))


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """open_clip; where it is not installed, the stand-ins under its name."""
    if open_clip().ClipLoss is published.ClipLoss:
        for name in ("factory", "loss"):
            monkeypatch.setattr(published, name, published, raising=False)
        for name in ("open_clip", "open_clip.factory", "open_clip.loss"):
            monkeypatch.setitem(sys.modules, name, published)


def made(model: str = "ViT-B-32", siglip: bool = False) -> nn.Module:
    """The loss that they make of the command line's options."""
    from open_clip.factory import create_loss

    return create_loss(
        Namespace(
            model=model,
            siglip=siglip,
            distill=False,
            local_loss=True,
            gather_with_grad=True,
            rank=0,
            world_size=1,
            horovod=False,
            loss_dist_impl=None,
            coca_caption_loss_weight=2.0,
            coca_contrastive_loss_weight=1.0,
        )
    )


def test_a_patch_changes_what_they_make_until_it_is_undone():
    theirs = open_clip()
    kinds = {"ViT-B-32": theirs.ClipLoss, "coca_ViT-B-32": type(made("coca_ViT-B-32"))}
    undo = patch_open_clip()
    assert type(made()) is compat.ClipLoss and type(made(siglip=True)) is compat.SigLipLoss
    assert type(made("coca_ViT-B-32")) is kinds["coca_ViT-B-32"]
    with patch_open_clip(itrloss.DiversityContrastiveLoss(temperature=0.05)):
        for loss in (
            made(),
            made(siglip=True),
            sys.modules["open_clip.loss"].ClipLoss(rank=0, world_size=1),
        ):
            assert isinstance(loss, RetrievalLoss) and loss.loss.temperature == 0.05
    assert type(made()) is compat.ClipLoss
    undo.close()
    assert {name: type(made(name)) for name in kinds} == kinds
    assert type(made(siglip=True)) is theirs.SigLipLoss


def test_a_patch_needs_open_clip(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ImportError, match=r"install itrloss with the extra 'open-clip'"):
        patch_open_clip()


def test_a_patch_with_a_loss_is_a_class_that_gathers(monkeypatch):
    open_clip()
    with patch_open_clip(itrloss.InfoNCELoss(learnable=True)):
        kind = sys.modules["open_clip.loss"].ClipLoss
        assert isinstance(made(), kind) and issubclass(type("Own", (kind,), {}), RetrievalLoss)
        monkeypatch.setattr("itrloss.integrations.world_size", lambda: 2)
        with pytest.warns(UserWarning, match="each process takes negatives .*gather=True"):
            kind(rank=0, world_size=2)
    with patch_open_clip(itrloss.InfoNCELoss(learnable=True, gather=True)):
        assert isinstance(
            sys.modules["open_clip.loss"].ClipLoss(rank=0, world_size=2), RetrievalLoss
        )
