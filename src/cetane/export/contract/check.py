"""The check of a folder: it is what an export of the bundle writes."""

import json
from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.export.contract.folder import contract_of, parts_of
from cetane.export.contract.texts import DOCUMENT, HOST, rendered
from cetane.files import FileRecord, check_files, read_json, read_text
from cetane.schema.draft_head import FOLDER
from cetane.schema.manifest import CONTRACT


def check(folder: Path, bundle: Bundle) -> list[str]:
    """The problems of a folder that was exported from a bundle; an empty list if there are none.

    It may lack draft heads: a bundle gets them later.
    """
    wanted = json.loads(json.dumps(contract_of(bundle)))
    try:
        told = read_json(folder / CONTRACT)
        heads = told.get("draft_heads")
        if isinstance(heads, dict):
            kept = {kind: head for kind, head in wanted["draft_heads"].items() if kind in heads}
            wanted["draft_heads"] = kept
        texts = rendered(wanted)
        other = [] if told == wanted else [CONTRACT]
        other += [name for name, text in texts.items() if read_text(folder / name) != text]
        if other:
            return [f"{name} is not what an export of {bundle.path} writes now" for name in other]
        check_files(folder, copied(bundle, wanted), "")
    except CetaneError as error:
        return [error.message]
    return []


def files(folder: Path, bundle: Bundle) -> set[str]:
    """The files that an export wrote into a folder; `check` has found no problem of it."""
    return {CONTRACT, HOST, DOCUMENT, *copied(bundle, read_json(folder / CONTRACT))}


def copied(bundle: Bundle, contract: dict[str, Any]) -> dict[str, FileRecord]:
    """The bundle's files that a folder with this contract holds."""
    listed = dict(bundle.manifest.files)
    for kind, head in bundle.draft_heads().items():
        files = head.manifest.files.items()
        listed |= {f"{FOLDER}/{kind}/{name}": record for name, record in files}
    parts = parts_of(contract)
    return {
        name: record
        for name, record in listed.items()
        if any(name == part or name.startswith(f"{part}/") for part in parts)
    }
