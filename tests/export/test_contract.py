"""The contract of a bundle: its NumPy host gives the engine's logits, for every family and cache
contract, and imports nothing of cetane."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import VARIANTS, build_model
from tests.families import (
    gemma_models,
    zaya_models,
)
from tests.families.alibi_models import build_alibi
from tests.families.matrix_models import QWEN_NEXT
from tests.families.mixture_models import build_mixture
from tests.families.parity import engine_of, with_tables_on_disk
from tests.families.recipes import int8_recipe, recipe
from tests.families.streaming_models import NINE, SCORES, streaming_engine, streaming_recipe

from cetane.bundle import Bundle
from cetane.engine.engine import Engine
from cetane.export.contract.describe import describe
from cetane.export.contract.memory import activation_bytes
from cetane.export.contract.texts import document, host
from cetane.mil import Body, MilFunction, NamedValue, Op, TensorType, load
from cetane.pipeline.export import export_contract
from cetane.schema.interface import Input
from cetane.schema.slots import CONTRACTS

MOST_LINES = 206
GROWING, MATRICES = 40, 15
"""Lines more of a host whose caches grow, or that has matrices and several experts for a token."""
MEMORY = ("packages", "tables", "caches", "states", "call", "activations", "peak")
TOGETHER = {"together": 2, "residual_scale": 2**-5}
ROUTED = {"kind": "per-block", "routed": ("decode", "verify", "prefill")}
FAMILIES: dict[str, Callable[[str], Engine]] = {
    "zaya": lambda contract: engine_of(zaya(), recipe(contract, **ROUTED, slices=2)),
    "gemma 3": lambda contract: engine_of(
        gemma_models.build_gemma3(),
        gemma_models.recipe(contract, tokens={"verify": 4, "prefill": 24}),
    ),
    "qwen3_next": lambda contract: engine_of(
        build_mixture("qwen3_next", **QWEN_NEXT["qwen3_next"]),
        recipe(contract, "per-block", routed=("decode", "verify"), family=TOGETHER),
    ),
    "gpt2": lambda contract: engine_of(build_model("gpt2"), recipe(contract)),
    "bloom": lambda contract: engine_of(build_alibi("bloom"), recipe(contract)),
    "gemma 4": lambda contract: engine_of(
        gemma_models.build_gemma4(), gemma_models.recipe(contract, head={"choose": True})
    ),
    "gemma 4 by argmax": lambda contract: engine_of(
        gemma_models.build_gemma4(),
        gemma_models.recipe(contract, head={"slices": 2, "choose": "argmax"}),
    ),
    "heads that stream": lambda contract: streaming_engine(
        build_model("llama", **NINE),
        streaming_recipe(SCORES, contract, 0 if contract == "shift" else 3),
    ),
}
"""Routed experts and histories; windows; matrices, and several routed experts for a token; rows by
position; distances; caches that layers share; layers with caches of two lengths."""


def growing(contract: str) -> Engine:
    """Windows, whose slots stay, beside full layers in three capacities."""
    tokens = {"verify": 4, "prefill": 8}
    recipe = gemma_models.recipe(contract, context=96, capacities=(32, 64), tokens=tokens)
    return engine_of(gemma_models.build_gemma3(), recipe)


@cache
def zaya() -> Any:
    return zaya_models.build_zaya()


class Models:
    """An engine's programs, as the host calls Core ML's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, shard: str, function: str) -> "Model":
        inputs = self.engine.plan.functions[shard, function].inputs
        return Model(self.engine.open(shard), function, inputs)


class Model:
    def __init__(self, program: Any, function: str, inputs: tuple[Input, ...]) -> None:
        self.program, self.function, self.inputs = program, function, inputs

    def make_state(self) -> Any:
        return self.program.make_state(self.function)

    def predict(self, inputs: dict[str, np.ndarray], state: Any = None) -> dict[str, np.ndarray]:
        for name, value in inputs.items():
            taken = next(i for i in self.inputs if i.name == name)
            kinds = {"fp16": np.float32, "int32": np.int32, "int8": np.int8}
            assert value.dtype == kinds[taken.dtype], (name, value.dtype)
        return self.program.call(
            self.function, inputs, self.make_state() if state is None else state
        )


def write(engine: Engine, folder: Path) -> dict[str, Any]:
    """A contract and its host, without packages."""
    plan, tables = engine.plan, engine.tables
    contract = describe(plan) | {"stop": [], "source": 'a """tiny""" model'}
    for name, table in plan.tables.items():
        if len(contract["tables"][name]) == 1:  # else they are there
            rows = tables.rows(name)[np.arange(table.rows)]
            np.save(folder / contract["tables"][name][0], rows.astype(np.float32))
    for name, values in tables.rotary.items():
        np.save(folder / contract["tables"][f"rotary-{name}"][0], values)
    (folder / "contract.json").write_text(json.dumps(contract))
    (folder / "host.py").write_text(host(contract))
    return contract


def module(folder: Path) -> Any:
    """The host as a module."""
    found = importlib.util.spec_from_file_location("host", folder / "host.py")
    assert found is not None and found.loader is not None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made


