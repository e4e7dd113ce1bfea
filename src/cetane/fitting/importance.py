"""How much errors of a layer's outputs change what the model answers.

The model wrote the text itself, so its next tokens are samples of its own answers. The gradients of
their losses, multiplied with themselves, give the Fisher information on average. This is the second
derivative of the KL from what the model answers.

It is too large to keep. Of each layer two factors stand for it, as in K-FAC (arXiv 1503.05671):

- products of the inputs, in which important tokens count more (GuidedQuant, arXiv 2505.07004);
- products of the outputs' gradients (YAQA, arXiv 2505.22988).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cetane.files import Progress, keep_tensors, kept_tensors
from cetane.fitting.losses import in_pieces
from cetane.gates.reference import decoder_of, logits_of
from cetane.hardware.memory import give_back

Matrix = npt.NDArray[np.float32]

EVEN = 0.5
"""The part of a token's importance that all tokens share. Without it few tokens decide, and other
texts lose: on held-out text, the errors of half the matrices grew by up to 15 %."""
LARGEST = 4096
"""The most outputs of a layer whose products are kept (64 MB). With more, all count alike. With
1,024 four bits of SmolLM2 lost: docs/reference/low-bits.md."""
ROWS = 512
"""Tokens of a pass, whose activations take most of the memory."""
PIECE = 8192
"""Rows of a product that are computed at a time."""
PASSES = 8
"""Passes, or rounded matrices, between two times that freed memory is given back. More often costs
time, since the system clears every page that it gives again."""

UNKNOWN = -100
"""The token after the last one, which has no loss."""
TEXT, TOKENS, OUTPUTS, SCALE = "text", "/tokens", "/outputs", "/scale"
"""The name of the text in a file, and the suffixes of a layer's tensors."""


@dataclass(frozen=True)
class Importance:
    """How much the errors of one layer count, by token and by output."""

    tokens: Tensor
    """How much an error at each token counts, `(N,)`, 1 on average."""
    outputs: Tensor | None
    """How errors of the outputs count together, fp32 `(O, O)`, its trace O; None for too many."""
    scale: float
    """The mean square of an output's gradient."""

    def products(self, inputs: Tensor) -> Matrix:
        """The mean product of inputs `(N, I)` with themselves, weighted by token.

        It is not weighted where the layer reads other rows than the tokens.
        """
        return mean_product(inputs, self.tokens if len(self.tokens) == len(inputs) else None)

    def of_rows(self, rows: Tensor | slice) -> Importance:
        """The importance of some rows of the weight, as a layer of their own."""
        return replace(self, outputs=None if self.outputs is None else self.outputs[rows][:, rows])

    def harm(self, off: Matrix, products: Matrix) -> float:
        """The KL, in nats a token, that errors `(O, I)` of the weight are predicted to cost."""
        together = off if self.outputs is None else self.outputs.numpy() @ off
        return self.scale / 2 * float(np.vdot(off @ products, together))


def mean_product(rows: Tensor, counts: Tensor | None = None) -> Matrix:
    """The mean product of rows `(N, I)` with themselves, fp32 `(I, I)`; `counts (N,)` weights rows.

    All weighted rows in fp32 are as large as the model, so they are made in pieces.
    """
    roots = None if counts is None else counts.sqrt().numpy()

    def piece(part: slice) -> Matrix:
        own = rows[part].float().numpy()
        # torch's threads would wait in a loop afterwards
        return own if roots is None else own * roots[part, None]

    pieces = (piece(slice(start, start + PIECE)) for start in range(0, len(rows), PIECE))
    return mean_of(pieces, rows.shape[1], len(rows))


def mean_of(pieces: Iterable[Matrix], size: int, count: int) -> Matrix:
    """The mean product of `count` rows with themselves, fp32 `(size, size)`. Rows that are in no
    piece `(n, size)` have zeros.

    numpy computes one half of such a symmetric product, torch both.
    """
    total = np.zeros((size, size), np.float32)
    for rows in pieces:
        total += rows.T @ rows
    total /= count
    return total


