"""Wrong ports: each mutation changes one thing in a port that is right.

*Graph*: the program computes something else. *Reading*: a constant stands for another parameter.
*Constants*: the package holds other values than it should. *Host*: tables, masks, slots and calls.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from cetane.compress.encoded import Affine, Dense
from cetane.engine.backend import Arrays
from cetane.engine.call import Call, Running
from cetane.engine.host import mask
from cetane.engine.memory import Mark
from cetane.engine.schedule import no_trees, skips
from cetane.engine.session import Session
from cetane.engine.slots import EMPTY, call_slots
from cetane.families import zaya_departures
from cetane.families.alibi import BloomBlock
from cetane.families.attention import ListedNorms, StackedNorms, UnitNorm
from cetane.families.axes import Axes
from cetane.families.base import Block, RoutedBlock, Weight
from cetane.families.blocks import ParallelBlock, PreNormBlock
from cetane.families.delta import DeltaNet
from cetane.families.experts import SumNorm
from cetane.families.falcon_h1 import FalconH1Block
from cetane.families.gemma import OwnAttention, SharedAttention, shared_names
from cetane.families.gpt2 import POSITIONS
from cetane.families.layers import CausalTaps, LayerNorm, Norm, RMSNorm, normalize
from cetane.families.mamba2 import GroupNorm, Mamba2
from cetane.families.matrices import Decays
from cetane.families.model import Matrix
from cetane.families.phimoe import SparseMixture
from cetane.families.rotary import RotaryTable
from cetane.families.selective_scan import NORMS, SelectiveScan
from cetane.schema.interface import FromCache, FromHistory, FromMatrix, Kept, Mask

from .families import CONTEXT
from .ports import AuthoredPort

M = TypeVar("M", bound=torch.nn.Module)
Place = Literal["graph", "reading", "constants", "host", "departure"]
LAYER = 1
"""The layer that is changed, unless a mutation says otherwise."""


class Inapplicable(Exception):
    """A family has nothing for a mutation to change."""


@dataclass(frozen=True)
class Mutation:
    """One wrong port, of every family that has what it changes."""

    name: str
    place: Place
    change: Callable[[AuthoredPort], None]
    tables: Mapping[str, Any] = field(default_factory=dict)
    """Tables of the recipe that it needs."""


TABLE: dict[str, Mutation] = {}


def mutation(
    name: str, place: Place, **tables: Any
) -> Callable[[Callable[[AuthoredPort], None]], Any]:
    def add(change: Callable[[AuthoredPort], None]) -> Callable[[AuthoredPort], None]:
        assert name not in TABLE
        TABLE[name] = Mutation(name, place, change, tables)
        return change

    return add


# Finding things in a port -------------------------------------------------------------------------


def blocks(port: AuthoredPort, attribute: str, layer: int = LAYER) -> Any:
    """The block of a layer that has a submodule."""
    for block in port.planner.model.layers:
        if block.layer == layer and attribute in dict(block.named_modules()):
            return block
    raise Inapplicable


def after(thing: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a module gives."""
    forward = thing.forward
    thing.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))


