"""The evidence: measurements of decoding on the ANE, as work and milliseconds.

The files are `data/evidence/*.csv`, and those that `cetane import` writes. Each row has its source,
and README.md there explains the columns. A row becomes a measurement of a step, and of every part
of it that was timed. Rows that the model cannot predict are left out, with the reason.
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from cetane.errors import CetaneError
from cetane.hardware.chips import Chip, chip_of, find_chip
from cetane.perf.cost import Work
from cetane.perf.shapes import COPIES, HALF, Bits, Contract, Decoder, load_decoders
from cetane.validation import parse_json, validated

Row = dict[str, str]
Kind = Literal["step", "part", "prefill", "verify"]
DEVICE_COLUMNS = ("id", "model", "chip", "what", "kind", "ms", "works", "source")
COLUMNS = {
    "book": (
        "topology", "ms_per_tok", "id", "model", "hw", "T", "mode", "compute_units_runtime",
        "quant_label", "source",
    ),
    "chunks": (
        "layout", "ms_per_step", "id", "model", "quant", "device", "compute", "kind", "status",
        "note", "source",
    ),
    "device": ("works", "ms", "id", "model", "chip", "what", "kind", "source"),
}  # fmt: skip
"""The columns that each kind of file must have. The first two tell the kinds apart."""
UNUSABLE = {
    "prewarm": "a first step",
    "host loaded": "the machine was busy",
    "locked IOSurface": "its buffers were locked",
    "LUT explosion": "its palettes had grown",
    "GPU in practice": "not on the ANE",
    "poorly ANE routed": "not on the ANE",
}
"""Remarks in rows that make a measurement unusable, with the reasons."""
HINT = f"cetane import writes {', '.join(DEVICE_COLUMNS)}"
MOST = 1e12
"""The most of any number in a row, of whatever unit; the least is 1 / `MOST`. So the products and
quotients of several stay finite."""


@dataclass(frozen=True)
class Measurement:
    """The measured milliseconds of programs, called one after another."""

    file: str
    id: str
    model: str
    chip: Chip
    what: str
    kind: Kind
    works: tuple[Work, ...]
    ms: float
    source: str

    @property
    def group(self) -> str:
        """The group that is left out together: a model on a device."""
        return f"{self.model} / {self.chip.id}"


@dataclass(frozen=True)
class Skipped:
    """A row of a decode step that is not used, and the reason."""

    file: str
    id: str
    model: str
    what: str
    why: str


class Unusable(Exception):
    """The reason why a row cannot be used."""


def shipped() -> list[Path]:
    """The files that come with cetane."""
    folder = Path(str(resources.files("cetane"))) / "data" / "evidence"
    return sorted(folder.glob("*.csv"))


@cache
def load_evidence() -> tuple[tuple[Measurement, ...], tuple[Skipped, ...]]:
    """The measurements that ship, and the skipped rows."""
    return read(shipped())


def read(paths: Iterable[Path]) -> tuple[tuple[Measurement, ...], tuple[Skipped, ...]]:
    """The measurements in CSV files, and the rows of decode steps that give none."""
    used: list[Measurement] = []
    skipped: list[Skipped] = []
    for path in paths:
        for row, parse in rows(path):
            try:
                used += parse(path.stem, row)
            except Unusable as reason:
                what = row.get("topology") or row.get("layout") or ""
                skipped.append(Skipped(path.stem, row["id"], row["model"], what, str(reason)))
    return tuple(used), tuple(skipped)


Parse = Callable[[str, Row], Iterator[Measurement]]


def rows(path: Path) -> Iterator[tuple[Row, Parse]]:
    """The rows of a file, with their parser. Raises CetaneError for a file of another kind."""
    try:
        reader = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
        columns = reader.fieldnames or ()
        content = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CetaneError(f"{path}: not a CSV file: {error}") from error
    parsers: dict[str, Parse] = {"book": book, "chunks": chunks, "device": device}
    kinds = [kind for kind, wanted in COLUMNS.items() if set(wanted[:2]) <= set(columns)]
    if not kinds:
        known = " nor ".join(" and ".join(wanted[:2]) for wanted in COLUMNS.values())
        raise CetaneError(f"{path}: it has neither the columns {known}", HINT)
    missing = [column for column in COLUMNS[kinds[0]] if column not in columns]
    if missing:
        raise CetaneError(f"{path}: it lacks the columns {', '.join(missing)}", HINT)
    parse = parsers[kinds[0]]
    for line, row in content:
        if None in row or None in row.values():
            raise CetaneError(f"{path}: line {line} does not have {len(columns)} fields")
        yield row, parse


def number(row: Row, column: str) -> float | None:
    """A positive number of a row, within `MOST`; None if it holds anything else."""
    return positive(row.get(column) or "")


def positive(text: str) -> float | None:
    """A positive number within `MOST`; None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 1 / MOST <= value <= MOST else None


