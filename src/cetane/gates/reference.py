"""The reference: the Hugging Face model of a checkpoint, in fp32. It is the truth of all gates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cetane.checkpoint import Checkpoint, RotatedCheckpoint, Rotation, streamed_part
from cetane.engine.backend import Array
from cetane.errors import CetaneError
from cetane.families import Truth, parse_config
from cetane.gates.bounds import Bounds, Held
from cetane.gates.experts import Choices, Routing
from cetane.gates.on_disk import OnDisk
from cetane.gates.streaming import let_stream
from cetane.gates.transformers_model import (
    Lender,
    by_parent,
    config_of,
    load_by_transformers,
    own_tensors,
    runs,
    stored_names,
    unfilled,
)
from cetane.hardware.quiet import quiet_transformers

RESIDENT = 4 << 30
"""The most bytes of fp32 weights with which a model stays in memory between runs."""


@dataclass(frozen=True)
class Observed:
    """A model's results on one sequence: logits `(n, V)`, and the requested tensors `(n, C)`."""

    logits: Array
    tensors: dict[Truth, Array]
    margins: dict[int, Array] = field(default_factory=dict)
    """The tokens' margins `(n,)`, by the number of a layer with experts (`Routing`). Where one is
    smaller than rounding errors, the model itself is undecided."""
    experts: dict[int, Array] = field(default_factory=dict)
    """The experts `(n, chosen)` that each token's router chooses, by layer, as in `Chosen`."""
    far: dict[int, Array] = field(default_factory=dict)
    """Those that are far below each, bool `(n, chosen, E)`, of layers that have some."""

    def scaled(self, scale: float) -> "Observed":
        """The same results, with tensors `scale` times as large."""
        if scale == 1:
            return self
        return replace(self, tensors={t: rows * scale for t, rows in self.tensors.items()})


@dataclass(frozen=True)
class Asked:
    """A sequence for the model, and what is asked of it."""

    tokens: Sequence[int]
    start: int
    """The position of the first token."""
    scale: float
    """The factor on its embeddings."""
    kept: Sequence[int]
    """The numbers of the tokens whose logits are wanted, ascending."""
    choices: Choices
    """A port's experts of some tokens."""


class Stop(BaseException):
    """Ends a model's pass when all requested tensors are there."""


