"""The rewrites' tests draw their numbers anew: they do not depend on which tests ran before."""

import numpy as np
import pytest
from tests.mil.fast.agreement import rng


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state
