"""Embeddings, scores, biases and masks: tensors, or arrays that share their memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..torch_versions import UINT64, aminmax, is_compiling


class Names(NamedTuple):
    """What the caller calls the two sides of a similarity matrix, and their ids; the names of ids
    are empty if it takes none.
    """

    rows: str = "rows"
    cols: str = "cols"
    row_ids: str = "row_ids"
    col_ids: str = "col_ids"


ROWS_AND_COLUMNS = Names()
IMAGES_AND_TEXTS = Names("images", "texts", "image_ids", "text_ids")
# What to write, in Python and on the command line, to pass embeddings where scores are expected.
EMBEDDINGS = (
    "embeddings go in as itrloss.Similarity(images, texts), on the command line as "
    "itrloss eval IMAGES TEXTS"
)


def from_numpy(x: Any) -> Any:
    """Return a NumPy array of numbers as a tensor on the CPU, and a table of pandas, too; anything
    else as it is.

    The tensor has the memory of the array, which may be a file's: the library never writes to what
    it is given. Only a layout or a number type that PyTorch does not know is copied. An array with
    masked entries, which have no value, is no tensor.
    """
    if isinstance(x, Tensor):
        return x
    if hasattr(x, "to_numpy"):
        x = x.to_numpy()
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiub" or np.ma.is_masked(x):
        return x
    size = min(x.dtype.itemsize, 8)  # of long doubles, too
    # by its size: NumPy has two types of 64 bits, of which PyTorch knows one
    native = np.dtype(f"{x.dtype.kind}{size}")
    if native.kind == "u" and size > 1 and UINT64 is None:
        if (x >= 2**63).any():
            return x
        native = np.dtype(np.int64)
    order = "F" if x.flags.f_contiguous else "C"  # PyTorch has no negative strides
    x = np.require(x, native, [order, "ALIGNED"])
    if x.flags.writeable:
        return torch.from_numpy(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ", UserWarning)
        return torch.from_numpy(x)


def host_may_read(x: Tensor) -> bool:
    """Return whether the host may read ``x`` without a synchronisation or a graph break."""
    if is_compiling() or x.device.type != "cpu":
        return False
    return type(x) is Tensor or not isinstance(x, torch._subclasses.FakeTensor)


def check_matrix(
    name: str, x: Any, shape: str, check_finite: bool = False, dims: int = 2, empty: bool = False
) -> None:
    """Raise an error unless ``x`` is a floating-point tensor of ``dims`` dimensions, none of them
    of size 0.

    With ``empty`` there may be no rows, as in one process of several.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        hint = as_floats(name, x)
        raise TypeError(
            f"{name}: expected a floating-point tensor {shape}, got {type_name(x)}{hint}"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got {x.layout}; write {name}.to_dense()")
    if x.dim() != dims or 0 in x.shape[int(empty) :]:
        hint = as_rows(name, x) if shape.endswith("D)") else ""
        raise ValueError(
            f"{name}: expected shape {shape}, each at least 1, got {tuple(x.shape)}{hint}"
        )
    if check_finite and len(x):
        require_finite(name, x)


def as_embeddings(rows: Any, cols: Any, check_finite: bool, names: Names) -> tuple[Tensor, Tensor]:
    """Return (N, D) and (M, D) embeddings, which may be NumPy arrays, as tensors; raise an error
    as :func:`check_embeddings` does.
    """
    if not isinstance(rows, Tensor):
        rows = from_numpy(rows)
    if not isinstance(cols, Tensor):
        cols = from_numpy(cols)
    check_embeddings(rows, cols, check_finite, names)
    return rows, cols


def check_embeddings(
    rows: Any, cols: Any, check_finite: bool, names: Names, empty: bool = False
) -> None:
    """Raise an error unless (N, D) and (M, D) embeddings match in dimension, dtype and device."""
    check_matrix(names.rows, rows, "(N, D)", check_finite, empty=empty)
    if cols is None:
        got = f"None with {names.rows} of shape {tuple(rows.shape)}"
        calls = {"texts": "loss(scores=scores)", "cols": "Similarity.from_scores(scores)"}
        if names.cols in calls:
            got = f"{got}; a matrix of scores goes in as {calls[names.cols]}"
        raise TypeError(f"{names.cols}: expected embeddings (M, D), got {got}")
    check_matrix(names.cols, cols, "(M, D)", check_finite, empty=empty)
    if rows.shape[1] != cols.shape[1]:
        expected = f"embeddings of dimension {rows.shape[1]} like {names.rows}"
        raise ValueError(f"{names.cols}: expected {expected}, got shape {tuple(cols.shape)}")
    if rows.dtype != cols.dtype or rows.device != cols.device:
        check_alike(names.cols, cols, names.rows, rows)


def check_alike(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise an error unless two tensors lie on one device, and both are float64 or neither is."""
    if (x.dtype == torch.float64) != (other.dtype == torch.float64):
        expected = f"the dtype of {other_name}, {other.dtype}"
        raise TypeError(
            f"{name}: expected {expected}, got {x.dtype}; write {name}.to({other_name}.dtype)"
        )
    if x.device != other.device:
        raise ValueError(
            f"{name}: expected device {other.device} like {other_name}, got {x.device}; "
            f"write {name}.to({other_name}.device)"
        )


def require_finite(name: str, x: Tensor) -> None:
    """Raise a ValueError for nan or infinity in a tensor (..., C). Synchronises with an
    accelerator.
    """
    given = x.detach().flatten(0, -2)
    if all_finite(given):
        return
    wrong = ~given.isfinite()
    row, col = divmod(int(wrong.flatten().byte().argmax()), given.shape[1])
    places = f"{int(wrong.sum())} of {given.numel()}, the first in row {row} and column {col}"
    raise ValueError(f"{name}: expected finite values, got nan or infinity: {places}")


def all_finite(x: Tensor) -> bool:
    """Return whether a matrix that is not empty has neither nan nor infinity. Synchronises with an
    accelerator.
    """
    # Rows are as in memory, of which no copy is made: it may be a file's. A nan is both extremes,
    # and aminmax takes a tenth of the time of isfinite.
    in_memory = x.T if x.stride(0) < x.stride(1) else x
    return bool(torch.stack(aminmax(in_memory)).isfinite().all())


def as_vector(name: str, x: object, size: int, check_finite: bool = False) -> Tensor | None:
    """Return floating-point numbers (size,) as a tensor; None if there are none."""
    x = from_numpy(x)
    if x is None:
        return None
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name}: expected ({size},) floating-point numbers, got {type_name(x)}")
    if x.shape != (size,):
        raise ValueError(f"{name}: expected shape ({size},), got {tuple(x.shape)}")
    if check_finite and size:
        require_finite(name, x[None])
    return x


def check_biases(
    bias: object, n: int, m: int, check_finite: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Return the (N,) and (M,) biases; raise an error unless they are a pair of tensors or None."""
    if bias is None:
        return None, None
    if not isinstance(bias, (tuple, list)) or len(bias) != 2:
        raise TypeError(f"bias: expected a pair of tensors or None, got {bias!r}")
    rows = as_vector("bias", bias[0], n, check_finite)
    return rows, as_vector("bias", bias[1], m, check_finite)


def as_bias(name: str, bias: object, size: int, device: torch.device) -> Tensor | None:
    """Return the (size,) bias of candidates, detached, on the device; None if there is none."""
    x = as_vector(name, bias, size)
    return None if x is None else x.detach().to(device)


def as_mask(name: str, mask: object, shape: tuple[int, ...]) -> Tensor:
    """Return a mask of bools, or of integers 0 and 1: a tensor, an array or nested lists."""
    x = from_numpy(np.array(mask) if isinstance(mask, (list, tuple)) else mask)
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex():
        raise TypeError(f"{name}: expected a bool tensor of shape {shape}, got {type_name(x)}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    return x


# ------------------------------------------------------------------------------- words of messages


def type_name(x: object) -> str:
    """Return what to call an object's type: a tensor's dtype, or a class's name."""
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def as_floats(name: str, x: object) -> str:
    """Return how to make a floating-point tensor of what is none; empty for no idea."""
    if isinstance(x, Tensor):
        labels = "; labels of one set of embeddings go in as loss(embeddings, labels=labels)"
        ids = "ids of two sets as loss(images, texts, image_ids, text_ids)"
        return f"{labels}, {ids}" if x.dim() == 1 else ""
    if type(x) is np.ndarray:  # and not masked
        return f"; write torch.from_numpy({name})"
    if isinstance(getattr(x, "pooler_output", None), Tensor):  # of a model of transformers
        return f"; write {name}.pooler_output"
    if not isinstance(x, list) or not x:
        return ""
    if isinstance(x[0], Mapping):
        trained = "itrloss.integrations.sentence_transformers.RetrievalLoss(model, loss)"
        return f"; in the trainer of sentence-transformers, a loss goes into {trained}"
    if isinstance(x[0], Tensor):
        return f"; write torch.stack({name}), or torch.cat({name}) of matrices"
    return f"; write torch.tensor({name})"


def as_rows(name: str, x: Tensor) -> str:
    """Return how to make rows of a tensor of another shape; empty for no idea."""
    if x.dim() == 1:
        return f"; for a single row, write {name}[None]"
    if x.dim() == 3:
        return (
            f"; write {name}.flatten(0, 1), with ids where several, such as captions, belong to "
            "one. Sets with one score for each pair are for itrloss.functional.set_similarity"
        )
    return ""


def repeated_rows(name: str, n: int, m: int) -> str:
    """Return how to repeat each of n rows to have m; empty if m is no multiple of n."""
    if n == 0 or m <= n or m % n:
        return ""
    rows = f"{name}.repeat_interleave({m // n}, 0)"
    return f"; where {m // n} consecutive ones belong to each, write {rows}"
