"""The audit of programs: a placement for every op, the findings, and a verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cetane.errors import CetaneError, printable
from cetane.gates.limits import limits
from cetane.gates.residency.graph import Graph
from cetane.gates.residency.rule import (
    GOOD_TO_BAD,
    PREDICATES,
    Confidence,
    Placement,
    Rule,
    Severity,
    load_rules,
    seen,
)
from cetane.gates.residency.tail import dragged
from cetane.gates.residency.target import Target
from cetane.mil.program import Op, Program, TensorType

DAMAGED = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, AssertionError)
"""The errors that reading a damaged op raises."""
UNSEEN = "unseen"
"""The id in place of a rule's, for an op without any rule or evidence."""


@dataclass
class Placed:
    """An op's predicted place, with its rule or evidence, and its measured place."""

    name: str
    output: str
    """Its first result, by which a Mac's plan names it; empty if it has none."""
    kind: str
    placement: Placement
    rule: str
    """The id of the rule or evidence that decides the placement."""
    confidence: Confidence
    weights: int = 0
    """The elements of the stored matrix that the op multiplies by."""
    measured: Placement | None = None
    cost: float | None = None
    """Its share of the function's time, as Core ML estimates it."""

    @property
    def final(self) -> Placement:
        """The measured place, else the predicted one."""
        return self.measured or self.placement


@dataclass(frozen=True)
class Finding:
    """A rule that applies: to some ops of a function, to all of them, or to the bundle."""

    rule: str
    """The rule's id."""
    severity: Severity
    placement: Placement | None
    confidence: Confidence
    message: str
    fix: str
    details: tuple[str, ...]
    """What the predicate found, each once."""
    ops: tuple[str, ...] = ()
    """The names of the ops; empty for a whole function or bundle."""


@dataclass(frozen=True)
class FunctionAudit:
    """The audit of one function at one shape."""

    package: str
    function: str
    variant: str
    """The shape, as words; empty for the one that the function was made for."""
    tokens: int
    """The columns of a call."""
    ops: tuple[Placed, ...]
    findings: tuple[Finding, ...]
    refusal: str | None = None
    """The error with which Core ML refused it, on a Mac."""

    @property
    def key(self) -> tuple[str, str]:
        """The package and the function: the same at all shapes."""
        return self.package, self.function

    def count(self, placement: Placement | None = None, conv: bool = False) -> int:
        """The number of compute ops, or of convolutions, in total or at a place."""
        return sum(
            (placement is None or op.final == placement) and (not conv or op.kind == "conv")
            for op in self.ops
        )

    def table(self) -> dict[str, int]:
        """A row of the published ports' tables, by column. Compute ops count, constants do not."""
        total, on = self.count(conv=True), self.count("ANE", conv=True)
        return {
            "conv_total": total,
            "conv_ane": on,
            "conv_non_ane": total - on,
            "ops": self.count(),
            "ops_ane": self.count("ANE"),
            "ops_cpu": self.count("CPU"),
            "ops_unknown": self.count("unknown"),
            "ops_fail": self.count("fails"),
            "ops_wrong": self.count("wrong"),
        }


@dataclass(frozen=True)
class Audit:
    """Every function at every shape, and the findings about all of them."""

    target: Target
    functions: tuple[FunctionAudit, ...]
    findings: tuple[Finding, ...]
    """Findings about the whole bundle."""
    reasons: tuple[str, ...] = field(default=())
    """The reasons why it did not pass."""

    @property
    def passed(self) -> bool:
        return not self.reasons

    @property
    def tiny(self) -> bool:
        """Whether every function is too small for the ANE."""
        return all("tiny-program" in {hit.rule for hit in one.findings} for one in self.functions)

    @property
    def severities(self) -> dict[str, Severity]:
        """The rules that apply, and how bad each is."""
        every = [found for function in self.functions for found in function.findings]
        return {found.rule: found.severity for found in (*every, *self.findings)}

    @property
    def basis(self) -> str:
        """Whether its figures were predicted, measured, or some of each."""
        measured = [op.measured is not None for f in self.functions for op in f.ops]
        if not any(measured):
            return "predicted"
        return "measured" if all(measured) else "measured where a Mac said so, else predicted"


def audit(programs: dict[str, Program], target: Target, without: Collection[str] = ()) -> Audit:
    """Audit programs, by the names of their packages, for a target. Reads no weights.

    `without` are the ids of rules that are left out. Raises CetaneError for ops that MIL does not
    allow.
    """
    known = load_rules().values()
    rules = [rule for rule in known if rule.applies(target) and rule.id not in without]
    graphs = [
        Graph(function, target, name, len(program.functions))
        for name, program in programs.items()
        for function in program.functions.values()
    ]
    functions: list[FunctionAudit] = []
    for graph in graphs:
        try:
            functions += examine(graph, rules)
        except DAMAGED as error:
            where = f"{graph.package}/{graph.function.name}"
            raise CetaneError(f"{where}: its ops are damaged: {error!r}") from error
    return judged(target, tuple(functions), tuple(about_all(graphs, rules)))


