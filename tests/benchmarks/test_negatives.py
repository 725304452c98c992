"""``python -m benchmarks.negatives`` on a few made-up pictures, and its tables in the docs."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import itrloss
from benchmarks import negatives, noise
from benchmarks.negatives import Hard, Loss, Options

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "negatives.json"


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
    printed = capsys.readouterr().out.splitlines()
    tables = negatives.table(rows), negatives.further_table(rows), negatives.search_table(rows)
    assert [len(lines) for lines in tables] == [20, 10, 18]
    assert printed == [*tables[0], "", *tables[1], "", *tables[2]]
    final = {(row["form"], row["noise"]): row for row in rows if row["split"] == "test"}
    searched = [row for row in rows if row["split"] == "dev"]
    for form in ("plain", "filter", "hardness", "groups", "mined"):
        tried = [row for row in searched if row["form"] == form]
        best = max(tried, key=lambda row: sum(row["rsum"]))
        assert final[form, 0.0]["options"] == final[form, 0.2]["options"] == best["options"]
    plain = final["plain", 0.2]
    mined = final["mined", 0.2]
    expected = sum(mined["rsum"]) / 2 - sum(plain["rsum"]) / 2
    assert mined["to plain"]["difference"] == [pytest.approx(expected, abs=0.02)]


def test_the_loss_of_every_form_without_further_negatives(data):
    split, model, ids = data
    rows = torch.arange(0, 300, 7)
    groups = torch.arange(60) // 4
    options = Options(margin=0.05, hardness=2.0, groups="other")
    found = Loss(options, split, ids, None, groups)(model, rows)
    v, w = model(split.pictures[ids[rows]], split.words[rows], split.weights[rows])
    both = itrloss.InfoNCELoss(0.1, margin=0.05, hardness=2.0, groups="other")
    of_rows = groups[ids[rows]]
    expected = both(v, w, ids[rows], ids[rows], image_groups=of_rows)
    torch.testing.assert_close(found, expected)
    without = itrloss.InfoNCELoss(0.1)(v, w, ids[rows], ids[rows])
    torch.testing.assert_close(Loss(Options(), split, ids, None, None)(model, rows), without)
    assert not torch.isclose(found, without)


def test_the_loss_with_further_negatives(data):
    split, model, ids = data
    rows = torch.tensor([0, 5, 6, 150, 299])  # of pictures 0, 1, 1, 30, 59
    pictures = torch.full((300, 3), -1)
    captions = torch.full((60, 3), -1)
    pictures[rows, 0] = torch.tensor([30, 7, 8, 1, -1])
    captions[[0, 1, 30, 59], 0] = torch.tensor([296, 3, -1, 17])
    found = Loss(Options(), split, ids, Hard(pictures, captions), None)(model, rows)

    v, w = model(split.pictures, split.words, split.weights)
    v, w = F.normalize(v), F.normalize(w)
    expected = torch.zeros((), dtype=torch.float64)
    drawn_captions = [296, 3, 3, 17]  # picture 1 is twice in the batch
    drawn_pictures = [30, 7, 8, 1]
    for row in rows.tolist():
        picture = int(ids[row])
        others = [r for r in [*rows.tolist(), *drawn_captions] if ids[r] != picture]
        expected += anchor(v[picture], w, [r for r in rows.tolist() if ids[r] == picture], others)
        batch = [*ids[rows].tolist(), *drawn_pictures]
        positives = [p for p in ids[rows].tolist() if p == picture]
        expected += anchor(w[row], v, positives, [p for p in batch if p != picture])
    torch.testing.assert_close(found, expected / len(rows))


def anchor(vector, candidates, positives, others):
    """Return the mean over positives of InfoNCE at τ = 0.1."""
    logits = candidates @ vector / 0.1
    losses = []
    for positive in positives:
        row = logits[[positive, *others]]
        losses.append(row.logsumexp(0) - row[0])
    return torch.stack(losses).mean()


def test_negatives_are_drawn_from_those_that_exist():
    torch.manual_seed(0)
    candidates = torch.tensor([[4, 5, 6], [7, -1, -1], [-1, -1, -1]])
    rows = torch.tensor([0, 1, 2]).repeat(200)
    found = negatives.drawn(candidates, rows).view(-1, 3)
    assert set(found[:, 0].tolist()) == {4, 5, 6}
    assert set(found[:, 1].tolist()) == {7} and set(found[:, 2].tolist()) == {-1}


PICTURES = torch.arange(60)


def scores_of(data):
    """Scores of all pictures and captions, and of each caption with its own picture."""
    split, model, ids = data
    v, w = model(*split)
    scores = F.normalize(v) @ F.normalize(w).T
    return scores, scores[ids, torch.arange(300)]


def mined(data, groups=PICTURES, **options):
    split, model, ids = data
    return negatives.mined(model, split, ids, groups, Options(negatives=3, **options))


@pytest.mark.parametrize("picture", [0, 17, 59])
def test_the_hardest_captions_are_mined(picture, data):
    ids = data[2]
    scores, _ = scores_of(data)
    others = scores[picture].masked_fill(ids == picture, -torch.inf)
    found = scores[picture, mined(data).captions[picture]]
    torch.testing.assert_close(found, others.topk(3).values)


def test_mined_candidates_lie_below_a_share_of_their_own_score(data):
    scores, of_captions = scores_of(data)
    of_pictures = of_captions.view(60, 5).mean(1)
    hard = mined(data, below=0.5)
    for picture in range(60):
        found = hard.captions[picture]
        assert (scores[picture, found[found >= 0]] < 0.5 * of_pictures[picture]).all()
    for caption in range(300):
        found = hard.pictures[caption]
        assert (scores[found[found >= 0], caption] < 0.5 * of_captions[caption]).all()


def test_mined_candidates_are_of_other_groups(data):
    ids = data[2]
    groups = PICTURES // 30  # one half of the pictures has its negatives in the other
    hard = mined(data, groups)
    assert (groups[hard.pictures] != groups[ids][:, None]).all()
    assert (groups[ids[hard.captions]] != groups[:, None]).all()


@pytest.fixture(scope="module")
def runs():
    """Three runs of a good model, and three of a worse one."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(50), torch.arange(250) // 5
    results = []
    for spread in (0.8, 0.8, 0.8, 1.2, 1.2, 1.2):
        v = torch.randn(50, 8, generator=generator)
        w = v[ids[1]] + spread * torch.randn(250, 8, generator=generator)
        results.append(itrloss.metrics.retrieval_results(itrloss.Similarity(v, w, *ids)))
    return results[:3], results[3:]


@pytest.mark.parametrize("figure", ["rsum", "i2t_r1", "t2i_r10"])
def test_figures_of_joined_runs_are_their_means(figure, runs):
    found = negatives.joined(runs[0]).metrics()[figure]
    assert found == pytest.approx(sum(run.metrics()[figure] for run in runs[0]) / 3)


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
    assert negatives.difference(runs[0], runs[0])["pictures"] == [0.0, 0.0]


@pytest.mark.parametrize(
    "table", [negatives.table, negatives.further_table, negatives.search_table]
)
def test_a_table_of_the_docs_has_the_results(table):
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    text = (ROOT / "docs" / "embedders.rst").read_text(encoding="utf-8")
    lines = table(rows)
    assert lines
    assert "\n".join("   " + line for line in lines) in text
