"""Inputs of the golden values: a batch, arguments by name, and the values of options."""

from __future__ import annotations

import inspect
import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

import itrloss
from itrloss import Similarity, compat, functional, metrics, rerank
from itrloss.memory import MemorySimilarity

D, HEADS, CLUSTERS = 8, 3, 4
IDS = {
    # five captions an image, two images with the same ones, and an image and two texts without a
    # match
    "captions": (torch.tensor([0, 1, 2, 3, 3, 9]), torch.tensor([*range(4)] * 5 + [77, 78])),
    "pairs": (None, None),
    "repeated": (torch.tensor([0, 1, 2, 0, 4, 9]), torch.tensor([0, 1, 2, 0, 4, 9])),
}


def numbers(seed: int, *shape: int) -> Tensor:
    """Return float64 numbers in [-1, 1] that look random, the same everywhere: cubes modulo a
    prime, divided once.
    """
    k = torch.arange(math.prod(shape)) + 499 * seed
    return ((k**3 % 10007).double() / 5003 - 1).view(shape)


class Batch:
    """A batch that makes its inputs on demand; ``leaves`` are those that get a gradient."""

    def __init__(self, kind: str):
        self.leaves: list[Tensor] = []
        self.ids = IDS[kind]
        self.own = [torch.arange(6) if x is None else x for x in self.ids]
        self.n, self.m = map(len, self.own)

    def leaf(self, x: Tensor) -> Tensor:
        self.leaves.append(x.requires_grad_())
        return x

    def near(self, side: int, seed: int, *shape: int) -> Tensor:
        """Embeddings (N, ..., D) of images (0) or texts (1); those of an id are similar."""
        centres = numbers(1, 11, D)[self.own[side] % 11].view(-1, *[1] * len(shape), D)
        return self.leaf(centres + 0.8 * numbers(seed, len(self.own[side]), *shape, D))

    def memory(self) -> itrloss.CoupledMemory:
        stored = itrloss.CoupledMemory(16, D, dtype=torch.float64)
        stored.enqueue(
            numbers(21, 11, D),
            numbers(22, 11, D),
            None if self.ids[0] is None else torch.arange(11) % 5,
        )
        return stored

    def similarity(self, seed: int = 2) -> Similarity:
        return Similarity(self.near(0, seed), self.near(1, seed + 1), *self.ids)

    def module(self, module: nn.Module) -> Any:
        """The module in float64, with its parameters among the leaves, and those drawn at random
        replaced.
        """
        for i, x in enumerate([*module.double().parameters(), *module.buffers()]):
            if x.dim() > 1 and bool(x.any()):
                x.data.copy_(0.5 * numbers(30 + i, *x.shape))
        self.leaves += list(module.parameters())
        return module


def linear(seed: int) -> nn.Linear:
    layer = nn.Linear(D, D).double()
    layer.weight.data, layer.bias.data = numbers(90 + seed, D, D), numbers(95 + seed, D)
    return layer


@itrloss.pair_term
def squared(scores: Tensor, guide: Any = 0.3) -> Tensor:
    return (scores - guide).square()


