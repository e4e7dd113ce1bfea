"""A tokenizer built from GGUF metadata. This is slow, so the cache folder keeps the result."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from cetane.checkpoint.added_tokens import check_characters
from cetane.checkpoint.gguf.file import GGUFFile
from cetane.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from cetane.checkpoint.tokenizer import Tokenizer
from cetane.checkpoint.tokenizers_library import library_errors
from cetane.errors import CetaneError
from cetane.files import cache_dir, is_kept, write_cache

_CONVERTER_VERSION = 4  # part of the cache key: raise it when a conversion changes

_LONG_TOKEN, _MOST_WORK = 64, 1 << 28
"""The characters of a long token, and the most for the sum of squared lengths of longer ones. This
sum is the work of `_merges`. Released vocabularies come to 2**24."""

_KINDS = ("gpt2", "llama", "gemma4")
"""The values of tokenizer.ggml.model: bytes, SentencePiece, and SentencePiece with merges."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_SAFETENSORS = "use the model's safetensors, which have its tokenizer.json"

_ENDS = frozenset(
    (
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>",
        "<|flush|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<eos>", "<|endoftext|>",
        "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>",
        "<｜end▁of▁sentence｜>", "[e~[",
    )
)  # fmt: skip
"""Tokens that end an answer: files often leave them out of their metadata.

It is llama.cpp's list, without `</s>`: that is a tag of HTML to Gemma.
"""
_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))
"""Where one of them ends an answer, `<|end|>` only ends a message (gpt-oss)."""

_PHI3_KEEPS = frozenset(("<unk>", "<s>", "<|endoftext|>"))
"""The special tokens of Phi-3 that do not drop the white space after them."""


def load_gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer that `file` describes. Raises CetaneError if it has none, or an unknown
    kind."""
    vocabulary = _Vocabulary(file)
    architecture = file.metadata["general.architecture"]
    entry = f"{architecture}-{_CONVERTER_VERSION}-{file.tokenizer_digest}"
    path = cache_dir() / "tokenizers" / entry / "tokenizer.json"
    backend = kept_backend(path)
    if backend is None:
        backend = vocabulary.build()
        write_cache(path, backend.to_str())
    return Tokenizer(
        backend,
        special_tokens=vocabulary.special_tokens(),
        eos_ids=vocabulary.eos_ids(),
        chat_template=vocabulary.get("tokenizer.chat_template", str),
        tool_template=vocabulary.get("tokenizer.chat_template.tool_use", str),
    )


def kept_backend(path: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of a kept file; None if it has changed, or if this version of the library
    cannot read it."""
    with suppress(CetaneError), library_errors(f"{path} is not a valid tokenizer"):
        return tokenizers.Tokenizer.from_file(str(path)) if is_kept(path) else None
    return None


