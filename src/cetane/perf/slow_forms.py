"""Formats that are slower than the rates say: `data/slow_forms.toml`."""

from fnmatch import fnmatchcase
from functools import cache

from pydantic import Field

from cetane.compress import Format
from cetane.files import shipped_text
from cetane.validation import Data, parse_toml, validated


class SlowForm(Data):
    """Formats that stream and multiply slower than others of their bits."""

    formats: str
    """A glob pattern of their names."""
    chips: tuple[str, ...] = ("*",)
    """Glob patterns of the ids of chips on which they are slow."""
    bits: float | None = Field(default=None, gt=0)
    """The bits to which the chip unpacks each weight first; None if it does not."""
    slower: float = Field(default=1, ge=1)
    low: float = 1
    high: float = 1
    """`low` and `high`: the range of the reports."""
    source: str
    date: str

    def holds(self, form: Format, chip: str) -> bool:
        """Whether a format is slow on a chip."""
        return fnmatchcase(form.name, self.formats) and any(
            fnmatchcase(chip, pattern) for pattern in self.chips
        )


class SlowForms(Data):
    """The content of `data/slow_forms.toml`."""

    form: list[SlowForm]


@cache
def load_slow_forms() -> tuple[SlowForm, ...]:
    """The forms that ship."""
    name = "slow_forms.toml"
    content = parse_toml(shipped_text(f"data/{name}"), name)
    return tuple(validated(SlowForms, content, name).form)


def streamed_as(form: Format, chip: str) -> tuple[float, float]:
    """The bits as which a chip streams a weight of this format, and its time relative to others of
    these bits. Most formats have their own bits, and 1."""
    slow = next((one for one in load_slow_forms() if one.holds(form, chip)), None)
    if slow is None:
        return float(form.bits), 1.0
    return slow.bits or float(form.bits), slow.slower
