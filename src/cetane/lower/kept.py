"""Templates in the store: a build that finds one skips its conversion."""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import NonNegativeInt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

import cetane
from cetane.errors import CetaneError
from cetane.files import code_sha256
from cetane.hardware.quiet import import_coremltools
from cetane.lower.template import Slot, Template, gaps
from cetane.store import cache_store
from cetane.validation import Data, parse_json, validated

CODE = ("compress", "families", "lower", "planner")
"""The rooms whose code a template depends on. Even names of variables count: they become names of
ops."""
FILE = "template.safetensors"
INDEX = "index"
"""The key of the file's metadata that holds a `StoredIndex` as JSON."""


class StoredIndex(Data):
    """The fields of a `Template` that are not bytes, as its file holds them."""

    placed: dict[str, dict[str, str]]
    slots: dict[str, dict[str, tuple[NonNegativeInt, NonNegativeInt | None]]]
    size: NonNegativeInt
    rest: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    """Offset and number of bytes of each piece outside the slots."""


def kept_template(structure: str, labels: Collection[str]) -> Template | None:
    """The template of a structure whose weights have these labels. None if no store has a sound
    one."""
    with cache_store.opened(key_of(structure)) as folder:
        if folder is None:
            return None
        try:
            with safe_open(folder / FILE, "np") as file:
                about = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in ("spec", "manifest", "rest")}
            template = template_of(parse_json(about[INDEX], FILE), arrays)
        except (OSError, SafetensorError, ValueError, KeyError, CetaneError):
            return None
    return template if set(template.slots) == set(labels) else None


def template_of(content: Any, arrays: dict[str, Any]) -> Template:
    """The template of a file's content. Raises CetaneError or ValueError if it holds none."""
    index = validated(StoredIndex, content, FILE)
    import_coremltools()
    from coremltools.proto import Model_pb2

    try:
        spec = Model_pb2.Model.FromString(arrays["spec"].tobytes())
    except Exception as error:  # protobuf's DecodeError, whose module has no types
        raise ValueError(f"{FILE}: {error}") from error
    slots = {
        label: {part: Slot(*slot) for part, slot in parts.items()}
        for label, parts in index.slots.items()
    }
    if [(start, end - start) for start, end in gaps(slots, index.size)] != list(index.rest):
        raise ValueError(f"{FILE}: its weight file has other gaps than its slots leave")
    ends = np.cumsum([0, *(length for _, length in index.rest)])
    if ends[-1] != arrays["rest"].size:
        raise ValueError(f"{FILE}: the bytes between its slots are missing")
    return Template(
        spec=spec,
        manifest=arrays["manifest"].tobytes(),
        placed=index.placed,
        slots=slots,
        size=index.size,
        rest=[
            (start, arrays["rest"][end - length : end].tobytes())
            for (start, length), end in zip(index.rest, ends[1:], strict=True)
        ],
    )


def keep_template(structure: str, template: Template) -> None:
    """Keep a template into which no weights were stamped yet. A full cache is no error."""
    arrays = {
        "spec": as_array(template.spec.SerializeToString(deterministic=True)),
        "manifest": as_array(template.manifest),
        "rest": as_array(b"".join(content for _, content in template.rest)),
    }
    index = {
        "placed": template.placed,
        "slots": {
            label: {part: (slot.nbytes, slot.offset) for part, slot in parts.items()}
            for label, parts in template.slots.items()
        },
        "size": template.size,
        "rest": [(start, len(content)) for start, content in template.rest],
    }

    def write(folder: Path) -> None:
        content = save(arrays, {INDEX: json.dumps(index, sort_keys=True)})
        (folder / FILE).write_bytes(content)  # only its owner can read a file of `save_file`

    cache_store.keep(key_of(structure), write)


def key_of(structure: str) -> str:
    """The key of a structure's template, for the code that is installed."""
    root = Path(cetane.__file__).parent
    code = code_sha256(*(root / room for room in CODE))
    return hashlib.sha256(f"template {structure} {code}".encode()).hexdigest()


def as_array(content: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(content, np.uint8)
