"""Points of a tiny model, beside a computation with transformers alone."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.families.recipes import subset_recipe
from tests.tasks.work import Inline

import cetane
from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.compress import Selection, SensitivityFile, parse_format, patterns
from cetane.compress.recipe_file import TextFile
from cetane.compress.sensitivity import SENSITIVITY
from cetane.errors import CetaneError
from cetane.families import Head
from cetane.fitting.fit import Fitter
from cetane.gates.compressions import Judge
from cetane.gates.port import Packaged
from cetane.gates.quality import perplexity
from cetane.gates.residency.target import Target
from cetane.gates.weights import wrong_weights
from cetane.hardware.chips import find_chip
from cetane.perf.predict import Predictor
from cetane.pipeline.build import build
from cetane.pipeline.calibration import resolve_fitted
from cetane.pipeline.compression_choice import check_budget
from cetane.pipeline.request import read_size
from cetane.planner import Encoder, Planner, as_recipe_asks
from cetane.schema.recipe import Recipe, load_recipe
from cetane.sweeps import moments
from cetane.sweeps.basis import Basis
from cetane.sweeps.candidates import Candidate, candidate_of, weights
from cetane.sweeps.grid import load_grid, parse_way, ways_named
from cetane.sweeps.on_chip import predict
from cetane.sweeps.passage import HARM, Passage
from cetane.sweeps.plot import plot
from cetane.sweeps.points import JudgedText, Point, SweptModel, best, pareto
from cetane.sweeps.run import Budget, run_sweep
from cetane.sweeps.sweep import POINTS, Sweep, write_recipe
from cetane.sweeps.tasks import SweepTasks, opened
from cetane.validation import MOST_DRAWN

TEXT = "The rating of how readily a fuel ignites is its cetane number. " * 60
NAME = "palette3-kmeans-group8"
FITTED = f"{NAME}+gptq"
VECTORS = "palette2-weighted-vector4-group16"


@pytest.fixture(scope="module", autouse=True)
def little_text() -> Iterator[None]:
    """Constants are fitted on no more text than a model of 64 channels needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cetane.fitting.fit.SEQUENCES", 24)
        patch.setattr("cetane.fitting.fit.READ", 8)
        patch.setattr("cetane.fitting.human_text.LENGTH", 64)
        yield


@pytest.fixture(scope="module")
def small(recipe: Callable[..., Recipe]) -> Recipe:
    return recipe(verify=None, layout={"kind": "per-layer"}, head={"slices": 2})


@pytest.fixture(scope="module")
def passage(tiny_checkpoint: Checkpoint) -> Passage:
    return Passage.cut("text", TEXT, tiny_checkpoint)


@pytest.fixture(scope="module")
def judge(tiny_checkpoint: Checkpoint, small: Recipe) -> Judge:
    return Judge(tiny_checkpoint, small)


@pytest.fixture(scope="module")
def basis(tiny_checkpoint: Checkpoint, small: Recipe) -> Basis:
    """The model's own basis: what its fp16 weights say is read once."""
    return Basis(tiny_checkpoint, small, lambda *_: None)


@pytest.fixture
def sweep(
    tiny_checkpoint: Checkpoint, small: Recipe, passage: Passage, basis: Basis, tmp_path: Path
) -> Callable[[], Sweep]:
    """A sweep of the tiny model; all that a test makes share a folder, all tests their basis."""
    opened.cache_clear()  # a worker keeps the sweep of its last job, and all tests have one job

    def make() -> Sweep:
        target = Target("m4-max")
        made = Sweep(tiny_checkpoint, small, passage, target, tmp_path / "out", lambda *_: None)
        made.own = basis
        return made

    return make


@pytest.fixture(scope="module")
def truth(tiny_checkpoint_folder: Path) -> Callable[[str], transformers.PreTrainedModel]:
    """transformers' model, its matrices decoded from a format."""

    def load(name: str) -> transformers.PreTrainedModel:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tiny_checkpoint_folder, dtype=torch.float32
        )
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    encoded = parse_format(name).encode(module.weight.numpy())
                    module.weight.copy_(torch.from_numpy(encoded.decode()))
        return model

    return load


