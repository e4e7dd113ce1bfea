"""cetane serve: bundles behind OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cetane.cli.options import Backend, ComputeUnits, with_units
from cetane.cli.output import progress, say, tell_kernels, warn

LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")


def serve(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE", help="Bundles.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="CETANE_API_KEY", help="The key that clients must send."),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A web page's origin that may call the server (CORS). May be repeated.",
        ),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait for a model.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="The longest time of a request.")] = 600,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of an answer.")
    ] = None,
    prefixes: Annotated[
        int, typer.Option(min=0, help="Conversations whose prompts stay in memory.")
    ] = 4,
    speculation: Annotated[
        bool,
        typer.Option(
            help="Verify drafts, where that pays: from the text, from earlier answers, and "
            "from the draft head, or else from the model itself in long texts."
        ),
    ] = True,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds for running answers when it is stopped.")
    ] = 10,
    backend: Backend = "auto",
    compute_units: ComputeUnits = None,
) -> None:
    """Serve bundles behind OpenAI's API, with a chat page.

    Clients use http://HOST:PORT/v1. The chat page is http://HOST:PORT/.
    """
    with progress("loading") as update:
        from cetane import serve as application  # which imports for seconds
        from cetane.mil.fast import share_threads
        from cetane.server.run import bind, run

        bound = bind(host, port)
        share_threads()
        tell_kernels(update, backend)
        app = application(
            *bundles, backend=with_units(backend, compute_units), queue=queue, seconds=seconds,
            max_tokens=max_tokens, prefixes=prefixes, speculation=speculation, grace=grace,
            api_key=api_key,
            origins=tuple(origin or ()), hosts=LOCAL if host in LOCAL else (),
        )  # fmt: skip
    if host not in LOCAL and api_key is None:
        warn("everybody who reaches this address can use it; --api-key asks for a key")
    shown = f"[{host}]" if ":" in host else host
    say(f"http://{shown}:{bound.getsockname()[1]}/")
    run(app, bound)
