"""cetane train-head: a draft head for a bundle."""

import time
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.cli.output import Json, console, print_json, progress, table
from cetane.engine.generate import open_engine
from cetane.gates.quality import read_tokens
from cetane.speculate.open import head_path
from cetane.speculate.train import acceptance, collect, new_head, split, train


def train_head(
    kind: Annotated[Literal["medusa", "eagle3"], typer.Argument(help="medusa or eagle3.")],
    target: Annotated[Path, typer.Option(help="The bundle that it shall draft for.")],
    data: Annotated[list[Path], typer.Option(help="A text file; may be given again.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", show_default="beside the bundle")
    ] = None,
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
    batch: Annotated[int, typer.Option(min=1, help="Windows of a step.")] = 4,
    json: Json = False,
) -> None:
    """Train a head that drafts for a bundle, on hidden states from the calls that decode."""
    started = time.monotonic()
    bundle = Bundle(target)
    bundle.verify()
    checkpoint = open_checkpoint(model or bundle.manifest.source)
    engine = open_engine(bundle)
    window = min(window, bundle.plan.recipe.cache.context)
    texts = [read_tokens(bundle.tokenizer, path, tokens) for path in data]
    ids = [token for text in texts for token in text[: len(text) - len(text) % window]]
    embedding = torch.from_numpy(np.array(bundle.tables().embedding))
    with progress(f"train {kind}") as update:
        folder = features and features / bundle.digest
        learned, held = split(collect(engine, ids, window, update, folder))
        head = new_head(kind, bundle, checkpoint, learned, vocabulary, steps)
        before = acceptance(head, held, embedding)
        left = minutes - (time.monotonic() - started) / 60
        train(head, learned, embedding, epochs, left, batch, update)
    after = acceptance(head, held, embedding)
    path = output or head_path(bundle, kind)
    head.save(path)
    if json:
        results = {"untrained": before, "trained": after}
        print_json(
            {"head": str(path), "windows": len(learned), "held_out": len(held)}
            | {"minutes": (time.monotonic() - started) / 60}
            | {"cpu_minutes": time.process_time() / 60}
            | {name: found.model_dump(mode="json") for name, found in results.items()}
        )
    else:
        rows = [
            [place + 1, before.top1[place], after.top1[place], after.accepted[place]]
            for place in range(steps)
        ]
        columns = ["drafted token", "right, untrained", "right", "right, with all before it"]
        table(f"{kind} on {after.positions} held-out positions", columns, rows)
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
