"""Input that is probably not what was meant: one warning says so, and right input has none."""

from __future__ import annotations

import math
import os
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.cases import sample

import itrloss
from itrloss import NO_ID, Similarity, SuspiciousInputWarning, compat
from itrloss.cli import main
from itrloss.functional import set_similarity
from itrloss.losses import base
from itrloss.metrics import retrieval_metrics, retrieval_results
from itrloss.rerank import CSLS


def embeddings(captions: int = 1, n: int = 40, seed: int = 0):
    """Images (n, 16) and texts (captions * n, 16), one image's behind the other."""
    images = sample(n, 16, seed=seed)
    return images, images.repeat_interleave(captions, 0) + 0.5 * sample(n * captions, 16, seed=9)


def said(function, *args, **kwargs):
    """Return the texts of the library's warnings of a call, which point here if Python can."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    ours = [x for x in caught if issubclass(x.category, SuspiciousInputWarning)]
    assert sys.version_info < (3, 12) or all(x.filename == __file__ for x in ours)
    return [str(x.message) for x in ours]


def trained(loss, *args, **kwargs):
    """Call a loss three times, as a trainer does."""
    for _ in range(3):
        loss(*args, **kwargs)


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
IMAGES, TEXTS = embeddings()
UNIT_IMAGES, UNIT_TEXTS = F.normalize(IMAGES), F.normalize(TEXTS)
COSINES = UNIT_IMAGES @ UNIT_TEXTS.T
IDS = torch.arange(40)
PADDED = torch.cat([IDS[:39], torch.tensor([NO_ID])])
FIVE_IMAGES, FIVE_TEXTS = embeddings(5)
FIVE_IDS = IDS, torch.arange(200) // 5


@pytest.mark.parametrize("name", LOSSES)
def test_logits_and_ids_that_leave_nothing_to_learn_are_noticed(name):
    make = LOSSES[name]
    for criterion in (make(), compat.adapt(make(), "sgraf")):
        (message,) = said(trained, criterion, scores=14.3 * COSINES)
        assert "scores above 5, as of logits" in message and "Pass cosines" in message
    (message,) = said(trained, make(), Similarity.from_scores(100 * COSINES))
    assert "scores above 5" in message
    loss = make()
    loss.reduction = "none"
    for given in ({"text_ids": IDS + 40}, {"image_ids": IDS, "text_ids": -1 - IDS}):
        (message,) = said(trained, make(), IMAGES, TEXTS, **given)
        assert "no image has a matching text" in message and "leave out both" in message
        (message,) = said(trained, loss, scores=COSINES, **given)
        assert "no image has a matching text" in message
        loss = make()


@pytest.mark.parametrize("name", LOSSES)
def test_right_batches_are_trained_on_without_a_word(name):
    make = LOSSES[name]
    for given in (
        {"scores": COSINES},
        {"scores": 1.6 * COSINES, "image_ids": IDS, "text_ids": IDS},
        {"images": TEXTS, "texts": TEXTS.roll(1, 1)},
        {"images": IMAGES, "texts": TEXTS, "image_ids": PADDED, "text_ids": PADDED},
    ):
        assert not said(trained, make(), **given)
    assert not said(trained, compat.adapt(make(), "vse_inf"), 30 * IMAGES, 20 * TEXTS)
    loss = make()
    assert not said(trained, loss, FIVE_IMAGES, FIVE_TEXTS, *FIVE_IDS)
    assert not said(loss, IMAGES[:1], TEXTS[:1])  # the last batch of an epoch


def test_nothing_is_read_on_other_devices_or_by_the_compiler(monkeypatch):
    """A read of a tensor on the meta device is an error, as it would be a wait on a GPU."""
    seen = []
    monkeypatch.setattr(base, "warn_of_ids", lambda *_: seen.append("ids"))
    logits = 100 * COSINES
    loss = itrloss.InfoNCELoss(engine="dense")
    loss(scores=logits.to("meta"))
    assert not said(torch.compile(loss, backend="eager", fullgraph=True), scores=logits)
    assert not seen
    loss(scores=logits)
    loss(scores=logits)
    assert seen == ["ids"]


def steps(loss, number, batches=0):
    """Train with a memory that takes in the first batches."""
    memory = itrloss.CoupledMemory(64, 16)
    for step in range(number):
        loss(IMAGES, TEXTS, IMAGES, TEXTS, memory)
        if step < batches:
            memory.enqueue(IMAGES, TEXTS)


MEMORY_LOSSES = {
    "M-DCL": lambda: itrloss.MemoryDiversityContrastiveLoss(positive_weight=1),
    "UTO": itrloss.UnifiedTrainingObjective,
    "InfoNCE": itrloss.MemoryInfoNCELoss,
}


@pytest.mark.parametrize("name", MEMORY_LOSSES)
def test_a_memory_that_stays_empty_is_noticed(name):
    loss = MEMORY_LOSSES[name]()
    assert not said(steps, loss, 99)
    (message,) = said(steps, loss, 9)
    assert message.startswith(f"{type(loss).__name__}: nothing was put into the memory before 100")
    assert "memory.enqueue(image_keys, text_keys, ids)" in message
    assert not said(steps, MEMORY_LOSSES[name](), 101, batches=1)
    assert not said(steps, MEMORY_LOSSES[name]().eval(), 101)


# ---------------------------------------------------------------------------- one call, one warning

SAME = 0 * IDS
HEADS = torch.stack([IMAGES, IMAGES.flip(1)], 1)
SQUARE = sample(40, 40)
MULTI_HOT = torch.tensor([[0, 1, 1], [1, 0, 1]] * 20)
LONG = 10 * IMAGES, 10 * TEXTS
OTHERS = sample(9, 16, seed=3)
UNIT = F.normalize(sample(16, 16, seed=7))
COPIES = IMAGES.repeat_interleave(5, 0)
SHUFFLED = torch.randperm(200, generator=torch.Generator().manual_seed(7))
FIVE_COSINES = F.normalize(COPIES) @ F.normalize(FIVE_TEXTS).T


def infonce(*args, **options):
    return lambda: itrloss.InfoNCELoss(**options)(*args)


def evaluated(*args: Any):
    return lambda: retrieval_metrics(*args)


def evaluated_embeddings(*args: Any):
    return lambda: retrieval_metrics(Similarity(*args))


def noisy(x, noise):
    return x + noise * sample(*x.shape, seed=6)


def with_log_scale(loss, value, *more):
    """Return a call of a loss with the parameter of a model."""
    loss.log_scale = torch.nn.Parameter(torch.tensor(value))
    return lambda: loss(IMAGES, TEXTS, *more)


def of_memory(text_ids):
    """Return a step with a memory, which has negatives but no positives."""
    memory = itrloss.CoupledMemory(64, 16)
    memory.enqueue(IMAGES, TEXTS, IDS)
    loss = itrloss.MemoryDiversityContrastiveLoss(positive_weight=1)
    return lambda: trained(loss, IMAGES, TEXTS, IMAGES, TEXTS, memory, IDS + 50, text_ids)


def of_form(kind, form, value, as_parameter):
    """Return a call of a loss with a temperature in one of its forms."""
    given = torch.nn.Parameter(torch.tensor(value)) if as_parameter else value
    loss = kind(**{form: given})
    return lambda: loss(IMAGES, TEXTS)


LOSSES_OF_FORMS = itrloss.InfoNCELoss, itrloss.SupConLoss, itrloss.SigmoidLoss
# A temperature, its scale or its logarithm in another's place; what it says instead.
OTHER_FORMS = [
    (
        (kind, form, value, as_parameter),
        f"{form}: {value:.4g} is a temperature of {temperature}, which is none for cosines; did",
    )
    for kind in LOSSES_OF_FORMS
    for as_parameter in (True, False)
    for form, value, temperature in (
        ("temperature", 14.0, 14),
        ("temperature", 2.659, 2.659),
        ("scale", 0.07, 14.29),
        ("log_scale", 0.07, 0.9324),
        ("log_scale", -2.659, 14.28),
    )
]
OTHER_FORMS += [
    ((itrloss.InfoNCELoss, form, -2.659, True), "did you mean log_scale=2.659?")
    for form in ("temperature", "scale")
]
OTHER_FORMS += [
    ((itrloss.InfoNCELoss, "temperature", 0.0, True), "0 is a temperature of 0, which"),
    ((itrloss.InfoNCELoss, "log_scale", -800.0, True), "-800 is a temperature of 1.014e+304"),
    ((itrloss.InfoNCELoss, "log_scale", 800.0, True), "800 is a temperature of 9.86e-305"),
    ((itrloss.InfoNCELoss, "temperature", 2.001, True), "2.001 is a temperature of 2.001"),
    ((itrloss.InfoNCELoss, "scale", 0.499, True), "0.499 is a temperature of 2.004"),
    ((itrloss.InfoNCELoss, "log_scale", 0.499, True), "did you mean temperature=0.499?"),
    ((itrloss.InfoNCELoss, "log_scale", 9.22, True), "did you mean scale=9.22 or"),
]
# The last that may be meant.
USUAL_FORMS = [
    ("temperature", 2.0),
    ("scale", 0.5),
    ("log_scale", 0.5),
    ("log_scale", math.log(1e4)),
    ("log_scale", -math.log(2)),
]
NO_MATCH = "no image has a matching text"
NO_NEGATIVES = "every image matches every text, so that the loss is 0"
LOGITS = "scores above 5, as of logits"
UNIT_ROWS = "each row has length 1, as embeddings have"
ONE_SIDE = "images, texts: both are the same embeddings"
LEARNT = {"learnable": True}
SUSPICIOUS: list[tuple[Any, str]] = [
    # losses
    (infonce(IMAGES, TEXTS, SAME, SAME), NO_NEGATIVES),
    (infonce(IMAGES, TEXTS, SAME, SAME, reduction="none"), NO_NEGATIVES),
    (infonce(IMAGES[:1], TEXTS[:3], SAME[:1], SAME[:3], reduction="sum"), NO_NEGATIVES),
    (infonce(IMAGES[:5], TEXTS[:1], SAME[:5], SAME[:1]), NO_NEGATIVES),
    (infonce(IMAGES[:1], TEXTS[:1]), NO_NEGATIVES),
    (infonce(Similarity(IMAGES, TEXTS, SAME, SAME)), NO_NEGATIVES),
    (infonce(IMAGES[:2], TEXTS[:2], *[torch.tensor([0, NO_ID])] * 2), NO_NEGATIVES),
    (infonce(IMAGES, TEXTS, MULTI_HOT, MULTI_HOT), "multi-hot labels go in as matches="),
    (of_memory(IDS + 500), f"MemoryDiversityContrastiveLoss: {NO_MATCH}"),
    (lambda: itrloss.VarianceAwareLoss()(HEADS, TEXTS, IDS, IDS + 1000), NO_MATCH),
    (lambda: itrloss.DVSEObjective()(HEADS, TEXTS, HEADS, None, IDS, IDS + 1000), NO_MATCH),
    *[(of_form(*case), text) for case, text in OTHER_FORMS],
    (infonce(*LONG, normalize=False), LOGITS),
    (lambda: compat.VSEPPLoss(0.2)(*LONG), LOGITS),
    (lambda: compat.SGRAFLoss(0.2)(100 * COSINES), LOGITS),
    (lambda: compat.CHANLoss()(100 * COSINES), LOGITS),
    (lambda: itrloss.InfoNCELoss()(scores=6 * COSINES - 6), LOGITS),  # as of log-probabilities
    (
        with_log_scale(itrloss.InfoNCELoss(**LEARNT), 14.3),
        "log_scale: 14.3 is a temperature of 6.16e-07",
    ),
    (with_log_scale(itrloss.InfoNCELoss(**LEARNT, max_scale=100), 100.0), "log_scale=4.605"),
    (
        with_log_scale(
            itrloss.MemoryInfoNCELoss(**LEARNT), 14.3, *LONG, itrloss.CoupledMemory(9, 16)
        ),
        "or log_scale=2.66",
    ),
    (with_log_scale(itrloss.SigmoidLoss(), 14.3), "or log_scale=2.66"),
    (lambda: itrloss.InfoNCELoss()(scores=UNIT), f"scores: {UNIT_ROWS}"),
    (lambda: compat.SGRAFLoss(0.2)(UNIT), UNIT_ROWS),
    (lambda: itrloss.DistillationLoss()(IMAGES, TEXTS, 100 * COSINES), "teacher: scores above 5"),
    (lambda: itrloss.DistillationLoss()(UNIT, UNIT.flip(1), UNIT), UNIT_ROWS),
    (
        lambda: itrloss.InfoNCELoss(margin=0.1)(IMAGES, TEXTS, guide=100 * COSINES),
        "guide: scores above 5",
    ),
    (infonce(SQUARE, SQUARE.T), "images, texts: a matrix and its transpose"),
    (infonce(IMAGES, IMAGES), "images, texts: both are the same embeddings"),
    (infonce(IMAGES, IMAGES.clone()), "images, texts: both are the same embeddings"),
    (lambda: itrloss.SupConLoss()(IMAGES, IMAGES, IDS, IDS), "loss(embeddings, labels=labels"),
    # sets and mining
    (
        lambda: set_similarity(HEADS, HEADS, image_mask=torch.zeros(40, 2).bool()),
        "all sets are empty",
    ),
    (lambda: itrloss.mine_hard_negatives(IMAGES, TEXTS, IDS, IDS + 99, 3), "no id in common"),
    (lambda: itrloss.mine_hard_negatives(IMAGES, TEXTS, SAME, SAME, 3), "there are no negatives"),
    # test sets
    (evaluated(UNIT), f"scores: {UNIT_ROWS}"),
    (evaluated(F.normalize(sample(64, 320)).half()), f"scores: {UNIT_ROWS}"),
    (evaluated(F.normalize(sample(64, 192)).bfloat16()), f"scores: {UNIT_ROWS}"),
    (evaluated(F.normalize(sample(300, 300).double())), f"scores: {UNIT_ROWS}"),
    (evaluated_embeddings(FIVE_TEXTS, FIVE_TEXTS), ONE_SIDE),
    (evaluated_embeddings(IMAGES, IMAGES.clone(), IDS, IDS), ONE_SIDE),
    (evaluated_embeddings(IMAGES, COPIES, *FIVE_IDS), ONE_SIDE),
    (evaluated(torch.rand(3, 63)), "without them, 3 images and 63 texts are 21 consecutive texts"),
    (evaluated(torch.rand(5, 500)), "100 consecutive texts an image, more than is usual"),
    (evaluated(FIVE_COSINES), "images: every 5 consecutive ones are the same"),
    (
        evaluated_embeddings(COPIES[SHUFFLED], FIVE_TEXTS, FIVE_IDS[1][SHUFFLED], FIVE_IDS[1]),
        "images: 160 of 200 rows are copies",
    ),
    (evaluated(FIVE_COSINES, FIVE_IDS[1], FIVE_IDS[1]), "images: 160 of 200 rows are copies"),
    # banks
    (
        lambda: CSLS().fit(IMAGES, OTHERS).topk(Similarity(IMAGES, TEXTS), 3),
        "the bank has images of the test set",
    ),
    (
        lambda: CSLS().fit(texts=COSINES).rerank(COSINES),
        "texts: the bank has texts of the test set",
    ),
]


@pytest.mark.parametrize(("call", "name"), SUSPICIOUS)
def test_suspicious_input_is_noticed_once(call, name):
    """The name is part of the warning."""
    (text,) = said(call)
    assert name in text


FAR_AWAY = torch.rand(4, 4)  # whose last image and text do not exist
FAR_AWAY[3] = FAR_AWAY[:, 3] = -1e9
WITHOUT_LAST = torch.tensor([0, 1, 2, NO_ID])
A_FEW_COPIES = IMAGES[torch.where(IDS != 5, torch.arange(40), 7)]
WITHOUT_ONE = COSINES.clone()
WITHOUT_ONE[:, 3] = -1e9  # a candidate that is left out of the ranking of all
RIGHT: list[Any] = [
    # losses
    of_memory(IDS + 50),
    infonce(IMAGES, TEXTS, temperature=1.0),
    infonce(IMAGES, TEXTS, temperature=20, normalize=False),  # no cosines
    *[of_form(itrloss.InfoNCELoss, *form, False) for form in USUAL_FORMS],
    lambda: itrloss.SigmoidLoss()(IMAGES, TEXTS, SAME, SAME),  # learns from positives alone
    lambda: itrloss.InfoNCELoss()(IMAGES[:1], TEXTS[:1], negatives=OTHERS),
    lambda: itrloss.InfoNCELoss()(scores=FAR_AWAY, image_ids=WITHOUT_LAST, text_ids=WITHOUT_LAST),
    *[
        lambda loss=loss: loss(scores=100 * COSINES)  # whose options are for logits
        for loss in (
            itrloss.InfoNCELoss(1.0, learnable=True),
            itrloss.TripletLoss(20.0),
            itrloss.SigmoidLoss(1.0, 0.0),
            itrloss.SupConLoss(1.0),
        )
    ],
    *[
        of_form(kind, form, value, as_parameter)
        for kind in LOSSES_OF_FORMS
        for as_parameter in (True, False)
        for form, value in (
            ("temperature", 0.07),
            ("temperature", 1.0),
            ("scale", 14.3),
            ("scale", 1.0),
            ("log_scale", 2.659),
            ("log_scale", 0.0),
        )
    ],
    lambda: itrloss.InfoNCELoss(0.8, **LEARNT)(IMAGES, TEXTS),
    lambda: itrloss.InfoNCELoss(14.0)(scores=100 * COSINES),
    with_log_scale(itrloss.InfoNCELoss(**LEARNT), 6.9),
    with_log_scale(itrloss.InfoNCELoss(**LEARNT, max_scale=100), 4.61),
    lambda: itrloss.VarianceAwareLoss()(HEADS, TEXTS, IDS, IDS),
    infonce(UNIT, UNIT.flip(0), normalize=False),
    lambda: itrloss.InfoNCELoss()(IMAGES, labels=IDS // 2),
    lambda: itrloss.InfoNCELoss()(IMAGES, IMAGES, matches=(IDS[:, None] // 2 == IDS // 2)),
    lambda: itrloss.InfoNCELoss()(SQUARE + SQUARE.T, labels=IDS // 2),
    lambda: itrloss.InfoNCELoss()(IMAGES, IMAGES, labels=IDS),  # without dropout
    lambda: itrloss.InfoNCELoss(margin=0.1)(IMAGES, labels=IDS // 2, guide=(TEXTS, TEXTS)),
    lambda: compat.VSEPPLoss(20)(*LONG),
    lambda: compat.VSEPPLoss(0.05, "order")(IMAGES.abs() / 4, TEXTS.abs() / 4),
    lambda: compat.SGRAFLoss(0.2)(COSINES),
    lambda: itrloss.DistillationLoss()(IMAGES, TEXTS, COSINES),
    lambda: itrloss.DistillationLoss(teacher_temperature=1.0)(IMAGES, TEXTS, 100 * COSINES),
    # sets and mining
    lambda: set_similarity(HEADS, HEADS, image_lengths=[0] + [2] * 39),
    lambda: itrloss.mine_hard_negatives(IMAGES, TEXTS, IDS, [0] + [99] * 39, 3),
    # test sets
    evaluated(torch.rand(5, 500), torch.arange(5), torch.arange(500) // 100),
    evaluated(torch.rand(1, 500)),
    evaluated(torch.eye(40)),
    evaluated_embeddings(noisy(COPIES, 0.1), FIVE_TEXTS),
    evaluated_embeddings(200 + IMAGES, 200 + TEXTS),  # with cosines above 0.9999
    evaluated(noisy(COPIES, 1e-3) @ FIVE_TEXTS.T, torch.arange(200), torch.arange(200)),
    evaluated_embeddings(noisy(COPIES, 0.1), FIVE_TEXTS, FIVE_IDS[1], FIVE_IDS[1]),
    evaluated_embeddings(A_FEW_COPIES, TEXTS),
    evaluated(WITHOUT_ONE),
    # banks
    lambda: CSLS().fit(OTHERS, OTHERS).rerank(Similarity(IMAGES, TEXTS)),
]


def test_right_input_is_taken_without_a_word():
    for number, call in enumerate(RIGHT):
        assert not said(call), number


@pytest.mark.parametrize("captions", [1, 5, 20])
def test_right_data_is_evaluated_without_a_word(captions):
    images, texts = embeddings(captions)
    ids = IDS, torch.arange(len(texts)) // captions
    sim = Similarity(images, texts, *ids)
    scores = sim.scores()
    for given in (sim, scores, (scores, scores * 2)):
        assert not said(retrieval_metrics, given)
    assert not said(retrieval_metrics, scores, *ids)
    assert not said(retrieval_metrics, Similarity(images.bfloat16(), texts.bfloat16(), *ids))
    assert not said(retrieval_results, sim, folds=4)


def test_the_filters_of_python_apply():
    many = torch.rand(5, 500)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SuspiciousInputWarning)
        with pytest.raises(SuspiciousInputWarning, match="500 texts"):
            retrieval_metrics(many)
    for action, number in (("default", 1), ("ignore", 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action, SuspiciousInputWarning)
            for _ in range(5):
                retrieval_metrics(many)
        assert len(caught) == number


@pytest.mark.parametrize(("trained", "form"), [(1.009, "temperature"), (1.011, "log_scale")])
def test_a_trained_parameter_is_named_in_its_own_form(trained: float, form: str):
    loss = itrloss.InfoNCELoss(temperature=14.0, learnable=True)
    with torch.no_grad():
        loss.log_scale.mul_(trained)
    (text,) = said(lambda: loss(IMAGES, TEXTS))
    assert text.startswith(f"{form}: ")


@pytest.mark.parametrize(("trained", "number"), [(0.9e-6, 0), (1.1e-6, 1)])
def test_a_parameter_of_about_0_is_as_passed(trained: float, number: int):
    loss = itrloss.InfoNCELoss(temperature=1.0, learnable=True)
    with torch.no_grad():
        loss.log_scale.fill_(trained)
    assert len(said(lambda: loss(IMAGES, TEXTS))) == number


# -------------------------------------------------------------------------------- the command line


@pytest.fixture
def _saved(tmp_path, monkeypatch):
    """Embeddings and scores of a test set, and of other pairs, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("test", 0), ("other", 1)):
        images, texts = embeddings(5, seed=seed)
        np.save(f"{name}_images.npy", images.numpy())
        np.save(f"{name}_texts.npy", texts.numpy())
        np.save(f"{name}_scores.npy", (F.normalize(images) @ F.normalize(texts).T).numpy())
        np.savez(f"{name}.npz", v=images.numpy(), w=texts.numpy())
    os.symlink("test_scores.npy", "link.npy")
    os.link("test_scores.npy", "hard.npy")
    np.savez("again.npz", sims=np.load("test_scores.npy"))
    np.save("double.npy", np.load("test_scores.npy").astype(np.float64))
    np.save("copied_images.npy", np.load("test_images.npy"))


