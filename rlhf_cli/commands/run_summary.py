"""The last lines of `rlhf run`: what the page says first, what to do next, and which settings no file has."""

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
    """Print how a run ended. `overrides` are each stage's; `met`: the evaluation meets its requirements."""
    if "eval" in configs:
        _show_ways_on(folder, configs, met=met)
    _show_unwritten(folder, configs, overrides)


def _show_ways_on(folder: Path, configs: Mapping[str, Config], *, met: bool) -> None:
    """The page's first sentence, and what to do now."""
    ways, judged = [], configs["eval"].folder
    if (judged / REPORT).is_file():  # what was drawn can be read
        page = report.brief(judged)
        terminal.out(f"the page says: {page.headline}")
        if not met or page.suspect:
            ways.append(f"open {shell_path(judged / REPORT)} in a browser")
    if met and "ppo" in configs:
        selected = " --step selected" if "selected_step" in render.read_report(judged) else ""
        name = shell_path(folder)
        ways += [f"rlhf chat {name} --compare sft,ppo", f"rlhf export {name} --out DIR{selected}"]
    if ways:
        terminal.out(f"next: {'; '.join(ways)}")


def _show_unwritten(folder: Path, configs: Mapping[str, Config], overrides: Mapping[str, Sequence[str]]) -> None:
    """A line on overrides that the stages' files lack, where the same command without them would run the stages."""
    stages: dict[str, list[str]] = {}
    for stage, config in configs.items():
        if texts := _unwritten(config, overrides[stage]):
            stages.setdefault(" ".join(f"-s {shell_word(text)}" for text in texts), []).append(stage)
    for given, names in stages.items():
        files = ", ".join(shown(configs[name].file) for name in names)
        lack, again = ("does not", "that stage") if len(names) == 1 else ("do not", "those stages")
        text = f"made with {given}, which {files} {lack} have: write it there to keep it"
        terminal.out(f"{text}, or a plain `rlhf run {shell_path(folder)}` makes {again} again")


def _unwritten(config: Config, overrides: Sequence[str]) -> list[str]:
    """Those of a stage's overrides that change a value of its file, where without them the stage is out of date."""
    if not overrides:
        return []
    try:
        plain = load(config.stage, config.file)
        if runs.quick_stage_status(plain).state == "finished":
            return []
        return [text for text in overrides if load(config.stage, config.file, [text]).dump() != plain.dump()]
    except RLHFError:  # without them it is refused, and says why
        return []
