"""Subsets of a vocabulary: any that are valid, and files that are not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import build_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from cetane.checkpoint import Tokenizer
from cetane.errors import CetaneError
from cetane.schema.recipe import load_recipe, parse_recipe, recipe_files
from cetane.schema.subset import Subset, as_ranges, load_subset

TEXT = {"name": "a.txt", "sha256": "0" * 64, "tokens": 98, "covered": 97}


def content(tokens: str = "0-258 261 300-302", **others: Any) -> dict[str, Any]:
    return {
        "vocabulary": 400, "tokens": tokens, "tokenizer": "a" * 64, "texts": [], "held_out": [TEXT],
    } | others  # fmt: skip


def test_ids() -> None:
    subset = Subset.model_validate(content())
    assert subset.ids.tolist() == [*range(259), 261, 300, 301, 302]
    assert subset.missing == 2 / 100


@given(st.sets(st.integers(0, 300), min_size=1))
def test_any_ids_survive(tokens: set[int]) -> None:
    ids = np.array(sorted(tokens))
    made = Subset.model_validate(content(as_ranges(ids)))
    assert made.ids.tolist() == ids.tolist()
    assert Subset.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": ""},
        {"tokens": " "},
        {"tokens": "3 3"},
        {"tokens": "5 3"},
        {"tokens": "5-3"},
        {"tokens": "0-5 5-9"},
        {"tokens": "-1"},
        {"tokens": "3-"},
        {"tokens": "3-4-5"},
        {"tokens": "1,2"},
        {"tokens": "²"},
        {"tokens": "1e3"},
        {"tokens": "0-400"},
        {"tokens": "0-9999999999999999"},
        {"tokens": "9" * 5000},
        {"tokens": [0, 1]},
        {"vocabulary": 0},
        {"vocabulary": 1 << 40},
        {"tokenizer": "../../etc/passwd"},
        {"held_out": [TEXT | {"covered": -1}]},
        {"surprise": 1},
    ],
    ids=str,
)
def test_what_is_no_subset(changes: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "subset.json"
    file.write_text(json.dumps(content() | changes))
    with pytest.raises(CetaneError, match=r"subset\.json") as raised:
        load_subset(file)
    assert "\n" not in raised.value.message
    assert raised.value.hint == "cetane vocabulary makes one"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\0"])
def test_what_is_no_file_of_ours(text: str, tmp_path: Path) -> None:
    file = tmp_path / "subset.json"
    file.write_text(text)
    with pytest.raises(CetaneError, match=r"subset\.json"):
        load_subset(file)


def test_a_file_that_is_too_large_or_not_there(tmp_path: Path) -> None:
    file = tmp_path / "subset.json"
    with pytest.raises(CetaneError, match="cannot read"):
        load_subset(file)
    with file.open("wb") as opened:
        opened.truncate(1 << 40)  # of holes
    with pytest.raises(CetaneError, match="larger"):
        load_subset(file)


def test_a_recipe_names_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(json.dumps(content()))
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[head]\nsubset = "some.json"\n')
    found = load_recipe(str(recipe))
    assert found.head.subset == load_subset(tmp_path / "some.json")
    again = parse_recipe(json.loads(found.model_dump_json()), "a manifest")
    assert again == found


def test_a_recipe_with_any_number_of_tokens_can_be_read_again(tmp_path: Path) -> None:
    """A TOML file of these ids is larger than any that is read."""
    tokens = as_ranges(np.arange(0, 250_000, 2))
    made = parse_recipe({
        "name": "mine", "head": {"subset": content(tokens, vocabulary=250_000)},
    }, "test")  # fmt: skip
    for name, write in recipe_files(made).items():
        write(tmp_path / name)
    assert load_recipe(str(tmp_path / "recipe.toml")) == made


def test_an_unknown_key_of_a_subset_in_a_recipe() -> None:
    with pytest.raises(CetaneError, match=r"head\.subset\.texts\.0\.nmae.*'name'"):
        wrong = content(texts=[TEXT | {"nmae": "x"}])
        parse_recipe({"name": "t", "head": {"subset": wrong}}, "t")


def byte_level() -> Tokenizer:
    return Tokenizer(build_tokenizer().backend_tokenizer, {"eos_token": "<eos>"}, (0,), None)


def byte_fallback() -> Tokenizer:
    """As Gemma's: pieces with a mark for spaces, and a token for every byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "▁aa", "漢"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁a", "a")]
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.add_special_tokens(["<stop>"])
    return Tokenizer(backend, {}, (262,), None)


def test_necessary_tokens_of_a_byte_level_tokenizer() -> None:
    """The alphabet and the end; no merge, for none of them is one character."""
    tokenizer = byte_level()
    assert tokenizer.necessary() == set(range(257))
    written = tokenizer.backend.encode("naïve 漢🙂\n").ids
    spelled = [tokenizer.backend.token_to_id(c) for i in written
               for c in tokenizer.backend.id_to_token(i)]  # fmt: skip
    assert set(spelled) <= tokenizer.necessary()
    assert tokenizer.decode(spelled) == "naïve 漢🙂\n"


def test_necessary_tokens_where_bytes_are_a_fallback() -> None:
    """All but the unknown token and a piece of two characters."""
    tokenizer = byte_fallback()
    assert set(range(263)) - tokenizer.necessary() == {0, tokenizer.backend.token_to_id("▁aa")}
    spelled = [1 + byte for byte in "é🙂".encode()]
    assert tokenizer.decode(spelled) == "é🙂"


def test_it_must_be_of_this_tokenizer_and_hold_what_is_necessary() -> None:
    tokenizer = byte_level()
    good = content("0-260", vocabulary=288, tokenizer=tokenizer.digest)
    Subset.model_validate(good).check(tokenizer)
    with pytest.raises(CetaneError, match="another tokenizer"):
        Subset.model_validate(good).check(byte_fallback())
    without_end = Subset.model_validate(good | {"tokens": "1-287"})
    with pytest.raises(CetaneError, match=r"lacks 1 tokens .* 0 \('<eos>'\)"):
        without_end.check(tokenizer)
