"""Pages of the docs site that come from the code: commands, recipe fields, limits.

mkdocs runs it (`mkdocs.yml`, gen-files); the pages exist in the site only, not in the repository.
"""

import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import mkdocs_gen_files
import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from cetane.cli.app import app
from cetane.schema.recipe import Recipe

LIMITS = {
    "gates": "thresholds.toml",
    "draft heads": "draft_head.toml",
    "residency": "residency/verdict.toml",
}
"""Files of `src/cetane/gates`, by what they limit."""


def main() -> None:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages: dict[str, dict[str, Any]] = {
        "commands": {"commands": list(commands(typer.main.get_command(app), "cetane"))},
        "recipe": {"tables": list(tables(Recipe))},
        "limits": {"files": [limits(name, file) for name, file in LIMITS.items()]},
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
                {"name": p.make_metavar(context), "about": " ".join((p.help or "").split())}
                for p in command.params
                if p.param_type_name == "argument"
            ],
            "options": [option(p) for p in command.params if p.param_type_name == "option"],
        }
    for name, one in below.items():
        yield from commands(one, f"{path} {name}")


def option(parameter: Any) -> dict[str, str]:
    """One option of a command."""
    default = parameter.default
    shown = default is not None and default is not False and not callable(default)
    return {
        "name": ", ".join((*parameter.opts, *parameter.secondary_opts)),
        "about": " ".join((parameter.help or "").split()),
        "default": str(default) if shown and str(default) not in ("", "()", "[]") else "",
    }


def tables(model: type[BaseModel], path: str = "") -> Iterator[dict[str, Any]]:
    """The tables of a recipe: their fields, and the tables below them."""
    fields, below = [], []
    for name, field in model.model_fields.items():
        kind = field.annotation
        inner = [t for t in (kind, *get_args(kind)) if isinstance(t, type)]
        nested = next((t for t in inner if issubclass(t, BaseModel)), None)
        if nested is not None and nested is kind:
            below.append((nested, f"{path}.{name}".lstrip(".")))
            continue
        fields.append({"name": name, "type": words(kind), "default": default(field),
                       "about": " ".join((field.description or "").split())})  # fmt: skip
    about = " ".join((model.__doc__ or "").split())
    yield {"path": path, "about": about, "fields": fields}
    for nested, where in below:
        yield from tables(nested, where)


def default(field: Any) -> str:
    """What a field is if a recipe says nothing."""
    if field.default_factory is not None:
        return "empty"
    if field.default is PydanticUndefined:
        return "required"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def words(kind: Any) -> str:
    """A type for people."""
    text = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    text = re.sub(r"typing\.(Literal|Annotated)|cetane\.[a-z_.]+\.|datetime\.", "", text)
    return text.replace("|", "or").replace("NoneType", "none").replace("None", "none").strip("[]")


def limits(name: str, file: str) -> dict[str, Any]:
    """A file of limits: its comment, and its values."""
    text = resources.files("cetane.gates").joinpath(file).read_text(encoding="utf-8")
    lead = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    content = tomllib.loads(text)
    rows = {key: value for key, value in content.items() if isinstance(value, dict)}
    return {
        "name": name,
        "file": f"src/cetane/gates/{file}",
        "about": " ".join(lead),
        "columns": list(rows),
        "names": list(dict.fromkeys(key for row in rows.values() for key in row)),
        "rows": rows,
        "others": {key: value for key, value in content.items() if key not in rows},
    }


main()
