"""The trainer: encoders, data, configuration, and runs that can be interrupted."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import itrloss
from examples.retrieval import encoders
from examples.retrieval import train as module
from examples.retrieval.config import Config, load_config, make_config
from examples.retrieval.data import Batches, Split, Vocabulary, feature_statistics, load_split, pad
from examples.retrieval.encoders import (
    GPO,
    BatchNorm,
    ImageEncoder,
    SetDropout,
    SubEmbeddings,
    TextEncoder,
)
from examples.retrieval.evaluate import before_and_after, model_scores, reranker
from examples.retrieval.models import CODER, DVSE, VSE, build_model
from examples.retrieval.objectives import LOSSES, WITH_MEMORY, build_loss
from examples.retrieval.preparation import load_model
from examples.retrieval.train import Trainer, learning_rate, train
from itrloss.rerank import FastReranker

CONFIGS = Path(module.__file__).parent / "configs"
WORDS = [f"word{i}" for i in range(20)]
# Two steps with the same embeddings and unclipped gradients.
DRY = {"feature_dropout": 0.0, "word_dropout": 0.0, "embedding_dropout": 0.0, "clip": 1e9}
RECALLS = ["i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10", "rsum"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Data set of 60 + 20 + 20 images of 4 regions; the words of a caption identify the components
    of its regions.
    """
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    meanings = rng.normal(size=(len(WORDS), 8))
    for split, n in {"train": 60, "dev": 20, "test": 20}.items():
        told = rng.integers(len(WORDS), size=(n, 4))
        features = meanings[told] + 0.1 * rng.normal(size=(n, 4, 8))
        np.save(root / f"{split}_ims.npy", features.astype(np.float16))
        captions = [
            rng.permutation(words)[: rng.integers(2, 5)] for words in told for _ in range(5)
        ]
        lines = [" ".join(WORDS[i] for i in caption) + "\n" for caption in captions]
        (root / f"{split}_caps.txt").write_text("".join(lines))
    return root


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Config:
    return Config(
        data=str(data),
        out=str(tmp_path / "run"),
        dim=16,
        word_dim=8,
        epochs=2,
        batch_size=32,
        lr=1e-2,
        min_count=1,
        concepts=10,
        tensorboard=False,
        progress=False,
        device="cpu",
    )


def captions_of(n: int) -> Split:
    """Captions of n images, five each: caption c of image i is `i-c`."""
    return Split(
        np.zeros((n, 2, 3), np.float32), [f"{i} {c}" for i in range(n) for c in range(5)], 5
    )


# --- encoders -------------------------------------------------------------------------------------


def test_gpo_agrees_with_a_loop_over_sets_and_dimensions():
    torch.manual_seed(0)
    gpo, lengths = GPO(), torch.tensor([5, 1, 3, 5])
    features = torch.randn(4, 5, 6)
    expected = torch.empty(4, 6)
    for b, length in enumerate(lengths.tolist()):
        codes = torch.zeros(1, length, 32)
        for t in range(length):
            for k in range(16):
                angle = t / 10000 ** (2 * k / 32)
                codes[0, t, 2 * k], codes[0, t, 2 * k + 1] = math.sin(angle), math.cos(angle)
        hidden = gpo.gru(codes)[0][0]
        weights = torch.softmax(gpo.score((hidden[:, :32] + hidden[:, 32:]) / 2)[:, 0] / 0.1, dim=0)
        for d in range(6):
            ranked = sorted(features[b, :length, d].tolist(), reverse=True)
            expected[b, d] = sum(w * x for w, x in zip(weights.tolist(), ranked, strict=True))
    torch.testing.assert_close(gpo(features, lengths), expected, rtol=0, atol=1e-6)
    assert gpo.score.bias is None
    assert len(gpo.weights(lengths, 5).unique(dim=0)) == 3  # one row of weights per distinct length


def test_padding_does_not_overflow_in_half_precision():
    torch.manual_seed(0)
    pool, lengths = GPO(8, 8), torch.tensor([3, 6])
    features = torch.randn(2, 6, 4, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        pooled = pool(features.half(), lengths)
    (256.0 * pooled.float().sum()).backward()
    assert all(
        p.grad is not None and torch.isfinite(p.grad).all() for p in (features, *pool.parameters())
    )


def test_padding_changes_nothing():
    torch.manual_seed(0)
    lengths = torch.tensor([4, 2, 6])
    features = torch.randn(3, 6, 5)
    longer = torch.cat([features, torch.full((3, 3, 5), 7.0)], dim=1)
    longer[1, 2:] = 1e3
    gpo = GPO()
    torch.testing.assert_close(gpo(longer, lengths), gpo(features, lengths), rtol=0, atol=1e-6)

    text = TextEncoder(20, 8, 16, word_dropout=0.5, embedding_dropout=0.5).eval()
    captions = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14]]
    words, lengths = pad(captions)
    padded = torch.cat([words, torch.zeros(3, 4, dtype=torch.int64)], dim=1)
    together = text(padded, lengths)
    torch.testing.assert_close(together, text(words, lengths), rtol=0, atol=1e-6)
    alone = torch.cat([text(*pad([caption])) for caption in captions])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_text_depends_on_word_order_and_images_not_on_region_order():
    torch.manual_seed(0)
    text, image = TextEncoder(20, 8, 16).eval(), ImageEncoder(5, 16).eval()
    a, b = text(*pad([[3, 4, 5], [5, 4, 3]]))
    assert (a - b).abs().max() > 1e-3
    regions = torch.randn(2, 6, 5)
    torch.testing.assert_close(image(regions), image(regions.flip(1)), rtol=0, atol=1e-6)