def logits_of(model: transformers.PreTrainedModel, tokens: Any) -> torch.Tensor:
    """Log probabilities in windows of the recipe's 64 slots."""
    with torch.inference_mode():
        found = [
            model(torch.tensor([tokens[start : start + 64]])).logits[0]
            for start in range(0, len(tokens), 64)
            if len(tokens[start : start + 64]) > 1
        ]
    return torch.cat([rows[:-1] for rows in found]).double().log_softmax(-1)


def test_a_point_is_what_transformers_says_of_the_decoded_weights(
    sweep: Callable[[], Sweep], passage: Passage, truth: Callable[..., Any]
) -> None:
    point = sweep().way(NAME)
    assert point is not None
    tokens = passage.judged
    p, q = (logits_of(truth(name), tokens) for name in ("fp16", NAME))
    targets = torch.tensor([t for i, t in enumerate(tokens) if i % 64])[:, None]
    assert point.text.tokens == len(targets) == len(p)
    losses = [float(-rows.gather(1, targets).mean()) for rows in (q, p)]
    assert point.perplexity == pytest.approx(np.exp(losses[0]), rel=1e-3)
    assert point.perplexity_ratio == pytest.approx(np.exp(losses[0] - losses[1]), rel=1e-3)
    assert point.kl == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=0.02)
    same = (p.argmax(1) == q.argmax(1)).double().mean()
    assert point.top1 == pytest.approx(float(same), abs=0.01)
    assert point.kl > 0.01  # there is something to compare
    assert set(point.cosines) == {"layer-00", "layer-01"}
    assert all(0.5 < cosine < 0.9999 for cosine in point.cosines.values())
    assert (point.method, point.bits, point.group) == ("kmeans", 3, "8")


