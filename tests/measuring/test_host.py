"""The kit's host gives the engine's logits, whatever the contract: it runs the same programs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import build_model
from tests.families import gemma_models
from tests.families.alibi_models import build_alibi
from tests.families.matrix_models import QWEN_NEXT
from tests.families.mixture_models import build_mixture
from tests.families.parity import engine_of, with_tables_on_disk
from tests.families.recipes import int8_recipe, recipe
from tests.families.streaming_models import NINE, SCORES, streaming_engine, streaming_recipe

from cetane.bundle import Bundle
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.kit.probes import expected_probes
from cetane.kit.write import bundle_files, host_description, probe_entry
from cetane.measuring.chain import ChainedRun
from cetane.measuring.host import Host
from cetane.schema.manifest import rotary_path, table_path
from cetane.schema.recipe import HeadSection
from cetane.schema.slots import CONTRACTS

TOKENS = [5, 17, 3, 99, 42, 7, 250, 11, 60, 61, 5, 17, 8]


class Function:
    """A function of the portable backend, as coremltools' compiled model."""

    def __init__(self, shard: Any, name: str) -> None:
        self.shard, self.name = shard, name

    def make_state(self) -> Any:
        return self.shard.make_state(self.name)

    def predict(self, data: dict[str, Any], state: Any = None) -> dict[str, Any]:
        wide = {n: v.astype(np.float32) if v.dtype.kind == "f" else v for n, v in data.items()}
        return dict(self.shard.call(self.name, wide, state))


def host_of(bundle: Bundle, folder: Path) -> Host:
    """A host in the folder that a kit would have, without the packages."""
    (folder / "host.json").write_text(json.dumps(host_description(bundle.plan)))
    np.save(folder / "head-tokens.npy", bundle.plan.choosable)
    names = [rotary_path(name) for name in bundle.plan.rotary]
    names += [table_path(n, p) for n in bundle.plan.tables for p in ("values", "scales")]
    for name in names:
        if (bundle.path / name).exists():
            (folder / name).write_bytes((bundle.path / name).read_bytes())
    backend = PortableBackend(bundle, "fp32")
    opened = {shard.name: backend.open(shard.name) for shard in bundle.plan.shards}
    return Host(folder, lambda shard, function: Function(opened[shard], function))


def follow(bundle: Bundle, folder: Path) -> None:
    """Both run the same calls, and agree on all logits."""
    engine = Engine(bundle.plan, PortableBackend(bundle, "fp32"), bundle.tables())
    modes = [mode for mode in bundle.plan.modes if mode != "verify"]
    session, host = engine.session(modes), host_of(bundle, folder)
    start = 0
    for call in session.schedule.cut(0, len(TOKENS), "last"):
        taken = TOKENS[start : start + call.count]
        start += call.count
        made = host.call(call.mode, taken, call.logits)
        assert (made is not None) == call.logits
    expected = session.feed(TOKENS)
    for _ in range(6):
        assert made is not None and expected is not None
        token = int(expected.argmax())
        assert int(made[-1].argmax()) == token
        assert np.allclose(made[-1], expected, rtol=0.02, atol=0.02)  # inputs are fp16 here
        made, expected = host.call("decode", [token]), session.feed([token])


def test_every_contract(variant: Bundle, tmp_path: Path) -> None:
    follow(variant, tmp_path)


def test_probes_with_adapters(adapted: Any, tmp_path: Path) -> None:
    """A probe's adapter takes part in all its calls."""
    opened: Any = object.__new__(ChainedRun)
    opened.host, opened.folder = host_of(adapted.bundle, tmp_path), tmp_path
    expected = expected_probes(adapted.bundle)
    opened.probes = [probe_entry(one) for one in expected]
    assert {probe["adapter"] for probe in opened.probes} == {None, "plain", "dora"}
    for index, one in enumerate(expected):
        np.save(tmp_path / opened.probes[index]["expected"], one.logits)
        rows = opened.probe(index)["positions"]
        assert len(rows) == len(one.logits) and min(row["cosine"] for row in rows) > 0.9999


