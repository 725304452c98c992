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


def test_the_loss_of_every_form_without_further_negatives(data):
    split, model, ids = data
    rows = torch.arange(0, 300, 7)
    groups = torch.arange(60) // 4
    own_ids = ids[rows]
    v, w = model(split.pictures[own_ids], split.words[rows], split.weights[rows])

    options = Options(margin=0.05, hardness=2.0, groups="other")
    of_all_forms = Loss(options, split, ids, None, groups)
    found = of_all_forms(model, rows)
    loss = itrloss.InfoNCELoss(0.1, margin=0.05, hardness=2.0, groups="other")
    expected = loss(v, w, own_ids, own_ids, image_groups=groups[own_ids])
    torch.testing.assert_close(found, expected)

    plain = Loss(Options(), split, ids, None, None)
    without = itrloss.InfoNCELoss(0.1)(v, w, own_ids, own_ids)
    torch.testing.assert_close(plain(model, rows), without)
    assert not torch.isclose(found, without)


def test_the_loss_with_further_negatives(data):
    split, model, ids = data
    rows = torch.tensor([0, 5, 6, 150, 299])  # of pictures 0, 1, 1, 30, 59
    pictures = torch.full((300, 3), -1)
    captions = torch.full((60, 3), -1)
    pictures[rows, 0] = torch.tensor([30, 7, 8, 1, -1])
    captions[[0, 1, 30, 59], 0] = torch.tensor([296, 3, -1, 17])
    loss = Loss(Options(), split, ids, Hard(pictures, captions), None)
    found = loss(model, rows)

    v, w = model(split.pictures, split.words, split.weights)
    v = F.normalize(v)
    w = F.normalize(w)
    own_captions = rows.tolist()
    own_pictures = ids[rows].tolist()
    all_captions = [*own_captions, 296, 3, 3, 17]  # picture 1 is twice in the batch
    all_pictures = [*own_pictures, 30, 7, 8, 1]
    expected = torch.zeros((), dtype=torch.float64)
    for caption, picture in zip(own_captions, own_pictures, strict=True):
        positives = [c for c in own_captions if ids[c] == picture]
        others = [c for c in all_captions if ids[c] != picture]
        expected += anchor(v[picture], w, positives, others)
        positives = [p for p in own_pictures if p == picture]
        others = [p for p in all_pictures if p != picture]
        expected += anchor(w[caption], v, positives, others)
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
    of_first, of_second, of_third = found.T.tolist()
    assert set(of_first) == {4, 5, 6}
    assert set(of_second) == {7}
    assert set(of_third) == {-1}


PICTURES = torch.arange(60)


def scores_of(data):
    """Scores of all pictures and captions, and of each caption with its own picture."""
    split, model, ids = data
    v, w = model(*split)
    scores = F.normalize(v) @ F.normalize(w).T
    return scores, scores[ids, torch.arange(300)]


def mined(data, groups=PICTURES, **options):
    """Three negatives of each picture and of each caption."""
    split, model, ids = data
    three = Options(negatives=3, **options)
    return negatives.mined(model, split, ids, groups, three)


@pytest.mark.parametrize("picture", [0, 17, 59])
def test_the_hardest_captions_are_mined(picture, data):
    _, _, ids = data
    scores, _ = scores_of(data)
    others = scores[picture].masked_fill(ids == picture, -torch.inf)
    captions = mined(data).captions[picture]
    torch.testing.assert_close(scores[picture, captions], others.topk(3).values)


def test_mined_candidates_lie_below_a_share_of_their_own_score(data):
    scores, of_captions = scores_of(data)
    of_pictures = of_captions.view(60, 5).mean(1)
    hard = mined(data, below=0.5)
    for picture, captions in enumerate(hard.captions):
        existing = captions[captions >= 0]
        assert (scores[picture, existing] < 0.5 * of_pictures[picture]).all()
    for caption, pictures in enumerate(hard.pictures):
        existing = pictures[pictures >= 0]
        assert (scores[existing, caption] < 0.5 * of_captions[caption]).all()
    assert len(hard.captions) == 60
    assert len(hard.pictures) == 300


def test_mined_candidates_are_of_other_groups(data):
    _, _, ids = data
    groups = PICTURES // 30  # one half of the pictures has its negatives in the other
    groups_of_captions = groups[ids]
    hard = mined(data, groups)
    assert (groups[hard.pictures] != groups_of_captions[:, None]).all()
    assert (groups_of_captions[hard.captions] != groups[:, None]).all()


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


@pytest.mark.parametrize(
    "table", [negatives.table, negatives.further_table, negatives.search_table]
)
def test_a_table_of_the_docs_has_the_results(table):
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    text = (ROOT / "docs" / "embedders.rst").read_text(encoding="utf-8")
    lines = table(rows)
    assert lines
    indented = "\n".join("   " + line for line in lines)
    assert indented in text
