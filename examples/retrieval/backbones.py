"""Pre-trained encoders of transformers: BERT for captions, and networks for raw images.

Nothing is downloaded: both are named by a directory, or by the name of a model that was downloaded
before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .config import Config, must_be
from .encoders import TextPooling, new_heads, new_pool

WHERE = "as a local directory or a name that was downloaded before"


def import_transformers() -> Any:
    try:
        import transformers
        from transformers import BertModel  # noqa: F401  raises if a dependency of BertModel is missing
    except ImportError as error:
        raise ImportError(
            "bert, backbone and CLIP need transformers: install itrloss with the extra 'bert' "
            f"({error})"
        ) from error
    return transformers


def _settings(setting: str, path: str, kind: str) -> Any:
    """Read the settings of a network; ``setting`` is the one of the run that names it."""
    with must_be(f"{setting} = {path!r}", f"{kind}, {WHERE}"):
        return import_transformers().AutoConfig.from_pretrained(path, local_files_only=True)


def _sizes(settings: Any) -> dict[str, Any]:
    """The settings of a network for a checkpoint, without the version of transformers: a run may
    be resumed with a newer one.
    """
    sizes = settings.to_diff_dict()
    sizes.pop("transformers_version", None)
    return sizes


def pretrained(setting: str, path: str, kind: str, cls: Any, **options: Any) -> Any:
    """Read a network with the weights of a checkpoint; a ValueError if some are missing."""
    with must_be(f"{setting} = {path!r}", f"{kind} with weights, {WHERE}"):
        model, report = cls.from_pretrained(
            path, local_files_only=True, output_loading_info=True, **options
        )
        missing = report["missing_keys"]
        if missing:
            raise ValueError(f"{len(missing)} are missing, such as {min(missing)}")
    return model


# --------------------------------------------------------------------------------------------- BERT


class WordPieces:
    """The tokeniser of a BERT and the sizes of its network, from which a checkpoint can rebuild it.

    Args:
        tokenizer: the tokeniser, as the JSON of the `tokenizers` library.
        sizes: the settings of `transformers.BertConfig`.
        mask: the id of the mask token.
    """

    def __init__(self, tokenizer: str, sizes: Mapping[str, Any], mask: int) -> None:
        import_transformers()
        from tokenizers import Tokenizer

        self.sizes = dict(sizes)
        self.mask = mask
        self._json = tokenizer
        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._tokenizer.enable_truncation(self.sizes["max_position_embeddings"])
        self._tokenizer.no_padding()

    @classmethod
    def of_checkpoint(cls, path: str) -> WordPieces:
        """Read them from a directory with config.json and the tokeniser's files, or from a
        downloaded model by name.
        """
        settings = _settings("bert", path, "a BERT")
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(path, local_files_only=True)
        # If its files are missing, transformers makes a tokeniser with special tokens only.
        fits = len(tokenizer.all_special_ids) < len(tokenizer) <= settings.vocab_size
        if settings.model_type != "bert" or tokenizer.mask_token_id is None or not fits:
            found = f"a {settings.model_type} of {settings.vocab_size} pieces"
            reason = f"{found}, a tokeniser of {len(tokenizer)}"
            kind = "a BERT with a tokeniser that fits it"
            raise ValueError(f"bert = {path!r}: must be {kind}, {WHERE} ({reason})")
        return cls(tokenizer.backend_tokenizer.to_str(), _sizes(settings), tokenizer.mask_token_id)

    def state(self) -> dict[str, Any]:
        """Return the constructor's arguments, for checkpoints."""
        return {"tokenizer": self._json, "sizes": self.sizes, "mask": self.mask}

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, caption: str) -> list[int]:
        """Ids of a caption's word pieces, with [CLS] before and [SEP] behind them."""
        return self._tokenizer.encode(caption).ids


