"""cetane validate: the gates of a finished bundle."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.cli.output import Json, console, errors, print_json, progress, table
from cetane.export import coreml_llm
from cetane.gates.draft_head import HeadResult, judge_heads
from cetane.gates.explain import Explanation, explain
from cetane.gates.golden import GoldenResult, golden
from cetane.gates.quality import perplexity, read_tokens
from cetane.gates.static import Finding, static_checks
from cetane.gates.verdict import Check
from cetane.schema.draft_head import HeadKind

BundlePath = Annotated[Path, typer.Argument(help="A bundle.")]


def validate(
    bundle: Annotated[
        Path, typer.Argument(help="A bundle, or a folder of CoreML-LLM's: its contract.")
    ],
    model: Annotated[
        str | None, typer.Option(help="The checkpoint, if it is not where the build found it.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--perplexity", help="Measure perplexity on a text file instead."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens of the text.")] = 20_000,
    json: Json = False,
) -> None:
    """Compare a bundle with the Hugging Face model, and its draft heads with what was trained. Exit
    code 1 when a gate is red.

    First, its packages and tables are compared with its manifest and with each other.
    """
    if (bundle / "model_config.json").is_file():  # which no bundle has
        problems = coreml_llm.check(bundle)
        if json:
            print_json({"problems": problems})
        for problem in problems if not json else []:
            errors.print(problem, markup=False, soft_wrap=True)
        raise typer.Exit(1 if problems else 0)
    opened = Bundle(bundle)
    if findings := misfits(opened, json):
        if json:
            print_json({"static": [finding.model_dump() for finding in findings]})
        raise typer.Exit(1)
    opened.verify()  # which knows that a file is another one, not what is wrong with it
    checkpoint = open_checkpoint(model or opened.manifest.source)
    if checkpoint.fingerprint != opened.manifest.fingerprint:
        errors.print(
            f"{checkpoint.source} is not the file that {bundle} was made from", markup=False
        )
    if text is None:
        result = check(opened, checkpoint, json)
        heads = check_heads(opened, json)
        if json:
            content = {"golden": result.model_dump(mode="json")}
            judged = {kind: head.model_dump(mode="json") for kind, head in heads.items()}
            print_json(content | ({"heads": judged} if judged else {}))
        passed = result.passed and all(head.passed for head in heads.values())
        raise typer.Exit(0 if passed else 1)
    ids = read_tokens(opened.tokenizer, text, tokens)
    with progress("perplexity") as update:
        quality = perplexity(opened, checkpoint, ids, update)
    if json:
        print_json({"perplexity": quality.model_dump(mode="json")})
    else:
        rows: list[list[Any]] = [[k, v] for k, v in quality.model_dump().items()]
        table("perplexity", ["what", "value"], rows)
    opened.write_gate("perplexity", quality.model_dump(mode="json") | {"text": text.name})
    raise typer.Exit(0 if quality.passed else 1)


def misfits(bundle: Bundle, json: bool) -> list[Finding]:
    """Run the static checks, store their result in the bundle, and print what they found."""
    findings = static_checks(bundle)
    listed = [finding.model_dump() for finding in findings]
    bundle.write_gate("static", {"passed": not findings, "findings": listed})
    for finding in findings if not json else []:
        errors.print(str(finding), markup=False, soft_wrap=True)
    if findings and not json:
        console.print("static checks: [bold red]FAIL[/]")
    return findings


def check(bundle: Bundle, checkpoint: Checkpoint, json: bool) -> GoldenResult:
    """Run the golden gate, store its result in the bundle, and print it."""
    with progress("golden") as update:
        result = golden(bundle, checkpoint, update)
    if not json:
        show(result)
        say_why(explain(bundle, checkpoint, result))
    bundle.write_gate("golden", result.model_dump(mode="json"))
    return result


def say_why(explanation: Explanation | None) -> None:
    """Print what is wrong with a refused port, and the change that mends it."""
    if explanation is None:
        return
    errors.print(f"{explanation.cause}: {explanation.sentence}", markup=False, soft_wrap=True)
    if explanation.recipe_change:
        errors.print(f"in the recipe:\n{explanation.recipe_change}", markup=False, soft_wrap=True)


def check_heads(bundle: Bundle, json: bool) -> dict[HeadKind, HeadResult]:
    """Run the golden gates of a bundle's draft heads, and print them."""
    with progress("heads") as update:
        results = judge_heads(bundle, update)
    if not json:
        for kind, result in results.items():
            show_head(kind, result)
    return results


def show_head(kind: str, result: HeadResult) -> None:
    """Print the golden gate of a draft head."""
    show_checks(f"golden gate of the {kind} head", result.checks)
    console.print(f"golden gate of the {kind} head: {verdict(result.passed)}")


def verdict(passed: bool) -> str:
    return "[bold green]pass[/]" if passed else "[bold red]FAIL[/]"


def show(result: GoldenResult) -> None:
    """Print the golden gate: every check, then the figures behind them."""
    show_checks("golden gate", result.checks)
    table(
        "what shards hand on",
        ["shard", "tensor", "mode", "cosine", "worst token", "PSNR dB"],
        [[s.shard, s.tensor, s.mode, s.cosine, s.cosine_min, s.psnr] for s in result.shards],
    )
    widest = sorted(result.ranges, key=lambda found: -found.largest)[:5]
    table(
        "largest residuals of the model (fp16 ends at 65504)",
        ["block", "largest"],
        [[found.block, found.largest] for found in widest],
    )
    for warning in result.warnings:
        errors.print(f"warning: {warning}", markup=False, soft_wrap=True)
    console.print(f"golden gate: {verdict(result.passed)}")


def show_checks(title: str, checks: tuple[Check, ...]) -> None:
    """Print values against their thresholds."""
    table(
        title,
        ["check", "value", "limit", "verdict"],
        [[c.name, c.value, c.limit, "pass" if c.passed else "FAIL"] for c in checks],
    )
