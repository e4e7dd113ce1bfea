"""CoreML-LLM's measurements: a few chunks, the cache as tensors in and out or as MLStates."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cetane.hardware.chips import Chip
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
    positive,
    whole,
)
from cetane.perf.shapes import Bits, Contract, Decoder

TIMED = {4: ("c1_ms", "c2_ms", "c3_ms", "c4_ms"), 3: ("c1_ms", "c2_ms", "c4_ms"),
         2: ("c1_ms", "c2_ms")}  # fmt: skip
"""The columns with the milliseconds of each chunk, by the number of chunks."""


def measurements_of(file: str, row: Row) -> Iterator[Measurement]:
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
        return Measurement.of_row(self.file, self.row, self.chip, what, kind, works, ms)

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


COREML_LLM = FileKind(
    marks=("layout", "ms_per_step"),
    columns=(
        "id", "model", "layout", "quant", "device", "compute", "kind", "ms_per_step", "status",
        "note", "source",
    ),
    parse=measurements_of,
)  # fmt: skip
