"""`rlhf run DIR`: run the stages of a folder, each in a child process, and skip those that are up to date by hash."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.loading import load
from rlhf_cli.errors import RLHFError, shell_path, shell_word, shown
from rlhf_cli.evaluation.print_report import print_report
from rlhf_cli.evaluation.requirements import check_requirements
from rlhf_cli.pipeline import children
from rlhf_cli.pipeline.decide import (
    StageDecision,
    check_inputs_exist,
    compute_status,
    decide_stage,
    plan_stages,
    steps_json,
)
from rlhf_cli.pipeline.load import add_seed, find_configs, load_all, route_overrides, select_stages
from rlhf_cli.report import show
from rlhf_cli.runs.layout import MANIFEST, REPORT_PAGE, seed_folder
from rlhf_cli.runs.report import read_report


@dataclass
class RunOutcome:
    """What `rlhf run` did: its exit code, and why each stage ran that did, by stage."""

    code: int = 0
    ran: dict[str, str] = field(default_factory=dict)
    is_of_seed: bool = False  # one of several
    unmet: bool = False  # the evaluation is complete and does not meet its requirements
    planned: Mapping[str, StageDecision] = field(default_factory=dict)  # with --dry-run, by stage

    def planned_json(self, folder: Path) -> dict[str, Any]:
        """Return what a dry run of a folder found as printed by `--json`."""
        return {"run": shown(folder), "steps": steps_json(self.planned)}


def run_folder(
    folder: Path,
    overrides: Sequence[str],
    options: Options,
    *,
    only: Sequence[str] = (),
    start: str | None = None,
    force: Sequence[str] = (),
    seed: int | None = None,
    checked: bool = False,
) -> RunOutcome:
    """Bring the stages of a folder up to date; the exit code is 0, or that of the stage that failed.

    `only`, `start` and `force` are the options --only, --from and --force. With `seed`, the run is DIR/seeds/SEED, and
    the seed is that of the stages that train. If any stage but the last has to run, `rlhf check` of the whole folder
    runs first, unless it is `checked`; its exit code is returned if it fails. Raises RLHFError C01-C17, D01, M01, M10
    before anything runs.
    """
    files = select_stages(find_configs(folder), folder, only=only, start=start, force=force)
    routed = route_overrides(overrides, list(files))
    if seed is not None:
        run = seed_folder(folder, seed)
        add_seed(routed, run, seed)
        overrides = [*overrides, f"*.run={json.dumps(str(run))}"]
    check = children.check_command(folder, overrides, options)
    is_selection = bool(only or start)  # selected stages check themselves
    try:
        configs = load_all(files, routed)
        check_inputs_exist(configs)
    except RLHFError as error:
        is_unreadable = error.exit_code != 2  # a file that cannot be read now, which `rlhf check` would not explain
        if not (is_selection or options.dry_run or is_unreadable):
            code = children.run_child(check)
            if code:
                return RunOutcome(code)
        raise

    if options.dry_run:
        planned = plan_stages(configs, force)
        for stage, decision in planned.items():
            terminal.out(f"{stage:<8} {decision.reason}")
        return RunOutcome(planned=planned)

    outcome = RunOutcome(is_of_seed=seed is not None)
    needed_check = None if checked or is_selection else check
    outcome.code = _run_stages(configs, routed, options, outcome, force=force, check=needed_check)
    if seed is None and (outcome.unmet or not outcome.code):
        show_summary(folder, configs, routed, met=not outcome.unmet)
    return outcome


def _run_stages(
    configs: Mapping[str, Config],
    routed: Mapping[str, Sequence[str]],
    options: Options,
    outcome: RunOutcome,
    *,
    force: Sequence[str],
    check: Sequence[str] | None,
) -> int:
    """Run the stages that are not up to date, note them in `outcome`, and return the exit code.

    `check` is the command that runs before the first one unless only the last has to run.
    """
    last = list(configs)[-1]
    for stage, config in configs.items():
        decision = decide_stage(compute_status(config), forced=stage in force)
        if decision.runs and check and stage != last:
            terminal.say("run      checking configs, data and tokenizers of all stages first")
            code = children.run_child(check)
            check = None
            if code:
                return code

        terminal.out(f"{stage:<8} {decision.reason}")
        if decision.runs:
            outcome.ran[stage] = decision.reason
            code = children.run_child(children.child_command(config, routed[stage], options, fresh=decision.fresh))
            if code:
                skipped = "" if stage == last else "; what comes after it was not run"
                terminal.error(f"{stage:<8} ended with exit code {code}{skipped}")
                outcome.unmet = code == 1 and _is_complete_evaluation(config)
                return code
        elif isinstance(config, EvalConfig):
            try:
                _show_evaluation(config, briefly=outcome.is_of_seed)
            except RLHFError as error:
                terminal.error(str(error))
                outcome.unmet = True
                return error.exit_code
    return 0


def _is_complete_evaluation(config: Config) -> bool:
    """Return True for an evaluation that is complete, and that failed because it does not meet its requirements."""
    return isinstance(config, EvalConfig) and (config.folder / MANIFEST).is_file()


def _show_evaluation(config: EvalConfig, *, briefly: bool) -> None:
    """Print the report of an up-to-date evaluation, unless `briefly`. Raises RLHFError R06 for an unmet requirement."""
    if not (config.folder / REPORT_PAGE).exists():  # killed between writing the manifest and the HTML report
        show.write_beside(config.folder)
    if not briefly:
        print_report(config.folder)
    check_requirements(read_report(config.folder), config.eval.require, where=config.where)


def show_summary(
    folder: Path,
    configs: Mapping[str, Config],
    overrides: Mapping[str, Sequence[str]],
    *,
    met: bool = True,
) -> None:
    """Print the end of a run: the conclusion of the report, next commands, and overrides that no config file has.

    `overrides` are those of each stage; `met`: the evaluation meets its requirements.
    """
    commands = []
    if "eval" in configs:
        evaluation = configs["eval"].folder
        if (evaluation / REPORT_PAGE).is_file():
            conclusion, is_suspect = show.brief(evaluation)
            terminal.out(f"the page says: {conclusion}")
            if not met or is_suspect:
                commands.append(f"open {shell_path(evaluation / REPORT_PAGE)} in a browser")
        if met and "ppo" in configs:
            commands.append(f"rlhf chat {shell_path(folder)} --compare sft,ppo")
            commands.append(f"rlhf export {shell_path(folder)} --out DIR")
    if commands:
        terminal.out(f"next: {'; '.join(commands)}")

    for stage, config in configs.items():
        if _is_changed_by(overrides[stage], config):
            options = " ".join(f"-s {shell_word(text)}" for text in overrides[stage])
            plain = f"a plain `rlhf run {shell_path(folder)}` runs {stage} again"
            terminal.out(f"{stage} used {options}: add it to {shown(config.file)}, or {plain}")


def _is_changed_by(overrides: Sequence[str], config: Config) -> bool:
    """Return True if overrides change the result of a stage whose file is valid without them."""
    try:
        return bool(overrides) and load(config.stage, config.file).identity() != config.identity()
    except RLHFError:  # `rlhf run` will report why
        return False