class Reference:
    """The transformers model of a checkpoint.

    transformers' own loader reads the weights if it knows the checkpoint's files and the model fits
    in memory (`loader` says so). So the gates see errors of cetane's own reader. For the same
    reason, transformers reads the config (`config_of`), and peft merges adapters if it is
    installed. Else each module takes its weights from the checkpoint when it runs. If the model is
    larger than `RESIDENT`, the module then gives them back, so a large model is never in memory as
    a whole.
    """

    def __init__(self, checkpoint: Checkpoint, own: bool = False) -> None:
        """With `own`, cetane's reader gives the checkpoint's tensors as they are, perhaps turned
        (`RotatedCheckpoint`) or with heads in another order (`StreamedCheckpoint`).

        Without it, the model has the original tensors. It gives and takes the residual stream of a
        turned checkpoint in the turned basis. Heads that stream do so in both cases, but for
        `seeing_all`.
        """
        self.stream: Rotation | None = None
        streamed = streamed_part(checkpoint)
        if isinstance(checkpoint, RotatedCheckpoint) and not own:
            self.stream, checkpoint = checkpoint.stream, checkpoint.base
        if streamed is not None and not own:
            checkpoint = streamed.base
        config = parse_config(checkpoint.config) if own else config_of(checkpoint)
        self.source = checkpoint.source
        with runs(self.source):
            empty = unfilled(config)
        size = sum(4 * parameter.numel() for parameter in empty.parameters())
        self.names = stored_names(empty, config)
        """The checkpoint's names of each module's own tensors, by module path."""
        self.resident = size <= RESIDENT
        """Whether the model stays in memory between runs."""
        by_transformers = self.resident and not own
        loaded = load_by_transformers(checkpoint, config, self.names) if by_transformers else None
        readers = "transformers and peft" if checkpoint.merged else "transformers"
        self.loader = readers if loaded is not None else "cetane"
        self.model: Any = empty if loaded is None else loaded
        self.model.requires_grad_(False)
        if loaded is None:
            self._lend(checkpoint)
        self._plain: str | None = None
        """transformers' name of the attention in which all heads see all tokens, if some stream."""
        if streamed is not None:
            seen = streamed.seen.in_order() if own else streamed.seen
            self._plain = let_stream(self.model, seen)
        self._in_use = nullcontext if loaded is None else OnDisk(self.model).in_use
        self._bounds: Bounds | None = None

    @property
    def bounds(self) -> dict[tuple[str, int], Held]:
        """The bounds that the model's runs showed, by the path of a module and the line of code.

        If it has not run yet, it reads one token."""
        if self._bounds is None:
            self.run([[0]])
        assert self._bounds is not None
        return self._bounds.noted

    @property
    def parameters(self) -> set[str]:
        """The checkpoint's names of all modules' own tensors."""
        return {name for own in self.names.values() for name in own.values()}

    @contextmanager
    def seeing_all(self) -> Iterator[None]:
        """A context in which every head sees all tokens, also one that streams in the port: the
        model as it was published."""
        if self._plain is None:
            yield
            return
        streaming = self.model.config._attn_implementation
        self.model.set_attn_implementation(self._plain)
        try:
            yield
        finally:
            self.model.set_attn_implementation(streaming)

    def _lend(self, checkpoint: Checkpoint) -> None:
        """Let modules take their weights from the checkpoint."""
        for path, names in self.names.items():
            module = self.model.get_submodule(path)
            for name, tensor in own_tensors(module).items():
                shape = tuple(checkpoint.shape(names[name]))
                if shape != tuple(tensor.shape):
                    raise CetaneError(
                        f"{names[name]}: shape {shape} does not fit the config, which asks for "
                        f"{tuple(tensor.shape)}",
                        "give a checkpoint whose weights and config.json are of one model",
                    )
            lender = Lender(checkpoint, names, module, self.resident)
            parent = self.model.get_submodule(path.rpartition(".")[0])
            caller = parent if by_parent(path, module) else module
            caller.register_forward_pre_hook(lender.lend)
            if not self.resident:
                caller.register_forward_hook(lender.take_back)

    def run(
        self,
        sequences: Sequence[Sequence[int]],
        wanted: Sequence[Truth] = (),
        starts: Sequence[int] = (),
        scales: Sequence[float] = (),
        kept: Sequence[Sequence[int]] = (),
        choices: Sequence[Choices] = (),
    ) -> list[Observed]:
        """The results on some sequences, in their order.

        The other arguments have an entry for each sequence. `starts` are the positions of the first
        tokens (default 0), `scales` the factors on the embeddings (1). `kept` are the numbers of
        the tokens whose logits are wanted (all), ascending. `choices` are the experts that a port
        chose: where its own choice is a near tie, the model takes them.

        A resident model takes one sequence after the other. A larger one takes all side by side, so
        it reads its weights once.
        """
        count = len(sequences)
        asked = [
            Asked(*one)
            for one in zip(
                sequences,
                starts or [0] * count,
                scales or [1.0] * count,
                kept or [range(len(tokens)) for tokens in sequences],
                choices or [{}] * count,
                strict=True,
            )
        ]
        groups = [[one] for one in asked] if self.resident else [asked]
        with self._in_use():
            return [seen for group in groups for seen in self._pass(group, wanted)]

    @torch.inference_mode()
    def _pass(self, asked: Sequence["Asked"], wanted: Sequence[Truth]) -> list[Observed]:
        """One pass over sequences side by side. Shorter sequences are padded on the right: a causal
        model does not look there."""
        length = max(len(one.tokens) for one in asked)
        batch = torch.tensor([[*one.tokens, *[0] * (length - len(one.tokens))] for one in asked])
        first = torch.tensor([one.start for one in asked])[:, None]
        scales = [one.scale for one in asked]
        kept = sorted({number for one in asked for number in one.kept})
        seen: dict[Truth, Tensor] = {}
        routing = Routing(batch.shape, [one.choices for one in asked])
        self._bounds = self._bounds or Bounds(self.model)
        with (
            quiet_transformers(),
            self._bounds,
            self._keeping(wanted, seen),
            self._scaled(scales),
            routing.of(self.model),
            runs(self.source),
        ):
            logits = self.model(
                batch,
                position_ids=first + torch.arange(length),
                use_cache=False,
                logits_to_keep=torch.tensor(kept),
            ).logits
        return [
            Observed(
                logits[row, np.searchsorted(kept, one.kept)].numpy(),
                {truth: self._given(truth, t[row, : len(one.tokens)]) for truth, t in seen.items()},
                {layer: m[row, : len(one.tokens)].numpy() for layer, m in routing.margins.items()},
                {layer: e[row, : len(one.tokens)].numpy() for layer, e in routing.experts.items()},
                {layer: f[row, : len(one.tokens)].numpy() for layer, f in routing.far.items()},
            )
            for row, one in enumerate(asked)
        ]

    @contextmanager
    def _scaled(self, scales: Sequence[float]) -> Iterator[None]:
        """A context that multiplies the first layer's input, if an affine map precedes it; else
        the embedding."""
        if all(scale == 1 for scale in scales):
            yield
            return
        factors = torch.tensor(scales)[:, None, None]
        decoder = decoder_of(self.model)
        if hasattr(decoder, "input_hidden_states_scale"):  # an affine follows the embedding
            hook = decoder.layers[0].register_forward_pre_hook(
                lambda _, args, kwargs: scaled_input(factors, args, kwargs), with_kwargs=True
            )
        else:
            hook = decoder.get_input_embeddings().register_forward_hook(
                lambda _, __, rows: rows * factors
            )
        try:
            yield
        finally:
            hook.remove()

    @torch.inference_mode()
    def tensors(
        self, tokens: Sequence[int], wanted: Sequence[Truth], choices: Choices | None = None
    ) -> dict[Truth, Array]:
        """Only the wanted tensors of a sequence, `(n, C)`. The pass ends with the last of them.
        `choices` as in `run`."""
        seen: dict[Truth, Tensor] = {}
        routing = Routing(torch.Size((1, len(tokens))), [choices or {}])
        with (
            self._in_use(),
            quiet_transformers(),
            self._keeping(wanted, seen, stop=True),
            routing.of(self.model),
            suppress(Stop),
            runs(self.source),
        ):
            self.model(torch.tensor([list(tokens)]), use_cache=False)
        return {truth: self._given(truth, tensor[0]) for truth, tensor in seen.items()}

    def _given(self, truth: Truth, tensor: Tensor) -> Array:
        """A tensor `(n, C)` in the port's basis. Only a layer's output has another basis: it is the
        residual stream."""
        residual = truth[0].rpartition(".")[2].isdigit()
        if residual and self.stream is not None:
            tensor = self.stream(tensor).float()
        return tensor.numpy()

    @torch.inference_mode()
    def head(self, hidden: Array, norm: str) -> Array:
        """Logits `(n, V)` for hidden states `(n, C)` after the last layer; `norm` is the path of
        the final norm."""
        stream = torch.from_numpy(hidden)
        if self.stream is not None:
            stream = self.stream(stream, back=True).float()
        with self._in_use():
            return logits_of(self.model, self.model.get_submodule(norm)(stream)).numpy()

    @contextmanager
    def _keeping(
        self, wanted: Sequence[Truth], seen: dict[Truth, Tensor], stop: bool = False
    ) -> Iterator[None]:
        """A context that copies the wanted tensors into `seen` while the model runs."""

        def keep(path: str) -> Any:
            def hook(_: Any, __: Any, output: Any) -> None:
                several = isinstance(output, tuple) or output.ndim == 4  # AltUp stacks its streams
                outputs = output if several else (output,)
                for truth in wanted:
                    if truth[0] == path:
                        seen[truth] = outputs[truth[1]].clone()
                if stop and len(seen) == len(wanted):
                    raise Stop

            return hook

        paths = dict.fromkeys(path for path, _ in wanted)
        hooks = [self.model.get_submodule(p).register_forward_hook(keep(p)) for p in paths]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def decoder_of(model: Any) -> Any:
    """All of a transformers model but its head. Llama 4's text model calls itself its base."""
    base = model.base_model
    return model.model if base is model else base


