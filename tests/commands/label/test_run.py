"""`rlhf label` with a tiny run: options, files by hand and of other tools, and training on it.

Modules: `cli/label.py`.
"""

import json
import shutil
import sys
from pathlib import Path

import chat_run
import pytest
from label_run import label
from ppo_folder import as_stage, lines, must_succeed, rlhf, write
from transformers import AutoModelForCausalLM

from rlhf_cli.files import write_json
from rlhf_cli.runs import locks

pytestmark = pytest.mark.full


def test_pairs_go_to_another_tool_and_its_labels_come_back(run: Path) -> None:
    tool = ("--n", 3, "--format", "argilla")
    must_succeed(label(run, *tool, "--export", "pairs.json"))
    records = json.loads(Path("pairs.json").read_text())
    records[2]["responses"] = {"choice": [{"value": "tie", "user_id": "ann"}]}
    Path("done.json").write_text(json.dumps(records))
    result = must_succeed(label(run, *tool, "--import", "done.json"))
    assert "1 new labels" in result.stdout and "label    1 labels in run/labels/people/labels.jsonl" in result.stderr
    (row,) = lines(run / "labels/people/labels.jsonl")
    assert (row["annotator"], row["choice"], row["pair"]) == ("ann", "tie", records[2]["id"])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--order", "best"], "C07"),
        (["--name", "../x"], "S03"),
        (["--annotators", "a,a"], "C11"),
        (["--from", "sft,sft"], "C11"),
        (["--compare", "sft,ppo", "--from", "sft"], "C11"),
        (["--export", "pairs.jsonl"], "D01"),
        (["--import", "x.json"], "C11"),
        (["--format", "argilla"], "C11"),
        (["--format", "argilla", "--import", "x.json", "--export", "y.json"], "C11"),
        (["--export", "run/eval.yaml", "--format", "argilla"], "C15"),
        (["--format", "other", "--import", "x.json"], "C07"),
        (["--seed", "1", "--name", "made"], "C15"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_one_line(run: Path, arguments: list[str], code: str) -> None:
    if "made" in arguments:
        must_succeed(label(run, "--terminal", "--n", 1, "--name", "made"))
    result = label(run, "--terminal", *arguments)
    assert result.exit_code == 2 and f"error[{code}]" in result.stderr and "Traceback" not in result.stderr
    assert "made" in arguments or not (run / "labels").exists()


@pytest.mark.parametrize(
    ("name", "written", "edited", "says"),
    [
        ("labels.jsonl", '"annotator": "me"', '"annotator": 1', ("D20", "labels.jsonl:1: ", "remove it: its pair")),
        ("labels.jsonl", '"annotator": "me"', '"annotator" "me"', ("D03", "labels.jsonl:1:", "remove it: its pair")),
        ("candidates.jsonl", '"sources":', '"sorces":', ("D20", 'jsonl:1: "sources" is missing', "another --name")),
        ("candidates.jsonl", '"answers": [', '"answers": ["x", ', ("D20", '"answers" and "sources" are not', "--name")),
        ("settings.json", "{", "", ("D20", "does not say how the answers of its folder were drawn", "--name")),
    ],
)
def test_a_file_edited_by_hand_is_refused_with_its_line_and_kept(
    run: Path, name: str, written: str, edited: str, says: tuple[str, ...]
) -> None:
    must_succeed(label(run, "--terminal", "--n", 3, typed="1\n2\n"))
    path = run / "labels/people" / name
    text = path.read_text().replace(written, edited, 1)
    path.write_text(text)
    result = label(run, "--terminal", "--n", 3)
    assert result.exit_code == 2 and result.stderr.count("error[") == 1, result.stderr
    assert all(each in result.stderr for each in says), result.stderr
    assert path.read_text() == text


def test_without_the_packages_of_the_page_the_terminal_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "rlhf_cli.commands.label.server", raising=False)
    result = label(run, "--n", 1)
    assert result.exit_code == 2 and "error[E09]" in result.stderr and "--terminal" in result.stderr


def test_a_second_process_on_one_folder_is_refused(run: Path) -> None:
    must_succeed(label(run, "--terminal", "--n", 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "_exclusive", {})  # as in another process
        locks.lock_folder(run / "labels/people")
        patch.setattr(locks, "_exclusive", {})
        result = label(run, "--terminal", "--n", 1)
    assert result.exit_code == 2 and "error[C15]" in result.stderr and result.stderr.count("hint:") == 1


def test_two_models_are_compared_on_held_out_prompts_without_their_names(run: Path) -> None:
    weights = run / "policy"
    shutil.copytree(run / "sft_model", weights)
    model = AutoModelForCausalLM.from_pretrained(weights)
    model.lm_head.weight.data.neg_()
    model.save_pretrained(weights)
    as_stage(run, "ppo", weights, chat_run.PPO, step=4)

    result = must_succeed(label(run, "--compare", "sft,ppo", "--terminal", typed="1\n2\n0\n"))
    rows = lines(run / "labels/compare/labels.jsonl")
    assert {row["prompt"] for row in rows} <= {row["prompt"] for row in lines(run / "heldout.jsonl")}
    assert all(row["sources"] == ["sft", "ppo"] for row in rows) and len(rows) == 3
    shown, _, summary = result.stdout.partition("annotator")
    assert "ppo" not in shown and "ppo is preferred to sft" in summary

    settings = json.loads((run / "labels/compare/settings.json").read_text())
    assert settings.pop("compares") is True
    write_json(run / "labels/compare/settings.json", settings)  # as older versions wrote it
    must_succeed(label(run, "--compare", "sft,ppo", "--terminal"))
    result = must_succeed(label(run, "--terminal", "--n", 1, typed="1\n"))
    assert "next: rlhf init next run run-2, " in result.stderr
    assert "compares" not in json.loads((run / "labels/people/settings.json").read_text())


def test_a_reward_stage_trains_on_the_labels_as_they_stand(run: Path) -> None:
    result = must_succeed(label(run, "--terminal", "--n", 12, typed="1\n" * 6 + "2\n" * 4 + "0\nb\n"))
    assert result.stderr.splitlines()[-1].startswith("next: name them in run/reward.yaml, ")
    must_succeed(label(run, "--export", run / "pairs.jsonl"))
    assert len(lines(run / "pairs.jsonl")) == 10
    shutil.rmtree(run / "reward")
    config = {
        "model": {"path": "sft"},
        "data": {"train": "labels/people"},
        "reward": {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 1, "max_length": 64},
    }
    write(run, "reward", config)
    result = must_succeed(rlhf("reward", "-c", run / "reward.yaml"))
    assert "2 pairs omitted: 1 bad, 1 tie" in result.stderr
    assert "finished already" in must_succeed(rlhf("reward", "-c", run / "reward.yaml")).stderr
    must_succeed(label(run, "--terminal", "--n", 13, typed="1\n"))
    assert "error[C15]" in rlhf("reward", "-c", run / "reward.yaml").stderr  # its data are other ones
