"""Tokenizers in GGUF metadata against the ones they were written from."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiktoken
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

from cetane.checkpoint import Tokenizer
from cetane.checkpoint.gguf.file import read_gguf
from cetane.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from cetane.checkpoint.gguf.tokenizer import load_gguf_tokenizer
from cetane.errors import CetaneError

CORPUS = [
    "def f(x):\n    return x ** 2  # the square\n\n\n",
    "It's 1234567 and 3.14; we'LL see, don't we?",
    "日本語のテキスト and naïve café, 'quoted' «text»",
    "emoji 😀👩‍👩‍👧‍👦 ½ ② ٣٤ ǅungla",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "   leading and trailing \t \n ",
    "a 1 b 22 c333 4444",
    "<|im_start|>user\nhi<think>there<|im_end|>",
    "e\u0301 \u00a0nbsp\u2003em",
    "HELLO'S World's",
    "C:\\path\\to [x](y) don't.stop",
    "中文2024年，「引号」。 yes!‘x’ the中文 \ufb01n  ",
    "x = {\n\n    'y': -1.5e3,\r\n}",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")

# tiktoken's o200k_base.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# What DeepSeek-V2-Lite's file has as ranges: letters of two cases. It leaves some scripts out.
CASED = r"[[\p{Lu}\p{Ll}\p{Lt}]&&[\p{Latin}\p{Greek}\p{Cyrillic}]]"
CJK = "[一-龥ࠀ-一가-퟿]+"


def split_on(*regexes: str, digits: bool = False) -> Any:
    """Pieces by each regex in turn; `digits` apart at the end, if asked."""
    parts: list[Any] = [pre_tokenizers.Split(Regex(r), behavior="isolated") for r in regexes]
    if digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*parts, byte_level])


# What the models' own tokenizer.json files say.
PUBLISHED: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "qwen2": lambda: split_on(QWEN2),
    "llama-bpe": lambda: split_on(LLAMA3),
    "lfm2": lambda: split_on(LLAMA3),
    "smaug-bpe": lambda: split_on(LLAMA3),
    "qwen35": lambda: split_on(QWEN35),
    "gpt-4o": lambda: split_on(O200K),
    "olmo": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "seed-coder": lambda: split_on(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "deepseek-llm": lambda: split_on(
        "[\r\n]", rf"\s?{CASED}+", "\\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, digits=True
    ),
    "deepseek-coder": lambda: split_on("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, digits=True),
    "deepseek-v3": lambda: split_on(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


def byte_level_backend(pre: str) -> Backend:
    backend = Backend(models.BPE(ignore_merges=pre in ("llama-bpe", "lfm2")))
    backend.pre_tokenizer = PUBLISHED[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return backend


Extra = Callable[[gguf.GGUFWriter], None]


def write(path: Path, architecture: str, kind: str, *extras: Extra) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    for extra in extras:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def load(path: Path) -> Tokenizer:
    return load_gguf_tokenizer(read_gguf(path))


def byte_level_gguf(path: Path, backend: Backend, pre: str | None, *extras: Extra) -> Path:
    state = json.loads(backend.to_str())
    tokens = sorted(backend.get_vocab(), key=backend.token_to_id)
    types = [TokenType.NORMAL] * len(tokens)
    for token in SPECIAL:
        types[tokens.index(token)] = TokenType.CONTROL
    types[tokens.index("<think>")] = TokenType.USER_DEFINED

    def metadata(writer: gguf.GGUFWriter) -> None:
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(2)

    return write(path, "llama", "gpt2", metadata, *extras)


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level(pre: str, tmp_path: Path) -> None:
    backend = byte_level_backend(pre)
    tokenizer = load(byte_level_gguf(tmp_path / "m.gguf", backend, pre))
    bos = [0] if pre in ("llama-bpe", "lfm2") else []  # llama.cpp's default for it
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == bos + ids
        assert tokenizer.decode(ids) == backend.decode(ids)
        pieces = backend.pre_tokenizer.pre_tokenize_str(text)
        assert tokenizer.backend.pre_tokenizer.pre_tokenize_str(text) == pieces
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.bos_id == 0 and tokenizer.eos_ids == (2, 0)


def test_splits_are_those_of_transformers() -> None:
    """Its reader of GGUF files has the rules of the models that it reads."""
    both = GGUF_PRE_TOKENIZER_SPLITS.keys() & PRE_TOKENIZERS.keys()
    assert {"llama4", "tekken", "dbrx", "megrez", "falcon-h1", "kanana2", "minimax-m2"} <= both
    for name in both:
        assert PRE_TOKENIZERS[name].splits == (GGUF_PRE_TOKENIZER_SPLITS[name],), name


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("x=1234", ["x", "=", "123", "4"]),
        ("it's 12", ["it", "'", "s", " ", "12"]),
        ('f("a") ==  2', ["f", '("', "a", '")', " ", "==", " ", " ", "2"]),
        ("a\n b`", ["a", "\n", " b", "`"]),
    ],
)
def test_the_splits_that_llama_cpp_calls_default(
    text: str, pieces: list[str], tmp_path: Path
) -> None:
    """By hand: runs of punctuation, then GPT-2's words, then numbers in threes."""
    backend = byte_level_backend("gpt-2")
    tokenizer = load(byte_level_gguf(tmp_path / "m.gguf", backend, "default"))
    found = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in found] == pieces


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("jais-2", "a      b 1234", ["a", "    ", " ", " b", " ", "123", "4"]),
        ("jais-2", "don't  ", ["don", "'t", "  "]),
        ("youtu", "ab\u4e2d\u6587 12don't", ["ab", "\u4e2d\u6587", " ", "1", "2", "don't"]),
        ("youtu", "\ud55c\uae00\u3001ok", ["\ud55c\uae00", "\u3001", "ok"]),
        ("command-r", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("stablelm2", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("mpt", "it's 12", ["it", "'s", " 12"]),
        ("a.x-4.0", "it's 12", ["it", "'s", " 12"]),
        ("gigachat", "it's 12", ["it", "'s", " 12"]),
        ("joyai-llm", "it's 1234", ["it", "'s", " ", "123", "4"]),
        ("hunyuan", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("solar-open", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("mellum2", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("exaone", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("glm4", "it's 1234", ["it", "'s", " ", "123", "4"]),
        ("falcon", "x=1234 `b`", ["x", "=", "123", "4", " ", "`", "b", "`"]),
        ("falcon", "it's 12", ["it", "'", "s", " 12"]),
        ("afmoe", "1234567 and 12", ["1", "234", "567", " and", " ", "12"]),
        ("afmoe", "123456", ["123", "456"]),
        ("afmoe", "\u4e2d\u6587ok", ["\u4e2d\u6587", "ok"]),
        ("exaone-moe", "it's so 12/\n\n", ["it", "'s", " so", " ", "1", "2", "/\n", "\n"]),
        ("exaone-moe", "a b c", ["a b c"]),
    ],
)
def test_splits_that_transformers_does_not_know(
    kind: str, text: str, pieces: list[str], tmp_path: Path
) -> None:
    """By hand: Jais 2 takes spaces by powers of two, Youtu runs of a script first, EXAONE words in
    one piece, AFMoE numbers in threes from the right."""
    backend = byte_level_backend("gpt-2")
    tokenizer = load(byte_level_gguf(tmp_path / "m.gguf", backend, kind))
    found = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in found] == pieces


KIMI = "|".join(  # of its tokenization_kimi.py
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def test_merges_that_a_kimi_lacks(tmp_path: Path) -> None:
    """Its tokens stand in the order of merges, as tiktoken takes them."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = split_on(KIMI)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    tokens = sorted(backend.get_vocab(), key=backend.token_to_id)
    of_character = {c: b for b, c in bytes_to_unicode().items()}
    ranks = {bytes(of_character[c] for c in token): i for i, token in enumerate(tokens)}
    truth = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens={})

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre("kimi-k2")
        writer.add_token_list(tokens)

    path = write(tmp_path / "m.gguf", "deepseek2", "gpt2", metadata)
    for text in [*TEXTS, "\u4e2d\u6587Ab\u4e2d's 12345 \u00e9t\u00e9 \u304b\u306a!\n"]:
        assert load(path).encode(text) == truth.encode(text), text


def test_flags_template_and_stop_tokens(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)
        writer.add_eot_token_id(1)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}<|im_end|>")

    backend = byte_level_backend("gpt-2")
    tokenizer = load(byte_level_gguf(tmp_path / "m.gguf", backend, "gpt-2", extra))
    ids = backend.encode("it's").ids
    assert tokenizer.encode("it's") == [0, *ids, 2]
    assert tokenizer.chat([{"role": "user", "content": "it's"}]) == [0, *ids, 2]
    assert tokenizer.eos_ids == (2, 1, 0)


def test_a_template_for_tools(tmp_path: Path) -> None:
    """llama.cpp's converter writes every template of a model, by its name."""

    def extra(writer: gguf.GGUFWriter) -> None:
        texts = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].name }}"}
        writer.add_chat_template([{"name": n, "template": text} for n, text in texts.items()])

    tokenizer = load(byte_level_gguf(tmp_path / "m.gguf", byte_level_backend("gpt-2"), "gpt-2",
                                     extra))  # fmt: skip
    messages = [{"role": "user", "content": "it's"}]
    assert tokenizer.render_chat(messages) == "it's"
    assert tokenizer.render_chat(messages, tools=[{"name": "weather"}]) == "weather"


PIECES = [
    *("<unk>", "<s>", "</s>"),
    *(f"<0x{i:02X}>" for i in range(256)),
    *("▁", "h", "e", "l", "o", "w", "r", "d", "é"),
    *("he", "ll", "hell", "lo", "llo", "hello", "▁he", "▁hello", "wo", "▁w", "▁wo", "or", "ld"),
    *("rld", "world", "▁world", "el", "ello", "▁h"),
]


def sentencepiece_gguf(
    path: Path, architecture: str = "llama", tokens: list[str] = PIECES, *extras: Extra
) -> Path:
    kinds = dict.fromkeys(("<s>", "</s>", "<end_of_turn>"), TokenType.CONTROL)
    kinds |= {"<unk>": TokenType.UNKNOWN}
    kinds |= dict.fromkeys(("  ", "   "), TokenType.USER_DEFINED)
    kinds |= {token: TokenType.BYTE for token in tokens if token.startswith("<0x")}
    types = [kinds.get(token, TokenType.NORMAL) for token in tokens]

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(tokens)
        # With ties, and not in the order of the ids.
        writer.add_token_scores([-float((i * 7) % 11) for i in range(len(tokens))])
        writer.add_token_types(types)

    return write(path, architecture, "llama", metadata, *extras)


SPM_TEXTS = [
    *("hello world", "hello  world", "hellohello", "Hé! 日", "world\nhello", "", "helloworldorld"),
    *("wor ld", "o", "</s>hello"),
]


def test_sentencepiece_matches_transformers(tmp_path: Path) -> None:
    path = sentencepiece_gguf(tmp_path / "m.gguf")
    architecture, description, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, description)
    tokenizer = load(path)
    for text in SPM_TEXTS[:-1]:
        ids = tokenizer.encode(text)
        assert ids == [1, *theirs.encode(text, add_special_tokens=False).ids]
        assert tokenizer.decode(ids) == theirs.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    # SentencePiece's and llama.cpp's dummy space: always one more, also after a special token.
    space, hello = PIECES.index("▁"), PIECES.index("▁hello")
    assert tokenizer.encode(" hello") == [1, space, hello]
    assert tokenizer.encode("</s>hello") == [1, 2, hello]


