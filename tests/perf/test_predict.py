"""Predictions of plans: the work by hand for the tiny llama, and for ZAYA1-8B."""

import time
from typing import Any

import pytest
from tests.conftest import UnreadCheckpoint, build_model, without_weights
from tests.families.gemma_models import build_gemma3, build_gemma4

from cetane.hardware.chips import find_chip
from cetane.lab.synthetic import SHAPES
from cetane.perf.combinations import Combinations
from cetane.perf.cost import load_fit, terms
from cetane.perf.predict import Predictor, distinct
from cetane.perf.shapes import load_decoders
from cetane.planner import Planner, as_recipe_asks
from cetane.schema.recipe import Mode, Recipe, load_recipe, parse_recipe
from cetane.schema.slots import CONTRACTS

LAYER = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 96 * 64  # q, k and v, o, mlp
GAINS = 2 * 64  # two norms a layer, in fp16
FEW = {"verify": 4, "prefill": 16}


@pytest.fixture(scope="module")
def tiny() -> UnreadCheckpoint:
    return UnreadCheckpoint(build_model("llama"))


@pytest.fixture(scope="module")
def zaya8b() -> UnreadCheckpoint:
    return without_weights(SHAPES["zaya1-8b"])


@pytest.fixture
def predictor() -> Predictor:
    return Predictor(find_chip("m4-max"))


def recipe(**content: Any) -> Recipe:
    return parse_recipe({"name": "test", "cache": {"context": 128}} | content, "test")


def test_the_work_of_a_chunk(tiny: UnreadCheckpoint, predictor: Predictor) -> None:
    planner = Planner(
        tiny, recipe(layout={"chunks": 1}, compression={"default": "int8-per-channel"})
    )
    host, layers, head = predictor.works(planner, "decode", 128)
    assert (host.calls, host.host) == (0, 1)
    assert layers.weights == {8: 2 * LAYER, 16: 2 * GAINS}
    assert head.weights == {8: 288 * 64, 16: 64}
    own = 2 * 2 * 16 * 2 * 128  # K and V of two heads, fp16
    assert layers.memory == 2 * (2 * own + own)  # copied with the new column, and read
    assert layers.attention_macs == 2 * 2 * 4 * 16 * 129  # four query heads, with that column
    assert layers.border == 2 * own + 2 * 64  # the cache comes in, and a hidden column goes
    assert head.border == 2 * (64 + 288)


@pytest.mark.parametrize(("chip", "unpacked"), [("m1-max", True), ("m2", False)])
def test_bytes_that_a_chip_unpacks_stream_as_fp16(
    tiny: UnreadCheckpoint, chip: str, unpacked: bool
) -> None:
    """int8 becomes fp16 on M1 (arXiv 2606.22283); 4-bit palettes stream as they are on all."""
    predictor = Predictor(find_chip(chip))
    fp16, int8, palette = (
        predictor.predict(Planner(tiny, recipe(compression={"default": name})), "decode").ms
        for name in ("fp16", "int8-per-channel", "palette4-kmeans-group8")
    )
    assert palette < fp16
    assert (int8 == fp16) == unpacked


def test_weights_that_the_smallest_palette_cannot_divide(predictor: Predictor) -> None:
    """Outputs of 48 rows are no whole groups of 32: a port stores these weights as int8."""
    planner = Planner(
        UnreadCheckpoint(build_model("llama", hidden_size=48)),
        recipe(compression={"default": "auto"}),
    )
    counts = predictor.counts(planner, planner.model.layers)
    assert {form.name: count for form, count in counts.items()} == {
        "fp16": 2 * 2 * 48,
        "palette6-kmeans-group32": 2 * (64 + 2 * 32 + 2 * 96) * 48,  # q, k and v, gate, up
        "int8-per-channel": 2 * 48 * (64 + 96),  # o, down
    }


def test_a_lookup_inside_reads_a_row_for_each_token(
    tiny: UnreadCheckpoint, predictor: Predictor
) -> None:
    """A table of 288 rows of 64 bytes, of which no weight is multiplied."""
    content = {"layout": {"chunks": 1}, "compression": {"default": "int8-per-channel"}}
    outside, inside = (
        Planner(tiny, recipe(embedding={"inside": inside}, **content)) for inside in (False, True)
    )
    tokens = inside.recipe.tokens.verify
    _, plain, _ = predictor.works(outside, "verify", 128)
    _, looked_up, _ = predictor.works(inside, "verify", 128)
    assert looked_up.weights == plain.weights
    assert looked_up.memory - plain.memory == tokens * 64
    program = inside.members["chunk-00"]
    assert predictor.nbytes(inside, program) == 288 * 64 + 2 * (LAYER + 2 * GAINS)


