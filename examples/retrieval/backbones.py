"""Pre-trained encoders: BERT for captions, and convolutional networks for raw images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .config import Config
from .encoders import GPO, SubEmbeddings

# --------------------------------------------------------------------------------------------- BERT


class WordPieces:
    """The tokeniser of a BERT and the sizes of its network, from which a checkpoint can rebuild it.

    Args:
        tokenizer: the tokeniser, as the JSON of the `tokenizers` library.
        sizes: the settings of `transformers.BertConfig`.
        mask: the id of the mask token.
    """

    def __init__(self, tokenizer: str, sizes: Mapping[str, Any], mask: int) -> None:
        _transformers()
        from tokenizers import Tokenizer

        self.sizes, self.mask = dict(sizes), mask
        self._json = tokenizer
        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._tokenizer.enable_truncation(self.sizes["max_position_embeddings"])
        self._tokenizer.no_padding()

    @classmethod
    def of_checkpoint(cls, path: str) -> WordPieces:
        """Read them from a directory with config.json and the tokeniser's files, or from a
        downloaded model by name.
        """
        transformers = _transformers()
        try:
            sizes = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{_bert(path)} with config.json, tokenizer.json or vocab.txt ({error})"
            ) from error
        # If its files are missing, transformers makes a tokeniser with special tokens only.
        fits = len(tokenizer.all_special_ids) < len(tokenizer) <= sizes.vocab_size
        if sizes.model_type != "bert" or tokenizer.mask_token_id is None or not fits:
            pair = (
                f"a {sizes.model_type} of {sizes.vocab_size} pieces, a tokeniser of "
                f"{len(tokenizer)}"
            )
            raise ValueError(f"{_bert(path)} with a tokeniser that fits it, not {pair}")
        settings = sizes.to_diff_dict()
        # of the installed library; resuming with a newer one is allowed
        settings.pop("transformers_version", None)
        return cls(tokenizer.backend_tokenizer.to_str(), settings, tokenizer.mask_token_id)

    def state(self) -> dict[str, Any]:
        """Return the constructor's arguments, for checkpoints."""
        return {"tokenizer": self._json, "sizes": self.sizes, "mask": self.mask}

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, caption: str) -> list[int]:
        """Ids of a caption's word pieces, with [CLS] before and [SEP] behind them."""
        return self._tokenizer.encode(caption).ids


class BertEncoder(nn.Module):
    """Padded word pieces (M, L) -> text embeddings (M, dim), as VSE-infinity: BERT, linear, GPO
    over all pieces.

    The first and last pieces, [CLS] and [SEP], are pooled like the others. In training, each piece
    between them is replaced by [MASK] with probability ``word_dropout``. (VSE-infinity's code
    selects one word in five and masks, replaces or removes it.) ``heads`` and ``asks`` are those of
    :class:`~examples.retrieval.encoders.TextEncoder`.
    """

    def __init__(
        self,
        pieces: WordPieces,
        dim: int,
        word_dropout: float = 0.0,
        heads: SubEmbeddings | None = None,
        asks: bool = False,
    ) -> None:
        super().__init__()
        transformers = _transformers()
        sizes = transformers.BertConfig(**pieces.sizes)
        self.bert = transformers.BertModel(sizes, add_pooling_layer=False)
        self.linear = nn.Linear(sizes.hidden_size, dim)
        self.pool = GPO()
        self.heads = heads
        self.asking = GPO() if asks else None
        self.word_dropout = word_dropout
        self.mask = pieces.mask

    def load_weights(self, path: str) -> None:
        """Load the weights of a checkpoint."""
        try:
            model, report = _transformers().BertModel.from_pretrained(
                path, add_pooling_layer=False, local_files_only=True, output_loading_info=True
            )
            if report["missing_keys"]:
                raise ValueError(
                    f"{len(report['missing_keys'])} are missing, such as "
                    f"{min(report['missing_keys'])}"
                )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{_bert(path)} with weights ({error}); bert_weights=false does without"
            ) from error
        self.bert.load_state_dict(model.state_dict())

    def forward(self, words: Tensor, lengths: Tensor) -> Any:
        place = torch.arange(words.shape[1])
        counts = (place < lengths[:, None]).to(words.device)
        if self.training and self.word_dropout:
            inner = ((place > 0) & (place < lengths[:, None] - 1)).to(words.device)
            hidden = torch.rand(words.shape, device=words.device) < self.word_dropout
            words = words.masked_fill(hidden & inner, self.mask)
        states = self.bert(input_ids=words, attention_mask=counts.long()).last_hidden_state
        states = self.linear(states)
        text = self.pool(states, lengths)
        if self.heads is not None:
            return self.heads(states, text, lengths)
        return text if self.asking is None else (text, self.asking(states, lengths))


