"""`rlhf run`: run all stages of a folder."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf_cli import distributed, terminal
from rlhf_cli.cli import completion
from rlhf_cli.cli.errors import RunNotGiven
from rlhf_cli.cli.options import (
    Debug,
    JsonAtEnd,
    Nproc,
    Quiet,
    ReportTo,
    Set,
    Trailing,
    TrustRemoteCode,
    Verbose,
    argument,
    flag,
    is_assignment,
    option,
    overrides_of,
    tracker_overrides,
)

SEEDS_TEXT = "One run for each seed, in DIR/seeds/N; ends with their mean and spread, and a page that compares them."


def run(
    folder: Annotated[
        Path, argument("DIR", "Run folder with sft.yaml, reward.yaml, ppo.yaml, eval.yaml.", completion.runs)
    ],
    assignments: Trailing = None,
    set_: Set = None,
    only: Annotated[
        list[str] | None, option("--only", "STAGE", "Run only this stage. Repeatable.", completion.stages)
    ] = None,
    start: Annotated[str | None, option("--from", "STAGE", "Start at this stage.", completion.stages)] = None,
    force: Annotated[
        list[str] | None,
        option("--force", "STAGE", "Run this stage even if it is up to date. Repeatable.", completion.stages),
    ] = None,
    seeds: Annotated[str | None, option("--seeds", "0,1,2", SEEDS_TEXT)] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Print which stages would run, and why.")] = False,
    nproc: Nproc = None,
    report_to: ReportTo = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: JsonAtEnd = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Run all stages of a folder that are not up to date.

    --set applies a key to the stage that has its section, '*.seed=3' to every stage, sft:model.dtype=float32 to one.
    """
    from rlhf_cli.commands import status
    from rlhf_cli.config.base import Options
    from rlhf_cli.pipeline.run import run_folder

    if is_assignment(str(folder)):
        raise RunNotGiven
    distributed.require_single_process("run")
    options = Options(dry_run=dry_run, trust_remote_code=trust_remote_code, debug=debug, nproc=nproc)
    with terminal.share_seen_messages():
        overrides = [*tracker_overrides(report_to, prefix="*."), *overrides_of(set_, assignments)]
        selection: dict[str, Any] = {"only": only or (), "start": start, "force": force or ()}
        if seeds is not None:
            from rlhf_cli.pipeline.seeds import parse_seeds, run_seeds

            raise typer.Exit(run_seeds(folder, parse_seeds(seeds), overrides, options, **selection))
        outcome = run_folder(folder, overrides, options, **selection)
    if not dry_run:
        status.conclude_run(folder, overrides, outcome)
    elif as_json:
        terminal.print_json(outcome.planned_json(folder))
    raise typer.Exit(outcome.code)
