"""Gates of a head that lacks tokens: the port is judged, and what the lack costs is reported."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.conftest import tiny_recipe
from tests.converting import converted_once
from tests.families.recipes import subset_recipe

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.errors import CetaneError
from cetane.gates import metrics
from cetane.gates.golden import golden
from cetane.gates.ladder import ladder
from cetane.gates.quality import perplexity
from cetane.gates.static import static_checks
from cetane.pipeline.build import build
from cetane.planner import Planner
from cetane.schema.recipe import Recipe, load_recipe
from cetane.schema.subset import as_ranges

TOKENS = [int(t) for t in np.random.default_rng(9).integers(1, 288, 97)]
LACKED = [257, 260, 261, 270, 287]
IDS = np.setdiff1d(np.arange(288), LACKED)


def recipe(folder: Path, ids: np.ndarray, **head: object) -> Recipe:
    """Decoding and prefill, with a subset for the tiny folder's tokenizer."""
    made = subset_recipe(ids, 288).head.subset
    assert made is not None
    subset = made.model_dump() | {
        "tokenizer": open_checkpoint(folder).tokenizer.digest,
        "held_out": [{"name": "t", "sha256": "0" * 64, "tokens": 98, "covered": 95}],
    }
    layout = {"kind": "chunks", "chunks": 1}
    return tiny_recipe(verify=None, layout=layout, head={"slices": 2, "subset": subset} | head)


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    target = tmp_path_factory.mktemp("subset") / "bundle"
    wanted = recipe(tiny_checkpoint_folder, IDS)
    with converted_once():
        return build(open_checkpoint(tiny_checkpoint_folder), wanted, target, lambda *_: None)


def test_the_bundle_holds_those_rows_alone(bundle: Bundle, truth: torch.nn.Module) -> None:
    """Of the checkpoint, in the order of the tokens; and its hash covers which they are."""
    heads = [shard for shard in bundle.plan.shards if shard.kind == "head"]
    assert [s.weight_bytes for s in heads] == [2 * 64 * (rows + 1) for rows in (128, 155)]
    engine = Engine(bundle.plan, PortableBackend(bundle, "fp16"), bundle.tables())
    with torch.inference_mode():
        expected = truth(torch.tensor([TOKENS[:40]])).logits[0].numpy()
    found = engine.session().feed(TOKENS[:40], "all")
    assert found is not None
    assert metrics.cosine(found[:, IDS], expected[:, IDS]).min() > 0.9999
    assert (found[:, LACKED] == -np.inf).all()
    assert (
        '"tokens": "0-256 258-259 262-269 271-286"' in (bundle.path / "manifest.json").read_text()
    )


def test_the_bundles_own_recipe_is_the_plans(bundle: Bundle) -> None:
    """The tokens lie beside it, in a file of the manifest."""
    bundle.verify()
    assert load_recipe(str(bundle.path / "recipe.toml")) == bundle.plan.recipe
    assert "subset.json" in bundle.manifest.files


def test_perplexity_by_hand(
    bundle: Bundle, checkpoint: Checkpoint, truth: transformers.PreTrainedModel
) -> None:
    """Of the model with the lacking tokens' probability replaced by an even share of 4 / 100."""
    found = perplexity(bundle, checkpoint, TOKENS, lambda *_: None)
    losses, plain, whole, absent, kl = [], [], [], [], []
    for window in (TOKENS[:64], TOKENS[64:]):
        with torch.inference_mode():
            logits = truth(torch.tensor([window])).logits[0, :-1].double()
        p = logits.softmax(-1)
        ours = torch.zeros_like(p)
        ours[:, IDS] = logits[:, IDS].softmax(-1)
        q = ours * 0.96
        q[:, LACKED] = 0.04 / len(LACKED)
        for row, token in enumerate(window[1:]):
            losses.append(-q[row, token].log())
            whole.append(-p[row, token].log())
            if token in IDS:
                plain.append(-ours[row, token].log())
        absent += p[:, LACKED].sum(-1).tolist()
        kl += (p * (p / q).log()).sum(-1).tolist()
    assert found.missing == 0.04
    assert found.perplexity == pytest.approx(float(np.exp(np.mean(losses))), rel=1e-3)
    assert found.reference_perplexity == pytest.approx(float(np.exp(np.mean(whole))), rel=1e-3)
    assert found.covered_perplexity == pytest.approx(float(np.exp(np.mean(plain))), rel=1e-3)
    assert found.covered == pytest.approx(len(plain) / len(losses))
    assert found.absent == pytest.approx(np.mean(absent), rel=1e-2)
    assert found.kl == pytest.approx(np.mean(kl), rel=1e-2)


