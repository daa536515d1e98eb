"""The chain of the preset ci in one fork (`make smoke` has a process a stage): what it writes, and no secret in it."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import canaries
import pytest
import run_cli
from bad_inputs import replace
from canaries import PICKLES, is_pickle, leaks
from chaos.fingerprint import differences, fingerprint
from run_cli import must_succeed

from rlhf_cli.models.batch import Prompts
from rlhf_cli.pipeline import children
from rlhf_cli.ppo.experience import Stats
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.report.show import brief

STAGES = ["sft", "reward", "ppo", "eval"]


def stage_lines(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The pipeline's line about each stage."""
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    lines = [re.match(r"(sft|reward|ppo|eval) +(.*)", line) for line in result.stdout.splitlines()]
    return {match[1]: match[2] for match in reversed(lines) if match}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with a run of the preset ci in run/, with fewer steps of SFT, and the result of its first `rlhf run`."""
    folder = tmp_path_factory.mktemp("chain")
    must_succeed(canaries.rlhf(folder / "home", "init", "ci", str(folder / "run")))
    replace(str(folder / "run/sft.yaml"), "max_steps: 200", "max_steps: 40")
    replace(str(folder / "run/sft.yaml"), "save_steps: 100", "save_steps: 20")

    def like_a_new_process() -> None:
        os.chdir(folder)
        tempfile.tempdir = None  # read TMPDIR again
        children.run_child = run_cli.child_here

    return folder, canaries.rlhf(folder / "home", "run", "run", before=like_a_new_process)


@pytest.fixture(scope="module")
def folder(first: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    """The folder, with the finished run."""
    assert stage_lines(first[1]) == dict.fromkeys(STAGES, "new")
    return first[0]


@pytest.mark.full
def test_every_stage_writes_its_files(folder: Path) -> None:
    for stage in STAGES:
        manifest = json.loads((folder / "run" / stage / "manifest.json").read_text())
        assert (manifest["schema"], manifest["stage"]) == (2, stage)
        assert (folder / "run" / stage / "config.yaml").is_file()
        if stage != "eval":
            assert {"tokenizer_sha256", "template_sha256", "special_tokens", "metrics"} <= manifest.keys()
            assert (folder / "run" / stage / "model/model.safetensors").is_file()
            assert (folder / "run" / stage / "metrics.jsonl").is_file()
    report = json.loads((folder / "run/eval/report.json").read_text())
    assert {"sft", "ppo"} <= report["models"].keys() and "ppo_vs_sft" in report["win_rate"]


@pytest.mark.full
def test_later_stages_do_not_repeat_warnings(
    first: tuple[Path, subprocess.CompletedProcess[str]], folder: Path
) -> None:
    result = first[1]
    warnings = json.loads((folder / "run/eval/report.json").read_text())["warnings"]
    assert [line for line in result.stderr.splitlines() if line.startswith("warning[R11]")] == warnings != []
    assert f"in report.json, printed above: R11 ({len(warnings)} times)\n" in result.stdout
    assert result.stdout.count("\nreport card: ") == 1 and result.stdout.count("report card: see above") == 1
    ppo = json.loads((folder / "run/ppo/manifest.json").read_text())["metrics"]["objective/scores"]
    assert f"ppo      reward {ppo:.3f} on training prompts (before the KL penalty), KL " in result.stderr
    *_, verdict, page_line, last = result.stdout.splitlines()
    assert verdict.startswith("result: ") and page_line == f"the page says: {brief(folder / 'run')[0]}"
    assert last.startswith("next: open run/eval/report.html in a browser; rlhf chat run --compare")


@pytest.mark.full
def test_a_second_run_skips_all_stages_in_seconds_and_prints_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    began = time.monotonic()
    again = canaries.rlhf(folder / "home", "run", "run")
    assert time.monotonic() - began < 10
    assert all(line.startswith("up to date (") for line in stage_lines(again).values())
    assert "win rate" in again.stdout and "report: run/eval/report.json" in again.stdout
    assert "\nreport card: " in again.stdout and "in report.json: warning[R11]: run/reward: " in again.stdout
    assert again.stderr == ""


@pytest.mark.full
def test_no_token_is_in_any_file_of_a_chain(folder: Path) -> None:
    must_succeed(canaries.rlhf(folder / "home", "env"))
    assert len(list((folder / "run").rglob("*"))) > 80
    assert leaks(folder) == [] and not list(folder.rglob("training_args.bin"))
    manifests = [json.loads(path.read_text()) for path in folder.glob("run/*/manifest.json")]
    assert len(manifests) == 4 and all(manifest["trust_remote_code"] is False for manifest in manifests)


@pytest.mark.full
def test_a_finished_chain_holds_no_pickle_but_what_transformers_resumes_from(folder: Path) -> None:
    for path in (folder / "run").rglob("*"):
        name = path.relative_to(folder / "run").as_posix().removeprefix("base/")
        if path.is_file():
            assert is_pickle(path.read_bytes()) == bool(PICKLES.fullmatch(name)), name
            assert path.suffix not in (".bin", ".pt", ".pth", ".pkl", ".ckpt") or PICKLES.fullmatch(name), name
    assert any(PICKLES.fullmatch(path.relative_to(folder / "run").as_posix()) for path in folder.rglob("*.pt"))


@pytest.mark.full
def test_m10_a_parent_without_its_manifest_is_rejected_even_if_the_stage_is_finished(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    manifest = folder / "run/reward/manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    try:
        result = run_cli.rlhf("ppo", "--config", "run/ppo.yaml")
    finally:
        manifest.write_text(text)
    assert result.exit_code == 2
    first, hint = result.stderr.splitlines()
    assert first.startswith("error[M10]: run/ppo.yaml")
    assert hint == "hint: finish it: rlhf reward --config run/reward.yaml; or change models.reward"
    must_succeed(run_cli.rlhf("ppo", "--config", "run/ppo.yaml"), "finished already")


@pytest.mark.full
def test_c15_another_config_is_rejected_by_a_stage_and_planned_by_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That `rlhf run` does what it plans is tested with fake stages (tests/pipeline/test_run.py)."""
    monkeypatch.chdir(folder)
    refused = run_cli.rlhf("ppo", "--config", "run/ppo.yaml", "ppo.kl_coef=0.123")
    assert refused.exit_code == 2 and refused.stderr.startswith("error[C15]: run/ppo.yaml: ")
    assert re.search(r"ppo\.kl_coef \S+ -> 0\.123", refused.stderr) and "--fresh" in refused.stderr
    lines = planned("run", "-s", "ppo.kl_coef=0.123")
    assert re.fullmatch(r"stale: ppo\.kl_coef \S+ -> 0\.123", lines["ppo"])
    assert lines["sft"].startswith("up to date") and lines["reward"].startswith("up to date")
    must_succeed(run_cli.rlhf("ppo", "--config", "run/ppo.yaml", "-s", "ppo.kl_coef=0.123", "--fresh"))
    assert (folder / "run/.old/ppo-1/manifest.json").is_file()
    lines = planned("run", "-s", "ppo.kl_coef=0.123")
    assert lines["ppo"].startswith("up to date") and lines["eval"] == "stale: models.ppo: other weights"


