"""The command line: help, streams, exit codes, and errors that fit a line.

Modules: `cli/errors.py`, `cli/options.py`, `cli/stage.py`, `pipeline/preview.py`.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cost import cost
from run_cli import ROOT, child, is_one_error, python, rlhf
from typer.main import get_command

import rlhf_cli
from rlhf_cli import config, runs
from rlhf_cli.cli import app, stage
from rlhf_cli.config.base import Options
from rlhf_cli.config.machinery.aliases import COMMANDS
from rlhf_cli.errors import RLHFError

SFT = "model: {path: ./base}\ndata: {train: rows.jsonl}\nsft:\n  learning_rate: 1e-5\n"


@pytest.fixture
def folder(here: Path) -> Path:
    """A run's folder with an SFT config, its data, a base model, and a PPO config."""
    (here / "sft.yaml").write_text(SFT)
    (here / "ppo.yaml").write_text("data: {prompts: rows.jsonl}\nppo: {total_episodes: 64}\n")
    (here / "rows.jsonl").write_text("{}\n")
    (here / "base").mkdir()
    (here / "base/config.json").write_text("{}")
    return here


@pytest.fixture
def stage_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[config.Config, Options]]:
    """Stages that only record their arguments."""
    calls: list[tuple[config.Config, Options]] = []
    monkeypatch.setattr(stage, "_runner", lambda name: lambda *arguments: calls.append(arguments))
    return calls


# Help


@pytest.mark.full
def test_help_is_light() -> None:
    result = child("--help")
    assert result.returncode == 0
    assert cost(lambda: child("--help")) <= 1.6  # 1.1 on a quiet machine
    assert result.stdout.count("completion") == 4  # two options, a line or two each


def test_help_shows_each_command_in_its_group_with_a_whole_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = child("--help").stdout
    groups = {part.split(":")[0]: part for part in text.split("\n\n") if part[:1].isupper()}
    shown = {title: re.findall(r"^  (\w+) ", groups[title], re.M) for title in ("Train", "Inspect", "Ship")}
    assert shown == {
        "Train": ["init", "convert", "check", "plan", "run", "sft", "reward", "dpo", "ppo", "eval"],
        "Inspect": ["status", "ls", "report", "chat", "label", "verify", "explain", "schema", "env"],
        "Ship": ["export", "serve"],
    }
    commands = get_command(app).commands  # type: ignore[attr-defined]
    public = {name for name, command in commands.items() if not command.hidden}
    assert public == {name for names in shown.values() for name in names}
    for line in "\n".join(groups[title] for title in shown).splitlines():
        assert len(line) <= 80 and (not line.startswith("  ") or line.endswith(".")), line


LIGHT = ["--help", "ppo -h", "run -h", "chat -h", "schema ppo", "explain kl_coef", "--version"]


@pytest.mark.full
@pytest.mark.parametrize("command", [*LIGHT, "sft -c sft.yaml --dry-run"])
def test_light_commands_import_no_torch(command: str, folder: Path) -> None:
    script = (
        f"import sys; from rlhf_cli.cli import app\ntry: app({command.split()})\nfinally: print('torch' in sys.modules)"
    )
    result = python("-c", script)
    assert (result.stdout.splitlines()[-1], result.stderr) == ("False", "")


@pytest.mark.full
def test_imported_objects_are_frozen_for_the_garbage_collector() -> None:
    script = (
        "import gc; from rlhf_cli.cli.options import heavy_imports; runs = []\n"
        "gc.callbacks.append(lambda phase, about: runs.append(phase)); runs.clear()\n"
        "with heavy_imports():\n    import torch\n"
        "assert runs == [] and gc.isenabled() and gc.get_freeze_count() > len(torch.__dict__)\n"
    )
    assert python("-c", script).stderr == ""


def test_the_version_is_the_packages() -> None:
    assert rlhf("--version").stdout == f"rlhf {rlhf_cli.__version__}\n"


# Usage


@pytest.mark.parametrize("place", [".", "sft.yaml", "-c sft.yaml", "./sft.yaml -s sft.max_steps=1"])
def test_a_stage_takes_its_run_or_its_file(folder: Path, place: str) -> None:
    result = rlhf("sft", *place.split(), "seed=7", "--dry-run")
    assert result.exit_code == 0 and "seed: 7" in result.stdout, result.output


