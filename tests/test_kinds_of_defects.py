"""Cases of kinds of defects that were found before, thought of from the kind alone.

They are where a young feature meets an old assumption: a relation that is no plain id, padding in a
count, a parameter that is not plain, input by another way, a fault in one process alone, and the
cost of sets of labels.
"""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import sparse
from support import oracle, oracle_embedders, oracle_metrics, oracle_more
from support.cases import sample
from support.processes import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import itrloss
from itrloss import NO_ID, Similarity, functional
from itrloss.metrics import Judgements, retrieval_metrics
from itrloss.related import Related

Outcome = tuple[Any, Any]  # what is computed, and what it should be
N, M, D = 7, 10, 8
IMAGE_IDS = torch.tensor([0, 1, 2, 3, 4, 0, 5])
TEXT_IDS = torch.tensor([0, 1, 2, 3, 4, 5, 1, 2, 8, 0])
IDS = IMAGE_IDS, TEXT_IDS


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return sample(*shape, seed=seed, dtype=torch.float64)


IMAGES = numbers(N, D)
TEXTS = numbers(M, D, seed=1)

# ------------------------------------------------------------- 1: relations that are no plain ids

# The same pairs by sets, whose other labels are on one side alone.
SETS = (
    torch.stack([IMAGE_IDS, IMAGE_IDS + 100], 1),
    torch.stack([torch.full((M,), NO_ID), TEXT_IDS + 200, TEXT_IDS], 1),
)
MATCHES = torch.tensor([[float(a == b) for b in TEXT_IDS] for a in IMAGE_IDS]).double()


def distributions() -> Outcome:
    logs = numbers(N, D, seed=2), numbers(M, D, seed=3)
    loss = itrloss.PCMEPlusPlusLoss(pseudo_weight=0.0, vib_weight=0.0, normalize=False)
    pairs = {}
    for i in range(N):
        for j in range(M):
            distance = (IMAGES[i] - TEXTS[j]).square().sum()
            distance = distance + logs[0][i].exp().sum() + logs[1][j].exp().sum()
            sign = 1 if IMAGE_IDS[i] == TEXT_IDS[j] else -1
            pairs[i, j] = math.log1p(math.exp(min(700.0, float(sign * 5 * (distance - 1)))))
    total = math.fsum(pairs.values())
    return loss.double()(IMAGES, TEXTS, *logs, *SETS), total / M / N * 2


def heads() -> Outcome:
    images = numbers(N, 3, D, seed=2)
    wanted = oracle_more.variance_aware(images.numpy(), TEXTS.numpy(), *IDS)
    return itrloss.VarianceAwareLoss()(images, TEXTS, *SETS), wanted


def memory_and_sets_on_one_side() -> Outcome:
    memory = itrloss.CoupledMemory(9, D, dtype=torch.float64)
    memory.enqueue(numbers(9, D, seed=4), numbers(9, D, seed=5), torch.arange(9))
    keys = numbers(N, D, seed=2), numbers(M, D, seed=3)
    loss = itrloss.MemoryInfoNCELoss(0.2, distillation=0.4)
    banks = memory.images.numpy(), memory.texts.numpy()
    given = [x.numpy() for x in (IMAGES, TEXTS, *keys)]
    options = {"temperature": 0.2, "distillation": 0.4}
    wanted = oracle_more.memory_info_nce(*given, *banks, *IDS, memory.ids, **options)
    return loss(IMAGES, TEXTS, *keys, memory, SETS[0], TEXT_IDS), wanted


def prefixes() -> Outcome:
    found = itrloss.Matryoshka(itrloss.InfoNCELoss(0.2), (3, D))(IMAGES, TEXTS, matches=MATCHES)
    parts = []
    for d in (3, D):
        scores = oracle.cosine(IMAGES[:, :d].numpy(), TEXTS[:, :d].numpy())
        parts.append(oracle.infonce(scores, *IDS, 0.2))
    return found, sum(parts)


def late_interaction() -> Outcome:
    images = numbers(N, 3, D, seed=2)
    texts = numbers(M, 4, D, seed=3)
    scores = oracle_embedders.late_scores(images, texts, "max_sum")
    found = functional.set_similarity(images, texts, "max_sum")
    loss = itrloss.InfoNCELoss(0.5)
    found = loss(scores=found, image_ids=SETS[0], text_ids=SETS[1])
    return found, oracle.infonce(scores.numpy(), *IDS, 0.5)


