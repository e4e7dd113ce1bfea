"""Windows of text with the target's hidden states and choices: the data that draft heads learn."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cetane.engine.engine import Engine
from cetane.files import Progress, disk_errors, replacing
from cetane.speculate.draft_heads.features import Taps, tapped_shards

HELD_OUT = 10
"""One window in this number is kept out of training."""
TOGETHER = 32
"""Windows that a transformers model reads at once."""


@dataclass(frozen=True)
class Windows:
    """Windows of text: `tokens (W, n)`, with the target's `features (W, n, 3, C)`, fp16.

    `choices (W, n)` are the target's greedy choices after every token.
    """

    features: Tensor
    tokens: Tensor
    choices: Tensor

    def part(self, indices: Sequence[int]) -> "Windows":
        at = list(indices)
        return Windows(self.features[at], self.tokens[at], self.choices[at])

    def sample(self, count: int) -> Tensor:
        """The features of some `count` windows, spread over the whole text."""
        return self.features[:: max(1, len(self) // count)]

    def __len__(self) -> int:
        return len(self.tokens)


@torch.no_grad()
def windows_of_model(model: Any, layers: Sequence[int], tokens: Tensor) -> Windows:
    """Windows with the features of a transformers model, on the model's device.

    They are those of the model itself, not of a bundle. `layers` are the three layers whose output
    is read; `tokens` is int64 `(W, n)`. Features take 6 bytes for each token and channel.
    """
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    shape = (*tokens.shape, len(layers), model.config.hidden_size)
    features = torch.empty(shape, dtype=torch.float16, device=model.device)
    tokens = tokens.to(model.device)
    choices, places = torch.empty_like(tokens), model.model.layers
    hooks = [places[n].register_forward_hook(keep(n)) for n in dict.fromkeys(layers)]
    try:
        for first in range(0, len(tokens), TOGETHER):
            rows = slice(first, first + TOGETHER)
            choices[rows] = model(tokens[rows], use_cache=False).logits.argmax(-1)
            features[rows] = torch.stack([seen[layer] for layer in layers], 2)
    finally:
        for hook in hooks:
            hook.remove()
    return Windows(features, tokens, choices)


def collect(
    engine: Engine, ids: Sequence[int], length: int, progress: Progress, folder: Path | None = None
) -> Windows:
    """Run a text through an engine, in windows of `length` tokens, each in a new session.

    `folder` keeps the result of every window in a file named by the hash of its tokens. So a
    stopped collection continues, and the next draft head reads it. A folder is for one bundle.
    """
    starts = range(0, len(ids) - length + 1, length)
    shape = (length, len(tapped_shards(engine.plan)), engine.plan.hidden)
    tokens = torch.tensor([list(ids[start : start + length]) for start in starts])
    features = torch.empty((len(starts), *shape), dtype=torch.float16)
    choices = torch.empty_like(tokens)
    for index, window in enumerate(tokens):
        progress("hidden states", index, len(starts))
        path = folder and folder / f"{hashlib.sha256(window.numpy().tobytes()).hexdigest()}.st"
        result = stored_window(path, shape) if path else None
        if result is None:
            result = computed_window(engine, window.tolist())
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                with disk_errors(path), replacing(path) as temporary:
                    save_file(result, temporary)
        features[index], choices[index] = result["features"], result["choices"]
    return Windows(features, tokens, choices)


def computed_window(engine: Engine, window: Sequence[int]) -> dict[str, Tensor]:
    """Features and choices of one window."""
    taps = Taps(engine.plan, tapped_shards(engine.plan))
    session = engine.session(watch=[taps.see], whole=True)
    logits = session.feed(window, "all")
    assert logits is not None
    return {
        "features": torch.from_numpy(taps.take(session.position)).half().contiguous(),
        "choices": torch.from_numpy(logits.argmax(-1)),
    }


def stored_window(path: Path, shape: tuple[int, ...]) -> dict[str, Tensor] | None:
    """The stored result of a window; None if the file is missing or damaged."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        return None
    wanted = {"features": shape, "choices": shape[:1]}
    return tensors if {name: tuple(t.shape) for name, t in tensors.items()} == wanted else None


def split(windows: Windows) -> tuple[Windows, Windows]:
    """The windows for training, and the held-out ones; both are spread over the whole text."""
    held = [i for i in range(len(windows)) if i % HELD_OUT == HELD_OUT - 1] or [len(windows) - 1]
    return windows.part([i for i in range(len(windows)) if i not in held]), windows.part(held)
