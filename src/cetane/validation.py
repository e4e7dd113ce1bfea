"""Validation of TOML and JSON: the base of all data, its limits, and the errors for wrong data."""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, ErrorDetails
from typing_extensions import is_typeddict

from cetane.errors import CetaneError

MOST_DEPTH = 64
"""The most levels of nested objects and lists. The deepest file of a real model has 12."""
MOST_DIGITS = 40
"""The most digits of a whole number. transformers writes 10**30 for a text length without limit."""
MOST_VALUES = 2**21
"""The most values in a JSON document: so many empty objects take 3 s and 0.7 GB. An index of 10 MB,
the largest of a released model, has fewer than 200,000."""
MOST_ELEMENTS = 2**28
"""Elements of one value of a program: 1 GiB in fp32, the logits of 1,024 tokens for a vocabulary of
262,144."""

PLAIN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.@-]{0,254}$"
"""A name that is one component of a path: no slash, and no dot or dash first."""
ADAPTER_NAME = r"^[A-Za-z][A-Za-z0-9_]{0,31}$"
"""A name of an adapter, which is part of the names of functions: Core ML must take it."""

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""A SHA-256 in small hexadecimal digits."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is neither infinite nor NaN."""
MOST_DRAWN = 1e15
"""The largest figure that is drawn, beyond any of a model. The borders of matplotlib's axes
overflow from about 1e250."""
Drawn = Annotated[float, Field(ge=-MOST_DRAWN, le=MOST_DRAWN, allow_inf_nan=False)]
"""A figure that can be drawn."""

HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of half a character in JSON. It may belong to a pair, which is a whole one."""

Content = TypeVar("Content")


class StopAtFirst:
    """An annotation of data whose lists and dicts are read up to their first wrong item.

    Else pydantic makes an error for each: a million empty objects for records took 8 GB.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return stop_at_first(handler(source))


MANY = ("dict", "frozenset", "list", "set", "tuple")
"""The kinds of schemas that hold any number of items."""


def stop_at_first(schema: CoreSchema, own: Any = None) -> CoreSchema:
    """The schema, which it changes, without the models in it, but for `own`: these stop too."""
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict) and not (part.get("type") == "model" and part["cls"] != own):
            if part.get("type") in MANY:
                part["fail_fast"] = True
            parts += [value for key, value in part.items() if key != "metadata"]
    return schema


class Data(BaseModel):
    """The base of all data in TOML or JSON: immutable, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return stop_at_first(handler(source), cls)


def read_already(what: str) -> BeforeValidator:
    """A validator for data whose file a recipe file may name: only its reader follows that path."""

    def check(value: object) -> object:
        if isinstance(value, str):
            raise ValueError(f"only a recipe file (.toml) can name a file of {what}")
        return value

    return BeforeValidator(check)


def validated(kind: type[Content], content: Any, where: str, hint: str | None = None) -> Content:
    """`content` as data of a kind.

    Raises CetaneError as "WHERE: KEY: REASON". For an unknown key it lists the known keys.
    """
    try:
        return adapter_of(kind).validate_python(content)  # type: ignore[arg-type]
    except CetaneError as error:  # of a validator with a hint of its own
        raise CetaneError(f"{where}: {error.message}", error.hint or hint) from error
    except ValidationError as error:
        raise CetaneError(f"{where}: {reason(error, kind)}", hint) from error
    except (RecursionError, UnicodeError, OverflowError) as error:
        raise CetaneError(f"{where}: {spoken(error)}", hint) from error


@cache
def adapter_of(kind: type[Any]) -> TypeAdapter[Any]:
    """The validator of a kind, made once: one for an answer's options takes 0.3 ms to make."""
    annotated: Any = Annotated[kind, StopAtFirst]
    return TypeAdapter(annotated)


def reason(error: ValidationError, kind: Any = None) -> str:
    """The first error, as "KEY: REASON"."""
    first, *others = error.errors(include_url=False, include_context=False, include_input=False)
    location = first["loc"]
    if location and str(location[-1]).startswith("literal["):  # a choice, or else some other value
        location = location[:-1]
        same = (one["msg"] for one in others if one["loc"][:-1] == location)
        choices = [message.removeprefix("Input should ") for message in same]
        first["msg"] = " or ".join([first["msg"], *choices])
    key, text = ".".join(map(str, location)), worded(first, kind)
    return f"{key}: {text}" if key else text


def worded(error: ErrorDetails, kind: Any) -> str:
    """What is wrong with data of a kind, without its place."""
    if error["type"] != "extra_forbidden":
        return plain(error["msg"])
    *outer, name = error["loc"]
    options = keys_at(kind, tuple(outer))
    return f"unknown key; {guess(str(name), options)}known: {', '.join(options)}"


