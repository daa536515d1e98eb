"""Commands that inspect a finished or running run and export its model, and explain keys and error codes."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli import system, terminal
from rlhf_cli.cli import completion
from rlhf_cli.cli.errors import only_run
from rlhf_cli.cli.options import (
    STAGES,
    AsJson,
    Debug,
    Set,
    StageFolder,
    Step,
    Trailing,
    TrustRemoteCode,
    argument,
    flag,
    heavy_imports,
    option,
)
from rlhf_cli.errors import RLHFError, did_you_mean

SEARCHED_TEXT = "Folders to search. Default: ./runs if it exists, else the working directory."


def ls(
    folders: Annotated[list[Path] | None, argument("DIR...", SEARCHED_TEXT)] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the runs below a folder with stages, results and sizes."""
    from rlhf_cli.commands import status

    status.list_runs(folders or [], as_json=as_json)


def status(
    folder: Annotated[Path | None, argument("RUN", "Run folder. Default: the only run here.", completion.runs)] = None,
    assignments: Trailing = None,
    set_: Set = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the progress and results of each stage, and what comes next."""
    from rlhf_cli.commands import status

    status.show(folder or only_run(), [*(set_ or []), *(assignments or [])], as_json=as_json)


RUNS_TEXT = "Run folder; several are compared. Default: the only run here."
OUT_TEXT = "HTML file. Default: RUN/eval/report.html; ./report.html for several runs."


def report(
    folders: Annotated[list[Path] | None, argument("RUN...", RUNS_TEXT, completion.runs)] = None,
    out: Annotated[Path | None, option("--out", "FILE", OUT_TEXT)] = None,
    step: Step = "last",
    debug: Debug = False,
) -> None:
    """Write an HTML report that diagnoses each stage, or compares runs.

    The file is self-contained. It covers the stages that exist so far, so a running run can be inspected.
    """
    from rlhf_cli.commands.report import show

    run_folders = folders or [only_run()]
    with system.translate_resource_errors(out or run_folders[0]):
        show.run(run_folders, out, step)


STAGE_TEXT = "ppo, sft, dpo or reward. Default: the PPO policy, or SFT if there is none."
ModelStage = Annotated[str | None, option("--stage", "STAGE", STAGE_TEXT, completion.stages)]


def export(
    folder: StageFolder,
    out: Annotated[Path | None, option("--out", "DIR", "New or empty folder to write to.")] = None,
    push: Annotated[
        str | None, option("--push", "OWNER/NAME", "Hub repository to upload to; created as private.")
    ] = None,
    public: Annotated[bool, flag("--public", "With --push: create a public repository.")] = False,
    step: Step = "last",
    stage: ModelStage = None,
    dtype: Annotated[
        str | None, option("--dtype", "DTYPE", "float32, bfloat16 or float16. Default: the dtype of the run.")
    ] = None,
    interpolate: Annotated[
        float | None, option("--interpolate", "SHARE", "Export SFT + SHARE * (PPO - SFT), with 0 < SHARE < 1.")
    ] = None,
    show_prompt: Annotated[
        bool, flag("--show-prompt", "Show a held-out prompt of your data in the model card.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Write a plain Hugging Face model folder, or push it to the Hub.

    Adapters are merged. The export is loaded with transformers and must reproduce the logits of the run, or it is
    deleted. --push uploads it as one commit and, without --out, keeps no local copy.
    """
    if out is None and push is None:
        hint = "rlhf export RUN --out DIR, --push OWNER/NAME"
        raise RLHFError("C11", "a folder or a repository is needed", hint=hint)
    if public and push is None:
        raise RLHFError("C11", "--public belongs to --push", hint="remove it, or add --push OWNER/NAME")
    from rlhf_cli.config.base import Options

    with heavy_imports():
        from rlhf_cli.commands import export

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    repository = export.Repository(push, public) if push is not None else None
    with system.translate_resource_errors(out or folder):
        export.run(
            folder, out, options, stage=stage, step=step, dtype=dtype, repository=repository, show_prompt=show_prompt,
            interpolate=interpolate,
        )  # fmt: skip


def serve(
    folder: StageFolder,
    stage: ModelStage = None,
    rollouts: Annotated[bool, flag("--rollouts", "The server that models.engine of ppo.yaml samples from.")] = False,
    execute: Annotated[bool, flag("--exec", "Start it. Default: only print the command.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Print the vLLM command that serves a model, or start it."""
    from rlhf_cli.config.base import Options

    if rollouts and stage is not None:
        raise RLHFError("C11", "--rollouts serves models.sft of ppo.yaml", hint="omit --stage")
    with heavy_imports():
        from rlhf_cli.commands import serve

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    serve.run(folder, options, stage=stage, rollouts=rollouts, execute=execute)


CHAT_STAGE_TEXT = "ppo, sft or dpo. Default: PPO, or SFT if there is none."
LENGTH_TEXT = "Maximum tokens of a reply. Default: the response length of PPO."
COMPARE_TEXT = "Let both models answer each prompt, with the same random numbers."
TEMPERATURE_TEXT = "Sampling temperature; 0 is greedy. Default: the temperature of PPO."


def chat(
    folder: Annotated[Path, argument("RUN", "Run folder, or folder of its SFT or PPO stage.", completion.runs)],
    stage: Annotated[str | None, option("--stage", "STAGE", CHAT_STAGE_TEXT, completion.chat_stages)] = None,
    step: Step = "last",
    compare: Annotated[str | None, option("--compare", "sft,ppo", COMPARE_TEXT, completion.chat_pairs)] = None,
    temperature: Annotated[float | None, option("--temperature", "X", TEMPERATURE_TEXT, min=0.0)] = None,
    max_new_tokens: Annotated[int | None, option("--max-new-tokens", "N", LENGTH_TEXT, min=1)] = None,
    seed: Annotated[int, option("--seed", "N", "Random seed of the replies.", min=0, max=2**32 - 1)] = 0,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Chat with the model of a run; see the reward and KL of each reply.

    /help lists the commands. From a pipe, each line is a prompt; replies go to stdout, numbers to stderr.
    """
    from rlhf_cli.config.base import Options

    with heavy_imports():
        from rlhf_cli.commands import chat

    chat_options = chat.ChatOptions(stage, step, compare, temperature, max_new_tokens, seed)
    with system.translate_resource_errors(folder):
        chat.run(folder, chat_options, Options(trust_remote_code=trust_remote_code, debug=debug))


def verify(
    folder: Annotated[Path, argument("RUN", "Run folder with ppo/.", completion.runs)],
    step: Annotated[
        int | None, option("--step", "N", "Update to repeat. Default: the newest with a checkpoint before it.", min=1)
    ] = None,
    as_json: AsJson = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Repeat one PPO update and compare it with a float64 reference.

    Exits with 1 if the two differ by more than 1e-6 in float64. RUN is not modified.
    """
    from rlhf_cli.config.base import Options

    with heavy_imports():
        from rlhf_cli.commands import verify as verify_command

    with system.translate_resource_errors(folder):
        code = verify_command.run(folder, step, Options(trust_remote_code=trust_remote_code), as_json=as_json)
    raise typer.Exit(code)


def schema(
    stage: Annotated[str | None, argument("STAGE", "sft, reward, dpo, ppo or eval.", completion.stages)] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of a config, for editors."""
    from rlhf_cli.config.machinery import json_schema

    if stage is not None and stage not in STAGES:
        raise RLHFError("C07", f"{stage}: not one of {', '.join(STAGES)}", hint=did_you_mean(stage, STAGES))
    terminal.out(json_schema.schema_text(stage).rstrip())


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


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, debug: Debug = False) -> None:
    """Print versions and devices, for a bug report."""
    import json
    import os
    import platform

    import torch

    from rlhf_cli import runs

    facts: dict[str, str | int] = {
        **runs.versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count() or 0,
        "torch_threads": torch.get_num_threads(),
        "gpus": torch.cuda.device_count(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
    if as_json:
        terminal.out(json.dumps(facts, indent=2))
    else:
        terminal.table(["what", "value"], [[name, str(value)] for name, value in facts.items()])
