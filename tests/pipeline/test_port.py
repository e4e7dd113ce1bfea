"""A port as a function: data comes back, nothing is printed, a red gate is no exception."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import build_model, tiny_recipe
from tests.converting import converted_once
from tests.gates.broken import converting_with, write_one_slot_off
from tests.quantized_folders import save_quantized

from cetane.bundle import Bundle
from cetane.cli.options import parse_changes
from cetane.errors import CetaneError
from cetane.files import silent
from cetane.gates.explain import Explanation
from cetane.gates.limits import Limits, read
from cetane.gates.transformers_files import TransformersFiles
from cetane.pipeline.attempt import PortHistory
from cetane.pipeline.build import build
from cetane.pipeline.port import is_open, mended, next_recipe, port
from cetane.pipeline.request import make_request, read_size
from cetane.schema.changes import decided, override
from cetane.schema.recipe import Recipe, load_recipe, parse_recipe


@pytest.fixture
def small() -> Iterator[Recipe]:
    """The recipe of the smallest build of several shards."""
    content = {
        "name": "small",
        "layout": {"kind": "per-block"},
        "cache": {"context": 32},
        "tokens": {"verify": 0, "prefill": 0},
    }
    with converted_once():
        yield parse_recipe(content, "small")


def test_a_port_returns_data_and_prints_nothing(
    small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path, capfd: Any
) -> None:
    steps: list[str] = []
    target = tmp_path / "not" / "there" / "yet"
    result = port(
        tiny_checkpoint_folder, recipe=small, output=target,
        progress=lambda what, done, total: steps.append(what),
    )  # fmt: skip
    assert capfd.readouterr() == ("", "")
    assert result.passed and result.bundle is not None and result.bundle.path == target
    assert result.gates.keys() == {"ladder", "residency", "golden"}
    assert result.seconds.keys() == {"choose", "build", "ladder", "residency", "golden"}
    assert all(seconds > 0 for seconds in result.seconds.values())
    assert result.plan == result.bundle.plan
    assert result.bundle.gates().keys() == {"ladder", "residency", "golden"}
    assert any(step.startswith("build ") for step in steps)
    assert steps[-1].startswith("golden gate")

    again = port(tiny_checkpoint_folder, recipe=small, output=target)
    assert again.passed and again.gates.keys() == {"golden"}


@pytest.mark.parametrize("kind", ["fp8", "bitsandbytes"])
def test_a_quantized_checkpoint(
    kind: str, small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the scales of its weights, the truth's residual stream would leave fp16."""
    unasked = TransformersFiles(error="another process takes seconds")
    monkeypatch.setattr("cetane.gates.files_read.read_by_transformers", lambda _: unasked)
    save_quantized(kind, build_model(num_hidden_layers=1), tmp_path / "model")
    result = port(tmp_path / "model", recipe=small, output=tmp_path / "bundle")
    assert result.passed and result.bundle is not None
    assert result.bundle.plan.recipe.family == small.family


