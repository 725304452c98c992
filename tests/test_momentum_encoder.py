"""Momentum encoders: their averages in all precisions, their mode, their state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from support.versions import checkpoint_wrapper, fully_shard
from torch import nn

from itrloss import MomentumEncoder

MOMENTUM = 0.999
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32, torch.float64]


def updated(keys: MomentumEncoder, encoder: nn.Module, steps: int) -> nn.Module:
    """Return the averaged module after some updates."""
    for _ in range(steps):
        keys.update(encoder)
    return keys.module


def longer(keys: MomentumEncoder, dtype: torch.dtype) -> nn.Module:
    """Return an encoder whose parameters are by a half larger than their averages."""
    encoder = copy.deepcopy(keys.module).to(dtype)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.mul_(1.5)
    return encoder


def linear(dtype: torch.dtype) -> tuple[MomentumEncoder, nn.Module]:
    """The average of a layer, and an encoder that is longer."""
    keys = MomentumEncoder(nn.Linear(8, 8).to(dtype), MOMENTUM)
    return keys, longer(keys, dtype)


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_parameters_are_averaged_and_buffers_copied_or_averaged(buffers):
    encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    keys = MomentumEncoder(encoder, 0.9, buffers=buffers)
    wanted = [x.detach().clone() for x in encoder.parameters()]
    wanted_mean = encoder[1].running_mean.clone()
    for _ in range(3):
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.add_(torch.randn_like(parameter))
        encoder(torch.randn(8, 3))
        keys.update(encoder)
        wanted = [x.lerp(new.detach(), 0.1) for x, new in zip(wanted, encoder.parameters())]  # noqa: B905
        mean = encoder[1].running_mean
        wanted_mean = mean.clone() if buffers == "copy" else wanted_mean.lerp(mean, 0.1)
    torch.testing.assert_close(list(keys.module.parameters()), wanted)
    torch.testing.assert_close(keys.module[1].running_mean, wanted_mean)


class TwoTowers(nn.Module):
    """A model whose keys are computed by methods, as CLIP's are."""

    def __init__(self):
        super().__init__()
        self.image = nn.Linear(3, 4)

    def encode_image(self, x):
        return self.image(x)


def test_methods_of_an_encoder_are_those_of_the_module():
    encoder = TwoTowers()
    keys = MomentumEncoder(encoder, 0.0)
    keys.update(encoder)
    x = torch.randn(5, 3)
    found = keys.module.encode_image(x)
    assert torch.equal(found, encoder.encode_image(x))
    assert not found.requires_grad


def test_complex_buffers_are_averaged():
    encoder = nn.Linear(3, 4)
    encoder.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))
    keys = MomentumEncoder(encoder, 0.75, buffers="average")
    encoder.phases.fill_(4 + 8j)
    keys.update(encoder)
    assert keys.module.phases.tolist() == [1 + 2j] * 2


def test_keys_have_no_gradient():
    keys = MomentumEncoder(nn.Linear(3, 4))
    assert not keys(torch.randn(8, 3)).requires_grad
    assert not any(x.requires_grad for x in keys.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_kept(training):
    keys = MomentumEncoder(nn.Sequential(nn.Linear(3, 4), nn.Dropout()), training=training)
    model = nn.ModuleList([keys])
    for mode in (True, False):
        model.train(mode)
        assert all(module.training == training for module in keys.modules())


def test_options_are_checked_whenever_they_are_set():
    with pytest.raises(ValueError, match="momentum: expected a number of at least 0 and at most 1"):
        MomentumEncoder(nn.Linear(2, 2), 1.5)
    with pytest.raises(ValueError, match="buffers"):
        MomentumEncoder(nn.Linear(2, 2), buffers="keep")  # type: ignore[arg-type]
    keys = MomentumEncoder(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="momentum: expected a number of at least 0 and at most 1"):
        keys.momentum = 1.5
    keys.momentum = 0
    encoder = nn.Linear(2, 2)
    assert torch.equal(updated(keys, encoder, 1).weight, encoder.weight)


WRAPPED = {
    "data parallel": nn.DataParallel,
    "compiled": lambda encoder: torch.compile(encoder, backend="eager"),
    "both": lambda encoder: nn.DataParallel(torch.compile(encoder, backend="eager")),
    "checkpointed": checkpoint_wrapper,
}


@pytest.mark.parametrize("way", WRAPPED)
def test_a_wrapped_encoder_moves_the_keys(way):
    keys = MomentumEncoder(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 0.0)
    encoder = longer(keys, torch.float32)
    updated(keys, WRAPPED[way](encoder), 1)
    assert torch.equal(keys.module[0].weight, encoder[0].weight)


BATCH_NORM = nn.BatchNorm1d(4)
OTHER_ENCODERS = {
    "other shapes": (
        nn.Sequential(nn.Linear(4, 1), BATCH_NORM),
        r"0.weight of shape \(4, 4\), as in the key encoder, got 0.weight of shape \(1, 4\)",
    ),
    "a layer less": (nn.Sequential(nn.Linear(4, 4)), r"1.weight of shape \(4,\), .* got nothing"),
    "a layer more": (
        nn.Sequential(nn.Linear(4, 4), BATCH_NORM, nn.BatchNorm1d(4)),
        r"1.num_batches_tracked of shape \(\), .* got 1.running_mean",
    ),
    "another buffer": (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)),
        r"1.running_mean of shape \(4,\), .* got nothing",
    ),
    "a state": (nn.Linear(4, 4).state_dict(), "expected a module, got OrderedDict"),
}


