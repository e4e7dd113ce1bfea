"""Tokenizers of SentencePiece, tiktoken and GPT-2's form as tokenizer.json, by transformers' own
converters.

The conversion runs once for each file, in a child process: a foreign file may make a library write
gigabytes, or end the process. Code that comes with a model is never run.
"""

import hashlib
import subprocess
from pathlib import Path

from cetane.checkpoint.sandbox import Sandbox
from cetane.checkpoint.tokenizer_trial import LARGEST
from cetane.errors import CetaneError
from cetane.files import cache_dir, is_kept, is_present, keep_text, read_json, sha256

SOURCES = ("tokenizer.model", "tiktoken.model", "tekken.json", "merges.txt")
"""Files that transformers converts, in the order of preference."""
SECONDS, MEMORY = 300, 16 << 30
"""CPU seconds and bytes of address space."""
VOCABULARY = "vocab.json"
"""The tokens that merges.txt merges."""
BESIDE = (
    VOCABULARY, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "config.json",
)  # fmt: skip
"""Files that decide what transformers makes of a source."""
VERSION = 3
"""The version of the conversion, a part of the cache's key."""
CODE = """
import json
sys.modules["torch"] = None  # no tokenizer needs it, and its import takes longer than all the rest
try:
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(
        sys.argv[1], local_files_only=True, trust_remote_code=False
    )
    backend = tokenizer.backend_tokenizer
    if not backend.encode("a", add_special_tokens=False).ids:
        sys.exit(f"error: {type(tokenizer).__name__} finds no tokens in it")
    print(json.dumps(tokenizer.special_tokens_map))
    sys.stdout.write(backend.to_str())
except Exception as error:
    sys.exit("error: " + " ".join(str(error).split()))
"""
OFFLINE = {"HF_HUB_OFFLINE": "1"}
SANDBOX = Sandbox(CODE, SECONDS, MEMORY, 2 * SECONDS, OFFLINE)


def converted(folder: Path) -> tuple[Path, dict[str, str]] | None:
    """The tokenizer.json of a folder that has another form of tokenizer, and its special tokens by
    name, which may be those of its class. None if the folder has no such form.

    The file lies in the cache folder. Raises CetaneError if transformers cannot convert it.
    """
    source = next((folder / name for name in SOURCES if is_present(folder / name)), None)
    if source is None:
        return None
    files = [source, *(path for name in BESIDE if is_present(path := folder / name))]
    told = "".join(f"{path.name} {sha256(path, LARGEST)}\n" for path in files)
    digest = hashlib.sha256(told.encode()).hexdigest()
    kept = cache_dir() / "tokenizers" / f"converted-{VERSION}-{digest}.json"
    beside = kept.with_suffix(".special.json")
    if not (is_kept(kept) and is_kept(beside)):
        special, tokenizer = convert(folder, source)
        keep_text(beside, special)
        keep_text(kept, tokenizer)
    named = read_json(beside)
    return kept, {name: text for name, text in named.items() if isinstance(text, str)}


def convert(folder: Path, source: Path) -> tuple[str, str]:
    """The special tokens by name, as JSON, and the content of the tokenizer.json, as a child
    process makes them."""
    if not source.stat().st_size:  # transformers would make a tokenizer without tokens
        raise CetaneError(f"{source} is empty", "download it again")
    if source.name == "merges.txt" and not (folder / VOCABULARY).is_file():
        raise CetaneError(f"{folder} has merges.txt but no {VOCABULARY}", f"get its {VOCABULARY}")
    try:
        done = SANDBOX.run(folder)
    except subprocess.TimeoutExpired:
        why = f"{source}: its conversion takes more than {SANDBOX.patience} s"
        raise CetaneError(why) from None
    if done.returncode or not 0 < len(done.stdout) <= LARGEST:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = said[-1].removeprefix("error: ")[:200] if said else "it gives nothing"
        raise CetaneError(
            f"transformers cannot make a tokenizer.json of {source}: {why}",
            "get a tokenizer.json of the same model, or set tokenizer_class in"
            " tokenizer_config.json to the model's own",
        )
    special, _, tokenizer = done.stdout.decode("utf-8").partition("\n")
    return special, tokenizer