def plain(message: str) -> str:
    """A message without the words that pydantic puts before those of a validator."""
    return message.replace("Value error, ", "")


def keys_at(kind: Any, location: tuple[int | str, ...]) -> list[str]:
    """The known keys of a table inside data of a kind, or of a TypedDict, which is flat."""
    if is_typeddict(kind):
        return [*kind.__annotations__]
    models = models_of(kind)
    for part in location:
        variants = [model for model in models if tagged(model, part)]
        if variants and len(models) > 1:  # of a union, the location names the variant's tag
            models = variants
            continue
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        if fields:  # else the part is a place in a list or a key of a dict
            models = [model for field in fields for model in models_of(field.annotation)]
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def tagged(model: type[BaseModel], part: int | str) -> bool:
    """Whether a field of a model is a literal that may be `part`."""
    literals = [f.annotation for f in model.model_fields.values()]
    return any(part in get_args(one) for one in literals if get_origin(one) is Literal)


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation names, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_of(argument)]


def guess(name: str, options: Iterable[str]) -> str:
    """`did you mean 'x'? ` with the option nearest to a name; "" if none is near."""
    close = difflib.get_close_matches(name, options, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def nearest(name: str, options: Iterable[str]) -> str:
    """The three options nearest to a name, at any distance."""
    return ", ".join(difflib.get_close_matches(name, options, n=3, cutoff=0))


def parse_json(
    text: str | bytes | bytearray, where: str, hint: str | None = None, unique: bool = False
) -> Any:
    """A JSON document. Raises CetaneError for invalid JSON, for half a character, and for JSON
    beyond this module's limits.

    `unique` refuses an object that has a key twice.
    """
    try:
        check_values(text)
        whole = text if isinstance(text, str) else str(text, "utf-8-sig")
        content = json.loads(whole, object_pairs_hook=without_duplicates if unique else None)
        check_limits(content)
        if HALF.search(whole):
            check_whole(content)
    except (ValueError, RecursionError) as error:
        raise CetaneError(f"{where} is not valid JSON: {spoken(error)}", hint) from error
    return content


def check_values(text: str | bytes | bytearray) -> None:
    """Raise ValueError for a JSON document of too many values, before any of them is made.

    A comma or an opening bracket precedes each value but the outermost.
    """
    if isinstance(text, str):
        count = sum(map(text.count, (",", "[", "{")))
    else:
        count = sum(map(text.count, (b",", b"[", b"{")))
    if count > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """A TOML document. Raises CetaneError for invalid TOML, and for TOML beyond this module's
    limits."""
    try:
        check_keys(text)
        content = tomllib.loads(text)
        check_limits(content)
    except (ValueError, RecursionError) as error:
        raise CetaneError(f"{where}: not TOML: {spoken(error)}") from error
    return content


def spoken(error: Exception) -> str:
    """The text of a parser's error, without Python's advice to programmers."""
    if isinstance(error, RecursionError):
        return "it is too deeply nested"
    if "integer string conversion" in str(error):  # Python's own limit, beyond ours
        return f"a number of more than {MOST_DIGITS} digits"
    return str(error)


def check_whole(content: Any) -> None:
    """Raise ValueError for half a character: JSON can hold it, and no UTF-8 can write it again."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text in it holds half a character") from error


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name appears twice")
    return content


def check_limits(content: Any) -> None:
    """Raise RecursionError for too deep nesting, and ValueError for too many digits."""
    level: list[Any] = [[content]]
    for _ in range(MOST_DEPTH):
        values = [v for each in level for v in (each.values() if isinstance(each, dict) else each)]
        for value in values:
            if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
                raise ValueError(f"a number of more than {MOST_DIGITS} digits")
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise RecursionError


STRING_OR_COMMENT = re.compile(
    r"""("{3}|")(?:\\?.)*?(?:\1"{0,2}|\Z)|('{3}|').*?(?:\2'{0,2}|\Z)|#[^\n]*""", re.DOTALL
)
"""In TOML, up to two quotes may precede the three that close a string. A string without an end
takes the rest, so that the search takes linear time."""


def check_keys(text: str) -> None:
    """Raise RecursionError for a dotted key of too many parts, which tomllib reads in quadratic
    time."""
    parts = 0
    for piece in STRING_OR_COMMENT.sub("", text).split("."):
        parts = 0 if any(mark in piece for mark in "\n,=") else parts + 1
        if parts > MOST_DEPTH:
            raise RecursionError
