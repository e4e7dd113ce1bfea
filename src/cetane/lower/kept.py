"""Templates in the cache folder: what one build has converted, the next one does not."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import cetane
from cetane.files import cache_dir, code_sha256, forget_oldest, replacing
from cetane.hardware.quiet import import_coremltools
from cetane.lower.template import Slot, Template

LARGEST = 1 << 30
"""Bytes of all kept templates. The one that was used longest ago is removed first."""
CODE = ("compress", "families", "lower", "planner")
"""The rooms that a template depends on: names of variables become names of ops."""
INDEX, DIGEST = "index", "digest"


def kept(structure: str) -> Template | None:
    """The template of a structure, if the cache has it whole."""
    path = place(structure)
    try:
        with safe_open(path, "np") as file:
            about = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in ("spec", "manifest", "rest")}
        if digest(about[INDEX], arrays) != about[DIGEST]:
            return None
        path.touch()
        index = json.loads(about[INDEX])
    except (OSError, SafetensorError, ValueError, KeyError):
        return None
    import_coremltools()
    from coremltools.proto import Model_pb2

    ends = np.cumsum([0, *(length for _, length in index["rest"])])
    return Template(
        spec=Model_pb2.Model.FromString(arrays["spec"].tobytes()),
        manifest=arrays["manifest"].tobytes(),
        placed=index["placed"],
        slots={
            label: {part: Slot(*slot) for part, slot in parts.items()}
            for label, parts in index["slots"].items()
        },
        size=index["size"],
        rest=[
            (start, arrays["rest"][end - length : end].tobytes())
            for (start, length), end in zip(index["rest"], ends[1:], strict=True)
        ],
    )


def keep(structure: str, template: Template) -> None:
    """Write a template that nothing was stamped into. It is no error if the cache is full."""
    path = place(structure)
    arrays = {
        "spec": as_array(template.spec.SerializeToString(deterministic=True)),
        "manifest": as_array(template.manifest),
        "rest": as_array(b"".join(content for _, content in template.rest)),
    }
    index = json.dumps(
        {
            "placed": template.placed,
            "slots": {
                label: {part: (slot.nbytes, slot.offset) for part, slot in parts.items()}
                for label, parts in template.slots.items()
            },
            "size": template.size,
            "rest": [(start, len(content)) for start, content in template.rest],
        }
    )
    with suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            save_file(arrays, temporary, {INDEX: index, DIGEST: digest(index, arrays)})
        forget_oldest(path.parent.glob("*.safetensors"), LARGEST)


def place(structure: str) -> Path:
    """The file of a structure, for the code that is installed."""
    root = Path(cetane.__file__).parent
    code = code_sha256(*(root / room for room in CODE))
    key = hashlib.sha256(f"{structure} {code}".encode()).hexdigest()
    return cache_dir() / "templates" / f"{key[:32]}.safetensors"


def digest(index: str, arrays: dict[str, Any]) -> str:
    """The hash of a template's file, by which damage is seen."""
    total = hashlib.sha256(index.encode())
    for name in sorted(arrays):
        total.update(arrays[name].tobytes())
    return total.hexdigest()


def as_array(content: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(content, np.uint8)
