"""cetane: port language models to Apple's Neural Engine from any machine.

This is the public API. Every function returns data, prints nothing, and raises only `CetaneError`.
Names are imported on first use, since some need torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cetane.bundle import Bundle
    from cetane.errors import CetaneError
    from cetane.evaluation.evaluate import evaluate
    from cetane.evaluation.figures import Evaluation, TaskFigure
    from cetane.pipeline.audit import ResidencyResult, audit
    from cetane.pipeline.diff import DiffResult, diff
    from cetane.pipeline.draft_head import (
        AddedDraftHeads,
        DraftHeadSettings,
        TrainedDraftHead,
        add_draft_heads,
        train_draft_head,
    )
    from cetane.pipeline.imports import KitImport, import_kit
    from cetane.pipeline.kit import Kit, make_kit
    from cetane.pipeline.language_model import Completion, CompletionStream, LanguageModel, load
    from cetane.pipeline.plan import plan
    from cetane.pipeline.port import PortResult, port
    from cetane.pipeline.validate import Validation, perplexity, validate
    from cetane.pipeline.versus import Versus, versus
    from cetane.schema.plan import Plan
    from cetane.schema.recipe import Recipe
    from cetane.server.app import serve
    from cetane.sweeps.choose import SweepResult, sweep

__version__ = "0.1.0"
__all__ = [
    "AddedDraftHeads",
    "Bundle",
    "CetaneError",
    "Completion",
    "CompletionStream",
    "DiffResult",
    "DraftHeadSettings",
    "Evaluation",
    "Kit",
    "KitImport",
    "LanguageModel",
    "Plan",
    "PortResult",
    "Recipe",
    "ResidencyResult",
    "SweepResult",
    "TaskFigure",
    "TrainedDraftHead",
    "Validation",
    "Versus",
    "add_draft_heads",
    "audit",
    "diff",
    "evaluate",
    "import_kit",
    "load",
    "make_kit",
    "perplexity",
    "plan",
    "port",
    "serve",
    "sweep",
    "train_draft_head",
    "validate",
    "versus",
]

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
"""onnxruntime sends events to Microsoft unless this is set before its import. cetane sends none."""
HOMES = {
    "cetane.bundle": ("Bundle",),
    "cetane.errors": ("CetaneError",),
    "cetane.evaluation.evaluate": ("evaluate",),
    "cetane.evaluation.figures": ("Evaluation", "TaskFigure"),
    "cetane.pipeline.audit": ("ResidencyResult", "audit"),
    "cetane.pipeline.diff": ("DiffResult", "diff"),
    "cetane.pipeline.draft_head": (
        "AddedDraftHeads", "DraftHeadSettings", "TrainedDraftHead", "add_draft_heads",
        "train_draft_head",
    ),
    "cetane.pipeline.imports": ("KitImport", "import_kit"),
    "cetane.pipeline.kit": ("Kit", "make_kit"),
    "cetane.pipeline.language_model": (
        "Completion", "CompletionStream", "LanguageModel", "load",
    ),
    "cetane.pipeline.plan": ("plan",),
    "cetane.pipeline.port": ("PortResult", "port"),
    "cetane.pipeline.validate": ("Validation", "perplexity", "validate"),
    "cetane.pipeline.versus": ("Versus", "versus"),
    "cetane.schema.plan": ("Plan",),
    "cetane.schema.recipe": ("Recipe",),
    "cetane.server.app": ("serve",),
    "cetane.sweeps.choose": ("SweepResult", "sweep"),
}  # fmt: skip
"""The public names, by the module that defines them."""

EXTRAS = {"cetane.server.app": "serve", "cetane.evaluation.evaluate": "eval"}
"""The extra that installs a module's packages, by module."""


def __getattr__(name: str) -> Any:
    for module, names in HOMES.items():
        if name in names:
            try:
                value = getattr(importlib.import_module(module), name)
            except ModuleNotFoundError as error:
                if module not in EXTRAS:
                    raise
                from cetane.errors import CetaneError, installing

                hint = installing(EXTRAS[module])
                raise CetaneError(f"cetane.{name} needs the package {error.name}", hint) from error
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
