"""Chat templates, rendered as transformers renders them."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cetane.errors import CetaneError


def render(
    template: str,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
    special_tokens: dict[str, str],
) -> str:
    """The prompt for `messages`; CetaneError when the template is broken or refuses them."""
    try:
        return _compile(template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except Exception as error:  # a template is foreign code: it can fail in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CetaneError(f"the chat template does not accept these messages: {reason}") from error


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it adds nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own convention)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache
def _compile(template: str) -> Template:
    # Templates come with the checkpoint and are not trusted: hence the sandbox.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