class BertEncoder(TextPooling):
    """Padded word pieces (M, L) -> text embeddings (M, dim), as VSE-infinity: BERT, linear, GPO
    over all pieces.

    The first and last pieces, [CLS] and [SEP], are pooled like the others. In training, each piece
    between them is selected with probability ``word_dropout``.
    """

    def __init__(self, config: Config, pieces: WordPieces, has_set: bool = False) -> None:
        super().__init__()
        heads = new_heads(config, 1) if has_set else None
        transformers = import_transformers()
        sizes = transformers.BertConfig(**pieces.sizes)
        self.bert = transformers.BertModel(sizes, add_pooling_layer=False)
        self.linear = nn.Linear(sizes.hidden_size, config.dim)
        self.pool = new_pool(config)
        self.heads = heads
        self.query_pool = new_pool(config) if config.loss == "coder" else None
        self.word_dropout = config.word_dropout
        self.in_three_ways = config.word_masking == "three ways"
        self.mask = pieces.mask

    def load_weights(self, path: str) -> None:
        """Load the weights of a checkpoint."""
        cls = type(self.bert)
        loaded = pretrained("bert", path, "a BERT", cls, add_pooling_layer=False)
        self.bert.load_state_dict(loaded.state_dict())

    def forward(self, words: Tensor, lengths: Tensor) -> Any:
        if self.training and self.word_dropout:
            words, lengths = self.masked(words, lengths)
        counts = (torch.arange(words.shape[1]) < lengths[:, None]).to(words.device)
        states = self.bert(input_ids=words, attention_mask=counts.long()).last_hidden_state
        outputs = self.pooled(self.linear(states), lengths)
        return outputs if len(outputs) > 1 else outputs[0]  # type: ignore[misc]

    def masked(self, words: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Words with selected pieces masked or, in three ways, masked, replaced by random ones or
        removed (1/2, 1/10 and 4/10 of them); and lengths.
        """
        place = torch.arange(words.shape[1])
        inner = ((place > 0) & (place < lengths[:, None] - 1)).to(words.device)
        selected = inner & (torch.rand(words.shape, device=words.device) < self.word_dropout)
        if not self.in_three_ways:
            return words.masked_fill(selected, self.mask), lengths
        way = torch.rand(words.shape, device=words.device)
        any_piece = torch.randint_like(words, self.bert.config.vocab_size)
        words = torch.where(selected & (way < 0.6), any_piece, words)
        words = words.masked_fill(selected & (way < 0.5), self.mask)
        removed = selected & (way >= 0.6)
        kept_first = removed.long().argsort(dim=1, stable=True)
        return words.gather(1, kept_first), lengths - removed.sum(1).cpu()


# ------------------------------------------------------------------------------------------- images


def network_sizes(path: str) -> dict[str, Any]:
    """Read the settings of a network for images, from which a checkpoint can rebuild it.

    ``path`` is a directory with config.json, or the name of a downloaded model.
    """
    return _sizes(_settings("backbone", path, "a network for images"))


class Backbone(nn.Module):
    """Raw images (B, 3, H, W) in [0, 1] -> the positions of the last feature map as regions, (B, R,
    dim).

    Batch normalisation uses its pre-trained statistics in training, too, because those of small
    batches of another data set would degrade the pre-trained features.

    Args:
        sizes: the settings of the network, a kind that `transformers.AutoBackbone` knows.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        transformers = import_transformers()
        settings = transformers.AutoConfig.for_model(**sizes)
        self.network = transformers.AutoBackbone.from_config(settings)
        self.dim: int = self.network.channels[-1]
        # Statistics of ImageNet, with which most networks were trained.
        mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
        std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def load_weights(self, path: str) -> None:
        """Load the weights of a checkpoint."""
        loaded = pretrained("backbone", path, "a network for images", type(self.network))
        self.network.load_state_dict(loaded.state_dict())

    def forward(self, pictures: Tensor) -> Tensor:
        maps = self.network((pictures - self.mean) / self.std).feature_maps
        return rearrange(maps[-1], "b d h w -> b (h w) d")
