"""First-token acceptance: how often each drafter knows the next token of greedy answers to the
prompts of the speculative suite. Each is asked at every position.

n-gram lookup seldom proposes, so there are three shares: of all positions, of a drafter's own
proposals, and of the positions at which the first drafter had a proposal.
"""

import time
from collections import deque
from pathlib import Path

from cetane.bundle import Bundle
from cetane.engine.generate import generate
from cetane.engine.open import open_engine
from cetane.engine.sampling import Sampler
from cetane.gates.probes import asked
from cetane.prompts import suite
from cetane.speculate.drafter import open_session
from cetane.speculate.first_tokens import FirstTokens
from cetane.speculate.open import DrafterOptions, open_drafters
from common import arguments, report


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("drafters", nargs="+", help="as for `cetane run --speculative`")
    parser.add_argument("--only", default="chat", help="categories, separated by commas")
    parser.add_argument("--prompts", type=int, help="most prompts of a category")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    options = parser.parse_args()
    bundle = Bundle(Path(options.model))
    engine, stop, rows, results = open_engine(bundle), bundle.tokenizer.eos_ids, [], []
    for category in options.only.split(","):
        texts = suite()[category][: options.prompts]
        prompts = [asked(bundle.tokenizer, text) for text in texts]
        found: list[FirstTokens] = []
        for name in options.drafters:
            chosen = DrafterOptions(name)
            (drafter,) = open_drafters(chosen, bundle, Sampler(), "auto", remember=False)
            started = time.process_time()
            one = FirstTokens(drafter)
            for prompt in prompts:
                session = open_session(engine, [drafter])
                deque(generate(session, prompt, Sampler(), options.tokens, stop, one), maxlen=0)
            found.append(one)
            row = [category, drafter.name, len(prompts), len(one.right), sum(one.proposed),
                   sum(one.right), one.share(), one.share(one.proposed),
                   one.share(found[0].proposed)]  # fmt: skip
            rows.append(row)
            results.append(dict(zip(COLUMNS, row, strict=True))
                           | {"cpu_seconds": time.process_time() - started})  # fmt: skip
    report("first-token acceptance", COLUMNS, rows, {"results": results}, options.json)


COLUMNS = ["category", "drafter", "prompts", "positions", "proposals", "right", "of positions",
           "of proposals", "of the first's proposals"]  # fmt: skip


if __name__ == "__main__":
    main()