class Collector:
    """Gathers the importance of one layer from its outputs' gradients."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        """`name` is the checkpoint's."""
        self.name, self.layer = name, layer
        self.outputs = 0
        self.sum: Tensor | None = None
        self.squares: list[Tensor] = []

    def watch(self, _layer: nn.Module, _given: Any, outputs: Tensor) -> None:
        """A forward hook. Outputs that depend on no token have no gradient: ZAYA projects zeros
        too, for the token before the first."""
        if outputs.requires_grad:
            outputs.register_hook(self.add)

    def add(self, gradient: Tensor) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])
        self.squares.append(torch.linalg.vector_norm(rows.float(), dim=1).square().cpu())
        self.outputs = rows.shape[1]
        if self.outputs > LARGEST:
            return
        if self.sum is None:
            self.sum = torch.zeros(self.outputs, self.outputs)
        # in the gradient's own dtype, bfloat16: each product is rounded, their sum is not.
        # numpy took six times as long, since torch's threads wait for work in a loop
        self.sum += (rows.T @ rows).cpu()

    def importance(self) -> Importance:
        squares = torch.cat(self.squares)
        tokens = EVEN + (1 - EVEN) * squares / squares.mean().clamp(min=1e-30)
        scale = float(squares.mean() / self.outputs)  # in fp32, as it is kept
        if self.sum is None:
            return Importance(tokens, None, scale)
        # in place: of SmolLM2's layers together, a copy would be 0.7 GB
        self.sum /= self.sum.diagonal().mean().clamp(min=1e-30)
        return Importance(tokens, self.sum, scale)

    def made(self) -> dict[str, Importance]:
        """The importance by name; empty if no token reached the layer."""
        return {self.name: self.importance()} if self.squares else {}


def importance(
    model: Any, collectors: Sequence[Collector], text: Tensor, progress: Progress
) -> dict[str, Importance]:
    """The importance of a transformers model's layers, by name, for text that it wrote.

    `text` is int64 `(B, T)`. Layers that no token reaches are left out.
    """
    parts = text.split(max(1, ROWS // text.shape[1]))
    with ExitStack() as stack, torch.enable_grad():
        embedding = model.get_input_embeddings().register_forward_hook(with_gradient)
        stack.callback(embedding.remove)
        for collector in collectors:
            stack.callback(collector.layer.register_forward_hook(collector.watch).remove)
        for number, part in enumerate(parts):
            progress("what errors change", number, len(parts))
            loss_of(model, part.to(model.device)).backward()
            # kept arrays lie between freed ones, whose pages stay: 9 GB in 144 passes
            if number % PASSES == PASSES - 1:
                give_back()
    progress("what errors change", len(parts), len(parts))
    return {name: one for own in collectors for name, one in own.made().items()}


def with_gradient(_module: nn.Module, _inputs: Any, hidden: Tensor) -> Tensor:
    """A forward hook that asks for gradients of all later results, though no weight learns."""
    return hidden.requires_grad_(True)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """The sum of the losses of all next tokens. The head computes in pieces too: all logits of 512
    tokens of Gemma's 262,144 take 0.5 GB, and as much for each step of their gradients."""
    hidden = decoder_of(model)(tokens, use_cache=False).last_hidden_state
    targets = nn.functional.pad(tokens[:, 1:], (0, 1), value=UNKNOWN).flatten()

    def of_rows(own: Tensor, rows: slice) -> Tensor:
        logits = logits_of(model, own)
        return nn.functional.cross_entropy(
            logits, targets[rows], ignore_index=UNKNOWN, reduction="sum"
        )

    return in_pieces(hidden.flatten(0, 1), of_rows)


def keep_importance(path: Path, text: Tensor, importances: Mapping[str, Importance]) -> None:
    """Keep a text and the importance of layers there."""
    tensors = {TEXT: text}
    for name, one in importances.items():
        tensors |= {f"{name}{TOKENS}": one.tokens, f"{name}{SCALE}": torch.tensor([one.scale])}
        if one.outputs is not None:
            tensors[f"{name}{OUTPUTS}"] = one.outputs
    keep_tensors(path, tensors)


def load_importance(path: Path) -> tuple[Tensor, dict[str, Importance]] | None:
    """What `keep_importance` wrote; None if it is missing or has changed."""
    tensors = kept_tensors(path)
    if tensors is None:
        return None
    names = [name.removesuffix(TOKENS) for name in tensors if name.endswith(TOKENS)]
    return tensors[TEXT], {
        name: Importance(
            tensors[name + TOKENS], tensors.get(name + OUTPUTS), float(tensors[name + SCALE])
        )
        for name in names
    }
