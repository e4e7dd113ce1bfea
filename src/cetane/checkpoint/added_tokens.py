"""Tokens that the files beside tokenizer.json declare.

Source: transformers 5, `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__`.
Older versions of transformers wrote all these forms.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from cetane.errors import CetaneError
from cetane.files import read_json_if_present

NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""The names that transformers gives to special tokens."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
DECODER = "added_tokens_decoder"
"""The key of tokenizer_config.json with the tokens by their ids."""
AGAIN = "download the model's tokenizer files again"

MOST_TOKENS = 1 << 18
"""The most tokens that files may declare: a whole large vocabulary. So many take 2 s to add."""
MOST_CHARACTERS = 1 << 22
"""The most characters of all added tokens together: the library takes 1.5 s and 0.4 GB for so many.
A vocabulary of 2^18 tokens has half as many."""


def declared_tokens(folder: Path, backend: Tokenizer) -> tuple[dict[str, str], list[AddedToken]]:
    """The text of each token that the folder's files name, such as eos_token; and the tokens to add
    to its tokenizer.json.

    A backend gives them the next ids in this order. Raises CetaneError for a wrong id, and an error
    of any kind if the files are malformed otherwise, or declare too many.
    """
    config = read_json_if_present(folder / "tokenizer_config.json")
    named: dict[str, Any] = {role: None for role in NAMES} | _names_in(config)
    others = _extra_in(config) or config.get("additional_special_tokens") or []
    extra = [_token(value) for value in others]
    if DECODER in config:  # it stands for all other files
        file, entries = folder / "tokenizer_config.json", config[DECODER]
        if not isinstance(entries, dict):
            raise CetaneError(f"{file}: {DECODER} is not an object of tokens by their ids", AGAIN)
        declared = {_id(number, file): _token(value) for number, value in entries.items()}
    else:
        older = read_json_if_present(folder / "special_tokens_map.json")
        named |= _names_in(older)
        extra += [_token(value, special=True) for value in _extra_in(older)]
        file = folder / "added_tokens.json"
        special = {token.content for token in (*map(_token, named.values()), *extra) if token}
        declared = {
            _id(number, file): AddedToken(
                text, normalized=text not in special, special=text in special
            )
            for text, number in read_json_if_present(file).items()
        }
        declared |= backend.get_added_tokens_decoder()
        if not extra:
            others = older.get("additional_special_tokens") or []
            extra = [_token(value, special=True) for value in others]

    if len(named) + len(extra) + len(declared) > MOST_TOKENS:
        raise ValueError(f"they are more than {MOST_TOKENS:,}")
    check_characters([*map(_token, named.values()), *extra, *declared.values()])
    tokens = {name: token for name, value in named.items() if (token := _token(value, True))}
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    wanted = [token for _, token in sorted(declared.items()) if token]
    known = present.keys() | {token.content for token in wanted}
    wanted += [t for t in (*tokens.values(), *extra) if t and t.content not in known]
    with_a_name = {token.content for token in tokens.values()}
    for token in wanted:
        token.special = token.special or token.content in with_a_name
    texts = {name: token.content for name, token in tokens.items()}
    return texts, [token for token in wanted if token != present.get(token.content)]


def check_characters(tokens: Iterable[AddedToken | None]) -> None:
    """Raise ValueError for added tokens that have too many characters together."""
    if sum(len(token.content) for token in tokens if token) > MOST_CHARACTERS:
        raise ValueError(f"added tokens have more than {MOST_CHARACTERS:,} characters together")


def check_blanks(folder: Path, backend: Tokenizer) -> None:
    """Raise CetaneError for an added token of blanks alone that takes the blanks beside it. At each
    blank of a text, the library then reads all that follow: of 100,000 it takes a minute."""
    for token in backend.get_added_tokens_decoder().values():
        if (token.lstrip or token.rstrip) and not token.content.strip():
            text = repr(token.content)
            raise CetaneError(
                f"{folder}: the added token {text} is blank, and takes the blanks beside it",
                "set its lstrip and rstrip to false in the tokenizer's files",
            )


def _id(number: Any, file: Path) -> int:
    """The id of a token that a file declares. Raises CetaneError for anything but a whole
    number."""
    try:
        if isinstance(number, int | str):
            return int(number)
    except ValueError:
        pass
    raise CetaneError(
        f"{file}: the id of an added token is {str(number)[:40]!r}, not a whole number", AGAIN
    )


def _names_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that a file names: `bos_token`, and others such as `image_token`."""
    extra = config.get("extra_special_tokens")
    names = {key: value for key, value in config.items() if key.endswith("_token")}
    return names | extra if isinstance(extra, dict) else names


def _extra_in(config: Mapping[str, Any]) -> list[Any]:
    """The special tokens without names that a file lists."""
    extra = config.get("extra_special_tokens")
    return extra if isinstance(extra, list) else []


def _token(value: Any, special: bool = False) -> AddedToken | None:
    """A token that a file gives as a text, or with its flags; None for anything else."""
    if isinstance(value, str):
        value = {"content": value, "special": True}
    text = value.get("content") if isinstance(value, dict) else None
    if not isinstance(text, str) or not text:
        return None
    flags = {"special": special} | {flag: bool(value[flag]) for flag in FLAGS if flag in value}
    return AddedToken(text, **flags)