def test_captions_run_in_groups_as_they_would_in_one(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    text = TextEncoder(20, 8, 16)
    words, lengths = pad(
        [torch.randint(1, 20, (int(n),)).tolist() for n in torch.randint(1, 12, (30,))]
    )
    seen = []
    for group in (30, 7):
        monkeypatch.setattr(encoders, "GROUP", group)
        out = text(words, lengths)
        seen.append([out, *torch.autograd.grad(out.square().sum(), list(text.parameters()))])
    for grouped, whole in zip(*seen, strict=True):
        torch.testing.assert_close(grouped, whole)


@pytest.mark.parametrize("shared", [False, True])
def test_shared_dropout_takes_a_feature_from_the_whole_set(shared: bool):
    torch.manual_seed(0)
    dropout = SetDropout(0.3, shared)
    kept = dropout(torch.ones(200, 6, 50))
    assert set(kept.unique().tolist()) == {0, torch.ones(()).div(0.7).item()}
    assert (kept == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert torch.equal(kept, kept[:, :1].expand_as(kept)) == shared
    assert not torch.equal(kept[:1].expand_as(kept), kept)  # independent for each set
    assert torch.equal(dropout.eval()(kept), kept)


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    text = TextEncoder(20, 8, 16, word_dropout=0.5)
    words, lengths = pad([[3, 4, 5, 6]])
    assert not torch.equal(text(words, lengths), text(words, lengths))
    text.eval()
    assert torch.equal(text(words, lengths), text(words, lengths))


# --- data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("captions", "per_image"), [(30, 5), (6, 1)])
def test_captions_belong_to_images_in_order(tmp_path: Path, captions: int, per_image: int):
    np.save(tmp_path / "dev_ims.npy", np.zeros((6, 2, 3), np.float16))
    (tmp_path / "dev_caps.txt").write_text("".join(f"caption\x0c {i}\n" for i in range(captions)))
    split = load_split(tmp_path, "dev")
    assert isinstance(split.features, np.memmap)
    assert split.captions[captions - 1] == f"caption\x0c {captions - 1}"
    assert split.text_ids.tolist() == [line // per_image for line in range(captions)]
    assert split.image_ids.tolist() == list(range(6))


def test_a_mismatch_of_images_and_captions_names_both_files(tmp_path: Path):
    np.save(tmp_path / "dev_ims.npy", np.zeros((6, 2, 3), np.float16))
    (tmp_path / "dev_caps.txt").write_text("one\n" * 29)
    with pytest.raises(
        ValueError, match=r"dev_caps\.txt has 29 captions and .*dev_ims\.npy has 6 images"
    ):
        load_split(tmp_path, "dev")
    np.save(tmp_path / "dev_ims.npy", np.zeros((6, 3), np.float16))
    with pytest.raises(ValueError, match=r"dev_ims\.npy.*\(n, regions, d\)"):
        load_split(tmp_path, "dev")


def test_vocabulary_keeps_frequent_words_and_weighs_rare_ones():
    captions = ["A dog, a dog's ball!", "A red ball", "a zebra", ""]
    vocabulary = Vocabulary.from_captions(captions, min_count=2)
    assert vocabulary.words == ["<pad>", "<unk>", "a", "ball"]
    assert vocabulary.encode("Ball, a ZEBRA") == [3, 2, 1]
    assert vocabulary.encode("...") == [1]
    idf = vocabulary.idf(captions)
    assert idf[3] / idf[2] == pytest.approx(math.log(4 / 2) / math.log(4 / 3))
    ids = torch.tensor([i for caption in captions for i in vocabulary.encode(caption)])
    assert idf[ids].mean() == pytest.approx(1)


def test_feature_statistics_are_those_of_all_regions():
    features = np.random.default_rng(0).normal(3, 2, size=(7, 2, 4)).astype(np.float16)
    mean, std = feature_statistics(features, chunk=3)
    flat = features.astype(np.float64).reshape(-1, 4)
    np.testing.assert_allclose(mean, flat.mean(0), rtol=1e-6)
    assert std.item() == pytest.approx(np.sqrt(((flat - flat.mean(0)) ** 2).mean()), rel=1e-6)
    assert feature_statistics(np.ones((2, 2, 4), np.float16))[1] == 1


@pytest.mark.parametrize("per_sample", [1, 2, 5])
def test_an_epoch_shows_every_caption_once_beside_its_image(per_sample: int):
    split = captions_of(8)
    split.features[:] = np.arange(8)[:, None, None]
    vocabulary = Vocabulary.from_captions(split.captions, min_count=1)
    batches = Batches(split, vocabulary, 4, per_sample, seed=0)
    shown = []
    for batch in batches.epoch(0):
        assert batch.regions.shape == (4, 2, 3) and len(batch.words) == 4 * per_sample
        assert torch.equal(batch.regions[:, 0, 0], batch.image_ids.float())
        assert torch.equal(batch.text_ids, batch.image_ids.repeat_interleave(per_sample))
        for words, length, image in zip(batch.words, batch.lengths, batch.text_ids, strict=True):
            caption = " ".join(vocabulary.words[i] for i in words[:length])
            assert caption.split()[0] == str(int(image))
            shown.append(caption)
    if per_sample == 2:  # five captions make three samples, of which one repeats a caption
        assert len(shown) == 8 * 6 and set(shown) == set(split.captions)
        assert len({a for a in split.captions if shown.count(a) == 2}) == 8
    else:
        assert sorted(shown) == sorted(split.captions)


@pytest.mark.parametrize("per_sample", [2, 3, 4])
def test_captions_of_a_sample_differ_and_are_drawn_anew_in_every_epoch(per_sample: int):
    split = captions_of(8)
    vocabulary = Vocabulary.from_captions(split.captions, min_count=1)

    def together(seed: int, epoch: int) -> set[frozenset[str]]:
        """Captions of each sample, independent of the order of samples and of captions in them."""
        found = []
        for batch in Batches(split, vocabulary, 4, per_sample, seed).epoch(epoch):
            said = [" ".join(vocabulary.words[i] for i in words[:2]) for words in batch.words]
            found += [frozenset(said[i : i + per_sample]) for i in range(0, len(said), per_sample)]
        assert all(len(sample) == per_sample for sample in found)
        return set(found)

    assert together(0, 0) == together(0, 0)
    assert together(0, 0) != together(0, 1) and together(0, 0) != together(1, 0)


def test_batches_follow_from_seed_epoch_and_step():
    split = captions_of(9)
    vocabulary = Vocabulary.from_captions(split.captions, min_count=1)

    def texts(seed: int, epoch: int, first_step: int = 0, per_image: int = 1) -> list[list]:
        batches = Batches(split, vocabulary, 10, per_image, seed)
        return [batch.words.tolist() for batch in batches.epoch(epoch, first_step)]

    whole = texts(0, 3)
    assert len(whole) == 4  # 45 captions: the incomplete fifth batch is dropped
    assert texts(0, 3, first_step=2) == whole[2:]
    assert texts(0, 4) != whole and texts(1, 3) != whole
    assert (
        texts(0, 3, per_image=2)[1:] == texts(0, 3, 1, per_image=2) != texts(0, 4, 1, per_image=2)
    )
    with pytest.raises(ValueError, match="captions_per_image = 6: must be at most all 5"):
        Batches(split, vocabulary, 10, 6, seed=0)


# --- configuration --------------------------------------------------------------------------------


def test_overrides_win_over_the_file(tmp_path: Path):
    file = tmp_path / "a.toml"
    file.write_text('loss = "dcl"\nlr = 1\n[loss_options]\nmargin = 0.3\nepsilon = 0.1\n')
    config = load_config(
        file, ["out=1", "seed=7", "loss_options.margin=0.2", "loss=dcl", "progress=false"]
    )
    assert (config.out, config.seed, config.loss, config.progress) == ("1", 7, "dcl", False)
    assert config.loss_options == {"margin": 0.2, "epsilon": 0.1}
    assert type(config.lr) is float
    assert load_config(file, ["loss=hal", "loss_options.scale=20"]).loss_options == {"scale": 20}
    assert load_config(None) == Config()


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("batchsize=3", ValueError, "unknown setting 'batchsize'"),
        ("seed=1.5", TypeError, "seed = 1.5.*int"),
        ("epochs=true", TypeError, "epochs = True.*int"),
        ("lr=fast", TypeError, "lr = 'fast'.*float"),
        ("loss_options=3", TypeError, "loss_options = 3.*table"),
        ("scenes_sizes.train=many", TypeError, r"scenes_sizes\.train = 'many'.*int"),
        ("lr.fast=1", ValueError, "lr is not a table"),
        ("lr", ValueError, "key=value"),
        ("epochs=0", ValueError, "epochs = 0.*at least 1"),
        ("word_dropout=1.0", ValueError, "word_dropout = 1.0"),
        ("clip=-1", ValueError, "clip = -1.0.*positive"),
        ("weight_decay=-1", ValueError, "weight_decay = -1.0.*negative"),
        ("micro_batch=-1", ValueError, "micro_batch = -1.*negative"),
        ("seed=-1", ValueError, "seed = -1.*negative"),
        ("backbone_weights=a.pth", ValueError, "backbone_weights = 'a.pth'.*without a backbone"),
        ("backbone_frozen=3", ValueError, "backbone_frozen = 3: must be 0 without a backbone"),
        ("warmup=hinge", ValueError, "warmup = 'hinge': must be 'triplet' or 'infonce'"),
        ("views=regions+global", ValueError, "views = 'regions.global'.*'whole'"),
        ("decay_epochs=0", ValueError, r"decay_epochs = \[0\].*at least 1"),
        ("decay_epochs=[1.5]", TypeError, r"decay_epochs\[0\] = 1.5.*int"),
        ("rerank=[25, 25, 20]", ValueError, r"rerank = \[25.0, 25.0, 20.0\].*four numbers"),
        ("precision=half", ValueError, "precision = 'half'.*'float32', 'bfloat16', 'float16'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(override: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        load_config(None, [override])


def test_an_unknown_loss_or_option_is_refused_by_name(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match=r"loss = 'softmax'.*triplet, infonce, .*uto, coder, dvse"):
        build_loss(Config(loss="softmax"))
    with pytest.raises(ValueError, match=r"loss_options\.scale: TripletLoss takes margin"):
        build_loss(Config(loss="triplet", loss_options={"scale": 0.1}))
    with pytest.raises(ValueError, match=r"loss_options\.reduction = 'none'"):
        build_loss(Config(loss="hal", loss_options={"reduction": "none"}))
    with pytest.raises(
        ValueError, match=r"captions_per_image = 1: must be at least 2 for caption_weight"
    ):
        Config(caption_weight=0.5)
    with pytest.raises(ValueError, match=r"momentum = 2.0: must be in \[0, 1\]"):
        Config(momentum=2.0)
    assert build_loss(Config(loss_options={"engine": "dense"})).engine == "dense"
    assert (
        build_loss(
            Config(loss="coder", loss_options={"temperature": 0.2, "clusters": 7})
        ).memory.temperature
        == 0.2
    )
    with pytest.raises(SystemExit):
        module.main(["seed=1", "--config", str(CONFIGS / "scenes.toml"), "loss=softmax"])
    assert "loss = 'softmax'" in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_shipped_configurations_are_valid(file: Path):
    config = load_config(file)
    loss = build_loss(config)
    assert type(loss) is LOSSES[config.loss]
    for name, value in config.loss_options.items():  # options of the loss, or of a part of it
        if name == "clusters":
            assert len(loss.prototypes.centroids) == value
        elif config.loss == "coder" and name.endswith("_weight") and name != "positive_weight":
            assert getattr(loss, name) == value
        else:
            assert value in [getattr(part, name, None) for part in loss.modules()]


def test_learning_rate_warms_up_and_drops():
    config = make_config({"lr": 1.0, "lr_warmup_steps": 4, "decay_epochs": 2})
    assert [learning_rate(config, 0, step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert [learning_rate(config, epoch, 100) for epoch in range(4)] == pytest.approx(
        [1, 1, 0.1, 0.1]
    )
    assert learning_rate(replace(config, decay_epochs=[]), 50, 100) == 1
    assert learning_rate(replace(config, decay_epochs=[2, 9]), 9, 100) == pytest.approx(0.01)


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "per_image"),
    [
        (loss, captions)
        for loss in LOSSES
        for captions in (1, 2, 5)
        if captions < 5 or loss not in WITH_MEMORY
    ],
)
def test_one_step_reaches_every_parameter_with_the_gradient_of_one_backward(
    config: Config, loss: str, per_image: int
):
    trainer = Trainer(replace(config, loss=loss, captions_per_image=per_image, clip=1e9))
    batch = next(trainer.batches.epoch(0))
    if trainer.objective.memory is not None:  # an empty memory gives no gradients
        trainer.objective.memory.enqueue(*torch.randn(2, 10, 16), torch.arange(10) + 1000)
    objective, state = copy.deepcopy(trainer.objective), torch.get_rng_state()
    inputs = batch.regions, batch.words, batch.lengths
    objective.prepare(trainer.model, *inputs)
    outputs = trainer.model(*inputs)
    objective(outputs, batch.image_ids, batch.text_ids)[0].backward()
    expected = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    learnt = {name: p.grad for name, p in objective.named_parameters() if p.requires_grad}

    torch.set_rng_state(state)  # the same dropout
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train_step(batch)
    for name, p in trainer.model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name
        torch.testing.assert_close(p.grad, expected[name], msg=name)
        assert not torch.equal(p, before[name]), name
    for name, gradient in learnt.items():
        torch.testing.assert_close(
            dict(trainer.objective.named_parameters())[name].grad, gradient, msg=name
        )


@pytest.mark.parametrize(
    ("loss", "per_image", "views"),
    [
        *(
            (loss, n, "regions")
            for k, loss in enumerate(LOSSES)
            for n in (2, 1 if loss in WITH_MEMORY or k % 2 else 5)
        ),
        *((loss, 2, "regions+regions") for loss in ("infonce", "coder", "dvse", "pvse")),
    ],
)
def test_a_few_samples_at_a_time_give_the_gradients_of_the_batch(
    config: Config, loss: str, per_image: int, views: str
):
    config = replace(
        config, loss=loss, captions_per_image=per_image, views=views, batch_size=20, heads=5, **DRY
    )
    found = []
    for micro in (0, 7):
        trainer = Trainer(replace(config, micro_batch=micro))
        for objective in trainer.objective if views == "regions+regions" else [trainer.objective]:
            if objective.memory is not None:
                torch.manual_seed(1)
                objective.memory.enqueue(*torch.randn(2, 10, 16), torch.arange(10) + 1000)
        for layer in trainer.model.modules():
            if isinstance(layer, BatchNorm | itrloss.DynamicGate):
                layer.training = False  # their statistics would be those of a few samples
        found.append((trainer.train_step(next(trainer.batches.epoch(0))), trainer))
    (value, whole), (chunked_value, chunked) = found
    assert chunked_value == pytest.approx(value, rel=1e-5)
    for (name, p), other in zip(
        whole.model.named_parameters(), chunked.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            other.grad, p.grad, rtol=1e-3, atol=3e-4 * p.grad.abs().max().item(), msg=name
        )
    for (name, x), other in zip(
        whole.objective.state_dict().items(), chunked.objective.state_dict().values(), strict=True
    ):
        if torch.is_tensor(x):
            torch.testing.assert_close(other, x, rtol=1e-4, atol=1e-4, msg=name)
    assert 0 < chunked.sums["loss_seconds"] < chunked.sums["seconds"]


@pytest.fixture(scope="module")
def losses_of_float32() -> dict[int, float]:
    """The last loss of the run in float32 by ``micro_batch``, to compare with in half precision."""
    return {}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("micro", [0, 16])
def test_encoders_run_in_the_precision_asked_for(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    losses_of_float32: dict[int, float],
    precision: str,
    micro: int,
):
    config = replace(config, loss="mdcl", memory=64, micro_batch=micro, epochs=2)
    if micro not in losses_of_float32:
        losses_of_float32[micro] = train(replace(config, out=config.out + "_exact"))["history"][-1][
            "loss"
        ]
    trainer = Trainer(replace(config, precision=precision))
    seen: list[torch.dtype] = []
    loss = trainer.objective.criterion.forward
    monkeypatch.setattr(
        trainer.objective.criterion,
        "forward",
        lambda *x, **y: (seen.extend(t.dtype for t in x if torch.is_tensor(t)), loss(*x, **y))[1],
    )
    trainer.run()
    assert set(seen) == {getattr(torch, precision)}
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert trainer.scaler.is_enabled() == (precision == "float16")
    assert trainer.history[-1]["loss"] == pytest.approx(losses_of_float32[micro], rel=0.05)


def test_what_does_not_fit_is_refused_before_the_first_step(
    config: Config, data: Path, tmp_path: Path
):
    with pytest.raises(ValueError, match="enhancement = 'sge': must be empty for views = 'whole'"):
        replace(config, enhancement="sge", views="whole")
    with pytest.raises(
        ValueError, match="views = 'whole': must be 'regions' too for loss = 'dvse'"
    ):
        replace(config, loss="dvse", views="whole")
    with pytest.raises(
        ValueError, match=r"views = 'regions\+whole': must be of regions for loss = 'pvse'"
    ):
        replace(config, loss="pvse", views="regions+whole")
    with pytest.raises(
        ValueError, match="micro_batch = 31: must leave more than one of the 32 samples"
    ):
        Trainer(replace(config, micro_batch=31))
    other = tmp_path / "other"
    shutil.copytree(data, other)
    for split in ("train", "dev"):
        np.save(
            other / f"{split}_global.npy",
            np.ones((len(load_split(data, split).features), 5), np.float32),
        )
    seen = replace(config, data=str(other), views="regions+whole")
    Trainer(seen)
    np.save(other / "dev_global.npy", np.ones((20, 6), np.float32))
    with pytest.raises(
        ValueError, match=r"dev_global\.npy: 6 features, must be 5 as in train_global\.npy"
    ):
        Trainer(seen)
    (other / "dev_global.npy").unlink()
    with pytest.raises(ValueError, match=r"views = 'regions\+whole': needs .*dev_global\.npy"):
        Trainer(seen)
    # the model ignores them
    assert train(replace(seen, views="regions", epochs=1))["best_rsum"] > 0
    np.save(other / "dev_ims.npy", np.ones((20, 4, 7), np.float32))
    with pytest.raises(ValueError, match=r"dev_ims\.npy: 7 features, must be 8"):
        Trainer(replace(config, data=str(other)))


def test_a_run_goes_on_with_the_captions_it_began_with(config: Config, data: Path, tmp_path: Path):
    train(replace(config, epochs=1))
    other = tmp_path / "other"
    shutil.copytree(data, other)
    train(replace(config, resume=True, data=str(other)))
    lines = (other / "train_caps.txt").read_text().splitlines()
    (other / "train_caps.txt").write_text("\n".join(reversed(lines)) + "\n")
    with pytest.raises(ValueError, match="was trained with other captions"):
        train(replace(config, resume=True, data=str(other), epochs=3))


@pytest.mark.parametrize("micro", [0, 16])
def test_gradients_are_clipped_at_their_own_norm_whatever_their_scale(
    config: Config, monkeypatch: pytest.MonkeyPatch, micro: int
):
    clip, norms = torch.nn.utils.clip_grad_norm_, []
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *given: (norms.append(clip(*given)), norms[-1])[1]
    )
    config = replace(config, micro_batch=micro, **DRY | {"clip": 0.1})
    for precision in ("float32", "float16"):
        trainer = Trainer(replace(config, precision=precision))
        # any scale other than 1 has an effect, and a small one does not overflow
        if precision == "float16":
            trainer.scaler = torch.amp.GradScaler("cpu", init_scale=0.125)
        trainer.train_step(next(trainer.batches.epoch(0)))
    assert norms[1].item() == pytest.approx(norms[0].item(), rel=0.05)
    clipped = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
    assert norms[0] > 0.1 and clipped.item() == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("per_image", [2, 3])
@pytest.mark.parametrize("loss", ["infonce", "mdcl", "pvse"])
def test_the_first_two_captions_of_an_image_belong_together(
    config: Config, loss: str, per_image: int
):
    config = replace(config, loss=loss, captions_per_image=per_image)
    trainer = Trainer(replace(config, caption_weight=0.5))
    batch = next(trainer.batches.epoch(0))
    trainer.objective.prepare(trainer.model, batch.regions, batch.words, batch.lengths)
    outputs = trainer.model(batch.regions, batch.words, batch.lengths)
    value, figures = trainer.objective(outputs, batch.image_ids, batch.text_ids)
    trainer.objective.config = config
    alone, _ = trainer.objective(outputs, batch.image_ids, batch.text_ids)
    texts = outputs[1].mean(1) if loss == "pvse" else outputs[1]
    texts = torch.nn.functional.normalize(texts, dim=1).detach().double()
    expected = 0.0
    firsts, seconds = texts[::per_image], texts[1::per_image]
    for this, other in ((firsts, seconds), (seconds, firsts)):
        scores = (this @ other.T / 0.07).exp()
        for i, own in enumerate(batch.image_ids):
            negatives = scores[i][batch.image_ids != own].sum()
            terms = [-torch.log(p / (p + negatives)) for p in scores[i][batch.image_ids == own]]
            expected += torch.stack(terms).mean().item() / len(this)
    assert figures["captions"].item() == pytest.approx(expected, rel=1e-4)
    assert value.item() == pytest.approx(alone.item() + 0.5 * expected, rel=1e-4)


@pytest.mark.parametrize("loss", WITH_MEMORY)
def test_captions_enter_the_memory_beside_the_keys_of_their_image(config: Config, loss: str):
    trainer = Trainer(replace(config, loss=loss, captions_per_image=3, memory=200, **DRY))
    objective, batch = trainer.objective, next(trainer.batches.epoch(0))
    inputs = batch.regions, batch.words, batch.lengths
    images, texts = (torch.nn.functional.normalize(keys) for keys in objective.keys(*inputs)[:2])
    objective.keys.update = lambda model: None
    objective.prepare(trainer.model, *inputs)
    objective.finish(batch.text_ids)
    assert len(objective.memory) == len(texts) == 96
    for row, text in enumerate(texts):
        assert objective.memory.ids[row] == batch.image_ids[row // 3]
        torch.testing.assert_close(objective.memory.images[row], images[row // 3])
        torch.testing.assert_close(objective.memory.texts[row], text)


def test_keys_follow_the_model_and_enter_the_memory_after_the_step(config: Config):
    trainer = Trainer(replace(config, loss="uto", momentum=0.5, memory=40))
    keys, memory = trainer.objective.keys, trainer.objective.memory
    start = trainer.model.text.embedding.weight.detach().clone()
    batches = list(trainer.batches.epoch(0))
    trainer.train_step(batches[0])
    # updated before the step, towards the same parameters
    assert torch.equal(keys.module.text.embedding.weight, start)
    assert len(memory) == 32 and torch.equal(memory.ids[:32], batches[0].text_ids)
    after = trainer.model.text.embedding.weight.detach().clone()
    trainer.train_step(batches[1])
    torch.testing.assert_close(keys.module.text.embedding.weight, (start + after) / 2)
    assert len(memory) == 40 and torch.equal(memory.ids[32:], batches[1].text_ids[:8])
    keys.update = lambda model: None
    torch.manual_seed(3)
    trainer.objective.prepare(
        trainer.model, batches[2].regions, batches[2].words, batches[2].lengths
    )
    images, texts = trainer.objective.batch_keys
    trainer.objective.finish(batches[2].text_ids)
    place = torch.arange(64, 64 + 32) % 40
    torch.testing.assert_close(memory.images[place], torch.nn.functional.normalize(images))
    torch.testing.assert_close(memory.texts[place], torch.nn.functional.normalize(texts))
    assert not any(p.requires_grad for p in keys.parameters())
    mine = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert mine == {id(p) for p in trainer.model.parameters()}


def test_a_run_ends_when_its_patience_does(config: Config, monkeypatch: pytest.MonkeyPatch):
    figures = iter([10.0, 30.0, 20.0, 30.0, 40.0, 50.0])
    monkeypatch.setattr(module, "recalls", lambda scores, split: {"rsum": next(figures)})
    patient = replace(config, epochs=6, patience=2)
    # an equal RSUM is no improvement
    assert [line["rsum"] for line in train(patient)["history"]] == [10, 30, 20, 30]
    resumed = train(replace(patient, resume=True, patience=3))
    assert [line["rsum"] for line in resumed["history"]] == [10, 30, 20, 30, 40, 50]


def test_similarity_of_coder_is_the_weighted_sum_of_both_cosines(config: Config):
    torch.manual_seed(0)
    model = build_model(replace(config, loss="coder", concepts=5), 8, 30).eval()
    regions, (words, lengths) = torch.randn(3, 4, 8), pad([[3, 4], [5], [6, 7, 8], [9, 2]])
    v, w, v_concepts, w_concepts = model(regions, words[:3], lengths[:3])
    cosines = [
        torch.cosine_similarity(a[:, None], b[None], dim=2)
        for a, b in ((v, w), (v_concepts, w_concepts))
    ]
    found = model.similarity(model.embed_images(regions), model.embed_texts(words[:3], lengths[:3]))
    torch.testing.assert_close(found, 0.9 * cosines[0] + 0.1 * cosines[1])
    torch.testing.assert_close(v_concepts, model.branch("image", v))
    torch.testing.assert_close(
        w_concepts, model.branch("text", model.text(words[:3], lengths[:3])[1])
    )


def test_similarity_of_dvse_is_that_of_the_best_head(config: Config):
    torch.manual_seed(0)
    model = build_model(replace(config, loss="dvse", heads=3), 8, 30).eval()
    regions, (words, lengths) = torch.randn(3, 4, 8), pad([[3, 4], [5], [6, 7, 8], [9, 2]])
    sets, texts, residuals, gate = model(regions, words, lengths)
    assert sets.shape == (3, 3, 16) and residuals.shape == (3, 3, 16) and gate.shape == (3, 3)
    assert texts.shape == (4, 16)
    best = torch.stack(
        [torch.cosine_similarity(sets[:, k, None], texts[None], dim=2) for k in range(3)]
    ).amax(0)
    found = model.similarity(model.embed_images(regions), model.embed_texts(words, lengths))
    torch.testing.assert_close(found, best)


def test_sub_embeddings_leave_padding_out():
    torch.manual_seed(0)
    heads, elements, pooled = SubEmbeddings(6, 2), torch.randn(3, 5, 6), torch.randn(3, 6)
    lengths = torch.tensor([5, 2, 3])
    sets, residuals = heads(elements, pooled, lengths)
    for b, length in enumerate(lengths.tolist()):
        alone = heads(elements[b : b + 1, :length], pooled[b : b + 1], torch.tensor([length]))
        torch.testing.assert_close((sets[b : b + 1], residuals[b : b + 1]), alone)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mdcl", "uto", "coder", "dvse"])
def test_the_models_of_the_papers_learn(config: Config, loss: str):
    # the printed weight is too small here
    options = {"mdcl": {"positive_weight": 1.0}}.get(loss, {})
    result = train(replace(config, loss=loss, loss_options=options, epochs=5, memory=64))
    assert result["best_rsum"] > 200  # for 20 images; chance level is 155
    model, _, _ = load_model(Path(config.out, "best.pt"))
    assert type(model) is {"coder": CODER, "dvse": DVSE}.get(loss, VSE)


def test_a_run_learns_and_writes_every_file(config: Config):
    config = replace(config, tensorboard=True, final_test=True, epochs=5)
    result = train(config)
    out = Path(config.out)
    assert make_config(json.loads((out / "config.json").read_text())) == config

    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert log == result["history"]
    assert [(line["epoch"], line["step"]) for line in log] == [
        (1, 9),
        (2, 18),
        (3, 27),
        (4, 36),
        (5, 45),
    ]
    assert {"loss", "lr", "seconds", "loss_seconds", *RECALLS} <= set(log[0])
    assert 0 < log[0]["loss_seconds"] < log[0]["seconds"] and log[0]["data_seconds"] > 0
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]
    # for 20 images; chance level is 155
    assert result["best_rsum"] == max(line["rsum"] for line in log) > 200

    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics == result["metrics"]
    assert all(
        set(RECALLS) <= set(metrics[split][when])
        for split in ("dev", "test")
        for when in ("before", "after")
    )
    assert metrics["dev"]["before"]["rsum"] == pytest.approx(result["best_rsum"])
    scores = np.load(out / "dev_scores.npy")
    assert (
        scores.dtype == np.float32
        and scores.shape == (20, 100)
        and np.abs(scores).max() <= 1 + 1e-6
    )

    model, vocabulary, loaded = load_model(out / "best.pt")
    assert loaded == config and not model.training
    caption = load_split(config.data, "dev").captions[7]
    regions = torch.from_numpy(load_split(config.data, "dev").features[3:4].astype(np.float32))
    cosine = torch.cosine_similarity(
        model.image(regions), model.text(*pad([vocabulary.encode(caption)]))
    )
    assert cosine.item() == pytest.approx(scores[3, 7], abs=1e-6)
    assert torch.load(out / "last.pt", weights_only=True)["epoch"] == 5
    assert list(out.glob("events.out.tfevents*"))
    assert not list(out.glob("*.partial"))


def test_metrics_are_re_ranked_as_the_settings_say(config: Config):
    run = train(replace(config, epochs=1, final_test=True, rerank=[9.0, 4.0, 3.0, 17.0]))["metrics"]
    dev = load_split(config.data, "dev")
    scores = torch.from_numpy(np.load(Path(config.out, "dev_scores.npy")))
    wanted = before_and_after(scores, dev, FastReranker(i2t=(9, 4), t2i=(3, 17)))
    assert run["dev"] == wanted != before_and_after(scores, dev, FastReranker())
    model, vocabulary, _ = load_model(Path(config.out, "best.pt"))
    test = load_split(config.data, "test")
    assert run["test"] == before_and_after(
        model_scores(model, test, vocabulary), test, reranker([9, 4, 3, 17])
    )


def test_the_four_numbers_of_a_re_ranking_are_gammas_and_lambdas():
    by = reranker([9.0, 4.0, 3.0, 17.0])
    assert by.i2t == (9, 4) and by.t2i == (3, 17)


@pytest.mark.parametrize(
    "loss",
    [
        "triplet",
        "float16",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("uto", "coder", "dvse")),
    ],
)
def test_a_killed_run_resumes_bit_for_bit(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
):
    options = {"triplet": {"reduction": "mean"}, "coder": {"clusters": 20}}.get(loss, {})
    if loss == "float16":  # with the scale that its gradients have reached
        config, loss = replace(config, precision="float16", micro_batch=16), "infonce"
    config = replace(
        config,
        loss=loss,
        loss_options=options,
        lr_warmup_steps=12,
        decay_epochs=[1],
        save_steps=4,
        memory=70,
    )
    train(replace(config, out=str(tmp_path / "straight")))

    # stop after step 4 of the second epoch; step 3 was saved
    step, calls = Trainer.train_step, iter(range(13))

    def mortal_step(self: Trainer, batch: object) -> float:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", mortal_step)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.undo()
    torch.manual_seed(123)  # another process would not share our random state either
    train(replace(config, resume=True))

    states = [
        torch.load(tmp_path / run / "last.pt", weights_only=True) for run in ("straight", "run")
    ]
    assert all(
        torch.equal(states[0]["model"][name], states[1]["model"][name])
        for name in states[0]["model"]
    )
    state = states[0]["objective"]
    assert all(
        torch.equal(x, states[1]["objective"][n])
        if torch.is_tensor(x)
        else x == states[1]["objective"][n]
        for n, x in state.items()
    )
    held = {"uto": "memory.images", "coder": "criterion.prototypes.centroids"}.get(loss)
    assert held is None or state[held].abs().sum() > 0
    moments = [
        [m for entry in s["optimizer"]["state"].values() for m in entry.values()] for s in states
    ]
    assert moments[0] and all(map(torch.equal, *moments))
    assert torch.equal(states[0]["rng"][0]["torch"], states[1]["rng"][0]["torch"])
    untimed = [
        [{k: v for k, v in line.items() if "seconds" not in k} for line in s["history"]]
        for s in states
    ]
    assert untimed[0] == untimed[1] and len(untimed[0]) == 2
    logs = [(tmp_path / run / "log.jsonl").read_text().splitlines() for run in ("straight", "run")]
    assert len(logs[0]) == len(logs[1]) == 2


def test_a_finished_run_resumes_to_the_same_metrics_and_other_settings_do_not(config: Config):
    first = train(config)
    assert train(replace(config, resume=True)) == first
    with pytest.raises(
        ValueError, match=r"was trained with loss = 'infonce', lr = 0\.01: .* resume=false"
    ):
        train(replace(config, resume=True, lr=1e-3, loss="hal"))


def test_a_new_run_leaves_nothing_of_a_former_one(config: Config, monkeypatch: pytest.MonkeyPatch):
    train(config)
    left = {file.name for file in Path(config.out).iterdir()}
    monkeypatch.setattr(
        Trainer, "train_epoch", lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        train(config)
    kept = {file.name for file in Path(config.out).iterdir()}
    assert left >= {"metrics.json", "best.pt", "last.pt"} and not kept & left - {"config.json"}


def test_an_interrupted_write_leaves_the_old_checkpoint(
    config: Config, monkeypatch: pytest.MonkeyPatch
):
    train(replace(config, epochs=1))
    path = Path(config.out, "last.pt")
    before = path.read_bytes()

    def dying_save(state: object, file) -> None:
        file.write(b"half a checkpoint")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", dying_save)
    with pytest.raises(OSError, match="no space"):
        Trainer(config).save(path)
    assert path.read_bytes() == before
    assert not [
        file for file in Path(config.out).iterdir() if "last.pt" in file.name and file != path
    ]


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_checkpoint_is_named(config: Config, damage: str):
    train(replace(config, epochs=1))
    path = Path(config.out, "last.pt")
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"last\.pt: (damaged|not a whole checkpoint).* resume=false"
    ):
        train(replace(config, resume=True))


def test_triplet_warms_up_on_all_negatives(config: Config, monkeypatch: pytest.MonkeyPatch):
    seen = []
    step = Trainer.train_step

    def watched_step(self: Trainer, batch: object) -> float:
        seen.append((self.epoch, self.objective.criterion.mining))
        return step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", watched_step)
    train(replace(config, loss="triplet", warmup_epochs=1))
    assert set(seen) == {(0, "all"), (1, "hardest")}


def test_every_view_warms_up_on_all_negatives(config: Config):
    objective = Trainer(
        replace(config, loss="triplet", views="regions+regions", warmup_epochs=1)
    ).objective
    for epoch, mining in enumerate(("all", "hardest")):
        objective.begin_epoch(epoch)
        assert [each.criterion.mining for each in objective] == [mining, mining]


def test_dvse_warms_up_on_all_negatives(config: Config):
    trainer = Trainer(replace(config, loss="dvse", warmup_epochs=1))
    batch = next(trainer.batches.epoch(0))
    outputs = trainer.model(batch.regions, batch.words, batch.lengths)
    trainer.objective.begin_epoch(0)
    value, terms = trainer.objective(outputs, batch.image_ids, batch.text_ids)
    every = itrloss.TripletLoss(mining="all", reduction="mean")
    ids = batch.image_ids, batch.text_ids
    heads = [every(outputs[0][:, k], outputs[1], *ids) for k in range(trainer.config.heads)]
    torch.testing.assert_close(
        value, len(outputs[0]) * (sum(heads) / len(heads) + 10 * terms["orthogonal"])
    )
    assert set(terms) == {"orthogonal"} and terms["orthogonal"] > 0
    trainer.objective.begin_epoch(1)
    value, terms = trainer.objective(outputs, batch.image_ids, batch.text_ids)
    assert set(terms) == {"variance_aware", "orthogonal"}
    total, _ = trainer.objective.criterion(*outputs, *ids)
    torch.testing.assert_close(value, len(outputs[0]) * total)


@pytest.mark.parametrize("loss", ["triplet", "pvse", "dvse"])
def test_the_warm_up_may_be_infonce(config: Config, loss: str):
    trainer = Trainer(replace(config, loss=loss, warmup="infonce", warmup_epochs=1))
    batch = next(trainer.batches.epoch(0))
    outputs, ids = (
        trainer.model(batch.regions, batch.words, batch.lengths),
        (batch.image_ids, batch.text_ids),
    )
    nce = itrloss.InfoNCELoss(0.07, reduction="mean")
    trainer.objective.begin_epoch(0)
    value, terms = trainer.objective(outputs, *ids)
    if loss == "triplet":  # triplet sums over the batch, and so does its warm-up
        expected = itrloss.InfoNCELoss(0.07, reduction="sum")(*outputs, *ids)
    elif loss == "pvse":
        scores = trainer.model.similarity(*outputs[:2])
        expected = (
            itrloss.InfoNCELoss(0.07, reduction="sum")(None, None, *ids, scores=scores)
            + 0.1 * terms["diversity"]
        )
    else:
        heads = torch.stack([nce(x, outputs[1], *ids) for x in outputs[0].unbind(1)])
        expected = len(outputs[0]) * (heads.mean() + 10 * terms["orthogonal"])
    torch.testing.assert_close(value, expected)
    trainer.objective.begin_epoch(1)
    after, _ = trainer.objective(outputs, *ids)
    usual = Trainer(replace(config, loss=loss, warmup_epochs=0))
    usual.objective.begin_epoch(1)
    torch.testing.assert_close(after, usual.objective(outputs, *ids)[0])


def test_a_loss_that_is_not_a_number_stops_the_run(config: Config):
    trainer = Trainer(config)
    with torch.no_grad():
        trainer.model.image.linear.weight.fill_(math.inf)
    with pytest.raises(FloatingPointError, match="epoch 1, step 1: loss nan"):
        trainer.train_step(next(trainer.batches.epoch(0)))
