"""Probes are ordinary tokens, and always the same ones."""

from pathlib import Path

import numpy as np
import pytest
import transformers

from cetane.checkpoint import Tokenizer, open_checkpoint
from cetane.gates.probes import QUESTIONS, chat_prompts, random_probe, text_probe

TABLE = np.random.default_rng(2).normal(size=(200, 16)).astype(np.float16)
TABLE[7] *= 0.01
TABLE[100:110] *= 0.1


@pytest.fixture
def tokenizer(tiny_checkpoint_folder: Path) -> Tokenizer:
    return open_checkpoint(tiny_checkpoint_folder).tokenizer


def test_random_probe() -> None:
    probe = random_probe(TABLE, 20_000, 1, {0, 3})
    drawn = set(probe.tokens)
    assert probe.name == "random-1"
    assert len(probe.tokens) == 20_000
    norms = np.linalg.norm(TABLE.astype(float), axis=1)
    smallest = set(np.argsort(norms)[:10].tolist())  # 5 % of 200
    assert 7 in smallest
    assert drawn == set(range(200)) - smallest - {0, 3}


def test_random_probes_are_seeded() -> None:
    assert random_probe(TABLE, 50, 1, set()) == random_probe(TABLE, 50, 1, set())
    assert random_probe(TABLE, 50, 1, set()).tokens != random_probe(TABLE, 50, 2, set()).tokens
    assert all(type(token) is int for token in random_probe(TABLE, 5, 1, set()).tokens)


@pytest.mark.parametrize("length", [1, 5, 100])
def test_text_probe(tokenizer: Tokenizer, length: int) -> None:
    tokens = tokenizer.encode("A text.")
    probe = text_probe(tokenizer, "A text.", length)
    assert probe.tokens == tuple((tokens * 100)[:length])


def test_text_probe_leaves_bos_out(tokenizer: Tokenizer) -> None:
    class WithBos:
        bos_id = 1

        def encode(self, text: str) -> list[int]:
            return [1, 5, 6]

    assert text_probe(WithBos(), "x", 5).tokens == (5, 6, 5, 6, 5)  # type: ignore[arg-type]


def test_chat_prompts(tokenizer: Tokenizer, tiny_checkpoint_folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint_folder)
    expected = [
        theirs.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True,
                                   return_dict=False)
        for q in QUESTIONS[:2]
    ]  # fmt: skip
    assert chat_prompts(tokenizer, 2) == expected


def test_chat_prompts_without_a_template(tokenizer: Tokenizer) -> None:
    plain = Tokenizer(tokenizer.backend, tokenizer.special_tokens, tokenizer.eos_ids, None)
    assert chat_prompts(plain, 1) == [plain.encode(QUESTIONS[0])]
