"""The form of answers that continue a prompt: `/v1/completions`."""

from collections.abc import Iterator, Sequence

from cetane.engine.likelihood import TokenLikelihood
from cetane.server.answer_form import AnswerForm, ChoiceSoFar, finish_reason
from cetane.server.answers import CompletionChoice, CompletionLogprobs
from cetane.server.requests import CompletionRequest
from cetane.server.writing import Echo, Ending, Event, Piece


class CompletionForm(AnswerForm):
    """Answers of `/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"
    request: CompletionRequest

    def choice(self, number: int, choice: ChoiceSoFar) -> CompletionChoice:
        last = choice.ending.last if choice.ending is not None else None
        scores = [*choice.scores, *([] if last is None else [last])]
        return CompletionChoice(
            index=number,
            text=self.echoed(number) + choice.text,
            logprobs=self.logprobs(number, [*choice.echoed, *scores], first=True),
            finish_reason=finish_reason(choice, ()),
        )

    def chunks(self, number: int, event: Event) -> Iterator[CompletionChoice]:
        choice, first = self.choices[number], not self.choices[number].begun
        scores: Sequence[TokenLikelihood] = ()
        text = self.echoed(number) if first else ""
        match event:
            case Echo():
                scores = event.scores
            case Piece():
                text, scores = text + event.text, event.scores
            case Ending():
                scores = () if event.last is None else (event.last,)
        ended = isinstance(event, Ending)
        if not (text or scores or ended):
            return
        choice.begun = True
        yield CompletionChoice(
            index=number,
            text=text,
            logprobs=self.logprobs(number, scores, first),
            finish_reason=finish_reason(choice, ()) if ended else None,
        )

    def echoed(self, number: int) -> str:
        """The text of a choice's prompt, if it is wanted back."""
        if not self.request.echo:
            return ""
        text = self.given(number)
        return self.served.tokenizer.decode(self.asks[number].ids) if text is None else text

    def given(self, number: int) -> str | None:
        """A choice's prompt, if the request has it as text."""
        prompt = self.request.prompt
        prompts = [prompt] if isinstance(prompt, str) else prompt
        text = prompts[number // self.request.n]
        return text if isinstance(text, str) else None

    def logprobs(
        self, number: int, scores: Sequence[TokenLikelihood], first: bool
    ) -> CompletionLogprobs | None:
        """Scores as four lists. The `first` chunk of an echo has the prompt's first token too."""
        if self.request.logprobs is None:
            return None
        tokens = [score.token for score in scores]
        logprobs: list[float | None] = [score.logprob for score in scores]
        tops: list[dict[str, float] | None] = [self.tops(score) for score in scores]
        if first and self.request.echo:
            tokens = [self.asks[number].ids[0], *tokens]
            logprobs, tops = [None, *logprobs], [None, *tops]
        offsets, choice = [], self.choices[number]
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += self.written(number, token)
        texts = [self.served.token_text(token) for token in tokens]
        return CompletionLogprobs(
            tokens=texts, token_logprobs=logprobs, top_logprobs=tops, text_offset=offsets
        )

    def written(self, number: int, token: int) -> int:
        """The characters that the next listed token writes. A special one writes none, unless the
        prompt has its text there, which an echo gives back."""
        choice, tokenizer = self.choices[number], self.served.tokenizer
        text = choice.listed.push(token)
        if not text and self.request.echo:
            special = tokenizer.decode([token], skip_special_tokens=False)
            prompt = self.given(number) or ""
            if special != tokenizer.decode([token]) and prompt.startswith(special, choice.offset):
                text = special
        return len(text)

    def tops(self, score: TokenLikelihood) -> dict[str, float]:
        """The likeliest tokens, and the token itself, by their texts."""
        tops: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            tops.setdefault(self.served.token_text(token), logprob)  # of equal texts the likelier
        return tops
