"""What wrong inputs of a beginner are answered with."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.versions import unsigned
from torch import nn

import itrloss
from itrloss import checks, compat, files, functional, metrics, rerank
from itrloss.checks import Options
from itrloss.cli import comparison, main
from itrloss.distributed.consensus import what_differs

GENERATOR = torch.Generator().manual_seed(0)
I = torch.randn(6, 8, generator=GENERATOR)  # noqa: E741 (images)
T = torch.randn(6, 8, generator=GENERATOR)
S = torch.randn(6, 6, generator=GENERATOR)
IDS = torch.arange(6)
OWN = torch.randn(6, 2, 8, generator=GENERATOR)  # negatives of each image
MULTI_HOT = torch.ones(6, 4, dtype=torch.bool)
SCALE: Any = nn.Parameter(torch.tensor(2.6))  # of a model
loss: Any = itrloss.InfoNCELoss()
it: Any = itrloss
grad_cache: Any = itrloss.grad_cache_step
results: Any = metrics.retrieval_metrics
dcl: Any = itrloss.DiversityContrastiveLoss
sim: Any = itrloss.Similarity(I, T)
nan_sim: Any = itrloss.Similarity(I * torch.nan, T)


filtered: Any = itrloss.InfoNCELoss(margin=0.1)
checked: Any = itrloss.InfoNCELoss(check_finite=True)
taught: Any = itrloss.DistillationLoss()
uto: Any = itrloss.UnifiedTrainingObjective()
mined: Any = itrloss.mine_hard_negatives
WORDS = list("abcdef")
LARGE = np.array([2**63 + i for i in range(6)], dtype=np.uint64)
MASKED = np.ma.array(np.arange(6), mask=np.arange(6) == 2)
MASKED_ROWS = np.ma.array(I.numpy(), mask=I.numpy() > 1)
MATCHES = torch.eye(6)
NAN = torch.full((6,), torch.nan)
META = torch.empty(6, 8, device="meta")
RESULTS = metrics.retrieval_results(S)


class Pooled(OrderedDict):
    """What get_image_features of transformers returns."""

    def __init__(self, pooler_output: torch.Tensor):
        super().__init__(pooler_output=pooler_output)
        self.pooler_output = pooler_output


def with_a_scale(x: Any) -> Any:
    """Return two embeddings and a scale, as a CLIP of one's own does."""
    return x, x, SCALE


def both_sides(x: Any) -> Any:
    """Return two embeddings, as an encoder of both sides does."""
    return x, x


def memory() -> Any:
    """Return a memory of the dimension of the embeddings."""
    return itrloss.CoupledMemory(16, 8)


def batches(*updates: Any) -> Any:
    """Return a metric after some batches."""
    metric = metrics.RetrievalMetrics()
    for batch in updates:
        metric.update(*batch)
    return metric


