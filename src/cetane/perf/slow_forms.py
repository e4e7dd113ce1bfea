"""Formats that are slower than the rates say: `data/slow_forms.toml`."""

from fnmatch import fnmatchcase
from functools import cache
from importlib import resources

from pydantic import Field

from cetane.compress import Format
from cetane.validation import Data, parse_toml, validated


class SlowForm(Data):
    """Formats that stream and multiply slower than others of their bits."""

    formats: str
    """A glob pattern of their names."""
    slower: float = Field(ge=1)
    low: float
    high: float
    source: str
    date: str


class SlowForms(Data):
    """The content of `data/slow_forms.toml`."""

    form: list[SlowForm]


@cache
def load_slow_forms() -> tuple[SlowForm, ...]:
    """The forms that ship."""
    name = "slow_forms.toml"
    text = (resources.files("cetane") / "data" / name).read_text(encoding="utf-8")
    return tuple(validated(SlowForms, parse_toml(text, name), name).form)


def slowness(form: Format) -> float:
    """The time of a weight in this format, relative to others of its bits: 1 for most formats."""
    known = (slow.slower for slow in load_slow_forms() if fnmatchcase(form.name, slow.formats))
    return next(known, 1.0)