def imported(code: str) -> set[str]:
    """The packages that a module imports."""
    nodes = list(ast.walk(ast.parse(code)))
    plain = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return plain | {str(n.module) for n in nodes if isinstance(n, ast.ImportFrom)}


EVERYWHERE = ("zaya", "gemma 4", "heads that stream")
CASES = [(family, contract) for family in EVERYWHERE for contract in CONTRACTS]


@pytest.mark.parametrize(
    ("family", "contract"),
    [
        *CASES,
        *(("gemma 3", contract) for contract in ("shift", "stateful", "stateful-blend")),
        ("qwen3_next", "readonly"),
        ("gpt2", "readonly"),
    ],
)
def test_the_host_gives_the_engines_logits(tmp_path: Path, family: str, contract: str) -> None:
    """A prompt longer than a window, in several calls with padding, and then token by token."""
    engine = FAMILIES[family](contract)
    agree(engine, tmp_path, MOST_LINES + (MATRICES if family == "qwen3_next" else 0))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_hosts_caches_grow(tmp_path: Path, contract: str) -> None:
    contents = agree(growing(contract), tmp_path, MOST_LINES + GROWING)
    assert [one["tokens"] for one in contents["capacities"]] == [32, 64, 96]
    assert "never go back to a smaller one" in document(
        contents | {"memory": dict.fromkeys(MEMORY, 0), "shards": [], "draft_heads": {}}
    )


def test_the_host_keeps_bytes(tmp_path: Path) -> None:
    """Keys and values as int8, with windows and caches that grow; the document says so."""
    cache = {"context": 96, "capacities": [32, 64]}
    recipe = int8_recipe(cache=cache)
    engine = engine_of(gemma_models.build_gemma4(**gemma_models.NO_TIES), recipe)
    contract = agree(engine, tmp_path, MOST_LINES + GROWING)
    assert all(contract["buffers"][f"{name}_scales"][2] == 1 for name in contract["int8"])
    given = {"memory": dict.fromkeys(MEMORY, 0), "draft_heads": {}, "shards": []}
    assert "are int8" in document(contract | given)
    shards = [shard | {"bytes": 1} for shard in contract["shards"]]
    assert "as int8: they are whole numbers" in document(contract | given | {"shards": shards})


def agree(engine: Engine, tmp_path: Path, most_lines: int) -> dict[str, Any]:
    """Compare a host with its engine over a whole context. Returns the contract."""
    contract = write(engine, tmp_path)
    code = (tmp_path / "host.py").read_text()
    assert len(code.splitlines()) <= most_lines
    session, ours = engine.session(), module(tmp_path).Host(tmp_path, Models(engine))
    fed = [int(t) for t in np.random.default_rng(1).integers(1, 100, engine.session().context - 9)]
    for _ in range(9):
        wanted, given = session.feed(fed), ours.feed(fed)
        assert wanted is not None
        finite = np.isfinite(given) & (given > -1e4)
        assert finite.any() and given.argmax() == wanted.argmax()
        np.testing.assert_allclose(given[finite], wanted[finite], rtol=1e-5, atol=1e-5)
        fed = [int(given.argmax())]
    with pytest.raises(ValueError, match="no room"):
        ours.feed([1, 2])
    return contract


def test_a_bundle_through_core_ml(tiny_bundle, tmp_path: Path) -> None:
    """host.py in a process of its own, on the bridge, and transformers' greedy tokens."""
    bundle: Bundle = tiny_bundle(contract="stateful", **VARIANTS["stateful"])
    folder = export_contract(bundle.path, tmp_path / "out")
    prompt = list(range(3, 25))
    command = [sys.executable, "-m", "cetane.bridge", folder / "host.py", *prompt, "--new", "12"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True, env=os.environ,
        cwd=tmp_path,
    )  # fmt: skip
    given = [int(token) for token in done.stdout.split()]
    model, seen = build_model("llama"), list(prompt)
    for token in given:
        with torch.no_grad():
            logits = model(torch.tensor([seen])).logits[0, -1]
        assert logits.max() - logits[token] < 1e-2
        seen.append(token)
    assert len(given) == 12 or int(logits.argmax()) == 0
    long = subprocess.run(
        list(map(str, [*command[:4], *[3] * 65])), capture_output=True, text=True, env=os.environ
    )
    assert long.returncode == 2 and not long.stdout
    assert "a prompt of 65 tokens, for a context of 64" in long.stderr
    if sys.platform != "darwin":
        without = subprocess.run(
            [sys.executable, folder / "host.py", "1"], capture_output=True, text=True, check=False
        )
        assert without.returncode == 1
        assert without.stderr.splitlines()[-1].endswith("python -m cetane.bridge host.py")
        assert "Traceback" not in without.stderr
    assert str(Path(bundle.manifest.source).parent) not in "".join(
        (folder / name).read_text() for name in ("contract.json", "CONTRACT.md", "host.py")
    )
    code = (folder / "host.py").read_text()
    packages = {name.partition(".")[0] for name in imported(code)}
    assert packages == {"argparse", "coremltools", "functools", "json", "numpy", "pathlib"}
    contract = json.loads((folder / "contract.json").read_text())
    figures = contract["memory"]
    assert figures["packages"] == sum(shard["bytes"] for shard in contract["shards"])
    assert figures["peak"] > figures["packages"] + figures["activations"] > 0
    text = (folder / "CONTRACT.md").read_text()
    for shard in contract["shards"]:
        for function in shard["functions"]:
            assert f"### {shard['name']}/{function['name']}" in text
            for port in (*function["inputs"], *function["outputs"], *function["states"]):
                assert f"`{port['name']}`" in text


