"""JSON schemas as grammars, mended first where llguidance 1.9.1 would not keep them."""

import json
import math
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The white space of JSON: fixed, since a small model may write blanks without end."""
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keys of a schema that hold more schemas, by names."""
PLAIN_VALUES = ("const", "enum", "default", "examples")
"""Keys of a schema that hold no schemas."""
MOVE = 1e-9
"""How far an exclusive bound moves inwards; further where float64 is coarser. From a smaller step
llguidance makes a pattern that it cannot read itself."""
FARTHEST = 2**63 - 1024
"""The farthest bound from zero of which llguidance 1.9.1 makes a pattern. It refuses the least
integer of 64 bits, which many schemas have as their minimum. float64 holds this one."""


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that a schema allows. Raises ValueError."""
    return str(LLMatcher.grammar_from_json_schema(json.dumps(mended(schema)), overrides=COMPACT))


def lark_json(schema: Mapping[str, Any]) -> str:
    """A schema as a term of a Lark grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT})


def mended(schema: Any) -> Any:
    """A schema whose exclusive bounds llguidance 1.9.1 keeps.

    It accepts the bound itself, such as 0 in (0, 0.5], if that is a whole number and the other
    bound is less than 1 away. So such a bound moves inwards by `MOVE` or more. It also rounds
    bounds to float64, and refuses those far from zero; here they move inwards before.
    """
    if isinstance(schema, list):
        return [mended(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {
        key: {name: mended(one) for name, one in value.items()}
        if key in NAMED_SCHEMAS and isinstance(value, Mapping)
        else value if key in PLAIN_VALUES else mended(value)
        for key, value in schema.items()
    }  # fmt: skip
    for bound, other, sign in (("Minimum", "Maximum", 1), ("Maximum", "Minimum", -1)):
        for key in (bound.lower(), f"exclusive{bound}"):
            if type(made.get(key)) in (int, float):
                made[key] = sign * max(sign * made[key], -FARTHEST)
            if type(made.get(key)) is int:
                made[key] = rounded(made[key], sign)
        place: Any = made.get(f"exclusive{bound}")
        ends: list[Any] = [made.get(other.lower()), made.get(f"exclusive{other}")]
        if type(place) in (int, float) and place % 1 == 0 and any(
            type(end) in (int, float) and 0 < sign * (end - place) < 1 for end in ends
        ):  # fmt: skip
            made[f"exclusive{bound}"] = place + sign * max(MOVE, math.ulp(place))
    return made


def rounded(bound: int, sign: int) -> int:
    """A bound as float64 holds it, moved towards `sign` if it does not."""
    near = float(bound)
    return int(near if sign * (int(near) - bound) >= 0 else math.nextafter(near, sign * math.inf))
