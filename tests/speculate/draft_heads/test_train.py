"""Training by several processes: as one that sees all their windows together."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.speculate.lessons import KINDS, counting, untrained
from torch import Tensor

from cetane.errors import CetaneError
from cetane.speculate.draft_heads.train import devices, train
from cetane.speculate.draft_heads.windows import Windows

Tensors = dict[str, Tensor]
ROOT = Path(__file__).parents[3]
PROCESSES = 2
WINDOWS = 12
BATCH = 2
EPOCHS = 4


class Watched(Windows):
    """Windows that remember which were taken, in every step."""

    def part(self, indices: Sequence[int]) -> Windows:
        self.__dict__.setdefault("taken", []).append(list(indices))
        return super().part(indices)


def trained(
    kind: str, windows: int, batch: int, epochs: int = EPOCHS, minutes: float = 9.0
) -> Tensors:
    """The weights of a head that all processes trained. `seen` are the windows that this process
    has learnt from, and `steps` is the number of steps."""
    data, embedding = counting(windows)
    watched = Watched(**vars(data))
    head = untrained(kind, embedding)
    train(head, watched, embedding, epochs, minutes, batch, lambda *_: None, devices())
    taken = vars(watched)["taken"]
    seen = torch.tensor([index for share in taken for index in share])
    return head.state_dict() | {"seen": seen, "steps": torch.tensor(len(taken))}


def work(out: Path) -> None:
    """What every process of the test does."""
    process = devices().process_index
    results = {kind: trained(kind, WINDOWS, BATCH) for kind in KINDS}
    minutes = 0.001 if process == 0 else 99.0  # only the main process has so little time
    results["clock"] = trained("medusa", 9, BATCH, 10**6, minutes)  # 4 + 4 + 1 windows
    for name, tensors in results.items():
        save_file(tensors, out / f"{name}-{process}")
    devices().end_training()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made")
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES))
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-m", *launch, "-m", "tests.speculate.draft_heads.test_train", str(out)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    return out


@pytest.mark.parametrize("minutes", [0.0, -9.0])
def test_a_head_without_a_minute_of_training_is_refused(minutes: float) -> None:
    """Text and hidden states may take all minutes: what comes then guesses as if untrained."""
    with pytest.raises(CetaneError, match="none is left to train"):
        trained("medusa", 2, BATCH, minutes=minutes)


@pytest.mark.parametrize("what", [*KINDS, "clock"])
def test_processes_make_one_head(made: Path, what: str) -> None:
    """In as many steps, whoever has less time."""
    one, other = (load_file(made / f"{what}-{process}") for process in range(PROCESSES))
    assert one["steps"] > 1
    assert not torch.equal(one.pop("seen"), other.pop("seen"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_processes_share_the_windows(made: Path, kind: str) -> None:
    seen = [load_file(made / f"{kind}-{process}")["seen"] for process in range(PROCESSES)]
    epochs = torch.cat([part.reshape(EPOCHS, -1) for part in seen], 1)
    assert torch.equal(epochs.sort().values, torch.arange(WINDOWS).expand(EPOCHS, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one_with_twice_the_windows(made: Path, kind: str) -> None:
    """But for the order of sums in bf16; one with the windows of either is far away."""
    found = load_file(made / f"{kind}-0")
    together, alone = (trained(kind, WINDOWS, BATCH * count) for count in (PROCESSES, 1))
    start = untrained(kind, counting(WINDOWS)[1])

    def distance(one: Tensors, other: Tensors) -> float:
        pairs = [(one[name], other[name]) for name, _ in start.named_parameters()]
        return sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5

    moved = distance(together, start.state_dict())
    assert found["steps"] == together["steps"] == EPOCHS * WINDOWS // (BATCH * PROCESSES)
    assert distance(found, together) < 0.01 * moved
    assert distance(found, alone) > 0.1 * moved


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_head_makes_is_on_its_device(kind: str) -> None:
    """Tensors on `meta` do not mix with those of another device."""
    _, embedding = counting(1)
    head = untrained(kind, embedding).to("meta")
    features, embedded = torch.empty(2, 9, 3, 64), torch.empty(2, 9, 64)
    logits = head.teach(features.to("meta"), embedded.to("meta"))
    assert {made.device.type for made in logits} == {"meta"}


if __name__ == "__main__":
    work(Path(sys.argv[1]))
