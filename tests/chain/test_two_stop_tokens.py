"""A chat model with two stop tokens of which one is the pad token, as Qwen2.5: what it reads, and each row's score.

Modules: `stages/common/reading.py`, `stages/common/model_loading.py`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from ppo_folder import write
from run_cli import must_succeed, rlhf
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli import data, jsonl, runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.models.batch import Rollout
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.stages.common import lifecycle, model_loading, reading
from rlhf_cli.stages.reward import normalize
from tests.reference.comparison import compare_run, disagreements

pytestmark = pytest.mark.full

STOP, PAD = "<|im_end|>", "<|endoftext|>"
THINGS = ["river", "sun", "moon", "tree", "bird", "stone", "cloud", "fish"]
ASKED = [[{"role": "user", "content": f"What is a {thing}?"}] for thing in THINGS]
REWARD = {
    "model": {"path": "sft"}, "data": {"train": "pairs.jsonl"},
    "reward": {"max_steps": 4, "normalize_samples": 256, "length_debias": True, "learning_rate": 1e-3},
}  # fmt: skip
PPO = {
    "models": {"sft": "sft", "reward": "reward"},
    "data": {"prompts": "sft.jsonl"},
    "output": {"snapshots": 0, "save_steps": 40},
    "ppo": {
        "total_episodes": 320, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "response_length": 8,
        "learning_rate": 1e-3, "num_ppo_epochs": 1,
    },
}  # fmt: skip
EVAL = {
    "models": {"sft": "sft", "ppo": "ppo", "reward": "reward"},
    "data": {"prompts": "sft.jsonl"},
    "eval": {"n": 8, "best_of": [], "frontier": False, "interpolate": [], "response_length": 8},
}
BEST_OF = {
    "run": "chosen", "model": {"path": "sft"}, "data": {"train": "sft.jsonl"},
    "best_of": {"reward": "reward", "n": 4, "response_length": 8}, "sft": {"max_steps": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished SFT and reward stages, of a model that ends an answer with each of its stop tokens as often."""
    folder = tmp_path_factory.mktemp("ends")
    answer = [{"role": "assistant", "content": "It shines."}]
    jsonl.write_jsonl(folder / "sft.jsonl", [{"prompt": asked, "completion": answer} for asked in ASKED])
    worse = [{"role": "assistant", "content": "No."}]
    jsonl.write_jsonl(folder / "pairs.jsonl", [{"prompt": p, "chosen": answer, "rejected": worse} for p in ASKED])
    families.write_causal(folder / "base", "qwen2", [f"What is a {thing}? It shines." for thing in THINGS])
    _make_both_ends_likely(folder / "base")
    write(folder, "sft", {"model": {"path": "base"}, "data": {"train": "sft.jsonl"}, "sft": {"max_steps": 1}})
    write(folder, "reward", REWARD)
    must_succeed(rlhf("sft", "-c", folder / "sft.yaml"))
    return folder


def _make_both_ends_likely(base: Path) -> None:
    """Give both stop tokens the same logits, which exceed those of all others at a part of the positions."""
    model, (stop, pad) = AutoModelForCausalLM.from_pretrained(base), ids(base)
    head = model.lm_head.weight.data
    end = 3 * head[stop]
    head *= 0.3
    head[stop] = head[pad] = end
    model.save_pretrained(base)
    assert set(model.generation_config.eos_token_id) == {stop, pad}


def ids(folder: Path) -> tuple[int, int]:
    """The ids of the stop token of the pairs and of the one that is also the pad token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (STOP, PAD)
    return tokenizer.convert_tokens_to_ids(STOP), tokenizer.convert_tokens_to_ids(PAD)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int, float]]:
    """The rows that reward models score from now on, as they were drawn, their responses' lengths, their scores."""
    rows: list[tuple[list[int], int, float]] = []
    plain = ModelReward.__call__

    def recorded(source: ModelReward, rollout: Rollout) -> torch.Tensor:
        scores = plain(source, rollout)
        drawn = [rollout.prompt_tokens(row) + rollout.response_tokens(row) for row in range(len(rollout))]
        rows.extend(zip(drawn, rollout.response_lengths.tolist(), scores.tolist(), strict=True))
        return scores

    monkeypatch.setattr(ModelReward, "__call__", recorded)
    return rows


