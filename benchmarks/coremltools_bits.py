"""coremltools' own ways to make few bits of a transformers model's linear layers.

They get the text that cetane's methods get, and their own defaults where nothing is said here. What
they make of the layers comes back as plain values, by the names of a checkpoint. A weight that is
no linear layer's, as of some experts, is rounded as its format says.

- `coreml-kmeans`: `optimize.coreml.palettize_weights`, exact k-means of each group of outputs.
- `coreml-skm`: `optimize.torch.palettization.SKMPalettizer`, weighted by squared gradients.
- `coreml-gptq`: `optimize.torch.layerwise_compression`'s GPTQ, int4 per output channel. Its
  algorithm is called layer by layer in the order of the computation, as its compressor does. The
  compressor's own loop cannot call the layers of present transformers.
"""

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from coremltools.optimize._utils import lut_to_dense
from coremltools.optimize.coreml._quantization_passes import palettize_weights
from coremltools.optimize.torch.layerwise_compression.algorithms import GPTQ, ModuleGPTQConfig
from coremltools.optimize.torch.palettization import SKMPalettizer, SKMPalettizerConfig
from torch import Tensor, nn

from cetane.checkpoint import Checkpoint
from cetane.compress import Palette, Selection, parse_format
from cetane.fitting.fit import Fitter
from cetane.fitting.seats import linear_layers
from cetane.gates.compressions import Judge
from cetane.planner import Planner

METHODS = ("coreml-kmeans", "coreml-skm", "coreml-gptq")
GPTQ_FORMAT = "int4-per-channel"
"""The only form of `coreml-gptq` that the ANE runs and Core ML has."""
BATCH = 4
"""Sequences of a call."""


class Theirs:
    """One model, whose weights `names` coremltools makes smaller."""

    def __init__(
        self, checkpoint: Checkpoint, planner: Planner, names: set[str], work: Path
    ) -> None:
        fitter = Fitter(checkpoint, planner, lambda *_: None)
        self.text = fitter.text()
        self.sensitivities = work / f"skm-{checkpoint.fingerprint[:16]}.pt"
        model = type(fitter.model)(fitter.model.config).eval()
        model.load_state_dict(fitter.model.state_dict())
        model.config.use_cache = False
        self.model, self.paths = model, fitter.names
        self.layers = linear_layers(model, fitter.names, names)

    def made(self, method: str, form: str) -> dict[str, Tensor]:
        """The weights as a method leaves them, by the checkpoint's names."""
        return {"coreml-kmeans": self.kmeans, "coreml-skm": self.skm, "coreml-gptq": self.gptq}[
            method
        ](form)

    def kmeans(self, form: str) -> dict[str, Tensor]:
        bits, group = palette(form)
        made = {}
        for name, layer in self.layers.items():
            weight = layer.get_parameter("weight").detach().half().float().numpy()
            found = palettize_weights.blockwise_compress(weight, "KMEANS", bits, [group, 0])
            made[name] = torch.from_numpy(lut_to_dense(found.indices, found.lut, None))
        return made

    def skm(self, form: str) -> dict[str, Tensor]:
        bits, group = palette(form)
        model = copy.deepcopy(self.model)
        layers = linear_layers(model, self.paths, self.layers)
        paths = {module: path for path, module in model.named_modules()}
        for layer in layers.values():
            layer.get_parameter("weight").requires_grad_(True)
        own = {"n_bits": bits, "granularity": "per_grouped_channel", "group_size": group}
        config = SKMPalettizerConfig.from_dict(
            {
                "module_name_configs": {paths[layer]: own for layer in layers.values()},
                "calibration_nsamples": len(self.text) // BATCH,
            }
        )
        known = {"sensitivity_path": str(self.sensitivities)}
        skm = SKMPalettizer(model, config)
        if not self.sensitivities.exists():
            skm.compute_sensitivity(self.text.split(BATCH), next_token_loss, **known)
        model = skm.compress(self.text.split(BATCH), next_token_loss, num_kmeans_workers=1, **known)
        made = linear_layers(model, self.paths, self.layers)
        return {name: layer.get_parameter("weight").detach() for name, layer in made.items()}

    @torch.no_grad()
    def gptq(self, form: str) -> dict[str, Tensor]:
        if form != GPTQ_FORMAT:
            raise SystemExit(f"coreml-gptq makes {GPTQ_FORMAT}, not {form}")
        config = ModuleGPTQConfig(weight_dtype="uint4", use_activation_order_heuristic=True)
        model = copy.deepcopy(self.model)
        layers = linear_layers(model, self.paths, self.layers)
        done: set[nn.Module] = set()
        for layer in layers.values():
            layer.register_forward_pre_hook(partial(compress_now, config, done))
        model(self.text, use_cache=False, logits_to_keep=1)
        return {name: layer.get_parameter("weight").detach() for name, layer in layers.items()}


def compress_now(
    config: ModuleGPTQConfig, done: set[nn.Module], layer: nn.Linear, inputs: tuple[Tensor]
) -> None:
    """Round a layer that is about to compute for the first time, by its inputs."""
    if layer in done:
        return
    done.add(layer)
    algorithm = GPTQ(layer, config)
    rows = inputs[0].reshape(1, -1, inputs[0].shape[-1])
    algorithm.add_batch(rows, nn.functional.linear(rows, layer.weight, layer.bias))
    algorithm.compress()
    algorithm.cleanup()


def palette(form: str) -> tuple[int, int]:
    """Bits and group of a format of palettes."""
    made = parse_format(form)
    assert isinstance(made, Palette) and made.group is not None
    return made.bits, made.group


def next_token_loss(model: Any, tokens: Tensor) -> Tensor:
    """What the Fisher information is of."""
    logits = model(tokens, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Values:
    """Tensors by name, as a source of weights."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name][start:stop]


def put(judge: Judge, tensors: Mapping[str, Tensor], rest: Selection) -> None:
    """Give a judge's model these tensors, and all others in the formats of a selection."""
    judge.compress(rest)
    for parameter in judge.parameters:
        if parameter.weight.name in tensors:
            value = parameter.weight.read(Values(tensors)).to(torch.float16)
            parameter.block.get_parameter(parameter.path).data.copy_(value)
            parameter.stored = "coremltools", str(id(tensors))
