"""``python -m itrloss.testing``: what it prints, and that it notices an engine that is wrong."""

from __future__ import annotations

import pytest
import torch

import itrloss
from itrloss.engine import tiled
from itrloss.testing import __main__ as machine


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Check three losses, of a few images."""
    kinds = [itrloss.InfoNCELoss, itrloss.MemoryDiversityContrastiveLoss, itrloss.MarginMSELoss]
    monkeypatch.setattr(machine, "losses", lambda: [kind() for kind in kinds])
    monkeypatch.setattr(machine, "SIZES", (8, 12))


def test_a_machine_that_is_right(capsys):
    assert machine.main([]) == 0
    printed = capsys.readouterr().out
    assert "cpu tiled bfloat16, errors up to 2e-02" in printed
    assert "MarginMSELoss" in printed
    assert "0 errors are no rounding" in printed


@pytest.mark.parametrize("images", [8, 12])  # of the batch for which it is wrong
@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_an_engine_that_is_wrong(monkeypatch, capsys, wrong, images):
    right = tiled.sums_and_slopes

    def sums_and_slopes(question, scores):
        sums, slopes = right(question, scores)
        return (wrong * sums if len(scores) == images else sums), slopes

    monkeypatch.setattr(tiled, "sums_and_slopes", sums_and_slopes)
    assert machine.main([]) == 1
    printed = capsys.readouterr().out.splitlines()
    (row,) = [line for line in printed if line.startswith("InfoNCELoss")]
    of_auto, of_tiled, *_ = row.split()[1:]
    assert of_auto.endswith("!")
    assert not of_tiled.endswith("!")


def test_every_loss_of_similarities_is_checked(monkeypatch):
    monkeypatch.undo()
    given = machine.batch(8)
    names = {type(loss).__name__ for loss in machine.losses()}
    assert {"PCMEPlusPlusLoss", "UnifiedTrainingObjective", "VarianceAwareLoss"} < names
    others = {name for name in itrloss.losses.__all__ if name.endswith(("Loss", "Objective"))}
    assert others - names - {"PairLoss", "MemoryLoss"} == {  # docs/testing.rst names them
        "PrototypeClassificationLoss",
        "DynamicOrthogonalLoss",
        "CODERObjective",
        "DVSEObjective",
    }
    for loss in machine.losses():
        found = machine.computed(loss, given, machine.EXACT)
        assert found["value"].dtype == torch.float64
        assert len(found) >= 3
