"""Other runtimes know no adapters: a bundle with them is refused, not exported without."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cetane.errors import CetaneError
from cetane.pipeline.export import RUNTIMES, export_coreai, export_runtime

EXPORTS: dict[str, Any] = {"coreai": export_coreai} | {
    name: partial(export_runtime, runtime=name) for name in RUNTIMES
}


@pytest.mark.parametrize("name", EXPORTS)
def test_adapters_are_refused(name: str, adapted: Any, tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="has adapters") as refusal:
        EXPORTS[name](adapted.bundle.path, tmp_path / "out")
    assert "--lora" in str(refusal.value.hint)
    assert not (tmp_path / "out").exists()
