"""`python -m flashladder`."""

from flashladder.cli import main

main(prog_name="flashladder")
