"""Fast builds for tests that are not about lowering."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cetane.lower.lower import Lowering
from cetane.lower.template import Template

TEMPLATES: dict[str, Template] = {}


@contextmanager
def converted_once() -> Iterator[None]:
    """Builds share what shards of one structure share, as the shards of one build do."""
    convert = Lowering._template

    def find(self: Lowering, shard: str, folder: Path) -> Template:
        key = self.structure(shard)
        if key not in TEMPLATES:
            TEMPLATES[key] = convert(self, shard, folder)
        return TEMPLATES[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lowering, "_template", find)
        yield
