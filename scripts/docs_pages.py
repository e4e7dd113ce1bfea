"""Pages of the docs site that come from the code: commands, recipe fields, limits, the API.

mkdocs runs it (`mkdocs.yml`, gen-files); the pages exist in the site only, not in the repository.
"""

import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import griffe
import mkdocs_gen_files
import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import cetane
from cetane.cli.app import app
from cetane.families import families
from cetane.schema.recipe import Recipe


def main() -> None:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages: dict[str, dict[str, Any]] = {
        "commands": {"commands": list(commands(typer.main.get_command(app), "cetane"))},
        "recipe": {"tables": [*tables(Recipe), *family_tables()]},
        "api": {"names": sorted(cetane.__all__, key=str.swapcase)},  # functions, then classes
        "limits": {"text": resources.files("cetane.gates").joinpath("limits.toml").read_text()},
    }
    for name, content in pages.items():
        with mkdocs_gen_files.open(f"reference/{name}.md", "w") as page:
            page.write(templates.get_template(f"{name}.md.j2").render(content))


def commands(command: Any, path: str) -> Iterator[dict[str, Any]]:
    """A command and all below it, as the command line declares them."""
    context = command.make_context(path, [], resilient_parsing=True)
    below = getattr(command, "commands", None) or {
        name: command.get_command(context, name)
        for name in getattr(command, "list_commands", lambda _: [])(context)
    }
    if not below:
        yield {
            "path": path,
            "about": " ".join((command.help or "").split()),
            "example": re.sub(r"\[/?\w*\]", "", command.epilog or ""),
            "arguments": [
                {"name": p.metavar or p.name.upper(), "about": " ".join((p.help or "").split())}
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


def tables(model: type[BaseModel], path: str = "") -> Iterator[dict[str, Any]]:
    """The tables of a recipe: their fields, and the tables below them."""
    source = griffe.load(model.__module__, search_paths=["src"])[model.__name__]
    fields, below = [], []
    for name, field in model.model_fields.items():
        if (kind := table_of(field.annotation)) is not None:
            below.append((kind, f"{path}.{name}".lstrip(".")))
            continue
        written = source.all_members[name]
        about = written.docstring.value if written.docstring else ""
        fields.append(
            {
                "name": name,
                "type": words(str(written.annotation)),
                "default": default(field),
                "about": " ".join(about.split()),
            }
        )
    yield {"path": path, "about": " ".join((model.__doc__ or "").split()), "fields": fields}
    for kind, where in below:
        yield from tables(kind, where)


def table_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that is a table, or none."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def family_tables() -> Iterator[dict[str, Any]]:
    """The table `[family]`, for each class of options that model types share."""
    types: dict[type[BaseModel], list[str]] = {}
    for name, family in families().items():
        types.setdefault(family.Options, []).append(name)
    for options, names in types.items():
        (table,) = tables(options, "family")
        yield table | {"about": f"For {', '.join(names)}. {table['about']}"}


def default(field: Any) -> str:
    """What a field is if a recipe says nothing."""
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "empty"
    if field.default in (None, "", ()):
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def words(annotation: str) -> str:
    """A type for people, from its annotation in the source."""
    text = re.sub(r"Annotated\[([\w.]+), .*?\)\]", r"\1", annotation)
    text = re.sub(r"Literal\[(.*?)\]", lambda m: " or ".join(m[1].split(", ")), text)
    text = re.sub(r"tuple\[(.*), \.\.\.\]", r"list of \1", text)
    text = re.sub(r"dict\[(\w+), (.*)\]", r"table of \2", text)
    text = text.replace(" | None", ", or none").replace(" | ", " or ")
    plain = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}
    return re.sub(r"\b(int|float|str|bool)\b", lambda m: plain[m[0]], text).replace("'", "`")


main()
