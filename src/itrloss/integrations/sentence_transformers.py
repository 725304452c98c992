"""Losses and an evaluator for sentence-transformers (``pip install
'itrloss[sentence-transformers]'``).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..checks import IdsLike, as_size, takes_queries
from ..metrics import confidence_intervals, default_ids, retrieval_results
from ..metrics.results import RECALLS, as_ks
from ..rerank import Reranker
from ..similarity import Similarity
from . import (
    SavesLosses,
    State,
    check_without_groups,
    ids_of,
    inner_loss,
    takes_negatives,
    warn_without_gather,
)

try:
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.base.evaluation import BaseEvaluator
    from sentence_transformers.base.losses import CachedLossMixin
except ImportError as error:
    raise ImportError(
        f"{__name__}: install itrloss with the extra 'sentence-transformers' ({error})"
    ) from error


class RetrievalLoss(CachedLossMixin, nn.Module):
    """A loss of this library as one of ``SentenceTransformerTrainer``.

    The first column of the data set holds the images (or queries, anchors), the second one the
    texts that match them. Further ones hold texts that match none, for losses that take
    ``negatives``. An integer column ``label`` holds ids: rows with equal ones match, too. With
    columns of negatives, it may hold lists: a row's id, and then the id of each of its negatives,
    which is no negative of rows with an equal one. Parameters of the loss are trained;
    :class:`RetrievalTrainer` also saves them.

    Args:
        model: the model to train, of one vector for each text: no ``MultiVectorEncoder``.
        loss: a :class:`itrloss.PairLoss` of images and texts alone, :class:`itrloss.Matryoshka`
            around one, or a module with ``forward(images, texts, image_ids=None, text_ids=None)``;
            in a job of several processes with ``gather=True``.
        mini_batch_size: encode that many rows at once, twice, as their ``Cached`` losses do
            (GradCache): what autograd saves for the encoder does not grow with the batch then. By
            default, all rows.

    Raises:
        TypeError, ValueError: for other losses, and in a call for columns or labels that the loss
            cannot take.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        loss: nn.Module,
        *,
        mini_batch_size: int | None = None,
    ):
        super().__init__()
        check_without_groups(loss)
        if mini_batch_size is not None:
            mini_batch_size = as_size("mini_batch_size", mini_batch_size)
        self.model = model
        self.loss = loss
        self.mini_batch_size = mini_batch_size  # type: ignore[assignment] # None: without the cache
        self.uses_gradient_cache = mini_batch_size is not None  # of CachedLossMixin
        self.is_saved = False  # by the trainer

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Return the loss of the columns' features; ``labels``: None, (B,) integers, or (B, 1 + K)
        with K columns of negatives.
        """
        if torch.is_grad_enabled() and not self.is_saved:
            self._warn_of_loss()
        if not self.uses_gradient_cache:
            columns = [self.model(x)["sentence_embedding"] for x in sentence_features]
            return self._loss(columns, labels)
        # The backward pass may scale gradients, but the loss's own parameters have complete ones
        # after this forward pass. So they are put into the graph of its value.
        trained = []
        if torch.is_grad_enabled():
            trained = [p for p in self.loss.parameters() if p.requires_grad]
        before = [p.grad for p in trained]
        for p in trained:
            p.grad = None
        value = self.forward_cached(sentence_features, labels)
        for p, grad in zip(trained, before, strict=True):
            if p.grad is not None:
                value = value + (p.grad * (p - p.detach())).sum()
            p.grad = grad
        return value

    def _warn_of_loss(self) -> None:
        """Warn once if the loss has parameters, which SentenceTransformerTrainer does not save."""
        self.is_saved = True  # said once
        names = [name for name, p in self.loss.named_parameters() if p.requires_grad]
        if names:
            warnings.warn(
                "RetrievalLoss: SentenceTransformerTrainer trains the parameters of the loss, "
                f"{', '.join(names)}, but its checkpoints do not hold them: a resumed run begins "
                "with their first values. RetrievalTrainer saves them.",
                stacklevel=4,  # the caller of the module
            )

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Return the loss of each column's mini-batches of embeddings, for ``CachedLossMixin``."""
        value = self._loss([torch.cat(x) for x in reps], labels)
        if with_backward:
            value.backward()
            value = value.detach()
        return value

    def _loss(self, columns: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        """Return the loss of the columns' (B, D) embeddings."""
        several = takes_negatives(self.loss)
        if len(columns) < 2 or (len(columns) > 2 and not several):
            expected = "two or more columns" if several else "two columns"
            loss = " ".join(repr(self.loss).split())
            raise ValueError(
                f"sentence_features: expected {expected} for {loss}, got {len(columns)}; "
                "InfoNCELoss takes columns of negatives, dataset.select_columns([...]) leaves out "
                "others"
            )
        images, texts, *others = columns
        negative_ids = None
        if labels is not None and others and labels.shape == (len(images), 1 + len(others)):
            labels, negative_ids = labels[:, 0], labels[:, 1:]
        ids = ids_of(labels, images)
        further = {}
        is_own = not getattr(inner_loss(self.loss), "in_batch", True)  # each query has its own
        if others:
            further["negatives"] = torch.stack(others, 1) if is_own else torch.cat(others)
        if negative_ids is not None:
            further["negative_ids"] = negative_ids if is_own else negative_ids.T.flatten()
        return self.loss(images, texts, ids, ids, **further)

    def get_config_dict(self) -> dict[str, object]:
        """Return the options, for the model card."""
        return {"loss": " ".join(repr(self.loss).split()), "mini_batch_size": self.mini_batch_size}

    @property
    def citation(self) -> str:
        """The BibTeX entry of this library, for the model card; its note is what the loss says of
        its source.
        """
        loss = inner_loss(self.loss)
        source = inspect.cleandoc(type(loss).__doc__ or "").partition("\n")[0]
        return f"""
@software{{itrloss,
    title = {{itrloss: Losses and Re-rankers for Image-Text Retrieval}},
    author = {{{{The itrloss authors}}}},
    version = {{{__version__}}},
    note = {{{type(loss).__name__}: {source}}},
}}
"""


class RetrievalTrainer(SavesLosses, SentenceTransformerTrainer):  # type: ignore[override]
    """A ``SentenceTransformerTrainer`` whose checkpoints also hold the states of the losses.

    These are the parameters of each :class:`RetrievalLoss`, such as a learnt temperature, and which
    negatives count in a ``TripletLoss``. A run that is resumed goes on with them. Arguments are
    those of ``SentenceTransformerTrainer``. To combine it with another subclass of that, inherit
    from this one first.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for part in self._losses().values():
            part.is_saved = True
            warn_without_gather(part.loss)

    def _losses(self) -> dict[str, RetrievalLoss]:
        """Return the losses of this library by name, also inside of others."""
        losses = self.loss if isinstance(self.loss, dict) else {"": self.loss}
        return {
            f"{key}.{name}": part
            for key, loss in losses.items()
            for name, part in loss.named_modules()
            if isinstance(part, RetrievalLoss)
        }

    def _own_states(self) -> dict[str, State]:
        """Return the states of the losses by name."""
        return {name: part.loss.state_dict() for name, part in self._losses().items()}

    def _load_own_states(self, states: dict[str, State]) -> None:
        """Load the states of the losses."""
        for name, part in self._losses().items():
            part.loss.load_state_dict(states[name])


class RetrievalEvaluator(BaseEvaluator):
    """An evaluator of retrieval in both directions, with confidence intervals and re-ranking.

    It returns :func:`itrloss.metrics.retrieval_metrics`, and the ends of their
    :func:`itrloss.metrics.confidence_intervals`, where they have any, as ``…_low`` and ``…_high``.
    The primary metric is ``rsum``.

    Args:
        images, texts: whatever the model's ``encode`` takes; images may be queries, or other
            anchors.
        image_ids, text_ids, reranker: see :func:`itrloss.metrics.retrieval_results`.
        ks: see :func:`itrloss.metrics.retrieval_metrics`.
        name: put in front of the metrics' names.
        encode: options of the model's ``encode``, such as ``{"batch_size": 64, "truncate_dim":
            256}``.
    """

    @takes_queries
    def __init__(
        self,
        images: Sequence[object],
        texts: Sequence[object],
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        reranker: Reranker | None = None,
        ks: Sequence[int] = RECALLS,
        name: str = "",
        encode: dict[str, Any] | None = None,
    ):
        super().__init__()
        self.images = images
        self.texts = texts
        self.ids = (image_ids, text_ids)
        if image_ids is None and text_ids is None:
            self.ids = default_ids(len(images), len(texts))
        self.reranker = reranker
        self.ks = as_ks(ks)
        self.name = name
        self.encode = encode or {}
        self.primary_metric = "rsum"

    def __call__(
        self,
        model: Any,
        output_path: str | None = None,
        epoch: int = -1,
        steps: int = -1,
    ) -> dict[str, float]:
        """Return the metrics of a model by name; nothing is written to ``output_path``."""
        images = model.encode(self.images, convert_to_tensor=True, **self.encode)
        texts = model.encode(self.texts, convert_to_tensor=True, **self.encode)
        results = retrieval_results(Similarity(images, texts, *self.ids), reranker=self.reranker)
        metrics = results.metrics(self.ks)
        for metric, (low, high) in confidence_intervals(results, ks=self.ks).items():
            metrics |= {f"{metric}_low": low, f"{metric}_high": high}
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def get_config_dict(self) -> dict[str, object]:
        """Return the options, for the model card."""
        options = dict(self.encode)
        if self.reranker is not None:
            options["reranker"] = repr(self.reranker)
        return options