def _transformers() -> Any:
    try:
        import transformers
        from transformers import BertModel  # noqa: F401  raises if a dependency of BertModel is missing
    except ImportError as error:
        raise ImportError(
            f"bert needs transformers: pip install 'itrloss[bert]' ({error})"
        ) from error
    return transformers


def _bert(path: str) -> str:
    return (
        f"bert = {path!r}: must be a BERT, as a local directory or a name that was downloaded "
        "before,"
    )


# ------------------------------------------------------------------------------------------- images


# Blocks per stage, whether they are bottleneck blocks, groups of the 3x3 convolution, and channels
# per group (of 64).
RESNETS = {
    "resnet18": ((2, 2, 2, 2), False, 1, 64),
    "resnet34": ((3, 4, 6, 3), False, 1, 64),
    "resnet50": ((3, 4, 6, 3), True, 1, 64),
    "resnet101": ((3, 4, 23, 3), True, 1, 64),
    "resnet152": ((3, 8, 36, 3), True, 1, 64),
    "resnext101_32x8d": ((3, 4, 23, 3), True, 32, 8),
}
STAGES = 5  # stages of a ResNet: its stem, and four of blocks


class Block(nn.Module):
    """A residual block: two convolutions of 3x3, or a bottleneck of 1x1, 3x3 and 1x1."""

    def __init__(
        self, inputs: int, inner: int, outputs: int, stride: int, narrow: bool, groups: int
    ) -> None:
        super().__init__()
        if narrow:
            shapes = [
                (inputs, inner, 1, 1, 1),
                (inner, inner, 3, stride, groups),
                (inner, outputs, 1, 1, 1),
            ]
        else:
            shapes = [(inputs, inner, 3, stride, 1), (inner, outputs, 3, 1, 1)]
        self.depth = len(shapes)
        for i, (channels, made, kernel, step, parts) in enumerate(shapes, 1):
            convolution = nn.Conv2d(
                channels, made, kernel, step, kernel // 2, groups=parts, bias=False
            )
            self.add_module(f"conv{i}", convolution)
            self.add_module(f"bn{i}", nn.BatchNorm2d(made))
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i in range(1, self.depth + 1):
            y = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(y))
            y = y.relu() if i < self.depth else y
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet(nn.Module):
    """A residual network up to its last feature map (He et al., CVPR 2016; ResNeXt, Xie et al.,
    CVPR 2017).

    Its weights have the names of torchvision and timm, so that their files can be loaded.
    """

    def __init__(self, blocks: Sequence[int], narrow: bool, groups: int, group_width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.num_features = 64
        for stage, count in enumerate(blocks):
            width = 64 * 2**stage
            inner, outputs = (
                (width * group_width // 64 * groups, 4 * width) if narrow else (width, width)
            )
            layers = []
            for i in range(count):
                stride = 2 if i == 0 and stage else 1
                layers.append(Block(self.num_features, inner, outputs, stride, narrow, groups))
                self.num_features = outputs
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def stages(self) -> list[nn.Module]:
        """The stages, from the image on, which can be frozen."""
        return [
            nn.ModuleList([self.conv1, self.bn1]),
            *(self.get_submodule(f"layer{i}") for i in range(1, STAGES)),
        ]

    def forward_features(self, pictures: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, d, H / 32, W / 32)."""
        x = self.maxpool(self.bn1(self.conv1(pictures)).relu())
        for i in range(1, STAGES):
            x = self.get_submodule(f"layer{i}")(x)
        return x


class Backbone(nn.Module):
    """Raw images (B, 3, H, W) in [0, 1] -> the positions of the last feature map as regions, (B, R,
    dim).

    Args:
        name: a key of RESNETS, or "timm/" and the name of one of timm's convolutional networks or
            vision transformers.
        frozen: number of stages, counted from the image, that are not trained: 1 is the stem,
            STAGES is all.
        keep_statistics: batch normalisation uses its pre-trained statistics in training, too,
            because those of small batches of another data set would degrade the pre-trained
            features.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, name: str, frozen: int = 0, keep_statistics: bool = False) -> None:
        super().__init__()
        if name not in RESNETS and not name.startswith("timm/"):
            raise ValueError(
                f"backbone = {name!r}: must be one of {', '.join(RESNETS)}, or timm/ and a name "
                "of timm's"
            )
        self.network: Any = ResNet(*RESNETS[name]) if name in RESNETS else _of_timm(name)
        self.dim: int = self.network.num_features
        self.keep_statistics = keep_statistics
        # Statistics of ImageNet, with which most networks were trained.
        self.register_buffer(
            "mean", torch.tensor([0.485, 0.456, 0.406])[:, None, None], persistent=False
        )
        self.register_buffer(
            "std", torch.tensor([0.229, 0.224, 0.225])[:, None, None], persistent=False
        )
        if frozen == STAGES:
            self.network.requires_grad_(False)
        elif frozen and not isinstance(self.network, ResNet):
            raise ValueError(
                f"backbone_frozen = {frozen}: must be 0 or {STAGES}, all, for backbone = {name!r}"
            )
        elif frozen:
            nn.ModuleList(self.network.stages()[:frozen]).requires_grad_(False)

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        for module in self.modules() if self.keep_statistics else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    def load_weights(self, path: str) -> None:
        """Load the weights of a file (.pth, .pt, .bin, .safetensors), without those of its
        classifier.
        """
        try:
            weights = _weights(path)
        except Exception as error:  # torch.load raises many kinds of errors for other files
            what = str(error).partition("\n")[0]
            raise ValueError(
                f"backbone_weights = {path!r}: must be a file of weights ({what})"
            ) from None
        own = self.network.state_dict()
        # Files from before PyTorch 0.4.1 lack num_batches_tracked, which matters for cumulative
        # averages only.
        weights = {n: x for n, x in own.items() if n.endswith(".num_batches_tracked")} | dict(
            weights
        )
        lacking = [n for n, x in own.items() if n not in weights or weights[n].shape != x.shape]
        if lacking:
            raise ValueError(
                f"backbone_weights = {path!r}: must hold the weights of the backbone; "
                f"{len(lacking)} of its {len(own)} are missing or have another shape, such as "
                f"{lacking[0]}"
            )
        self.network.load_state_dict({n: weights[n] for n in own})

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.network.forward_features((pictures - self.mean) / self.std)
        if x.ndim == 3:
            return x
        last = x.shape[3] == self.dim != x.shape[1]  # channels last, as for timm's Swin
        return rearrange(x, "b h w d -> b (h w) d" if last else "b d h w -> b (h w) d")


def _weights(path: str) -> Mapping[str, Tensor]:
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file  # installed with transformers and with timm

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def build_backbone(config: Config) -> Backbone | None:
    """Build the backbone of the settings, before its weights are loaded; None for pre-computed
    features.
    """
    if not config.backbone:
        return None
    if config.backbone_frozen and not config.backbone_weights:
        raise ValueError(
            f"backbone_frozen = {config.backbone_frozen}: must be 0 without backbone_weights"
        )
    return Backbone(
        config.backbone, config.backbone_frozen, keep_statistics=bool(config.backbone_weights)
    )


def _of_timm(name: str) -> Any:
    try:
        import timm  # pyright: ignore[reportMissingImports]
    except (
        ImportError,
        RuntimeError,
    ) as error:  # RuntimeError: torchvision was built for another torch
        raise ImportError(
            f"backbone = {name!r} needs timm: pip install 'itrloss[grid]' ({error})"
        ) from error
    try:
        return timm.create_model(
            name.removeprefix("timm/"), pretrained=False, num_classes=0, global_pool=""
        )
    except RuntimeError as error:
        raise ValueError(f"backbone = {name!r}: must be one of timm's ({error})") from error
