"""What transformers reads of a model's files: its tokenizer, and the config of a GGUF file.

transformers and chat templates run in a child process, since they trust a model's files. The cache
folder keeps what the child said.
"""

import json
import subprocess
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.checkpoint.convert_tokenizer import OFFLINE
from cetane.checkpoint.sandbox import Sandbox
from cetane.checkpoint.tokenizer_files import TOKENIZER_FILES
from cetane.errors import CetaneError
from cetane.files import (
    cache_dir,
    content_identity,
    file_identity,
    json_sha256,
    read_cache,
    write_cache,
)  # fmt: skip
from cetane.gates.probes import QUESTIONS, texts
from cetane.validation import Data, parse_json, validated

SECONDS, MEMORY, LARGEST = 120, 16 << 30, 1 << 24
"""CPU seconds, bytes of address space, and bytes of the answer. Gemma's GGUF takes 20 s."""
SIGNS = """\
Größe, naïve Café: “Quotes”… don't, I'LL; Ελληνικά, Русский
עברית, العربية, हिन्दी, ไทย, 日本語の文章です。中文,한국어는
\uff46\uff55\uff4c\uff4c \uff11\uff12 \ufb01, ½ ², Ⅷ, ٣٤٥, \u00e9 e\u0301 x\u0302 İı ẞß
👍🏽 👩\u200d👩\u200d👧 🇫🇷 ☕\ufe0f \U0001f9ff \u200b|\u00a0|\u3000|\u2028
\ufffd|\ue000|\u0007|\u007f|
\ttabs\t\there,  two   three    blanks \r\nCRLF\r\n\r\n\n\n
1234567890123456789012345 3.14159265 1,000,000 0x1F v2.0.1 2024-11-28T16:45:53Z
aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!!!!!!!!!! ________ ==== .... \\\\ {}[]()<>/@#$%^&*~`|
camelCase snake_case UPPER http://a.b/c?d=e&f=%20#g <b>x</b> a@b.c  blanks at the end   """
"""What an English text lacks: other scripts, joined signs, control characters, long numbers, runs
of one sign. Rules of splitting differ most in these."""
TEXTS = ("", texts(), SIGNS)
CHATS = (
    [{"role": "user", "content": QUESTIONS[0]}],
    [
        {"role": "user", "content": QUESTIONS[2]},
        {"role": "assistant", "content": "Air scatters blue light the most."},
        {"role": "user", "content": QUESTIONS[1]},
    ],
)
CODE = """
import json
from pathlib import Path
from transformers import (
    AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
)

place, (texts, chats) = Path(sys.argv[1]), json.loads(ASKED)
local = {"local_files_only": True, "trust_remote_code": False}
if place.is_file():
    folder, gguf, kinds = place.parent, {"gguf_file": place.name}, [AutoTokenizer]
else:
    folder, gguf, kinds = place, {}, [AutoTokenizer, PreTrainedTokenizerFast]

def chat(tokenizer, messages, tokenize):
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=tokenize, return_dict=False
        )
    except Exception:
        return None

def sample(kind):
    tokenizer = kind.from_pretrained(folder, **gguf, **local)
    return {
        "reader": type(tokenizer).__name__,
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "texts": [tokenizer(text).input_ids for text in texts],
        "plain": [tokenizer(text, add_special_tokens=False).input_ids for text in texts],
        "rendered": [chat(tokenizer, messages, False) for messages in chats],
        "chats": [chat(tokenizer, messages, True) for messages in chats],
        "from_gguf": bool(gguf),
    }

def stops():
    stated = None
    if (folder / "generation_config.json").is_file():
        stated = GenerationConfig.from_pretrained(folder, **local).eos_token_id
    if stated is None:
        config = PreTrainedConfig.get_config_dict(folder, **local)[0]
        stated = config.get("eos_token_id")
        if stated is None:
            stated = (config.get("text_config") or {}).get("eos_token_id")
    return [i for i in (stated if isinstance(stated, list) else [stated]) if type(i) is int]

def config():
    stated = PreTrainedConfig.get_config_dict(folder, **gguf, **local)[0]
    if "full_attention_interval" in stated:
        stated["layer_types"] = AutoConfig.for_model(**stated).layer_types
    return stated

answer = {"samples": [], "stops": None, "config": None, "error": None}
for kind in kinds:
    try:
        answer["samples"].append(sample(kind))
    except Exception as error:
        answer["error"] = answer["error"] or " ".join(str(error).split())[:200]
try:
    if gguf:
        answer["config"] = config()
    else:
        answer["stops"] = stops()
except Exception:
    pass
print(json.dumps(answer, default=str))
"""
SANDBOX = Sandbox(
    f"ASKED = {json.dumps([TEXTS, CHATS])!r}\n{CODE}",
    SECONDS,
    MEMORY,
    2 * SECONDS,
    OFFLINE | {"TOKENIZERS_PARALLELISM": "false"},
)