def whole(digits: str) -> int:
    """Digits as a whole number, at most `MOST`. Raises Unusable for a larger one."""
    if float(digits) > MOST:
        raise Unusable(f"the number {digits[:16]}... is too large")
    return int(digits)


def decoder(row: Row) -> Decoder:
    """The shapes of a row's model. Raises Unusable if they are not known."""
    decoder = load_decoders().get(row["model"])
    if decoder is None:
        raise Unusable("its shapes are not known")
    return decoder


def chip(device: str) -> Chip:
    """The chip of a device in the evidence. Raises Unusable if it is not known."""
    chip = chip_of(device)
    if chip is None:
        raise Unusable(f"the chip of {device!r} is not known")
    return chip


def check_remarks(row: Row) -> None:
    """Raise Unusable if a row's remarks say so (`UNUSABLE`)."""
    remarks = row.get("note") or row.get("notes") or ""
    for words, reason in UNUSABLE.items():
        if words in remarks:
            raise Unusable(f"{reason}: {remarks}")


def sizes(layout: str, layers: int) -> list[int]:
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


# ane-book: shards of decoder layers with an MLState each, and slices of the head in parallel.

EIGHT: Bits = {"attention": 8, "mlp": 8, "head": 8}


def book(file: str, row: Row) -> Iterator[Measurement]:
    """The measurements of an ane-book row: a step, and its layers and head if they were timed."""
    if row["model"].startswith("synthetic") or row["T"] not in ("1", "1 decode / 4 prefill", ""):
        return
    check_remarks(row)
    model = decoder(row)
    where = chip(row["hw"])

    def measured(what: str, kind: Kind, works: list[Work], column: str) -> Iterator[Measurement]:
        if (ms := number(row, column)) is not None:
            yield Measurement(
                file, row["id"], row["model"], where, what, kind, tuple(works), ms, row["source"]
            )

    layout = row["topology"]
    if "LM-head shard" in layout:
        one = number(row, "weight_mb_per_shard")
        weights = {8.0: (one or 0) * 1e6}
        yield from measured(layout, "part", [Work(weights=weights)], "ms_per_call")
        return
    head = Work(weights={8.0: model.head})
    slots = int(number(row, "state_len") or 0)
    if model.experts:
        layers = zaya(model, layout, row["quant_label"], slots)
    else:
        if not slots:
            raise Unusable("its context is not stated")
        single = re.match(r"single shard (\d+)L", layout)
        counts = [whole(single[1])] if single else sizes(layout, model.layers)
        if sum(counts) > model.layers:
            raise Unusable(f"the layout {layout!r} has not {model.layers} layers")
        ends = list(accumulate(counts))
        any_unit = float(row["compute_units_runtime"] == "all")
        layers = [
            replace(model.program(end - count, end, slots, EIGHT, "blended"), any_unit=any_unit)
            for count, end in zip(counts, ends, strict=True)
        ]
        if single:
            yield from measured(layout, "step", layers, "ms_per_shard")
            return
    host = Work(calls=0, sorted=model.vocab if samples(row) else 0)
    yield from measured(f"{layout}: layers", "part", layers, "layers_ms_per_tok")
    yield from measured(f"{layout}: head", "part", [head], "head_ms_per_tok")
    yield from measured(layout, "step", [*layers, head, host], "ms_per_tok")