def judged(
    target: Target, functions: tuple[FunctionAudit, ...], findings: tuple[Finding, ...]
) -> Audit:
    """An audit with its verdict."""
    return Audit(target, functions, findings, tuple(reasons(functions, findings)))


def examine(graph: Graph, rules: Sequence[Rule]) -> Iterator[FunctionAudit]:
    """The audits of a function at every shape."""
    for variant in ("", *variants(graph.flexible)):
        graph.variant = variant
        yield place(graph, rules)
    graph.variant = ""


def variants(inputs: dict[str, TensorType]) -> Iterator[str]:
    """The shapes of flexible inputs, without those that the function was made for. A range counts
    as one shape."""
    for type_ in inputs.values():
        if type_.enumerated:
            others = [shape for shape in type_.enumerated if shape != type_.default]
            yield from ("x".join(map(str, shape)) for shape in others)
        else:
            yield "x".join(map(str, type_.shape))
        return  # the inputs of a function grow together


def place(graph: Graph, rules: Sequence[Rule]) -> FunctionAudit:
    """The placement of every op of a function at one shape, and the findings."""
    placed = {id(op): by_evidence(op, graph) for op in graph.ops}
    findings: list[Finding] = []
    drags: dict[int, tuple[Op, Rule]] = {}
    for rule in rules:
        scope, predicate = PREDICATES[rule.id]
        if scope == "op":
            hits = [(op, detail) for op in graph.ops if (detail := predicate(op, graph))]
            if hits:
                findings.append(finding(rule, [d for _, d in hits], [op.name for op, _ in hits]))
            # One op that does not compile keeps all of the function from running.
            whole = bool(hits) and rule.placement == "fails"
            concerned: Iterable[Op] = graph.ops if whole else [op for op, _ in hits]
            if rule.drags:
                drags |= {id(op): (op, rule) for op, _ in hits}
        elif scope == "function" and (detail := predicate(graph)):
            findings.append(finding(rule, [detail]))
            concerned = graph.ops
        else:
            continue
        for op in concerned:
            worsen(placed[id(op)], rule)
    for op, leader in dragged(graph, [op for op, _ in drags.values()]):
        # A worse rule about the leader says nothing about its neighbours.
        worsen(placed[id(op)], drags[id(leader)][1])
    for op, holder in graph.held:
        stay_with(placed[id(op)], placed[id(holder)])
    places = {key: op.placement for key, op in placed.items()}
    for rule in rules:
        scope, predicate = PREDICATES[rule.id]
        if scope == "places" and (detail := predicate(graph, places)):
            findings.append(finding(rule, [detail]))
    return FunctionAudit(
        graph.package, graph.function.name, graph.variant, graph.tokens,
        tuple(placed.values()), tuple(findings),
    )  # fmt: skip


def by_evidence(op: Op, graph: Graph) -> Placed:
    """An op, placed by the evidence for its kind. Evidence is about fp16."""
    matrix = graph.matrix(op)
    result = op.outputs[0].name if op.outputs else ""
    placed = Placed(op.name, result, op.kind, "unknown", UNSEEN, "low")
    placed.weights = 0 if matrix is None else matrix.elements
    evidence = seen().get(op.kind)
    # The first result decides: a top-k's second one is integers.
    of_halves = not op.outputs or graph.dtype(op.outputs[0].name) in ("fp16", "bool")
    if evidence is not None and evidence.placement is not None and of_halves:
        placed.placement, placed.rule = evidence.placement, evidence.id
        placed.confidence = evidence.confidence
    return placed


def worsen(placed: Placed, rule: Rule) -> None:
    """Take the placement of a rule, if it is worse than the current one."""
    if rule.placement and is_worse(rule.placement, placed.placement):
        placed.placement, placed.rule = rule.placement, rule.id
        placed.confidence = rule.confidence


def stay_with(placed: Placed, holder: Placed) -> None:
    """Take the placement of the op that holds this one in a body, if it is worse."""
    if is_worse(holder.placement, placed.placement):
        placed.placement, placed.rule = holder.placement, holder.rule
        placed.confidence = holder.confidence


def is_worse(placement: Placement, other: Placement) -> bool:
    return GOOD_TO_BAD.index(placement) > GOOD_TO_BAD.index(other)


def finding(rule: Rule, details: list[str], ops: Sequence[str] = ()) -> Finding:
    """The finding of a rule, with its details and the names of its ops."""
    unique = tuple(dict.fromkeys(details))
    return Finding(
        rule.id, rule.severity, rule.placement, rule.confidence, rule.message, rule.fix, unique,
        tuple(ops),
    )  # fmt: skip


def about_all(graphs: Sequence[Graph], rules: Sequence[Rule]) -> Iterator[Finding]:
    """The findings of rules about all programs together."""
    for rule in rules:
        scope, predicate = PREDICATES[rule.id]
        if scope == "bundle" and (detail := predicate(graphs)):
            yield finding(rule, [detail])