# A wrong input, and what its message has in it: a regular expression.
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: setattr(dcl(), "log_scale", SCALE), "no parameter 'log_scale'; it learns none"),
    (
        lambda: setattr(it.InfoNCELoss(learnable=True), "logit_scale", SCALE),
        "no parameter 'logit_scale'; it learns temperature, scale, log_scale",
    ),
    (
        lambda: setattr(it.SigmoidLoss(), "logit_bias", SCALE),
        "it learns scale, bias, temperature, log_scale",
    ),
    (
        lambda: it.InfoNCELoss(directions="text-image")(I, T, negatives=T),
        "negatives: expected directions='both' or 'image-text'.* pass these as images",
    ),
    (
        lambda: filtered(I, T, guide=(I[:4], T)),
        r"^guide\[0\]: expected as many rows as there are images, 6, got shape \(4, 8\)$",
    ),
    (
        lambda: filtered(scores=S, guide=(I, T[:4])),
        r"^guide\[1\]: expected as many rows as there are texts, 6, got shape \(4, 8\)$",
    ),
    (
        lambda: taught(I, T, (I, T[:3])),
        r"^teacher\[1\]: expected as many rows as there are texts, 6, got shape \(3, 8\)$",
    ),
    (lambda: taught(I, T), "teacher: expected .* scores or embeddings"),
    (
        lambda: taught(I, T, (I, T, T)),
        r"teacher: expected embeddings \(images, texts\), got 3 tensors",
    ),
    (
        lambda: loss(I, T, negatives=OWN, negative_ids=torch.ones(6, 2, dtype=torch.bool)),
        "^negative_ids: .*the id of what does not exist is itrloss.NO_ID",
    ),
    (
        lambda: loss(I, T, MULTI_HOT, MULTI_HOT),
        r"multi-hot labels as matches=\(of_images.float\(\) @ of_texts.float\(\).T\) > 0",
    ),
    (lambda: compat.ClipLoss()(I, T, 0), "^logit_scale: expected a number above 0, got 0"),
    (lambda: compat.ClipLoss()(I, T, None), "^logit_scale: expected a number, got None"),
    # what goes into a loss
    (
        lambda: loss(S),
        r"^texts: .* got None with images of .*; .* goes in as loss\(scores=scores\)",
    ),
    (lambda: loss(), r"^images: expected a floating-point tensor \(N, D\), got NoneType"),
    (lambda: loss((I, T)), "^images: .* got tuple$"),
    (lambda: loss(I, T[:, :7]), r"^texts: .*dimension 8 like images, got shape \(6, 7\)"),
    (lambda: loss(I, T[:5]), "^image_ids, text_ids: needed for 6 images and 5 texts.* pairing$"),
    (
        lambda: loss(I[:2], T),
        "where 3 consecutive ones belong to each, write "
        r"image_ids=torch.arange\(2\), text_ids=torch.arange\(6\) // 3$",
    ),
    (
        lambda: it.Similarity(I[:3], T).positive_counts,  # as its arguments are called
        r"^row_ids, col_ids: .*row_ids=torch.arange\(3\), col_ids=torch.arange\(6\) // 2$",
    ),
    (lambda: loss(I.long(), T), "^images: .*got torch.int64$"),
    (lambda: loss(I, T.double()), r"^texts: .*float64.*write texts.to\(images.dtype\)"),
    (lambda: loss(I.to("meta"), T), r"^texts: .*meta.*write texts.to\(images.device\)"),
    (lambda: loss(I[0], T[0]), r"^images: .*got \(8,\); for a single row, write images\[None\]"),
    (lambda: loss(I[None], T[None]), r"^images: .*\(1, 6, 8\); write images.flatten\(0, 1\)"),
    (
        lambda: loss(I.expand(4, 6, 8), T),
        r"^images: .*images.flatten\(0, 1\), with ids where several",
    ),
    (lambda: loss(I.numpy(), T), r"^images: .*ndarray; write torch.from_numpy\(images\)"),
    (lambda: loss(I.tolist(), T), r"^images: .*got list; write torch.tensor\(images\)"),
    (lambda: loss(list(I), T), r"^images: .*got list; write torch.stack\(images\)"),
    (lambda: loss(I.to_sparse(), T), r"^images: .*torch.sparse_coo; write images.to_dense\(\)"),
    (lambda: loss(I, T[:0], IDS, IDS[:0]), r"^texts: .*\(0, 8\)"),
    (lambda: loss(I, T[:5], IDS[:5], IDS), r"^image_ids: expected shape \(6,\), got \(5,\)"),
    (lambda: loss(I, T, IDS > 2, IDS), "^image_ids: expected an integer tensor.*bool"),
    (lambda: loss(I, T, (-1 - IDS).view(unsigned.uint64), IDS), r"^image_ids: .*below 2\*\*63"),
    (lambda: loss(sim, None, IDS, IDS), "^image_ids: "),
    (lambda: loss(sim, T), "^texts: "),
    (lambda: loss(scores=S.int()), "^scores: .*torch.int32"),
    (lambda: checked(nan_sim), "^rows: expected finite"),
    (lambda: checked(scores=S / 0), "^scores: expected finite"),
    (lambda: sim.towards("i2i"), "^directions: expected 'both', .* got 'i2i'"),
    (
        lambda: checked(torch.where(I.max() > I, I, torch.inf), T),
        "^images: expected finite values, got nan or infinity: 1 of 48, the first in row .*column",
    ),
    (lambda: loss(I, T, S), r"^image_ids: .*got torch.float32 \(6, 6\); embeddings go in as"),
    (lambda: loss(I, T, I), "^image_ids: .*; embeddings go in as .*, negatives as negatives="),
    (lambda: loss(I, T, targets=torch.eye(6)), "^targets: .* who matches whom as matches="),
    (lambda: loss(I, T, IDS), "^text_ids: expected ids to go with image_ids, got None"),
    (lambda: loss(I, T, IDS / 2), "^image_ids: expected an integer tensor.*got torch.float32$"),
    (
        lambda: loss(I, T, SCALE),  # as of CLIP's (image, text, scale)
        "^image_ids: expected an integer tensor .*float32, a scalar as logit_scale is; pass images",
    ),
    (lambda: loss(Pooled(I), T), r"^images: .*got Pooled; write images.pooler_output"),
    (lambda: loss(I, T, IDS, list("abcdef")), "^text_ids: expected strings with strings"),
    (
        lambda: loss(I, T, image_groups=IDS, text_groups=list("abcdef")),
        "^text_groups: expected strings with strings in image_groups",
    ),
    (lambda: loss(scores=S.numpy()), r"^scores: .*write torch.from_numpy\(scores\)"),
    (lambda: loss(I, T, scores=S), "^scores: expected either scores or images and texts"),
    (
        lambda: loss(I, IDS),
        r"^texts: .* got torch.int64; labels of one set of emb.*labels=labels",
    ),
    # options
    (lambda: it.PrototypeClassificationLoss(8), "^PrototypeC.*missing a required argument: 'clus"),
    (lambda: it.TripletLoss(0.2, "all", 3), "^TripletLoss: too many positional arguments"),
    (lambda: it.TripletLoss(0.2, margin=0.2), "^TripletLoss: multiple values for argument 'mar"),
    (lambda: it.InfoNCELoss(hardness=-1), "^hardness: expected at least 0, got -1"),
    (lambda: rerank.FastReranker(i2t=3), "^i2t: expected two numbers above 0, got 3"),
    (lambda: it.InfoNCELoss(I, T), r"^temperature: .*\(6, 8\); options go first, and data"),
    (lambda: it.InfoNCELoss(0), "^temperature: expected a number above 0, got 0"),
    (lambda: it.TripletLoss(-0.2), "^margin: expected a number of at least 0, got -0.2"),
    (lambda: it.InfoNCELoss(temprature=1), "'temprature'; did you mean 'temperature'"),
    (lambda: it.InfoNCELoss(nn.Parameter(I)), r"^temperature: expected a parameter of one value"),
    (
        lambda: dcl(SCALE),
        r"^temperature: .*share a model's .*: InfoNCELoss\(log_scale=model.logit_s",
    ),
    (
        lambda: it.InfoNCELoss(scale=SCALE.exp()),
        "^scale: expected a number, .*; a loss shares an nn.Parameter, and not what is computed",
    ),
    (
        lambda: it.SupConLoss(0.1, scale=10),
        "^scale: expected None with temperature, another form of it",
    ),
    (
        lambda: it.SigmoidLoss(log_scale=SCALE, temperature=0.1),
        "^log_scale: expected None with temperature, another form of it",
    ),
    (lambda: it.MILNCELoss(scale=0), "^scale: expected a number above 0, got 0"),
    (
        lambda: it.InfoNCELoss(directions="i2i"),
        "^directions: expected 'both', 'ima.*, got 'i2i'.*",
    ),
    (lambda: it.InfoNCELoss(engine="tilled"), "^engine: .*'tilled'; did you mean 'tiled'"),
    (lambda: it.HubnessAwareLoss(scale=0), "^scale: expected a number above 0, got 0"),
    (lambda: it.TripletLoss(temperature=0), "^temperature: expected a number above 0, got 0"),
    (lambda: it.TripletLoss(mining="all", temperature=1), "^temperature: .*with mining='all'"),
    (lambda: dcl(-1.0), "^temperature: expected a number above 0, got -1"),
    (lambda: dcl(epsilon=-1), "^epsilon: .*got -1"),
    (lambda: dcl(entropy_temperature=0), "^entropy_temperature: .*above 0, got 0"),
    # what other libraries call it
    (lambda: it.InfoNCELoss(max_scale=20)(I, T), "^max_scale: .*got 20; .* write temperature=1/20"),
    (lambda: setattr(it.HubnessAwareLoss(), "scale", SCALE), "^scale: .*losses that learn"),
    (
        lambda: loss(I, T, negatives=[T, T]),
        r"^negatives: .*got list; write torch.stack\(negatives\), or torch.cat",
    ),
    (lambda: loss([{"input_ids": I}]), r"^images: .*RetrievalLoss\(model, loss\)"),
    (
        lambda: grad_cache(loss, [both_sides], [I], 2),
        r"^images: expected a floating-point tensor \(N, D\), got tuple",
    ),
    (
        lambda: grad_cache(loss, [with_a_scale], [I], 4),
        r"^encoders\[0\]: .*got \(\); output=.* such as output=lambda out: out\[:2\]",
    ),
    (
        lambda: grad_cache(loss, [lambda x: x @ x.T], [I], 4),
        r"^encoders\[0\]: .*, got \[\(4, 4\), \(2, 2\)\]; output=.*image_embeds.*; pad texts",
    ),
    (
        lambda: grad_cache(loss, [both_sides], [(I, S[:5])], 4),
        r"^inputs\[0\]: .*got shapes .*; .*\(model.get_image_features, model.get_text_features",
    ),
    # functions
    (lambda: functional.info_nce_loss(I, T), "^sim: expected .*got Tensor"),  # type: ignore[arg-type]
    (lambda: functional.triplet_loss(sim, mining="all", temperature=1), "^temperature: .*'all'"),
    # similarities and terms
    (lambda: sim.ranks(ties="random"), "^ties: .*got 'random'"),
    (lambda: it.Similarity(S), r"^cols: .*Similarity.from_scores\(scores\)"),
    (lambda: it.Similarity(I, T, memory_budget="1GB"), "^memory_budget: .*bytes.*'1GB'"),
    (lambda: it.Similarity.from_scores(I, T), "^row_ids: .*embeddings go in as itrloss.Simil"),
    (lambda: sim.topk(10), "^k: expected a number from 1 to 6, got 10"),
    (lambda: sim.entropy(0), "^temperature: expected .*above 0, got 0"),
    (lambda: sim.sum_of_positives("square"), "^term: expected a function of scores, got 'square'"),
    (lambda: it.pair_term(3), "^function: expected a function of scores, got 3"),
    (lambda: sim.sum(lambda s: 3.0), "^term: .* to return a tensor, got float"),
    (lambda: functional.info_nce_loss(sim, 0), "^temperature: .*above 0, got 0"),
    (lambda: it.describe(S), r"^sim: expected an itrloss.Similarity\(images, texts\), got Tensor"),
    # memories, clusters, negatives, chunks
    (lambda: it.CoupledMemory(16, 8, dtype="half"), "^dtype: expected a floating-point type"),
    (lambda: memory().enqueue(I, T[:5]), r"^text_keys: expected shape \(6, 8\), got \(5, 8\)$"),
    (
        lambda: memory().enqueue(I, torch.cat([T, T])),
        r"got \(12, 8\); .*write image_keys.repeat_interleave\(2, 0\)$",
    ),
    (lambda: it.MomentumEncoder(I), "^encoder: expected a module, got Tensor"),
    # metrics and re-rankers
    (lambda: results(S, ties="pesimistic"), "^ties: .*did you mean 'pessimistic'"),
    (lambda: results(I, T), r"^image_ids: .*\(6, 8\); embeddings go in as itrloss.Similarity"),
    (lambda: results((I, T)), "^image_ids, text_ids: needed .*embeddings go in as itrloss.Sim"),
    (lambda: results(S.tolist()), r"^scores: .*got list; write torch.tensor\(scores\)"),
    (lambda: results(S, reranker="csls"), r"^reranker: .*itrloss.rerank.CSLS\(\), got 'csls'"),
    (lambda: results(S, reranker=rerank.CSLS), "^reranker: expected a re-ranker with its opt"),
    (lambda: metrics.compare_all([S], baseline="a"), "^systems: expected results of .* got list"),
    (lambda: metrics.compare_all({"a": S}, baseline="a"), "^systems: .* got Tensor for 'a'"),
    (lambda: comparison.compare_models({"a": S, "b": S}), "^results: .* got Tensor for 'a'"),
    (lambda: metrics.save_trec(S, "folder"), "^results: expected those of retrieval_results"),
    (
        lambda: results(S[None]),
        r"^scores: .*\(1, 6, 6\)$",
    ),
    (lambda: rerank.CSLS(K=10), "^CSLS: .*'K'; did you mean 'k'"),  # type: ignore[call-arg]
    (lambda: compat.adapt(loss, "vse++"), "^code_base: expected 'vsepp', .*, got 'vse[+][+]'$"),
    # ids
    *[
        (
            lambda ids=ids: loss(I, T, ids, ids),
            rf"^image_ids: expected an integer tensor of shape \(6,\), got {got}$",
        )
        for ids, got in (
            ([0.5] * 6, r"\[0.5, 0.5, .*"),
            ([True] * 6, r"\[True, .*"),
            ([1, 2, None, 3, 4, 5], r"\[1, 2, None, .*"),
            (("1", 2, "3", 4, 5, 6), r"\('1', 2, .*"),
            ([[1], [2, 3]], r"\[\[1\], \[2, 3\]\]"),
            (np.ones(6), "ndarray of torch.float64"),
            (MASKED, "MaskedArray of object"),
            (IDS.to(torch.complex64), "torch.complex64"),
        )
    ],
    (lambda: loss(I, T, "abcdef", "abcdef"), r"^image_ids: expected shape \(6,\), got \(\)"),
    (lambda: loss(I, T, None, WORDS), "^text_ids: expected an integer .* got list of strings"),
    (lambda: loss(I, T, image_groups=MASKED), "^image_groups: expected an integer tensor"),
    (lambda: loss(I, T, LARGE.tolist(), LARGE.tolist()), r"^image_ids: expected ids below 2\*\*63"),
    (lambda: mined(I, T, LARGE, LARGE, 3), r"_ids: expected ids below 2\*\*63, got larger ones"),
    (lambda: memory().enqueue(I, T, LARGE), r"^ids: expected ids below 2\*\*63"),
    (lambda: loss(I, T, LARGE.reshape(6, 1).repeat(2, 1), OWN), r"^image_ids: .*below 2\*\*63"),
    (lambda: loss(I, T, [WORDS[:2]] * 6, IDS), "^text_ids: expected strings with strings"),
    (lambda: mined(I, T, [WORDS[:2]] * 6, IDS), "^corpus_ids: expected strings"),
    (
        lambda: loss(I, T, matches=torch.arange(36).view(6, 6)),
        "^matches: expected bools, 0 and 1, or floats as weights, got integers up to 35",
    ),
    (lambda: loss(I, T, matches=MATCHES.to(torch.complex64)), "^matches: expected real numbers"),
    (
        lambda: loss(I, T, matches=np.ma.array(MATCHES.numpy(), mask=MATCHES.numpy() > 0)),
        r"^matches: expected a tensor \(N, M\), got MaskedArray",
    ),
    # negatives, guides and teachers
    (
        lambda: loss(I, T, negatives=T, negative_ids=WORDS),
        "^negative_ids: expected integers, as without image_ids they are numbers of images",
    ),
    (
        lambda: loss(I, T, negatives=OWN, negative_ids=[["a", "b"]] * 6),
        "^negative_ids: expected integers, as without",
    ),
    (
        lambda: loss(I, T, IDS, IDS, negatives=OWN, negative_ids=LARGE.repeat(2).reshape(6, 2)),
        r"^negative_ids: expected ids below 2\*\*63, got larger ones",
    ),
    *[
        (
            lambda ids=ids, own=own: loss(I, T, ids, ids, negatives=T, negative_ids=own),
            "^negative_ids: expected strings with strings in image_ids",
        )
        for ids, own in ((IDS, WORDS), (WORDS, IDS), (WORDS, S), ([["a", "b"]] * 6, IDS))
    ],
    (
        lambda: filtered(I, T, negatives=OWN, guide=(I, T, T)),
        r"^guide\[2\]: expected shape \(6, 2, 8\), as of negatives, got \(6, 8\)",
    ),
    (
        lambda: filtered(I, T, negatives=OWN, guide=(I, T, OWN.double())),
        r"^guide\[2\]: expected the dtype of guide\[0\], torch.float32, got torch.float64",
    ),
    (
        lambda: filtered(I, T, negatives=OWN, guide=(I, T, OWN[..., :2])),
        r"^guide\[2\]: expected shape \(K, D\) or \(6, K, 8\)",
    ),
    (
        lambda: filtered(I, T, guide=(I, META)),
        r"^guide\[1\]: expected device cpu, got meta",
    ),
    (
        lambda: filtered(I, T, guide=META[:, :6]),
        "^guide: expected device cpu, got meta",
    ),
    (
        lambda: loss(scores=S, negatives=S.double()),
        "^negatives: expected the dtype of scores, torch.float32, got torch.float64",
    ),
    (lambda: taught(I, T, META[:, :6]), "^teacher: expected device cpu, got meta"),
    (lambda: taught(I[0], T, torch.ones(4)), "^images: expected shape"),
    # what else is passed in
    (lambda: uto(I, T, I.numpy(), T, memory()), "^image_keys: expected a floating-point tensor"),
    (lambda: uto(I, T, I, None, memory()), "^text_keys: expected embeddings"),
    (lambda: it.Similarity(I, T, bias=(NAN, None), check_finite=True), "^bias: expected finite"),
    (lambda: results(it.Similarity(I, T, bias=(NAN, None))), "^bias: expected finite values"),
    (lambda: it.Similarity(I, T, bias=(IDS, None)), r"^bias: expected \(6,\) floating-point num"),
    (lambda: it.Similarity(I, T, bias=(None, NAN[:2])), r"^bias: expected shape \(6,\), got \(2,"),
    (lambda: it.Similarity(I, T, bias=NAN), "^bias: expected a pair of tensors or None"),
    (lambda: it.Similarity(I, T, bias=(None,) * 3), "^bias: expected a pair of tensors or None"),
    (lambda: mined(I, T, IDS, IDS, below=NAN), "^below: expected numbers, got nan"),
    (lambda: it.Similarity(MASKED_ROWS, T), r"^rows: expected a floating.* got MaskedArray$"),
    (
        lambda: it.DVSEObjective()(OWN, T, OWN[:5], None, IDS, IDS),
        "^residuals: expected a row for each",
    ),
    (
        lambda: it.DVSEObjective()(OWN, T, OWN, torch.tensor(1.0)),
        r"^gate: expected a row for each of 6 images, got shape \(\)",
    ),
    *[
        (lambda k=k: sim.topk(k), "^k: expected an integer, got [^;]*$")
        for k in (True, np.True_, 2.0, np.float32(2), "2", np.array([2, 3]), None)
    ],
    # batches of a metric
    (lambda: batches().compute(), "update"),
    (lambda: batches((I, T[:5])), "6 images and 5 texts"),
    (lambda: batches((I, T, IDS[1:], IDS)), r"image_ids.*\(6,\).*\(5,\)"),
    (lambda: batches((I, T.double())), "texts"),
    (lambda: batches((I, T, IDS, None)), "both in all batches"),
    (lambda: batches((I, T, None, IDS)), "both in all batches"),
    (lambda: batches((I, T), (I, T, IDS, IDS)), "both in all batches"),
    (lambda: batches((I, T, IDS, IDS), (I, T)), "both in all batches"),
    (lambda: batches((I, T), (I[:3], T)), "different numbers of texts.* got 1 and 2"),
    (lambda: batches((I[:0], T)), "0 images and 6 texts"),
    (lambda: batches((I, T, IDS, IDS), (I, T, WORDS, WORDS)), "expected strings in all batches"),
    (lambda: metrics.RetrievalMetrics(ties="worst"), "^ties: "),
    (lambda: metrics.RetrievalMetrics(folds=0), "^folds: "),
    (lambda: metrics.RetrievalMetrics(reranker=rerank.CSLS), "^reranker: "),
    (lambda: metrics.compare_all({"a": RESULTS}, baseline="b"), "^baseline: expected 'a', got 'b'"),
    (
        lambda: metrics.compare_all({"a": RESULTS}, baseline="a", figures=("r1",)),
        "^figures: expected 'i2t_r1'",
    ),
    # files
    (lambda: files.read_matrix(S), "os.PathLike object.*, not .?Tensor"),  # type: ignore[arg-type]
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("wrong", "name"), WRONG, ids=[message for _, message in WRONG])
def test_a_message_says_what_to_do_about_wrong_input(wrong: Callable[[], Any], name: str):
    """The name is a regular expression of the message."""
    with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError)) as raised:
        wrong()
    said = str(raised.value)
    assert re.search(name, said), said
    assert not re.search(r"0x[0-9a-f]{6}|has no attribute '_|aten::|cannot be multiplied", said)
    assert len(said) < 700


