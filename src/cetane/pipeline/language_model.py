"""Text generation with a bundle: one answer, a stream, a conversation, or logits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from cetane.bundle import Bundle
from cetane.engine.open import open_engine
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.mil.fast import share_threads
from cetane.mil.fast.compiled import compile_loop
from cetane.pipeline.answer_session import AnswerSession, CompletionStream
from cetane.pipeline.completion import AnswerOptions, Completion, Sampling
from cetane.pipeline.prompt import SHORTER, Message, Prompt, TooLong, prompt_ids
from cetane.speculate.open import AUTO, PLAIN, DrafterOptions, check_drafter
from cetane.validation import validated

ANSWER_TOKENS = 512
"""The most tokens of an answer, by default."""


class LanguageModel:
    """A bundle and its engine.

    It remembers the last prompt and answer. A prompt that continues them runs only its new tokens,
    but for an answer with a seed: these tokens would round differently from a prompt run at once.
    `adapter` names the adapter of all tokens from now on; None is the base alone. What a
    conversation holds already stays as its own adapter computed it.
    """

    def __init__(
        self, bundle: Bundle, backend: str = "auto", drafter: DrafterOptions | None = None
    ) -> None:
        self.bundle = bundle
        self.engine = open_engine(bundle, backend)
        self._answers = AnswerSession(bundle, self.engine, backend, drafter)
        self._adapter: str | None = None

    @property
    def adapter(self) -> str | None:
        """The adapter of the next tokens. CetaneError for one that the bundle lacks."""
        return self._adapter

    @adapter.setter
    def adapter(self, name: str | None) -> None:
        self.bundle.plan.on(name)
        self._adapter = name

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self.bundle.plan.recipe.cache.context

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template, and so is for conversations."""
        return self.bundle.tokenizer.has_chat_template

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        For a model without a chat template, line breaks join the messages. CetaneError for a list
        of other things than token ids or messages, and for a text that is too long for the context
        whatever its tokens are.
        """
        return prompt_ids(prompt, self.bundle.tokenizer, self.context)

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int = ANSWER_TOKENS, **sampling: Unpack[Sampling]
    ) -> CompletionStream:
        """Write an answer piece by piece; `Sampling` lists the options.

        CetaneError for a prompt that is empty, longer than the context or has an unknown token, and
        for options that are unknown, of a wrong type or out of range. A head that gives only its
        choice takes no sampling.
        """
        given = {"max_new_tokens": max_new_tokens, **sampling}
        options: dict[str, Any] = {**validated(AnswerOptions, given, "the options of an answer")}
        most = options.pop("max_new_tokens")
        if most < 1:
            raise CetaneError(f"max_new_tokens = {most}: must be at least 1")
        settings = Sampler(**options)
        if self.bundle.plan.recipe.head.choose and not settings.plain:
            raise CetaneError(
                f"{self.bundle.path} gives only its likeliest token",
                "leave out temperature, penalties and bias, or port with head.choose = false",
            )
        ids = self.ids(prompt)
        if not ids:
            raise CetaneError(
                "the prompt has no tokens", "give some text: this tokenizer adds no start token"
            )
        if len(ids) > self.context:
            raise TooLong(
                f"the prompt has {len(ids)} tokens, the context holds {self.context}", SHORTER
            )
        self.bundle.tokenizer.check_known(ids, self.bundle.plan.vocab)  # before the answer begins
        continues = not any(isinstance(item, Mapping) for item in prompt)
        return CompletionStream(self._answers, ids, most, settings, self.adapter, continues)

    def generate(
        self, prompt: Prompt, *, max_new_tokens: int = ANSWER_TOKENS, **sampling: Unpack[Sampling]
    ) -> Completion:
        """Write an answer and return it whole; options as in `stream`.

        >>> lm = cetane.load(bundle)
        >>> lm.generate("def __init__(self", max_new_tokens=8).finish_reason
        'length'
        """
        stream = self.stream(prompt, max_new_tokens=max_new_tokens, **sampling)
        for _ in stream:
            pass
        return stream.completion

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_new_tokens: int = ANSWER_TOKENS,
        **sampling: Unpack[Sampling],
    ) -> Completion:
        """Answer a conversation by the model's chat template; messages as in transformers.

        CetaneError as `stream`, and for anything but messages.

        >>> lm = cetane.load(bundle)
        >>> lm.chat([{"role": "user", "content": "import"}], max_new_tokens=4).finish_reason
        'length'
        """
        if not all(isinstance(message, Mapping) for message in messages):  # `generate` takes more
            raise CetaneError(
                "a conversation is a list of messages: {'role': 'user', 'content': TEXT}",
                "generate continues a text, without the chat template",
            )
        return self.generate(messages, max_new_tokens=max_new_tokens, **sampling)

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after each of n tokens, `(n, V)` fp32.

        Tokens that the head cannot choose have minus infinity. CetaneError for a bundle that gives
        choices, for an unknown token, and for more tokens than the context.

        >>> lm = cetane.load(bundle)
        >>> lm.logits(lm.ids("import os")).shape[1] == lm.bundle.plan.vocab
        True
        """
        if self.bundle.plan.recipe.head.choose:
            raise CetaneError(
                f"{self.bundle.path} gives choices, not logits", "port with head.choose = false"
            )
        logits = self.engine.session(adapter=self.adapter).feed(tokens, "all")
        assert logits is not None
        return logits

    def speculation(self) -> dict[str, Any] | None:
        """Counters of the drafter so far; None without one."""
        return self._answers.speculation()

    def close(self) -> None:
        """Save what the drafters have learned. The model cannot write afterwards: it ends an answer
        that nobody has read to its end."""
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def load(
    bundle: str | Path,
    *,
    backend: str = "auto",
    speculative: str | DrafterOptions | None = AUTO,
    exclusive: bool = False,
    adapter: str | None = None,
) -> LanguageModel:
    """Open a bundle for text generation; every file's hash is checked first.

    - `backend` is `portable` (any machine), `coreml` (a Mac), or `auto`.
    - `speculative` names a drafter, or is a `DrafterOptions` with its settings; None is plain
      decoding. By default, drafts come from this process's own texts and from the bundle's draft
      head, where they pay. Without a head, a bundle of several capacities drafts for itself in long
      texts. An answer with a seed takes none: a seed promises the same text, and calls of several
      tokens can round differently.
    - `adapter` is the first value of `LanguageModel.adapter`.
    - With `exclusive`, all programs share one pool of threads. That is faster, but needs a process
      that runs nothing else on onnxruntime.

    CetaneError for a damaged or missing bundle.

    >>> with cetane.load(bundle) as lm:
    ...     answer = lm.generate("import ", max_new_tokens=4)
    >>> len(answer.tokens)
    4
    """
    if exclusive:
        share_threads()
    opened = Bundle(Path(bundle))
    opened.verify()
    if isinstance(speculative, bool):
        raise CetaneError(
            f"speculative = {speculative}: it names a drafter",
            'write None for plain decoding, or "auto"',
        )
    if isinstance(speculative, str):
        speculative = DrafterOptions(speculative)
    opened.plan.on(adapter)  # this and the next refuse before the model is opened
    if speculative is not None and speculative.drafter != PLAIN:
        check_drafter(speculative.drafter, opened)
    model = LanguageModel(opened, backend, speculative)
    model.adapter = adapter
    if isinstance(model.engine.backend, PortableBackend):
        compile_loop()  # here, not in the middle of the first answer
    return model
