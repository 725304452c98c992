"""Online k-means: prototypes that follow the embeddings of a model in training."""

from __future__ import annotations

from dataclasses import KW_ONLY

import torch
import torch.distributed as dist
from torch import Tensor

from .anchors import Hardest
from .checks import (
    CheckedModule,
    KeepsDtypes,
    as_size,
    check_matrix,
    from_numpy,
    option,
)
from .distributed import digest, gather_parts, world_size
from .engine.relation import IGNORE_ID, weighted_sums
from .engine.vectors import host_may_read, normalized
from .similarity import Engine, Similarity

__all__ = ["OnlineKMeans"]

_NEVER = 2**62
_CLOSE = 1 - 1e-5  # a point with a higher cosine to its centroid never seeds a cluster


class OnlineKMeans(KeepsDtypes, CheckedModule):
    r"""Mini-batch spherical k-means (Sculley, WWW 2010; Dhillon & Modha, 2001) with centroids that
    persist.

    Each point, at unit length, belongs to the centroid of highest cosine (the first of equals).
    After a batch

    .. math:: c_k \leftarrow
              \frac{n_k c_k + \sum_{x \in k} x}{\lVert n_k c_k + \sum_{x \in k} x \rVert}, \qquad
              n_k \leftarrow n_k + |\{x \in k\}|

    Clusters begin empty. An empty one is seeded with a point of the batch that is far from all
    centroids, the farthest first (in a first batch of more points than clusters, the first points).
    So is a cluster that got no point while ``patience`` points per cluster were seen. Points of
    length 0, and those that are not finite, change nothing. In a single process no update
    synchronises with an accelerator; see :doc:`losses/prototypes`.

    Args:
        clusters, dim: K and the dimension of the points.
        max_count: upper bound of n_k in the step size ``1 / n_k``; None: counts grow without bound.
        patience: above 0. A cluster of average size is reseeded by mistake with probability
            ``exp(-patience)``.
        engine: of the search for the nearest centroids, see :class:`itrloss.Similarity`.

    Attributes:
        centroids: (clusters, dim) of unit length, zeros where a cluster is empty. They stay float32
            when the module is cast, as half precision would lose small steps.
        counts: (clusters,) int64 n.
    """

    clusters: int = option(at_least=1, fixed=True)
    dim: int = option(at_least=1, fixed=True)
    _: KW_ONLY
    max_count: float | None = option(default=None, above=0)
    patience: float = option(default=10, above=0)
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.centroids: Tensor
        self.counts: Tensor
        self.waiting: Tensor
        self.replaced: Tensor
        clusters = self.clusters
        with torch.inference_mode(False):  # inference tensors could not be written to later
            self.register_buffer("centroids", torch.empty(clusters, self.dim, dtype=torch.float32))
            self.register_buffer("counts", torch.empty(clusters, dtype=torch.int64))
            # points seen since a cluster's last one
            self.register_buffer("waiting", torch.empty(clusters, dtype=torch.int64))
            # 1 for a reseeded cluster; an integer, as averages of models fail at a bool buffer
            self.register_buffer("replaced", torch.empty(clusters, dtype=torch.int64))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Empty all clusters, as is needed after ``to_empty``."""
        self.centroids.zero_()
        self.counts.zero_()
        self.waiting.fill_(_NEVER)
        self.replaced.zero_()

    def __len__(self) -> int:
        """Return the number of clusters that are not empty. Synchronises with an accelerator."""
        return int((self.waiting < _NEVER).sum())

    def __bool__(self) -> bool:
        """Return True, for the object exists, whatever its length."""
        return True

    @property
    def reseeded(self) -> Tensor:
        """The (clusters,) bool mask of the clusters whose centroid the last update replaced by a
        point, for :meth:`itrloss.PrototypeClassificationLoss.reset`.
        """
        return self.replaced.bool()

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return the (B,) int64 clusters of points ``x`` (B, dim) of any length; points of length
        0, and those that are not finite, are in the first.

        Before the first update that is a RuntimeError; on an accelerator, where it would
        synchronise, all are 0.
        """
        x = self._points(x, empty=True)
        if host_may_read(x) and not len(self):
            raise RuntimeError("OnlineKMeans: no cluster has a point yet; call update first")
        if len(x) == 0:
            return torch.zeros(0, dtype=torch.int64, device=x.device)
        return self._nearest(x, self.waiting < _NEVER).indices

    @torch.no_grad()
    def update(self, x: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
        """Move the centroids by a batch ``x`` (B, dim) of points of any length, without a gradient.

        In a distributed job, by the points of all processes of the group, so that centroids are the
        same on all.

        Returns:
            (B,) int64: the cluster of each point, of a seed the one that it seeded, or the first
            with the same centroid; the first of points of length 0, and of those that are not
            finite.
        """
        patience = min(int(self.patience * self.clusters), _NEVER - 1)
        if world_size(process_group) == 1:
            parts = [self._points(x, empty=True)]
        else:
            same = f"{self.extra_repr()}; centroids {digest(self.centroids)}"
            (parts,) = gather_parts(lambda: [self._points(x, empty=True)], process_group, same)
        points = torch.cat(parts)
        if len(points) == 0:
            self.replaced.zero_()
            return torch.zeros(0, dtype=torch.int64, device=points.device)
        ids = self._step(points, patience)
        if len(parts) == 1:
            return ids
        return ids.split([len(part) for part in parts])[dist.get_rank(process_group)]

    @torch.no_grad()
    def fit(self, x: Tensor, iterations: int = 20) -> Tensor:
        """Refit to a whole data set ``x`` (B, dim), and return its (B,) int64 clusters (Lloyd's
        algorithm).

        It begins with the current centroids and new counts, and ends after ``iterations``, or when
        no assignment changes, for which an accelerator synchronises. In a distributed job every
        process passes all points.
        """
        iterations = as_size("iterations", iterations)
        x = self._points(x)
        before = None
        reseeded = torch.zeros_like(self.reseeded)
        for _ in range(iterations):
            self.counts.zero_()
            ids = self._step(x, 0)
            reseeded |= self.reseeded
            if before is not None and torch.equal(ids, before):
                break
            before = ids
        self.replaced.copy_(reseeded)
        ids = self._nearest(x, self.waiting < _NEVER).indices
        self.counts.zero_().index_add_(0, ids, _not_zero(x))
        return ids

    def _points(self, x: Tensor, empty: bool = False) -> Tensor:
        """Return points at unit length, checked; zeros for those that are not finite, as when a
        scaler overflows.
        """
        x = from_numpy(x)
        check_matrix("x", x, f"(B, {self.dim})", empty=empty)
        if x.shape[1] != self.dim:
            raise ValueError(f"x: expected shape (B, {self.dim}), got {tuple(x.shape)}")
        if x.device != self.centroids.device:
            expected = f"device {self.centroids.device} like the centroids"
            raise ValueError(f"x: expected {expected}, got {x.device}")
        x = torch.where(x.isfinite().all(1, keepdim=True), x, 0.0)
        return normalized(x).to(self.centroids.dtype)

    def _nearest(self, x: Tensor, seeded: Tensor) -> Hardest:
        """Return the (B,) highest cosines with a centroid and their indices; -1 and 0 while there
        is none.
        """
        sim = Similarity(
            x,
            self.centroids,
            x.new_zeros(x.shape[0], dtype=torch.int64),
            torch.where(seeded, 1, IGNORE_ID),
            normalize=False,
            engine=self.engine,
            memory_budget=0,
        )
        best = sim.hardest_negatives()
        return Hardest(best.values.clamp_min(-1), best.indices.clamp_min(0))

    def _step(self, x: Tensor, patience: int) -> Tensor:
        """Update with the points of all processes; return their (B,) clusters. ``patience``: a
        number of points.
        """
        batch = x.shape[0]
        clusters = self.clusters
        seen = _not_zero(x)
        seeded = self.waiting < _NEVER
        first_seeds = torch.zeros_like(seeded)
        # seed a first batch with its first points, so that the others have a nearest centroid
        if batch > clusters:
            first = seen.sort(descending=True, stable=True)
            points = x[first.indices[:clusters]]
            first_seeds = ~seeded.any() & (first.values[:clusters] > 0)
            self.centroids.copy_(torch.where(first_seeds[:, None], points, self.centroids))
            seeded = seeded | first_seeds
        cosines, ids = self._nearest(x, seeded)
        hit = torch.zeros_like(self.waiting).index_add_(0, ids, seen) > 0
        self.waiting.add_(seen.sum()).masked_fill_(hit & seeded | first_seeds, 0)
        self._reseed(cosines.masked_fill(seen == 0, 1.0), ids, patience)
        reseeded = self.reseeded | first_seeds
        self.replaced.copy_(reseeded)
        self.counts.masked_fill_(reseeded, 0)
        self.waiting.masked_fill_(reseeded, 0)
        self._move(x, ids)
        return ids

    def _reseed(self, cosines: Tensor, ids: Tensor, patience: int) -> None:
        """Give the farthest points to the clusters that waited for more than ``patience`` points.

        ``cosines``, ``ids``: (B,) of the points; ``ids`` and ``replaced`` are overwritten.
        """
        pairs = min(len(self.waiting), ids.shape[0])
        # Empty clusters first, in their order; then those that waited longest.
        waited, cluster = torch.sort(self.waiting, descending=True, stable=True)
        cluster = cluster[:pairs]
        closeness, point = torch.sort(cosines, stable=True)
        point = point[:pairs]
        replaced = (waited[:pairs] > patience) & (closeness[:pairs] < _CLOSE)
        ids.index_copy_(0, point, torch.where(replaced, cluster, ids[point]))
        self.replaced.zero_().index_copy_(0, cluster, replaced.long())

    def _move(self, x: Tensor, ids: Tensor) -> None:
        """Move the centroids of the clusters that got some of these unit vectors, by sums of a
        fixed order.
        """
        batch = x.shape[0]
        # As many sums as there are points or clusters, so that nothing depends on the data and has
        # to synchronise. With sums of all clusters alone, an update took 67 ms in place of 23
        # (python -m timeit -p -s "import torch, itrloss; means = itrloss.OnlineKMeans(10000, 512)"
        # -s "x = torch.randn(128, 512)" "means.update(x)").
        if batch >= self.clusters:
            group = ids
            which = torch.arange(self.clusters, device=x.device)
            row = which
        else:  # the sum of a cluster is repeated for each of its points
            group = torch.searchsorted(ids.sort().values, ids)
            which = ids
            row = group
        points = torch.arange(batch, device=x.device)
        sums = weighted_sums(x, points, x.new_ones(batch), group, len(which))[row]
        sizes = torch.zeros_like(which).index_add_(0, group, _not_zero(x))[row]
        old = self.centroids[which]
        counts = self.counts[which]
        limit = torch.inf if self.max_count is None else self.max_count
        new = normalized(sums + counts.to(old.dtype).clamp_max(limit)[:, None] * old)
        # Points that cancel each other leave a centroid in place.
        moved = new.any(1, keepdim=True) & (sizes > 0)[:, None]
        self.centroids.index_copy_(0, which, torch.where(moved, new, old))
        self.counts.index_copy_(0, which, counts + sizes)


def _not_zero(x: Tensor) -> Tensor:
    """Return (B,) int64: 1 for each point that counts, 0 for those of length 0."""
    return x.any(1).long()
