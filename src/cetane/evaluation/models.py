"""Models for lm-evaluation-harness: a bundle's engine, and the Hugging Face model."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from cetane.bundle import Bundle
from cetane.checkpoint import Tokenizer
from cetane.engine.generate import extend
from cetane.engine.likelihood import TokenLikelihood, likelihoods, token_likelihood
from cetane.engine.open import open_engine
from cetane.engine.prefixes import Prefixes
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.evaluation.answers import KeptAnswers
from cetane.files import Progress, silent
from cetane.gates.reference import Reference

MOST = 256
"""The most tokens of a generated answer, as in the harness, unless the task says otherwise."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""The options of a task that a sampler takes."""
HANDLED = {"until", "max_gen_toks", "do_sample", *SAMPLING}
"""All options of a task that have an effect."""

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""A context and its continuation: as texts, if known, and both as tokens."""

Question = tuple[list[int], int, list[str], dict[str, Any]]
"""The tokens of a prompt, the most tokens of its answer, its stop texts, and the sampler's
options."""


class TokenModel(TemplateLM):
    """A model for the harness: takes requests as tokens, in a fast order, and answers each once."""

    def __init__(
        self, tokenizer: Tokenizer, context: int, answers: KeptAnswers, progress: Progress = silent
    ) -> None:
        super().__init__()
        self.own_tokenizer, self.max_length = tokenizer, context
        self.answers, self.progress = answers, progress
        self.shortened = 0
        """The number of answers that had less room than their task wanted."""
        self.without_system = 0
        """The number of prompts without their system message, which the template refuses."""
        self.scored: dict[str, tuple[float, int]] = {}
        """The log likelihood of every scored continuation and its number of tokens, by the key of
        its request."""

    @abstractmethod
    def scores(self, tokens: Sequence[int], start: int) -> list[TokenLikelihood]:
        """The log probability of each token from position `start` >= 1 on, with the likeliest
        token. `tokens` may be one more than the context: nothing is predicted after the last."""

    @abstractmethod
    def write(
        self, tokens: Sequence[int], most: int, sampler: Sampler, stop: Sequence[int]
    ) -> Iterator[int]:
        """Generate at most `most` tokens after `tokens`, up to one of the tokens `stop`."""

    @property
    def eot_token_id(self) -> int:
        if not self.own_tokenizer.eos_ids:
            raise CetaneError("the model has no stop token, which the harness needs")
        return self.own_tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        bos = self.own_tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.own_tokenizer.digest[:16]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.own_tokenizer.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation. A system message that the template refuses is left out, as
        in lm_eval's own model."""
        try:
            return self.conversation(chat_history, add_generation_prompt)
        except CetaneError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            text = self.conversation(others, add_generation_prompt)
        self.without_system += 1
        return text

    def conversation(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """The text of a conversation. The harness gives the begin of an answer (a task's
        `gen_prefix`) as a last message of the assistant, which stays open."""
        if not add_generation_prompt and messages[-1]["role"] == "assistant":
            return self.own_tokenizer.render_open_chat(messages)
        return self.own_tokenizer.render_chat(messages, add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The tokens of a text. By default they begin with BOS if the model uses one."""
        bos = self.own_tokenizer.special_tokens.get("bos_token")
        if add_special_tokens is None:
            add_special_tokens = bos is None or not string.startswith(bos)
        encode = (
            self.own_tokenizer.encode if add_special_tokens else self.own_tokenizer.encode_plain
        )
        return encode(string)

    def _loglikelihood_tokens(
        self, requests: list[Scored], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """The log likelihood of each continuation in nats, and whether it is the greedy one.

        Requests with a common context are answered one after another, so its tokens run once. All
        tokens of a continuation are scored. Raises CetaneError before the first if they do not fit
        the context.
        """
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise CetaneError(
                f"a continuation of {longest:,} tokens does not fit a context of "
                f"{self.max_length:,}",
                "build with a larger context",
            )
        results: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda i: (requests[i][1], requests[i][2]))
        for done, number in enumerate(order):
            if not disable_tqdm:
                self.progress("log likelihoods", done, len(order))
            _, context, continuation = requests[number]
            before = context or [self.prefix_token_id]  # a context of spaces alone has no tokens
            ids = [*before, *continuation][-self.max_length - 1 :]  # the last one is not fed
            results[number] = self.likelihood(ids, len(ids) - len(continuation))
        self.answers.save()
        return [results[number] for number in range(len(requests))]

    def likelihood(self, ids: list[int], start: int) -> tuple[float, bool]:
        """The log likelihood of the tokens from `start` on, in nats, and whether all are greedy.

        The answer is kept for the next run."""
        key, known = self.answers.get("likelihood", [ids, start])
        if known is None:
            scores = self.scores(ids, start)
            known = [sum(s.logprob for s in scores), all(s.greedy for s in scores)]
            self.answers.add(key, known)
        total, greedy = known
        self.scored[key] = float(total), len(ids) - start
        return float(total), bool(greedy)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log likelihood of whole texts in nats, in windows of the context."""
        totals = []
        for done, request in enumerate(requests):
            self.progress("texts", done, len(requests))
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False),
                self.prefix_token_id, self.max_length, 1,
            )  # fmt: skip
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs, True)))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers to prompts, cut before the first of their stop texts.

        A prompt that asks again for a sampled answer gets another one, the same in every run."""
        texts = []
        asked: Counter[str] = Counter()
        questions = list(map(self.question, requests))  # refuses before the first answer
        for done, (ids, most, stops, sampling) in enumerate(questions):
            self.progress("answers", done, len(requests))
            key, known = self.answers.get("answer", [ids, most, stops, sampling])
            if known is None:
                sampler = Sampler(**sampling, seed=asked[key])
                asked[key] += 1
                known = self.text(self.write(ids, most, sampler, self.stop_tokens(stops)), stops)
                if sampler.plain:
                    self.answers.add(key, known)
            texts.append(known)
        self.answers.save()
        return texts

    def question(self, request: Instance) -> Question:
        """What a request asks. Its answer gets the room that the context has left.

        The prompt stays whole, since without its beginning it is another question. Raises
        CetaneError if the context has no room for an answer, or for an unknown option."""
        prompt, options = request.args
        options = normalize_gen_kwargs(dict(options), MOST)
        ids, wanted = self.tok_encode(prompt), int(options["max_gen_toks"])
        most = min(wanted, self.max_length - len(ids))
        if most < 1:
            raise CetaneError(
                f"{request.task_name}, sample {request.doc_id} (from 0): a prompt of {len(ids):,} "
                f"tokens leaves no room for an answer in a context of {self.max_length:,}",
                "build with a larger context; if the task has examples, --fewshot gives fewer",
            )
        self.shortened += most < wanted
        return ids, most, options["until"], sampling_of(options)

    def stop_tokens(self, stops: Sequence[str]) -> tuple[int, ...]:
        """The model's stop tokens, and those stop texts that are special tokens: the text of an
        answer leaves these out."""
        return (*self.own_tokenizer.eos_ids, *self.own_tokenizer.special_ids(stops))

    def text(self, tokens: Iterable[int], stops: Sequence[str]) -> str:
        """The text of tokens before the first stop text."""
        stream, text = self.own_tokenizer.stream(), ""
        for token in tokens:
            text += stream.push(token)
            if any(stop in text for stop in stops if stop):
                break
        else:
            text += stream.finish()
        for stop in filter(None, stops):
            text = text.split(stop)[0]
        return text


def sampling_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The sampler's options among a task's. Raises CetaneError for an option outside `HANDLED`."""
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("num_beams") == 1:  # one beam is no search
        del given["num_beams"]
    if others := sorted(given.keys() - HANDLED):
        raise CetaneError(
            f"the task asks for {', '.join(others)}, which evaluations do not follow",
            f"they follow {', '.join(SAMPLING)}",
        )
    return {name: given[name] for name in SAMPLING if name in given}


