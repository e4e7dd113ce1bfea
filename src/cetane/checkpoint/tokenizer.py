"""The tokenizer of a checkpoint: ids, special tokens, stop tokens, chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from cetane.checkpoint.added_tokens import check_blanks, declared_tokens
from cetane.checkpoint.chat_template import render
from cetane.checkpoint.convert_tokenizer import SOURCES, converted
from cetane.checkpoint.text_stream import TextStream
from cetane.checkpoint.tokenizer_files import TEMPLATE_FILES, chat_templates, stop_tokens
from cetane.checkpoint.tokenizer_trial import check_tokenizer
from cetane.checkpoint.tokenizers_library import check_unicode, interruptible, library_errors
from cetane.errors import CetaneError
from cetane.files import is_present, json_sha256, read_json_if_present

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHER = [byte for byte in range(256) if byte not in _PLAIN]
_BYTE_OF = {chr(byte): bytes([byte]) for byte in _PLAIN} | {
    chr(256 + index): bytes([byte]) for index, byte in enumerate(_OTHER)
}
"""The byte of every character in tokens of GPT-2's kind, which avoid control characters."""
CONTEXT = 8
"""Tokens before a text on which the text of its first token may depend: after none, decoders of
SentencePiece's kind drop a blank."""
CHARACTERS = 8
"""Characters of a text that are encoded at first for each token asked. English has 4 to 5."""
NEAR_CUT = 1024
"""Tokens before the end of a part of a text that may differ from those of the whole text."""
LONGEST_TOKEN = 1024
"""The most bytes for which a token counts. Released tokenizers have tokens of some hundred bytes;
one of a megabyte would let gigabytes into a small context."""
MARK = "<the message ends here> "
"""A text that marks the end of a message in a rendered conversation. Its blank tells whether the
template trims contents."""
SPLITS = "split_special_tokens"
"""The key of tokenizer_config.json by which the text of a special token is plain text."""
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
"""The names of special tokens of which the tokenizer itself makes use."""


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers.Tokenizer`, with the special tokens and templates of its model's files."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """Text by name: `ROLES`, and others that templates may write."""
    eos_ids: tuple[int, ...]
    """Every token that ends a generation."""
    chat_template: str | None
    tool_template: str | None = None
    """The template of conversations with tools, if the model has one beside its chat template."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, and the optional files beside it.

        Without one, transformers makes it of another form (`SOURCES`). Raises CetaneError if there
        is none of these, or if a file is malformed.
        """
        path = folder / "tokenizer.json"
        of_its_class: dict[str, str] = {}
        if not is_present(path):
            made = converted(folder)
            if made is None:
                raise CetaneError(
                    f"{folder} has no tokenizer.json, and no {' or '.join(SOURCES)} to make it of",
                    "get the model's tokenizer files",
                )
            path, of_its_class = made
        check_tokenizer(path)
        with library_errors(f"{path} is not a valid tokenizer"):
            backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_truncation()
        backend.no_padding()

        with library_errors(f"{folder}: its added tokens are not valid"):
            named, tokens = declared_tokens(folder, backend)
            if path.parent == folder:  # transformers has added them to what it made
                backend.add_tokens(tokens)
            check_blanks(folder, backend)
        special = of_its_class | {n: text for n, text in named.items() if n.endswith("_token")}
        config = read_json_if_present(folder / "tokenizer_config.json")
        backend.encode_special_tokens = config.get(SPLITS) is True
        templates = chat_templates(folder, config.get("chat_template"))
        return cls(
            backend,
            special,
            stop_tokens(folder, backend, special.get("eos_token")),
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
        )

    def save(self, folder: Path) -> None:
        """Write files for `load` and for transformers' AutoTokenizer, with the same bytes
        always."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.backend.encode_special_tokens:  # tokenizer.json does not tell it
            config[SPLITS] = True
        (folder / "tokenizer.json").write_text(self.backend.to_str(), encoding="utf-8")
        _write_json(folder / "tokenizer_config.json", config)
        _write_json(folder / "generation_config.json", {"eos_token_id": list(self.eos_ids)})
        for name, template in self.templates.items():
            path = folder / TEMPLATE_FILES[name]
            path.parent.mkdir(exist_ok=True)
            path.write_text(template, encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with the special tokens around it that the model expects, such as
        BOS."""
        return self._encode(text, add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of `text` alone."""
        return self._encode(text, add_special_tokens=False)

    def encode_aside(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, but other Python threads run meanwhile: a text of 1 MB takes 0.5 s."""
        check_unicode(text)
        with library_errors("the tokenizer cannot encode this text"):
            (encoding,) = self.backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = encoding.ids
        return ids

    def encode_first(self, text: str, count: int) -> list[int]:
        """The first `count` ids that `encode` gives, or all if there are fewer.

        Each MB of text takes 160 MB to encode, so the rest of a long text is not encoded. Ctrl-C
        ends the wait for a tokenizer that takes quadratic time.
        """
        enough = count + NEAR_CUT
        length = CHARACTERS * enough
        while True:
            ids = interruptible(partial(self.encode_aside, text[:length]))
            if len(ids) >= enough or length >= len(text):
                return ids[:count]
            length *= 2

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not valid UTF-8 become U+FFFD."""
        with library_errors("the tokenizer cannot decode these tokens"):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_aside(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """As `decode`, but other Python threads run meanwhile, as with `encode_aside`."""
        with library_errors("the tokenizer cannot decode these tokens"):
            (text,) = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The ids of a conversation, as `render_chat` writes it."""
        prompt = self.render_chat(messages, add_generation_prompt, tools)
        # The template writes the special tokens itself.
        return self._encode(prompt, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The text of a conversation. A message has a "role" and a "content"; `tools` are
        descriptions of functions, as in OpenAI's API.

        Raises CetaneError if the model has no chat template, or if it refuses the messages.
        """
        template = self.template_for(tools)
        if template is None:
            raise CetaneError("this model has no chat template", "encode plain text instead")
        return render(template, messages, add_generation_prompt, self.special_tokens, tools)

    def render_open_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation up to the end of its last message's content.

        A model can then go on with that message (transformers' `continue_final_message`).

        Raises CetaneError as `render_chat`, and if the template leaves out the last message.
        """
        *earlier, last = messages
        marked = {**last, "content": last["content"] + MARK}
        text, found, after = self.render_chat([*earlier, marked], False).rpartition(MARK.strip())
        if not found:
            raise CetaneError("the chat template leaves out the message that the model continues")
        # A template that trims contents would have trimmed the blanks before the mark too.
        return text if after.startswith(" ") else text.rstrip()

    def template_for(self, tools: Sequence[Any]) -> str | None:
        """The template of a conversation with these tools, if any, chosen as in transformers."""
        if tools and self.tool_template is not None:
            return self.tool_template
        return self.chat_template

    @property
    def templates(self) -> dict[str, str]:
        """Its chat templates, by the names that Hugging Face gives them."""
        named = {"default": self.chat_template, "tool_use": self.tool_template}
        return {name: template for name, template in named.items() if template is not None}

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a text; None if the model has none."""
        bos = self.special_tokens.get("bos_token")
        return None if bos is None else self.backend.token_to_id(bos)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. The model's embedding may have more rows."""
        return self.backend.get_vocab_size()

    @cached_property
    def longest(self) -> int:
        """The most bytes of text for which a token stands: no token's own text has more, unless it
        is over `LONGEST_TOKEN`."""
        longest = max((len(text.encode()) for text in self.backend.get_vocab()), default=1)
        return min(longest, LONGEST_TOKEN)

    @cached_property
    def digest(self) -> str:
        """sha256 of its tokens by id. Tokenizers with the same digest have the same ids."""
        tokens = sorted((i, text) for text, i in self.backend.get_vocab().items())
        return json_sha256(tokens)

    def necessary(self) -> set[int]:
        """The tokens that can write and end any text.

        These are special and added tokens, stop tokens, bytes and single characters.
        """
        needed = {*self.backend.get_added_tokens_decoder(), *self.eos_ids}
        for text, token in self.backend.get_vocab().items():
            written = self.decode([token])
            character = len(written) == 1 and written != "\N{REPLACEMENT CHARACTER}"
            if len(text) == 1 or _BYTE.fullmatch(text) or character:
                needed.add(token)
        return needed

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token writes; of an added token, its own text. Empty for an unknown
        id."""
        text = self.backend.id_to_token(token)
        if text is None or token in self._added:
            return (text or "").encode()
        if self._byte_level:
            return b"".join(_BYTE_OF.get(c) or c.encode() for c in text)
        if _BYTE.fullmatch(text):
            return bytes([int(text[3:5], 16)])
        return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def check_known(self, ids: Iterable[int], vocab: int) -> None:
        """Raise CetaneError, which names the token, if a model of `vocab` tokens lacks one of
        `ids`."""
        unknown = next((token for token in ids if not 0 <= token < vocab), None)
        if unknown is None:
            return
        text = {token: text for text, token in self.backend.get_vocab().items()}.get(unknown)
        if text is None:
            raise CetaneError(
                f"token {unknown} is not in the vocabulary of {vocab}",
                "give tokens of the model's own tokenizer",
            )
        raise CetaneError(
            f"the tokenizer has {text!r} as token {unknown}, but the model has only {vocab} tokens",
            "take the tokenizer that the model was trained with, or resize the model's embedding"
            " (transformers: resize_token_embeddings)",
        )

    def special_ids(self, texts: Iterable[str]) -> tuple[int, ...]:
        """The ids of those texts that are special tokens, which `decode` skips."""
        added = self.backend.get_added_tokens_decoder()
        tokens = map(self.backend.token_to_id, texts)
        return tuple(token for token in tokens if token in added and added[token].special)

    @cached_property
    def _added(self) -> set[int]:
        return {*self.backend.get_added_tokens_decoder()}

    @cached_property
    def _byte_level(self) -> bool:
        """Whether every character of a token stands for a byte, as in GPT-2."""
        decoder = json.loads(self.backend.to_str())["decoder"] or {}
        return any(
            part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ()))
        )

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """A decoder of tokens that arrive one by one, and continue the text of the tokens
        `before`."""
        near = list(before[-CONTEXT:])
        if self.decode(near).endswith("\N{REPLACEMENT CHARACTER}"):
            near = []  # the next token may complete a character, which would go missing
        return TextStream(self, near, len(near))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        check_unicode(text)
        with library_errors("the tokenizer cannot encode this text"):
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
