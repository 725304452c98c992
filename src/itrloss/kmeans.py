"""Online k-means: prototypes that follow the embeddings of a model in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import WholeState, check_matrix, check_number, check_size, one_of
from .distributed import gather_rows, world_size
from .engine.matrix import ENGINES
from .engine.pairs import weighted_sums
from .engine.scores import IGNORE_ID, host_may_read, inverse_norms, scaled
from .similarity import Engine, Similarity

__all__ = ["OnlineKMeans"]

_NEVER = torch.iinfo(torch.int64).min // 2
_CLOSE = 1 - 1e-5  # a point with a higher cosine to its centroid never seeds a cluster


class OnlineKMeans(WholeState):
    r"""Mini-batch spherical k-means (Sculley, WWW 2010; Dhillon & Modha, 2001) with centroids that persist.

    Each point, at unit length, belongs to the centroid of highest cosine (the first of equals). After a batch

    .. math:: c_k \leftarrow \frac{n_k c_k + \sum_{x \in k} x}{\lVert n_k c_k + \sum_{x \in k} x \rVert}, \qquad
              n_k \leftarrow n_k + |\{x \in k\}|

    Clusters begin empty. An empty one is seeded with a point of the batch that is far from all centroids, the farthest
    first (in a first batch of more points than clusters, the first points). So is a cluster that got no point while
    ``patience`` points per cluster were seen. Batches of several processes must be of one size. No update synchronises
    with an accelerator; see :doc:`methods/prototypes`.

    Args:
        clusters: K.
        dim: D of the points.
        max_count: upper bound of n_k in the step size ``1 / n_k``; None: counts grow without bound.
        patience: see above; greater than 0. A cluster of average size is reseeded by mistake with probability
            ``exp(-patience)``.
        engine: of the search for the nearest centroids, see :class:`itrloss.Similarity`.

    Attributes:
        centroids: (clusters, dim) of unit length, zeros where a cluster is empty. They stay float32 when the module is
            cast, as half precision would lose small steps.
        counts: (clusters,) int64 n.
        reseeded: (clusters,) bool, the clusters whose centroid the last update replaced by a point, for
            :meth:`itrloss.PrototypeClassificationLoss.reset`.
    """

    centroids: Tensor
    counts: Tensor
    last: Tensor
    seen: Tensor
    reseeded: Tensor

    def __init__(
        self,
        clusters: int,
        dim: int,
        *,
        max_count: float | None = None,
        patience: float = 10.0,
        engine: Engine = "auto",
    ):
        super().__init__()
        check_size("clusters", clusters)
        check_size("dim", dim)
        check_number("patience", patience, positive=True)
        if max_count is not None:
            check_number("max_count", max_count, positive=True)
        one_of("engine", engine, "auto", *ENGINES)
        #: The number of clusters, K.
        self.clusters = clusters
        #: The dimension of the points, D.
        self.dim = dim
        self.max_count, self.patience = max_count, patience
        self.engine: Engine = engine
        self.register_buffer("centroids", torch.zeros(clusters, dim, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(clusters, dtype=torch.int64))
        self.register_buffer("last", torch.full((clusters,), _NEVER))  # value of ``seen`` at a cluster's last point
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("reseeded", torch.zeros(clusters, dtype=torch.bool))

    def __len__(self) -> int:
        """Return the number of clusters that are not empty. Synchronises with an accelerator."""
        return int((self.last != _NEVER).sum())

    def __bool__(self) -> bool:
        return True

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return the (B,) int64 clusters of points ``x`` (B, dim) of any length; those of length 0 are in the first.

        Raises:
            RuntimeError: before the first update, on the CPU. On an accelerator, where the check would synchronise, all
                clusters are 0 then.
        """
        self._check(x)
        if host_may_read(x) and not len(self):
            raise RuntimeError("OnlineKMeans: no cluster has a point yet; call update first")
        return self._nearest(self._unit(x.detach()), self.last != _NEVER)[1]

    @torch.no_grad()
    def update(self, x: Tensor) -> Tensor:
        """Assign a batch to its clusters and move their centroids.

        Args:
            x: (B, dim) floating point of any length; no gradient goes through it.

        Returns:
            (B,) int64: the cluster of each point, for a seed the cluster that it seeded. Points that are not finite
            count as zero.
        """
        self._check(x)
        ids = self._step(gather_rows(x.detach()))
        return ids if world_size() == 1 else ids.view(-1, len(x))[torch.distributed.get_rank()]

    @torch.no_grad()
    def fit(self, x: Tensor, iterations: int = 20) -> Tensor:
        """Refit to a whole data set, starting from the current centroids (Lloyd's algorithm).

        Counts begin anew. Each iteration synchronises with an accelerator, to stop when no assignment changes.

        Args:
            x: (B, dim) points; in a distributed job all of them on every process.
            iterations: the largest number of iterations.

        Returns:
            (B,) int64 clusters of the points.
        """
        self._check(x)
        check_number("iterations", iterations, positive=True)
        x, before = x.detach(), None
        replaced = torch.zeros_like(self.reseeded)
        for _ in range(iterations):
            self.counts.zero_()
            ids = self._step(x, whole=True)
            replaced |= self.reseeded
            if before is not None and torch.equal(ids, before):
                break
            before = ids
        self.reseeded.copy_(replaced)
        ids = self.predict(x)
        self.counts.zero_().index_add_(0, ids, torch.ones_like(ids))
        return ids

    def _check(self, x: Tensor) -> None:
        check_matrix("x", x, f"(B, {self.dim})")
        if x.shape[1] != self.dim:
            raise ValueError(f"x: expected shape (B, {self.dim}), got {tuple(x.shape)}")
        if x.device != self.centroids.device:
            raise ValueError(f"x: expected device {self.centroids.device} like the centroids, got {x.device}")

    def _nearest(self, x: Tensor, seeded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (B,) highest cosines with a centroid and their indices; -1 and 0 while there is none."""
        ids = x.new_zeros(x.shape[0], dtype=torch.int64), torch.where(seeded, 1, IGNORE_ID)
        options: dict[str, Any] = {"normalize": False, "engine": self.engine, "memory_budget": 0}
        best = Similarity(x, self.centroids, *ids, **options).hardest_negatives()
        return best.values.clamp_min(-1), best.indices.clamp_min(0)

    def _unit(self, x: Tensor) -> Tensor:
        """Return the unit vectors of x, zeros for points that are not finite (an overflow that the optimiser skips)."""
        x = torch.where(x.isfinite().all(1, keepdim=True), x, 0.0)
        return scaled(x, inverse_norms(x)).to(self.centroids.dtype)

    def _step(self, x: Tensor, whole: bool = False) -> Tensor:
        """Update with the points of all processes, and return their (B,) clusters; ``whole``: with a whole data set."""
        batch, clusters = x.shape[0], self.clusters
        x = self._unit(x)
        zero = (x == 0).all(1)
        seeded = self.last != _NEVER
        first_seeds = torch.zeros_like(seeded)
        if batch > clusters:  # seed a first batch with its first points, so that the others have a nearest centroid
            first_seeds = ~seeded.any() & ~zero[:clusters]
            self.centroids.copy_(torch.where(first_seeds[:, None], x[:clusters], self.centroids))
            seeded = seeded | first_seeds
        cosines, ids = self._nearest(x, seeded)
        self.seen.add_(batch)
        hit = torch.zeros_like(seeded).index_fill_(0, ids, True) & seeded
        self.last.copy_(torch.where(hit | first_seeds, self.seen, self.last))
        patience = 0 if whole else int(self.patience * clusters)
        places = min(batch, clusters)
        # Empty clusters first, in their order; then those that waited longest.
        waited, place = (v[:places] for v in torch.sort(self.seen - self.last, descending=True, stable=True))
        closeness, point = (v[:places] for v in torch.sort(cosines.masked_fill(zero, 1.0), stable=True))
        replaced = (waited > patience) & (closeness < _CLOSE)
        ids.index_copy_(0, point, torch.where(replaced, place, ids[point]))
        self.reseeded.zero_().index_copy_(0, place, replaced).logical_or_(first_seeds)
        self.counts.masked_fill_(self.reseeded, 0)
        self.last.copy_(torch.where(self.reseeded, self.seen, self.last))
        self._move(x, ids)
        return ids

    def _move(self, x: Tensor, ids: Tensor) -> None:
        """Move the centroids of the clusters that got some of these unit vectors."""
        which, sums, sizes = _cluster_sums(x, ids, self.clusters)
        old, count = self.centroids[which], self.counts[which]
        if self.max_count is not None:
            count = count.clamp_max(self.max_count)
        new = sums + count[:, None].to(old.dtype) * old
        inv = inverse_norms(new)
        # Points that cancel each other leave a centroid in place.
        new = torch.where(((inv > 0) & (sizes > 0))[:, None], scaled(new, inv), old)
        self.centroids.index_copy_(0, which, new)
        self.counts.index_copy_(0, which, self.counts[which] + sizes)

    def _apply(self, fn: Any, recurse: bool = True) -> OnlineKMeans:
        """Move the module between devices; centroids keep their dtype."""
        before = self.centroids
        super()._apply(fn, recurse)
        if self.centroids.dtype != before.dtype:
            self.centroids = before.to(self.centroids.device)
        return self

    def extra_repr(self) -> str:
        options = ("clusters", "dim", "max_count", "patience", "engine")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in options)


def _cluster_sums(x: Tensor, ids: Tensor, clusters: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (G,) clusters, among them all that got points, with the sums (G, D) and the numbers (G,) of their points.

    Additions have a fixed order: deterministic. G is the smaller of the numbers of points and of clusters, so that its
    size does not depend on the data and nothing synchronises. A cluster that occurs twice has the same sums twice.
    """
    batch = torch.arange(x.shape[0], device=x.device)
    ones = x.new_ones(x.shape[0])
    if x.shape[0] >= clusters:
        which = torch.arange(clusters, device=x.device)
        sizes = torch.zeros_like(which).index_add_(0, ids, torch.ones_like(ids))
        return which, weighted_sums(x, batch, ones, ids, clusters), sizes
    ordered, order = torch.sort(ids, stable=True)
    begins = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
    group = begins.cumsum(0)
    which = ordered[:1].repeat(x.shape[0]).index_copy_(0, group, ordered)
    named = torch.where(batch <= group[-1], batch, 0)
    sums = weighted_sums(x, order, ones, group, x.shape[0])
    return which[named], sums[named], torch.zeros_like(ids).index_add_(0, group, torch.ones_like(ids))[named]
