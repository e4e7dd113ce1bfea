"""cetane eval: tasks of lm-evaluation-harness on a bundle."""

from pathlib import Path
from typing import Annotated

import typer

from cetane.cli.gate_tables import show_model
from cetane.cli.options import (
    AdapterName,
    Backend,
    BundlePath,
    Checkpoint,
    ComputeUnits,
    Json,
    refuse,
    with_units,
)
from cetane.cli.output import (
    facts,
    print_json,
    progress,
    show_warnings,
    table,
    tell_kernels,
)
from cetane.errors import CetaneError


def eval(
    bundle: BundlePath,
    tasks: Annotated[
        str, typer.Option(help="Tasks, separated by commas.")
    ] = "cetane_cloze,cetane_choice",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first samples of each task.")
    ] = None,
    fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each sample.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask in turns of a conversation, by the chat template.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(help="reference: the Hugging Face model answers the same requests."),
    ] = None,
    model: Checkpoint = None,
    adapter: AdapterName = None,
    include: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder with more tasks as YAML.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Results, as lm-eval writes them."),
    ] = None,
    backend: Backend = "auto",
    compute_units: ComputeUnits = None,
    json: Json = False,
) -> None:
    """Evaluate a bundle with lm-evaluation-harness.

    After an interruption, run it again: it goes on where it was. The bundle keeps the figures for
    its report.
    """
    if against not in (None, "reference"):
        raise CetaneError(f"--against {against}: only reference is known")
    if against is None:
        refuse("is for --against reference", {"--model": model})
    with progress("eval") as update:
        from cetane import evaluate  # which imports for seconds

        tell_kernels(update, backend)
        result = evaluate(
            bundle, [task for task in tasks.split(",") if task], limit=limit, fewshot=fewshot,
            chat=chat, against_reference=against is not None, model=model, adapter=adapter,
            backend=with_units(backend, compute_units),
            include=include, output=output, progress=update,
        )  # fmt: skip
    show_warnings(result.warnings)
    if json:
        print_json(result.model_dump(mode="json"))
        return
    columns = ["task", "metric", "samples", "value", "error"]
    rows = [[f.task, f.metric, f.samples, f.value, f.error] for f in result.figures]
    if against is not None:
        columns += ["reference", "difference", "its error"]
        for row, f in zip(rows, result.figures, strict=True):
            row += [f.reference, f.difference, f.difference_error]
    table("Tasks", columns, rows)
    if result.source is not None and result.fingerprint is not None:
        show_model(result.source, result.fingerprint)
    if result.nats is not None:
        facts({"log likelihoods, from the reference's": f"{result.nats:.2g} nats a token",
               "same greedy flags": f"{result.greedy:.2%}"})  # fmt: skip
