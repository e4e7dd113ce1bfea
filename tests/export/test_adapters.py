"""Other runtimes know no adapters: a bundle with them is refused, not exported without."""

from pathlib import Path
from typing import Any

import pytest

from cetane.errors import CetaneError
from cetane.pipeline.export import export_coreai, export_coreml_llm


@pytest.mark.parametrize("export", [export_coreml_llm, export_coreai])
def test_adapters_are_refused(export: Any, adapted: Any, tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="has adapters") as refusal:
        export(adapted.bundle.path, tmp_path / "out")
    assert "--lora" in str(refusal.value.hint)
    assert not (tmp_path / "out").exists()
