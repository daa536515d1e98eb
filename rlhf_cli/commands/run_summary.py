"""The last lines of `rlhf run`: the report's headline, next commands, and overrides that no config file has."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_cli import runs, terminal
from rlhf_cli.commands import report
from rlhf_cli.config.base import Config
from rlhf_cli.config.loading import load
from rlhf_cli.errors import RLHFError, shell_path, shell_word, shown
from rlhf_cli.evaluation import render
from rlhf_cli.runs.stage_folder import REPORT


def show(
    folder: Path, configs: Mapping[str, Config], overrides: Mapping[str, Sequence[str]], *, met: bool = True
) -> None:
    """Print the end of a run. `overrides` are those of each stage; `met`: the evaluation meets its requirements."""
    if "eval" in configs:
        _show_next_commands(folder, configs, met=met)
    _show_unsaved_overrides(folder, configs, overrides)


def _show_next_commands(folder: Path, configs: Mapping[str, Config], *, met: bool) -> None:
    """Print the report's headline and the next commands."""
    commands, evaluation = [], configs["eval"].folder
    if (evaluation / REPORT).is_file():
        summary = report.brief(evaluation)
        terminal.out(f"the page says: {summary.headline}")
        if not met or summary.suspect:
            commands.append(f"open {shell_path(evaluation / REPORT)} in a browser")
    if met and "ppo" in configs:
        selected = " --step selected" if "selected_step" in render.read_report(evaluation) else ""
        name = shell_path(folder)
        commands += [f"rlhf chat {name} --compare sft,ppo", f"rlhf export {name} --out DIR{selected}"]
    if commands:
        terminal.out(f"next: {'; '.join(commands)}")


def _show_unsaved_overrides(
    folder: Path, configs: Mapping[str, Config], overrides: Mapping[str, Sequence[str]]
) -> None:
    """Print a line on overrides without which the same command would run the stages again."""
    stages: dict[str, list[str]] = {}
    for stage, config in configs.items():
        if texts := _unsaved_overrides(config, overrides[stage]):
            stages.setdefault(" ".join(f"-s {shell_word(text)}" for text in texts), []).append(stage)
    for options, names in stages.items():
        files = ", ".join(shown(configs[name].file) for name in names)
        negation, again = ("does not", "that stage") if len(names) == 1 else ("do not", "those stages")
        text = f"made with {options}, which {files} {negation} have: write it there to keep it"
        terminal.out(f"{text}, or a plain `rlhf run {shell_path(folder)}` makes {again} again")


def _unsaved_overrides(config: Config, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that change a value of the stage's file, if the stage is out of date without them."""
    if not overrides:
        return []
    try:
        plain = load(config.stage, config.file)
        if runs.quick_stage_status(plain).state == "finished":
            return []
        return [text for text in overrides if load(config.stage, config.file, [text]).dump() != plain.dump()]
    except RLHFError:  # the config is invalid without them; `rlhf run` will report why
        return []
