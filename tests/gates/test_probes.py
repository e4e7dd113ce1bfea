"""Probes are ordinary tokens, and always the same ones."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from tests.conftest import build_model

from cetane.bundle import Bundle
from cetane.checkpoint import Tokenizer, open_checkpoint
from cetane.engine.backend import Arrays
from cetane.errors import CetaneError
from cetane.families.grouped_query import blocks
from cetane.files import silent
from cetane.gates import probes
from cetane.gates.golden import Proof
from cetane.gates.observe import Watched, structure_tasks
from cetane.gates.probes import (
    QUESTIONS,
    begun,
    chat_prompts,
    host_parts,
    host_tokens,
    parts,
    probe_parts,
    random_tokens,
    structure_probes,
    text_tokens,
    text_windows,
    texts,
    tree_parents,
    tree_path,
    windows,
)
from cetane.gates.reference import Reference
from cetane.schema.interface import MASKED
from cetane.schema.recipe import Mode

from .mutations.families import build, recipe, tokenizer_of
from .mutations.ports import AuthoredPort, TinyCheckpoint

TABLE = np.random.default_rng(2).normal(size=(200, 16)).astype(np.float16)
TABLE[7] *= 0.01
TABLE[100:110] *= 0.1


@pytest.fixture
def tokenizer(tiny_checkpoint_folder: Path) -> Tokenizer:
    return open_checkpoint(tiny_checkpoint_folder).tokenizer


def test_random_tokens() -> None:
    tokens = random_tokens(TABLE, 20_000, 1, {0, 3})
    assert len(tokens) == 20_000
    norms = np.linalg.norm(TABLE.astype(float), axis=1)
    smallest = set(np.argsort(norms)[:10].tolist())  # 5 % of 200
    assert 7 in smallest
    assert set(tokens) == set(range(200)) - smallest - {0, 3}


def test_a_start_that_ends_with_a_token(tokenizer: Tokenizer) -> None:
    text = text_tokens(tokenizer, 100)
    assert begun(tokenizer, 8) == begun(tokenizer, 8, up_to=5) == text[:8]
    assert begun(tokenizer, 8, up_to=40) == text[33:41]
    with_bos: Any = SimpleNamespace(bos_id=3, encode=tokenizer.encode)
    assert begun(with_bos, 8, up_to=40) == (3, *text[34:41])
    assert begun(with_bos, 1, up_to=40) == (3,)


def test_random_tokens_are_seeded() -> None:
    assert random_tokens(TABLE, 50, 1, set()) == random_tokens(TABLE, 50, 1, set())
    assert random_tokens(TABLE, 50, 1, set()) != random_tokens(TABLE, 50, 2, set())
    assert all(type(token) is int for token in random_tokens(TABLE, 5, 1, set()))


@pytest.mark.parametrize("length", [1, 5, 100])
def test_text_tokens(tokenizer: Tokenizer, length: int) -> None:
    tokens = tokenizer.encode("A text.")
    assert text_tokens(tokenizer, length, "A text.") == tuple((tokens * 100)[:length])


def test_a_text_without_bos() -> None:
    class WithBos:
        bos_id = 1

        def encode(self, text: str) -> list[int]:
            return [1, 5, 6]

    assert text_tokens(WithBos(), 5, "x") == (5, 6, 5, 6, 5)  # type: ignore[arg-type]


def test_texts_are_long_enough_without_repeats(tokenizer: Tokenizer) -> None:
    """Of a vocabulary of 49,152 tokens, SmolLM2's, they are some 1,400 tokens."""
    words = texts().split()
    assert len(words) > 900
    assert len(set(zip(words, words[1:], words[2:], strict=False))) > 0.97 * len(words)


def test_windows() -> None:
    assert windows(range(7), 3) == [(0, 1, 2), (3, 4, 5)]  # one token predicts nothing
    assert windows(range(8), 3) == [(0, 1, 2), (3, 4, 5), (6, 7)]


def test_text_windows(good: Bundle) -> None:
    """Every position is predicted once, from the start of its window."""
    context = good.plan.recipe.cache.context
    pieces = text_windows(good.tokenizer, good.plan, 0, 150)
    tokens = text_tokens(good.tokenizer, 151)
    assert all(2 <= len(piece.tokens) <= context for piece in pieces)
    assert sum(len(piece.tokens) - 1 for piece in pieces) == 150
    assert [t for piece in pieces for t in piece.tokens[1:]] == list(tokens[1:])


