"""Writes a kit: a zip archive that measures bundles on a Mac."""

import json
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import numpy as np

from cetane.bundle import Bundle
from cetane.bundle.rows import ROW_FORMATS
from cetane.files import FileRecord, Progress, json_sha256, records
from cetane.kit.example_calls import ExampleCall, function_calls
from cetane.kit.expectation import GATE, expectation
from cetane.kit.measurements import Label
from cetane.kit.probes import ExpectedProbe, expected_probes
from cetane.schema.manifest import rotary_path, table_path
from cetane.schema.plan import Plan

KIT = "kit.json"
SCHEMA = 1
LABELS: tuple[Label, ...] = get_args(Label)
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the archive, so that the same bundles give the same kit."""


def write_folder(bundles: list[Bundle], folder: Path, progress: Progress) -> dict[str, Any]:
    """Write all files of a kit but the packages and tables, which stay in their bundles.

    Returns `kit.json`.
    """
    write_script(folder)
    entries: dict[str, Any] = {}
    files: dict[str, FileRecord] = {}
    for label, bundle in zip(LABELS, bundles, strict=False):
        progress(f"probes of {bundle.path.name}", len(entries), len(bundles))
        (folder / label / "inputs").mkdir(parents=True)
        entries[label] = write_bundle(bundle, folder / label)
        files |= {f"{label}/{name}": bundle.manifest.files[name] for name in bundle_files(bundle)}
    files |= records(folder, folder)
    listed = {name: record.model_dump() for name, record in sorted(files.items())}
    content = {"schema_version": SCHEMA, "bundles": entries, "files": listed}
    content["id"] = json_sha256(content)
    (folder / KIT).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return content


def write_script(folder: Path) -> None:
    """Write the script, its modules, and a page about its use."""
    package = resources.files("cetane")
    for name in ("measure.py", "README.md"):
        (folder / name).write_bytes((package / "data" / "kit" / name).read_bytes())
    (folder / "measuring").mkdir()
    for source in (package / "measuring").iterdir():
        if source.name.endswith(".py"):
            (folder / "measuring" / source.name).write_bytes(source.read_bytes())


def bundle_files(bundle: Bundle) -> list[str]:
    """The bundle's own files that a kit holds, under the same paths in the kit's folder of it."""
    plan = bundle.plan
    row_format = ROW_FORMATS[plan.recipe.embedding.rows]
    tables = [rotary_path(name) for name in plan.rotary]
    for name, table in plan.tables.items():
        tables += [table_path(name, part) for part in row_format.stored(table)]
    wanted = {*bundle.manifest.package_files, *tables}
    return [name for name in bundle.manifest.files if name in wanted]


def write_bundle(bundle: Bundle, folder: Path) -> dict[str, Any]:
    """Write the host's description, inputs and probes of a bundle. Returns its entry in `kit.json`.

    Also keeps the `Expectation` with the bundle's gates.
    """
    plan = bundle.plan
    (folder / "host.json").write_text(json.dumps(host_description(plan), sort_keys=True) + "\n")
    np.save(folder / "head-tokens.npy", plan.choosable.astype(np.int32))
    expected = expected_probes(bundle)
    (folder / "probes.json").write_text(json.dumps([probe_entry(e) for e in expected]) + "\n")
    for one in expected:
        np.save(folder / probe_entry(one)["expected"], one.logits.astype(np.float32))
    calls = function_calls(bundle)
    bundle.write_gate(GATE, expectation(plan, expected, calls).model_dump(mode="json"))
    functions = []
    for number, ((shard, name), call) in enumerate(sorted(calls.items())):
        path = f"inputs/{number:04}.npz"
        save_call(folder / path, call)
        function = plan.functions[shard, name]
        functions.append(
            {
                "shard": shard,
                "name": name,
                "tokens": function.tokens,
                "several": len(plan.by_name[shard].functions) > 1,
                "stateful": bool(function.states),
                "zeros": {zero: list(shape) for zero, shape in call.zeros.items()},
                "int8": [item.name for item in function.inputs if item.dtype == "int8"],
                "inputs": path,
            }
        )
    return {
        "name": bundle.path.resolve().name,
        "digest": bundle.digest,
        "functions": functions,
        "probes": [one.probe.name for one in expected],
    }


def host_description(plan: Plan) -> dict[str, Any]:
    """A bundle as `measuring/host.py` reads it. Probes use only the largest of several capacities,
    so functions of smaller ones are left out."""
    functions = [
        {"shard": shard.name} | function.model_dump(mode="json")
        for shard in plan.shards
        for function in shard.functions
        if function.capacity is None
    ]
    return {
        "order": plan.recipe.tensor_layout,
        "context": plan.recipe.cache.context,
        "vocab": plan.vocab,
        "softcap": plan.softcap,
        "caches": {name: slots.model_dump(mode="json") for name, slots in plan.caches.items()},
        "modes": modes_entry(plan),
        "adapters": {name: modes_entry(plan.on(name)) for name in plan.adapters},
        "functions": functions,
    }


def modes_entry(plan: Plan) -> dict[str, Any]:
    """The calls of every mode, in `host.json`."""
    return {name: mode.model_dump(mode="json") for name, mode in plan.modes.items()}


def probe_entry(expected: ExpectedProbe) -> dict[str, Any]:
    """A probe in `probes.json`."""
    content = expected.probe.model_dump(mode="json")
    content["prompt"] = content["calls"][: expected.probe.prompt]
    return content | {"expected": f"expected-{expected.probe.name}.npy"}


def save_call(path: Path, call: ExampleCall) -> None:
    arrays = {f"in/{name}": value for name, value in call.inputs.items()}
    arrays |= {f"out/{name}": value for name, value in call.outputs.items()}
    np.savez(path, **arrays)  # type: ignore[arg-type]


def pack(bundles: list[Bundle], folder: Path, archive: Path, progress: Progress) -> None:
    """Put a kit's folder and the bundles' files into one archive, under `kit/`."""
    sources = {name: folder / name for name in records(folder, folder)}
    for label, bundle in zip(LABELS, bundles, strict=False):
        sources |= {f"{label}/{name}": bundle.file(name) for name in bundle_files(bundle)}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED, allowZip64=True) as packed:
        for done, (name, path) in enumerate(sorted(sources.items())):
            progress(name, done, len(sources))
            entry = zipfile.ZipInfo(f"kit/{name}", LONG_AGO)
            entry.external_attr = 0o644 << 16
            with path.open("rb") as source, packed.open(entry, "w", force_zip64=True) as target:
                while block := source.read(1 << 20):
                    target.write(block)