def test_each_option_refuses_what_it_does_not_allow():
    """When it is passed, and when it is set later."""
    number = 0
    for kind in {**vars(it), **vars(compat), **vars(rerank)}.values():
        if not isinstance(kind, type) or not issubclass(kind, Options):
            continue
        for name, declared in kind._all_options.items():
            for wrong in ("no such word", object(), I):
                if name == "process_group":
                    continue
                number += 1
                with pytest.raises((TypeError, ValueError), match=rf"^{name}: expected"):
                    declared.parse(wrong)
    assert number > 700


OF_IDS = "rerank @scores.npy --image-ids @two.npz:x --text-ids"
# Arguments of the command line, and what is said; @ stands for a folder with files.
WRONG_COMMANDS = [
    ("rerank @score.npy", "No such file or directory: '@score.npy'"),
    ("rerank @integers.npy", "expected floating-point numbers, got torch.int64; save them as fl"),
    ("rerank @scores.npy --methods qbnorm", "itrloss: --methods: expected 'fast', "),
    ("rerank @scores.npy --methods qbnorm", "got 'qbnorm'; did you mean 'qb-norm'?"),
    ("rerank @scores.npy --methods csls fast", "separated by commas, as in --methods fast,csls"),
    ("rerank @scores.npy --foldz 5", "No such option: --foldz (Possible options: --folds)"),
    ("rerank @scores.npy --ks 1;5", "--ks: expected integers of at least 1, got '1;5'"),
    ("rerank @scores.npy --folds x", "Invalid value for '--folds': "),
    ("rerank @scores.npy @scores.npy", "embeddings are for itrloss eval"),
    ("rerank @two.npz", "it has x, y; for one of several, write @two.npz:NAME"),
    ("rerank @two.npz:z", "two.npz: expected an array of the name 'z'; it has x, y"),
    ("rerank @scores.npy:x", "scores.npy: expected no name, as the file has one array, got 'x'"),
    ("rerank @scores.csv:x", "scores.csv: expected no name, as the file has one array, got 'x'"),
    ("rerank @scores.npy --exclude @scores.csv:x", "scores.csv: expected no name, "),
    (f"{OF_IDS} @ids.txt:x", "ids.txt: expected no name, "),
    ("rerank @twos.npz:x", "No such file or directory: '@twos.npz:x'"),
    ("rerank @out.npz", "itrloss compare takes such re-ranked scores of both directions"),
    (f"{OF_IDS} @two.npz", "two.npz: expected an array of the name 'sims'; it has x, y"),
    (f"{OF_IDS} @ids.csv", "ids.csv: expected one column; it has image, caption; for one of them,"),
    (f"{OF_IDS} @ids.csv:text", "expected a column of the name 'text'; it has image, caption"),
    (f"{OF_IDS} @ids.json", "ids.json: expected an array of the name 'sims'; it has a, b"),
]


