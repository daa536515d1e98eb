"""`rlhf schema`: print a JSON Schema."""

from typing import Annotated

from rlhf_cli import terminal
from rlhf_cli.cli import completion
from rlhf_cli.cli.options import Debug, argument
from rlhf_cli.errors import RLHFError, did_you_mean
from rlhf_cli.runs.layout import STAGES


def schema(
    stage: Annotated[str | None, argument("STAGE", "sft, reward, dpo, ppo or eval.", completion.stages)] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of a config, for editors."""
    from rlhf_cli.config import json_schema

    if stage is not None and stage not in STAGES:
        raise RLHFError("C07", f"{stage}: not one of {', '.join(STAGES)}", hint=did_you_mean(stage, STAGES))
    terminal.out(json_schema.schema_text(stage).rstrip())
