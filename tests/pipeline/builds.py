"""The parts of the smallest build of several shards, and ways to stop it."""

from collections.abc import Callable
from typing import Any

from cetane.bundle import Bundle

PARTS = [
    "embedding.npy",
    "tokenizer",
    "recipe.toml",
    "rotary-default.npy",
    "shards/layer-00.mlpackage",
    "shards/head-0.mlpackage",
    "shards/layer-01.mlpackage",
]
"""In the order in which they are made: the second layer is of the first one's kind."""
STEPS = [*PARTS, "done"]


class Stop(BaseException):
    """A kill, as far as Python can see one."""


def silent(*_: Any, **__: Any) -> None:
    """No progress; and a gate that lets everything pass."""


def stop_at(step: str) -> Callable[[str, int, int], None]:
    """A progress that kills the build before a step."""

    def progress(name: str, done: int, total: int) -> None:
        if name == step:
            raise Stop

    return progress


def assert_same(bundle: Bundle, other: Bundle) -> None:
    """One bundle is as good as the other, and nothing else lies beside it."""
    bundle.verify()
    assert (bundle.path / "manifest.json").read_bytes() == (
        other.path / "manifest.json"
    ).read_bytes()
    assert [path.name for path in bundle.path.parent.iterdir()] == [bundle.path.name]
