"""The command line: help, streams, exit codes, and errors that fit a line."""

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
from typer.main import get_command
from typer.testing import CliRunner, Result

import rlhf_cli
from rlhf_cli import cli, config, runs
from rlhf_cli.cli import app, train
from rlhf_cli.cli.errors import ELSEWHERE
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError

ROOT = Path(__file__).parent.parent
SFT = "model: {path: ./base}\ndata: {train: rows.jsonl}\nsft:\n  learning_rate: 1e-5\n"


def rlhf(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def child(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlhf_cli", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)


def is_one_error(result: Result, code: str, exit_code: int = 2) -> bool:
    """One error line, at most one hint, on stderr alone."""
    first, *rest = result.stderr.splitlines()
    assert result.stdout == ""
    assert len(rest) <= 1 and all(line.startswith("hint: ") for line in rest), result.stderr
    assert "Traceback" not in result.stderr
    assert (first.startswith(f"error[{code}]: "), result.exit_code) == (True, exit_code), result.stderr
    return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with an SFT config, its data, a base model, and a PPO config."""
    (tmp_path / "sft.yaml").write_text(SFT)
    (tmp_path / "ppo.yaml").write_text("data: {prompts: rows.jsonl}\nppo: {total_episodes: 64}\n")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> list[tuple[config.Config, Options]]:
    """Stages that only note what they were given."""
    given: list[tuple[config.Config, Options]] = []
    monkeypatch.setattr(train, "_runner", lambda name: lambda *arguments: given.append(arguments))
    return given


# Help


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
        "Train": ["init", "convert", "check", "plan", "run", "sft", "reward", "ppo", "eval"],
        "Inspect": ["status", "ls", "report", "chat", "verify", "explain", "schema", "env"],
        "Ship": ["export"],
    }
    commands = get_command(app).commands  # type: ignore[attr-defined]
    public = {name for name, command in commands.items() if not command.hidden}
    assert public == {name for names in shown.values() for name in names}
    for line in "\n".join(groups[title] for title in shown).splitlines():
        assert len(line) <= 80 and (not line.startswith("  ") or line.endswith(".")), line


@pytest.mark.parametrize(
    "command",
    [
        [*line.split()]
        for line in ("--help", "ppo -h", "run -h", "chat -h", "schema ppo", "explain kl_coef", "--version")
    ],
)
def test_light_commands_import_no_torch(command: list[str]) -> None:
    script = f"import sys; from rlhf_cli.cli import app\ntry: app({command})\nfinally: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.splitlines()[-1] == "False"
    assert result.stderr == ""


COLLECTOR = """
import gc, sys
from rlhf_cli.cli.options import heavy_imports
runs = []
gc.callbacks.append(lambda phase, about: runs.append(phase))
runs.clear()
with heavy_imports():
    import torch
assert runs == [] and gc.isenabled(), runs
frozen = gc.get_freeze_count()
assert frozen > len(torch.__dict__), frozen
with heavy_imports():
    import torch
    mine = [[] for _ in range(10)]
assert gc.get_freeze_count() <= frozen  # nothing came, so nothing of the caller's is kept
try:
    with heavy_imports():
        import no_such_module
except ImportError:
    assert gc.isenabled()
"""


def test_the_collector_does_not_walk_over_what_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTOR], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_stage_names_its_options() -> None:
    said = rlhf("ppo", "-h").stdout
    for option in ("--config", "-c", "--set", "-s", "--dry-run", "--fresh", "--trust-remote-code", "--debug"):
        assert option in said


def test_the_version_is_the_packages() -> None:
    assert rlhf("--version").stdout == f"rlhf {rlhf_cli.__version__}\n"


# Usage


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["zzz"], "zzz"),
        (["ppo"], "--config"),
        (["ppo", "--config"], "--config"),
        (["ppo", "-c", "x.yaml", "--frsh"], "--frsh"),
        (["--nope"], "--nope"),
        (["run", "runs/x", "--only"], "run --help"),
    ],
)
def test_usage_errors_have_our_form_and_name_the_help(arguments: list[str], text: str) -> None:
    result = rlhf(*arguments)
    assert is_one_error(result, "C11")
    assert text in result.stderr
    assert result.stderr.rstrip().endswith("--help")


def test_a_misspelt_command_names_the_one_that_is_near() -> None:
    assert rlhf("stauts", "runs/x").stderr.endswith("hint: did you mean rlhf status?\n")


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("grpo", "rlhf ppo --config FILE"),
        ("dpo", "rlhf init preferences"),
        ("train", "rlhf run DIR"),
        ("serve", "rlhf export RUN --out DIR, then: vllm serve DIR"),
        ("compare", "rlhf report A B"),
        ("sweep", "rlhf report runs/kl-*"),
        ("merge", "rlhf export RUN --out DIR"),
        ("push", "--push REPO"),
        ("doctor", "rlhf env"),
    ],
)
def test_a_command_of_another_system_names_what_does_its_work(command: str, answer: str) -> None:
    result = rlhf(command, "runs/x", "--lr", "3")
    assert is_one_error(result, "C11") and result.stderr.startswith(f"error[C11]: there is no command {command}\n")
    assert answer in result.stderr.partition("\nhint: ")[2]


def test_what_does_their_work_is_there() -> None:
    """Every command and every long option that the answers name."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert not ELSEWHERE.keys() & commands.keys()
    for answer in ELSEWHERE.values():
        for name, words in re.findall(r"\brlhf ([a-z]+)([^,;]*)", answer):
            assert name in commands, answer
            assert set(re.findall("--[a-z]+", words)) <= {text for each in commands[name].params for text in each.opts}


def test_no_command_shows_the_help_and_is_an_error_of_usage() -> None:
    result = rlhf()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "\n  ppo " in result.stderr


def test_a_config_error_tells_file_line_and_fix(folder: Path) -> None:
    (folder / "sft.yaml").write_text(SFT.replace("learning_rate", "learning_rat"))
    result = rlhf("sft", "-c", "sft.yaml")
    assert is_one_error(result, "C01")
    assert "sft.yaml:4: " in result.stderr and "learning_rate" in result.stderr


def test_a_folder_for_a_config_is_explained(folder: Path) -> None:
    result = rlhf("sft", "-c", folder)
    assert is_one_error(result, "C09")
    assert "hint: --config sft.yaml; for all stages: rlhf run " in result.stderr
    assert is_one_error(rlhf("sft", "-c", folder / "base"), "C09")


def test_a_missing_config_names_what_is_near(folder: Path) -> None:
    result = rlhf("sft", "-c", "stf.yaml")
    assert is_one_error(result, "C09")
    assert "sft.yaml" in result.stderr


def test_all_problems_are_told_at_once(folder: Path) -> None:
    result = rlhf("sft", "-c", "sft.yaml", "-s", "sft.nope=1", "-s", "seed=-1")
    assert result.exit_code == 2
    codes = sorted(line[:10] for line in result.stderr.splitlines() if line.startswith("error"))
    assert codes == ["error[C01]", "error[C06]"]


# What a stage is given


def test_overrides_and_options_reach_the_stage(folder: Path, stage: list) -> None:
    arguments = ["-c", "sft.yaml", "-s", "sft.learning_rate=2e-5", "seed=4", "--set", "sft.max_length=9", "--fresh"]
    assert rlhf("sft", *arguments).exit_code == 0
    ((given, options),) = stage
    assert (given.sft.learning_rate, given.sft.max_length, given.seed) == (2e-5, 9, 4)
    assert options == Options(fresh=True)
    rlhf("sft", "-c", "sft.yaml", "--trust-remote-code", "--debug")
    assert stage[1][1] == Options(trust_remote_code=True, debug=True)


def test_run_hands_on_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_cli.commands import run as pipeline

    given: list[Any] = []
    monkeypatch.setattr(pipeline, "run", lambda *arguments: given.append(arguments) or 5)
    selected = ["--only", "ppo", "--force", "ppo", "--from", "sft"]
    assert rlhf("run", "x", "-s", "*.seed=3", "ppo.kl_coef=1", *selected, "--dry-run").exit_code == 5
    selection = pipeline.StageFilter(("ppo",), "sft", ("ppo",))
    assert given == [(Path("x"), ["*.seed=3", "ppo.kl_coef=1"], selection, Options(dry_run=True))]


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


def test_a_dry_run_loads_no_torch(folder: Path) -> None:
    command = ["sft", "-c", "sft.yaml", "--dry-run"]
    script = f"import sys; from rlhf_cli.cli import app\ntry: app({command})\nfinally: print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, env=environment)
    assert result.stdout.splitlines()[-1] == "False"


def test_a_dry_run_tells_what_is_not_ready_and_refuses_what_nobody_will_make(folder: Path) -> None:
    said = rlhf("ppo", "-c", "ppo.yaml", "--dry-run")
    assert said.exit_code == 0
    assert "# reads   models.reward: not ready: " in said.stdout
    assert said.stdout.endswith("# writes  ppo: once what it reads is ready\n")
    assert is_one_error(rlhf("ppo", "-c", "ppo.yaml", "--dry-run", "models.sft=./bse"), "M01")
    (folder / "rows.jsonl").unlink()
    assert is_one_error(rlhf("ppo", "-c", "ppo.yaml", "--dry-run"), "D01")


def test_a_dry_run_tells_what_would_become_of_the_output(folder: Path) -> None:
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

    monkeypatch.setattr(train, "_runner", lambda name: run)


def test_an_unexpected_failure_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("division\n by zero"))
    result = rlhf("sft", "-c", "sft.yaml")
    assert is_one_error(result, "R00", exit_code=1)
    assert result.stderr.startswith("error[R00]: ZeroDivisionError: division by zero\nhint: ")


def test_debug_shows_the_traceback_and_keeps_the_exit_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in ((ZeroDivisionError(), 1), (RLHFError("M10", "not ready"), 2), (RLHFError("R01", "nan"), 1)):
        failing(monkeypatch, error)
        assert "Traceback" not in rlhf("sft", "-c", "sft.yaml").stderr
        result = rlhf("sft", "-c", "sft.yaml", "--debug")
        assert "Traceback" in result.stderr
        assert result.exit_code == code


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_what_ends_a_stage_ends_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    failing(monkeypatch, error)
    result = rlhf("sft", "-c", "sft.yaml")
    assert result.exit_code == code
    assert "Traceback" not in result.output


@pytest.mark.parametrize("word", [".", "sft.yaml"])
def test_a_config_without_its_option_is_understood(folder: Path, word: str) -> None:
    result = rlhf("sft", word)
    assert result.exit_code == 2 and "error[C11]: Missing option '--config'" in result.stderr
    assert result.stderr.endswith("hint: rlhf sft --config sft.yaml\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_in_good_order(folder: Path, number: int, code: int) -> None:
    script = """
import signal, time; from rlhf_cli import cli
from rlhf_cli.cli import app, train
from rlhf_cli.cli.errors import ELSEWHERE
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
def stage(*_):
    try:
        print("up", flush=True)
        time.sleep(60)
    finally:
        print("closed", flush=True)
train._runner = lambda name: stage
cli.app(["sft", "-c", "sft.yaml"])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        said, complaint = process.communicate(timeout=30)
    assert (process.returncode, said) == (code, "closed\n")
    assert "Traceback" not in complaint


def test_a_lock_is_let_go_when_a_command_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(given: Any, _: Any) -> None:
        runs.start_stage(given, runs.compute_identity(given, {}, {}), {}, fresh=False)
        raise ZeroDivisionError

    monkeypatch.setattr(train, "_runner", lambda name: run)
    assert rlhf("sft", "-c", "sft.yaml").exit_code == 1
    script = "import pathlib, sys; from rlhf_cli.runs.locks import lock_folder; lock_folder(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script, str(folder / "sft")], env=environment, check=True)


def test_a_reader_that_leaves_early_is_no_failure_to_explain() -> None:
    command = [sys.executable, "-m", "rlhf_cli", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


# The small commands


def test_schema_is_json_schema() -> None:
    every, one = (json.loads(rlhf(*arguments).stdout) for arguments in (["schema"], ["schema", "ppo"]))
    assert len(every["anyOf"]) == 4
    assert "ppo" in one["properties"] and one["additionalProperties"] is False
    result = rlhf("schema", "pppo")
    assert is_one_error(result, "C07")
    assert "did you mean ppo?" in result.stderr


def test_init_lists_its_presets_and_says_what_it_needs(folder: Path) -> None:
    listed = [line.split()[0] for line in rlhf("init", "--list").stdout.splitlines()]
    assert listed[0] == "preset" and {"demo", "ci"} <= set(listed)
    assert is_one_error(rlhf("init", "ci"), "C11")
    result = rlhf("init", "dmo", "x")
    assert is_one_error(result, "C07")
    assert "did you mean demo?" in result.stderr


def test_init_writes_a_folder_of_a_seed_and_refuses_to_write_over_it(folder: Path) -> None:
    assert rlhf("init", "ci", "a", "--seed", "0").exit_code == 0
    assert rlhf("init", "ci", "b", "--seed", "1").exit_code == 0
    assert config.load("ppo", "a/ppo.yaml").ppo == config.load("ppo", "b/ppo.yaml").ppo
    assert (folder / "a/data/prompts.jsonl").read_bytes() != (folder / "b/data/prompts.jsonl").read_bytes()
    before = {path: path.read_bytes() for path in (folder / "a").rglob("*") if path.is_file()}
    assert is_one_error(rlhf("init", "ci", "a", "--seed", "1"), "C15")
    assert {path: path.read_bytes() for path in (folder / "a").rglob("*") if path.is_file()} == before


def test_env_tells_versions_and_devices() -> None:
    facts = json.loads(rlhf("env", "--json").stdout)
    assert facts["rlhf"] == rlhf_cli.__version__
    assert {"python", "torch", "transformers", "trl", "platform", "cpus", "gpus"} <= facts.keys()
    assert f"torch_threads  {facts['torch_threads']}" in rlhf("env").stdout
