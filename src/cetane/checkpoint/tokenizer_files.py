"""The files of a model's tokenizer, and what those beside `tokenizer.json` say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from cetane.checkpoint.chat_template import LARGEST_TEMPLATE
from cetane.checkpoint.convert_tokenizer import SOURCES, VOCABULARY
from cetane.errors import CetaneError
from cetane.files import is_present, read_json_if_present, read_text

TEMPLATE_FILES = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
"""The files of chat templates, by the template's name."""
TOKENIZER_FILES = (
    "tokenizer.json",
    *SOURCES,
    VOCABULARY,
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    *TEMPLATE_FILES.values(),
    "generation_config.json",
)
NO_TOKEN = -1
"""What some configs say in place of a stop token that they do not have."""


def stop_tokens(folder: Path, backend: tokenizers.Tokenizer, eos: str | None) -> tuple[int, ...]:
    """The stop tokens of generation_config.json, else of config.json; and the tokenizer's own."""
    generation, config = folder / "generation_config.json", folder / "config.json"
    of_config = read_json_if_present(config)
    said = (
        (generation, read_json_if_present(generation)),
        (config, of_config),
        (config, of_config.get("text_config")),
    )
    file, declared = next(
        (
            (path, content["eos_token_id"])
            for path, content in said
            if isinstance(content, dict) and content.get("eos_token_id") is not None
        ),
        (config, None),
    )
    listed = declared if isinstance(declared, list) else [declared]
    ids = [i for i in listed if type(i) is int and i != NO_TOKEN]
    if wrong := [i for i in ids if not 0 <= i < 2**31]:
        raise CetaneError(
            f"{file}: eos_token_id: no token has the id {wrong[0]}",
            "correct the id, or get the file again",
        )
    own = None if eos is None else backend.token_to_id(eos)
    return tuple(dict.fromkeys(ids if own is None else [*ids, own]))


def chat_templates(folder: Path, configured: Any) -> dict[str, str]:
    """The chat templates by name: those of files, else those of `tokenizer_config.json`, whose
    `chat_template` is `configured`.

    As in transformers, a file with the default template replaces all of the config's.
    """
    if isinstance(configured, dict):
        configured = [{"name": name, "template": text} for name, text in configured.items()]
    elif not isinstance(configured, list):
        configured = [{"name": "default", "template": configured}]
    named: dict[str, str] = {}
    if not is_present(folder / TEMPLATE_FILES["default"]):
        for entry in configured:
            match entry:
                case {"name": str(name), "template": str(template)}:
                    named[name] = template
    for name, file in TEMPLATE_FILES.items():
        if is_present(folder / file):
            named[name] = read_text(folder / file, LARGEST_TEMPLATE)
    return named