@pytest.mark.parametrize("family", ["gemma3", "zaya"])
@pytest.mark.parametrize("widths", [(0, 0), (4, 16)])
def test_probes_use_every_slot_again(family: str, widths: tuple[int, int]) -> None:
    verify, prefill = widths
    tables = {"tokens": {"verify": verify, "prefill": prefill}}
    port = AuthoredPort(TinyCheckpoint(build(family), tokenizer_of()), recipe("fp16", **tables))
    assert port.plan.recipe.tokens.by_mode().keys() == port.plan.modes.keys()
    rows = port.tables.tokens[:]
    text, end, faint = structure_probes(rows, port.tokenizer, port.plan, 0)
    reused = max((g.count for g in port.plan.caches.values() if g.limited), default=0)
    assert len(text.tokens) > reused + max(prefill, 1)
    assert end.start + len(end.tokens) == port.plan.recipe.cache.context
    assert faint.scale < 0.01
    for mode, of in port.plan.modes.items():
        shares = parts(port.plan, mode, len(text.tokens))
        assert sum(part.tokens for part in shares) == len(text.tokens)
        for part in (shares[0], shares[-1]):
            assert part.judged
            assert part.mode == mode
            assert part.tokens >= 8
        assert of.tokens <= shares[0].tokens


@pytest.mark.parametrize("filled", [0, 40, 10_000])
def test_probes_reach_the_end_of_the_context(filled: int) -> None:
    port = AuthoredPort(TinyCheckpoint(build("llama"), tokenizer_of()), recipe("fp16"))
    probes = structure_probes(port.tables.tokens[:], port.tokenizer, port.plan, filled)
    context = port.plan.recipe.cache.context
    assert len(probes[0].tokens) >= min(filled, context)
    assert max(probe.start + len(probe.tokens) for probe in probes) == context


def test_each_mode_takes_tokens_without_logits() -> None:
    """Steps that only fill caches run in every mode."""
    port = AuthoredPort(TinyCheckpoint(build("llama"), tokenizer_of()), recipe("fp16"))
    for mode in port.plan.modes:
        assert {mode} <= {part.mode for part in parts(port.plan, mode, 120) if not part.judged}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_each_mode_does_all_that_a_host_does(family: str) -> None:
    """Behind the text that it reads, in some tens of tokens; in no other probe."""
    port = AuthoredPort(TinyCheckpoint(build(family), tokenizer_of()), recipe("fp16"))
    text, *others = structure_probes(port.tables.tokens[:], port.tokenizer, port.plan, 0)
    for mode, of in port.plan.modes.items():
        every = probe_parts(port.plan, mode, text)
        assert sum(part.tokens for part in every) == len(text.tokens)
        ways = [part.way for part in every if part.way]
        drafts = ["draft"] * 3 + ["tree"] * 2 if of.tokens > 1 else []
        assert ways == ["rewind", *drafts, "last", "last"]
        assert every[-len(ways) :] == host_parts(port.plan, mode)
        assert host_tokens(port.plan, mode) <= 1.5 * of.tokens + 50
        for probe in others:
            made = probe_parts(port.plan, mode, probe)
            assert sum(part.tokens for part in made) == len(probe.tokens)
            assert not any(part.way for part in made)


@pytest.mark.parametrize("verify", [4, 8])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_whole_call_takes_the_last_tokens_of_the_context(family: str, verify: int) -> None:
    """In every mode."""
    own = recipe("fp16", tokens={"verify": verify, "prefill": 16})
    port = AuthoredPort(TinyCheckpoint(build(family), tokenizer_of()), own)
    _, end, *_ = structure_probes(port.tables.tokens[:], port.tokenizer, port.plan, 0)
    for task in structure_tasks(port.plan, [end]):
        last = Watched(port.twin, port.planner, task).calls[-1]
        width = port.plan.modes[task.mode].tokens
        assert (last.mode, len(last.call.tokens)) == (task.mode, width)
        assert last.call.positions[-1] == port.plan.recipe.cache.context - 1


