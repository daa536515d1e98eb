"""`rlhf label` with a tiny run: what is drawn, at the terminal, and training on it.

Modules: `cli/label.py`, `commands/label/at_terminal.py`, `commands/label/candidates.py`, `commands/label/inputs.py`.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import chat_run
import pytest
from label_run import label
from ppo_folder import as_stage, lines, must_succeed, rlhf, write
from transformers import AutoModelForCausalLM

from rlhf_cli import jsonl
from rlhf_cli.commands.label import candidates
from rlhf_cli.commands.label.inputs import LabelInputs, LabelOptions, read_inputs
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError
from rlhf_cli.files import write_json
from rlhf_cli.runs import locks

pytestmark = pytest.mark.full


@pytest.fixture
def run(label_origin: Path, here: Path) -> Path:
    """A copy of the run in the working directory."""
    return Path(shutil.copytree(label_origin, "run"))


def test_a_label_is_stored_for_each_key_and_undo_shows_the_pair_again(run: Path) -> None:
    result = must_succeed(label(run, "--terminal", "--n", 4, typed="1\n2 short, odd\nu\n0\nx\nb\nq\n"))
    rows = lines(run / "labels/people/labels.jsonl")
    assert [row.get("choice", "undo") for row in rows][2:] == ["undo", "tie", "bad"]
    assert rows[1]["tags"] == ["short", "odd"] and rows[1]["pair"] == rows[2]["undo"] == rows[3]["pair"]
    assert "3 of 4 labels" in result.stderr and "sft" not in result.stdout
    result = must_succeed(label(run, "--terminal", "--n", 4, typed="s\n1\n"))
    assert "4 of 4 labels" in result.stderr and len(lines(run / "labels/people/labels.jsonl")) == 6


def test_a_killed_draw_goes_on_with_the_same_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "BATCH_PROMPTS", 4)
    path = run / "labels/people/candidates.jsonl"
    must_succeed(label(run, "--terminal", "--n", 12))
    whole = path.read_bytes()
    assert whole.count(b"\n") >= 12
    for kept in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        must_succeed(label(run, "--terminal", "--n", 12))
        assert path.read_bytes() == whole
    must_succeed(label(run, "--terminal", "--n", 16))
    assert path.read_bytes().startswith(whole)


def test_equal_and_empty_answers_are_left_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    answers = ["a", " a", "", "b"]
    drawn = [candidates.Candidate(5, "p", answers, ["sft"] * 4, [True] * 4, {})]
    assert [pair.name for pair in candidates.ordered_pairs(drawn, "random", 9)] == ["5:0-3", "5:1-3"]
    candidates.report_unusable(drawn)
    assert "4 of 6 pairs omitted: 3 empty, 1 equal answers" in capsys.readouterr().err


def test_uncertain_pairs_come_first() -> None:
    def candidate(row: int, **scores: list[float]) -> candidates.Candidate:
        return candidates.Candidate(row, "p", ["a", "b"], ["sft"] * 2, [True] * 2, scores)

    one_model = [candidate(0, reward=[3.0, 1.0]), candidate(1, reward=[0.1, 0.2]), candidate(2, reward=[0.0, 1.0])]
    assert [pair.name[0] for pair in candidates.ordered_pairs(one_model, "uncertain", 2)] == ["1", "2"]
    ensemble = [candidate(0, a=[1.0, 0.0], b=[1.0, 0.1]), candidate(1, a=[1.0, 0.0], b=[0.0, 5.0])]
    assert [pair.name[0] for pair in candidates.ordered_pairs(ensemble, "uncertain", 2)] == ["1", "0"]


def test_uncertain_order_scores_with_the_reward_model_of_the_run(run: Path) -> None:
    must_succeed(label(run, "--terminal", "--n", 3, "--order", "uncertain"))
    rows = lines(run / "labels/people/candidates.jsonl")
    assert len(rows) >= 12 and all(len(row["scores"]["reward"]) == 2 for row in rows)


def test_held_out_prompts_are_asked_only_to_compare(run: Path) -> None:
    text = (run / "heldout.jsonl").read_text() + '{"prompt": "what is new?"}\n'
    (run / "more.jsonl").write_text(text)
    result = must_succeed(label(run, "--terminal", "--prompts", run / "more.jsonl"))
    assert "6 of 7 prompts omitted" in result.stderr
    assert [row["prompt"] for row in lines(run / "labels/people/candidates.jsonl")] == ["what is new?"]


def inputs_of(run: Path, **options: Any) -> LabelInputs:
    return read_inputs(run, LabelOptions(**options), Options())


def test_held_out_transcripts_of_a_model_without_a_template_are_left_out(run: Path) -> None:
    asked = [{"prompt": f"\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: what is {x}?\n\nAssistant:"} for x in "ab"]
    jsonl.write_jsonl(run / "heldout.jsonl", asked[:1])
    jsonl.write_jsonl(run / "more.jsonl", asked)
    assert inputs_of(run, prompts=run / "more.jsonl").rows == [1]


def test_held_out_prompts_that_are_not_in_the_cache_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "eval", {**chat_run.EVAL, "data": {"prompts": "nobody/nothing-of-this-name"}})
    inputs_of(run)
    assert "nobody/nothing-of-this-name is not in the cache: its prompts are not omitted" in capsys.readouterr().err


def test_a_model_trained_on_conversations_gets_texts_as_turns(tmp_path: Path) -> None:
    run = chat_run.make(tmp_path, template="chatml")
    jsonl.write_jsonl(run / "prompts.jsonl", [{"prompt": "tell me about the sea"}])
    write(run, "ppo", chat_run.PPO)
    inputs = inputs_of(run)
    assert inputs.tokenizer.decode(inputs.prompts[0].ids).startswith("<|im_start|>user\ntell me about the sea")


def test_each_model_answers_as_often_as_the_others(run: Path) -> None:
    three = f"sft,{run / 'sft'},{run.resolve() / 'sft'}"
    inputs = inputs_of(run, sources=three)
    assert len(inputs.policies) == inputs.answers == 3
    assert inputs_of(run, sources=three, answers=6).answers == 6
    with pytest.raises(RLHFError, match="C11"):
        inputs_of(run, sources=three, answers=4)


def test_a_judge_that_compares_two_models_has_its_own_folder() -> None:
    assert LabelOptions(compare="sft,ppo").folder_name == "compare"
    assert LabelOptions(compare="sft,ppo", by="judges:short").folder_name == "compare.judges.short"


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


def test_a_file_edited_by_hand_is_refused_with_its_line_and_kept(run: Path) -> None:
    must_succeed(label(run, "--terminal", "--n", 3, typed="1\n2\n"))
    path = run / "labels/people/labels.jsonl"
    edited = path.read_text().replace('"annotator": "me"', '"annotator": 1', 1)
    path.write_text(edited)
    result = label(run, "--terminal", "--n", 3)
    assert result.exit_code == 2 and "error[D20]" in result.stderr and "labels.jsonl:1" in result.stderr
    assert path.read_text() == edited


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
    must_succeed(label(run, "--terminal", "--n", 1, typed="1\n"))
    assert "compares" not in json.loads((run / "labels/people/settings.json").read_text())


def test_a_reward_stage_trains_on_the_labels_as_they_stand(run: Path) -> None:
    must_succeed(label(run, "--terminal", "--n", 12, typed="1\n" * 6 + "2\n" * 4 + "0\nb\n"))
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
