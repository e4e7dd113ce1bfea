"""cetane bench: two bundles beside each other, or the gain of drafting, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.options import (
    AdapterName,
    Backend,
    BundlePath,
    ComputeUnits,
    DraftTokens,
    Json,
    MaxNew,
    refuse,
    with_units,
)
from cetane.cli.output import conclude, print_json, progress, say, say_wrapped, table, tell_kernels

if TYPE_CHECKING:
    from cetane.pipeline.bench import DraftingBenchmark
    from cetane.pipeline.versus import Versus
    from cetane.speculate.bench import Speed

Drafters = Annotated[str, typer.Option(help="Drafters of run --speculative, separated by commas.")]


def bench(
    bundle: BundlePath,
    other: Annotated[
        Path | None,
        typer.Argument(metavar="OTHER", help="Compare with this bundle, without drafts."),
    ] = None,
    drafters: Drafters = "auto",
    categories: Annotated[
        str, typer.Option(help="Categories of prompts, separated by commas.", show_default="all")
    ] = "",
    prompts: Annotated[
        int | None, typer.Option(min=1, help="The most prompts of a category.")
    ] = None,
    max_new: MaxNew = 64,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Repetitions.", show_default="1; with OTHER 5"),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="With OTHER: tokens of the prompt.", show_default="128"),
    ] = None,
    energy: Annotated[
        float, typer.Option(min=0, help="With OTHER: seconds under a power meter, on a Mac.")
    ] = 0,
    draft_tokens: DraftTokens = None,
    adapter: AdapterName = None,
    backend: Backend = "auto",
    compute_units: ComputeUnits = None,
    json: Json = False,
) -> None:
    """Compare generation with and without drafts.

    It runs both in one process, prompt by prompt. The exit code is 1 if any token differs. It is
    also 1 if drafts slow a category of prompts to less than 0.97 of the speed of plain decoding.
    The time in which a drafter reads prompts counts. On an idle machine the clock judges the speed;
    on a busy machine the number of calls does.

    With OTHER, compare two bundles instead, in turns: load, first token, prefill, decoding, and
    energy.
    """
    if other is not None:
        refuse(
            "is for drafts; with OTHER both bundles run alone",
            {
                "--drafters": drafters != "auto", "--categories": categories, "--prompts": prompts,
                "--draft-tokens": draft_tokens, "--adapter": adapter,
            },
        )  # fmt: skip
        with progress("bench") as update:
            from cetane.pipeline.versus import versus

            tell_kernels(update, backend)
            pair = versus(
                bundle, other, prompt_tokens=prompt_tokens or 128, tokens=max_new,
                rounds=rounds or 5, energy=energy, exclusive=True,
                backend=with_units(backend, compute_units), progress=update,
            )  # fmt: skip
        return print_json(pair.as_json()) if json else show_pair(pair)
    refuse("needs OTHER", {"--prompt-tokens": prompt_tokens, "--energy": energy})
    with progress("bench") as update:
        from cetane.pipeline.bench import bench as measure

        tell_kernels(update, backend)
        result = measure(
            bundle, drafters=drafters.split(","),
            categories=[name for name in categories.split(",") if name], prompts=prompts,
            tokens=max_new, rounds=rounds or 1, draft_tokens=draft_tokens,
            adapter=adapter, backend=with_units(backend, compute_units), exclusive=True,
            progress=update,
        )  # fmt: skip
    conclude(result, json, show)


def show_pair(pair: Versus) -> None:
    """Print every figure of both, and their ratio with its range over the turns."""
    a, b = (turns.bundle.name for turns in pair.turns)
    table(
        f"{b} over {a}, {pair.backend} backend, {pair.prompt_tokens} + {pair.tokens} tokens",
        ["figure", a, b, "ratio", "of single turns"],
        [
            [r.name, f"{r.first:.4g}", f"{r.second:.4g}", f"{r.ratio:.3f}",
             f"{r.low:.3f} to {r.high:.3f}"]
            for r in pair.ratios
        ],
    )  # fmt: skip


def show(result: DraftingBenchmark) -> None:
    """Print speeds by category, then the fate of the drafts."""
    calls = ", ".join(f"T={width} {s * 1e3:.1f} ms" for width, s in result.seconds.items())
    say_wrapped(f"calls: {calls}; drafts of at most {result.longest} tokens")
    say(f"judged by {'the clock' if result.idle else 'calls, since the machine is busy'}")
    table(
        "tokens per second, with and without drafts",
        ["category", "drafter", "plain", "drafted", "ratio", "by calls", "slowest", "same", "pays"],
        [
            [s.category, s.drafter, *map(two, (s.plain, s.speculative, s.ratio, s.by_calls)),
             two(s.slowest), "yes" if s.same else "NO",
             {True: "yes", False: "NO", None: "-"}[result.pays(s)]]
            for s in result.speeds
        ],
    )  # fmt: skip
    if silent := dict.fromkeys(s.category for s in result.speeds if s.ratio is None):
        say(f"no speed, since every answer ends with its first token: {', '.join(silent)}")
    table(
        "drafts: calls and accepted tokens",
        ["category", "drafter", "accepted", "tokens/call", "drafted calls", "plain calls"],
        [drafts(speed) for speed in result.speeds],
    )
    table(
        "milliseconds to the first token",
        ["category", "drafter", "plain", "drafted", "drafter reads"],
        [
            [s.category, s.drafter, *(two(1e3 * t) for t in (s.first_plain, s.first_speculative)),
             two(1e3 * s.reading)]
            for s in result.speeds
        ],
    )  # fmt: skip


def drafts(speed: Speed) -> list[object]:
    return [
        speed.category, speed.drafter, two(speed.acceptance), two(speed.tokens_per_call),
        speed.verifier_calls, speed.fallbacks,
    ]  # fmt: skip


def two(value: float | None) -> str:
    """Two decimals, or a dash."""
    return "-" if value is None else f"{value:.2f}"
