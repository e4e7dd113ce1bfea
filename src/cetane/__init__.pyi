# The public names, and the modules that define them: `__init__.py` reads them here.
from .bundle import Bundle as Bundle
from .errors import CetaneError as CetaneError
from .evaluation.evaluate import evaluate as evaluate
from .evaluation.figures import Evaluation as Evaluation
from .evaluation.figures import TaskFigure as TaskFigure
from .pipeline.audit import ResidencyResult as ResidencyResult
from .pipeline.audit import audit as audit
from .pipeline.completion import Completion as Completion
from .pipeline.diff import DiffResult as DiffResult
from .pipeline.diff import diff as diff
from .pipeline.draft_head import add_draft_heads as add_draft_heads
from .pipeline.draft_head import train_draft_head as train_draft_head
from .pipeline.draft_head_result import AddedDraftHeads as AddedDraftHeads
from .pipeline.draft_head_result import DraftHeadSettings as DraftHeadSettings
from .pipeline.draft_head_result import TrainedDraftHead as TrainedDraftHead
from .pipeline.import_kit import KitImport as KitImport
from .pipeline.import_kit import import_kit as import_kit
from .pipeline.kit import Kit as Kit
from .pipeline.kit import make_kit as make_kit
from .pipeline.language_model import CompletionStream as CompletionStream
from .pipeline.language_model import LanguageModel as LanguageModel
from .pipeline.language_model import load as load
from .pipeline.plan import plan as plan
from .pipeline.port import port as port
from .pipeline.port_result import PortResult as PortResult
from .pipeline.validate import Validation as Validation
from .pipeline.validate import perplexity as perplexity
from .pipeline.validate import validate as validate
from .pipeline.versus import Versus as Versus
from .pipeline.versus import versus as versus
from .schema.plan import Plan as Plan
from .schema.recipe import Recipe as Recipe
from .server.app import serve as serve
from .sweeps.run import SweepResult as SweepResult
from .sweeps.run import sweep as sweep

__version__: str
