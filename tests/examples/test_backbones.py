"""Pre-trained encoders: their outputs, how they are trained, and whole runs with them."""

from __future__ import annotations

import copy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import drawn

from examples.retrieval.backbones import Backbone, BertEncoder, WordPieces, network_sizes
from examples.retrieval.config import Config
from examples.retrieval.data import pad
from examples.retrieval.evaluate import model_scores
from examples.retrieval.preparation import load_model
from examples.retrieval.train import Trainer, train


@pytest.fixture
def raw(config: Config, photos: Path, resnet: str) -> Config:
    """Settings of a small run on raw images."""
    return replace(config, data=str(photos), backbone=resnet, concepts=3, batch_size=8)


# --- BERT -----------------------------------------------------------------------------------------


def test_captions_are_cut_into_the_pieces_of_the_checkpoint(bert):
    pieces = WordPieces.of_checkpoint(bert)
    said = [drawn.PIECES[i] for i in pieces.encode("Left reds, blue")]
    assert said == ["[CLS]", "left", "red", "##s", "[UNK]", "blue", "[SEP]"]
    assert pieces.encode("") == [2, 3]
    long = pieces.encode("red " * 40)
    assert len(long) == 16
    assert long[-1] == 3


def test_word_pieces_are_rebuilt_from_their_state(bert):
    pieces = WordPieces.of_checkpoint(bert)
    again = WordPieces(**pieces.state())
    assert again.encode("Left reds, blue") == pieces.encode("Left reds, blue")
    assert again.state() == pieces.state()
    assert "transformers_version" not in pieces.sizes  # a newer one may resume the run


def test_bert_is_pooled_over_all_its_pieces(bert):
    from transformers import BertModel

    encoder = BertEncoder(Config(loss="coder", dim=16), WordPieces.of_checkpoint(bert)).eval()
    encoder.load_weights(bert)
    words, lengths = pad([[2, 7, 10, 3]])
    hidden = encoder.linear(BertModel.from_pretrained(bert).eval()(words)[0])
    text, query = encoder(words, lengths)
    torch.testing.assert_close(text, encoder.pool(hidden, lengths))
    torch.testing.assert_close(query, encoder.query_pool(hidden, lengths))  # type: ignore[misc]


def test_bert_leaves_padding_out(bert):
    torch.manual_seed(0)
    encoder = BertEncoder(Config(dim=16, word_dropout=0.5), WordPieces.of_checkpoint(bert)).eval()
    captions = [[2, 7, 10, 3], [2, 3], [2, 8, 9, 5, 11, 12, 3]]
    words, lengths = pad(captions)
    longer = torch.cat([words, torch.full((3, 4), 9)], dim=1)
    alone = torch.cat([encoder(*pad([caption])) for caption in captions])
    torch.testing.assert_close(encoder(longer, lengths), alone, rtol=0, atol=1e-6)


def test_word_dropout_hides_pieces_but_never_the_first_or_the_last(bert, monkeypatch):
    torch.manual_seed(0)
    pieces = WordPieces.of_checkpoint(bert)
    encoder = BertEncoder(Config(dim=16, word_dropout=0.3), pieces)
    forward = encoder.bert.forward
    seen = []

    def watched(**given):
        seen.append(given["input_ids"])
        return forward(**given)

    monkeypatch.setattr(encoder.bert, "forward", watched)
    words, lengths = pad([[2, *[7] * n, 3] for n in [12] * 100 + [5] * 100])
    encoder(words, lengths)
    encoder.eval()(words, lengths)
    training, evaluation = seen
    hidden = training == pieces.mask
    assert hidden[:100, 1:13].float().mean().item() == pytest.approx(0.3, abs=0.05)
    assert (words[hidden] == 7).all()
    assert torch.equal(training[~hidden], words[~hidden])
    assert torch.equal(evaluation, words)


def test_pieces_are_masked_replaced_or_removed_as_in_public_code(bert):
    torch.manual_seed(0)
    pieces = WordPieces.of_checkpoint(bert)
    config = Config(dim=16, word_dropout=0.5, word_masking="three ways")
    encoder = BertEncoder(config, pieces)
    long, short = [2, *[7] * 12, 3], [2, *[8] * 4, 3]
    words, lengths = pad([long] * 300 + [short] * 100)
    found, kept = encoder.masked(words, lengths)
    inner = 300 * 12 + 100 * 4
    removed = int((lengths - kept).sum())
    rows = [row[:n].tolist() for row, n in zip(found, kept.tolist(), strict=True)]
    assert all(row[0] == 2 and row[-1] == 3 for row in rows)  # [CLS] and [SEP]
    middle = [piece for row in rows for piece in row[1:-1]]
    masked = middle.count(pieces.mask)
    others = sum(piece not in (7, 8, pieces.mask) for piece in middle)
    assert removed / inner == pytest.approx(0.5 * 0.4, abs=0.03)
    assert masked / inner == pytest.approx(0.5 * 0.5 + 0.05 / len(pieces), abs=0.03)
    assert others / inner == pytest.approx(0.05 * (1 - 2 / len(pieces)), abs=0.02)
    assert torch.isfinite(encoder(words, lengths)).all()


