"""cetane run: text from a bundle."""

import time
from pathlib import Path
from typing import Annotated

import typer

from cetane.bundle import Bundle
from cetane.cli.output import Json, console, errors, print_json, table
from cetane.engine.engine import Engine
from cetane.engine.generate import generate, open_engine
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.errors import CetaneError
from cetane.mil.fast import share_threads
from cetane.speculate.open import NAMES, Wish, open_speculator
from cetane.speculate.speculator import Speculator


def run(
    bundle: Annotated[Path, typer.Argument(help="A bundle.")],
    prompt: Annotated[str | None, typer.Argument(help="What to ask.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Hold a conversation.")] = False,
    prompt_ids: Annotated[
        str | None, typer.Option(help="Token ids, separated by commas, in place of a text.")
    ] = None,
    max_new: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps all.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    backend: Annotated[str, typer.Option(help="auto, portable or coreml.")] = "auto",
    speculative: Annotated[
        str | None,
        typer.Option(
            help=f"Draft tokens, verify several at once: {', '.join(NAMES)}, or the path of a head "
            "or of a smaller bundle."
        ),
    ] = None,
    ngram_min: Annotated[int, typer.Option(help="Shortest match of a text with itself.")] = 1,
    ngram_max: Annotated[int, typer.Option(help="Longest match.")] = 8,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a draft.", show_default="verify - 1")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print where time went.")] = False,
    json: Json = False,
) -> None:
    """Generate text from a bundle's Core ML packages, on any machine."""
    sampler = Sampler(temperature, top_k, top_p, min_p, seed)
    opened = Bundle(bundle)
    opened.verify()
    if sum([chat, prompt is not None, prompt_ids is not None]) != 1:
        raise CetaneError("give one of: a prompt, --prompt-ids, or --chat")
    if chat and json:
        raise CetaneError("--json is for one answer, not for --chat")
    share_threads()
    engine = open_engine(opened, backend)
    speculator = None
    if speculative is not None:
        wish = Wish(speculative, ngram_min, ngram_max, draft_tokens)
        speculator = open_speculator(wish, opened, engine, sampler, backend)
    if chat:
        converse(opened, engine, sampler, max_new, speculator)
    else:
        if prompt_ids is None:
            ids = ask(opened, [message("user", prompt or "")])
        else:
            ids = parse_ids(prompt_ids)
        answer = Answer(opened, new_session(engine, speculator), sampler, max_new, json, speculator)
        answer.give(ids)
    counted = {}
    if speculator is not None:
        speculator.close()
        counted = {"speculation": speculator.summary()}
    if json:
        print_json(
            answer.summary() | ({"profile": dict(engine.seconds)} if profile else {}) | counted
        )
    elif profile:
        rows = [[name, seconds] for name, seconds in engine.seconds.items()]
        table("profile", ["where", "seconds"], rows)
        for title, counters in counted.items():
            rows = [[name, "-" if v is None else v] for name, v in counters.items()]
            table(title, ["what", "value"], rows)


class Answer:
    """Generates one answer and prints it as it comes."""

    def __init__(
        self,
        bundle: Bundle,
        session: Session,
        sampler: Sampler,
        max_new: int,
        quiet: bool,
        speculator: Speculator | None,
    ) -> None:
        self.bundle, self.session, self.sampler = bundle, session, sampler
        self.max_new, self.quiet, self.speculator = max_new, quiet, speculator
        self.prompt: list[int] = []
        self.tokens: list[int] = []
        self.text = ""
        self.seconds = {"first_token": 0.0, "rest": 0.0}

    def give(self, ids: list[int]) -> str:
        """Run `ids`, print what the model says after them, and return it."""
        tokenizer = self.bundle.tokenizer
        self.prompt, started = ids, time.perf_counter()
        stream = tokenizer.stream()
        for token in generate(
            self.session, ids, self.sampler, self.max_new, tokenizer.eos_ids, self.speculator
        ):
            if not self.tokens:
                self.seconds["first_token"] = time.perf_counter() - started
                started = time.perf_counter()
            self.tokens.append(token)
            self.show(stream.push(token))
        self.show(stream.finish())
        self.seconds["rest"] = time.perf_counter() - started
        if not self.quiet:
            print()
        return self.text

    def show(self, text: str) -> None:
        """Add a piece of the answer."""
        self.text += text
        if not self.quiet:
            print(text, end="", flush=True)

    def summary(self) -> dict[str, object]:
        """The answer and its cost, for `--json`."""
        rate = (len(self.tokens) - 1) / self.seconds["rest"] if len(self.tokens) > 1 else None
        return {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": len(self.prompt),
            "seconds_to_first_token": self.seconds["first_token"],
            "tokens_per_second": rate,
        }


def message(role: str, content: str) -> dict[str, str]:
    """A turn of a conversation."""
    return {"role": role, "content": content}


def ask(bundle: Bundle, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, or of its text when the model has no chat template."""
    tokenizer = bundle.tokenizer
    if tokenizer.has_chat_template:
        return tokenizer.chat(messages)
    return tokenizer.encode("\n".join(item["content"] for item in messages))


def converse(
    bundle: Bundle, engine: Engine, sampler: Sampler, max_new: int, speculator: Speculator | None
) -> None:
    """A conversation on the terminal; what is already in the cache is not run again."""
    messages: list[dict[str, str]] = []
    session = new_session(engine, speculator)
    held: list[int] = []
    errors.print("[dim]an empty line ends the conversation[/]")
    while question := ask_user():
        asked = message("user", question)
        ids = ask(bundle, [*messages, asked])
        if len(ids) > session.context:
            ids = ask(bundle, [asked])
            if len(ids) > session.context:
                errors.print(
                    f"the question has {len(ids)} tokens, the context holds {session.context}",
                    soft_wrap=True,
                )
                continue
            errors.print("the context is full: the conversation starts anew", soft_wrap=True)
            messages, session, held = [], new_session(engine, speculator), []
        messages.append(asked)
        shared = held == ids[: len(held)]
        if not shared:
            session, held = new_session(engine, speculator), []
        answer = Answer(bundle, session, sampler, max_new, False, speculator)
        messages.append(message("assistant", answer.give(ids[len(held) :])))
        held = [*ids, *answer.tokens][: session.position]


def new_session(engine: Engine, speculator: Speculator | None) -> Session:
    return engine.session() if speculator is None else speculator.session(engine)


def ask_user() -> str:
    """A line from the terminal; empty at its end."""
    try:
        return console.input("[bold]> [/]").strip()
    except EOFError:
        print()
        return ""


def parse_ids(text: str) -> list[int]:
    """`1,2,3` as token ids."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise CetaneError(f"--prompt-ids {text!r}: not numbers separated by commas") from error
