"""The trainer's tests use very small models, which a second thread would slow down."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import drawn

from examples.retrieval.config import Config


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features that a small model can learn from; to be copied before it is changed."""
    sizes = {"train": 60, "dev": 20, "test": 20}
    return drawn.features(tmp_path_factory.mktemp("features"), sizes)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(drawn.tiny_bert(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="session")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(drawn.tiny_resnet(tmp_path_factory.mktemp("resnet")))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn.karpathy(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Config:
    """Settings of a small run."""
    return Config(
        data=str(data),
        out=str(tmp_path / "run"),
        min_count=1,
        dim=16,
        word_dim=8,
        concepts=10,
        memory=64,
        image_size=48,
        epochs=1,
        batch_size=32,
        lr=1e-2,
        tensorboard=False,
        progress=False,
    )
