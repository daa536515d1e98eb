"""`rlhf run`: what runs, what is skipped, and why. The stages are fakes that train nothing; all else is real."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fake_stage
import pytest

from rlhf_cli import config
from rlhf_cli.commands import run as pipeline
from rlhf_cli.commands import run_summary
from rlhf_cli.commands.run import StageFilter
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError

FAKE = Path(fake_stage.__file__)
CONFIGS = {
    "sft": "model: {path: ./base}\ndata: {train: sft.jsonl}\nsft: {learning_rate: 1e-5, weight_decay: 0.0}\n",
    "reward": "data: {train: pairs.jsonl}\nreward: {learning_rate: 1e-5}\n",
    "ppo": "data: {prompts: prompts.jsonl}\nppo: {kl_coef: 0.05, total_episodes: 64}\n",
    "eval": "data: {prompts: held-out.jsonl}\n",
}


def run_here(command: list[str]) -> int:
    """A stage in this process, which is quicker than a child."""
    assert command[:4] == [sys.executable, "-P", "-m", "rlhf_cli"]
    if command[4] == "check":
        return 0  # the fakes' data would not pass
    try:
        return fake_stage.main(command[4:])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with all four configs, their data and a base model; stages are replaced by fakes."""
    for stage, text in CONFIGS.items():
        (tmp_path / f"{stage}.yaml").write_text(text)
    for name in ("sft", "pairs", "prompts", "held-out"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(FAKE.parent.parent))
    monkeypatch.setattr(pipeline, "_run_child", run_here)
    return tmp_path


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """Runs the pipeline and returns its line about each stage; asserts on the exit code."""

    def call(*overrides: str, code: int = 0, dry_run: bool = False, **selection: object) -> dict[str, str]:
        capfd.readouterr()
        options = Options(dry_run=dry_run)
        assert pipeline.run(Path("."), overrides, StageFilter(**selection), options) == code  # type: ignore[arg-type]
        lines = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines() if line.strip()]
        # The fakes say "sft new" too; a pipeline's own line has the stage's name in a column of 8.
        return {line[0]: line[1] for line in reversed(lines) if line[0] in CONFIGS}

    return call


def change(folder: Path, stage: str, old: str, new: str) -> None:
    path = folder / f"{stage}.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def is_skipped(line: str) -> bool:
    return line.startswith("up to date (") and line.endswith("), skipped")


def ran(lines: dict[str, str]) -> list[str]:
    return [stage for stage, line in lines.items() if not is_skipped(line)][::-1]


