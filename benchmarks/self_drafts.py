"""Self-drafts beside plain decoding and look-ups, after long prompts of Python's documentation.
`triforce` is self-drafts and look-ups.

All run in turns in one process, so that a noisy machine disturbs all. Speeds are by CPU time of the
process. The bundle needs a smaller capacity:

    cetane build MODEL -r int8 -o BUNDLE --context 8192 --set cache.capacities=[512] \\
        --set tokens.verify=8
    python benchmarks/self_drafts.py BUNDLE [--tokens 7000] [--new 128]

docs/reference/drafts.md has the table.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.engine.backend import Array
from cetane.engine.generate import extend
from cetane.engine.open import open_engine
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.gates.quality import read_tokens
from cetane.speculate.controller import Controller
from cetane.speculate.ngram import Ngram
from cetane.speculate.open import call_times
from cetane.speculate.speculator import Speculator
from cetane.speculate.triforce import TriForce
from common import arguments, report, standard_library_text

QUESTION = "\n\nExplain in your own words what the text above is about, and who needs it."
COLUMNS = ["prompt", "drafter", "tokens/s", "ratio", "verifying calls", "tokens a call",
           "accepted", "same tokens"]  # fmt: skip


def answer(
    session: Session, ids: list[int], logits: Array, new: int, speculator: Speculator | None
) -> tuple[list[int], float]:
    """The greedy tokens after a prompt that the session holds, and their CPU seconds after the
    first. These count the reading of the prompt by a drafter."""
    reading = time.process_time()
    if speculator is not None:
        speculator.begin(session, ids)
        speculator.read()
    reading = time.process_time() - reading
    tokens, started = [], 0.0
    for token in extend(session, logits, Sampler(), new, (), speculator):
        started = started or time.process_time()
        tokens.append(token)
    return tokens, reading + time.process_time() - started


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--starts", type=int, nargs="+", default=[0, 14000])
    parser.add_argument("--draft-tokens", type=int, default=4)
    options = parser.parse_args()
    bundle, new, most = Bundle(Path(options.model)), options.new, options.draft_tokens
    engine = open_engine(bundle, "portable")
    costs = call_times(engine, most)
    last = max(options.starts) + options.tokens
    text = read_tokens(bundle.tokenizer, standard_library_text(), last)
    makers: dict[str, Callable[[], Speculator | None]] = {
        "none": lambda: None,
        "self-drafts": lambda: Speculator([TriForce(bundle.plan)], most, Controller(costs)),
        "self-drafts, always": lambda: Speculator([TriForce(bundle.plan)], most),
        "ngram": lambda: Speculator([Ngram()], most, Controller(costs)),
        "triforce": lambda: Speculator([Ngram(), TriForce(bundle.plan)], most, Controller(costs)),
    }
    rows: list[list[Any]] = []
    for start in options.starts:
        part = text[start : start + options.tokens]
        asked = [{"role": "user", "content": bundle.tokenizer.decode(part) + QUESTION}]
        for prompt, ids in (("goes on", part), ("question", bundle.tokenizer.chat(asked))):
            session = engine.session()
            logits = session.feed(ids)
            assert logits is not None
            mark, plain, first = session.mark(), 0.0, None
            for name in (*makers, "none"):
                session.rewind(mark)
                speculator = makers[name]()
                tokens, seconds = answer(session, ids, logits, new, speculator)
                plain, first = plain or seconds, first or tokens
                found = {} if speculator is None else speculator.summary()
                rows.append(
                    [f"{prompt}, {start}", name, (len(tokens) - 1) / seconds, plain / seconds,
                     *(found.get(key, "") for key in
                       ("verifier_calls", "tokens_per_call", "acceptance")), tokens == first]
                )  # fmt: skip
                print(rows[-1], flush=True)
    report(f"{new} tokens after {options.tokens}, drafts of {most}", COLUMNS, rows, {"rows": rows},
           options.json)  # fmt: skip


if __name__ == "__main__":
    main()
