"""States as bundles write them, by the rules: a position, a mask or a shift."""

from collections.abc import Callable

import pytest

from cetane.bundle import Bundle
from cetane.gates.residency.audit import audit
from cetane.gates.residency.target import Target
from cetane.mil import load


@pytest.mark.parametrize(
    ("contract", "found", "on_ane"),
    [
        ("stateful", {"states"}, False),
        ("stateful-blend", {"states", "state-blend"}, True),
        ("stateful-shift", {"states", "state-shift"}, False),
    ],
)
def test_how_a_state_is_written(
    tiny_bundle: Callable[..., Bundle], contract: str, found: set[str], on_ane: bool
) -> None:
    """A mask leaves every op on the ANE, as ane-book's plans did; a shift is error -14, as in
    CoreML-LLM's log. A position needs integers, whose ops leave it."""
    bundle = tiny_bundle(
        contract=contract, layout={"kind": "single"}, tensor_layout="ct1", verify=None, prefill=None
    )
    packages = {shard.name: load(bundle.shard(shard.name)) for shard in bundle.plan.shards}
    audited = audit(packages, Target("m4-max"), ("tiny-program",))
    ids = {one.rule for function in audited.functions for one in function.findings}
    assert {name for name in ids if name.startswith("state")} == found
    assert all(f.count("ANE") == f.count() for f in audited.functions) == on_ane
