"""A similarity matrix: its inputs, its engine, and what is kept of it between questions."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..checks import one_of
from . import dense, devices, moments, tiled
from .autograd import AllScores, Request, Targets, ask, pairs_of, plain_pair_scores, plain_product
from .class_sums import positive_sums
from .inputs import NO_SIDE, TILE, Inputs, Side, even_chunks, tile_shape, whole_scores
from .pair_scores import Index, pair_scores
from .pairs import Pairs, segment_sum
from .products import full_float32, matmul, rounds_float32
from .question import Question, Value, joined
from .terms import identity
from .tiled import Best
from .vectors import (
    Embeddings,
    autocast_dtype,
    full_precision,
    host_may_read,
    inverse_norms,
    may_keep,
)

if TYPE_CHECKING:
    from .trial import Form

Engine = Literal["auto", "dense", "tiled", "triton"]
ENGINES = "dense", "tiled", "triton"
Bias = tuple[Tensor | None, Tensor | None]  # (N,) and (M,), added to the scores

# Scores up to which calls of operators and of Python take longer than passes over the matrix. There
# "auto" takes plain PyTorch: 0.75 of the time of tiles at 128 x 512 (``python -m benchmarks
# --losses infonce --shapes 128x128x512 --variants dense tiled``).
DENSE_UP_TO = 2**16
# Scores up to which a matrix is one tile of a CPU. If it is kept, it is kept whole, with one node
# of the graph between it and the embeddings, also where the engine is called "tiled".
ONE_TILE = TILE["cpu"][0]
# Scores up to which launches of kernels take longer than passes over the matrix.
TRITON_FROM = 2**20
MEMORY_BUDGET = 256 * 2**20  # bytes of scores that "auto" keeps (8192 x 8192 in float32)
# Scores at most of a block of half-precision rows, which are converted for each block.
CONVERTED_AT_ONCE = 2**26


def choose_engine(engine: str, numel: int, budget: int, x: Tensor) -> str:
    """Return the engine for ``numel`` scores of embeddings like ``x``: ``"auto"`` chooses one.

    Raises:
        ImportError, TypeError, ValueError: for ``"triton"`` if it is not installed, for float64, or
            on the CPU.
    """
    if engine == "auto":
        return choose_automatically(numel, budget, x)
    one_of("engine", engine, "auto", *ENGINES)
    if engine == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ImportError(
                "engine='triton' needs Triton, which comes with PyTorch for CUDA: "
                "pip install triton"
            )
        if x.dtype == torch.float64:
            raise TypeError("engine: 'triton' computes in float32, and the embeddings are float64")
        if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                "engine: 'triton' needs an accelerator (or TRITON_INTERPRET=1), "
                "got embeddings on the CPU"
            )
    return engine


def choose_automatically(numel: int, budget: int, x: Tensor) -> str:
    """Return the engine that ``"auto"`` takes."""
    itemsize = 8 if x.dtype == torch.float64 else 4
    may_hold = numel * itemsize <= budget
    if torch.compiler.is_compiling():  # the compiler fuses what plain PyTorch does with a matrix
        return "dense" if may_hold else "tiled"
    up_to = DENSE_UP_TO if x.device.type == "cpu" else TRITON_FROM
    if may_hold and numel <= up_to:
        return "dense"
    if x.device.type != "cuda" or x.dtype == torch.float64 or numel <= TRITON_FROM:
        return "tiled"
    return "triton" if devices.is_verified(x.device) else "tiled"


class Matrix:
    """A score matrix (N, M), of embeddings or precomputed. All anchors of it share this object."""

    def __init__(
        self,
        rows: Embeddings,
        cols: Embeddings,
        pairs: Pairs,
        engine: str,
        budget: int,  # bytes of scores that may be kept
        bias: Bias = (None, None),
    ):
        if engine == "triton" and bias == (None, None):
            rows = as_multiplied(rows)
            cols = as_multiplied(cols)
        self.embeddings: tuple[Embeddings, Embeddings] | None = (rows, cols)
        self.given: Embeddings | None = None  # (N, M) precomputed scores
        self.bias = tuple(None if b is None else b.to(rows.dtype) for b in bias)
        self._start(pairs, engine, rows)
        numel = math.prod(self.shape)
        fits = engine == "tiled" and numel * self.dtype.itemsize <= budget
        #: Whether scores are kept, and unit vectors with them, from the first question on.
        self.keeps = engine == "dense" or fits
        #: Whether they are a tensor in the graph, with one node between them and the embeddings.
        self.in_graph = engine == "dense" or (fits and numel <= ONE_TILE)
        #: Whether scores certainly lie in [-1, 1].
        self.bounded = rows.normalize and cols.normalize and bias == (None, None)

    @classmethod
    def of_scores(cls, scores: Embeddings, pairs: Pairs, engine: str) -> Matrix:
        """Return a matrix of precomputed scores (N, M)."""
        matrix = cls.__new__(cls)
        matrix.embeddings = None
        matrix.given = scores
        matrix.bias = (None, None)
        matrix._start(pairs, engine, scores)
        matrix.keeps = False
        matrix.in_graph = True
        matrix.bounded = False
        return matrix

    def _start(self, pairs: Pairs, engine: str, like: Embeddings) -> None:
        """Set what matrices of embeddings and of scores have in common."""
        self.pairs = pairs
        self.shape = pairs.shape
        self.engine = engine
        self.dtype = like.dtype
        self.device = like.x.device
        #: Whether errors of Triton are raised: the user chose it, and ``"auto"`` did not.
        self.strict = False
        #: Whether the columns are a memory: few are positives, and nobody asks for them.
        self.is_memory = False
        self._kept_scores: Tensor | None = None  # (N, M), without a gradient
        self._graph_scores: Tensor | None = None  # (N, M), with their graph
        self._positive_scores: Tensor | None = None  # (P,), where they came along with a sum
        self._summed = False  # whether a sum puts all scores into the graph

    def of_weights(self) -> Matrix:
        """Return a matrix with the weights of matches in place of the scores."""
        weights = self.pairs.weight_matrix().to(self.dtype)
        return Matrix.of_scores(Embeddings(weights, False), self.pairs, self.engine)

    def detach(self) -> Matrix:
        """Return the same scores without a gradient; kept scores are shared, and computed first."""
        if self.embeddings is None:
            assert self.given is not None
            twin = Matrix.of_scores(self.given.detach(), self.pairs, self.engine)
            twin.strict = self.strict
            return twin
        rows, cols = self.embeddings
        if self.keeps and may_keep() and not rounds_float32(self.device):
            self.inputs()  # which forms the scores
        bias = tuple(None if b is None else b.detach() for b in self.bias)
        twin = Matrix(rows.detach(), cols.detach(), self.pairs, self.engine, 0, bias)  # type: ignore[arg-type]
        # They are rounded as these, whatever autocast says now.
        twin.embeddings = rows.detach(), cols.detach()
        twin.keeps = self.keeps
        twin.in_graph = self.in_graph
        twin.bounded = self.bounded
        twin.is_memory = self.is_memory
        twin.strict = self.strict
        twin._kept_scores = self._kept_scores
        if self._graph_scores is not None and self.engine == "dense":
            twin._graph_scores = self._graph_scores.detach()
        return twin

    def without_bias(self) -> Matrix:
        """Return the inner products of the embeddings alone, without a gradient."""
        assert self.embeddings is not None
        rows, cols = (vectors.detach() for vectors in self.embeddings)
        twin = Matrix(rows, cols, self.pairs, "tiled", 0)
        twin.embeddings = rows, cols  # rounded as these
        return twin

    def host_may_read(self) -> bool:
        """Return whether the host may read answers without a synchronisation or a graph break."""
        like = self.given if self.embeddings is None else self.embeddings[0]
        assert like is not None
        return host_may_read(like.x)

    def largest_score(self) -> Tensor | None:
        """Return a bound (1,) of the scores' sizes, which is 1 for unit vectors.

        None for precomputed scores and for biases, whose sizes are not known.
        """
        if self.bounded:
            return torch.ones(1, dtype=self.dtype, device=self.device)
        if self.embeddings is None or self.bias != (None, None):
            return None
        rows, cols = self.embeddings
        return rows.largest_norm() * cols.largest_norm()

    def check_unchanged(self) -> None:
        """Raise an error if inputs were modified in place: kept scores would not match them."""
        if torch.compiler.is_compiling():
            return
        if self.given is not None:
            changed = self.given.changed
            what = "scores were"
        else:
            assert self.embeddings is not None
            changed = self.embeddings[0].changed or self.embeddings[1].changed
            what = "embeddings were"
        if changed:
            raise RuntimeError(
                f"the {what} modified in place after this Similarity was made; make another one"
            )

    # ------------------------------------------------------------------------------------- inputs

    def inputs(self) -> Inputs:
        """Return the inputs of a pass. Scores that are kept are computed at the first call.

        That saves one product in backward and in each later pass: 0.81 of the time of HAL at 1024 x
        1024 x 512 (``pytest benchmarks/test_micro.py --benchmark-enable -k kept_scores``).
        """
        if self.embeddings is None or (torch.compiler.is_compiling() and self.engine == "dense"):
            return Inputs(NO_SIDE, NO_SIDE, self.graph_scores().detach())
        rows, _ = self.embeddings
        if not self.keeps or not may_keep():
            return self._inputs_without_scores()
        sides = self._kept_sides()
        if self._kept_scores is None and self.in_graph and self.embedding_targets().any_trained():
            self._kept_scores = self.graph_scores().detach()
        if self._kept_scores is None:
            with torch.no_grad(), full_precision(rows.x):
                self._kept_scores = whole_scores(*sides)
        return Inputs(*sides, self._kept_scores)

    def _inputs_without_scores(self) -> Inputs:
        """Return the inputs of a pass over the vectors alone."""
        assert self.embeddings is not None
        rows, cols = self.embeddings
        if self.keeps and may_keep():
            return Inputs(*self._kept_sides(), None)
        return Inputs(self._side(rows, 0), self._side(cols, 1), None)

    def _side(self, embeddings: Embeddings, side: int) -> Side:
        return Side(embeddings.x, embeddings.inverse_norms(), None, self.bias[side])

    def _kept_sides(self) -> tuple[Side, Side]:
        """Return both sides at unit length."""
        assert self.embeddings is not None
        rows, cols = self.embeddings
        row_unit, row_inv = rows.kept()
        col_unit, col_inv = cols.kept()
        row_bias, col_bias = self.bias
        return Side(None, row_inv, row_unit, row_bias), Side(None, col_inv, col_unit, col_bias)

    def targets(self) -> Targets:
        """Return what gets the gradient of sums over the scores."""
        if self.in_graph and (self.embeddings is None or self._graph_scores is not None):
            return Targets(scores=self.graph_scores())
        return self.embedding_targets()

    def embedding_targets(self) -> Targets:
        """Return the embeddings and biases that get a gradient, or the precomputed scores."""
        if self.embeddings is None:
            return Targets(scores=self.graph_scores())
        rows, cols = self.embeddings
        if self.engine == "dense":  # all questions meet in the scores, which rounds once, too
            return Targets(rows.target, cols.target, *self.bias)
        return Targets(rows.gradient_target(), cols.gradient_target(), *self.bias)

    def graph_scores(self) -> Tensor:
        """Return the (N, M) scores with their graph, not to be modified or handed out."""
        if self._graph_scores is not None:
            return self._graph_scores
        keep = may_keep()
        with torch.set_grad_enabled(keep):  # with their graph, even if first used under no_grad
            scores = self._scores_of_graph()
        if keep and self.in_graph:
            self._graph_scores = scores
        return scores

    def _scores_of_graph(self) -> Tensor:
        """Return the (N, M) scores with their graph: one node, or plain PyTorch when compiled."""
        if self.embeddings is None:
            assert self.given is not None
            return self.given.x.to(self.dtype)
        rows, cols = self.embeddings
        if torch.compiler.is_compiling():
            return plain_product(rows.differentiable(), cols.differentiable(), *self.bias)
        # Their gradient goes to the unit vectors, whose other matrices add theirs before all of it
        # goes back to the embeddings at once: 12 launches less of M-DCL (python -m
        # benchmarks.launches, with and without).
        units = Targets(rows.differentiable(), cols.differentiable(), *self.bias)
        return AllScores.apply(*units[:4], self._plain_inputs())  # type: ignore[return-value]

    def scores(self) -> Tensor:
        """Return the (N, M) scores, with their graph if they are trained; not to be modified."""
        trained = torch.is_grad_enabled() and self.embedding_targets().any_trained()
        if trained or self.embeddings is None:
            return self.graph_scores()
        inputs = self._exact_inputs()
        if inputs.scores is not None:
            return inputs.scores
        with torch.no_grad(), full_precision(inputs.like), full_float32(self.device):
            return whole_scores(inputs.rows, inputs.cols)

    def _exact_inputs(self) -> Inputs:
        """Return the inputs of scores without a gradient: no setting for training rounds them."""
        if self.embeddings is None:
            return self.inputs()
        is_rounded = any(vectors.x is not vectors.given for vectors in self.embeddings)
        if not is_rounded and not rounds_float32(self.device):
            return self.inputs()
        sides: list[Side] = []
        for vectors, bias in zip(self.embeddings, self.bias, strict=True):
            with torch.no_grad():
                inv = inverse_norms(vectors.given) if vectors.normalize else None
            sides.append(Side(vectors.given, inv, None, bias))
        return Inputs(sides[0], sides[1], None)

    # ------------------------------------------------------------------------------------ answers

    def sums(self, question: Question, guide: Matrix | None = None) -> Tensor:
        """Return the sums (A,) of a question; a ``guide`` has the scores of its limits."""
        self.check_unchanged()
        if guide is not None:
            guide.check_unchanged()
        self._summed = self._summed or torch.is_grad_enabled()
        if self.engine == "dense":
            other = None if guide is None else guide.scores().detach().to(self.dtype)
            return dense.sums(question, self.graph_scores(), other)
        by_moments = guide is None and self._has_gain_by_moments(question)
        inputs = self._inputs_without_scores() if by_moments else self.inputs()
        pairs = self._positives_along(question)
        early = False
        form = None
        if guide is None:
            early = self._finds_early(question, is_total=False)
            form = self._form(question, inputs, pairs, early)
        request = Request(
            question=question,
            inputs=inputs,
            guide=None if guide is None else guide.inputs(),
            pairs=pairs,
            form=form,
            strict=self.strict,
            early=early and form is not None,
            moments=by_moments,
        )
        return self._asked(request)

    def _asked(self, request: Request) -> Tensor:
        """Return the sums of a request, and keep the scores of positives that come along."""
        sums, positives = ask(request, self.targets())
        if request.pairs is not None:
            self._positive_scores = positives
        assert sums is not None
        return sums

    def _has_gain_by_moments(self, question: Question) -> bool:
        """Return whether sums of scores and of squares are best computed without the scores.

        They are in float64, which CPUs multiply half as fast as float32, and most GPUs far slower.
        """
        if self.embeddings is None or self.in_graph or self.bias != (None, None):
            return False
        if self.device.type != "cpu" or self.dtype == torch.float64:
            return False
        dim = self.embeddings[0].x.shape[1]
        return moments.answers(question) and moments.has_gain(question, dim, self.keeps)

    def weighted_sum(self, question: Question, weights: Value) -> Tensor:
        """Return the () total of a question's sums, times weights without a gradient."""
        request = self._early_request(question, weights)
        if request is None:
            return (self.sums(question) * weights).sum()
        self.check_unchanged()
        self._summed = True
        return self._asked(request)

    def _early_request(self, question: Question, weights: Value) -> Request | None:
        """Return the request of a total if its gradient is to be found in the forward pass."""
        if not self._finds_early(question, is_total=True):
            return None
        if not isinstance(weights, Tensor):
            weights = torch.full((1,), weights, dtype=self.dtype, device=self.device)
        inputs = self.inputs()
        pairs = self._positives_along(question)
        form = self._form(question, inputs, pairs, True, weights)
        if form is None:
            return None
        return Request(question, inputs, None, pairs, form, self.strict, True, weights)

    def _finds_early(self, question: Question, is_total: bool) -> bool:
        """Return whether Triton finds the gradient of vectors along with sums, or their total."""
        if not torch.is_grad_enabled() or self.embeddings is None or not self._may_use_triton():
            return False
        from . import triton

        dtype = self.embeddings[0].x.dtype
        rows, cols = self.targets()[:2]
        return triton.may_find_early(question, dtype, rows, cols, is_total)

    def _positives_along(self, question: Question) -> tuple[Index, Index] | None:
        """Return the positive pairs if their scores are to be computed along with a sum.

        Losses that sum over all candidates seldom ask for positives one by one.
        """
        if not torch.is_grad_enabled() or self._positive_scores is not None:
            return None
        if self.pairs.one_to_one:
            return None, None
        if self.is_memory or question.over != "negatives" or not self.lists_positives():
            return None
        return self.pairs.listed

    def lists_positives(self) -> bool:
        """Return whether sums over positives are over listed pairs, not over all scores.

        An accelerator has to tell the host how many there are. If plain PyTorch has the scores at
        hand, it does without.
        """
        if self.pairs.one_to_one:
            return True
        if not self.pairs.listable:
            return False
        if self.engine == "dense" and not self.host_may_read():
            return False
        return self.pairs.are_few

    def sums_by_class(self) -> bool:
        """Return whether plain scores of positives are best summed from the vectors of classes.

        On an accelerator they are, as it need not wait until the pairs are listed.
        """
        if self.embeddings is None or self.pairs.ids[0] is None or self.engine == "dense":
            return False
        if torch.compiler.is_compiling():
            return False
        return not self._lists_positives_at_no_cost()

    def sums_of_positive_scores(self, sides: tuple[int, ...]) -> Tensor:
        """Return the sums (A,) of the scores of each anchor's positives, from sums by class."""
        self.check_unchanged()
        inputs = self.inputs()
        targets = self.embedding_targets()
        by_triton = self.engine == "triton"
        sums = [positive_sums(inputs, self.pairs, side, targets, by_triton) for side in sides]
        return torch.cat(sums)

    def _form(
        self,
        question: Question,
        inputs: Inputs,
        pairs: tuple[Index, Index] | None,
        early: bool,
        weights: Tensor | None = None,
    ) -> Form | None:
        """Return the form of a question's sums if Triton has kernels for it that work."""
        if not self._may_use_triton():
            return None
        from . import trial, triton

        if not triton.has_kernel(question):
            return None
        rows, cols, _, _, scores = self.targets()
        gradients = trial.gradients_needed(question, rows, cols, scores)
        form = trial.form_of(question, inputs, gradients, pairs, early, weights)
        return form if self.strict or trial.works(form) else None

    def _may_use_triton(self) -> bool:
        """Return whether to look for a kernel; none adds biases.

        A user who chose Triton gets its errors, without a trial. Where ``"auto"`` did, a trial
        would interrupt compiled code.
        """
        if self.engine != "triton" or self.bias != (None, None):
            return False
        return self.strict or not torch.compiler.is_compiling()

    @property
    def skips_needless(self) -> bool:
        """Whether exponentials and maxima that the device finds needless take no time.

        Kernels return at once, but cuBLAS would multiply float32 embeddings all the same.
        """
        if self.engine != "triton" or self.embeddings is None or self.bias != (None, None):
            return False
        from . import triton

        rows, cols = self.embeddings
        return triton.fused(rows.x, cols.x)

    def highest(self, question: Question, guide: Matrix | None = None) -> Tensor:
        """Return the highest ``scale S`` (A,) that counts, -inf without any. No gradient."""
        self.check_unchanged()
        with torch.no_grad():
            if self.engine == "dense":
                other = None if guide is None else guide.scores().to(self.dtype)
                return dense.highest(question, self.graph_scores(), other)
            inputs = self.inputs()
            with full_precision(inputs.like):
                if guide is None and self._may_use_triton():
                    return self._highest_by_triton(question, inputs)
                return tiled.highest(question, inputs, None if guide is None else guide.inputs())

    def _highest_by_triton(self, question: Question, inputs: Inputs) -> Tensor:
        """Return the highest ``scale S`` (A,), by Triton if its kernel works."""
        from . import trial, triton

        form = trial.form_of_maximum(question, inputs)
        if self.strict or trial.works(form):
            try:
                return triton.highest(question, inputs)
            except Exception as error:
                trial.refuse(form, self.strict, error)
        return tiled.highest(question, inputs, None)

    def about_summed_negatives(self, sides: tuple[int, ...]) -> Tensor:
        """Return about the sums (A,) of the scores of each anchor's negatives. No gradient.

        Divided by the number of negatives, they are near their mean.
        """
        self.check_unchanged()
        with torch.no_grad():
            # Precomputed scores may be infinite at positives; those of a small matrix are at hand,
            # and a mask launches less than sums of positives do.
            compiling = torch.compiler.is_compiling()
            masks = self.in_graph and not self.pairs.one_to_one and not compiling
            by_list = not self.pairs.others_are_negatives
            if self.embeddings is None or masks or by_list:
                return self.sums(Question(self.pairs, sides, (identity,)))
            inputs = self.inputs()
            sums: list[Tensor] = []
            with full_precision(inputs.like):
                for side in sides:
                    total = tiled.summed_scores(inputs, side)
                    candidates = self.shape[1 - side]
                    # One positive hardly moves a mean, but several may score far from the
                    # negatives.
                    if compiling and not self.pairs.one_to_one:
                        total = total * (self.pairs.counts(side)[1] / candidates)
                    elif not self.pairs.one_to_one:
                        total = total - self._positives_of_side(inputs, side)
                    sums.append(total)
            if self.pairs.one_to_one:
                return joined(sums) * (1 - 1 / max(self.shape[0], 1))
            return joined(sums)

    def _positives_of_side(self, inputs: Inputs, side: int) -> Tensor:
        """Return the sums (A,) of the scores of each anchor's positives, without a gradient."""
        if self.pairs.ids[0] is not None and not self._lists_positives_at_no_cost():
            targets = self.embedding_targets()
            return positive_sums(inputs, self.pairs, side, targets, self.engine == "triton")
        scores = pair_scores(inputs, *self.pairs.listed)
        return segment_sum(scores, self.pairs.listed[side], self.shape[side])

    def _lists_positives_at_no_cost(self) -> bool:
        """Return whether positives are few, and the host knows them without waiting."""
        return self.host_may_read() and self.lists_positives()

    def hardest(self, question: Question) -> Best:
        """Return the highest score that counts of each anchor, and its candidate: (A,).

        The gradient of a score goes to the embeddings of its pair alone.
        """
        self.check_unchanged()
        with torch.no_grad():
            if self.engine == "dense":
                best = Best(*dense.hardest(question, self.graph_scores()))
            else:
                inputs = self.inputs()
                with full_precision(inputs.like):
                    best = tiled.hardest(question, inputs)
        if not torch.is_grad_enabled() or not self.embedding_targets().any_trained():
            return best
        rows, cols = self._pairs_of(question.sides, best.indices.clamp_min(0))
        scores = self._pair_and_positive_scores(rows, cols)
        return Best(torch.where(best.indices < 0, -math.inf, scores), best.indices)

    def _pairs_of(self, sides: tuple[int, ...], others: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows and columns (A,) of anchors of some sides with a candidate each."""
        n, m = self.shape
        all_rows = torch.arange(n, device=self.device)
        all_cols = torch.arange(m, device=self.device)
        if sides == (0,):
            return all_rows, others
        if sides == (1,):
            return others, all_cols
        return torch.cat([all_rows, others[n:]]), torch.cat([others[:n], all_cols])

    def _pair_and_positive_scores(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return the scores of pairs, with the positives' in the same node of the graph if few.

        That is one gradient of all embeddings less, 0.88 of the time (python -m benchmarks --losses
        "triplet hardest" --shapes 512x512x1024, with and without).
        """
        alone = self.engine == "dense" or self._positive_scores is not None
        if alone or not self.lists_positives():
            return self.pair_scores(rows, cols)
        positive_rows, positive_cols = self.pairs.listed
        count = len(positive_rows)
        if count > sum(self.shape):
            return self.pair_scores(rows, cols)
        scores = self.pair_scores(
            torch.cat([positive_rows, rows]), torch.cat([positive_cols, cols])
        )
        self._positive_scores = scores[:count]
        return scores[count:]

    def sorted_excesses(self, question: Question, margin: float) -> Tensor:
        """Return the (A,) sums of hinges of all positives, which need not be listed."""
        return dense.sorted_excesses(question, self.graph_scores(), margin)

    # -------------------------------------------------------------------------------------- pairs

    def pair_scores(self, i: Index, j: Index) -> Tensor:
        """Return the differentiable (P,) scores of rows i with columns j; None: row p, column p."""
        self.check_unchanged()
        if self.engine == "dense" and self._scores_pairs_alone(i):
            return plain_pair_scores(self._plain_inputs(), Targets(), i, j)
        if self.engine == "dense":
            return pairs_of(self.graph_scores(), i, j)
        request = Request(None, self.inputs(), None, (i, j))
        # Where no sum puts all scores into the graph, pairs alone save two products in backward.
        targets = self.targets() if self._summed else self.embedding_targets()
        scores = ask(request, targets)[1]
        assert scores is not None
        return scores

    def _scores_pairs_alone(self, i: Index) -> bool:
        """Return whether plain PyTorch scores some pairs by themselves, which saves two products.

        In eager mode it does so unless the scores are there already: copies of the vectors of
        listed pairs take longer than the products of backward, 1.3 times as long for the triplet
        loss at 128 x 128 x 512. Compiled, they are not made, and pairs alone take half of the time
        at 512 x 512 x 1024 (``python -m benchmarks --losses "triplet hardest" --shapes 128x128x512
        --variants dense compiled``, with and without).
        """
        if self.embeddings is None or self._summed:
            return False
        if i is not None and len(i) > sum(self.shape):
            return False
        return torch.compiler.is_compiling() or self._graph_scores is None

    def _plain_inputs(self) -> Inputs:
        """Return the vectors at unit length with their graph."""
        assert self.embeddings is not None
        rows, cols = self.embeddings
        row_bias, col_bias = self.bias
        return Inputs(
            Side(None, None, rows.differentiable(), row_bias),
            Side(None, None, cols.differentiable(), col_bias),
            None,
        )

    def positive_scores(self) -> Tensor:
        """Return the (P,) scores of the positive pairs in the order of ``pairs.listed``."""
        self.check_unchanged()
        if self._positive_scores is not None:
            return self._positive_scores
        if self.pairs.one_to_one:
            scores = self.pair_scores(None, None)
        else:
            scores = self.pair_scores(*self.pairs.listed)
        if torch.is_grad_enabled() and may_keep():
            self._positive_scores = scores
        return scores

    # ------------------------------------------------------------------------------------- blocks

    def blocks(self, side: int, size: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of a side's anchors, each with a copy of its scores (B, C), no gradient.

        ``size``: the number of scores of a block at most.
        """
        self.check_unchanged()
        n = self.shape[side]
        m = self.shape[1 - side]
        if self.given is None:
            inputs = self._exact_inputs()
        else:  # half precision is converted block by block
            inputs = Inputs(NO_SIDE, NO_SIDE, self.given.x.detach())
        if size is None:  # half-precision embeddings are converted anew for each block
            height, width = tile_shape(n, m, self.device.type)
            size = max(height * width, min(128 * m, CONVERTED_AT_ONCE))
        for part in even_chunks(n, max(1, size // m)):
            if inputs.scores is not None:
                whole = inputs.scores.T if side else inputs.scores
                block = contiguous_copy(whole[part], self.dtype)
            else:
                with torch.no_grad(), full_precision(inputs.like), full_float32(self.device):
                    block = block_of_scores(inputs, side, part)
            yield part, block


def contiguous_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy of a part (B, C) of a matrix or of its transpose.

    A part of the transpose is first copied as it lies in memory, and then transposed, which PyTorch
    does by blocks: 7 ns a number in place of 26 for 200 columns of 5000 x 25000 scores on an EPYC
    (``pytest benchmarks/test_micro.py --benchmark-enable -k columns``).
    """
    layout = torch.contiguous_format
    if x.stride(1) == 1:
        return x.to(dtype, copy=True, memory_format=layout)
    return x.T.contiguous().to(dtype).T.clone(memory_format=layout)


def as_multiplied(vectors: Embeddings) -> Embeddings:
    """Return vectors in the dtype in which Triton's kernels multiply them.

    They multiply half precision, and leave float32 to cuBLAS. So they get float32 vectors in
    autocast's dtype, if it is on. Other engines multiply all in float32, and would gain nothing
    from rounding.
    """
    dtype = autocast_dtype(vectors.x)
    return vectors if dtype is None else vectors.rounded(dtype)


def block_of_scores(inputs: Inputs, side: int, part: slice) -> Tensor:
    """Return the scores (B, C) of some of a side's vectors with all of the others."""
    own, others = inputs.sides(side)
    left = own.vectors(part)
    candidates = len(others.like)
    width = tile_shape(len(left), candidates, left.device.type)[1]
    block = left.new_empty(len(left), candidates)
    for c in even_chunks(candidates, width):
        block[:, c] = matmul(left, others.vectors(c).T)
    if own.bias is not None:
        block += own.bias[part, None]
    if others.bias is not None:
        block += others.bias
    return block
