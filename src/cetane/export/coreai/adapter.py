"""The adapter: cetane's blocks behind the inputs, outputs and states of the contract."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cetane.export.coreai.contract import KEYS, STEP, VALUES
from cetane.families import CacheForm, CacheSpec, RotaryTable, Shard
from cetane.schema.interface import (
    MASKED,
    Embedding,
    FromCache,
    Input,
    Mask,
    Output,
    Position,
    Rotary,
    ToCache,
)


@torch.library.custom_op("cetane::write_columns", mutates_args=())
def write_columns(state: Tensor, new: Tensor, row: int, start: Tensor) -> Tensor:
    """A copy of `state (L, 1, C, 1, S)` with `new (1, 1, C, 1, T)` in row `row`, from column
    `start (1,)` on."""
    first = int(start)
    written = state.clone()
    written[row : row + 1, ..., first : first + new.shape[-1]] = new
    return written


@write_columns.register_fake
def _(state: Tensor, new: Tensor, row: int, start: Tensor) -> Tensor:
    return torch.empty_like(state)


class StateRows(CacheForm):
    """Rows of two states that all layers share, one for keys and one for values.

    A layer writes its columns and then attends to its whole row, so masks cover the context.
    """

    contract = "stateful"

    def __init__(self, spec: CacheSpec, tensors: dict[str, Tensor]) -> None:
        self.spec, self.tensors, self.row = spec, tensors, spec.first

    @classmethod
    def inputs(cls, spec: CacheSpec, tokens: int) -> list[Input]:
        assert spec.state is not None
        shape = spec.state.shape
        return [
            *(Input(name=name, shape=shape, source=FromCache(name=name, group=spec.group))
              for name in (KEYS, VALUES)),
            Input(name=STEP, shape=(1,), dtype="int32", source=Position(group=spec.group)),
        ]  # fmt: skip

    @classmethod
    def outputs(cls, spec: CacheSpec, tokens: int) -> list[Output]:
        if spec.first:  # the states are the output of the group with the first row
            return []
        assert spec.state is not None
        return [
            Output(
                name=f"{name}_out",
                shape=spec.state.shape,
                sink=ToCache(name=name, group=spec.group, write="replace"),
            )
            for name in (KEYS, VALUES)
        ]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        row, self.row = self.row, self.row + 1
        for name, new in ((KEYS, k), (VALUES, v)):
            self.tensors[name] = self.write(row, self.tensors[name], new)
        shape = (1, *k.shape[1:3], -1)
        return self.tensors[KEYS][row].reshape(shape), self.tensors[VALUES][row].reshape(shape)

    def write(self, layer: int, cache: Tensor, new: Tensor) -> Tensor:
        """The whole state, with the new columns in a layer's row."""
        columns = new.reshape(1, 1, -1, 1, new.shape[-1])
        return write_columns(cache, columns, layer, self.tensors[STEP])

    def results(self) -> dict[str, Tensor]:
        return {f"{name}_out": self.tensors[name] for name in (KEYS, VALUES)}


class CoreAIAdapter(nn.Module):
    """A module whose `forward` takes the tensors of `extend`, and changes the states in place."""

    def __init__(
        self,
        shard: Shard,
        rotary: Mapping[str, RotaryTable],
        positions: int,
        softcap: float | None,
    ) -> None:
        """`positions` is the number of positions of the rotary tables."""
        super().__init__()
        self.shard, self.softcap = (shard,), softcap
        for name, table in rotary.items():
            cos, sin = table.cos_sin(positions).half()
            self.register_buffer(f"cos_{name}", cos)
            self.register_buffer(f"sin_{name}", sin)
        for item in shard.inputs:
            if isinstance(item.source, Mask):
                *_, tokens, context = item.shape
                columns = window_columns(item.source.window, context, tokens)
                if columns is not None:
                    self.register_buffer(f"window_{item.source.window}", columns)

    def forward(
        self,
        transformer_input: Tensor,
        position_ids: Tensor,
        in_step: Tensor,
        causal_mask: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """`out_logits (1, 1, T, V)`; without a head, the sum of one number of each state.

        A function needs an output, and the host does not read that sum.
        """
        (shard,) = self.shard
        states = {KEYS: key_cache, VALUES: value_cache}
        positions = position_ids.to(torch.int32).flatten()

        def given(item: Input) -> Tensor:
            match item.source:
                case Embedding():
                    return transformer_input.transpose(1, 3)
                case Rotary(table=table, part=part):
                    rows = self.get_buffer(f"{part}_{table}")[positions]
                    return rows.transpose(0, 1)[None, None]
                case Mask(window=window):
                    mask = self.windowed(causal_mask[0, :, 0], window, in_step)
                    return mask.transpose(0, 1)[None, None]
                case Position():
                    return in_step
            assert isinstance(item.source, FromCache)
            return states[item.source.name]

        values = shard(*(given(item) for item in shard.inputs))
        made = dict(zip((output.name for output in shard.outputs), values, strict=True))
        for name, state in states.items():
            state.copy_(made[f"{name}_out"])
        slices = [value for name, value in made.items() if name.startswith("logits_")]
        if not slices:
            return made[f"{KEYS}_out"][0, 0, 0, 0, 0] + made[f"{VALUES}_out"][0, 0, 0, 0, 0]
        return self.capped(torch.cat(slices, 1)).permute(0, 2, 3, 1)

    def capped(self, logits: Tensor) -> Tensor:
        """Logits with the model's softcap, which Apple's host does not apply."""
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap

    def windowed(self, mask: Tensor, window: int | None, in_step: Tensor) -> Tensor:
        """The mask `(S, T)` of layers with this window, made from the host's causal mask."""
        columns = dict(self.named_buffers()).get(f"window_{window}")
        if columns is None:
            return mask
        context = mask.shape[0]
        keys = torch.arange(context, dtype=torch.int32) + (context - in_step)
        return torch.minimum(mask, columns[keys])


def window_columns(window: int | None, context: int, tokens: int) -> Tensor | None:
    """The additive mask `(2 S, T)` of a window, by a key's distance from the call's first token.

    A call that starts at position p reads its rows from S - p on. None if no key is ever hidden.
    The host's own mask is only causal.
    """
    if window is None or window >= context:
        return None
    distance = torch.arange(tokens)[None] - (torch.arange(2 * context)[:, None] - context)
    return torch.where(distance >= window, MASKED, 0.0).half()
