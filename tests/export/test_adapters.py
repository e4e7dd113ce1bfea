"""The contract carries adapters. Other runtimes know none: a bundle with them is refused, not
exported without."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.export.test_contract import Models, module, write

from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.errors import CetaneError
from cetane.pipeline.export import export_coreai, export_runtime
from cetane.pipeline.runtime_folder import RUNTIMES

EXPORTS: dict[str, Any] = {"coreai": export_coreai} | {
    name: partial(export_runtime, runtime=name) for name in RUNTIMES
}


@pytest.mark.parametrize("name", EXPORTS)
def test_adapters_are_refused(name: str, adapted: Any, tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="has adapters") as refusal:
        EXPORTS[name](adapted.bundle.path, tmp_path / "out")
    assert "--lora" in str(refusal.value.hint)
    assert not (tmp_path / "out").exists()


def test_the_contracts_host_runs_an_adapter(adapted: Any, tmp_path: Path) -> None:
    """Its logits are those of the model into which peft merged the adapter."""
    bundle, prompt = adapted.bundle, [9, 40, 77, 5, 61]
    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
    contract = write(engine, tmp_path)
    assert sorted(contract["adapters"]) == ["dora", "plain"]
    host = module(tmp_path).Host
    for name, model in adapted.merged.items():
        given = host(tmp_path, Models(engine), adapter=name).feed(prompt)
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0, -1].numpy()
        assert np.abs(given - wanted).max() < 0.02 < np.abs(wanted).max()
