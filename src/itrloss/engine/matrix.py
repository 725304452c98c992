"""A similarity matrix: its relation, its engine, and what its scores are made of."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import one_of
from ..torch_versions import VERSION, is_compiling
from . import dense, devices, tiled
from .autograd import Request, Targets, ask, with_biases
from .inputs import NO_SIDE, TILE, Inputs, Side, even_chunks, tile_shape, whole_scores
from .pair_scores import Index
from .products import full_float32, matmul, rounds_float32
from .question import Question, Value, is_trained, joined
from .relation import Relation
from .step import NO_COLUMNS, BlockSums, Layout, Step, StepPart, pairs_of
from .terms import identity, square
from .tiled import Hardest
from .vectors import (
    Embeddings,
    autocast_dtype,
    host_may_read,
    inverse_norms,
    is_autocast_on,
    may_keep,
    normalized,
)

Engine = Literal["auto", "dense", "tiled", "triton"]
ENGINES = "dense", "tiled", "triton"
Bias = tuple[Tensor | None, Tensor | None]  # (N,) and (M,), added to the scores

# Scores up to which a matrix is small: one block, whose scores are kept in the graph.
SMALL = TILE["cpu"][0]
# Scores up to which pairs of a small matrix have their gradient by way of all scores: copies of the
# vectors of listed pairs take longer than the products of backward, 1.3 times as long for the
# triplet loss at 128 x 128 x 512 (``python -m benchmarks --losses "triplet hardest" --shapes
# 128x128x512``).
PAIRS_BY_SCORES = 2**16
# Scores up to which launches of kernels take longer than passes over the matrix.
TRITON_FROM = 2**20
# In a CUDA graph, where launches cost no time: InfoNCE of 1024 x 1024 x 512 takes 0.088 ms in
# Triton and 0.227 in tiles (an H100, ``python -m benchmarks gpu``).
TRITON_FROM_IN_GRAPHS = 2**16
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
        if VERSION < (2, 8) or importlib.util.find_spec("triton") is None:
            raise ImportError(
                "engine='triton' needs PyTorch 2.8 or newer, and Triton, which comes with PyTorch "
                "for CUDA: pip install triton"
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
    if is_compiling():  # the compiler fuses what plain PyTorch does with a matrix
        itemsize = 8 if x.dtype == torch.float64 else 4
        return "dense" if numel * itemsize <= budget else "tiled"
    least = TRITON_FROM_IN_GRAPHS if devices.is_recorded(x.device) else TRITON_FROM
    if x.device.type != "cuda" or x.dtype == torch.float64 or numel <= least:
        return "tiled"
    return "triton" if devices.is_verified(x.device) else "tiled"


def is_small(engine: str, numel: int, budget: int, dtype: torch.dtype) -> bool:
    """Return whether the scores of a matrix are kept in the graph of its step."""
    if engine == "dense":
        return True
    return engine == "tiled" and numel <= SMALL and numel * torch.finfo(dtype).bits <= 8 * budget


class Matrix:
    """A score matrix (N, M), of embeddings or precomputed. All anchors of it share this object.

    Its scores are in the graph (given, or of a small matrix), or they are kept without one, or they
    are multiplied block by block in each pass.
    """

    def __init__(  # noqa: PLR0913 — made in this module alone, always by name
        self,
        relation: Relation,
        engine: str,
        like: Embeddings,  # for the dtype and the device
        *,
        vectors: tuple[Embeddings, Embeddings] | None = None,
        given: Embeddings | None = None,  # (N, M) scores that were passed in
        part: StepPart | None = None,  # of a small matrix
        keeps_scores: bool = False,  # whether scores are kept without a graph, with unit vectors
        is_memory: bool = False,  # the columns are: few are positives, and nobody asks for them
        sources: tuple[Embeddings, ...] = (),  # what the rows are made of, if it is more than one
    ):
        self.relation = relation
        self.shape = relation.shape
        self.engine = engine
        self.dtype = like.dtype
        self.device = like.x.device
        self.embeddings = vectors
        self.given = given
        self._like = like
        self.bias: Bias = (None, None)
        if vectors is not None:
            self.bias = vectors[0].bias, vectors[1].bias
        self.is_biased = self.bias[0] is not None or self.bias[1] is not None
        self.is_memory = is_memory
        self.keeps_scores = keeps_scores
        self._part = part
        self._scores: Tensor | None = None  # (N, M) in the graph
        self._inputs: Inputs | None = None  # of passes over the vectors, or over kept scores
        self._positives: Tensor | None = None  # (P,), where they came along with a sum
        self._summed = False  # whether sums put all scores into the graph
        #: Whether scores are a tensor in the graph.
        self.in_graph = given is not None or part is not None
        #: Whether sums keep the slopes of the only block.
        self._keeps_slopes = self.in_graph and engine == "tiled"
        if math.prod(self.shape) > SMALL or is_compiling():
            self._keeps_slopes = False
        self._sources = vectors or sources or (like,)
        #: Whether scores certainly lie in [-1, 1].
        self.bounded = not self.is_biased
        for x in self._sources:
            self.bounded = self.bounded and x.is_unit

    @classmethod
    def of_scores(cls, scores: Embeddings, relation: Relation, engine: str) -> Matrix:
        """Return a matrix of precomputed scores (N, M)."""
        return cls(relation, engine, scores, given=scores)

    @classmethod
    def of_embeddings(
        cls,
        rows: Embeddings,
        cols: Embeddings,
        relation: Relation,
        engine: str,
        budget: int,  # bytes of scores that may be kept
    ) -> Matrix:
        """Return the matrix of the products of embeddings, with their biases."""
        if not is_small(engine, math.prod(relation.shape), budget, rows.dtype):
            return large_matrix(rows, cols, relation, engine, budget)
        part = part_of(rows.target, cols.target, rows.normalize)
        return cls(relation, engine, rows, vectors=(rows, cols), part=part)

    def of_weights(self) -> Matrix:
        """Return a matrix with the weights of matches in place of the scores."""
        weights = self.relation.weight_matrix().to(self.dtype)
        return Matrix.of_scores(Embeddings(weights, False), self.relation, self.engine)

    def detach(self, relation: Relation | None = None) -> Matrix:
        """Return the same scores without a gradient; kept scores are shared, and computed first.

        ``relation``: another one of the same shape, in place of the matrix's own.
        """
        asks = self.keeps_scores or (self._part is not None and bool(self._part.numbers))
        if asks and may_keep() and not rounds_float32(self.device):
            self.inputs()  # which forms the scores
        vectors = self.embeddings
        if vectors is not None:
            vectors = vectors[0].detach(), vectors[1].detach()
        twin = Matrix(
            self.relation if relation is None else relation,
            self.engine,
            self._like.detach(),
            vectors=vectors,
            given=None if self.given is None else self.given.detach(),
            part=None if self._part is None else self._part.detach(),
            keeps_scores=self.keeps_scores,
            is_memory=self.is_memory,
            sources=tuple([x.detach() for x in self._sources]) if vectors is None else (),
        )
        twin._inputs = self._inputs
        if self._scores is not None:
            twin._scores = self._scores.detach()
        return twin

    def without_bias(self) -> Matrix:
        """Return the inner products of the embeddings alone, without a gradient."""
        self.check_unchanged()
        assert self.embeddings is not None
        rows, cols = (Embeddings(x.given.detach(), x.normalize) for x in self.embeddings)
        return large_matrix(rows, cols, self.relation, "tiled", 0)

    def host_may_read(self) -> bool:
        """Return whether the host may read answers without a synchronisation or a graph break."""
        return host_may_read(self._like.x)

    def check_unchanged(self) -> None:
        """Raise an error if inputs were modified in place that are still to be read."""
        if is_compiling():
            return
        what = ""
        for x in self._sources:
            if x.version is not None and x.version != x.given._version:
                what = "embeddings were" if self.given is None else "scores were"
        if self.is_biased and any([x.bias_changed for x in self._sources]):
            what = "biases were"
        if what:
            raise RuntimeError(
                f"the {what} modified in place after this Similarity was made; make another one"
            )

    # ------------------------------------------------------------------------------------- inputs

    def scores_in_graph(self) -> Tensor | None:
        """Return the (N, M) scores with their graph, not to be modified or handed out.

        None where there are none: they are multiplied in each pass.
        """
        if not self.in_graph:
            return None
        self.check_unchanged()
        if self._scores is not None:
            return self._scores
        keeps = may_keep()
        with torch.set_grad_enabled(keeps):  # also if first used under no_grad
            if self.given is not None:
                scores = self.given.x.to(self.dtype)
            else:
                assert self._part is not None
                scores = self._part.scores()
                if self.is_biased:
                    scores = with_biases(scores, *self.bias)
        if keeps:
            self._scores = scores
        return scores

    def inputs(self) -> Inputs:
        """Return the inputs of a pass. Scores that are kept are computed at the first call.

        That saves one product in backward and in each later pass: 0.81 of the time of HAL at 1024 x
        1024 x 512 (``pytest benchmarks/test_micro.py --benchmark-enable -k kept_scores``).
        """
        scores = self.scores_in_graph()
        if scores is not None:
            return Inputs(NO_SIDE, NO_SIDE, scores.detach())
        self.check_unchanged()
        if self._inputs is not None:
            return self._inputs
        keeps = may_keep()
        inputs = self._inputs_of_vectors(self.keeps_scores and keeps)
        if keeps:
            self._inputs = inputs
        return inputs

    def _inputs_of_vectors(self, keeps_scores: bool) -> Inputs:
        """Return the vectors of a large matrix, and its scores with the unit vectors if kept."""
        assert self.embeddings is not None
        find = inverse_norms
        if self.engine == "triton" and not is_compiling():
            from . import triton

            find = triton.inverse_norms
        sides: list[Side] = []
        for vectors in self.embeddings:
            unit = vectors.unit() if keeps_scores else None
            x = vectors.x.detach() if unit is None else None
            sides.append(Side(x, vectors.inverse_norms(find), unit, vectors.constant_bias))
        rows, cols = sides
        if not keeps_scores:
            return Inputs(rows, cols, None)
        return Inputs(rows, cols, whole_scores(rows, cols))

    def targets(self) -> Targets:
        """Return what gets the gradient of sums over the scores."""
        scores = self.scores_in_graph()
        if scores is not None:
            return Targets(scores=scores)
        assert self.embeddings is not None
        rows, cols = self.embeddings
        return Targets(rows.gradient_target(), cols.gradient_target(), *self.bias)

    def scores(self) -> Tensor:
        """Return the (N, M) scores, with their graph if they are trained; not to be modified."""
        if self.given is not None or (torch.is_grad_enabled() and self._is_trained()):
            scores = self.scores_in_graph()
            return self._differentiable_scores() if scores is None else scores
        inputs = self._exact_inputs()
        if inputs.scores is not None:
            return inputs.scores
        with full_float32(self.device):
            return whole_scores(inputs.rows, inputs.cols)

    def _is_trained(self) -> bool:
        """Return whether vectors, given scores or biases get a gradient."""
        for source in self._sources:
            if source.target.requires_grad:
                return True
        return any([is_trained(x) for x in self.bias])

    def _differentiable_scores(self) -> Tensor:
        """Return the (N, M) scores of a large matrix with their graph."""
        assert self.embeddings is not None
        rows, cols = (vectors.target for vectors in self.embeddings)
        part = part_of(rows, cols, self.embeddings[0].normalize)
        return with_biases(part.scores(), *self.bias)

    def _exact_inputs(self) -> Inputs:
        """Return the inputs of scores without a gradient: no setting for training rounds them."""
        if self.embeddings is None:
            return self.inputs()
        is_rounded = any([vectors.is_rounded for vectors in self.embeddings])
        if not is_rounded and not rounds_float32(self.device):
            return self.inputs()
        self.check_unchanged()
        sides: list[Side] = []
        for vectors in self.embeddings:
            given = Embeddings(vectors.given.detach(), vectors.normalize)
            sides.append(Side(given.x, given.inverse_norms(), None, vectors.constant_bias))
        return Inputs(sides[0], sides[1], None)

    # ------------------------------------------------------------------------------------ answers

    def sums(self, question: Question, guide: Matrix | None = None) -> Tensor:
        """Return the sums (A,) of a question; a ``guide`` has the scores of its limits.

        A small matrix, whose scores are in the graph, is one block: :meth:`_sums_of_block`. A large
        one is visited tile by tile: :func:`itrloss.engine.autograd.ask`.
        """
        self._summed = self._summed or torch.is_grad_enabled()
        if self.engine == "dense":
            other = None if guide is None else guide.scores().detach().to(self.dtype)
            scores = self.scores_in_graph()
            assert scores is not None
            return dense.sums(question, scores, other)
        keeps = self._keeps_slopes and torch.is_grad_enabled()
        if keeps and guide is None and question.term.slope is not None:
            return self._sums_of_block(question)
        by_triton = guide is None and self._has_kernel(question)
        targets = self.targets()
        request = Request(
            question,
            self.inputs(),
            guide=None if guide is None else guide.inputs(),
            pairs=self._positives_along(question),
            by_triton=by_triton,
            early=by_triton and self._finds_early(question, targets, is_total=False),
        )
        return self._answered(request, ask(request, targets))

    def _sums_of_block(self, question: Question) -> Tensor:
        """Return the sums (A,) over the only block, whose scores are in the graph."""
        scores = self.scores_in_graph()
        assert scores is not None
        pairs = self._positives_along(question)
        sums, positives = BlockSums.apply(question, pairs, scores, *question.values)
        if pairs is not None:
            self._positives = positives
        return sums

    def _answered(self, request: Request, answer: tuple[Tensor | None, Tensor | None]) -> Tensor:
        """Return the sums of an answer, and keep the scores of positives that came along."""
        sums, positives = answer
        if request.pairs is not None:
            self._positives = positives
        assert sums is not None
        return sums

    def weighted_sum(self, question: Question, weights: Value) -> Tensor:
        """Return the () total of a question's sums, times weights without a gradient.

        Triton finds its gradient along with it, where the vectors have one.
        """
        targets: Targets | None = None
        if self._has_kernel(question):
            targets = self.targets()
        if targets is None or not self._finds_early(question, targets, is_total=True):
            sums = self.sums(question)
            return (sums * weights).sum() if isinstance(weights, Tensor) else sums.sum() * weights
        self._summed = True
        pairs = self._positives_along(question)
        request = Request(question, self.inputs(), None, pairs, True, True, weights)
        return self._answered(request, ask(request, targets))

    def _finds_early(self, question: Question, targets: Targets, is_total: bool) -> bool:
        """Return whether Triton finds the gradient of vectors along with sums, or their total."""
        if not torch.is_grad_enabled() or self.embeddings is None:
            return False
        from . import triton

        like = self.embeddings[0].x
        return triton.may_find_early(question, like, targets.rows, targets.cols, is_total)

    def _positives_along(self, question: Question) -> tuple[Index, Index] | None:
        """Return the positive pairs if their scores are to be computed along with a sum.

        Losses that sum over all candidates seldom ask for positives one by one.
        """
        if not torch.is_grad_enabled() or self._positives is not None:
            return None
        if self.relation.one_to_one:
            return None, None
        if self.is_memory or question.over != "negatives" or not self.lists_positives():
            return None
        return self.relation.listed

    def lists_positives(self) -> bool:
        """Return whether sums over positives are over listed pairs, not over all scores.

        An accelerator has to tell the host how many there are. If the scores are at hand, it does
        without.
        """
        if self.relation.one_to_one:
            return True
        if not self.relation.listable:
            return False
        if self.in_graph and not self.host_may_read():
            return False
        return self.relation.are_few

    def _has_kernel(self, question: Question) -> bool:
        """Return whether Triton answers a question; none of its kernels adds biases."""
        if self.engine != "triton" or self.is_biased:
            return False
        from . import triton

        return triton.has_kernel(question)

    def highest(self, question: Question, guide: Matrix | None = None) -> Tensor:
        """Return the highest ``scale S`` (A,) that counts, -inf without any. No gradient."""
        with torch.no_grad():
            if self.engine == "dense":
                other = None if guide is None else guide.scores().to(self.dtype)
                return dense.highest(question, self.scores(), other)
            inputs = self.inputs()
            if guide is None and self.engine == "triton" and not self.is_biased:
                from . import triton

                return triton.highest(question, inputs)
            return tiled.highest(question, inputs, None if guide is None else guide.inputs())

    def std(self, sides: tuple[int, ...]) -> Tensor:
        """Return the (A,) standard deviations of each anchor's negatives' scores, 0 without any. No
        gradient.
        """
        if self._keeps_slopes:
            scores = self.scores_in_graph()
            assert scores is not None
            return tiled.std_of_block(self.relation, scores, sides)
        number, _, squares = self.moments(sides)
        return (squares / number.clamp_min(1)).sqrt()

    def moments(self, sides: tuple[int, ...]) -> Tensor:
        """Return the number of each anchor's negatives, the mean of their scores and the sum of
        their squares about it: (3, A), without a gradient.

        About the mean, no digits of the squares cancel.
        """
        question = Question(identity, self.relation, sides)
        if self.engine == "dense":
            counts = [self.relation.counts(side, positive=False) for side in sides]
            number = joined(counts).to(self.dtype)
            mean = self.sums(question) / number.clamp_min(1)
            squares = self.sums(Question(square, self.relation, sides, shift=-mean))
            return torch.stack([number, mean, squares])
        inputs = self.inputs()
        if self._has_kernel(question) and not is_compiling():
            from . import triton

            return triton.moments(question, inputs)
        return tiled.moments(question, inputs)

    def sums_by_class(self) -> bool:
        """Return whether plain scores of positives are best summed from the vectors of classes.

        On an accelerator they are, as it need not wait until the pairs are listed.
        """
        if self.in_graph or not self.relation.by_ids or is_compiling():
            return False
        return not (self.host_may_read() and self.lists_positives())

    def sums_of_positive_scores(self, sides: tuple[int, ...]) -> Tensor:
        """Return the sums (A,) of the scores of each anchor's positives, from the sums of the
        vectors of each class.

            sum_{p in pos(i)} S_ip = <u_i, c_k>        c_k = sum_{j in k} v_j        k: i's class

        That is work of (N + M) D, however many pairs there are, and no pair is listed.
        """
        self.check_unchanged()
        assert self.embeddings is not None
        units = [normalized(x.target, x.normalize) for x in self.embeddings]
        return joined([self._sums_by_class(units[side], units[1 - side], side) for side in sides])

    def _sums_by_class(self, own: Tensor, others: Tensor, side: int) -> Tensor:
        """Return the (A,) sums of the scores of positives, of vectors (A, D) and (C, D) of unit
        length.
        """
        own_bias, others_bias = self.bias[side], self.bias[1 - side]
        if others_bias is not None:  # as one more dimension
            own = F.pad(own, (0, 1), value=1.0)
            others = torch.cat([others, others_bias[:, None].to(others.dtype)], 1)
        total = self._products_by_class(own, others, side)
        if own_bias is not None:
            total = total + own_bias * self.relation.counts(side, positive=True)
        return total

    def _products_by_class(self, own: Tensor, others: Tensor, side: int) -> Tensor:
        """Return the (A,) sums of the products of vectors (A, D) with their positives (C, D)."""
        classes = self.relation.classes(side)
        of_others = self.relation.classes(1 - side)
        vectors = others * of_others.known[:, None]
        of_class = vectors.new_zeros(of_others.size, vectors.shape[1])
        of_class = of_class.index_put((of_others.number,), vectors, accumulate=True)
        return (own * of_class[classes.number]).sum(1) * classes.known

    def hardest(self, question: Question) -> Hardest:
        """Return the highest score that counts of each anchor, and its candidate: (A,).

        The gradient of a score goes to the embeddings of its pair alone.
        """
        all_have_one = self.bounded and not question.limited
        all_have_one = all_have_one and self.relation.one_to_one and min(self.shape) > 1
        with torch.no_grad():
            best = self._hardest(question)
            if not all_have_one:
                missing = best.values == -math.inf
                best = best._replace(indices=best.indices.masked_fill(missing, -1))
        if not torch.is_grad_enabled() or not self._is_trained():
            return best
        rows, cols = self._pairs_of(question.sides, best.indices.clamp_min(0))
        scores = self._pair_and_positive_scores(rows, cols)
        if all_have_one:
            return Hardest(scores, best.indices)
        return Hardest(torch.where(best.indices < 0, -math.inf, scores), best.indices)

    def _hardest(self, question: Question) -> Hardest:
        """Return what :meth:`hardest` does, without a gradient; any index where there is none."""
        if self.engine == "dense":
            return Hardest(*dense.hardest(question, self.scores()))
        if self._keeps_slopes:
            scores = self.scores_in_graph()
            assert scores is not None
            return tiled.hardest_of_block(question, scores)
        inputs = self.inputs()
        return tiled.hardest(question, inputs)

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
        alone = self.engine == "dense" or self._positives is not None
        if alone or not self.lists_positives():
            return self.pair_scores(rows, cols)
        positive_rows, positive_cols = self.relation.listed
        count = len(positive_rows)
        if count > sum(self.shape):
            return self.pair_scores(rows, cols)
        scores = self.pair_scores(
            torch.cat([positive_rows, rows]), torch.cat([positive_cols, cols])
        )
        self._positives = scores[:count]
        return scores[count:]

    def sorted_excesses(self, question: Question, margin: float) -> Tensor:
        """Return the (A,) sums of hinges of all positives, which need not be listed."""
        return dense.sorted_excesses(question, self.scores(), margin)

    # -------------------------------------------------------------------------------------- pairs

    def pair_scores(self, i: Index, j: Index, with_sums: bool = False) -> Tensor:
        """Return the differentiable (P,) scores of rows i with columns j; None: row p, column p.

        ``with_sums``: whether sums over all scores are to follow, whose gradient is a matrix. Pairs
        have theirs in it then, too: 0.65 of the time of the triplet loss with all negatives at 128
        x 128 x 1024 (``python -m benchmarks --losses "triplet all" --shapes 128x1024``).
        """
        self.check_unchanged()
        if not (with_sums or self._summed) and self._scores_pairs_by_vectors():
            assert self._part is not None
            known = None if self._scores is None else pairs_of(self._scores.detach(), i, j)
            return self._part.pairs(i, j, known)
        if self.engine == "dense" or self._keeps_slopes:
            scores = self.scores_in_graph()
            assert scores is not None
            return pairs_of(scores, i, j)
        scores = ask(Request(None, self.inputs(), pairs=(i, j)), self.targets())[1]
        assert scores is not None
        return scores

    def _scores_pairs_by_vectors(self) -> bool:
        """Return whether the gradient of some pairs' scores goes straight to their vectors."""
        part = self._part
        if part is None or part.of_memory or self.is_biased:
            return False
        if is_compiling() or not torch.is_grad_enabled():
            return False
        return self._scores is None or math.prod(self.shape) > PAIRS_BY_SCORES

    def positive_scores(self, with_sums: bool = False) -> Tensor:
        """Return the (P,) scores of the positive pairs in the order of ``relation.listed``; for
        ``with_sums``, see :meth:`pair_scores`.
        """
        if self._positives is not None:
            self.check_unchanged()
            return self._positives
        pairs = (None, None) if self.relation.one_to_one else self.relation.listed
        scores = self.pair_scores(*pairs, with_sums)
        if torch.is_grad_enabled() and may_keep():
            self._positives = scores
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
        if size is None:
            # Half-precision embeddings are converted anew for each block, and products with few
            # rows are slow: with 256 rows, one takes 0.8 of the time a row of one with 128 (Zen 3,
            # ``python -m benchmarks.reranking``).
            height, width = tile_shape(n, m, self.device.type)
            size = max(height * width, min(256 * m, CONVERTED_AT_ONCE))
        for part in even_chunks(n, max(1, size // m)):
            if inputs.scores is not None:
                whole = inputs.scores.T if side else inputs.scores
                block = contiguous_copy(whole[part], self.dtype)
            else:
                with full_float32(self.device):
                    block = block_of_scores(inputs, side, part)
            yield part, block


# -------------------------------------------------------------------------- matrices of embeddings


def large_matrix(
    rows: Embeddings,
    cols: Embeddings,
    relation: Relation,
    engine: str,
    budget: int,  # bytes of scores that may be kept
    is_memory: bool = False,
) -> Matrix:
    """Return a matrix that is multiplied block by block; its scores are kept if they fit."""
    is_biased = rows.bias is not None or cols.bias is not None
    if engine == "triton" and not is_biased and is_autocast_on(rows.x.device.type):
        rows = as_multiplied(rows)
        cols = as_multiplied(cols)
    size = math.prod(relation.shape) * (torch.finfo(rows.dtype).bits // 8)
    return Matrix(
        relation,
        engine,
        rows,
        vectors=(rows, cols),
        keeps_scores=engine == "tiled" and size <= budget,
        is_memory=is_memory,
    )


def memory_matrix(
    rows: Embeddings,
    bank: Embeddings,  # of unit length, without a gradient
    relation: Relation,
    engine: str,
    budget: int,  # bytes of scores that may be kept
) -> Matrix:
    """Return the matrix of a batch's vectors with a memory's."""
    if not is_small(engine, math.prod(relation.shape), budget, rows.dtype):
        return large_matrix(rows, bank, relation, engine, budget, is_memory=True)
    place = slice(0, len(rows)), NO_COLUMNS
    step = Step(Layout(len(rows), True, (place,)), [bank.x], (rows.target,))
    part = StepPart(step, (0,), *place)
    return Matrix(relation, engine, rows, part=part, is_memory=True)


def part_of(rows: Tensor, cols: Tensor, normalize: bool) -> StepPart:
    """Return the matrix of rows (N, D) and columns (M, D) as the only one of a step.

    The first answer that needs its scores multiplies them: :class:`itrloss.engine.step.StepScores`.
    """
    n = rows.shape[0]
    stop = n + cols.shape[0]
    place = slice(0, n), slice(n, stop)
    step = Step(Layout(stop, normalize, (place,)), [None], (rows, cols))
    return StepPart(step, (0,), *place)


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
    vectors = others.like
    candidates = len(vectors)
    if vectors.dtype == left.dtype:
        block = matmul(left, vectors.T)
    else:  # half precision is converted
        block = left.new_empty(len(left), candidates)
        width = tile_shape(len(left), candidates, left.device.type)[1]
        for c in even_chunks(candidates, width):
            block[:, c] = matmul(left, vectors[c].T.to(left.dtype))
    # Scores are fewer than numbers of vectors.
    if others.unit is None and others.inv is not None:
        block *= others.inv.T
    if own.bias is not None:
        block += own.bias[part, None]
    if others.bias is not None:
        block += others.bias
    return block
