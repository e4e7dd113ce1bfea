"""What a recipe leaves to cetane: the smallest compression that is as good as it promises."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.families.recipes import subset_recipe

from cetane.bundle.rows import ROW_FORMATS
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.compress import parse_format
from cetane.errors import CetaneError
from cetane.files import silent
from cetane.fitting import fit, human_text
from cetane.gates.limits import Limits, read
from cetane.pipeline import candidate_judge
from cetane.pipeline.calibration import resolve_fitted
from cetane.pipeline.candidate_judge import CandidateJudge
from cetane.pipeline.compression_choice import Harms, check_budget, resolutions, resolve_recipe
from cetane.pipeline.judgement import MARGIN, Judgement
from cetane.pipeline.request import Request, make_request, read_size
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe, load_recipe, recipe_files
from cetane.store.settings import using

pytestmark = pytest.mark.usefixtures("own_cache")
SMALL, LARGE = "palette6-kmeans-group32", "int8-per-channel"


@pytest.fixture
def recipe() -> Recipe:
    """The default, for a model of 256 positions."""
    return override(load_recipe("default"), {"cache.context": 256})


@pytest.fixture
def promise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], None]:
    """`promise(kl)`: what the quality `good` allows. What was judged by other limits is unknown."""

    def change(kl: float) -> None:
        monkeypatch.setenv("CETANE_CACHE", str(tmp_path / f"cache-{kl}"))
        content = read().model_dump()
        content["quality"]["good"] |= {"kl": kl, "top1": 0.01, "perplexity_ratio": 100.0}
        changed = Limits.model_validate(content)
        monkeypatch.setattr("cetane.gates.limits.read", lambda: changed)

    return change


def size(checkpoint: Checkpoint, recipe: Recipe) -> int:
    plan = Planner(checkpoint, recipe).plan()
    return plan.weight_bytes + plan.embedding_bytes


def kl_of_hugging_face(folder: Path, recipe: Recipe, tokens: tuple[int, ...]) -> float:
    """Mean KL of transformers' model with weights encoded and decoded, from the same in fp16."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def log_probabilities() -> torch.Tensor:
        with torch.inference_mode():
            windows = torch.tensor(tokens).reshape(2, 128)
            return model(windows).logits[:, :-1].double().log_softmax(-1)

    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    p = log_probabilities()
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        if name == "model.embed_tokens.weight":
            form = ROW_FORMATS[recipe.embedding.rows]
            decoded = form.decode(form.encode(parameter.data.numpy()))
            parameter.data = torch.from_numpy(decoded).float()
            continue
        kind = "head" if name == "lm_head.weight" else "any"
        weights = recipe.compression.format_for(name, kind)
        halves = [parameter.data] if kind == "any" else list(parameter.data.tensor_split([128]))
        parts = [weights.encode(half.half().numpy()).decode() for half in halves]
        parameter.data = torch.from_numpy(np.concatenate(parts)).float()
    q = log_probabilities()
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_the_smallest_that_holds_is_taken(tiny_checkpoint: Checkpoint, recipe: Recipe) -> None:
    chosen = resolve_recipe(tiny_checkpoint, recipe)
    assert chosen.compression.default == SMALL
    assert chosen.compression.types == {"head": LARGE}, "what the recipe names stays"
    assert chosen.embedding.format == "int8" and chosen.layout.kind == "chunks"
    assert chosen.reasons.keys() == {"compression.default", "embedding.format"}
    assert "KL" in chosen.reasons["compression.default"]
    assert resolve_recipe(tiny_checkpoint, chosen) == chosen


def test_a_head_that_lacks_tokens_is_compressed_as_others(
    tiny_checkpoint: Checkpoint, recipe: Recipe
) -> None:
    """What it loses by them is its subset's, and no format's."""
    subset = subset_recipe(np.arange(0, 288, 2), 288).head.subset
    head = recipe.head.model_copy(update={"subset": subset})
    chosen = resolve_recipe(tiny_checkpoint, recipe.model_copy(update={"head": head}), silent)
    assert chosen.compression.default == SMALL
    assert "not good" not in chosen.reasons["compression.default"]