@pytest.mark.parametrize("slices", [1, 3])
def test_a_head_that_chooses_gives_rows_and_no_logits(
    tiny: UnreadCheckpoint, predictor: Predictor, slices: int
) -> None:
    planner = Planner(tiny, recipe(layout={"chunks": 1}, head={"choose": True, "slices": slices}))
    _, _, *heads = predictor.works(planner, "verify", 128)
    tokens = planner.recipe.tokens.verify
    assert [head.border for head in heads] == [2 * tokens * (64 + 2 + 1)] * slices


def test_palettes_of_single_rows_take_longer(tiny: UnreadCheckpoint, predictor: Predictor) -> None:
    """Four times as long as those that 8 rows share (coremltools, guide on OPT-1.3B)."""
    rows, groups = (
        Planner(tiny, recipe(compression={"default": f"palette4-kmeans-group{size}"}))
        for size in (1, 8)
    )
    slow, fast = (predictor.predict(planner, "decode").terms for planner in (rows, groups))
    assert slow["MACs"] == pytest.approx(4 * fast["MACs"])
    assert slow["KV"] == fast["KV"]


@pytest.mark.parametrize(
    ("contract", "crosses", "copied"),
    [("readonly", 1, 2), ("blend", 2, 6), ("shift", 2, 2), ("stateful", 0, 2)],
)
def test_contracts(
    tiny: UnreadCheckpoint, predictor: Predictor, contract: str, crosses: int, copied: int
) -> None:
    content = {"cache": {"contract": contract, "context": 128}, "layout": {"chunks": 1}}
    planner = Planner(tiny, recipe(**content))
    _, layers, _ = predictor.works(planner, "decode", 128)
    own = 2 * 2 * 2 * 16 * 2 * 128
    assert layers.border == crosses * own + 2 * 64
    assert layers.memory == (1 + copied) * own
    assert set(CONTRACTS) == {"readonly", "blend", "shift", "stateful"}


def test_caches_of_bytes(tiny: UnreadCheckpoint, predictor: Predictor) -> None:
    """Bytes and scales cross the border once. In the program a cast reads them and writes fp16,
    and then all is as before."""
    cache: dict[str, Any] = {"context": 128}
    target = {"deployment": "iOS26"}
    plain, rounded = (
        predictor.works(
            Planner(tiny, recipe(layout={"kind": "single"}, cache=cache | more, target=target)),
            "decode",
            128,
        )[1]
        for more in ({}, {"format": "int8"})
    )
    halves, held = 2 * 2 * 2 * 2 * 128 * 16, 2 * 2 * 2 * 128 * (16 + 2)
    assert plain.border - rounded.border == halves - held
    assert rounded.memory - plain.memory == halves + held
    assert plain.attention_macs == rounded.attention_macs


def test_more_context_more_shards_and_more_tokens_cost_more(
    tiny: UnreadCheckpoint, predictor: Predictor
) -> None:
    one, two = (Planner(tiny, recipe(layout={"chunks": n})) for n in (1, 2))
    first = predictor.predict(one, "decode")
    assert predictor.predict(one, "decode", 256).terms["KV"] > first.terms["KV"]
    dispatch = load_fit().rates["dispatch"].value
    more = predictor.predict(two, "decode").terms["dispatch"] - first.terms["dispatch"]
    assert more == pytest.approx(dispatch)
    assert first.binds == "host"
    assert first.low is not None and first.high is not None and first.low < first.ms < first.high
    assert first.tok_s == pytest.approx(1000 / first.ms)


