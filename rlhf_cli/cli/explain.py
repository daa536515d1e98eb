"""`rlhf explain`: explain a key or an error code."""

from typing import Annotated

from rlhf_cli.cli import completion
from rlhf_cli.cli.options import Debug, argument, flag
from rlhf_cli.errors import RLHFError

NAME_TEXT = "Key (kl_coef, ppo.kl_coef), section (data) or error code (D10)."


def explain(
    name: Annotated[str | None, argument("KEY|CODE", NAME_TEXT, completion.keys_and_codes)] = None,
    all_: Annotated[bool, flag("--all", "All keys and all error codes.")] = False,
    debug: Debug = False,
) -> None:
    """Explain a config key (meaning, default, source) or an error code."""
    from rlhf_cli.commands import explain

    if (name is None) != all_:
        raise RLHFError("C11", "a key or a code is needed, or --all alone", hint="rlhf explain kl_coef")
    if name is None:
        explain.explain_all()
    else:
        explain.explain(name)