def samples(row: Row) -> bool:
    """Whether the host sorts all logits: those runtimes sample at temperature 1 by default."""
    return "ZAYA" in row["model"] or "temperature=1" in row["mode"]


def zaya(model: Decoder, layout: str, quant: str, slots: int) -> list[Work]:
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


# CoreML-LLM: a few chunks, the cache as tensors in and out or as MLStates.

TIMED = {4: ("c1_ms", "c2_ms", "c3_ms", "c4_ms"), 3: ("c1_ms", "c2_ms", "c4_ms"),
         2: ("c1_ms", "c2_ms")}  # fmt: skip


def chunks(file: str, row: Row) -> Iterator[Measurement]:
    """The measurements of a chunked port's row: a step, and its chunks if they were timed."""
    if row["kind"] not in ("decode", "chunk", "verify", "prefill chunk", "spec"):
        return
    if row["status"] != "measured" or row["compute"] != "CPU_AND_NE":
        return
    check_remarks(row)
    port = ChunkedPort.of(file, row)
    if row["kind"] == "spec":
        yield from port.plain_decoding()
    elif row["kind"] in ("chunk", "prefill chunk"):
        yield from port.first_chunk()
    else:
        yield from port.step()


@dataclass(frozen=True)
class ChunkedPort:
    """A parsed row of the chunked ports."""

    file: str
    row: Row
    model: Decoder
    chip: Chip
    bits: Bits
    tokens: int
    """Tokens of a call."""
    slots: int
    """Slots of a cache."""
    ms: float | None
    """Milliseconds of a step."""

    @classmethod
    def of(cls, file: str, row: Row) -> "ChunkedPort":
        """Parse a row. Raises Unusable if it does not tell what it measured."""
        model, where, slots = decoder(row), chip(row["device"]), number(row, "ctx")
        if slots is None:
            raise Unusable("its context is not stated")
        tok_s, ms = number(row, "tok_s"), number(row, "ms_per_step")
        tokens = int(number(row, "T") or 1)
        bits = formats(row["quant"])
        step = 1000 / tok_s if tok_s else ms
        return cls(file, row, model, where, bits, tokens, int(slots), step)

    def measured(self, what: str, kind: Kind, works: Iterable[Work], ms: float) -> Measurement:
        row = self.row
        return Measurement(
            self.file, row["id"], row["model"], self.chip, what, kind, tuple(works), ms,
            row["source"],
        )  # fmt: skip

    def chunked(
        self, cuts: str, slots: int, contract: Contract, tokens: int = 1, full: int | None = None
    ) -> list[Work]:
        """The work of every chunk; `cuts` is the layout."""
        where = cuts_of(self.model, cuts)
        return self.model.chunked(where, slots, self.bits, contract, tokens, full)

    def plain_decoding(self) -> Iterator[Measurement]:
        """The plain decoding of a speculative row: its remark has the tokens a second (`base`)."""
        base = re.search(r"\bbase (\d+(?:\.\d+)?)", self.row["note"])
        speed = positive(base[1]) if base else None
        if speed is not None:
            works = [*self.chunked("4-chunk", self.slots, "io"), Work(calls=0, host=1)]
            what = f"{self.row['layout']}: base"
            yield self.measured(what, "step", works, 1000 / speed)

    def first_chunk(self) -> Iterator[Measurement]:
        """A row that timed one chunk. Only the content of the first chunk is known."""
        layout = self.row["layout"]
        if "chunk_1" not in layout and "chunk1" not in layout:
            raise Unusable("what it holds is not known")
        if "real_len" in layout or "realLen" in layout or self.ms is None:
            return
        if self.row["kind"] == "prefill chunk":  # a graph without a cache, over its own tokens
            works = self.chunked("4-chunk", self.tokens, "none", self.tokens)[:1]
            yield self.measured(layout, "prefill", works, self.ms)
        else:
            works = self.chunked("4-chunk", self.slots, contract_of(layout))[:1]
            yield self.measured(layout, "part", works, self.ms)

    def step(self) -> Iterator[Measurement]:
        """A whole step, and its chunks if they were timed."""
        row, model, layout = self.row, self.model, self.row["layout"]
        contract = contract_of(layout)
        if model.chunks:
            full = re.search(r"FW=(\d+)", layout)
            wide = whole(full[1]) if full else None
            works = self.chunked(layout, self.slots, contract, self.tokens, wide)
        else:
            calls = number(row, "dispatches") or model.calls
            if calls is None:
                raise Unusable("how many programs it has is not stated")
            one = model.program(0, model.layers, self.slots, self.bits, contract, True, self.tokens)
            works = [one, Work(calls=calls - 1)]
        kind: Kind = "step" if row["kind"] == "decode" else "verify"
        if model.chunks and kind == "step":
            for work, column in zip(works, TIMED.get(len(works), ()), strict=False):
                if (part := number(row, column)) is not None:
                    name = f"{layout}: {column.removesuffix('_ms')}"
                    yield self.measured(name, "part", [work], part)
        if self.ms is not None:
            yield self.measured(layout, kind, [*works, Work(calls=0, host=1)], self.ms)


