"""The last lines of `rlhf run`: what the page says, and where to go from there."""

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_run import report, write_run
from run_cli import rlhf

import rlhf_cli
from rlhf_cli import terminal
from rlhf_cli.errors import shell_word
from rlhf_cli.pipeline.run import show_summary
from rlhf_cli.report import frontier
from rlhf_cli.report.show import brief, show_evaluation, write_beside

SOURCE = Path(rlhf_cli.__file__).parent


@pytest.mark.parametrize("met", [True, False])
@pytest.mark.parametrize("gold", [0.63, 0.2], ids=["good", "found out"])
@pytest.mark.usefixtures("here")
def test_the_report_comes_first_if_it_shows_a_problem(
    capsys: pytest.CaptureFixture[str], gold: float, met: bool
) -> None:
    run = write_run(Path("run"), evaluation=report(gold=gold))
    configs: dict[str, Any] = {stage: SimpleNamespace(folder=run / stage) for stage in ("ppo", "eval")}

    def last_lines() -> list[str]:
        capsys.readouterr()
        show_summary(run, configs, {"ppo": [], "eval": []}, met=met)
        return capsys.readouterr().out.splitlines()

    onward = ["rlhf chat run --compare sft,ppo", "rlhf export run --out DIR"] if met else []
    assert last_lines() == ([f"next: {'; '.join(onward)}"] if onward else []), "no page was drawn"
    write_beside(run / "eval")
    page = ["open run/eval/report.html in a browser"] if gold < 0.5 or not met else []
    assert last_lines() == [f"the page says: {brief(run)[0]}", f"next: {'; '.join([*page, *onward])}"]
    assert ("Stage to fix first" in brief(run)[0]) == (gold < 0.5)


def test_a_frontier_that_cannot_be_drawn_is_a_warning(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(here / "run")
    monkeypatch.setattr(frontier, "render", lambda *_, **__: 1 / 0)
    config: Any = SimpleNamespace(folder=run / "eval", eval=SimpleNamespace(require={}), where=str)
    show_evaluation(config)
    assert not (run / "eval/frontier.svg").exists() and (run / "eval/report.html").exists()
    assert "warning[R15]: frontier.svg could not be written: ZeroDivisionError" in terminal.emitted_warnings()[0]


def test_a_missing_report_is_written_again(fake_chain: Path, here: Path) -> None:
    """After a kill between the manifest of the evaluation and its report: nothing is evaluated again."""
    shutil.copytree(fake_chain, here, dirs_exist_ok=True)
    before = Path("eval/manifest.json").read_bytes()
    first, second = (rlhf("run", ".") for _ in range(2))
    for result in (first, second):
        assert result.exit_code == 0 and "eval     up to date" in result.stdout, result.output
        assert "win rate" in result.stdout and "report: eval/report.json" in result.stdout
        assert "\nthe page says: " in result.stdout
    assert Path("eval/manifest.json").read_bytes() == before
    drawn = Path("eval/report.html").stat()
    assert rlhf("run", ".").exit_code == 0
    assert Path("eval/report.html").stat().st_mtime_ns == drawn.st_mtime_ns  # one that is there stays


NAMES = ["plain/name_1.yaml", "sp ace", "$(id)", "a'b", "x;y", "é", "line\nbreak", "\x1b]0;t\x07", "\udcff", "#x", "~"]


@pytest.mark.parametrize("name", [*NAMES, "-rf", "tab\t'"])
def test_a_printed_name_is_one_word_of_a_shell(name: str) -> None:
    printed = shell_word(name)
    assert printed.isprintable()
    echoed = subprocess.run(["bash", "-c", f"printf %s {printed}"], capture_output=True, check=True).stdout
    assert echoed == name.encode("utf-8", "surrogateescape")


@pytest.mark.full
def test_every_command_that_is_printed_has_its_names_quoted() -> None:
    lines = [(path, line) for path in SOURCE.rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines()]
    commands = re.compile(
        r"\b(rlhf|hf) [a-z]+[^`]*(--config|run|check|report|init \w+|download) \{(shown\(|folder|path|base\})"
    )
    assert [line for line in lines if commands.search(line[1])] == []
