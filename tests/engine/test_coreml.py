"""The coreml backend on coremltools' own Python, over a stand-in for the part that is macOS.

The stand-in has the interface of coremltools' `_MLModelProxy` and computes with the exact executor.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import coremltools as ct
import coremltools.models._compiled_model as compiled_model
import numpy as np
import pytest

from cetane.bundle import Bundle
from cetane.cli.recompile import recompile
from cetane.doctor import leftovers
from cetane.engine.coreml import CoreMLBackend
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.open import open_engine
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.mil import TensorState, load
from cetane.mil.executor import Executable

PROMPT = [7, 250, 31, 99, 4, 180, 66, 12, 5, 201, 43]


class Proxy:
    """`_MLModelProxy`, as far as the backend uses it."""

    made: list["Proxy"]
    compiled: list[str]

    @classmethod
    def compileModel(cls, package: str) -> str:
        target = Path(tempfile.mkdtemp()) / "model.mlmodelc"
        shutil.copytree(package, target)
        cls.compiled.append(package)
        return str(target)

    def __init__(
        self, path: str, units: str, function: str, hints: dict[str, str], asset: Any
    ) -> None:
        assert Path(path).suffix == ".mlmodelc"
        assert hints == {}
        assert asset is None
        program = load(Path(path))
        self.units, self.name = units, function
        self.function = program.functions[function or "main"]
        self.run = Executable(self.function, "fp16")
        self.states: list[TensorState] = []
        self.dtypes: set[np.dtype[Any]] = set()
        self.made.append(self)

    def newState(self) -> TensorState:
        self.states.append(self.run.make_state())
        return self.states[-1]

    def predict(
        self, data: dict[str, np.ndarray], state: TensorState | None
    ) -> dict[str, np.ndarray]:
        assert (state is not None) == bool(self.function.states)
        self.dtypes |= {array.dtype for array in data.values()}
        return self.run(data, state)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Proxy]:
    """A Mac, as far as coremltools can see."""
    proxy = type("Mac", (Proxy,), {"made": [], "compiled": []})
    library = ModuleType("coremltools.libcoremlpython")
    library._MLModelProxy = proxy  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, library.__name__, library)
    monkeypatch.setattr(compiled_model, "_MLModelProxy", proxy)
    for module in (compiled_model, ct.models.utils):
        monkeypatch.setattr(module, "_macos_version", lambda: (15, 0))
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    return proxy


def tokens(engine: Engine) -> list[int]:
    return list(generate(engine.session(), PROMPT, Sampler(), 12))


def test_tokens_are_the_portable_backends(mac: type[Proxy], variant: Bundle) -> None:
    engine = open_engine(variant, "coreml")
    found = tokens(engine)
    assert engine.backend.name == "coreml"
    assert found == tokens(Engine(variant.plan, PortableBackend(variant), variant.tables()))
    half = Engine(variant.plan, PortableBackend(variant, "fp16"), variant.tables())
    assert found == tokens(half)


def test_functions_and_states(mac: type[Proxy], variant: Bundle) -> None:
    """One model a function, named where there are several; one state a shard and session."""
    engine = open_engine(variant, "coreml")
    tokens(engine)
    tokens(engine)
    several = [shard.functions for shard in variant.plan.shards if len(shard.functions) > 1]
    if variant.plan.recipe.tokens.shapes == "range":
        assert not several
        assert {proxy.name for proxy in mac.made} == {""}
    else:
        named = [function.name for functions in several for function in functions]
        assert [proxy.name for proxy in mac.made] == named
    assert {proxy.units for proxy in mac.made} == {"CPU_AND_NE"}
    stateful = [shard for shard in variant.plan.shards if any(f.states for f in shard.functions)]
    assert sum(len(proxy.states) for proxy in mac.made) == 2 * len(stateful)


def test_arrays_are_fp16(mac: type[Proxy], variant: Bundle) -> None:
    """What the engine hands over is fp16 (coremltools itself widens it); caches stay fp16."""
    backend = CoreMLBackend(variant)
    handed: list[np.ndarray] = []
    opened = backend.open

    def open_and_watch(shard: str) -> Any:
        program = opened(shard)
        call = program.call

        def watched(function: str, inputs: dict[str, np.ndarray], state: Any) -> Any:
            handed.extend(inputs.values())
            return call(function, inputs, state)

        program.call = watched  # type: ignore[method-assign]
        return program

    backend.open = open_and_watch  # type: ignore[method-assign]
    session = Engine(variant.plan, backend, variant.tables()).session()
    session.feed(PROMPT)
    assert {array.dtype for array in handed} <= {np.dtype(np.float16), np.dtype(np.int32)}
    assert {array.dtype for array in session.memory.caches.values()} <= {np.dtype(np.float16)}


def test_shards_are_compiled_once(mac: type[Proxy], variant: Bundle, tmp_path: Path) -> None:
    for _ in range(2):
        tokens(open_engine(variant, "coreml"))
    assert len(mac.compiled) == len(variant.plan.shards)
    kept = sorted((tmp_path / "cache/compiled").iterdir())
    assert len(kept) == len(variant.plan.shards)
    assert {path.suffix for path in kept} == {".mlmodelc"}


def test_another_build_is_compiled_again(
    mac: type[Proxy], tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    bundle = tiny_bundle(contract="blend", shapes="range", layout={"kind": "chunks", "chunks": 1})
    tokens(open_engine(bundle, "coreml"))
    copy = shutil.copytree(bundle.path, tmp_path / "copy")
    tokens(open_engine(Bundle(copy), "coreml"))
    assert len(mac.compiled) == len(bundle.plan.shards)
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"name": "tiny"', '"name": "another"'))
    tokens(open_engine(Bundle(copy), "coreml"))
    assert len(mac.compiled) == 2 * len(bundle.plan.shards)


def test_an_upgraded_system_compiles_again(
    mac: type[Proxy],
    tiny_bundle: Callable[..., Bundle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By itself when a shard is opened, and ahead of that by `cetane recompile`, which keeps
    nothing; gc finds what is of the other build."""
    bundle = tiny_bundle(contract="blend", shapes="range", layout={"kind": "chunks", "chunks": 1})
    shards = len(bundle.plan.shards)
    for build in ("24G84", "25B78"):
        monkeypatch.setattr("cetane.engine.coreml.os_build", lambda build=build: build)
        tokens(open_engine(bundle, "coreml"))
    assert len(mac.compiled) == 2 * shards
    kept = {path.name for path in (tmp_path / "cache/compiled").iterdir()}
    monkeypatch.setattr("cetane.doctor.os_build", lambda: "25B78")
    monkeypatch.setattr("cetane.doctor.Path.home", lambda: tmp_path)
    old = [item for item in leftovers() if "compiled" in item.why]
    assert {item.path.name for item in old} == {name for name in kept if "24G84" in name}

    recompile(bundle.path, json=True)
    assert len(mac.compiled) == 3 * shards
    assert {path.name for path in (tmp_path / "cache/compiled").iterdir()} == kept


@pytest.mark.parametrize("version", [(), (14, 6)], ids=["not macOS", "macOS 14"])
def test_other_machines(
    version: tuple[int, ...],
    tiny_bundle: Callable[..., Bundle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = tiny_bundle(contract="blend", shapes="range", layout={"kind": "chunks", "chunks": 1})
    monkeypatch.setattr(ct.models.utils, "_macos_version", lambda: version)
    with pytest.raises(CetaneError, match="needs macOS 15") as error:
        open_engine(bundle, "coreml")
    assert error.value.hint == "elsewhere, cetane run --backend portable runs the bundle"
