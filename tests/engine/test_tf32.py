"""TF32: losses follow the process's setting, and ranks, scores and re-rankers do not."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from support.cases import sample
from support.versions import needs
from torch.utils._python_dispatch import TorchDispatchMode

import itrloss
from itrloss import Similarity
from itrloss.engine import matrix, products
from itrloss.metrics import retrieval_metrics
from itrloss.mining import mine_hard_negatives
from itrloss.rerank import MutualProximity

CUDA = torch.device("cuda:0")
SETTINGS = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def as_it_was():
    """Leave the process's setting as it was."""
    yield
    if products.HAS_FP32_PRECISION:
        SETTINGS.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


def allow_by_precision():
    torch.set_float32_matmul_precision("high")


def allow_by_flag():
    SETTINGS.allow_tf32 = True


def allow_by_newer_setting():
    SETTINGS.fp32_precision = "tf32"


with_newer = needs("matmul.fp32_precision", 2, 9)
ALLOWED = [
    allow_by_precision,
    allow_by_flag,
    pytest.param(allow_by_newer_setting, marks=with_newer),
]


@pytest.mark.parametrize("allow", ALLOWED)
def test_the_setting_is_the_process(allow):
    assert not products.rounds_float32(CUDA)
    allow()
    assert products.rounds_float32(CUDA)
    assert not products.rounds_float32(torch.device("cpu"))


@with_newer
@pytest.mark.parametrize("allow", ALLOWED)
def test_full_float32_puts_the_setting_back(allow):
    allow()
    before = SETTINGS.fp32_precision
    for error in (None, ValueError):
        with contextlib.suppress(ValueError), products.full_float32(CUDA):
            assert SETTINGS.fp32_precision == "ieee"
            assert not products.rounds_float32(CUDA)
            if error is not None:
                raise error
        assert SETTINGS.fp32_precision == before == "tf32"
    torch.set_float32_matmul_precision("high")  # the older setting can still be read
    assert SETTINGS.allow_tf32


def test_nothing_is_set_where_nothing_is_rounded(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "matmul", types.MappingProxyType({}))
    with products.full_float32(torch.device("cpu")):
        pass
    monkeypatch.setattr(products, "HAS_FP32_PRECISION", True)
    refusing = types.SimpleNamespace(__slots__=(), fp32_precision="ieee")
    monkeypatch.setattr(torch.backends.cuda, "matmul", refusing)
    with products.full_float32(CUDA):
        assert refusing.fp32_precision == "ieee"


def test_older_versions_have_one_flag(monkeypatch):
    """PyTorch 2.8 does not know the newer setting."""
    older = types.SimpleNamespace(allow_tf32=True)
    monkeypatch.setattr(products, "HAS_FP32_PRECISION", False)
    monkeypatch.setattr(torch.backends.cuda, "matmul", older)
    assert products.rounds_float32(CUDA)
    with products.full_float32(CUDA):
        assert older.allow_tf32 is False
    assert older.allow_tf32 is True


class Noted(TorchDispatchMode):
    """Notes the setting at each float32 product."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            self.seen.append(SETTINGS.fp32_precision)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def setting(monkeypatch):
    """TF32 is allowed, and counts for the CPU, too."""

    def rounds(device):
        return SETTINGS.fp32_precision == "tf32"

    SETTINGS.fp32_precision = "tf32"
    monkeypatch.setattr(products, "rounds_float32", rounds)
    monkeypatch.setattr(matrix, "rounds_float32", rounds)


def vectors(n=40, seed=0):
    return sample(n, 8, seed=seed)


def trained():
    return [vectors(seed=k).requires_grad_() for k in range(2)]


TRAINING = {
    "dense": lambda: itrloss.InfoNCELoss(engine="dense")(*trained()).backward(),
    "tiled": lambda: itrloss.InfoNCELoss(engine="tiled")(*trained()).backward(),
}
EVALUATION = {
    "topk": lambda: Similarity(vectors(), vectors(seed=1)).topk(3),
    "topk of the trained": lambda: Similarity(*trained()).topk(3),
    "ranks in tiles": lambda: Similarity(vectors(), vectors(seed=1), engine="tiled").ranks(),
    "scores": lambda: Similarity(vectors(), vectors(seed=1)).scores(),
    "blocks": lambda: list(Similarity(vectors(), vectors(seed=1)).blocks(80)),
    "metrics": lambda: retrieval_metrics(Similarity(vectors(), vectors(seed=1))),
    "mutual proximity": lambda: MutualProximity().rerank(Similarity(vectors(), vectors(seed=1))),
    "mining": lambda: mine_hard_negatives(
        vectors(), vectors(seed=1), torch.arange(40), torch.arange(40), k=3
    ),
}


@with_newer
@pytest.mark.parametrize("name", TRAINING)
def test_losses_follow_the_setting(name, setting):
    with Noted() as noted:
        TRAINING[name]()
    assert noted.seen
    assert set(noted.seen) == {"tf32"}


@with_newer
@pytest.mark.parametrize("name", EVALUATION)
def test_evaluation_does_not(name, setting):
    with Noted() as noted:
        EVALUATION[name]()
    assert noted.seen
    assert set(noted.seen) == {"ieee"}
    assert SETTINGS.fp32_precision == "tf32"


@with_newer
def test_scores_that_a_loss_rounded_are_not_ranked(setting):
    """They may be kept for the next loss."""
    sim = Similarity(*trained())
    itrloss.InfoNCELoss()(sim)
    with Noted() as noted:
        sim.ranks()
    assert set(noted.seen) == {"ieee"}
