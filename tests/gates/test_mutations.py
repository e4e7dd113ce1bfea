"""A sample of the wrong ports of docs/mutations.md, and right ports; the table is a benchmark."""

from functools import cache

import pytest

from .mutations.families import build, recipe, tokenizer_of
from .mutations.ports import AuthoredPort, RememberedReference, TinyCheckpoint, judge
from .mutations.table import PORT, TABLE

SAMPLE = [
    ("llama", "query heads of the wrong group", "structure"),
    ("llama", "mask one slot off", "structure"),
    ("llama", "columns of T = 4 in the wrong order", "structure"),
    ("llama", "head slices swapped", "structure"),
    ("llama", "epsilon of the final norm", "structure"),
    ("llama", "two layers' norms swapped", "structure"),
    ("llama", "stored queries doubled", "weights"),
    ("llama", "one stored element is off", "weights"),
    ("llama", "embedding rows one off", "weights"),
    ("gemma3", "a slot reused one step early", "structure"),
    ("gemma3", "a window one token too long", "structure"),
    ("gemma3", "softcap missing", "structure"),
    ("gemma3", "gains read without their offset", "structure"),
    ("zaya", "an expert swapped", "structure"),
    ("zaya", "stale history", "structure"),
]


@cache
def model(family: str) -> tuple[TinyCheckpoint, RememberedReference]:
    checkpoint = TinyCheckpoint(build(family), tokenizer_of())
    return checkpoint, RememberedReference(checkpoint)


@pytest.mark.parametrize(("family", "name", "question"), SAMPLE)
def test_a_wrong_port_is_refused(family: str, name: str, question: str) -> None:
    """At four bits a weight as at sixteen, by the question that its fault belongs to."""
    checkpoint, reference = model(family)
    port = AuthoredPort(checkpoint, recipe("4 bits"))
    TABLE[name].change(port)
    assert question in judge(port, reference).refused_by


@pytest.mark.parametrize("form", ["fp16", "int8", "6 bits", "4 bits"])
def test_a_published_port_is_refused_at_any_number_of_bits(form: str) -> None:
    """Four departures of ZAYA's, which passed a gate whose limits sank with the bits."""
    checkpoint, reference = model("zaya")
    tables = {"family": {"departures": PORT}, "tokens": {"verify": 0, "prefill": 0}}
    assert (
        "structure" in judge(AuthoredPort(checkpoint, recipe(form, **tables)), reference).refused_by
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "zaya"])
def test_a_right_port_is_certified(family: str) -> None:
    checkpoint, reference = model(family)
    judged = judge(AuthoredPort(checkpoint, recipe("4 bits")), reference)
    assert judged.refused_by == ()
    assert judged.result is not None
    assert judged.result.passed
