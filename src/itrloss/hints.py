"""What a wrong input was probably meant to be, for the message of its error.

Nothing here is called unless an error is raised, but for :func:`explained`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

F = TypeVar("F", bound=Callable[..., Any])

# What papers and other libraries call options and arguments, and what they are called here.
_SYNONYMS = {
    "alpha": ("margin", "scale"),
    "avg": ("mean",),
    "average": ("mean",),
    "bank": ("images",),
    "batchmean": ("mean",),
    "beta": ("scale",),
    "clip": ("clamp",),
    "cuda": ("triton", "auto"),
    "gamma": ("scale",),
    "groups": ("image_groups",),
    "i2t": ("image-text",),
    "image_embeddings": ("images", "rows"),
    "image_features": ("images", "rows"),
    "image_ids": ("row_ids",),
    "images": ("rows",),
    "ids": ("image_ids", "query_ids"),
    "k": ("ks",),
    "labels": ("image_ids", "query_ids"),
    "lambda_value": ("weight",),
    "logit_scale": ("temperature", "scale"),
    "logits": ("scores",),
    "m": ("margin",),
    "matryoshka_dims": ("dims",),
    "matryoshka_weights": ("weights",),
    "max_violation": ("mining",),
    "n_clusters": ("clusters",),
    "scale": ("temperature",),
    "similarity": ("scores",),
    "sims": ("scores",),
    "t2i": ("text-image",),
    "target": ("image_ids",),
    "targets": ("image_ids",),
    "tau": ("temperature",),
    "temp": ("temperature",),
    "temperature": ("scale",),
    "text_embeddings": ("texts", "cols"),
    "text_features": ("texts", "cols"),
    "text_ids": ("col_ids",),
    "texts": ("cols",),
    "cliploss": ("InfoNCELoss",),
    "crossbatchmemory": ("CoupledMemory",),
    "dcl": ("DiversityContrastiveLoss",),
    "dclloss": ("DiversityContrastiveLoss",),
    "distillkldivloss": ("DistillationLoss",),
    "gistembedloss": ("InfoNCELoss",),
    "hal": ("HubnessAwareLoss",),
    "halloss": ("HubnessAwareLoss",),
    "kldivloss": ("DistillationLoss",),
    "marginmseloss": ("DistillationLoss",),
    "mdcl": ("MemoryDiversityContrastiveLoss",),
    "mdclloss": ("MemoryDiversityContrastiveLoss",),
    "multiplenegativesrankingloss": ("InfoNCELoss",),
    "negative_mask": ("negative_ids",),
    "ntxentloss": ("InfoNCELoss",),
    "recall": ("retrieval_metrics",),
    "uto": ("UnifiedTrainingObjective",),
    "utoloss": ("UnifiedTrainingObjective",),
    "vse++": ("vsepp",),
    "vseloss": ("VSEPPLoss",),
    "top_k": ("k",),
}


_SHARED_SCALE = (
    "a loss with learnable=True shares a model's parameter: loss.log_scale = model.logit_scale"
)
_MULTI_HOT = (
    "labels (N, k) are sets of ids, not multi-hot rows; for these, write "
    "matches=(of_images.float() @ of_texts.float().T) > 0"
)
# What to pass, and on the command line, where scores are expected.
EMBEDDINGS = (
    "embeddings go in as itrloss.Similarity(images, texts), on the command line as "
    "itrloss eval IMAGES TEXTS"
)
# What to know besides the word that was meant, by the words given and meant.
_ADVICE = {
    ("logit_scale", "temperature"): _SHARED_SCALE,
    ("logit_scale", "scale"): _SHARED_SCALE,
}


# A scale multiplies scores, and a temperature divides them.
_INVERSES = {("scale", "temperature"), ("temperature", "scale"), ("tau", "scale")}


def nearest(given: object, allowed: Iterable[object]) -> str | None:
    """Return the word that a misspelt or foreign one probably stands for; None for no idea."""
    if not isinstance(given, str):
        return None
    words = {_plain(word): word for word in allowed if isinstance(word, str)}
    for synonym in _SYNONYMS.get(given.lower(), ()):
        if _plain(synonym) in words:
            return words[_plain(synonym)]
    plain = _plain(given)
    close = difflib.get_close_matches(plain, words, 1, 0.7)
    if close:
        return words[close[0]]
    if len(plain) < 4:
        return None
    # a word that is longer by a part, as in image_embeddings for images
    longer = [word for word in words if len(word) > 3 and (word in plain or plain in word)]
    return words[longer[0]] if longer else None


def _plain(word: str) -> str:
    """Return a word without what is often confused: case, hyphens and underscores."""
    return word.lower().replace("-", "").replace("_", "").replace(" ", "")


def did_you_mean(given: object, allowed: Iterable[object]) -> str:
    """Return the end of a message that says what was probably meant; empty for no idea."""
    meant = nearest(given, allowed)
    if meant is None:
        return ""
    inverse = f", which is 1 / {given}" if (given, meant) in _INVERSES else ""
    advice = _ADVICE.get((str(given), meant))
    question = f"; did you mean {meant!r}{inverse}?"
    return question if advice is None else f"{question} {advice}"


def shown(value: object) -> str:
    """Return a value for a message: a parameter, a tensor or an array by its shape."""
    if isinstance(value, nn.Parameter):
        return f"a parameter of shape {tuple(value.shape)}"
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def in_place_of_option(value: object) -> str:
    """Return advice where data was passed for an option of a loss; empty for other values."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        return "; options go first, and data into the call: loss = Loss(...); loss(images, texts)"
    return ""


