"""``python -m benchmarks.negatives`` on a few made-up pictures."""

import json

import pytest
import torch
import torch.nn.functional as F
from support.stored import assert_stored_numbers

import itrloss
from benchmarks import negatives, noise
from benchmarks.negatives import Hard, Loss, Options


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(noise, "BATCH", 64)
    monkeypatch.setattr(noise, "DIM", 16)
    monkeypatch.setattr(negatives, "EPOCHS", 1)
    monkeypatch.setattr(negatives, "RATE", 0.02)


@pytest.fixture
def data(photographs, small):
    """A split, a model in evaluation mode, in float64, and the pictures of the captions."""
    split, _, words = noise.read(photographs)
    torch.manual_seed(0)
    model = noise.Model(split.pictures.shape[1], words).double().eval()
    split = split._replace(pictures=split.pictures.double(), weights=split.weights.double())
    return split, model, torch.arange(len(split.words)) // 5


@pytest.mark.slow
def test_trainings_are_kept_and_options_chosen_by_the_development_split(
    photographs, small, monkeypatch, capsys
):
    monkeypatch.setattr(negatives, "SEEDS", (0, 1))
    out = photographs / "out"
    arguments = [str(photographs), str(out)]
    assert negatives.main(arguments) == 0
    first = json.loads((out / "negatives.json").read_text())
    assert {"processor", "torch", "date"} <= set(first["machine"])
    monkeypatch.setattr(noise, "fitted", None)  # nothing is trained again
    capsys.readouterr()
    assert negatives.main(arguments) == 0
    rows = json.loads((out / "negatives.json").read_text())["rows"]
    assert rows == first["rows"]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert [row["split"] for row in rows] == ["dev"] * 18 + ["test"] * 28
    expect_chosen(rows)


def expect_chosen(rows):
    """Check that the final trainings have the options that did best, and their differences."""
    final = {(row["form"], row["noise"]): row for row in rows if row["split"] == "test"}
    searched = [row for row in rows if row["split"] == "dev"]
    for form in ("plain", "filter", "hardness", "groups", "mined"):
        tried = [row for row in searched if row["form"] == form]
        best = max(tried, key=lambda row: sum(row["rsum"]))
        assert final[form, 0.0]["options"] == best["options"]
        assert final[form, 0.2]["options"] == best["options"]
    plain = final["plain", 0.2]
    mined = final["mined", 0.2]
    expected = sum(mined["rsum"]) / 2 - sum(plain["rsum"]) / 2
    assert mined["to plain"]["difference"] == [pytest.approx(expected, abs=0.02)]


def losses_of(split, model, ids):
    """The losses of all pairs and of a batch with mined ones, by name."""
    groups = torch.arange(60) // 4
    every = torch.arange(0, 300, 7)
    # of pictures 0, 1, 1, 30, 59, of which the second is twice in the batch
    rows = torch.tensor([0, 5, 6, 150, 299])
    pictures = torch.full((300, 3), -1)
    captions = torch.full((60, 3), -1)
    pictures[rows, 0] = torch.tensor([30, 7, 8, 1, -1])
    captions[[0, 1, 30, 59], 0] = torch.tensor([296, 3, -1, 17])
    options = Options(margin=0.05, hardness=2.0, groups="other")
    losses = {
        "plain": Loss(Options(), split, ids, None, None)(model, every),
        "of all forms": Loss(options, split, ids, None, groups)(model, every),
        "hard": Loss(Options(), split, ids, Hard(pictures, captions), None)(model, rows),
    }
    return {name: [loss.item()] for name, loss in losses.items()}


def mined_of(split, model, ids):
    """How many pictures and captions are mined, and the scores of some of them."""
    found = {}
    v, w = model(*split)
    scores = F.normalize(v) @ F.normalize(w).T
    halves = torch.arange(60) // 30
    for name, of_pictures, more in (
        ("the hardest", torch.arange(60), {}),
        ("below half of the own score", torch.arange(60), {"below": 0.5}),
        ("of other groups", halves, {}),
    ):
        three = Options(negatives=3, **more)
        hard = negatives.mined(model, split, ids, of_pictures, three)
        assert hard.captions.shape == (60, 3)
        assert hard.pictures.shape == (300, 3)
        for side, numbers in hard._asdict().items():
            own = scores if side == "captions" else scores.T
            existing = numbers >= 0
            kept = own.gather(1, numbers.clamp_min(0))[existing]  # numbers may tie
            found[f"{name}, {side}"] = [existing.sum().item(), *kept[::7].tolist()]
    return found


def test_losses_and_what_is_mined_are_those_of_loops(data):
    """They are stored: loops over anchors and candidates, and the library's loss, had the same."""
    assert_stored_numbers("negatives", losses_of(*data) | mined_of(*data))


def test_negatives_are_drawn_from_those_that_exist():
    torch.manual_seed(0)
    candidates = torch.tensor([[4, 5, 6], [7, -1, -1], [-1, -1, -1]])
    rows = torch.tensor([0, 1, 2]).repeat(200)
    found = negatives.drawn(candidates, rows).view(-1, 3)
    of_first, of_second, of_third = found.T.tolist()
    assert set(of_first) == {4, 5, 6}
    assert set(of_second) == {7}
    assert set(of_third) == {-1}


@pytest.fixture(scope="module")
def runs():
    """Three runs of a good model, and three of a worse one."""
    generator = torch.Generator().manual_seed(0)
    image_ids = torch.arange(50)
    text_ids = torch.arange(250) // 5
    results = []
    for spread in (0.8, 0.8, 0.8, 1.2, 1.2, 1.2):
        v = torch.randn(50, 8, generator=generator)
        w = v[text_ids] + spread * torch.randn(250, 8, generator=generator)
        sim = itrloss.Similarity(v, w, image_ids, text_ids)
        results.append(itrloss.metrics.retrieval_results(sim))
    return results[:3], results[3:]


@pytest.mark.parametrize("figure", ["rsum", "i2t_r1", "t2i_r10"])
def test_figures_of_joined_runs_are_their_means(figure, runs):
    good, _ = runs
    found = negatives.joined(good).metrics()
    mean = sum(run.metrics()[figure] for run in good) / 3
    assert found[figure] == pytest.approx(mean)


def test_a_difference_and_its_interval_over_seeds_are_scipys(runs):
    stats = pytest.importorskip("scipy.stats")
    each = []
    for a, b in zip(*runs, strict=True):
        each.append(a.metrics()["rsum"] - b.metrics()["rsum"])
    low, high = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    found = negatives.difference(*runs)
    assert found["difference"] == [pytest.approx(sum(each) / 3, abs=0.006)]
    assert found["seeds"] == [pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01)]


def test_a_difference_lies_in_its_interval_over_pictures(runs):
    found = negatives.difference(*runs)
    low, high = found["pictures"]
    assert low < found["difference"][0] < high
    good, _ = runs
    to_itself = negatives.difference(good, good)
    assert to_itself["pictures"] == [0.0, 0.0]
