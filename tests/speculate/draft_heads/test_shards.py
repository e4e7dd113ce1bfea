"""Heads as shards: they say what the torch heads say, and generation stays what it is."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.gemma_models import build_gemma3, build_gemma4
from tests.families.gemma_models import recipe as make_recipe
from tests.families.parity import engine_of, in_turn, tokens, truth
from tests.families.recipes import recipe as zaya_recipe
from tests.families.recipes import subset_recipe
from tests.speculate.draft_head_models import (
    STEPS,
    InMemory,
    random_draft_head,
    rollout,
    with_draft_head,
)

from cetane.engine.engine import Engine
from cetane.engine.generate import extend, generate
from cetane.engine.portable import PortableBackend
from cetane.engine.prefixes import Prefixes
from cetane.engine.sampling import Sampler
from cetane.engine.verify import Draft
from cetane.mil import load
from cetane.schema.recipe import Recipe
from cetane.speculate.draft_heads.drafter import drafter_of, open_drafter
from cetane.speculate.draft_heads.features import Taps, tapped_shards
from cetane.speculate.draft_heads.modules import TorchDraftHead
from cetane.speculate.draft_heads.runner import Eagle3Runner, open_runner
from cetane.speculate.draft_heads.train import new_draft_head
from cetane.speculate.draft_heads.windows import collect
from cetane.speculate.drafter import watches
from cetane.speculate.speculator import Speculator
from cetane.speculate.timing import RECENT

pytestmark = pytest.mark.usefixtures("shared_templates")
KINDS = ["medusa", "eagle3"]
FAMILIES = ["llama", "gemma3", "gemma4", "zaya"]


@pytest.fixture(scope="module")
def engines(zaya: Any) -> Callable[[str, str], Engine]:
    """`engines(family, contract)`: authored modules, in shards that hand on hidden states."""
    made: dict[tuple[str, str], Engine] = {}

    def engine(family: str, contract: str) -> Engine:
        key = family, contract
        if key not in made:
            made[key] = engine_of(*model_of(family, contract, zaya))
        return made[key]

    return engine


def model_of(family: str, contract: str, zaya: Any, **gemma: Any) -> tuple[Any, Recipe]:
    """A model of transformers, and a recipe for it."""
    if family == "zaya":
        return zaya, zaya_recipe(contract, "chunks")
    gemmas = {"gemma3": build_gemma3, "gemma4": build_gemma4}
    model = gemmas[family](**gemma) if family in gemmas else build_model(family)
    return model, make_recipe(contract)


class Recording:
    """A drafter, and what it was asked and said."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.said = drafter, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, most: int) -> Draft:
        unread = self.drafter.unread
        draft = self.drafter.propose(most)
        if self.drafter.name == "eagle3" and draft.tokens:  # it has read all but the last token
            assert unread >= 1 and self.drafter.unread == 0
            assert self.said or unread == 1, "it reads a prompt before the first token"
        self.said.append((list(self.drafter.tokens), most, draft))
        return draft


