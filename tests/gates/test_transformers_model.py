"""transformers reads a GGUF without asking for the same names again and again."""

import gguf
import pytest

from cetane.gates.transformers_model import one_name_map


def test_names_of_gguf_are_mapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *named: made.append(named))
    with one_name_map():
        for layers in (2, 2, 3):
            gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    assert made == [(gguf.MODEL_ARCH.LLAMA, 2), (gguf.MODEL_ARCH.LLAMA, 3)]
