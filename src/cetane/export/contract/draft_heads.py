"""The draft heads of a bundle as a part of its contract.

A host that drafts runs their functions between two calls of the model. `follow`, and `read` for a
prompt, take the hidden states of accepted tokens. `draft` goes on from the draft head's own output.
"""

from typing import Any

from cetane.bundle.draft_heads import DraftHead
from cetane.schema.draft_head import FOLDER, ROTARY, VOCABULARY
from cetane.schema.function import Function
from cetane.schema.interface import (
    MASKED,
    Embedding,
    FromTensor,
    Input,
    Mask,
    Output,
    Rotary,
    ToTensor,
)


def draft_head(head: DraftHead) -> dict[str, Any]:
    """A draft head: its files, and what a host gives to its functions and takes from them."""
    made, folder = head.manifest, f"{FOLDER}/{head.name}"
    files = [f"{head.name}.mlpackage", VOCABULARY, *([ROTARY] if ROTARY in made.files else [])]
    return {
        "files": [f"{folder}/{file}" for file in files],
        "rows": made.rows,
        "steps": made.steps,
        "taps": list(made.taps),
        "caches": {name: slots.model_dump() for name, slots in made.caches.items()},
        "functions": [function(head, one) for one in made.functions],
    }


def function(head: DraftHead, described: Function) -> dict[str, Any]:
    """A function, with `means` as for those of the model."""
    content = described.model_dump()
    content["inputs"] = [i.model_dump() | {"means": given(head, i)} for i in described.inputs]
    content["outputs"] = [o.model_dump() | {"means": taken(head, o)} for o in described.outputs]
    return content


def given(head: DraftHead, item: Input) -> str:
    """Who fills an input."""
    match item.source:
        case Embedding():
            return "the embedding rows of the tokens after those of the hidden states, as columns"
        case Rotary(part=part):
            return f"the {part} rows of the tokens' positions in {ROTARY}, as columns"
        case Mask():
            return f"0 where a token sees a key, else {MASKED:g}; it sees all up to its own"
        case FromTensor(name="features"):
            shards = ", ".join(head.manifest.taps)
            return (
                f"the last hidden_out of {shards} in a call, one after the other, for tokens that "
                "were accepted"
            )
        case FromTensor() if head.name == "medusa":
            return f"the last hidden_out of {head.manifest.taps[0]} for the last accepted token"
        case FromTensor():
            return "hidden of the call before, its last token's column"
    return "the draft head's own cache, zeros before the first call"


def taken(head: DraftHead, item: Output) -> str:
    """What becomes of an output."""
    match item.sink:
        case ToTensor(name="logits"):
            columns = "a column for each drafted token" if head.name == "medusa" else "by column"
            return f"logits of the tokens in {VOCABULARY}, {columns}"
        case ToTensor():
            return "for the next call of draft"
    return "new columns: write each at its token's slot; a refused draft's are overwritten"
