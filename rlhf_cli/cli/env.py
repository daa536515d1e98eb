"""`rlhf env`: print versions and devices."""

from rlhf_cli import terminal
from rlhf_cli.cli.options import AsJson, Debug


def env(as_json: AsJson = False, debug: Debug = False) -> None:
    """Print versions and devices, for a bug report."""
    from rlhf_cli.commands.env import environment

    facts = environment()
    if as_json:
        terminal.print_json(facts)
    else:
        terminal.table(["what", "value"], [[name, str(value)] for name, value in facts.items()])
