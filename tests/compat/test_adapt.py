"""``compat.adapt``: any loss of the library in the trainers of VSE code bases."""

from __future__ import annotations

import pickle
from argparse import Namespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.answers import assert_same_step
from support.cases import sample
from support.losses_registry import select
from support.processes import run
from support.vse_trainers import CODE_BASES, B, D, Trainer, hinge_sum, smooth_chamfer, xattn_score

import itrloss
from itrloss import compat
from itrloss.compat import adapt

LOSSES = select(
    "dcl",
    "dcl entropy",
    "infonce learnable",
    "sigmoid",
    "triplet all",
    "hal mild",
    "supcon",
    "multi-similarity",
    "rince of the defaults",
)
MEMORY_LOSSES = select("uto mild", "mdcl")
UTO = MEMORY_LOSSES["uto mild"].make()


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    """Unit vectors that get a gradient."""
    x = sample(*shape, seed=seed, dtype=torch.float64)
    return F.normalize(x, dim=-1).requires_grad_()


# ----------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", CODE_BASES)
def test_every_loss_trains_in_every_code_base(name, loss):
    model = Trainer(name, LOSSES[loss].make())
    criterion = model.criterion
    twin = pickle.loads(pickle.dumps(criterion))
    assert f"code_base='{name}'" in repr(twin) == repr(criterion)
    values = [model.train_emb() for _ in range(6)]
    assert values[-1] < values[0]
    has_mining = loss == "triplet all"
    for on in (True, False):
        before = model.loss().item()
        criterion.max_violation = on
        assert criterion.max_violation == (on and has_mining)
        if not has_mining and name != "user":  # whose queues move on
            assert model.loss().item() == before
        model.train_emb()


def test_the_hardest_negatives_come_back_as_they_were():
    criterion = adapt(itrloss.TripletLoss(mining="batch-hard"), "vse_inf")
    assert criterion.max_violation
    criterion.max_violation_off()
    criterion.max_violation_off()
    assert criterion.loss.mining == "all"
    criterion.max_violation_on()
    assert criterion.loss.mining == "batch-hard"
    soft = adapt(itrloss.TripletLoss(temperature=0.1), "vse_inf")
    with pytest.raises(ValueError, match="expected None with mining"):
        soft.max_violation_off()
    assert soft.loss.mining == "hardest"


@pytest.mark.parametrize("loss", MEMORY_LOSSES)
@pytest.mark.parametrize("name", ["hal", "user"])
def test_losses_with_a_memory_train_where_there_is_one(name, loss):
    model = Trainer(name, MEMORY_LOSSES[loss].make())
    model.train_emb()  # without a bank in HAL
    model.load_memory_bank()
    first = model.loss().item()
    for _ in range(6):
        model.train_emb()
    assert model.loss().item() < first
    model.criterion.max_violation_on()


# --------------------------------------------------------------------------- what the loss is given


def test_infonce_is_clip4clips_cross_entropy_of_logits():
    cosines = unit(B, D) @ unit(B, D, seed=1).T
    logits = (30 * cosines).detach().requires_grad_()
    loss = itrloss.InfoNCELoss(1.0, directions="image-text")
    criterion = adapt(loss, "clip4clip")
    found = (criterion(logits) + criterion(logits.T)) / 2
    own = torch.arange(B)
    wanted = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    assert_same_step(found, wanted, (logits,))


def test_dive_has_as_many_texts_of_each_image():
    images = unit(B, 2, D, seed=3)
    texts = unit(5 * B, 2, D, seed=4)
    own = itrloss.TripletLoss(0.2, mining="all")
    value, parts = adapt(own, "dive", smooth_chamfer)(images, texts, None, None, None, None)
    assert parts == {}
    scores = smooth_chamfer(images.flatten(0, 1), texts.flatten(0, 1))
    ids = torch.arange(B)
    wanted = own(scores=scores, image_ids=ids, text_ids=ids.repeat_interleave(5))
    torch.testing.assert_close(value, wanted)


def test_a_score_function_replaces_cosines_and_is_trained():
    class Scores(torch.nn.Linear):
        def forward(self, im, s):
            return super().forward(im) @ s.T

    function = Scores(D, D).double()
    im = unit(B, D)
    s = unit(B, D, seed=1)
    own = itrloss.InfoNCELoss(directions="image-text")  # tells rows from columns
    criterion = adapt(own, "vsepp", function)
    wanted = own(scores=function(im, s))
    torch.testing.assert_close(criterion(im, s), wanted)
    assert {*function.parameters()} <= {*criterion.parameters()}


def test_sets_are_scored_by_their_best_pair_and_may_have_one_element():
    im = unit(B, 2, D)
    s = unit(B, 3, D, seed=1)
    own = itrloss.InfoNCELoss()
    criterion = adapt(own, "pvse")
    every = torch.einsum("ikd,jld->ijkl", im, s)
    loss, parts = criterion(im, s, None, None)
    torch.testing.assert_close(loss, own(scores=every.amax((2, 3))))
    assert parts.keys() == {"ranking_loss"}
    assert parts["ranking_loss"].equal(loss)
    assert not parts["ranking_loss"].requires_grad
    first = im[:, 0], s[:, 0]
    loss, _ = criterion(*first, None, None)
    torch.testing.assert_close(loss, own(*first))


