# The public names, and the modules that define them: `__init__.py` reads them here.
from .bundle import Bundle
from .errors import CetaneError
from .evaluation.evaluate import evaluate
from .evaluation.figures import Evaluation, TaskFigure
from .pipeline.audit import ResidencyResult, audit
from .pipeline.diff import DiffResult, diff
from .pipeline.draft_head import (
    AddedDraftHeads,
    DraftHeadSettings,
    TrainedDraftHead,
    add_draft_heads,
    train_draft_head,
)
from .pipeline.imports import KitImport, import_kit
from .pipeline.kit import Kit, make_kit
from .pipeline.language_model import Completion, CompletionStream, LanguageModel, load
from .pipeline.plan import plan
from .pipeline.port import port
from .pipeline.port_result import PortResult
from .pipeline.validate import Validation, perplexity, validate
from .pipeline.versus import Versus, versus
from .schema.plan import Plan
from .schema.recipe import Recipe
from .server.app import serve
from .sweeps.choose import SweepResult, sweep

__version__: str
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
