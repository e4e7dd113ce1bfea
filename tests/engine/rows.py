"""What tests of a call's rows share."""

from collections.abc import Sequence

import numpy as np

from cetane.engine.engine import Engine


def same_alone_and_among(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Tokens have the same logits, bit for bit, one by one and in one call, after each prompt."""
    for prompt in prompts:
        alone, together = engine.session(), engine.session()
        alone.feed(prompt)
        together.feed(prompt)
        for first in (5, 100, 200):
            tokens = [first, first + 1, first + 7]
            single = [np.array(alone.feed([token])) for token in tokens]
            rows = np.array(together.evaluate(tokens))
            together.accept(3)
            np.testing.assert_array_equal(rows, single)
