"""Pages from jinja2 templates, with one set of options for Markdown and HTML."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def environment(package: str, filters: dict[str, Any], *, autoescape: bool = False) -> Environment:
    """The templates in the folder `templates` of a package, and the filters that they use.

    A name that a page lacks is an error, never an empty place. HTML pages escape what they print.
    """
    made = Environment(
        loader=PackageLoader(package),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= filters
    return made
