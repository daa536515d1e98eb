"""`rlhf check`: all that is wrong at once, before any training, in the words of the stages.

Modules: `pipeline/check_files.py`, `pipeline/check_models.py`, `pipeline/check_report.py`.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import run_cli
from bad_inputs import check, foreign_scorer, replace, rlhf
from cost import cost
from safetensors.torch import load_file, save_file
from typer.testing import Result

from rlhf_cli import distributed, jsonl
from rlhf_cli.commands.init import presets
from rlhf_cli.models import tokenizers
from rlhf_cli.pipeline import children


@pytest.fixture
def run_folder(folder: Path) -> Path:
    """A run whose later stages start from what the earlier ones are still to make."""
    replace("reward.yaml", "model: {path: model}\n", "")
    replace("ppo.yaml", "models: {sft: model, reward: scorer}\n", "")
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 64\n  response_length: 32")
    pairs = {json.dumps(row): row for _, row in jsonl.read_jsonl(folder / "pairs.jsonl")}  # none twice
    jsonl.write_jsonl(folder / "pairs.jsonl", pairs.values())
    jsonl.write_jsonl(folder / "held-out.jsonl", [{"prompt": f"And the {n}?"} for n in range(9)])
    (folder / "eval.yaml").write_text("data: {prompts: held-out.jsonl}\neval: {n: 9, best_of: []}\n")
    return folder


def json_report(file: str, *arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(check(file, *arguments, "--json").stdout)
    return report


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


def test_quiet_prints_errors_only(run_folder: Path) -> None:
    jsonl.write_jsonl(run_folder / "held-out.jsonl", [{"prompt": "And?"}] * 9 + [{"prompt": "And? " * 99}])
    assert "D10" in check(".").stderr
    quiet = check(".", "--quiet")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "", "")


def test_lengths_are_those_of_the_stage(folder: Path) -> None:
    tokenizer = tokenizers.load_tokenizer(folder / "model")
    texts = [{"prompt": "Tell me", "completion": " about the sun" * (n % 7 + 1)} for n in range(96)]
    jsonl.write_jsonl(folder / "rows.jsonl", texts)
    lengths = [sum(len(tokenizer(text).input_ids) for text in row.values()) + 1 for row in texts]
    for limit, left_out in (1000, 0), (20, sum(length > 20 for length in lengths)):
        checked = json_report("sft.yaml", f"sft.max_length={limit}")["checked"]
        (numbers,) = [each for each in checked if each["what"] == "data.train"]
        assert (numbers["rows"], numbers["left_out"]) == (96 - left_out, left_out)
        assert numbers["longest"] == max(length for length in lengths if length <= limit)


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
    assert commands == [[*distributed.RLHF_COMMAND, "check", ".", "--quiet"]]
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


def test_json(folder: Path) -> None:
    replace("sft.yaml", "path: model", "path: owner/model")
    jsonl.write_jsonl(folder / "rows.jsonl", [{"prompt": "a", "completion": ""}])
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    jsonl.write_jsonl(folder / "pairs.jsonl", [{**pair, "prompt": f"{n}"} for n in range(8)])
    replace("reward.yaml", "train: pairs.jsonl", "train: pairs.jsonl, eval: pairs.jsonl")
    report = json_report("sft.yaml")
    place, hint = "rows.jsonl:1", "correct the row, or set data.on_bad: drop"
    problem = {"code": "D09", "text": '"completion" is empty', "where": place, "hint": hint, "level": "error"}
    assert (report["ok"], report["problems"]) == (False, [problem])
    assert report["not_checked"][0].startswith("sft model.path: owner/model is not in the hub's cache")
    warned = json_report("reward.yaml")
    assert warned["ok"] and [(one["code"], one["level"]) for one in warned["problems"]] == [("D13", "warning")]
    jsonl.write_jsonl(folder / "pairs.jsonl", [{**pair, "chosen": f"{n}"} for n in range(8)])
    assert json_report("reward.yaml")["problems"] == []  # one prompt for all rows is no leak
    assert json_report("nowhere")["problems"][0]["code"] == "C09"


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


@pytest.mark.parametrize("name", ["modle", "base/model"])
def test_a_misspelt_folder_is_not_a_hub_id(folder: Path, name: str) -> None:
    (folder / "base").mkdir()
    replace("sft.yaml", "path: model", f"path: {name}")
    assert messages(check("sft.yaml"), "error[M01]: sft.yaml:1: model.path")


def test_a_missing_model_is_reported_once_with_all_its_keys(folder: Path) -> None:
    replace("ppo.yaml", "models: {sft: model, reward: scorer}", "models: {sft: model, reward: ./gone, value: ./gone}")
    (message,) = messages(check("ppo.yaml"), "error[M01]")
    assert message == "error[M01]: ppo.yaml:1: models.value: no such folder gone (models.reward too)"


def test_a_stage_that_has_not_run_is_no_misspelt_folder(run_folder: Path) -> None:
    (run_folder / "ppo").mkdir()
    replace("eval.yaml", "data:", "policies: {dpo: RUN/dpo}\ndata:")
    hint = "hint: write dpo.yaml (`rlhf init` with --baselines writes one in a new run) and run that stage first"
    assert hint in check("eval.yaml").stderr


def test_fresh_weights(run_folder: Path) -> None:
    new = "new: {hidden_size: 32, num_attention_heads: 4, num_hidden_layers: 1, max_position_embeddings: 64, "
    replace("sft.yaml", "path: model", new + "tokenizer: {train: rows.jsonl, vocab_size: 300}}")
    replace("sft.yaml", "max_steps: 1", "max_steps: 1, max_length: 64")
    quick = check(".")
    assert quick.exit_code == 0 and lines(quick.stdout)["sft", "data.train"] == "96 rows; columns: prompt, completion"
    assert "not checked: sft model.new: its tokenizer" in quick.stdout
    deep = check(".", "--deep")
    assert deep.exit_code == 0 and lines(deep.stdout)["ppo", "data.prompts"].startswith("96 prompts, at most ")
    assert "not checked" not in deep.stdout
    replace("sft.yaml", "hidden_size", "hiden_size")
    assert "error[C01]: sft.yaml:1: model.new.hiden_size" in check(".").stderr


def test_evaluation_prompts_that_a_stage_trains_on(run_folder: Path) -> None:
    """D13 across stages, once for each training file that contains them."""
    _, pair = next(jsonl.read_jsonl(run_folder / "pairs.jsonl"))
    jsonl.write_jsonl(run_folder / "held-out.jsonl", [{"prompt": pair["prompt"]}, {"prompt": "Something else?"}])
    result = check(".")
    warnings = messages(result, "warning[D13]: eval.yaml:1: 1 of 2 evaluation prompts also occur in")
    assert [line.rpartition(" ")[2] for line in warnings] == ["rows.jsonl", "pairs.jsonl", "prompts.jsonl"]
    assert result.exit_code == 0


@pytest.mark.parametrize("deep", [False, True])
def test_models_are_loaded_only_with_the_option(folder: Path, deep: bool) -> None:
    """M13: one tied matrix is expected, and two are stored; only their numbers show if they are equal."""
    tensors = load_file(folder / "model/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model/model.safetensors", metadata={"format": "pt"})
    result = check("sft.yaml", *(["--deep"] if deep else []))
    assert result.exit_code == (2 if deep else 0), result.stderr
    assert ("error[M13]: sft.yaml:1: model: config.json has tie_word_embeddings" in result.stderr) == deep


def test_a_missing_head_is_found_without_loading(folder: Path) -> None:
    foreign_scorer(folder)
    shutil.copy(folder / "model/model.safetensors", folder / "scorer")
    result = check("ppo.yaml")
    assert result.exit_code == 2 and "error[M02]: ppo.yaml:1: scorer has no trained reward head" in result.stderr


def test_t04_and_t05_against_a_stage_that_is_still_to_run(run_folder: Path) -> None:
    foreign_scorer(run_folder)
    (run_folder / "ppo.yaml").write_text("models: {reward: scorer}\n" + (run_folder / "ppo.yaml").read_text())
    assert check(".").exit_code == 0
    replace("sft.yaml", "path: model", "path: model, chat_template: chatml")
    assert "error[T04]: ppo.yaml:1: models.reward has another tokenizer" in check(".").stderr
    replace("reward.yaml", "data:", "model: {chat_template: '{{ messages }}'}\ndata:")
    assert "error[T05]: reward.yaml:1: model.chat_template is not that of the SFT stage" in check(".").stderr


@pytest.mark.full
def test_finished_stages_and_the_output_of_another_config(run_folder: Path) -> None:
    assert rlhf("sft").exit_code == 0
    whole = lines(check(".").stdout)
    assert whole["sft", "sft.yaml"].startswith("config read; output: up to date (")
    assert whole["reward", "model.path"] == "sft: llama, 336 tokens"
    assert check("reward.yaml").exit_code == 0
    replace("sft.yaml", "max_steps: 1", "max_steps: 2")
    assert "error[C15]: sft.yaml: sft holds another run: sft.max_steps 1 -> 2" in check("sft.yaml").stderr
    stale = check(".")  # rlhf run moves it aside
    assert stale.exit_code == 0 and lines(stale.stdout)["reward", "model.path"].startswith("sft, which the sft stage")


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


@pytest.mark.full
def test_static_faults_are_found_quickly_without_torch(run_folder: Path) -> None:
    """Each of the four files has a fault; the cost counts the start of Python too."""
    replace("sft.yaml", "max_steps: 1", "max_stepps: 1")
    replace("reward.yaml", "max_steps: 1", "max_steps: -1")
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: sixty")
    replace("eval.yaml", "best_of: []", "best_of: 2")
    code = "import sys; from rlhf_cli.cli import app\ntry: app(['check', '.'])\n"
    code += "finally: print(sorted({'torch', 'transformers', 'datasets'} & sys.modules.keys()))"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def checked() -> subprocess.CompletedProcess[str]:
        return run_cli.python("-c", code, env=env)

    done = checked()
    assert done.returncode == 2 and done.stdout.splitlines()[-1] == "[]", done.stdout
    errors = [line[6:9] for line in done.stderr.splitlines() if line.startswith("error[")]
    assert errors == ["C01", "C06", "C05", "C05"]
    assert cost(checked) <= 5


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


def test_prompts_that_do_not_fit_have_a_reason(folder: Path) -> None:
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 64\n  response_length: 126")
    result = check("ppo.yaml")
    assert result.exit_code == 2 and "error[D05]: " in result.stderr
    assert "hint: lower ppo.response_length (126 tokens for a response leave 2 to a prompt), or use" in result.stderr
