"""The trial of a foreign tokenizer: a child process loads it once, before this process does.

The `tokenizers` library trusts its files. A damaged file can make it panic, abort the process,
match a regular expression for ever, or write gigabytes. None of these can be caught.
"""

import json
import re
import subprocess
from pathlib import Path
from signal import SIGKILL, SIGXCPU

from cetane.checkpoint.added_tokens import MOST_CHARACTERS
from cetane.checkpoint.sandbox import Sandbox
from cetane.errors import CetaneError
from cetane.files import cache_dir, read_cache, refuse_pointer, sha256, write_cache

SECONDS, MEMORY = 20, 4 << 30
"""CPU seconds and bytes of address space. Gemma's tokenizer of 33 MB takes 2 s and 1.2 GB."""
LARGEST = 1 << 28
"""Bytes of a file. Released tokenizers have up to 40 MB."""
VERSION = 5
"""The version of the trial, a part of the cache's key."""
MOST_GROWTH = 100
"""The most characters that a step may make of one. Normal forms of Unicode make 18 at most."""
CODE = f"""
import json
import tokenizers
def check(made, text):
    if len(made) > {MOST_GROWTH} * (len(text) + 1):
        sys.exit("error: it makes a long text of a short one")
def strings(value, name=""):
    if name in ("content", "prepend"):
        check(value, "")
    if isinstance(value, str) and value and name != "precompiled_charsmap":
        yield value
    elif isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from strings(inner, name)
def added_characters(content):
    try:
        return sum(len(token["content"]) for token in json.loads(content)["added_tokens"])
    except (LookupError, TypeError, ValueError, RecursionError):
        return 0  # the library says what is wrong
with open(sys.argv[1], "rb") as file:
    content = file.read()
if added_characters(content) > {MOST_CHARACTERS}:
    sys.exit("error: its added tokens have more than {MOST_CHARACTERS:,} characters together")
try:
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
except Exception as error:
    sys.exit(f"error: {{error}}")
normalizer, splitter, decoder = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder
# A chain of replacements may double only what it replaces, which other texts do not hold.
steps = [json.loads(step.__getstate__()) for step in (normalizer, splitter, decoder) if step]
own = [*strings(steps)]
for text in own if decoder else ():
    check(decoder.decode([text]), text)
for text in (*own, *map(chr, [*range(0xD800), *range(0xE000, 0x30000)])) if normalizer else ():
    check(normalizer.normalize_str(text), text)
letters = "".join(chr(c) for c in range(32, 127))
words = "The quick brown fox, naïve café: 12345.678! 中文 العربية 🙂 "
texts = ["", "a", words, letters, words * 20, "a" * 512, " " * 512, "7" * 512, "!" * 512,
         "\\n" * 64, "\\0\\t\\ufffd", "aA1! " * 200, *(c * 64 + "!" for c in "a 7")]
for text in (*texts, *own):
    if splitter:
        check("".join(piece for piece, _ in splitter.pre_tokenize_str(text)), text)
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special).ids
        if len(ids) > 100 * (len(text) + 100):
            sys.exit("error: it makes too many tokens of a short text")
        tokenizer.decode(ids)
tokenizer.get_vocab_size()
"""
GAVE_UP = re.compile(r"Onig: Regex search error: ([a-z -]+)")
"""How the library ends at a regular expression that tries too many ways: after ten million steps,
on any machine."""
RAISED = re.compile(r"^Exception: (.+)", re.MULTILINE)
"""What the library raises at a text that it cannot encode."""
SANDBOX = Sandbox(CODE, SECONDS, MEMORY, 3 * SECONDS, {"TOKENIZERS_PARALLELISM": "false"})


def check_tokenizer(path: Path) -> None:
    """Raise CetaneError for a tokenizer.json that cannot load and encode within the limits.

    The cache keeps the verdict under the file's hash, so each file is tried once.
    """
    kept = cache_dir() / "tokenizers" / f"trial-{VERSION}-{sha256(path, LARGEST)}.json"
    known = read_cache(kept)
    error = tried(path) if known is None else json.loads(known)["error"]
    if known is None:
        write_cache(kept, json.dumps({"error": error}))
    if error is not None:
        refuse_pointer(path)
        raise CetaneError(f"{path} is not a valid tokenizer: {error}", "get the model again")


def tried(path: Path) -> str | None:
    """The error of a child that loaded the tokenizer and encoded some texts; None if it passed.

    Raises CetaneError for a child that ends without a verdict: the cause may be this machine.
    """
    try:
        done = SANDBOX.run(path)
    except subprocess.TimeoutExpired:
        raise no_verdict(path, f"it takes more than {SANDBOX.patience} s") from None
    said = done.stderr.decode("utf-8", "replace").strip()
    if done.returncode == 0:
        return None
    if said.startswith("error: "):
        return said.removeprefix("error: ")[:200]
    if gave_up := GAVE_UP.search(said):
        return f"a regular expression of it fails on a short text: {gave_up[1]}"
    if raised := RAISED.search(said):
        return f"it fails on a short text: {raised[1][:200]}"
    if "panicked" in said and "Os {" not in said:  # no error of this machine
        return "the tokenizers library panics on it"
    raise no_verdict(path, why_it_ended(done.returncode, said))


def why_it_ended(status: int, said: str) -> str:
    """Why a child ended without a verdict, by its status and by what it wrote to stderr."""
    if "MemoryError" in said or "memory allocation" in said:
        return f"it needs more than {MEMORY >> 30} GB of memory, or the machine has less"
    if "panicked" in said:
        return "the tokenizers library panics on it"
    if status == -SIGXCPU:
        return f"it needs more than {SANDBOX.seconds} s of a processor"
    if status == -SIGKILL:
        return "another program killed the child process"
    last = said.splitlines()[-1][:200] if said else "it said nothing"
    return f"the child process ended with status {status}: {last}"


def no_verdict(path: Path, why: str) -> CetaneError:
    return CetaneError(
        f"{path}: the trial of this tokenizer came to no verdict: {why}",
        "run the command again; if it ends so again, get the model again",
    )