def test_a_first_run_makes_all_and_a_second_one_nothing(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run() == dict.fromkeys(CONFIGS, "new")
    monkeypatch.setattr(pipeline, "_run_child", lambda command: pytest.fail(f"ran {command}"))
    lines = run()
    assert all(is_skipped(line) for line in lines.values()) and lines.keys() == CONFIGS.keys()


def test_all_is_checked_once_before_the_first_of_several_stages(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def child(command: list[str]) -> int:
        calls.append(command[4])
        return 2 if command[4] == "check" and (folder / "wrong").exists() else run_here(command)

    monkeypatch.setattr(pipeline, "_run_child", child)
    (folder / "wrong").touch()
    assert run(code=2) == {} and calls == ["check"]
    (folder / "wrong").unlink()
    run()
    assert calls == ["check", "check", *CONFIGS]
    run()  # nothing to do
    (folder / "held-out.jsonl").write_text("{} \n")
    run()  # the last stage alone: it looks for itself
    assert calls == ["check", "check", *CONFIGS, "eval"]
    command = pipeline.check_command(Path("a"), ["ppo.kl_coef=1"], Options(trust_remote_code=True))
    assert command[4:] == ["check", "a", "--quiet", "--set", "ppo.kl_coef=1", "--trust-remote-code"]


def test_skipping_everything_shows_the_verdict_and_needs_no_torch(
    run: Callable, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run()
    script = "import sys; from rlhf_cli.cli import app\ntry: app(['run', '.'])\nfinally: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stderr == ""
    assert "win rate" in result.stdout and "report: eval/report.json" in result.stdout
    assert result.stdout.splitlines()[-1] == "False"


def test_kl_coef_runs_ppo_and_eval_again_and_nothing_else(run: Callable, folder: Path) -> None:
    run()
    change(folder, "ppo", "kl_coef: 0.05", "kl_coef: 0.1")
    lines = run()
    assert ran(lines) == ["ppo", "eval"]
    assert lines["ppo"] == "stale: ppo.kl_coef 0.05 -> 0.1"
    assert lines["eval"] == "stale: models.ppo: other weights"
    assert (folder / ".old/ppo-1/manifest.json").is_file() and (folder / ".old/eval-1/report.json").is_file()
    assert ran(run()) == []


def test_a_parent_made_again_with_the_same_bytes_makes_nothing_stale(run: Callable, folder: Path) -> None:
    run()
    change(folder, "sft", "weight_decay: 0.0", "weight_decay: 0.1")
    assert ran(run()) == ["sft"]
    change(folder, "sft", "learning_rate: 1e-5", "learning_rate: 2e-5")
    lines = run()
    assert ran(lines) == ["sft", "reward", "ppo", "eval"]
    assert lines["sft"] == "stale: sft.learning_rate 1e-05 -> 2e-05"
    assert lines["reward"] == "stale: model.path: other weights"


def test_other_data_is_content_and_not_dates(run: Callable, folder: Path) -> None:
    run()
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    assert ran(run()) == []
    (folder / "prompts.jsonl").write_text("{} \n")
    lines = run()
    assert lines["ppo"] == "stale: data.prompts: other content"
    assert ran(lines) == ["ppo", "eval"]


def test_another_package_version_runs_nothing(run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    manifest = json.loads((folder / "sft/manifest.json").read_text())
    manifest |= {"schema": 1, "versions": {"rlhf": "9.9", "torch": "9.9"}}  # schema 1 has no hash of itself
    (folder / "sft/manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr("rlhf_cli.runs.stage_folder.__version__", "10.0")
    assert ran(run()) == []


def test_a_key_that_came_with_a_newer_version_runs_nothing_at_its_default(run: Callable, folder: Path) -> None:
    run()
    for stage, section, key in (("sft", "sft", "packing"), ("ppo", "ppo", "gamma"), ("eval", "eval", "modes")):
        identity = json.loads((folder / stage / "identity.json").read_text())
        del identity["config"][section][key]  # as an older version wrote it
        (folder / stage / "identity.json").write_text(json.dumps(identity))
    assert ran(run()) == []
    assert run("ppo.gamma=0.9")["ppo"] == "stale: ppo.gamma: new key 0.9"


def test_a_run_can_be_moved(run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    moved = folder.rename(folder.with_name("moved"))
    monkeypatch.chdir(moved)
    assert ran(run()) == []


def test_logging_cadence_changes_nothing(run: Callable, folder: Path) -> None:
    run()
    change(folder, "sft", "sft: {", "output: {keep: 5}\nsft: {logging_steps: 3, ")
    assert ran(run()) == []


@pytest.mark.parametrize(("stage", "rest"), [("sft", "; what comes after it was not run"), ("eval", "")])
def test_what_was_not_run_is_told_where_there_is_any(
    run: Callable, stage: str, rest: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_FAILS", stage)
    assert pipeline.run(Path("."), (), StageFilter(), Options()) == 7
    assert f"{stage:<8} ended with exit code 7{rest}\n" in capfd.readouterr().err


def test_a_failed_stage_stops_the_run_and_is_resumed(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "reward")
    assert run(code=7) == {"sft": "new", "reward": "new"}
    monkeypatch.delenv("FAKE_FAILS")
    lines = run()
    assert is_skipped(lines["sft"])
    assert lines["reward"] == "resumes at step 120"
    assert lines["ppo"] == "new"


def test_an_unfinished_parent_is_finished_first_and_its_children_stay(run: Callable, folder: Path) -> None:
    run()
    (folder / "reward/manifest.json").unlink()
    (folder / "reward/model/model.safetensors").unlink()
    (folder / "reward/model").rmdir()
    lines = run()
    assert ran(lines) == ["reward"]
    assert lines["reward"] == "starts again (no step was saved)"


def test_a_damaged_output_is_made_again(run: Callable, folder: Path) -> None:
    run()
    (folder / "sft/model/model.safetensors").write_text("")
    lines = run()
    assert ran(lines) == ["sft"]
    assert lines["sft"].startswith("damaged: model/model.safetensors has 0 bytes, ")
    assert (folder / ".old/sft-1").is_dir()


# Selections


def test_only_from_and_force(run: Callable, folder: Path) -> None:
    run()
    assert ran(run(force=("reward",))) == ["reward"]
    assert run(force=("sft",), only=("sft",)) == {"sft": "forced to run again"}
    change(folder, "ppo", "0.05", "0.1")
    assert run(only=("reward",)).keys() == {"reward"}
    assert run(start="ppo").keys() == {"ppo", "eval"}
    assert len(list((folder / ".old").iterdir())) == 4


@pytest.mark.parametrize(
    ("selection", "code", "text"),
    [
        ({"only": ("rewards",)}, "C07", "did you mean reward?"),
        ({"start": "eval", "only": ("sft",)}, "C17", "--only and --from"),
        ({"start": "ppo", "force": ("sft",)}, "C17", "--force sft"),
    ],
)
def test_selections_that_mean_nothing_are_refused(run: Callable, selection: dict, code: str, text: str) -> None:
    with pytest.raises(RLHFError) as caught:
        run(**selection)
    assert caught.value.problems[0].code == code
    assert text in str(caught.value)


def test_a_selection_needs_the_parents_that_it_leaves_out(run: Callable, folder: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        run(only=("ppo",))
    assert [problem.code for problem in caught.value.problems] == ["M01", "M01"]
    assert "rlhf sft --config sft.yaml" in str(caught.value)


def test_a_stage_without_a_file_is_left_out(run: Callable, folder: Path) -> None:
    (folder / "eval.yaml").unlink()
    assert run().keys() == {"sft", "reward", "ppo"}
    with pytest.raises(RLHFError, match="C09"):
        run(only=("eval",))


def test_all_that_is_missing_is_told_before_anything_runs(run: Callable, folder: Path) -> None:
    (folder / "pairs.jsonl").unlink()
    (folder / "held-out.jsonl").unlink()
    (folder / "base/config.json").unlink()
    with pytest.raises(RLHFError) as caught:
        run()
    assert [problem.code for problem in caught.value.problems] == ["M01", "D01", "D01"]
    assert not (folder / "sft").exists()


def test_all_config_errors_of_all_files_are_told_at_once(run: Callable, folder: Path) -> None:
    change(folder, "sft", "weight_decay", "weight_decai")
    change(folder, "ppo", "kl_coef", "kl_coeff")
    with pytest.raises(RLHFError) as caught:
        run()
    assert [problem.where for problem in caught.value.problems] == ["sft.yaml:3", "ppo.yaml:2"]


def test_folders_that_hold_no_run(tmp_path: Path, run: Callable) -> None:
    (tmp_path / "empty").mkdir()
    for name, text in (("empty", "holds none of"), ("emptx", "did you mean empty?"), ("sft.yaml", "rlhf sft --config")):
        with pytest.raises(RLHFError) as caught:
            pipeline.run(Path(name), (), StageFilter(), Options())
        assert caught.value.problems[0].code == "C09"
        assert text in str(caught.value)


# Overrides


def test_a_key_goes_to_the_stage_that_has_its_section(run: Callable) -> None:
    run()
    lines = run("ppo.kl_coef=0.2")
    assert lines["ppo"] == "stale: ppo.kl_coef 0.05 -> 0.2"
    assert run("ppo.kl_coef=0.2", "reward.learning_rate=3e-5")["reward"] == "stale: reward.learning_rate 1e-05 -> 3e-05"


def test_a_star_goes_to_every_stage_that_has_the_section() -> None:
    stages = list(CONFIGS)
    assert pipeline.route_overrides(["*.seed=3"], stages) == {stage: ["*.seed=3"] for stage in CONFIGS}
    assert pipeline.route_overrides(["model.new.hidden_size=8", "data.on_identical=drop"], stages) == {
        "sft": ["model.new.hidden_size=8"],
        "reward": ["data.on_identical=drop"],
        "ppo": [],
        "eval": [],
    }
    assert pipeline.route_overrides(["*.models.dtype=float32"], stages) == {
        "sft": [], "reward": [], "ppo": ["*.models.dtype=float32"], "eval": ["*.models.dtype=float32"],
    }  # fmt: skip


def test_every_stage_gets_the_seed(run: Callable) -> None:
    run()
    lines = run("*.seed=3")
    assert [line.split(";")[0] for line in lines.values()] == ["stale: seed 0 -> 3"] * 4


def test_a_setting_that_no_file_has_is_told_where_the_next_run_would_undo_it(
    run: Callable, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(*overrides: str) -> list[str]:
        capfd.readouterr()
        assert pipeline.run(Path("."), overrides, StageFilter(), Options()) == 0
        return [line for line in capfd.readouterr().out.splitlines() if line.startswith("made with")]

    run()
    keep = "have: write it there to keep it, or a plain `rlhf run {}` makes {} again"
    where = str(folder)
    (line,) = told("ppo.kl_coef=0.2", "ppo.total_episodes=64", "sft.logging_steps=7")
    assert line.startswith("made with -s ppo.kl_coef=0.2, which ppo.yaml does not have: write")
    assert line.endswith(keep.format(where, "that stage"))
    (line,) = told("ppo.kl_coef=0.05", "*.seed=3")
    files = "sft.yaml, reward.yaml, ppo.yaml, eval.yaml"
    assert line == f"made with -s '*.seed=3', which {files} do not {keep.format(where, 'those stages')}"
    run()
    assert told("sft.logging_steps=7", "ppo.kl_coef=0.05") == []


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("seed=3", "-s '*.seed=3' sets it in all of them"),
        ("data.columns.prompt=q", "-s '*.data.columns.prompt=q' sets it in all"),
        ("pppo.kl_coef=1", "did you mean ppo?"),
        ("rubbish", "--set rubbish: expected KEY=VALUE\nhint: e.g. --set ppo.kl_coef=0.1"),
        ("=", "--set =: expected KEY=VALUE"),
    ],
)
def test_an_ambiguous_or_unknown_section_is_refused(run: Callable, text: str, hint: str) -> None:
    with pytest.raises(RLHFError) as caught:
        run(text)
    assert caught.value.problems[0].code == "C11"
    assert hint in str(caught.value)
    assert caught.value.exit_code == 2


# Dry runs


def test_a_dry_run_says_what_would_run_and_runs_nothing(run: Callable, folder: Path) -> None:
    assert run(dry_run=True) == {
        "sft": "new",
        "reward": "after sft: new",
        "ppo": "after sft and reward: new",
        "eval": "after sft and ppo and reward: new",
    }
    assert not (folder / "sft").exists()
    run()
    change(folder, "ppo", "0.05", "0.1")
    lines = run(dry_run=True)
    assert is_skipped(lines["sft"]) and is_skipped(lines["reward"])
    assert lines["ppo"] == "stale: ppo.kl_coef 0.05 -> 0.1"
    assert lines["eval"] == "after ppo: runs again if that changes what it starts from"
    assert not (folder / ".old").exists()


# The gate


def test_an_evaluation_that_is_up_to_date_is_still_held_against_its_requirements(run: Callable, folder: Path) -> None:
    run()
    change(folder, "eval", "data:", 'eval: {require: {win_rate.ppo_vs_sft.reward.value: ">= 0.6"}}\ndata:')
    with pytest.raises(RLHFError) as caught:
        run()
    assert caught.value.problems[0].code == "R06" and caught.value.exit_code == 1
    assert "win_rate.ppo_vs_sft.reward.value is 0.5, required >= 0.6" in str(caught.value)


def test_an_evaluation_that_does_not_meet_its_requirements_ends_with_the_page(
    run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[bool] = []
    monkeypatch.setattr(run_summary, "show", lambda *given, met=True: ends.append(met))

    def failing(stage: str) -> Callable[[list[str]], int]:
        return lambda command: run_here(command) or int(command[4] == stage)

    monkeypatch.setattr(pipeline, "_run_child", failing("ppo"))
    run(code=1)
    assert ends == [], "what a stage before it left is no evaluation"
    monkeypatch.setattr(pipeline, "_run_child", failing("eval"))
    run(code=1)
    assert ends == [False]
    run()
    assert ends == [False, True]
    change(folder, "eval", "data:", 'eval: {require: {win_rate.ppo_vs_sft.reward.value: ">= 0.6"}}\ndata:')
    with pytest.raises(RLHFError, match="R06"):
        run()
    assert ends == [False, True, False]


# Children


def start_and_wait(folder: Path) -> subprocess.Popen[str]:
    """`rlhf run .` in a process of its own, with a stage that waits for a signal."""
    script = f"""
import sys; from rlhf_cli import cli; from rlhf_cli.commands import run as pipeline
real = pipeline.child_command
pipeline.child_command = lambda *a, **k: [sys.executable, {str(FAKE)!r}, *real(*a, **k)[4:]]
pipeline.check_command = lambda *a: [sys.executable, "-c", ""]
cli.app(["run", "."])
"""
    environment = {**os.environ, "FAKE_WAITS": "sft"}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    until((folder / "sft/waiting").exists, "the child never came up")
    assert parent.poll() is None
    return parent


def until(there: Callable[[], bool], else_: str) -> None:
    deadline = time.monotonic() + 30
    while not there():
        assert time.monotonic() < deadline, else_
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_child_and_its_exit_code_comes_back(folder: Path, number: int, code: int) -> None:
    parent = start_and_wait(folder)
    parent.send_signal(number)
    _, said = parent.communicate(timeout=30)
    assert parent.returncode == code
    assert f"sft      ended with exit code {code}" in said and "Traceback" not in said
    assert not (folder / "reward").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child is not told that its parent was killed")
def test_a_child_whose_parent_is_killed_is_asked_to_stop(folder: Path) -> None:
    parent = start_and_wait(folder)
    parent.kill()
    parent.communicate(timeout=30)
    until((folder / "sft/stopped").exists, "the child goes on by itself")


def test_a_child_killed_by_a_signal_counts_as_the_shell_counts() -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert pipeline._run_child([sys.executable, "-c", script]) == 137


def test_what_comes_after_a_child_that_finished_just_then_is_not_begun() -> None:
    script = "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: None)\n"
    script += "os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.5)"
    assert pipeline._run_child([sys.executable, "-c", script]) == 143


def test_a_child_gets_what_the_command_line_said(folder: Path) -> None:
    loaded = config.load("sft", folder / "sft.yaml")
    options = Options(trust_remote_code=True, debug=True)
    command = pipeline.child_command(loaded, ["seed=3", "*.output.keep=4"], options, fresh=True)
    assert command[4:] == [
        *("sft", "--config", str(folder / "sft.yaml"), "--set", "seed=3", "--set", "*.output.keep=4"),
        *("--fresh", "--trust-remote-code", "--debug"),
    ]
    assert pipeline.child_command(loaded, [], Options(), fresh=False)[4:] == command[4:7]