@pytest.mark.parametrize("rows", ["int8", "int4"])
def test_rows_with_scales(rows: str, tmp_path: Path) -> None:
    """Two tables; of 48 columns, the last block is shorter."""
    wanted = gemma_models.recipe(embedding={"format": rows})
    engine = with_tables_on_disk(engine_of(gemma_models.build_gemma4(), wanted), tmp_path)
    for name in engine.plan.rotary:
        np.save(tmp_path / rotary_path(name), engine.tables.rotary[name])
    (tmp_path / "host.json").write_text(json.dumps(host_description(engine.plan)))
    np.save(tmp_path / "head-tokens.npy", engine.plan.choosable)
    opened = {shard.name: engine.open(shard.name) for shard in engine.plan.shards}
    host = Host(tmp_path, lambda shard, function: Function(opened[shard], function))
    session = engine.session(["decode"])
    for token in TOKENS:
        made, expected = host.call("decode", [token]), session.feed([token])
        assert made is not None and np.allclose(made[-1], expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rows", ["fp16", "int8", "int4"])
def test_a_kit_ships_the_scales(rows: str, tiny_bundle: Callable[..., Bundle]) -> None:
    bundle = tiny_bundle(embedding={"format": rows}, verify=None, prefill=None)
    assert ("embedding-scales.npy" in bundle_files(bundle)) == (rows != "fp16")


def test_distances(tmp_path: Path) -> None:
    engine = engine_of(build_alibi("mpt"), recipe("readonly"))
    agree(engine, tmp_path, [("prefill", TOKENS[:5]), ("verify", TOKENS[:4])])


def test_matrices_and_several_experts(tmp_path: Path) -> None:
    """Qwen3-Next, with two experts in each function. Its host keeps fp16, so logits are near."""
    model = build_mixture("qwen3_next", **QWEN_NEXT["qwen3_next"])
    routed = recipe(
        "readonly", "chunks", routed=("decode",), family={"together": 2, "residual_scale": 2**-5}
    )
    agree(engine_of(model, routed), tmp_path, [("prefill", TOKENS[:5])])


@pytest.mark.parametrize("contract", [*CONTRACTS, "stateful-blend"])
def test_heads_that_stream(contract: str, tmp_path: Path) -> None:
    """Two caches for a layer, and a sequence beyond the window of one."""
    wanted = streaming_recipe(SCORES, contract, 0 if contract == "shift" else 3)
    engine = streaming_engine(build_model("llama", **NINE), wanted)
    calls = [("prefill", TOKENS), ("prefill", [*TOKENS, 9, 9, 9]), ("verify", TOKENS[:4])]
    agree(engine, tmp_path, [call for call in calls if contract != "shift" or len(call[1]) != 13])


@pytest.mark.parametrize("choose", [True, "argmax"])
def test_a_head_that_chooses(choose: bool | str, tmp_path: Path) -> None:
    head = HeadSection(slices=3, choose=choose)
    engine = engine_of(build_model("llama"), recipe("readonly").model_copy(update={"head": head}))
    agree(engine, tmp_path, [("prefill", TOKENS[:5])])


def test_caches_of_bytes(tmp_path: Path) -> None:
    """The host keeps int8, gives int8, and rounds nothing itself."""
    engine = engine_of(build_model("llama"), int8_recipe(context=64))
    agree(engine, tmp_path, [("prefill", TOKENS[:5]), ("verify", TOKENS[:4])])
    described = json.loads((tmp_path / "host.json").read_text())
    host = Host(tmp_path, lambda *_: None)  # type: ignore[arg-type, return-value]
    types = {item["source"]["name"]: item["dtype"] for function in described["functions"]
             for item in function["inputs"] if item["source"]["host"] == "cache"}  # fmt: skip
    kept = {name: str(host.kept[name].dtype) for name in types}
    assert kept == {name: {"fp16": "float16"}.get(of, of) for name, of in types.items()}


def agree(engine: Engine, tmp_path: Path, first: list[tuple[str, list[int]]]) -> None:
    """A host and an engine give near logits, after some calls and then token by token."""
    (tmp_path / "host.json").write_text(json.dumps(host_description(engine.plan)))
    np.save(tmp_path / "head-tokens.npy", engine.plan.choosable)
    for name, table in engine.tables.rotary.items():
        np.save(tmp_path / rotary_path(name), table)
    np.save(tmp_path / "embedding.npy", engine.tables.rows("tokens")[np.arange(engine.plan.vocab)])
    opened = {shard.name: engine.open(shard.name) for shard in engine.plan.shards}
    host = Host(tmp_path, lambda shard, function: Function(opened[shard], function))
    session = engine.session(["decode", *dict(first)])
    for mode, tokens in [*first, *(("decode", [token]) for token in TOKENS)]:
        made, expected = host.call(mode, tokens), session.feed(tokens)
        assert made is not None and np.allclose(made[-1], expected, rtol=0.02, atol=0.02)


def test_a_reset_begins_anew(pair: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    host = host_of(pair[0], tmp_path)
    first = host.call("decode", [5])
    host.call("decode", [6])
    host.reset()
    again = host.call("decode", [5])
    assert first is not None and again is not None
    assert host.position == 1 and np.array_equal(first, again)


@pytest.mark.parametrize("mode", ["verify", "nothing"])
def test_a_mode_that_is_not_there(pair: tuple[Bundle, Bundle], tmp_path: Path, mode: str) -> None:
    with pytest.raises(KeyError):
        host_of(pair[0], tmp_path).call(mode, [1])
