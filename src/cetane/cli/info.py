"""cetane info: what a bundle is, and what its gates said."""

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import DraftHead
from cetane.cli.output import BundlePath, Json, megabytes, print_json, table
from cetane.cli.plan import show


def info(bundle: BundlePath, json: Json = False) -> None:
    """Show a bundle's manifest and gate results; every file's hash is checked."""
    opened = Bundle(bundle)
    opened.verify()
    gates = opened.gates()
    if json:
        manifest = opened.manifest.model_dump(mode="json")
        heads = {
            kind: {"digest": head.digest} | head.manifest.model_dump(mode="json")
            for kind, head in opened.draft_heads().items()
        }
        print_json({"digest": opened.digest, "manifest": manifest, "heads": heads, "gates": gates})
        return
    show(opened.plan)
    total = sum(record.bytes for record in opened.manifest.files.values())
    rows = [
        ["source", opened.manifest.source],
        ["digest", opened.digest],
        ["files", f"{len(opened.manifest.files)}, {megabytes(total)}, all as built"],
        *([f"made with {name}", number] for name, number in opened.manifest.producer.items()),
        *([f"gate {name}", verdict(result)] for name, result in gates.items()),
    ]
    table("bundle", ["what", "value"], rows)
    if shards := opened.draft_heads():
        columns = ["head", "functions", "proposes from", "weights", "right, held out"]
        table("draft heads", columns, [head_row(head) for head in shards.values()])


def head_row(head: DraftHead) -> list[str]:
    """A draft head for people."""
    about = head.manifest
    return [
        head.name,
        ", ".join(f"{function.name} T={function.tokens}" for function in about.functions),
        f"{about.rows} tokens",
        megabytes(about.weight_bytes),
        ", ".join(f"{share:.1%}" for share in about.training.top1),
    ]


def verdict(result: dict[str, object]) -> str:
    """A gate's outcome, or its figures where it has no verdict."""
    if "passed" in result:
        return "pass" if result["passed"] else "FAIL"
    shown = {key: value for key, value in result.items() if isinstance(value, int | float)}
    return ", ".join(f"{key} {value:.4g}" for key, value in shown.items())
