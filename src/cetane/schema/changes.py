"""Changes of recipes by dotted TOML key, and the reasons for those that cetane made."""

import tomllib
from collections.abc import Collection, Mapping
from typing import Any

from cetane.errors import CetaneError
from cetane.schema.recipe import Recipe, load_recipe, parse_recipe, read_recipe, shipped
from cetane.validation import Data


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A recipe with some values replaced, by dotted TOML key: `{"cache.context": 64}`.

    Raises CetaneError for an unknown key, with the alternatives, and for a value that does not fit.
    Without changes, returns the recipe itself.
    """
    if not changes:
        return recipe
    content, where = recipe.model_dump(), f"recipe {recipe.name}"
    replace(content, changes, where)
    changed = parse_recipe(content, where)
    changed.compression.find_as(*recipe.compression.files)
    return changed


def load_changed(source: str, changes: Mapping[str, Any]) -> Recipe:
    """The recipe that `load_recipe` reads, or, if the file is one only with these changes, with
    them."""
    content, path = read_recipe(source)
    try:
        recipe = parse_recipe(content, str(path))
    except CetaneError:
        replace(content, changes, str(path))
        recipe = parse_recipe(content, str(path))
    recipe.compression.find_beside(path)
    return recipe


def replace(content: dict[str, Any], changes: Mapping[str, Any], where: str) -> None:
    """Replace values of a recipe's content, by dotted key. CetaneError for a key in no table."""
    for key, value in changes.items():
        *tables, field = key_path(key)
        table = content
        for name in tables:
            inner = table.setdefault(name, {})
            if not isinstance(inner, dict):
                raise CetaneError(f"{where}: {key}: {name} is not a table")
            table = inner
        table[field] = value


def decided(recipe: Recipe, values: Mapping[str, Any], reasons: Mapping[str, str]) -> Recipe:
    """A recipe with some values that cetane chose, by dotted key, and why."""
    return override(recipe, {**values, "reasons": {**recipe.reasons, **reasons}})


def without_reasons(recipe: Recipe, keys: Collection[str]) -> Recipe:
    """A recipe without the reasons for some values, by dotted key, which somebody else chooses.

    A sentence is about one choice. So it goes with its other values, and with those inside a table.
    """
    gone = {
        reason for own, reason in recipe.reasons.items()
        if any(own == key or own.startswith(f"{key}.") for key in keys)
    }  # fmt: skip
    kept = {key: reason for key, reason in recipe.reasons.items() if reason not in gone}
    return recipe.model_copy(update={"reasons": kept})


def told_changes(recipe: Recipe) -> str:
    """The values of a recipe's tables that differ from those of the recipe of its name that comes
    with cetane, in words. Empty if none has this name."""
    if recipe.name not in shipped():
        return ""
    before = load_recipe(recipe.name)
    return ", ".join(
        f"{name}.{key}" if isinstance(value, Mapping | Data) else f"{name}.{key} = {value}"
        for name, table in recipe if isinstance(table, Data)
        for key, value in table if value != getattr(getattr(before, name), key)
    )  # fmt: skip


def value_of(recipe: Recipe, key: str) -> Any:
    """A value of a recipe by its dotted key, also a default that files leave out; None where it has
    none."""
    value: Any = recipe
    for name in key_path(key):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value.model_dump() if isinstance(value, Data) else value


def key_path(key: str) -> list[str]:
    """The names in a dotted TOML key: two in `cache.context`, three in `a.b."c.d"`."""
    try:
        tomllib.loads(f"{key} = 0")
        table: Any = tomllib.loads(f"[{key}]")  # a header holds no value and no comment
        path = []
        while table:
            ((name, table),) = table.items()
            path.append(name)
    except ValueError as error:  # no TOML, or not one key
        raise CetaneError(
            f"{key!r} is not a key of a recipe", "write a dotted key, such as cache.context"
        ) from error
    return path


def keys_in(changes: Mapping[str, Any]) -> frozenset[str]:
    """The dotted keys of all values that changes name, those inside tables too."""
    keys: set[str] = set()

    def add(path: list[str], value: Any) -> None:
        keys.add(".".join(path))
        if isinstance(value, Mapping):
            for name, inner in value.items():
                add([*path, name], inner)

    for key, value in changes.items():
        add(key_path(key), value)
    return frozenset(keys)