def in_place_of_number(value: object) -> str:
    """Return advice where a tensor was passed for a number; empty for other values."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        return f"; {_SHARED_SCALE}"
    return in_place_of_option(value)


def in_place_of_images(value: object) -> str:
    """Return advice where a trainer's batch was passed for images; empty for other values."""
    if isinstance(value, (list, tuple)) and any(isinstance(x, Mapping) for x in value):
        return (
            "; in the trainer of sentence-transformers, a loss goes into "
            "itrloss.integrations.sentence_transformers.RetrievalLoss(model, loss)"
        )
    return ""


def as_floats(name: str, x: Any) -> str:
    """Return how to make a floating-point tensor of what is none; empty for no idea."""
    if isinstance(x, Tensor) and name == "negatives" and not x.is_complex():
        return "; for row numbers of a corpus, pass those rows: corpus[negatives]"
    if isinstance(x, Tensor):
        return "" if x.is_complex() else f"; write {name}.float()"
    if isinstance(x, np.ndarray):
        return f"; write torch.from_numpy({name})" if x.dtype.kind == "f" else ""
    if isinstance(getattr(x, "pooler_output", None), Tensor):  # of a model of transformers
        return f"; write {name}.pooler_output"
    if not isinstance(x, (list, tuple)) or not len(x):
        return ""
    if name == "negatives" and all(isinstance(part, Tensor) for part in x):
        return (
            "; write torch.cat(negatives) for negatives of all images, or "
            "torch.stack(negatives, 1) for each image's own, the i-th of each tensor"
        )
    if all(isinstance(part, Tensor) for part in x):
        return f"; write torch.stack({name}), or pass the tensors one by one"
    return f"; write torch.tensor({name})"


def as_matrix(name: str, x: Tensor, are_embeddings: bool) -> str:
    """Return how to make a matrix of a tensor of another shape; empty for no idea."""
    if x.dim() == 1:
        return f"; for a single row, write {name}[None]"
    if x.dim() == 3 and 1 in x.shape[:2]:
        return f"; write {name}.squeeze({list(x.shape).index(1)})"
    if x.dim() == 3 and are_embeddings:
        return (
            f"; for {x.shape[1]} embeddings of each, such as captions, write {name}.flatten(0, 1) "
            "and pass ids. Sets with one score for each pair are for "
            "itrloss.functional.set_similarity"
        )
    return ""


def consecutive_ids(n: int, m: int, row_ids: str, col_ids: str) -> str:
    """Return the ids of as many consecutive columns for each row; empty if numbers do not fit."""
    if n == 0 or m % n:
        return ""
    ids = f"{row_ids}=torch.arange({n}), {col_ids}=torch.arange({m}) // {m // n}"
    return f"; where {m // n} consecutive ones belong to each, write {ids}"


def repeated_rows(name: str, n: int, m: int) -> str:
    """Return how to repeat each of n rows to have m; empty if m is no multiple of n."""
    if n == 0 or m <= n or m % n:
        return ""
    rows = f"{name}.repeat_interleave({m // n}, 0)"
    return f"; where {m // n} consecutive ones belong to each, write {rows}"


