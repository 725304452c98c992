r"""Write CLIP's features of raw images: `{split}_global.npy`, for ``enhancement=cge`` and
``views=regions+whole``.

    hf download openai/clip-vit-base-patch32
    python -m examples.retrieval.clip_features DIR --model openai/clip-vit-base-patch32

DIR has one of the layouts of :mod:`examples.retrieval.pictures`. The files go there, or, of
VSE-infinity's, to DIR/precomp: their order is that of the regions there. A feature is CLIP's
embedding of a picture, (n, d); with --spatial (n, positions, d), the positions of its last layer,
projected in the same way.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from itrloss.files import written

from .backbones import import_transformers, pretrained
from .data import features_directory, load_split
from .pictures import Images, open_picture

BATCH = 64
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])  # of CLIP's training pictures
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])


def pixels(picture: Image.Image, size: int) -> Tensor:
    """The centre of a picture as a square, normalised, (3, size, size)."""
    square = ImageOps.fit(picture, (size, size), Image.Resampling.BICUBIC)
    colours = torch.from_numpy(np.array(square, dtype=np.float32)) / 255
    return ((colours - MEAN) / STD).permute(2, 0, 1)


@torch.no_grad()
def clip_features(clip: Any, images: Images, spatial: bool = False) -> np.ndarray:
    """Features of all images, (n, d) float16, or spatial ones, (n, positions, d)."""
    parts = []
    for rows in torch.arange(len(images)).split(BATCH):
        squares = [
            pixels(open_picture(images.paths[i]), clip.config.image_size) for i in rows.tolist()
        ]
        found = clip(pixel_values=torch.stack(squares).to(clip.device))
        features = found.image_embeds
        if spatial:
            positions = found.last_hidden_state[:, 1:]  # behind that of the whole
            features = clip.visual_projection(clip.vision_model.post_layernorm(positions))
        parts.append(features.half().cpu())
    return torch.cat(parts).numpy()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="the directory of the raw images")
    parser.add_argument("--model", required=True, help="a directory, or a downloaded model's name")
    parser.add_argument("--spatial", action="store_true")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    try:
        cls = import_transformers().CLIPVisionModelWithProjection
        clip = pretrained("model", args.model, "a CLIP", cls).eval().to(args.device)
        for name in ("train", "dev", "test"):
            images = load_split(args.data, name).features
            if not isinstance(images, Images):
                raise ValueError(f"data = {str(args.data)!r}: must be a directory of raw images")
            features = clip_features(clip, images, args.spatial)
            path = features_directory(args.data) / f"{name}_global.npy"
            with written(path, "wb") as file:
                np.save(file, features)
            print(f"{path}: {features.shape}")
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
