"""`python -m cetane.bridge SCRIPT [ARGS]`: run a script with the bridge in place."""

import runpy
import sys
from pathlib import Path

from cetane.bridge import install
from cetane.errors import CetaneError

USAGE = "usage: python -m cetane.bridge [--precision fp32|fp16] SCRIPT [ARGS]"


def main(arguments: list[str]) -> None:
    """Run the script as `__main__`, with its own arguments and its folder on the path."""
    precision = "fp32"
    if arguments[:1] == ["--precision"] and len(arguments) > 1:
        precision, arguments = arguments[1], arguments[2:]
    if not arguments or arguments[0].startswith("-"):
        raise CetaneError(USAGE)
    script = Path(arguments[0])
    if not script.is_file():
        raise CetaneError(f"{script} is not a file", hint=USAGE)
    install(precision=precision)
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CetaneError as error:
        sys.exit(str(error))