def logits_of(model: Any, normed: Tensor) -> Tensor:
    """The logits `(..., V)` of a transformers model for normed hidden states `(..., C)`."""
    config = model.config
    scaling = getattr(config, "logits_scaling", 1.0)
    if config.model_type == "hyperclovax":  # multiplies by what all others divide by
        scaling = 1 / scaling
    logits: Tensor = model.get_output_embeddings()(normed) / scaling
    for name in ("logit_scale", "lm_head_multiplier"):
        factor = getattr(config, name, None)  # None in an MPT's config
        logits *= 1.0 if factor is None else factor
    bound = getattr(config, "final_logit_softcapping", None)
    return logits if bound is None else torch.tanh(logits / bound) * bound


def reference_of(checkpoint: Checkpoint, adapter: str | None = None) -> Reference:
    """The reference of a checkpoint, or of its base with one of its adapters merged.

    The last reference stays in memory for the next gate, until `forget_reference`: loading takes
    longer than most questions of a gate."""
    return _last_reference(checkpoint, adapter)


# `lru_cache` tells a left-out argument from None, so it is on a function without a default.
@lru_cache(maxsize=1)
def _last_reference(checkpoint: Checkpoint, adapter: str | None) -> Reference:
    return Reference(checkpoint if adapter is None else checkpoint.with_merged(adapter))


def forget_reference() -> None:
    """Free the reference that stays in memory."""
    _last_reference.cache_clear()


def scaled_input(factors: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a layer, with its hidden states multiplied by factors."""
    if args:
        return (args[0] * factors, *args[1:]), kwargs
    return args, kwargs | {"hidden_states": kwargs["hidden_states"] * factors}


def would_choose(
    logits: Array, prompt: Sequence[int], generated: Sequence[int], margin: float = 0.0
) -> Array:
    """For every generated token, whether it is the greedy choice at its place, or at most `margin`
    nats less likely.

    `logits (n, V)` are a model's for the `n` tokens of the prompt and the answer. If all are true
    without a margin, greedy decoding of that model generates the same tokens.
    """
    rows, tokens = logits[len(prompt) - 1 : -1], np.asarray(generated, np.int64)
    short = rows.max(axis=1) - rows[np.arange(len(tokens)), tokens]
    first = rows.argmax(axis=1) == tokens
    return np.asarray(first | (short <= margin if margin else False))