def test_sentencepiece_without_dummy_space(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(False)

    tokenizer = load(sentencepiece_gguf(tmp_path / "m.gguf", "llama", PIECES, extra))
    assert tokenizer.encode("hello") == [PIECES.index("hello")]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_phi3_drops_white_space_after_its_own_tokens(tmp_path: Path) -> None:
    """By the flags of Phi-3's tokenizer.json, which its GGUF files lack. Names of models vary."""
    own = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]
    drops = {"</s>", *own[1:]}
    tokens = [*PIECES, "\n", *own]

    def metadata(writer: gguf.GGUFWriter) -> None:
        kinds = dict.fromkeys(("<s>", *own), TokenType.CONTROL) | {"<unk>": TokenType.UNKNOWN}
        kinds |= {"</s>": TokenType.USER_DEFINED}
        kinds |= {token: TokenType.BYTE for token in tokens if token.startswith("<0x")}
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
        writer.add_eos_token_id(tokens.index("<|endoftext|>"))
        writer.add_add_bos_token(False)

    path = write(tmp_path / "m.gguf", "phi3", "llama", metadata)
    architecture, description, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, description)
    flags = json.loads(theirs.to_str())
    for token in flags["added_tokens"]:
        token["rstrip"] = token["content"] in drops
    theirs = Backend.from_str(json.dumps(flags))
    tokenizer = load(path)
    for text in ["<|user|>\nhello<|end|>\n<|assistant|>\n", "<s> hello</s>  he<|endoftext|>\nhe"]:
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    chat = [tokens[i] for i in tokenizer.encode("<|user|>\nhello<|end|>\n<|assistant|>\n")]
    assert chat == ["<|user|>", "▁hello", "<|end|>", "<|assistant|>"]


