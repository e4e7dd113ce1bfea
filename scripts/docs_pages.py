"""Pages of the reference that come from the code: commands, recipe fields, the API.

`python scripts/docs_pages.py` writes them into docs/reference. A test compares them with the code.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import griffe
import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import cetane
from cetane.cli.app import app
from cetane.families import families
from cetane.schema.recipe import Recipe, Width

ROOT = Path(__file__).parents[1]


def pages() -> dict[str, str]:
    """The pages' texts by their names in docs/reference."""
    templates = Environment(
        loader=FileSystemLoader(ROOT / "scripts" / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    contents: dict[str, dict[str, Any]] = {
        "commands.md": {"commands": list(commands(typer.main.get_command(app), "cetane"))},
        "recipe.md": {"tables": [*tables(Recipe), *family_tables()]},
        # swapcase puts functions before classes
        "api.md": {"names": sorted(vars(cetane)["__all__"], key=str.swapcase)},
    }
    return {
        name: templates.get_template(f"{name}.j2").render(content)
        for name, content in contents.items()
    }


def commands(command: Any, path: str) -> Iterator[dict[str, Any]]:
    """A command and all below it, as the command line declares them."""
    context = command.make_context(path, [], resilient_parsing=True)
    below = {
        name: command.get_command(context, name)
        for name in getattr(command, "list_commands", lambda _: [])(context)
    }
    if not below:
        yield {
            "path": path,
            "about": " ".join((command.help or "").split()),
            "example": re.sub(r"\[/?\w*\]", "", command.epilog or ""),
            "arguments": [
                {
                    "name": "` or `".join((p.metavar or p.name.upper()).split("|")),
                    "about": " ".join((p.help or "").split()),
                }
                for p in command.params
                if p.param_type_name == "argument"
            ],
            "options": [option(p) for p in command.params if p.param_type_name == "option"],
        }
    for name, one in below.items():
        yield from commands(one, f"{path} {name}")


def option(parameter: Any) -> dict[str, str]:
    """One option of a command."""
    default, stated = parameter.default, parameter.show_default
    shown = default is not None and default is not False and not callable(default)
    written = f"`{default}`" if shown and str(default) not in ("", "()", "[]") else ""
    return {
        "name": ", ".join((*parameter.opts, *parameter.secondary_opts)),
        "about": " ".join((parameter.help or "").split()),
        "default": stated if isinstance(stated, str) else written,
    }


@cache
def sources() -> griffe.Object | griffe.Alias:
    """The package as its files are written, with the docstrings of fields."""
    return griffe.load("cetane", search_paths=[ROOT / "src"])


def tables(model: type[BaseModel], path: str = "", about: str = "") -> Iterator[dict[str, Any]]:
    """The tables of a recipe: their fields, and the tables below them."""
    source = sources()[f"{model.__module__}.{model.__name__}".removeprefix("cetane.")]
    hints = get_type_hints(model, include_extras=True)
    fields, below = [], []
    for name, field in model.model_fields.items():
        written = source.all_members[name].docstring
        told = one_line(written.value if written else "")
        kind = table_of(field.annotation)
        if kind is not None and not named_by_path(field):
            below.append((kind, f"{path}.{name}".lstrip("."), told))
            continue
        fields.append(
            {
                "name": name,
                "type": "path of a file" if kind else words(hints[name]),
                "default": default(field),
                "about": told,
            }
        )
    yield {"path": path, "about": about or one_line(model.__doc__ or ""), "fields": fields}
    for kind, where, told in below:
        yield from tables(kind, where, told)


def one_line(text: str) -> str:
    return " ".join(text.split())


def table_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that is a table, or none."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def named_by_path(field: FieldInfo) -> bool:
    """Whether a recipe names the file of a table, which cetane writes (`read_already`)."""
    return any(isinstance(one, BeforeValidator) for one in field.metadata)


def family_tables() -> Iterator[dict[str, Any]]:
    """The table `[family]`, for each class of options that model types share."""
    types: dict[type[BaseModel], list[str]] = {}
    for name, family in families().items():
        types.setdefault(family.Options, []).append(name)
    for options, names in types.items():
        (table,) = tables(options, "family")
        yield table | {"about": f"For {', '.join(names)}. {table['about']}"}


def default(field: FieldInfo) -> str:
    """What a field is if a recipe says nothing."""
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "empty"
    if field.default in (None, "", ()):
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def words(hint: Any) -> str:
    """A type for people: kinds of values, or the values themselves."""
    if hint == Width:
        return f"{PLAIN[int]}, or 0"
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return words(inner[0])
    if kind is Literal:
        return alternatives([f"`{value}`" for value in inner])
    if kind is tuple:
        return f"list of {several(inner[0])}"
    if kind is dict:
        return "table" if inner[1] is Any else f"table of {several(inner[1])}"
    if kind in (Union, UnionType):
        some = alternatives([words(one) for one in inner if one is not NoneType])
        return f"{some}, or none" if NoneType in inner else some
    return PLAIN[hint]


def alternatives(options: Sequence[str]) -> str:
    """`a, b or c`."""
    *first, last = options
    return f"{', '.join(first)} or {last}" if first else last


def several(hint: Any) -> str:
    """The type of a list's members: plain kinds in the plural."""
    text = words(hint)
    return f"{text}s" if text in PLAIN.values() else text


if __name__ == "__main__":
    for name, text in pages().items():
        (ROOT / "docs" / "reference" / name).write_text(text, encoding="utf-8")
