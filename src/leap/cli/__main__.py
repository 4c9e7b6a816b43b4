"""`python -m leap.cli` is `leap`."""

from leap.cli import main

main()