def test_gemma_matches_transformers(tmp_path: Path) -> None:
    tokens = [*PIECES, "  ", "   ", "<end_of_turn>"]

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_add_space_prefix(False)
        writer.add_unk_token_id(0)

    path = sentencepiece_gguf(tmp_path / "m.gguf", "gemma3", tokens, extra)
    architecture, description, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, description)
    tokenizer = load(path)
    for text in [*SPM_TEXTS, "hello   world", "    o", "<end_of_turn>"]:
        ids = tokenizer.encode(text)
        assert ids == [1, *theirs.encode(text, add_special_tokens=False).ids]
    assert tokenizer.eos_ids == (2, tokens.index("<end_of_turn>"))
    assert tokenizer.encode("   o")[1:] == [tokens.index("   "), tokens.index("o")]


def test_gemma4_matches_transformers(tmp_path: Path) -> None:
    """As the converter writes it: the merges of its tokenizer.json, and scores of no meaning."""
    tokens = [
        *("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"),
        *(f"<0x{i:02X}>" for i in range(256)),
        *("▁", "h", "e", "l", "o", "w", "é", "\n", "▁▁", "\n\n", "he", "lo", "ll", "hel", "llo"),
        *("▁he", "▁w", "hello", "▁hello", "<|channel>"),
    ]
    merges = ["▁ ▁", "\n \n", "l l", "l o", "h e", "ll o", "he l", "▁ he", "▁ w", "he llo"]
    kinds = dict.fromkeys(tokens[:6], TokenType.CONTROL) | {"<|channel>": TokenType.USER_DEFINED}
    kinds |= dict.fromkeys(tokens[6:262], TokenType.BYTE)

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_token_scores([-1000.0] * len(tokens))
        writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
        writer.add_token_merges(merges)
        for role, i in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
            getattr(writer, f"add_{role}_token_id")(i)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)

    path = write(tmp_path / "m.gguf", "gemma4", "gemma4", metadata)
    architecture, description, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, description)
    tokenizer = load(path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (2, (1, 5))
    texts = [*SPM_TEXTS, "hello   world", " hello\n\n\nhe", "<|turn>he<|channel>\nllo<turn|>\n"]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == [2, *theirs.encode(text, add_special_tokens=False).ids]
        assert tokenizer.decode(ids) == theirs.decode(ids)
    assert [tokens[i] for i in tokenizer.encode(" hello")] == ["<bos>", "▁he", "llo"]


@pytest.mark.parametrize(
    ("eos", "others", "ends"),
    [
        # What the models' own generation_config.json files list, eos first.
        ("<|endoftext|>", ["<|assistant|>", "<|end|>"], ["<|end|>"]),  # Phi-3
        ("<|return|>", ["<|call|>", "<|end|>", "<|endoftext|>"], ["<|call|>", "<|endoftext|>"]),
        ("<eos>", ["<|tool_response>", "<|turn>", "<turn|>"], ["<|tool_response>", "<turn|>"]),
        ("<|im_end|>", ["<|endoftext|>", "<|im_start|>"], ["<|endoftext|>"]),  # Qwen
    ],
)
def test_all_tokens_that_end_an_answer(
    eos: str, others: list[str], ends: list[str], tmp_path: Path
) -> None:
    tokens = ["<unk>", "<s>", "</s>", eos, *others]

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([TokenType.CONTROL] * len(tokens))
        writer.add_eos_token_id(3)

    tokenizer = load(write(tmp_path / "m.gguf", "llama", "llama", metadata))
    assert [tokens[i] for i in tokenizer.eos_ids] == [eos, *ends]


def test_saved_tokenizer_reads_the_same(tmp_path: Path) -> None:
    for path in (
        sentencepiece_gguf(tmp_path / "s.gguf"),
        byte_level_gguf(tmp_path / "b.gguf", byte_level_backend("qwen2"), "qwen2"),
    ):
        tokenizer = load(path)
        tokenizer.save(tmp_path / path.stem)
        again = Tokenizer.load(tmp_path / path.stem)
        for text in TEXTS + SPM_TEXTS:
            assert again.encode(text) == tokenizer.encode(text)
        assert (again.bos_id, again.eos_ids) == (tokenizer.bos_id, tokenizer.eos_ids)


def test_cache(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sentencepiece_gguf(tmp_path / "m.gguf")
    first = load(path)
    entry, hashed = sorted(own_cache.glob("tokenizers/*/*"))
    # and no temporary file beside them
    assert (entry.name, hashed.name) == ("tokenizer.json", "tokenizer.json.sha256")
    good = entry.read_bytes()
    ids = json.loads(good)
    vocab = ids["model"]["vocab"]
    vocab["h"], vocab["e"] = vocab["e"], vocab["h"]

    for corrupt in (b"", good[: len(good) // 2], b"[]", json.dumps(ids).encode()):
        entry.write_bytes(corrupt)
        assert load(path).encode("hello") == first.encode("hello")
        assert entry.read_bytes() == good

    # Other metadata has an entry of its own.
    load(sentencepiece_gguf(tmp_path / "n.gguf", "llama", [*PIECES, "x"]))
    assert len(list(own_cache.glob("tokenizers/*"))) == 2

    # A cached tokenizer is not built again, and a cache that cannot be written is no error.
    monkeypatch.setattr("cetane.checkpoint.gguf.tokenizer._Vocabulary.build", None)
    assert load(path).encode("hello") == first.encode("hello")
    monkeypatch.undo()
    (tmp_path / "file").touch()
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "file"))
    assert load(path).encode("hello") == first.encode("hello")


def good_tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_token_list(["a", "b", "ab"])
    writer.add_tokenizer_pre("gpt-2")


def good_bpe(writer: gguf.GGUFWriter) -> None:
    good_tokens(writer)
    writer.add_token_merges(["a b"])


@pytest.mark.parametrize(
    ("kind", "extras", "match"),
    [
        ("bert", [], "'bert' is not one of gpt2, llama, gemma4"),
        ("gpt2", [], r"no tokenizer\.ggml\.tokens"),
        ("gpt2", [lambda w: w.add_token_list(["a"])], "pre-tokenizer None is not known"),
        (
            "gpt2",
            [lambda w: w.add_token_list(["a"]), lambda w: w.add_tokenizer_pre("new")],
            "pre-tokenizer 'new' is not known",
        ),
        ("gpt2", [good_tokens], r"no tokenizer\.ggml\.merges"),
        ("gemma4", [good_tokens], r"no tokenizer\.ggml\.merges"),
        ("gpt2", [good_tokens, lambda w: w.add_token_merges(["a z"])], "out of vocabulary"),
        ("gpt2", [good_tokens, lambda w: w.add_token_merges(["ab"])], "'ab' is not two tokens"),
        ("gpt2", [good_tokens, lambda w: w.add_token_types([1])], "1 entries for 3 tokens"),
        ("gpt2", [good_bpe, lambda w: w.add_eos_token_id(3)], "eos_token_id 3 is not below 3"),
        ("gpt2", [good_bpe, lambda w: w.add_bool("tokenizer.chat_template", True)], "not a str"),
        ("llama", [good_tokens], r"no tokenizer\.ggml\.scores"),
        ("llama", [lambda w: w.add_token_list(["a", "b", "a"])], r"tokenizer\.ggml\.scores"),
        (
            "llama",
            [
                lambda w: w.add_token_list(["a", "b", "a"]),
                lambda w: w.add_token_scores([0.0, 0.0, 0.0]),
            ],
            "appears twice",
        ),
        (
            "llama",
            [lambda w: w.add_token_list(["a"]), lambda w: w.add_token_scores([0.0])],
            "bos_token_id 1 is not below 1",
        ),
        ("llama", [lambda w: w.add_array("tokenizer.ggml.tokens", [1, 2])], "not a list"),
        (
            "llama",
            [good_tokens, lambda w: w.add_array("tokenizer.ggml.scores", ["x", "y", "z"])],
            "not a ndarray",
        ),
    ],
)
def test_bad_metadata(kind: str, extras: list[Extra], match: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", kind, *extras)
    with pytest.raises(CetaneError, match=match) as caught:
        load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    if "not known" in match or "not one of" in match:
        assert "safetensors" in str(caught.value.hint)


def test_long_special_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of 1 MB took 12 s and 4 GB."""
    monkeypatch.setattr("cetane.checkpoint.added_tokens.MOST_CHARACTERS", 2)
    types = [TokenType.NORMAL, TokenType.CONTROL, TokenType.CONTROL]
    path = write(tmp_path / "m.gguf", "llama", "gpt2", good_bpe, lambda w: w.add_token_types(types))
    with pytest.raises(CetaneError, match="added tokens have more than 2 characters together"):
        load(path)


def test_damaged_metadata_never_escapes_as_another_error(tmp_path: Path) -> None:
    rng = random.Random(0)
    for path in (
        sentencepiece_gguf(tmp_path / "s.gguf"),
        byte_level_gguf(tmp_path / "b.gguf", byte_level_backend("qwen2"), "qwen2"),
    ):
        data = path.read_bytes()
        for _ in range(100):
            damaged = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(24, len(data))] = rng.choice((0, 1, 65, 255))
            path.write_bytes(damaged)
            with suppress(CetaneError):
                load(path).encode("hello world")


def test_merges_follow_scores_by_hand(tmp_path: Path) -> None:
    """ "abc" is a+bc or ab+c, whichever of "ab" and "bc" scores better."""
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc"]
    for better, expected in (("ab", [6, 5]), ("bc", [3, 7])):
        extras: list[Extra] = [
            lambda w: w.add_token_list(tokens),
            lambda w, better=better: w.add_token_scores([-float(t != better) for t in tokens]),
            lambda w: w.add_add_space_prefix(False),
            lambda w: w.add_add_bos_token(False),
        ]
        path = write(tmp_path / f"{better}.gguf", "llama", "llama", *extras)
        assert load(path).encode("abc") == expected
