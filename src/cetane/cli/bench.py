"""cetane bench: what a way to run a bundle gains, measured on this machine."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from cetane.bundle import Bundle
from cetane.cli.output import BundlePath, Json, console, print_json, progress, table
from cetane.cli.run import ask, message
from cetane.engine.generate import open_engine
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.mil.fast import share_threads
from cetane.speculate.bench import Speed, compare
from cetane.speculate.bench import suite as speculative_suite
from cetane.speculate.drafter import Drafter
from cetane.speculate.open import Wish, longest_draft, open_controller, open_drafters


def bench(
    bundle: BundlePath,
    suite: Annotated[str, typer.Option(help="speculative is the one there is.")] = "speculative",
    drafters: Annotated[
        str, typer.Option(help="As for run --speculative, separated by commas.")
    ] = "ngram,suffix,union",
    only: Annotated[
        str | None, typer.Option(help="Categories of prompts, separated by commas.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Most prompts of a category.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="How often all is done.")] = 1,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a draft.", show_default="verify - 1")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, portable or coreml.")] = "auto",
    json: Json = False,
) -> None:
    """Compare generation with drafts and without, prompt by prompt in one process. Exit code 1 if
    any token differs."""
    if suite != "speculative":
        raise CetaneError(f"no suite {suite!r}; known: speculative")
    known = speculative_suite()
    chosen = only.split(",") if only else list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise CetaneError(f"no category {unknown[0]!r}; known: {', '.join(known)}")
    opened = Bundle(bundle)
    opened.verify()
    share_threads()
    engine = open_engine(opened, backend)
    wishes = [Wish(name, draft_tokens=draft_tokens) for name in drafters.split(",")]
    longest = longest_draft(wishes[0], engine)
    making: dict[str, Callable[[], list[Drafter]]] = {
        wish.drafter: partial(open_drafters, wish, opened, Sampler(), backend, remember=False)
        for wish in wishes
    }
    measured = open_controller(engine, longest).costs
    ids = {
        name: [ask(opened, [message("user", text)]) for text in known[name][:prompts]]
        for name in chosen
    }
    with progress("bench") as update:
        speeds = compare(
            engine,
            ids,
            making,
            measured,
            longest,
            tokens,
            rounds,
            opened.tokenizer.eos_ids,
            update,
        )
    if json:
        print_json(
            {
                "bundle": str(bundle),
                "draft_tokens": longest,
                "seconds": {width: cost.seconds for width, cost in measured.items()},
                "speeds": [speed.model_dump(mode="json") for speed in speeds],
            }
        )
    else:
        calls = ", ".join(f"T={w} {cost.seconds * 1e3:.1f} ms" for w, cost in measured.items())
        console.print(f"calls: {calls}; drafts of at most {longest} tokens")
        table("speculative decoding against plain", COLUMNS, [row(speed) for speed in speeds])
    raise typer.Exit(0 if all(speed.same for speed in speeds) else 1)


COLUMNS = [
    "category", "drafter", "plain t/s", "t/s", "ratio", "by calls", "slowest", "accepted",
    "per call", "calls", "plain", "same",
]  # fmt: skip


def row(speed: Speed) -> list[object]:
    """A row under `COLUMNS`."""
    figures = (
        speed.plain, speed.speculative, speed.ratio, speed.by_calls, speed.slowest,
        speed.acceptance, speed.tokens_per_call,
    )  # fmt: skip
    return [
        speed.category,
        speed.drafter,
        *("-" if figure is None else f"{figure:.2f}" for figure in figures),
        speed.verifier_calls,
        speed.fallbacks,
        "yes" if speed.same else "NO",
    ]