@pytest.mark.parametrize(
    ("widths", "mode", "drafts", "trees"),
    [
        ((2, 0), "verify", [(1, 2), (2, 2)], [2]),
        ((3, 0), "verify", [(1, 3), (2, 3), (3, 3)], [3, 2]),
        ((4, 16), "verify", [(1, 4), (2, 4), (4, 4)], [4, 3]),
        ((8, 64), "verify", [(1, 8), (4, 8), (8, 8)], [8, 7]),
        ((8, 64), "prefill", [(1, 64), (8, 16), (16, 16)], [16, 15]),
        ((32, 64), "prefill", [(1, 64), (17, 33), (33, 33)], [33]),
    ],
)
def test_drafts_and_trees(
    widths: tuple[int, int], mode: Mode, drafts: list[tuple[int, int]], trees: list[int]
) -> None:
    """Accepted tokens of drafted ones: one, half of them and all. No narrower call takes them."""
    tables = {"tokens": {"verify": widths[0], "prefill": widths[1]}}
    port = AuthoredPort(TinyCheckpoint(build("llama"), tokenizer_of()), recipe("fp16", **tables))
    made = host_parts(port.plan, mode)
    assert [(p.tokens - 1, p.drafted) for p in made if p.way == "draft"] == drafts
    assert [(p.tokens - 1, p.drafted) for p in made if p.way == "tree"] == [
        (len(tree_path(count)), count) for count in trees
    ]


