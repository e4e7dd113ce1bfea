"""The manifest of a draft head: its functions, its training and its files."""

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from cetane.files import MOST_FILES, FileRecord
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
from cetane.schema.plan import Plan
from cetane.schema.slots import Slots
from cetane.validation import Data

DraftHeadKind = Literal["medusa", "eagle3"]
KINDS: tuple[DraftHeadKind, ...] = get_args(DraftHeadKind)
REQUIRED_OUTPUTS: dict[DraftHeadKind, dict[str, set[str]]] = {
    "medusa": {"draft": {"logits"}},
    "eagle3": {"draft": {"logits", "hidden"}, "follow": {"logits", "hidden"}},
}
"""The functions that a drafter calls, and the tensors that each must give, by kind."""
GIVEN_TENSORS: dict[DraftHeadKind, dict[str, set[str]]] = {
    "medusa": {"draft": {"hidden"}},
    "eagle3": {"draft": {"hidden"}, "follow": {"features"}, "read": {"features"}},
}
"""The tensors that a drafter gives to each function, by kind."""
FOLDER, MANIFEST, SCHEMA = "heads", "head.json", 1
SOURCE, VOCABULARY, ROTARY, HELD_OUT = (
    "source.safetensors", "vocabulary.npy", "rotary-default.npy", "held-out.npy",
)  # fmt: skip
"""Files of a draft head: the trained weights in fp16, the tokens that it can propose, its rotary
table, and windows of text that were kept out of training."""
HIDDEN = "hidden_out"
"""The output by which a shard hands on the hidden state."""
MOST_STEPS = 16
"""The most tokens of a draft."""
Shares = Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(max_length=MOST_STEPS)]
"""A share for each place of a draft."""


class Training(Data):
    """The texts that a draft head learned from, and its score on windows that were held out."""

    data: dict[str, str]
    """sha256 of every text, by the name of its file."""
    windows: int
    length: int
    """Tokens of a window."""
    held_out: int
    positions: int
    """Drafts that were judged."""
    top1: Shares
    """Share of right tokens at each place of a draft, each place judged by itself; empty if no
    draft was judged."""
    accepted: Shares
    """Share of drafts that are right up to and with each place."""


class DraftHeadManifest(Data):
    """Everything that a runtime needs to know about a draft head.

    Paths are relative to its folder.
    """

    schema_version: int = SCHEMA
    producer: dict[str, str]
    kind: DraftHeadKind
    bundle: str
    """Digest of the bundle's manifest."""
    rows: int = Field(ge=1, le=2**20)
    """Number of tokens that it can propose. Row i of its logits is token `vocabulary[i]`."""
    steps: int = Field(ge=1, le=MOST_STEPS)
    """Tokens that it was trained to draft."""
    taps: tuple[str, ...] = Field(min_length=1, max_length=3)
    """The shards whose hidden states it reads, in the order of its input's channels."""
    caches: dict[str, Slots]
    """Its own cache groups. The columns of drafted tokens are dropped when the draft ends."""
    weight_bytes: int
    functions: tuple[Function, ...]
    training: Training
    files: dict[str, FileRecord] = Field(max_length=MOST_FILES)

    @model_validator(mode="after")
    def consistent(self) -> "DraftHeadManifest":
        """Raise ValueError if a drafter could not run these functions: a manifest may be
        hostile."""
        names = [function.name for function in self.functions]
        if len(names) != len(set(names)) or not REQUIRED_OUTPUTS[self.kind].keys() <= set(names):
            raise ValueError(f"functions {', '.join(names)} do not make the draft head {self.kind}")
        check_caches(self.caches, self.functions)
        if any(slots.contract != "readonly" or slots.limited for slots in self.caches.values()):
            raise ValueError("a draft head's caches must be readonly and hold the whole context")
        sources = {type(item.source) for f in self.functions for item in f.inputs}
        if Rotary in sources and ROTARY not in self.files:
            raise ValueError(f"no {ROTARY}, whose rows its functions take")
        for function in self.functions:
            self._check_inputs(function)
            self._check_outputs(function)
        return self

    def _check_inputs(self, function: Function) -> None:
        """Raise ValueError for an input that a drafter cannot supply."""
        given = GIVEN_TENSORS[self.kind].get(function.name, set())
        known = Embedding(), *(Rotary(table="default", part=part) for part in ("cos", "sin"))
        for item in function.inputs:
            source = item.source
            tensor = isinstance(source, FromTensor) and source.name in given
            if not (tensor or isinstance(source, Mask | FromCache) or source in known):
                raise ValueError(f"{function.name}: a drafter cannot supply {item.name}")
        sources = {type(item.source) for item in function.inputs}
        if FromCache in sources and Mask not in sources:
            raise ValueError(f"{function.name}: it reads a cache without a mask")

    def _check_outputs(self, function: Function) -> None:
        """Raise ValueError for an output with an unknown sink, or a missing output."""
        cached = {
            item.source.name
            for other in self.functions
            for item in other.inputs
            if isinstance(item.source, FromCache)
        }
        for output in function.outputs:
            sink = output.sink
            tensor = isinstance(sink, ToTensor) and sink.name in ("logits", "hidden")
            append = isinstance(sink, ToCache) and sink.write == "append" and sink.name in cached
            if not (tensor or append):
                raise ValueError(f"{function.name}: a drafter cannot store {output.name}")
        given = {o.sink.name for o in function.outputs if isinstance(o.sink, ToTensor)}
        missing = REQUIRED_OUTPUTS[self.kind].get(function.name, set()) - given
        if missing:
            raise ValueError(f"{function.name}: the output {min(missing)} is missing")


def tappable(plan: Plan) -> list[str]:
    """The shards of layers that hand on the hidden state, in order: a draft head may read these."""
    return [
        shard.name
        for shard in plan.shards
        if shard.kind == "layers"
        and any(item.name == HIDDEN for f in shard.functions for item in f.outputs)
    ]