@pytest.mark.parametrize(
    ("name", "texts", "added"),
    [("pvse", B, ["div_loss", "mmd_loss"]), ("dive", 5 * B, ["unif_loss", "mmd_loss"])],
)
def test_regularisers_are_those_of_the_original(name, texts, added):
    given = [unit(size, 2, D, seed=i) for i, size in enumerate((B, texts, B, texts))]
    options = CODE_BASES[name].options
    opt, function = options["opt"], options.get("score_function")
    without_options = adapt(itrloss.InfoNCELoss(), name, function)
    with_options = adapt(itrloss.InfoNCELoss(), name, function, opt)
    original = compat.PVSELoss(opt) if name == "pvse" else compat.DivELoss(2, 2, function, opt)
    bare, _ = without_options(*given)
    full, parts = with_options(*given)
    value, wanted = original(*given)
    of_ranking = ("ranking_loss", "t2i_loss", "i2t_loss")
    ranking = [part for key, part in wanted.items() if key in of_ranking]
    torch.testing.assert_close(full - bare, value - sum(ranking))
    assert [key for key in parts if key != "ranking_loss"] == added
    for key in added:
        assert parts[key].equal(wanted[key])


@pytest.mark.parametrize("size", [16, 4096])
def test_queues_are_those_of_the_objective_and_may_be_overwritten(size):
    loss = itrloss.MemoryDiversityContrastiveLoss()
    v, w, v_k, t_k = (unit(B, D, seed=i) for i in range(4))
    v_queue, t_queue = (unit(size, D, seed=i).detach().T.contiguous() for i in (5, 6))
    memory = itrloss.CoupledMemory(size, D).double()
    memory.enqueue(v_queue.T, t_queue.T)
    wanted = loss(v, w, v_k, t_k, memory)
    criterion = adapt(loss, "user")
    found = criterion.moco_forward(v, t_k, w, v_k, v_queue, t_queue)
    v_queue[:, :B] = 0
    t_queue[:, :B] = 0
    assert_same_step(found, wanted, (v, w))
    assert criterion(v, w).item() == 0
    # and add nothing to a loss without a memory
    of_batch = adapt(itrloss.InfoNCELoss(), "user")
    assert of_batch.moco_forward(v, t_k, w, v_k, v_queue, t_queue).item() == 0


def test_entries_of_the_batch_in_a_bank_are_no_negatives():
    im, s, images, texts = (unit(n, D, seed=i) for i, n in enumerate((4, 4, 6, 6)))
    own = (0, 1, 2, 3)
    with_own = [0, 1, 2, 3, 4, 5]
    with_others = [9, 8, 7, 6, 4, 5]
    criterion = adapt(itrloss.MemoryDiversityContrastiveLoss(), "hal")
    value = criterion(im, s, images, texts, with_own, own)
    # as after an epoch in which nothing changed
    known = torch.cat([im, images[4:]]).detach(), torch.cat([s, texts[4:]]).detach()
    changed = criterion(im, s, *known, with_own, own)
    foreign = criterion(im, s, *known, with_others, own)
    assert foreign > changed
    assert value != changed
    without_a_bank = criterion(im, s, None, None, None, own)
    assert without_a_bank.item() == 0
    loss = itrloss.MemoryInfoNCELoss()  # of the batch with its keys, too
    memory = itrloss.CoupledMemory(1, D, dtype=im.dtype)
    torch.testing.assert_close(adapt(loss, "hal")(im, s), loss(im, s, im, s, memory))


# -------------------------------------------------------------------------- parameters, checkpoints


SETTINGS = Namespace(margin=0.2, max_violation=False, mask_repeat=False, num_embeds=2)
SWITCHED = {
    "VSE++": compat.VSEPPLoss,
    "VSE-infinity": compat.VSEInfinityLoss,
    "SGRAF": compat.SGRAFLoss,
    "CHAN": compat.CHANLoss,
    "HREM": lambda: compat.HREMLoss(SETTINGS),
    "PVSE": lambda: compat.PVSELoss(SETTINGS),
    "any loss": lambda: adapt(itrloss.TripletLoss(mining="all"), "vsepp"),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_a_state_has_which_negatives_count(name):
    criterion = SWITCHED[name]()
    criterion.max_violation_on()
    state = criterion.state_dict()
    assert all(isinstance(entry, torch.Tensor) for entry in state.values())
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), criterion])
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)  # a copy
    for _ in range(2):
        average.update_parameters(model)
    resumed = SWITCHED[name]()
    assert not resumed.max_violation
    resumed.load_state_dict(state)
    assert resumed.max_violation
    resumed.max_violation_off()
    resumed.load_state_dict({})  # of a version that did not store it
    assert not resumed.max_violation


def test_a_criterion_is_one_number():
    criterion = adapt(itrloss.TripletLoss(), "vsepp")
    criterion.loss.reduction = "none"
    with pytest.raises(ValueError, match="reduction"):
        criterion(unit(B, D), unit(B, D, seed=1))


