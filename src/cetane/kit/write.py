"""Writes a kit: a zip archive that measures bundles on a Mac."""

import json
import zipfile
from collections.abc import Iterator, Mapping
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any, get_args

import numpy as np

from cetane.bundle import Bundle
from cetane.bundle.rows import ROW_FORMATS
from cetane.files import FileRecord, Progress, json_sha256, records
from cetane.kit.example_calls import LARGEST_OUTPUT, ExampleCall, function_calls
from cetane.kit.measurements import Label
from cetane.kit.probes import ExpectedProbe, expected_probes
from cetane.schema.function import Route
from cetane.schema.interface import FromCache, Output, ToCache, ToTensor
from cetane.schema.manifest import rotary_path, shard_path, table_path
from cetane.schema.plan import Plan
from cetane.validation import Data

KIT = "kit.json"
GATE = "kit"
"""The name of the gate that keeps an `Expectation` with its bundle."""
SCHEMA = 1
LABELS: tuple[Label, ...] = get_args(Label)
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the archive, so that the same bundles give the same kit."""
Calls = dict[tuple[str, str], ExampleCall]


class Expectation(Data):
    """What a kit expects of a bundle, kept as a gate's result."""

    positions: dict[str, tuple[int, ...]]
    """The token of every judged position, by probe."""
    functions: dict[str, tuple[str, ...]]
    """The judged outputs of every measured function, as SHARD/FUNCTION."""


def expectation(plan: Plan, probes: list[ExpectedProbe], calls: Calls) -> Expectation:
    """What a bundle should compute. Its probes give the logits, and its calls the other outputs."""
    return Expectation(
        positions={one.probe.name: tuple(expected_tokens(one)) for one in probes},
        functions={"/".join(key): judged_outputs(plan, key, calls[key]) for key in sorted(calls)},
    )


def judged_outputs(plan: Plan, key: tuple[str, str], call: ExampleCall) -> tuple[str, ...]:
    """The outputs of a function that are compared: of those that an error can judge, all that its
    example call has."""
    return tuple(one.name for one in comparable(plan, key) if one.name in call.outputs)


def comparable(plan: Plan, key: tuple[str, str]) -> Iterator[Output]:
    """The outputs of a function that an error can judge, but for those too large for a kit.

    Scores of experts and whole numbers are left out, since a last bit can change them entirely.
    Probes judge what follows from them.
    """
    scores = {route.scores for route in routes(plan)}
    function = plan.functions[key]
    whole = {
        item.source.name
        for item in function.inputs
        if isinstance(item.source, FromCache) and item.dtype == "int8"
    }
    for item in function.outputs:
        scored = isinstance(item.sink, ToTensor) and item.sink.name in scores
        rounded = isinstance(item.sink, ToCache) and item.sink.name in whole
        if not scored and not rounded and prod(item.shape) <= LARGEST_OUTPUT:
            yield item


def experts(plan: Plan) -> set[tuple[str, str]]:
    """The functions that tokens choose. No token of a kit may have chosen some of them."""
    return {(r.shard, name) for r in routes(plan) for names in r.experts for name in names}


def is_complete(plan: Plan, expected: Expectation, positions: Mapping[str, int]) -> bool:
    """Whether an expectation judges so many positions of every probe, and of every function all
    that can be compared. An expert may have nothing, if no token chose it."""
    chosen = experts(plan)
    for key in plan.functions:
        outputs = expected.functions.get("/".join(key))
        if not outputs and key in chosen:
            continue
        if outputs is None or set(outputs) != {one.name for one in comparable(plan, key)}:
            return False
    return {name: len(own) for name, own in expected.positions.items()} == positions


def uncompared(plan: Plan, expected: Expectation) -> list[str]:
    """The functions, as SHARD/FUNCTION, of which nothing is compared, although it could be.

    Experts are not among them, since no token may have chosen them; nor are functions that have
    only outputs too large for a kit.
    """
    chosen = experts(plan)
    return [
        "/".join(key)
        for key in plan.functions
        if not expected.functions.get("/".join(key))
        and key not in chosen
        and any(comparable(plan, key))
    ]


def routes(plan: Plan) -> Iterator[Route]:
    """The choices of experts in all modes, at all capacities, with all adapters."""
    for capacity in plan.capacities:
        for modes in (capacity.modes, *capacity.adapters.values()):
            for mode in modes.values():
                yield from (step for step in (*mode.steps, *mode.silent) if isinstance(step, Route))


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
    packages = tuple(f"{shard_path(shard.name)}/" for shard in plan.shards)
    return [name for name in bundle.manifest.files if name.startswith(packages) or name in tables]


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


def expected_tokens(expected: ExpectedProbe) -> list[int]:
    """The expected token of every judged position."""
    return [int(token) for token in expected.logits.argmax(axis=1)]


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