class TokenizerSample(Data):
    """What a tokenizer of transformers makes of `TEXTS` and `CHATS`."""

    reader: str
    """The class in transformers."""
    bos: int | None
    eos: int | None
    texts: tuple[tuple[int, ...], ...]
    """The ids of each text, with special tokens around them."""
    plain: tuple[tuple[int, ...], ...]
    """The ids of each text alone."""
    rendered: tuple[str | None, ...]
    """The prompt of each conversation; None where the template refuses it, or there is none."""
    chats: tuple[tuple[int, ...] | None, ...]
    """The ids of each conversation."""
    from_gguf: bool


class TransformersFiles(Data):
    """What transformers reads of a model's files."""

    samples: tuple[TokenizerSample, ...] = ()
    """The tokenizer by the class of the model, and of a folder also as its tokenizer.json says.
    Either is right: some classes read otherwise on purpose."""
    stops: tuple[int, ...] | None = None
    """The stop tokens of generation_config.json, else of config.json; None if they are unknown."""
    config: Mapping[str, Any] | None = None
    """What a GGUF file says of the config; None for a folder, and where transformers does not know
    the architecture."""
    error: str | None = None
    """Why transformers cannot read a tokenizer; None if it can."""


def read_by_transformers(checkpoint: Checkpoint) -> TransformersFiles:
    """What transformers reads of a checkpoint's files. Never raises an error."""
    place = checkpoint.folder or Path(checkpoint.source)
    if not place.exists():
        return TransformersFiles(error=f"{place} is not here")
    try:
        kept = cache_dir() / "tokenizers" / f"read-{key_of(place, checkpoint.tokenizer)}.json"
        known = read_cache(kept)
        answer = asked(place) if known is None else known
        read = validated(TransformersFiles, parse_json(answer, str(kept)), str(kept))
    except CetaneError as error:
        return TransformersFiles(error=str(error))
    if known is None:
        write_cache(kept, answer)
    return read


def asked(place: Path) -> str:
    """What a child process says of a folder or a GGUF file: `TransformersFiles` as JSON.

    Raises CetaneError for a child that does not come to an answer: the cause may be this machine.
    """
    try:
        done = SANDBOX.run(place)
    except subprocess.TimeoutExpired:
        raise CetaneError(f"it takes more than {SANDBOX.patience} s") from None
    if done.returncode or not 0 < len(done.stdout) <= LARGEST:
        raise CetaneError(f"its process ended with status {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


def key_of(place: Path, tokenizer: Tokenizer) -> str:
    """A key of all that a child's answer depends on. Some templates write the date."""
    files = [place / name for name in ("config.json", *TOKENIZER_FILES)]
    dated = any("strftime" in template for template in tokenizer.templates.values())
    return json_sha256(
        [
            version("transformers"),
            SANDBOX.code,
            str(date.today()) if dated else "",
            *(content_identity(path) for path in files if path.is_file()),
            *([str(place.parent), file_identity(place)] if place.is_file() else ()),
        ]
    )
