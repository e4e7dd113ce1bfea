"""Two bundles on one machine: load, first token, prefill, decode and energy, in turns."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cetane.bundle import Bundle
from cetane.engine.engine import Engine
from cetane.engine.open import open_engine
from cetane.engine.session import Session
from cetane.errors import CetaneError
from cetane.files import Progress, silent
from cetane.gates.probes import text_tokens
from cetane.measuring.energy import BadSamples, joules
from cetane.measuring.meter import Meter
from cetane.mil.fast import share_threads

WARM = 2
"""The uncounted first steps of a turn."""


@dataclass(frozen=True)
class Turns:
    """A bundle's figures. Those in a sequence have one value for each turn."""

    bundle: Path
    load_ms: float
    """The first opening of all its shards in this process."""
    load_again_ms: float
    """The second opening, by a new engine."""
    first_token_ms: Sequence[float]
    """Reading the prompt, up to the first token."""
    prefill_tok_s: Sequence[float]
    """Tokens of the prompt per second, by the same clock."""
    decode_ms: Sequence[float]
    """A step of greedy decoding, as the mean of a turn."""
    joules_per_token: float | None
    """Energy of processor, GPU and Neural Engine together; None without a power meter."""


@dataclass(frozen=True)
class Ratio:
    """The second bundle's figure over the first's."""

    name: str
    first: float
    second: float
    """The medians of the bundles' turns."""
    ratio: float
    """The median of the turns' ratios."""
    low: float
    high: float
    """The smallest and the largest of the turns' ratios."""


@dataclass(frozen=True)
class Versus:
    """Two bundles, compared."""

    backend: str
    prompt_tokens: int
    tokens: int
    turns: tuple[Turns, Turns]
    ratios: tuple[Ratio, ...]

    def as_json(self) -> dict[str, Any]:
        content = asdict(self)
        for one in content["turns"]:
            one["bundle"] = str(one["bundle"])
        return content


def versus(
    first: str | Path,
    second: str | Path,
    *,
    prompt_tokens: int = 128,
    tokens: int = 32,
    rounds: int = 5,
    energy: float = 0,
    backend: str = "auto",
    exclusive: bool = False,
    progress: Progress = silent,
) -> Versus:
    """Compare two bundles in turns, A B B A, so that other load and heat meet both.

    Each turn reads a text of `prompt_tokens`, then decodes `tokens` greedily. `energy` is how many
    seconds each bundle decodes under a power meter afterwards; 0 for none. `exclusive` as in
    `load`. CetaneError for a damaged bundle, a context that is too small, a number below 1, and
    `energy` without a meter.
    """
    for name, number in (("prompt_tokens", prompt_tokens), ("tokens", tokens), ("rounds", rounds)):
        if number < 1:
            raise CetaneError(f"{name} = {number}: must be at least 1")
    bundles = [Bundle(Path(path)) for path in (first, second)]
    for bundle in bundles:
        bundle.verify()
        context = bundle.plan.recipe.cache.context
        if prompt_tokens + tokens + WARM > context:
            raise CetaneError(
                f"{bundle.path} has a context of {context}, and {prompt_tokens} + {tokens} tokens "
                "do not fit it",
                "give fewer with --prompt-tokens and --max-new",
            )
    if energy and Meter().name is None:
        raise CetaneError("no power meter", "brew install macmon, or run as root on a Mac")
    if exclusive:
        share_threads()
    sides = [BundleSide(bundle, backend, prompt_tokens, tokens) for bundle in bundles]
    for turn in range(rounds):
        for number in (0, 1) if turn % 2 == 0 else (1, 0):
            progress(bundles[number].path.name, 2 * turn + number, 2 * rounds)
            sides[number].turn()
    a, b = (side.turns(side.joules(energy)) for side in sides)
    return Versus(sides[0].engine.backend.name, prompt_tokens, tokens, (a, b), ratios(a, b))


