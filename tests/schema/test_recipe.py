"""Recipes: defaults, bounds, and an error that names the key for everything else."""

import re
import tomllib
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from cetane.errors import CetaneError
from cetane.families.options import ResidualOptions
from cetane.schema.recipe import Recipe, load_recipe, parse_recipe, shipped
from cetane.validation import check_keys, parse_json, parse_toml, validated


def parse(**content: Any) -> Recipe:
    return parse_recipe({"name": "test"} | content, "test.toml")


def test_defaults() -> None:
    recipe = parse()
    assert recipe.tensor_layout == "c1t"
    assert (recipe.layout.kind, recipe.layout.chunks) == ("chunks", None)
    assert (recipe.cache.contract, recipe.cache.context) == ("readonly", 512)
    assert recipe.tokens.by_mode() == {"decode": 1, "verify": 8, "prefill": 64}
    assert recipe.head.slices == 1
    assert recipe.compression.default == "fp16"
    assert recipe.target.deployment == "iOS18"


@pytest.mark.parametrize(
    "content",
    [
        {"tensor_layout": "ct1"},
        {"family": {"skip_expert": "identity", "departures": ["no-means"], "unknown": 7}},
        {"layout": {"kind": "per-layer", "routed": ["decode"]}},
        {"layout": {"routed": ["prefill", "decode", "verify"]}},
        *({"layout": {"kind": kind}} for kind in ("per-block", "per-layer", "single", "chunks")),
        {"layout": {"kind": "chunks", "chunks": 1}},
        *({"cache": {"contract": c}} for c in ("readonly", "blend", "shift", "stateful")),
        {"cache": {"context": 64}, "tokens": {"prefill": 64}},
        {"tokens": {"verify": 2, "prefill": 2}},
        {"tokens": {"verify": 64, "prefill": 1024}, "cache": {"context": 1024}},
        {"tokens": {"shapes": "range"}},
        {"head": {"slices": 16}},
        {"compression": {"types": {"mlp": "palette4-kmeans-group32"}}},
        {"compression": {"names": {"model.layers.0.*": "int8-per-tensor"}}},
        {"target": {"deployment": "iOS26"}},
    ],
    ids=str,
)
def test_what_is_asked_for_is_there_and_survives_json(content: dict[str, Any]) -> None:
    recipe = parse(**content)
    dumped = recipe.model_dump(mode="json")
    for key, value in content.items():
        found = dumped[key]
        assert found | value == found if isinstance(value, dict) else found == value
    assert Recipe.model_validate(dumped) == recipe