EVAL = "eval test_images.npy test_texts.npy"
ITSELF = "expected held-out pairs, got images or texts of the test set"
IN_BANK = "of the test set, so that test queries see one another"
ONE_ARRAY = "expected images and texts, got one array for both"
# Commands, and what is said once; "" for nothing.
COMMANDS = [
    ("rerank test_scores.npy --val test_scores.npy", ITSELF),
    ("rerank test_scores.npy --val link.npy", ITSELF),
    ("rerank test_scores.npy --val hard.npy", ITSELF),
    ("rerank test_scores.npy --val again.npz", ITSELF),
    ("rerank test_scores.npy --val double.npy", ITSELF),
    (f"{EVAL} --val test_images.npy test_texts.npy", ITSELF),
    (f"{EVAL} --val copied_images.npy other_texts.npy", ITSELF),
    ("rerank test_scores.npy --bank-images test_scores.npy", IN_BANK),
    ("rerank test_scores.npy --bank-texts again.npz", IN_BANK),
    (f"{EVAL} --bank-images test_images.npy", IN_BANK),
    ("eval test_images.npy copied_images.npy", ONE_SIDE),
    (EVAL, ""),
    ("rerank test_scores.npy --val other_scores.npy", ""),
    ("rerank again.npz:sims", ""),
    (f"{EVAL} --val other_images.npy other_texts.npy", ""),
    (f"{EVAL} --bank-images other_images.npy --bank-texts other_texts.npy", ""),
    ("eval test.npz:v test.npz:w", ""),
    ("eval test.npz:v test.npz:w --bank-texts other.npz:w", ""),
    ("eval test.npz:v test.npz:w --val other.npz:v other.npz:w", ""),
    ("eval test_images.npy test_images.npy", ONE_ARRAY),
    ("eval test.npz:w test.npz:w", ONE_ARRAY),
    ("eval link.npy hard.npy", ONE_SIDE),
    (f"{EVAL} --val other_texts.npy other_texts.npy", ONE_ARRAY),
]


@pytest.mark.usefixtures("_saved")
@pytest.mark.parametrize(("command", "name"), COMMANDS)
def test_a_command_says_what_is_suspicious(command, name, capsys):
    more = ["--samples", "50"] if command.startswith("compare") else ["--methods", "fast,csls"]
    code = main([*command.split(), *more])
    out, err = capsys.readouterr()
    if name == ONE_ARRAY:
        assert code == 2 and not out and name in err and "FILE:NAME" in err
        return
    if name == ITSELF:
        assert code == 2 and "RSUM" not in out and name in err
        return
    assert code == 0 and "RSUM" in out
    assert name in err and len(err.splitlines()) == bool(name)
