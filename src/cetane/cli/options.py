"""Options that several commands share, so that each has one name everywhere."""

import math
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from cetane.errors import CetaneError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every table.")]
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A Hugging Face folder, a GGUF file, or a hub id."),
]


def a_bundle(path: Path) -> Path:
    """The path of a bundle; CetaneError for any other, before a command imports for seconds."""
    from cetane.bundle.no_bundle import refuse_no_bundle

    refuse_no_bundle(path)
    return path


BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle.", callback=a_bundle)]
Checkpoint = Annotated[
    str | None,
    typer.Option("--model", help="The checkpoint, if it has moved since the build."),
]
RecipeName = Annotated[
    str,
    typer.Option("--recipe", "-r", help="A recipe by name (cetane recipes), or a .toml file."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="TOKENS",
        min=32,
        help="The most tokens of prompt and answer together, in place of the recipe's.",
    ),
]
Bits = Annotated[
    int | None,
    typer.Option(
        "--bits",
        metavar="BITS",
        help="Bits of a weight, in place of the recipe's: 16, 8, 6, 4, 3 or 2.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any value of the recipe, such as tokens.verify=8. May be repeated.",
    ),
]
Lora = Annotated[
    Path | None,
    typer.Option("--lora", metavar="FOLDER", help="A peft LoRA to merge into the model."),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="A peft LoRA to keep beside the model, which shares its weights. May be repeated.",
    ),
]
MovedLora = Annotated[
    Path | None,
    typer.Option(
        "--lora", metavar="FOLDER", help="The merged adapter, if it has moved since the build."
    ),
]
MovedAdapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="One of the bundle's adapters, if it has moved since the build. May be repeated.",
    ),
]
AdapterName = Annotated[
    str | None,
    typer.Option("--adapter", metavar="NAME", help="One of the bundle's adapters."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="The folder of the bundle.",
        show_default="MODEL-RECIPE",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace another bundle in that folder.")]
Rebuild = Annotated[
    bool,
    typer.Option(
        "--rebuild/--skip-existing", help="Remake what an earlier build made, or keep it."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Processes that share the work."),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="ADDRESS",
        help="Dask's scheduler, whose workers share the work; 'local' starts one here.",
    ),
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="A shared store: what is there is not made again. A folder, s3://, gs:// or hf://.",
        show_default="[store] url of cetane.toml",
    ),
]
ChipName = Annotated[
    str | None,
    typer.Option("--chip", help="A chip, such as m4-max or a19-pro.", show_default="m4-max"),
]
MeasuredChip = Annotated[
    str | None,
    typer.Option(
        "--chip",
        help="A chip, such as m4-max or a19-pro.",
        show_default="the measured one, else m4-max",
    ),
]
ForChip = Annotated[
    str | None,
    typer.Option("--chip", help="Choose the layout for this chip, such as m4-max or a19-pro."),
]
ALLOW_OFF_ANE = "--no-require-residency"
"""The option of a port for a chip that goes on where rules put it off the ANE."""


def parse_os(text: str) -> float:
    """The number of a system, as iOS counts: 18 for `18` and for `macOS 15`."""
    from cetane.gates.residency.target import system_number

    number = system_number(text)
    if number is None:
        with suppress(ValueError):
            number = float(text)
    if number is None or not 1 <= number < math.inf:
        raise CetaneError(f"--os {text!r}: no system", "write 'macOS 15', 'iOS 18' or only 18")
    return number


def os_option(when: str = "", default: str = "26") -> Any:
    """The option of a system. Its help begins with `when` it is for."""
    told = f"{when}the system, such as 'macOS 15'; a number alone is iOS's: 18."
    return typer.Option(
        parser=parse_os,
        metavar="SYSTEM",
        help=told[0].upper() + told[1:],
        show_default=default,
    )


OsNumber = Annotated[float | None, os_option()]
MeasuredOs = Annotated[float | None, os_option(default="the measured one, else 26")]
Quality = Annotated[
    str | None,
    typer.Option(
        "--quality",
        metavar="PROMISE",
        help="What is promised: near-lossless, good or usable, in place of the recipe's.",
    ),
]
Backend = Annotated[str, typer.Option(help="auto, portable (any machine) or coreml (a Mac).")]
ComputeUnits = Annotated[
    str | None,
    typer.Option(
        "--compute-units",
        metavar="UNITS",
        help="With Core ML: CPU_AND_NE, ALL, CPU_ONLY or CPU_AND_GPU.",
        show_default="CPU_AND_NE",
    ),
]
MaxNew = Annotated[int, typer.Option("--max-new", min=1, help="The most tokens of an answer.")]
DraftTokens = Annotated[
    int | None, typer.Option(help="The most tokens of a draft.", show_default="verify - 1")
]


def refuse(reason: str, options: Mapping[str, object]) -> None:
    """Raise CetaneError for the first option that was given: it would do nothing here."""
    for name, given in options.items():
        if given:
            raise CetaneError(f"{name} {reason}")


def parse_ids(text: str) -> list[int]:
    """The token ids of `--prompt-ids`, which commas separate."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise CetaneError(
            f"--prompt-ids {text!r}: not numbers separated by commas", "write 1,1000,5000"
        ) from error


def parse_adapters(settings: list[str] | None) -> dict[str, str]:
    """The folders of `--adapter NAME=FOLDER` options, by name."""
    return parse_named("--adapter", "NAME=FOLDER", "sql=adapters/sql", settings)


def parse_named(option: str, form: str, example: str, settings: list[str] | None) -> dict[str, str]:
    """The paths of a repeated `option`, by name. CetaneError for a setting of another form, and for
    a name that comes twice."""
    found: dict[str, str] = {}
    for setting in settings or []:
        name, _, path = setting.partition("=")
        if not name or not path:
            raise CetaneError(f"{option} {setting!r}: not {form}", f"as in {example}")
        if name in found:
            raise CetaneError(f"{option} {name}: named twice")
        found[name] = path
    return found


def parse_changes(settings: list[str] | None) -> dict[str, Any]:
    """`--set tokens.verify=8` options as values by key."""
    return dict(map(parse_change, settings or []))


def parse_change(setting: str) -> tuple[str, Any]:
    """A key and a value, which is read as TOML, else it is a text. CetaneError for a setting
    without a key or `=`."""
    key, equals, text = (part.strip() for part in setting.partition("="))
    if not key or not equals:
        raise CetaneError(f"{setting!r}: not KEY=VALUE", "as in cache.context=4096")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # no TOML, or a number of more digits than Python reads
        return key, text


def with_units(backend: str, units: str | None) -> str:
    """A backend's name with the compute units, which choose Core ML."""
    if units is None:
        return backend
    return f"{'coreml' if backend == 'auto' else backend}:{units}"
