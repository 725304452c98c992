"""Metrics in other forms: accumulated over batches, as tables and TREC files, and for several
systems at once.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import sample
from support.flops import Sizes
from support.processes import run

import itrloss
from itrloss import metrics
from itrloss.metrics import (
    compare,
    compare_all,
    retrieval_metrics,
    retrieval_results,
)
from itrloss.metrics.uncertainty import holm
from itrloss.rerank import CSLS, FastReranker


def embedded(captions=3, noise=1.5, seed=0):
    images = sample(12, 8, seed=seed, dtype=torch.float64)
    texts = images.repeat_interleave(captions, 0)
    return images, texts + noise * sample(*texts.shape, seed=seed + 9, dtype=torch.float64)


def results(noise=1.5, seed=0, **options):
    images, texts = embedded(noise=noise, seed=seed)
    return retrieval_results(
        torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(texts).T, **options
    )


# --- batches --------------------------------------------------------------------------------------


def batched(**options):
    """Return the metric of batches; without its library, the test is skipped."""
    pytest.importorskip("torchmetrics")
    return metrics.RetrievalMetrics(**options)


def figures(metric) -> dict[str, float]:
    return {name: float(x) for name, x in metric.compute().items()}


@pytest.mark.parametrize("captions", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{"ks": (2, 7)}, {"folds": 2, "ties": "optimistic", "hubness_k": 2}, {"reranker": CSLS(2)}],
)
def test_batches_have_the_figures_of_all(captions, options):
    images, texts = embedded(captions=captions)
    ids = torch.arange(12), torch.arange(12).repeat_interleave(captions)
    wanted = retrieval_metrics(itrloss.Similarity(images, texts, *ids), **options)
    plain, mixed = batched(**options), batched(**options)
    order = torch.randperm(len(texts))
    for rows, cols in zip(torch.arange(12).split(5), order.split(-(-len(texts) // 3)), strict=True):
        mine = slice(int(rows[0]) * captions, (int(rows[-1]) + 1) * captions)
        plain.update(images[rows].requires_grad_(), texts[mine])
        mixed.update(images[rows], texts[cols], ids[0][rows] + 7, ids[1][cols] + 7)
    assert figures(plain) == pytest.approx(wanted)
    assert {k: x for k, x in figures(mixed).items() if "skew" not in k} == pytest.approx(
        {k: x for k, x in wanted.items() if "skew" not in k}
    )
    assert not plain.images[0].requires_grad and figures(plain) == figures(plain)
    plain.reset()
    plain.update(images, texts)
    assert figures(plain) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="ks"):
        batched(ks=(0,))


def test_a_batch_by_itself_and_all_together():
    images, texts = embedded()
    metric = batched(normalize=False)
    here = metric(images[:4], texts[:12])
    metric(images[4:], texts[12:])
    part, whole = ((images[:4], texts[:12]), (images, texts))
    for found, (v, w) in ((here, part), (metric.compute(), whole)):
        wanted = retrieval_metrics(v @ w.T)
        assert {k: float(x) for k, x in found.items()} == pytest.approx(wanted)


@pytest.mark.parametrize("way", ["forward", "merge_state"])
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((1, None), (3, None), "different numbers of texts an image, got 1 and 3"),
        ((1, None), (1, range(4)), "expected both in all batches"),
        ((1, "abcd"), (1, range(4)), "expected strings in all batches"),
    ],
)
def test_batches_are_paired_alike_however_they_are_joined(way, first, second, message):
    images, _ = embedded()
    metric, other = batched(), batched()
    for each, (captions, ids), own in ((metric, first, images[:4]), (other, second, images[4:8])):
        ids = None if ids is None else list(ids)
        joined = metric if way == "forward" else each
        joined(own, own.repeat_interleave(captions, 0), ids, ids)
    if way == "merge_state":
        metric.merge_state(other)
    with pytest.raises((TypeError, ValueError), match=message):
        metric.compute()


def test_a_batch_may_lie_in_memory_that_is_used_again():
    images, texts = embedded(captions=1)
    metric = batched()
    buffers = images[:4].clone(), texts[:4].numpy().copy()
    for part in torch.arange(12).split(4):
        buffers[0][:] = images[part]
        buffers[1][:] = texts[part]
        metric.update(*buffers)
    wanted = retrieval_metrics(itrloss.Similarity(images, texts))
    assert figures(metric) == pytest.approx(wanted)


def test_batches_of_images_once_per_caption_are_folded():
    images, texts = embedded()
    metric = batched()
    for part in torch.arange(36).split(12):
        metric.update(images.repeat_interleave(3, 0)[part], texts[part])
    with pytest.warns(UserWarning, match="taken for 12 images"):
        assert figures(metric) == pytest.approx(results().metrics())


def test_batches_without_a_match_or_without_rows_belong_to_the_whole():
    images, texts = embedded(captions=1)
    metric = batched()
    assert metric(images[:6], texts[:6], range(6), range(6)) is not None
    assert metric(images[6:7], texts[7:8], [6], [7]) is None
    assert metric(images[:0], texts[:0], [], []) is None
    metric.update(images[7:8], texts[6:7], [7], [6])
    wanted = retrieval_metrics(itrloss.Similarity(images[:8], texts[:8]))
    assert figures(metric)["rsum"] == pytest.approx(wanted["rsum"])


@pytest.mark.parametrize("size", [1, 4, 5, 6])
@pytest.mark.parametrize("options", [{"folds": 3}, {"reranker": FastReranker()}])
def test_a_batch_need_not_be_a_data_set(size, options):
    """Most sizes are no multiple of the folds, and a batch may be a single pair."""
    images, texts = sample(2, 21, 8, seed=1)
    metric = batched(**options)
    for part in torch.arange(21).split(size):
        metric(images[part], texts[part])
    assert figures(metric) == retrieval_metrics(itrloss.Similarity(images, texts), **options)


def batches_worker(rank: int) -> dict[str, Any]:
    images, texts = embedded()
    found = {}
    for kind in ("ids", "none"):
        metric = metrics.RetrievalMetrics()
        cuts = torch.arange(12).split((3, 4, 5))
        for rows in cuts[:2] if rank == 0 else cuts[2:]:  # parts and batches have different sizes
            cols = slice(3 * int(rows[0]), 3 * int(rows[-1]) + 3)
            ids = (rows, torch.arange(36)[cols] // 3) if kind == "ids" else ()
            metric.update(images[rows], texts[cols], *ids)
        found[kind] = figures(metric)
    return found


@pytest.mark.slow
def test_two_processes_have_the_figures_of_one(tmp_path):
    pytest.importorskip("torchmetrics")
    first, second = run(batches_worker, tmp_path)
    assert first == second
    for found in first.values():
        assert found == pytest.approx(results().metrics())


# --- tables ---------------------------------------------------------------------------------------


def test_a_frame_has_the_rows():
    pandas = pytest.importorskip("pandas")
    found = results()
    frame = found.to_frame()
    assert frame.to_dict("records") == list(found.rows())
    hits = frame[frame.direction == "t2i"].best_rank.between(1, 5).mean()
    assert 100 * hits == pytest.approx(found.metrics()["t2i_r5"]) and isinstance(
        frame, pandas.DataFrame
    )


# --- several systems ------------------------------------------------------------------------------


def test_comparisons_of_several_systems_are_holms():
    systems = {
        "base": results(2.0),
        "same": results(2.0),
        "bad": results(5.0),
        "other": results(2.0, 1),
    }
    names = ("rsum", "t2i_r1")
    found = compare_all(systems, baseline="base", figures=names, samples=300, level=0.9, seed=3)
    single = {
        name: compare(x, systems["base"], samples=300, level=0.9, seed=3)
        for name, x in systems.items()
    }
    assert list(found) == ["same", "bad", "other"] and all(
        tuple(x) == names for x in found.values()
    )
    tests = [(name, figure) for name in found for figure in names]
    corrected = holm([single[name][figure].p_value for name, figure in tests])
    for (name, figure), p_value in zip(tests, corrected, strict=True):
        assert found[name][figure] == single[name][figure]._replace(p_value=p_value)
    assert found["same"]["rsum"].p_value == 1 > 0.05 > found["bad"]["rsum"].p_value


def rejected(p_values: list[float], level: float) -> set[int]:
    """Holm's procedure as it is defined: reject the smallest p while p <= level / tests left."""
    left = list(range(len(p_values)))
    found = set()
    while left:
        smallest = min(left, key=lambda i: p_values[i])
        if p_values[smallest] > level / len(left):
            break
        found.add(smallest)
        left.remove(smallest)
    return found


