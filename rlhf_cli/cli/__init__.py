"""The `rlhf` command line. Heavy modules are imported inside the commands, so that `rlhf --help` is fast."""

from rlhf_cli.cli.main import app as app
