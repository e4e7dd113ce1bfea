"""The trial of a grammar: a child process compiles it once, before the server itself does.

llguidance trusts its grammars. One of a few hundred bytes can keep it busy for ever or end the
process: a chain of 3,000 rules overflows its stack. Neither can be caught, so a child process
compiles each grammar first.
"""

from functools import lru_cache

from cetane.checkpoint.sandbox import Sandbox
from cetane.errors import CetaneError

SECONDS, MEMORY = 5, 2 << 30
"""CPU seconds and bytes of address space of a trial. The largest schema of OpenAI's API, with 5,000
properties, takes 0.9 s; one with 100 takes 0.3 s, nearly all of it the child's start."""
CODE = """
from llguidance import LLMatcher
LLMatcher.validate_grammar(sys.stdin.buffer.read().decode())
"""
SANDBOX = Sandbox(CODE, SECONDS, MEMORY, 3 * SECONDS, {"RAYON_NUM_THREADS": "1"})


@lru_cache(maxsize=32)
def check_compiles(grammar: str) -> None:
    """Raise CetaneError if llguidance comes to no end with a grammar within the limits. A wrong
    grammar passes. Clients send the same few again and again, so the last that passed are kept."""
    if not SANDBOX.succeeds(grammar.encode()):
        raise CetaneError(
            f"the grammar needs more than {SECONDS} s or {MEMORY >> 30} GB, or is nested too"
            " deeply: make it simpler"
        )