class BundleModel(TokenModel):
    """A bundle on its engine, with one of its adapters or without."""

    def __init__(
        self, bundle: Bundle, backend: str, answers: KeptAnswers, progress: Progress = silent,
        adapter: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(bundle.tokenizer, bundle.plan.recipe.cache.context, answers, progress)
        self.adapter = adapter
        self.prefixes = Prefixes(open_engine(bundle, backend))

    def scores(self, tokens: Sequence[int], start: int) -> list[TokenLikelihood]:
        return likelihoods(self.prefixes, tokens, start, adapter=self.adapter)[0]

    def write(
        self, tokens: Sequence[int], most: int, sampler: Sampler, stop: Sequence[int]
    ) -> Iterator[int]:
        fed = self.prefixes.feed(tokens, adapter=self.adapter)
        return extend(fed.session, fed.logits, sampler, most, stop)


class ReferenceModel(TokenModel):
    """The Hugging Face model of a checkpoint, in fp32."""

    def __init__(
        self, reference: Reference, tokenizer: Tokenizer, context: int, answers: KeptAnswers,
        progress: Progress = silent,
    ) -> None:  # fmt: skip
        super().__init__(tokenizer, context, answers, progress)
        self.reference = reference

    def scores(self, tokens: Sequence[int], start: int) -> list[TokenLikelihood]:
        rows = range(start - 1, len(tokens) - 1)  # a row predicts the token after its own
        logits = self.reference.run([tokens[:-1]], kept=[rows])[0].logits
        return [
            token_likelihood(row, tokens[at + 1], 1) for at, row in zip(rows, logits, strict=True)
        ]

    def write(
        self, tokens: Sequence[int], most: int, sampler: Sampler, stop: Sequence[int]
    ) -> Iterator[int]:
        ids = list(tokens)
        for _ in range(most):
            last = self.reference.run([ids], kept=[[len(ids) - 1]])[0].logits[-1]
            ids.append(sampler(last))
            if ids[-1] in stop:
                return
            yield ids[-1]
