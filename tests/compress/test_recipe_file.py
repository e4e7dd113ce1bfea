"""Files that a recipe names: found beside it, and read only as they were."""

from pathlib import Path

import pytest

from cetane.compress.recipe_file import TextFile
from cetane.errors import CetaneError
from cetane.files import sha256
from cetane.pipeline.request import make_request
from cetane.schema.changes import override
from cetane.schema.recipe import load_recipe, parse_recipe

RECIPE = """
[compression]
default = "palette4-kmeans-group8"
method = "gptq"
[compression.text]
file = "ours.txt"
sha256 = "{digest}"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with a text beside it."""
    text = tmp_path / "ours.txt"
    text.write_text("What our users ask.", encoding="utf-8")
    path = tmp_path / "ours.toml"
    path.write_text(RECIPE.format(digest=sha256(text)))
    return path


def test_a_recipes_text_lies_beside_it(recipe: Path) -> None:
    """Also after values were replaced."""
    loaded = load_recipe(str(recipe))
    for one in (loaded, override(loaded, {"cache.context": 64})):
        assert one.compression.text is not None
        assert one.compression.text.read() == "What our users ask."


def test_another_text_is_refused(recipe: Path) -> None:
    (recipe.parent / "ours.txt").write_text("Something else.", encoding="utf-8")
    text = load_recipe(str(recipe)).compression.text
    assert text is not None
    with pytest.raises(CetaneError, match=r"compression\.text: .*not the file"):
        text.read()


@pytest.mark.parametrize("wrong", ["../{}", "{}x", "{}\n", "{:.63}"])
def test_a_hash_is_a_hash_and_nothing_more(wrong: str, recipe: Path) -> None:
    digest = sha256(recipe.parent / "ours.txt")
    with pytest.raises(CetaneError, match=r"compression\.text"):
        parse_recipe({"name": "x", "compression": {
            "default": "palette4-kmeans-group8", "method": "gptq",
            "text": {"file": "ours.txt", "sha256": wrong.format(digest)},
        }}, "x")  # fmt: skip


def test_plain_constants_read_no_text(recipe: Path) -> None:
    text = TextFile.of(recipe.parent / "ours.txt").model_dump()
    with pytest.raises(CetaneError, match="plain constants read none; ask for few bits"):
        parse_recipe({"name": "plain", "compression": {"text": text}}, "plain")


def test_few_bits_of_a_port_take_a_text(tiny_checkpoint_folder: Path, recipe: Path) -> None:
    text = recipe.parent / "ours.txt"
    asked = make_request(tiny_checkpoint_folder, bits=4, text=text).recipe.compression
    assert asked.text == TextFile.of(text) and asked.text.read() == "What our users ask."
    assert asked.text.file == "ours.txt", "a bundle's recipe says nothing of a user's folders"
    with pytest.raises(CetaneError, match="plain constants read none"):
        make_request(tiny_checkpoint_folder, bits=8, text=text)
    with pytest.raises(CetaneError, match=r"nothing\.txt"):
        make_request(tiny_checkpoint_folder, bits=4, text=recipe.parent / "nothing.txt")
    text.write_bytes(b"What our users \xff ask.")
    with pytest.raises(CetaneError, match="it is not UTF-8"):
        make_request(tiny_checkpoint_folder, bits=4, text=text)