def folds_of_two_matrices() -> Outcome:
    scores = numbers(6, 12), numbers(6, 12, seed=1)
    image_ids = torch.arange(6)
    text_ids = torch.tensor([0, 1, 0, 1, 3, 2, 3, 2, 5, 4, 4, 5])
    sets = torch.stack([image_ids, image_ids + 100], 1), torch.stack([text_ids, text_ids + 200], 1)
    found = retrieval_metrics(scores, *sets, folds=3)
    first, second = [oracle_metrics.folds(x.numpy(), image_ids, text_ids, 3) for x in scores]
    names = [x for x in found if x != "rsum"]
    wanted = [(first if name.startswith("i2t") else second).get(name) for name in names]
    known = [k for k, x in enumerate(wanted) if x is not None]
    assert len(known) > 20
    return [found[names[k]] for k in known], [wanted[k] for k in known]


def teacher_in_groups() -> Outcome:
    images, texts, teacher, others = numbers(4, 8, D)
    groups = torch.arange(8) // 4
    related = Related((groups, groups))
    taught = Similarity(teacher, others, torch.arange(8), torch.arange(8), related=related)
    found = itrloss.DistillationLoss(directions="image-text")(
        images, texts, taught, image_groups=groups
    )
    parts = []
    for part in (slice(4), slice(4, 8)):
        own = Similarity(images[part], texts[part]).scores()
        given = Similarity(teacher[part], others[part]).scores()
        options = {"temperature": 0.07, "teacher_temperature": 0.07}
        parts.append(oracle_embedders.distillation(own, given, **options))
    return found, sum(parts) / 2


def gradient_cache() -> Outcome:
    tower = nn.Linear(D, D).double()
    loss = itrloss.InfoNCELoss(0.2)
    options = {"image_ids": SETS[0], "text_ids": SETS[1]}
    itrloss.grad_cache_step(loss, (tower, tower), (IMAGES, TEXTS), 3, **options)
    found = tower.weight.grad
    tower.zero_grad()
    loss(tower(IMAGES), tower(TEXTS), matches=MATCHES).backward()
    return found, tower.weight.grad


RELATIONS = [
    distributions,
    heads,
    memory_and_sets_on_one_side,
    prefixes,
    late_interaction,
    folds_of_two_matrices,
    teacher_in_groups,
    gradient_cache,
]


@pytest.mark.parametrize("case", RELATIONS, ids=lambda x: x.__name__)
def test_a_relation_is_what_the_loops_say(case):
    found, wanted = case()
    torch.testing.assert_close(
        torch.as_tensor(found).detach().double(), torch.as_tensor(wanted).double()
    )


