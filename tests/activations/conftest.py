"""A tiny llama of int8 weights, and its activations quantized."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cetane.activations import Options, quantize_activations, samples
from cetane.activations.quantize import Quantized
from cetane.bundle import Bundle

INT8: dict[str, Any] = {
    "verify": None,
    "layout": {"kind": "chunks", "chunks": 1},
    "compression": {"default": "int8-per-channel"},
}
"""One shard of layers and one of the head, each with functions of 1 and 8 tokens."""


@pytest.fixture(scope="session", autouse=True)
def _few_prompts() -> Iterator[None]:
    """One category of prompts calibrates, and the answers are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "CALIBRATING", ("chat",))
        patch.setattr(samples, "ANSWER", 2)
        yield


@pytest.fixture(scope="session")
def bundle(tiny_bundle: Callable[..., Bundle]) -> Bundle:
    return tiny_bundle(**INT8)


@pytest.fixture(scope="session")
def made(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Quantized]:
    """The bundle with inputs and outputs of projections in 8 bits, by real samples."""
    target = tmp_path_factory.mktemp("activations") / "a8"
    return quantize_activations(bundle, target, Options(tensors="all"), lambda *_: None)