def test_weights_that_the_smallest_does_not_divide(
    tiny_checkpoint_folder: Path, tmp_path: Path, recipe: Recipe
) -> None:
    """Heads of 20 channels: projections of 80 and 40 stay in int8, and the plan says so before."""
    folder = tmp_path / "uneven"
    shutil.copytree(tiny_checkpoint_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = transformers.AutoConfig.from_pretrained(folder)
    config.head_dim = 20
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    assert Planner(checkpoint, recipe).plan().weight_bytes
    chosen = resolve_recipe(checkpoint, recipe)
    assert chosen.compression.default == SMALL
    assert chosen.compression.names == {f"*.self_attn.{name}_proj.weight": LARGE for name in "kqv"}
    assert f"{LARGE} for weights that it does not divide" in chosen.reasons["compression.default"]
    assert size(checkpoint, recipe) == size(checkpoint, chosen)
    with pytest.raises(CetaneError) as refused:
        _ = make_request(folder, changes={"compression.default": SMALL}, context=256).planner
    assert "palette6-kmeans-group16" in str(refused.value.hint)


@pytest.mark.parametrize("kl", [2e-3, 3.5e-4, 1e-9])
def test_what_is_chosen_holds_by_hugging_face(
    kl: float, tiny_checkpoint: Checkpoint, recipe: Recipe, promise: Callable[[float], None],
    tiny_checkpoint_folder: Path,
) -> None:  # fmt: skip
    """And what is smaller does not: there are three steps of a stricter promise."""
    promise(kl)
    choices = list(resolutions(tiny_checkpoint, recipe))
    first, last = choices[0], choices[-1]
    tokens = CandidateJudge(tiny_checkpoint, recipe, silent).tokens
    assert last.compression.default == last.embedding.format == "fp16"
    assert size(tiny_checkpoint, first) <= size(tiny_checkpoint, last)
    if kl > 1e-8:
        assert kl_of_hugging_face(tiny_checkpoint_folder, first, tokens) < kl
    if kl < 2e-3:
        smallest = override(recipe, {"compression.default": SMALL, "embedding.format": "int8"})
        assert kl_of_hugging_face(tiny_checkpoint_folder, smallest, tokens) > MARGIN * kl
        assert first.compression != smallest.compression
        assert "; smaller is not proven good: " in first.reasons["compression.default"]


def test_a_mix_is_between_its_formats(
    tiny_checkpoint: Checkpoint, recipe: Recipe, promise: Callable[[float], None]
) -> None:
    promise(1e-3)
    mixed = next(c for c in resolutions(tiny_checkpoint, recipe) if c.compression.names)
    assert set(mixed.compression.names.values()) == {LARGE}
    sizes = [size(tiny_checkpoint, override(recipe, {"compression.default": name}))
             for name in (SMALL, LARGE)]  # fmt: skip
    assert sizes[0] < size(tiny_checkpoint, mixed) < sizes[1]


@pytest.fixture
def four_bits(
    tiny_checkpoint_folder: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> Request:
    """`--bits 4` of the tiny model."""
    monkeypatch.setattr(fit, "SEQUENCES", 16)
    monkeypatch.setattr(human_text, "LENGTH", 32)
    # palettes of a tiny model take bits of their own
    wanted = {"compression.mix_to": 8.0, "compression.rotate": False}
    return make_request(tiny_checkpoint_folder, recipe, bits=4, changes=wanted)


@pytest.fixture
def shared_fits(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants of `four_bits` are fitted once: they do not depend on what is promised."""
    for module in ("cetane.compress.fitted", "cetane.fitting.fit"):
        monkeypatch.setattr(f"{module}.folder", lambda: run_folder / "fits of four bits")


def divergence(recipe: Recipe, checkpoint: Checkpoint) -> float:
    """The KL of a recipe on the text that a port chooses by; it differs from processor to
    processor."""
    judge = CandidateJudge(checkpoint, recipe, silent)
    truth = judge.truth
    judge.model.compress(recipe.compression)
    judge.model.store_rows(recipe.embedding.rows)
    return judge.compare(truth).mean("kl")


@pytest.mark.usefixtures("shared_fits")
def test_few_bits_that_fall_short_get_more_where_errors_cost_most(
    four_bits: Request, promise: Callable[[float], None]
) -> None:
    checkpoint, asked = four_bits.checkpoint, four_bits.recipe
    promise(1.05 * divergence(resolve_fitted(checkpoint, asked), checkpoint))  # less than a fifth
    mixed = next(resolutions(checkpoint, asked))
    assert mixed.compression.names
    six = override(
        mixed, {"compression.names": {}, "compression.default": "palette6-kmeans-group8"}
    )
    assert size(checkpoint, mixed) < size(checkpoint, six)
    assert " bits a weight (6 for " in mixed.reasons["compression.default"]
    assert "smaller is not proven good: palette4" in mixed.reasons["compression.default"]


@pytest.mark.usefixtures("shared_fits")
def test_too_few_bits_for_a_mix_are_not_passed_over_in_silence(
    four_bits: Request, promise: Callable[[float], None]
) -> None:
    promise(1e-9)
    small = override(four_bits.recipe, {"compression.mix_to": 4.01})
    (last,) = resolutions(four_bits.checkpoint, small)
    assert "; no mix: none of at most 4.01 bits" in last.reasons["compression.default"]
    with pytest.raises(CetaneError, match=r"mix_to: 4 bits a weight hold no mix, .*than 4"):
        override(four_bits.recipe, {"compression.mix_to": 4.0})


@pytest.mark.usefixtures("shared_fits")
def test_a_promise_that_no_mix_holds_leaves_the_most_bits_that_a_mix_may_have(
    four_bits: Request, promise: Callable[[float], None]
) -> None:
    promise(1e-9)
    (last,) = resolutions(four_bits.checkpoint, four_bits.recipe)
    assert all(name.startswith("palette6") for name in last.compression.names.values())
    reason = last.reasons["compression.default"]
    assert reason.index("bits a weight (6 for") < reason.index("), not good: ")
    assert reason.index("), not good: ") < reason.index("; palette4")


def test_a_model_too_large_to_mix_says_so(
    four_bits: Request, promise: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cetane.gates.reference.RESIDENT", 1)
    promise(1e-9)
    (last,) = resolutions(four_bits.checkpoint, four_bits.recipe)
    assert not last.compression.names
    assert "; no mix: what weights cost is predicted" in last.reasons["compression.default"]


def test_a_model_too_large_to_judge_is_not_fitted_first(
    four_bits: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cetane.gates.compressions.installed_memory", lambda: 1)
    monkeypatch.setattr(fit, "Fitter", None)
    with pytest.raises(CetaneError, match="judging compressions takes all weights in fp32"):
        next(resolutions(four_bits.checkpoint, four_bits.recipe))


@pytest.mark.usefixtures("shared_fits")
def test_only_what_is_chosen_is_tuned(
    four_bits: Request, promise: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uniform palettes and smaller mixes are judged as they were rounded: tuning takes minutes."""
    tuned: list[set[str]] = []

    def record(_fitter: Any, _first: Any, formats: Any, *_: Any) -> dict[str, Any]:
        tuned.append({form.name for form in formats.values()})
        return {}

    monkeypatch.setattr(fit.Fitter, "tuned", record)
    promise(1e-9)
    asked = override(four_bits.recipe, {"compression.method": "tuned"})
    (last,) = resolutions(four_bits.checkpoint, asked)
    assert last.compression.method == "tuned"
    assert len(tuned) == 1
    assert set(last.compression.names.values()) <= tuned[0]


@pytest.mark.usefixtures("shared_fits")
def test_rows_that_hold_alone_are_not_blamed_for_few_bits(
    four_bits: Request, promise: Callable[[float], None]
) -> None:
    """Rows of fp16 would take more bytes than the bits that are missing."""
    checkpoint, asked = four_bits.checkpoint, four_bits.recipe
    alone = override(asked, {
        "compression.default": "fp16", "compression.method": "plain", "compression.mix_to": None,
        "embedding.format": "int8",
    })  # fmt: skip
    promise(2 * divergence(alone, checkpoint))
    (last,) = resolutions(checkpoint, asked)
    assert last.embedding.format == "int8"
    assert last.compression.names
    promise(0.5 * divergence(alone, checkpoint))
    (last,) = resolutions(checkpoint, asked)
    assert last.embedding.format == "fp16"


def test_int4_rows_are_judged_as_they_are(
    tiny_checkpoint: Checkpoint, recipe: Recipe, tiny_checkpoint_folder: Path
) -> None:
    tokens = CandidateJudge(tiny_checkpoint, recipe, silent).tokens
    asked = override(recipe, {"compression.default": LARGE, "embedding.format": "int4"})
    wanted = kl_of_hugging_face(tiny_checkpoint_folder, asked, tokens)
    assert divergence(asked, tiny_checkpoint) == pytest.approx(wanted, rel=0.01)


def test_rows_that_break_the_promise_alone_stay_where_a_recipe_names_them(
    tiny_checkpoint: Checkpoint, recipe: Recipe, promise: Callable[[float], None]
) -> None:
    """No weights are blamed for them."""
    promise(1e-9)
    (last,) = resolutions(tiny_checkpoint, override(recipe, {"embedding.format": "int4"}))
    assert (last.embedding.format, last.compression.default) == ("int4", "fp16")
    (refused,) = last.reasons["compression.default"].split("; smaller is not proven good: ")[1:]
    assert refused.startswith("int4 rows alone: ")


def test_plain_constants_are_not_mixed(tiny_checkpoint_folder: Path, recipe: Recipe) -> None:
    plain = make_request(
        tiny_checkpoint_folder, recipe, bits=4, changes={"compression.method": "plain"}
    )
    assert plain.recipe.compression.mix_to is None


def test_two_machines_judge_at_once(
    tiny_checkpoint: Checkpoint, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = CandidateJudge(tiny_checkpoint, recipe, silent)
    monkeypatch.setattr(judge, "stored", lambda *_: None)
    with using(str(tmp_path / "shared")):
        for rest in (1.0, 1.0000001):
            made = Harms(rest=rest, parts=())
            assert judge.kept(Harms, recipe, lambda made=made: made) == made


def test_a_second_port_judges_nothing(
    tiny_checkpoint: Checkpoint, recipe: Recipe, promise: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    promise(1e-4)
    first = resolve_recipe(tiny_checkpoint, recipe)
    monkeypatch.setattr(candidate_judge, "Judge", None)
    assert resolve_recipe(tiny_checkpoint, recipe) == first


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"cache.context": 64}, False),
        ({"cache.format": "int8", "target.deployment": "iOS26"}, False),
        ({"cache.context": 128}, True),  # as many tokens are judged together
        ({"cache.contract": "blend"}, True),
    ],
    ids=["window", "format", "context", "contract"],
)
def test_judgements_are_told_apart_by_the_caches_that_they_are_made_with(
    change: dict[str, Any], same: bool, tiny_checkpoint: Checkpoint, recipe: Recipe
) -> None:
    keys = {CandidateJudge(tiny_checkpoint, one, silent).key(Judgement, one)
            for one in (recipe, override(recipe, change))}  # fmt: skip
    assert (len(keys) == 1) == same


@pytest.mark.parametrize("named", [{"compression.default": "fp16", "embedding.format": "fp16"}])
def test_a_recipe_that_names_its_bits_keeps_them(
    named: dict[str, Any],
    tiny_checkpoint: Checkpoint,
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidate_judge, "Judge", None)
    chosen = resolve_recipe(tiny_checkpoint, override(recipe, named))
    assert chosen.compression.default == chosen.embedding.format == "fp16"
    assert not chosen.reasons


@pytest.mark.parametrize("budget", ["137MB", "8.2MB", "0.0001GB"])
def test_the_size_that_a_refusal_names_is_enough(budget: str) -> None:
    """Also where budget and size are the same whole number of megabytes."""

    class Plan:
        weight_bytes, embedding_bytes = read_size(budget), 12_345

        def plan(self) -> "Plan":
            return self

    planner: Any = Plan()
    with pytest.raises(CetaneError) as caught:
        check_budget(planner, read_size(budget), "it takes")
    asked, needed = re.findall(r"[0-9.]+(?= ?MB)", caught.value.message)
    unit = {"M": 1, "G": 1000}[budget[-2]]
    assert float(asked) == float(budget[:-2]) * unit < float(needed) < float(asked) + 0.2
    check_budget(planner, read_size(f"{needed}MB"), "it takes")


def test_a_budget_that_nothing_fits_is_refused(tiny_checkpoint: Checkpoint, recipe: Recipe) -> None:
    fitting = size(tiny_checkpoint, resolve_recipe(tiny_checkpoint, recipe))
    assert next(resolutions(tiny_checkpoint, recipe, silent, fitting)).reasons
    with pytest.raises(CetaneError, match=r"--budget .* the smallest that is good takes"):
        next(resolutions(tiny_checkpoint, recipe, silent, fitting - 1))
    named = override(recipe, {"compression.default": LARGE, "embedding.format": "fp16"})
    with pytest.raises(CetaneError, match=r"MB: the recipe's formats take [0-9.]+ MB"):
        next(resolutions(tiny_checkpoint, named, silent, 1))


def test_what_is_not_good_is_not_called_good_where_it_is_too_large(
    tiny_checkpoint: Checkpoint, recipe: Recipe, promise: Callable[[float], None]
) -> None:
    promise(1e-9)
    with pytest.raises(CetaneError, match="nothing smaller is proven good, and the nearest to"):
        next(resolutions(tiny_checkpoint, recipe, silent, 1))


def test_a_written_recipe_is_the_same_recipe(
    tiny_checkpoint: Checkpoint, recipe: Recipe, tmp_path: Path
) -> None:
    chosen = resolve_recipe(tiny_checkpoint, recipe)
    for name, write in recipe_files(chosen).items():
        write(tmp_path / name)
    assert load_recipe(str(tmp_path / "recipe.toml")) == chosen


def test_formats_of_a_plan_alone(recipe: Recipe) -> None:
    """What is left open is the smallest that a port tries."""
    assert recipe.compression.format_for("any", "mlp") == parse_format(SMALL)
    assert recipe.embedding.rows == "int8"