# Arguments by name. First embeddings: their side, a seed, and the number of them an item.
EMBEDDINGS = {
    **dict.fromkeys(["images", "queries", "images_mean", "im", "image_features", "v_q"], (0, 2)),
    **dict.fromkeys(["texts", "corpus", "texts_mean", "s", "text_features", "t_q"], (1, 3)),
    **{
        "image_concepts": (0, 10),
        "text_concepts": (0, 11),
        "negatives": (0, 7, HEADS),
        "regions": (0, 8, 5),
    },
    **dict.fromkeys(["image_sets", "residuals", "img", "img_embs"], (0, 8, HEADS)),
    **{
        "txt": (1, 9, HEADS),
        "img_r": (0, 12, HEADS),
        "txt_r": (1, 13, HEADS),
        "text_sets": (1, 9, 2),
    },
}
OPT = {
    "local_alpha": 8.0,
    "local_ep": 0.3,
    "global_alpha": 6.0,
    "global_beta": 5.0,
    "mb_k": 3,
    "mu": 7.0,
    "gama": 0.2,
}
OPT |= {
    "num_embeds": HEADS,
    "mmd_weight": 0.2,
    "div_weight": 0.7,
    "unif_weight": 0.3,
    "img_num_embeds": HEADS,
}
OPT |= {
    "txt_num_embeds": 2,
    "temperature": 4.0,
    "mask_repeat": True,
    "margin": 0.3,
    "max_violation": False,
}
CONSTANTS: dict[str, Any] = {
    **{
        "size": 16,
        "dim": D,
        "clusters": CLUSTERS,
        "k": 3,
        "below": 0.4,
        "above": 0.1,
        "margin": 0.3,
        "term": squared,
    },
    **{
        "dims": (3, D),
        "weights": (0.3, 0.6),
        "rows": torch.tensor([0, 3, 3, 5]),
        "cols": torch.tensor([1, 0, 5, 2]),
    },
    **{
        "mb_img": numbers(61, 8, D),
        "mb_cap": numbers(62, 8, D),
        "mb_ind": torch.arange(8),
        "s_l": [2] * 6,
    },
    **{
        "indices": torch.arange(6) + 6,
        "img_ids": torch.tensor([0, 0, 1, 2, 3, 4]),
        "opt": Namespace(**OPT),
    },
    **{"img_set_size": HEADS, "txt_set_size": 2, "similarity_fn": None, "number of heads": HEADS},
    **dict.fromkeys(["v_queue", "t_queue"], numbers(65, D, 9)),
    **{
        "counts": numbers(17, 9),
        "reranker": rerank.FastReranker(),
        "opt hardest": Namespace(**OPT | {"max_violation": 1}),
    },
    "scorer": lambda images, texts: numbers(41, 22, 22)[images, texts],
    "score_function": lambda im, s, lengths: im.mean(1) @ s.mean(1).T,
}
DATA: dict[str, Callable[[Batch], Any]] = {
    **{name: lambda b, x=x: b.near(*x) for name, x in EMBEDDINGS.items()},
    **{name: lambda b, x=x: x for name, x in CONSTANTS.items()},
    **dict.fromkeys(["sim"], Batch.similarity),
    **dict.fromkeys(["scores", "sims of compat"], lambda b: b.similarity().scores()),
    **dict.fromkeys(["values", "sums", "x"], lambda b: numbers(18, b.n + b.m)),
    **dict.fromkeys(["image_keys", "v_k"], lambda b: b.near(0, 4).detach()),
    **dict.fromkeys(["text_keys", "t_k"], lambda b: b.near(1, 5).detach()),
    **dict.fromkeys(["positives", "guide"], lambda b: b.similarity(6).both),
    "image_ids": lambda b: b.ids[0],
    "text_ids": lambda b: b.ids[1],
    "query_ids": lambda b: b.own[0],
    "corpus_ids": lambda b: b.own[1],
    "memory": Batch.memory,
    "sims": lambda b: MemorySimilarity.of(**{name: DATA[name](b) for name in MEMORY}),
    "diversity_of": lambda b: [b.similarity(15).both],
    "teacher": lambda b: b.similarity(6),
    "heads": lambda b: [
        Similarity(x, y, *b.ids) for y in [b.near(1, 3)] for x in b.near(0, 8, HEADS).unbind(1)
    ],
    "gate": lambda b: numbers(9, b.n, HEADS).relu(),
    "mask": lambda b: numbers(9, b.n, 5) > -0.5,
    "valid": lambda b: numbers(18, b.n + b.m) > -0.5,
    "bias": lambda b: numbers(19, b.m),
    "biases": lambda b: (b.leaf(numbers(25, b.n)), None),
    "prototype_ids": lambda b: torch.arange(b.n) % CLUSTERS,
    "weight": lambda b: b.leaf(numbers(12, CLUSTERS, D)),
    "images_log_variance": lambda b: b.leaf(numbers(13, b.n, D)),
    "texts_log_variance": lambda b: b.leaf(numbers(14, b.m, D)),
    "image_lengths": lambda b: torch.arange(b.n) % HEADS + 1,
    "text_lengths": lambda b: torch.arange(b.m) % 2 + 1,
    "encoder": lambda b: linear(0),
    "loss": lambda b: itrloss.InfoNCELoss(learnable=True),
    "judgements": lambda b: metrics.Judgements(
        torch.arange(30) % b.n, torch.arange(30) * 7 % b.m, numbers(16, 30)
    ),
    "systems": lambda b: {
        name: metrics.retrieval_results(b.similarity(i)) for i, name in ((2, "a"), (6, "b"))
    },
    "logit_scale": lambda b: b.leaf(torch.tensor([9.0], dtype=torch.float64)),
    "logit_bias": lambda b: b.leaf(torch.tensor([-2.0], dtype=torch.float64)),
    "txt_embs": lambda b: b.leaf(numbers(80, 30, 2, D)),
    "texts' residuals": lambda b: b.leaf(numbers(81, 30, 2, D)),
}
MEMORY = "images", "texts", "image_keys", "text_keys", "memory", "image_ids", "text_ids"
INSTEAD: dict[str, dict[str, str]] = {  # what these owners call otherwise
    "LateInteractionLoss": (sets := {"images": "image_sets", "texts": "text_sets"}),
    "set_similarity": sets,
    "FilteredInfoNCELoss": {"guide": "teacher"},
    "DynamicGate": {"heads": "number of heads"},
    "Similarity": {
        "rows": "images",
        "cols": "texts",
        "row_ids": "image_ids",
        "col_ids": "text_ids",
        "bias": "biases",
    },
    "CHANLoss": {"sims": "sims of compat"},
    "SCANLoss": {"im": "img", "s": "txt"},
    "DivELoss": {"txt_r": "texts' residuals"},
}
# although they have a default
GIVEN = {"images", "texts", "img_r", "txt_r", "mb_img", "mb_cap", "mb_ind", "indices"}
# which take as many texts
SQUARE = {"CODERObjective", "DirectionalInfoNCELoss", "moco_forward", *compat.__all__}
OTHERS: dict[str, list[Any]] = {  # options' values that cannot be derived from the default
    **{
        "alpha": [8.0],
        "epsilon": [0.2],
        "max_count": [4],
        "folds": [2],
        "measure": ["order"],
        "margin": [0.25],
    },
    **{"directions": [("image-text", "text-text")], "reduction": ["sum"], "ties": ["optimistic"]},
    **{"i2t": [(10.0, 5.0)], "t2i": [(5.0, 10.0)]},
}
LEFT_OUT = {  # how something is computed, checked and shown, and what excludes other arguments
    *(
        "engine",
        "check_finite",
        "telemetry",
        "gather",
        "process_group",
        "names",
        "progress",
        "block",
        "memory_budget",
    ),
    *(
        "dtype",
        "training",
        "local_loss",
        "gather_with_grad",
        "cache_labels",
        "rank",
        "world_size",
        "use_horovod",
    ),
    *("dist_impl", "chunk_size", "length", "output_dict", "scores", "relevant", "txt_per_img"),
}
REFUSED = {
    "CODERObjective.reduction=none",
    "DVSEObjective.reduction=sum",
    "DVSEObjective.reduction=none",
}
PASSED_ON = {  # where arguments end up that are passed on with ``**``
    **dict.fromkeys(
        ["InfoNCELoss", "SigmoidLoss", "DirectionalInfoNCELoss", "PCMEPlusPlusLoss"],
        itrloss.PairLoss,
    ),
    "CODERObjective": itrloss.DiversityContrastiveLoss,
    "DVSEObjective": itrloss.VarianceAwareLoss,
    "memory_diversity_contrastive_loss": functional.diversity_contrastive_loss,
    "unified_training_objective": functional.hubness_aware_loss,
    "Matryoshka": lambda image_ids=None, text_ids=None: None,
}


