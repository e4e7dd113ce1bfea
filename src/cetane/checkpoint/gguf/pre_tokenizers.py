"""How a GGUF file's tokenizer splits a text before it merges bytes, as data."""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    _TEKKEN.replace(r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDINGS + "|")
    .replace(r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _ENDINGS + "|")
    .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)
_SPACES = "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_JAIS2 = _LLAMA3.replace(r"|\s+(?!\S)|\s+", rf"{_SPACES}|\s{{1}}")
_YOUTU_SCRIPTS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+"
    r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    r"|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_YOUTU = _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED_CODER = _QWEN2.replace(r"+[\r\n]*|", "+|")

# From the tokenizer.json of DeepSeek-V2-Lite, DeepSeek-Coder and DeepSeek-V3. Characters are
# written by their numbers, since some look like others.
_CASED = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    r"\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    r"\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    r"\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    r"\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    r"\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    r"\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    r"\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    r"\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    r"\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}"
    r"\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # threes from the right
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    r"\u1100-\u11ff]+",
    _DEEPSEEK_V3[2],
)
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_NO_HAN = "&&[^\\p{Han}]]"
_KIMI_K2 = r"\p{Han}+|" + _GPT4O.replace(r"\p{M}]", r"\p{M}" + _NO_HAN).replace(
    r"[\r\n/]*", r"[\r\n]*"
)


@dataclass(frozen=True)
class PreTokenizer:
    """The meaning of one value of `tokenizer.ggml.pre` (llama.cpp's llama-vocab.cpp)."""

    splits: tuple[str, ...]  # applied one after the other; each match becomes a piece
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is itself a token stays whole
    add_bos: bool = False
    merges_by_id: bool = False  # the merges follow from the order of tokens, if a file has none


PRE_TOKENIZERS = (
    dict.fromkeys(
        (
            "gpt-2",
            "olmo",
            "granite-docling",
            "trillion",
            "mellum",
            "phi-2",
            "exaone4",
            "mpt",
            "a.x-4.0",
            "gigachat",
        ),
        PreTokenizer((_GPT2,)),
    )
    | dict.fromkeys(
        ("smollm", "starcoder", "refact", "minerva-7b", "command-r", "mellum2", "exaone"),
        PreTokenizer((r"\p{N}", _GPT2)),
    )
    | dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral", "midm-2.0"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    )
    | dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,)))
    | dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True))
    | dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), PreTokenizer((_GPT4O,)))
    | dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), PreTokenizer(_DEEPSEEK_V3))
    | dict.fromkeys(
        ("deepseek-r1-qwen", "hunyuan", "kormo", "megrez", "solar-open"), PreTokenizer((_QWEN2,))
    )
    | {
        "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9]{3}")),
        "qwen2": PreTokenizer((_QWEN2,), nfc=True),
        "stablelm2": PreTokenizer((_QWEN2,), nfc=True),
        "jais-2": PreTokenizer((_JAIS2,)),
        "youtu": PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), ignore_merges=True),
        "seed-coder": PreTokenizer((_SEED_CODER,)),
        "qwen35": PreTokenizer((_QWEN35,), nfc=True),
        "afmoe": PreTokenizer(_AFMOE),
        "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
        "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9]{3}")),
        "kimi-k2": PreTokenizer((_KIMI_K2,), merges_by_id=True),
        "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
        "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
        "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    }
)
