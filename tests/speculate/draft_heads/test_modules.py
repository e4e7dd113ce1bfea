"""Draft heads: what they see, that they learn, that they are judged aligned, and their files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.matrix_models import QWEN_NEXT
from tests.families.mixture_models import build_mixture
from tests.families.parity import engine_of, tokens
from tests.families.recipes import DECODE
from tests.families.recipes import recipe as routed_recipe
from tests.speculate.lessons import KINDS, STEPS, config, counting, untrained
from torch.nn import functional as F

from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.sampling import Sampler
from cetane.engine.verify import Draft
from cetane.errors import CetaneError
from cetane.families import author as authored
from cetane.speculate.draft_heads import windows as windows_module
from cetane.speculate.draft_heads.acceptance import acceptance, aligned
from cetane.speculate.draft_heads.features import Taps, tapped_shards
from cetane.speculate.draft_heads.modules import load_draft_head, make_draft_head
from cetane.speculate.draft_heads.train import CrossEntropy, devices, gains, train
from cetane.speculate.draft_heads.windows import TOGETHER, Windows, collect, split, windows_of_model
from cetane.speculate.drafter import Drafter
from cetane.speculate.first_tokens import FirstTokens


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., Engine]) -> Engine:
    return tiny_engine()


def test_windows_of_a_model_itself(model: Any) -> None:
    """Against what transformers calls hidden states: entry n is what layer n reads, and the last
    one is normed, so a middle one stands for it."""
    text = torch.tensor([tokens(seed)[:9] for seed in range(280, 282 + TOGETHER)])
    found = windows_of_model(model, [0, 0, 1], text)
    with torch.inference_mode():
        truth = model(text, output_hidden_states=True)
    assert torch.equal(found.tokens, text)
    assert found.features.shape == (TOGETHER + 2, 9, 3, 64)
    assert torch.equal(found.choices, truth.logits.argmax(-1))
    assert torch.allclose(found.features[:, :, 0].float(), truth.hidden_states[1], atol=2e-3)
    assert torch.equal(found.features[:, :, 0], found.features[:, :, 1])
    last = model.model.norm(found.features[:, :, 2].float())
    assert torch.allclose(last, truth.hidden_states[2], atol=2e-3)


@pytest.mark.parametrize("kind", ["phi", "nanochat"])
def test_other_last_norms_are_refused(kind: str) -> None:
    """phi's subtracts a mean, and nanochat's has no gains."""
    checkpoint = InMemoryCheckpoint(build_model(kind))
    with pytest.raises(CetaneError, match="only an RMSNorm with gains"):
        gains(authored(checkpoint.config, "c1t", {}, checkpoint), checkpoint)


def test_hidden_states_are_those_of_the_model(engine: Engine, model: Any) -> None:
    """Of accepted tokens only, whatever calls they came in."""
    ids = tokens(288)
    with torch.inference_mode():
        truth = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    shards = tapped_shards(engine.plan)
    assert shards == ("chunk-00", "chunk-01", "chunk-01")
    taps, found = Taps(engine.plan, shards), []
    session = engine.session(watch=[taps.see], whole=True)
    session.feed(ids[:9])
    found.append(taps.take(session.position))
    assert taps.take(session.position).shape == (0, 3, 64)
    session.evaluate([*ids[9:11], 5, 6])
    session.accept(2)
    found.append(taps.take(session.position))
    session.evaluate([ids[11]])
    session.accept(1)
    session.evaluate(ids[12:16])
    session.accept(4)
    found.append(taps.take(session.position))
    rows = np.concatenate(found)
    assert [len(part) for part in found] == [9, 2, 5]
    assert np.abs(rows[:, 0] - truth[1][0, :16].numpy()).max() < 1e-4
    assert np.array_equal(rows[:, 1], rows[:, 2])
    # transformers' last hidden state is normed: undo nothing, norm ours
    normed = model.model.norm(torch.from_numpy(rows[:, 2])).detach().numpy()
    assert np.abs(normed - truth[2][0, :16].numpy()).max() < 1e-4


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_next"])
def test_hidden_states_behind_routed_experts(kind: str) -> None:
    """Those that a layer hands on, not those before its experts: of one, or of all chosen ones."""
    model = build_mixture(
        kind, **{"num_local_experts": 4} if kind == "mixtral" else QWEN_NEXT[kind]
    )
    routed = routed_recipe("readonly", "per-layer", routed=DECODE)
    routed_engine, ids = engine_of(model, routed), tokens(288)[:12]
    shards = tapped_shards(routed_engine.plan)
    with torch.inference_mode():
        truth = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    taps = Taps(routed_engine.plan, shards)
    session = routed_engine.session(watch=[taps.see], whole=True)
    session.feed(ids[:9])  # eight without routes, then one with
    assert taps.waiting == 9
    first = taps.take(session.position)
    session.evaluate([*ids[9:11], 5, 6])
    session.accept(2)
    rows = np.concatenate([first, taps.take(session.position, session.path)])
    assert np.abs(rows[:, 0] - truth[1][0, :11].numpy()).max() < 1e-4


def test_hidden_states_of_an_accepted_branch(engine: Engine) -> None:
    """Those of the plain text; bit for bit the same whatever the other branches were."""
    found = []
    for refused in (5, 6):
        taps = Taps(engine.plan, tapped_shards(engine.plan))
        session = engine.session(watch=[taps.see], whole=True)
        session.feed([1, 2, 3])
        taps.take(session.position, session.path)
        session.evaluate([4, refused, 9, refused], [-1, 0, 0, 2])
        session.accept_path([0, 2])
        found.append(taps.take(session.position, session.path))
        assert found[-1].shape == (2, 3, 64)
    taps = Taps(engine.plan, tapped_shards(engine.plan))
    engine.session(watch=[taps.see], whole=True).feed([1, 2, 3, 4, 9])
    assert np.allclose(taps.take(5)[3:], found[0], atol=1e-4)
    assert np.array_equal(*found)


@pytest.mark.parametrize("layout", [{"kind": "single"}, {"kind": "per-layer", "head": "last"}])
def test_a_layout_that_keeps_the_last_hidden_state(
    tiny_engine: Callable[..., Engine], layout: dict[str, str]
) -> None:
    """Its head would learn from an earlier layer what the model answers after the last one."""
    with pytest.raises(CetaneError, match=r"the last layer and .* are one shard \(port with layo"):
        tapped_shards(tiny_engine(layout=layout).plan)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn(kind: str) -> None:
    windows, embedding = counting()
    learned, held = split(windows)
    assert (len(learned), len(held)) == (36, 4)
    head = untrained(kind, embedding)
    before = acceptance(head, held, embedding)
    losses: list[str] = []
    train(head, learned, embedding, 150, 1.0, 12, lambda what, *_: losses.append(what), devices())
    after = acceptance(head, held, embedding)
    assert max(before.top1) < 0.3
    assert min(after.top1) > 0.8, after
    assert after.positions == 4 * (24 - STEPS)
    assert float(losses[-1].split()[1]) < 0.5 * float(losses[0].split()[1])


def test_a_text_without_a_judged_draft_has_no_shares() -> None:
    """Nowhere does the text follow the target's choices."""
    windows, embedding = counting()
    strange = Windows(
        windows.features, windows.tokens, (windows.choices + 1) % windows.choices.max()
    )
    judged = acceptance(untrained("medusa", embedding), strange, embedding)
    assert (judged.positions, judged.top1, judged.accepted) == (0, (), ())