def test_red_first_shards_are_a_result(
    small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = read().model_dump()
    content["structure"] |= {"relative": 1e-30}
    strict = Limits.model_validate(content)
    monkeypatch.setattr("cetane.gates.limits.read", lambda: strict)
    result = port(tiny_checkpoint_folder, recipe=small, output=tmp_path / "red")
    assert not result.passed and result.bundle is None
    assert result.ladder is not None and not result.ladder.passed
    assert result.as_json()["gates"].keys() == {"ladder", "residency"}
    assert not (tmp_path / "red").exists()


def test_overrides_reach_the_bundle(
    small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    result = port(
        tiny_checkpoint_folder, recipe=small, output=tmp_path / "changed",
        context=64, bits=8, changes={"embedding.format": "int8"},
    )  # fmt: skip
    recipe = result.plan.recipe
    assert (recipe.cache.context, recipe.compression.default) == (64, "int8-per-channel")
    assert recipe.embedding.format == "int8"


@pytest.mark.parametrize("broken", ["tokenizer", "family"])
def test_a_refusal_leaves_nothing(
    broken: str, small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_checkpoint_folder.iterdir():
        if broken == "family" and file.name == "config.json":
            text = file.read_text().replace('"llama"', '"lama"')
            (folder / file.name).write_text(text)
        elif not (broken == "tokenizer" and file.name == "tokenizer.json"):
            (folder / file.name).symlink_to(file)
    with pytest.raises(CetaneError):
        port(folder, recipe=small, output=tmp_path / "out" / "bundle")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("given", "context"), [(None, 256), (64, 64)])
def test_a_recipe_by_name_fits_a_small_model(
    given: int | None, context: int, tiny_checkpoint_folder: Path
) -> None:
    """The default has room for 2,048 tokens, this model for 256."""
    request = make_request(tiny_checkpoint_folder, context=given)
    assert request.planner.plan().recipe.cache.context == context


@pytest.mark.parametrize(
    "setting",
    ["cache.context=64", "cache.context = 64", 'cache."context"=64', "cache={context=64}"],
)
def test_a_context_in_a_setting_is_taken_as_it_is(
    setting: str, tiny_checkpoint_folder: Path
) -> None:
    request = make_request(tiny_checkpoint_folder, changes=parse_changes([setting]))
    assert request.recipe.cache.context == 64
    assert "cache.context" in request.named, "no choice for a chip changes it"


def test_a_context_that_was_asked_for_is_not_changed(tiny_checkpoint_folder: Path) -> None:
    with pytest.raises(CetaneError, match=r"cache\.context = 512"):
        _ = make_request(tiny_checkpoint_folder, context=512).planner


@pytest.mark.parametrize(("bits", "form"), [(16, "fp16"), (8, "int8-per-channel")])
def test_many_bits_in_place_of_few(
    bits: int, form: str, small: Recipe, tiny_checkpoint_folder: Path
) -> None:
    """The recipe of a bundle of few bits says how these are fitted and mixed."""
    few = make_request(tiny_checkpoint_folder, small, bits=4).recipe
    assert few.compression.mix_to == 4.6 and few.compression.method == "gptq"
    many = make_request(tiny_checkpoint_folder, few, bits=bits).recipe.compression
    assert (many.default, many.method, many.mix_to) == (form, "plain", None)
    plain = make_request(tiny_checkpoint_folder, few, changes={"compression.method": "plain"})
    assert plain.recipe.compression.mix_to is None


@pytest.mark.parametrize(("text", "size"), [("300MB", 300_000_000), ("1.25GB", 1_250_000_000)])
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["300", "1KB", "0MB", "-1MB", "300mb", "1e3MB", "9" * 400 + "MB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(CetaneError, match="not a size in MB or GB"):
        read_size(text)


def test_residency_is_a_gate_of_a_named_chip(
    small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """So tiny a model stays on the CPU, which is no port for a chip's ANE."""
    target = tmp_path / "phone"
    refused = port(tiny_checkpoint_folder, recipe=small, output=target, chip="a19-pro")
    assert not refused.passed and refused.bundle is None and refused.golden is None
    assert refused.residency is not None and str(refused.residency.target) == "a19-pro, OS 26"
    assert refused.ladder is None, "residency comes first"
    assert refused.explanation is not None and refused.explanation.cause == "residency"
    assert "tiny-program" in refused.explanation.sentence
    assert not target.exists()
    allowed = port(
        tiny_checkpoint_folder, recipe=small, output=target, chip="a19-pro", os=18,
        require_residency=False,
    )  # fmt: skip
    assert allowed.passed and allowed.residency is not None
    assert str(allowed.residency.target) == "a19-pro, OS 18"
    # A finished bundle is audited for a chip, too.
    again = port(tiny_checkpoint_folder, recipe=small, output=target, chip="m1")
    assert not again.passed and again.golden is not None and again.golden.passed
    assert again.explanation is not None and again.explanation.cause == "residency"


def test_residency_is_required_of_a_chip_alone(small: Recipe, tiny_checkpoint_folder: Path) -> None:
    with pytest.raises(CetaneError, match="of a named chip only"):
        port(tiny_checkpoint_folder, recipe=small, require_residency=True)


def test_a_system_that_does_not_load_the_port_is_refused_before_any_work(
    small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    newer = override(small, {"target.deployment": "iOS26"})
    for recipe, system, named in ((small, 17, "--os 18"), (newer, 18, "--os 26")):
        with pytest.raises(CetaneError, match=f"not {system}") as refused:
            port(tiny_checkpoint_folder, recipe=recipe, output=tmp_path / "port", chip="a13",
                 os=system)  # fmt: skip
        assert named in (refused.value.hint or "")
    assert not [*tmp_path.iterdir()]


def test_fix_takes_the_advice_of_a_red_gate(
    small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """One bit is too few, and the sentence names six; the bundle's recipe says why."""
    target, one_bit = tmp_path / "fixed", {"compression.default": "palette1-kmeans-per-tensor"}
    fixed = port(
        tiny_checkpoint_folder, recipe=small, output=target, changes=one_bit, fix=True
    )  # fmt: skip
    assert fixed.passed and len(fixed.changes) == 1
    said, _, sentence = fixed.changes[0].partition(": ")
    assert said == "compression.default = palette6-kmeans-group32"
    assert "costs more than 'good' allows" in sentence
    written = load_recipe(str(target / "recipe.toml"))
    assert written == fixed.plan.recipe
    assert written.reasons["compression.default"] == sentence

    again = port(tiny_checkpoint_folder, recipe=small, output=target, changes=one_bit, fix=True)
    assert again.passed and again.gates.keys() == {"golden"}, "the same port keeps its bundle"
    assert again.changes == fixed.changes and again.plan == fixed.plan
    with pytest.raises(CetaneError, match="another checkpoint or recipe"):
        port(tiny_checkpoint_folder, recipe=small, output=target)


def test_fix_mends_first_shards(tiny_checkpoint_folder: Path, tmp_path: Path) -> None:
    """Graphs that write a wrong slot are refused before the others are built."""
    blend = tiny_recipe("blend", verify=None, context=32, layout={"kind": "per-block"})
    with converting_with(write_one_slot_off, tmp_path / "cache"):
        fixed = port(tiny_checkpoint_folder, recipe=blend, output=tmp_path / "fixed", fix=True)
    assert fixed.passed and fixed.plan.recipe.cache.contract == "readonly"
    said, _, sentence = fixed.changes[0].partition(": ")
    assert said == "cache.contract = readonly"
    assert "a cache or a mask of decode, prefill is wrong" in sentence


ONE_BIT = {"compression.default": "palette1-kmeans-per-tensor"}


def test_a_second_port_to_a_place_is_refused_before_it_chooses(
    small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, chosen = tmp_path / "out", []

    def choices(*_: Any) -> Iterator[Recipe]:
        chosen.append(small)
        with pytest.raises(CetaneError, match=r"is being written by process \d+ .*porting small"):
            port(tiny_checkpoint_folder, recipe=small, output=target)
        yield small

    monkeypatch.setattr("cetane.pipeline.port.resolutions", choices)
    assert port(tiny_checkpoint_folder, recipe=small, output=target).bundle is not None
    assert len(chosen) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no lock is left"


def test_a_red_gate_stays_a_result_where_the_next_choice_is_too_large(
    small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choices(*_: Any) -> Iterator[Recipe]:
        yield override(small, ONE_BIT)
        raise CetaneError("--budget 1MB: the nearest to the model takes 1.1 MB")

    monkeypatch.setattr("cetane.pipeline.port.resolutions", choices)
    red = port(tiny_checkpoint_folder, recipe=small, output=tmp_path / "red", budget="1MB")
    assert red.golden is not None and not red.passed
    assert red.explanation is not None and red.explanation.cause == "compression"
    assert red.refused == "--budget 1MB: the nearest to the model takes 1.1 MB"
    assert red.as_json()["refused"] == red.refused and not red.changes
    assert red.bundle is not None and red.bundle.gates()["golden"]["passed"] is False


def test_advice_beyond_the_budget_is_not_taken(
    small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    plan = make_request(tiny_checkpoint_folder, small, changes=ONE_BIT).planner.plan()
    budget = f"{(plan.weight_bytes + plan.embedding_bytes + 1) / 1e6:.6f}MB"
    red = port(
        tiny_checkpoint_folder, recipe=small, output=tmp_path / "red", changes=ONE_BIT, fix=True,
        budget=budget,
    )  # fmt: skip
    assert not red.passed and red.bundle is not None and not red.changes
    assert red.refused is not None and "what the gate advises takes" in red.refused


def test_a_bundle_that_an_earlier_port_mended_holds_the_budget(
    small: Recipe, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """It was built of a larger recipe than the one that is asked for."""
    target, request = tmp_path / "out", make_request(tiny_checkpoint_folder, small, changes=ONE_BIT)
    plan = request.planner.plan()
    bundle = build(request.checkpoint, small, target, silent)
    PortHistory(first=request.recipe, changes=("six bits",)).keep(bundle)
    budget = f"{(plan.weight_bytes + plan.embedding_bytes + 1) / 1e6:.6f}MB"
    with pytest.raises(CetaneError, match=f"--budget {budget}: the bundle there takes"):
        port(tiny_checkpoint_folder, recipe=small, output=target, changes=ONE_BIT, budget=budget)
    assert Bundle(target).digest == bundle.digest


SIX_BITS = Explanation(
    cause="compression", where="", sentence="It costs too much.",
    changes={"compression.default": "palette6-kmeans-group32"},
)  # fmt: skip


def test_a_value_that_the_user_named_is_not_changed_without_fix(
    small: Recipe, tiny_checkpoint_folder: Path
) -> None:
    """Not even if the recipe comes from a bundle, where cetane once chose another value."""
    key = "compression.default"
    chosen = decided(small, {key: "palette6-kmeans-group32"}, {key: "six bits are good"})
    named = make_request(tiny_checkpoint_folder, chosen, changes=ONE_BIT)
    assert not named.recipe.reasons
    assert next_recipe(named, SIX_BITS, iter(()), [named.recipe], fix=False) is None
    after_fix = decided(named.recipe, {key: "palette2-kmeans-group32"}, {key: "1 bit is not good"})
    assert not is_open(named, after_fix, SIX_BITS)
    advised = next_recipe(named, SIX_BITS, iter(()), [named.recipe], fix=True)
    assert advised is not None and advised.compression.default == "palette6-kmeans-group32"

    left = make_request(tiny_checkpoint_folder, small, changes={key: "auto"})
    assert is_open(left, after_fix, SIX_BITS), "the user left it to cetane"


def test_another_format_keeps_no_constants_of_the_one_before(
    small: Recipe, tiny_checkpoint_folder: Path
) -> None:
    """And four bits that were asked for stay four bits, unless `--fix` asks for a mend."""
    request = make_request(tiny_checkpoint_folder, small)
    compression = {
        "default": "palette4-kmeans-group8", "method": "gptq",
        "mix_to": 4.6, "fitted": {"file": "f", "sha256": "0" * 64},
    }  # fmt: skip
    content = {"name": "few", "compression": compression}
    recipe = parse_recipe({**content, "reasons": {"compression.default": "the smallest"}}, "here")
    assert not is_open(request, recipe, SIX_BITS)
    after = mended(request, recipe, SIX_BITS).compression
    assert (after.default, after.method) == ("palette6-kmeans-group32", "plain")
    assert after.fitted is None and after.mix_to is None
    plain = {**compression, "method": "plain", "fitted": None, "mix_to": None}
    open_ = parse_recipe({**content, "compression": plain, "reasons": recipe.reasons}, "here")
    assert is_open(request, open_, SIX_BITS)


def test_another_format_keeps_nothing_of_a_mix(small: Recipe, tiny_checkpoint_folder: Path) -> None:
    """Neither its names nor what was said of it; the user's own names and other reasons stay."""
    own = {"compression.names": {"*.o_proj.weight": "int8-per-channel"}}
    request = make_request(tiny_checkpoint_folder, small, bits=4, changes=own)
    mix = {"*.v_proj.weight": "palette6-kmeans-group32", **own["compression.names"]}
    fitted = {"compression.names": mix, "compression.fitted": {"file": "f", "sha256": "0" * 64}}
    said = dict.fromkeys(("compression.default", "embedding.format"), "4.60 bits, not good")
    scaled = {"family.residual_scale": "the stream reaches 1e6"}
    recipe = decided(request.recipe, fitted, said | scaled)
    after = mended(request, recipe, SIX_BITS)
    assert after.compression.names == own["compression.names"]
    assert after.reasons == request.recipe.reasons | scaled | {
        "compression.default": SIX_BITS.sentence
    }
    rows = SIX_BITS.model_copy(update={"changes": {"embedding.format": "fp16"}})
    assert mended(request, recipe, rows).compression.names == mix, "the default stays"
