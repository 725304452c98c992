"""``python -m benchmarks.noise`` on a few made-up pictures, and the losses it defines, from their
papers' formulas.
"""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from support.cases import sample

from benchmarks import noise


def test_runs_are_written_and_not_repeated(photographs, monkeypatch, capsys):
    monkeypatch.setattr(noise, "BATCH", 64)
    monkeypatch.setattr(noise, "DIM", 16)
    losses = {name: (make, 0.02) for name, (make, _) in noise.LOSSES.items()}
    monkeypatch.setattr(noise, "LOSSES", {name: losses[name] for name in ("InfoNCE", "GCE")})
    out = photographs / "noise.json"
    arguments = [str(photographs), str(out), "--noise", "0", "--seeds", "3", "--epochs", "3"]
    assert noise.main(arguments) == 0
    first = json.loads(out.read_text())
    assert {"processor", "torch", "date"} <= set(first["machine"])
    monkeypatch.setattr(noise, "LOSSES", losses)
    noise.main(arguments)
    rows = json.loads(out.read_text())["rows"]
    assert rows[:2] == first["rows"]
    others = [name for name in losses if name not in ("InfoNCE", "GCE")]
    assert [row["loss"] for row in rows[2:]] == others
    chance = 100 * 2 * (1 + 5 + 10) / 20
    for row in rows:
        assert len(row["rsum"]) == 3
        assert row["best"] >= row["last"] > 1.5 * chance, row
    assert "InfoNCE, filtered" in capsys.readouterr().out


def test_a_share_of_the_captions_swap_their_pictures():
    ids = torch.arange(1000) // 5
    assert torch.equal(noise.swapped(ids, 0.0, 1), ids)
    found = noise.swapped(ids, 0.4, 1)
    assert 380 < int((found != ids).sum()) <= 400
    assert torch.equal(found.sort().values, ids)
    assert torch.equal(found, noise.swapped(ids, 0.4, 1))
    assert not torch.equal(found, noise.swapped(ids, 0.4, 2))


@pytest.fixture
def unit():
    """Unit vectors of six images and of their texts."""
    return F.normalize(sample(2, 6, 8, dtype=torch.float64), dim=2)


def test_filtered_infonce_leaves_out_better_candidates(unit):
    images, texts = unit
    rows, _ = noise.FilteredInfoNCELoss(0.1, 0.1, reduction="none")(images, texts)
    scores = images @ texts.T
    left_out = scores > scores.diagonal()[:, None] + 0.1
    assert left_out.any()
    logits = (scores / 0.1).masked_fill(left_out, -math.inf)
    wanted = F.cross_entropy(logits, torch.arange(6), reduction="none")
    torch.testing.assert_close(rows, wanted, rtol=1e-9, atol=1e-9)
