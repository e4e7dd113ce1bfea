"""Recipes with some values replaced, by dotted key."""

from pathlib import Path

import pytest

from cetane.errors import CetaneError
from cetane.schema.changes import (
    decided,
    load_changed,
    override,
    told_changes,
    value_of,
    without_reasons,
)
from cetane.schema.recipe import load_recipe, parse_recipe

RECIPE = parse_recipe({"name": "test"}, "test.toml")


@pytest.mark.parametrize(
    "key", ["#", "a=1\nb", "a = {} #", "a = 0 #", "a] #", "[a]\nb", "", "a b", "."]
)
def test_what_is_no_key(key: str) -> None:
    with pytest.raises(CetaneError, match="is not a key of a recipe"):
        override(RECIPE, {key: 3})


def test_a_reason_goes_with_its_value_and_with_all_that_it_speaks_of() -> None:
    reasons = {
        "compression.default": "six bits are good", "embedding.format": "six bits are good",
        "family.residual_scale": "residuals are large",
    }  # fmt: skip
    recipe = decided(RECIPE, {}, reasons)
    assert without_reasons(recipe, {"cache.context", "compression.defaults"}) == recipe
    scale = {"family.residual_scale": "residuals are large"}
    assert without_reasons(recipe, {"embedding.format"}).reasons == scale
    assert without_reasons(recipe, {"compression"}).reasons == scale, "a table has its values"
    assert not without_reasons(recipe, {"family", "compression.default"}).reasons


def test_values_by_their_keys() -> None:
    recipe = parse_recipe({"name": "r", "family": {"together": 2}}, "r")
    assert value_of(recipe, "compression.rotate") is False, "files leave this default out"
    assert value_of(recipe, "quality") == "good"
    assert value_of(recipe, "family.together") == 2
    assert value_of(recipe, "family.other") is None
    assert value_of(recipe, "compression.default.other") is None
    assert value_of(recipe, "tokens") == recipe.tokens.model_dump()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("head.subset", r"only a recipe file \(.toml\) can name a file of tokens"),
        ("compression.text", "name a file with its hash: {file = 'a.txt', sha256"),
        ("compression.sensitivity", "name a file with its hash: {file = 'a.txt', sha256"),
    ],
)
def test_a_file_where_a_table_belongs(key: str, message: str) -> None:
    with pytest.raises(CetaneError, match=f"{key}: {message}"):
        override(RECIPE, {key: "a.txt"})


def test_a_file_that_needs_the_changes(tmp_path: Path) -> None:
    """A file whose recipe stands alone is read without them: the caller knows what they change."""
    whole, part = tmp_path / "whole.toml", tmp_path / "part.toml"
    whole.write_text("[tokens]\nverify = 4\n")
    part.write_text("[tokens]\nverify = 128\n")
    change = {"tokens.verify": 2}
    assert load_changed(str(whole), change).tokens.verify == 4
    assert load_changed(str(part), change).tokens.verify == 2
    with pytest.raises(CetaneError, match=r"part\.toml: tokens\.verify: "):
        load_changed(str(part), {"head.slices": 2})


def test_what_differs_from_the_recipe_that_ships() -> None:
    """`cetane info` gives the description of that one, which says nothing of `--bits 16`."""
    shipped = load_recipe("default")
    values = {"compression.default": "fp16", "compression.types": {"a": "fp16"}}
    changed = override(shipped, values | {"cache.context": 64})
    told = "cache.context = 64, compression.default = fp16, compression.types"
    assert told_changes(changed) == told
    assert not told_changes(shipped) and not told_changes(override(RECIPE, values))