def test_modes_can_be_left_out() -> None:
    assert parse(tokens={"verify": None, "prefill": None}).tokens.by_mode() == {"decode": 1}
    assert parse(tokens={"verify": None}).tokens.by_mode() == {"decode": 1, "prefill": 64}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"layuot": {}}, "layuot: unknown key; did you mean 'layout'? known: name, description, "),
        ({"zzz": 1}, "zzz: unknown key; known: name, description, family, tensor_layout, layout, "),
        (
            {"cache": {"contxt": 512}},
            "cache.contxt: unknown key; did you mean 'context'? known: contract, sliding, context",
        ),
        (
            {"tokens": {"drafts": 4}},
            "tokens.drafts: unknown key; known: verify, prefill, shapes",
        ),
        (
            {"compression": {"type": {}}},
            "compression.type: unknown key; did you mean 'types'? known: default, types, names",
        ),
        ({"cache": {"context": 100}}, "cache.context: context must be a multiple of 32"),
        ({"cache": {"context": 48}}, "cache.context: context must be a multiple of 32"),
        ({"cache": {"context": 0}}, "cache.context: "),
        ({"cache": {"context": -32}}, "cache.context: "),
        ({"cache": {"context": "many"}}, "cache.context: "),
        ({"cache": {"context": 64.5}}, "cache.context: "),
        ({"cache": {"contract": "copy"}}, "cache.contract: Input should be 'readonly', 'blend', "),
        ({"cache": 512}, "cache: "),
        ({"cache": {"padded": True}}, "cache: padded = true needs contract = 'stateful'"),
        (
            {"cache": {"contract": "stateful", "sliding": "shift", "padded": True}},
            "cache: padded = true needs contract = 'stateful'",
        ),
        (
            {"cache": {"contract": "stateful", "state_heads": 32}},
            "cache: state_heads above 1 needs padded = true",
        ),
        (
            {"layout": {"kind": "merged"}},
            "layout.kind: Input should be 'per-block', 'per-layer', 'chunks', 'single' or 'auto'",
        ),
        ({"layout": {"kind": "chunks", "chunks": 0}}, "layout.chunks: "),
        (
            {"layout": {"kind": "single", "chunks": 4}},
            "layout: chunks = 4 is only for the layout 'chunks': layout.kind = 'chunks'",
        ),
        (
            {"layout": {"kind": "per-block", "chunks": 4}},
            "layout: chunks = 4 is only for the layout 'chunks'",
        ),
        ({"layout": {"routed": ["draft"]}}, "layout.routed.0: Input should be 'decode', 'verify' "),
        ({"layout": {"routed": "decode"}}, "layout.routed: "),
        (
            {"layout": {"routed": ["decode"]}, "tokens": {"shapes": "range"}},
            "layout.routed needs static shapes: tokens.shapes = 'static'",
        ),
        (
            {"head": {"choose": True}, "tokens": {"shapes": "range"}},
            "head.choose = true needs static shapes: tokens.shapes = 'static'",
        ),
        (
            {"layout": {"routed": ["decode", "verify"]}, "tokens": {"verify": None}},
            "layout.routed: the recipe has no mode verify",
        ),
        ({"family": ["no-means"]}, "family: "),
        ({"tensor_layout": "tc"}, "tensor_layout: Input should be 'c1t' or 'ct1'"),
        ({"tokens": {"verify": 1}}, "tokens.verify: "),
        ({"tokens": {"verify": 65}}, "tokens.verify: "),
        ({"tokens": {"prefill": 1}}, "tokens.prefill: "),
        ({"tokens": {"prefill": 1025}}, "tokens.prefill: "),
        ({"tokens": {"decode": 1}}, "tokens.decode: unknown key"),
        ({"tokens": {"shapes": "dynamic"}}, "tokens.shapes: "),
        (
            {"cache": {"context": 32}, "tokens": {"prefill": 64}},
            "a call of 64 tokens does not fit a context of 32",
        ),
        (
            {"cache": {"context": 32}, "tokens": {"prefill": None, "verify": 33}},
            "a call of 33 tokens does not fit a context of 32",
        ),
        ({"head": {"slices": 0}}, "head.slices: "),
        ({"head": {"slices": [2]}}, "head.slices: "),
        ({"target": {"deployment": "iOS15"}}, "target.deployment: Input should be 'iOS18' or "),
        (
            {"compression": {"default": "int8"}},
            "compression.default: unknown compression format 'int8'",
        ),
        (
            {"compression": {"types": {"mlp": "palette5-kmeans-group32"}}},
            "compression.types.mlp: unknown compression format 'palette5-kmeans-group32'",
        ),
        (
            {"compression": {"names": {"*": "fp32"}}},
            "compression.names.*: unknown compression format 'fp32'",
        ),
        (
            {"compression": {"method": "tuned", "minutes": float("inf")}},
            "compression.minutes: Input should be a finite number",
        ),
        ({"name": None}, "name: "),
        ({"name": 7}, "name: "),
    ],
    ids=str,
)
def test_mistakes_are_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(CetaneError) as error:
        parse(**content)
    assert str(error.value).startswith(f"test.toml: {message}")


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse().cache.context = 64


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe == load_recipe(str(shipped()[name]))
    assert recipe.name == name
    assert recipe.description


def test_the_usual_recipes_are_shipped() -> None:
    assert {"default", "fp16", "int8", "palette4"} <= shipped().keys()


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[cache]\ncontext = 1024\n")
    assert load_recipe(str(path)) == parse_recipe({"name": "mine", "cache": {"context": 1024}}, "")


