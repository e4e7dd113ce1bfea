"""What tests of a call's rows share."""

from collections.abc import Sequence

import numpy as np

from cetane.engine.engine import Engine


def same_alone_and_among(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Tokens have the same logits, bit for bit, one by one and in one call, after each prompt. Two
    have a narrower function where there is one."""
    for prompt in prompts:
        alone, together = engine.session(), engine.session()
        alone.feed(prompt)
        together.feed(prompt)
        for first, count in ((5, 3), (100, 2), (200, 3)):
            tokens = [first, first + 1, first + 7][:count]
            single = [np.array(alone.feed([token])) for token in tokens]
            rows = np.array(together.evaluate(tokens))
            together.accept(count)
            np.testing.assert_array_equal(rows, single)
