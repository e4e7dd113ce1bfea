"""The proof that a port is right: five questions, each with limits of its own.

- *Weights*: is every constant what its format makes of the checkpoint's parameter?
- *Structure*: do the programs, on the checkpoint's own values, compute the Hugging Face model?
- *Compression*: is the port, as it ships, as near to that model as its recipe promises? Heads that
  stream count as a compression too: of caches.
- *fp16*: what does the rounding of every result cost?
- *ane*: what do an ANE's products over many keys cost, late in the context?

One shard is in memory at a time. Only greedy decoding holds all shards, as for a user.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from cetane.bundle import Bundle
from cetane.bundle.tables import Tables
from cetane.checkpoint import Checkpoint
from cetane.engine.authored import embedding_rows
from cetane.engine.backend import Array
from cetane.engine.generate import generate
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.errors import CetaneError, installing
from cetane.files import Progress
from cetane.gates.bases import base_checks, unknown_bases
from cetane.gates.beside_shards import wrong_tables, wrong_tokenizer
from cetane.gates.experts import TakenExperts
from cetane.gates.files_read import FilesRead
from cetane.gates.golden_result import GoldenResult, Range
from cetane.gates.idle_experts import idle_deviations, idle_functions
from cetane.gates.limits import limits, limits_digest
from cetane.gates.lost import LostNumbers
from cetane.gates.manifest import same_plan, same_tags
from cetane.gates.model_results import ModelResults
from cetane.gates.observe import ProbeTask, Seen, observe, structure_tasks
from cetane.gates.port import Port, computes_as_shipped, packaged
from cetane.gates.probe_sizes import filled, largest_window, tokens_for_experts
from cetane.gates.probes import (
    Probe,
    chat_prompts,
    structure_probes,
    text_windows,
    widest_mode,
)
from cetane.gates.quality import greedy_check, sure
from cetane.gates.readings import judge_readings, misread
from cetane.gates.reference import RESIDENT, Reference, reference_of, would_choose
from cetane.gates.rounding import (
    Rounding,
    judge_quantized,
    judge_rounding,
    late_rounding,
    measure_rounding,
    same_scales,
    together,
)
from cetane.gates.shipped import Compressed, Compression, Text, peak, twin_kl
from cetane.gates.structure import Deviation, deviations, judge_structure, made_by
from cetane.gates.text_tasks import capacity_of, first_positions, start_tasks, window_tasks
from cetane.gates.unjudged import (
    TOO_LARGE,
    near,
    unreached_experts,
    unreached_tokens,
    unrounded_experts,
)
from cetane.gates.verdict import Check, at_most
from cetane.gates.weights import (
    LISTED,
    WrongWeight,
    judge_weights,
    uncompared,
    unused_parameters,
    wrong_weights,
)
from cetane.hardware import LARGEST_FP16
from cetane.hardware.memory import give_back
from cetane.mil.program import Precision, listed
from cetane.planner import Planner, tags
from cetane.planner.weights import weight_count
from cetane.threads import beside

STEPS = 6
"""The steps that the progress counts: the five questions, and greedy decoding."""
OWN_MERGE = "cetane itself merged the model's adapters: {} lets peft do it"


def golden(
    bundle: Bundle,
    checkpoint: Checkpoint,
    progress: Progress,
    prompts: int = 2,
    greedy_tokens: int = 32,
) -> GoldenResult:
    """Compare a bundle with the checkpoint's Hugging Face model, also with each of its adapters.

    An adapter's reference is the model with the adapter merged. `prompts` is the number of chat
    prompts for greedy decoding, `greedy_tokens` the number of tokens after each.

    Raises CetaneError if the checkpoint has other adapters than the bundle.
    """
    planner = Planner(checkpoint, bundle.plan.recipe)
    if planner.adapters.keys() != bundle.plan.adapters.keys():
        raise CetaneError(
            f"{bundle.path} has the adapters {listed(bundle.plan.adapters)}, "
            f"but the checkpoint has {listed(planner.adapters)}",
            "open the checkpoint with the adapters of the build",
        )

    def proof(adapter: str | None) -> Proof:
        port = packaged(bundle, planner.on(adapter), checkpoint)
        truth = reference_of(checkpoint, adapter)
        named = progress if adapter is None else prefixed(adapter, progress)
        return Proof(port, checkpoint, truth, bundle.tables(), named)

    result = proof(None).run(prompts, greedy_tokens)
    bases = [*base_checks(checkpoint)]
    adapters = {name: proof(name).run(prompts, greedy_tokens) for name in planner.adapters}
    manifest = [
        same_plan(bundle.plan, planner.plan()),
        same_tags(bundle.manifest.tags, tags(planner)),
    ]
    checks = [*result.checks, *manifest, *bases]
    for name, own in adapters.items():
        checks += [
            check.model_copy(update={"name": f"{name}: {check.name}"}) for check in own.checks
        ]
    merged = checkpoint.merged or checkpoint.adapters
    loaders = {result.loader, *(own.loader for own in adapters.values())}
    could = merged and checkpoint.quantization is None  # peft merges into no quantised weights here
    told = [OWN_MERGE.format(installing("lora"))] if could and "cetane" in loaders else []
    return result.model_copy(
        update={
            "adapters": adapters,
            "checks": tuple(checks),
            "passed": all(check.passed for check in checks),
            "warnings": (*result.warnings, *told, *unknown_bases(checkpoint)),
        }
    )


def prefixed(name: str, progress: Progress) -> Progress:
    """The progress of one adapter's proof."""
    return lambda what, done, total: progress(f"{name}: {what}", done, total)