@pytest.mark.parametrize(
    ("line", "code", "text", "hint"),
    [
        ("zzz", "C11", "zzz", "rlhf --help"),
        ("ppo --config", "C11", "--config", "rlhf ppo --help"),
        ("ppo -c x.yaml --frsh", "C11", "--frsh", "rlhf ppo --help"),
        ("--nope", "C11", "--nope", "rlhf --help"),
        ("run runs/x --only", "C11", "--only", "rlhf run --help"),
        ("stauts runs/x", "C11", "stauts", "did you mean rlhf status?"),
        ("sft", "C11", "no FILE or RUN is given", "rlhf sft RUN, or rlhf sft --config FILE"),
        ("sft seed=1", "C11", "no FILE or RUN is given", "rlhf sft RUN"),
        ("sft base", "C09", "base has no sft.yaml", "name a run folder, or its file: rlhf sft FILE"),
        ("sft nope", "C09", "nope", ""),
        ("sft -c sft.yaml base", "C11", "--set base: expected KEY=VALUE", ""),
        ("sft -c .", "C09", "is a folder", "--config sft.yaml; for all stages: rlhf run "),
        ("sft -c base", "C09", "base is a folder", "give the stage's YAML file"),
        ("ppo -c ppo.yaml --dry-run models.sft=./bse", "M01", "bse", ""),
        ("schema pppo", "C07", "pppo", "did you mean ppo?"),
        ("init ci", "C11", "DIR is missing", "rlhf init ci runs/ci"),
        ("init ci rows.jsonl/x", "E03", "rows.jsonl is a file", "name a folder elsewhere"),
        ("convert sft.yaml", "C11", "Missing argument 'DIR'", "rlhf convert --help"),
        ("report nope", "M01", "no such folder nope", "name the folder of a run"),
        ("report .", "M01", "holds no output of", "run it first: rlhf run /"),
        ("chat .", "M01", "holds neither ppo/ nor sft/", "run it first: rlhf run /"),
        ("init dmo x", "C07", "dmo", "did you mean demo?"),
    ],
)
def test_a_wrong_command_line_is_one_error_with_the_fix(
    folder: Path, line: str, code: str, text: str, hint: str
) -> None:
    assert is_one_error(rlhf(*line.split()), code, text, f"\nhint: {hint}")


def test_a_command_of_another_system_has_a_hint_with_commands_and_options_that_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert not COMMANDS.keys() & commands.keys()
    for command, answer in COMMANDS.items():
        result = rlhf(command, "runs/x", "--lr", "3")
        assert is_one_error(result, "C11")
        assert result.stderr == f"error[C11]: there is no command {command}\nhint: {answer}\n"
        for name, words in re.findall(r"\brlhf ([a-z]+)([^,;]*)", answer):
            assert name in commands, answer
            assert set(re.findall("--[a-z]+", words)) <= {text for each in commands[name].params for text in each.opts}


def test_no_command_shows_the_help_and_is_an_error_of_usage() -> None:
    result = rlhf()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "\n  ppo " in result.stderr


# The arguments of a stage


def test_overrides_and_options_reach_the_stage(folder: Path, stage_calls: list) -> None:
    arguments = ["-c", "sft.yaml", "-s", "sft.learning_rate=2e-5", "seed=4", "--set", "sft.max_length=9", "--fresh"]
    assert rlhf("sft", *arguments).exit_code == 0
    ((sft, options),) = stage_calls
    assert (sft.sft.learning_rate, sft.sft.max_length, sft.seed) == (2e-5, 9, 4)
    assert options == Options(fresh=True)
    rlhf("sft", "-c", "sft.yaml", "--trust-remote-code", "--debug")
    assert stage_calls[1][1] == Options(trust_remote_code=True, debug=True)


def test_run_hands_on_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_cli.pipeline import run as pipeline_run

    calls: list[Any] = []
    monkeypatch.setattr(pipeline_run, "run_folder", lambda *given, **options: calls.append((given, options)) or 5)
    selected = ["--only", "ppo", "--force", "ppo", "--from", "sft"]
    assert rlhf("run", "x", "-s", "*.seed=3", "ppo.kl_coef=1", *selected, "--dry-run").exit_code == 5
    assert calls == [
        (
            (Path("x"), ["*.seed=3", "ppo.kl_coef=1"], Options(dry_run=True)),
            {"only": ["ppo"], "start": "sft", "force": ["ppo"]},
        )
    ]


# Dry runs