def test_a_teacher_of_other_candidates_is_refused_though_they_are_as_many():
    x, y, *others = numbers(4, 8, D)
    ids = torch.arange(8)
    teacher = Similarity(*others, ids, ids, related=Related((ids // 4, ids // 4)))
    loss = itrloss.DistillationLoss()
    loss(x, y, teacher, ids, ids, image_groups=ids // 4)
    with pytest.raises(ValueError, match="teacher: expected the groups and the padding"):
        loss(x, y, teacher, ids, ids, image_groups=ids % 2)


# -------------------------------------------------------------------------- 2: padding in counts

IMAGE_PLACES = torch.tensor([1, 2, 3, 5, 6, 7, 10])  # of 11
TEXT_PLACES = torch.tensor([0, 1, 2, 3, 6, 7, 8, 9, 10, 12])  # of 13


def spread(x: Tensor, places: Tensor, size: int, fill: float) -> Tensor:
    """``x`` at its places among ``size`` entries; the others are ``fill``."""
    whole = x.new_full((size, *x.shape[1:]), fill)
    return whole.index_copy(0, places, x)


def rows(x: Tensor, fill: float = 0.7) -> Tensor:
    return spread(x, IMAGE_PLACES, 11, fill)


def cols(x: Tensor, fill: float = 0.7) -> Tensor:
    return spread(x, TEXT_PLACES, 13, fill)


PADDED_IDS = rows(IMAGE_IDS, NO_ID), cols(TEXT_IDS, NO_ID)
OTHER = numbers(N, 4, seed=6), numbers(M, 4, seed=7)  # another model's
OWN = numbers(N, 4, D, seed=8)  # negatives of each image
OWN_IDS = torch.arange(4 * N).view(N, 4) % 6


def of_distributions(loss: Any, v: Tensor, w: Tensor, is_padded: bool, ids: Any) -> Tensor:
    logs = numbers(N, D, seed=2), numbers(M, D, seed=3)
    if is_padded:
        logs = rows(logs[0]), cols(logs[1])
    return loss(v, w, *logs, *ids)


def of_a_teacher(loss: Any, v: Tensor, w: Tensor, is_padded: bool, ids: Any) -> Tensor:
    teacher = (rows(OTHER[0]), cols(OTHER[1])) if is_padded else OTHER
    return loss(v, w, teacher, *ids)


def of_own_negatives(loss: Any, v: Tensor, w: Tensor, is_padded: bool, ids: Any) -> Tensor:
    """With more negatives that do not exist, and a guide."""
    own, own_ids, guide = OWN, OWN_IDS, (*OTHER, numbers(N, 4, 4, seed=9))
    if is_padded:
        own = rows(torch.cat([own, own[:, :2]], 1))
        own_ids = rows(torch.cat([own_ids, torch.full((N, 2), NO_ID)], 1), NO_ID)
        third = torch.cat([guide[2], guide[2][:, :2]], 1)
        guide = rows(guide[0]), cols(guide[1]), rows(third)
    given = {"negatives": own, "negative_ids": own_ids}
    if loss.margin is not None:
        given["guide"] = guide
    return loss(v, w, *ids, **given)


def of_pairs(loss: Any, v: Tensor, w: Tensor, is_padded: bool, ids: Any) -> Tensor:
    return loss(v, w, *ids)


def of_residuals(loss: Any, v: Tensor, w: Tensor, is_padded: bool, ids: Any) -> Tensor:
    """The objective of DVSE, with heads that share the images' embeddings, and a gate."""
    residuals = numbers(N, 3, 5, seed=2)
    gate = torch.arange(3 * N).view(N, 3) % 2
    if is_padded:
        residuals, gate = rows(residuals), rows(gate, 1)
    factors = torch.tensor([[1.0], [2.0], [-1.0]]) * torch.linspace(1, 2, D)
    total, _ = loss(v[:, None] * factors, w, residuals, gate, *ids)
    return total


ALL_CANDIDATES = {"image_image": True, "text_text": True, "joint": True, "hardness": 2.0}
PADDED: dict[str, tuple[Any, Any]] = {
    "pcme++": (of_distributions, itrloss.PCMEPlusPlusLoss(vib_weight=0.3).double()),
    "teacher": (of_a_teacher, itrloss.DistillationLoss()),
    "teacher of texts": (of_a_teacher, itrloss.DistillationLoss(directions="text-image")),
    "own negatives": (of_own_negatives, itrloss.InfoNCELoss(0.2, **ALL_CANDIDATES)),
    "own negatives and a guide": (of_own_negatives, itrloss.InfoNCELoss(0.2, margin=0.1)),
    "own negatives alone": (
        of_own_negatives,
        itrloss.InfoNCELoss(0.2, in_batch=False, directions="image-text"),
    ),
    "prefixes": (of_pairs, itrloss.Matryoshka(itrloss.SigmoidLoss().double(), (3, D))),
    "dvse": (of_residuals, itrloss.DVSEObjective()),
}


@pytest.mark.parametrize("name", PADDED)
def test_what_does_not_exist_counts_nowhere(name):
    call, loss = PADDED[name]
    found = []
    for is_padded in (False, True):
        v = IMAGES.clone().requires_grad_()
        w = TEXTS.clone().requires_grad_()
        given = (rows(v), cols(w), True, PADDED_IDS) if is_padded else (v, w, False, IDS)
        value = call(loss, *given)
        found.append([value, *torch.autograd.grad(value, (v, w))])
    torch.testing.assert_close(found[1], found[0])


def test_a_batch_of_nobody_has_no_orthogonal_term():
    nobody = torch.full((N,), NO_ID)
    _, terms = itrloss.DVSEObjective()(
        numbers(N, 3, D), TEXTS, numbers(N, 3, 5), None, nobody, TEXT_IDS
    )
    assert terms.orthogonal == 0


def test_figures_by_judgements_and_of_batches_leave_padding_out():
    padded = rows(IMAGES), cols(TEXTS), *PADDED_IDS
    judged = torch.tensor([0, 0, 1, 2, 3, 4, 5]), torch.tensor([0, 3, 1, 2, 5, 6, 7])
    grades = torch.tensor([1.0, 0, 2, 1, 0, 3, 1])
    by_judgements = Judgements(*judged, grades)
    wanted = retrieval_metrics(Similarity(IMAGES, TEXTS, *IDS), relevant=by_judgements)
    places = IMAGE_PLACES[judged[0]], TEXT_PLACES[judged[1]]
    by_judgements = Judgements(*places, grades)
    assert retrieval_metrics(Similarity(*padded), relevant=by_judgements) == wanted
    found = []
    for batch in ((IMAGES, TEXTS, *IDS), padded):
        metric = itrloss.metrics.RetrievalMetrics()
        metric.update(*batch)
        found.append(metric.compute())
    assert found[0] == found[1]


def test_images_without_regions_move_no_running_mean():
    gates = [itrloss.DynamicGate(5, 3), itrloss.DynamicGate(5, 3)]
    gates[1].load_state_dict(gates[0].state_dict())
    regions = sample(4, 6, 5)
    mask = torch.cat([torch.ones(4, 6), torch.zeros(2, 6)])
    wanted = gates[0](regions)
    found = gates[1](torch.cat([regions, sample(2, 6, 5, seed=1)]), mask)
    assert torch.equal(found[:4], wanted) and not found[4:].any()
    for name, x in gates[0].state_dict().items():
        torch.testing.assert_close(gates[1].state_dict()[name], x)


def warnings_of(*given: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        itrloss.InfoNCELoss()(*given, **options)
    return [str(x.message) for x in caught]


def test_warnings_are_of_what_exists():
    ids = torch.tensor([0, 0, 0, NO_ID])
    (said,) = warnings_of(*sample(2, 4, D), ids, ids)
    assert "every image matches every text" in said
    scores = torch.rand(4, 4)
    scores[3] = scores[:, 3] = -1e9
    ids = torch.tensor([0, 1, 2, NO_ID])
    assert not warnings_of(scores=scores, image_ids=ids, text_ids=ids)


# ----------------------------------------------------------------- 3: parameters that are not plain

LEARNT: dict[str, Any] = {
    "infonce": lambda: itrloss.InfoNCELoss(learnable=True),
    "sigmoid": itrloss.SigmoidLoss,
    "pcme++": itrloss.PCMEPlusPlusLoss,
    "prefixes": lambda: itrloss.Matryoshka(itrloss.SigmoidLoss(), (3, D)),
    "prototypes": lambda: itrloss.PrototypeClassificationLoss(D, 3),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return LEARNT[name]().double()


def inputs_of(name: str) -> list[Tensor]:
    if name == "prototypes":
        return [IMAGES, TEXTS[:N], torch.arange(N) % 3]
    number = 4 if name == "pcme++" else 2
    return list(numbers(number, 6, D))


def outcome(loss: Any, name: str, parameters: dict[str, Tensor]) -> list[Tensor]:
    value = loss(*inputs_of(name))
    return [value, *torch.autograd.grad(value, list(parameters.values()))]


def moved(name: str, by: float) -> list[Tensor]:
    """The outcome of a loss with parameters that are larger by a number."""
    loss = made(name)
    with torch.no_grad():
        for x in loss.parameters():
            x += by
    return outcome(loss, name, dict(loss.named_parameters()))


def replica_of(module: nn.Module) -> Any:
    """What ``nn.DataParallel`` makes of a module on each of its devices."""
    replicas = {x: x._replicate_for_data_parallel() for x in module.modules()}
    for own, copied in replicas.items():
        for name, part in own._modules.items():
            copied._modules[name] = replicas[part]
        for name, x in own._parameters.items():
            if x is not None:
                setattr(copied, name, x + 0.25)
    return replicas[module]


@pytest.mark.parametrize("name", LEARNT)
def test_replicas_compute_with_their_copies(name):
    loss = made(name)
    found = outcome(replica_of(loss), name, dict(loss.named_parameters()))
    torch.testing.assert_close(found, moved(name, 0.25))


@pytest.mark.parametrize("name", LEARNT)
def test_parameters_may_be_an_argument(name):
    loss = made(name)
    own = {key: (x + 0.25).detach().requires_grad_() for key, x in loss.named_parameters()}
    found = outcome(lambda *x: torch.func.functional_call(loss, own, x), name, own)
    torch.testing.assert_close(found, moved(name, 0.25))


class Moved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.25


@pytest.mark.parametrize("name", LEARNT)
def test_parameters_may_be_computed_from_others(name):
    loss = made(name)
    for part in list(loss.modules()):
        for key in list(part._parameters):
            if part._parameters[key] is not None:
                parametrize.register_parametrization(part, key, Moved())
    found = outcome(loss, name, dict(loss.named_parameters()))
    torch.testing.assert_close(found, moved(name, 0.25))


def test_an_option_whose_parameter_is_computed_cannot_be_set():
    loss = made("infonce")
    parametrize.register_parametrization(loss, "log_scale", Moved())
    with pytest.raises(AttributeError, match="temperature: cannot be set"):
        loss.temperature = 0.5


def test_a_replica_leaves_the_limit_to_the_parameter_that_learns():
    loss = itrloss.InfoNCELoss(0.01, learnable=True, max_scale=20.0)
    value = replica_of(loss)(*sample(2, 6, D))
    assert float(loss.log_scale.detach().exp()) == pytest.approx(20)
    torch.testing.assert_close(value, itrloss.InfoNCELoss(0.05)(*sample(2, 6, D)))


class Sharded(nn.Module):
    """Towers with losses whose parameters are changed by a call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Linear(D, D)
        self.logit_scale = nn.Parameter(torch.tensor([math.log(100)]))
        self.loss = itrloss.InfoNCELoss(learnable=True, max_scale=20.0)
        self.loss.log_scale = self.logit_scale
        self.objective = itrloss.CODERObjective(D, 4)
        self.memory = itrloss.CoupledMemory(4, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = self.tower(x), self.tower(y)
        total, _ = self.objective(*pairs, x, y, self.memory, *pairs)
        return total + self.loss(*pairs)


def after_a_step(rank: int, is_sharded: bool) -> dict[str, Any]:
    model = Sharded()
    x, y = sample(2, 6, D)
    said = ""
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        said = repr(model.loss) if rank == 0 else ""
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    model(x, y).backward()
    optimizer.step()
    names = ["logit_scale", "objective.classifier.weight", "tower.weight"]
    whole = []
    for name in names:
        p = model.get_parameter(name)
        whole.append((p.full_tensor() if is_sharded else p).detach())
    return {"whole": whole, "said": said}


def test_shards_are_limited_and_reset(tmp_path):
    wanted = after_a_step(0, False)["whole"]
    assert float(wanted[0].exp()) < 21
    for rank, found in enumerate(run(after_a_step, tmp_path, True)):
        torch.testing.assert_close(found["whole"], wanted, rtol=1e-5, atol=1e-6)
        # one process alone asks: nothing that all have to answer
        assert ("temperature=in shards" in found["said"]) == (rank == 0)


# ----------------------------------------------------------------- 4: inputs that pass another door

MEMORY = itrloss.CoupledMemory(4, D, dtype=torch.float64)
NAMES = [list("ab"), list("cd")] * 3 + [list("ab")]
META = {"device": "meta"}
TOO_LARGE = np.array([[2**63, 1]] * N, dtype=np.uint64)
LOSS = itrloss.InfoNCELoss()
FILTERED = itrloss.InfoNCELoss(margin=0.1)
TAUGHT = itrloss.DistillationLoss()
NAN = torch.full((N,), math.nan)
MASKED = np.ma.array(np.arange(N), mask=np.arange(N) == 2)
MASKED_ROWS = np.ma.array(IMAGES.numpy(), mask=IMAGES.numpy() > 1)
UTO = itrloss.UnifiedTrainingObjective()


def batches_of_two_kinds() -> None:
    metric = itrloss.metrics.RetrievalMetrics()
    metric.update(IMAGES, TEXTS, *IDS)
    names = [[str(x) for x in ids.tolist()] for ids in IDS]
    metric.update(IMAGES, TEXTS, *names)


def with_a_bias(check: bool) -> Similarity:
    bias = NAN.double(), None
    return Similarity(IMAGES, TEXTS, *IDS, bias=bias, check_finite=check)


BAD: dict[str, Any] = {
    "image_ids: expected ids below 2": lambda: LOSS(IMAGES, TEXTS, TOO_LARGE, SETS[1]),
    "text_ids: expected strings with strings": lambda: LOSS(IMAGES, TEXTS, NAMES, TEXT_IDS),
    "text_ids: expected an integer tensor": lambda: LOSS(  # numbers of images
        IMAGES, IMAGES, None, list("abcdefg"), image_groups=IMAGE_IDS
    ),
    "corpus_ids: expected strings": lambda: itrloss.mine_hard_negatives(
        IMAGES, TEXTS, NAMES, SETS[1]
    ),
    "image_ids, text_ids: expected strings in all batches": batches_of_two_kinds,
    "image_keys: expected a floating-point tensor": lambda: UTO(
        IMAGES, TEXTS, IMAGES.numpy(), TEXTS, MEMORY
    ),
    "text_keys: expected embeddings": lambda: UTO(IMAGES, TEXTS, IMAGES, None, MEMORY),
    "bias: expected finite values": lambda: with_a_bias(True),
    "bias: expected finite values, got nan": lambda: retrieval_metrics(with_a_bias(False)),
    "below: expected numbers, got nan": lambda: itrloss.mine_hard_negatives(
        IMAGES, TEXTS, *IDS, below=NAN
    ),
    "teacher: expected device cpu, got meta": lambda: TAUGHT(
        IMAGES, TEXTS, torch.empty(N, M, **META), *IDS
    ),
    "guide[1]: expected device cpu, got meta": lambda: FILTERED(
        IMAGES, TEXTS, *IDS, guide=(OTHER[0], OTHER[1].to("meta"))
    ),
    "guide: expected device cpu, got meta": lambda: FILTERED(
        IMAGES[:M], IMAGES, guide=Similarity(*torch.empty(2, N, 4, **META))
    ),
    "matches: expected real numbers": lambda: LOSS(
        IMAGES, TEXTS, matches=MATCHES.to(torch.complex64)
    ),
    "matches: expected a tensor (N, M), got MaskedArray": lambda: LOSS(
        IMAGES, TEXTS, matches=np.ma.array(MATCHES.numpy(), mask=MATCHES.numpy() > 0)
    ),
    "image_groups: expected an integer tensor": lambda: LOSS(IMAGES, IMAGES, image_groups=MASKED),
    "rows: expected a floating-point tensor (N, D), got MaskedArray": lambda: Similarity(
        MASKED_ROWS, TEXTS, *IDS
    ),
    "residuals: expected a row for each": lambda: itrloss.DVSEObjective()(
        numbers(N, 3, D), TEXTS, numbers(N - 1, 3, 5), None, *IDS
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_input_is_refused_wherever_it_comes_in(message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        BAD[message]()


FORMS_OF_MATCHES = {
    "array": MATCHES.numpy(),
    "bools": MATCHES.numpy() > 0,
    "sparse": sparse.csr_array(MATCHES.numpy()),
    "nothing masked": np.ma.array(MATCHES.numpy(), mask=np.zeros((N, M), bool)),
}


@pytest.mark.parametrize("form", FORMS_OF_MATCHES)
def test_matches_come_in_all_forms(form):
    wanted = oracle.infonce(oracle.cosine(IMAGES.numpy(), TEXTS.numpy()), *IDS, 0.07)
    found = LOSS(IMAGES, TEXTS, matches=FORMS_OF_MATCHES[form])
    assert float(found) == pytest.approx(wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [itrloss.SDMLoss, itrloss.InfoNCELoss, itrloss.HubnessAwareLoss])
def test_weights_in_half_precision_are_not_rounded_again(make, dtype):
    """Their sums would be, where an anchor has several: 0.1 + 0.2 in bfloat16 is 1 % off."""
    weights = (MATCHES * torch.rand(N, M, dtype=torch.float64)).to(dtype)
    found, wanted = [make()(IMAGES, TEXTS, matches=x) for x in (weights, weights.double())]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


# -------------------------------------------------------------------- 5: wrong in one process alone


def trained(*shape: int, seed: int = 0) -> Tensor:
    return sample(*shape, seed=seed).requires_grad_()


V, W = sample(2, 4, D)
#: What is said by the process whose input is wrong, or by all if they differ.
SHARED: list[tuple[str, Any]] = [
    (
        "gather: expected the same in all processes, got biases ['none', 'gradient",
        lambda odd: Similarity.sharded(V, W, bias=(None, torch.zeros(4, requires_grad=not odd))),
    ),
    (
        "gather: expected the same in all processes, got biases ['gradient False",
        lambda odd: itrloss.PCMEPlusPlusLoss(gather=True, learnable=False)(
            V, W, V, W.clone().requires_grad_(not odd)
        ),
    ),
    (
        "image_keys: expected a floating-point tensor",
        lambda odd: UTO_OF_ALL(V, W, V.numpy() if odd else V, W, itrloss.CoupledMemory(4, D)),
    ),
    (
        "gather: expected the same in all processes, got ids of strings",
        lambda odd: itrloss.CoupledMemory(8, D).enqueue(V, W, four_ids(odd)),
    ),
    (
        "gather: expected the same in all processes, got of strings",
        lambda odd: metric_of(four_ids(odd)),
    ),
    (
        "memory: expected one of dimension 8",
        lambda odd: itrloss.Matryoshka(UTO_OF_ALL, (3, D))(
            V, W, V, W, itrloss.CoupledMemory(4, D - odd)
        ),
    ),
    (
        "image_ids: expected an integer tensor",
        lambda odd: OF_ALL(V, W, np.ma.array(np.arange(4), mask=np.arange(4) < odd), np.arange(4)),
    ),
    (
        "guide: expected a Similarity or embeddings",
        lambda odd: FILTERED_OF_ALL(
            V, W, guide=(np.ma.array(V.numpy(), mask=(V > 0).numpy()) if odd else V, W)
        ),
    ),
    (
        "guide[0]: expected device cpu",
        lambda odd: FILTERED_OF_ALL(V, W, guide=(V.to("meta") if odd else V, W)),
    ),
    ("teacher: expected the groups", lambda odd: teacher_of_all(odd)),
    (
        "gather: expected the same in all processes, got numbers of labels",
        lambda odd: OF_ALL(V, W, *[torch.arange(8 + 4 * odd).view(4, -1)] * 2),
    ),
    (
        "residuals: expected a row for each",
        lambda odd: itrloss.DVSEObjective(gather=True)(
            V[:, None].expand(4, 3, D), W, sample(4 - odd, 3, 5)
        ),
    ),
]
OF_ALL = itrloss.InfoNCELoss(gather=True)
FILTERED_OF_ALL = itrloss.InfoNCELoss(gather=True, margin=0.1)
UTO_OF_ALL = itrloss.UnifiedTrainingObjective(gather=True)


def four_ids(odd: bool) -> Any:
    return list("abcd") if odd else torch.arange(4)


def metric_of(ids: Any) -> Any:
    metric = itrloss.metrics.RetrievalMetrics()
    metric.update(V, W, ids, ids)
    return metric.compute()


def teacher_of_all(odd: bool) -> Any:
    ids = torch.arange(4)
    groups = ids // 2
    teacher = Similarity.sharded(V, W, ids, ids, related=Related((groups, groups)))
    own = ids % 2 if odd else groups
    loss = itrloss.DistillationLoss(gather=True)
    return loss(V, W, teacher, ids, ids, image_groups=own, text_groups=own)


def errors(rank: int) -> list[str]:
    said = []
    for _, call in SHARED:
        try:
            call(rank == 1)
            said.append("")
        except (TypeError, ValueError) as error:
            said.append(str(error))
        dist.barrier()
    return said


def test_what_one_process_refuses_all_refuse(tmp_path):
    first, second = run(errors, tmp_path)
    for (message, _), of_first, of_second in zip(SHARED, first, second, strict=True):
        assert of_second.startswith(message)
        assert message in of_first


# ------------------------------------------------------------------ 6: the cost of sets of labels


class Written(TorchDispatchMode):
    """Counts the elements that operators return."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.elements += sum(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


SIZE, LABELS = 512, 16


def drawn(kind: str, size: int = SIZE) -> Tensor:
    """Sets of 16 labels."""
    generator = torch.Generator().manual_seed(size)
    sets = torch.randint(0, 5000, (size, LABELS), generator=generator)
    if kind == "two that all have":
        sets[:, 0] = 7
        sets[:, 1] = 8
    if kind == "of twenty":
        sets = torch.rand(size, 20, generator=generator).argsort(1)[:, :LABELS]
    if kind == "padded":
        sets[:, 3:] = NO_ID
        sets[:, :3] %= 80
    return sets


def passes(call: Any, pairs: int) -> float:
    with Written() as written:
        call()
    return written.elements / pairs


def ids_or_sets(call: Any, sets: Tensor, pairs: int) -> tuple[float, float]:
    """The passes over all pairs with one label of each, and with all of them."""
    return passes(lambda: call(sets[:, 0].contiguous()), pairs), passes(lambda: call(sets), pairs)


@pytest.mark.parametrize("kind", ["rare", "two that all have", "of twenty", "padded"])
@pytest.mark.parametrize("engine", ["auto", "tiled"])
def test_sets_cost_no_more_passes_than_matches(kind, engine):
    """Comparing each label with each takes 3000."""
    sets = drawn(kind)
    members = [set(x) - {NO_ID} for x in sets.tolist()]
    matches = torch.tensor([[not a.isdisjoint(b) for b in members] for a in members])
    x, y = trained(SIZE, 4), trained(SIZE, 4, seed=1)
    loss = itrloss.InfoNCELoss(engine=engine)
    pairs = SIZE * SIZE
    assert passes(lambda: loss(x, y, sets, sets).backward(), pairs) < 1.3 * passes(
        lambda: loss(x, y, matches=matches).backward(), pairs
    )
    torch.testing.assert_close(loss(x, y, sets, sets), loss(x, y, matches=matches))


def test_sets_on_one_side_cost_few_passes():
    x, y = trained(SIZE, 4), trained(SIZE, 4, seed=1)
    own = drawn("rare")[:, 3].contiguous()
    loss = itrloss.InfoNCELoss()
    by_ids, by_sets = ids_or_sets(lambda ids: loss(x, y, ids, own), drawn("rare"), SIZE**2)
    assert by_sets < by_ids + 20  # 200 more where each label is compared


@pytest.mark.parametrize("make", [itrloss.UnifiedTrainingObjective, itrloss.MemoryInfoNCELoss])
def test_sets_against_a_memory_cost_few_passes(make):
    memory = itrloss.CoupledMemory(8192, 4)
    memory.enqueue(*sample(2, 8192, 4), drawn("rare", 8192)[:, 0])
    x, y = trained(64, 4), trained(64, 4, seed=1)
    keys = x.detach(), y.detach()
    loss = make()

    def step(ids: Tensor) -> None:
        loss(x, y, *keys, memory, ids, ids).backward()

    by_ids, by_sets = ids_or_sets(step, drawn("rare", 64), 2 * 64 * 8192)
    assert by_sets < by_ids + 30  # 200 more where each label is compared


def test_sets_beside_further_negatives_cost_few_passes():
    x, y = trained(SIZE, 4), trained(SIZE, 4, seed=1)
    further = {"negatives": sample(2048, 4), "negative_ids": drawn("rare", 2048)[:, 0]}
    loss = itrloss.InfoNCELoss()

    def step(ids: Tensor) -> None:
        loss(x, y, ids, ids, **further).backward()

    by_ids, by_sets = ids_or_sets(step, drawn("rare"), SIZE * 2048)
    assert by_sets < by_ids + 40  # 250 more where each label is compared


def test_sets_of_a_test_set_cost_few_passes():
    x, y = sample(SIZE, 4), sample(2048, 4)

    def step(ids: Tensor) -> None:
        sim = Similarity(x, y, ids[:SIZE], ids)
        retrieval_metrics(sim)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_ids, by_sets = ids_or_sets(step, drawn("rare", 2048), SIZE * 2048)
    assert by_sets < by_ids + 40


def test_mining_looks_at_the_labels_of_few_pairs():
    x, y = sample(64, 4), sample(20_000, 4)

    def step(ids: Tensor) -> None:
        itrloss.mine_hard_negatives(x, y, ids[:64], ids, 10)

    by_ids, by_sets = ids_or_sets(step, drawn("rare", 20_000), 64 * 20_000)
    assert by_sets < 2.5 * by_ids
