"""The gate of a folder for ANEMLL: played by its hosts' rules, its logits must be the bundle's.

The export lowers the model once more, with masks, caches and rotary tables of its own. So the
bundle's gates say nothing about these graphs.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from cetane.bundle import Bundle
from cetane.bundle.tables import Tables
from cetane.checkpoint import Checkpoint
from cetane.engine.authored import host_tables
from cetane.export.anemll.contract import PREFILL
from cetane.export.anemll.host import ChatHost, Folder, PortableModels
from cetane.files import Progress
from cetane.gates.exported import bundle_logits, choice_check, logit_checks
from cetane.gates.probes import text_tokens
from cetane.gates.verdict import Check
from cetane.planner import Planner

STEPS = 12
"""Tokens that are fed one by one after every prefill, and compared."""
BATCHES = 2
"""Whole batches before them: the second reads what the first wrote."""
LONGEST = 1536
"""The most tokens of a prefill. A longer window is not left: that would take minutes."""


def judge_anemll(
    bundle: Bundle, checkpoint: Checkpoint, path: Path, progress: Progress
) -> tuple[list[Check], list[str]]:
    """Compare a folder with the bundle from which it was exported, both in fp32.

    Returns the checks, and in words what was not judged. The bundle gets the rows of the embedding
    unrounded, since the folder has them in fp16. If other weights differ, the limits are those of
    the recipe's quality.
    """
    folder = Folder(path, PortableModels())
    tokens = text_tokens(bundle.tokenizer, min(folder.context, LONGEST + 2 * STEPS))
    lengths, unjudged = prefills(folder)
    spans = [(max(n - 1, 0), min(max(n - 1, 0) + STEPS, len(tokens))) for n in lengths]
    progress("the bundle", 0, len(spans) + 1)
    truths = bundle_logits(bundle, unrounded(bundle, checkpoint), tokens, spans)
    checks, anew = list[Check](), encoded_anew(bundle)
    for done, (length, (start, stop), truth) in enumerate(zip(lengths, spans, truths, strict=True)):
        progress(f"{length} tokens and {stop - start} steps", done + 1, len(spans) + 1)
        host = ChatHost(folder)
        for at in range(0, length, folder.batch):
            host.run(tokens[at : at + folder.batch], at, PREFILL)
        # As theirs do, it feeds the last token of a prefill once more.
        made = [host.head(tokens[position], position) for position in range(start, stop)]
        choices = np.array([host.best(one) for one in made])
        where = f"steps {start} to {stop - 1} after a prefill of {length}"
        checks.append(choice_check(bundle, where, choices, truth, anew))
        if not folder.choose:
            parts = [f"logits{number + 1}" for number in range(folder.parts)]
            rows = [np.concatenate([one[part].ravel() for part in parts]) for one in made]
            logits = np.stack(rows)[:, : truth.shape[1]].astype(np.float32)
            checks += logit_checks(bundle, where, logits, truth, anew)
    progress("judged", len(spans) + 1, len(spans) + 1)
    return checks, unjudged


def prefills(folder: Folder) -> tuple[list[int], list[str]]:
    """The tokens to prefill before the steps, and what is not judged: none, some batches, a whole
    window, and batches beyond it."""
    batch = folder.batch
    room = max(batch, folder.context - STEPS)
    lengths = {0, min(BATCHES * batch, room // batch * batch)}
    if folder.window is None or folder.window >= folder.context:
        return sorted(lengths), []
    wanted = (folder.window, folder.window + BATCHES * batch)
    beyond = {length for length in wanted if length <= min(room, LONGEST)}
    unjudged = []
    if len(beyond) < 2:
        late = "batches" if beyond else "positions"
        unjudged.append(f"{late} beyond the window of {folder.window} tokens")
    return sorted(lengths | beyond), unjudged


def unrounded(bundle: Bundle, checkpoint: Checkpoint) -> Tables:
    """The bundle's tables, with unrounded rows of the embedding if the host looks tokens up."""
    tables = bundle.tables()
    if tables.tokens is None:
        return tables
    own = host_tables(Planner(checkpoint, bundle.plan.recipe), checkpoint)
    return replace(tables, tokens=own.tokens)


def encoded_anew(bundle: Bundle) -> bool:
    """Whether the folder's codes of the embedding or the head may be others than the bundle's: an
    embedding inside a shard becomes fp16, and codes for a whole tensor depend on the head's parts.
    """
    recipe = bundle.plan.recipe
    form = recipe.compression.types.get("head", recipe.compression.default)
    forms = [form, *recipe.compression.names.values()]
    return recipe.embedding.inside or any(form.endswith("per-tensor") for form in forms)
