"""Kits: archives that measure bundles on a Mac. `import_kit.py` reads what they bring back."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.files import (
    Progress,
    check_outside,
    check_writable,
    disk_errors,
    make_folder_of,
    replacing,
    silent,
)
from cetane.gates.quality import refuse_choices
from cetane.kit.write import LABELS, pack, write_folder


@dataclass(frozen=True)
class Kit:
    """A kit that was written."""

    path: Path
    id: str
    bytes: int
    bundles: dict[str, str]
    """Names of the bundles, by their label in the kit."""
    functions: int
    """Functions that it measures."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def make_kit(
    bundles: Sequence[str | Path], output: str | Path, *, progress: Progress = silent
) -> Kit:
    """Write a zip archive that measures one or two bundles on a Mac.

    It holds their packages, inputs with expected outputs, and a script that needs only Python,
    numpy and coremltools. Raises CetaneError for more than two bundles, a damaged one, and one that
    gives choices and no logits. Also for an `output` that is a folder or lies in a bundle.
    """
    if isinstance(bundles, str | Path):  # a text is a sequence of letters
        raise CetaneError("a kit takes a list of bundles", f"give [{str(bundles)!r}]")
    if not 1 <= len(bundles) <= len(LABELS):
        raise CetaneError(
            f"a kit holds one or two bundles, not {len(bundles)}", "make one kit for each pair"
        )
    opened = [Bundle(Path(path)) for path in bundles]
    target = Path(output)
    for bundle in opened:
        bundle.verify()
        refuse_choices(bundle)
        check_outside(target, bundle.path)
    if target.is_dir():
        raise CetaneError(f"{target} is a folder", "name a file, such as kit.zip")
    check_writable(target)
    with disk_errors(target), tempfile.TemporaryDirectory(prefix="cetane-kit-") as temporary:
        folder = Path(temporary)
        content = write_folder(opened, folder, progress)
        make_folder_of(target)
        with replacing(target) as archive:
            pack(opened, folder, archive, progress)
    entries = content["bundles"]
    return Kit(
        target,
        content["id"],
        target.stat().st_size,
        {label: entry["name"] for label, entry in entries.items()},
        sum(len(entry["functions"]) for entry in entries.values()),
    )
