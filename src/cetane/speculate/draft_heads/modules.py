"""Draft heads in torch, for training: small networks that read the target's hidden states.

They propose only tokens that the training text uses most. They share the target's last norm, and
its output rows for these tokens.

Medusa (arXiv 2401.10774) has one residual layer for each further token. EAGLE-3 (arXiv 2503.01840)
has one decoder layer. It reads hidden states of three depths and the tokens after them, then
continues from its own output. Training uses its own output too; its paper calls this training-time
test.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from cetane.checkpoint import Rotation
from cetane.compress import parse_format
from cetane.errors import CetaneError
from cetane.files import disk_errors, replacing
from cetane.schema.draft_head import DraftHeadKind
from cetane.validation import Data, parse_json, validated

TAPS = 3
"""The number of depths whose hidden states EAGLE-3 reads."""
THETA = 10_000.0
"""The base of the rotary positions of EAGLE-3."""


class DraftHeadConfig(Data):
    """The shape of a draft head, and the bundle that it drafts for."""

    kind: DraftHeadKind
    hidden: int = Field(ge=1, le=2**16)
    rows: int = Field(ge=1, le=2**20)
    """Tokens that it can propose."""
    steps: int = Field(ge=1, le=16)
    """Tokens that it was trained to draft."""
    eps: float = Field(ge=0, le=1)
    softcap: float | None = Field(default=None, gt=0)
    """The softcap of the target's logits. Only training applies it: a softcap does not change which
    logits are largest."""
    bundle: str
    """Digest of the bundle whose hidden states it reads; empty if it belongs to none yet."""
    depths: tuple[str, ...] = ()
    """The blocks of the target whose hidden states it reads; empty if that is not known."""
    scale: float = Field(default=1.0, gt=0, le=1)
    """The factor on these hidden states (`family.residual_scale`)."""
    turned: bool = False
    """Whether these hidden states, and the embeddings, have turned channels
    (`compression.rotate`)."""
    weights: Literal["fp16", "int8-per-channel"] = "fp16"
    """The format of its projections: that of the target's output head, if it is one of these. Rows
    taken from an int8 head keep their scales, so both heads have the same values."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The depths that it reads, as places in `features.tapped_shards`."""
        return (TAPS - 1,) if self.kind == "medusa" else tuple(range(TAPS))


