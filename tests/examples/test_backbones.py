"""BERT and image backbones: their outputs, which parameters are trained, and whole runs with
them.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import drawn
from torch.nn import functional as F

from examples.retrieval.backbones import RESNETS, Backbone, BertEncoder, Block, WordPieces
from examples.retrieval.config import Config
from examples.retrieval.data import load_split, pad
from examples.retrieval.evaluate import model_scores
from examples.retrieval.preparation import load_model
from examples.retrieval.train import Trainer, train


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    return str(drawn.tiny_bert(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return drawn.karpathy(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def features(tmp_path_factory) -> Path:
    """Data set of 40 + 10 images of 4 regions with five captions each."""
    root, rng = tmp_path_factory.mktemp("features"), np.random.default_rng(0)
    for split, n in {"train": 40, "dev": 10}.items():
        np.save(root / f"{split}_ims.npy", rng.normal(size=(n, 4, 6)).astype(np.float16))
        words = rng.choice(["left", "right", "a", "reds", "blue", "green"], (n * 5, 4))
        (root / f"{split}_caps.txt").write_text(
            "".join(" ".join(own[: 2 + i % 3]) + "\n" for i, own in enumerate(words))
        )
    return root


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        out=str(tmp_path / "run"),
        dim=16,
        word_dim=8,
        epochs=1,
        batch_size=16,
        min_count=1,
        concepts=3,
        memory=64,
        image_size=48,
        tensorboard=False,
        progress=False,
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    """File of weights like torchvision's, including the classifier's."""
    torch.manual_seed(1)
    network = Backbone("resnet18").network
    for name, x in network.state_dict().items():
        if "running" in name:  # such that some units of every ReLU are active
            x.uniform_(0.5, 1.5) if "var" in name else x.uniform_(-0.1, 0.1)
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(
        {**network.state_dict(), "fc.weight": torch.ones(10, 512), "fc.bias": torch.ones(10)}, path
    )
    return str(path)


# --- BERT -----------------------------------------------------------------------------------------


def test_captions_are_cut_into_the_pieces_of_the_checkpoint(bert: str):
    pieces = WordPieces.of_checkpoint(bert)
    said = [drawn.PIECES[i] for i in pieces.encode("Left reds, blue")]
    assert said == ["[CLS]", "left", "red", "##s", "[UNK]", "blue", "[SEP]"]
    assert pieces.encode("") == [2, 3]
    long = pieces.encode("red " * 40)
    assert len(long) == 16 and long[-1] == 3 and len(pieces) == len(drawn.PIECES)
    again = WordPieces(**pieces.state())
    assert (
        again.encode("Left reds, blue") == pieces.encode("Left reds, blue")
        and again.state() == pieces.state()
    )
    assert "transformers_version" not in pieces.sizes and pieces.sizes["hidden_size"] == 12


def test_bert_is_pooled_over_all_its_pieces(bert: str):
    encoder = BertEncoder(WordPieces.of_checkpoint(bert), 16, asks=True).eval()
    encoder.load_weights(bert)
    from transformers import BertModel

    theirs = BertModel.from_pretrained(bert).eval()
    words, lengths = pad([[2, 7, 10, 3]])
    hidden = encoder.linear(theirs(words)[0])
    text, asked = encoder(words, lengths)
    torch.testing.assert_close(text, encoder.pool(hidden, lengths))
    torch.testing.assert_close(asked, encoder.asking(hidden, lengths))  # type: ignore[misc]


def test_padding_changes_nothing(bert: str):
    torch.manual_seed(0)
    encoder = BertEncoder(WordPieces.of_checkpoint(bert), 16, word_dropout=0.5).eval()
    captions = [[2, 7, 10, 3], [2, 3], [2, 8, 9, 5, 11, 12, 3]]
    words, lengths = pad(captions)
    longer = torch.cat([words, torch.full((3, 4), 9)], dim=1)
    torch.testing.assert_close(encoder(longer, lengths), encoder(words, lengths), rtol=0, atol=1e-6)
    alone = torch.cat([encoder(*pad([caption])) for caption in captions])
    torch.testing.assert_close(encoder(words, lengths), alone, rtol=0, atol=1e-6)


def test_pieces_are_hidden_in_training_but_never_the_first_or_the_last(
    bert: str, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    pieces = WordPieces.of_checkpoint(bert)
    encoder, seen = BertEncoder(pieces, 16, word_dropout=0.3), []
    forward = encoder.bert.forward
    monkeypatch.setattr(
        encoder.bert, "forward", lambda **given: seen.append(given["input_ids"]) or forward(**given)
    )
    words, lengths = pad([[2, *[7] * n, 3] for n in [12] * 100 + [5] * 100])
    encoder(words, lengths)
    inner = seen[0] == pieces.mask
    assert inner[:100, 1:13].float().mean().item() == pytest.approx(0.3, abs=0.05)
    assert torch.equal(seen[0][~inner], words[~inner]) and (words[inner] == 7).all()
    encoder.eval()(words, lengths)
    assert torch.equal(seen[1], words)


def test_what_is_pre_trained_has_its_rate_in_every_view(config: Config, photos: Path, bert: str):
    trainer = Trainer(
        replace(
            config,
            data=str(photos),
            views="regions+regions",
            bert=bert,
            backbone="resnet18",
            backbone_lr_factor=0.3,
        )
    )
    rates = {
        id(p): group["factor"] for group in trainer.optimizer.param_groups for p in group["params"]
    }
    for name, p in trainer.model.named_parameters():
        assert rates[id(p)] == (
            0.1 if ".text.bert." in name else 0.3 if ".image.backbone." in name else 1.0
        ), name


def test_weights_from_elsewhere_are_read_or_refused_by_name(weights: str, tmp_path: Path):
    given = torch.load(weights, weights_only=True)
    path = tmp_path / "old.pth"  # as before batches were counted
    torch.save(
        {name: x for name, x in given.items() if not name.endswith("num_batches_tracked")}, path
    )
    Backbone("resnet18").load_weights(str(path))
    for name, content in (("junk.pth", b"junk"), ("junk.safetensors", b"junk"), ("none.pth", None)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"backbone_weights = '.*{name}': must be a file of weights"
        ):
            Backbone("resnet18").load_weights(str(tmp_path / name))


@pytest.mark.parametrize("loss", ["infonce", "uto", "coder", "dvse", "pvse"])
def test_one_step_reaches_every_parameter_of_a_bert(
    config: Config, features: Path, bert: str, loss: str
):
    options = {"coder": {"clusters": 5}}.get(loss, {})
    trainer = Trainer(
        replace(config, data=str(features), bert=bert, loss=loss, loss_options=options)
    )
    begun = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    rates = {
        id(p): group["factor"] for group in trainer.optimizer.param_groups for p in group["params"]
    }
    assert {
        rates[id(p)] for n, p in trainer.model.named_parameters() if n.startswith("text.bert.")
    } == {0.1}
    assert {
        rates[id(p)] for n, p in trainer.model.named_parameters() if not n.startswith("text.bert.")
    } == {1.0}
    trainer.objective.begin_epoch(1)
    trainer.model.train()
    for batch in list(trainer.batches.epoch(0))[:2]:  # the memory is empty in the first step
        trainer.train_step(batch)
    rate = trainer.optimizer.param_groups[0]["lr"]
    assert all(
        group["lr"] == pytest.approx(rate * group["factor"])
        for group in trainer.optimizer.param_groups
    )
    still = {n for n, p in trainer.model.named_parameters() if torch.equal(p, begun[n])}
    assert not still


def test_a_run_with_bert_is_stored_whole_and_goes_on(
    config: Config, features: Path, tmp_path: Path
):
    checkpoint = drawn.tiny_bert(tmp_path / "bert")
    config = replace(config, data=str(features), bert=str(checkpoint), loss="uto", lr=1e-2)
    train(config)
    trainer = Trainer(replace(config, resume=True))
    trainer.load(Path(config.out, "last.pt"))
    with pytest.raises(ValueError, match="bert_weights = True: cannot resume"):
        Trainer(replace(config, bert_weights=False)).load(Path(config.out, "last.pt"))
    longer = train(replace(config, epochs=2, resume=True))
    assert [line["epoch"] for line in longer["history"]] == [1, 2]

    for file in checkpoint.iterdir():  # the run's own checkpoint suffices
        file.unlink()
    model, vocabulary, _ = load_model(Path(config.out, "best.pt"))
    scores = model_scores(model, trainer.dev, vocabulary)
    np.testing.assert_allclose(scores, np.load(Path(config.out, "dev_scores.npy")), atol=1e-6)


def test_bert_begins_with_the_weights_of_its_checkpoint_unless_it_shall_not(
    config: Config, features: Path, bert: str
):
    from transformers import BertModel

    theirs = BertModel.from_pretrained(bert).embeddings.word_embeddings.weight
    config = replace(config, data=str(features), bert=bert)
    for given in (True, False):
        own = Trainer(
            replace(config, bert_weights=given)
        ).model.text.bert.embeddings.word_embeddings.weight  # type: ignore[union-attr]
        assert torch.equal(own, theirs) == given


def test_what_is_no_bert_is_refused_by_name(
    config: Config, features: Path, bert: str, tmp_path: Path, monkeypatch
):
    config = replace(config, data=str(features))
    with pytest.raises(
        ValueError, match=r"bert = '.*nowhere': must be a BERT, as a local directory"
    ):
        Trainer(replace(config, bert=str(tmp_path / "nowhere")))
    for file in ("config.json", "vocab.txt"):
        (tmp_path / file).write_text(Path(bert, file).read_text())
    with pytest.raises(
        ValueError, match=r"bert = .* with weights .*; bert_weights=false does without"
    ):
        Trainer(replace(config, bert=str(tmp_path)))
    Trainer(replace(config, bert=str(tmp_path), bert_weights=False))
    (tmp_path / "vocab.txt").write_text("\n".join([*drawn.PIECES, "more"]))
    with pytest.raises(
        ValueError,
        match=r"with a tokeniser that fits it, not a bert of 14 pieces, a tokeniser of 15",
    ):
        Trainer(replace(config, bert=str(tmp_path)))
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(
        ValueError,
        match=r"with a tokeniser that fits it, not a bert of 14 pieces, a tokeniser of 5",
    ):
        Trainer(replace(config, bert=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"bert needs transformers: pip install 'itrloss\[bert\]'"
    ):
        Trainer(replace(config, bert=bert))


# --- images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dim", "parameters"),
    [  # the numbers stated by torchvision, minus the classifier's
        ("resnet18", 512, 11_689_512 - 513_000),
        ("resnet34", 512, 21_797_672 - 513_000),
        ("resnet50", 2048, 25_557_032 - 2_049_000),
        ("resnet101", 2048, 44_549_160 - 2_049_000),
        ("resnet152", 2048, 60_192_808 - 2_049_000),
        ("resnext101_32x8d", 2048, 88_791_336 - 2_049_000),
    ],
)
def test_backbones_have_the_sizes_of_the_published(name: str, dim: int, parameters: int):
    with torch.device("meta"):
        backbone = Backbone(name)
        regions = backbone(torch.rand(2, 3, 96, 64))
    assert regions.shape == (2, 6, dim) and backbone.dim == dim
    assert sum(p.numel() for p in backbone.parameters()) == parameters
    assert set(RESNETS) >= {name}


@pytest.mark.parametrize(
    ("narrow", "stride", "groups"), [(False, 1, 1), (False, 2, 1), (True, 1, 1), (True, 2, 4)]
)
def test_a_block_is_that_of_the_published_networks(narrow: bool, stride: int, groups: int):
    """Weights are torchvision's, and so is the stride of a bottleneck block, in its 3x3 convolution
    (ResNet 1.5).
    """
    torch.manual_seed(0)
    outputs = 16 if stride > 1 else 8
    block = (
        Block(8, 4 if narrow else outputs, outputs, stride, narrow, groups)
        .eval()
        .requires_grad_(False)
    )
    for name, buffer in block.named_buffers():
        if buffer.ndim:
            buffer.uniform_(0.5, 1.5) if "var" in name else buffer.normal_()
    state = block.state_dict()

    def convolved(
        x: torch.Tensor, convolution: str, norm: str, stride: int = 1, groups: int = 1
    ) -> torch.Tensor:
        weight = state[f"{convolution}.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)
        mean, var, scale, shift = (
            state[f"{norm}.{k}"] for k in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, var, scale, shift)

    given = torch.randn(2, 8, 6, 6)
    if narrow:
        x = convolved(given, "conv1", "bn1").relu()
        x = convolved(x, "conv2", "bn2", stride, groups).relu()
        x = convolved(x, "conv3", "bn3")
    else:
        x = convolved(given, "conv1", "bn1", stride).relu()
        x = convolved(x, "conv2", "bn2")
    past = convolved(given, "downsample.0", "downsample.1", stride) if stride > 1 else given
    torch.testing.assert_close(block(given), (x + past).relu())


def test_regions_are_the_places_of_the_last_feature_map():
    torch.manual_seed(0)
    backbone = Backbone("resnet18").eval()
    pictures = torch.rand(2, 3, 64, 96)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = (pictures - mean[:, None, None]) / std[:, None, None]
    found = backbone(pictures)
    maps = backbone.network.forward_features(x)
    assert maps.shape == (2, 512, 2, 3)
    torch.testing.assert_close(found[1, 4], maps[1, :, 1, 1])


def test_statistics_and_frozen_stages_stay(config: Config, photos: Path, weights: str):
    config = replace(
        config,
        data=str(photos),
        backbone="resnet18",
        backbone_weights=weights,
        backbone_frozen=2,
        batch_size=8,
        backbone_lr_factor=0.5,
        loss="uto",
    )
    trainer = Trainer(config)
    network = trainer.model.image.backbone.network  # type: ignore[union-attr]
    begun, given = copy.deepcopy(network.state_dict()), torch.load(weights)
    assert all(torch.equal(x, given[name]) for name, x in begun.items())
    trainer.model.train()
    for batch in trainer.batches.epoch(0):
        trainer.train_step(batch)
    for name, x in network.state_dict().items():
        stays = (
            name.startswith(("conv1", "bn1", "layer1"))
            or "running" in name
            or "num_batches" in name
        )
        assert torch.equal(x, begun[name]) == stays, name
    keys = trainer.objective.keys.module.image.backbone.network  # type: ignore[union-attr]
    assert torch.equal(keys.bn1.running_mean, given["bn1.running_mean"])
    rates = {group["factor"] for group in trainer.optimizer.param_groups}
    assert rates == {1.0, 0.5}
    frozen = Trainer(replace(config, backbone_frozen=5)).model
    assert not any(p.requires_grad for p in frozen.image.backbone.parameters())  # type: ignore[union-attr]


def test_every_view_begins_with_the_weights_that_are_named(
    config: Config, photos: Path, bert: str, weights: str
):
    from transformers import BertModel

    words, given = BertModel.from_pretrained(bert).state_dict(), torch.load(weights)
    config = replace(
        config, data=str(photos), bert=bert, backbone="resnet18", backbone_weights=weights
    )
    both = list(Trainer(replace(config, views="regions+regions")).model)  # type: ignore[call-overload]
    assert len(both) == 2
    for view in both:
        assert all(
            torch.equal(x, given[name])
            for name, x in view.image.backbone.network.state_dict().items()
        )
        assert all(torch.equal(x, words[name]) for name, x in view.text.bert.state_dict().items())


@pytest.mark.parametrize("loss", ["infonce", "coder", "dvse", "pvse"])
def test_one_step_reaches_every_parameter_of_a_backbone(config: Config, photos: Path, loss: str):
    options = {"coder": {"clusters": 5}}.get(loss, {})
    trainer = Trainer(
        replace(
            config,
            data=str(photos),
            backbone="resnet18",
            loss=loss,
            loss_options=options,
            batch_size=8,
            enhancement="sge" if loss == "infonce" else "",
        )
    )
    begun = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.objective.begin_epoch(1)
    trainer.model.train()
    for batch in list(trainer.batches.epoch(0))[:2]:
        trainer.train_step(batch)
    assert not {n for n, p in trainer.model.named_parameters() if torch.equal(p, begun[n])}


def test_a_run_on_raw_images_with_bert_learns_and_is_stored(
    config: Config, photos: Path, bert: str
):
    config = replace(
        config,
        data=str(photos),
        backbone="resnet18",
        bert=bert,
        epochs=3,
        lr=3e-3,
        backbone_lr_factor=0.3,
        feature_dropout=0.0,
        word_dropout=0.0,
        final_test=True,
    )
    result = train(config)
    log = result["history"]
    assert log[-1]["loss"] < 0.9 * log[0]["loss"] and set(result["metrics"]) == {"dev", "test"}
    model, vocabulary, loaded = load_model(Path(config.out, "best.pt"))
    assert loaded == config
    dev = load_split(config.data, "dev", config.image_size)
    scores = model_scores(model, dev, vocabulary)
    np.testing.assert_allclose(scores, np.load(Path(config.out, "dev_scores.npy")), atol=1e-5)


def test_backbones_that_do_not_fit_are_refused_by_name(
    config: Config, photos: Path, features: Path, weights: str
):
    raw = replace(config, data=str(photos))
    for change, message in (
        ({}, r"backbone = '': must be the name of one, .* for the raw images of .*photos"),
        ({"backbone": "resnet9"}, r"backbone = 'resnet9': must be one of resnet18, .*, or timm/"),
        (
            {"backbone": "resnet18", "backbone_frozen": 2},
            r"backbone_frozen = 2: must be 0 without backbone_weights",
        ),
        (
            {"backbone": "resnet34", "backbone_weights": weights},
            r"backbone_weights = .*resnet18\.pth': must hold",
        ),
        (
            {"backbone": "resnet18", "data": str(features)},
            r"backbone = 'resnet18': must be empty for the features",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(replace(raw, **change))
    with pytest.raises(ValueError, match=r"backbone_frozen = 6: must be from 0 to 5"):
        replace(raw, backbone_frozen=6)


# timm needs a torchvision built for the installed torch, so the calls to timm are tested, not timm
# itself.


class Transformer(torch.nn.Module):
    """Stand-in for timm's vision transformers: it has a width, and returns positions as a
    sequence.
    """

    num_features = 7

    def forward_features(self, pictures: torch.Tensor) -> torch.Tensor:
        return pictures.mean((2, 3))[:, :1, None].expand(-1, 5, 7)


def test_timm_is_asked_for_other_networks(monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def create_model(name: str, **options: object) -> torch.nn.Module:
        asked.update(options, name=name)
        if name == "nothing":
            raise RuntimeError("Unknown model (nothing)")
        return Transformer()

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    backbone = Backbone("timm/vit_tiny")
    assert asked == {"name": "vit_tiny", "pretrained": False, "num_classes": 0, "global_pool": ""}
    assert backbone(torch.rand(2, 3, 8, 8)).shape == (2, 5, 7) and backbone.dim == 7
    with pytest.raises(
        ValueError, match=r"backbone = 'timm/nothing': must be one of timm's \(Unknown model"
    ):
        Backbone("timm/nothing")
    with pytest.raises(ValueError, match=r"backbone_frozen = 2: must be 0 or 5, all"):
        Backbone("timm/vit_tiny", frozen=2)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        ImportError, match=r"backbone = 'timm/vit_tiny' needs timm: pip install 'itrloss\[grid\]'"
    ):
        Backbone("timm/vit_tiny")