@pytest.mark.parametrize(("command", "message"), WRONG_COMMANDS)
def test_a_message_says_what_to_do_about_a_wrong_command(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    np.save(tmp_path / "scores.npy", S.numpy())
    np.save(tmp_path / "integers.npy", np.arange(36).reshape(6, 6))
    np.savez(tmp_path / "two.npz", x=np.arange(6), y=np.arange(6))
    np.savez(tmp_path / "out.npz", i2t=S.numpy(), t2i=S.numpy(), transductive=[True, True])
    (tmp_path / "ids.csv").write_text("image,caption\n0,a\n1,b\n")
    (tmp_path / "scores.csv").write_text("0.1,0.2\n0.3,0.4\n")
    (tmp_path / "ids.txt").write_text("0\n1\n")
    (tmp_path / "ids.json").write_text('{"a": 0, "b": 1}')
    arguments = [x.replace("@", f"{tmp_path}/") for x in command.split()]
    assert main(arguments) == 2
    assert message.replace("@", f"{tmp_path}/") in capsys.readouterr().err


@pytest.mark.parametrize("given", ["semihard", "variance", 3, None, "xyz"])
def test_hints_guess_nothing_of_other_words(given: object):
    assert checks.did_you_mean(given, ["hardest", "all", "std", None, True]) == ""


def test_messages_of_processes_say_only_what_differs():
    first = "float32 (8), gradients [True, True], {'engine': 'auto'} InfoNCELoss, margin 0.1"
    second = first.replace("True, True", "True, False").replace("0.1", "0.2")
    assert what_differs([first, second]) == [
        "gradients [True, True], margin 0.1",
        "gradients [True, False], margin 0.2",
    ]
    assert what_differs([first, "memory (3, 4)"]) == [first, "memory (3, 4)"]
    first = "guide False InfoNCELoss {'temperature': 0.07, 'reduction': 'mean'} in training mode"
    second = first.replace("0.07", "0.05").replace("mean", "sum")
    assert what_differs([first, second]) == [
        "'temperature': 0.07, 'reduction': 'mean'",
        "'temperature': 0.05, 'reduction': 'sum'",
    ]
