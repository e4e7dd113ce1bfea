"""A sample of the wrong ports of docs/reference/mutations.md, and right ones; the whole table is
`benchmarks/mutations.py`."""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from tests.conftest import build_model
from tests.families.mixture_models import build_oss

from cetane.engine.backend import Arrays
from cetane.gates.golden import Proof
from cetane.gates.limits import limits

from .mutations.families import FORMATS, build, flattened, recipe, tokenizer_of
from .mutations.ports import (
    AuthoredPort,
    RememberedReference,
    TinyCheckpoint,
    encoded_once,
    judge,
)
from .mutations.table import PORT, TABLE

SAMPLE = [
    ("llama", "query heads of the wrong group", "structure"),
    ("llama", "mask one slot off", "structure"),
    ("llama", "columns of T = 4 in the wrong order", "structure"),
    ("llama", "head slices swapped", "structure"),
    ("llama", "epsilon of the final norm", "structure"),
    ("llama", "two layers' norms swapped", "structure"),
    ("llama", "stored queries doubled", "weights"),
    ("llama", "one stored element is off", "weights"),
    ("llama", "embedding rows one off", "weights"),
    ("gemma3", "a slot reused one step early", "structure"),
    ("gemma3", "a window one token too long", "structure"),
    ("gemma3", "softcap missing", "structure"),
    ("gemma3", "gains read without their offset", "structure"),
    ("gemma3", "gelu in its other form, or for silu", "structure"),
    ("gemma4", "shared caches without their values", "structure"),
    ("gemma3n", "streams not corrected", "structure"),
    ("gemma3n", "low-rank residual missing", "structure"),
    ("gemma3n", "sparse gates open above another share", "structure"),
    *[
        (family, "refused columns are kept", "structure")
        for family in ("gemma3", "lfm2", "qwen3_next", "zaya")
    ],
    *[
        (family, "the last accepted token is not seen", "structure")
        for family in ("llama", "gemma3", "qwen3_next", "zaya")
    ],
    *[
        (family, "later accepted tokens are the second one", "structure")
        for family in ("llama", "gemma3", "lfm2", "qwen3_next", "zaya")
    ],
    ("llama", "a draft that is accepted whole ends wrongly", "structure"),
    ("zaya", "a draft that is accepted whole ends wrongly", "structure"),
    ("llama", "a branch's columns are the first ones", "structure"),
    ("llama", "a branch's columns are neighbours", "structure"),
    ("gemma3", "a branch's columns are neighbours", "structure"),
    ("llama", "a token of a tree sees only its parent", "structure"),
    ("llama", "positions of a tree end at its second level", "structure"),
    ("llama", "later tokens of a tree see no start of the text", "structure"),
    ("llama", "decode of a smaller capacity does not see some slots", "structure"),
    ("llama", "verify of a smaller capacity does not see some slots", "structure"),
    ("zaya", "decode of a smaller capacity does not see some slots", "structure"),
    ("llama", "branches see each other", "structure"),
    ("gemma3", "branches see each other", "structure"),
    ("gemma3", "a mark shares its windows with later calls", "structure"),
    ("lfm2", "a rewind leaves histories", "structure"),
    ("zaya", "a rewind leaves histories", "structure"),
    ("qwen3_next", "a rewind leaves matrices", "structure"),
    ("lfm2", "a copy lacks histories", "structure"),
    ("zaya", "a copy lacks histories", "structure"),
    ("qwen3_next", "a copy lacks matrices", "structure"),
    ("llama", "a copy shares its caches", "structure"),
    ("gemma3", "a copy shares its caches", "structure"),
    ("llama", "logits of a call's first token", "structure"),
    ("deepseek_v3", "experts chosen without their correction", "structure"),
    ("deepseek_v3", "experts of any group", "structure"),
    ("deepseek_v3", "latent norm of queries missing", "structure"),
    ("zaya", "an expert swapped", "structure"),
    ("zaya", "router state one layer late", "structure"),
    ("zaya", "rotary table of another base", "structure"),
    ("zaya", "stale history", "structure"),
    ("stablelm", "RMSNorm for LayerNorm", "structure"),
    ("stablelm", "a norm without its bias", "structure"),
    ("apertus", "another activation", "structure"),
    ("nanochat", "no rotary embedding", "structure"),
    ("gpt_neox", "MLP behind attention, not beside it", "structure"),
    ("gpt_neox", "gelu in its other form, or for silu", "structure"),
    ("gpt_neox", "keys read the values' weights", "structure"),
    ("gpt2", "keys read the values' weights", "structure"),
    ("gpt2", "learned positions left out", "structure"),
    ("gpt2", "a weight matrix transposed", "structure"),
    ("gpt2", "stored positions one row off", "weights"),
    ("opt", "learned positions one row off", "structure"),
    ("opt", "another activation", "structure"),
    ("bitnet", "norm of what attention heads give left out", "structure"),
    ("bitnet", "norm inside an MLP left out", "structure"),
    ("afmoe", "gates of attention of the next channel", "structure"),
    ("flex_olmo", "the sum of experts not normed", "structure"),
    ("afmoe", "experts chosen without their correction", "structure"),
    ("olmo_hybrid", "rates of correction half as large", "structure"),
    ("olmo_hybrid", "keys and queries of the delta rule of the next head", "structure"),
    ("olmo_hybrid", "decays of the delta rule of the next head", "structure"),
    ("olmo_hybrid", "a rewind leaves matrices", "structure"),
    ("phimoe", "experts twice as far below are near", "structure"),
    ("phimoe", "experts a hundredth farther below are near", "structure"),
    ("phimoe", "no expert is near", "structure"),
    ("phimoe", "the second expert shares its weight with the first", "structure"),
    ("phimoe", "the first expert is the second best", "structure"),
    ("phi", "MLP behind attention, not beside it", "structure"),
    ("nemotron_h", "keys and queries of Mamba-2 of the next group", "structure"),
    ("nemotron_h", "bounds of steps of Mamba-2 on values alone", "structure"),
    ("phi", "biases of logits left out", "structure"),
    ("phi", "the final norm without its bias", "structure"),
]