@pytest.mark.parametrize("count", range(2, 18))
def test_a_tree_has_a_wrong_token_beside_each_right_one(count: int) -> None:
    path, parents = tree_path(count), tree_parents(count)
    assert len(parents) == count
    assert [parents[column] for column in path] == [-1, *path][:-1]
    wrong = set(range(count)) - {*path}
    assert all(parents[column] in {-1, *path} for column in wrong)
    lone = {0} if count % 2 else set()
    assert {parents[column] for column in wrong} == {parents[c] for c in path if c not in lone}
    assert len(path) >= (3 if count >= 5 else count // 2)


@pytest.mark.parametrize("widths", [(2, 16), (8, 16), (8, 64)])
@pytest.mark.parametrize("capacities", [[96], [64, 96, 160], [128], [192]])
def test_each_mode_fills_each_capacity(widths: tuple[int, int], capacities: list[int]) -> None:
    """A call ends where a cache is full, behind tokens of other modes; the next one crosses."""
    tables = {
        "tokens": {"verify": widths[0], "prefill": widths[1]},
        "cache": {"contract": "readonly", "context": 512, "capacities": capacities},
    }
    model = build_model("llama", max_position_embeddings=512)
    port = AuthoredPort(TinyCheckpoint(model, tokenizer_of()), recipe("fp16", **tables))
    text = structure_probes(port.tables.tokens[:], port.tokenizer, port.plan, 512)[0]
    for mode in port.plan.modes:
        at, by = 0, {}
        for part in probe_parts(port.plan, mode, text):
            by |= dict.fromkeys(range(at, at + part.tokens), part)
            at += part.tokens
        assert at == len(text.tokens) == 512
        for full in capacities:
            last, first = by[full - 1], by[full]
            assert (last.mode, last.judged) == (first.mode, first.judged) == (mode, True)
            assert last is not first


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose texts are short beside its blocks of 192 keys."""
    for name in ("TEXT_BYTES", "MOST_TEXT_BYTES"):
        monkeypatch.setattr(f"cetane.gates.probe_sizes.{name}", 0)
    for module in ("families.grouped_query", "gates.probes"):
        monkeypatch.setattr(f"cetane.{module}.LONGEST_BLOCK", 192)


def long_port(contract: str) -> AuthoredPort:
    """A context of 1,024 tokens."""
    model = build_model("llama", max_position_embeddings=1024)
    cache = {"contract": contract, "context": 1024}
    return AuthoredPort(TinyCheckpoint(model, tokenizer_of()), recipe("fp16", cache=cache))


@pytest.mark.usefixtures("short_text")
@pytest.mark.parametrize("contract", ["readonly", "blend", "stateful"])
def test_a_key_that_is_lost_between_blocks(contract: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five borders, the first and the last have probes."""
    port = long_port(contract)

    def wrong() -> set[tuple[str, Mode]]:
        proof = Proof(port, port.checkpoint, Reference(port.checkpoint), port.tables, silent)  # type: ignore[arg-type]
        return {(one.probe, one.mode) for one in proof.structure()[0] if one.relative > 1e-4}

    assert not wrong()

    def cut(keys: int, new: int, most: int) -> list[slice]:
        made = blocks(keys, new, most)
        return [slice(part.start, part.stop - (part.stop < keys)) for part in made]

    monkeypatch.setattr("cetane.families.grouped_query.blocks", cut)
    assert wrong() == {
        (probe, mode) for probe in ("beyond 192", "beyond 960") for mode in port.plan.modes
    }


@pytest.mark.usefixtures("short_text")
@pytest.mark.parametrize("counted", [(), (500,)])
def test_slots_that_a_number_does_not_count(
    counted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token of another probe is in a slot from 500 to 515."""
    monkeypatch.setattr(probes, "COUNTED", counted)
    port = long_port("readonly")

    def hide(_: str, __: str, inputs: Arrays) -> None:
        if "mask" in inputs:
            inputs["mask"][..., 500:516] = MASKED

    port.before.append(hide)
    proof = Proof(port, port.checkpoint, Reference(port.checkpoint), port.tables, silent)  # type: ignore[arg-type]
    wrong = {(one.probe, one.mode) for one in proof.structure()[0] if one.relative > 1e-4}
    assert wrong == {("beyond 500", mode) for mode in port.plan.modes if counted}


@pytest.mark.parametrize(
    ("contract", "filled", "crossed"),
    [
        ("readonly", 0, {192, 960}),
        ("readonly", 192, {384, 960}),  # the text reads beyond 192
        ("readonly", 900, {960}),
        ("readonly", 1000, set()),
        ("shift", 0, set()),
    ],
)
@pytest.mark.usefixtures("short_text")
def test_borders_behind_the_text(contract: str, filled: int, crossed: set[int]) -> None:
    assert crossings(long_port(contract), filled) == crossed


def test_borders_of_a_familys_own_blocks() -> None:
    """Of 64 keys, in a context of 160 tokens."""
    checkpoint = TinyCheckpoint(build("gemma3"), tokenizer_of())
    own = recipe("fp16", family={"full_block": 64})
    assert crossings(AuthoredPort(checkpoint, own), 0) == {64, 128}
    assert crossings(AuthoredPort(checkpoint, recipe("fp16")), 0) == set()


def crossings(port: AuthoredPort, filled: int) -> set[int]:
    """The positions that probes cross."""
    probes = structure_probes(port.tables.tokens[:], port.tokenizer, port.plan, filled)
    crossed = {int(p.name.removeprefix("beyond ")): p for p in probes if p.name[:6] == "beyond"}
    for at, probe in crossed.items():
        assert probe.start <= at - 32 < at + 16 <= probe.start + len(probe.tokens)
    return {*crossed}


def test_a_state_that_reuses_slots_is_not_rewound() -> None:
    cache = {"contract": "stateful", "context": 160}
    checkpoint = TinyCheckpoint(build("gemma3"), tokenizer_of())
    plan = AuthoredPort(checkpoint, recipe("fp16", cache=cache)).plan
    assert plan.forgets
    assert "rewind" not in {part.way for part in host_parts(plan, "verify")}


def test_a_tokenizer_without_english(tokenizer: Tokenizer) -> None:
    class Mute:
        bos_id = None

        def encode(self, text: str) -> list[int]:
            return []

    with pytest.raises(CetaneError, match="no token of the English text"):
        text_tokens(Mute(), 5)  # type: ignore[arg-type]


def test_chat_prompts(tokenizer: Tokenizer, tiny_checkpoint_folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint_folder)
    expected = [
        theirs.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True,
                                   return_dict=False)
        for q in QUESTIONS[:2]
    ]  # fmt: skip
    assert chat_prompts(tokenizer, 2) == expected


def test_chat_prompts_of_a_template_that_refuses_a_question_alone(tokenizer: Tokenizer) -> None:
    """Some want a system message first."""
    strict = replace(tokenizer, chat_template="{{ raise_exception('a system message first') }}")
    assert chat_prompts(strict, 1) == [strict.encode(QUESTIONS[0])]


def test_chat_prompts_without_a_template(tokenizer: Tokenizer) -> None:
    plain = Tokenizer(tokenizer.backend, tokenizer.special_tokens, tokenizer.eos_ids, None)
    assert chat_prompts(plain, 1) == [plain.encode(QUESTIONS[0])]