def choices(owner: str, function: Any) -> dict[str, list[Any]]:
    """Return, for each argument of a function, its default and others; functions are called with
    the batch.
    """
    hints = get_type_hints(
        function.__init__ if inspect.isclass(function) else function, None, vars(rerank)
    )
    found: dict[str, list[Any]] = {}
    for name, p in inspect.signature(function).parameters.items():
        hint, default, required = hints.get(name), [p.default], p.default is p.empty
        kinds = (hint,) if get_origin(hint) is Literal else get_args(hint)
        literals = [x for kind in kinds if get_origin(kind) is Literal for x in get_args(kind)]
        data = DATA.get(INSTEAD.get(owner, {}).get(name, name))
        if name == "self" or p.kind is p.VAR_POSITIONAL or (name in LEFT_OUT and not required):
            continue
        if p.kind is p.VAR_KEYWORD:
            more = choices(owner, PASSED_ON[owner])
            found |= {
                key: x
                for key, x in more.items()
                if key not in found
                and (key.endswith("_ids") or type(x[0]) in (str, float, int, bool))
            }
        elif literals:
            found[name] = [
                *default * (not required),
                *(x for x in literals if x != p.default),
                *[0.6] * (float in kinds),
            ]
        elif name in OTHERS and not required:
            found[name] = default + OTHERS[name]
        elif isinstance(p.default, bool):
            found[name] = [p.default, not p.default]
        elif isinstance(p.default, (int, float)):
            found[name] = [
                p.default,
                3 if isinstance(p.default, int) else float(f"{0.7 * p.default:.3g}") or 0.5,
            ]
        elif data is None:
            raise LookupError(f"{owner}: the argument {name} needs a value in promised_inputs.py")
        else:
            found[name] = [
                *default * (not required and name not in GIVEN and not name.endswith("_ids")),
                data,
            ]
            found[name] += [DATA["opt hardest"]] * (name == "opt")
    return {
        name: [x for x in values if f"{owner}.{name}={x}" not in REFUSED]
        for name, values in found.items()
    }