@pytest.fixture(autouse=True, scope="module")
def encodings() -> Iterator[None]:
    with encoded_once():
        yield


@cache
def model(family: str) -> tuple[TinyCheckpoint, RememberedReference]:
    checkpoint = TinyCheckpoint(build(family), tokenizer_of())
    return checkpoint, RememberedReference(checkpoint)


@pytest.mark.parametrize(("family", "name", "question"), SAMPLE)
def test_a_wrong_port_is_refused(family: str, name: str, question: str) -> None:
    """At four bits a weight as at sixteen, by the question that its fault belongs to."""
    checkpoint, reference = model(family)
    port = AuthoredPort(checkpoint, recipe("4 bits", **TABLE[name].tables))
    TABLE[name].change(port)
    assert question in judge(port, reference).refused_by


def test_a_host_whose_memory_has_two_capacities_does_not_run() -> None:
    """The mark's slots are fewer than its groups say. A command calls it a fault of cetane."""
    checkpoint, reference = model("llama")
    wrong = TABLE["a rewind keeps a larger capacity"]
    port = AuthoredPort(checkpoint, recipe("fp16", **wrong.tables))
    wrong.change(port)
    with pytest.raises(IndexError, match="out of bounds"):
        judge(port, reference)


def test_a_published_port_is_refused_at_any_number_of_bits() -> None:
    """Four departures of ZAYA's, which passed a gate whose limits sank with the bits."""
    checkpoint, reference = model("zaya")
    tables = {"family": {"departures": PORT}, "tokens": {"verify": 0, "prefill": 0}}
    structure = None  # which no format changes
    for form in FORMATS:
        judged = judge(AuthoredPort(checkpoint, recipe(form, **tables)), reference, structure)
        assert "structure" in judged.refused_by
        structure = judged.structure


@pytest.mark.parametrize(
    ("family", "bits"),
    [
        ("llama", "4 bits"),
        ("gemma3", "4 bits"),
        ("gemma4", "6 bits"),
        ("olmo", "fp16"),
        ("zaya", "4 bits"),
    ],
)
def test_a_right_port_is_certified(family: str, bits: str) -> None:
    """Four bits cost the random Gemma 4 more than `usable` lets them: its best logits are near."""
    checkpoint, reference = model(family)
    judged = judge(AuthoredPort(checkpoint, recipe(bits)), reference)
    assert judged.refused_by == ()
    assert judged.result is not None
    assert judged.result.passed


def test_a_context_without_room_for_drafts() -> None:
    checkpoint, reference = model("llama")
    port = AuthoredPort(checkpoint, recipe("fp16", cache={"context": 32}))
    proof = Proof(port, checkpoint, reference, port.tables, lambda *_: None)  # type: ignore[arg-type]
    (warning,) = (one for one in proof.beyond([]) if "drafts" in one)
    assert "in verify, prefill: the context of 32 tokens" in warning


@cache
def undecided() -> tuple[TinyCheckpoint, RememberedReference]:
    """A gpt-oss whose experts are so near that a text begins with a tie."""
    near = build_oss(limit=0.3, sliding_window=112, num_local_experts=16)
    checkpoint = TinyCheckpoint(flattened(near, 0.02), tokenizer_of())
    return checkpoint, RememberedReference(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        None,
        "a window one token too long",
        "a window one token too short",
        "a slot reused one step early",
    ],
)
def test_ties_of_experts_excuse_no_wrong_token(change: str | None) -> None:
    """Late in a text, where most tokens attend to one with a tie."""
    checkpoint, reference = undecided()
    port = AuthoredPort(checkpoint, recipe("fp16"))
    if change is not None:
        TABLE[change].change(port)
    assert judge(port, reference).refused_by == (() if change is None else ("structure",))


