"""Reward sources: ensembles and clips by hand and through `rlhf ppo`; a source that fails; columns of the data.

Modules: `rewards/trial.py`.
"""

import json
import math
import os
import shutil
import sys
from pkgutil import resolve_name
from statistics import fmean

import families
import pytest
import tiny
import torch
import yaml
from ppo_folder import EVAL, PPO, PROMPTS, fails, lines, must_succeed, ppo, rlhf, steps, stop_in_update, weights, write
from run_cli import forked
from transformers import AutoTokenizer

from rlhf_cli import jsonl, progress
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import tokenizers
from rlhf_cli.models.batch import Rollout
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import COMBINE, EnsembleReward
from tests.reference.comparison import compare_run, disagreements

ROLLOUT = Rollout.from_lists([[5], [6]], [[3, 2], [4, 2]], stop_token_id=2)
SCORES = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([3.0, -2.0]), "c": torch.tensor([5.0, 1.0])}


def ensemble(**options) -> EnsembleReward:
    return EnsembleReward({name: lambda rollout, scores=scores: scores for name, scores in SCORES.items()}, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [3.0, -1.0]),
        ({"combine": "min"}, [1.0, -2.0]),
        ({"combine": "mean_minus_std", "std_coef": 2.0}, [3 - 2 * math.sqrt(8 / 3), -1 - 2 * math.sqrt(2)]),
        ({"combine": "mean_minus_std", "std_coef": 0.0}, [3.0, -1.0]),
    ],
)
def test_an_ensemble_by_hand(options, expected):
    scores = ensemble(**options)(ROLLOUT)
    assert scores.score.tolist() == pytest.approx(expected)
    assert scores.disagreement.tolist() == pytest.approx([math.sqrt(8 / 3), math.sqrt(2)])
    assert set(COMBINE) == {"mean", "min", "mean_minus_std"}


def test_an_ensemble_is_one_source_and_its_members_are_logged():
    trainer = tiny.trainer(rewards={"vote": ensemble(combine="min")}, kl_coef=0.0, learning_rate=0.0)
    experience = trainer.make_experience(ROLLOUT)
    assert experience.scores.tolist() == [1.0, -2.0]
    stats = trainer.update(experience)
    assert stats["objective/score/vote"] == -0.5 and stats["objective/score/vote/c"] == 3.0
    assert stats["objective/disagreement/vote"] == pytest.approx((math.sqrt(8 / 3) + math.sqrt(2)) / 2)


@pytest.mark.parametrize(("combine", "bad"), [("mean", float("nan")), ("min", float("inf"))])
def test_r01_a_member_that_is_not_finite(combine, bad):
    """Also if the combined score is finite."""
    broken = {**SCORES, "b": torch.tensor([bad, 0.0])}
    members = {name: lambda rollout, scores=scores: scores for name, scores in broken.items()}
    with pytest.raises(RLHFError, match=r"R01.*score `vote/b`.*row 0"):
        tiny.trainer(rewards={"vote": EnsembleReward(members, combine)}).make_experience(ROLLOUT)


def test_a_source_is_clipped_before_it_is_weighted():
    trainer = tiny.trainer(rewards={"a": lambda rollout: SCORES["a"], "c": lambda rollout: SCORES["c"]})
    trainer.reward_weights, trainer.reward_clips = {"a": 10.0, "c": 1.0}, {"a": 1.5}
    assert trainer.make_experience(ROLLOUT).scores.tolist() == [10 * 1.0 + 5.0, 10 * -1.5 + 1.0]


@pytest.mark.full
def test_an_ensemble_and_a_clip_through_the_stage(run_folder):
    shutil.copytree(run_folder / "reward_model", run_folder / "second")
    votes = {"models": {"one": "reward_model", "two": "second"}, "combine": "mean_minus_std", "std_coef": 0.5}
    votes["clip"] = 0.25
    write(run_folder, "ppo", {**PPO, "rewards": {"vote": votes}})
    must_succeed(ppo(run_folder, "ppo.missing_eos_penalty=null"))
    for row in lines(run_folder / "ppo/metrics.jsonl"):
        assert row["objective/score/vote/one"] == row["objective/score/vote/two"] == row["objective/score/vote"]
        assert row["objective/disagreement/vote"] == 0.0 and abs(row["objective/scores"]) <= 0.25
    config = yaml.safe_load((run_folder / "ppo/config.yaml").read_text())
    assert config["rewards"]["vote"]["models"] == {"one": "../reward_model", "two": "../second"}
    assert (
        "rewards.vote.models.two"
        in must_succeed(rlhf("check", run_folder / "ppo.yaml", "ppo.missing_eos_penalty=null")).stdout
    )
    missing = ppo(run_folder, "--fresh", "-s", "rewards.vote.models.two=./reward_modle")
    fails(missing, "M01", "no such folder reward_modle")


