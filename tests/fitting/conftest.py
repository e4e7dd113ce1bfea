"""What all tests of fits share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this process: one that fits at the same time may write other words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CETANE_CACHE", str(tmp_path_factory.mktemp("fits")))
        yield
