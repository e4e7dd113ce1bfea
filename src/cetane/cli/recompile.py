"""cetane recompile: compiles a bundle's programs for this build of macOS."""

from cetane.cli.options import BundlePath, Json
from cetane.cli.output import print_json, progress, table


def recompile(bundle: BundlePath, json: Json = False) -> None:
    """Compile and load every shard again.

    An upgrade of macOS makes this necessary.
    """
    from cetane.pipeline.recompile import recompile as compile_anew

    with progress("recompile") as update:
        seconds = compile_anew(bundle, progress=update)
    if json:
        print_json({"seconds": seconds})
    else:
        rows = [[shard, taken] for shard, taken in seconds.items()]
        table("compiled and loaded (measured)", ["shard", "seconds"], rows)
