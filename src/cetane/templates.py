"""Pages from jinja2 templates, with one set of options for Markdown and HTML."""

import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from cetane.errors import steerless

TAG = re.compile(r"<(?=[A-Za-z/!?])")
"""What Markdown takes for the beginning of a tag or a comment of HTML."""
LINK = re.compile(r"\](?=\((?!https?://))")
"""The end of a link's words in Markdown, if its address may be a script or a file."""


def environment(package: str, filters: dict[str, Any], *, autoescape: bool = False) -> Environment:
    """The templates in the folder `templates` of a package, and the filters that they use.

    A name that a page lacks is an error, never an empty place. HTML pages escape what they print,
    Markdown pages only what would begin a tag, or a link that leads elsewhere than to the web.
    """
    made = Environment(
        loader=PackageLoader(package),
        autoescape=autoescape,
        finalize=plain if autoescape else untagged,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= filters
    return made


def plain(value: Any) -> Any:
    """A value for a page. Texts may be a stranger's; markup is a page's own."""
    return steerless(value) if type(value) is str else value


def untagged(value: Any) -> Any:
    """A value for a page of Markdown, without HTML and without scripts in links."""
    if not isinstance(value, str):
        return value
    return LINK.sub("&#93;", TAG.sub("&lt;", steerless(value)))