@pytest.mark.parametrize("name", OTHER_ENCODERS)
@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_another_encoder_is_refused_before_anything_moves(name, buffers):
    keys = MomentumEncoder(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 0.5, buffers=buffers)
    before = copy.deepcopy(keys.state_dict())
    encoder, message = OTHER_ENCODERS[name]
    with pytest.raises((TypeError, ValueError), match=f"^encoder: .*{message}"):
        keys.update(encoder)
    torch.testing.assert_close(keys.state_dict(), before, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("own", DTYPES)
@pytest.mark.parametrize("new", DTYPES)
@pytest.mark.parametrize("way", ["made", "cast later", "from float32 state"])
def test_averages_move_alike_in_all_precisions(own, new, way):
    start = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    if way == "cast later":
        keys = MomentumEncoder(start, MOMENTUM).to(own)
    else:
        keys = MomentumEncoder(copy.deepcopy(start).to(own), MOMENTUM)
    if way == "from float32 state":
        keys.load_state_dict(MomentumEncoder(start, MOMENTUM).state_dict())
    encoder = longer(keys, new)
    before = [x.detach().double() for x in copy.deepcopy(keys.module).parameters()]
    updated(keys, encoder, 500)
    tolerance = max(torch.finfo(own).eps, 1e-5)
    for first, found, target in zip(
        before, keys.module.parameters(), encoder.parameters(), strict=True
    ):
        wanted = target.detach().double().lerp(first, MOMENTUM**500)
        assert found.dtype == own
        torch.testing.assert_close(found.detach().double(), wanted, rtol=tolerance, atol=1e-7)


def test_averaged_buffers_in_half_precision_move():
    encoder = nn.BatchNorm1d(4).to(torch.bfloat16)
    keys = MomentumEncoder(encoder, MOMENTUM, buffers="average")
    encoder.running_mean.fill_(1.0)
    found = updated(keys, encoder, 500).running_mean.double()
    wanted = torch.full((4,), 1 - MOMENTUM**500, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=4e-3, atol=0)


def test_an_average_in_half_precision_begins_where_others_put_it():
    keys, encoder = linear(torch.bfloat16)
    updated(keys, encoder, 10)
    keys.module.load_state_dict(encoder.state_dict())
    assert torch.equal(updated(keys, encoder, 10).weight, encoder.weight)
    assert torch.equal(updated(keys.float(), encoder, 1).weight, encoder.weight.float())


def test_the_module_alone_may_be_cast():
    keys = MomentumEncoder(nn.Linear(8, 8), 0.0)
    encoder = longer(keys, torch.bfloat16)
    keys.module.to(torch.bfloat16)
    assert torch.equal(updated(keys, encoder, 1).weight, encoder.weight)


# -------------------------------------------------------------------------------------------- state


def loaded(keys: MomentumEncoder) -> MomentumEncoder:
    other, _ = linear(keys.module.weight.dtype)
    other.load_state_dict(keys.state_dict())
    return other


COPIES = {
    "a loaded state": loaded,
    "deepcopy": copy.deepcopy,
    "pickle": lambda keys: pickle.loads(pickle.dumps(keys)),
    "cast as trainers do": lambda keys: copy.deepcopy(keys).to(keys.module.weight.dtype),
}


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_goes_on_bit_for_bit(way, dtype):
    keys, encoder = linear(dtype)
    updated(keys, encoder, 20)
    other = COPIES[way](keys)
    assert torch.equal(updated(other, encoder, 200).weight, updated(keys, encoder, 200).weight)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_float32_encoder_loads_a_state_in_half_precision(dtype):
    half, encoder = linear(dtype)
    updated(half, encoder, 200)
    full = MomentumEncoder(nn.Linear(8, 8), MOMENTUM)
    full.load_state_dict(half.state_dict())
    assert torch.equal(full.module.weight, half.module.weight.float())
    assert not list(full.averages.buffers())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sharded_encoder_moves(dtype, tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        keys, encoder = linear(dtype)
        wanted = updated(copy.deepcopy(keys), encoder, 100).weight
        fully_shard(keys, mesh=mesh)
        fully_shard(encoder, mesh=mesh)
        updated(keys, encoder, 100)
        found = keys.state_dict()["module.weight"].full_tensor()
        assert torch.equal(found, wanted)
    finally:
        dist.destroy_process_group()
