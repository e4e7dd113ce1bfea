"""Grammars: llguidance decides which tokens an answer may go on with."""

import json
import math
from collections.abc import Mapping
from typing import Any

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

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The white space of JSON: fixed, since a small model may write blanks without end."""
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keys of a schema that hold more schemas, by names."""
PLAIN_VALUES = ("const", "enum", "default", "examples")
"""Keys of a schema that hold no schemas."""
MOVE = 1e-9
"""How far an exclusive bound moves inwards; further where float64 is coarser. From a smaller step
llguidance makes a pattern that it cannot read itself."""


FARTHEST = 2**63 - 1024
"""The farthest bound from zero of which llguidance 1.9.1 makes a pattern. It refuses the least
integer of 64 bits, which many schemas have as their minimum. float64 holds this one."""

ADVICE = {
    "NoExtensionBias": "no text follows it: a rule or schema refers to itself alone, or fits none",
    "Resource '": "it refers to another document, which is not fetched: put that under $defs",
    "Unimplemented keys": "{}: leave them out, and check the answer for them",
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


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that a schema allows. Raises ValueError."""
    return str(LLMatcher.grammar_from_json_schema(json.dumps(mended(schema)), overrides=COMPACT))


def lark_json(schema: Mapping[str, Any]) -> str:
    """A schema as a term of a Lark grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT})


def mended(schema: Any) -> Any:
    """A schema whose exclusive bounds llguidance 1.9.1 keeps. It accepts the bound itself if that
    is a whole number and the other bound is less than 1 away, as 0 in (0, 0.5]. So such a bound
    moves inwards by `MOVE` or more.

    It also rounds bounds to float64, and refuses those far from zero; here they move inwards
    before."""
    if isinstance(schema, list):
        return [mended(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {
        key: {name: mended(one) for name, one in value.items()}
        if key in NAMED_SCHEMAS and isinstance(value, Mapping)
        else value if key in PLAIN_VALUES else mended(value)
        for key, value in schema.items()
    }  # fmt: skip
    for bound, other, sign in (("Minimum", "Maximum", 1), ("Maximum", "Minimum", -1)):
        for key in (bound.lower(), f"exclusive{bound}"):
            if type(made.get(key)) in (int, float):
                made[key] = sign * max(sign * made[key], -FARTHEST)
            if type(made.get(key)) is int:
                made[key] = rounded(made[key], sign)
        place: Any = made.get(f"exclusive{bound}")
        ends: list[Any] = [made.get(other.lower()), made.get(f"exclusive{other}")]
        if type(place) in (int, float) and place % 1 == 0 and any(
            type(end) in (int, float) and 0 < sign * (end - place) < 1 for end in ends
        ):  # fmt: skip
            made[f"exclusive{bound}"] = place + sign * max(MOVE, math.ulp(place))
    return made


def rounded(bound: int, sign: int) -> int:
    """A bound as float64 holds it, moved towards `sign` if it does not."""
    near = float(bound)
    return int(near if sign * (int(near) - bound) >= 0 else math.nextafter(near, sign * math.inf))
