"""Splits of pre-computed features, words, and resumable batches."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from support import drawn
from support.stored import assert_stored

from examples.retrieval.check_data import Report
from examples.retrieval.data import (
    Batch,
    Batches,
    Split,
    Vocabulary,
    begin_with,
    feature_statistics,
    load_split,
    whole_statistics,
    word_vectors,
)

# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("captions", "per_image"), [(30, 5), (6, 1)])
def test_captions_belong_to_images_in_order(tmp_path, captions, per_image):
    np.save(tmp_path / "dev_ims.npy", np.zeros((6, 2, 3), np.float16))
    lines = [f"caption\x0c {i}\n" for i in range(captions)]
    (tmp_path / "dev_caps.txt").write_text("".join(lines))
    split = load_split(tmp_path, "dev")
    assert isinstance(split.features, np.memmap)
    assert split.captions[captions - 1] == f"caption\x0c {captions - 1}"
    assert split.text_ids.tolist() == [line // per_image for line in range(captions)]
    assert split.image_ids.tolist() == list(range(6))


def test_feature_statistics_are_of_all_regions():
    features = np.random.default_rng(0).normal(3, 2, size=(7, 2, 4)).astype(np.float16)
    mean, std = feature_statistics(features, chunk=3)
    flat = features.astype(np.float64).reshape(-1, 4)
    average = flat.mean(0)
    np.testing.assert_allclose(mean, average, rtol=1e-6)
    variance = ((flat - average) ** 2).mean()
    assert std.item() == pytest.approx(np.sqrt(variance), rel=1e-6)


def test_constant_features_have_a_deviation_of_1():
    features = np.ones((2, 2, 4), np.float16)
    _, std = feature_statistics(features)
    assert std == 1


def test_whole_statistics_are_of_the_signed_roots():
    wholes = np.float32([[4, -9], [0, -1]])
    mean, std = whole_statistics(wholes)
    torch.testing.assert_close(mean, torch.tensor([1.0, -2.0]))
    torch.testing.assert_close(std, torch.tensor([2**0.5, 2**0.5]))


# --- words ----------------------------------------------------------------------------------------


CAPTIONS = ["A dog, a dog's ball!", "A red ball", "a zebra", ""]
FREQUENT = Vocabulary.from_captions(CAPTIONS, min_count=2)


def test_vocabulary_keeps_frequent_words():
    assert FREQUENT.words == ["<pad>", "<unk>", "a", "ball"]
    assert FREQUENT.encode("Ball, a ZEBRA") == [3, 2, 1]
    assert FREQUENT.encode("...") == [1]


def test_idf_weighs_rare_words():
    idf = FREQUENT.idf(CAPTIONS)
    of_a = math.log(4 / 3)  # in three of four captions
    assert idf[3] / idf[2] == pytest.approx(math.log(4 / 2) / of_a)
    ids = [word for caption in CAPTIONS for word in FREQUENT.encode(caption)]
    assert idf[ids].mean() == pytest.approx(1)


def test_the_words_of_scans_vocabulary_keep_their_order(tmp_path):
    words = ["<pad>", "<start>", "<end>", "<unk>", "man", "a", "."]
    numbers = dict(zip(reversed(words), reversed(range(7)), strict=True))
    named = {str(i): word for word, i in numbers.items()}
    file = tmp_path / "f30k_precomp_vocab.json"
    file.write_text(json.dumps({"word2idx": numbers, "idx2word": named, "idx": 7}))
    vocabulary = Vocabulary.of_scan(str(file))
    assert vocabulary.words == ["<pad>", "<unk>", "man", "a", "."]
    assert vocabulary.encode("A man, a dog.") == [3, 2, 3, 1]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # as of GloVe, with the first line of fastText's and an empty one
        ("2 2\ndog 1.0 2.0\ncat 3.0 -4\n\n", {"dog": [1, 2], "cat": [3, -4]}),
        # as in glove.840B.300d.txt, whose words may have spaces
        (
            "dog 1.0 2.0\n. . . -3 4\nat name@domain.com 5 6\n",
            {"dog": [1, 2], ". . .": [-3, 4], "at name@domain.com": [5, 6]},
        ),
    ],
)
def test_word_vectors_are_read_from_gloves_format(text, wanted, tmp_path):
    (tmp_path / "glove.2d.txt").write_text(text)
    vectors = word_vectors(str(tmp_path / "glove.2d.txt"))
    assert {word: vector.tolist() for word, vector in vectors.items()} == wanted


def test_words_begin_with_their_vectors_at_the_length_of_the_others():
    weight = torch.full((4, 3), 2.0)
    vectors = {"dog": np.float32([3, 4]), "cat": np.float32([0, 5])}
    words = ["<pad>", "cat", "bird", "dog"]
    assert begin_with(weight, words, vectors) == 2
    unchanged = [2, 2, 2]
    length = 2 * 3**0.5
    cat = [0, length, 2]
    dog = [0.6 * length, 0.8 * length, 2]
    wanted = torch.tensor([unchanged, cat, unchanged, dog])
    torch.testing.assert_close(weight, wanted)


def test_word_vectors_that_are_too_long_are_refused():
    with pytest.raises(ValueError, match=r"word_dim = 1: must be at least 2"):
        begin_with(torch.ones(1, 1), ["dog"], {"dog": np.float32([3, 4])})


# --- batches --------------------------------------------------------------------------------------


def split_of(n: int) -> Split:
    """Split of n images with five captions each: caption c of image i is `i c`."""
    numbers = np.float32(np.arange(n))
    regions = np.broadcast_to(numbers[:, None, None], (n, 2, 3))
    captions = [f"{i} {c}" for i in range(n) for c in range(5)]
    return Split(regions, captions, 5, wholes=regions[:, 0])


def batches_of(split: Split, *settings: int, **options: int) -> Batches:
    """Batches with all words of a split."""
    vocabulary = Vocabulary.from_captions(split.captions, 1)
    return Batches(split, vocabulary, *settings, **options)


def captions_in(batches: Batches, batch: Batch) -> list[str]:
    """The captions of a batch in words, after a check that each is of its image."""
    assert torch.equal(batch.regions[:, 0, 0], batch.image_ids.float())
    assert torch.equal(batch.wholes, batch.regions[:, 0])
    vocabulary = Vocabulary.from_captions(batches.split.captions, 1)
    captions = []
    for row, image in zip(batch.words.tolist(), batch.text_ids.tolist(), strict=True):
        words = [vocabulary.words[i] for i in row if i]
        assert words[0] == str(image)
        captions.append(" ".join(words))
    assert batch.lengths.tolist() == [2] * len(captions)
    return captions


# images; batch size, captions per image and seed; other settings; epoch and first step
EPOCHS = {
    "one caption a sample": (8, (4, 1, 0), {}, (0, 0)),
    "two captions, of which one is shown twice": (8, (4, 2, 0), {}, (0, 0)),
    "another epoch": (8, (4, 2, 0), {}, (1, 0)),
    "another seed": (8, (4, 2, 1), {}, (0, 0)),
    "all captions": (8, (4, 5, 0), {}, (0, 0)),
    "without the incomplete last batch": (9, (10, 1, 0), {}, (3, 0)),
    "from its second step": (9, (10, 1, 0), {}, (3, 1)),
    "with helpers": (9, (10, 2, 0), {"workers": 2}, (1, 0)),
    "without helpers": (9, (10, 2, 0), {}, (1, 0)),
    "the first of two processes": (9, (5, 2, 0), {"rank": 0, "world": 2}, (1, 0)),
    "the second of two processes": (9, (5, 2, 0), {"rank": 1, "world": 2}, (1, 0)),
}


def test_batches_are_those_that_were_read():
    """Epochs show every caption; samples hold different ones, anew in every epoch; all follows from
    seed, epoch and step; processes share the samples of one.
    """
    lines = []
    for name, (images, settings, options, epoch) in EPOCHS.items():
        batches = batches_of(split_of(images), *settings, **options)
        lines.append(f"# {name}")
        lines += [", ".join(captions_in(batches, batch)) for batch in batches.epoch(*epoch)]
    assert_stored("batches", "\n".join(lines))


def test_batches_leave_the_random_numbers_of_training_alone():
    state = torch.get_rng_state()
    batches = batches_of(split_of(9), 10, 2, 0)
    list(batches.epoch(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_settings_that_the_data_do_not_allow_are_named():
    with pytest.raises(ValueError, match="captions_per_image = 6: must be at most all 5"):
        batches_of(split_of(9), 10, 6, 0)
    with pytest.raises(ValueError, match="5 training samples are too few for 6 processes"):
        batches_of(split_of(1), 10, 1, 0, world=6)


SIZES = {"train": 6, "dev": 4, "test": 5}


def test_images_that_are_there_five_times_are_read_once(tmp_path):
    drawn.features(tmp_path, SIZES)
    once = {}
    for kind in ("ims", "global"):
        path = tmp_path / f"dev_{kind}.npy"
        once[kind] = np.load(path)
        np.save(path, np.repeat(once[kind], 5, 0))
    split = load_split(tmp_path, "dev")
    assert np.array_equal(split.features, once["ims"])
    assert np.array_equal(split.wholes, once["global"])
    assert split.captions_per_image == 5
    said = "\n".join(Report(tmp_path).lines)
    assert said.count("five times each in the file, as in VSE++, read once") == 1

    different = np.load(tmp_path / "dev_ims.npy")
    different[7] += 1  # these are 20 images, with a caption each
    np.save(tmp_path / "dev_ims.npy", different)
    assert load_split(tmp_path, "dev").captions_per_image == 1


def test_one_vector_an_image_is_its_only_region(tmp_path):
    drawn.features(tmp_path, SIZES)
    for name in SIZES:
        (tmp_path / f"{name}_global.npy").unlink()
        vectors = np.load(tmp_path / f"{name}_ims.npy")[:, 0]
        np.save(tmp_path / f"{name}_ims.npy", np.repeat(vectors, 5, 0))
    split = load_split(tmp_path, "dev")
    assert split.features.shape == (4, 1, 8)
    assert split.captions_per_image == 5
    in_file = np.load(tmp_path / "dev_ims.npy").astype(np.float32)
    assert np.array_equal(split.regions(3), in_file[15:16])
    said = "\n".join(Report(tmp_path).lines)
    assert said.count("one vector an image, as in VSE++, read as its only region; five times") == 3


def test_features_below_vse_infinitys_directory(tmp_path):
    (tmp_path / "precomp").mkdir()
    (tmp_path / "id_mapping.json").write_text("{}")
    drawn.features(tmp_path / "precomp", SIZES)
    assert load_split(tmp_path, "dev").captions == load_split(tmp_path / "precomp", "dev").captions
    report = Report(tmp_path)
    assert report.ready
    assert "  VSE-infinity's directory: its precomp/ is read" in report.lines


def test_global_features_of_pictures_lie_beside_their_list(tmp_path):
    drawn.karpathy(tmp_path)
    (tmp_path / "precomp").mkdir()
    np.save(tmp_path / "precomp" / "dev_global.npy", np.ones((3, 7), np.float32))
    assert load_split(tmp_path, "dev").wholes is None  # those are in another order