BREAKS = {
    "model": ("rlhf_cli.rewards.model.RetokenizingReward._decode", {"model": "other"}),
    "function": ("len_reward.score", {"function": "len_reward:score"}),
    "async": ("len_reward.later", {"function": "len_reward:later"}),
    "builtin": ("rlhf_cli.rewards.builtin.len", {"builtin": "length", "parameters": {"most": 3}}),
    "pipeline": ("rlhf_cli.rewards.classifier.ClassifierReward.__call__", {"pipeline": "kind", "label": "POSITIVE"}),
}
LENGTHS = """
def score(prompts, responses):
    return [float(len(response)) for response in responses]

async def later(prompts, responses):
    return score(prompts, responses)
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", BREAKS)
def test_r05_a_source_of_any_kind_that_fails_leaves_a_checkpoint_to_resume_from(run_folder, monkeypatch, kind):
    """tests/rewards/test_http.py tests an endpoint, and that the resumed run ends like one without a fault."""
    (run_folder / "len_reward.py").write_text(LENGTHS)
    sys.modules.pop("len_reward", None)
    monkeypatch.syspath_prepend(run_folder)
    jsonl.write_jsonl(run_folder / "other.jsonl", [{"text": "zebra quartz"}])
    shutil.copytree(run_folder / "reward_model", run_folder / "other")
    tokenizers.train_tokenizer(run_folder / "other.jsonl", 270).save_pretrained(run_folder / "other")
    families.write_sentiment_classifier(run_folder / "kind", PROMPTS)
    target, source = BREAKS[kind]
    models = {"sft": "sft_model", "value": "policy_head"}
    write(run_folder, "ppo", {**PPO, "models": models, "rewards": {"mine": source}})
    break_in_the_third_update(monkeypatch, target)
    failed = ppo(run_folder, "-s", "output.save_steps=4")
    fails(failed, "R05", "error[R05]: reward `", "mine", exit_code=1)
    assert steps(run_folder / "ppo/state") == {2}


def break_in_the_third_update(patch, target):
    """From the third update on, `target` raises."""
    holder, _, name = target.rpartition(".")
    owner = resolve_name(holder)
    plain, updates = getattr(owner, name, len), []
    update = PPOTrainer.update
    patch.setattr(PPOTrainer, "update", lambda self, experience: (updates.append(1), update(self, experience))[1])

    def broken(*arguments):
        if len(updates) >= 2:
            raise OSError("the third time")
        return plain(*arguments)

    patch.setattr(owner, name, broken, raising=False)


# Columns of the data: reward functions as people write them for TRL's GRPOTrainer

GRPO = """
def letters(completions, letter, **kwargs):
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(text.count(one)) for text, one in zip(texts, letter)]

async def long(prompts, completion_ids, task, **kwargs):
    assert all("tell me" in (each if isinstance(each, str) else each[-1]["content"]) for each in prompts)
    return [float(len(ids)) if one == "long" else None for ids, one in zip(completion_ids, task)]

