"""What is said of data and networks that do not fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support import drawn
from support.transcripts import replay

from examples.retrieval.config import load_config
from examples.retrieval.train import Trainer

# a copy of what, and files that are other ones, or, with None, not there
FOLDERS = {
    "no_globals": ("data", {"dev_global.npy": None}),
    "narrow_globals": ("data", {"dev_global.npy": np.ones((20, 6), np.float32)}),
    "few_globals": ("data", {"dev_global.npy": np.ones((5, 7), np.float32)}),
    "wide_regions": ("data", {"dev_ims.npy": np.ones((20, 4, 9), np.float32)}),
    "no_regions": ("data", {"dev_ims.npy": np.ones((20, 3, 8, 1), np.float32)}),
    "few_captions": ("data", {"dev_caps.txt": "one\n" * 29}),
    "no_list": ("photos", {"dataset_coco.json": "{"}),
    "no_file": ("photos", {"dataset_coco.json": '{"images": [{"split": "train"}]}'}),
    "no_image": ("photos", {"dataset_coco.json": '{"images": []}'}),
    "no_caption": (
        "photos",
        {
            "dataset_coco.json": '{"images": [{"split": "train", "filename": "1.jpg",'
            ' "sentences": []}]}'
        },
    ),
    "both_kinds": ("vse_infinity", {"precomp/train_ims.npy": np.ones((3, 4, 8), np.float32)}),
    "two_lists": ("photos", {"dataset_a.json": "{}"}),
    "bert_without_weights": ("bert", {"model.safetensors": None}),
    "bert_of_more_words": ("bert", {"vocab.txt": "\n".join([*drawn.PIECES, "more"])}),
    "bert_without_words": ("bert", {"vocab.txt": None}),
    "resnet_without_weights": ("resnet", {"model.safetensors": None}),
    "no_array": ("data", {"dev_ims.npy": "no array"}),
    "integers": ("data", {"dev_global.npy": np.ones((20, 7), np.int64)}),
    "no_captions": ("data", {"dev_caps.txt": None}),
    "no_mapping": ("mapping", {"id_mapping.json": "{"}),
    "words": (
        "data",
        {
            "vectors.npy": np.full((3, 4), -1, np.float16),
            "sentence.txt": "a dog\n",
            "uneven.txt": "a 1 2\ndog 1\n",
            "list.json": '["word1", "word2"]',
            "numbers.json": "[1, 2]",
            "half.json": '{"words": ["dog"], "together": [[0]]}',
            "broken.json": "{",
        },
    ),
}
SMALL = ["min_count=1", "dim=16", "word_dim=8", "image_size=48", "batch_size=8", "progress=false"]


@pytest.fixture
def folders(tmp_path, monkeypatch, request):
    """The working directory, with data and networks."""
    monkeypatch.chdir(tmp_path)
    for name, (kind, files) in {**FOLDERS, **{x: (x, {}) for x in KINDS}}.items():
        if kind in ("vse_infinity", "mapping"):
            drawn.mapping(Path(name))
        else:
            shutil.copytree(request.getfixturevalue(kind), name)
        for file, content in files.items():
            path = Path(name, file)
            if content is None:
                path.unlink()
            elif isinstance(content, str):
                path.write_text(content)
            else:
                np.save(path, content)


KINDS = ("data", "photos", "bert", "resnet")


def complaint(*settings: str) -> str:
    """Return the error of a run with these settings."""
    try:
        Trainer(load_config(None, [*SMALL, "tensorboard=false", *settings]))
    except ValueError as error:
        return str(error)
    return "none"


def test_what_is_said_of_data_and_networks(folders):
    replay("runs", train=complaint)
