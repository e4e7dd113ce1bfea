"""Weights that lie in a file: the same numbers, and no memory of the process."""

from pathlib import Path

import pytest
import torch
from torch import nn

from cetane.gates import on_disk
from cetane.gates.on_disk import OnDisk


class Tied(nn.Module):
    """An embedding whose rows are the head's, and a layer of odd sizes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(1000, 333)
        self.layer = nn.Linear(333, 333)
        self.head = nn.Linear(333, 1000, bias=False)
        self.head.weight = self.rows.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layer(self.rows(tokens)))
        return result


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Tied:
    monkeypatch.setattr(on_disk, "LEAST", 1)
    return Tied().requires_grad_(False)


def resident(model: nn.Module) -> int:
    """Bytes of the model's pages that the process holds."""
    start = min(parameter.data_ptr() for parameter in model.parameters())
    for block in Path("/proc/self/smaps").read_text().split("VmFlags:"):
        lines = [line for line in block.splitlines() if "-" in line.split(" ")[0]]
        if lines and int(lines[-1].split("-")[0], 16) <= start < int(
            lines[-1].split(" ")[0].split("-")[1], 16
        ):
            return int(block.split("Rss:")[1].split()[0]) * 1024
    raise AssertionError("the weights are not mapped")


def test_a_pass_gives_the_same_and_leaves_nothing_in_memory(model: Tied) -> None:
    tokens = torch.tensor([5, 0, 999, 7])
    before, places = model(tokens), {p.data_ptr() for p in model.parameters()}
    moved = OnDisk(model)
    assert not places & {p.data_ptr() for p in model.parameters()}
    assert model.head.weight is model.rows.weight
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters())
    with moved.in_use():
        assert torch.equal(model(tokens), before)
        assert float(model.layer.weight.sum()) and resident(model)
    assert not resident(model)
    with moved.in_use():
        assert torch.equal(model(tokens), before)


def test_where_no_file_can_be_written_they_stay(
    model: Tied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "file"))
    tokens, places = torch.tensor([3]), {p.data_ptr() for p in model.parameters()}
    before = model(tokens)
    with OnDisk(model).in_use():
        assert torch.equal(model(tokens), before)
    assert places == {p.data_ptr() for p in model.parameters()}
