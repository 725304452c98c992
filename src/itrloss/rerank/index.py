"""Re-ranking in a FAISS index for nearest neighbours (``pip install 'itrloss[faiss]'``)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..checks import as_bias, as_size, check_matrix, from_numpy
from ..engine.vectors import normalized
from ..similarity import TopK


class BiasedIndex:
    """A FAISS index of candidates that ranks by ``cos(query, candidate) + bias``.

    Candidates get their bias as an additional dimension, queries the value 1, so that the inner
    product is the re-ranked score. Any FAISS index for inner products works, at its usual speed and
    accuracy.

    Args:
        candidates: (C, D) embeddings, which are normalised.
        bias: (C,) from :meth:`itrloss.rerank.Reranker.biases`; None: plain cosine.
        factory: FAISS' description of the index: ``"Flat"`` is exact, ``"HNSW32"`` a graph,
            ``"IVF1024,Flat"`` searches the nearest of 1024 cells.
        nprobe: number of cells that an index with cells searches; None: FAISS' default, 1.

    Raises:
        ImportError: without FAISS.
    """

    def __init__(
        self,
        candidates: Tensor,
        bias: Tensor | None = None,
        factory: str = "Flat",
        *,
        nprobe: int | None = None,
    ):
        candidates = from_numpy(candidates)
        check_matrix("candidates", candidates, "(C, D)", True)
        bias = as_bias("bias", bias, len(candidates), torch.device("cpu"))
        if nprobe is not None:
            nprobe = as_size("nprobe", nprobe)
        try:
            import faiss  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                "an index needs FAISS: install itrloss with the extra 'faiss'"
            ) from error
        if bias is None:
            bias = torch.zeros(len(candidates), device="cpu")
        data = _extended(candidates, bias)
        try:
            self.index = faiss.index_factory(data.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
            if not self.index.is_trained:
                self.index.train(data)
            self.index.add(data)
            if nprobe is not None:
                faiss.ParameterSpace().set_index_parameter(self.index, "nprobe", nprobe)
        except RuntimeError as error:
            message = str(error).strip().splitlines()[-1]
            index = f"the index {factory!r} with {len(data)} candidates"
            if nprobe is not None:
                index += f" and nprobe = {nprobe}"
            raise ValueError(f"factory: FAISS cannot build {index}: {message}") from None

    def search(self, queries: Tensor, k: int) -> TopK:
        """Return the (Q, k) scores and indices of the k best candidates of each query.

        Where an approximate index finds fewer than k, the rest is -inf and -1.

        Args:
            queries: (Q, D) embeddings, which are normalised.
            k: number of candidates.
        """
        queries = from_numpy(queries)
        check_matrix("queries", queries, "(Q, D)", True)
        k = as_size("k", k)
        dim = self.index.d - 1
        if queries.shape[1] != dim:
            raise ValueError(f"queries: expected shape (Q, {dim}), got {tuple(queries.shape)}")
        vectors = _extended(queries, torch.ones(len(queries), device="cpu"))
        values, indices = map(torch.from_numpy, self.index.search(vectors, k))
        return TopK(values.masked_fill(indices < 0, -torch.inf), indices)


def _extended(embeddings: Tensor, last: Tensor) -> np.ndarray:
    """Return embeddings (N, D) at unit length with a last dimension (N,), in float32."""
    vectors = normalized(embeddings.detach().cpu()).float()
    return torch.cat([vectors, last.float()[:, None]], 1).numpy()
