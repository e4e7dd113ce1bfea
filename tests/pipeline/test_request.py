"""What a user names, and what follows from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cetane.errors import CetaneError
from cetane.gates.residency.target import Target
from cetane.pipeline.plan import planner_for
from cetane.pipeline.request import make_request


@pytest.mark.parametrize(
    ("changes", "packages"),
    [({"layout.chunks": 1}, 1), ({"layout.cuts": (1,)}, 2), ({"layout": {"chunks": 1}}, 1)],
)
@pytest.mark.parametrize("target", [None, Target("m4-max")])
def test_named_chunks_need_no_kind(
    changes: Mapping[str, Any], packages: int, target: Target | None, tiny_checkpoint_folder: Path
) -> None:
    """The recipe leaves the layout to cetane: advice such as (layout.chunks) works as it is."""
    request = make_request(tiny_checkpoint_folder, changes=changes)
    plan = planner_for(request, target).plan()
    assert plan.recipe.layout.kind == "chunks"
    assert sum(shard.kind != "head" for shard in plan.shards) == packages


@pytest.mark.parametrize("kind", ["auto", "per-layer"])
def test_another_kind_that_is_named_stays(kind: str, tiny_checkpoint_folder: Path) -> None:
    changes = {"layout.kind": kind, "layout.chunks": 2}
    with pytest.raises(CetaneError, match=r"only for the layout 'chunks': layout\.kind = 'chunks'"):
        make_request(tiny_checkpoint_folder, changes=changes)
