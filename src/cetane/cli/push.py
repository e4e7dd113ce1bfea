"""cetane push: uploads a bundle or an exported folder to the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer

from cetane.cli.options import Json, MeasuredChip
from cetane.cli.output import megabytes, print_json, progress, say, say_next, warn


def push(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A bundle, or a folder of cetane export.")
    ],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository.")],
    bundle: Annotated[
        Path | None,
        typer.Option(help="The bundle that an exported folder is from; its gates fill the card."),
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="The model's license, by its id on the hub.")
    ] = None,
    chip: MeasuredChip = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out", help="Agree to upload the part of your --text that a draft head keeps."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the card and the files; upload nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Upload a bundle or an export to the hub.

    It goes to the Hugging Face hub, with a model card from the bundle's gates. It uses your login:
    hf auth login.
    """
    with progress("push"):
        from cetane.report.push import push as upload  # which imports for seconds

        done = upload(
            folder,
            repo,
            bundle=bundle,
            license=license,
            chip=chip,
            public=public,
            held_out=held_out,
            dry_run=dry_run,
        )
    if json:
        print_json(done.as_json())
        return
    if dry_run:
        say(done.card)
        for name, size in done.files.items():
            say(f"{size:>14,} {name}")
    for name in done.texts:
        warn(f"{name} holds windows of text as tokens, which anyone can read there")
    whole = megabytes(sum(done.files.values()))
    say(f"{len(done.files)} files, {whole}: {done.url or 'nothing uploaded, dry run'}")
    if dry_run:
        options = {"--bundle": bundle, "--license": license, "--chip": chip, "--public": public,
                   "--held-out": held_out}  # fmt: skip
        say_next("push", folder, repo, options=options)
