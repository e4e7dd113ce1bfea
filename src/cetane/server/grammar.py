"""Grammars: llguidance decides which tokens an answer may go on with."""

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from cetane.checkpoint import Tokenizer
from cetane.errors import CetaneError
from cetane.server.errors import ApiError
from cetane.server.requests import (
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    TextFormat,
)
from cetane.server.schemas import json_grammar

ADVICE = {
    "NoExtensionBias": "no text follows it: a rule or schema refers to itself alone, or fits none",
    "Resource '": "it refers to another document, which is not fetched: put that under $defs",
    "Unimplemented keys": "{}: leave them out, and check the answer for them",
    "panic: ": "it has more parts than llguidance takes: make it simpler",
    "oneOf constraints are not": "oneOf is for schemas that no value fits twice: use anyOf",
}
"""What to say in place of llguidance's words, by their beginning; `{}` are its words."""
SIMPLER = "make the grammar simpler, or the answer shorter"


class Grammars:
    """Makes constraints for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        if not tokenizer.eos_ids:
            raise CetaneError("the model has no stop token, so no grammar can end its answers")
        self.vocab = vocab
        every = max(vocab, tokenizer.vocab_size)  # a tokenizer may have more than the model
        try:
            self.tokenizer = LLTokenizer(
                tokenizer.backend.to_str(), n_vocab=every, eos_token=list(tokenizer.eos_ids)
            )
        except ValueError as error:
            reason = str(error).split("\n")[0]
            raise CetaneError(f"grammars cannot read this model's tokenizer: {reason}") from error

    def constraint(self, grammar: str, param: str) -> "GrammarConstraint":
        """A new constraint for a grammar. Raises ApiError if llguidance refuses it, or if it is
        too large."""
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise refused(matcher, param)
        constraint = GrammarConstraint(matcher, self.vocab, param)
        try:
            constraint.allowed()  # some grammars only fail at the first token
        except ApiError:
            raise refused(matcher, param) from None
        return constraint


class GrammarConstraint:
    """A grammar's state in one answer."""

    def __init__(self, matcher: LLMatcher, vocab: int, param: str) -> None:
        """`param` names the field that holds the grammar, for errors."""
        self.matcher, self.vocab, self.param = matcher, vocab, param

    def fresh(self) -> "GrammarConstraint":
        """The same grammar, for another answer."""
        matcher = self.matcher.deep_copy()
        matcher.reset()
        return GrammarConstraint(matcher, self.vocab, self.param)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Whether each token may come next, `(V,)`. Raises ApiError at a limit of llguidance,
        whose mask then allows the end alone."""
        packed = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        if self.matcher.is_error():
            raise self.failed()
        return np.unpackbits(packed, count=self.vocab, bitorder="little").astype(bool)

    def keep(self, token: int) -> None:
        """Go on after a token. Raises ApiError at a limit of llguidance."""
        if not self.matcher.consume_token(token):
            raise self.failed()

    def failed(self) -> ApiError:
        text = f"{self.param}: the grammar failed in the answer: {reason(self.matcher)}: {SIMPLER}"
        return ApiError(400, text, self.param, "invalid_value")


def refused(matcher: LLMatcher, param: str) -> ApiError:
    return ApiError(400, f"{param}: {reason(matcher)}", param, "invalid_value")


def reason(matcher: LLMatcher) -> str:
    """What is wrong, in one line. llguidance also shows the state of its parser."""
    first, *others = (matcher.get_error() or "no reason given").split("\n")
    for words, advice in ADVICE.items():
        if first.startswith(words):
            return advice.format(first)
    of_regex = next((line for line in others if line.startswith("error: ")), None)
    if of_regex is None:
        return first
    return f"{first} {others[0].strip()}: {of_regex.removeprefix('error: ')}"


def grammar_of(response_format: ResponseFormat | None) -> str | None:
    """The grammar of a response format, for llguidance; None if there is no constraint. Raises
    ApiError."""
    try:
        match response_format:
            case None | TextFormat():
                return None
            case JsonObjectFormat():
                return json_grammar({"type": "object"})
            case JsonSchemaFormat():
                return json_grammar(response_format.json_schema.schema_)
            case RegexFormat():
                return str(LLMatcher.grammar_from_regex(response_format.regex))
            case GrammarFormat():
                return str(LLMatcher.grammar_from_lark(response_format.grammar))
    except ValueError as error:
        text = str(error).split("\n")[0]
        raise ApiError(400, f"response_format: {text}", "response_format") from error
