"""Writes the folder: the bundle's packages, tables and tokenizer, the contract and the host."""

import shutil
from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.checkpoint.names import model_name
from cetane.export.contract.describe import describe
from cetane.export.contract.draft_heads import draft_head
from cetane.export.contract.memory import memory_figures
from cetane.export.contract.texts import rendered
from cetane.files import Progress, replacing, write_json
from cetane.mil import load
from cetane.schema.manifest import CONTRACT, TOKENIZER


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
