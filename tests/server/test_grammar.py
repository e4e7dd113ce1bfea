"""A grammar's constraint: what it says at llguidance's limits."""

import json
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models

from cetane.errors import CetaneError
from cetane.server.errors import ApiError
from cetane.server.grammar import GrammarConstraint, Grammars, grammar_of, reason
from cetane.server.requests import RegexFormat
from cetane.server.schemas import json_grammar, mended


def grammars(decoder: Any, vocab: int, characters: str = "abc") -> Grammars:
    """Those of a tokenizer with the token <eos>, and one for each character."""
    tokens = ("<eos>", *characters)
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.decoder = decoder
    tokenizer: Any = SimpleNamespace(eos_ids=(0,), backend=backend, vocab_size=len(tokens))
    return Grammars(tokenizer, vocab)


@pytest.mark.parametrize("vocab", [3, 4, 6])
def test_a_model_with_fewer_or_more_tokens_than_its_tokenizer(vocab: int) -> None:
    grammar = grammar_of(RegexFormat(type="regex", regex="[bc]"))
    assert grammar is not None
    allowed = grammars(decoders.ByteLevel(), vocab).constraint(grammar, "x").allowed()
    assert allowed.tolist() == [False, False, True, True, False, False][:vocab]


def test_a_tokenizer_that_tells_no_bytes() -> None:
    with pytest.raises(CetaneError, match="cannot read this model's tokenizer"):
        grammars(decoders.Metaspace(), 4)


def test_a_panic_of_the_library_is_told_in_words() -> None:
    """An enum of 100,000 values told of an assertion in Rust."""
    matcher: Any = SimpleNamespace(get_error=lambda: "panic: assertion failed: symbols.len() < 9")
    assert reason(matcher) == "it has more parts than llguidance takes: make it simpler"


WRONG: dict[str, dict[str, Any]] = {
    "regex parse error: ^(?!x)y: look-around": {"type": "string", "pattern": "^(?!x)y"},
    "regex parse error: (a: unclosed group": {"properties": {"a": {"pattern": "(a"}}},
    "Unknown format: nonsense": {"type": "string", "format": "nonsense"},
    "oneOf is for schemas that no value fits twice: use anyOf": {
        "oneOf": [{"type": "integer"}, {"minimum": 2}]
    },
    "no text follows it: a rule or schema refers to itself alone": {"$ref": "#"},
    'Unimplemented keys: ["not"]: leave them out': {"not": {"type": "string"}},
    "it refers to another document, which is not fetched": {"$ref": "http://x.example/y"},
}


@pytest.mark.parametrize("told", WRONG)
def test_a_refusal_says_why(told: str) -> None:
    with pytest.raises(ApiError) as error:
        grammars(decoders.ByteLevel(), 4).constraint(json_grammar(WRONG[told]), "x")
    assert error.value.message.startswith(f"x: {told}")
    assert "\n" not in error.value.message


def test_a_grammar_that_fails_in_an_answer_is_no_end() -> None:
    """llguidance's mask then allows the stop token alone, as if the answer were whole."""
    failed: Any = SimpleNamespace(
        compute_bitmask=lambda: b"\x01", is_error=lambda: True, get_error=lambda: "too large\nmore"
    )
    with pytest.raises(
        ApiError, match=r"^x: the grammar failed in the answer: too large: "
    ) as told:
        GrammarConstraint(failed, 8, "x").allowed()
    assert (told.value.status, told.value.param) == (400, "x")


DIGITS = "-.0123456789"
NUMBERS = ("0", "-0", "0.0", "0.1", "0.5", "0.6", "1", "1.0", "2", "3", "10", "10.1", "10.6",
           "-0.1", "-0.5", "-1", "-1.5", "-2")  # fmt: skip


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0},
        {"exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 0, "minimum": 0, "exclusiveMaximum": 0.5},
        {"exclusiveMinimum": 10, "maximum": 10.5},
        {"minimum": -0.5, "exclusiveMaximum": 0},
        {"minimum": -1.5, "exclusiveMaximum": -1.0},
        {"exclusiveMinimum": 0, "maximum": 2, "type": "integer"},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    ],
)
def test_an_exclusive_bound_is_no_number_of_an_answer(bounds: dict[str, Any]) -> None:
    schema = {"type": "number"} | bounds
    made = grammars(decoders.ByteLevel(), 1 + len(DIGITS), DIGITS)
    constraint = made.constraint(json_grammar(schema), "x")
    for text in NUMBERS:
        written = schema.get("type") == "integer" and "." in text  # 1.0 is valid, but not written
        valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        assert follows(constraint, text) == (valid and not written), text


def follows(constraint: GrammarConstraint, number: str) -> bool:
    """Whether a grammar takes a number as a whole answer, digit by digit."""
    one = constraint.fresh()
    for token in (*(1 + DIGITS.index(digit) for digit in number), 0):
        if not one.allowed()[token]:
            return False
        one.keep(token)
    return True


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 2**53 + 1, "maximum": 2**53 + 3},
        {"exclusiveMinimum": 2**53 + 1, "exclusiveMaximum": 2**53 + 5},
        {"minimum": 0, "maximum": 2**63 - 1},
        {"minimum": -(2**53) - 3, "maximum": -(2**53) - 1},
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63},
        {"minimum": -(10**30), "maximum": 10**30},
    ],
)
def test_an_integer_beyond_float64_is_within_its_bounds(bounds: dict[str, int]) -> None:
    """llguidance counts in float64: it took 9007199254740996 for a maximum of ...995."""
    schema = {"type": "integer"} | bounds
    made = grammars(decoders.ByteLevel(), 1 + len(DIGITS), DIGITS)
    constraint = made.constraint(json_grammar(schema), "x")
    steps = (*range(-6, 7), -1025, -1023, 1024, 1026)
    near = {0} | {bound + step for bound in bounds.values() for step in steps}
    taken = [number for number in near if follows(constraint, str(number))]
    assert taken and all(map(jsonschema.Draft202012Validator(schema).is_valid, taken))


def test_what_only_looks_like_a_bound_is_kept() -> None:
    bounds = {"exclusiveMinimum": 0, "maximum": 0.5}
    kept = {"const": bounds, "exclusiveMinimum": True, "minimum": 0, "maximum": 0.5}
    schema = {"properties": {"exclusiveMinimum": kept, "enum": bounds}, "items": [bounds]}
    moved = {"exclusiveMinimum": 1e-9, "maximum": 0.5}
    assert mended(schema) == {
        "properties": {"exclusiveMinimum": kept, "enum": moved}, "items": [moved]
    }  # fmt: skip
    far = {"exclusiveMinimum": 10**9, "maximum": 10**9 + 0.5}
    assert 10**9 < mended(far)["exclusiveMinimum"] < 10**9 + 0.001