@cache
def quiet_slice() -> tuple[TinyCheckpoint, RememberedReference]:
    """A Llama whose last 64 tokens have so small logits that no token of a probe chooses them."""
    made = build_model("llama", num_hidden_layers=3, tie_word_embeddings=False)
    with torch.no_grad():
        made.lm_head.weight[224:] *= 0.7
    checkpoint = TinyCheckpoint(made, tokenizer_of())
    return checkpoint, RememberedReference(checkpoint)


def neighbour(outputs: Arrays) -> None:
    """Choose another row of the slice."""
    last = outputs["row_0"][-1]
    last[:] = np.where(last > 0, last - 1, last + 1)


def smaller(outputs: Arrays) -> None:
    """Give a smaller logit."""
    outputs["logit_0"] *= 0.9


@pytest.mark.parametrize("change", [None, neighbour, smaller])
def test_a_slice_that_no_probe_chooses(change: Callable[[Arrays], None] | None) -> None:
    """A head that chooses is judged by what each slice chooses, not by the best slice alone."""
    checkpoint, reference = quiet_slice()
    port = AuthoredPort(checkpoint, recipe("fp16", head={"slices": 6, "choose": True}))

    def of_the_last_slice(shard: str, _: str, outputs: Arrays) -> None:
        if change is not None and shard == "head-5":
            change(outputs)

    port.after.append(of_the_last_slice)
    assert judge(port, reference).refused_by == (() if change is None else ("structure",))


@pytest.mark.parametrize("off", [0, 3e-3])
def test_one_logit_of_a_large_vocabulary(off: float) -> None:
    """One token's logit is off, by a part of the logits' size. The norm of the row hardly shows
    it."""
    checkpoint = TinyCheckpoint(build_model("llama", vocab_size=4096), tokenizer_of())
    reference = RememberedReference(checkpoint)
    size = reference.run([list(range(8))])[0].logits.std()
    port = AuthoredPort(checkpoint, recipe("fp16"))

    def of_the_last_slice(shard: str, _: str, outputs: Arrays) -> None:
        if shard == "head-2":
            for logits in outputs.values():
                logits[:, 5] += off * size

    port.after.append(of_the_last_slice)
    judged = judge(port, reference)
    assert judged.worst < limits().structure.relative
    assert judged.refused_by == (("structure",) if off else ())


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_that_is_sure_of_few_tokens(wrong: bool) -> None:
    """Of 1,024 positions, 8 are decided: too few to prove a share, and enough to refuse one."""
    unsure = build_model(
        "granite", num_hidden_layers=2, embedding_multiplier=12.0, logits_scaling=8.0,
        residual_multiplier=0.22, attention_multiplier=0.0078125,
    )  # fmt: skip
    checkpoint = TinyCheckpoint(unsure, tokenizer_of())
    port = AuthoredPort(checkpoint, recipe("fp16"))
    proof = Proof(port, checkpoint, RememberedReference(checkpoint), port.tables, lambda *_: None)  # type: ignore[arg-type]
    answer = proof.structure()[1]

    def rolled(_: str, __: str, outputs: Arrays) -> None:
        for name, logits in outputs.items():
            if wrong and name.startswith("logits"):
                outputs[name] = np.roll(logits, 1, 1)

    port.after.append(rolled)
    found, _ = proof.compression(answer, [])
    assert all(check.passed for check in found.checks) is not wrong
    assert bool(found.warnings) is not wrong
    assert found.positions == (512 if wrong else 1024)


MISTRAL = build_model(
    "mistral", num_hidden_layers=2, sliding_window=128, max_position_embeddings=512
)
"""All of its layers have one window, which no call reaches, and no cache is as short."""


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        (None, True),
        ("windowed layers see everything", False),
        ("a window one token too long", False),
    ],
)
def test_a_window_that_no_call_reaches(change: str | None, passed: bool) -> None:
    checkpoint = TinyCheckpoint(MISTRAL, tokenizer_of())
    port = AuthoredPort(checkpoint, recipe("fp16", cache={"context": 224}))
    if change is not None:
        TABLE[change].change(port)
    refused_by = judge(port, RememberedReference(checkpoint)).refused_by
    assert refused_by == (() if passed else ("structure",))
    assert not any(slots.limited for slots in port.plan.caches.values())


def test_a_window_that_the_family_forgets() -> None:
    """So the plan knows of none; the model does."""
    reference = RememberedReference(TinyCheckpoint(MISTRAL, tokenizer_of()))
    forgetful = TinyCheckpoint(MISTRAL, tokenizer_of())
    forgetful.config["sliding_window"] = None
    port = AuthoredPort(forgetful, recipe("fp16", cache={"context": 224}))
    assert judge(port, reference).refused_by == ("structure",)
