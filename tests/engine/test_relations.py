"""Sets of labels, groups and matrices of matches, beside the loops of `oracle_embedders`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.losses_registry import where
from support.oracle_embedders import contrastive, sdm
from support.processes import run
from torch import Tensor

import itrloss
from itrloss import NO_ID, InfoNCELoss, Related, Similarity

ENGINES = ["dense", "tiled"]


def dense(who: dict[str, Any]) -> dict[str, Any]:
    """Input for the loops, which read matrices entry by entry."""
    sparse = "matches" in who and who["matches"].is_sparse
    return {"matches": who["matches"].to_dense()} if sparse else who


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def integers(seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def relation(kind: str, seed: int, n: int, m: int) -> dict[str, Any]:
    """Input that says who matches, as losses take it."""
    if kind == "label sets":
        ids = integers(seed, 6, n, 3), integers(seed + 1, 6, m, 2)
        for x in ids:
            x[:, -1][integers(seed + 2, 2, len(x)).bool()] = NO_ID
        ids[0][0] = NO_ID  # an image that does not exist
        return {"image_ids": ids[0], "text_ids": ids[1]}
    if kind == "groups":
        groups = integers(seed, 3, n), integers(seed + 1, 3, m)
        groups[1][0] = NO_ID
        ids = integers(seed + 2, 4, n), integers(seed + 3, 4, m)
        names = "image_groups", "text_groups", "image_ids", "text_ids"
        return dict(zip(names, (*groups, *ids), strict=True))
    matches = integers(seed, 3, n, m).double()
    if kind == "weights":
        matches *= torch.tensor([0.3, 1.0, 2.5])[integers(seed + 1, 3, n, m)]
        unjudged = integers(seed + 2, 4, n, m) == 0
        return {"matches": matches.masked_fill(unjudged, torch.nan)}
    if kind == "sparse":
        matches = relation("weights", seed, n, m)["matches"]
        matches[n // 2 - 1 : n // 2 + 1] = 0.0  # rows without entries
        return {"matches": matches.to_sparse()}
    return {"matches": matches.masked_fill(matches == 2, torch.nan)}


KINDS = ["label sets", "groups", "matches", "weights", "sparse"]


def refuses(name: str, kind: str) -> bool:
    """Whether a loss takes no weights: sums over all pairs of a positive and a negative."""
    return kind in ("weights", "sparse") and name == "triplet all"


def assert_same(found: Any, wanted: Any, given: list[Tensor]) -> None:
    assert float(found) == pytest.approx(float(wanted), abs=1e-9)
    grads = [
        torch.autograd.grad(x, given, retain_graph=True, allow_unused=True) for x in (found, wanted)
    ]
    for a, b in zip(*grads, strict=True):
        zero = torch.zeros_like(given[0][:1, :1])
        difference = (zero if a is None else a) - (zero if b is None else b)
        assert difference.abs().max() < 1e-9


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_infonce_is_the_loops(kind: str, engine: Any, seed: int):
    n, m = 5, 7
    given = [x.requires_grad_() for x in (draw(seed, n, 4), draw(seed + 50, m, 4))]
    who = relation(kind, seed, n, m)
    options: dict[str, Any] = {"temperature": 0.2}
    options["directions"] = ("both", "image-text", "text-image")[seed % 3]
    if seed % 2:
        options |= {"image_image": True, "text_text": True}
    if seed % 4 > 1:
        options["margin"] = 0.3
    rule = "other" if seed % 5 == 0 else "same"
    loss = InfoNCELoss(**options, groups=rule, engine=engine)
    wanted = contrastive(*given, **options, negative_groups=rule, **dense(who))
    if isinstance(wanted, Tensor) and wanted.requires_grad:
        assert_same(loss(*given, **who), wanted, given)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_sdm_is_the_loops(kind: str, engine: Any):
    for seed in range(6):
        given = [x.requires_grad_() for x in (draw(seed, 5, 4), draw(seed + 50, 7, 4))]
        who = relation(kind, seed, 5, 7)
        found = itrloss.SDMLoss(0.2, engine=engine)(*given, **who)
        assert_same(found, sdm(*given, temperature=0.2, **dense(who)), given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", where(lambda entry: entry.takes == "pairs" and entry.oracle))
def test_every_loss_takes_relations_on_both_engines(name: str, kind: str):
    """Tiles give what plain PyTorch does; so do scores and a similarity."""
    entry = where(lambda entry: entry.takes == "pairs" and entry.oracle)[name]
    if "pcme" in name:
        return
    given = [x.requires_grad_() for x in (draw(1, 9, 8), draw(2, 7, 8))]
    who = relation(kind, 3, 9, 7)
    if refuses(name, kind):
        with pytest.raises(ValueError, match="matches: expected 1 for all matches"):
            entry.make()(*given, **who)
        return
    wanted = entry.make(engine="dense")(*given, **who)
    assert_same(entry.make(engine="tiled")(*given, **who), wanted, given)
    ids = who.get("image_ids"), who.get("text_ids")
    groups = who.get("image_groups"), who.get("text_groups")
    related = Related(groups, "same", who.get("matches"))
    sim = Similarity(*given, *ids, related=related)
    assert_same(entry.make()(sim), wanted, given)


@pytest.mark.parametrize("name", where(lambda entry: entry.takes == "pairs" and entry.oracle))
def test_a_matrix_of_equal_ids_is_what_ids_are(name: str):
    entry = where(lambda entry: entry.takes == "pairs" and entry.oracle)[name]
    if entry.ids != "any":
        return
    given = [x.requires_grad_() for x in (draw(1, 9, 8), draw(2, 7, 8))]
    ids = integers(1, 5, 9), integers(2, 5, 7)
    wanted = entry.make()(*given, *ids)
    for engine in ENGINES:
        loss = entry.make(engine=engine)
        assert_same(loss(*given, matches=ids[0][:, None] == ids[1]), wanted, given)
        sets = [x[:, None].repeat(1, 2) for x in ids]
        assert_same(loss(*given, *sets), wanted, given)
        one = torch.zeros(9, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
        assert_same(loss(*given, *ids, image_groups=one[0], text_groups=one[1]), wanted, given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_rounded_float64(kind: str, dtype: Any):
    given = draw(1, 9, 8), draw(2, 7, 8)
    who = relation(kind, 3, 9, 7)
    rounded = [x.to(dtype) for x in given]
    wanted = InfoNCELoss(0.2)(*(x.double() for x in rounded), **who)
    for engine in ENGINES:
        found = InfoNCELoss(0.2, engine=engine)(*rounded, **who)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_relations_compile_as_one_graph(kind: str):
    torch.compiler.reset()
    given = draw(1, 9, 8), draw(2, 7, 8)
    who = relation(kind, 3, 9, 7)
    for make in (InfoNCELoss, itrloss.DiversityContrastiveLoss):
        loss = make(engine="dense")
        if "matches" in who:  # whose values are read
            related = Related(matches=who["matches"])
            inputs: Any = (Similarity(*given, related=related, engine="dense"),)
            torch.testing.assert_close(loss(*inputs), loss(*given, **who))
            continue
        compiled = torch.compile(loss, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given, **who), loss(*given, **who))


def test_groups_label_sets_and_sparse_matches_need_no_matrix():
    """The largest tensor of a step has few numbers for a batch of many tiles."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not result.is_sparse:
                self.size = max(self.size, result.numel())
            return result

    n = 4096
    given = [x.requires_grad_() for x in (torch.randn(n, 8), torch.randn(n, 8))]
    matches = torch.sparse_coo_tensor(integers(3, n, 2, 3 * n), torch.rand(3 * n), (n, n))
    for who in (
        {"image_groups": integers(1, 4, n)},
        {"image_ids": integers(2, 9000, n, 2)},
        {"matches": matches},
    ):
        if "image_ids" in who:
            who["text_ids"] = who["image_ids"]
        with Largest() as largest:
            InfoNCELoss(engine="tiled")(*given, **who).backward()
        assert largest.size <= n * n // 4


