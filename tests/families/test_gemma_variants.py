"""Options of Gemma's attention, Gemma 3n's streams, and errors of the published ports' pipeline."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import InMemoryCheckpoint
from tests.families.gemma_models import (
    FEEDS,
    FULL,
    GEMMA3N,
    GEMMA4,
    SLIDING,
    build_gemma3,
    build_gemma3n,
    build_gemma4,
    masked_truth,
    recipe,
)
from tests.families.parity import TOLERANCE, assert_close, engine_of, run, tokens, truth

from cetane.bundle.tables import Tables
from cetane.engine.engine import Engine
from cetane.errors import CetaneError
from cetane.families import author
from cetane.families.grouped_query import AttentionHeads, attend
from cetane.families.rotary import RotaryTable
from cetane.planner import Planner
from cetane.schema.interface import MASKED
from cetane.schema.slots import CONTRACTS, Slots

LENGTH = 64
SOME = {name: FEEDS[name] for name in ("prefill", "uneven")}


@cache
def gemma4() -> Any:
    return build_gemma4()


@cache
def gemma3n() -> Any:
    return build_gemma3n()


@cache
def plain() -> np.ndarray:
    return truth(gemma4(), LENGTH)


@pytest.mark.parametrize(
    ("contract", "window", "sinks"),
    [
        ("shift", 32, 0),
        ("blend", 32, 0),
        ("readonly", 20, 0),
        ("stateful", 20, 0),
        ("stateful-blend", 20, 0),
        ("readonly", 28, 4),
        ("blend", 20, 3),
        ("stateful", 17, 5),
        ("stateful-blend", 17, 5),
    ],
)
def test_full_layers_with_a_window(contract: str, window: int, sinks: int) -> None:
    """Their caches are short; the first tokens, where they are sinks, stay for ever."""
    wanted = recipe(contract, family={"full_window": window, "sinks": sinks})
    engine = engine_of(gemma4(), wanted)
    assert engine.plan.caches["full"].limited
    expected = masked_truth(gemma4(), window, sinks)
    assert_close(engine, expected, FEEDS)
    assert np.abs(expected - plain())[window + 1 :].max() > 1e-2  # it is another model there
    found = run(engine, FEEDS["uneven"])
    assert np.abs(found - plain())[:window].max() <= TOLERANCE  # and the same one here


def test_states_that_shift() -> None:
    """One token at a time: nothing else may be pushed into them."""
    wanted = recipe("stateful-blend", "stateful-shift", tokens={"verify": 0, "prefill": 0})
    assert_close(engine_of(gemma4(), wanted), plain(), {"alone": [1] * len(plain())})
    with pytest.raises(CetaneError, match="layers of sliding take one token a call"):
        engine_of(gemma4(), recipe("stateful-blend", "stateful-shift"))


def test_sinks_cannot_shift() -> None:
    with pytest.raises(CetaneError, match="a shift cache forgets the first tokens"):
        engine_of(gemma4(), recipe("shift", family={"full_window": 24, "sinks": 4}))
    with pytest.raises(CetaneError, match="sinks needs full_window"):
        engine_of(gemma4(), recipe(family={"sinks": 4}))


@pytest.mark.parametrize("block", [1, 5, 16, 64])
@pytest.mark.parametrize("seen", ["all", "none of the first", "none of the last", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_in_blocks(block: int, seen: str, dtype: torch.dtype) -> None:
    """Against a softmax in float64; blocks that do not divide the keys, or are unseen."""
    rng = np.random.default_rng(block)
    q, k, v = (
        torch.tensor(rng.standard_normal((1, h, 8, n))) for h, n in ((4, 3), (2, 37), (2, 37))
    )
    mask = torch.zeros(1, 1, 6, 37)
    if seen != "all":
        hidden = {"none of the first": slice(0, 20), "none of the last": slice(16, 37)}
        mask[..., hidden.get(seen, slice(0, 37))] = MASKED
    rows = q.reshape(2, 2, 8, 3).transpose(2, 3).reshape(1, 2, 6, 8)
    weights = torch.softmax(rows @ k * 0.5 + mask, -1)
    expected = (weights @ v.transpose(2, 3)).reshape(2, 2, 3, 8).transpose(2, 3).reshape(1, 4, 8, 3)
    heads = AttentionHeads(4, 2, 8, 0.5, block=block)
    found = attend(q.to(dtype), k.to(dtype), v.to(dtype), mask.to(dtype), heads)
    assert torch.isfinite(found).all()
    if seen == "none":  # padding, whose result nobody reads: any mean of values
        return
    limit = 1e-6 if dtype == torch.float32 else 4e-3
    assert (found.double() - expected).abs().max() < limit


@pytest.mark.parametrize("contract", CONTRACTS)
def test_blocks_that_do_not_divide_the_context(contract: str) -> None:
    engine = engine_of(gemma4(), recipe(contract, family={"full_block": 24}))
    assert_close(engine, plain(), SOME)


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("layout", [{"kind": "single"}, {"kind": "chunks", "cuts": [2, 4]}])
def test_one_padded_state_for_all_layers(heads: int, layout: dict[str, Any]) -> None:
    """It is the model, by calls of every width, and nothing is ever written beside its rows."""
    cache = {"contract": "stateful", "context": 64, "padded": True, "state_heads": heads}
    engine = engine_of(gemma4(), recipe("stateful", layout=layout, cache=cache))
    assert_close(engine, plain(), FEEDS)
    session = engine.session()
    session.feed(tokens(288, 60), "all")
    slots = {name: group.count for name, group in engine.plan.caches.items()}
    assert slots == {"sliding": 64, "full": 64}
    states = [s for own in session.execution.states.values() for s in own.made.values()]
    for state in states:
        for rows in state.tensors.values():
            assert rows.shape[1:] == (heads, 32, 64)
            assert not rows[:, 1:].any()  # of one head
            used = [int(np.abs(row.numpy()).sum((0, 2)).astype(bool).sum()) for row in rows]
            assert set(used) <= {16, 32}  # channels of sliding layers, and of full ones
    assert max(len(state.tensors) for state in states) == 1


def test_what_a_padded_state_wastes() -> None:
    """By hand: keys and values of 2 sliding and 2 full layers, of which one state is made."""
    cache = {"contract": "stateful", "context": 64, "padded": True, "state_heads": 8}
    plan = engine_of(gemma4(), recipe(layout={"kind": "single"}, cache=cache)).plan
    own = 2 * 2 * 2 * (1 * 16 + 1 * 32) * 64
    assert plan.kv_bytes[64] == 2 * 8 * 8 * 32 * 64
    assert plan.kv_padding == plan.kv_bytes[64] - own
    plain = engine_of(gemma4(), recipe("stateful", layout={"kind": "single"})).plan
    assert (plain.kv_bytes[64], plain.kv_padding) == (own, 0)
    content = plan.model_dump(mode="json")  # a manifest may have been changed
    content["shards"][0]["functions"][0]["states"][0]["shape"][-1] = 32
    with pytest.raises(ValueError, match="padded_kv is 32 long, not 64"):
        type(plan).model_validate(content)


def test_a_padded_state_with_windows_and_sinks() -> None:
    cache = {"contract": "stateful", "context": 96, "padded": True}
    family = {"full_window": 17, "sinks": 5}
    engine = engine_of(gemma4(), recipe(cache=cache, family=family))
    assert engine.plan.caches["full"].count < engine.plan.caches["sliding"].count < 96
    assert_close(engine, masked_truth(gemma4(), 17, 5), FEEDS)


@pytest.mark.parametrize("layout", [{"kind": "single"}, {"kind": "chunks", "cuts": [2, 4]}])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_prefill_leaves_out_what_nobody_reads(contract: str, layout: dict[str, Any]) -> None:
    """Layers that read others' caches run for the last token alone, and it is as it was."""
    engine = engine_of(gemma4(), recipe(contract, layout=layout))
    called: list[str] = []
    session = engine.session(
        ["prefill", "decode"],
        watch=[lambda step, *_: called.append(f"{step.shard}/{step.function}")],
    )
    ids = tokens(288, LENGTH)
    logits = session.feed(ids[:43])
    assert logits is not None
    assert np.abs(logits - plain()[42]).max() <= TOLERANCE
    prefill = {call for call in called if not call.endswith("decode")}
    if layout["kind"] == "single":
        assert prefill == {"model/fill"}
    else:
        assert prefill == {"chunk-00/prefill", "chunk-01/prefill"}
        assert "chunk-02/decode" in called
    for token, expected in zip(ids[43:], plain()[43:], strict=True):
        assert np.abs(session.feed([token]) - expected).max() <= TOLERANCE


