"""ane-book's measurements: shards of decoder layers with an MLState each, and slices of the head in
parallel."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from cetane.perf.cost import Work
from cetane.perf.measurement import (
    FileKind,
    Kind,
    Measurement,
    Row,
    Unusable,
    check_remarks,
    chip,
    decoder,
    number,
    whole,
)
from cetane.perf.shapes import COPIES, HALF, Bits, Decoder

EIGHT_BITS: Bits = {"attention": 8, "mlp": 8, "head": 8}
SINGLE = re.compile(r"single shard (\d+)L")
"""The layout of one shard, with the number of its layers."""


def measurements_of(file: str, row: Row) -> Iterator[Measurement]:
    """The measurements of a row: a step, and its layers and head if they were timed."""
    if row["model"].startswith("synthetic") or row["T"] not in ("1", "1 decode / 4 prefill", ""):
        return
    check_remarks(row)
    model = decoder(row)
    where = chip(row["hw"])

    def measured(what: str, kind: Kind, works: list[Work], column: str) -> Iterator[Measurement]:
        if (ms := number(row, column)) is not None:
            yield Measurement.of_row(file, row, where, what, kind, works, ms)

    layout = row["topology"]
    if "LM-head shard" in layout:
        megabytes = number(row, "weight_mb_per_shard") or 0
        work = Work(weights={8.0: megabytes * 1e6})
        yield from measured(layout, "part", [work], "ms_per_call")
        return
    head = Work(weights={8.0: model.head})
    slots = int(number(row, "state_len") or 0)
    if model.experts:
        layers = zaya_layers(model, layout, row["quant_label"], slots)
    else:
        layers = dense_layers(model, layout, row["compute_units_runtime"], slots)
        if SINGLE.match(layout):
            yield from measured(layout, "step", layers, "ms_per_shard")
            return
    host = Work(calls=0, sorted=model.vocab if sorts_logits(row) else 0)
    yield from measured(f"{layout}: layers", "part", layers, "layers_ms_per_tok")
    yield from measured(f"{layout}: head", "part", [head], "head_ms_per_tok")
    yield from measured(layout, "step", [*layers, head, host], "ms_per_tok")


def sorts_logits(row: Row) -> bool:
    """Whether the host sorts all logits: those runtimes sample at temperature 1 by default."""
    return "ZAYA" in row["model"] or "temperature=1" in row["mode"]


def dense_layers(model: Decoder, layout: str, units: str, slots: int) -> list[Work]:
    """A program for each shard of dense layers, loaded for some compute units. Raises Unusable
    without slots, and for a layout that the model cannot have."""
    if not slots:
        raise Unusable("its context is not stated")
    single = SINGLE.match(layout)
    counts = [whole(single[1])] if single else layers_by_shard(layout, model.layers)
    if sum(counts) > model.layers:
        raise Unusable(f"the layout {layout!r} has not {model.layers} layers")
    programs = [
        model.program(end - count, end, slots, EIGHT_BITS, "blended")
        for count, end in zip(counts, accumulate(counts), strict=True)
    ]
    return [replace(program, any_unit=float(units == "all")) for program in programs]


def zaya_layers(model: Decoder, layout: str, quant: str, slots: int) -> list[Work]:
    """The published port: for each layer, a program of attention and one of all experts."""
    query = model.query_heads * model.head_dim
    keys = model.kv_heads * model.head_dim
    projections = 2 * model.hidden * query
    if "probe" in layout:  # queries to output, no cache
        attention = Work(weights={8.0: projections})
    elif "CCA" in layout:  # queries and keys in fp16, with one tap of the convolutions
        half = model.hidden * (query + keys) + 170_000
        rest = model.hidden * (query + keys)
        attention = Work(weights={16.0: half, 8.0: rest})
    else:
        attention = Work(weights={8.0: projections + 2 * model.hidden * keys})
    if "probe" not in layout:
        memory = 2 * HALF * slots * keys * (1 + COPIES["blend"])
        attention = Work(weights=attention.weights, memory=memory)
    experts = Work(weights={4.0 if "INT4" in quant else 8.0: model.experts})
    return [attention.times(model.layers), experts.times(model.layers)]


def layers_by_shard(layout: str, layers: int) -> list[int]:
    """The layers of every shard, from `16+8+6+2` or `10x3+2` (ten of three, one of two). Raises
    Unusable if they are not `layers` together."""
    counts: list[int] = []
    for part in layout.split(" ")[0].split("+"):
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)", part)
        if match is None:
            raise Unusable(f"the layout {layout!r} is not understood")
        shards, each = whole(match[1] or "1"), whole(match[2])
        if not 0 < shards * each <= layers:
            raise Unusable(f"the layout {layout!r} has not {layers} layers")
        counts += [each] * shards
    if sum(counts) != layers:
        raise Unusable(f"the layout {layout!r} has not {layers} layers")
    return counts


ANE_BOOK = FileKind(
    marks=("topology", "ms_per_tok"),
    columns=(
        "id", "model", "hw", "topology", "T", "mode", "compute_units_runtime", "quant_label",
        "ms_per_tok", "source",
    ),
    parse=measurements_of,
)  # fmt: skip
