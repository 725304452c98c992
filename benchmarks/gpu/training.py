"""Steps: the loss in a whole step of training, under autocast, and next to other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from itrloss import InfoNCELoss

from .. import cases, eager, runner
from ..cases import Case
from ..peak import peak_memory
from ..peers import Unavailable
from .session import Session
from .speed import HALF, case_fields, measured

Loss = Callable[..., Tensor]  # of images and texts (N, D)


# -------------------------------------------------------------------------------- with two encoders


class Transformer(nn.Module):
    """A pre-norm transformer over T tokens, and a projection of their mean to D dimensions."""

    def __init__(self, width: int, layers: int, tokens: int, dim: int):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=max(1, width // 64),
            dim_feedforward=4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.projection = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, D) embeddings of (N, T, W) tokens."""
        return self.projection(self.layers(x + self.positions).mean(1))


class Patches(nn.Conv2d):
    """The (N, T, W) patches of (N, 3, H, W) images."""

    def forward(self, input: Tensor) -> Tensor:
        """Return one token for each patch."""
        return super().forward(input).flatten(2).transpose(1, 2)


class Towers(nn.Module):
    """Two encoders with random weights, and inputs for them."""

    def __init__(self, images: nn.Module, texts: nn.Module, inputs: tuple[Tensor, Tensor]):
        super().__init__()
        self.images = images
        self.texts = texts
        self.inputs = inputs

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the embeddings (N, D) of images and of texts, in bfloat16."""
        image_inputs, text_inputs = self.inputs
        with torch.autocast(image_inputs.device.type, HALF):
            return self.images(image_inputs), self.texts(text_inputs)


def vit_b32(session: Session, n: int, dim: int) -> Towers:
    """Return encoders of the size of CLIP's ViT-B/32."""
    size, width, layers, vocabulary = session.pick((224, 768, 12, 49408), (64, 16, 1, 10))
    tokens, text_width = session.pick((77, 512), (5, 16))
    images = nn.Sequential(
        Patches(3, width, kernel_size=32, stride=32),
        Transformer(width, layers, (size // 32) ** 2, dim),
    )
    texts = nn.Sequential(
        nn.Embedding(vocabulary, text_width), Transformer(text_width, layers, tokens, dim)
    )
    inputs = (
        torch.randn(n, 3, size, size, device=session.device),
        torch.randint(vocabulary, (n, tokens), device=session.device),
    )
    return Towers(images, texts, inputs).to(session.device)


def linear_towers(session: Session, n: int, dim: int) -> Towers:
    """Return one linear layer on stored features for each side, as of a frozen model."""
    width = session.pick(2048, 16)
    inputs = (
        torch.randn(n, width, device=session.device),
        torch.randn(n, width, device=session.device),
    )
    return Towers(nn.Linear(width, dim), nn.Linear(width, dim), inputs).to(session.device)


TOWERS = {"ViT-B/32": (vit_b32, 1024), "linear layers": (linear_towers, 32768)}
VARIANTS = "ours triton", "eager", "open_clip"


def encoders(session: Session) -> None:
    """Time InfoNCE alone, two encoders alone, and both: what a faster loss is worth."""
    dim = session.pick(512, 16)
    for towers, (make, batch) in TOWERS.items():
        n = session.pick(batch, 12)
        shape = (n, n, dim)
        case = Case("infonce", shape, HALF, session.device.type)
        if session.is_late(loss=towers, shape=shape):
            return
        with session.attempt(loss="infonce", shape=shape):
            measured(session, case, VARIANTS)
        model = make(session, n, dim)
        with session.attempt(loss=towers, shape=shape):
            training_step(session, f"{towers}, no loss", model, shape, squares)
        for variant in VARIANTS:
            with session.attempt(loss=towers, shape=shape, variant=variant):
                try:
                    loss = runner.loss(variant, case, cases.problem(case))
                except Unavailable as reason:
                    session.say(loss=towers, variant=variant, skipped=str(reason))
                    continue
                training_step(session, f"{towers} + infonce", model, shape, loss, variant)


def squares(images: Tensor, texts: Tensor) -> Tensor:
    """Return a loss that costs nothing."""
    return images.float().square().mean() + texts.float().square().mean()


def training_step(
    session: Session,
    name: str,
    model: Towers,
    shape: tuple[int, int, int],
    loss: Loss,
    variant: str = "encoders",
) -> None:
    """Time forward and backward of the encoders with a loss."""

    def run() -> None:
        model.zero_grad()
        loss(*model()).backward()

    row = session.timed(run, 1.0)
    found = peak_memory(run, session.device)
    session.say(**case_fields(name, shape), variant=variant, **row, peak_mb=found)


# ---------------------------------------------------------------------------------- under autocast


def amp(session: Session) -> None:
    """Time what trainers pass under autocast: unit vectors in float32, next to open_clip's loss."""
    shapes = ((1024, 512), (4096, 512), (8192, 768), (32768, 512))
    for n, dim in session.pick(shapes, ((20, 16),)):
        images, texts = session.pair(n, n, dim, torch.float32)
        v, w = (
            nn.functional.normalize(x.detach(), dim=1).requires_grad_() for x in (images, texts)
        )
        exact = exact_gradient(v, w) if n <= 8192 else None
        base: float | None = None
        for variant, (loss, has_tf32) in autocast_losses(session, n, dim).items():
            about = case_fields("infonce", (n, n, dim), torch.float32) | {"variant": variant}
            if session.is_late(**about):
                return
            with session.attempt(**about), tf32(has_tf32):
                step = AutocastStep(loss, v, w)
                row = session.timed(step, 0.3)
                base = base or row["seconds"]
                row["to open_clip"] = round(row["seconds"] / base, 3)
                if exact is not None:
                    row["gradient error"] = step.error(exact)
                session.say(**about, **row, peak_mb=peak_memory(step, session.device))


def autocast_losses(session: Session, n: int, dim: int) -> dict[str, tuple[Loss, bool]]:
    """Return symmetric InfoNCE in several forms, the sum of both directions, and whether TF32 may
    stand in for float32. The first is open_clip's, or the same in plain PyTorch.
    """
    case = Case("infonce", (n, n, dim), HALF, session.device.type)  # others run under autocast
    ours = InfoNCELoss(engine="triton")
    try:
        reference = {"open_clip": runner.loss("open_clip", case, cases.problem(case))}
    except Unavailable as reason:
        session.say(variant="open_clip", skipped=str(reason))
        reference = {"eager": eager.infonce}
    losses: dict[str, tuple[Loss, bool]] = {name: (f, False) for name, f in reference.items()}
    losses["ours"] = ours, False
    losses["ours, engine of auto"] = InfoNCELoss(), False
    losses["ours, autocast off"] = without_autocast(ours), False
    losses["ours, autocast off, TF32"] = without_autocast(ours), True
    losses["ours, rounded before"] = (lambda x, y: ours(x.to(HALF), y.to(HALF))), False
    return losses


def without_autocast(loss: Loss) -> Loss:
    """Return a loss that does not follow autocast."""

    def call(images: Tensor, texts: Tensor) -> Tensor:
        with torch.autocast(images.device.type, enabled=False):
            return loss(images, texts)

    return call


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Return a context in which products of float32 may be made of TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class AutocastStep:
    """Forward under autocast, and backward."""

    def __init__(self, loss: Loss, images: Tensor, texts: Tensor):
        self.loss = loss
        self.images = images
        self.texts = texts

    def __call__(self) -> None:
        self.images.grad = None
        self.texts.grad = None
        with torch.autocast(self.images.device.type, HALF):
            value = self.loss(self.images, self.texts)
        value.backward()

    def error(self, exact: Tensor) -> float:
        """Return the relative error of the images' gradient.

        Only the part across the vectors counts: normalisation takes the other out.
        """
        assert self.images.grad is not None
        unit = self.images.detach().double()
        grad = self.images.grad.double()
        grad = grad - unit * (unit * grad).sum(1, keepdim=True)
        return float(f"{float((grad - exact).norm() / exact.norm()):.2g}")


def exact_gradient(images: Tensor, texts: Tensor) -> Tensor:
    """Return the images' gradient in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (images, texts)]
    return torch.autograd.grad(InfoNCELoss(engine="dense")(*leaves), leaves[0])[0]


# ------------------------------------------------------------------- small batches, other libraries


def small(session: Session) -> None:
    """Time batches at which launches decide: eager, as CUDA graphs, and compiled."""
    shapes = (
        ("infonce", (128, 128, 1024)),
        ("infonce", (512, 512, 1024)),
        ("dcl std", (128, 128, 1024)),
        ("dcl std", (512, 512, 1024)),
        ("mdcl", (128, 4096, 1024)),
        ("mdcl", (512, 16384, 512)),
        ("uto", (128, 4096, 1024)),
        ("uto", (512, 16384, 512)),
    )
    launched = ("eager", "ours recorded", "ours graphed", "eager graphed")
    compiled = ("ours compiled", "eager compiled")
    toy = (("mdcl", (4, 24, 16)),)
    for loss, shape in session.pick(shapes, toy):
        compared(session, loss, shape, launched)
    for loss, shape in session.pick((shapes[1], shapes[4]), ()):  # a minute of compiling
        compared(session, loss, shape, compiled)


def peers(session: Session) -> None:
    """Time other libraries' losses; one that is not installed has a row that says so."""
    large = (("infonce", (32768, 32768, 512)), ("sigmoid", (65536, 65536, 768)))
    medium = (("infonce", (8192, 8192, 512)), ("sigmoid", (8192, 8192, 512)))
    toy = (("infonce", (12, 12, 16)), ("sigmoid", (12, 12, 16)))
    for loss, shape in session.pick(medium, toy):
        compared(session, loss, shape, ("ours triton", "eager", "matmul_bound", "peers"), True)
    variants = ("ours triton", "eager", "eager compiled", "matmul_bound", "peers")
    for loss, shape in session.pick(large, ()):
        compared(session, loss, shape, variants)


def compared(
    session: Session,
    loss: str,
    shape: tuple[int, int, int],
    variants: tuple[str, ...],
    accuracy: bool = False,
) -> None:
    """Write the rows of a loss in bfloat16, unless there is no time."""
    if session.is_late(loss=loss, shape=shape):
        return
    with session.attempt(loss=loss, shape=shape):
        measured(session, Case(loss, shape, HALF, session.device.type), variants, accuracy)


STEPS = {"encoders": encoders, "amp": amp, "small": small, "peers": peers}
