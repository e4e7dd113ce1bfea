"""Uploads of folders to the Hugging Face hub, with their model cards."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from cetane.bundle import Bundle
from cetane.bundle.folder import HUB_CACHE, HUB_FILES
from cetane.checkpoint.names import HUB_ID
from cetane.errors import CetaneError
from cetane.export import contract
from cetane.files import read_json_if_present, regular_files
from cetane.hardware.chips import find_chip
from cetane.pipeline.runtime_folder import RUNTIMES, check_folder
from cetane.report.card import FolderKind, card
from cetane.schema.draft_head import FOLDER, HELD_OUT
from cetane.schema.manifest import CONFIGS, CONTRACT, MANIFEST, ORIGIN

CARD = "README.md"
KINDS: dict[str, FolderKind] = {MANIFEST: "bundle", CONTRACT: "contract", **CONFIGS}
"""The kind of a folder with this file."""
PACKAGED = re.compile(r"[\w-][\w.-]*\.(mlpackage|mlmodelc)(/[\w-][\w. -]*)+")
"""A file of a package, compiled or not; a hidden file is none."""


@dataclass(frozen=True)
class Upload:
    """What is uploaded, or would be."""

    repo: str
    kind: FolderKind
    card: str
    files: dict[str, int]
    """The bytes of every file, by its path, without the card and what only the hub writes."""
    texts: list[str]
    """The files that hold windows of text, of which no draft head learned."""
    url: str | None = None
    """The address of the commit; None for a dry run."""

    def as_json(self) -> dict[str, Any]:
        return {
            "repo": self.repo, "kind": self.kind, "files": self.files, "card": self.card,
            "texts": self.texts, "url": self.url,
        }  # fmt: skip


def push(
    folder: str | Path,
    repo: str,
    *,
    bundle: str | Path | None = None,
    license: str | None = None,
    chip: str | None = None,
    public: bool = False,
    held_out: bool = False,
    dry_run: bool = False,
) -> Upload:
    """Upload a bundle, or a folder that was exported from `bundle`, with a model card.

    The folder is one of the layouts `contract`, `anemll` and `coreml-llm`. A repository that is not
    there yet is made, private unless `public`. A dry run contacts nothing. Raises CetaneError for

    - a damaged bundle, or a folder of no known kind;
    - an exported folder that is wrong or holds other files;
    - a draft head with windows of the user's own text, unless `held_out`;
    - a refusal of the hub.
    """
    path = Path(folder)
    if not HUB_ID.fullmatch(repo):
        raise CetaneError(f"{repo!r} is no repository", "its name has the form OWNER/NAME")
    kind = kind_of(path)
    if kind != "bundle" and bundle is None:
        raise CetaneError(
            f"{path} has no gates for its card", "--bundle names the bundle that it is from"
        )
    source = Bundle(path if kind == "bundle" else Path(bundle or path))
    source.verify()
    if kind != "bundle":
        check_origin(path, kind, source)
        check_export(path, kind, source)
    files = {name: (path / name).stat().st_size for name in regular_files(path) if goes_up(name)}
    if kind != "bundle":
        refuse_strangers(path, kind, source, files)
    texts = held_out_texts(source) if kind == "bundle" else {}
    owned = [name for name, learned in texts.items() if learned]
    if owned and not held_out:
        raise CetaneError(
            f"{path}: anyone can read a tenth of {', '.join(texts[owned[0]])} in {owned[0]}",
            "if the text may be known there, add --held-out",
        )
    wanted = None if chip is None else find_chip(chip)
    about = card(source, kind, repo, license, wanted, files)
    upload = Upload(repo, kind, about, files, list(texts))
    return upload if dry_run else replace(upload, url=commit(path, upload, public))


def held_out_texts(bundle: Bundle) -> dict[str, list[str]]:
    """The files with windows of text, and the user's texts that each is from: none if the model
    wrote the text itself."""
    return {
        f"{FOLDER}/{kind}/{HELD_OUT}": list(head.manifest.training.data)
        for kind, head in bundle.draft_heads().items()
    }


def check_origin(folder: Path, kind: FolderKind, source: Bundle) -> None:
    """Raise CetaneError unless an exported folder names this bundle: its gates are about no
    other."""
    name = CONTRACT if kind == "contract" else ORIGIN
    told = read_json_if_present(folder / name).get("bundle")
    if told is None:
        raise CetaneError(
            f"{folder} does not tell from which bundle it is ({name})",
            f"an export without problems does: {export_command(kind, source)}",
        )
    if told != source.digest:
        raise CetaneError(f"{folder} was exported from another bundle than {source.path}")


def export_command(kind: FolderKind, source: Bundle) -> str:
    """The command that writes such a folder."""
    return f"cetane export {quote(str(source.path))} --layout {kind} -o FOLDER"


def check_export(folder: Path, kind: FolderKind, source: Bundle) -> None:
    """Raise CetaneError for an exported folder that its own check refuses."""
    checked = (
        contract.check(folder, source) if kind == "contract" else check_folder(folder).problems
    )
    if checked:
        raise CetaneError(
            f"{folder} is no whole export of {source.path}: {checked[0]}",
            f"{export_command(kind, source)} makes one",
        )


def goes_up(name: str) -> bool:
    """Whether a file is the folder's: the hub writes some, and Python does where a host ran."""
    cached = name.startswith(HUB_CACHE) or "__pycache__" in name.split("/")
    return name not in HUB_FILES and not cached


def refuse_strangers(folder: Path, kind: FolderKind, source: Bundle, names: Iterable[str]) -> None:
    """Raise CetaneError for a file that no export wrote: it may be private."""
    if kind == "anemll" or kind == "coreml-llm":
        known = {ORIGIN, *RUNTIMES[kind].FILES}
        names = (name for name in names if not PACKAGED.fullmatch(name))
    else:
        known = contract.files(folder, source)
    stranger = next((name for name in names if name not in known), None)
    if stranger is not None:
        raise CetaneError(
            f"{folder}: {stranger} is no file of the layout {kind}",
            "move it away: push uploads only what an export has",
        )


def kind_of(folder: Path) -> FolderKind:
    """The kind of a folder, by the files that are there."""
    for name, kind in KINDS.items():
        if (folder / name).is_file():
            return kind
    raise CetaneError(
        f"{folder} is neither a bundle nor an export for an app",
        "cetane port makes a bundle; --layout contract, anemll and coreml-llm make exports",
    )


def commit(folder: Path, upload: Upload, public: bool) -> str:
    """Upload everything in one commit. Returns the commit's address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="cetane")
    adds = [
        CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=upload.card.encode()),
        *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name)
          for name in upload.files),
    ]  # fmt: skip
    try:
        api.create_repo(upload.repo, private=not public, exist_ok=True)
        made = api.create_commit(upload.repo, adds, commit_message=f"Add {folder.name}")
    except Exception as error:  # the network, the hub and its HTTP client raise many kinds
        raise CetaneError(
            f"cannot push to {upload.repo}: {' '.join(str(error).split()) or type(error).__name__}",
            "check the network, and log in with: hf auth login",
        ) from error
    return str(made.commit_url)