def planned(*arguments: str) -> dict[str, str]:
    """The plan of `rlhf run` for each stage."""
    result = must_succeed(run_cli.rlhf("run", *arguments, "--dry-run"))
    return dict(line.split(maxsplit=1) for line in result.stdout.splitlines())


# The next round


def in_run_folder(folder: Path, *, killed_at: int | None = None) -> Callable[[], None]:
    """Return what a fork does first: stages run in it, and it is killed in an update of PPO."""

    def prepare() -> None:
        os.chdir(folder)
        tempfile.tempdir = None
        children.run_child = run_cli.child_here
        if killed_at is not None:
            real = PPOTrainer.step

            def step(trainer: PPOTrainer, prompts: Prompts) -> Stats:
                if trainer.updates == killed_at - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(trainer, prompts)

            PPOTrainer.step = step

    return prepare


@pytest.fixture(scope="module")
def rounds(folder: Path) -> Path:
    """The folder with two finished next rounds of the run: straight/, and killed/ whose PPO was killed in update 2."""
    home = folder / "home"
    judge = "def short(prompts, responses):\n    return [-len(each) for each in responses]\n"
    (folder / "run/brevity.py").write_text(judge)  # no test in this process has imported this name
    begin = in_run_folder(folder)
    must_succeed(canaries.rlhf(home, "label", "run", "--by", "brevity:short", "--n", "30", before=begin))
    before = fingerprint(folder / "run")
    for name in ("straight", "killed"):
        must_succeed(canaries.rlhf(home, "init", "next", "run", name, before=begin))
        replace(str(folder / name / "reward.yaml"), "max_steps: 60", "max_steps: 20")
        replace(str(folder / name / "eval.yaml"), "n: 32", "n: 16")

    must_succeed(canaries.rlhf(home, "run", "straight", before=begin))
    killed = canaries.rlhf(home, "run", "killed", before=in_run_folder(folder, killed_at=2))
    assert killed.returncode == -signal.SIGKILL and not (folder / "killed/ppo/manifest.json").exists()
    again = must_succeed(canaries.rlhf(home, "run", "killed", before=begin))
    assert stage_lines(again)["ppo"] == "resumes at step 1" and "up to date" in stage_lines(again)["reward"]
    assert fingerprint(folder / "run") == before
    return folder


