"""Random JSON schemas: every answer parses and validates, by the jsonschema package."""

import json
from typing import Any

import jsonschema
import openai
from hypothesis import given, settings
from hypothesis import strategies as st

names = st.sampled_from(["a", "b", "é", "x y"])
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
              st.integers(-20, 20), st.integers(0, 30)),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
              st.integers(0, 2), st.integers(0, 3)),
    st.builds(lambda values: {"enum": values},
              st.lists(st.sampled_from([1, "one", None, True, 2.5, "ü"]), min_size=1, max_size=3)),
    st.just({"type": "string", "pattern": "^[ab]{1,3}$"}),
    st.just({"const": "x"}),
)  # fmt: skip


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def fields(properties: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": sorted(properties)[:1],
                "additionalProperties": False}  # fmt: skip

    return st.one_of(
        st.builds(fields, st.dictionaries(names, inner, max_size=3)),
        st.builds(lambda item, low, more: {"type": "array", "items": item, "minItems": low,
                                           "maxItems": low + more},
                  inner, st.integers(0, 1), st.integers(0, 2)),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=2)),
    )  # fmt: skip


schemas = st.recursive(leaves, nested, max_leaves=4)


def test_a_hundred_schemas(client: openai.OpenAI) -> None:
    ends = []

    @settings(max_examples=100, derandomize=True, database=None)
    @given(schemas, st.integers(0, 10**6))
    def check(schema: dict[str, Any], seed: int) -> None:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "json"}], seed=seed, max_tokens=400,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "random", "schema": schema, "strict": True},
            },
        )  # fmt: skip
        (choice,) = answer.choices
        ends.append(choice.finish_reason)
        jsonschema.validate(json.loads(choice.message.content), schema)

    check()
    assert set(ends) == {"stop"} and len(ends) >= 100
