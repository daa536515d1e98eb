"""`rlhf check`: all that is wrong at once, before any training, in the words of the stages."""

import json
from pathlib import Path

import pytest
import run_cli
from bad_inputs import check, foreign_scorer, replace, rlhf
from typer.testing import Result

from rlhf_cli import distributed, jsonl
from rlhf_cli.commands.init import presets
from rlhf_cli.pipeline import children


def messages(result: Result, start: str = "error[") -> list[str]:
    """Return the printed lines that start with a text."""
    return [line for line in result.output.splitlines() if line.startswith(start)]


def codes(result: Result) -> list[str]:
    return [line[6:9] for line in messages(result)]


def lines(stdout: str) -> dict[tuple[str, str], str]:
    """Return (stage, what) -> found of the table."""
    cells = [line.split(None, 2) for line in stdout.splitlines()[1:] if line[:1] not in ("n", "o")]
    return {(stage, what): rest for stage, what, rest in cells}


def test_a_valid_run(run_folder: Path) -> None:
    result = check(".")
    assert (result.exit_code, result.stderr) == (0, "") and result.stdout.endswith("\nok\n")
    checked = lines(result.stdout)
    assert checked["sft", "sft.yaml"] == "config read; output: new"
    assert checked["sft", "model.path"] == "model: llama, 336 tokens"
    assert checked["reward", "model.path"] == "sft, which the sft stage is to make"
    assert checked["reward", "data.train"].startswith("93 rows, at most ")  # by the tokenizer that sft will leave
    assert checked["reward", "batches"] == "93 pairs, 2604 tokens; a step: 8 x 1 = 8 pairs; in all 1 steps"
    assert "16 x 4 = 64 episodes" in checked["ppo", "batches"] and "1 updates" in checked["ppo", "batches"]
    assert checked["eval", "data.prompts"].startswith("9 prompts, at most ")
    assert "not checked" not in result.stdout and not (run_folder / "sft").exists()


def test_selecting_by_what_ppo_was_trained_on_is_warned_of(run_folder: Path) -> None:
    replace("eval.yaml", "best_of: []", "best_of: [], select: reward")
    result = check(".")
    assert result.exit_code == 0 and result.stderr.count("warning[C18]: eval.yaml:2: eval.select: the reward") == 1
    assert "hint: select by a judge that PPO never saw" in result.stderr


