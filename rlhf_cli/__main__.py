"""`python -m rlhf_cli` is `rlhf`."""

from rlhf_cli.cli import app

app(prog_name="rlhf")
