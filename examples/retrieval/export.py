"""Write a trained model's embeddings to files, for ``itrloss eval``, a bank of queries, or an
index.

python -m examples.retrieval.export runs/user --splits train dev --out embeddings
itrloss eval embeddings/dev_images.npy embeddings/dev_texts.npy \\
    --bank-images embeddings/train_images.npy --bank-texts embeddings/train_texts.npy
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .data import load_split
from .evaluate import encode, model_scores
from .preparation import data_directory, load_model


def export(run: Path, splits: Sequence[str], out: Path, data: Path | None = None) -> list[Path]:
    """Write ``{split}_images.npy`` (n, d) and ``{split}_texts.npy`` (captions, d), float32 of
    length 1.

    Their cosine is the model's similarity. The similarity of sets of embeddings (DVSE) is no
    cosine: for such a model, ``{split}_scores.npy`` (n, captions) float32 holds it.
    """
    model, words, config = load_model(run / "best.pt")
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for name in splits:
        split = load_split(data or data_directory(config), name, config.image_size)
        if config.loss == "dvse":
            file = out / f"{name}_scores.npy"
            np.save(file, model_scores(model, split, words).numpy())
            files.append(file)
            continue
        images, texts = encode(model, split, words)
        for kind, embeddings in (("images", images), ("texts", texts)):
            file = out / f"{name}_{kind}.npy"
            np.save(file, model.as_vectors(embeddings).cpu().numpy())
            files.append(file)
    return files


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run directory")
    splits = ("train", "dev", "test", "testall")
    parser.add_argument("--splits", nargs="+", default=["dev"], choices=splits)
    parser.add_argument("--data", type=Path, help="the data, if they were moved since the run")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    try:
        print(*export(args.run, args.splits, args.out, args.data), sep="\n")
    except (OSError, ValueError) as error:
        sys.exit(f"export: {error}")


if __name__ == "__main__":
    main()