@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_are_factors_of_positives(engine: Any, few: int, monkeypatch):
    """Means over positives are by their weights, and sums multiply by them, listed or not."""
    monkeypatch.setattr("itrloss.engine.pairs.FEW", few)
    given = [x.requires_grad_() for x in (draw(1, 6, 4), draw(2, 8, 4))]
    matches = relation("weights", 5, 6, 8)["matches"]
    scores = torch.nn.functional.normalize(given[0]) @ torch.nn.functional.normalize(given[1]).T
    assert_weights(given, scores, matches, engine)
    assert_weights(given, scores, matches.masked_fill(matches > 0, 1.0), engine)


def assert_weights(given: list[Tensor], scores: Tensor, matches: Tensor, engine: Any) -> None:
    """Check four losses against their formulas with weights, of both directions."""
    weights = matches.nan_to_num(0.0)
    negative = (matches == 0).double()
    margin = 0.2
    parts: dict[str, Any] = {"dcl": [], "hal": [], "triplet": []}
    for s, w, rest in ((scores, weights, negative), (scores.T, weights.T, negative.T)):
        valid = ((w > 0).any(1) & (rest > 0).any(1)).double()
        number = valid.sum()
        attraction = (w * s.clamp_min(-1 + 1e-6).log1p()).sum(1)
        mean = attraction / w.sum(1).clamp_min(1e-9)
        repulsion = 0.1 * (1 + (((s - 0.3) / 0.1).exp() * rest).sum(1)).log()
        parts["dcl"].append(((repulsion - mean) * valid).sum() / number)
        hal = (1 + ((20 * (s - 0.1)).exp() * rest).sum(1)).log() / 20
        pairs = (w.sum(1) * valid).sum()
        parts["hal"].append((hal * valid).sum() / number - 0.5 * (attraction * valid).sum() / pairs)
        hardest = s.masked_fill(rest == 0, -torch.inf).amax(1)
        hinges = (w * (margin - s + hardest[:, None]).clamp_min(0)).sum(1)
        parts["triplet"].append(torch.where(valid > 0, hinges, 0.0).sum())
    z = 5 * scores - 2
    sums = negative * torch.nn.functional.softplus(z) + weights * torch.nn.functional.softplus(-z)
    parts["sigmoid"] = [sums.sum() * 0.5 / 6, sums.sum() * 0.5 / 8]
    losses = {
        "dcl": itrloss.DiversityContrastiveLoss(diversity=None, positive_weight=1.0, engine=engine),
        "hal": itrloss.HubnessAwareLoss(20.0, 0.1, engine=engine),
        "triplet": itrloss.TripletLoss(margin, engine=engine),
        "sigmoid": itrloss.SigmoidLoss(5.0, -2.0, learnable=False, engine=engine),
    }
    for name, loss in losses.items():
        assert_same(loss(*given, matches=matches), sum(parts[name]), given)
    # the values of each anchor are computed apart
    losses["sigmoid"].reduction = "none"
    rows, cols = losses["sigmoid"](*given, matches=matches)
    assert_same(rows.sum(), 0.5 * sums.sum(), given)
    assert_same(cols.sum(), 0.5 * sums.sum(), given)


