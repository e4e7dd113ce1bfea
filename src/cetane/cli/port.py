"""cetane port: plan, build and gates in one command."""

from pathlib import Path
from typing import Any

import typer

from cetane.checkpoint import open_checkpoint
from cetane.cli.build import Force, Output, SkipExisting, make
from cetane.cli.output import Json, Model, RecipeName, console, errors, print_json
from cetane.cli.plan import show
from cetane.cli.validate import check, show_checks
from cetane.gates.ladder import ladder
from cetane.gates.residency.audit import Audit, audit
from cetane.gates.residency.store import summary
from cetane.gates.residency.target import Target
from cetane.mil.reader import load
from cetane.planner import Planner


def port(
    model: Model,
    output: Output = None,
    recipe: RecipeName = "default",
    skip_existing: SkipExisting = True,
    force: Force = False,
    json: Json = False,
) -> None:
    """Port a model: plan it, build it, and prove that the result is right.

    The first shard of every kind is judged, and audited for residency, before the others are made.
    """
    checkpoint = open_checkpoint(model)
    gates: dict[str, Any] = {}

    def climb(planner: Planner, packages: dict[str, Path]) -> None:
        result = ladder(checkpoint, planner, packages)
        gates["ladder"] = result.model_dump(mode="json")
        placed = audit({name: load(path) for name, path in packages.items()}, Target())
        gates["residency"] = summary(placed)
        if not json:
            show_checks("first shard of every kind", result.checks)
            warn(placed)
        if not result.passed:
            if json:
                print_json({"bundle": None, "gates": gates})
            errors.print(
                "the first shards are not right, so the others were not built; "
                "once the cause is mended, --rebuild makes them anew",
                soft_wrap=True,
            )
            raise typer.Exit(1)

    bundle = make(model, output, recipe, force, skip_existing, climb)
    for name, outcome in gates.items():
        bundle.write_gate(name, outcome)
    if not json:
        show(bundle.plan)
    result = check(bundle, checkpoint, json)
    if json:
        gates["golden"] = result.model_dump(mode="json")
        print_json({"bundle": str(bundle.path), "digest": bundle.digest, "gates": gates})
    elif result.passed:
        console.print(f"next: cetane run {bundle.path} --chat", markup=False, soft_wrap=True)
    raise typer.Exit(0 if result.passed else 1)


def warn(found: Audit) -> None:
    """Say what keeps the first shards off the ANE. It is a prediction, so it stops nothing."""
    for reason in found.reasons:
        errors.print(
            f"warning: residency on {found.target}, {found.basis}: {reason}; "
            "cetane audit BUNDLE tells more",
            markup=False, soft_wrap=True,
        )  # fmt: skip