never = lambda prompts, responses: [None] * len(prompts)
"""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
SOURCES = {"letters": {"function": "grpo:letters", "weight": 2}, "long": {"function": "grpo:long"}}
SOURCES["never"] = {"function": "grpo:never", "weight": 0}
THINK = {"function": "trl.rewards:think_format_reward"}  # it reads messages only
MODELS, DATA = {"sft": "sft_model", "value": "policy_head"}, {"prompts": "rows.jsonl"}
GRPO_PPO = {**PPO, "models": MODELS, "rewards": SOURCES, "data": DATA}
COLUMNS = [{"letter": "etaoin"[row % 6], "task": ["long", "short"][row % 2]} for row in range(len(PROMPTS))]


@pytest.fixture
def grpo_folder(run_folder, monkeypatch):
    (run_folder / "grpo.py").write_text(GRPO)
    monkeypatch.delitem(sys.modules, "grpo", raising=False)
    monkeypatch.syspath_prepend(run_folder)
    write(run_folder, "ppo", GRPO_PPO)
    write(run_folder, "eval", {**EVAL, "judges": {"letters": "grpo:letters"}, "data": DATA})
    write_rows(run_folder, PROMPTS, COLUMNS)
    return run_folder


def write_rows(folder, prompts, columns):
    rows = [{"prompt": prompt, "n": {}, **more} for prompt, more in zip(prompts, columns, strict=False)]
    jsonl.write_jsonl(folder / "rows.jsonl", rows)


def give_template(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)


@pytest.mark.full
@pytest.mark.parametrize("conversations", [False, True])
def test_a_reward_file_of_grpo_runs_as_it_is_and_resumes_to_the_same_bytes(grpo_folder, conversations):
    if conversations:
        give_template(grpo_folder / "sft_model")
        write_rows(grpo_folder, [[{"role": "user", "content": text}] for text in PROMPTS], COLUMNS)
        write(grpo_folder, "ppo", {**GRPO_PPO, "rewards": {**SOURCES, "think": THINK}})
    more = {"think": 0.0} if conversations else {}
    must_succeed(rlhf("check", grpo_folder / "ppo.yaml"))
    must_succeed(ppo(grpo_folder))
    samples, out = lines(grpo_folder / "ppo/samples.jsonl"), grpo_folder / "ppo"
    for row in samples:
        completion = [{"role": "assistant", "content": row["response"]}] if conversations else row["response"]
        assert row["columns"] == COLUMNS[PROMPTS.index(row["prompt"].removeprefix("user: "))]
        (by_hand,) = resolve_name("grpo.letters")(completions=[completion], letter=[row["columns"]["letter"]])
        long = row["length"] if row["columns"]["task"] == "long" else None
        assert row["scores"] == more | {"letters": by_hand, "long": long, "never": None}
    assert len({row["scores"]["letters"] for row in samples}) > 1 < len({row["scores"]["long"] for row in samples})
    for line in lines(out / "metrics.jsonl"):
        assert 0 < line["objective/unscored/long"] < 1 == line["objective/unscored/never"]
        assert line.keys().isdisjoint({"objective/score/never", "objective/unscored/letters"})
    assert '"metric": "objective/score/never",\n    "value": null' in (out / "manifest.json").read_text()
    straight = weights(grpo_folder)
    stop_in_update(grpo_folder, 3, "--fresh")
    must_succeed(ppo(grpo_folder), "resumes at step 3 of 4")
    assert (weights(grpo_folder), lines(out / "samples.jsonl")) == (straight, samples)
    must_succeed(rlhf("verify", grpo_folder))
    assert disagreements(compare_run(grpo_folder)) == {}


@pytest.mark.full
def test_a_judge_reads_columns_and_scores_every_row(grpo_folder):
    must_succeed(ppo(grpo_folder, "-s", "ppo.total_episodes=8"))
    judge = ["eval", "-c", grpo_folder / "eval.yaml", "--fresh"]
    must_succeed(rlhf(*judge))
    for row in lines(grpo_folder / "eval/samples.jsonl"):
        assert row["scores"]["letters"] == row["response"].count(COLUMNS[row["index"]]["letter"])
    long = "judges={long: 'grpo:long'}"
    says = ("reward `long` returned None for row 1", "judges score every row")
    fails(rlhf(*judge, "-s", long), "R05", *says, exit_code=1)
    write_rows(grpo_folder, PROMPTS, [{}] * 20)
    for command in (["check", grpo_folder / "eval.yaml"], judge):
        fails(rlhf(*command), "D02", 'the function of `letters` takes "letter", but', "further columns: n")


def test_d02_d12_a_column_that_is_missing_or_of_two_types(grpo_folder):
    """Found by `rlhf check`, and by the stage before it trains."""
    misspelt = [{"leter": "e", "task": "a"}], "D02", 'takes "letter"', "columns: n, leter, task", "did you mean leter?"
    mixed = [COLUMNS[0], {"letter": None}, {"letter": 5}], "D12", "rows.jsonl:3: ", "is a number here, text in line 1"
    for columns, code, *says in (misspelt, mixed):
        write_rows(grpo_folder, PROMPTS, columns * 20)
        for result in (rlhf("check", grpo_folder / "ppo.yaml"), ppo(grpo_folder)):
            fails(result, code, *says)
    assert not (grpo_folder / "ppo/metrics.jsonl").exists()


SHAPES = """
def tensors(samples, prompts, outputs, **rest):
    import torch  # here: the trial of a function that does without takes a third of the time
    assert [sample.removeprefix(prompt) for sample, prompt in zip(samples, prompts)] == outputs
    return [torch.tensor(float(len(text))) for text in outputs]

