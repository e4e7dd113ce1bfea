"""What a bundle says of itself, and where its files are."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import Field

from cetane.errors import CetaneError
from cetane.files import FileRecord
from cetane.schema.plan import Plan
from cetane.validation import Data

SCHEMA = 3
MANIFEST = "manifest.json"
GATES = "gates"
RECIPE = "recipe.toml"
"""The recipe of the plan as a file, with the reasons for what cetane chose."""
TOKENIZER = "tokenizer"
PRODUCERS = ("cetane", "coremltools", "torch", "transformers")


class Manifest(Data):
    """Everything a runtime needs to know. Paths are relative to the bundle."""

    schema_version: int = SCHEMA
    producer: dict[str, str]
    source: str
    """The checkpoint as it was named; gates compare with it unless told otherwise."""
    fingerprint: str
    """The checkpoint's content, as far as headers, sizes and dates tell."""
    tags: dict[str, str] = Field(default_factory=dict, exclude_if=lambda tags: not tags)
    """Which attention and which CCA the bundle has, where an architecture has several."""
    plan: Plan
    files: dict[str, FileRecord]


def shard_path(name: str) -> str:
    return f"shards/{name}.mlpackage"


def table_path(name: str) -> str:
    """Rows by token; a quantised table has its scales in a file of its own."""
    return "embedding.npy" if name == "tokens" else f"embedding-{name}.npy"


def scales_path(name: str) -> str:
    return table_path(name).replace(".npy", "-scales.npy")


def rotary_path(table: str) -> str:
    return f"rotary-{table}.npy"


def producers() -> dict[str, str]:
    """Versions of what makes a bundle."""
    return {name: version(name) for name in PRODUCERS}


def check_schema(content: dict[str, Any], schema: int, file: Path, hint: str) -> None:
    """CetaneError for a manifest of another version of its schema, or of none."""
    version = content.get("schema_version")
    if type(version) is not int:
        raise CetaneError(f"{file}: not a manifest: it has no schema_version", hint)
    if version != schema:
        raise CetaneError(f"{file}: schema {version}, this cetane reads {schema}", hint)