class TorchDraftHead(nn.Module, ABC):
    """A draft head of either kind.

    `vocabulary (R,)` holds the tokens that it can propose, ascending. `output (R, C)` are the
    target's rows for them. `norm (C,)` is the gain of the target's last norm.
    """

    kinds: ClassVar[dict[str, type["TorchDraftHead"]]] = {}
    vocabulary: Tensor
    output: Tensor
    norm: Tensor

    def __init_subclass__(cls, kind: str) -> None:
        TorchDraftHead.kinds[kind] = cls

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("vocabulary", torch.zeros(config.rows, dtype=torch.int64))
        self.register_buffer("output", torch.zeros(config.rows, config.hidden))
        self.register_buffer("norm", torch.ones(config.hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states `(..., C)` behind the target's last norm."""
        return F.rms_norm(hidden, (self.config.hidden,), self.norm, self.config.eps)

    def target(self, last: Tensor) -> Tensor:
        """The target's own logits `(..., R)` for the vocabulary, from its last hidden state
        `(..., C)`, before any softcap."""
        return self.normed(last) @ self.output.T

    def capped(self, logits: Tensor) -> Tensor:
        """Logits with the target's softcap."""
        cap = self.config.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @abstractmethod
    def teach(self, features: Tensor, embedded: Tensor) -> list[Tensor]:
        """Logits of all drafted tokens, for drafts from every position of some windows of text.

        `features (B, n, 3, C)` are hidden states, `embedded (B, n, C)` the embeddings of the same
        tokens. Item k of the result is `(B, n - 1 - k, R)`; at position i it predicts the token at
        i + 2 + k. The target itself chooses the token at i + 1 before a draft begins.
        """

    def rescale(self, scale: float) -> None:
        """Let it read hidden states with another factor. It computes the same as before: a norm may
        divide the factor out."""
        self.config = self.config.model_copy(update={"scale": scale})

    def turn(self, stream: Rotation, back: bool = False) -> None:
        """Let it read turned channels in place of plain ones, or the other way `back`. It computes
        the same as before. NotImplementedError for a kind that cannot."""
        raise NotImplementedError

    @torch.no_grad()
    def round(self) -> None:
        """Round all weights to what a package holds: matrices to the format of the config, and
        gains and biases to fp16."""
        form = parse_format(self.config.weights)
        for tensor in self.state_dict().values():
            if tensor.ndim == 2:
                tensor.copy_(torch.from_numpy(form.encode(tensor.numpy()).decode()))
            elif tensor.is_floating_point():
                tensor.copy_(tensor.half())

    def save(self, path: Path, without: frozenset[str] = frozenset()) -> None:
        """Write the weights in fp16, but for the tensors `without`. Weights that are already
        rounded keep their values."""
        tensors = {
            name: (tensor.half() if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in self.state_dict().items()
            if name not in without
        }
        with disk_errors(path), replacing(path) as temporary:
            save_file(tensors, temporary, {"cetane": self.config.model_dump_json()})


def make_draft_head(config: DraftHeadConfig) -> TorchDraftHead:
    """An untrained draft head, always with the same random weights."""
    torch.manual_seed(0)
    return TorchDraftHead.kinds[config.kind](config)


def load_draft_head(path: Path, without: frozenset[str] = frozenset()) -> TorchDraftHead:
    """A draft head from a file of `TorchDraftHead.save`. Raises CetaneError for another file.

    The file may lack the tensors `without`, which then stay on torch's meta device.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if "cetane" not in metadata:
                raise ValueError("its metadata has no cetane, which describes a draft head")
            about = parse_json(metadata["cetane"], "its metadata")
            config = validated(DraftHeadConfig, about, "its metadata")
            with torch.device("meta"):
                draft_head = TorchDraftHead.kinds[config.kind](config)
            wanted = {name: tuple(t.shape) for name, t in draft_head.state_dict().items()}
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            wanted = {n: shape for n, shape in wanted.items() if n in shapes or n not in without}
            if wanted != shapes:
                raise ValueError("tensors of other shapes")
            tensors = {name: file.get_tensor(name) for name in wanted}
            check_tensors(tensors)
            floats = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
            draft_head.load_state_dict(floats, assign=True, strict=not without)
    except (CetaneError, OSError, SafetensorError, KeyError, ValueError) as error:
        raise CetaneError(f"{path}: not a draft head: {' '.join(str(error).split())}") from error
    return draft_head.eval().requires_grad_(False)


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a draft head could run with these tensors."""
    for name, tensor in tensors.items():
        if name == "vocabulary":
            if tensor.dtype != torch.int64 or (tensor.diff() <= 0).any() or tensor[0] < 0:
                raise ValueError("its vocabulary does not hold ascending tokens")
        elif tensor.dtype not in (torch.float16, torch.float32) or not tensor.isfinite().all():
            raise ValueError(f"{name} does not hold finite numbers")


class Medusa(TorchDraftHead, kind="medusa"):
    """One residual layer for each drafted token, on the target's last hidden state."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            nn.Linear(config.hidden, config.hidden) for _ in range(config.steps)
        )
        for layer in self.layers:  # untrained, every layer repeats the target's next token
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def hidden(self, last: Tensor, step: int) -> Tensor:
        """What the layer of a drafted token makes of the last hidden state; both `(..., C)`."""
        hidden = self.normed(last)
        made: Tensor = hidden + F.silu(self.layers[step](hidden))
        return made

    def logits(self, last: Tensor, step: int) -> Tensor:
        """Logits `(..., R)` of a drafted token, from the last hidden state `(..., C)`."""
        return self.hidden(last, step) @ self.output.T

    def teach(self, features: Tensor, embedded: Tensor) -> list[Tensor]:
        last = features[:, :, -1]
        return [self.logits(last[:, : -1 - step], step) for step in range(self.config.steps)]


KeysValues = tuple[Tensor, Tensor]
"""Keys and values, each `(B, H, n, D)`."""


class Eagle3(TorchDraftHead, kind="eagle3"):
    """One decoder layer, which reads three hidden states and the token after them."""

    WIDTH = 64
    """Channels of an attention head."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__(config)
        hidden = config.hidden
        self.attention_heads = max(1, hidden // self.WIDTH)
        inner = self.attention_heads * self.WIDTH
        self.fuse = nn.Linear(TAPS * hidden, hidden, bias=False)
        self.norm_features = nn.RMSNorm(hidden, config.eps)
        self.norm_embedded = nn.RMSNorm(hidden, config.eps)
        self.norm_mlp = nn.RMSNorm(hidden, config.eps)
        self.norm_output = nn.RMSNorm(hidden, config.eps)
        self.qkv = nn.Linear(2 * hidden, 3 * inner, bias=False)
        self.out = nn.Linear(inner, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 6 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    @torch.no_grad()
    def rescale(self, scale: float) -> None:
        self.fuse.weight *= self.config.scale / scale
        super().rescale(scale)

    @torch.no_grad()
    def turn(self, stream: Rotation, back: bool = False) -> None:
        """Only the hidden states and embeddings are turned; its own channels stay as they are."""
        hidden = self.config.hidden
        for tap in range(TAPS):
            columns = self.fuse.weight[:, tap * hidden : (tap + 1) * hidden]
            columns.copy_(stream(columns, back=back))
        columns = self.qkv.weight[:, :hidden]  # take the gains, which belong to plain channels
        columns.copy_(stream(columns * self.norm_embedded.weight, back=back))
        self.norm_embedded.weight.fill_(1)
        self.config = self.config.model_copy(update={"turned": not back})

    def project(self, feature: Tensor, embedded: Tensor) -> tuple[Tensor, KeysValues]:
        """Queries, keys and values `(B, H, n, D)` of inputs `(B, n, C)`."""
        x = torch.cat([self.norm_embedded(embedded), self.norm_features(feature)], -1)
        shape = (*x.shape[:2], 3, self.attention_heads, self.WIDTH)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4)
        return apply_rotary(q), (apply_rotary(k), v)

    def finish(self, feature: Tensor, q: Tensor, past: KeysValues, mask: Tensor | None) -> Tensor:
        """The layer's output `(B, n, C)`, which is the feature of the next token.

        `feature (B, n, C)`, queries `(B, H, n, D)`, `past` of m tokens, `mask` bool `(n, m)`.
        """
        mixed = F.scaled_dot_product_attention(q, *past, attn_mask=mask)
        h = feature + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_mlp(h)).chunk(2, -1)
        made: Tensor = h + self.down(F.silu(gate) * up)
        return made

    def logits(self, h: Tensor) -> Tensor:
        """Logits `(..., R)` of the next token, from the layer's output `(..., C)`."""
        return self.norm_output(h) @ self.output.T

    def teach(self, features: Tensor, embedded: Tensor) -> list[Tensor]:
        """Step k at position i belongs to the draft that began at position i - k.

        It sees the target's features up to position i - k, and the earlier steps' output after it.
        """
        count = features.shape[1] - 1
        feature = self.fuse(features[:, :count].flatten(2))
        after = embedded[:, 1:]
        places = torch.arange(count, device=features.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        made = []
        for step in range(self.config.steps):
            q, (k, v) = self.project(feature, after)
            keys, values = [*keys, k], [*values, v]
            behind = places[:, None] - places
            seen = [behind >= step] + [behind == step - back for back in range(1, step + 1)]
            mask = torch.cat(seen, 1)
            mask[:, 0] |= ~mask.any(1)  # positions before the first draft; never used
            h = self.finish(feature, q, (torch.cat(keys, 2), torch.cat(values, 2)), mask)
            made.append(self.logits(h)[:, step:])
            feature = F.pad(h[:, :-1], (0, 0, 1, 0))  # the output at i is the feature of i + 1
        return made


def apply_rotary(x: Tensor) -> Tensor:
    """Rotary positions for `x (B, H, n, D)`."""
    half = x.shape[-1] // 2
    frequencies = THETA ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)