@pytest.mark.slow
@pytest.mark.full
def test_a_round_is_judged_against_sft_and_the_policy_before(rounds: Path) -> None:
    report = json.loads((rounds / "straight/eval/report.json").read_text())
    assert {"ppo_vs_sft", "ppo_vs_previous", "previous_vs_sft"} == report["win_rate"].keys()
    first = json.loads((rounds / "run/ppo/manifest.json").read_text())
    ppo = json.loads((rounds / "straight/ppo/manifest.json").read_text())
    assert ppo["parents"]["models.policy"] == {"path": "../../run/ppo", "stage": "ppo", "sha256": first["model_sha256"]}
    assert ppo["parents"]["models.sft"] == first["parents"]["models.sft"] | {"path": "../../run/sft"}

    updates = [json.loads(line) for line in (rounds / "straight/ppo/metrics.jsonl").read_text().splitlines()]
    assert updates[0]["policy/first_ratio_error"] == 0 and updates[0]["objective/kl_k1"] != 0
    page = (rounds / "straight/eval/report.html").read_text()
    assert "PPO over previous" in page


@pytest.mark.slow
@pytest.mark.full
def test_a_round_that_was_killed_in_ppo_ends_in_the_same_bytes(rounds: Path) -> None:
    for stage in ("reward", "ppo"):
        straight, killed = (fingerprint(rounds / name / stage) for name in ("straight", "killed"))
        assert differences(straight, killed) == [], stage
    straight, killed = (json.loads((rounds / name / "eval/report.json").read_text()) for name in ("straight", "killed"))
    assert straight | {"warnings": []} == killed | {"warnings": []}  # they name the folder


@pytest.mark.slow
@pytest.mark.full
def test_a_round_of_another_policy_is_made_again(rounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "straight"):
        shutil.copytree(rounds / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(children, "run_child", run_cli.child_here)
    must_succeed(run_cli.rlhf("run", "run", "--only", "ppo", "-s", "ppo.total_episodes=32"))
    plan = must_succeed(run_cli.rlhf("run", "straight", "--dry-run"))
    lines = stage_lines(subprocess.CompletedProcess([], 0, plan.stdout, plan.stderr))
    assert lines["reward"].startswith("up to date") and lines["ppo"] == "stale: models.policy: other weights"
    assert lines["eval"].startswith("after ppo")