def test_rlhf_run_checks_everything_first(run_folder: Path) -> None:
    """A fault of the third stage ends it before the first one."""
    jsonl.write_jsonl(run_folder / "prompts.jsonl", [{"prompt": f"Tell me about {n}."} for n in range(70)])
    with (run_folder / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": null}\n')
    done = run_cli.run_here(".")
    assert (done.exit_code, done.stdout) == (2, "")
    first, error, hint = done.stderr.splitlines()
    assert first.startswith("run      checking") and hint.startswith("hint: ")
    assert error.startswith('error[D06]: prompts.jsonl:71: "prompt" is null')
    assert not (run_folder / "sft").exists()


def test_a_stage_with_wrong_values_has_its_files_checked(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a wrong key may name the file: a missing file would then be an error that follows from another."""
    replace("reward.yaml", "max_steps: 1", "max_steps: -1, no_such_key: 3")
    replace("reward.yaml", "pairs.jsonl", "pears.jsonl")
    replace("ppo.yaml", "prompts: prompts.jsonl", "prompts: promts.jsonl, prompt: prompts.jsonl")
    result = check(".")
    assert codes(result) == ["C06", "C01", "C01", "D01"], result.stderr
    assert "reward.yaml:1: data.train: " in messages(result)[3]
    assert messages(result, "not checked: reward: rows and models")
    assert set(codes(check("reward.yaml"))) == {"C06", "C01", "D01", "M01"}
    commands: list[list[str]] = []
    monkeypatch.setattr(children, "run_child", lambda command: commands.append(command) or 2)
    done = run_cli.rlhf("run", ".")  # which hands on what its child says
    assert (done.exit_code, done.output) == (2, "")
    assert commands == [[*distributed.RLHF_COMMAND, "check", ".", "--before-run"]]
    assert check(".", "--quiet").stderr.count("error[") == 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "break_it"),
    [
        ("sft", ("rows.jsonl", '{"prompt": "a", "completion": ""}')),
        ("reward", ("pairs.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "b"}')),
        ("ppo", ("prompts.jsonl", '{"prompt": ""}')),
        ("sft", ("model/tokenizer_config.json", "{")),
    ],
)
def test_check_reports_what_the_stage_reports(folder: Path, stage: str, break_it: tuple[str, str]) -> None:
    foreign_scorer(folder)
    (folder / break_it[0]).write_text(break_it[1])
    checked = check(f"{stage}.yaml").stderr
    assert "error[" in checked and set(checked.splitlines()) == set(rlhf(stage).stderr.splitlines())


def test_an_unreachable_hub_is_no_error(run_folder: Path) -> None:
    """Everything else is checked, rows without their lengths."""
    replace("sft.yaml", "path: model", "path: owner/model")
    replace("ppo.yaml", "prompts.jsonl", "owner/prompts")
    result = check(".")
    assert (result.exit_code, result.stderr) == (0, "")
    skipped = messages(result, "not checked: ")
    assert len(skipped) == 5 and "hf download owner/model" in skipped[0] and "owner/prompts" in skipped[1]
    assert (
        "tokenizer is not known" in skipped[2]
        and lines(result.stdout)["sft", "data.train"] == "96 rows; columns: prompt, completion"
    )
    jsonl.write_jsonl(run_folder / "pairs.jsonl", [{"prompt": "", "chosen": "a", "rejected": "b"}])
    assert check(".").exit_code == 2


def test_the_stage_of_a_file(folder: Path) -> None:
    for stage, text in (
        ("reward", "stage: reward\n" + (folder / "reward.yaml").read_text()),
        ("sft", (folder / "sft.yaml").read_text()),
        ("eval", "judges: {}\ndata: {prompts: rows.jsonl}\nmodels: {sft: model}\n"),
    ):
        (folder / "mine.yaml").write_text(text)
        assert (stage, "mine.yaml") in lines(check("mine.yaml").stdout)
    (folder / "mine.yaml").write_text("seed: 1\n")
    assert messages(check("mine.yaml"), "error[C07]: mine.yaml: ")


def test_overrides_reach_the_stages(run_folder: Path) -> None:
    assert check(".", "-s", "ppo.total_episodes=128", "*.seed=3").exit_code == 0
    result = check(".", "-s", "ppo.total_episodes=0", "seed=1")
    assert "error[C06]: --set ppo.total_episodes" not in result.stderr and "error[C11]: --set seed" in result.stderr


@pytest.mark.full
def test_the_steps_of_a_run_are_those_that_it_takes(folder: Path) -> None:
    sizes = "num_train_epochs: 1.5, per_device_train_batch_size: 7, gradient_accumulation_steps: 3"
    replace("sft.yaml", "max_steps: 1", sizes)
    counted = lines(check("sft.yaml").stdout)["sft", "batches"]
    assert counted == "96 rows, 1344 tokens; a step: 7 x 3 = 21 rows; in all 8 steps"
    done = rlhf("sft")
    assert done.exit_code == 0 and f"\nsft      {counted}\n" in f"\n{done.stderr}"
    assert json.loads((folder / "sft/manifest.json").read_text())["step"] == 8


def test_nine_faults_of_one_folder_at_once(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In configs, files, rows, batches, models, functions and the environment, each with its place."""
    replace("sft.yaml", "max_steps: 1", "max_steps: 1, max_length: 999, per_device_train_batch_size: 99")
    jsonl.write_jsonl(run_folder / "rows.jsonl", [{"prompt": "Tell me", "completion": " about the sun" * 60}] * 8)
    replace("reward.yaml", "data:", "model: {path: ./modle}\ndata:")
    jsonl.write_jsonl(run_folder / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "b"}])
    replace("ppo.yaml", "prompts.jsonl", "promts.jsonl")
    replace("ppo.yaml", "ppo:", "rewards: {mine: {function: 'no_such:module'}}\nppo:\n  num_shared_layers: 2")
    replace("eval.yaml", "n: 9", "m: 9")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = check(".")
    assert sorted(codes(result)) == ["C01", "C06", "C13", "C17", "D01", "D07", "D11", "E04", "M01"], result.stderr
    for place in ("WORLD_SIZE: ", "sft.yaml:3: ", "pairs.jsonl:1: ", "reward.yaml:1: ", "ppo.yaml:1: ", "ppo.yaml:4: "):
        assert f"]: {place}" in result.stderr, (place, result.stderr)
    assert result.exit_code == 2 and result.stderr.count("hint: ") >= 9 and "Traceback" not in result.stderr
    assert not result.stdout.rstrip().endswith("ok")


@pytest.mark.full
def test_a_preset_is_all_right(tmp_path: Path) -> None:
    presets.init("ci", tmp_path / "ci")
    assert check(str(tmp_path / "ci")).exit_code == 0