def by_transformers(folder: Path, rows: list[list[int]], lengths: list[int]) -> list[float]:
    """The scores of transformers' own forward, of rows that end as the pairs did, by the model card's formula."""
    model, (stop, pad) = AutoModelForSequenceClassification.from_pretrained(folder).eval(), ids(folder)
    assert model.config.pad_token_id == pad, "transformers reads a row that ends with it at the token before"
    rows = [[*row[:-1], stop] if row[-1] == pad else row for row in rows]
    with torch.no_grad():
        logits = [float(model(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows]
    fields = {"slope": "reward_length_slope", "mean_length": "reward_length_mean", "mean": "reward_mean"}
    scale = {name: getattr(model.config, field, 0.0) for name, field in fields.items()}
    raw = [score - scale["slope"] * (n - scale["mean_length"]) for score, n in zip(logits, lengths, strict=True)]
    return [(score - scale["mean"]) / getattr(model.config, "reward_std", 1.0) for score in raw]


def check(folder: Path, scored: list[tuple[list[int], int, float]]) -> None:
    rows = [row for row, *_ in scored]
    assert {*ids(folder)} < {row[-1] for row in rows}, "some rows end with each of them, others are cut off"
    lengths = [length for _, length, _ in scored]
    assert len({*lengths}) > 1 and abs(AutoConfig.from_pretrained(folder).reward_length_slope) > 1e-3
    assert [score for *_, score in scored] == pytest.approx(by_transformers(folder, rows, lengths), abs=1e-4)


def test_normalized_on_answers_that_end_as_the_pairs(stages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    plain = normalize.normalize_scores

    def recorded(config: Any, scorer: Any, answers: list[normalize.SampledAnswer], group: Any) -> Any:
        measured.append(([answer.ids for answer in answers], [len(answer.response) for answer in answers]))
        return plain(config, scorer, answers, group)

    monkeypatch.setattr(normalize, "normalize_scores", recorded)
    must_succeed(rlhf("reward", "-c", stages / "reward.yaml"))
    ((rows, lengths),) = measured
    stop, pad = ids(stages / "reward/model")
    assert stop in {row[-1] for row in rows} and pad not in {row[-1] for row in rows}
    scores = torch.tensor(by_transformers(stages / "reward/model", rows, lengths))
    assert (float(scores.mean()), float(scores.std(correction=0))) == pytest.approx((0, 1), abs=1e-4)


@pytest.mark.parametrize("engine", ["hf", pytest.param("graph", marks=pytest.mark.slow)])
def test_forty_updates_of_ppo(stages: Path, engine: str, scored: list[tuple[list[int], int, float]]) -> None:
    must_succeed(rlhf("reward", "-c", stages / "reward.yaml"))
    write(stages, "ppo", PPO)
    must_succeed(rlhf("ppo", "-c", stages / "ppo.yaml", "--fresh", "-s", f"models.engine={engine}"))
    assert len(jsonl_lines(stages / "ppo/metrics.jsonl")) == 40 and len(scored) >= 320
    check(stages / "reward/model", scored)
    stop, pad = ids(stages / "reward/model")
    assert json.loads((stages / "ppo/manifest.json").read_text())["special_tokens"]["stop"] == [stop, pad]


def jsonl_lines(path: Path) -> list[Any]:
    return [row for _, row in jsonl.read_jsonl(path)]


def test_verify_the_evaluation_and_the_best_of_n(stages: Path, scored: list[tuple[list[int], int, float]]) -> None:
    must_succeed(rlhf("reward", "-c", stages / "reward.yaml"))
    write(stages, "ppo", PPO)
    must_succeed(rlhf("ppo", "-c", stages / "ppo.yaml", "--fresh", "-s", "output.save_steps=39"))
    must_succeed(rlhf("verify", stages, "--step", "40"))
    assert disagreements(compare_run(stages, 40)) == {}
    for stage, config in (("eval", EVAL), ("sft", BEST_OF)):
        scored.clear()
        write(stages, stage, config)
        must_succeed(rlhf(stage, "-c", stages / f"{stage}.yaml"))
        check(stages / "reward/model", scored)


@pytest.fixture(scope="module")
def foreign(stages: Path) -> Path:
    """The reward model as another program would have trained it, with ChatML's newline behind each answer."""
    must_succeed(rlhf("reward", "-c", stages / "reward.yaml"))
    shutil.copytree(stages / "reward/model", stages / "foreign")
    config = json.loads((stages / "foreign/config.json").read_text())
    for field in ("reward_at_stop_token", "reward_mean", "reward_std", "reward_length_slope", "reward_length_mean"):
        assert config.pop(field)
    (stages / "foreign/config.json").write_text(json.dumps(config))
    return stages / "foreign"


@pytest.mark.parametrize(
    ("stage", "config", "key"),
    [
        ("ppo", {**PPO, "ppo": {**PPO["ppo"], "total_episodes": 64, "learning_rate": 0}}, "models.reward"),
        (
            "eval",
            {**EVAL, "models": {"sft": "sft", "ppo": "base"}, "eval": {**EVAL["eval"], "temperature": 1.0}},
            "models.reward",
        ),
        ("sft", BEST_OF, "best_of.reward"),
    ],
)
def test_a_foreign_model_reads_what_its_template_writes_behind_an_answer(
    stages: Path, foreign: Path, scored: list[tuple[list[int], int, float]], stage: str, config: Any, key: str
) -> None:
    """As TRL's RewardTrainer trains: on the template's rendering of the whole conversation."""
    (folder := stages / f"with-{stage}").mkdir()
    for name in ("sft", "sft.jsonl", "base"):
        (folder / name).symlink_to(stages / name)
    write(folder, stage, config)
    must_succeed(rlhf(stage, "-c", folder / f"{stage}.yaml", "-s", f"{key}={foreign}"))
    tokenizer, (stop, pad) = AutoTokenizer.from_pretrained(foreign), ids(foreign)
    newline = tokenizer.encode("\n")
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]
    assert tokenizer.apply_chat_template(conversation, return_dict=False)[-2:] == [stop, *newline]
    ended = [row[-1] in (stop, pad) for row, *_ in scored]
    assert any(ended) and not all(ended)
    rendered = [[*row[:-1], stop, *newline] if end else row for (row, *_), end in zip(scored, ended, strict=True)]
    lengths = [length for _, length, _ in scored]
    assert [score for *_, score in scored] == pytest.approx(by_transformers(foreign, rendered, lengths), abs=1e-4)
    if stage == "ppo":
        must_succeed(rlhf("verify", folder))
        assert disagreements(compare_run(folder)) == {}


USER = {"role": "user", "content": "What is a sun?"}
ROWS = {
    "a text": ({"prompt": "What is a sun?"}, [USER]),
    "a system column": (
        {"prompt": "What is a sun?", "system": "Be brief."}, [{"role": "system", "content": "Be brief."}, USER],
    ),
    "UltraChat": (
        {"prompt": "What is a sun?", "prompt_id": "7", "messages": [USER, {"role": "assistant", "content": "A star."}]},
        [USER],
    ),
    "a pair": ({"prompt": "What is a sun?", "chosen": "It shines.", "rejected": "No."}, [USER]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_model_trained_on_conversations_reads_texts_as_turns(stages: Path, tmp_path: Path, name: str) -> None:
    """SFT read messages, PPO the text beside them, and passed it without the template."""
    row, conversation = ROWS[name]
    jsonl.write_jsonl(tmp_path / "prompts.jsonl", [row] * 8)
    write(stages, "ppo", PPO)
    config = load("ppo", stages / "ppo.yaml", overrides=[f"data.prompts={tmp_path / 'prompts.jsonl'}"])
    parent = runs.open_parent(str(stages / "sft"), expect=("sft",), key="models.sft", where="")
    tokenizer = model_loading.load_tokenizer(config, Options(), parent)
    prompts = reading.read_prompts(config, "data.prompts", tokenizer, None, 8)
    rendered = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert prompts and all(prompt.ids == rendered for prompt in prompts)
    assert parent.manifest.prompt_form == "conversation", "also when its data is gone"
    assert lifecycle.manifest_fields(prompts, tokenizer, 1)["prompt_form"] == "conversation", "for the next stage"
    if "chosen" in row:
        (pair, *_) = data.preference_rows(tmp_path / "prompts.jsonl", tokenizer, max_length=None)
        answered = [*conversation, {"role": "assistant", "content": "It shines."}]
        assert tokenizer.decode(pair["chosen_ids"]) + "\n" == tokenizer.apply_chat_template(answered, tokenize=False)


@pytest.mark.parametrize("stage", ["ppo", "eval"])
def test_t10_texts_for_a_chat_model_of_another_program(stages: Path, tmp_path: Path, stage: str) -> None:
    config = {"ppo": PPO, "eval": {**EVAL, "eval": {"n": 8, "temperature": 1.0, "response_length": 8}}}[stage]
    jsonl.write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "What is a sun?"}] * 8)
    models = {"sft": str(stages / "base"), "ppo": str(stages / "base"), "reward": str(stages / "reward")}
    given = {**config, "models": {key: models[key] for key in config["models"]}, "data": {"prompts": "prompts.jsonl"}}
    write(tmp_path, stage, given)
    must_succeed(rlhf("reward", "-c", stages / "reward.yaml"))
    result = must_succeed(rlhf("check", tmp_path / f"{stage}.yaml"), "warning[T10]: ", "data.format: turns")
    assert result.stderr.count("T10") == 1
    for known in ("turns", "plain"):
        write(tmp_path, stage, {**given, "data": {"prompts": "prompts.jsonl", "format": known}})
        assert "T10" not in must_succeed(rlhf("check", tmp_path / f"{stage}.yaml")).stderr
