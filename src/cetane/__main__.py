"""`python -m cetane` is `cetane`."""

from cetane.cli import main

main()
