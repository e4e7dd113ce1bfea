"""What a draft head of a bundle says of itself."""

from typing import Literal, get_args

from pydantic import Field, model_validator

from cetane.files import FileRecord
from cetane.schema.check import check_caches
from cetane.schema.function import Function
from cetane.schema.interface import (
    Embedding,
    FromCache,
    FromTensor,
    Mask,
    Rotary,
    ToCache,
    ToTensor,
)
from cetane.schema.slots import Slots
from cetane.validation import Data

DraftHeadKind = Literal["medusa", "eagle3"]


KINDS: tuple[DraftHeadKind, ...] = get_args(DraftHeadKind)


FOLDER, MANIFEST, SCHEMA = "heads", "head.json", 1


SOURCE, VOCABULARY, ROTARY, HELD_OUT = (
    "source.safetensors", "vocabulary.npy", "rotary-default.npy", "held-out.npy",
)  # fmt: skip
"""What was trained, in fp16; the tokens it can propose; windows of text that it has not seen."""


class Training(Data):
    """What a head learned from, and how it did on windows that were held out."""

    data: dict[str, str]
    """sha256 of every text, by the name of its file."""
    windows: int
    length: int
    """Tokens of a window."""
    held_out: int
    positions: int
    """Drafts that were judged."""
    top1: tuple[float, ...]
    """Share of right tokens at every place of a draft."""
    accepted: tuple[float, ...]
    """Share of drafts that are right up to this place."""


class DraftHeadManifest(Data):
    """Everything a runtime needs to know of a head. Paths are relative to its folder."""

    schema_version: int = SCHEMA
    producer: dict[str, str]
    kind: DraftHeadKind
    bundle: str
    """Digest of the bundle's manifest."""
    rows: int = Field(ge=1, le=2**20)
    """Tokens that it can propose: row i of its logits is about token i of the vocabulary's file."""
    steps: int = Field(ge=1, le=16)
    """Tokens that it was trained to draft."""
    taps: tuple[str, ...] = Field(min_length=1, max_length=3)
    """Shards of the bundle after which it reads the hidden state, the input's channels in order."""
    caches: dict[str, Slots]
    """Of its own, by group; in a draft its columns count for that draft only."""
    weight_bytes: int
    functions: tuple[Function, ...]
    training: Training
    files: dict[str, FileRecord]

    @model_validator(mode="after")
    def consistent(self) -> "DraftHeadManifest":
        """What a drafter relies on; a manifest may be hostile."""
        names = [function.name for function in self.functions]
        needed = {"draft"} if self.kind == "medusa" else {"draft", "follow"}
        if len(names) != len(set(names)) or not needed <= set(names):
            raise ValueError(f"a {self.kind} head with the functions {', '.join(names)}")
        check_caches(self.caches, self.functions)
        if any(slots.contract != "readonly" or slots.limited for slots in self.caches.values()):
            raise ValueError("a head's caches are readonly, for the whole context")
        for function in self.functions:
            self.check(function)
        return self

    def check(self, function: Function) -> None:
        """ValueError for what a drafter cannot supply, or has no place for."""
        known = Embedding(), *(Rotary(table="default", part=part) for part in ("cos", "sin"))
        for item in function.inputs:
            source = item.source
            tensor = isinstance(source, FromTensor) and source.name in ("features", "hidden")
            if not (tensor or isinstance(source, Mask | FromCache) or source in known):
                raise ValueError(f"{function.name}: nothing gives {item.name}")
        kept = {i.source.name for i in function.inputs if isinstance(i.source, FromCache)}
        cached = {i.source.name for f in self.functions for i in f.inputs
                  if isinstance(i.source, FromCache)}  # fmt: skip
        for output in function.outputs:
            sink = output.sink
            tensor = isinstance(sink, ToTensor) and sink.name in ("logits", "hidden")
            append = isinstance(sink, ToCache) and sink.write == "append" and sink.name in cached
            if not (tensor or append):
                raise ValueError(f"{function.name}: {output.name} has no place to go")
        if kept and not any(isinstance(i.source, Mask) for i in function.inputs):
            raise ValueError(f"{function.name}: a cache without a mask")
