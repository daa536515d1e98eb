"""`rlhf run DIR --seeds 0,1,2`: what a seed changes, what is shared, and the results of all."""

import json
import math
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import fake_stage
import pytest
from fake_config import CONFIGS, write_configs
from report_run import report
from run_cli import is_one_error, rlhf

from rlhf_cli.pipeline import children, seeds
from rlhf_cli.runs.report import Report


@pytest.fixture
def started(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A run of stages that train nothing in DIR `study`, and the command lines that were started."""
    (here / "study").mkdir()
    write_configs(here / "study")
    commands: list[list[str]] = []

    def run_child(command: list[str]) -> int:
        commands.append(command[4:])
        if command[4] == "check":
            return 0
        with redirect_stdout(sys.stderr):
            return fake_stage.main(command[4:])

    monkeypatch.setattr(children, "run_child", run_child)
    return commands


def stages(commands: list[list[str]]) -> list[str]:
    return [command[0] for command in commands]


def test_each_seed_has_a_run_and_only_training_has_its_seed(started: list[list[str]]) -> None:
    result = rlhf("run", "study", "--seeds", "0,7")
    assert result.exit_code == 0, result.output
    assert stages(started) == ["check", *CONFIGS, *CONFIGS], "the data are checked once"
    for seed in (0, 7):
        for stage in CONFIGS:
            identity = json.loads(Path(f"study/seeds/{seed}/{stage}/identity.json").read_text())
            assert identity["config"]["seed"] == (0 if stage == "eval" else seed)
    assert not [stage for stage in CONFIGS if Path("study", stage).exists()], "the run of DIR itself is not touched"
    assert [line.split()[:3] for line in result.stdout.splitlines() if line.startswith(("mean", "spread"))] == [
        ["mean", "0.500", "[0.500,"],
        ["spread", "0.000", "0.000"],
    ]
    assert Path("study/seeds/report.html").is_file()


def test_finished_seeds_are_kept_and_a_new_one_is_added(started: list[list[str]]) -> None:
    assert rlhf("run", "study", "--seeds", "0").exit_code == 0
    started.clear()
    values = json.loads(rlhf("run", "study", "--seeds", "0,1", "--json").stdout)
    assert stages(started) == ["check", *CONFIGS]
    assert [list(each["ran"]) for each in values["seeds"]] == [[], list(CONFIGS)]
    title = "PPO over SFT, reward"
    assert values["results"]["win_rate"] == {"title": title, "mean": 0.5, "spread": 0.0, "ci95": [0.5, 0.5], "n": 2}
    assert values["page"] == "study/seeds/report.html"


def test_a_failure_ends_it_and_the_same_command_resumes(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = children.run_child
    monkeypatch.setattr(children, "run_child", lambda command: 7 if command[4] == "ppo" else whole(command))
    failed = rlhf("run", "study", "--seeds", "0,1,2")
    assert failed.exit_code == 7 and "seed 0   ended with exit code 7; not run: 1, 2; the same" in failed.stderr
    assert rlhf("run", "study", "--seeds", "0,1,2", "-q").stdout == "", "there is no result"
    last = rlhf("run", "study", "--seeds", "0").stderr
    assert last.endswith("seed 0   ended with exit code 7; the same command resumes\n")
    monkeypatch.setattr(children, "run_child", whole)
    started.clear()
    assert rlhf("run", "study", "--seeds", "0,1,2").exit_code == 0
    assert stages(started)[:3] == ["check", "ppo", "eval"]


def test_an_unmet_requirement_does_not_end_it(started: list[list[str]]) -> None:
    file = Path("study/eval.yaml")
    file.write_text(file.read_text() + "eval: {require: {win_rate.ppo_vs_sft.reward.value: '>= 0.6'}}\n")
    assert rlhf("run", "study", "--seeds", "0,1").exit_code == 0, "the fake evaluation does not check"
    again = rlhf("run", "study", "--seeds", "0,1")
    assert again.exit_code == 1 and again.stderr.count("error[R06]") == 2


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ("--seeds 0,0", "C07", "--seeds 0,0: not a list of different seeds"),
        ("--seeds 0,x", "C07", "e.g. --seeds 0,1,2"),
        ("--seeds 0,1 -s *.seed=3", "C17", "--seeds and --set *.seed=3 contradict each other"),
        ("--seeds 0,1 -s ppo:seed=3", "C17", "contradict each other"),
    ],
)
def test_what_is_no_seed_is_refused(started: list[list[str]], options: str, code: str, text: str) -> None:
    assert is_one_error(rlhf("run", "study", *options.split()), code, text)
    assert started == []


def test_the_interval_over_seeds_is_students() -> None:
    def of(gold: float) -> Report:
        values: dict[str, Any] = report(gold=gold)
        return Report.model_validate(values)

    win_rate, kl, score = seeds.quantities([of(0.6), of(0.7), of(0.8)])
    assert (win_rate.key, kl.key, score.key) == ("win_rate", "kl", "score") and "gold" in win_rate.title
    low, high = win_rate.as_json()["ci95"]
    assert math.isclose(win_rate.mean, 0.7) and math.isclose(win_rate.spread or 0, 0.1)
    assert math.isclose(high - 0.7, 4.302653 * 0.1 / math.sqrt(3), rel_tol=1e-6) and math.isclose(0.7 - low, high - 0.7)
    alone = seeds.quantities([of(0.6)])[0]
    assert alone.spread is None and alone.as_json()["ci95"] is None


def test_the_run_of_a_seed_has_the_configs_of_all(started: list[list[str]]) -> None:
    assert rlhf("run", "study", "--seeds", "0,1", "-s", "ppo.kl_coef=0.1").exit_code == 0
    status = rlhf("status", "study/seeds/1")
    assert status.exit_code == 0 and status.stdout.count(" finished ") == 3
    assert "next: rlhf run study --seeds 1 runs ppo (stale: ppo.kl_coef 0.1 -> 0.05)" in status.stdout
    assert "next: nothing" in rlhf("status", "study/seeds/1", "-s", "ppo.kl_coef=0.1").stdout
    assert is_one_error(rlhf("run", "study/seeds/1"), "C09", "those of study\nhint: rlhf run study --seeds 1")
    assert rlhf("check").stderr.startswith("study is the only run here\n"), "the seeds have no configs of their own"
    for command in ("report", "chat"):
        assert is_one_error(rlhf(command, "study"), "M01", "hint: name the run of a seed: study/seeds/0")
    assert "seeds    0, 1 in study/seeds\n" in rlhf("status", "study").stdout
    assert "next: rlhf run study --seeds 0,1 for its seeds; rlhf run study runs sft" in rlhf("status", "study").stdout
    assert "2 seeds" in rlhf("ls", ".").stdout and "never run" not in rlhf("ls", ".").stdout
