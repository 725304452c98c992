"""Re-ranking through an index for nearest neighbours, by FAISS (``pip install 'itrloss[faiss]'``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_matrix, check_size
from ..engine.scores import inverse_norms, scaled
from ..similarity import TopK


class BiasedIndex:
    """An index of candidates that ranks by ``cos(query, candidate) + bias``, as every re-ranker with biases does.

    The bias is one more dimension of a candidate, and 1 is one more of a query: their inner product is the score. So
    any FAISS index for inner products answers with re-ranked neighbours at its usual speed, and with its usual losses.

    Args:
        candidates: (C, D) embeddings of any length.
        bias: (C,) of :meth:`itrloss.rerank.Reranker.biases`; None: plain cosine.
        factory: FAISS' description of an index: ``"Flat"`` is exact, ``"HNSW32"`` a graph, ``"IVF1024,Flat"`` searches
            the nearest of 1024 cells.
        nprobe: how many cells an index with cells searches; None: FAISS' default, 1.

    Raises:
        ImportError: without FAISS.
    """

    def __init__(
        self, candidates: Tensor, bias: Tensor | None = None, factory: str = "Flat", *, nprobe: int | None = None
    ):
        check_matrix("candidates", candidates, "(C, D)", True)
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != candidates.shape[:1]):
            got = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(f"bias: expected shape ({candidates.shape[0]},), got {got}")
        faiss = _faiss()
        vectors = _unit(candidates)
        last = torch.zeros(len(vectors), 1) if bias is None else bias.detach().float().cpu()[:, None]
        data = torch.cat([vectors, last], 1).numpy()
        if nprobe is not None:
            check_size("nprobe", nprobe)
        try:
            self.index = faiss.index_factory(data.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
            if not self.index.is_trained:
                self.index.train(data)
            self.index.add(data)
            if nprobe is not None:
                faiss.ParameterSpace().set_index_parameter(self.index, "nprobe", nprobe)
        except RuntimeError as error:
            said = str(error).strip().splitlines()[-1]
            what = f"{factory!r} with {len(data)} candidates" + (f" and nprobe = {nprobe}" if nprobe else "")
            raise ValueError(f"factory: FAISS does not make an index of {what}: {said}") from None

    def search(self, queries: Tensor, k: int) -> TopK:
        """The k best candidates of each query.

        Args:
            queries: (Q, D) embeddings of any length.
            k: how many.

        Returns:
            ``values`` and ``indices`` (Q, k); where an approximate index finds fewer than k, -inf and -1.
        """
        check_matrix("queries", queries, "(Q, D)", True)
        check_size("k", k)
        if queries.shape[1] != self.index.d - 1:
            raise ValueError(f"queries: expected shape (Q, {self.index.d - 1}), got {tuple(queries.shape)}")
        asked = torch.cat([_unit(queries), torch.ones(len(queries), 1)], 1)
        values, indices = self.index.search(asked.numpy(), k)
        missing = torch.from_numpy(indices) < 0
        return TopK(torch.from_numpy(values).masked_fill(missing, -torch.inf), torch.from_numpy(indices))


def _unit(x: Tensor) -> Tensor:
    x = x.detach().cpu()
    return scaled(x, inverse_norms(x)).float()


def _faiss() -> Any:
    try:
        import faiss  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("an index needs FAISS: pip install 'itrloss[faiss]'") from error
    return faiss