def test_training_ends_with_the_time() -> None:
    windows, embedding = counting()
    steps: list[str] = []
    train(untrained("medusa", embedding), windows, embedding, 10**6, 0.005, 8,
          lambda what, *_: steps.append(what), devices())  # fmt: skip
    assert 0 < len(steps) < 10**4


def test_the_evaluation_is_aligned_and_the_seeds_was_not() -> None:
    """A perfect head scores 1. The seed compared the drafts of the last tenth of a text with tokens
    from its start. By that a perfect head scores like a guess (its famous 1.3 %)."""
    random = torch.Generator().manual_seed(1)
    choices = torch.randint(0, 50, (1, 400), generator=random)
    drafts = [choices[:, 1 + k :] for k in range(STEPS)]  # from position i: chosen at i + 1 + k
    assert aligned(drafts, choices).all()
    assert aligned(drafts, choices).shape == (1, 400 - STEPS, STEPS)
    start = 360
    seeds = (drafts[0][0, start:] == choices[0, 1 : 1 + 399 - start]).float().mean()
    assert seeds < 0.1
    late = [choices[:, 2 + k :] for k in range(STEPS)]  # one token off
    assert aligned(late, choices[:, :-1]).float().mean() < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(tmp_path: Path, kind: str) -> None:
    windows, embedding = counting(4)
    head = untrained(kind, embedding)
    head.round()
    head.save(tmp_path / "head.safetensors")
    found = load_draft_head(tmp_path / "head.safetensors")
    assert found.config == head.config
    with torch.inference_mode():
        for one, other in zip(head.teach(windows.features.float(), embedding[windows.tokens]),
                              found.teach(windows.features.float(), embedding[windows.tokens]),
                              strict=True):  # fmt: skip
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "damage", ["none", "text", "no config", "other config", "huge", "missing", "shape", "kind"]
)
def test_files_that_are_no_heads(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "head.safetensors"
    head = make_draft_head(config("medusa"))
    head.save(path)
    tensors, about = load_file(path), head.config.model_dump_json()
    if damage == "none":
        path.unlink()
    elif damage == "text":
        path.write_text("not a head")
    else:
        match damage:
            case "no config":
                about = ""
            case "other config":
                about = about.replace('"steps":3', '"steps":4')
            case "huge":
                about = about.replace('"hidden":16', '"hidden":9999999')
            case "missing":
                del tensors["norm"]
            case "shape":
                tensors["norm"] = torch.ones(17)
            case "kind":
                about = about.replace("medusa", "pickle")
        save_file(tensors, path, {"cetane": about} if about else {})
    with pytest.raises(CetaneError, match="not a draft head"):
        load_draft_head(path)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"eps": float("nan")}, "eps: "),
        ({"eps": float("inf")}, "eps: "),
        ({"eps": -1.0}, "eps: "),
        ({"scale": 1e300}, "scale: "),
        (None, "its metadata has no cetane"),
    ],
)
def test_numbers_that_no_draft_head_has(
    tmp_path: Path, about: dict[str, float] | None, message: str
) -> None:
    """Some were found after the hidden states were collected, in a file that was removed; others
    only by the gate."""
    path = tmp_path / "head.safetensors"
    head = make_draft_head(config("medusa"))
    told = json.dumps(head.config.model_dump() | (about or {}))
    save_file(head.state_dict(), path, {"other": ""} if about is None else {"cetane": told})
    with pytest.raises(CetaneError, match=f"{path}: not a draft head: .*{message}"):
        load_draft_head(path)


