"""What ``compare_rerankers`` takes: scores of any form, and names next to re-rankers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cases import embeddings

from itrloss import Similarity
from itrloss.cli import main, tables
from itrloss.cli.comparison import compare_rerankers
from itrloss.metrics import retrieval_metrics
from itrloss.rerank import CSLS, QueryBankNorm, Sinkhorn, TwoStageReranker

IMAGES, NOISE = embeddings(12, 24, d=8, seed=3)
TEXTS = IMAGES.repeat_interleave(2, 0) + NOISE
IDS = torch.arange(12), torch.arange(12).repeat_interleave(2)
SIM = Similarity(IMAGES, TEXTS, *IDS)
COSINES = SIM.scores()
BANKS = embeddings(9, 10, d=8, seed=5)


def rsums(*args, **options) -> dict[str, float]:
    found = compare_rerankers(*args, samples=9, **options)
    return {entry.name: entry.results.metrics()["rsum"] for entry in found.entries}


def test_names_and_re_rankers_are_compared():
    methods = ("csls", Sinkhorn(scale=50), CSLS(3))
    found = compare_rerankers(SIM, methods, samples=9)
    assert [entry.name for entry in found.entries] == [
        "no re-ranking",
        "csls",
        "Sinkhorn(scale=50, iterations=10)",
        "CSLS(k=3)",
    ]
    for entry in found.entries[1:]:
        assert entry.results.metrics() == retrieval_metrics(SIM, reranker=entry.reranker)
    assert found.entries[2].reranker is methods[1]
    assert "Sinkhorn(scale=50, iterations=10)†" in tables.text(found.table())


def test_re_rankers_get_banks_unless_they_have_some():
    own = CSLS(3).fit(*embeddings(7, 8, d=8, seed=6))
    bare = CSLS(4)
    found = compare_rerankers(SIM, (own, bare, QueryBankNorm(15.0)), BANKS, samples=9)
    assert [entry.name for entry in found.entries[1:]] == [
        "CSLS(k=3), bank",
        "CSLS(k=4)",
        "CSLS(k=4), bank",
        "QueryBankNorm(scale=15.0, k=1), bank",
    ]
    assert found.entries[1].reranker is own
    assert bare.transductive == (True, True)
    of_own = QueryBankNorm(15.0).fit(*BANKS)
    found = compare_rerankers(SIM, (of_own, QueryBankNorm(14.0)), samples=9)
    assert [entry.reranker for entry in found.entries] == [None, of_own]
    assert "QueryBankNorm(scale=14.0, k=1) was left out: needs banks" in found.hints[0]


FORMS = {
    "a matrix": lambda x: x,
    "an array": lambda x: x.numpy(),
    "a Similarity of scores": lambda x: Similarity.from_scores(x, *IDS),
    "images once per caption": lambda x: x.repeat_interleave(2, 0),
}


@pytest.mark.parametrize("form", FORMS)
def test_scores_and_held_out_scores_may_have_any_form(form):
    held_out = COSINES.flip(0, 1)
    options = {"methods": ("fast", "csls")}
    wanted = rsums(
        Similarity.from_scores(COSINES, *IDS),
        validation=Similarity.from_scores(held_out, *IDS),
        **options,
    )
    assert len(wanted) == 4
    assert rsums(FORMS[form](COSINES), validation=FORMS[form](held_out), **options) == wanted


def test_the_method_to_take_is_the_best_on_held_out_pairs():
    """Whatever the test set says; by a bank of scores a method has no figure with them."""
    draw = torch.Generator().manual_seed(3)
    held_out = torch.rand(12, 24, generator=draw) / 4
    held_out[IDS[1], torch.arange(24)] += 0.1
    held_out += 0.3 * torch.rand(24, generator=draw)  # hubs
    methods = ("csls", "inverted-softmax", "sinkhorn")
    bank = torch.rand(30, 24, generator=draw)
    found = compare_rerankers(COSINES, methods, (bank, None), held_out, samples=9)
    figures = {}
    for entry in found.entries:
        if "bank" in entry.name:
            assert entry.held_out is None
            continue
        figures[entry.name] = retrieval_metrics(held_out, reranker=entry.reranker)["rsum"]
        assert entry.held_out == figures[entry.name]
    best = max(figures, key=figures.__getitem__)
    assert best != "no re-ranking"
    assert found.advised is not None and found.advised.name == best
    assert found.hints == [
        f"Take {best}: of these rows it has the highest RSUM on the held-out pairs, "
        f"{figures[best]:.1f}."
    ]


def test_banks_are_of_held_out_pairs_too_if_all_are_embeddings():
    images, texts = embeddings(12, 24, d=8, seed=9)
    held_out = Similarity(images, images.repeat_interleave(2, 0) + texts, *IDS)
    own = CSLS(3).fit(*BANKS)
    for validation in held_out, held_out.scores():
        found = compare_rerankers(SIM, ("csls", own), BANKS, validation, samples=9)
        for entry in found.entries:
            has_bank = entry.reranker is not None and not all(entry.reranker.transductive)
            if has_bank and validation is not held_out:
                assert entry.held_out is None
            else:
                wanted = retrieval_metrics(validation, reranker=entry.reranker)["rsum"]
                assert entry.held_out == wanted


def test_fast_re_ranking_is_calibrated_without_a_bank_of_scores():
    """A bank of scores does not fit held-out pairs, whatever these are."""
    images, texts = embeddings(12, 24, d=8, seed=9)
    held_out = Similarity(images, images.repeat_interleave(2, 0) + texts, *IDS)
    bank = torch.rand(9, 24) / 4
    for validation in held_out, held_out.scores():
        found = compare_rerankers(COSINES, ("fast",), (bank, None), validation, samples=9)
        *_, without_bank, _, by_bank = found.entries
        assert without_bank.name == "fast, calibrated"
        assert by_bank.name == "fast, calibrated, one bank"
        assert by_bank.reranker.i2t == without_bank.reranker.i2t


@pytest.mark.parametrize("kind", [tuple, list])
def test_banks_may_be_arrays_and_lists(kind):
    wanted = rsums(SIM, ("csls",), BANKS)
    assert rsums(SIM, ("csls",), kind(bank.numpy() for bank in BANKS)) == wanted
    wanted = rsums(SIM, ("csls",), (None, BANKS[1]))
    assert rsums(SIM, ("csls",), kind([None, BANKS[1].numpy()])) == wanted
    assert list(rsums(SIM, ("csls",), kind([None, None]))) == ["no re-ranking", "csls"]


def test_latex_has_no_advice():
    found = compare_rerankers(COSINES, ("csls", "qb-norm"), samples=9)
    table = found.table()
    assert [hint.split()[0] for hint in table.hints] == ["qb-norm", "Take"]
    text = tables.latex(table)
    assert "Changes are against the first row" in text
    assert not any(word in text for word in ("left out", "Choose", "Take"))


def test_pairs_are_numbered_as_the_scores_are_given(tmp_path, capsys):
    """Rows that are repeated are images of their own where pairs say who is right."""
    scores = COSINES[:6, :12].repeat_interleave(2, 0)
    pairs = torch.arange(6), torch.arange(6)
    wanted = retrieval_metrics(scores, relevant=pairs)["rsum"]
    assert rsums(scores, methods=("csls",), rules={"relevant": pairs})["no re-ranking"] == wanted
    np.save(tmp_path / "scores.npy", scores.numpy())
    np.savetxt(tmp_path / "pairs.txt", torch.stack([torch.arange(12)] * 2, 1).numpy(), "%d")
    command = f"rerank {tmp_path}/scores.npy --methods csls --relevant {tmp_path}/pairs.txt"
    assert main([*command.split(), "--samples", "9"]) == 0
    assert "12 images, 12 texts (right by" in capsys.readouterr().out


WRONG = {
    "a misspelt name": ({"methods": ("fst",)}, "methods: expected 'fast', .*did you mean 'fast'"),
    "one name": ({"methods": "fast"}, "methods: expected 'fast', .*got 'f'"),
    "a class": ({"methods": (CSLS,)}, "methods: expected 'fast', .*CSLS"),
    "the test set": ({"validation": COSINES}, "validation: expected held-out pairs, "),
    "a pair": (
        {"sim": (COSINES, COSINES)},
        r"sim: expected a floating-point tensor \(N, M\), got tuple",
    ),
    "two arrays": (
        {"sim": [COSINES.numpy()] * 2},
        r"sim: expected a floating-point tensor \(N, M\), got list",
    ),
    "a ragged matrix": ({"sim": COSINES[:, :20]}, "image_ids, text_ids: needed for 12 images"),
    "a bank": ({"banks": COSINES}, "banks: expected a pair, .*got Tensor"),
    "held-out nans": ({"validation": torch.full((4, 4), np.nan)}, "validation: expected finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name):
    options, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        compare_rerankers(**{"sim": COSINES, **options})


def test_re_rankers_that_differ_in_their_banks_have_a_row_each():
    banks = [torch.rand(4, 8), torch.rand(8, 4)]
    others = [x.flip(0) for x in banks]
    methods = [CSLS(), CSLS().fit(*banks), CSLS().fit(*others)]
    found = compare_rerankers(torch.rand(8, 8), methods, samples=9)
    names = [entry.name for entry in found.entries]
    assert names == [
        "no re-ranking",
        "CSLS(k=10)",
        "CSLS(k=10), bank",
        "CSLS(k=10), bank (2)",
    ]


def test_a_scorer_of_test_pairs_is_not_asked_for_held_out_ones():
    sim = torch.rand(8, 8)
    method = TwoStageReranker(lambda images, texts: -sim[images, texts], 2)
    found = compare_rerankers(sim, [method, "csls"], validation=torch.rand(8, 8), samples=9)
    two_stage, csls = found.entries[1:]
    assert two_stage.name == repr(method)
    assert two_stage.held_out is None
    assert csls.held_out is not None
    assert found.advised is not two_stage
