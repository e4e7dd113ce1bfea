"""Wrong data ends at its first wrong item: a file of a megabyte must not fill the memory. Halves of
characters are refused, wherever JSON comes from."""

import json
from collections.abc import Callable
from typing import Any, Self

import pytest
from pydantic import Field, ValidationError, model_validator

from cetane.errors import CetaneError
from cetane.schema.manifest import Manifest
from cetane.validation import Data, adapter_of, parse_json


class Row(Data):
    number: int


class Table(Data):
    rows: tuple[Row, ...] = ()
    named: dict[str, tuple[Row, ...]] = Field(default_factory=dict)
    either: list[Row | int] = Field(default_factory=list)

    @model_validator(mode="after")
    def consistent(self) -> Self:
        return self


WRONG: list[dict[str, Any]] = [{}] * 1000


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (Table, {"rows": WRONG}),
        (Table, {"named": {str(number): WRONG for number in range(1000)}}),
        (tuple[Table, ...], [{"rows": WRONG}] * 1000),
        (dict[str, list[Row]], {"a": WRONG, "b": WRONG}),
    ],
)
def test_a_thousand_wrong_items_are_one_error(kind: Any, content: Any) -> None:
    with pytest.raises(ValidationError) as error:
        adapter_of(kind).validate_python(content)
    assert error.value.error_count() == 1


def test_a_choice_names_each_of_its_kinds_once() -> None:
    with pytest.raises(ValidationError) as error:
        adapter_of(Table).validate_python({"either": WRONG})
    assert [one["loc"][2] for one in error.value.errors()] == ["Row", "int"]


def test_a_manifest_of_a_million_empty_steps() -> None:
    """It took 8 GB to say that one field is missing."""
    modes = {"decode": {"steps": WRONG, "width": 1}}
    with pytest.raises(ValidationError) as error:
        adapter_of(Manifest).validate_python({"plan": {"modes": modes}})
    steps = [one for one in error.value.errors() if "steps" in one["loc"]]
    assert {one["loc"][4] for one in steps} == {0}


@pytest.mark.parametrize("text", [r'{"a": "x\ud800"}', r'{"\uDFFF": 1}', r'[["\ude00\ud83d"]]'])
@pytest.mark.parametrize("kind", [str, str.encode])
def test_json_with_half_a_character(kind: Callable[[str], Any], text: str) -> None:
    """It was read, and failed with a traceback where it was hashed or written again."""
    with pytest.raises(CetaneError, match="x is not valid JSON: a text in it holds half a ch"):
        parse_json(kind(text), "x")


@pytest.mark.parametrize("text", [r'"\ud83d\ude00"', r'"\\ud800"', r'"\u00e4"', '"🙂"'])
def test_json_with_whole_characters(text: str) -> None:
    assert parse_json(text, "x") == json.loads(text)
