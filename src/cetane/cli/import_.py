"""cetane import: reads what a Mac measured into a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.options import Checkpoint, Json, refuse
from cetane.cli.output import (
    conclude,
    console,
    facts,
    print_json,
    say,
    say_wrapped,
    table,
    verdict,
    warn,
    with_unit,
)
from cetane.errors import CetaneError

if TYPE_CHECKING:
    from cetane.gates.residency.refuted import Refuted
    from cetane.kit.device import DeviceResult, EnergyResult
    from cetane.kit.speed import Figures
    from cetane.pipeline.import_kit import KitImport
    from cetane.pipeline.import_xcode import XcodeImport


def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A kit's measurements.json; Xcode's .mlperf folder; Core ML's analytics.mil; or "
            "a file of powermetrics (plist) or macmon (JSON lines).",
        ),
    ],
    bundles: Annotated[
        list[Path] | None, typer.Argument(metavar="BUNDLE", help="The bundles it measured.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="With a power meter's file: tokens of that load.")
    ] = None,
    model: Checkpoint = None,
    json: Json = False,
) -> None:
    """Read what a Mac measured.

    Measured placements win over rules. A gate judges the outputs. Times become evidence for the
    cost model. Energy is shown. Exit code 1 if the device computed something else than expected.
    """
    from cetane.pipeline.import_kit import import_kit
    from cetane.pipeline.import_power import import_power
    from cetane.pipeline.import_xcode import import_xcode

    given = bundles or []
    kind = kind_of(file)
    if kind != "power":
        refuse("is for a power meter's file", {"--tokens": tokens})
    if kind != "kit":
        refuse("is for a kit's measurements", {"--model": model})
    if kind == "kit":
        conclude(import_kit(file, given, model=model), json, partial(show_kit, given))
    elif kind == "xcode":
        if len(given) != 1:
            raise CetaneError(f"{file} is about one package", "give its bundle or .mlpackage")
        day = datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()
        conclude(import_xcode(file, given[0], day), json, show_xcode)
    else:
        if len(given) > 1:
            raise CetaneError(f"{file} is about one load", "give the bundle that ran then")
        energy = import_power(file, tokens, given[0] if given else None)
        if json:
            print_json(energy.model_dump(mode="json"))
        else:
            show_energy(energy)


def kind_of(path: Path) -> str:
    """The kind of a file, by its name, or by its first bytes. CetaneError for a bundle."""
    from cetane.schema.manifest import MANIFEST

    if (path / MANIFEST).is_file():
        raise CetaneError(f"{path} is a bundle, and no file of a Mac", "the Mac's file comes first")
    if path.is_dir():
        return "xcode"
    if not path.is_file():
        raise CetaneError(f"{path}: no such file")
    if path.suffix == ".mil":
        return "xcode"
    with path.open("rb") as file:
        start = file.read(4096).lstrip()
    meter = start.startswith((b"<?xml", b"<plist", b"bplist")) or b'_power"' in start
    return "power" if meter else "kit"


def show_kit(bundles: Sequence[Path], result: KitImport) -> None:
    """Print every bundle's outcome, then the two beside each other."""
    for path, outcome in zip(bundles, result.outcomes, strict=True):
        show_outcome(path, outcome)
    if result.ratios:
        shown = {name.replace("_", " "): f"{ratio:.3f}" for name, ratio in result.ratios.items()}
        first, second = result.names
        facts(shown, f"the time of B ({second}), over that of A ({first})")


def show_outcome(bundle: Path, outcome: DeviceResult) -> None:
    """Print the gate, the figures, and where predictions were wrong."""
    from cetane.bundle import Bundle
    from cetane.pipeline.import_kit import evidence_file

    basis = "measured on" if outcome.device else "run, not on a device, on"
    say_wrapped(
        f"{outcome.name}: {basis} {outcome.machine}, {outcome.date}, {outcome.compute_units}"
    )
    table(
        "outputs against cetane's executor",
        ["check", "value", "limit", ""],
        [[c.name, f"{c.value:.6g}", f"{c.limit:.6g}", "pass" if c.passed else "FAIL"]
         for c in outcome.checks],
    )  # fmt: skip
    facts(figures(outcome.figures))
    for one in outcome.compared:
        inside = {True: "inside its interval", False: "outside its interval", None: ""}[one.inside]
        say(
            f"{one.mode}: measured {one.measured_ms:.2f} ms, predicted {one.predicted_ms:.2f} ms "
            f"({one.ratio:.2f} times; {one.binds} binds) {inside}"
        )
    show_rules(outcome.rules)
    for line in outcome.refusals:
        warn(f"the compiler refused: {line}")
    for line in outcome.faults:
        warn(f"fault: {line}")
    for line in outcome.notes:
        warn(f"note: {line}")
    if outcome.rows:
        file = quote(str(evidence_file(Bundle(bundle))))
        say(f"{outcome.rows} rows of evidence: python -m cetane.perf.fit {file}")
    console.print(f"device: {verdict(outcome.passed)}")


def figures(own: Figures) -> dict[str, str | None]:
    """Names and values of the figures that were measured."""
    return {
        "decoding": with_unit(own.decode_tok_s, "tokens/s"),
        "a token, median": with_unit(own.decode_ms, "ms"),
        "a token, 95 %": with_unit(own.decode_p95_ms, "ms"),
        "prefill": with_unit(own.prefill_tok_s, "tokens/s"),
        "first token": with_unit(own.first_token_ms, "ms"),
        "a verifying call": with_unit(own.verify_ms, f"ms, T = {own.verify_tokens}"),
        "load, after compiling": with_unit(own.load_ms, "ms"),
        "load, again": with_unit(own.load_again_ms, "ms"),
        "memory at most": with_unit(own.peak_bytes and own.peak_bytes / 1e6, "MB"),
        "energy": with_unit(own.joules_per_token, "J a token"),
    }


def show_rules(rules: tuple[Refuted, ...]) -> None:
    """Print the rules that were wrong."""
    if rules:
        table(
            "rules that were wrong here",
            ["rule", "predicted", "wrong", "of", "measured", "narrow it"],
            [[r.rule, r.predicted, r.wrong, r.ops,
              ", ".join(f"{n} {place}" for place, n in r.measured.items()), r.narrow]
             for r in rules],
        )  # fmt: skip


def show_xcode(result: XcodeImport) -> None:
    """Print the places of ops, and where rules were wrong."""
    told = result.told
    say(f"{result.package}: {told.machine}, {told.system}, {told.compute_units}")
    facts(
        {
            "a prediction": with_unit(told.predict_ms, "ms"),
            "load": with_unit(told.load_ms, "ms"),
            "compile": with_unit(told.compile_ms, "ms"),
        }
        | {f"estimated, {name}": with_unit(ms, "ms") for name, ms in told.estimated_ms.items()}
    )
    for reason, count in told.refusals.items():
        say(f"  off the ANE, {count} ops: {reason}")
    show_rules(result.rules)
    if result.note is not None:
        warn(f"note: {result.note}")
    console.print(f"residency, {result.audit.basis}: {verdict(result.passed)}")


def show_energy(energy: EnergyResult) -> None:
    """Print watts and joules per token."""
    facts({rail: with_unit(watts, "W") for rail, watts in energy.watts.items()}, "mean power")
    if energy.joules_per_token is not None:
        facts({r: with_unit(j, "J") for r, j in energy.joules_per_token.items()}, "energy a token")
    if energy.ane_silent:
        warn("note: the Neural Engine's counter stayed at 0")
    for line in energy.notes:
        warn(f"note: {line}")