def test_losses_inside_of_others_are_switched():
    loss = itrloss.Matryoshka(itrloss.TripletLoss(), [3, D])
    criterion = adapt(loss, "vse_inf")
    batch = unit(B, D), unit(B, D, seed=1)
    hardest = criterion(*batch)
    criterion.max_violation_off()
    assert criterion(*batch) > hardest
    assert criterion.loss.loss.mining == "all"


# ------------------------------------------------------------------------------------------- errors

NCE = itrloss.InfoNCELoss()
WRONG = {
    "code_base: expected 'vsepp'": lambda: adapt(NCE, "vse"),
    "score_function: expected one": lambda: adapt(NCE, "scan"),
    "score_function: expected a function": lambda: adapt(NCE, "scan", "t2i"),
    "score_function: expected None for 'chan'": lambda: adapt(NCE, "chan", xattn_score),
    "opt: expected None for 'chan'": lambda: adapt(NCE, "chan", opt=Namespace()),
    "loss: expected one of images and texts alone": lambda: adapt(
        itrloss.DistillationLoss(), "vsepp"
    ),
    "loss: expected one of images and texts": lambda: adapt(torch.nn.CrossEntropyLoss(), "vsepp"),
    "loss: expected one that takes scores": lambda: adapt(itrloss.Matryoshka(NCE, [2]), "pvse"),
    "loss: expected one without a memory": lambda: adapt(UTO, "vsepp"),
    "loss: expected reduction": lambda: adapt(itrloss.InfoNCELoss(reduction="none"), "vsepp"),
    "loss: expected reduction 'mean'": lambda: adapt(
        itrloss.UnifiedTrainingObjective(reduction="none"), "user"
    ),
    "indices: expected an integer tensor": lambda: adapt(UTO, "hal")(*[unit(2, D)] * 4, [0, 1]),
    "mb_ind: expected": lambda: adapt(UTO, "hal")(*[unit(2, D)] * 4, [0], [0, 1]),
    "takes scores": lambda: adapt(itrloss.Matryoshka(NCE, [2]), "sgraf"),
    "txt_embs: expected as many texts": lambda: adapt(NCE, "dive")(unit(2, D), unit(3, D)),
    "scores: expected shape": lambda: adapt(NCE, "chan")(unit(B)),
    "10 images and 11 texts": lambda: adapt(NCE, "clip4clip")(unit(B, B + 1)),
    r"ScoresCriterion.forward\(\) takes": lambda: adapt(NCE, "sgraf")(*range(7)),
    "VSECriterion.* takes 3 positional arguments": lambda: adapt(NCE, "vsepp")(1, 2, 3),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_the_argument(message):
    with pytest.raises((TypeError, ValueError), match=message):
        WRONG[message]()


NUMBERS = [3, 3, 0, 200, 200, 1]


@pytest.mark.parametrize(
    "ids",
    [torch.tensor(NUMBERS), NUMBERS, np.array(NUMBERS), ["x", "x", "", "yy", "yy", "ß"]],
    ids=["tensor", "list", "array", "strings"],
)
def test_hrem_takes_scores_with_ids_that_mask(ids):
    """This is the call of LAPS."""
    scores = unit(6, 6)
    sets = (torch.randn(6, 3, 4), torch.randn(6, 5, 4))
    numbers = torch.tensor(NUMBERS)
    wanted = hinge_sum(scores, 0.2, False, numbers[:, None] == numbers)
    criterion = compat.HREMLoss(opt=Namespace(mask_repeat=1, margin=0.2))
    torch.testing.assert_close(criterion(*sets, ids, scores), wanted)
    adapted = adapt(NCE, "hrem")
    wanted = NCE(scores=scores, image_ids=ids, text_ids=ids)
    torch.testing.assert_close(adapted(*sets, ids, scores), wanted)
    torch.testing.assert_close(adapted(scores, scores, ids), NCE(scores, scores, ids, ids))


def test_a_margin_is_that_of_the_loss_inside():
    adapted = adapt(itrloss.Matryoshka(itrloss.TripletLoss(0.2), (2, D)), "vsepp")
    adapted.margin = 1.0
    assert adapted.margin == adapted.loss.loss.margin == 1.0
    with pytest.raises(AttributeError, match="margin: expected a loss that has one, got SupCon"):
        adapt(itrloss.SupConLoss(), "vsepp").margin = 1.0


def queues_of_each(rank: int) -> torch.Tensor:
    """How USER's loss differs from our own where each process has a queue of its own."""
    v = unit(B, D)
    w = unit(B, D).flip(0)
    queue = unit(20, D).roll(rank, 1).T
    memory = itrloss.CoupledMemory(20, D, dtype=v.dtype)
    memory.enqueue_alone(queue.T, queue.T)
    loss = itrloss.UnifiedTrainingObjective()
    adapted = adapt(loss, "user")
    found = adapted.moco_forward(v, w, w, v, queue, queue)
    return found - loss(v, w, v, w, memory)


@pytest.mark.slow
def test_queues_stay_in_their_process(tmp_path):
    for difference in run(queues_of_each, tmp_path):
        assert difference.abs() < 1e-6
