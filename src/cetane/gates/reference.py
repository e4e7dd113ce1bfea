"""The truth: the Hugging Face model of a checkpoint, in fp32."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cetane.checkpoint import Checkpoint
from cetane.engine.backend import Array
from cetane.errors import CetaneError
from cetane.families import Truth, parse_config

RESIDENT = 4 << 30
"""Bytes of fp32 weights up to which a model stays in memory between runs."""


@dataclass(frozen=True)
class Observed:
    """What a model computes for one sequence: logits `(n, V)`, and the tensors `(n, C)` that were
    asked for."""

    logits: Array
    tensors: dict[Truth, Array]


class Stop(Exception):
    """Ends a pass when everything that was asked for is there."""


class Lender:
    """Gives a module its own tensors for the time of a forward pass, or for good."""

    def __init__(self, checkpoint: Checkpoint, names: dict[str, str], resident: bool) -> None:
        self.checkpoint, self.names, self.resident = checkpoint, names, resident
        self.lent = False

    def lend(self, module: nn.Module, _: Any) -> None:
        if self.lent:
            return
        for name, tensor in own_tensors(module).items():
            tensor.data = self.checkpoint.read(self.names[name]).float()
        self.lent = True

    def take_back(self, module: nn.Module, *_: Any) -> None:
        for tensor in own_tensors(module).values():
            tensor.data = torch.empty(0)
        self.lent = False


class Reference:
    """A transformers model that takes the checkpoint's tensors when a module needs them.

    A large model is never in memory as a whole: a module's weights come before its forward pass
    and go after it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        config = parse_config(checkpoint.config)
        with no_init_weights():  # pages that nobody writes take no memory
            self.model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
            ).eval()
        self.model.requires_grad_(False)
        size = sum(4 * parameter.numel() for parameter in self.model.parameters())
        for path, module in self.model.named_modules():
            prefix = f"{path}." if path else ""
            names = {}
            for name, tensor in own_tensors(module).items():
                stored = prefix + name
                if stored == "lm_head.weight" and config.tie_word_embeddings:
                    stored = "model.embed_tokens.weight"
                if tuple(checkpoint.shape(stored)) != tuple(tensor.shape):
                    shape = tuple(checkpoint.shape(stored))
                    raise CetaneError(f"{stored}: shape {shape} does not fit the config")
                names[name] = stored
            if names:
                lender = Lender(checkpoint, names, size <= RESIDENT)
                module.register_forward_pre_hook(lender.lend)
                if not lender.resident:
                    module.register_forward_hook(lender.take_back)

    @torch.inference_mode()
    def run(
        self, sequences: Sequence[Sequence[int]], wanted: Sequence[Truth] = ()
    ) -> list[Observed]:
        """One pass over some sequences, side by side; shorter ones are padded on the right, where
        a causal model does not look."""
        length = max(map(len, sequences))
        batch = torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens in sequences])
        found: dict[Truth, Tensor] = {}
        with self._keeping(wanted, found):
            logits = self.model(batch, use_cache=False).logits
        return [
            Observed(
                logits[row, : len(tokens)].numpy(),
                {truth: tensor[row, : len(tokens)].numpy() for truth, tensor in found.items()},
            )
            for row, tokens in enumerate(sequences)
        ]

    @torch.inference_mode()
    def tensors(self, tokens: Sequence[int], wanted: Sequence[Truth]) -> dict[Truth, Array]:
        """Only some tensors of a sequence, `(n, C)`; the pass ends with the last of them."""
        found: dict[Truth, Tensor] = {}
        with self._keeping(wanted, found, stop=True), suppress(Stop):
            self.model(torch.tensor([list(tokens)]), use_cache=False)
        return {truth: tensor[0].numpy() for truth, tensor in found.items()}

    def agrees(self, prompt: Sequence[int], generated: Sequence[int]) -> Array:
        """`choices` of the model itself."""
        return choices(self.run([[*prompt, *generated]])[0].logits, prompt, generated)

    @torch.inference_mode()
    def head(self, hidden: Array) -> Array:
        """Logits `(n, V)` for hidden states `(n, C)` after the last layer."""
        logits: Tensor = self.model.lm_head(self.model.model.norm(torch.from_numpy(hidden)))
        return logits.numpy()

    @contextmanager
    def _keeping(
        self, wanted: Sequence[Truth], found: dict[Truth, Tensor], stop: bool = False
    ) -> Iterator[None]:
        """Copies what was asked for into `found` while the model runs."""

        def keep(path: str) -> Any:
            def hook(_: Any, __: Any, output: Any) -> None:
                outputs = output if isinstance(output, tuple) else (output,)
                for truth in wanted:
                    if truth[0] == path:
                        found[truth] = outputs[truth[1]].clone()
                if stop and len(found) == len(wanted):
                    raise Stop

            return hook

        paths = dict.fromkeys(path for path, _ in wanted)
        hooks = [self.model.get_submodule(p).register_forward_hook(keep(p)) for p in paths]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and stored buffers of a module itself, not of its children."""
    buffers = module.named_buffers(recurse=False)
    passing = module._non_persistent_buffers_set
    return dict(module.named_parameters(recurse=False)) | {
        name: tensor for name, tensor in buffers if name not in passing
    }


def choices(logits: Array, prompt: Sequence[int], generated: Sequence[int]) -> Array:
    """For every generated token, whether it is the greedy choice at its place.

    `logits (n, V)` are a model's for the prompt and what was generated. All true means that greedy
    decoding of that model gives the same tokens, since every choice is made after the same tokens.
    """
    own = logits[len(prompt) - 1 : -1].argmax(axis=1)
    return np.asarray(own == np.asarray(generated))