# --- images ---------------------------------------------------------------------------------------


def test_regions_are_the_places_of_the_last_feature_map(resnet):
    backbone = Backbone(network_sizes(resnet)).eval()
    backbone.load_weights(resnet)
    pictures = torch.rand(2, 3, 64, 96)
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    (maps,) = backbone.network((pictures - mean) / std).feature_maps
    assert maps.shape == (2, 16, 2, 3)
    found = backbone(pictures)
    assert found.shape == (2, 6, backbone.dim)
    torch.testing.assert_close(found[1, 4], maps[1, :, 1, 1])


def test_pre_trained_statistics_stay_and_weights_are_trained(raw):
    trainer = Trainer(replace(raw, backbone_lr_factor=0.5, loss="uto"))
    network = trainer.model.image.backbone.network  # type: ignore[union-attr]
    begun = copy.deepcopy(network.state_dict())
    trainer.model.train()
    for batch in trainer.batches.epoch(0):
        trainer.train_step(batch)
    for name, x in network.state_dict().items():
        stays = "running" in name or "num_batches" in name
        assert torch.equal(x, begun[name]) == stays, name


def test_a_backbone_without_a_rate_stays(raw):
    trainer = Trainer(replace(raw, backbone_lr_factor=0.0))
    begun = copy.deepcopy(trainer.model.image.backbone.state_dict())  # type: ignore[union-attr]
    trainer.model.train()
    trainer.train_step(next(trainer.batches.epoch(0)))
    for name, x in trainer.model.image.backbone.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(x, begun[name]), name


# --- both -----------------------------------------------------------------------------------------


def test_every_view_begins_with_pre_trained_weights_at_their_own_rates(raw, bert):
    from transformers import BertModel, ResNetBackbone

    words = BertModel.from_pretrained(bert).state_dict()
    pictures = ResNetBackbone.from_pretrained(raw.backbone).state_dict()
    trainer = Trainer(replace(raw, bert=bert, views="regions+regions", backbone_lr_factor=0.3))
    rates = {}
    for group in trainer.optimizer.param_groups:
        rates |= dict.fromkeys(map(id, group["params"]), group["lr"] / raw.lr)
    for view in trainer.model:  # type: ignore[attr-defined]
        for name, x in view.image.backbone.network.state_dict().items():
            assert torch.equal(x, pictures[name])
        for name, x in view.text.bert.state_dict().items():
            assert torch.equal(x, words[name])
    for name, p in trainer.model.named_parameters():
        rate = 1.0
        if ".text.bert." in name:
            rate = 0.1
        elif ".image.backbone." in name:
            rate = 0.3
        assert rates[id(p)] == pytest.approx(rate), name


@pytest.mark.parametrize("loss", ["infonce", "uto", "coder", "dvse"])
def test_training_reaches_every_parameter(raw, bert, loss):
    options = {"coder": {"clusters": 5}}.get(loss, {})
    enhancement = "sge" if loss == "uto" else ""
    trainer = Trainer(
        replace(raw, bert=bert, loss=loss, loss_options=options, enhancement=enhancement)
    )
    assert not drawn.take_steps(trainer, 2)  # the memory is empty in the first step


def test_a_run_is_stored_whole_and_goes_on(raw, bert, tmp_path):
    copies = tmp_path / "bert", tmp_path / "resnet"
    for source, copied in zip((bert, raw.backbone), copies, strict=True):
        shutil.copytree(source, copied)
    config = replace(
        raw,
        bert=str(copies[0]),
        backbone=str(copies[1]),
        backbone_lr_factor=0.3,
        feature_dropout=0.0,
        word_dropout=0.0,
        final_test=True,
        epochs=2,
    )
    train(config)
    result = train(replace(config, epochs=3, resume=True))
    log = result["history"]
    assert [line["epoch"] for line in log] == [1, 2, 3]
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]
    assert set(result["metrics"]) == {"dev", "test"}

    dev = Trainer(config).dev
    for path in copies:  # the run's own checkpoint suffices
        shutil.rmtree(path)
    model, words, _ = load_model(Path(config.out, "best.pt"))
    scores = np.load(Path(config.out, "dev_scores.npy"))
    np.testing.assert_allclose(model_scores(model, dev, words), scores, atol=1e-5)


# --- what is refused ------------------------------------------------------------------------------


def test_a_missing_package_is_named(config, bert, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = r"bert, backbone and CLIP need transformers: install itrloss with the extra 'bert'"
    with pytest.raises(ImportError, match=message):
        Trainer(replace(config, bert=bert))