@pytest.mark.parametrize("context", [2048, 8192])
def test_layers_that_read_the_caches_of_others(predictor: Predictor, context: int) -> None:
    """Gemma 4 E2B as CoreML-LLM cuts it, as `Decoder` counts it. Only that port repeats keys, and
    keeps those of windows as wide as the others."""
    cuts = (8, 15, 25)
    content = {
        "layout": {"kind": "chunks", "cuts": cuts, "head": "last"},
        "cache": {"contract": "blend", "sliding": "shift", "context": context},
        "head": {"slices": 1},
    }
    planner = Planner(without_weights(SHAPES["gemma4-e2b"]), recipe(**content))
    _, *ours = predictor.works(planner, "decode", context)
    port = load_decoders()["gemma4-e2b"]
    plain = port.model_copy(update={"repeats_keys": False, "cache_dim": 0})
    bits = {"attention": 16.0, "mlp": 16.0, "head": 16.0}
    # what `Decoder` leaves out: hidden columns, rows of the layers' own embeddings, and logits
    per_layer = 35 * 256
    columns = [1536 + 2 * per_layer, 1536 + per_layer, 1536 + per_layer, 1536 + per_layer + 262144]
    theirs = plain.chunked(cuts, context, bits, "io")
    for one, other, handed in zip(ours, theirs, columns, strict=True):
        assert (one.memory, one.attention_macs) == (other.memory, other.attention_macs)
        assert one.border == other.border + 2 * handed


def test_calls_for_a_prompt_have_no_head(tiny: UnreadCheckpoint, predictor: Predictor) -> None:
    apart, whole = (
        Planner(tiny, recipe(layout=how)) for how in ({"chunks": 2}, {"kind": "single"})
    )
    *layers, _ = predictor.works(apart, "prefill", 128)
    assert predictor.works(apart, "prefill", 128, silent=True) == layers
    told = predictor.predict(apart, "prefill").terms
    assert told == terms(layers, predictor.costs)
    # a single program is called whole
    told = predictor.predict(whole, "prefill").terms
    assert told == terms(predictor.works(whole, "prefill", 128), predictor.costs)


def test_calls_for_a_prompt_skip_layers_that_only_read_caches(predictor: Predictor) -> None:
    """The 15 layers of Gemma 4 E2B that keep caches, as `Decoder` counts them. The last 20 keep
    none: a prompt's calls need no tensor that only these read."""
    content = {
        "layout": {"kind": "chunks", "cuts": (14,)},
        "compression": {"default": "palette4-kmeans-group32"},
        "cache": {"contract": "stateful", "context": 2048},
    }
    planner = Planner(without_weights(SHAPES["gemma4-e2b"]), recipe(**content))
    _, first, second = predictor.works(planner, "prefill", 2048, silent=True)
    bits = {"attention": 4.0, "mlp": 4.0, "head": 4.0}
    port = load_decoders()["gemma4-e2b"]
    for one, start, stop in ((first, 0, 14), (second, 14, 15)):
        assert one.weights[4] == port.program(start, stop, 2048, bits, "none").weights[4]
    # layer 13 hands on the keys and values of windows, since decoding calls the same function
    slots = 512 + 64
    assert first.border == 2 * 64 * (1536 + 2 * 35 * 256) + 2 * 2 * 256 * slots
    assert second.border == 2 * 64 * (1536 + 35 * 256)


def test_one_program_hands_no_keys_on(predictor: Predictor) -> None:
    """Layers 4 and 5 read two tensors of keys and two of values, which no call takes or gives."""
    gemma = UnreadCheckpoint(build_gemma4())
    content = {"tokens": FEW, "cache": {"contract": "stateful", "context": 128}}
    one, cut = (
        Planner(gemma, recipe(layout={"kind": "chunks", "chunks": chunks}, **content))
        for chunks in (1, 3)
    )
    _, whole, _ = predictor.works(one, "decode", 128)
    assert whole.border == 2 * (64 + 2 * 6 * 8)
    _, first, second, third, _ = predictor.works(cut, "decode", 128)
    # a window of 32 tokens, and the 15 that a call of 16 writes before its first one reads
    shared = 2 * 2 * (16 * 64 + 32 * 128)
    assert first.border == 2 * (64 + 2 * 6 * 8)
    assert second.border == third.border == 2 * (64 + 6 * 8) + shared
    assert third.memory == shared  # each is read once


@pytest.mark.parametrize("contract", ["readonly", "shift", "blend", "stateful"])
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_windows_at_other_contexts(predictor: Predictor, contract: str, mode: Mode) -> None:
    """A context has one prediction, whether the recipe's or another's."""
    gemma = UnreadCheckpoint(build_gemma3())  # windows of 32 tokens
    short, long = (
        Planner(gemma, recipe(tokens=FEW, cache={"contract": contract, "context": context}))
        for context in (32, 128)
    )
    assert not any(slots.limited for slots in short.memory.slots.values())
    assert predictor.predict(short, mode, 128) == predictor.predict(long, mode)


