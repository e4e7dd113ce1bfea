"""cetane train-head: a draft head for a bundle."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.cli.output import Json, console, print_json, progress, table
from cetane.cli.port import warn
from cetane.cli.validate import show_head
from cetane.engine.generate import open_engine
from cetane.errors import CetaneError
from cetane.files import sha256
from cetane.gates.draft_head import audit_draft_head, judge_draft_head
from cetane.gates.quality import read_tokens
from cetane.schema.draft_head import Training
from cetane.speculate.draft_heads.build import add_draft_head
from cetane.speculate.draft_heads.train import (
    acceptance,
    collect,
    devices,
    new_draft_head,
    split,
    train,
)


def train_head(
    kind: Annotated[Literal["medusa", "eagle3"], typer.Argument(help="medusa or eagle3.")],
    target: Annotated[Path, typer.Option(help="The bundle that it shall draft for.")],
    data: Annotated[list[Path], typer.Option(help="A text file; may be given again.")],
    model: Annotated[
        str | None, typer.Option(help="The checkpoint, if it is not where the build found it.")
    ] = None,
    features: Annotated[
        Path | None, typer.Option(help="Keep hidden states here, for another run or head.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of every file.")] = 200_000,
    window: Annotated[int, typer.Option(min=16, help="Tokens that are seen together.")] = 256,
    vocabulary: Annotated[int, typer.Option(min=1, help="Tokens it may propose.")] = 8192,
    steps: Annotated[int, typer.Option(min=1, max=16, help="Tokens of a draft.")] = 3,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    minutes: Annotated[float, typer.Option(help="Most minutes of all this.")] = 30.0,
    batch: Annotated[int, typer.Option(min=1, help="Windows of a step, on each device.")] = 4,
    json: Json = False,
) -> None:
    """Train a head that drafts for a bundle, on hidden states from the calls that decode, and make
    it a shard of the bundle, in place of an earlier one of its kind. Exit code 1 when its golden
    gate is red. Started by `torchrun`, it trains on several devices."""
    started, accelerator = time.monotonic(), devices()
    bundle = Bundle(target)
    bundle.verify()
    checkpoint = open_checkpoint(model or bundle.manifest.source)
    engine = open_engine(bundle)
    window = min(window, bundle.plan.recipe.cache.context)
    if window < 2 * steps:
        raise CetaneError(f"--window {window}: less than two drafts of {steps} tokens")
    texts = [read_tokens(bundle.tokenizer, path, tokens) for path in data]
    ids = [token for text in texts for token in text[: len(text) - len(text) % window]]
    rows = bundle.tables().embedding
    embedding = torch.from_numpy(np.asarray(rows[np.arange(rows.shape[0])], np.float16))
    with progress(f"train {kind}", accelerator.is_main_process) as update:
        folder = features and features / bundle.digest
        with accelerator.main_process_first() if folder else nullcontext():  # others read them
            learned, held = split(collect(engine, ids, window, update, folder))
        head = new_draft_head(kind, bundle, checkpoint, learned, vocabulary, steps)
        before = acceptance(head, held, embedding)
        left = minutes - (time.monotonic() - started) / 60
        train(head, learned, embedding, epochs, left, batch, update, accelerator)
        accelerator.end_training()
        if not accelerator.is_main_process:
            raise typer.Exit
        head.round()
        after = acceptance(head, held, embedding)
        training = Training(
            data={path.name: sha256(path) for path in data},
            windows=len(learned),
            length=window,
            held_out=len(held),
            **after.model_dump(),
        )
        update("lower", 0, 1)
        shard = add_draft_head(bundle, head, held.tokens, training)
        judged = judge_draft_head(bundle, shard, engine, update)
    audited = audit_draft_head(bundle, shard)
    if json:
        print_json(
            {"head": str(shard.path), "digest": shard.digest, "windows": len(learned)}
            | {"held_out": len(held), "untrained": before.model_dump(mode="json")}
            | {"minutes": (time.monotonic() - started) / 60}
            | {"cpu_minutes": time.process_time() / 60}
            | {"trained": after.model_dump(mode="json"), "residency": audited.passed}
            | {"golden": judged.model_dump(mode="json")}
        )
    else:
        columns = ["drafted token", "right, untrained", "right", "right, with all before it"]
        places = [
            [place + 1, before.top1[place], after.top1[place], after.accepted[place]]
            for place in range(steps)
        ]
        table(f"{kind} on {after.positions} held-out positions", columns, places)
        show_head(kind, judged)
        warn(audited)
        console.print(f"wrote {shard.path}", markup=False, soft_wrap=True)
    raise typer.Exit(0 if judged.passed else 1)