@pytest.mark.parametrize(
    ("rows", "said"), [("int8", "row = values * scale / 127"), ("int4", "rows in 4 bits")]
)
def test_rows_with_scales(rows: str, said: str, tmp_path: Path) -> None:
    """The host decodes rows as the engine does; of 48 columns, the last block is shorter."""
    recipe = gemma_models.recipe(embedding={"format": rows})
    engine = engine_of(gemma_models.build_gemma4(), recipe)
    contract = agree(with_tables_on_disk(engine, tmp_path), tmp_path, MOST_LINES)
    assert [len(contract["tables"][name]) for name in engine.plan.tables] == [2, 2]
    given = {"memory": dict.fromkeys(MEMORY, 0), "draft_heads": {}, "shards": []}
    assert said in document(contract | given)


def test_activations_by_hand(tiny_bundle) -> None:
    """A head: its largest moment holds the norm's input and result, or more; never its weights."""
    bundle: Bundle = tiny_bundle(contract="readonly", **VARIANTS["readonly"])
    name = bundle.plan.shards[-1].name
    functions = load(bundle.shard(name)).functions
    hidden = bundle.plan.hidden * 2
    assert 2 * hidden <= activation_bytes(functions["decode"]) <= 8 * hidden
    tokens = bundle.plan.modes["prefill"].tokens
    assert activation_bytes(functions["prefill"]) == tokens * activation_bytes(functions["decode"])


def test_a_result_that_nothing_reads_is_soon_forgotten() -> None:
    """At most two values of 200 bytes: `a` beside `unread`, then beside `b`."""
    half = TensorType((1, 100), "fp16")
    ops = tuple(
        Op(kind, "", {"x": (read,)}, tuple(NamedValue(name, half) for name in made))
        for kind, read, made in (
            ("split", "x", ("a", "unread")), ("relu", "a", ("b",)), ("relu", "b", ("y",)),
        )
    )  # fmt: skip
    function = MilFunction("main", {"x": half}, {"y": half}, {}, Body((), ops, ("y",)))
    assert activation_bytes(function) == 400


@pytest.mark.parametrize(
    ("family", "contract", "runs", "hides"),
    [
        ("gemma 3", "readonly", False, False),
        ("gemma 4", "readonly", True, False),  # silent calls leave layers out
        ("gemma 4", "stateful", True, True),
    ],
)
def test_a_host_that_drafts(family: str, contract: str, runs: bool, hides: bool) -> None:
    """What it must do is told where the bundle's calls need it."""
    head = {"files": [], "taps": ["chunk-00"], "steps": 3, "rows": 9, "functions": []}
    given = {"memory": dict.fromkeys(MEMORY, 0), "draft_heads": {"medusa": head}, "shards": []}
    described = describe(FAMILIES[family](contract).plan) | {"source": "", "stop": []}
    text = document(described | given)
    assert ("Run `steps` in every call, those of a prompt too" in text) == runs
    assert ("refused tokens stay in a state" in text) == hides
    assert "\n2. medusa: give" in text and "\n\n| draft head | drafts |" in text


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_page_says_where_padding_must_fit(contract: str) -> None:
    """A graph that writes a state writes its padding too, at every capacity. Its window keeps its
    slots, so there a larger capacity is no way out."""
    described = describe(growing(contract).plan) | {"source": "", "stop": []}
    given = {"memory": dict.fromkeys(MEMORY, 0), "draft_heads": {}, "shards": []}
    text, inside = document(described | given), contract == "stateful"
    said = re.findall(r"not pass the last slot of (\S+): .*, padding too, .* there(.*)[.]", text)
    groups = described["groups"]
    wanted = [(name, "" if group["limited"] else ", or the next capacity")
              for name, group in groups.items()]  # fmt: skip
    assert len(groups) == 2 and said == (wanted if inside else [])
    assert ("holds the end of the call, padding included, and" in text) == inside


def test_a_subset_and_hostile_names(tmp_path: Path) -> None:
    """Rows of a head for some tokens; and a source that would end a docstring or a table."""
    engine = FAMILIES["gemma 3"]("readonly")
    contract = write(engine, tmp_path) | {"rows": [3, 5, 7], "bundle": "", "source": '"""|\n# x'}
    contract["shards"] = [shard | {"bytes": 1} for shard in contract["shards"]]
    contract["draft_heads"] = {}
    contract["memory"] = dict.fromkeys(
        ("packages", "tables", "caches", "states", "call", "activations", "peak"), 1
    )
    assert "self.rows = np.array" in host(contract)
    ast.parse(host(contract))
    assert "___" in document(contract).splitlines()[0]