@pytest.mark.parametrize("name", [NAME, "int4-per-block32", "palette3-weighted-group16", VECTORS])
def test_a_bundle_is_as_good_as_its_point(
    name: str, sweep: Callable[[], Sweep], tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The decoded constants of a package are those that were judged."""
    work = sweep()
    point = work.way(name)
    assert point is not None
    recipe = load_recipe(str(write_recipe(work, point)))
    bundle = build(tiny_checkpoint, recipe, tmp_path / "bundle", lambda *_: None)
    planner = Planner(tiny_checkpoint, bundle.plan.recipe)
    port = Packaged(bundle, planner, tiny_checkpoint, bundle.tables(), bundle.tokenizer)
    assert not list(wrong_weights(port, tiny_checkpoint))
    found = perplexity(bundle, tiny_checkpoint, list(work.passage.judged), lambda *_: None)
    assert bundle.plan.weight_bytes == point.weight_bytes
    assert found.tokens == point.text.tokens
    assert found.perplexity == pytest.approx(point.perplexity, rel=1e-3)
    assert found.kl == pytest.approx(point.kl, rel=0.02)
    shutil.rmtree(work.folder)  # the bundle holds what an export needs to encode once more
    for one in (Bundle(bundle.path).plan.recipe, load_recipe(str(bundle.path / "recipe.toml"))):
        assert one == bundle.plan.recipe
        Encoder(tiny_checkpoint, one.compression)


def test_a_fitted_point_is_what_its_recipe_ports(
    sweep: Callable[[], Sweep], tiny_checkpoint: Checkpoint, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its channels are turned, its head is as the recipe says, and nothing is fitted twice."""
    work = sweep()
    plain, fitted = work.way(NAME), work.way(FITTED)
    assert plain is not None and fitted is not None
    assert (fitted.name, fitted.method, fitted.bits, fitted.group) == (FITTED, "gptq", 3, "8")
    assert fitted.compression.rotate and fitted.compression.fitted is None
    assert fitted.weight_bytes == plain.weight_bytes
    assert fitted.kl < plain.kl
    assert sweep().way(FITTED) == fitted
    recipe = load_recipe(str(write_recipe(work, fitted)))
    monkeypatch.setattr(Fitter, "__init__", lambda *_: pytest.fail("fitted twice"))
    other = as_recipe_asks(tiny_checkpoint, recipe)
    bundle = build(other, resolve_fitted(other, recipe), tmp_path / "bundle", lambda *_: None)
    found = perplexity(bundle, other, list(work.passage.judged), lambda *_: None)
    assert bundle.plan.weight_bytes == fitted.weight_bytes
    assert found.perplexity == pytest.approx(fitted.perplexity, rel=1e-3)
    assert found.kl == pytest.approx(fitted.kl, rel=0.02)


def test_one_basis_at_a_time_is_in_memory(sweep: Callable[[], Sweep]) -> None:
    work = sweep()
    for name, loaded in ((NAME, work.own), (FITTED, work.rotated), ("int8-per-tensor", work.own)):
        assert work.way(name) is not None
        assert [basis for basis in (work.own, work.rotated) if "judge" in vars(basis)] == [loaded]


def test_sizes_are_the_plans(
    sweep: Callable[[], Sweep], tiny_checkpoint: Checkpoint, small: Recipe
) -> None:
    work = sweep()
    for name in ("fp16", "int4-per-block32", NAME):
        point = work.way(name)
        assert point is not None
        planner = Planner(tiny_checkpoint, work.recipe_of(point.compression))
        assert point.weight_bytes == planner.plan().weight_bytes
        assert work.sizes.of_way(name) + work.sizes.rest == point.weight_bytes
        stored = list(weights(planner))
        size = sum(parse_format(name).nbytes(w.shape) for w in stored)
        assert point.bits_per_weight == pytest.approx(8 * size / sum(w.elements for w in stored))


def test_fp16_is_the_truth(sweep: Callable[[], Sweep]) -> None:
    point = sweep().way("fp16")
    assert point is not None
    assert (point.kl, point.top1, point.perplexity_ratio) == (0, 1, 1)
    assert all(answer.same for answer in point.smoke)
    assert [a.expected is None for a in point.smoke] == [False, False, True]


def stop(*_: Any) -> None:
    """In place of work that a test does not reach."""
    raise KeyboardInterrupt


def test_what_is_known_is_not_judged_again(
    sweep: Callable[[], Sweep], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sweep that was killed goes on where it stopped, and says so."""
    judged = []
    compare = Judge.compare

    def watch(self: Judge, truth: Any) -> Any:
        judged.append(len(truth))
        if len(judged) == 3:
            raise KeyboardInterrupt
        return compare(self, truth)

    monkeypatch.setattr(Judge, "compare", watch)
    names = ["fp16", NAME, "int8-per-channel", "int8-per-tensor"]
    work = sweep()
    with pytest.raises(KeyboardInterrupt):
        for name in names:
            work.way(name)
    path = work.folder / "sweep.jsonl"
    path.write_bytes(path.read_bytes() + b'{"version":1,"key":"cut o')
    judged += [0]  # no more interruptions
    again = sweep()
    found = [again.way(name) for name in names]
    assert len(judged) == 3 + 1 + 2
    assert [point.name for point in found if point] == names
    assert len(path.read_text().splitlines()) == 4
    third = sweep()
    third.release()
    assert [third.way(name) for name in names] == found
    caplog.set_level("INFO", "cetane")
    ways = [*names, "palette8-weighted-group32", "int4-per-channel"]
    monkeypatch.setattr(Sweep, "way", stop)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(third, ways, None, mixing=False)
    assert caplog.messages == [f"an earlier sweep judged 4 of 6 ways in {third.folder}"]
    assert "judge" not in vars(third.own)  # nothing is loaded for what is known


def test_figures_of_other_code_are_measured_anew(
    sweep: Callable[[], Sweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mended format or judge gives others."""
    before = sweep()
    assert before.way(NAME) and before.sensitivities
    monkeypatch.setattr("cetane.sweeps.sweep.code_version", lambda: "another")
    after = sweep()
    assert not after.has_sensitivities
    assert not after.knows(candidate_of(parse_way(NAME), after.planner, None))


def test_other_weights_of_the_same_size_and_date_are_measured_anew(
    tiny_checkpoint_folder: Path, small: Recipe, passage: Passage, tmp_path: Path
) -> None:
    """As from archives whose files all have the same date."""
    folder = tmp_path / "model"

    def unpacked(factor: float) -> Sweep:
        """A sweep of the model in `folder`, its norms' gains multiplied."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny_checkpoint_folder, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] *= factor
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        for path in folder.iterdir():
            os.utime(path, (0, 0))
        target, out = Target("m4-max"), tmp_path / "out"
        return Sweep(open_checkpoint(folder), small, passage, target, out, lambda *_: None)

    work = unpacked(1.0)
    before, key = work.way("fp16"), work.sensitivity_key
    work = unpacked(-1.0)
    after = work.way("fp16")
    assert before and after and before.perplexity != after.perplexity
    assert before.model.fingerprint == after.model.fingerprint
    assert before.model.content != after.model.content and work.sensitivity_key != key


@pytest.mark.parametrize("target", [Target("m1"), Target("m4-max", 18)])
def test_another_target_is_predicted_and_not_judged(
    sweep: Callable[[], Sweep], monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    before = sweep().way(NAME)
    other = replace(sweep(), target=target)
    monkeypatch.setattr(Judge, "__init__", lambda *_: pytest.fail("judged"))
    after = other.way(NAME)
    assert before is not None
    assert after is not None
    assert after.predicted.target == target != before.predicted.target
    assert after.model_dump(exclude={"predicted"}) == before.model_dump(exclude={"predicted"})


def test_sensitivities_are_mean_squares_of_inputs(
    judge: Judge, passage: Passage, truth: Callable[..., Any]
) -> None:
    judge.compress(Selection())
    tokens = passage.calibration[:128]
    found = moments.measure(judge, tokens)
    model = truth("fp16")
    seen: dict[str, list[torch.Tensor]] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, x, path=path: seen.setdefault(f"{path}.weight", []).append(x[0][0])
            )
    logits_of(model, tokens)
    assert found.inputs.keys() == seen.keys()
    for name, inputs in seen.items():
        expected = torch.cat(inputs).double().square().mean(0).numpy()
        np.testing.assert_allclose(found.inputs[name], expected, rtol=5e-3)  # gains are fp16


def test_a_head_that_lacks_tokens(
    tiny_checkpoint: Checkpoint, small: Recipe, passage: Passage, truth: Callable[[str], Any]
) -> None:
    """All tokens that it lacks share the probability that its texts without them had."""
    tokens = passage.judged[:128]
    lacked = sorted({tokens[3], tokens[70], 5})
    ids = np.setdiff1d(np.arange(288), lacked)
    subset = subset_recipe(ids, 288).head.subset
    head = small.head.model_copy(update={"subset": subset})
    judge = Judge(tiny_checkpoint, small.model_copy(update={"head": head}))
    judge.compress(Selection())
    before = list(judge.read(tokens))
    blocks = "int4-per-block32"  # of rows, so a smaller head has the same
    judge.compress(Selection(default=blocks))
    found = judge.compare(before)
    assert subset is not None
    q, p = (predicted(truth(name), tokens, ids, subset.missing) for name in (blocks, "fp16"))
    targets = torch.tensor([t for i, t in enumerate(tokens) if i % 64])[:, None]
    assert set(targets.flatten().tolist()) & set(lacked)
    for value, rows in ((found.perplexity, q), (found.reference, p)):
        assert value == pytest.approx(float((-rows.gather(1, targets)).mean().exp()), rel=1e-3)
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=0.02)


def predicted(model: Any, tokens: Any, ids: np.ndarray, missing: float) -> torch.Tensor:
    """transformers' log probabilities, renormalized over `ids`; the others share `missing`."""
    kept = logits_of(model, tokens)[:, ids].log_softmax(-1)
    rows = torch.full((len(kept), 288), missing / (288 - len(ids)), dtype=torch.float64)
    rows[:, ids] = kept.exp() * (1 - missing)
    return rows.log()


@pytest.mark.parametrize("other", [{"context": 96}, {"compression": {"rotate": True}}])
def test_sensitivities_of_another_window_or_basis_are_measured_anew(
    other: dict[str, Any], tiny_checkpoint: Checkpoint, recipe: Callable[..., Recipe],
    passage: Passage, tmp_path: Path,
) -> None:  # fmt: skip
    def work(wanted: Recipe) -> Sweep:
        here = as_recipe_asks(tiny_checkpoint, wanted)
        return Sweep(here, wanted, passage, Target("m4-max"), tmp_path, lambda *_: None)

    assert work(recipe()).sensitivities.file == SENSITIVITY
    assert work(recipe()).has_sensitivities
    assert not work(recipe(**other)).has_sensitivities


def test_a_text_shorter_than_a_call_has_no_sensitivities(judge: Judge) -> None:
    with pytest.raises(CetaneError, match="too few to measure sensitivities"):
        moments.measure(judge, [1, 2, 3])


def test_mixed_formats_fit_their_size(sweep: Callable[[], Sweep]) -> None:
    work = sweep()
    six, four, three = (work.sizes.of_way(f"palette{bits}-kmeans-group32") for bits in (6, 4, 3))
    sizes = [(six + four) // 2, (four + three) // 2]
    found = [work.point(mix) for mix in work.mixes([*sizes, 10])]
    assert len(found) == 2
    assert list(work.refused.values()) == ["the smallest formats do not fit"]
    for point, size in zip(found, sizes, strict=True):
        assert point.method == "mixed"
        assert point.weight_bytes - work.sizes.rest <= size
        assert len(set(point.compression.names.values())) > 1
        assert work.sizes.of(point.compression) == point.weight_bytes - work.sizes.rest
    assert found[0].kl < found[1].kl
    lines = (work.folder / "layers.jsonl").read_text().splitlines()
    assert len(lines) == 5 * len(load_grid().mixed.formats)  # two layers of two kinds, the head
    again = sweep()
    assert [again.point(mix) for mix in again.mixes(sizes)] == found
    assert len((work.folder / "layers.jsonl").read_text().splitlines()) == len(lines)


def test_a_budget_counts_tables_as_a_port_does(
    sweep: Callable[[], Sweep], tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cetane.sweeps.run.plot", lambda *_: [])
    fp16 = sweep().way("fp16")
    assert fp16 is not None
    whole = fp16.weight_bytes + 288 * 64 * 2  # the embedding, in fp16
    for size, name in ((whole, "fp16"), (whole - 1, NAME)):
        budget = f"{size / 1e6:.6f}MB"
        found = run_sweep(sweep(), ["fp16", NAME], Budget.read(budget), False)
        assert (found.budget_bytes, found.table_bytes) == (size, 288 * 64 * 2)
        assert found.chosen is not None and found.chosen.name == name
        assert found.recipe is not None
        planner = Planner(tiny_checkpoint, load_recipe(str(found.recipe)))
        check_budget(planner, read_size(budget), "the chosen point takes")


@pytest.mark.parametrize("crew", [None, Inline()], ids=["alone", "workers"])
def test_a_mix_that_fails_is_refused_once(
    crew: Inline | None, sweep: Callable[[], Sweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the sweep goes on."""
    mix = Candidate("mixed-8.00", "mixed", None, None, Selection(default="int8-per-channel"))
    measure, failed = Sweep.measure, list[str]()

    def watch(self: Sweep, wanted: Candidate, *rest: Any) -> Point:
        if wanted.name != mix.name:
            return measure(self, wanted, *rest)
        failed.append(wanted.name)
        raise CetaneError("too much for this machine")

    monkeypatch.setattr(Sweep, "measure", watch)
    monkeypatch.setattr(Sweep, "mixes", lambda *_: [mix])
    monkeypatch.setattr(SweepTasks, "judge_ways", lambda *_: None)
    monkeypatch.setattr("cetane.sweeps.run.plot", lambda *_: [])
    found = run_sweep(sweep(), ["fp16"], None, True, crew)
    assert [point.name for point in found.points] == ["fp16"]
    assert found.refused == {mix.name: "too much for this machine"}
    assert failed == [mix.name]


def test_weights_that_a_format_cannot_hold_stay_in_fp16(
    tiny_checkpoint: Checkpoint, small: Recipe
) -> None:
    planner = Planner(tiny_checkpoint, small)
    found = candidate_of(parse_way("palette4-kmeans-group64"), planner, None)
    kept = {name for name, form in found.selection.names.items() if form == "fp16"}
    assert kept == {w.name for w in weights(planner) if w.shape[0] % 64}
    assert any("k_proj" in name for name in kept)


def test_what_a_recipe_keeps_in_fp16_stays(
    tiny_checkpoint: Checkpoint, recipe: Callable[..., Recipe]
) -> None:
    rules = {"default": "int8-per-channel", "types": {"head": "fp16", "mlp": "int8-per-tensor"},
             "names": {"model.layers.0.*": "fp16"}}  # fmt: skip
    planner = Planner(tiny_checkpoint, recipe(compression=rules))
    found = candidate_of(parse_way(NAME), planner, None).selection
    assert (found.types, found.names) == ({"head": "fp16"}, {"model.layers.0.*": "fp16"})
    fitted = candidate_of(parse_way(FITTED), planner, None).selection
    assert not any("vector" in name for name in ways_named(["*"]))  # unmeasured on an ANE
    assert (fitted.types, fitted.names) == (rules["types"], rules["names"])  # as a port of --bits
    assert candidate_of(parse_way("fp16"), planner, None).selection == Selection()


def test_a_method_has_the_options_that_the_recipe_gives_it(
    tiny_checkpoint: Checkpoint, recipe: Callable[..., Recipe]
) -> None:
    rules = {"default": NAME, "method": "tuned", "minutes": 5.0,
             "second_order": {"damping": 0.1, "order": "given"}}  # fmt: skip
    planner = Planner(tiny_checkpoint, recipe(compression=rules))
    wanted = planner.recipe.compression
    for method in ("gptq", "tuned"):
        fitted = candidate_of(parse_way(f"{NAME}+{method}"), planner, None).selection
        assert (fitted.minutes, fitted.second_order) == (5.0, wanted.second_order)
    assert candidate_of(parse_way(NAME), planner, None).selection == Selection(default=NAME)


def test_a_recipe_of_a_sweep_has_its_text_beside_it(
    tiny_checkpoint: Checkpoint, recipe: Callable[..., Recipe], passage: Passage, tmp_path: Path
) -> None:
    """Also of a point that was judged in an earlier sweep, and on another machine."""
    text = tmp_path / "ours" / "words.txt"
    text.parent.mkdir()
    text.write_text("What our users ask.\r\n", encoding="utf-8", newline="")
    named, target = TextFile.of(text), Target("m4-max")
    wanted = recipe(compression={"default": NAME, "method": "gptq", "text": named.model_dump()})
    wanted.compression.find_as(named)
    work = Sweep(tiny_checkpoint, wanted, passage, target, tmp_path / "out", lambda *_: None)
    known = Point.model_construct(
        name=FITTED, bits_per_weight=3.0, perplexity=1.0, perplexity_ratio=1.0,
        compression=Selection.model_validate_json(wanted.compression.model_dump_json()),
        text=JudgedText(name="text", sha256="0" * 64, tokens=1),
    )  # fmt: skip
    written = write_recipe(work, known)
    text.unlink()
    moved = written.parent.rename(tmp_path / "elsewhere") / written.name
    read = load_recipe(str(moved)).compression.text
    assert read is not None
    assert read.read() == "What our users ask.\r\n"


@pytest.mark.parametrize("bits", [3.0, MOST_DRAWN])
def test_a_plot_takes_any_name_and_size(tmp_path: Path, bits: float) -> None:
    """A name is no formula, and its letters may be missing in the font. A line of a stranger's
    folder may hold any number: with a tick for each bit, it took all memory, or failed."""
    point = Point.model_construct(
        name="4 $\\frac$", method="kmeans", group="32", bits_per_weight=bits, weight_bytes=1000,
        kl=0.1, perplexity=9.0, model=SweptModel(source="漢 $\\frac$", fingerprint=""),
        text=JudgedText(name="5 $\\x$ é.txt", sha256="0" * 64, tokens=9),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plot([point], point, tmp_path)
    written = (tmp_path / "sweep.svg").read_text("utf-8")
    assert "漢 $\\frac$: 9 tokens of 5 $\\x$ é.txt" in written and "chosen: 4 $\\frac$" in written


def test_a_plot_shortens_long_names(tmp_path: Path) -> None:
    """A file's name of 255 characters left no room for the axes, which matplotlib told."""
    point = Point.model_construct(
        name="n" * 255, method="kmeans", group="32", bits_per_weight=4.0, weight_bytes=1000,
        kl=0.1, perplexity=9.0, model=SweptModel(source="m" * 255, fingerprint=""),
        text=JudgedText(name="t" * 255, sha256="0" * 64, tokens=9),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plot([point], point, tmp_path)
    written = (tmp_path / "sweep.svg").read_text("utf-8")
    assert all(f"{letter * 30} ..." in written for letter in "nmt")


def test_a_method_leaves_out_what_it_cannot_find(
    tiny_checkpoint: Checkpoint, recipe: Callable[..., Recipe]
) -> None:
    """As in a recipe that a sweep wrote for a mix of weighted palettes."""
    rules = {"default": "fp16", "types": {"head": "palette6-uniform-group8"},
             "names": {"model.layers.0.*": "palette4-weighted-group8", "model.layers.1.*": "fp16"},
             "sensitivity": {"file": "s.safetensors", "sha256": "0" * 64}}  # fmt: skip
    planner = Planner(tiny_checkpoint, recipe(compression=rules))
    fitted = candidate_of(parse_way(FITTED), planner, None).selection
    assert (fitted.types, fitted.names) == ({}, {"model.layers.1.*": "fp16"})


def test_predictions(tiny_checkpoint: Checkpoint, recipe: Callable[..., Recipe]) -> None:
    """Speed is the plan's; residency that of the rules about weights."""
    predictor = Predictor(find_chip("m4-max"))
    for name, rule in (("int4-per-block32", "int4-per-block"), ("int8-per-channel", None)):
        planner = Planner(tiny_checkpoint, recipe(compression={"default": name}))
        found = predict(planner, predictor, Target("m4-max"))
        assert found.decode_ms == predictor.predict(planner, "decode").ms
        assert (rule in found.rules) == (rule is not None)
        assert "int4-per-block" not in found.rules or rule


def test_the_system_decides_where_weights_are_read(
    tiny_checkpoint: Checkpoint, recipe: Callable[..., Recipe]
) -> None:
    """Programs for a newer one run nowhere."""
    predictor = Predictor(find_chip("m4-max"))
    planner = Planner(tiny_checkpoint, recipe(target={"deployment": "iOS26"}))
    older, newer = (predict(planner, predictor, Target("m4-max", os)) for os in (18, 26))
    assert "newer-system" in {*older.rules} - {*newer.rules}


def test_a_text_must_keep_what_is_judged_apart(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(CetaneError, match=r"short: \d+ tokens are too few for a sweep"):
        Passage.cut("short", "a b c", tiny_checkpoint)
    found = Passage.cut("text", TEXT, tiny_checkpoint)
    tokens = tiny_checkpoint.tokenizer.encode(TEXT)
    assert len(found.calibration) >= HARM
    assert (*found.calibration, *found.judged) == tuple(tokens[: 512 + 1024])


def point(name: str, size: int, kl: float) -> Point:
    return Point.model_construct(key=name, name=name, weight_bytes=size, kl=kl)


def test_pareto_and_the_best_for_a_size() -> None:
    points = [point("a", 100, 0.0), point("b", 50, 0.1), point("c", 50, 0.2), point("d", 60, 0.1),
              point("e", 20, 0.9)]  # fmt: skip
    assert [p.name for p in pareto(points)] == ["a", "b", "e"]
    assert [best(points, size) for size in (19, 49, 60, 1000)] == [
        None, points[4], points[1], points[0],
    ]  # fmt: skip


def test_the_grid_and_its_patterns() -> None:
    usual = ways_named([])
    assert usual[0] == "fp16"
    assert len(usual) == len(set(usual)) <= 26
    everything = ways_named(["*"])
    assert set(usual) < set(everything)
    assert all(parse_way(name).name == name for name in everything)
    assert ways_named(["int8-*", "palette1-kmeans-group32"]) == [
        "fp16", *(f"int8-per-{per}" for per in ("channel", "tensor", "block32", "block64")),
        "palette1-kmeans-group32",
    ]  # fmt: skip
    fitted = set(ways_named(["*+gptq"])) - {"fp16"}
    assert {parse_way(name).method for name in fitted} == {"gptq"}
    assert {f"palette{bits}-kmeans-group8+gptq" for bits in (4, 3)} <= fitted & set(usual)
    assert ways_named(["palette4-kmeans-group16+tuned"])[1] == "palette4-kmeans-group16+tuned"
    for wrong in ("palette5-kmeans-group32", f"{NAME}+weighted", f"{NAME}+"):
        with pytest.raises(CetaneError, match="no such format"):
            ways_named([wrong])


def test_a_pattern_matches_what_it_should() -> None:
    mlp = ["model.layers.1.mlp.up.weight", "model.layers.1.mlp.down.weight"]
    assert patterns(mlp, ["model.layers.1.attn.q.weight", "lm_head.weight"]) == [
        "model.layers.1.mlp.*"
    ]
    assert patterns(mlp, ["model.layers.1.mlp.gate.weight"]) == sorted(mlp)
    assert patterns(mlp[:1], mlp[1:]) == mlp[:1]


def test_a_model_with_experts(
    in_memory: Callable[..., Any],
    tiny_model: Callable[..., Any],
    recipe: Callable[..., Recipe],
    tmp_path: Path,
) -> None:
    """Every weight of every family is reached: those of experts, convolutions and cut heads too."""
    config = {"num_hidden_layers": 4, "num_experts": 2, "moe_intermediate_size": 32,
              "router_hidden_size": 16, "pad_token_id": 0}  # fmt: skip
    checkpoint = in_memory(tiny_model("zaya", **config))
    judge = Judge(checkpoint, recipe(verify=None, layout={"kind": "per-block"}))
    tokens = [int(t) for t in np.random.default_rng(1).integers(1, 288, 64)]
    digest = moments.measure(judge, tokens).save(tmp_path / "counted.safetensors")
    counted = SensitivityFile(file="counted.safetensors", sha256=digest)
    counted.find_beside(tmp_path / "recipe.toml")
    before = list(judge.read(tokens))
    for name in ("int8-per-channel", "palette8-weighted-per-tensor"):
        judge.compress(Selection(default=name, sensitivity=counted))
        found = judge.compare(before)
        assert 0 < found.kl < 0.1
        assert min(found.cosines.values()) > 0.99


def test_heads_are_cut(judge: Judge) -> None:
    heads = [p for p in judge.parameters if isinstance(p.block, Head) and p.weight.kind]
    assert len(heads) == 2


def test_workers_judge_what_one_process_judges(
    sweep: Callable[[], Sweep], tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe,
    passage: Passage,
) -> None:  # fmt: skip
    names = ["fp16", "int8-per-channel", FITTED, "palette4-weighted-group8"]
    alone, folder = sweep(), tmp_path / "by-workers"
    shared = Sweep(tiny_checkpoint, small, passage, Target("m4-max"), folder, lambda *_: None)
    workers = Inline()
    SweepTasks(shared, workers).judge_ways(names, mixing=False)
    assert workers.performed == ["sensitivities", *names]
    assert not vars(shared.own).keys() & {"judge", "answers"}  # it judged nothing itself
    for name in names:
        mine, theirs = alone.way(name), shared.way(name)
        assert mine is not None and theirs is not None
        differing = {"seconds", "compression"}
        assert mine.model_dump(exclude=differing) == theirs.model_dump(exclude=differing)
    again = Inline()
    SweepTasks(shared, again).judge_ways(names, mixing=False)
    assert not again.performed
    assert sorted(path.name for path in folder.iterdir()) == ["sensitivity.safetensors", POINTS]


@pytest.mark.parametrize("name", ["tasks", "tasks/objects", "tasks/results"])
def test_a_strangers_sweep_writes_nothing_elsewhere(
    name: str, tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, passage: Passage
) -> None:
    """Results of workers were put where a link of the folder led."""
    folder, theirs = tmp_path / "sweep", tmp_path / "theirs"
    theirs.mkdir()
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(theirs)
    work = Sweep(tiny_checkpoint, small, passage, Target("m4-max"), folder, lambda *_: None)
    with pytest.raises(CetaneError, match=r"cannot write .*/tasks: there are links in it \(move"):
        SweepTasks(work, Inline()).judge_ways(["fp16"], mixing=False)
    assert not list(theirs.iterdir()) and (folder / name).is_symlink()


def test_a_bundle_takes_no_files_of_a_sweep(tmp_path: Path) -> None:
    """With them it was refused ever after: they are not in its manifest."""
    (tmp_path / "manifest.json").touch()
    with pytest.raises(CetaneError, match="is a bundle, which holds no files of a sweep"):
        cetane.sweep("model", output=tmp_path)