def test_hidden_states_are_kept(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection that was stopped goes on with the windows it lacks, damaged ones among them."""
    ids, made = tokens(288) * 3, []
    computed = windows_module.computed_window
    monkeypatch.setattr(
        windows_module, "computed_window", lambda *given: made.append(given) or computed(*given)
    )
    expected = collect(engine, ids, 24, lambda *_: None)
    collect(engine, ids[:48], 24, lambda *_: None, tmp_path)
    assert (len(made), len(list(tmp_path.iterdir()))) == (6, 2)
    save_file({"features": torch.ones(3)}, next(tmp_path.iterdir()))
    found = collect(engine, ids, 24, lambda *_: None, tmp_path)
    assert len(made) == 9
    again = collect(engine, ids, 24, lambda *_: None, tmp_path)
    assert len(made) == 9
    for one in (found, again):
        assert torch.equal(one.features, expected.features)
        assert torch.equal(one.choices, expected.choices)
        assert torch.equal(one.tokens, expected.tokens)


def test_cross_entropy_is_that_of_torch() -> None:
    logits = torch.randn(3, 5, 40, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn(3, 5, 40, dtype=torch.float64).softmax(-1)
    truth = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
    (gradient,) = torch.autograd.grad(2 * truth, logits)
    loss = CrossEntropy.apply(logits, wanted)
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
    assert torch.allclose(torch.autograd.grad(2 * loss, logits)[0], gradient, rtol=1e-6)


def test_first_tokens_of_greedy_answers(engine: Engine) -> None:
    """Always right, always wrong, and silent at every other position."""
    prompt = tokens(288)[:7]
    answer = [*prompt, *generate(engine.session(), prompt, Sampler(), 12)]

    class Known(Drafter):
        def __init__(self, off: int, every: int) -> None:
            super().__init__()
            self.off, self.every = off, every

        def propose(self, most: int) -> Draft:
            at = len(self.tokens)
            return Draft(tuple([(answer[at] + self.off) % 288][: at % self.every == 0]), "known")

    for off, every, right, proposed in ((0, 1, 11, 11), (1, 1, 0, 11), (0, 2, 6, 6)):
        found = FirstTokens(Known(off, every))
        list(generate(engine.session(), prompt, Sampler(), 12, (), found))
        assert (len(found.right), sum(found.proposed), sum(found.right)) == (11, proposed, right)
        assert found.share() == right / 11
        assert found.share(found.proposed) == right / proposed
        assert found.share([False] * 11) is None