def test_an_embedding_inside() -> None:
    wanted = recipe(embedding={"inside": True}, layout={"kind": "chunks", "cuts": [4]})
    engine = engine_of(gemma4(), wanted)
    inputs = {item.name for item in engine.plan.shards[0].functions[0].inputs}
    assert "token_ids" in inputs
    assert "hidden" not in inputs
    assert_close(engine, plain(), SOME)


@pytest.mark.parametrize("choose", [True, "argmax"])
@pytest.mark.parametrize("layout", [{"kind": "single"}, {"kind": "chunks", "chunks": 2}])
def test_a_head_that_chooses(layout: dict[str, Any], choose: bool | str) -> None:
    """Of three slices each its largest logit: the model's own choice, and the logit it has."""
    wanted = recipe(layout=layout, head={"slices": 3, "choose": choose})
    engine = engine_of(gemma4(), wanted)
    for pieces in SOME.values():
        found = run(engine, pieces)
        assert (found.argmax(1) == plain().argmax(1)).all()
        assert np.abs(found.max(1) - plain().max(1)).max() <= TOLERANCE
        assert ((found > MASKED).sum(1) == 3).all()


class TestPublishedPorts:
    """The pipeline of the second seed, rule by rule (CoreML-LLM, commit 72178c6)."""

    def test_all_pairs_of_full_layers_turned(self) -> None:
        """Right at position 0, where its parity test looked, and nowhere else."""
        engine = engine_of(gemma4(), recipe())
        wrong = 1e6 ** (-torch.arange(0, 32, 2).float() / 32)
        tables = engine.tables
        rotary = tables.rotary | {"full": RotaryTable(wrong).cos_sin(LENGTH).numpy()}
        theirs = Engine(
            engine.plan, engine.backend, Tables(tables.embedding, rotary, tables.others)
        )
        error = np.abs(run(theirs, FEEDS["prefill"]) - plain()).max(axis=1)
        assert error[0] <= TOLERANCE
        assert error[8:].min() > 1e-3
        assert_close(engine, plain(), SOME)

    def test_one_mask_for_both_kinds_in_prefill(self) -> None:
        """Sliding layers that look beyond their window, in prompts that are longer than it."""
        engine = engine_of(gemma4(), recipe(windowed=False, tokens={"verify": 2, "prefill": 64}))
        plan = engine.plan.model_dump(mode="json")
        for shard in plan["shards"]:
            for function in shard["functions"]:
                for item in function["inputs"]:
                    if item["source"]["host"] == "mask":
                        item["source"]["window"] = None
        theirs = Engine(type(engine.plan).model_validate(plan), engine.backend, engine.tables)
        error = np.abs(run(theirs, FEEDS["prefill"]) - plain()).max(axis=1)
        window = GEMMA4["sliding_window"]
        assert error[:window].max() <= TOLERANCE
        assert error[window:].min() > 1e-3
        assert_close(engine, plain(), SOME)

    def test_verify_that_shifts_before_it_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first tokens of a call lose keys that are still in their window."""
        ours = engine_of(gemma4(), recipe("blend", "shift"))
        assert ours.plan.caches["sliding"].contract_for(4) == "readonly"
        assert_close(ours, plain(), {"steps of 4": FEEDS["steps of 4"]})
        monkeypatch.setattr(Slots, "contract_for", lambda self, tokens: self.contract)
        theirs = engine_of(gemma4(), recipe("blend", "shift"))
        assert theirs.plan.caches["sliding"].contract_for(4) == "shift"
        error = np.abs(run(theirs, FEEDS["steps of 4"]) - plain()).max(axis=1)
        window = GEMMA4["sliding_window"]
        assert error[:window].max() <= TOLERANCE
        calls = error[window:].reshape(-1, 4)  # of every call the last token has all its keys ...
        assert calls[:, :3].min() > 1e-5  # ... and those before it do not
        assert calls[0, 0] > TOLERANCE


def part_of_heads(**full: Any) -> dict[str, Any]:
    """A config whose full layers ask for half of each head to be turned."""
    factor = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    return {"rope_parameters": {SLIDING: sliding, FULL: factor | full}}


@pytest.mark.parametrize("build", [build_gemma3, build_gemma4])
def test_a_part_of_heads_that_transformers_ignores(build: Callable[..., Any]) -> None:
    model = build(**part_of_heads(rope_type="default"))
    assert_close(engine_of(model, recipe()), truth(model, LENGTH), SOME)


CONFIG = {"model_type": "gemma4_text", **GEMMA4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"enable_moe_block": True}, "mixtures of experts"),
        ({"use_bidirectional_attention": "all"}, "only causal models"),
        ({"layer_types": ["chunked_attention", *GEMMA4["layer_types"][1:]]}, "chunked_attention"),
        ({"layer_types": GEMMA4["layer_types"][:3]}, "not valid"),
        ({"num_kv_shared_layers": 6}, "not valid"),
        ({"num_kv_shared_layers": 5}, "not valid"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"head_dim": 0}, "not valid"),
        ({"global_head_dim": 0}, "not valid"),
        ({"global_head_dim": 2**40}, "not valid"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input = 100"),
        ({"rope_parameters": {SLIDING: {"rope_theta": 1e4}}}, "not valid"),
        (
            part_of_heads(rope_type="linear", factor=8.0),
            "positions to 16 of 32 channels of a head, which",
        ),
        ({"hidden_activation": "swish-ish"}, "hidden_act = 'swish-ish'; known"),
    ],
)
def test_configs_that_no_model_has(config: dict[str, Any], message: str) -> None:
    known = {k: v for k, v in gemma4().config.to_dict().items() if k != "per_layer_config"}
    with pytest.raises(CetaneError, match=message):
        author(known | CONFIG | config, "c1t", {}, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"altup_num_inputs": 1}, "altup_num_inputs = 1, not from 2"),
        ({"altup_active_idx": 3}, "altup_active_idx = 3, but there are 3 streams"),
        ({"altup_active_idx": -1}, "altup_active_idx = -1"),
        ({"laurel_rank": 0}, "laurel_rank = 0, not from 1"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input = 0, not from 1"),
        ({"activation_sparsity_pattern": [1.0, *[0.0] * 5]}, "1.0 is not less than 1"),
        ({"activation_sparsity_pattern": [0.5]}, "not valid"),
        ({"intermediate_size": [96] * 5 + [0]}, "intermediate_size = 0, not from 1"),
        ({"intermediate_size": [96] * 5}, "not valid"),
        ({"num_kv_shared_layers": 6}, "leaves no layer that makes keys"),
        ({"num_kv_shared_layers": 7}, "leaves no layer that makes keys"),
        ({"num_kv_shared_layers": 5}, "not valid"),
        ({"layer_types": GEMMA3N["layer_types"][:3]}, "not valid"),
        ({"layer_types": ["chunked_attention", *GEMMA3N["layer_types"][1:]]}, "chunked_attention"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"hidden_activation": "swish-ish"}, "hidden_act = 'swish-ish'; known"),
    ],
)
def test_configs_that_no_gemma3n_has(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CetaneError, match=message):
        author(gemma3n().config.to_dict() | config, "c1t", {}, None)


@pytest.mark.parametrize("layout", [{"kind": "per-block"}, {"kind": "chunks", "cuts": [2, 5]}])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_streams_between_shards(contract: str, layout: dict[str, Any]) -> None:
    engine = engine_of(gemma3n(), recipe(contract, layout=layout))
    made = {item.name for shard in engine.plan.shards for item in shard.functions[0].outputs}
    assert made >= {"hidden_out", "stream_1_out", "stream_2_out", "shared_full_k_out"}
    assert_close(engine, truth(gemma3n(), LENGTH), SOME)


def test_faint_streams() -> None:
    """Below the magnitude by which transformers divides, and all zeros."""
    model = build_gemma3n()
    with torch.no_grad():
        model.model.embed_tokens.weight[:200] *= 1e-3
        model.model.embed_tokens.weight[:100] = 0
    assert_close(engine_of(model, recipe()), truth(model, LENGTH), SOME)


def test_gemma3_refuses_what_is_not_causal() -> None:
    config = build_gemma3().config.to_dict() | {"use_bidirectional_attention": True}
    with pytest.raises(CetaneError, match="only causal models"):
        author(config, "c1t", {}, None)


def damage(plan: Any, name: str, shape: list[int]) -> None:
    for item in plan["shards"][0]["functions"][0]["inputs"]:
        if item["name"] == name:
            item["shape"] = shape


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mask_full", [1, 1, 1, 32], "mask_full is 32 long, not 65"),
        ("mask_sliding", [1, 1, 1, 65], "mask_sliding is 65 long, not 33"),
        ("full_k", [1, 1, 32, 32], "full_k is 32 long, not 64"),
        ("full_k", [1, 2, 32, 64], r"full_v has shape \(1, 1, 32, 64\)"),
    ],
)
def test_a_shard_for_another_context(name: str, shape: list[int], message: str) -> None:
    """The seeds' "8K rebuild" of one chunk: found before anything runs."""
    made = engine_of(build_gemma4(num_kv_shared_layers=0), recipe()).plan
    content = made.model_dump(mode="json")
    damage(content, name, shape)
    with pytest.raises(ValueError, match=message):
        type(made).model_validate(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["tables"]["tokens"].update(rows=5), "table of tokens is not 288 by 64"),
        (lambda p: p["tables"].pop("tokens"), "no table tokens"),
        (lambda p: p["tables"]["per_layer"].update(rows=5), "fewer rows than the vocabulary"),
        (lambda p: p["tables"].pop("per_layer"), "no table per_layer"),
        (lambda p: p["caches"]["full"].update(sinks=64), "64 of 64 slots are never used again"),
        (lambda p: p["caches"]["full"].update(count=2**40), "less than or equal"),
        (lambda p: p["caches"].pop("sliding"), "no cache group sliding"),
        (lambda p: sink(p).update(group="sliding"), "is not of the group sliding"),
    ],
)
def test_a_plan_that_an_engine_cannot_run(change: Any, message: str) -> None:
    made = engine_of(gemma4(), recipe()).plan
    content = made.model_dump(mode="json")
    change(content)
    with pytest.raises(ValueError, match=message):
        type(made).model_validate(content)


def sink(plan: Any) -> Any:
    """Where the first shard's new keys of full layers go."""
    outputs = plan["shards"][0]["functions"][0]["outputs"]
    return next(o["sink"] for o in outputs if o["name"] == "full_k_out")


def test_layers_that_differ_in_more_than_their_heads() -> None:
    config = gemma4().config.to_dict()
    config["per_layer_config"]["1"]["intermediate_size"] = 7
    with pytest.raises(CetaneError, match="not valid"):
        author(config, "c1t", {}, None)


def test_truths_of_streams() -> None:
    """transformers shows no streams that are merged, nor made of the first."""
    layout = {"kind": "chunks", "cuts": [3]}
    planner = Planner(InMemoryCheckpoint(gemma3n()), recipe(layout=layout))
    first, second, *_ = planner.truths("decode").values()
    path = "model.layers.2"
    streams = ("hidden", "stream_1", "stream_2")
    assert {f"{name}_out": (path, index) for index, name in enumerate(streams)}.items() <= (
        first.items()
    )
    assert "hidden_out" not in second
