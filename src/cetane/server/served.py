"""A model that is served: a bundle, its engine, and what its answers need."""

from contextlib import suppress
from functools import cached_property
from pathlib import Path

from cetane.bundle import Bundle
from cetane.engine.open import open_engine
from cetane.engine.prefixes import Prefixes
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.schema.plan import Plan
from cetane.server.grammar import Grammars
from cetane.server.settings import Settings
from cetane.speculate.controller import Controller
from cetane.speculate.open import (
    DrafterOptions,
    default_drafters,
    known_controller,
    longest_draft,
    open_best_head,
    verifies,
)
from cetane.speculate.speculator import Speculator
from cetane.speculate.suffix import EarlierAnswers


class Served:
    """A bundle behind the API. Only its worker's thread may use the engine."""

    def __init__(self, path: Path, backend: str, settings: Settings) -> None:
        """Verify and open a bundle. Raises CetaneError if it is damaged or missing."""
        self.bundle = Bundle(path)
        self.bundle.verify()
        self.name = path.resolve().name
        adapters = self.bundle.plan.adapters
        self.adapters: dict[str, str | None] = {
            self.name: None, **{f"{self.name}:{adapter}": adapter for adapter in adapters}
        }  # fmt: skip
        """The adapter of every name under which clients ask for this model."""
        self.created = int((path / "manifest.json").stat().st_mtime)
        self.tokenizer = self.bundle.tokenizer
        self.engine = open_engine(self.bundle, backend)
        self.controller: Controller | None = None
        self.head = None
        widths = [mode.tokens for mode in self.plan.modes.values()]
        if settings.speculation and verifies(self.engine):
            self.options = DrafterOptions()
            self.longest = longest_draft(self.options, self.engine)
            self.controller = known_controller(self.engine, self.longest, self.bundle, backend)
            self.answers = EarlierAnswers()
            self.head = open_best_head(self.bundle, backend)
        self.prefixes = Prefixes(self.engine, settings.prefixes, whole=self.head is not None)
        # Functions are prepared on first use, and the first request shall not wait for that.
        for adapter in self.adapters.values():
            tokens = [0] * min(max(widths), self.context)
            for start in (0, *(one.tokens for one in self.plan.smaller)):
                session = self.engine.session(start=start, adapter=adapter)
                session.feed(tokens[: self.context - start])

    @property
    def plan(self) -> Plan:
        return self.bundle.plan

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self.plan.recipe.cache.context

    @property
    def chooses(self) -> bool:
        """Whether the head gives only its choice, so that answers are greedy."""
        return bool(self.plan.recipe.head.choose)

    @cached_property
    def constrains(self) -> bool:
        """Whether answers can follow a grammar."""
        with suppress(CetaneError):
            return self.grammars is not None and not self.chooses
        return False

    @cached_property
    def grammars(self) -> Grammars:
        """Makes the constraints of answers. Raises CetaneError if llguidance cannot read the
        tokenizer, or if it has no stop token."""
        return Grammars(self.tokenizer, self.plan.vocab)

    def speculator(self, sampler: Sampler) -> Speculator | None:
        """A speculator for one answer; None if the answer gets no drafts.

        A request with a seed promises the same answer again. On Core ML, verifying calls may round
        differently, so such an answer gets no drafts. Drafts come from the answer's own text, from
        earlier answers of this model and adapter, which this process remembers, and from the
        bundle's draft head. Without a head, the model drafts for itself where it can. Drafts
        change only the speed.
        """
        if self.controller is None or sampler.seed is not None:
            return None
        drafters = default_drafters(self.options, self.plan, self.answers, self.head)
        return Speculator(drafters, self.longest, self.controller)

    def token_text(self, token: int) -> str:
        """A token as OpenAI's API writes it: its text, or its bytes if they are no text alone."""
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
