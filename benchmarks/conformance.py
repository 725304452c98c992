"""How losses of other libraries fare in ``itrloss.testing.check_loss``; those that are installed.

    python -m benchmarks.conformance --out benchmarks/results/conformance.json

Each is called as in its documentation. open_clip's and lightly's files of losses are imported
without the rest of their packages, which need torchvision.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

import itrloss
from itrloss.testing import ConformanceError, check_loss

from . import report, runner
from .peers import Unavailable, _module, _open_clip

SCALE, BIAS = 10.0, -10.0


class Peer(NamedTuple):
    """A library's loss: its package, how it is made and called."""

    package: str
    make: Callable[[], Any]
    call: Callable[..., Any] | None = None
    ids: bool = False


def _units(loss: Any, images: Tensor, texts: Tensor) -> Any:
    return loss(F.normalize(images, dim=1), F.normalize(texts, dim=1), SCALE)


def _units_and_bias(loss: Any, images: Tensor, texts: Tensor) -> Any:
    return loss(F.normalize(images, dim=1), F.normalize(texts, dim=1), SCALE, BIAS)


def _both_directions(
    loss: Any, images: Tensor, texts: Tensor, image_ids: Tensor, text_ids: Tensor
) -> Any:
    """Call a loss with labels, whose second embeddings are a reference set, in both directions."""
    there = loss(images, image_ids, ref_emb=texts, ref_labels=text_ids)
    return there + loss(texts, text_ids, ref_emb=images, ref_labels=image_ids)


def _of_embeddings(loss: Any, images: Tensor, texts: Tensor) -> Any:
    return loss.compute_loss_from_embeddings([images, texts], None)


def _lightly(module: str, name: str) -> Callable[..., Any]:
    """Return a class of lightly, whose packages are not imported as a whole."""
    for package in (
        "lightly",
        "lightly.loss",
        "lightly.models",
        "lightly.models.modules",
        "lightly.utils",
    ):
        if package not in sys.modules:
            spec = importlib.util.find_spec("lightly")
            if spec is None:
                raise Unavailable("lightly is not installed")
            parent = ModuleType(package)
            folders = [Path(x) for x in spec.submodule_search_locations or ()]
            parent.__path__ = [str(x.joinpath(*package.split(".")[1:])) for x in folders]
            parent.__spec__ = spec if package == "lightly" else None
            sys.modules[package] = parent
    try:
        return getattr(importlib.import_module(f"lightly.loss.{module}"), name)
    except ImportError as error:
        raise Unavailable(f"its module cannot be imported: {error}") from error


def _metric_learning(name: str, **options: Any) -> Peer:
    losses = "pytorch_metric_learning.losses"
    make = lambda: getattr(_module(losses, "pytorch-metric-learning"), name)(**options)  # noqa: E731
    return Peer("pytorch-metric-learning", make, _both_directions, True)


def _sentence_transformers(**options: Any) -> Peer:
    module = "sentence_transformers.sentence_transformer.losses"

    def make() -> Any:
        return _module(module, "sentence-transformers").MultipleNegativesRankingLoss(
            None, **options
        )

    return Peer("sentence-transformers", make, _of_embeddings)


PEERS = {
    "ClipLoss": Peer("open_clip_torch", lambda: _open_clip().ClipLoss(), _units),
    "ClipLoss(cache_labels=True)": Peer(
        "open_clip_torch", lambda: _open_clip().ClipLoss(cache_labels=True), _units
    ),
    "SigLipLoss": Peer("open_clip_torch", lambda: _open_clip().SigLipLoss(), _units_and_bias),
    "MultipleNegativesRankingLoss": _sentence_transformers(),
    "MultipleNegativesRankingLoss, two directions": _sentence_transformers(
        directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
    ),
    "NTXentLoss(0.07)": _metric_learning("NTXentLoss", temperature=0.07),
    "SupConLoss(0.1)": _metric_learning("SupConLoss", temperature=0.1),
    "MultiSimilarityLoss": _metric_learning("MultiSimilarityLoss"),
    "CircleLoss": _metric_learning("CircleLoss"),
    "TripletMarginLoss": _metric_learning("TripletMarginLoss"),
    "ContrastiveLoss": _metric_learning("ContrastiveLoss"),
    "lightly NTXentLoss": Peer("lightly", lambda: _lightly("ntx_ent_loss", "NTXentLoss")()),
    "lightly DCLLoss": Peer("lightly", lambda: _lightly("dcl_loss", "DCLLoss")()),
    "InfoNCE": Peer("info-nce-pytorch", lambda: _module("info_nce", "info-nce-pytorch").InfoNCE()),
    "itrloss InfoNCELoss": Peer("itrloss", itrloss.InfoNCELoss, None, True),
}


def conformance(name: str) -> dict[str, Any]:
    """Return the row of a loss: its package and version, and numbers and names of checks, or why
    there are none.
    """
    peer = PEERS[name]
    row: dict[str, Any] = {"loss": name}
    try:
        version = (
            itrloss.__version__
            if peer.package == "itrloss"
            else importlib.metadata.version(peer.package)
        )
        row["package"] = f"{peer.package} {version}"
        loss = peer.make()
    except (Unavailable, importlib.metadata.PackageNotFoundError) as error:
        return {"package": peer.package} | row | {"error": str(error)}
    start = time.perf_counter()
    try:
        outcome = check_loss(loss, call=peer.call, ids=peer.ids)
    except ConformanceError as error:
        outcome = error.report
    row |= {status: len(outcome.names(status)) for status in ("passed", "skipped")}
    row["failed"] = {x.name: x.reason for x in outcome.outcomes if x.status == "failed"}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def main(arguments: list[str] | None = None) -> int:
    """Check, print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance", description=__doc__)
    parser.add_argument("--losses", nargs="+", choices=PEERS, default=list(PEERS), metavar="LOSS")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(arguments)
    rows = []
    for name in args.losses:
        rows.append(row := conformance(name))
        print(f"{row['package']}: {name}: ", end="")
        print(
            row.get("error")
            or f"{row['passed']} passed, {len(row['failed'])} failed, {row['skipped']} skipped",
            flush=True,
        )
        for check, reason in row.get("failed", {}).items():
            print(f"  {check}: {reason}")
    if args.out:
        report.save(args.out, runner.machine("cpu"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