def test_golden_judges_the_port_and_the_choice_apart(
    bundle: Bundle, checkpoint: Checkpoint, truth: transformers.PreTrainedModel
) -> None:
    found = golden(bundle, checkpoint, lambda *_: None, prompts=0)
    best: list[int] = []
    for name, tokens in found.probes.items():
        if name.startswith("text from"):
            with torch.inference_mode():
                best += truth(torch.tensor([tokens])).logits[0].argmax(-1).tolist()
    for score in found.logits:
        assert score.cosine > 0.9999
        assert score.kl < 1e-3
        assert score.top1 > 0.97
        assert score.best == pytest.approx(np.isin(best, IDS).mean())
        assert 0 < score.absent < 0.1
    (check,) = [check for check in found.checks if "best token in the head" in check.name]
    assert check.interval is not None
    assert check.passed == (check.interval[0] >= check.limit)


def test_a_choice_that_lacks_what_the_model_says_fails(
    bundle: Bundle, checkpoint: Checkpoint, asked: Callable[..., None]
) -> None:
    """By that check and no other: the port is right."""
    asked("quality.good", kl=9, perplexity_ratio=9, top1=0.5, best=1.01)
    found = golden(bundle, checkpoint, lambda *_: None, prompts=0)
    failed = {check.name for check in found.checks if not check.passed}
    assert failed == {"compression, good: best token in the head"}


def test_ladder(bundle: Bundle, checkpoint: Checkpoint) -> None:
    planner = Planner(checkpoint, bundle.plan.recipe)
    packages = {shard.name: bundle.shard(shard.name) for shard in bundle.plan.shards}
    found = ladder(checkpoint, planner, packages)
    assert found.passed
    assert {s.shard for s in found.shards if s.tensor == "logits"} == {"head-0", "head-1"}


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "bundle"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": as_ranges(np.arange(1, 288))}, "without which some texts cannot be written"),
        ({"tokenizer": "1" * 64}, "another tokenizer"),
        ({"vocabulary": 289}, "for 289 tokens"),
    ],
)
def test_a_build_with_the_wrong_subset(
    change: dict[str, object],
    message: str,
    tiny_checkpoint_folder: Path,
    target: Path,
) -> None:
    wanted = recipe(tiny_checkpoint_folder, IDS).model_dump()
    wanted["head"]["subset"] |= change
    with pytest.raises(CetaneError, match=message):
        build(
            open_checkpoint(tiny_checkpoint_folder),
            Recipe.model_validate(wanted),
            target,
            lambda *_: None,
        )


def test_a_bundle_without_the_token_that_ends_a_text(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers could never end. Someone may have written its recipe again."""
    assert static_checks(bundle) == []
    wanted = bundle.plan.recipe.model_dump()
    wanted["head"]["subset"] |= {"tokens": as_ranges(np.setdiff1d(IDS, 0))}
    recipe = Recipe.model_validate(wanted)
    plan = bundle.plan.model_copy(update={"recipe": recipe})
    monkeypatch.setattr(Bundle, "plan", plan)
    (problem,) = static_checks(bundle)
    assert problem.where == "head"
    assert "without which some texts cannot be written, such as 0" in problem.problem