def test_a_weight_of_a_mean_alone_changes_nothing():
    """Weights of one positive of an anchor are a factor of one term, and divided by themselves."""
    given = [x.requires_grad_() for x in (draw(1, 6, 4), draw(2, 6, 4))]
    for kind in (InfoNCELoss, itrloss.SupConLoss, itrloss.SDMLoss):
        wanted = kind()(*given)
        assert_same(kind()(*given, matches=torch.diag(torch.rand(6) + 0.5)), wanted, given)


@pytest.mark.parametrize("kind", ["matches", "weights", "sparse"])
@pytest.mark.parametrize("engine", ENGINES)
def test_matches_may_be_modified_before_the_backward_pass(kind: str, engine: Any):
    given = [x.requires_grad_() for x in (draw(1, 6, 4), draw(2, 8, 4))]
    matches = relation(kind, 5, 6, 8)["matches"]
    wanted = torch.autograd.grad(InfoNCELoss(engine=engine)(*given, matches=matches), given)
    loss = InfoNCELoss(engine=engine)(*given, matches=matches)
    (matches._values() if kind == "sparse" else matches).fill_(1.0)
    for a, b in zip(torch.autograd.grad(loss, given), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_metrics_ask_for_ids():
    sim = Similarity(draw(1, 4, 3), draw(2, 4, 3), related=Related(matches=torch.eye(4)))
    with pytest.raises(ValueError, match="scores: expected ids of one number"):
        itrloss.metrics.retrieval_metrics(sim)


FEW = draw(1, 4, 3), draw(2, 4, 3)
IDS = torch.arange(4)
WRONG: dict[str, dict[str, Any]] = {
    r"matches: expected shape \(4, 4\), got \(3, 3\)": {"matches": torch.eye(3)},
    "matches: expected None beside image_ids and text_ids": {
        "matches": torch.eye(4),
        "image_ids": IDS,
        "text_ids": IDS,
    },
    "matches: expected None beside image_groups": {"matches": torch.eye(4), "image_groups": IDS},
    "matches: expected numbers above 0 for a match": {"matches": -torch.eye(4)},
    "matches: expected numbers .*, 0 for a negative": {"matches": torch.eye(4) / 0},
    "matches: expected a dense tensor, or one of torch.sparse_coo": {
        "matches": torch.eye(4).to_sparse_csr()
    },
    "matches: expected a tensor": {"matches": [[1]]},
    "image_groups: expected groups to go with text_groups": {"text_groups": IDS},
    r"image_groups: expected shape \(4,\), got \(3,\)": {"image_groups": IDS[:3]},
    r"image_ids: expected shape \(4, k\), got \(3, 2\)": {
        "image_ids": IDS[:3, None].repeat(1, 2),
        "text_ids": IDS,
    },
    "image_ids: .*a mask of the pairs that match goes in as matches": {
        "image_ids": torch.eye(4, dtype=torch.bool)
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_named(message: str):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        InfoNCELoss()(*FEW, **WRONG[message])


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_listed_and_counted_by_parts(kind: str, monkeypatch):
    given = [x.requires_grad_() for x in (draw(1, 9, 8), draw(2, 7, 8))]
    who = relation(kind, 3, 9, 7)
    losses = InfoNCELoss(engine="tiled"), itrloss.SDMLoss(engine="dense")
    wanted = [loss(*given, **who) for loss in losses]
    monkeypatch.setattr("itrloss.engine.relations._AT_ONCE", 20)  # two rows at a time
    for loss, value in zip(losses, wanted, strict=True):
        assert_same(loss(*given, **who), value, given)


@pytest.mark.parametrize("kind", ["label sets", "groups"])
@pytest.mark.parametrize("seed", range(4))
def test_guides_and_own_negatives_beside_relations(kind: str, seed: int):
    given = [x.requires_grad_() for x in (draw(seed, 5, 4), draw(seed + 50, 7, 4))]
    own = draw(seed + 1, 5, 3, 4)
    guide = draw(seed + 2, 5, 6), draw(seed + 3, 7, 6), draw(seed + 4, 5, 3, 6)
    who = relation(kind, seed, 5, 7)
    who |= {"negatives": own, "negative_ids": integers(seed, 6, 5, 3)}
    options: dict[str, Any] = {"temperature": 0.2, "margin": 0.1}
    for also in ({}, {"directions": "image-text", "in_batch": False}, {"text_text": True}):
        wanted = contrastive(*given, **options, **also, guide=guide, **who)
        found = InfoNCELoss(**options, **also)(*given, guide=guide, **who)
        if wanted.requires_grad:
            assert_same(found, wanted, given)


# --------------------------------------------------------------------------------------- processes

PAIR_LOSSES = where(lambda entry: entry.takes == "pairs" and bool(entry.oracle))
WHOLE = 9, 12  # images and texts
# Numbers of images and texts of each process.
PARTS: dict[str, list[tuple[int, int]]] = {
    "uneven": [(2, 10), (7, 2)],
    "empty": [(0, 0), (9, 12)],
    "three": [(2, 5), (3, 0), (4, 7)],
}
SHARED = [*(kind for kind in KINDS if kind != "sparse"), "open groups", "ids"]


def shared_relation(kind: str) -> dict[str, Any]:
    """Input for a whole batch that says who matches."""
    if kind == "ids":
        return {"image_ids": integers(1, 4, WHOLE[0]), "text_ids": integers(2, 4, WHOLE[1])}
    if kind == "open groups":
        who = relation("groups", 7, *WHOLE)
        who["image_groups"][::3] = NO_ID
        return who
    return relation(kind, 7, *WHOLE)


def part_of(who: dict[str, Any], rows: slice, cols: slice) -> dict[str, Any]:
    """What a process passes in: rows of a matrix of matches, and otherwise its own items."""
    sides = {"image": rows, "text": cols, "matches": rows}
    return {name: x[sides[name.split("_")[0]]] for name, x in who.items()}


def shared_losses(kind: str) -> dict[str, Any]:
    """Losses with the relation, by name: each of the registry with some of the kinds."""
    made: dict[str, Any] = {}
    for name in list(PAIR_LOSSES)[SHARED.index(kind) % 3 :: 3]:
        if "pcme" not in name and not refuses(name, kind):
            made[name] = PAIR_LOSSES[name].make
    made["infonce among all"] = lambda **options: InfoNCELoss(
        0.2, joint=True, image_image=True, text_text=True, margin=0.2, **options
    )
    made["infonce, other groups"] = lambda **options: InfoNCELoss(0.2, groups="other", **options)
    made["infonce of texts"] = lambda **options: InfoNCELoss(
        0.2, directions="text-image", hardness=2.0, **options
    )
    return made


def slices(sizes: list[tuple[int, int]], rank: int) -> tuple[slice, slice]:
    starts = [sum(size[side] for size in sizes[:rank]) for side in (0, 1)]
    stops = [start + size for start, size in zip(starts, sizes[rank], strict=True)]
    return slice(starts[0], stops[0]), slice(starts[1], stops[1])


def value_and_gradients(make: Any, given: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """The loss, its gradients, and the values of each anchor."""
    leaves = [given[x] for x in ("images", "texts", "scores") if x in given]
    loss = make(engine="tiled" if len(leaves) == 2 else "dense", **options)
    value = loss(**given)
    gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
    loss.reduction = "none"
    values = loss(**given)
    values = values if isinstance(values, tuple) else (values,)
    return [value.detach(), *gradients, *[x.detach() for x in values]]


def computed(kind: str, form: str, rank: int, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """What a process finds; of one process, the whole batch."""
    rows, cols = slices(sizes, rank)
    images = draw(1, WHOLE[0], 8)
    texts = draw(2, WHOLE[1], 8)
    who = part_of(shared_relation(kind), rows, cols)
    if form == "scores":
        units = [torch.nn.functional.normalize(x) for x in (images, texts)]
        given = {"scores": (units[0] @ units[1].T)[rows].clone().requires_grad_()}
    else:
        given = {
            "images": images[rows].clone().requires_grad_(),
            "texts": texts[cols].clone().requires_grad_(),
        }
    found = {}
    for name, make in shared_losses(kind).items():
        if form == "scores" and name == "infonce among all":
            continue
        found[name] = value_and_gradients(make, {**given, **who}, gather=len(sizes) > 1)
    return found


CASES_OF_JOBS = [
    (kind, form)
    for form in ("embeddings", "scores")
    for kind in SHARED
    if form == "embeddings" or kind not in ("matches", "weights", "label sets")
]


def at_hand(kind: str, rank: int, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """What own anchors have where all candidates are at hand, as for ranking."""
    rows, cols = slices(sizes, rank)
    images = draw(1, WHOLE[0], 8)[rows]
    texts = draw(2, WHOLE[1], 8)[cols]
    who = part_of(shared_relation(kind), rows, cols)
    ids = who.get("image_ids"), who.get("text_ids")
    groups = who.get("image_groups"), who.get("text_groups")
    related = Related(groups, "same", who.get("matches"))
    kind_of = Similarity.sharded if len(sizes) > 1 else Similarity
    sim = kind_of(images, texts, *ids, related=related)
    found = [torch.stack([*itrloss.describe(sim).values()])]
    for view in (sim, sim.T):
        local = view.local()
        n = view.shape[0]
        found += [local.positive_counts[:n], local.negative_counts[:n], local.scores()[:n]]
    return {"at hand": found}


def of_a_process(rank: int, sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    return [
        *(computed(kind, form, rank, sizes) for kind, form in CASES_OF_JOBS),
        *(at_hand(kind, rank, sizes) for kind in SHARED),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
def test_processes_have_the_loss_of_one(parts: str, tmp_path: Path):
    sizes = PARTS[parts]
    every = run(of_a_process, tmp_path, sizes, world=len(sizes))
    cases = [*CASES_OF_JOBS, *((kind, "at hand") for kind in SHARED)]
    for number, (kind, form) in enumerate(cases):
        whole = at_hand(kind, 0, [WHOLE]) if form == "at hand" else computed(kind, form, 0, [WHOLE])
        for name, (value, *tensors) in whole.items():
            of_each = [found[number][name] for found in every]
            for first, *_ in of_each:
                torch.testing.assert_close(first, value, rtol=1e-10, atol=1e-10)
            gradients = {"embeddings": 2, "scores": 1, "at hand": 0}[form]
            for k, wanted in enumerate(tensors):
                got = torch.cat([own[1 + k] for own in of_each])
                if k < gradients:  # DistributedDataParallel divides them
                    got = got / len(sizes)
                torch.testing.assert_close(
                    got, wanted, rtol=1e-9, atol=1e-10, msg=f"{kind} {form} {name} {k}"
                )


def marks_rules_and_numbers(rank: int) -> list[Tensor]:
    """Counts with texts of no image, ranks by groups, and an error of other numbers of labels."""
    images = torch.randn(3, 4)
    texts = torch.randn(3, 4)
    numbers = torch.tensor([[2, NO_ID, 0], [0, 1, NO_ID]][rank])  # of own images
    sim = Similarity.sharded(images, texts, None, numbers)
    found = [sim.T.positive_counts[:3], sim.T.negative_counts[:3]]
    groups = torch.tensor([[0, 0, 1], [1, 2, NO_ID]][rank])
    sim = Similarity.sharded(images, texts, related=Related((groups, None), "other"))
    found += [sim.local().negative_counts, sim.T.local().negative_counts]
    labels = torch.zeros(3, 2 + rank, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"numbers of labels \[2, 2\] in process 0"):
        Similarity.sharded(images, texts, labels, labels)
    return found


def test_marks_rules_and_numbers_of_labels_over_processes(tmp_path: Path):
    every = run(marks_rules_and_numbers, tmp_path)
    positives, negatives, of_rows, of_cols = (torch.cat(x) for x in zip(*every, strict=True))
    assert positives.tolist() == [1, 0, 1, 1, 1, 0]
    assert negatives.tolist() == [5, 0, 5, 5, 5, 0]  # a text that does not exist has none
    # of six, those of the own group are none, nor is the own text of what is open to all
    assert of_rows.tolist() == of_cols.tolist() == [4, 4, 4, 4, 5, 5]
