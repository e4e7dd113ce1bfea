"""Conversions by copies of the process: in order, and none is lost with a copy."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from coremltools.proto import Model_pb2

from cetane.errors import CetaneError
from cetane.lower.converted import Converted
from cetane.lower.recorder import Slice
from cetane.lower.side_by_side import side_by_side

HERE = os.getpid()


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def made(version: int) -> Converted:
    """A function, with the process that made it."""
    spec = Model_pb2.Model(specificationVersion=version)
    spec.description.metadata.author = str(os.getpid())
    return Converted(spec, {}, {"a": "b"}, {Slice(0, 1, 2): Slice(0, 2, 3)})


def dying(version: int) -> Converted:
    """Dies in a copy."""
    if os.getpid() != HERE:
        os.kill(os.getpid(), signal.SIGKILL)
    return made(version)


def refused(version: int) -> Converted:
    raise CetaneError(f"no version {version}", "take another")


def versions(*work: Callable[[], Converted]) -> list[int]:
    return [converted.spec.specificationVersion for converted in side_by_side(work)]


@pytest.mark.skipif(sys.platform != "linux", reason="copies are for Linux")
def test_copies_give_what_they_made_in_order() -> None:
    results = list(side_by_side([partial(made, number) for number in range(5)]))
    assert [result.spec.specificationVersion for result in results] == [0, 1, 2, 3, 4]
    assert all(result.spec.description.metadata.author != str(HERE) for result in results)
    assert results[0].labels == {"a": "b"} and results[0].slices == {Slice(0, 1, 2): Slice(0, 2, 3)}


def test_what_a_dead_copy_leaves_is_converted_here() -> None:
    assert versions(*(partial(dying, number) for number in range(3))) == [0, 1, 2]


def test_an_error_is_that_of_the_conversion() -> None:
    with pytest.raises(CetaneError, match="no version 7") as raised:
        versions(partial(made, 1), partial(refused, 7))
    assert raised.value.hint == "take another"


def test_one_thread_has_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (result, _) = side_by_side([partial(made, 1), partial(made, 2)])
    assert result.spec.description.metadata.author == str(HERE)