def paths_of(draft: Draft) -> Iterator[tuple[int, ...]]:
    """For each token of a draft, all from the first after the text to it."""
    made: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        made.append((*(made[parent] if parent >= 0 else ()), token))
        yield made[-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_head_knows_its_target(zaya: Any, family: str, kind: str) -> None:
    """What it is taught are the model's own logits, with the offset of its norm and its softcap."""
    model, recipe = model_of(family, "readonly", zaya, final_logit_softcapping=0.5)
    engine = engine_of(model, recipe)
    bundle = InMemory(Path(), engine)
    windows = collect(engine, tokens(engine.plan.vocab), 16, lambda *_: None)
    head = new_draft_head(kind, bundle, InMemoryCheckpoint(model), windows, 40, STEPS)
    expected = truth(model, 16)[:, head.vocabulary]
    with torch.inference_mode():
        found = head.capped(head.target(windows.features[0, :, -1].float())).numpy()
    assert np.abs(expected).max() > 0.1
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()  # features are fp16


def test_a_new_head_for_a_head_of_part_of_the_vocabulary(tmp_path: Path) -> None:
    """It proposes nothing that the target cannot choose, whatever the text says most."""
    model, ids = build_model("llama"), [*range(0, 280, 7), *range(280, 288)]
    engine = engine_of(model, subset_recipe(ids, 288))
    windows = collect(engine, tokens(engine.plan.vocab), 16, lambda *_: None)
    assert not set(windows.tokens.flatten().tolist()) <= set(ids)
    assert set(windows.choices.flatten().tolist()) <= set(ids)
    bundle = InMemory(tmp_path, engine)
    for rows in (8, len(ids), 288):
        head = new_draft_head("medusa", bundle, InMemoryCheckpoint(model), windows, rows, STEPS)
        assert len(head.vocabulary) == min(rows, len(ids))
        assert set(head.vocabulary.tolist()) <= set(ids)


def features_of(engine: Engine, ids: list[int]) -> np.ndarray:
    """`(n, 3, C)` of a text, fed at once."""
    taps = Taps(engine.plan, tapped_shards(engine.plan))
    engine.session(watch=[taps.see], whole=True).feed(ids, "none")
    return taps.take(len(ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "contract"), in_turn(FAMILIES))
def test_drafts_are_those_of_the_torch_head(
    engines: Callable[[str, str], Engine], tmp_path: Path, family: str, contract: str, kind: str
) -> None:
    """In fp32, at every step of a generation, which is token by token the one without drafts."""
    assert_drafts(engines(family, contract), tmp_path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_order_of_axes(tmp_path: Path, kind: str) -> None:
    recipe = make_recipe("readonly", tensor_layout="ct1")
    assert_drafts(engine_of(build_model("llama"), recipe), tmp_path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_the_targets_int8(tmp_path: Path, kind: str) -> None:
    """Its output rows are the target's as they ship; its other matrices are int8 too."""
    compression = {"types": {"head": "int8-per-channel"}}
    model = build_model("llama")
    engine = engine_of(model, make_recipe("readonly", compression=compression))
    bundle = InMemory(tmp_path / "bundle", engine)
    windows = collect(engine, tokens(engine.plan.vocab), 16, lambda *_: None)
    head = new_draft_head(kind, bundle, InMemoryCheckpoint(model), windows, 40, STEPS)
    head.round()
    rows = model.lm_head.weight.detach().half().numpy()[head.vocabulary]
    scale = np.abs(rows).max(1, keepdims=True) / np.float16(127)
    steps = np.rint(rows / scale).astype(np.float32)
    assert np.array_equal(head.output.numpy(), (steps * scale).astype(np.float16))

    assert_drafts(engine, tmp_path, kind, "int8-per-channel")
    shard = bundle.draft_heads()[kind]  # type: ignore[index]
    matrices = [t for t in random_draft_head(kind, bundle).state_dict().values() if t.ndim == 2]
    whole = sum(tensor.numel() for tensor in matrices)
    assert whole < shard.manifest.weight_bytes < 1.2 * whole


def assert_drafts(engine: Engine, folder: Path, kind: str, weights: str = "fp16") -> None:
    bundle = InMemory(folder / "bundle", engine)
    bundle.path.mkdir()
    head = random_draft_head(kind, bundle, weights=weights)
    prompt = tokens(engine.plan.vocab)[:11]
    expected = list(generate(engine.session(), prompt, Sampler(), 16))
    shard = with_draft_head(bundle, head)
    own = open_drafter(shard, bundle, PortableBackend(shard, "fp32"))
    own.unlikely = 0.0  # whole drafts, however unsure
    drafter = Recording(own)
    speculator = Speculator([drafter], STEPS)
    session = speculator.session(engine)
    assert list(generate(session, prompt, Sampler(), 16, (), speculator)) == expected

    features = features_of(engine, [*prompt, *expected][:-1])
    assert len(drafter.said) >= 4
    trees = session.no_trees is None
    for text, most, draft in drafter.said:
        likely = rollout(head, features[: len(text) - 1], text, engine.tables.embedding)
        if not trees:
            best = next(path for path in likely if len(path) == STEPS)
            likely = {path: chance for path, chance in likely.items() if path == best[: len(path)]}
        assert list(paths_of(draft)) == list(likely)[:most], text
    assert any(draft.branches for _, _, draft in drafter.said) == trees
    assert speculator.counters.drafted >= 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", [16, 19])
def test_a_prompt_whose_start_is_known(
    engines: Callable[[str, str], Engine], tmp_path: Path, kind: str, cached: int
) -> None:
    """A server's session holds it: the head drafts as one that reads only what comes after."""
    engine = engines("llama", "readonly")
    bundle = InMemory(tmp_path / "bundle", engine)
    bundle.path.mkdir()
    head = random_draft_head(kind, bundle)
    shard = with_draft_head(bundle, head)
    runner = open_runner(shard, bundle, PortableBackend(shard, "fp32"))
    prompt, prefixes = tokens(engine.plan.vocab)[:19], Prefixes(engine, whole=True)
    expected = list(generate(engine.session(), prompt, Sampler(), 16))
    prefixes.feed(prompt[:cached])
    for _ in range(2):  # each answer has a drafter of its own, and all share the runner
        own = drafter_of(runner)
        own.unlikely = 0.0
        drafter = Recording(own)
        speculator = Speculator([drafter], STEPS)
        fed = prefixes.feed(prompt, watch=watches(engine.plan, [drafter]))
        assert fed.cached >= 16
        speculator.begin(fed.session, prompt)
        said = list(extend(fed.session, fed.logits, Sampler(), 16, (), speculator))
        assert said == expected
        features = features_of(engine, [*prompt, *expected][:-1])[fed.cached :]
        assert len(drafter.said) >= 4
        for text, most, draft in drafter.said:
            seen = text[fed.cached :]
            known = features[: len(seen) - 1]
            likely = list(rollout(head, known, seen, engine.tables.embedding))
            assert list(paths_of(draft)) == (likely[:most] if len(known) else []), text


@pytest.fixture(scope="module")
def eagle(
    engines: Callable[[str, str], Engine], tmp_path_factory: pytest.TempPathFactory
) -> tuple[TorchDraftHead, Eagle3Runner]:
    bundle = InMemory(tmp_path_factory.mktemp("eagle"), engines("llama", "readonly"))
    head = random_draft_head("eagle3", bundle)
    shard = with_draft_head(bundle, head)
    runner = open_runner(shard, bundle, PortableBackend(shard, "fp32"))
    assert isinstance(runner, Eagle3Runner)
    return head, runner


def test_the_time_of_a_draft_is_that_of_the_last_calls(eagle: tuple[Any, Eagle3Runner]) -> None:
    """A trial is no more than a first guess."""
    _, runner = eagle
    assert runner.seconds.keys() == runner.functions.keys()
    for _ in range(RECENT):
        runner.seconds["follow"].add(3.0)
        runner.seconds["draft"].add(1.0)
    assert (runner.times.asking, runner.times.token) == (2.0, 1.0)
    runner.try_out()  # other tests share it


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.tuples(st.integers(1, 14), st.integers(0, 4)), min_size=1, max_size=8))
def test_whatever_is_accepted(
    eagle: tuple[TorchDraftHead, Eagle3Runner], pieces: list[tuple[int, int]]
) -> None:
    """Pieces of any length, after drafts that go on as the text does or not: logits are those of
    `teach`, which sees the whole text at once."""
    head, runner = eagle
    random = torch.Generator().manual_seed(2)
    count = 56
    features = torch.randn(1, count, 3, 64, generator=random)
    ids = torch.randint(0, 288, (count,), generator=random)
    embedding = runner.execution.tables.embedding
    embedded = torch.from_numpy(np.array(embedding[ids.numpy()], np.float32))
    with torch.inference_mode():
        made = head.teach(features, embedded[None])
    rows, text = features[0].numpy(), ids.tolist()
    runner.forget()
    at = 0
    for length, wrong in pieces:
        upto = min(at + length, count - STEPS)
        if upto == at:
            break
        logits = [runner.follow(rows[at:upto], text[at + 1 : upto + 1])]
        logits += [runner.step(token) for token in text[upto + 1 : upto + STEPS]]
        for step, found in enumerate(logits):
            assert np.abs(found - made[step][0, upto - 1].numpy()).max() < 2e-4
        for token in range(min(wrong, runner.room)):
            runner.step(token)
        at = upto


def test_a_draft_ends_with_the_cache(eagle: tuple[TorchDraftHead, Eagle3Runner]) -> None:
    _, runner = eagle
    runner.forget()
    count = runner.memory.groups["kv"].count
    rows = np.zeros((count, 3, 64), np.float32)
    runner.follow(rows[: count - 2], [1] * (count - 2))
    assert runner.room == 2
    runner.step(1)
    runner.step(1)
    assert runner.room == 0
    runner.follow(rows[count - 2 :], [1, 1])
    assert runner.room == 0


def test_functions(eagle: tuple[TorchDraftHead, Eagle3Runner]) -> None:
    """Weights are stored once, a prompt needs no attention, and the package is what the manifest
    says."""
    head, runner = eagle
    program = load(runner.draft_head.shard("eagle3"))
    described = {f.name: f for f in runner.draft_head.manifest.functions}
    assert {name: f.tokens for name, f in described.items()} == {
        "follow": 4, "read": 8, "draft": 1,
    }  # fmt: skip
    for name, function in program.functions.items():
        assert list(function.inputs) == [item.name for item in described[name].inputs]
        assert set(function.outputs) == {item.name for item in described[name].outputs}
    kinds = {name: {op.kind for op in f.ops} for name, f in program.functions.items()}
    assert "softmax" in kinds["follow"]
    assert "softmax" in kinds["draft"]
    assert "softmax" not in kinds["read"]
    tensors = [t for t in head.state_dict().values() if t.is_floating_point()]
    used = sum(2 * t.numel() for name, t in head.state_dict().items()
               if t.is_floating_point() and name != "norm")  # fmt: skip
    assert runner.draft_head.manifest.weight_bytes == used
    weights = runner.draft_head.shard("eagle3") / "Data/com.apple.CoreML/weights/weight.bin"
    assert weights.stat().st_size < 1.1 * sum(2 * t.numel() for t in tensors) + 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_is_unchanged(
    engines: Callable[[str, str], Engine], tmp_path: Path, kind: str
) -> None:
    """A head's drafts are not drawn at random, so a seed gives one text, with and without."""
    engine = engines("llama", "readonly")
    bundle = InMemory(tmp_path, engine)
    shard = with_draft_head(bundle, random_draft_head(kind, bundle))
    drafter = open_drafter(shard, bundle, PortableBackend(shard, "fp32"))
    prompt = tokens(288)[:5]

    def text(speculator: Speculator | None) -> list[int]:
        session = engine.session() if speculator is None else speculator.session(engine)
        return list(generate(session, prompt, Sampler(1.5, seed=3), 40, (), speculator))

    speculator = Speculator([drafter], STEPS)
    assert text(speculator) == text(None)
    assert speculator.counters.drafted > 20
