"""A small decoder layer through coremltools' whole conversion, against the torch module."""

from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
import torch
from torch.nn import functional

from cetane.mil import load
from cetane.mil.executor import Executable

WIDTH, HEADS, KV_HEADS, HEAD, LENGTH, VOCABULARY = 32, 4, 2, 8, 6, 50


class Decoder(torch.nn.Module):
    """Embedding, one pre-norm layer with rotary grouped-query attention, gated MLP, next token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.query = torch.nn.Linear(WIDTH, HEADS * HEAD)
        self.key = torch.nn.Linear(WIDTH, KV_HEADS * HEAD)
        self.value = torch.nn.Linear(WIDTH, KV_HEADS * HEAD)
        self.output = torch.nn.Linear(HEADS * HEAD, WIDTH)
        self.gate = torch.nn.Conv2d(WIDTH, 64, 1)
        self.up = torch.nn.Conv2d(WIDTH, 64, 1)
        self.down = torch.nn.Conv2d(64, WIDTH, 1)
        angles = torch.outer(torch.arange(LENGTH), 100.0 ** -torch.linspace(0, 1, HEAD // 2))
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -4e4).triu(1))

    @staticmethod
    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat([-right, left], -1) * self.sin

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(tokens)
        h = self.norm(x)
        q, k, v = (
            linear(h).view(1, LENGTH, -1, HEAD).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        q, k = self.rotate(q), self.rotate(k)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        a = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        x = x + self.output(a.transpose(1, 2).reshape(1, LENGTH, -1))
        h = self.norm(x).transpose(1, 2).unsqueeze(2)
        h = self.down(functional.silu(self.gate(h)) * functional.gelu(self.up(h)))
        x = x + h.squeeze(2).transpose(1, 2)
        logits = self.norm(x) @ self.embed.weight.T
        return logits, logits.argmax(-1)


@pytest.fixture(scope="module", params=["iOS16", "iOS18"])
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = ct.convert(
        torch.jit.trace(Decoder().eval(), torch.zeros(1, LENGTH, dtype=torch.int32)),
        inputs=[ct.TensorType("tokens", shape=(1, LENGTH), dtype=np.int32)],
        outputs=[ct.TensorType("logits"), ct.TensorType("next")],
        minimum_deployment_target=ct.target[request.param],
        skip_model_load=True,
    )
    path = tmp_path_factory.mktemp("decoder") / "decoder.mlpackage"
    model.save(str(path))
    return path


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("fp16", 3e-2)])
def test_decoder_agrees_with_torch(package: Path, precision: str, tolerance: float) -> None:
    tokens = np.array([[3, 14, 15, 9, 26, 5]], np.int32)
    model = Decoder().half().float().eval()  # the package's weights are fp16 too
    with torch.no_grad():
        logits, following = model(torch.from_numpy(tokens))
    outputs = Executable(load(package).functions["main"], precision)({"tokens": tokens})  # type: ignore[arg-type]
    np.testing.assert_allclose(outputs["logits"], logits, atol=tolerance)
    np.testing.assert_array_equal(outputs["next"], following)