def test_heads_that_stream_at_other_contexts(predictor: Predictor) -> None:
    scores = {"source": "test", "model_type": "test", "method": "mass", "settings": {}}
    streaming = {"scores": scores | {"layers": [[0.9, 0.1]] * 2}, "sinks": 2, "window": 30}
    short, long = (
        recipe(tokens=FEW, cache={"context": context, "streaming": streaming | {"full": 0.5}})
        for context in (32, 128)
    )
    model: Any = UnreadCheckpoint(build_model("llama"))
    one, other = (Planner(as_recipe_asks(model, made), made) for made in (short, long))
    assert predictor.predict(one, "decode", 128) == predictor.predict(other, "decode")


def test_no_interval_for_a_chip_that_was_never_fitted(tiny: UnreadCheckpoint) -> None:
    found = Predictor(find_chip("m1")).predict(Planner(tiny, recipe()), "decode")
    assert found.ms > 0 and found.low is None and found.high is None


def test_distinct_experts() -> None:
    assert distinct(16, 1) == pytest.approx(1)
    assert distinct(2, 2) == pytest.approx(1.5)  # same or other, half the time each
    assert distinct(16, 10_000) == pytest.approx(16)


def test_routing_reads_one_expert_of_sixteen(
    zaya8b: UnreadCheckpoint, predictor: Predictor
) -> None:
    dense, routed = (Planner(zaya8b, load_recipe(name)) for name in ("zaya-int4", "zaya-routed"))
    weights = [
        sum(w.weights.get(4.0, 0) for w in predictor.works(p, "decode", 2048))
        for p in (dense, routed)
    ]
    assert weights[0] == 40 * 16 * 3 * 2048 * 2048
    # 16 experts and the skip, which has no weights, are equally likely
    assert weights[1] == pytest.approx(weights[0] / 17)
    assert predictor.predict(routed, "decode").ms < 0.6 * predictor.predict(dense, "decode").ms
    assert predictor.predict(routed, "decode").binds == "dispatch"


def test_the_published_port_is_predicted_within_the_interval(
    zaya8b: UnreadCheckpoint, predictor: Predictor
) -> None:
    """ane-book row P058, experiment 30, an MLState a layer: 107.6 ms, its host's sorting aside."""
    content = load_recipe("zaya-exp30").model_dump()
    content["cache"]["contract"] = "stateful"
    found = predictor.predict(Planner(zaya8b, parse_recipe(content, "test")), "decode")
    assert found.low is not None and found.high is not None
    assert found.low < 107.6 < found.high


def test_a_sweep_of_zaya_is_fast_and_honest(zaya8b: UnreadCheckpoint) -> None:
    started = time.process_time()
    sweep = Combinations(zaya8b, load_recipe("zaya-int4"), find_chip("m4-max"))
    found = []
    for one in sweep:
        found.append(one)
        if len(found) == 200:
            break
    assert len(found) / (time.process_time() - started) >= 50
    for one in found[::67]:  # the same as a plan of its own
        planner = Planner(zaya8b, one.recipe)
        alone = Predictor(find_chip("m4-max"))
        assert one.decode == alone.predict(planner, "decode")
        assert one.verifying == alone.predict(planner, "verify")
        programs = len(planner.plan().functions)
        if one.refused and "programs" in one.refused:
            assert programs > 128 and one.refused.startswith(str(programs))
        elif one.refused is None:
            assert programs <= 128
            assert max(s.weight_bytes for s in planner.plan().shards) <= 2_015_800_000 * 1.01


def test_a_sweep_of_a_dense_model(tiny: UnreadCheckpoint) -> None:
    sweep = Combinations(tiny, recipe(), find_chip("m4-max"))
    found = list(sweep)
    assert len(found) == len(sweep) == 2 * 4 * 4 * 3
    assert {one.layout for one in found} == {"per-layer", "single"}
    assert {one.contract for one in found} == set(CONTRACTS)
    assert {one.context for one in found} == {128}  # the model knows 256 positions
    assert not any(one.refused for one in found)
    assert len({(o.layout, o.contract, o.format, o.verify) for o in found}) == len(found)