def test_a_file_may_leave_functions_out(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[tokens]\nverify = 0\nprefill = false\n")
    assert load_recipe(str(file)).tokens.by_mode() == {"decode": 1}


def test_a_file_may_name_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "yours"')
    assert load_recipe(str(path)).name == "yours"


@pytest.mark.parametrize("source", ["defualt", "", "default/", "none.toml", "../recipes"])
def test_unknown_recipes_name_the_nearest(source: str) -> None:
    with pytest.raises(CetaneError, match=rf"no recipe '{re.escape(source)}'") as raised:
        load_recipe(source)
    assert "cetane recipes lists them" in str(raised.value)
    assert ("did you mean 'default'?" in str(raised.value)) == source.startswith("def")


@pytest.mark.parametrize("content", [b"[cache", b"cache = ", b"a = 1\na = 2", b"\xff\xfe"])
def test_files_that_are_not_toml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(CetaneError, match=r"bad\.toml: (not TOML|it is not UTF-8): "):
        load_recipe(str(path))


def test_a_file_of_an_editor_that_marks_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('description = "ours"', encoding="utf-8-sig")
    assert load_recipe(str(path)).description == "ours"


def test_a_value_that_is_neither_a_choice_nor_a_number() -> None:
    with pytest.raises(CetaneError, match="residual_scale: Input should be 'auto' or be less than"):
        validated(ResidualOptions, {"residual_scale": 3}, "[family]")


def test_mistakes_in_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[tokens]\nverfy = 4\n")
    with pytest.raises(CetaneError, match=r"bad\.toml: tokens\.verfy: unknown key; .*'verify'"):
        load_recipe(str(path))


DOTS, DEEP = "." * 70, ".".join("a" * 70)


@pytest.mark.parametrize(
    "text",
    [
        f'a = "{DOTS}"',
        f"a = '{DOTS}'",
        f"# it's {DOTS}\na = 1 # {DOTS}",
        f'a = "\\"{DOTS}"',
        f'a = """"{DOTS}\\"""{DOTS}"""""',
        f"a = [''''{DOTS}''''', '\\', \"{DOTS}\"]",
    ],
)
def test_dots_in_texts_and_comments(text: str) -> None:
    assert parse_toml(text, "x") == tomllib.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        f"{DEEP} = 1",
        f"[{DEEP}]",
        f"a = [''''b'''', {{{DEEP} = 1}}]",
        f'a = [""""b\\"""""", {{{DEEP} = 1}}]',
        f"a = ['\\', {{{DEEP} = 1}}]",
        f'a = ["\\\\", {{{DEEP} = 1}}]',
        f"# it's\n{DEEP} = 1",
        ".".join(['"="'] * 70) + " = 1",
    ],
)
def test_keys_of_too_many_parts(text: str) -> None:
    with pytest.raises(RecursionError):
        check_keys(text)
    with pytest.raises(CetaneError, match="too deeply nested"):
        parse_toml(text, "x")


@pytest.mark.parametrize("digits", [41, 5000])  # Python itself has a limit, with advice to its user
def test_a_number_of_many_digits(digits: int) -> None:
    for parse, text in ((parse_toml, "a = {}"), (parse_json, '{{"a": {}}}')):
        with pytest.raises(CetaneError, match=r"a number of more than 40 digits$"):
            parse(text.format("9" * digits), "x")


@pytest.mark.parametrize("value", ["[]", "{}", "1", '"a"', "[[1]]"])
@pytest.mark.parametrize("kind", [str, bytes])
def test_more_json_than_memory(kind: type, value: str) -> None:
    """A file of 64 MB held objects of 4 GB, and was read for minutes."""
    written = f"[{','.join([value] * (2**21 + 1))}]"
    text = written if kind is str else written.encode()
    tracemalloc.start()
    with pytest.raises(CetaneError, match="x is not valid JSON: more than 2,097,152 values"):
        parse_json(text, "x")
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_as_many_values_as_json_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cetane.validation.MOST_VALUES", 5)
    assert parse_json('{"a": [1, 2], "b": {}}', "x") == {"a": [1, 2], "b": {}}
    with pytest.raises(CetaneError, match="more than 5 values"):
        parse_json('{"a": [1, 2], "b": {}, "c": 1}', "x")
