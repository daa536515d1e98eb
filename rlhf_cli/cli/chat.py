"""`rlhf chat`: chat with the model of a run."""

from pathlib import Path
from typing import Annotated

from rlhf_cli import system
from rlhf_cli.cli import completion
from rlhf_cli.cli.errors import only_run
from rlhf_cli.cli.options import ONLY_RUN, Debug, Quiet, Step, TrustRemoteCode, Verbose, argument, heavy_imports, option

RUN_TEXT = f"Run folder, or folder of its SFT or PPO stage. {ONLY_RUN}"
CHAT_STAGE_TEXT = "ppo, sft or dpo. Default: PPO, or SFT if there is none."
LENGTH_TEXT = "Maximum tokens of a reply. Default: the response length of PPO."
COMPARE_TEXT = "Let both models answer each prompt, with the same random numbers."
TEMPERATURE_TEXT = "Sampling temperature; 0 is greedy. Default: the temperature of PPO."


def chat(
    folder: Annotated[Path | None, argument("RUN", RUN_TEXT, completion.runs)] = None,
    stage: Annotated[str | None, option("--stage", "STAGE", CHAT_STAGE_TEXT, completion.chat_stages)] = None,
    step: Step = None,
    compare: Annotated[str | None, option("--compare", "sft,ppo", COMPARE_TEXT, completion.chat_pairs)] = None,
    temperature: Annotated[float | None, option("--temperature", "X", TEMPERATURE_TEXT, min=0.0)] = None,
    max_new_tokens: Annotated[int | None, option("--max-new-tokens", "N", LENGTH_TEXT, min=1)] = None,
    seed: Annotated[int, option("--seed", "N", "Random seed of the replies.", min=0, max=2**32 - 1)] = 0,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Chat with the model of a run; see the reward and KL of each reply.

    /help lists the commands. From a pipe, each line is a prompt; replies go to stdout, numbers to stderr.
    """
    from rlhf_cli.config.base import Options

    run = folder or only_run()
    with heavy_imports():
        from rlhf_cli.commands.chat import loop

    chat_options = loop.ChatOptions(stage, step, compare, temperature, max_new_tokens, seed)
    with system.translate_resource_errors(run):
        loop.run(run, chat_options, Options(trust_remote_code=trust_remote_code, debug=debug))
