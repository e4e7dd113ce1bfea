"""The chat: a conversation on the terminal."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from cetane.cli.output import errors, progress, several, warn
from cetane.errors import CetaneError, steerless
from cetane.files import cache_dir

if TYPE_CHECKING:
    from cetane.pipeline.answer_session import CompletionStream
    from cetane.pipeline.completion import Completion, Sampling
    from cetane.pipeline.language_model import LanguageModel
    from cetane.pipeline.prompt import Message

HELP = """\
/reset         forget the conversation
/adapter NAME  use an adapter from now on; without a name, the model alone
/system TEXT   tell the model how to answer; this starts a new conversation
/help          this list
Ctrl-C stops an answer. An empty line or Ctrl-D ends the conversation."""
LINES = 1000
"""The number of questions that the history keeps."""


class Chat:
    """A conversation: questions from the terminal, answers from a model."""

    def __init__(self, model: LanguageModel, max_new: int, sampling: Sampling) -> None:
        self.model, self.max_new, self.sampling = model, max_new, sampling
        self.system: list[Message] = []
        self.turns: list[Message] = []

    def run(self) -> None:
        """Talk until an empty line."""
        if not self.model.chats:
            warn("a base model without a chat template: it continues your text, and may ramble")
        warn("an empty line ends the conversation; /help lists commands")
        with suppress(EOFError), Lines():
            while question := ask():
                if question.startswith("/"):
                    self.obey(question)
                else:
                    self.answer(question)

    def obey(self, line: str) -> None:
        """Carry out a command."""
        command, _, text = line.partition(" ")
        match command:
            case "/reset":
                self.turns = []
                warn("the conversation starts anew")
            case "/system":
                self.system = [{"role": "system", "content": text.strip()}] if text.strip() else []
                self.turns = []
                warn("the conversation starts anew")
            case "/adapter":
                self.change(text.strip() or None)
            case "/help":
                warn(HELP)
            case _:
                warn(f"no command {command}; /help lists them")

    def change(self, adapter: str | None) -> None:
        """Go on with another adapter."""
        try:
            self.model.adapter = adapter
        except CetaneError as error:
            warn(str(error))
        else:
            warn(f"from now on: {adapter or 'the model alone'}")

    def answer(self, question: str) -> None:
        """Ask the model, print its answer, and keep both."""
        asked = {"role": "user", "content": question}
        try:
            if self.too_long([asked]):
                self.refuse(asked)
                return
            if self.turns and self.too_long([*self.turns, asked]):
                warn("the context is full: the conversation starts anew")
                self.turns = []
            prompt = [*self.system, *self.turns, asked]
            stream = self.model.stream(prompt, max_new_tokens=self.max_new, **self.sampling)
        except CetaneError as error:  # such as a template that refuses a system text
            warn(str(error))
            return
        completion = show(stream)
        warn(ending(completion, self.model.context))
        said = {"role": "assistant", "content": completion.text}
        self.turns += [asked, said]

    def too_long(self, turns: list[Message]) -> bool:
        from cetane.pipeline.prompt import TooLong

        try:
            return len(self.model.ids([*self.system, *turns])) > self.model.context
        except TooLong:
            return True

    def refuse(self, asked: Message) -> None:
        count = len(self.model.ids([*self.system, asked]))
        warn(f"the question has {count} tokens, the context holds {self.model.context}")


def show(stream: CompletionStream) -> Completion:
    """Print an answer as it comes; Ctrl-C ends it. A long prompt is read for seconds before."""
    try:
        with progress(f"reading {len(stream.ids)} tokens"):
            first = next(stream, "")
        for piece in chain([first], stream):
            print(steerless(piece), end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
    print(flush=True)
    return stream.completion


def ending(completion: Completion, context: int) -> str:
    """The number of tokens, their speed, and the reason for the end."""
    reasons = {
        "stop": "the model ended",
        "length": "stopped at --max-new",
        "context": f"the context of {context} tokens is full",
        "interrupted": "stopped by you",
    }
    rate = completion.tokens_per_second
    speed = "" if rate is None else f", {rate:.1f} tokens/s"
    count = several(len(completion.tokens), "token")
    return f"[{count}{speed}, {reasons[completion.finish_reason]}]"


def ask() -> str:
    """A line from the terminal, without surrounding blanks. Ctrl-C starts the line again."""
    while True:
        try:
            return input("> ").strip()
        except KeyboardInterrupt:
            print(flush=True)
        except EOFError:
            print(flush=True)
            raise


class Lines:
    """A context with arrow keys and a lasting history of questions, if the system has readline."""

    def __enter__(self) -> None:
        self.file = cache_dir() / "chat-history"
        if not errors.is_terminal:
            return
        with suppress(ImportError, OSError):
            import readline

            readline.set_history_length(LINES)
            readline.read_history_file(self.file)

    def __exit__(self, *_: object) -> None:
        if not errors.is_terminal:
            return
        with suppress(ImportError, OSError):
            import readline

            self.file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(self.file)
            self.file.chmod(0o600)