def tensor(queries, prompts, letter):
    import torch
    return torch.tensor([query.removeprefix(prompt).count(one) for query, prompt, one in zip(queries, prompts, letter)])

def older(queries, prompts):
    print("printed")
    assert all("tell me" in prompt for prompt in prompts)
    import numpy as np
    return np.array([query.startswith(prompt) and len(query) > len(prompt) for query, prompt in zip(queries, prompts)])

def whole(queries, prompts, labels=None, **rest):
    import torch
    return {"rewards": torch.ones(len(queries)), "scores": 0, "extra_logs": {}}

def reversed_(response, prompts):
    return [all(one in prompt for one in ("tell", "me")) for prompt in prompts]

def messages(completions, **rest):
    return [len(completion[0]["content"]) for completion in completions]

def one_sample(data_source, solution_str, letter, extra_info=None):
    return float(letter in solution_str)

def by_index(prompts, responses):
    return {index: 1.0 for index in range(len(prompts))}
"""
FAULTS = """
import os, time

def ends(prompts, responses):
    os._exit(7)

def fine(prompts, responses):
    print("printed")
    return [1, None]

def picky(prompts, responses):
    return [float(text.split("=")[1]) for text in responses]

def slow(prompts, responses):
    time.sleep(600)
"""
TAKEN = ("tensors", "tensor", "older", "whole", "reversed_")


@pytest.fixture
def shapes_folder(grpo_folder, monkeypatch):
    (grpo_folder / "shapes.py").write_text(SHAPES)
    monkeypatch.delitem(sys.modules, "shapes", raising=False)
    return grpo_folder


def write_functions(folder, *names):
    write(folder, "ppo", {**GRPO_PPO, "rewards": {name: {"function": f"shapes:{name}"} for name in names}})


@pytest.mark.full
@pytest.mark.parametrize("template", [False, True])
def test_functions_of_openrlhf_and_trlx_run_as_they_are(shapes_folder, template):
    """With a chat template OpenRLHF's queries have its special tokens."""
    if template:
        give_template(shapes_folder / "sft_model")
    write_functions(shapes_folder, *TAKEN)
    if template:
        checked = json.loads(must_succeed(rlhf("check", shapes_folder / "ppo.yaml", "--json")).stdout)
        found = {row["what"]: row["found"] for row in checked["checked"]}
        assert {f"rewards.{name}" for name in TAKEN} <= found.keys()
        assert found["rewards.older"] == "called on 2 rows with a made-up response; scores: 1, 1"
    must_succeed(ppo(shapes_folder, "-s", "ppo.total_episodes=16"))
    for row in lines(shapes_folder / "ppo/samples.jsonl"):
        response = row["response"]
        end = "</s>" if template and row["ended"] else ""
        by_hand = {"tensors": len(response), "tensor": (response + end).count(row["columns"]["letter"])}
        assert row["scores"] == {**by_hand, "older": 1.0, "whole": 1.0, "reversed_": 1.0}
    must_succeed(rlhf("verify", shapes_folder))
    assert disagreements(compare_run(shapes_folder)) == {}