@given(
    st.lists(st.integers(1, 200).map(lambda x: x / 200), max_size=12),
    st.integers(1, 999).map(lambda x: (x + 0.37) / 1000),  # never equal to a corrected p
)
def test_corrected_p_values_reject_what_holms_procedure_rejects(p_values, level):
    assert {i for i, p in enumerate(holm(p_values)) if p <= level} == rejected(p_values, level)


def test_figures_that_are_not_compared_are_not_kept(monkeypatch):
    monkeypatch.setattr("itrloss.metrics.uncertainty._DRAWN", 1000)
    systems = {str(seed): results(seed=seed) for seed in range(4)}
    with Sizes() as made:
        compare_all(systems, baseline="0", samples=9999)
    assert max(made.sizes) == len(systems) * 10_000


def test_a_test_counts_once():
    systems = {"base": results(2.0), "a": results(5.0), "b": results(2.0, 1)}
    found = compare_all(systems, baseline="base", samples=50)
    assert found == compare_all(systems, baseline="base", samples=50, figures=("rsum", "rsum"))
    assert compare_all({"base": systems["base"]}, baseline="base") == {}
    assert compare_all(systems, baseline="b", figures=()) == {"base": {}, "a": {}}


# --- the documentation ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [x for x in metrics.__all__ if hasattr(getattr(metrics, x, None), "_fields")]
)
def test_fields_of_named_tuples_are_described(name):
    """Without a docstring, the pages say "Alias for field number 0"."""
    analyzer = pytest.importorskip("sphinx.pycode").ModuleAnalyzer.for_module(
        getattr(metrics, name).__module__
    )
    assert {(name, field) for field in getattr(metrics, name)._fields} <= set(
        analyzer.find_attr_docs()
    )


# --- without the extra ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("pandas", lambda: results().to_frame()),
        ("torchmetrics", lambda: metrics.RetrievalMetrics()),
    ],
)
def test_what_the_extra_brings_is_named_where_it_is_not_there(package, call, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "itrloss.metrics.batches", raising=False)
    with pytest.raises(ImportError, match=r"install itrloss with the extra 'metrics'"):
        call()
    assert importlib.import_module("itrloss.metrics").retrieval_metrics(torch.eye(2))["rsum"] == 600
