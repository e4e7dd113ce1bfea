"""Opens an engine for a bundle, on a backend by its name."""

import sys

from cetane.bundle import Bundle
from cetane.engine.backend import Backend
from cetane.engine.coreml import UNITS, Compilable, ComputeUnits, CoreMLBackend
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.errors import CetaneError

BACKENDS = ("auto", "portable", "coreml")


def open_engine(bundle: Bundle, backend: str = "auto") -> Engine:
    """An engine for a bundle, on a backend of `open_backend`."""
    return Engine(bundle.plan, open_backend(bundle, backend), bundle.tables())


def open_backend(shards: Compilable, backend: str) -> Backend:
    """A backend by name. `auto` is Core ML on a Mac; elsewhere it is cetane's executor, in its
    fastest arithmetic. `coreml:CPU_AND_GPU`, and so on, is Core ML on other compute units.

    Raises CetaneError for an unknown name.
    """
    name, _, units = str(backend).partition(":")  # the API passes on what a user wrote
    if name not in BACKENDS:
        raise CetaneError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}")
    if units and name != "coreml":
        raise CetaneError(f"the backend {name} has no compute units", "only coreml has them")
    if name == "coreml" or (name == "auto" and sys.platform == "darwin"):
        return CoreMLBackend(shards, known_units(units))
    return PortableBackend(shards, "stored")


def known_units(name: str) -> ComputeUnits:
    """Compute units by name; the default for an empty name. Raises CetaneError for others."""
    for units in UNITS:
        if units == (name or UNITS[0]):
            return units
    raise CetaneError(f"unknown compute units {name!r}; known: {', '.join(UNITS)}")
