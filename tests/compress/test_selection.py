import json
import tomllib

import pytest
from pydantic import ValidationError

from cetane.compress import Selection
from cetane.errors import CetaneError
from cetane.files import json_sha256

KINDS = {
    "model.layers.0.self_attn.q_proj.weight": "attention",
    "model.layers.0.mlp.up_proj.weight": "mlp",
    "model.layers.10.mlp.up_proj.weight": "mlp",
    "lm_head.weight": "head",
}

RECIPE = """
[compression]
default = "palette6-kmeans-group32"
[compression.types]
head = "int8-per-channel"
attention = "palette4-uniform-group8"
[compression.names]
"model.layers.*" = "int8-per-tensor"
"model.layers.0.*" = "fp16"
"""


def test_the_last_match_wins() -> None:
    selection = Selection.model_validate(tomllib.loads(RECIPE)["compression"])
    selection.check(KINDS)
    chosen = {name: selection.format_for(name, kind).name for name, kind in KINDS.items()}
    assert list(chosen.values()) == ["fp16", "fp16", "int8-per-tensor", "int8-per-channel"]
    assert selection.format_for("model.norm.weight", "norm").name == "palette6-kmeans-group32"
    assert selection.format_for("x", "attention").name == "palette4-uniform-group8"


def test_the_order_of_names_is_the_order_of_the_file() -> None:
    selection = Selection(names={"lm_head.*": "fp16", "*": "int8-per-tensor"})
    assert selection.format_for("lm_head.weight", "head").name == "int8-per-tensor"


def test_the_order_of_names_survives_a_manifest() -> None:
    """Manifests, and the keys of all that depends on a recipe, are JSON with sorted keys."""
    one = Selection(names={"model.layers.0.*": "int8-per-tensor", "*.up_proj.*": "fp16"})
    other = Selection(names={"*.up_proj.*": "fp16", "model.layers.0.*": "int8-per-tensor"})
    assert one != other
    for selection in (one, other):
        content = json.dumps(selection.model_dump(mode="json"), sort_keys=True)
        again = Selection.model_validate(json.loads(content))
        assert again == selection and list(again.names) == list(selection.names)
    keys = [json_sha256(selection.model_dump(mode="json")) for selection in (one, other)]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("names", [[1], [["a"]], [[["a"], "fp16"]], [["a", 5]], "fp16"])
def test_what_is_no_table_of_names(names: object) -> None:
    with pytest.raises(ValidationError):
        Selection.model_validate({"names": names})


def test_nothing_is_compressed_unless_asked() -> None:
    assert Selection().format_for("lm_head.weight", "head").name == "fp16"


def test_patterns_are_case_sensitive() -> None:
    selection = Selection(names={"LM_HEAD.*": "int8-per-tensor"})
    assert selection.format_for("lm_head.weight", "head").name == "fp16"


def test_a_pattern_without_a_match_is_answered_with_the_closest_names() -> None:
    selection = Selection(names={"model.layers.0.self_atn.q_proj.weight": "fp16"})
    with pytest.raises(CetaneError, match="self_atn") as error:
        selection.check(KINDS)
    assert "model.layers.0.self_attn.q_proj.weight" in (error.value.hint or "")


def test_an_unknown_type_is_answered_with_the_known_ones() -> None:
    with pytest.raises(CetaneError, match="'heads'") as error:
        Selection(types={"heads": "fp16"}).check(KINDS)
    assert error.value.hint == "the model has attention, head, mlp"


@pytest.mark.parametrize(
    ("table", "where"),
    [
        ({"default": "int4"}, ("default",)),
        ({"types": {"head": "int8"}}, ("types", "head")),
        ({"names": {"lm_head.*": "palette5-kmeans-group8"}}, ("names", "lm_head.*")),
        ({"defualt": "fp16"}, ("defualt",)),
    ],
)
def test_a_wrong_table_says_where(table: dict[str, object], where: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as error:
        Selection.model_validate(table)
    assert [detail["loc"] for detail in error.value.errors()] == [where]


def test_a_selection_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Selection().default = "int8-per-tensor"  # type: ignore[misc]