class Largest(Sampler):
    """Chooses greedily, and among NaN too: the model's own choice is then another token."""

    def __call__(self, logits: Array) -> int:
        return int(logits.argmax())


@dataclass(frozen=True)
class PortRead:
    """A text or the start of a prompt, as the port read it."""

    task: ProbeTask
    seen: Seen
    """The port's results as it ships, in fp32."""
    decided: Array
    """For each token, whether the model is sure of the next one, bool `(n,)`."""
    text: bool


class Proof:
    """The questions that the golden gate asks of a port."""

    def __init__(
        self, port: Port, weights: Checkpoint, reference: Reference, tables: Tables,
        progress: Progress,
    ) -> None:  # fmt: skip
        """`tables` are the port's own."""
        self.port, self.weights, self.reference = port, weights, reference
        self.tables, self.progress = tables, progress
        self.adapter = port.planner.adapter
        self.plan, self.planner = port.plan, port.planner
        self.files = FilesRead(weights, self.planner.model, reference, port.tokenizer)
        self.scale = self.planner.model.residual_scale or 1.0
        self.mode = widest_mode(self.plan)
        self.lost: LostNumbers | None = None
        rows = embedding_rows(self.planner, weights)
        tokens = filled(self.planner, self.plan, reference)
        drawn = tokens_for_experts(self.planner, self.plan)
        self.probes = structure_probes(rows, port.tokenizer, self.plan, tokens, drawn)

    def run(self, prompts: int, greedy_tokens: int) -> GoldenResult:
        """Ask structure, compression, fp16, ane and greedy decoding, in this order.

        The fifth question, weights, is asked during compression and fp16: by a second thread, where
        arithmetic has two. An adapter's proof leaves out weights and readings: the base's proof has
        judged those of all functions.
        """
        alone = self.adapter is None
        deviated, text, unreached = self.structure()
        starts = start_tasks(self.plan, self.port.tokenizer, text.peak)
        windows = {window.name: window.tokens for window in text.windows}
        misreadings = list(misread(self.port, self.reference)) if alone else []
        with beside(self.wrong_weights if alone else lambda: ([], [])) as weights:
            compression, read = self.compression(text, starts)
            del text  # logits of a large vocabulary
            rounding, activations, cache_kl, unrounded = self.rounding(read)
            del read
            self.show("weights", 3)
            wrong, unused = weights()
        ane = self.ane()
        greedy = self.greedy(prompts, greedy_tokens)
        checks = [
            *(judge_weights(wrong, unused) if alone else ()),
            *(judge_readings(misreadings) if alone else ()),
            *judge_structure(deviated),
            judge_ranges(compression.ranges),
            *judge_rounding("fp16", rounding),
            *judge_rounding("ane", ane),
            *judge_quantized(activations),
            *([same_scales(self.port)] if activations else []),
            *compression.checks,
            *([greedy_check(greedy, self.plan.recipe)] if greedy else []),
        ]
        self.progress("done", STEPS, STEPS)
        return GoldenResult(
            passed=all(check.passed for check in checks),
            fingerprint=self.weights.fingerprint,
            checks=tuple(checks),
            shards=compression.shards,
            logits=compression.logits,
            ranges=compression.ranges,
            warnings=(
                *([TOO_LARGE] if prompts and not greedy else []),
                *unreached,
                *unrounded,
                *self.beyond(ane),
                *compression.warnings,
                *near(compression.ranges, self.planner),
                *(self.files.warnings(compression.model_perplexity) if alone else ()),
                *(uncompared(self.weights, self.planner.recipe.compression) if alone else ()),
            ),
            greedy=tuple(float(share.mean()) for share in greedy),
            probes={
                probe.name: probe.tokens
                for probe in (*self.probes, *(task.probe for task in starts))
            }
            | windows,
            greedy_tokens=greedy_tokens,
            wrong_weights=tuple(wrong[:LISTED]),
            unused=tuple(unused[:LISTED]),
            misread=tuple(misreadings[:LISTED]),
            structure=tuple(deviated),
            rounding=tuple(rounding),
            ane=tuple(ane),
            activations=tuple(activations),
            twin_kl=compression.twin_kl,
            cache_kl=cache_kl,
            lost=self.lost,
            positions=compression.positions,
            loader=self.reference.loader,
            limits=limits_digest(),
        )

    def beyond(self, ane: Sequence[Rounding]) -> Iterator[str]:
        """Warnings of what lies beyond the probes."""
        read, window = len(self.probes[0].tokens), largest_window(self.plan, self.reference)
        keys = max((one.keys for one in ane), default=self.plan.recipe.cache.context)
        return unreached_tokens(self.plan, read, keys, window, first_positions(self.plan))

    def show(self, question: str, number: int) -> None:
        """Show a question, and give memory that the last one freed back to the system."""
        give_back()
        self.progress(question, number, STEPS)

    def wrong_weights(self) -> tuple[list[WrongWeight], list[str]]:
        """What differs from the checkpoint, and parameters that are not fully used."""
        wrong = [
            *wrong_tokenizer(self.port.tokenizer, self.weights.tokenizer),
            *self.files.wrong,
            *wrong_weights(self.port, self.weights),
            *wrong_tables(self.planner, self.weights, self.tables),
        ]
        names = self.reference.parameters
        shapes = {name: self.weights.shape(name) for name in names if name in self.weights}
        return wrong, [*unused_parameters(self.planner, shapes), *self.files.unread_errors]

    def structure(self) -> tuple[list[Deviation], Text, list[str]]:
        """The twin's deviations from the model, its results on the text, and warnings of rare
        experts that no token reached. Functions of such experts are compared with their modules."""
        self.show("structure", 0)
        tasks = structure_tasks(self.plan, self.probes)
        windows = self.windows(0, first_positions(self.plan))
        twin = self.port.twin
        every = [*tasks, *window_tasks(self.plan, windows)]
        seen = observe(twin, self.planner, every)
        self.seek(None, every, seen)
        probed, texts = seen[: len(tasks)], seen[len(tasks) :]
        truths = ModelResults.ask(self.reference, tasks, probed, scale=self.scale)
        differences = list(deviations(self.plan, self.planner, tasks, probed, truths))
        text = Text(windows, [one.logits for one in texts], peak(windows, texts))
        idle = idle_functions(twin, self.adapter)
        if idle:
            modules = Planner(self.weights, self.planner.recipe).on(self.adapter)
            differences += idle_deviations(twin, modules, self.weights, idle)
        return differences, text, [*unreached_experts(self.planner, self.plan, idle, probed)]

    def seek(
        self,
        arithmetic: Precision | None,
        tasks: Sequence[ProbeTask],
        seen: Sequence[Seen],
        after: Session | None = None,
    ) -> None:
        """Note where infinity or NaN first comes from, by the shortest task that has one. What an
        earlier question met is the first. `after` is the session from which the tasks went on."""
        if self.lost is not None:
            return
        head = self.plan.tokens(0, self.plan.rows)
        lost = [task for task, one in zip(tasks, seen, strict=True) if not one.finite(head)]
        if lost:
            shortest = min(lost, key=lambda task: len(task.probe.tokens))
            self.lost = self.port.lost(arithmetic, shortest, after)

    def windows(self, start: int, stop: int) -> list[Probe]:
        """The windows of text from position `start` up to `stop`."""
        return text_windows(self.port.tokenizer, self.plan, start, stop)

    def compression(
        self, text: Text, starts: Sequence[ProbeTask]
    ) -> tuple[Compressed, list[PortRead]]:
        """The port's figures against the model on text, and what both made of that text and of
        `starts`.

        The text grows until every share is decided, up to `evidence.most` positions.
        """
        self.show("compression", 1)
        evidence, windows = limits().evidence, text.windows
        compression = Compression(self.plan, self.planner, self.mode)
        tasks = [*window_tasks(self.plan, windows), *starts]
        seen = observe(self.port.shipped, self.planner, tasks)
        self.seek("fp32", tasks, seen)
        truths = self.ask(tasks, seen)
        read = [
            PortRead(task, ours, sure(truths.logits(task.probe, ours.at)), task not in starts)
            for task, ours in zip(tasks, seen, strict=True)
        ]
        seen = seen[: len(windows)]
        compression.twin_kl = twin_kl(text, seen, self.plan)
        compression.add(windows, seen, truths)
        for task in starts:
            compression.reach(truths.of(task.probe))
        stop = first_positions(self.plan)
        while stop < evidence.most and not compression.decided:
            windows = self.windows(stop, 2 * stop)
            tasks = window_tasks(self.plan, windows)
            seen = observe(self.port.shipped, self.planner, tasks)
            self.seek("fp32", tasks, seen)
            compression.add(windows, seen, self.ask(tasks, seen))
            stop *= 2
        return compression.result(), read

    def ask(self, tasks: Sequence[ProbeTask], seen: Sequence[Seen]) -> ModelResults:
        """The model's results on tasks, with the residual stream after every block. Its heads see
        all tokens, even if they stream in the port."""
        streams = [t for block in self.planner.model.layers for t in block.residuals()]
        with self.reference.seeing_all():
            return ModelResults.ask(self.reference, tasks, seen, streams, self.scale)

    def rounding(
        self, read: Sequence[PortRead]
    ) -> tuple[list[Rounding], list[Rounding], float, list[str]]:
        """The port in fp16 against itself in fp32: on all windows of text, then on each start. The
        same of the port as it ships against unrounded activations, if those are of 8 bits. And
        `cache_kl`, as in `GoldenResult`; and warnings of functions that did not run."""
        self.show("fp16", 2)
        tasks, exact = [one.task for one in read], [one.seen for one in read]
        taken = TakenExperts.of(self.planner)
        if not computes_as_shipped(self.port):
            fp32 = self.port.computing("fp32")
            exact = observe(fp32, self.planner, tasks, watch=[taken.note])
        engine = self.port.computing("fp16", taken)
        rounded = observe(engine, self.planner, tasks)
        self.seek("fp16", tasks, rounded)
        unreached = [*unrounded_experts(idle_functions(engine, self.adapter))]
        activations = []
        if self.port.int8_activations:
            activations = self.losses(read, exact, [one.seen for one in read])
        losses = self.losses(read, exact, rounded)
        return losses, activations, self.cache_kl(read, exact), unreached

    def losses(
        self, read: Sequence[PortRead], exact: Sequence[Seen], rounded: Sequence[Seen]
    ) -> list[Rounding]:
        """What some rounding costs: on all windows of text, then on each start."""
        places = made_by(self.planner, self.plan)
        measured = [
            measure_rounding(
                one.task,
                ours,
                made,
                places,
                self.plan,
                decided=one.decided,
                capacity=capacity_of(self.plan, one.task.probe),
                text=one.text,
            )
            for one, ours, made in zip(read, exact, rounded, strict=True)
        ]
        windows = [one for one in measured if one.text]
        starts = [one for one in measured if not one.text]
        return [together(windows), *starts]

    def cache_kl(self, read: Sequence[PortRead], exact: Sequence[Seen]) -> float:
        """The KL of the port from its results `exact` without rounding to 8 bits, on text, if its
        caches are of 8 bits."""
        if self.plan.recipe.cache.format == "fp16":
            return 0.0
        windows = [(one, own) for one, own in zip(read, exact, strict=True) if one.text]
        unrounded = Text([one.task.probe for one, _ in windows], [own.logits for _, own in windows])
        return twin_kl(unrounded, [one.seen for one, _ in windows], self.plan)

    def ane(self) -> list[Rounding]:
        """The port in an ANE's arithmetic against itself in fp32, late in the context."""
        self.show("an ANE's arithmetic", 4)
        weights = weight_count(self.planner.blocks)
        return late_rounding(self.port, weights, partial(self.seek, "ane"))

    def greedy(self, prompts: int, length: int) -> list[Array]:
        """By prompt, whether the model `would_choose` each greedy token too. Empty for a model that
        does not fit in memory."""
        self.show("greedy decoding", 5)
        held = 4 * weight_count(self.planner.blocks)  # fp32, as the executor has them
        if not prompts or held > RESIDENT:
            return []
        context = self.plan.recipe.cache.context
        room = max(context // 2, context - length)
        questions = [ids[:room] for ids in chat_prompts(self.port.tokenizer, prompts)]
        engine, modes = self.port.resident, self.plan.plain_modes
        answers = [list(generate(engine.session(modes), q, Largest(), length)) for q in questions]
        del engine  # the whole model
        asked = [[*q, *a] for q, a in zip(questions, answers, strict=True)]
        with self.reference.seeing_all():
            results = self.reference.run(asked)
        margin = limits().evidence.margin
        return [
            would_choose(result.logits, question, answer, margin)
            for result, question, answer in zip(results, questions, answers, strict=True)
        ]


def judge_ranges(ranges: Sequence[Range]) -> Check:
    """Whether the model's residual stream stays in fp16's range, on all that was read."""
    largest = max((one.largest for one in ranges), default=0.0)
    return at_most("fp16: residual stream", largest, LARGEST_FP16)