def around(block: Block, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the tensors and the memory that a block gets, for this block only."""
    forward = block.forward

    def changed(flow: dict[str, Any], memory: dict[str, Any]) -> None:
        own, kept = dict(flow), dict(memory)
        change(own, kept)
        forward(own, kept)
        for name in block.writes:
            if name in own:
                flow[name] = own[name]
        for name in ("probabilities", "scores"):
            if name in own:
                flow[name] = own[name]

    block.forward = changed  # type: ignore[method-assign]


def cache_of(block: Any) -> str:
    names = [name for name in block.keeps if name in ("kv", "sliding", "full")]
    if not names:
        raise Inapplicable
    return names[0]


def named(block: Any, part: str) -> str:
    """The tensor that a block reads whose name starts so."""
    for name in block.reads:
        if name.startswith(part):
            return str(name)
    raise Inapplicable


def attention(port: AuthoredPort, layer: int = LAYER) -> Any:
    """The block of a layer that attends."""
    for block in layer_blocks(port, layer):
        if part(block, "self_attn") is not None:
            return block
    raise Inapplicable


def mixer(port: AuthoredPort) -> Any:
    return part(attention(port), "self_attn")


ALSO = {
    "self_attn": ("attention", "attn", "self_attention"),
    "q_proj": ("q_b_proj",), "o_proj": ("out_proj", "dense", "c_proj"),
    "q_norm": ("q_layernorm", "query_layernorm"), "k_norm": ("k_layernorm", "key_layernorm"),
    "mlp": ("feed_forward", "ffn"), "gate_proj": ("w1",),
    "up_proj": ("w3", "c_fc", "fc1", "dense_h_to_4h"),
    "down_proj": ("w2", "c_proj", "fc2", "dense_4h_to_h"),
    "input_layernorm": (
        "operator_norm", "norm", "ln_1", "self_attn_layer_norm", "norm_1", "ln_attn",
    ),
    "post_attention_layernorm": ("ffn_norm", "ln_2", "final_layer_norm", "norm_2", "ln_mlp"),
}  # fmt: skip
"""Llama's names, and other families' for the same parts."""


HEAD_NORMS = RMSNorm | UnitNorm | LayerNorm | StackedNorms | ListedNorms
"""The norms of queries and keys: behind one of them, doubled queries change nothing."""


def names_of(name: str) -> tuple[str, ...]:
    """All names of a part, by Llama's."""
    return name, *ALSO.get(name, ())


def part(owner: Any, name: str) -> Any:
    """A submodule by Llama's name; None if the family has nothing like it."""
    found = (getattr(owner, one, None) for one in names_of(name))
    return next((made for made in found if made is not None), None)


def own_name(owner: Any, *path: str) -> str:
    """A submodule's path, by Llama's names."""
    names = []
    for step in path:
        names.append(next(name for name in names_of(step) if hasattr(owner, name)))
        owner = getattr(owner, names[-1])
    return ".".join(names)


def layer_blocks(port: AuthoredPort, layer: int) -> list[Any]:
    return [block for block in port.planner.model.layers if block.layer == layer]


def layer_part(port: AuthoredPort, name: str) -> Any:
    """A layer's norm or MLP by Llama's name."""
    for block in layer_blocks(port, LAYER):
        if (made := part(block, name)) is not None:
            return made
    raise Inapplicable


def by_head(x: Tensor, heads: int) -> Tensor:
    return x.reshape(1, heads, x.shape[1] // heads, -1)


# Attention ----------------------------------------------------------------------------------------


@mutation("query heads of the wrong group", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    queries = part(attn, "q_proj")
    after(queries, lambda x: by_head(x, attn.heads.query).roll(1, 1).reshape(x.shape))


@mutation("value heads in the wrong order", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    if attn.heads.kv < 2 or not hasattr(attn, "v_proj"):
        raise Inapplicable
    after(attn.v_proj, lambda x: by_head(x, attn.heads.kv).flip(1).reshape(x.shape))


@mutation("keys and values swapped", "graph")
def _(port: AuthoredPort) -> None:
    block = attention(port)
    name = cache_of(block)

    def change(flow: dict[str, Any], memory: dict[str, Any]) -> None:
        extend = memory[name]
        memory[name] = lambda k, v: extend(v, k)

    around(block, change)


@mutation("one key head zeroed", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    dim = attn.heads.dim
    if not hasattr(attn, "k_proj"):
        raise Inapplicable
    after(attn.k_proj, lambda x: torch.cat([torch.zeros_like(x[:, :dim]), x[:, dim:]], 1))


@mutation("queries of one layer doubled", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    if hasattr(attn, "qk_norm") or isinstance(part(attn, "q_norm"), HEAD_NORMS):
        target = part(attn, "q_norm")
        if target is None:
            raise Inapplicable
        after(target, lambda x: 2 * x)
    else:
        after(part(attn, "q_proj"), lambda x: 2 * x)


@mutation("attention scores not scaled", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    attn.heads = replace(attn.heads, scale=attn.heads.scale * attn.heads.dim**0.5)


@mutation("heads merged in the wrong order", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    output, query = part(attn, "o_proj"), attn.heads.query
    forward = output.forward
    output.forward = lambda x: forward(by_head(x, query).transpose(1, 2).reshape(x.shape))


@mutation("attention skipped", "graph")
def _(port: AuthoredPort) -> None:
    after(part(mixer(port), "o_proj"), torch.zeros_like)


@mutation("query and key norms swapped", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    if not isinstance(part(attn, "q_norm"), RMSNorm):
        raise Inapplicable
    if not isinstance(part(attn, "k_norm"), RMSNorm):
        raise Inapplicable
    if attn.form.normed_last or not attn.kind.positioned:  # only the product of the gains counts
        raise Inapplicable
    query, key = part(attn, "q_norm"), part(attn, "k_norm")
    query.forward, key.forward = key.forward, query.forward


@mutation("query norm missing", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    if not isinstance(part(attn, "q_norm"), HEAD_NORMS):
        raise Inapplicable
    part(attn, "q_norm").forward = lambda x: x


@mutation("latent norm missing", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    if not hasattr(attn, "kv_a_layernorm"):
        raise Inapplicable
    attn.kv_a_layernorm.forward = lambda x: x


@mutation("latent norm of queries missing", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    if not hasattr(attn, "q_a_layernorm"):
        raise Inapplicable
    attn.q_a_layernorm.forward = lambda x: x


@mutation("latents made for the wrong head", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    if not hasattr(attn, "to_latent"):
        raise Inapplicable
    after(attn.to_latent, lambda x: by_head(x, attn.heads.query).roll(1, 1).reshape(x.shape))


@mutation("value norm missing", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    if not isinstance(attn, OwnAttention):
        raise Inapplicable
    attn.values = lambda v: v


@mutation("a projection's bias dropped", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    queries = part(attn, "q_proj")
    if getattr(queries, "bias", None) is None:
        raise Inapplicable
    queries.forward = queries.contract


def form_without(module: Any, part: str) -> None:
    """Have attention compute without a part that its form names."""
    if getattr(getattr(module, "form", None), part, None) is None:
        raise Inapplicable
    module.form = replace(module.form, **{part: None})


@mutation("gates of attention left out", "graph")
def _(port: AuthoredPort) -> None:
    form_without(mixer(port), "gates")


@mutation("gates of attention of the next channel", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    if getattr(getattr(attn, "form", None), "gates", None) is None:
        raise Inapplicable
    after(attn.get_submodule(attn.form.gate), lambda x: x.roll(1, 1))


@mutation("norm of what attention heads give left out", "graph")
def _(port: AuthoredPort) -> None:
    form_without(mixer(port), "inner_norm")


# Positions ----------------------------------------------------------------------------------------


@mutation("cosines and sines swapped", "graph")
def _(port: AuthoredPort) -> None:
    block = attention(port)
    cos, sin = (named(block, "rope_cos" if "rope_cos" in block.reads else "cos"),
                named(block, "rope_sin" if "rope_sin" in block.reads else "sin"))  # fmt: skip
    around(block, lambda flow, _: flow.update({cos: flow[sin], sin: flow[cos]}))


def rotary_of(port: AuthoredPort) -> dict[str, RotaryTable]:
    """The port's rotary tables, of a model with positions."""
    tables = port.planner.model.rotary
    if not tables:
        raise Inapplicable
    return tables


@mutation("no rotary embedding", "graph")
def _(port: AuthoredPort) -> None:
    block = attention(port)
    cos = named(block, "rope_cos" if "rope_cos" in block.reads else "cos")
    sin = named(block, "rope_sin" if "rope_sin" in block.reads else "sin")

    def change(flow: dict[str, Any], _: Any) -> None:
        flow.update({cos: torch.ones_like(flow[cos]), sin: torch.zeros_like(flow[sin])})

    around(block, change)


@mutation("learned positions left out", "graph")
def _(port: AuthoredPort) -> None:
    first = port.planner.model.layers[0]
    if POSITIONS not in first.reads:
        raise Inapplicable
    forward = first.forward

    def without(flow: Any, memory: Any) -> None:
        forward(flow | {POSITIONS: torch.zeros_like(flow["hidden"])}, memory)

    first.forward = without  # type: ignore[method-assign]


@mutation("learned positions one row off", "reading")
def _(port: AuthoredPort) -> None:
    model = port.planner.model
    if POSITIONS not in model.tables:
        raise Inapplicable
    own = model.tables[POSITIONS]
    late = replace(own, table=replace(own.table, first=own.table.first + 1))
    port.planner.model = replace(model, tables=model.tables | {POSITIONS: late})


@mutation("keys one rotary row ahead of queries", "graph")
def _(port: AuthoredPort) -> None:
    block = attention(port)
    name, tables = cache_of(block), rotary_of(port)
    table = tables.get(name) or tables.get("default") or next(iter(tables.values()))
    angles = table.cos_sin(2)[:, 1, :, None]
    dim = angles.shape[1]

    def turn(k: Tensor) -> Tensor:
        cos, sin = angles.to(k.device)  # readings run modules without values
        part, rest = k[:, :, :dim], k[:, :, dim:]
        half = dim // 2
        other = torch.cat([-part[:, :, half:], part[:, :, :half]], 2)
        return torch.cat([part * cos + other * sin, rest], 2)

    def change(_: Any, memory: dict[str, Any]) -> None:
        extend = memory[name]
        memory[name] = lambda k, v: extend(turn(k), v)

    around(block, change)


@mutation("rotary table of another base", "reading")
def _(port: AuthoredPort) -> None:
    tables = rotary_of(port)
    for name, table in list(tables.items()):
        tables[name] = RotaryTable(table.inverse_frequencies**1.1, table.scale)


@mutation("rotary table of the other kind of layer", "reading")
def _(port: AuthoredPort) -> None:
    tables = rotary_of(port)
    names = list(tables)
    if len(names) < 2 or len({t.inverse_frequencies.numel() for t in tables.values()}) > 1:
        raise Inapplicable
    if torch.equal(*(tables[name].inverse_frequencies for name in names[:2])):
        raise Inapplicable
    tables[names[0]], tables[names[1]] = tables[names[1]], tables[names[0]]


@mutation("rotary rows shifted for queries", "graph")
def _(port: AuthoredPort) -> None:
    attn = mixer(port)
    table = next(iter(rotary_of(port).values()))
    angles = table.cos_sin(2)[:, 1, :, None]
    dim = angles.shape[1]
    if not isinstance(part(attn, "q_norm"), torch.nn.Identity | HEAD_NORMS):
        raise Inapplicable
    if dim != attn.heads.dim:
        raise Inapplicable

    def turn(q: Tensor) -> Tensor:
        cos, sin = angles.to(q.device)
        half = dim // 2
        other = torch.cat([-q[:, :, half:], q[:, :, :half]], 2)
        return q * cos + other * sin

    after(part(attn, "q_norm"), turn)


# Masks, slots, calls ------------------------------------------------------------------------------


def masks(port: AuthoredPort) -> dict[str, int]:
    """Names of mask inputs, and the slots of their groups."""
    named = {
        name: port.planner.memory.slots[source.group].count
        for name, source in port.planner.model.host.items()
        if isinstance(source, Mask)
    }
    if not named:
        raise Inapplicable
    return named


def needs_caches(port: AuthoredPort) -> None:
    """A model of recurrent layers alone has no keys and values."""
    if not port.plan.caches:
        raise Inapplicable


def whole_masks(port: AuthoredPort) -> list[str]:
    """Names of mask inputs that show all earlier tokens."""
    host = port.planner.model.host
    names = [n for n, source in host.items() if isinstance(source, Mask) and not source.window]
    if not names:
        raise Inapplicable
    return names


@mutation("mask one slot off", "host")
def _(port: AuthoredPort) -> None:
    names = masks(port)

    def change(_: str, __: str, inputs: dict[str, Any]) -> None:
        for name in names.keys() & inputs.keys():
            inputs[name] = np.roll(inputs[name], 1, -1)

    port.before.append(change)


@mutation("the past is not seen", "host")
def _(port: AuthoredPort) -> None:
    names = masks(port)

    def change(_: str, __: str, inputs: dict[str, Any]) -> None:
        for name in names.keys() & inputs.keys():
            inputs[name][..., : names[name]] = -4e4

    port.before.append(change)


@mutation("tokens of a call see later ones", "host")
def _(port: AuthoredPort) -> None:
    names = masks(port)

    def change(_: str, __: str, inputs: dict[str, Any]) -> None:
        for name in names.keys() & inputs.keys():
            own = inputs[name][..., names[name] :]
            own[...] = own[..., -1:, :]

    port.before.append(change)


@mutation("oldest visible token is hidden", "host")
def _(port: AuthoredPort) -> None:
    names = masks(port)

    def change(_: str, __: str, inputs: dict[str, Any]) -> None:
        for name in names.keys() & inputs.keys():
            inputs[name][..., 0] = -4e4

    port.before.append(change)


@mutation("a window one token too long", "host")
def _(port: AuthoredPort) -> None:
    change_windows(port, 1)


@mutation("a window one token too short", "host")
def _(port: AuthoredPort) -> None:
    change_windows(port, -1)


def change_windows(port: AuthoredPort, by: int) -> None:
    """The masks that the host makes; slots stay as they are, with room for one token more."""
    host = port.planner.model.host
    windowed = {n: s for n, s in host.items() if isinstance(s, Mask) and s.window}
    if not windowed:
        raise Inapplicable
    for name, source in windowed.items():
        host[name] = source.model_copy(update={"window": source.window + by})


@mutation("windowed layers see everything", "host")
def _(port: AuthoredPort) -> None:
    host = port.planner.model.host
    windowed = {n: s for n, s in host.items() if isinstance(s, Mask) and s.window}
    if not windowed:
        raise Inapplicable
    for name, source in windowed.items():
        host[name] = source.model_copy(update={"window": None})


@mutation("a slot reused one step early", "host")
def _(port: AuthoredPort) -> None:
    slots = port.planner.memory.slots
    limited = {name: group for name, group in slots.items() if group.limited}
    if not limited:
        raise Inapplicable
    model = port.planner.model
    for name, group in limited.items():
        window = getattr(model.memory[name], "window", None) or group.count
        slots[name] = group.model_copy(update={"count": window - 2})


SMALLER = 96
GROWS = {"cache": {"contract": "readonly", "context": CONTEXT, "capacities": [SMALLER]}}


@mutation("decode of a smaller capacity does not see some slots", "host", **GROWS)
def _(port: AuthoredPort) -> None:
    hides_slots(port, f"decode-c{SMALLER}")


@mutation("verify of a smaller capacity does not see some slots", "host", **GROWS)
def _(port: AuthoredPort) -> None:
    hides_slots(port, f"verify-c{SMALLER}")


def hides_slots(port: AuthoredPort, name: str) -> None:
    """A function does not see slots in the first quarter of its cache."""
    whole = whole_masks(port)
    if not any(function == name for _, function in port.plan.functions):
        raise Inapplicable

    def change(_: str, function: str, inputs: dict[str, Any]) -> None:
        for own in inputs.keys() & whole:
            if function == name:
                inputs[own][..., 12 : SMALLER // 4] = -4e4

    port.before.append(change)


@mutation("cached keys one slot off", "host")
def _(port: AuthoredPort) -> None:
    needs_caches(port)

    def change(_: str, __: str, inputs: dict[str, Any]) -> None:
        for name in inputs:
            if name in ("kv_k", "sliding_k", "full_k"):
                inputs[name] = np.roll(inputs[name], 1, -1)

    port.before.append(change)


@mutation("cached keys and values swapped", "host")
def _(port: AuthoredPort) -> None:
    needs_caches(port)

    def change(_: str, __: str, outputs: dict[str, Any]) -> None:
        for group in ("kv", "sliding", "full"):
            k, v = f"{group}_k_out", f"{group}_v_out"
            if k in outputs:
                outputs[k], outputs[v] = outputs[v], outputs[k]

    port.after.append(change)


@mutation("cache of one layer is its neighbour's", "host")
def _(port: AuthoredPort) -> None:
    kept = [block for block in port.planner.members["chunk-01"] if block.keeps]
    names = [cache_of(block) for block in kept]
    if not any(names.count(name) > 1 for name in names):
        raise Inapplicable

    def change(shard: str, _: str, inputs: dict[str, Any]) -> None:
        for name in inputs:
            if shard == "chunk-01" and name in ("kv_k", "sliding_k", "full_k"):
                inputs[name] = np.flip(inputs[name], 0).copy()

    port.before.append(change)


@mutation("columns of T = 4 in the wrong order", "host")
def _(port: AuthoredPort) -> None:
    needs_caches(port)

    def change(_: str, function: str, outputs: dict[str, Any]) -> None:
        if function == "verify":
            for name in outputs:
                if name.endswith(("_k_out", "_v_out")):
                    outputs[name] = np.flip(outputs[name], -1).copy()

    port.after.append(change)


@mutation("hidden columns of T = 4 in the wrong order", "host")
def _(port: AuthoredPort) -> None:
    def change(shard: str, function: str, outputs: dict[str, Any]) -> None:
        if function == "verify" and "hidden_out" in outputs and shard == "chunk-00":
            outputs["hidden_out"] = np.flip(outputs["hidden_out"], -1).copy()

    port.after.append(change)


@mutation("prefill writes its last column nowhere", "host")
def _(port: AuthoredPort) -> None:
    needs_caches(port)

    def change(_: str, function: str, outputs: dict[str, Any]) -> None:
        if function == "prefill":
            for name in outputs:
                if name.endswith(("_k_out", "_v_out")):
                    outputs[name][..., -1] = 0

    port.after.append(change)


# Drafts, trees and rewinds: what the host keeps of a call -----------------------------------------


def writes_columns(port: AuthoredPort) -> bool:
    """Whether the host writes columns of calls."""
    sinks = (o.sink for f in port.plan.functions.values() for o in f.outputs)
    return any(isinstance(sink, Kept) for sink in sinks)


def keeps(port: AuthoredPort, columns: Callable[[Call, list[int]], Sequence[int]]) -> None:
    """The host keeps other columns of a call than those of the accepted path."""
    if not writes_columns(port):
        raise Inapplicable

    def change(session: Session) -> None:
        keep = session.memory.write_accepted
        session.memory.write_accepted = (  # type: ignore[method-assign]
            lambda call, writes, path: keep(call, writes, columns(call, list(path)))
        )

    port.sessions.append(change)


@mutation("refused columns are kept", "host")
def _(port: AuthoredPort) -> None:
    keeps(port, lambda call, _: range(len(call.tokens)))


@mutation("later accepted tokens are the second one", "host")
def _(port: AuthoredPort) -> None:
    keeps(port, lambda _, path: path[:2] + path[1:2] * (len(path) - 2))


@mutation("a draft that is accepted whole ends wrongly", "host")
def _(port: AuthoredPort) -> None:
    keeps(port, lambda call, path: path if len(path) < len(call.tokens) else [*path[:-1], 0])


def of_trees(port: AuthoredPort) -> None:
    if no_trees(port.plan):
        raise Inapplicable


@mutation("a branch's columns are the first ones", "host")
def _(port: AuthoredPort) -> None:
    of_trees(port)
    keeps(port, lambda _, path: range(len(path)))


@mutation("a branch's columns are neighbours", "host")
def _(port: AuthoredPort) -> None:
    of_trees(port)
    keeps(port, lambda _, path: [path[0] + i for i in range(len(path))])


def places(port: AuthoredPort, change: Callable[[Call, Session], Call]) -> None:
    """The host makes other calls of trees."""
    of_trees(port)

    def changed(session: Session) -> None:
        place = session.memory.place

        def placed(*given: Any) -> Call:
            call = place(*given)
            return call if call.parents is None else change(call, session)

        session.memory.place = placed  # type: ignore[method-assign]

    port.sessions.append(changed)


@mutation("branches see each other", "host")
def _(port: AuthoredPort) -> None:
    class Blind(Call):
        def ancestors(self) -> None:
            return None

    places(port, lambda call, _: Blind(**vars(call)))


@mutation("a token of a tree sees only its parent", "host")
def _(port: AuthoredPort) -> None:
    class Short(Call):
        def ancestors(self) -> Any:
            seen = np.eye(len(self.tokens), dtype=bool)
            for token, parent in enumerate(self.parents or ()):
                seen[token, parent] |= parent >= 0
            return seen

    places(port, lambda call, _: Short(**vars(call)))


@mutation("positions of a tree end at its second level", "host")
def _(port: AuthoredPort) -> None:
    def change(call: Call, session: Session) -> Call:
        memory, positions = session.memory, np.minimum(call.positions, session.position + 1)
        columns = session.position + np.arange(len(call.tokens))
        groups = {
            name: call_slots(group, memory.slots[name], columns, positions, call.width)
            for name, group in memory.groups.items()
        }
        return replace(call, positions=positions, groups=groups)

    places(port, change)


@mutation("later tokens of a tree see no start of the text", "host")
def _(port: AuthoredPort) -> None:
    """From the fourth on."""
    of_trees(port)
    whole = whole_masks(port)

    def change(session: Session) -> None:
        prepare = session.prepare_draft

        def changed(*given: Any) -> Running:
            running = prepare(*given)
            if running.call.parents is not None:
                for name in whole:
                    source = port.planner.model.host[name]
                    assert isinstance(source, Mask)
                    running.hosted[name] = mask(source, running.call, np.float32)
                    running.hosted[name][..., 3:, :5] = -4e4
            return running

        session.prepare_draft = changed  # type: ignore[method-assign]

    port.sessions.append(change)


@mutation("the last accepted token is not seen", "host")
def _(port: AuthoredPort) -> None:
    needs_caches(port)

    def change(session: Session) -> None:
        memory, count = session.memory, session.memory.count_accepted

        def changed(call: Call, path: Any) -> None:
            count(call, path)
            newest = memory.position - 1
            memory.slots = {n: np.where(s == newest, EMPTY, s) for n, s in memory.slots.items()}

        memory.count_accepted = changed  # type: ignore[method-assign]

    port.sessions.append(change)


def does_not_rewind(port: AuthoredPort, part: str, of: type[Any]) -> None:
    """A rewind leaves one part of the memory as later tokens made it."""
    items = (item for function in port.plan.functions.values() for item in function.inputs)
    if not any(isinstance(item.source, of) for item in items):
        raise Inapplicable

    def change(session: Session) -> None:
        memory, rewind = session.memory, session.memory.rewind

        def changed(mark: Mark) -> None:
            rewind(replace(mark, **{part: getattr(memory, part)}))

        memory.rewind = changed  # type: ignore[method-assign]

    port.sessions.append(change)


@mutation("a rewind leaves histories", "host")
def _(port: AuthoredPort) -> None:
    does_not_rewind(port, "histories", FromHistory)


@mutation("a rewind leaves matrices", "host")
def _(port: AuthoredPort) -> None:
    does_not_rewind(port, "matrices", FromMatrix)


@mutation("a rewind keeps a larger capacity", "host", **GROWS)
def _(port: AuthoredPort) -> None:
    """But not its slots, so no call after it fits."""
    if not port.plan.caches:
        raise Inapplicable

    def change(session: Session) -> None:
        memory, rewind = session.memory, session.memory.rewind

        def changed(mark: Mark) -> None:
            larger = memory.capacity, memory.groups
            rewind(mark)
            memory.capacity, memory.groups = larger

        memory.rewind = changed  # type: ignore[method-assign]

    port.sessions.append(change)


@mutation("a mark shares its windows with later calls", "host")
def _(port: AuthoredPort) -> None:
    if not any(group.limited for group in port.plan.caches.values()) or port.plan.forgets:
        raise Inapplicable
    port.sessions.append(lambda session: setattr(session.memory, "_apart", dict))


@mutation("a copy lacks histories", "host")
def _(port: AuthoredPort) -> None:
    copies_otherwise(port, FromHistory, lambda mark: replace(mark, histories=zeros(mark.histories)))


@mutation("a copy lacks matrices", "host")
def _(port: AuthoredPort) -> None:
    copies_otherwise(port, FromMatrix, lambda mark: replace(mark, matrices=zeros(mark.matrices)))


@mutation("a copy shares its caches", "host")
def _(port: AuthoredPort) -> None:
    if port.plan.recipe.cache.contract != "readonly":  # else a call makes a cache of its own
        raise Inapplicable
    copies_otherwise(port, FromCache, lambda mark: mark)


def copies_otherwise(port: AuthoredPort, of: type[Any], copied: Callable[[Mark], Mark]) -> None:
    """A copy of a mark is another one."""
    items = (item for function in port.plan.functions.values() for item in function.inputs)
    if not port.plan.copies or not any(isinstance(item.source, of) for item in items):
        raise Inapplicable

    def change(session: Session) -> None:
        memory, mark = session.memory, session.memory.mark

        def changed() -> Mark:
            made = mark()
            object.__setattr__(made, "copied", lambda: copied(made))
            return made

        memory.mark = changed  # type: ignore[method-assign]

    port.sessions.append(change)


def zeros(arrays: Arrays) -> Arrays:
    return {name: np.zeros_like(array) for name, array in arrays.items()}


@mutation("logits of a call's first token", "host")
def _(port: AuthoredPort) -> None:
    """Where silent calls skip layers, the last token has a call of its own."""
    if all(skips(port.plan, mode) for mode in port.plan.modes.values() if mode.tokens > 1):
        raise Inapplicable

    def change(session: Session) -> None:
        prepare = session.prepare

        def changed(tokens: Any, wanted: Any, modes: Any = None) -> list[Running]:
            calls = prepare(tokens, wanted, modes)
            if wanted == "last":
                calls[-1].then.append(lambda: first_for_last(calls[-1]))
            return calls

        session.prepare = changed  # type: ignore[method-assign]

    port.sessions.append(change)


def first_for_last(running: Running) -> None:
    assert running.logits is not None
    if running.logits.rows is not None:
        running.logits.rows[-1] = running.logits.rows[0]


@mutation("head slices swapped", "host")
def _(port: AuthoredPort) -> None:
    port.opened_as |= {"head-0": "head-1", "head-1": "head-0"}


@mutation("stale history", "host")
def _(port: AuthoredPort) -> None:
    if not {"conv", "delayed"} & set(port.planner.model.memory):
        raise Inapplicable

    def change(_: str, __: str, inputs: dict[str, Any]) -> None:
        for name in ("conv", "delayed"):
            if name in inputs:
                inputs[name][...] = 0

    port.before.append(change)


def short_convolution(port: AuthoredPort) -> Any:
    for block in port.planner.model.layers:
        if hasattr(block, "conv"):
            return block.conv
    raise Inapplicable


def convolution_of(port: AuthoredPort) -> CausalTaps:
    """The taps of the first layer that has some."""
    made = (m for block in port.planner.model.layers for m in block.modules())
    for module in made:
        if isinstance(module, CausalTaps) and len(module.taps) > 1:
            return module
    raise Inapplicable


@mutation("a convolution's gates swapped", "graph")
def _(port: AuthoredPort) -> None:
    conv = short_convolution(port)

    def swapped(x: Tensor) -> Tensor:
        before, behind, inner = x.split(conv.size, dim=1)
        return torch.cat([behind, before, inner], 1)

    after(conv.in_proj, swapped)


@mutation("a convolution's taps in the wrong order", "graph")
def _(port: AuthoredPort) -> None:
    taps = convolution_of(port)
    forward, time = taps.forward, taps.time
    taps.forward = lambda x: forward(x.flip(time)).flip(time)  # type: ignore[method-assign]


@mutation("a convolution one token late", "graph")
def _(port: AuthoredPort) -> None:
    taps = convolution_of(port)
    forward = taps.forward
    taps.forward = lambda x: forward(x.roll(1, taps.time))  # type: ignore[method-assign]


@mutation("history of the convolutions one column off", "host")
def _(port: AuthoredPort) -> None:
    if "conv" not in port.planner.model.memory:
        raise Inapplicable

    def change(_: str, __: str, inputs: dict[str, Any]) -> None:
        if "conv" in inputs:
            inputs["conv"] = np.roll(inputs["conv"], 1, -1)

    port.before.append(change)


# Norms, residuals, MLP ----------------------------------------------------------------------------


@mutation("a gain off by one", "graph")
def _(port: AuthoredPort) -> None:
    norm = layer_part(port, "input_layernorm")
    if norm.weight is None:
        raise Inapplicable
    forward = norm.forward

    def changed(x: Tensor) -> Tensor:
        before = norm.weight.data
        norm.weight.data = before + 1
        try:
            return forward(x)
        finally:
            norm.weight.data = before

    norm.forward = changed


@mutation("a norm without its gain", "graph")
def _(port: AuthoredPort) -> None:
    norm = layer_part(port, "post_attention_layernorm")
    if norm.weight is None:
        raise Inapplicable
    forward = norm.forward
    norm.forward = lambda x: forward(x) / norm.weight


@mutation("LayerNorm for RMSNorm", "graph")
def _(port: AuthoredPort) -> None:
    norm = layer_part(port, "input_layernorm")
    if isinstance(norm, LayerNorm):
        raise Inapplicable
    forward = norm.forward
    norm.forward = lambda x: forward(x - x.mean(1, keepdim=True))


@mutation("RMSNorm for LayerNorm", "graph")
def _(port: AuthoredPort) -> None:
    norm = layer_part(port, "input_layernorm")
    if not isinstance(norm, LayerNorm):
        raise Inapplicable

    def changed(x: Tensor) -> Tensor:
        made = normalize(x, norm.size, norm.eps, norm.axis)
        made = made if norm.weight is None else made * norm.weight
        return made if norm.bias is None else made + norm.bias

    norm.forward = changed  # type: ignore[method-assign]


@mutation("a norm without its bias", "graph")
def _(port: AuthoredPort) -> None:
    norm = layer_part(port, "input_layernorm")
    if getattr(norm, "bias", None) is None:
        raise Inapplicable
    after(norm, lambda x: x - norm.bias)


@mutation("the final norm without its bias", "graph")
def _(port: AuthoredPort) -> None:
    for head in port.planner.heads:
        if getattr(head.norm, "bias", None) is None:
            raise Inapplicable
        after(head.norm, lambda x, norm=head.norm: x - norm.bias)


@mutation("MLP behind attention, not beside it", "graph")
def _(port: AuthoredPort) -> None:
    block = attention(port)
    if not isinstance(block, ParallelBlock):
        raise Inapplicable
    block.forward = partial(PreNormBlock.forward, block)  # type: ignore[method-assign]


def epsilon_norms(port: AuthoredPort) -> list[Norm]:
    whole = (*port.planner.model.layers, *port.planner.heads)
    return [m for block in whole for m in block.modules() if isinstance(m, Norm)]


@mutation("epsilon ten times too large", "graph")
def _(port: AuthoredPort) -> None:
    for norm in epsilon_norms(port):
        norm.eps *= 10


@mutation("epsilon of one layer's second norm", "graph")
def _(port: AuthoredPort) -> None:
    norm = layer_part(port, "post_attention_layernorm")
    norm.eps *= 100


@mutation("epsilon of the final norm", "graph")
def _(port: AuthoredPort) -> None:
    for head in port.planner.heads:
        head.norm.eps *= 100


@mutation("epsilon left out", "graph")
def _(port: AuthoredPort) -> None:
    for norm in epsilon_norms(port):
        norm.eps = 0.0


@mutation("a layer skipped", "graph")
def _(port: AuthoredPort) -> None:
    for block in port.planner.model.layers:
        if block.layer == LAYER:
            skip(block)


def skip(block: Block) -> None:
    forward = block.forward

    def changed(flow: dict[str, Any], memory: dict[str, Any]) -> None:
        before = {name: flow[name] for name in block.streams}
        forward(flow, memory)
        flow.update(before)

    block.forward = changed  # type: ignore[method-assign]


@mutation("the last layer skipped", "graph")
def _(port: AuthoredPort) -> None:
    skip(port.planner.model.layers[-1])


@mutation("residual dropped", "graph")
def _(port: AuthoredPort) -> None:
    block = attention(port)
    forward = block.forward

    def changed(flow: dict[str, Any], memory: dict[str, Any]) -> None:
        before = flow["hidden"]
        forward(flow, memory)
        flow["hidden"] = flow["hidden"] - before

    block.forward = changed


@mutation("gate and up swapped", "graph")
def _(port: AuthoredPort) -> None:
    mlp = layer_part(port, "mlp")
    if part(mlp, "gate_proj") is None:
        if not hasattr(mlp, "experts"):
            raise Inapplicable
        expert = mlp.experts[0]
        inner = expert.inner
        after(expert.gate_up_proj, lambda x: torch.cat([x[:, inner:], x[:, :inner]], 1))
        return
    gate, up = part(mlp, "gate_proj"), part(mlp, "up_proj")
    gate.forward, up.forward = up.forward, gate.forward


@mutation("another activation", "graph")
def _(port: AuthoredPort) -> None:
    mlp = layer_part(port, "mlp")
    for owner in (mlp, *getattr(mlp, "experts", ())):
        if hasattr(owner, "act"):
            plain = owner.act is torch.nn.functional.relu
            owner.act = torch.nn.SiLU() if plain else torch.nn.ReLU()


@mutation("gelu in its other form, or for silu", "graph")
def _(port: AuthoredPort) -> None:
    mlp = layer_part(port, "mlp")
    for owner in (mlp, *getattr(mlp, "experts", ())):
        if hasattr(owner, "act"):
            exact = owner.act is torch.nn.functional.gelu
            owner.act = torch.nn.GELU("tanh" if exact else "none")


@mutation("norm inside an MLP left out", "graph")
def _(port: AuthoredPort) -> None:
    mlp = layer_part(port, "mlp")
    if getattr(mlp, "inner_norm", None) is None:
        raise Inapplicable
    mlp.inner_norm = None


@mutation("MLP skipped", "graph")
def _(port: AuthoredPort) -> None:
    mlp = layer_part(port, "mlp")
    after(mlp, torch.zeros_like)


# Embedding and head -------------------------------------------------------------------------------


@mutation("embedding scale missing", "reading")
def _(port: AuthoredPort) -> None:
    model = port.planner.model
    if model.embedding.factor == 1:
        raise Inapplicable
    port.planner.model = replace(model, embedding=replace(model.embedding, factor=1.0))


@mutation("embedding doubled", "reading")
def _(port: AuthoredPort) -> None:
    model = port.planner.model
    table = replace(model.embedding, factor=2 * model.embedding.factor)
    port.planner.model = replace(model, embedding=table)


@mutation("softcap missing", "graph")
def _(port: AuthoredPort) -> None:
    if port.planner.model.softcap is None:
        raise Inapplicable
    port.planner.model = replace(port.planner.model, softcap=None)


@mutation("softcap too large", "graph")
def _(port: AuthoredPort) -> None:
    softcap = port.planner.model.softcap
    if softcap is None:
        raise Inapplicable
    port.planner.model = replace(port.planner.model, softcap=1.5 * softcap)


@mutation("final norm skipped", "graph")
def _(port: AuthoredPort) -> None:
    for head in port.planner.heads:
        head.norm.forward = lambda x: x


@mutation("head rows one off", "graph")
def _(port: AuthoredPort) -> None:
    for head in port.planner.heads:
        after(head.lm_head, lambda x: x.roll(1, 1))


# Reading: a constant stands for another parameter -------------------------------------------------


Read = Callable[[str, Any, Any], Weight]
"""`Block.weight`: the weight of a parameter's path, of its shape, as its module holds it."""


def reading(block: Block, change: Callable[[Read], Read], path: str | None = None) -> None:
    """Have a block read other tensors, or another form of the parameters whose path has `path`.
    Inapplicable if it reads what it read before."""

    def places() -> list[Any]:
        return [(at, item.name, item.part, item.rows, item.columns) for at, item in block.weights()]

    before = places()
    block.weight = change(block.weight)  # type: ignore[method-assign]
    if path is None and places() == before:
        raise Inapplicable
    if path is not None and not any(path in at for at, *_ in before):
        raise Inapplicable


def rename(block: Block, change: Callable[[str], str]) -> None:
    """Have a block read tensors of other names."""

    def changed(read: Read) -> Read:
        def weight(path: str, shape: Any, held: Any) -> Weight:
            item = read(path, shape, held)
            return replace(item, name=change(item.name))

        return weight

    reading(block, changed)


def stand_in(block: Block, ours: str, theirs: str) -> None:
    """Have one submodule of a block read another's tensors."""
    reading(block, lambda read: lambda path, *rest: read(path.replace(ours, theirs), *rest))


@mutation("a weight matrix transposed", "reading")
def _(port: AuthoredPort) -> None:
    block = attention(port)
    name = own_name(block, "self_attn", "q_proj")
    shape = block.get_submodule(name).weight.shape
    if shape[0] != shape[1]:
        raise Inapplicable

    def transposed(read: Read) -> Read:
        def weight(path: str, *rest: Any) -> Weight:
            item = read(path, *rest)
            if path != f"{name}.weight":
                return item
            pick = item.pick or (lambda tensor: tensor)
            return replace(item, pick=lambda tensor: pick(tensor).T)

        return weight

    reading(block, transposed, f"{name}.weight")


@mutation("a weight matrix is its neighbour's", "reading")
def _(port: AuthoredPort) -> None:
    block = attention(port)
    output = own_name(block, "self_attn", "o_proj")
    if all(part(b, "self_attn") is None for b in layer_blocks(port, LAYER - 1)):
        raise Inapplicable
    rename(block, lambda n: n.replace(f"layers.1.{output}", f"layers.0.{output}"))


@mutation("keys read the values' weights", "reading")
def _(port: AuthoredPort) -> None:
    block = attention(port)
    if not hasattr(mixer(port), "v_proj"):
        raise Inapplicable
    stand_in(block, own_name(block, "self_attn", "k_proj"), own_name(block, "self_attn", "v_proj"))


@mutation("gate reads up's weights", "reading")
def _(port: AuthoredPort) -> None:
    block = next(iter(layer_blocks(port, LAYER)))
    for gate, up in (("mlp.gate_proj", "mlp.up_proj"), ("feed_forward.w1", "feed_forward.w3")):
        if gate in dict(block.named_modules()):
            return stand_in(block, gate, up)
    raise Inapplicable


@mutation("two layers' norms swapped", "reading")
def _(port: AuthoredPort) -> None:
    norm = re.compile(r"layers\.[01]\.(input_layernorm|post_attention_layernorm|operator_norm)")
    swap = {"layers.0": "layers.1", "layers.1": "layers.0"}

    def change(name: str) -> str:
        return re.sub(r"layers\.[01]", lambda m: swap[m[0]], name) if norm.search(name) else name

    blocks = [
        block
        for layer in (0, 1)
        for block in layer_blocks(port, layer)
        if any(norm.search(weight.name) for _, weight in block.weights())
    ]
    if not blocks:  # OLMo's norms have no weights
        raise Inapplicable
    for block in blocks:
        rename(block, change)


def without_factor(module: Any) -> None:
    held = module.held.get("weight")
    if held is None or held.factor == 1:
        raise Inapplicable
    module.held["weight"] = replace(held, factor=1.0)


@mutation("factor on what attention adds missing", "reading")
def _(port: AuthoredPort) -> None:
    without_factor(part(mixer(port), "o_proj"))


@mutation("factor on logits missing", "reading")
def _(port: AuthoredPort) -> None:
    for head in port.planner.heads:
        without_factor(head.norm)


@mutation("gains read without their offset", "reading")
def _(port: AuthoredPort) -> None:
    gains = ((norm, norm.held.get("weight")) for norm in epsilon_norms(port))
    norms = [norm for norm, held in gains if held is not None and held.pick is not None]
    if not norms:
        raise Inapplicable
    for norm in norms:
        norm.held["weight"] = replace(norm.held["weight"], pick=None)


@mutation("biases of logits left out", "graph")
def _(port: AuthoredPort) -> None:
    for head in port.planner.heads:
        if head.lm_head.bias is None:
            raise Inapplicable
        after(head.lm_head, lambda x, one=head.lm_head: x - one.bias.reshape(1, -1, 1, 1))


@mutation("head rows of the wrong tokens", "reading")
def _(port: AuthoredPort) -> None:
    head = port.planner.heads[1]
    weight = head.weight

    def changed(path: str, shape: Any, held: Any) -> Any:
        item = weight(path, shape, held)
        return (
            item if item.rows is None else replace(item, rows=(item.rows[0] - 1, item.rows[1] - 1))
        )

    head.weight = changed  # type: ignore[method-assign]


# What single families have ------------------------------------------------------------------------


@mutation("an expert swapped", "graph")
def _(port: AuthoredPort) -> None:
    experts = layer_part(port, "mlp")
    if not hasattr(experts, "experts"):
        raise Inapplicable
    one, other = experts.experts[0], experts.experts[1]
    one.forward, other.forward = other.forward, one.forward


@mutation("an expert's weights are the next one's", "reading")
def _(port: AuthoredPort) -> None:
    block = next((b for b in port.planner.model.layers if isinstance(b, RoutedBlock)), None)
    if block is None:
        raise Inapplicable
    weight = block.weight

    def changed(path: str, shape: Any, held: Any) -> Any:
        item = weight(path, shape, held)
        return replace(item, rows=(1, 2)) if item.rows == (0, 1) else item

    block.weight = changed  # type: ignore[method-assign]


def mixtures(port: AuthoredPort) -> list[Any]:
    blocks = [block for block in port.planner.model.layers if hasattr(block, "mixture")]
    if not blocks:
        raise Inapplicable
    return blocks


@mutation("a token takes one expert fewer", "graph")
def _(port: AuthoredPort) -> None:
    block = mixtures(port)[0]
    if block.bounded:  # it takes two, whatever else it holds
        block.mixture = LoneMixture(**vars(block.mixture))
    else:
        block.mixture = replace(block.mixture, chosen=block.mixture.chosen - 1)


class LoneMixture(SparseMixture):
    def weigh(self, logits: Tensor, axes: Axes, correction: Any = None) -> Tensor:
        first, _ = self.taken(logits, axes)
        return self.share(logits, first)


@mutation("weights of experts normalised, or not", "graph")
def _(port: AuthoredPort) -> None:
    for block in mixtures(port):
        if block.bounded:  # its shares are not made of probabilities
            block.mixture = NormedMixture(**vars(block.mixture))
        else:
            block.mixture = replace(block.mixture, normalised=not block.mixture.normalised)


class NormedMixture(SparseMixture):
    def weigh(self, logits: Tensor, axes: Axes, correction: Any = None) -> Tensor:
        weights = super().weigh(logits, axes)
        return weights / weights.sum(1, keepdim=True)


@mutation("experts get each other's weights", "graph")
def _(port: AuthoredPort) -> None:
    for block in mixtures(port):
        after(block.router_proj, lambda x: x.roll(1, 1))


@mutation("experts chosen without their correction", "graph")
def _(port: AuthoredPort) -> None:
    for block in mixtures(port):
        if block.correction is None:
            raise Inapplicable
        block.correction.forward = lambda scores: scores


@mutation("the sum of experts not normed", "graph")
def _(port: AuthoredPort) -> None:
    norms = [block for block in port.planner.model.layers if isinstance(block, SumNorm)]
    if not norms:
        raise Inapplicable
    for block in norms:
        block.get_submodule(block.normed).forward = lambda x: x  # type: ignore[method-assign]


@mutation("experts of any group", "graph")
def _(port: AuthoredPort) -> None:
    for block in mixtures(port):
        if block.mixture.open_groups == block.mixture.groups:
            raise Inapplicable
        block.mixture = replace(block.mixture, open_groups=block.mixture.groups)


@mutation("bounds of experts left out", "graph")
def _(port: AuthoredPort) -> None:
    bounded = [m for b in mixtures(port) for m in b.modules() if hasattr(m, "limit")]
    if not bounded:
        raise Inapplicable
    for experts in bounded:
        experts.limit = 1e4


def sparse_mixtures(port: AuthoredPort) -> Iterator[Any]:
    """The blocks of which a token's experts share weights with those near them."""
    blocks = [block for block in mixtures(port) if block.bounded]
    if not blocks:
        raise Inapplicable
    yield from blocks


@mutation("experts twice as far below are near", "graph")
def _(port: AuthoredPort) -> None:
    for block in sparse_mixtures(port):
        block.mixture = replace(block.mixture, near=2 * block.mixture.near)


@mutation("experts a hundredth farther below are near", "graph")
def _(port: AuthoredPort) -> None:
    for block in sparse_mixtures(port):
        block.mixture = replace(block.mixture, near=1.01 * block.mixture.near)


@mutation("no expert is near", "graph")
def _(port: AuthoredPort) -> None:
    for block in sparse_mixtures(port):
        block.mixture = replace(block.mixture, near=0.0)


@mutation("all experts are near", "graph")
def _(port: AuthoredPort) -> None:
    for block in sparse_mixtures(port):
        block.mixture = replace(block.mixture, near=1e4)


@mutation("the second expert shares its weight with the first", "graph")
def _(port: AuthoredPort) -> None:
    for block in sparse_mixtures(port):
        block.mixture = OpenMixture(**vars(block.mixture))


class OpenMixture(SparseMixture):
    def share(self, logits: Tensor, taken: Tensor, open_to: Tensor | None = None) -> Tensor:
        return super().share(logits, taken)


@mutation("the first expert is the second best", "graph")
def _(port: AuthoredPort) -> None:
    for block in sparse_mixtures(port):
        block.mixture = SwappedMixture(**vars(block.mixture))


class SwappedMixture(SparseMixture):
    def taken(self, logits: Tensor, axes: Axes) -> tuple[Tensor, Tensor]:
        first, second = super().taken(logits, axes)
        return second, first


@mutation("sinks of attention left out", "reading")
def _(port: AuthoredPort) -> None:
    block = attention(port)

    def without(read: Read) -> Read:
        def weight(path: str, *rest: Any) -> Weight:
            item = read(path, *rest)
            lost = "sinks" in path
            return replace(item, pick=lambda x: torch.full_like(x, -1e4)) if lost else item

        return weight

    reading(block, without, "sinks")


@mutation("matrices forgotten", "host")
def _(port: AuthoredPort) -> None:
    memory = port.planner.model.memory
    names = [name for name, kept in memory.items() if isinstance(kept, Matrix)]
    if not names:
        raise Inapplicable

    def change(_: str, __: str, inputs: dict[str, Any]) -> None:
        for name in names:
            if name in inputs:
                inputs[name] = np.zeros_like(inputs[name])

    port.before.append(change)


# The delta rule -----------------------------------------------------------------------------------


def first_mixer(port: AuthoredPort, kind: type[M]) -> M:
    """The mixer of the first layer that has one of a kind."""
    for block in port.planner.model.layers:
        for module in block.modules():
            if isinstance(module, kind):
                return module
    raise Inapplicable


def with_values(
    mixer: torch.nn.Module, leaf: torch.nn.Module, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    """Let a mixer compute with other values of a parameter of its `leaf`."""
    forward = mixer.forward

    def changed(*args: Any) -> Any:
        own = leaf._parameters
        before = own[name]
        assert before is not None
        own[name] = change(before)  # type: ignore[assignment]
        try:
            return forward(*args)
        finally:
            own[name] = before

    mixer.forward = changed  # type: ignore[method-assign]


def delta_rule(port: AuthoredPort) -> DeltaNet:
    return first_mixer(port, DeltaNet)


def split_otherwise(port: AuthoredPort, change: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    """Change the queries, keys and values of a layer, `(1, channels, 1, T)` each."""
    rule = delta_rule(port)
    act = rule.act
    rule.act = lambda x: torch.cat(change(*act(x).split(rule.sizes, dim=1)), 1)


@mutation("rates of correction half as large", "graph")
def _(port: AuthoredPort) -> None:
    rule = delta_rule(port)
    if rule.most == 1:
        raise Inapplicable
    rule.most /= 2


@mutation("rates of correction all the largest", "graph")
def _(port: AuthoredPort) -> None:
    after(delta_rule(port).in_proj_b, lambda x: torch.full_like(x, 20))


@mutation("decays of the delta rule left out", "graph")
def _(port: AuthoredPort) -> None:
    rule = delta_rule(port)
    after(rule.decays, lambda made: (made[0], torch.zeros_like(made[1])))


@mutation("decays of the delta rule of the next head", "graph")
def _(port: AuthoredPort) -> None:
    rule = delta_rule(port)
    after(rule.decays, lambda made: (made[0], made[1].roll(1, 1)))


@mutation("keys and queries of the delta rule of any length", "graph")
def _(port: AuthoredPort) -> None:
    delta_rule(port).unit = lambda x: x  # type: ignore[method-assign]


@mutation("keys and queries of the delta rule swapped", "graph")
def _(port: AuthoredPort) -> None:
    split_otherwise(port, lambda q, k, v: (k, q, v))


@mutation("keys and queries of the delta rule of the next head", "graph")
def _(port: AuthoredPort) -> None:
    heads = delta_rule(port).heads
    if heads.key_heads == 1:
        raise Inapplicable
    split_otherwise(port, lambda q, k, v: (q.roll(heads.keys, 1), k.roll(heads.keys, 1), v))


@mutation("an activation behind a convolution of the delta rule left out", "graph")
def _(port: AuthoredPort) -> None:
    delta_rule(port).act = lambda x: x


@mutation("answers of the delta rule not normed", "graph")
def _(port: AuthoredPort) -> None:
    delta_rule(port).norm.forward = lambda x: x  # type: ignore[method-assign]


@mutation("gates of the delta rule left out", "graph")
def _(port: AuthoredPort) -> None:
    open_ = 1.2784645  # of which the SiLU is 1
    after(delta_rule(port).in_proj_z, lambda x: torch.full_like(x, open_))


# Mamba-2 ------------------------------------------------------------------------------------------


def state_space(port: AuthoredPort) -> Mamba2:
    return first_mixer(port, Mamba2)


def with_numbers(port: AuthoredPort, name: str, change: Callable[[Tensor], Tensor]) -> None:
    mixer = state_space(port)
    with_values(mixer, mixer.space, name, change)


def stepped(port: AuthoredPort, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Change the steps and the decays of a layer."""
    space = state_space(port).space
    forward = space.forward
    space.forward = lambda x: change(*forward(x))  # type: ignore[method-assign]


def convolved(port: AuthoredPort, change: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    """Change the values, keys and queries of a layer, `(1, channels, 1, T)` each."""
    mixer = state_space(port)
    act = mixer.act
    mixer.act = lambda x: torch.cat(change(*act(x).split(mixer.sizes, dim=1)), 1)


@mutation("decays of Mamba-2 with the other sign", "graph")
def _(port: AuthoredPort) -> None:
    stepped(port, lambda steps, decays: (steps, -decays))


@mutation("decays of Mamba-2 left out", "graph")
def _(port: AuthoredPort) -> None:
    stepped(port, lambda steps, decays: (steps, torch.zeros_like(decays)))


@mutation("decays of Mamba-2 of the next head", "graph")
def _(port: AuthoredPort) -> None:
    stepped(port, lambda steps, decays: (steps, decays.roll(1, 1)))


@mutation("decays of Mamba-2 of stored logarithms", "graph")
def _(port: AuthoredPort) -> None:
    with_numbers(port, "A_log", lambda rates: -(-rates).log())


@mutation("steps of Mamba-2 do not multiply inputs", "graph")
def _(port: AuthoredPort) -> None:
    stepped(port, lambda steps, decays: (torch.ones_like(steps), decays))


@mutation("biases of steps of Mamba-2 left out", "graph")
def _(port: AuthoredPort) -> None:
    with_numbers(port, "dt_bias", torch.zeros_like)


@mutation("bounds of steps of Mamba-2 left out", "graph")
def _(port: AuthoredPort) -> None:
    space = state_space(port).space
    if space.bounds == (None, None):
        raise Inapplicable
    space.bounds = None, None


@mutation("bounds of steps of Mamba-2 on values alone", "graph")
def _(port: AuthoredPort) -> None:
    space = state_space(port).space
    if space.bounds == (None, None):
        raise Inapplicable
    bounded = space.forward
    space.forward = lambda x: (  # type: ignore[method-assign]
        bounded(x)[0],
        Decays.steps(space, x) * space.A_log,
    )


@mutation("a token's own input to Mamba-2 left out", "graph")
def _(port: AuthoredPort) -> None:
    with_numbers(port, "D", torch.zeros_like)


@mutation("keys and queries of Mamba-2 swapped", "graph")
def _(port: AuthoredPort) -> None:
    convolved(port, lambda v, k, q: (v, q, k))


@mutation("keys and queries of Mamba-2 of the next group", "graph")
def _(port: AuthoredPort) -> None:
    heads = state_space(port).heads
    if heads.key_heads == 1:
        raise Inapplicable
    convolved(port, lambda v, k, q: (v, k.roll(heads.keys, 1), q.roll(heads.keys, 1)))


@mutation("an activation behind a convolution of Mamba-2 left out", "graph")
def _(port: AuthoredPort) -> None:
    state_space(port).act = lambda x: x


@mutation("gates of Mamba-2 left out", "graph")
def _(port: AuthoredPort) -> None:
    mixer = state_space(port)
    gate = mixer.gate
    mixer.gate = lambda answers, gates: gate(  # type: ignore[method-assign]
        answers, torch.ones_like(gates)
    )


@mutation("gates of Mamba-2 on the other side of their norm", "graph")
def _(port: AuthoredPort) -> None:
    mixer = state_space(port)
    if mixer.gated == "unnormed":
        raise Inapplicable
    mixer.gated = "last" if mixer.gated == "first" else "first"


@mutation("groups of Mamba-2 normed together", "graph")
def _(port: AuthoredPort) -> None:
    norm = getattr(state_space(port), "norm", None)
    if not isinstance(norm, GroupNorm):
        raise Inapplicable
    norm.groups, norm.size = 1, norm.size * norm.groups


# Scans of Mamba, and biases by distance -----------------------------------------------------------


def scan(port: AuthoredPort) -> SelectiveScan:
    return first_mixer(port, SelectiveScan)


def with_rates(port: AuthoredPort, name: str, change: Callable[[Tensor], Tensor]) -> None:
    mixer = scan(port)
    with_values(mixer, mixer.rates, name, change)


def read_by_scan(port: AuthoredPort, change: Callable[..., Any]) -> None:
    """Change the steps' sources, the keys and the queries of a scan."""
    mixer = scan(port)
    after(mixer.x_proj, lambda x: torch.cat(change(*x.split(mixer.parts, dim=1)), 1))


@mutation("decays of a scan left out", "graph")
def _(port: AuthoredPort) -> None:
    with_rates(port, "A_log", torch.zeros_like)


@mutation("decays of a scan of the next channel", "graph")
def _(port: AuthoredPort) -> None:
    with_rates(port, "A_log", lambda rates: rates.roll(1, 2))


@mutation("decays of a scan of the next state", "graph")
def _(port: AuthoredPort) -> None:
    with_rates(port, "A_log", lambda rates: rates.roll(1, 1))


@mutation("decays of a scan of stored logarithms", "graph")
def _(port: AuthoredPort) -> None:
    with_rates(port, "A_log", lambda rates: -(-rates).log())


@mutation("a token's own input to a scan left out", "graph")
def _(port: AuthoredPort) -> None:
    with_rates(port, "D", torch.zeros_like)


@mutation("biases of steps of a scan left out", "graph")
def _(port: AuthoredPort) -> None:
    projection = scan(port).dt_proj
    projection.forward = projection.contract  # type: ignore[method-assign]


@mutation("keys and queries of a scan swapped", "graph")
def _(port: AuthoredPort) -> None:
    read_by_scan(port, lambda steps, k, q: (steps, q, k))


@mutation("keys of a scan of the next state", "graph")
def _(port: AuthoredPort) -> None:
    read_by_scan(port, lambda steps, k, q: (steps, k.roll(1, 1), q))


@mutation("norms inside a scan left out", "graph")
def _(port: AuthoredPort) -> None:
    mixer = scan(port)
    if mixer.form.norm_eps is None:
        raise Inapplicable
    for name in NORMS:
        setattr(mixer, name, torch.nn.Identity())


@mutation("epsilon of the norms inside a scan", "reading")
def _(port: AuthoredPort) -> None:
    mixer = scan(port)
    if mixer.form.norm_eps is None:
        raise Inapplicable
    for name in NORMS:
        getattr(mixer, name).eps *= 10


@mutation("an activation behind a convolution of a scan left out", "graph")
def _(port: AuthoredPort) -> None:
    scan(port).act = lambda x: x


@mutation("gates of a scan left out", "graph")
def _(port: AuthoredPort) -> None:
    open_ = 1.2784645  # of which the SiLU is 1
    after(scan(port).in_proj_z, lambda x: torch.full_like(x, open_))


def sloped(port: AuthoredPort, change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> None:
    """Change the slopes of a model's heads."""
    for block in port.planner.model.layers:
        attn = part(block, "self_attn")
        if attn is None or not attn.kind.slopes:
            raise Inapplicable
        attn.kind = replace(attn.kind, slopes=change(attn.kind.slopes))


@mutation("slopes of the next head", "graph")
def _(port: AuthoredPort) -> None:
    sloped(port, lambda slopes: slopes[1:] + slopes[:1])


@mutation("slopes of heads in reverse", "graph")
def _(port: AuthoredPort) -> None:
    sloped(port, lambda slopes: slopes[::-1])


@mutation("slopes 0.1 % too steep", "graph")
def _(port: AuthoredPort) -> None:
    sloped(port, lambda slopes: tuple(1.001 * slope for slope in slopes))


@mutation("the slope of one head left out", "graph")
def _(port: AuthoredPort) -> None:
    sloped(port, lambda slopes: (0.0, *slopes[1:]))


def spaced(port: AuthoredPort, change: Callable[[np.ndarray, int], np.ndarray]) -> None:
    """Change the distances of a mask's keys that are seen; `change` also gets the slots before the
    call."""
    if not any(isinstance(s, Mask) and s.distances for s in port.planner.model.host.values()):
        raise Inapplicable
    names = masks(port)

    def changed(_: str, __: str, inputs: dict[str, Any]) -> None:
        for name in names.keys() & inputs.keys():
            own = inputs[name]
            inputs[name] = np.where(own > -3e4, change(own, names[name]), own).astype(own.dtype)

    port.before.append(changed)


@mutation("masks without distances", "host")
def _(port: AuthoredPort) -> None:
    spaced(port, lambda mask, _: np.zeros_like(mask))


@mutation("distances with the other sign", "host")
def _(port: AuthoredPort) -> None:
    spaced(port, lambda mask, _: -mask)


@mutation("distances of earlier calls' tokens one too long", "host")
def _(port: AuthoredPort) -> None:
    spaced(port, lambda mask, slots: mask - (np.arange(mask.shape[-1]) < slots))


@mutation("the embedding is not normed", "graph")
def _(port: AuthoredPort) -> None:
    block = port.planner.model.layers[0]
    if not isinstance(block, BloomBlock):
        raise Inapplicable
    block.first = None


@mutation("factors on what projections make left out", "reading")
def _(port: AuthoredPort) -> None:
    block = port.planner.model.layers[LAYER]
    if not isinstance(block, FalconH1Block):
        raise Inapplicable
    block.made = {}


@mutation("router state one layer late", "graph")
def _(port: AuthoredPort) -> None:
    routed = [b for b in port.planner.model.layers if "router" in b.reads]
    if not routed:
        raise Inapplicable
    around(routed[0], lambda flow, _: flow.update(router=torch.zeros_like(flow["router"])))


@mutation("per-layer input of the neighbour", "graph")
def _(port: AuthoredPort) -> None:
    block = attention(port)
    if not getattr(block, "width", 0):
        raise Inapplicable
    block.layer += 1


@mutation("layer scalar missing", "graph")
def _(port: AuthoredPort) -> None:
    block = attention(port)
    if not hasattr(block, "layer_scalar"):
        raise Inapplicable
    forward = block.forward

    def changed(flow: dict[str, Any], memory: dict[str, Any]) -> None:
        forward(flow, memory)
        flow["hidden"] = flow["hidden"] / block.layer_scalar.value

    block.forward = changed


def streams(port: AuthoredPort) -> Any:
    """What a layer does with several streams."""
    block = attention(port)
    if not hasattr(block, "altup"):
        raise Inapplicable
    return block


@mutation("streams not predicted", "graph")
def _(port: AuthoredPort) -> None:
    streams(port).altup.predict = lambda before: before


@mutation("streams of the neighbours predicted", "graph")
def _(port: AuthoredPort) -> None:
    altup = streams(port).altup
    predict = altup.predict
    altup.predict = lambda before: [*predict(before)[1:], predict(before)[0]]


@mutation("streams not corrected", "graph")
def _(port: AuthoredPort) -> None:
    altup = streams(port).altup

    def correct(predicted: list[Tensor], computed: Tensor) -> list[Tensor]:
        return [computed if one is predicted[altup.active] else one for one in predicted]

    altup.correct = correct


@mutation("scale of the active stream missing", "graph")
def _(port: AuthoredPort) -> None:
    altup = streams(port).altup
    altup.asked = lambda corrected: corrected[altup.active]


@mutation("low-rank residual missing", "graph")
def _(port: AuthoredPort) -> None:
    laurel = streams(port).laurel
    laurel.forward = lambda x: x * laurel.factor


@mutation("sparse gates open for all channels", "graph")
def _(port: AuthoredPort) -> None:
    mlp = streams(port).mlp
    mlp.act = mlp.act.keywords["act"]


@mutation("sparse gates open above another share", "graph")
def _(port: AuthoredPort) -> None:
    mlp = streams(port).mlp
    mlp.act = partial(mlp.act, deviations=1.05 * mlp.act.keywords["deviations"])


@mutation("a stream left out of the mean", "graph")
def _(port: AuthoredPort) -> None:
    streams(port)
    merge: Any = port.planner.model.layers[-1]
    after(merge.altup_unembed_projections[-1], torch.zeros_like)


@mutation("shared caches without their values", "graph")
def _(port: AuthoredPort) -> None:
    sharing = [
        (block, attention.kind.name)
        for block in port.planner.model.layers
        if isinstance(attention := getattr(block, "self_attn", None), SharedAttention)
    ]
    if not sharing:
        raise Inapplicable
    block, kind = sharing[-1]
    keys, values = shared_names(kind)
    around(block, lambda flow, _: flow.update({values: flow[keys]}))


# Constants: the package holds other values --------------------------------------------------------


def stored(port: AuthoredPort, name: str, shard: str = "chunk-00") -> tuple[str, Any]:
    """A module's weight in a shard, by Llama's name."""
    made = port.encode(shard)
    ends = tuple(f"{one}.weight" for one in names_of(name))
    for label, encoded in reversed(made.items()):
        if label.endswith(ends):
            return label, encoded
    raise Inapplicable


def put(port: AuthoredPort, label: str, encoded: Any, shard: str = "chunk-00") -> None:
    port.stored.setdefault(shard, {})[label] = encoded


def scaled(encoded: Any, factor: float) -> Any:
    half = np.float16(factor)
    if isinstance(encoded, Dense):
        return Dense(encoded.weight * half)
    if isinstance(encoded, Affine):
        return replace(encoded, scale=encoded.scale * half)
    return replace(encoded, lut=encoded.lut * half)


@mutation("stored queries doubled", "constants")
def _(port: AuthoredPort) -> None:
    label, encoded = stored(port, "q_proj")
    put(port, label, scaled(encoded, 2))


@mutation("a stored matrix with the wrong sign", "constants")
def _(port: AuthoredPort) -> None:
    label, encoded = stored(port, "o_proj")
    put(port, label, scaled(encoded, -1))


def rearranged(encoded: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(encoded, Dense):
        return Dense(change(encoded.weight))
    if isinstance(encoded, Affine):
        return replace(encoded, data=change(encoded.data))
    return replace(encoded, indices=change(encoded.indices))


@mutation("a stored matrix transposed", "constants")
def _(port: AuthoredPort) -> None:
    label, encoded = stored(port, "q_proj")
    shape = next(iter(vars(encoded).values())).shape
    if shape[0] != shape[1]:
        raise Inapplicable
    put(port, label, rearranged(encoded, lambda x: np.swapaxes(x, 0, 1).copy()))


@mutation("one stored key head is another's", "constants")
def _(port: AuthoredPort) -> None:
    label, encoded = stored(port, "k_proj")
    put(port, label, rearranged(encoded, lambda x: np.roll(x, len(x) // 2, 0)))


@mutation("one stored row is its neighbour's", "constants")
def _(port: AuthoredPort) -> None:
    label, encoded = stored(port, "down_proj")

    def change(x: Any) -> Any:
        x = x.copy()
        x[3] = x[4]
        return x

    put(port, label, rearranged(encoded, change))


@mutation("one stored element is off", "constants")
def _(port: AuthoredPort) -> None:
    label, encoded = stored(port, "down_proj")

    def change(x: Any) -> Any:
        x = x.copy()
        x[3, 4] = x[3, 4] + 1 if x[3, 4] < 3 else x[3, 4] - 1
        return x

    put(port, label, rearranged(encoded, change))


@mutation("a stored gain off by one", "constants")
def _(port: AuthoredPort) -> None:
    label, encoded = stored(port, "input_layernorm")
    put(port, label, Dense(encoded.weight + np.float16(1)))


@mutation("two stored matrices swapped", "constants")
def _(port: AuthoredPort) -> None:
    made = port.encode("chunk-00")
    pairs = [
        (a, b)
        for a in made
        for b in made
        if a < b
        and a.endswith("proj.weight")
        and b.endswith("proj.weight")
        and next(iter(vars(made[a]).values())).shape == next(iter(vars(made[b]).values())).shape
    ]
    if not pairs:
        raise Inapplicable
    a, b = pairs[0]
    put(port, a, made[b])
    put(port, b, made[a])


@mutation("stored head of the other slice", "constants")
def _(port: AuthoredPort) -> None:
    label, _ = stored(port, "lm_head", "head-0")
    _, other = stored(port, "lm_head", "head-1")
    put(port, label, other, "head-0")


@mutation("embedding rows one off", "constants")
def _(port: AuthoredPort) -> None:
    tables = port.tables
    vars(port)["tables"] = replace(tables, tokens=np.roll(tables.tokens[:], 1, 0))


@mutation("stored positions one row off", "constants")
def _(port: AuthoredPort) -> None:
    tables = port.tables
    if POSITIONS not in tables.others:
        raise Inapplicable
    rolled = np.roll(tables.others[POSITIONS][:], 1, 0)
    vars(port)["tables"] = replace(tables, others=tables.others | {POSITIONS: rolled})


@mutation("stored rotary rows one off", "constants")
def _(port: AuthoredPort) -> None:
    tables = port.tables
    rotary_of(port)
    rolled = {name: np.roll(rows, 1, 1) for name, rows in tables.rotary.items()}
    vars(port)["tables"] = replace(tables, rotary=rolled)


# ZAYA's departures: what a published port does differently ----------------------------------------

PORT = ("soft-routing", "silu-router", "bias-on-logits", "no-router-state")
"""Four at once: a port that passed the gate that this one replaced."""
DEPARTURES: dict[str, tuple[str, ...]] = {
    **{f"departure: {name}": (name,) for name in zaya_departures.DEPARTURES
       if name not in ("skip-large-bias",)},
    "departure: four of the published port": PORT,
}  # fmt: skip


def mutations(family: str) -> Iterator[tuple[str, Place]]:
    """The names of all mutations that may apply to a family, and where they change a port."""
    for name, item in TABLE.items():
        yield name, item.place
    if family == "zaya":
        for name in DEPARTURES:
            yield name, "departure"