class BundleSide:
    """One bundle, open."""

    def __init__(self, bundle: Bundle, backend: str, prompt_tokens: int, tokens: int) -> None:
        self.bundle, self.count = bundle, tokens
        self.prompt = text_tokens(bundle.tokenizer, prompt_tokens)
        self.first: list[float] = []
        self.decode: list[float] = []
        self.loads = []
        for _ in range(2):
            self.engine: Engine = open_engine(bundle, backend)
            self.loads.append(self.load())
        self.read(self.session())  # functions are compiled on their first call
        self.step(self.session(), 0)

    def load(self) -> float:
        """Milliseconds of opening every shard."""
        for shard in self.bundle.plan.shards:
            self.engine.open(shard.name)
        return 1e3 * self.engine.seconds["load"]

    def session(self) -> Session:
        return self.engine.session(self.engine.plan.plain_modes)

    def read(self, session: Session) -> int:
        """Read the prompt. Returns the next token."""
        logits = session.feed(self.prompt)
        assert logits is not None
        return int(logits.argmax())

    def step(self, session: Session, token: int) -> int:
        logits = session.feed([token])
        assert logits is not None
        return int(logits.argmax())

    def turn(self) -> None:
        """One turn: the prompt, then greedy decoding."""
        session = self.session()
        started = time.perf_counter()
        token = self.read(session)
        self.first.append(1e3 * (time.perf_counter() - started))
        for _ in range(WARM):
            token = self.step(session, token)
        started = time.perf_counter()
        for _ in range(self.count):
            token = self.step(session, token)
        self.decode.append(1e3 * (time.perf_counter() - started) / self.count)

    def joules(self, seconds: float) -> float | None:
        """Joules of a decoded token, from decoding for some seconds; None for 0 seconds.

        No prompt is read: its energy would count more where a full context comes sooner.
        """
        if not seconds:
            return None
        meter, count = Meter(), 0
        with meter:
            begun = time.time()
            while time.time() - begun < seconds:
                session, token = self.session(), self.prompt[0]
                while session.position < session.context and time.time() - begun < seconds:
                    token = self.step(session, token)
                    count += 1
            ended = time.time()
        try:
            made = joules(meter.samples(), begun, ended, count)
        except BadSamples as error:
            raise CetaneError(f"{meter.name}: {error}") from error
        if made is None:
            raise CetaneError(f"{meter.name} gave no sample in {seconds:g} s", "measure for longer")
        spent: float = made["joules_per_token"]["processor"]
        return spent

    def turns(self, spent: float | None) -> Turns:
        return Turns(
            bundle=self.bundle.path,
            load_ms=self.loads[0],
            load_again_ms=self.loads[1],
            first_token_ms=tuple(self.first),
            prefill_tok_s=tuple(1e3 * len(self.prompt) / ms for ms in self.first),
            decode_ms=tuple(self.decode),
            joules_per_token=spent,
        )


def ratios(a: Turns, b: Turns) -> tuple[Ratio, ...]:
    """The second's figures over the first's, turn by turn where there are turns."""
    figures: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "decode, ms a token": (a.decode_ms, b.decode_ms),
        "prefill, tokens/s": (a.prefill_tok_s, b.prefill_tok_s),
        "first token, ms": (a.first_token_ms, b.first_token_ms),
        "load, ms": ([a.load_ms], [b.load_ms]),
        "load again, ms": ([a.load_again_ms], [b.load_again_ms]),
    }
    if a.joules_per_token and b.joules_per_token:
        figures["energy, J a token"] = ([a.joules_per_token], [b.joules_per_token])
    return tuple(ratio(name, *pair) for name, pair in figures.items())


def ratio(name: str, first: Sequence[float], second: Sequence[float]) -> Ratio:
    each = [two / one for one, two in zip(first, second, strict=True)]
    return Ratio(name, median(first), median(second), median(each), min(each), max(each))
