"""What `rlhf label` reads of a run: policies, prompts, and how answers are drawn.

Modules: `commands/label/prompts.py`.
"""

import json
from pathlib import Path
from typing import Any

import chat_run
import pytest
from label_run import label
from ppo_folder import PROMPTS, lines, must_succeed, write

from rlhf_cli import jsonl
from rlhf_cli.commands.label.inputs import LabelInputs, LabelOptions, read_inputs
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError

pytestmark = pytest.mark.full


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


def round_before(folder: Path, policy: str | None, prompt: str) -> None:
    """Write what a round leaves: the config of its PPO, and labels of one prompt, and of another one with --compare."""
    folder.mkdir()
    write(folder, "ppo", {**chat_run.PPO, "models": {"policy": policy}})
    (folder / "ppo").mkdir()
    (folder / "ppo.yaml").rename(folder / "ppo/config.yaml")
    row = {"pair": "0:0-1", "answers": ["a", "b"], "sources": ["ppo", "ppo"], "order": [0, 1]}
    said = {"choice": "tie", "annotator": "me", "seconds": 1.0, "time": 1.0}
    for name, labelled in (("people", prompt), ("compare", PROMPTS[9])):
        labels = folder / "labels" / name
        labels.mkdir(parents=True)
        jsonl.write_jsonl(labels / "labels.jsonl", [{"prompt": labelled, **row, **said}])
        (labels / "candidates.jsonl").touch()
        (labels / "settings.json").write_text(json.dumps({"compares": name == "compare"}))


def test_prompts_that_a_round_before_labelled_come_last(run: Path) -> None:
    first = inputs_of(run).rows
    round_before(Path("zero"), None, PROMPTS[0])
    round_before(Path("one"), "../../zero/ppo", PROMPTS[1])
    write(run, "ppo", {**chat_run.PPO, "models": {"policy": "../one/ppo/snapshots/step_000002"}})
    labelled = [row for row in first if row in (0, 1)]
    assert inputs_of(run).rows == [row for row in first if row not in (0, 1)] + labelled != first
    assert sorted(inputs_of(run, seed=1).rows[-2:]) == [0, 1]

    few = must_succeed(label(run, "--by", "short", "--n", len(first) - 8)).stderr
    assert "round before" not in few
    every = must_succeed(label(run, "--by", "short", "--n", len(first))).stderr
    assert f"2 of {len(first)} pairs have prompts that a round before labelled: no others are left" in every


def test_each_model_answers_as_often_as_the_others(run: Path) -> None:
    three = f"sft,{run / 'sft'},{run.resolve() / 'sft'}"
    inputs = inputs_of(run, sources=three)
    assert len(inputs.policies) == inputs.answers == 3
    assert inputs_of(run, sources=three, answers=6).answers == 6
    with pytest.raises(RLHFError, match="C11"):
        inputs_of(run, sources=three, answers=4)


def test_the_sft_model_answers_while_ppo_is_underway(run: Path) -> None:
    (run / "ppo").mkdir()
    (run / "ppo/identity.json").write_text("{}")
    assert [policy.name for policy in inputs_of(run, sources="sft").policies] == ["sft"]
    assert inputs_of(run / "sft", sources="sft").run == run
    with pytest.raises(RLHFError, match="M10"):
        inputs_of(run)


def test_a_judge_that_compares_two_models_has_its_own_folder() -> None:
    assert LabelOptions(compare="sft,ppo").folder_name == "compare"
    assert LabelOptions(compare="sft,ppo", by="judges:short").folder_name == "compare.judges.short"
