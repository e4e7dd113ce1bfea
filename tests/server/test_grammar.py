"""A grammar's constraint: what it says at llguidance's limits."""

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from cetane.errors import CetaneError
from cetane.server.errors import ApiError
from cetane.server.grammar import GrammarConstraint, Grammars, grammar_of, json_grammar
from cetane.server.requests import RegexFormat


def grammars(decoder: Any, vocab: int) -> Grammars:
    """Those of a tokenizer with the tokens <eos>, a, b and c."""
    backend = Tokenizer(models.BPE({"<eos>": 0, "a": 1, "b": 2, "c": 3}, []))
    backend.decoder = decoder
    tokenizer: Any = SimpleNamespace(eos_ids=(0,), backend=backend, vocab_size=4)
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