def reasons(functions: Sequence[FunctionAudit], findings: Sequence[Finding]) -> Iterator[str]:
    """The reasons why an audit does not pass, by `limits.toml`.

    A finding that a Mac refuted does not count. A Mac measures functions at their default shapes
    alone. So a finding at another shape counts unless the default shape has the same one, refuted.
    """
    ask = limits().residency
    refuted = {f.key: refuted_findings(f) for f in functions if not f.variant}
    where: defaultdict[tuple[str, Severity], set[tuple[str, str]]] = defaultdict(set)
    for function in functions:
        for finding in function.findings:
            if finding not in refuted[function.key]:
                where[finding.rule, finding.severity].add(function.key)
    for finding in findings:
        where[finding.rule, finding.severity] = set()
    for (rule, severity), of in where.items():
        if severity in ask.severities:
            yield f"{severity}: {rule}" + (f" ({len(of)} functions)" if len(of) > 1 else "")
    yield from refusals(functions)
    yield from against_rules(functions)
    share = weights_off_ane(functions)
    if share > ask.weights_off_ane:
        yield (
            f"{share:.1%} of the weights are read off the ANE, "
            f"at most {ask.weights_off_ane:.0%} may be"
        )
    unknown = share_of_weights(functions, "unknown")
    if unknown > ask.weights_off_ane:
        kinds = {op.kind for f in functions for op in f.ops if op.weights and op.final == "unknown"}
        yield (
            f"nobody reports where {unknown:.1%} of the weights are read "
            f"({', '.join(sorted(kinds))}), of at most {ask.weights_off_ane:.0%} it may be "
            "unknown: measure them on a Mac, by cetane audit --measure"
        )


def refusals(functions: Sequence[FunctionAudit]) -> Iterator[str]:
    """The reason that a Mac's Core ML refused functions: the first one, and its error."""
    refused = [function for function in functions if function.refusal is not None]
    if refused:
        first = refused[0]
        yield (
            f"fatal: Core ML refuses {first.package}/{first.function}"
            f"{and_more(len(refused) - 1)}: {printable(first.refusal or '')}"
        )


def against_rules(functions: Sequence[FunctionAudit]) -> Iterator[str]:
    """The reason that a Mac put too much of functions off the ANE: the worst one and its ops.

    Only ops count that no rule puts there. The others are judged as findings, such as a tail behind
    an argmax, or a tiny program.
    """
    limit = limits().residency.against_rules
    above = []
    for function in functions:
        kinds = off_against_rules(function)
        if (share := sum(kinds.values())) > limit:
            above.append((share, f"{function.package}/{function.function}", kinds))
    if above:
        share, name, kinds = max(above, key=lambda one: one[0])
        most = sorted(kinds, key=lambda kind: -kinds[kind])[:3]
        yield (
            f"{name}{and_more(len(above) - 1)}: a Mac runs {share:.0%} off the ANE against the "
            f"rules, at most {limit:.0%} may be: "
            + ", ".join(f"{kind} {kinds[kind]:.0%}" for kind in most)
            + "; try another layout or format"
        )


def off_against_rules(function: FunctionAudit) -> dict[str, float]:
    """What a Mac put off the ANE and no rule does, by kind of op.

    Values are shares of the function's time, as Core ML estimates it. They are shares of its ops
    if the cost of one is not known.
    """
    measured = [op for op in function.ops if op.measured in ("ANE", "CPU")]
    timed = all(op.cost is not None for op in measured) and any(op.cost for op in measured)
    costs = [op.cost or 0.0 if timed else 1.0 for op in measured]
    kinds: defaultdict[str, float] = defaultdict(float)
    for op, cost in zip(measured, costs, strict=True):
        if op.measured == "CPU" and op.placement != "CPU":
            kinds[op.kind] += cost / sum(costs)
    return kinds


def and_more(others: int) -> str:
    """Further functions, in words."""
    return f" and {others} more" if others else ""


def refuted_findings(function: FunctionAudit) -> list[Finding]:
    """The findings that put ops off the ANE, where a Mac measured all of these ops on it."""
    on_ane = {op.name for op in function.ops if op.measured == "ANE"}
    every = {op.name for op in function.ops}
    return [
        finding for finding in function.findings
        if finding.placement in ("CPU", "fails") and set(finding.ops or every) <= on_ane
    ]  # fmt: skip


def weights_off_ane(functions: Sequence[FunctionAudit]) -> float:
    """The share of weights that are read off the ANE. Unknown placements do not count as such."""
    return share_of_weights(functions, "CPU", "fails", "wrong")


def share_of_weights(functions: Sequence[FunctionAudit], *placements: Placement) -> float:
    """The share of weights whose op has one of these placements, over all functions at their
    default shape."""
    ops = [op for function in functions if not function.variant for op in function.ops]
    there = sum(op.weights for op in ops if op.final in placements)
    return there / max(sum(op.weights for op in ops), 1)
