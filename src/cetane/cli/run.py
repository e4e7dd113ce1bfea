"""cetane run: generates text with a bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cetane.cli.options import (
    AdapterName,
    Backend,
    BundlePath,
    ComputeUnits,
    DraftTokens,
    Json,
    MaxNew,
    parse_ids,
    with_units,
)
from cetane.cli.output import facts, print_json, progress, tell_kernels, warn, with_unit
from cetane.errors import CetaneError

if TYPE_CHECKING:
    from cetane.pipeline.completion import Completion, Sampling
    from cetane.pipeline.language_model import LanguageModel
    from cetane.pipeline.prompt import Message, Prompt


PromptIdsOption = Annotated[
    str | None, typer.Option(help="Token ids, separated by commas, in place of a prompt.")
]
SpeculativeOption = Annotated[
    str,
    typer.Option(
        help="Who drafts tokens, which one call of the model then verifies. auto asks look-ups, "
        "and the bundle's draft head or else self-drafts (triforce). Others: ngram, suffix, union, "
        "triforce, medusa, eagle3, or the path of a smaller bundle. none decodes plainly."
    ),
]


def run(
    bundle: BundlePath,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Hold a conversation.")] = False,
    prompt_ids: PromptIdsOption = None,
    adapter: AdapterName = None,
    max_new: MaxNew = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1 keeps all.")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="0 keeps all.")] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Makes sampling repeatable. In a chat, each answer then reads the whole "
            "conversation anew.",
        ),
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(min=-2, max=2, help="Lowers every token that the answer holds.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(min=-2, max=2, help="Lowers it as often as the answer holds it.")
    ] = 0.0,
    backend: Backend = "auto",
    compute_units: ComputeUnits = None,
    speculative: SpeculativeOption = "auto",
    ngram_min: Annotated[int, typer.Option(help="The shortest match, in tokens.")] = 1,
    ngram_max: Annotated[int, typer.Option(help="The longest match, in tokens.")] = 8,
    draft_tokens: DraftTokens = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time went.")] = False,
    json: Json = False,
) -> None:
    """Generate text from a bundle, on any machine.

    On a Mac, Core ML runs the packages. Elsewhere cetane's own executor does.
    """
    check(chat, json, prompt, prompt_ids)
    ids = None if prompt_ids is None else parse_ids(prompt_ids)
    with progress("loading") as update:
        from cetane.cli.chat import Chat  # these import for seconds
        from cetane.pipeline.completion import Sampling
        from cetane.pipeline.language_model import load
        from cetane.speculate.open import DrafterOptions

        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
            presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        )  # fmt: skip
        drafter = DrafterOptions(speculative, ngram_min, ngram_max, draft_tokens)
        tell_kernels(update, backend)
        model = load(
            bundle, backend=with_units(backend, compute_units), speculative=drafter,
            exclusive=True, adapter=adapter,
        )  # fmt: skip
    with model:
        if chat:
            Chat(model, max_new, sampling).run()
            if profile:
                show_profile(model, None)
        else:
            question: Message = {"role": "user", "content": prompt or ""}
            asked: Prompt = [question] if ids is None else ids
            answer(model, asked, max_new, sampling, profile, json)


def check(chat: bool, json: bool, prompt: str | None, prompt_ids: str | None) -> None:
    """Raise CetaneError unless there is exactly one of prompt, ids and chat."""
    given = sum([chat, prompt is not None, prompt_ids is not None])
    if given != 1:
        which = "only one" if given else "one"
        raise CetaneError(f"give {which} of: a prompt, --prompt-ids, or --chat")
    if chat and json:
        raise CetaneError("--json is only for one answer, so not for --chat")


def answer(
    model: LanguageModel,
    asked: Prompt,
    max_new: int,
    sampling: Sampling,
    profiled: bool,
    json: bool,
) -> None:
    """Print one answer as it comes, or as JSON with its counters. Ctrl-C ends the command, after
    what there is was printed."""
    from cetane.cli.chat import ending, show

    if not json:
        completion = show(model.stream(asked, max_new_tokens=max_new, **sampling))
        warn(ending(completion, model.context))
    else:
        with progress("answer"):
            completion = model.generate(asked, max_new_tokens=max_new, **sampling)
        print_json(completion.as_json() | counted(model, completion if profiled else None))
    if profiled and not json:
        show_profile(model, completion)
    if completion.finish_reason == "interrupted":
        raise typer.Abort


def counted(model: LanguageModel, profiled: Completion | None) -> dict[str, Any]:
    """The counters of the drafter, and the profile of an answer."""
    from cetane.pipeline.profile import profile

    speculation = model.speculation()
    made = {} if profiled is None else {"profile": profile(model.engine, profiled).as_json()}
    return made | ({} if speculation is None else {"speculation": speculation})


def show_profile(model: LanguageModel, completion: Completion | None) -> None:
    """Print the figures that the published ports print, then the drafter's counters."""
    from cetane.pipeline.profile import profile

    made = profile(model.engine, completion)
    facts(
        {
            "decode throughput": with_unit(made.decode_tok_s, "tok/s"),
            "total forward throughput": with_unit(made.forward_tok_s, "tok/s"),
            "layers": with_unit(made.layers_ms, "ms/token"),
            "head": with_unit(made.head_ms, "ms/token"),
            "average per layer": with_unit(made.layer_ms, "ms"),
            "verifier": with_unit(made.verify_ms, f"ms/call, T = {made.verify_tokens}"),
        },
        "profile",
    )
    facts(
        {name: f"{one.cold_ms:.1f} ms cold, {one.warm_ms:.1f} ms warm"
         for name, one in made.load.items()},
        "load by shard",
    )  # fmt: skip
    facts({name: f"{spent:.3f} s" for name, spent in made.seconds.items()}, "seconds in all")
    speculation = model.speculation()
    if speculation is not None:
        facts({name: "-" if v is None else v for name, v in speculation.items()}, "speculation")