def explained(function: F) -> F:
    """Return a function whose errors for unknown and superfluous arguments say what it takes."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Call the function; explain what it does not take."""
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # one that comes from further down is left as it is
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise misfit(function, args, kwargs, error) from None

    return call  # type: ignore[return-value]


def misfit(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError
) -> TypeError:
    """Return the error for arguments that a function does not take."""
    parameters = inspect.signature(function).parameters
    names = [name for name, x in parameters.items() if x.kind != x.VAR_KEYWORD and name != "self"]
    name = function.__qualname__.removesuffix(".__init__")
    if "self" in parameters and args and not isinstance(args[0], Tensor):
        name = f"{type(args[0]).__name__}.{function.__name__}".removesuffix(".__init__")
    name = name.removesuffix(".forward")  # a module is called itself
    for given in kwargs:
        if given not in names:
            return unknown(name, given, names)
    by_position = [n for n in names if parameters[n].kind == parameters[n].POSITIONAL_OR_KEYWORD]
    number = len(args) - int("self" in parameters)
    if number > len(by_position):
        expected = f"{', '.join(by_position) or 'nothing'} by position"
        hint = ""
        if "scores" in by_position and all(isinstance(x, Tensor) for x in args[-number:]):
            hint = f"; {EMBEDDINGS}"
        return TypeError(f"{name}: expected {expected}, got {number} arguments{hint}")
    needed = [n for n in by_position if parameters[n].default is inspect.Parameter.empty]
    missing = [n for n in needed[max(number, 0) :] if n not in kwargs]
    if missing:
        return TypeError(f"{name}: expected {', '.join(needed)}, got no {', '.join(missing)}")
    return error


def unknown(name: str, given: str, allowed: Iterable[str]) -> TypeError:
    """Return the error for a keyword that a class or a function does not know."""
    names = list(allowed)
    hint = did_you_mean(given, names) or f"; it has {', '.join(names)}"
    if given == "logit_scale" and "images" in names:  # in the call of a loss
        hint = f"; {_SHARED_SCALE}"
    if given == "image_ids" and "image_features" in names:
        hint = f"{hint}. For ids, take itrloss.InfoNCELoss; {_SHARED_SCALE}"
    return TypeError(f"{name}: got an unexpected keyword argument {given!r}{hint}")


def in_place_of_ids(name: str, x: object) -> str:
    """Return what to pass for a scale or a mask; empty for other values."""
    if isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point():
        return ", a scalar as logit_scale is; pass images and texts alone"
    if not isinstance(x, Tensor) or x.dtype != torch.bool or x.dim() != 2:
        return ""
    if name == "negative_ids":
        return "; for a mask of those that exist, write torch.where(mask, -1, itrloss.NO_ID)"
    return f"; {_MULTI_HOT}"


def multi_hot(x: Tensor) -> str:
    """Return what to pass for labels (N, k) that are all 0 or 1; empty for others."""
    if x.dim() != 2 or x.shape[1] < 2 or not bool(((x == 0) | (x == 1)).all()):
        return ""
    return f"; {_MULTI_HOT}"


def no_parameter(name: str, given: str, learnt: Iterable[str]) -> AttributeError:
    """Return the error for a parameter that a loss does not learn."""
    names = ", ".join(learnt)
    return AttributeError(f"{name}: it has no parameter {given!r}; it learns {names or 'none'}")


def as_similarity(name: str, x: object) -> str:
    """Return how to pass a matrix of scores for another model; empty for other values."""
    if isinstance(x, Tensor) and x.dim() == 2:
        return f"; scores go in as itrloss.Similarity.from_scores({name}, image_ids, text_ids)"
    return ""


def options_of(kind: type) -> list[str]:
    """Return the keywords of a class, with those that it passes on to its base classes."""
    names: dict[str, None] = {}
    for owner in kind.__mro__:
        if "__init__" not in vars(owner) or owner is torch.nn.Module:
            continue
        parameters = inspect.signature(owner.__init__).parameters.values()
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        names |= {x.name: None for x in parameters if x.kind in kinds}
        if not any(x.kind == x.VAR_KEYWORD for x in parameters):
            break
    names.pop("self", None)
    return list(names)


def public_names(module: str, names: list[str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``, whose error says which public name was meant."""

    def missing(name: str) -> Any:
        """Raise the error for a name that the module does not have."""
        hint = "" if name.startswith("_") else did_you_mean(name, names)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    return missing
