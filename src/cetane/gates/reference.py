"""The truth: the Hugging Face model of a checkpoint, in fp32."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cetane.checkpoint import Checkpoint
from cetane.engine.backend import Array
from cetane.errors import CetaneError
from cetane.families import parse_config


@dataclass(frozen=True)
class Truth:
    """What the model computes for one sequence: logits `(n, V)`, and hidden states `(n, C)` after
    the modules that were asked for."""

    logits: Array
    hidden: dict[str, Array]


class Reference:
    """A transformers model that holds the checkpoint's own tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        config = parse_config(checkpoint.config)
        with no_init_weights():
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        for name, parameter in self.model.named_parameters():
            if name not in checkpoint and name in tied:
                continue
            tensor = checkpoint.read(name)
            if tensor.shape != parameter.shape:
                raise CetaneError(f"{name}: shape {tuple(tensor.shape)} does not fit the config")
            parameter.data.copy_(tensor)
            parameter.requires_grad_(False)
        self.model.tie_weights()

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], modules: Sequence[str] = ()) -> Truth:
        """One pass over a sequence; `modules` are paths as `model.layers.3`."""
        hidden: dict[str, Array] = {}

        def keep(path: str) -> Any:
            def hook(_: Any, __: Any, output: Any) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                hidden[path] = tensor[0].numpy().copy()

            return hook

        hooks = [self.model.get_submodule(p).register_forward_hook(keep(p)) for p in modules]
        try:
            logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return Truth(logits.numpy(), hidden)

    def agrees(self, prompt: Sequence[int], generated: Sequence[int]) -> Array:
        """For every generated token, whether it is the model's own greedy choice at its place.

        All true means that greedy decoding of the model gives the same tokens, since every choice
        is made after the same tokens.
        """
        logits = self.run([*prompt, *generated]).logits
        own = logits[len(prompt) - 1 : -1].argmax(axis=1)
        return np.asarray(own == np.asarray(generated))
