"""The adapter: a shard of cetane behind CoreML-LLM's inputs and outputs.

Their runtime's masks are right only for decoding. A prefill gets one causal mask for both kinds of
layers. Sliding layers also need a window; the adapter knows it, since prefill starts at position 0.
A verify call's sliding mask does not hide later drafts. But its first row is the mask of a decoding
call, which tells the content of the cache; the adapter knows the rest.
"""

import torch
from torch import Tensor, nn

from cetane.export.coreml_llm.contract import LAST_POSITION, SLIDING, WIDTH, is_cache
from cetane.families import Blend, CacheForm, CacheSpec, Flow, Head, ReadOnly, Shard
from cetane.schema.function import Function
from cetane.schema.interface import MASKED, Input, Mask, Output, ToCache
from cetane.schema.recipe import Mode


class Staged(Blend):
    """Reads the call's columns in their slots, and returns only these: the host writes them."""

    @classmethod
    def outputs(cls, spec: CacheSpec, tokens: int) -> list[Output]:
        return ReadOnly.outputs(spec, tokens)

    extend = ReadOnly.extend


class Fresh(CacheForm):
    """The start of a sequence: there is no past, and every layer returns its own columns."""

    contract = "readonly"

    def __init__(self, spec: CacheSpec, tensors: dict[str, Tensor]) -> None:
        self.spec, self.written = spec, []

    @classmethod
    def inputs(cls, spec: CacheSpec, tokens: int) -> list[Input]:
        return []

    @classmethod
    def outputs(cls, spec: CacheSpec, tokens: int) -> list[Output]:
        return [
            Output(
                name=fresh_name(spec.group, part, layer),
                shape=(1, spec.heads, spec.dim, tokens),
                sink=ToCache(name=buffer, group=spec.group, write="append"),
            )
            for layer in range(spec.layers)
            for part, (_, buffer) in zip("kv", spec.names(), strict=True)
        ]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.written.append((k, v))
        return k, v

    def write(self, layer: int, cache: Tensor, new: Tensor) -> Tensor:
        return new

    def results(self) -> dict[str, Tensor]:
        return {
            fresh_name(self.spec.group, part, layer): tensor
            for layer, pair in enumerate(self.written)
            for part, tensor in zip("kv", pair, strict=True)
        }


def fresh_name(group: str, part: str, layer: int) -> str:
    """cetane's name for the keys or values of a group's nth layer in a package."""
    return f"{group}_{part}_{layer}_out"


class Adapter(nn.Module):
    """A module whose `forward` takes and gives the tensors of the contract's function."""

    past: Tensor
    own: Tensor
    window: Tensor

    def __init__(
        self,
        shard: Shard,
        function: Function,
        mode: Mode,
        names: dict[str, str],
        heads: tuple[Head, ...],
        window: int,
    ) -> None:
        """`names` maps cetane's names of the shard's inputs and outputs to theirs, without
        `heads`."""
        super().__init__()
        self.shard, self.heads = (shard,), heads
        self.function, self.mode, self.names = function, mode, names
        if mode == "verify":
            query, key = torch.arange(function.tokens)[:, None], torch.arange(window)
            self.register_buffer("past", hidden_unless(key > query))
            self.register_buffer("own", hidden_unless(key[: function.tokens] <= query))
        elif mode == "prefill":
            query, key = torch.arange(function.tokens)[:, None], torch.arange(function.tokens)
            self.register_buffer("window", hidden_unless(query - key < window))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (shard,) = self.shard
        given = dict(zip((i.name for i in self.function.inputs), tensors, strict=True))
        values = shard(*(self.inward(item, given[self.names[item.name]]) for item in shard.inputs))
        made = dict(zip((output.name for output in shard.outputs), values, strict=True))
        results = {
            self.names[name]: outward(self.names[name], value)
            for name, value in made.items()
            if name in self.names
        }
        if self.heads:
            results |= self.choose(made["hidden_out"], given.get(LAST_POSITION))
        return tuple(results[output.name] for output in self.function.outputs)

    def inward(self, item: Input, value: Tensor) -> Tensor:
        """The input of cetane's shard, made from their input."""
        if isinstance(item.source, Mask):
            return self.mask(value) if item.source.group == SLIDING else value
        if len(value.shape) == 3:  # channels last
            rows = value if item.shape[3] == 1 else value.transpose(1, 2)
            return rows.reshape(item.shape)
        return value[..., : item.shape[2]].transpose(2, 3)

    def mask(self, given: Tensor) -> Tensor:
        """The mask of a sliding layer."""
        if self.mode == "decode":
            return given
        if self.mode == "prefill":
            return torch.minimum(given, self.window)
        # With p tokens in the cache, the first row shows p + 1 columns, so one too many.
        filled = nn.functional.pad(given[:, :, :1, :-1], (1, 0), value=MASKED)
        return torch.cat([torch.minimum(filled, self.past), self.own], 3)

    def choose(self, hidden: Tensor, last: Tensor | None) -> dict[str, Tensor]:
        """The row and value of every token's largest logit; with `last (1, N, 1)`, only of the
        token that it marks.

        It is chosen slice by slice: on the ANE, an argmax over more than 65,536 rows is wrong.
        """
        if last is not None:
            hidden = (hidden * last.reshape(1, 1, 1, -1)).sum(3, keepdim=True)
        largest, chosen = None, None
        for head in self.heads:
            flow: Flow = {"hidden": hidden}
            head(flow, {})
            logits = flow["logits"].flatten(2)
            top, row = logits.amax(1), logits.argmax(1).to(torch.int32) + head.start
            if largest is None or chosen is None:
                largest, chosen = top, row
            else:
                chosen = torch.where(top > largest, row, chosen)
                largest = torch.maximum(top, largest)
        assert largest is not None and chosen is not None
        cap = self.heads[0].model[0].softcap
        capped = largest if cap is None else torch.tanh(largest / cap) * cap
        normed = self.heads[0].norm(hidden)
        return {
            "token_ids": chosen,
            "token_id": chosen.reshape(-1),
            "token_logit": capped.reshape(-1),
            "hidden_states_out": channels_last(normed),
        }


def hidden_unless(seen: Tensor) -> Tensor:
    """The additive mask `(1, 1, queries, keys)` that shows only keys in `seen`."""
    return torch.where(seen, 0.0, MASKED)[None, None]


def channels_last(value: Tensor) -> Tensor:
    """`(1, C, 1, T)` -> `(1, T, C)`."""
    rows = value.reshape(1, value.shape[1], -1)
    return rows.reshape(1, 1, -1) if rows.shape[2] == 1 else rows.transpose(1, 2)


def outward(name: str, value: Tensor) -> Tensor:
    """Their output, made from cetane's."""
    if name.startswith(("hidden", "per_layer")):
        return channels_last(value)
    value = value.transpose(2, 3)
    return nn.functional.pad(value, (0, WIDTH - value.shape[3])) if is_cache(name) else value
