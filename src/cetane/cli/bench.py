"""cetane bench: the gain of drafting on a bundle, measured on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.options import Backend, BundlePath, DraftTokens, Json, MaxNew
from cetane.cli.output import conclude, progress, say, table

if TYPE_CHECKING:
    from cetane.pipeline.bench import DraftingBenchmark
    from cetane.speculate.bench import Speed


def bench(
    bundle: BundlePath,
    drafters: Annotated[
        str, typer.Option(help="Drafters of run --speculative, separated by commas.")
    ] = "ngram,suffix,union",
    categories: Annotated[
        str, typer.Option(help="Categories of prompts, separated by commas.", show_default="all")
    ] = "",
    prompts: Annotated[
        int | None, typer.Option(min=1, help="The most prompts of a category.")
    ] = None,
    max_new: MaxNew = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of the whole benchmark.")] = 1,
    draft_tokens: DraftTokens = None,
    backend: Backend = "auto",
    json: Json = False,
) -> None:
    """Compare generation with and without drafts, prompt by prompt, in one process.

    Exit code 1 if any token differs.
    """
    from cetane.pipeline.bench import bench as measure

    with progress("bench") as update:
        result = measure(
            bundle, drafters=drafters.split(","),
            categories=[name for name in categories.split(",") if name], prompts=prompts,
            tokens=max_new, rounds=rounds, draft_tokens=draft_tokens, backend=backend,
            exclusive=True, progress=update,
        )  # fmt: skip
    conclude(result, json, show)


def show(result: DraftingBenchmark) -> None:
    """Print speeds by category, then the fate of the drafts."""
    calls = ", ".join(f"T={width} {s * 1e3:.1f} ms" for width, s in result.seconds.items())
    say(f"calls: {calls}; drafts of at most {result.longest} tokens")
    table(
        "tokens per second, with and without drafts",
        ["category", "drafter", "plain", "drafted", "ratio", "by calls", "slowest", "same"],
        [
            [s.category, s.drafter, *map(two, (s.plain, s.speculative, s.ratio, s.by_calls)),
             two(s.slowest), "yes" if s.same else "NO"]
            for s in result.speeds
        ],
    )  # fmt: skip
    table(
        "drafts: calls and accepted tokens",
        ["category", "drafter", "accepted", "tokens/call", "drafted calls", "plain calls"],
        [drafts(speed) for speed in result.speeds],
    )


def drafts(speed: Speed) -> list[object]:
    return [
        speed.category, speed.drafter, two(speed.acceptance), two(speed.tokens_per_call),
        speed.verifier_calls, speed.fallbacks,
    ]  # fmt: skip


def two(value: float | None) -> str:
    """Two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"
