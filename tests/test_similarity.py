"""Input errors of ``Similarity`` and the losses name the argument; smaller behaviours of the public
interface.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cases import embeddings, sample

import itrloss
from itrloss import Similarity
from itrloss.engine.terms import identity

V, W = embeddings(4, 6, dtype=torch.float32)
IDS = torch.arange(4), torch.arange(6)
loss = itrloss.DiversityContrastiveLoss()
F = itrloss.functional

BAD = {
    "dims": (lambda: loss(V, W[:, :3], *IDS), ValueError, "texts.*dimension 6.*\\(6, 3\\)"),
    "not a matrix": (lambda: loss(V[0], W, *IDS), ValueError, "images.*\\(N, D\\).*\\(6,\\)"),
    "not a tensor": (lambda: loss(V.numpy(), W, *IDS), TypeError, "images.*ndarray"),
    "integers": (lambda: loss(V, W.long(), *IDS), TypeError, "texts.*int64"),
    "mixed precision": (lambda: loss(V, W.double(), *IDS), TypeError, "float64"),
    "no rows": (lambda: loss(V[:0], W, *IDS), ValueError, "images.*\\(0, 6\\)"),
    "no columns": (lambda: loss(V, W[:0], *IDS), ValueError, "texts.*\\(0, 6\\)"),
    "no dimensions": (lambda: loss(V[:, :0], W[:, :0], *IDS), ValueError, "images"),
    "unpaired": (lambda: loss(V, W), ValueError, "image_ids, text_ids.*4.*6"),
    "short ids": (
        lambda: loss(V, W, IDS[0][:3], IDS[1]),
        ValueError,
        "image_ids.*\\(4,\\).*\\(3,\\)",
    ),
    "ids of the other side": (lambda: loss(V, W, *IDS[::-1]), ValueError, "image_ids"),
    "float ids": (lambda: loss(V, W, IDS[0], IDS[1].float()), TypeError, "text_ids.*float32"),
    "boolean ids": (lambda: loss(V, W, IDS[0].bool(), IDS[1]), TypeError, "image_ids.*bool"),
    "unsigned ids that int64 cannot hold": (
        lambda: loss(V, W, (-1 - IDS[0]).view(torch.uint64), IDS[1]),
        ValueError,
        r"image_ids: expected ids below 2\*\*63",
    ),
    "fractional ids": (lambda: loss(V, W, [0.5, 1, 2, 3], IDS[1]), TypeError, "image_ids.*list"),
    "one input": (lambda: loss(V), TypeError, "texts"),
    "no input": (lambda: loss(), TypeError, "images"),
    "scores and embeddings": (lambda: loss(V, W, *IDS, scores=V @ W.T), ValueError, "scores"),
    "similarity and ids": (
        lambda: loss(Similarity(V, W, *IDS), None, *IDS),
        ValueError,
        "image_ids",
    ),
    "similarity and texts": (lambda: loss(Similarity(V, W, *IDS), W), ValueError, "texts"),
    "integer scores": (lambda: loss(scores=torch.ones(3, 3).int()), TypeError, "scores.*int32"),
    "engine": (lambda: Similarity(V, W, *IDS, engine="triton2"), ValueError, "engine.*'triton2'"),
    "engine of a loss": (lambda: itrloss.InfoNCELoss(engine="fast"), ValueError, "engine.*'fast'"),
    "nan in a similarity": (
        lambda: itrloss.InfoNCELoss(check_finite=True)(Similarity(V * float("nan"), W, *IDS)),
        ValueError,
        "rows.*finite",
    ),
    "engine of scores": (
        lambda: Similarity.from_scores(torch.rand(3, 3), engine="fast"),
        ValueError,
        "engine.*'fast'",
    ),
    "engine of before": (
        lambda: itrloss.InfoNCELoss(engine="reference"),
        ValueError,
        "engine.*'reference'",
    ),
    "reduction": (
        lambda: itrloss.InfoNCELoss(reduction="average"),
        ValueError,
        "reduction.*'average'",
    ),
    "functional reduction": (
        lambda: F.info_nce_loss(Similarity(V, V), reduction="x"),
        ValueError,
        "reduction",
    ),
    "mining": (lambda: itrloss.TripletLoss(mining="semi"), ValueError, "mining.*'semi'"),
    "soft form of all": (
        lambda: itrloss.TripletLoss(mining="all", temperature=0.1),
        ValueError,
        "temperature: expected None beside mining='all'.*0.1",
    ),
    "soft form of all, functional": (
        lambda: F.triplet_loss(Similarity(V, V), mining="all", temperature=0.1),
        ValueError,
        "temperature: expected None beside mining='all'",
    ),
    "triplet temperature": (
        lambda: itrloss.TripletLoss(temperature=0.0),
        ValueError,
        "temperature: expected a number above 0, got 0",
    ),
    "functional mining": (
        lambda: F.triplet_loss(Similarity(V, V), mining="semi"),
        ValueError,
        "mining",
    ),
    "temperature": (lambda: itrloss.InfoNCELoss(0.0), ValueError, "temperature"),
    "epsilon": (lambda: itrloss.DiversityContrastiveLoss(epsilon=-1), ValueError, "epsilon.*-1"),
    "entropy temperature": (
        lambda: itrloss.DiversityContrastiveLoss(entropy_temperature=0),
        ValueError,
        "entropy_t",
    ),
    "temperature of another type": (
        lambda: itrloss.InfoNCELoss("0.07"),
        TypeError,
        "temperature.*'0.07'",
    ),  # type: ignore
    "true for a number": (lambda: itrloss.HubnessAwareLoss(scale=True), TypeError, "scale.*True"),
    "margin": (lambda: itrloss.TripletLoss(margin=None), TypeError, "margin.*None"),  # type: ignore[arg-type]
    "embeddings for a similarity": (lambda: F.info_nce_loss(V, W), TypeError, "sim.*Tensor"),  # type: ignore[arg-type]
    "embeddings for a diversity": (lambda: F.std_diversity(V), TypeError, "sim.*Tensor"),  # type: ignore[arg-type]
    "dcl temperature": (lambda: itrloss.DiversityContrastiveLoss(-1.0), ValueError, "temperature"),
    "diversity": (
        lambda: itrloss.DiversityContrastiveLoss(diversity="var"),
        ValueError,
        "diversity.*'var'",
    ),
    "functional diversity": (
        lambda: F.diversity_contrastive_loss(Similarity(V, V), diversity="var"),  # type: ignore[arg-type]
        ValueError,
        "diversity",
    ),
    "positive": (
        lambda: itrloss.DiversityContrastiveLoss(positive="abs"),
        ValueError,
        "positive.*'abs'",
    ),
    "positive weight": (
        lambda: itrloss.DiversityContrastiveLoss(positive_weight="half"),
        ValueError,
        "positive_weight",
    ),
    "hal scale": (lambda: itrloss.HubnessAwareLoss(scale=0), ValueError, "scale"),
    "over": (lambda: Similarity(V, V).logsumexp(over="best"), ValueError, "over"),
    "scale": (lambda: Similarity(V, V).logsumexp(torch.ones(3)), ValueError, "scale.*\\(4,\\)"),
    "entropy": (lambda: Similarity(V, V).entropy(0), ValueError, "temperature"),
    "term": (
        lambda: Similarity(V, V).sum_of_positives("square"),
        TypeError,
        "term: expected a function of scores, got 'square'",
    ),
    "k": (lambda: Similarity(V, V).topk(5), ValueError, "k.*4.*5"),
    "ties": (lambda: Similarity(V, V).ranks(ties="random"), ValueError, "ties"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_finite_input_is_checked_on_request(bad):
    broken = V.clone()
    broken[1, 2] = bad
    strict = itrloss.InfoNCELoss(check_finite=True)
    assert strict(V, V).isfinite()
    with pytest.raises(ValueError, match=r"images.*finite"):
        strict(broken, V)
    with pytest.raises(ValueError, match=r"texts.*finite"):
        strict(V, broken)
    with pytest.raises(ValueError, match=r"scores.*finite"):
        strict(scores=broken[:, :4])
    assert not itrloss.InfoNCELoss()(broken, V).isfinite()


def test_ids_of_any_integer_type():
    wanted = loss(V, W, IDS[0], IDS[1] % 4)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(loss(V, W, IDS[0].to(dtype), (IDS[1] % 4).to(dtype)), wanted)


def test_top_and_ranks_of_known_scores():
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.5], [0.2, 0.3, 0.3, 0.1]])
    ids = torch.tensor([0, 1]), torch.tensor([1, 0, 0, 1])
    sim = Similarity.from_scores(scores, *ids)
    assert sim.ranks().tolist() == [[3, 4], [3, 4]]
    assert sim.ranks(ties="optimistic").tolist() == [[2, 4], [3, 4]]
    assert sim.T.ranks().tolist() == [[2], [2], [1], [2]]
    assert sim.topk(2).indices[0, 0] == 0 and sim.T.topk(1).indices.flatten().tolist() == [
        0,
        1,
        0,
        0,
    ]
    bias = torch.tensor([-1.0, 0.0, 0.0, 0.0])
    assert sim.ranks(bias=bias)[0].tolist() == [2, 3]
    assert sim.topk(1, bias=bias).values.flatten().tolist() == [0.5, pytest.approx(0.3)]


def test_terms_of_your_own():
    @itrloss.pair_term
    def doubled_for_a_test(scores, weight):
        return 2 * weight * scores

    sim = Similarity(V, W, IDS[0], IDS[1] % 4)
    for engine in ("dense", "tiled"):
        sim = Similarity(V, W, IDS[0], IDS[1] % 4, engine=engine)
        weight = torch.rand(4, requires_grad=True)
        for ask in (sim.sum_of_positives, sim.sum):
            value = ask(doubled_for_a_test, weight)
            torch.testing.assert_close(value, 2 * weight * ask(identity))
            (found,) = torch.autograd.grad(value.sum(), weight)
            torch.testing.assert_close(found, 2 * ask(identity))


def test_terms_are_told_apart_by_identity_and_not_by_name():
    """Of two functions of one name, each is summed, and differentiated, itself."""
    terms = []
    for factor in (1.0, 2.0):

        @itrloss.pair_term
        def exponential(scores, factor=factor):
            return factor * scores

        terms.append(exponential)
    for engine in ("dense", "tiled"):
        v = V.clone().requires_grad_()
        sim = Similarity(v, W, IDS[0], IDS[1] % 4, engine=engine)
        first, second = (sim.sum(term).sum() for term in terms)
        torch.testing.assert_close(second, 2 * first)
        gradients = [torch.autograd.grad(x, v, retain_graph=True)[0] for x in (first, second)]
        torch.testing.assert_close(gradients[1], 2 * gradients[0])
        assert sim.logsumexp(3.0).isfinite().all()  # the library's own exponential


@pytest.mark.parametrize("engine", ["dense", "tiled", "auto"])
def test_terms_may_work_in_place(engine):
    @itrloss.pair_term
    def over(scores, threshold):
        return scores.sub_(threshold).relu_()

    def plain(scores):
        return (scores - 0.1).relu()

    with torch.no_grad():
        ids = IDS[0], IDS[1] % 4
        scores = Similarity(V, W, *ids).scores()
        before = scores.clone()
        for sim in (
            Similarity(V, W, *ids, engine=engine),
            Similarity.from_scores(scores, *ids, engine=engine),
        ):
            kept = sim.scores()
            torch.testing.assert_close(sim.sum(over, 0.1), sim.sum(plain))
            torch.testing.assert_close(sim.sum_of_positives(over, 0.1), sim.sum_of_positives(plain))
            assert torch.equal(sim.scores(), kept)
        assert torch.equal(scores, before)


def test_terms_are_pickled_by_name_or_by_value():
    for term in (itrloss.terms.exponential, itrloss.terms.softplus):
        assert pickle.loads(pickle.dumps(term)) is term
    local = itrloss.pair_term(torch.nn.functional.softplus)
    again = pickle.loads(pickle.dumps(local))
    torch.testing.assert_close(again(V), local(V))


def test_a_term_with_its_own_slope_has_its_gradient():
    @itrloss.pair_term(slope=lambda z: 3 * z**2)
    def cube(scores):
        return scores**3

    gradients = []
    for term in (cube, lambda scores: scores**3):
        v = V.clone().requires_grad_()
        sim = Similarity(v, W, IDS[0], IDS[1] % 4, engine="tiled")
        value = sim.both.sum(term, scale=2.0, shift=0.3)
        gradients.append(torch.autograd.grad(value.sum(), v)[0])
    torch.testing.assert_close(*gradients)


def test_scores_asked_for_under_no_grad_keep_their_gradient():
    v = V.clone().requires_grad_()
    for engine in ("dense", "tiled"):
        sim = Similarity(v, V, engine=engine)
        with torch.no_grad():
            sim.mean_std()
            sim.scores()
        assert sim.logsumexp(2.0).requires_grad


def test_public_names_are_those_and_no_others():
    """Run in a subprocess, because other tests import modules that ``import itrloss`` does not."""
    names = "import itrloss; print(*(name for name in dir(itrloss) if not name.startswith('_')))"
    found = subprocess.run(
        [sys.executable, "-c", names], capture_output=True, text=True, check=True
    )
    public = set(found.stdout.split())
    modules = {path.stem for path in Path(itrloss.__file__).parent.iterdir()}
    assert public - (modules - set(itrloss.__all__)) == set(itrloss.__all__)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_candidates_of_minus_infinity_are_the_last_and_say_so(engine):
    scores = torch.tensor([[-torch.inf, 0.5, -torch.inf, 1.0]])
    top = Similarity.from_scores(scores, *torch.arange(5).split((1, 4)), engine=engine).topk(4)
    assert top.values.tolist() == [[1.0, 0.5, -torch.inf, -torch.inf]]
    assert top.indices[0, :2].tolist() == [3, 1] and set(top.indices[0].tolist()) == set(range(4))


@pytest.mark.parametrize("ids", [(None, None), (torch.arange(4), torch.arange(4).flip(0))])
def test_positives_of_long_embeddings_do_not_overflow_on_tiles(ids):
    """Products of two embeddings beyond 1.8e19 are infinite in float32, unless one is normalised
    before.
    """
    v, w = V, W[:4]
    expected = Similarity(v, w, *ids, engine="dense").both.mean_of_positives(identity)
    found = Similarity(v * 2.0**66, w * 2.0**66, *ids, engine="tiled").both.mean_of_positives(
        identity
    )
    torch.testing.assert_close(found, expected)


@itrloss.pair_term
def overwrites_its_parameter(scores, weight):
    return weight.mul_(2) * scores


@itrloss.pair_term
def overwrites_a_guide(scores, guide):
    return guide.mul_(3) * scores


def matrices(engine):
    """Given scores and embeddings, with captions and one to one."""
    ids = torch.arange(7), torch.arange(9) % 7
    images, texts = sample(7, 8), sample(9, 8, seed=1)
    return [
        Similarity.from_scores(sample(7, 9).tanh(), *ids, engine=engine),
        Similarity(images, texts, *ids, engine=engine),
        Similarity(images, texts[:7], engine=engine),
    ]


SUMS = {
    "negatives": lambda sim, term, *weight: sim.sum(term, *weight),
    "all": lambda sim, term, *weight: sim.sum(term, *weight, over="all"),
    "positives": lambda sim, term, *weight: sim.sum_of_positives(term, *weight),
    "total": lambda sim, term, *weight: sim.weighted_sum(term, *weight),
}


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("name", SUMS)
def test_terms_may_overwrite_their_parameters(name, engine, small_tiles):
    for sim in matrices(engine):
        weight = sample(7, seed=2)
        before = weight.clone()
        found = SUMS[name](sim, overwrites_its_parameter, weight)
        assert torch.equal(weight, before)
        sums = sim.sum(identity) if name == "total" else SUMS[name](sim, identity)
        wanted = 2 * before * sums
        torch.testing.assert_close(found, wanted.sum() if name == "total" else wanted)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_terms_may_overwrite_the_scores_of_a_guide(engine, small_tiles):
    scores, guiding = sample(25, 30).tanh(), sample(25, 30, seed=1)
    ids = torch.arange(25), torch.arange(30)
    sim = Similarity.from_scores(scores, *ids, engine=engine)
    guide = Similarity.from_scores(guiding.clone(), *ids, engine=engine)
    found = sim.sum(overwrites_a_guide, guide=guide, over="all")
    assert torch.equal(guide.scores(), guiding)
    torch.testing.assert_close(found, (3 * guiding * scores).sum(1))


ANSWERS = {
    "scores of positives": lambda sim: sim.positive_scores(),
    "numbers of positives": lambda sim: sim.positive_counts,
    "numbers of negatives": lambda sim: sim.negative_counts,
}


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_may_be_overwritten(name, engine):
    ask = ANSWERS[name]
    for sim in matrices(engine):
        answer = ask(sim)
        before = answer.clone()
        answer.zero_()
        assert torch.equal(ask(sim), before)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_functions_of_pairs_may_work_in_place(engine):
    def value(scores, of_row, of_col):
        return scores.exp_() + of_row.mul_(2) + of_col.mul_(3)

    for sim in matrices(engine):
        n, m = sim.shape
        of_rows, of_cols = sample(n, seed=3), sample(m, seed=4)
        first = sim.mean_of_pairs(value, of_rows.clone(), of_cols.clone())
        assert torch.equal(sim.mean_of_pairs(value, of_rows, of_cols), first)
        if sim.one_to_one:
            assert torch.equal(of_rows, sample(n, seed=3))
            assert torch.equal(of_cols, sample(m, seed=4))
