"""Input that is probably not what was meant: one warning says so, and right input has none."""

from __future__ import annotations

import os
import sys
import warnings

import numpy as np
import pytest
import torch

import itrloss
from itrloss import Similarity, SuspiciousInputWarning, compat
from itrloss.cli import main
from itrloss.functional import set_similarity
from itrloss.metrics import retrieval_metrics, retrieval_results
from itrloss.rerank import CSLS


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def embeddings(n=40, captions=5, dim=16, noise=0.5, seed=0):
    """Images (n, dim) and texts (captions * n, dim), one image's behind the other."""
    g = generator(seed)
    images = torch.randn(n, dim, generator=g)
    texts = images.repeat_interleave(captions, 0)
    return images, texts + noise * torch.randn(texts.shape, generator=g)


def said(function, *args, **kwargs):
    """Return the texts of the library's warnings of a call, which point here if Python can."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    ours = [x for x in caught if issubclass(x.category, SuspiciousInputWarning)]
    assert sys.version_info < (3, 12) or all(x.filename == __file__ for x in ours)
    return [str(x.message) for x in ours]


@pytest.mark.parametrize("form", ["embeddings", "scores"])
def test_copies_with_the_id_of_an_image_are_noticed(form):
    """As in an evaluation of pairs, whose images with five captions are in five rows."""
    draw = generator(7)
    images, texts = torch.randn(10, 8, generator=draw), torch.randn(50, 8, generator=draw)
    texts += 2 * images.repeat_interleave(5, 0)
    ids = torch.arange(10).repeat_interleave(5)

    def evaluate(rows, row_ids):
        if form == "scores":
            return retrieval_metrics(rows @ texts.T, row_ids, ids)
        return retrieval_metrics(Similarity(rows, texts, row_ids, ids))

    copies = images.repeat_interleave(5, 0)
    with pytest.warns(SuspiciousInputWarning, match="images: 40 of 50 rows are copies"):
        evaluate(copies, ids)
    shuffled = torch.randperm(50, generator=draw)  # as by a loader
    with pytest.warns(SuspiciousInputWarning, match="images: 40 of 50 rows are copies"):
        evaluate(copies[shuffled], ids[shuffled])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SuspiciousInputWarning)
        evaluate(images, torch.arange(10))
        evaluate(copies + 0.1 * torch.randn(50, 8, generator=draw), ids)  # views of one scene


def test_a_few_copies_are_no_reason_to_warn():
    images, texts = embeddings(captions=1)
    images[5] = images[7]
    images[20] = images[30]
    assert not said(retrieval_metrics, Similarity(images, texts))
    # one candidate that is left out of the ranking of all makes rows no copies
    scores = torch.nn.functional.normalize(images) @ texts.T
    scores[:, 3] = -1e9
    assert not said(retrieval_metrics, scores)


@pytest.mark.parametrize("captions", [1, 2, 5, 10, 20])
@pytest.mark.parametrize("form", ["similarity", "scores", "ids", "pair", "folds", "half"])
def test_right_data_is_evaluated_without_a_word(form, captions):
    images, texts = embeddings(captions=captions)
    sim = Similarity(images, texts, torch.arange(40), torch.arange(len(texts)) // captions)
    if form == "similarity":
        assert not said(retrieval_metrics, sim)
    elif form == "half":
        ids = sim.ids
        assert not said(retrieval_metrics, Similarity(images.bfloat16(), texts.bfloat16(), *ids))
    elif form == "ids":
        assert not said(retrieval_metrics, sim.scores(), *sim.ids)
    elif form == "pair":
        assert not said(retrieval_metrics, (sim.scores(), sim.scores() * 2))
    elif form == "folds":
        assert not said(retrieval_results, sim, folds=4)
    else:
        assert not said(retrieval_metrics, sim.scores())


def test_a_temperature_that_is_probably_a_scale_is_noticed():
    images, texts = embeddings(captions=1)
    (message,) = said(itrloss.InfoNCELoss(20), images, texts)
    assert message.startswith("temperature: 20 ") and "temperature=1/20" in message
    assert not said(itrloss.InfoNCELoss(1.0), images, texts)
    # scores that are no cosines may be of any size
    assert not said(itrloss.InfoNCELoss(20, normalize=False), images, texts)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_unit_vectors_are_no_scores(seed, dtype):
    x = torch.nn.functional.normalize(torch.randn(64, 64 * (1 + seed), generator=generator(seed)))
    messages = said(retrieval_metrics, x.to(dtype))
    (message,) = messages
    assert message.startswith("scores: each row has length 1, as embeddings have")


def test_images_against_themselves_are_noticed():
    images, texts = embeddings(captions=5)
    ids = torch.arange(40), torch.arange(200) // 5
    cases = [
        (texts, texts),
        (images, images.clone()),
        (images, images, torch.arange(40), torch.arange(40)),
        (images, images.repeat_interleave(5, 0), *ids),
        (texts[::5], texts, *ids),
    ]
    for given in cases:
        (message,) = said(retrieval_metrics, Similarity(*given))
        assert message.startswith("images, texts: both are the same embeddings")


def test_an_unusual_number_of_texts_an_image_is_noticed():
    for n, m in ((2, 100), (5, 500), (30, 900), (3, 63), (10, 1280)):
        (message,) = said(retrieval_metrics, torch.rand(n, m, generator=generator()))
        assert message.startswith("image_ids, text_ids: without them")
        assert f"{m // n} consecutive texts an image" in message
    ids = torch.arange(5), torch.arange(500) // 100
    assert not said(retrieval_metrics, torch.rand(5, 500), *ids)
    assert not said(retrieval_metrics, torch.rand(1, 500))


def test_the_filters_of_python_apply():
    many = torch.rand(5, 500, generator=generator())
    with warnings.catch_warnings():
        warnings.simplefilter("error", SuspiciousInputWarning)
        with pytest.raises(SuspiciousInputWarning, match="500 texts"):
            retrieval_metrics(many)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(5):
            retrieval_metrics(many)
    assert len(caught) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore", SuspiciousInputWarning)
        retrieval_metrics(many)
    assert not caught


# --------------------------------------------------------------------------------------- the losses

LOSSES = {
    "InfoNCE": itrloss.InfoNCELoss,
    "learnt InfoNCE": lambda: itrloss.InfoNCELoss(learnable=True),
    "filtered": lambda: itrloss.InfoNCELoss(margin=0.1),
    "DCL": lambda: itrloss.DiversityContrastiveLoss(positive_weight=1),
    "HAL": itrloss.HubnessAwareLoss,
    "RINCE": itrloss.RINCELoss,
    "complementary": itrloss.ComplementaryContrastiveLoss,
    "triplet": itrloss.TripletLoss,
    "SigLIP": itrloss.SigmoidLoss,
    "SupCon": itrloss.SupConLoss,
    "MIL-NCE": itrloss.MILNCELoss,
    "multi-similarity": itrloss.MultiSimilarityLoss,
    "circle": itrloss.CircleLoss,
}


def cosines(n=32):
    images, texts = embeddings(n=n, captions=1)
    return torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(texts).T


def trained(loss, *args, **kwargs):
    """Call a loss three times, as a trainer does."""
    for _ in range(3):
        loss(*args, **kwargs)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [14.3, 50.0, 100.0])
def test_logits_are_no_cosines(name, scale):
    logits = scale * cosines()
    adapted = compat.adapt(LOSSES[name](), "sgraf")
    for criterion in (LOSSES[name](), adapted):
        (message,) = said(trained, criterion, scores=logits)
        assert "scores above 5, as of logits" in message and "Pass cosines" in message
    (message,) = said(trained, LOSSES[name](), Similarity.from_scores(logits))
    assert "scores above 5" in message


@pytest.mark.parametrize("name", LOSSES)
def test_right_batches_are_trained_on_without_a_word(name):
    scores = cosines()
    images, texts = embeddings(captions=2)
    ids = torch.arange(40), torch.arange(80) // 2
    with_padding = torch.cat([torch.arange(39), torch.tensor([torch.iinfo(torch.int64).min])])
    make = LOSSES[name]
    assert not said(trained, make(), scores=scores)
    assert not said(
        trained, make(), scores=1.6 * scores, image_ids=ids[0][:32], text_ids=ids[0][:32]
    )
    assert not said(trained, make(), images, texts, *ids)
    assert not said(trained, make(), texts, texts.roll(1, 1))
    assert not said(trained, make(), images, images, with_padding, with_padding)
    assert not said(trained, compat.adapt(make(), "vse_inf"), 30 * images, 20 * texts[::2])
    loss = make()
    loss(images, texts, *ids)
    assert not said(loss, images[:1], texts[:1])  # the last batch of an epoch


def test_options_for_logits_take_logits():
    logits = 100 * cosines()
    for loss in (
        itrloss.InfoNCELoss(1.0),
        itrloss.InfoNCELoss(1.0, learnable=True),
        itrloss.TripletLoss(20.0),
        itrloss.SigmoidLoss(1.0, 0.0),
        itrloss.SupConLoss(1.0),
    ):
        assert not said(trained, loss, scores=logits)


@pytest.mark.parametrize("name", LOSSES)
def test_ids_that_leave_nothing_to_learn_are_noticed(name):
    images, texts = embeddings(captions=1)
    rows = torch.arange(40)
    for cols in (rows + 40, rows + 1000, -1 - rows):
        (message,) = said(trained, LOSSES[name](), images, texts, rows, cols)
        assert "no image has a matching text" in message and "leave out both" in message
    (message,) = said(
        trained, LOSSES[name](), scores=cosines(), image_ids=rows[:32], text_ids=-rows[:32] - 1
    )
    assert "no image has a matching text" in message
    loss = LOSSES[name]()
    loss.reduction = "none"
    (message,) = said(trained, loss, images, texts, text_ids=rows + 40)
    assert "no image has a matching text" in message


def test_batches_without_negatives_are_noticed():
    images, texts = embeddings(captions=1)
    same = torch.zeros(40, dtype=torch.int64)
    cases = [
        (images, texts, same, same),
        (images[:1], texts[:1]),
        (images[:1], texts[:3], same[:1], same[:3]),
        (images[:5], texts[:1], same[:5], same[:1]),
        (Similarity(images, texts, same, same),),
    ]
    for reduction in ("mean", "sum", "none"):
        for given in cases:
            (message,) = said(trained, itrloss.InfoNCELoss(reduction=reduction), *given)
            assert "every image matches every text, so that the loss is 0" in message
    assert not said(trained, itrloss.SigmoidLoss(), images, texts, same, same)
    further = torch.randn(7, 16, generator=generator())
    assert not said(trained, itrloss.InfoNCELoss(), images[:1], texts[:1], negatives=further)


def test_a_memory_has_negatives_but_no_positives():
    images, texts = embeddings(captions=1)
    rows = torch.arange(40)
    memory = itrloss.CoupledMemory(64, 16)
    memory.enqueue(images, texts, rows)
    loss = itrloss.MemoryDiversityContrastiveLoss(positive_weight=1)
    given = images, texts, images, texts, memory
    assert not said(trained, loss, *given, rows + 50, rows + 50)
    loss = itrloss.MemoryDiversityContrastiveLoss(positive_weight=1)
    (message,) = said(trained, loss, *given, rows + 50, rows + 500)
    assert "MemoryDiversityContrastiveLoss: no image has a matching text" in message


MEMORY_LOSSES = {
    "M-DCL": lambda: itrloss.MemoryDiversityContrastiveLoss(positive_weight=1),
    "UTO": itrloss.UnifiedTrainingObjective,
    "InfoNCE": itrloss.MemoryInfoNCELoss,
}


@pytest.mark.parametrize("name", MEMORY_LOSSES)
def test_a_memory_that_stays_empty_is_noticed(name):
    images, texts = embeddings(captions=1)

    def steps(loss, number, batches=0):
        memory = itrloss.CoupledMemory(64, 16)
        for step in range(number):
            loss(images, texts, images, texts, memory)
            if step < batches:
                memory.enqueue(images, texts)

    loss = MEMORY_LOSSES[name]()
    assert not said(steps, loss, 99)
    (message,) = said(steps, loss, 120)
    assert message.startswith(f"{type(loss).__name__}: nothing was put into the memory before 100")
    assert "memory.enqueue(image_keys, text_keys, ids)" in message
    assert not said(steps, MEMORY_LOSSES[name](), 120, batches=1)
    assert not said(steps, MEMORY_LOSSES[name]().eval(), 120)


def test_unit_vectors_are_no_scores_of_a_loss():
    for seed in range(5):
        x = torch.nn.functional.normalize(torch.randn(32, 32, generator=generator(seed)))
        (message,) = said(trained, itrloss.InfoNCELoss(), scores=x)
        assert message.startswith("scores: each row has length 1")


def test_nothing_is_read_on_other_devices_or_by_the_compiler(monkeypatch):
    """A read of a tensor on the meta device is an error, as it would be a wait on a GPU."""
    from itrloss.losses import base

    seen = []
    monkeypatch.setattr(base, "warn_of_ids", lambda *_: seen.append("ids"))
    logits = 100 * cosines()
    loss = itrloss.InfoNCELoss(engine="dense")
    loss(scores=logits.to("meta"))
    assert not seen
    assert not said(torch.compile(loss, backend="eager", fullgraph=True), scores=logits)
    assert not seen
    loss(scores=logits)
    loss(scores=logits)
    assert seen == ["ids"]


# ---------------------------------------------------- other arguments of losses and other functions

IMAGES, TEXTS = embeddings(captions=1)
IDS = torch.arange(40)
OTHER_IDS = IDS + 1000
HEADS = torch.stack([IMAGES, IMAGES.flip(1)], 1)
SQUARE = torch.randn(40, 40)
MULTI_HOT = torch.tensor([[0, 1, 1], [1, 0, 1]] * 20)
COSINES = cosines(n=40)
VECTORS = torch.nn.functional.normalize(torch.randn(16, 16, generator=generator(7)))
LONG = 10 * IMAGES, 10 * TEXTS
OTHERS = torch.randn(9, 16, generator=generator(3))


def with_log_scale(loss, value):
    """Give a loss the parameter of a model."""
    loss.log_scale = torch.nn.Parameter(torch.tensor(value))
    return loss


SUSPICIOUS = {
    "heads without an id of the texts": (
        lambda: itrloss.VarianceAwareLoss()(HEADS, TEXTS, IDS, OTHER_IDS),
        "no image has a matching text",
    ),
    "heads of DVSE without an id of the texts": (
        lambda: itrloss.DVSEObjective()(HEADS, TEXTS, HEADS, None, IDS, OTHER_IDS),
        "no image has a matching text",
    ),
    "long embeddings that are not normalised": (
        lambda: itrloss.InfoNCELoss(normalize=False)(*LONG),
        "scores above 5, as of logits",
    ),
    "long embeddings of VSE++": (
        lambda: compat.VSEPPLoss(0.2)(*LONG),
        "scores above 5, as of logits",
    ),
    "a scale in place of its logarithm": (
        lambda: with_log_scale(itrloss.InfoNCELoss(learnable=True), 14.3)(IMAGES, TEXTS),
        "log_scale: 14.3 is a scale of 1.623e+06, by which",
    ),
    "a scale that is cut": (
        lambda: with_log_scale(itrloss.InfoNCELoss(learnable=True, max_scale=100), 100.0)(
            IMAGES, TEXTS
        ),
        "scale itself, its logarithm is 4.605",
    ),
    "a scale with a memory": (
        lambda: with_log_scale(itrloss.MemoryInfoNCELoss(learnable=True), 14.3)(
            IMAGES, TEXTS, IMAGES, TEXTS, itrloss.CoupledMemory(9, 16)
        ),
        "its logarithm is 2.66",
    ),
    "a scale of the sigmoid loss": (
        lambda: with_log_scale(itrloss.SigmoidLoss(), 14.3)(IMAGES, TEXTS),
        "its logarithm is 2.66",
    ),
    "logits of SGRAF": (
        lambda: compat.SGRAFLoss(0.2)(100 * COSINES),
        "scores above 5, as of logits",
    ),
    "logits of CHAN": (lambda: compat.CHANLoss()(100 * COSINES), "scores above 5, as of logits"),
    "embeddings for SGRAF's scores": (lambda: compat.SGRAFLoss(0.2)(VECTORS), "has length 1"),
    "a teacher's logits": (
        lambda: itrloss.DistillationLoss()(IMAGES, TEXTS, 100 * COSINES),
        "teacher: scores above 5",
    ),
    "a teacher's embeddings": (
        lambda: itrloss.DistillationLoss()(VECTORS, VECTORS.flip(1), VECTORS),
        "each row has length 1",
    ),
    "a guide's logits": (
        lambda: itrloss.InfoNCELoss(margin=0.1)(
            IMAGES, TEXTS, guide=Similarity.from_scores(100 * COSINES)
        ),
        "guide: scores above 5",
    ),
    "a matrix and its transpose": (
        lambda: itrloss.InfoNCELoss()(SQUARE, SQUARE.T),
        "images, texts: a matrix and its transpose",
    ),
    "multi-hot labels": (
        lambda: itrloss.InfoNCELoss()(IMAGES, TEXTS, MULTI_HOT, MULTI_HOT),
        "labels (N, k) are sets of ids, not multi-hot rows; for these, write matches=",
    ),
    "embeddings of zeros": (
        lambda: itrloss.InfoNCELoss()(0 * IMAGES, TEXTS),
        "images: all embeddings are zero",
    ),
    "empty sets": (
        lambda: set_similarity(HEADS, HEADS, image_mask=torch.zeros(40, 2).bool()),
        "all sets are empty",
    ),
    "mining of right answers": (
        lambda: itrloss.mine_hard_negatives(IMAGES, TEXTS, IDS, OTHER_IDS, 3),
        "they have no id in common",
    ),
    "mining with one id for all": (
        lambda: itrloss.mine_hard_negatives(IMAGES, TEXTS, 0 * IDS, 0 * IDS, 3),
        "there are no negatives",
    ),
    "the test queries as a bank": (
        lambda: CSLS().fit(IMAGES, TEXTS).topk(Similarity(IMAGES, TEXTS), 3),
        "the bank has images of the test set",
    ),
    "the test scores as a bank": (
        lambda: CSLS().fit(texts=COSINES).rerank(COSINES),
        "texts: the bank has texts of the test set",
    ),
}


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_other_suspicious_input_is_noticed(name):
    call, message = SUSPICIOUS[name]
    messages = said(call)
    assert any(message in text for text in messages), messages


RIGHT = {
    "a large scale": lambda: with_log_scale(itrloss.InfoNCELoss(learnable=True), 6.9)(
        IMAGES, TEXTS
    ),
    "a scale that has grown": lambda: with_log_scale(
        itrloss.InfoNCELoss(learnable=True, max_scale=100), 4.61
    )(IMAGES, TEXTS),
    "heads": lambda: itrloss.VarianceAwareLoss()(HEADS, TEXTS, IDS, IDS),
    "unit vectors": lambda: itrloss.InfoNCELoss(normalize=False)(VECTORS, VECTORS.flip(0)),
    "long embeddings and wide margins": lambda: compat.VSEPPLoss(20)(*LONG),
    "order embeddings": lambda: compat.VSEPPLoss(0.05, "order")(IMAGES.abs() / 4, TEXTS.abs() / 4),
    "cosines of a code base": lambda: compat.SGRAFLoss(0.2)(COSINES),
    "a teacher's cosines": lambda: itrloss.DistillationLoss()(IMAGES, TEXTS, COSINES),
    "a teacher's logits in their units": lambda: itrloss.DistillationLoss(teacher_temperature=1.0)(
        IMAGES, TEXTS, 100 * COSINES
    ),
    "other negatives": lambda: itrloss.InfoNCELoss()(IMAGES, TEXTS, negatives=OTHERS),
    "some empty sets": lambda: set_similarity(HEADS, HEADS, image_lengths=[0] + [2] * 39),
    "a corpus with few right answers": lambda: itrloss.mine_hard_negatives(
        IMAGES, TEXTS, IDS, [0] + [99] * 39, 3
    ),
    "a bank of others": lambda: CSLS().fit(OTHERS, OTHERS).rerank(Similarity(IMAGES, TEXTS)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_other_right_input_is_taken_without_a_word(name):
    assert not said(RIGHT[name])


# -------------------------------------------------------------------------------- the command line


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Embeddings and scores of a test set, and of other pairs, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("test", 0), ("other", 1)):
        images, texts = embeddings(seed=seed)
        scores = torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(texts).T
        np.save(f"{name}_images.npy", images.numpy())
        np.save(f"{name}_texts.npy", texts.numpy())
        np.save(f"{name}_scores.npy", scores.numpy())
        np.savez(f"{name}.npz", v=images.numpy(), w=texts.numpy())
    os.symlink("test_scores.npy", "link.npy")
    os.link("test_scores.npy", "hard.npy")
    np.savez("again.npz", sims=np.load("test_scores.npy"))
    np.save("double.npy", np.load("test_scores.npy").astype(np.float64))
    np.save("copied_images.npy", np.load("test_images.npy"))
    return tmp_path


def run(capsys, *arguments):
    code = main([*arguments, "--methods", "fast"])
    out, err = capsys.readouterr()
    return code, out, err


EVAL = ("eval", "test_images.npy", "test_texts.npy")


@pytest.mark.parametrize(
    "arguments",
    [
        ("rerank", "test_scores.npy", "--val", "test_scores.npy"),
        ("rerank", "test_scores.npy", "--val", "link.npy"),
        ("rerank", "test_scores.npy", "--val", "hard.npy"),
        ("rerank", "test_scores.npy", "--val", "again.npz"),
        ("rerank", "test_scores.npy", "--val", "double.npy"),
        (*EVAL, "--val", "test_images.npy", "test_texts.npy"),
        (*EVAL, "--val", "copied_images.npy", "other_texts.npy"),
        ("rerank", "test_scores.npy", "--bank-images", "test_scores.npy"),
        ("rerank", "test_scores.npy", "--bank-texts", "again.npz"),
        (*EVAL, "--bank-images", "test_images.npy"),
    ],
)
def test_the_test_set_as_its_own_validation_or_bank_is_noticed(arguments, saved, capsys):
    code, out, err = run(capsys, *arguments)
    (line,) = err.splitlines()
    assert code == 0 and "RSUM" in out
    if "--val" in arguments:
        assert "--val: " in line and "pass held-out pairs" in line
    else:
        assert "of the test set, so that test queries see one another" in line


@pytest.mark.parametrize(
    "arguments",
    [
        EVAL,
        ("rerank", "test_scores.npy"),
        ("rerank", "test_scores.npy", "--val", "other_scores.npy"),
        ("rerank", "again.npz:sims"),
        (*EVAL, "--val", "other_images.npy", "other_texts.npy"),
        (*EVAL, "--bank-images", "other_images.npy", "--bank-texts", "other_texts.npy"),
        ("eval", "test.npz:v", "test.npz:w"),
        ("eval", "test.npz:v", "test.npz:w", "--bank-texts", "other.npz:w"),
        ("eval", "test.npz:v", "test.npz:w", "--val", "other.npz:v", "other.npz:w"),
    ],
)
def test_right_files_are_read_without_a_word(arguments, saved, capsys):
    code, out, err = run(capsys, *arguments)
    assert code == 0 and not err and "40 images, 200 texts (5 an image" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "test_images.npy", "test_images.npy"),
        ("eval", "test.npz:w", "test.npz:w"),
        ("eval", "link.npy", "hard.npy"),
        (*EVAL, "--val", "other_texts.npy", "other_texts.npy"),
    ],
)
def test_one_array_for_images_and_texts_is_refused(arguments, saved, capsys):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out
    assert "expected images and texts, got one array for both" in err and "FILE:NAME" in err


def test_copies_of_a_file_under_another_name_are_noticed_once(saved, capsys):
    arguments = ("eval", "test_images.npy", "copied_images.npy")
    assert main([*arguments, "--methods", "fast", "csls", "nnn"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "images, texts: both are the same embeddings" in line


def test_one_matrix_for_two_models_is_noticed(saved, capsys):
    arguments = ("compare", "test_scores.npy", "double.npy", "--samples", "50")
    assert main([*arguments]) == 0
    assert "double: it has the same ranks as test_scores" in capsys.readouterr().err
