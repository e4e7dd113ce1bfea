"""The gate of a folder for CoreML-LLM: played by its runtime's rules, it must choose the bundle's
tokens.

The export lowers the model once more, with masks and caches of its own. So the bundle's gates say
nothing about these graphs. The last package gives choices, and their logits unless it verifies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cetane.bundle import Bundle
from cetane.bundle.rows import ROW_FORMATS, EncodedRows
from cetane.bundle.tables import Tables
from cetane.checkpoint import Checkpoint
from cetane.engine.authored import StoredRows
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.export.coreml_llm.app_folder import AppFolder, AppRows, read_folder
from cetane.export.coreml_llm.folder import HALVES
from cetane.export.coreml_llm.host import AppHost, Chosen
from cetane.families import TokenTable, Weights
from cetane.files import Progress
from cetane.gates.beside_shards import same_rows
from cetane.gates.exported import Span, bundle_logits, choice_check, chosen_logits_check
from cetane.gates.probes import text_tokens
from cetane.gates.verdict import Check, at_most
from cetane.planner import Planner

STEPS = 6
"""Tokens that are fed one by one at the end of every play."""
ROW_FILES = {"tokens": "embed_tokens", "per_layer": "embed_tokens_per_layer"}
"""The names of the files with rows, without endings, by table."""
OUT_OF_REACH = "positions beyond the window of {} tokens"


def judge_coreml_llm(
    bundle: Bundle, checkpoint: Checkpoint, path: Path, progress: Progress
) -> tuple[list[Check], list[str]]:
    """`table_checks` and `judge_folder` of a folder: a play reads only some rows of its tables."""
    tables = [*table_checks(bundle, checkpoint, path)]
    checks, unjudged = judge_folder(bundle, checkpoint, read_folder(path), progress)
    return [*tables, *checks], unjudged


def table_checks(bundle: Bundle, checkpoint: Checkpoint, path: Path) -> Iterator[Check]:
    """Whether a folder has the bundle's rotary tables, the model's rows in int8, and two parameters
    in fp16, which no play reads."""
    for name, table in bundle.tables().rotary.items():
        for part, rows in zip(("cos", "sin"), table, strict=True):
            given = np.load(path / f"{part}_{name}.npy", "r")[: len(rows)]
            same = np.array_equal(given, rows.astype(np.float16))
            yield at_most(f"{part}_{name}.npy: not the bundle's", int(not same), 0)
    for name, token_table in token_tables(bundle, checkpoint).items():
        file = ROW_FILES[name]
        stored = AppRows(path, file, token_table.channels, 1.0)
        parts: dict[str, npt.NDArray[Any]] = {"values": stored.values, "scales": stored.scales}
        rows = EncodedRows(ROW_FORMATS["int8"], parts, stored.values.shape)
        same = same_rows(rows, plain_rows(token_table, checkpoint))
        yield at_most(f"{file}_q8.bin or its scales: not the model's", int(not same), 0)
    for file, weight in HALVES.items():
        wanted = checkpoint.read(weight).half().numpy()
        same = np.array_equal(np.fromfile(path / file, np.float16), wanted.ravel())
        yield at_most(f"{file}: not the model's", int(not same), 0)


def judge_folder(
    bundle: Bundle, checkpoint: Checkpoint, folder: AppFolder, progress: Progress
) -> tuple[list[Check], list[str]]:
    """Compare a folder with the bundle from which it was exported, both in fp32.

    Returns the checks, and in words what was not judged. The bundle gets the tables that the folder
    should have. So a right folder differs by the order of sums alone.
    """
    lengths, unjudged = prefills(folder)
    after = STEPS + 2 * folder.verify_tokens
    tokens = text_tokens(bundle.tokenizer, min(folder.context, lengths[-1] + after))
    spans = [Span(max(length - 1, 0), min(length + after, len(tokens))) for length in lengths]
    progress("the bundle", 0, len(spans) + 1)
    engine = Engine(bundle.plan, PortableBackend(bundle), as_written(bundle, checkpoint))
    truths = bundle_logits(engine, tokens, spans)
    checks = list[Check]()
    for done, (length, (start, stop, _), truth) in enumerate(
        zip(lengths, spans, truths, strict=True)
    ):
        progress(f"a prefill of {length} tokens", done + 1, len(spans) + 1)
        where = f"tokens {start} to {stop - 1} after a prefill of {length}"
        single, verified = play(AppHost(folder), tokens[:stop], length)
        found = {at: one.token for at, one in single.items()} | verified
        choices, numbers = np.array([*found.values()]), np.array([*found]) - start
        checks.append(choice_check(where, choices, truth[numbers]))
        count = len(single)
        logits = np.array([one.logit for one in single.values()], np.float32)
        checks.append(chosen_logits_check(where, logits, choices[:count], truth[numbers[:count]]))
    progress("judged", len(spans) + 1, len(spans) + 1)
    return checks, unjudged


def as_written(bundle: Bundle, checkpoint: Checkpoint) -> Tables:
    """The tables that the folder should have: rows in int8, and rotary tables in fp16."""
    tables = token_tables(bundle, checkpoint)
    rows = {name: Int8Rows(table, checkpoint) for name, table in tables.items()}
    rotary = {
        name: table.astype(np.float16).astype(np.float32)
        for name, table in bundle.tables().rotary.items()
    }
    return Tables(rows.pop("tokens"), rotary, dict(rows))


def token_tables(bundle: Bundle, checkpoint: Checkpoint) -> dict[str, TokenTable]:
    """The model's tables with a row for each token."""
    model = Planner(checkpoint, bundle.plan.recipe).model
    return {"tokens": TokenTable(model.vocab, model.hidden, model.embedding), **model.tables}