class _Vocabulary:
    """The metadata under `tokenizer.`, checked on access."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.kind = self.get("tokenizer.ggml.model", str)
        if self.kind not in _KINDS:
            why = f"tokenizer model {self.kind!r} is not one of {', '.join(_KINDS)}"
            raise self.bad(why, _SAFETENSORS)
        tokens = self.get("tokenizer.ggml.tokens", list)
        if not tokens:
            raise self.bad("it has no tokenizer.ggml.tokens")
        self.tokens: list[str] = tokens
        self.types = self.numbers("tokenizer.ggml.token_type", default=_NORMAL)

    def bad(self, why: str, hint: str | None = None) -> CetaneError:
        return CetaneError(f"{self.file.path} has no usable tokenizer: {why}", hint)

    def get(self, key: str, kind: type) -> Any:
        """The value of `key`; None if the file has none."""
        value = self.file.metadata.get(key)
        if value is not None and type(value) is not kind:
            raise self.bad(f"{key} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def numbers(self, key: str, default: float | None = None) -> list[Any]:
        """One number for each token."""
        values = self.get(key, np.ndarray)
        if values is None:
            if default is None:
                raise self.bad(f"it has no {key}")
            return [default] * len(self.tokens)
        if len(values) != len(self.tokens):
            raise self.bad(f"{key} has {len(values)} entries for {len(self.tokens)} tokens")
        result: list[Any] = values.tolist()
        return result

    def token_id(self, role: str) -> int | None:
        """The id in `tokenizer.ggml.<role>_token_id`, or llama.cpp's default for SentencePiece."""
        token_id = self.get(f"tokenizer.ggml.{role}_token_id", int)
        if token_id is None and self.kind == "llama":
            token_id = {"unknown": 0, "bos": 1, "eos": 2}.get(role)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise self.bad(f"{role}_token_id {token_id} is not below {len(self.tokens)}")
        return int(token_id)

    def special_tokens(self) -> dict[str, str]:
        roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: self.token_id(role) for name, role in roles.items()}
        return {f"{name}_token": self.tokens[i] for name, i in ids.items() if i is not None}

    def eos_ids(self) -> tuple[int, ...]:
        declared = [self.token_id(role) for role in ("eos", "eot", "eom")]
        by_name = {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED) and token in _ENDS
        }
        if by_name.keys() & _HARMONY_ENDS:
            by_name.pop("<|end|>", None)
        return tuple(dict.fromkeys(i for i in (*declared, *by_name.values()) if i is not None))

    def build(self) -> tokenizers.Tokenizer:
        with library_errors(f"{self.file.path} has no usable tokenizer"):
            if self.kind == "gpt2":
                backend, added_bos = self._byte_level()
            else:
                backend, added_bos = self._sentencepiece(), True
            self._add_special(backend)
            self._add_bos_and_eos(backend, added_bos)
        return backend

    def ids(self, tokens: list[str]) -> dict[str, int]:
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            raise self.bad("a token appears twice")
        return ids

    def _own_merges(self) -> list[tuple[str, str]]:
        """The merges that the file lists."""
        merges = self.get("tokenizer.ggml.merges", list)
        if merges is None:
            raise self.bad("it has no tokenizer.ggml.merges")
        pairs = []
        for merge in merges:
            space = merge.find(" ", 1)  # a token may itself begin with a space
            if space < 0:
                raise self.bad(f"its merge {merge!r} is not two tokens")
            pairs.append((merge[:space], merge[space + 1 :]))
        return pairs

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, bool]:
        name = self.get("tokenizer.ggml.pre", str)
        rule = PRE_TOKENIZERS.get(name)
        if rule is None:
            raise self.bad(f"pre-tokenizer {name!r} is not known", _SAFETENSORS)
        ids = self.ids(self.tokens)
        if rule.merges_by_id and self.get("tokenizer.ggml.merges", list) is None:
            merges = _merges(ids, [-i for i in range(len(ids))], self.types)
        else:
            merges = self._own_merges()
        backend = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=rule.ignore_merges))
        if rule.nfc:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(split), "isolated") for split in rule.splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        return backend, rule.add_bos

    def _pieces(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """The ids of SentencePiece's tokens, and the merges that make them."""
        tokens = self.tokens
        if self.kind == "gemma4":
            return self.ids(tokens), self._own_merges()
        if self.file.metadata["general.architecture"].startswith("gemma"):
            # The converter wrote runs of "▁" as spaces. Gemma's merges follow the order of its
            # tokens, not their scores.
            tokens = ["▁" * len(t) if t.isspace() and set(t) == {" "} else t for t in tokens]
            ranks: list[float] = [-i for i in range(len(tokens))]
        else:
            ranks = self.numbers("tokenizer.ggml.scores")
        ids = self.ids(tokens)
        return ids, _merges(ids, ranks, self.types)

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        ids, merges = self._pieces()
        unknown = self.special_tokens().get("unk_token")
        backend = tokenizers.Tokenizer(
            models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        prefix = self.get("tokenizer.ggml.add_space_prefix", bool)
        prefix = self.kind == "llama" if prefix is None else prefix
        to_underline = normalizers.Replace(" ", "▁")
        to_space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix:
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_underline])
            backend.decoder = decoders.Sequence([*to_space, decoders.Strip(" ", 1, 0)])
        else:
            backend.normalizer = to_underline
            backend.decoder = decoders.Sequence(to_space)
        return backend

    def _add_special(self, backend: tokenizers.Tokenizer) -> None:
        """Match control and user-defined tokens as a whole, before the text is split."""
        by_role = set(self.special_tokens().values())
        special, plain = [], []
        for token, kind in zip(self.tokens, self.types, strict=True):
            drops = self._drops_space_after(token)
            if kind in (_CONTROL, _UNKNOWN) or token in by_role:
                special.append(AddedToken(token, rstrip=drops, normalized=False, special=True))
            elif kind == _USER_DEFINED and backend.token_to_id(token) is not None:
                plain.append(AddedToken(token, rstrip=drops, normalized=False, special=False))
        check_characters([*special, *plain])
        backend.add_special_tokens(special)
        backend.add_tokens(plain)

    def _drops_space_after(self, token: str) -> bool:
        """Whether a special token takes the white space after it, as Phi-3's tokenizer.json says.

        The file does not have this. llama.cpp knows it by `general.name`, but converters write
        "Phi 3 Mini" or a fine-tuned model's own name.
        """
        is_phi3 = self.file.metadata["general.architecture"] == "phi3" and self.kind == "llama"
        return is_phi3 and token not in _PHI3_KEEPS

    def _add_bos_and_eos(self, backend: tokenizers.Tokenizer, bos_by_default: bool) -> None:
        add_bos = self.get("tokenizer.ggml.add_bos_token", bool)
        wanted = {
            "bos": bos_by_default if add_bos is None else add_bos,
            "eos": self.get("tokenizer.ggml.add_eos_token", bool),
        }
        ids = {role: self.token_id(role) for role, want in wanted.items() if want}
        present = {role: i for role, i in ids.items() if i is not None}
        if present:
            names = {role: self.tokens[i] for role, i in present.items()}
            template = [names.get("bos"), "$A", names.get("eos")]
            backend.post_processor = processors.TemplateProcessing(
                single=[part for part in template if part is not None],
                special_tokens=[(names[role], i) for role, i in present.items()],
            )


def _merges(ids: dict[str, int], ranks: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes another token, best rank first.

    SentencePiece merges the pair that makes the token of the best score; a BPE model needs a list
    of pairs. In a tie the longer left part comes first, as in transformers' converters.
    """
    if sum(len(token) ** 2 for token in ids if len(token) > _LONG_TOKEN) > _MOST_WORK:
        raise CetaneError("the tokenizer's tokens are too long to derive their merges")
    merges = []
    for token, i in ids.items():
        if types[i] not in (_NORMAL, _USER_DEFINED):
            continue
        rank = ranks[i]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((rank, cut, len(token) - cut, left, right))
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]