def test_a_dry_run_prints_a_config_that_loads_and_writes_nothing(folder: Path, tmp_path_factory: Any) -> None:
    before = sorted(folder.rglob("*"))
    result = child("sft", "-c", "sft.yaml", "--dry-run", "sft.max_length=9", cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(folder.rglob("*")) == before
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "printed.yaml"
    elsewhere.write_text(result.stdout)
    loaded = config.load("sft", folder / "sft.yaml", ["sft.max_length=9"])
    assert config.load("sft", elsewhere).dump() == yaml.safe_load(result.stdout) == loaded.dump()
    assert result.stdout.splitlines()[-3:] == [
        f"# reads   model.path: base (foreign, {runs.open_parents(loaded)['model.path'].sha256[:6]})",
        "# reads   data.train: rows.jsonl",
        "# writes  sft: new",
    ]


def test_a_dry_run_lists_missing_inputs_and_refuses_those_that_no_stage_writes(folder: Path) -> None:
    result = rlhf("ppo", "-c", "ppo.yaml", "--dry-run")
    assert result.exit_code == 0
    assert "# reads   models.reward: not ready: " in result.stdout
    assert result.stdout.endswith("# writes  ppo: once what it reads is ready\n")
    (folder / "rows.jsonl").unlink()
    assert is_one_error(rlhf("ppo", "-c", "ppo.yaml", "--dry-run"), "D01")


def test_a_dry_run_prints_what_happens_to_the_output(folder: Path) -> None:
    loaded = config.load("sft", folder / "sft.yaml")
    parents = runs.open_parents(loaded)
    identity = runs.compute_identity(loaded, parents, loaded.sources())
    runs.start_stage(loaded, identity, {}, fresh=False)
    runs.commit_state(loaded.folder / "state", "checkpoint-7", lambda path: None, keep=2)

    def outcome(*more: str) -> str:
        return rlhf("sft", "-c", "sft.yaml", "--dry-run", *more).stdout.splitlines()[-1]

    assert outcome() == "# writes  sft: resumes at step 7"
    assert outcome("sft.max_length=9") == "# writes  sft: stale: sft.max_length 1024 -> 9; needs --fresh"
    assert outcome("sft.max_length=9", "--fresh") == "# writes  sft: new; the old folder moves to .old/"
    runs.complete_stage(loaded, identity, parents=parents, fields={})
    assert outcome() == "# writes  sft: it is finished, nothing to do"


# Failures


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(*_: Any) -> None:
        raise error

    monkeypatch.setattr(stage, "_runner", lambda name: run)


def test_an_unexpected_failure_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("division\n by zero"))
    result = rlhf("sft", "-c", "sft.yaml")
    assert is_one_error(result, "R00", exit_code=1)
    assert result.stderr.startswith("error[R00]: ZeroDivisionError: division by zero\nhint: ")


@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError(), 1), (RLHFError("M10", "not ready"), 2), (RLHFError("R01", "nan"), 1)]
)
def test_debug_shows_the_traceback_and_keeps_the_exit_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    failing(monkeypatch, error)
    assert "Traceback" not in rlhf("sft", "-c", "sft.yaml").stderr
    result = rlhf("sft", "-c", "sft.yaml", "--debug")
    assert "Traceback" in result.stderr and result.exit_code == code


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_in_good_order(folder: Path, number: int, code: int) -> None:
    script = """
import signal, time
from rlhf_cli import cli
from rlhf_cli.cli import stage
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
def wait(*_):
    try:
        print("up", flush=True)
        time.sleep(60)
    finally:
        print("closed", flush=True)
stage._runner = lambda name: wait
cli.app(["sft", "-c", "sft.yaml"])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        output, complaint = process.communicate(timeout=30)
    assert (process.returncode, output) == (code, "closed\n")
    assert "Traceback" not in complaint


def test_a_failed_command_releases_its_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(sft: Any, _: Any) -> None:
        runs.start_stage(sft, runs.compute_identity(sft, {}, {}), {}, fresh=False)
        raise ZeroDivisionError

    monkeypatch.setattr(stage, "_runner", lambda name: run)
    assert rlhf("sft", "-c", "sft.yaml").exit_code == 1
    script = "import pathlib, sys; from rlhf_cli.runs.locks import lock_folder; lock_folder(pathlib.Path(sys.argv[1]))"
    assert python("-c", script, folder / "sft").returncode == 0


def test_a_reader_that_closes_early_is_no_error() -> None:
    command = [sys.executable, "-m", "rlhf_cli", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


# The small commands


def test_schema_prints_one_stage_or_all_and_env_the_versions() -> None:
    every, one = (json.loads(rlhf(*arguments).stdout) for arguments in (["schema"], ["schema", "ppo"]))
    assert len(every["anyOf"]) == 5 and "ppo" in one["properties"] and one["additionalProperties"] is False
    facts = json.loads(rlhf("env", "--json").stdout)
    assert facts["rlhf"] == rlhf_cli.__version__
    assert {"python", "torch", "transformers", "trl", "platform", "cpus", "gpus"} <= facts.keys()
    assert f"torch_threads  {facts['torch_threads']}" in rlhf("env").stdout