# What kits measured: each row has its work with it.

WORKS = TypeAdapter(list[Work])


def device(file: str, row: Row) -> Iterator[Measurement]:
    """A row that `cetane import` wrote: its work was computed from the bundle's own plan."""
    where = f"{file}, row {row['id']}"
    works = validated(WORKS, parse_json(row["works"], where), where)
    ms = number(row, "ms")
    amounts = [amount for work in works for amount in amounts_of(work)]
    if ms is None or not all(0 <= amount <= MOST**2 for amount in amounts):
        raise CetaneError(f"{where}: its time or its work is not a positive number")
    if not any(work.calls for work in works):
        raise CetaneError(f"{where}: its work calls no program")
    try:
        on = find_chip(row["chip"])
    except CetaneError as error:
        raise CetaneError(f"{where}: {error.message}") from error
    yield Measurement(
        file, row["id"], row["model"], on, row["what"],
        validated(TypeAdapter(Kind), row["kind"], where), tuple(works), ms, row["source"],
    )  # fmt: skip


def amounts_of(work: Work) -> Iterator[float]:
    """All numbers of a work."""
    yield from (work.calls, work.any_unit, work.tokens, work.attention_macs)
    yield from (work.memory, work.border, work.sorted, work.host)
    yield from (number for pair in work.weights.items() for number in pair)


def cuts_of(model: Decoder, layout: str) -> tuple[int, ...]:
    """The layers at which a layout cuts: its own numbers, or those known for its chunk count."""
    if "Topology I " in f"{layout} ":
        return (15, 25)
    spans = re.findall(r"L(\d+)-(\d+)", layout)
    if spans:
        starts = [whole(start) for start, _ in spans]
        stops = [whole(stop) + 1 for _, stop in spans]
        edges = [0, *stops]
        if starts != edges[:-1] or stops[-1] != model.layers or edges != sorted(set(edges)):
            raise Unusable(f"the layout {layout!r} does not cut {model.layers} layers")
        return tuple(stops[:-1])
    match = re.search(r"(\d+)-chunk", layout)
    if match is None or whole(match[1]) not in model.chunks:
        raise Unusable(f"the layout {layout!r} is not understood")
    return model.chunks[whole(match[1])]


def contract_of(layout: str) -> Contract:
    """The port's cache contract."""
    return "stateful" if re.search(r"MLState|stateful\b", layout) else "io"


def formats(quant: str) -> Bits:
    """The bits of every kind of weight."""
    if mixed := re.fullmatch(r"INT(\d) MLP \+ INT(\d) attn", quant):
        return {"mlp": float(mixed[1]), "attention": float(mixed[2]), "head": float(mixed[1])}
    match = re.search(r"INT(\d)|fp(16)", quant)
    if match is None:
        raise Unusable(f"the format {quant!r} is not understood")
    bits = float(match[1] or match[2])
    return {"attention": bits, "mlp": bits, "head": bits}
