"""Options of several commands: what --quiet, --verbose and --json print, and how heavy modules are imported.

Modules: `cli/export.py`, `cli/run.py`.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_cli import is_one_error, python, rlhf
from typer.main import get_command

from rlhf_cli import terminal
from rlhf_cli.cli import app
from rlhf_cli.commands.init.presets import PRESETS
from rlhf_cli.config.base import Options
from rlhf_cli.runs.layout import STAGES

PRINT_PROGRESS = (
    *("init", "convert", "check", "plan", "run", *STAGES),
    *("report", "chat", "label", "verify", "export", "serve", "launch"),
)
END_WITH_JSON = ("init", "run", "report", "label", "export")


@pytest.fixture
def finished(fake_chain: Path, here: Path) -> Path:
    """A finished run in the working directory."""
    shutil.copytree(fake_chain, here / "run")
    return here / "run"


def test_every_command_that_prints_progress_can_be_quiet_or_verbose() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for name in PRINT_PROGRESS:
        names = {option for each in commands[name].params for option in each.opts}
        assert {"-q", "--quiet", "-v", "--verbose"} <= names, name
        assert ("--json" in names) or name not in END_WITH_JSON, name


@pytest.mark.parametrize(
    ("line", "path"),
    [("run run", "run/eval/report.html"), ("report run", "run/eval/report.html"), ("init ci new", "new")],
)
def test_quiet_prints_the_path_of_the_result_only(finished: Path, line: str, path: str) -> None:
    result = rlhf(*line.split(), "-q")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{path}\n", "")


def test_quiet_lists_the_names_of_the_presets(here: Path) -> None:
    assert rlhf("init", "--list", "-q").stdout.split() == list(PRESETS)


@pytest.mark.parametrize("command", ["check", "status", "plan"])
def test_an_override_alone_is_of_the_only_run_here(finished: Path, command: str) -> None:
    override = "eval.n=7"
    alone = rlhf(command, override, "-s", "eval.batch=no")
    named = rlhf(command, "run", override, "-s", "eval.batch=no")
    assert alone.stderr == f"run is the only run here\n{named.stderr}" and alone.stdout == named.stdout
    text = f"error[C11]: rlhf run: which run? There are run\nhint: rlhf run run {override}\n"
    assert rlhf("run", override).stderr == text, "it writes, so it takes no run that was not named"


def test_quiet_hides_no_error_and_contradicts_verbose(here: Path) -> None:
    assert is_one_error(rlhf("run", "nowhere", "-q"), "C09")
    assert is_one_error(rlhf("run", "nowhere", "-q", "-v"), "C11", "--quiet and --verbose contradict each other")


def test_verbose_sets_the_log_level_of_the_libraries(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in terminal.LIBRARY_LOGS:
        monkeypatch.setenv(name, "error")
        monkeypatch.delenv(name)
    rlhf("run", "nowhere", "-v")
    assert {os.environ[name] for name in terminal.LIBRARY_LOGS} == {"info"}
    assert terminal.mode_options() == ["--verbose"], "which child processes get"


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("run run", {"run", "stages", "next", "exit_code", "ran", "page", "conclusion"}),
        ("report run", {"page", "runs"}),
        ("report run run", {"page", "runs"}),
        ("init ci new", {"folder", "next"}),
        ("init --list", {"presets"}),
        ("run run --dry-run", {"run", "steps"}),
        ("run run --dry-run --seeds 0,1", {"run", "seeds"}),
    ],
)
def test_json_is_one_object_on_stdout(finished: Path, line: str, keys: set[str]) -> None:
    result = rlhf(*line.split(), "--json")
    assert result.exit_code == 0, result.output
    assert keys <= json.loads(result.stdout).keys()
    assert result.stderr, "what is printed without --json"


def test_json_of_a_run_states_what_ran_and_what_came_of_it(finished: Path) -> None:
    values = json.loads(rlhf("run", "run", "--json").stdout)
    assert (values["exit_code"], values["ran"], values["page"]) == (0, {}, "run/eval/report.html")
    assert values["conclusion"] and values["next"]["action"] == "nothing"
    (finished / "eval.yaml").write_text(
        (finished / "eval.yaml").read_text() + "\neval: {require: {win_rate.ppo_vs_sft.reward.value: '> 0.9'}}\n"
    )
    unmet = rlhf("run", "run", "--json")
    assert unmet.exit_code == json.loads(unmet.stdout)["exit_code"] == 1 and "error[R06]" in unmet.stderr


@pytest.mark.full
def test_imported_objects_are_frozen_for_the_garbage_collector() -> None:
    script = (
        "import gc; from rlhf_cli.cli.options import heavy_imports; runs = []\n"
        "gc.callbacks.append(lambda phase, about: runs.append(phase)); runs.clear()\n"
        "with heavy_imports():\n    import torch\n"
        "assert runs == [] and gc.isenabled() and gc.get_freeze_count() > len(torch.__dict__)\n"
    )
    assert python("-c", script).stderr == ""


def test_variables_stand_for_options(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--report-to` becomes an override before those of the command line, which therefore win."""
    from rlhf_cli.pipeline import run as pipeline_run

    calls: list[Any] = []
    monkeypatch.setattr(
        pipeline_run, "run_folder", lambda *given, **_: calls.append(given) or pipeline_run.RunOutcome()
    )
    for name, value in {"NPROC": "2", "TRUST_REMOTE_CODE": "1", "REPORT_TO": "wandb,tensorboard"}.items():
        monkeypatch.setenv(f"RLHF_{name}", value)
    assert rlhf("run", "x", "-s", "ppo.kl_coef=1").exit_code == 0
    ((_, overrides, options),) = calls
    assert overrides == ["*.output.report_to=[wandb,tensorboard]", "ppo.kl_coef=1"]
    assert options == Options(nproc="2", trust_remote_code=True)
    for name in ("run", "ppo"):
        text = rlhf(name, "--help", env={"COLUMNS": "200"}).stdout
        assert text.count("env var: RLHF_") == 3, text
    assert "RLHF_NPROC=2" in rlhf("env").stdout


def test_trackers_of_a_stage(folder: Path, stage_calls: list) -> None:
    assert rlhf("sft", ".", "--report-to", "wandb").exit_code == 0
    assert stage_calls[0][0].output.report_to == ["wandb"]