def plain_rows(table: TokenTable, weights: Weights) -> StoredRows:
    """The rows of a table without its factor, which the folder's config has."""
    return StoredRows(replace(table, table=replace(table.table, factor=1.0)), weights)


class Int8Rows:
    """Rows of a checkpoint, rounded to int8 when they are read, and then multiplied by their
    factor."""

    def __init__(self, table: TokenTable, weights: Weights) -> None:
        self.rows, self.factor = plain_rows(table, weights), table.table.factor

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape

    def __getitem__(self, tokens: npt.NDArray[Any], /) -> npt.NDArray[Any]:
        row_format = ROW_FORMATS["int8"]
        return row_format.decode(row_format.encode(self.rows[tokens])) * self.factor


def prefills(folder: AppFolder) -> tuple[list[int], list[str]]:
    """The tokens of the prompts, ascending, and what is not judged: no prompt, one token, the
    longest prompt, and one that a draft takes over the end of the window."""
    longest = min(folder.prefill_tokens, folder.context - STEPS - 2 * folder.verify_tokens)
    edge = folder.window - max(1, folder.verify_tokens // 2)
    lengths = {0, *(length for length in (1, edge, longest) if 0 < length <= longest)}
    reached = max(lengths) + STEPS + 2 * folder.verify_tokens
    beyond = folder.context <= folder.window or reached > folder.window
    return sorted(lengths), [] if beyond else [OUT_OF_REACH.format(folder.window)]


def play(
    host: AppHost, tokens: Sequence[int], length: int
) -> tuple[dict[int, Chosen], dict[int, int]]:
    """Prefill `length` tokens, verify two drafts if there is room, and feed the others one by one.

    Returns by position what single calls chose, and what calls that verify chose. The first draft
    has only one right token, and all of the second are right.
    """
    single, verified = dict[int, Chosen](), dict[int, int]()
    if length:
        single[length - 1] = host.prefill(tokens[:length])
    width = host.folder.verify_tokens
    for right in (1, width) if width and length + 2 * width <= len(tokens) else ():
        at = host.position
        drafts = [*tokens[at : at + right], *tokens[at : at + width - right]]
        verified |= dict(enumerate(host.verify(drafts)[:right], at))
        host.commit(right)
    for at in range(host.position, len(tokens)):
        single[at] = host.decode(tokens[at])
    return single, verified
