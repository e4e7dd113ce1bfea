"""The manifest of a bundle: its plan, its source, and its files with their hashes."""

from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cetane.errors import CetaneError
from cetane.files import MOST_FILES, FileRecord
from cetane.schema.function import AdapterName
from cetane.schema.plan import Plan
from cetane.validation import Data

SCHEMA = 3
"""The version of manifests that this cetane writes and reads."""
MANIFEST = "manifest.json"
GATES = "gates"
TOKENIZER = "tokenizer"
ORIGIN = "cetane.json"
"""The file of a folder for another runtime with its `Origin`."""
CONTRACT = "contract.json"
Runtime = Literal["anemll", "coreml-llm"]
CONFIGS: dict[str, Runtime] = {"meta.yaml": "anemll", "model_config.json": "coreml-llm"}
"""The runtime whose config has this name. No bundle has one."""
EXPORTS = (CONTRACT, *CONFIGS, "metadata.json")
"""Files of which each layout of `cetane export`, but `onnx`, has one. Some exports have a model's
config too."""
PRODUCERS = ("cetane", "coremltools", "torch", "transformers")


class AdapterSource(Data):
    """The origin of an adapter."""

    source: str
    """Its folder."""
    fingerprint: str
    """`Lora.fingerprint`: a hash of its config, header, file size and date."""


class Origin(Data):
    """The bundle of a folder for another runtime, and the files that were compared with it. Paths
    are relative to the folder."""

    bundle: str
    """The bundle's digest."""
    files: dict[str, FileRecord] = Field(max_length=MOST_FILES)


class Manifest(Data):
    """Everything that a runtime needs to know about a bundle. Paths are relative to it."""

    schema_version: int = SCHEMA
    producer: dict[str, str]
    source: str
    """The checkpoint as the user named it. Gates compare with it if it is on this machine, unless
    another is given."""
    fingerprint: str
    """`Checkpoint.fingerprint`: a hash of headers, file sizes and dates."""
    lora: AdapterSource | None = Field(default=None, exclude_if=lambda lora: lora is None)
    """The adapter that is merged into the weights."""
    adapters: dict[AdapterName, AdapterSource] = Field(
        default_factory=dict, exclude_if=lambda adapters: not adapters
    )
    """The origins of the plan's adapters."""
    plan: Plan
    tags: dict[str, str] = Field(default_factory=dict)
    """Words for the bundle's attention, under the keys of the published ports' manifests."""
    files: dict[str, FileRecord] = Field(max_length=MOST_FILES)

    @property
    def package_files(self) -> dict[str, FileRecord]:
        """The files of all shards' packages."""
        packages = tuple(f"{shard_path(shard.name)}/" for shard in self.plan.shards)
        return {name: record for name, record in self.files.items() if name.startswith(packages)}

    @property
    def package_bytes(self) -> int:
        """The bytes of all shards' packages."""
        return sum(record.bytes for record in self.package_files.values())


def shard_path(name: str) -> str:
    return f"shards/{name}.mlpackage"


def table_path(name: str, part: str = "values") -> str:
    """The file of a part of a table. Rows that have scales keep them in a second file."""
    table = "embedding" if name == "tokens" else f"embedding-{name}"
    return f"{table}.npy" if part == "values" else f"{table}-{part}.npy"


def rotary_path(table: str) -> str:
    return f"rotary-{table}.npy"


def producers() -> dict[str, str]:
    """Versions of the packages that make a bundle."""
    return {name: version(name) for name in PRODUCERS}


def check_schema(content: dict[str, Any], schema: int, file: Path, hint: str) -> None:
    """Raise CetaneError for a manifest of another schema version, or without one."""
    version = content.get("schema_version")
    if type(version) is not int:
        raise CetaneError(f"{file}: not a manifest, since it has no schema_version", hint)
    if version != schema:
        raise CetaneError(f"{file}: schema {version}; this cetane reads schema {schema}", hint)