REFUSED = {
    "messages": (
        "raised TypeError",
        "it reads prompts or completions as messages, but the prompts of the data are texts",
    ),
    "one_sample": (
        "returned 0.0, one number for all rows, as a function of one sample",
        "it is called once for all rows",
    ),
    "by_index": ("returned a dict without `rewards`; its keys: 0, 1", "OpenRLHF's dict with `rewards`"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_r05_check_names_why_a_function_cannot_work_before_a_model_is_loaded(shapes_folder, monkeypatch, name):
    write_functions(shapes_folder, name)
    with monkeypatch.context() as patch:
        patch.setattr("rlhf_cli.stages.common.model_loading.load_model", None)
        fails(rlhf("check", shapes_folder / "ppo.yaml"), "R05", "ppo.yaml:", f"reward `{name}`", *REFUSED[name])
    fails(ppo(shapes_folder), "R05", f"reward `{name}`", *REFUSED[name], exit_code=1)
    models = {**EVAL["models"], "ppo": "sft_model"}
    write(shapes_folder, "eval", {**EVAL, "models": models, "data": DATA, "judges": {"mine": f"shapes:{name}"}})
    judge = rlhf("check", shapes_folder / "eval.yaml", "-s", "eval.temperature=1.0", "eval.response_length=4")
    fails(judge, "R05", "eval.yaml:", "reward `mine`", *REFUSED[name])


@pytest.mark.full
def test_a_function_that_another_response_may_not_stop_is_not_checked(grpo_folder, monkeypatch):
    """What it prints, changes or ends is no part of the check."""
    monkeypatch.setattr("rlhf_cli.rewards.trial.SECONDS", 2.0)
    (grpo_folder / "faults.py").write_text(FAULTS)
    names = ("ends", "fine", "picky", "slow")
    write(grpo_folder, "ppo", {**GRPO_PPO, "rewards": {name: {"function": f"faults:{name}"} for name in names}})
    before = {path: path.stat().st_mtime_ns for path in grpo_folder.rglob("*")}
    report = json.loads(must_succeed(rlhf("check", grpo_folder / "ppo.yaml", "--json")).stdout)
    on = "on 2 rows with a made-up response, reward"
    assert report["not_checked"] == [
        f"ppo rewards.ends: {on} `ends` ended its process with status 7",
        f"ppo rewards.picky: {on} `picky` raised IndexError: list index out of range",
        f"ppo rewards.slow: {on} `slow` did not return within 2 s",
    ]
    found = {row["what"]: row["found"] for row in report["checked"]}
    assert found["rewards.fine"] == "called on 2 rows with a made-up response; scores: 1, none"
    after = {path: path.stat().st_mtime_ns for path in grpo_folder.rglob("*") if "__pycache__" not in path.parts}
    assert after.keys() == before.keys() and all(after[path] == before[path] for path in after if path != grpo_folder)


def test_d02_labels_of_openrlhf(shapes_folder):
    (shapes_folder / "labelled.py").write_text("def score(queries, prompts, labels):\n    return [1.0] * len(labels)\n")
    write(shapes_folder, "ppo", {**GRPO_PPO, "rewards": {"mine": {"function": "labelled:score"}}})
    fails(
        rlhf("check", shapes_folder / "ppo.yaml"), "D02", 'takes "labels"', "hint: OpenRLHF fills it from --label_key"
    )


def test_c17_a_function_by_the_name_of_its_file(grpo_folder):
    write(grpo_folder, "ppo", {**GRPO_PPO, "rewards": {"mine": {"function": "grpo.py:letters"}}})
    fails(rlhf("check", grpo_folder / "ppo.yaml"), "C17", "write the module without .py: grpo:letters")


@pytest.mark.parametrize(
    ("module", "function"), [("statistics", "score"), ("statistics", "mean"), ("datasets", "score")]
)
def test_c17_a_file_by_the_name_of_an_installed_module(grpo_folder, module, function):
    (grpo_folder / f"{module}.py").write_text(
        f"def {function}(prompts, responses):\n    return [1.0] * len(responses)\n"
    )
    write(grpo_folder, "ppo", {**GRPO_PPO, "rewards": {"mine": {"function": f"{module}:{function}"}}})
    says = f"{module}.py has the name of an installed module", "hint: rename the file"
    fails(rlhf("check", grpo_folder / "ppo.yaml"), "C17", *says)


@pytest.mark.full
def test_verifiers_as_rewards_and_as_judges(grpo_folder):
    right = {"builtin": "exact_match", "parameters": {"column": "letter", "extract": "[a-z]"}}
    long = {"builtin": "regex", "parameters": {"column": "task"}, "weight": 0, "clip": None}
    sources = {"right": {**right, "weight": 2.0}, "long": long}
    write(grpo_folder, "ppo", {**GRPO_PPO, "rewards": sources})
    by_task = {**EVAL["eval"], "by": "task"}
    write(grpo_folder, "eval", {**EVAL, "judges": {"right": right}, "data": DATA, "eval": by_task})
    must_succeed(rlhf("check", grpo_folder))
    must_succeed(ppo(grpo_folder, "-s", "ppo.total_episodes=8", "ppo.missing_eos_penalty=null"))
    must_succeed(rlhf("verify", grpo_folder))
    assert disagreements(compare_run(grpo_folder)) == {}
    printed = must_succeed(rlhf("eval", "-c", grpo_folder / "eval.yaml")).stdout
    trained, evaluated = (lines(grpo_folder / f"{stage}/samples.jsonl") for stage in ("ppo", "eval"))
    for row in trained + evaluated:
        columns = row["columns"]
        last = [character for character in row["response"] if "a" <= character <= "z"][-1:]
        assert row["scores"]["right"] == float(last == [columns["letter"]])
    assert all(row["score"] == 2 * row["scores"]["right"] for row in trained)
    assert all(row["columns"] == COLUMNS[row["index"]] for row in evaluated)
    by = json.loads((grpo_folder / "eval/report.json").read_text())["by"]
    assert by["column"] == "task" and [group["value"] for group in by["groups"]] == ["long", "short"]
    for group in by["groups"]:
        for model, means in [*group["models"].items(), *((f"best_of_{row['n']}", row) for row in group["best_of"])]:
            rows = [row for row in evaluated if (row["model"], row["mode"]) == (model, "sampled")]
            scores = [row["scores"]["right"] for row in rows if row["columns"]["task"] == group["value"]]
            assert len(scores) == group["n"] and means["judges"]["right"]["mean"] == pytest.approx(fmean(scores))
    page = (grpo_folder / "eval/report.html").read_text()
    assert (
        "Mean by right for each task" in printed and "Data: letter: e, task: long" in page and "for each task" in page
    )
    write_rows(grpo_folder, PROMPTS, [{"letter": {"b": 1}}] * 20)
    result = rlhf("eval", "-c", grpo_folder / "eval.yaml", "--fresh")
    fails(result, "D06", "rows.jsonl:1: ", "a text, a number or a list", "hint: correct it, or remove the row")
    write_rows(grpo_folder, PROMPTS, [*COLUMNS[:4], {"letter": None, "task": "long"}])
    for n, *says in ((4, "ok"), (5, 'rows.jsonl:5: "letter" is null or missing, but a judge must score every row')):
        assert all(text in rlhf("check", grpo_folder / "eval.yaml", "-s", f"eval.n={n}").output for text in says), n
    write_rows(grpo_folder, PROMPTS, [{"letter": {"b": 1}}] * 20)
    for result in (rlhf("check", grpo_folder / "ppo.yaml"), ppo(grpo_folder, "--fresh")):
        fails(result, "D02", 'the function of `long` takes "task", but', "further columns: n, letter")


def test_d02_c17_a_column_of_groups_that_is_missing_or_has_too_many_values(grpo_folder):
    write(grpo_folder, "eval", {**EVAL, "models": {**EVAL["models"], "ppo": "sft_model"}, "data": DATA})
    jsonl.write_jsonl(grpo_folder / "rows.jsonl", [{"prompt": f"tell me {n}", "line": n} for n in range(21)])
    sampling = ["eval.temperature=1.0", "eval.response_length=4"]
    own = ("eval.by names ", "rows.jsonl itself; further columns: line\nhint: copy it to")
    many = ("eval.by: ", "21 different values, more than 20")
    similar = ("eval.by names ", "did you mean line?")
    for by, code, says in (("lin", "D02", similar), ("prompt", "D02", own), ("line", "C17", many)):
        for command in (["check", grpo_folder / "eval.yaml"], ["eval", "-c", grpo_folder / "eval.yaml"]):
            fails(rlhf(*command, "-s", f"eval.by={by}", *sampling), code, *says)


POOL = """import os, signal, time
from multiprocessing import get_context

calls = 0

def length(text):
    time.sleep(0.05)
    return float(len(text))

def pooled(prompts, responses):
    global calls
    calls += 1
    with get_context("fork").Pool(2) as pool:  # its end sends SIGTERM to the workers
        scores = pool.map_async(length, responses)
        if calls == 2:
            os.killpg(0, signal.SIGINT)  # Ctrl-C, which workers get too
        return scores.get()
"""


@pytest.mark.full
def test_a_function_may_fork_workers_and_a_slow_one_is_said(run_folder, monkeypatch, capfd):
    """Workers that had the run's handlers went on after the pool's SIGTERM, and the run hung.

    Workers that ended on Ctrl-C left the pool without their results.
    """
    (run_folder / "pool.py").write_text(POOL)
    config = {**PPO, "rewards": {"pooled": {"function": "pool:pooled"}}, "models": {"sft": "sft_model"}}
    write(run_folder, "ppo", config)
    monkeypatch.setattr(progress, "SLOW_S", 0.1)
    ended = forked("ppo", "-c", run_folder / "ppo.yaml", before=os.setsid)
    assert ended.returncode == 130 and capfd.readouterr().err.count("a second signal") == 1, ended.stderr
    assert ended.stderr.count("reward `pooled` takes more than 0.1 s") == 1, "once, of two calls"
    assert [line["step"] for line in lines(run_folder / "ppo/metrics.jsonl")] == [1, 2]
