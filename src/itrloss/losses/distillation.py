"""Cross-entropy against a teacher's softmax."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import functional
from ..checks import IdsLike, Names, check_matrix, option
from ..checks.warnings import may_be_read, warn_of_units, warn_of_vectors
from ..engine.related import PassedIds, Related
from ..functional import Values
from ..similarity import Similarity
from .base import PairLoss
from .other_model import (
    as_tensors,
    check_embeddings_of,
    check_rows,
    described_model,
    has_candidates_of,
)

_OF_TEACHER = Names("teacher[0]", "teacher[1]", "image_ids", "text_ids")


class DistillationLoss(PairLoss):
    r"""Cross-entropy against the softmax of a teacher's scores, over both directions.

    .. math:: \ell_i = -\sum_j q_{ij} \log p_{ij}, \qquad
        p_i = \operatorname{softmax}_j(S_{ij} / \tau), \qquad
        q_i = \operatorname{softmax}_j(T_{ij} / \tau_t)

    over all candidates, whatever matches. It is the divergence KL(q | p) plus the entropy of q, a
    constant (Hinton et al. 2015, https://arxiv.org/abs/1503.02531). The teacher gets no gradient.
    See :doc:`losses/infonce`.

    Args:
        temperature: τ, in units of cosine similarity.
        teacher_temperature: :math:`\tau_t`, in units of the teacher's scores.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.
    """

    temperature: float = option(default=0.07, above=0)
    teacher_temperature: float = option(default=0.07, above=0)

    @property
    def in_cosines(self) -> bool:
        """Whether the temperature is one for cosines."""
        return self.temperature < 0.5

    def forward(  # type: ignore[override]
        self,
        images: Tensor | None = None,
        texts: Tensor | None = None,
        teacher: Tensor | Similarity | Sequence[Tensor] | None = None,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        scores: Tensor | None = None,
        image_groups: IdsLike | None = None,
        text_groups: IdsLike | None = None,
        **unknown: Any,
    ) -> Values:
        """Return the loss of (N, D) images and (M, D) texts, or of a score matrix.

        Args:
            images, texts, scores: see :meth:`PairLoss.forward`. Scores may be those of each image
                with its own candidates, such as its text and its hard negatives, with
                ``directions="image-text"``.
            teacher: (N, M) scores of another model, its embeddings ``(images, texts)``, or a
                :class:`Similarity` of these.
            image_ids, text_ids: see there; they are for ``telemetry`` alone, and go with groups.
            image_groups, text_groups: see there; candidates are of the same group, or match.
        """
        if unknown:
            self.refuse(unknown)
        given = as_tensors(teacher)

        check = partial(self._checked, given, images, texts, scores)  # type: ignore[arg-type]
        related = self._related(image_groups, text_groups, None)
        ids = image_ids, text_ids
        own = images if scores is None else scores
        no_ids = image_ids is None and text_ids is None and related is None
        if no_ids and not self.sharded and isinstance(own, Tensor) and own.dim() == 2:
            n, m = own.shape if texts is None else (len(own), len(texts))
            if n != m:
                ids = torch.arange(n, device=own.device), torch.arange(m, device=own.device)
        sim = self._similarity(images, texts, ids, scores, related, check)
        model = self._model(given, sim, ids, related)
        if not self._looked and not torch.compiler.is_compiling():
            self._look_at_teacher(model)
        return self._with_telemetry(self.compute(sim, model), sim)

    def _checked(
        self, teacher: object, images: Tensor, texts: Tensor | None, scores: Tensor | None
    ) -> str:
        """Return what a teacher is, in words; raise an error for a wrong one."""
        if isinstance(teacher, Similarity):
            if self.sharded and scores is not None:
                expected = "expected scores in a job whose loss gets scores"
                raise TypeError(f"teacher: {expected}, got {type(teacher).__name__}")
            return described_model("teacher", teacher, images, texts, self)
        if not isinstance(teacher, Tensor):
            check_embeddings_of("teacher", teacher, has_negatives=False)
        return f"teacher {type(teacher).__name__}"

    def _model(
        self,
        teacher: object,  # a Similarity, scores or embeddings
        sim: Similarity,
        ids: PassedIds,
        related: Related | None,
    ) -> Similarity:
        """Return a teacher's scores or embeddings as a similarity, and a similarity as it is."""
        if isinstance(teacher, Tensor):
            return self._taught_by(teacher, sim, ids, related)
        if isinstance(teacher, Similarity):
            functional.check_other_model("teacher", teacher, sim)
            self._check_candidates(teacher, sim)
            return teacher
        assert isinstance(teacher, list)
        images, texts = teacher

        def check() -> str:
            """Check the teacher; return nothing that has to be the same in all processes."""
            check_rows(_OF_TEACHER, images, texts, sim)
            return ""

        return self._between(images, texts, ids, _OF_TEACHER, check, related=related)

    def _check_candidates(self, teacher: Similarity, sim: Similarity) -> None:
        """Raise an error unless a teacher's softmax is over the candidates of the loss."""
        if sim.one_to_one and teacher.one_to_one:
            return

        def check() -> str:
            """Compare the candidates, of a shared batch those of this process."""
            if not has_candidates_of(sim, teacher):
                expected = "expected the groups and the padding of the loss"
                meant = "its scores, or its embeddings (images, texts), get them"
                raise ValueError(f"teacher: {expected}, got other candidates; {meant}")
            return "candidates of the teacher"

        self.agree(check)

    def _taught_by(
        self,
        scores: Tensor,
        sim: Similarity,
        ids: PassedIds,
        related: Related | None,
    ) -> Similarity:
        """Return a teacher's scores of the same images and texts as a similarity."""

        def check() -> str:
            """Check the input; return what has to be the same in all processes."""
            check_matrix("teacher", scores, "(N, M)", self.check_finite, empty=self.sharded)
            if scores.shape != sim.shape:
                raise ValueError(f"teacher: expected shape {sim.shape}, got {tuple(scores.shape)}")
            if scores.device != sim.device:
                raise ValueError(f"teacher: expected device {sim.device}, got {scores.device}")
            return "teacher"

        if sim.share is None:
            check()
            return Similarity.from_scores(scores, *ids, related=related)
        options = {"process_group": self.process_group, "same": check, "related": related}
        return Similarity.sharded_scores(scores, *sim.own_ids, **options)

    @torch.no_grad()
    def _look_at_teacher(self, teacher: Similarity) -> None:
        """Warn of a teacher in other units, or of its embeddings; see :meth:`_look`."""
        if not may_be_read(teacher):
            return
        warn_of_vectors(teacher)
        if self.teacher_temperature < 0.5:
            warn_of_units(type(self).__name__, teacher, "teacher: scores")

    def compute(  # type: ignore[override]
        self, sim: Similarity, teacher: Similarity
    ) -> Values:
        """Return the loss of the similarities of two models."""
        taught = functional.check_other_model("teacher", teacher, sim)
        return functional.distillation_loss(
            self.anchors(sim),
            self.anchors(taught),
            self.temperature,
            self.teacher_temperature,
            self.reduction,
        )
