"""Writes the folder: the bundle's packages, tables and tokenizer, the contract and the host."""

import re
import shutil
from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.checkpoint.names import model_name
from cetane.export.contract.describe import describe
from cetane.export.contract.draft_heads import draft_head
from cetane.export.contract.memory import memory_figures
from cetane.files import Progress, replacing, write_json
from cetane.mil import load
from cetane.schema.manifest import CONTRACT, TOKENIZER
from cetane.templates import environment

HOST, DOCUMENT = "host.py", "CONTRACT.md"


def export(bundle: Bundle, target: Path, progress: Progress) -> None:
    """Write the folder; `target` must not exist."""
    contract = contract_of(bundle)
    with replacing(target) as folder:
        folder.mkdir(parents=True)
        parts = parts_of(contract)
        for done, part in enumerate(parts):
            progress(part, done, len(parts))
            copy(bundle.file(part), folder / part)
        write_json(folder / CONTRACT, contract)
        for name, text in rendered(contract).items():
            (folder / name).write_text(text, encoding="utf-8")
        progress("done", len(parts), len(parts))


def parts_of(contract: dict[str, Any]) -> list[str]:
    """The files and folders of a bundle that an export copies."""
    parts = [shard["package"] for shard in contract["shards"]]
    parts += [file for files in contract["tables"].values() for file in files]
    parts += [file for head in contract["draft_heads"].values() for file in head["files"]]
    return [*parts, TOKENIZER]


def contract_of(bundle: Bundle) -> dict[str, Any]:
    """The content of `contract.json`."""
    programs = [load(bundle.shard(shard.name)) for shard in bundle.plan.shards]
    contract, memory = describe(bundle.plan), memory_figures(bundle, programs)
    for shard in contract["shards"]:
        shard["bytes"] = memory.packages[shard["name"]]
    return contract | {
        "bundle": bundle.digest,
        "source": model_name(bundle.manifest.source),
        "stop": list(bundle.tokenizer.eos_ids),
        "memory": memory.as_json(),
        "draft_heads": {str(kind): draft_head(h) for kind, h in bundle.draft_heads().items()},
    }


def copy(source: Path, target: Path) -> None:
    """Copy a file or a folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def rendered(contract: dict[str, Any]) -> dict[str, str]:
    """The texts that are written from the contract, by their files' names."""
    return {HOST: host(contract), DOCUMENT: document(contract)}


def host(contract: dict[str, Any]) -> str:
    """The host's code, with only what this contract needs."""
    functions, steps, groups = functions_of(contract), steps_of(contract), contract["groups"]
    sources = [item["source"] for function in functions for item in function["inputs"]]
    return templates().get_template("host.py.j2").render(
        name=plain(contract["source"]),
        order=contract["order"],
        time=3 if contract["order"] == "c1t" else 2,
        sources={source["host"] for source in sources},
        sinks={item["sink"]["host"] for function in functions for item in function["outputs"]},
        groups=groups,
        capacities=contract["capacities"],
        buffers=contract["buffers"],
        int8=bool(contract["int8"]),
        contracts={each["contract"].removeprefix("stateful-") for each in groups.values()},
        forms={form for each in groups.values() for form in each["forms"].values()},
        ends=any(each["ends"] for each in groups.values()),
        windows=any(source.get("window") for source in sources),
        states=any(function["states"] for function in functions),
        adapters=sorted(contract["adapters"]),
        routed=any("experts" in step for step in steps),
        adds=any("adds" in step for step in steps),
        skips=any(mode["skips"] for mode in contract["modes"]),
        row_format=contract["row_format"],
        subset=contract["rows"] is not None,
        softcap=contract["softcap"],
    )  # fmt: skip


def document(contract: dict[str, Any]) -> str:
    """The contract in words."""
    functions = functions_of(contract)
    sinks = (item["sink"]["host"] for f in functions for item in f["outputs"])
    sources = (item["source"] for f in functions for item in f["inputs"])
    return templates().get_template("contract.md.j2").render(
        **contract, adds=any("adds" in step for step in steps_of(contract)),
        matrices="matrix" in sinks,
        by_position={each["table"] for each in sources if each["host"] == "position_rows"},
    )  # fmt: skip


def functions_of(contract: dict[str, Any]) -> list[dict[str, Any]]:
    return [function for shard in contract["shards"] for function in shard["functions"]]


def steps_of(contract: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for mode in contract["modes"] for step in mode["steps"]]


def templates() -> Any:
    """The templates, with their filters."""
    return environment("cetane.export.contract", {"shape": shape, "mb": megabytes, "plain": plain})


def plain(text: str) -> str:
    """A name for code and tables: a model's source may hold any characters."""
    return re.sub(r"[^\w./@ -]", "_", text)[:100]


def shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
