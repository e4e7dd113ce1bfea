"""What a user names, and what follows from it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import build_model, build_tokenizer

from cetane.errors import CetaneError
from cetane.gates.residency.target import Target
from cetane.pipeline.plan import planner_for
from cetane.pipeline.request import check_named_file, make_request
from cetane.planner.weights import format_of
from cetane.schema.streaming import HeadScores, load_scores
from cetane.schema.subset import Subset, load_subset


@pytest.mark.parametrize(
    ("changes", "packages"),
    [({"layout.chunks": 1}, 1), ({"layout.cuts": (1,)}, 2), ({"layout": {"chunks": 1}}, 1)],
)
@pytest.mark.parametrize("target", [None, Target("m4-max")])
def test_named_chunks_need_no_kind(
    changes: Mapping[str, Any], packages: int, target: Target | None, tiny_checkpoint_folder: Path
) -> None:
    """The recipe leaves the layout to cetane: advice such as (layout.chunks) works as it is."""
    request = make_request(tiny_checkpoint_folder, changes=changes)
    plan = planner_for(request, target).plan()
    assert plan.recipe.layout.kind == "chunks"
    assert sum(shard.kind != "head" for shard in plan.shards) == packages


@pytest.mark.parametrize("bits", [None, 4])
def test_minutes_that_nothing_takes(bits: int | None, tiny_checkpoint_folder: Path) -> None:
    changes = {"compression.minutes": 5.0}
    method = "plain" if bits is None else "gptq"
    with pytest.raises(CetaneError, match=f'minutes: only tuning .* is "{method}"'):
        make_request(tiny_checkpoint_folder, bits=bits, changes=changes)
    changes |= {"compression.method": "tuned", "compression.default": "palette4-kmeans-group8"}
    request = make_request(tiny_checkpoint_folder, bits=bits, changes=changes)
    assert request.recipe.compression.minutes == 5.0


@pytest.mark.parametrize("read", [load_scores, load_subset])
def test_a_file_for_recipes_replaces_nothing_else(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    """A bundle lists its files, so another one would spoil it; a model's config is no result."""
    config, earlier = tmp_path / "config.json", tmp_path / "earlier.json"
    config.write_text("{}")
    bundle = tmp_path / "bundle"
    (bundle / "tokenizer").mkdir(parents=True)
    (bundle / "manifest.json").write_text("{}")
    for output, message in (
        (config, "another file is there"),
        (bundle / "new.json", "is inside"),
        (bundle / "gates" / "new.json", "is inside"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(CetaneError, match=message):
            check_named_file(output, read)
    assert config.read_text() == "{}" and not (bundle / "gates").exists()
    found = {
        load_scores: HeadScores(
            source="m", model_type="llama", method="mass", settings={}, layers=((0.5,),)
        ),
        load_subset: Subset(vocabulary=2, tokens="0-1", tokenizer="0" * 64, texts=(), held_out=()),
    }[read]
    earlier.write_text(found.model_dump_json())
    for output in (earlier, tmp_path / "folder" / "new.json"):
        check_named_file(output, read)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("kind", ["auto", "per-layer"])
def test_another_kind_that_is_named_stays(kind: str, tiny_checkpoint_folder: Path) -> None:
    changes = {"layout.kind": kind, "layout.chunks": 2}
    with pytest.raises(CetaneError, match=r"only for the layout 'chunks': layout\.kind = 'chunks'"):
        make_request(tiny_checkpoint_folder, changes=changes)


@pytest.mark.parametrize(
    ("text", "rest", "options"),
    [
        ('cache.format = "int8"', 'target.deployment = "iOS26"',
         {"changes": {"target.deployment": "iOS26"}}),
        ("tokens.prefill = 1024", "cache.context = 2048", {"context": 2048}),
    ],
)  # fmt: skip
def test_a_command_may_complete_a_recipe(
    text: str, rest: str, options: dict[str, Any], tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """The error of the file alone asks for exactly that key. What is still wrong is told."""
    part, whole = tmp_path / "part" / "mine.toml", tmp_path / "whole" / "mine.toml"
    for path, content in ((part, text), (whole, f"{text}\n{rest}")):
        path.parent.mkdir()
        path.write_text(content)
    made = make_request(tiny_checkpoint_folder, str(part), **options).recipe
    assert made == make_request(tiny_checkpoint_folder, str(whole)).recipe
    for others in ({}, {"changes": {"tokens.verify": 4}}):
        with pytest.raises(CetaneError, match=r"mine\.toml: "):
            make_request(tiny_checkpoint_folder, str(part), **others)


@pytest.mark.parametrize(
    ("bits", "default", "mix_to"),
    [(4, "int4-per-channel", None), (4, "palette6-kmeans-group8", None), (2, "fp16", None),
     (4, "palette3-kmeans-group8", 4.6), (2, "palette2-kmeans-vector4-group16", 2.1)],
)  # fmt: skip
def test_few_bits_mix_only_palettes(
    bits: int, default: str, mix_to: float | None, tiny_checkpoint_folder: Path
) -> None:
    """Nobody who names another format wrote `mix_to`: it is no reason to refuse it."""
    request = make_request(
        tiny_checkpoint_folder, bits=bits, changes={"compression.default": default}
    )
    compression = request.recipe.compression
    assert (compression.default, compression.method) == (default, "gptq")
    assert compression.mix_to == mix_to


SOME = """
cache.context = 64
compression.default = "int8-per-channel"
compression.types = {head = "palette6-kmeans-group32", attention = "fp16"}
compression.names = {"model.layers.0.mlp.*" = "int4-per-channel"}
"""


@pytest.mark.parametrize(
    ("recipe", "bits", "changes", "formats"),
    [("default", 16, {}, {"fp16"}),
     ("default", 6, {}, {"palette6-kmeans-group32", "int8-per-channel"}),
     ("default", 16, {"compression.types.head": "int8-per-channel"}, {"fp16", "int8-per-channel"}),
     (SOME, 8, {}, {"int8-per-channel", "fp16"}), (SOME, 16, {}, {"fp16"})],
)  # fmt: skip
def test_no_weight_has_fewer_bits_than_asked(
    recipe: str, bits: int, changes: dict[str, Any], formats: set[str],
    tiny_checkpoint_folder: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """The head of the default recipe stayed at int8; one that the user names does."""
    if recipe == SOME:
        recipe = str(tmp_path / "some.toml")
        Path(recipe).write_text(SOME)
    planner = make_request(tiny_checkpoint_folder, recipe, bits=bits, changes=changes).planner
    weights = [weight for block in planner.blocks for _, weight in block.weights() if weight.kind]
    rules = planner.recipe.compression
    assert {format_of(weight, rules).name for weight in weights} == formats


def test_a_mix_that_is_named_is_refused_for_other_formats(tiny_checkpoint_folder: Path) -> None:
    changes = {"compression.default": "int4-per-channel", "compression.mix_to": 4.6}
    with pytest.raises(CetaneError, match="mix_to: a mix is of palettes"):
        make_request(tiny_checkpoint_folder, bits=4, changes=changes)


def test_a_method_without_a_format_to_fit_is_refused_with_the_plan(
    tiny_checkpoint_folder: Path,
) -> None:
    """`cetane plan` named a port as the next step, which refused it."""
    changes = {"compression.method": "gptq", "compression.default": "int8-per-channel"}
    request = make_request(tiny_checkpoint_folder, changes=changes)
    with pytest.raises(CetaneError, match=r'"gptq" fits palettes .* no weight has such a format'):
        assert request.planner


def test_few_bits_say_where_channels_stay(tiny_checkpoint_folder: Path, tmp_path: Path) -> None:
    build_model("mixtral", num_local_experts=4).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    said = make_request(tmp_path, bits=4).recipe.reasons
    assert "no channels of this model can be turned" in said["compression.rotate"]
    dense = make_request(tiny_checkpoint_folder, bits=4).recipe
    assert dense.compression.rotate and not dense.reasons
    named = make_request(tmp_path, bits=4, changes={"compression.rotate": False})
    assert not named.recipe.reasons


@pytest.mark.parametrize(
    ("options", "prefill"),
    [
        ({}, 64),
        ({"context": 32}, 32),
        ({"changes": {"cache.capacities": (32, 64), "cache.context": 96}}, 32),
        ({"recipe": "zaya-int8", "context": 32}, 32),
        ({"recipe": "zaya-exp31", "context": 32}, None),
        ({"context": 32, "changes": {"tokens.prefill": 16}}, 16),
    ],
)
def test_a_prefill_that_nobody_names_fits_the_caches(
    options: dict[str, Any], prefill: int | None, tiny_checkpoint_folder: Path
) -> None:
    assert make_request(tiny_checkpoint_folder, **options).recipe.tokens.prefill == prefill


def test_a_model_of_few_positions_has_a_prefill_that_fits(tmp_path: Path) -> None:
    build_model("llama", max_position_embeddings=33).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    request = make_request(tmp_path)
    assert (request.recipe.cache.context, request.recipe.tokens.prefill) == (32, 32)
    assert request.planner.plan().modes["prefill"].tokens == 32


@pytest.mark.parametrize("changes", [{"tokens.prefill": 48}, {"tokens": {"prefill": 48}}])
def test_a_prefill_that_somebody_names_stays(
    changes: dict[str, Any], tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    message = r"48 tokens does not fit a context of 32: tokens\.prefill = 32 is the most"
    with pytest.raises(CetaneError, match=message):
        make_request(tiny_checkpoint_folder, context=32, changes=changes)
    named, silent = tmp_path / "named.toml", tmp_path / "silent.toml"
    named.write_text("tokens.prefill = 48")
    with pytest.raises(CetaneError, match=message):
        make_request(tiny_checkpoint_folder, str(named), context=32)
    silent.write_text("tokens.verify = 4")
    assert make_request(tiny_checkpoint_folder, str(silent), 32).recipe.tokens.prefill == 32
