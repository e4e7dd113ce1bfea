"""cetane info: a bundle's plan, origin and gate results."""

from __future__ import annotations

from itertools import starmap
from typing import TYPE_CHECKING

from cetane.cli.options import BundlePath, Json, Verbose
from cetane.cli.output import Unbroken, facts, megabytes, print_json, table

if TYPE_CHECKING:
    from cetane.bundle import Bundle
    from cetane.bundle.draft_heads import DraftHead
    from cetane.schema.manifest import Manifest


def info(bundle: BundlePath, verbose: Verbose = False, json: Json = False) -> None:
    """Show a bundle's plan, origin and gate results.

    It checks the hash of every file.
    """
    from cetane.bundle import Bundle

    opened = Bundle(bundle)
    opened.verify()
    if json:
        heads = {
            kind: {"digest": head.digest} | head.manifest.model_dump(mode="json")
            for kind, head in opened.draft_heads().items()
        }
        manifest = opened.manifest.model_dump(mode="json")
        judged = {"bundle": opened.digest}
        gates = {name: judged | result for name, result in opened.gates().items()}
        print_json({"digest": opened.digest, "manifest": manifest, "heads": heads, "gates": gates})
    else:
        show(opened, verbose)


def show(bundle: Bundle, verbose: bool) -> None:
    """Print a bundle's plan, its functions, its draft heads and its gate results."""
    from cetane.cli.plan_tables import show as show_plan
    from cetane.schema.changes import told_changes

    show_plan(bundle.plan, tables=verbose)
    manifest, recipe = bundle.manifest, bundle.plan.recipe
    total = sum(record.bytes for record in manifest.files.values())
    made = ", ".join(f"{name} {version}" for name, version in manifest.producer.items())
    facts(
        {
            "source": Unbroken(manifest.source),
            **origins(manifest),
            "recipe": f"{recipe.name}: {recipe.description}",
            # what its description does not know of
            **({"values of its own": changed} if (changed := told_changes(recipe)) else {}),
            "digest": bundle.digest[:16],  # the whole one is wider than a terminal; JSON has it
            "files": f"{len(manifest.files)}, {megabytes(total)}, all as built",
            "made with": made,
        }
        # Some files beside the gates' results only help other commands, and tell nothing.
        | {name: told for name, told in starmap(kept, bundle.gates().items()) if told},
        title=str(bundle.path),
    )
    if heads := bundle.draft_heads():
        columns = ["draft head", "functions", "proposes from", "weights", "right, held out"]
        table("draft heads", columns, [head_row(head) for head in heads.values()])


def origins(manifest: Manifest) -> dict[str, str]:
    """The folders of adapters."""
    merged = {} if manifest.lora is None else {"merged adapter": manifest.lora}
    named = merged | {f"adapter {name}": one for name, one in manifest.adapters.items()}
    return {name: Unbroken(one.source) for name, one in named.items()}


def head_row(head: DraftHead) -> list[str]:
    """A row of the table of draft heads."""
    about = head.manifest
    return [
        head.name,
        ", ".join(f"{function.name} T={function.tokens}" for function in about.functions),
        f"{about.rows} tokens",
        megabytes(about.weight_bytes),
        ", ".join(f"{share:.1%}" for share in about.training.top1) or "not judged",
    ]


def kept(name: str, result: dict[str, object]) -> tuple[str, str]:
    """A stored result's title, and what is said of it."""
    if name.partition("-")[0] == "evaluation":  # of the base, or of an adapter
        return name, evaluated(result)
    return f"gate {name}", outcome(result)


def evaluated(result: dict[str, object]) -> str:
    """An evaluation's figures, and how the tasks were asked."""
    from cetane.evaluation.figures import Evaluation
    from cetane.validation import validated

    found = validated(Evaluation, result, "evaluation", "run cetane eval again")
    told = [f"{one.task} {one.metric} {one.value:.4g}" for one in found.figures]
    if found.limit is not None:
        told.append(f"limit {found.limit}")
    if found.fewshot is not None:
        told.append(f"after {found.fewshot} examples")
    if found.chat:
        told.append("by the chat template")
    return ", ".join(told)


def outcome(result: dict[str, object]) -> str:
    """A gate's verdict, with the chip of a prediction; or its figures if it has none."""
    from cetane.gates.limits import OTHER_LIMITS, limits_digest

    if "passed" in result:
        told = "pass" if result["passed"] is True else "FAIL"
        about = "basis" in result and "target" in result
        if "limits" in result and result["limits"] != limits_digest():
            return f"{told}, {OTHER_LIMITS}"
        return f"{told}, {result['basis']} for {result['target']}" if about else told
    return ", ".join(
        f"{key} {value:.4g}"
        for key, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    )
