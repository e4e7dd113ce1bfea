"""A grammar's constraint: what it says at llguidance's limits."""

import json
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models

from cetane.errors import CetaneError
from cetane.server.errors import ApiError
from cetane.server.grammar import (
    GrammarConstraint,
    Grammars,
    grammar_of,
    json_grammar,
    mended,
)
from cetane.server.requests import RegexFormat


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


WRONG = {
    "regex parse error: ^(?!x)y: look-around": {"type": "string", "pattern": "^(?!x)y"},
    "regex parse error: (a: unclosed group": {"properties": {"a": {"pattern": "(a"}}},
    "Unknown format: nonsense": {"type": "string", "format": "nonsense"},
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
    with pytest.raises(CetaneError, match=r"the grammar failed: too large$"):
        GrammarConstraint(failed, 8).allowed()


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
        one, whole = constraint.fresh(), True
        for token in (*(1 + DIGITS.index(digit) for digit in text), 0):
            if not one.allowed()[token]:
                whole = False
                break
            one.keep(token)
        written = schema.get("type") == "integer" and "." in text  # 1.0 is valid, but not written
        valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        assert whole == (valid and not written), text


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
