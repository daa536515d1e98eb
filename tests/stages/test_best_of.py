"""`best_of` of sft.yaml: SFT on the reward model's best of n answers, through the real CLI on tiny models."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from ppo_folder import EVAL, evaluate, fails, lines, manifest, must_succeed, rlhf, write
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl_stage import signal_at
from typer.testing import Result

from rlhf_cli import data
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.models.batch import Prompts
from rlhf_cli.models.load import load_causal_lm
from rlhf_cli.ppo.graph_engine import GraphEngine
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages.best_of import select_best
from rlhf_cli.stages.common import engines

BEST_OF = {"n": 5, "reward": "reward_model", "response_length": 8, "temperature": 1.0, "per_device_batch_size": 16}
CONFIG: dict[str, Any] = {
    "model": {"path": "sft_model"}, "data": {"train": "prompts.jsonl", "eval": "heldout.jsonl"}, "best_of": BEST_OF,
    "sft": {"max_steps": 6, "learning_rate": 3e-3, "max_length": 48}, "output": {"save_steps": 2},
}  # fmt: skip


def sft(folder: Path, *sets: str) -> Result:
    return rlhf("sft", "-c", folder / "sft.yaml", *(part for each in sets for part in ("-s", each)))


@pytest.fixture(scope="module")
def straight(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The folder of a finished run, and the command's result. Read-only."""
    folder = Path(shutil.copytree(origin, tmp_path_factory.mktemp("best-of") / "run"))
    write(folder, "sft", CONFIG)
    return folder, must_succeed(sft(folder))


def test_the_best_is_the_first_of_the_highest_scores_and_an_end_counts() -> None:
    rewards = torch.tensor([1.0, 3.0, 3.0, 2.0, 2.5, 2.0])
    ended = torch.tensor([True, True, True, True, False, False])
    scores, best = select_best(rewards, ended, 3, 1.0)
    assert (scores.tolist(), best.tolist()) == ([[1.0, 3.0, 3.0], [2.0, 1.5, 1.0]], [1, 0])
    assert select_best(rewards, ended, 3, 0.25)[1].tolist() == [1, 1]


@pytest.mark.full
def test_it_trains_on_the_answers_that_transformers_scores_highest(straight: tuple[Path, Result]) -> None:
    """Answers are found again by sampling each draw alone, and scoring it without the package."""
    run_folder, result = straight
    answers, complete = lines(run_folder / "sft/best_of.jsonl"), manifest(run_folder, "sft")
    prompts = [row["prompt"] for name in ("prompts", "heldout") for row in lines(run_folder / f"{name}.jsonl")]
    assert [answer["prompt"] for answer in answers] == prompts
    metrics, names = complete["metrics"], ("mean_score", "score", "ended")
    means = [fmean(answer[key] for answer in answers[:20]) for key in names]
    assert [metrics[f"best_of_{key}"] for key in names] == pytest.approx(means) and means[0] < means[1]
    assert metrics["eval_rows"] == 12 and metrics["eval_tokens"] == sum(len(a["completion_ids"]) for a in answers[20:])
    assert f"best of 5 answers to 20 prompts: mean score {means[0]:.2f} -> {means[1]:.2f}; " in result.stderr
    assert complete["parents"]["best_of.reward"]["path"] == "../reward_model" and "sft/best_of.jsonl" not in complete
    assert "best of 5 of that model's own" in (run_folder / "sft/model/README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(run_folder / "sft_model")
    policy = load_causal_lm(run_folder / "sft_model").eval()
    scorer = AutoModelForSequenceClassification.from_pretrained(run_folder / "reward_model").eval()
    for row, (name, number) in {0: ("train", 0), 7: ("train", 7), 25: ("eval", 5)}.items():
        ids = data.encode(tokenizer, prompts[row], None)[0]
        scores, drawn = [], []
        for draw in range(5):
            seeds = (derive_seed(0, f"best_of/{name}", number, draw),)
            batch = replace(Prompts.from_lists([ids]), seeds=seeds, response_length=8)
            rollout = HFEngine(policy, tokenizer.eos_token_id, 0, 1.0).generate(batch)
            drawn.append(rollout.response_tokens(0))
            with torch.no_grad():
                score = float(scorer(torch.tensor([ids + drawn[-1]])).logits[0, 0])
            scores.append(score - (drawn[-1][-1] != tokenizer.eos_token_id))
        best = scores.index(max(scores))
        assert answers[row]["completion_ids"] == drawn[best]
        found = answers[row]["score"], answers[row]["mean_score"]
        assert found == pytest.approx((scores[best], fmean(scores)), abs=1e-4)


@pytest.mark.full
def test_on_a_gpu_graph_draws_the_same_answers(
    run_folder: Path, straight: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run_folder, "sft", CONFIG)
    monkeypatch.setattr(engines, "engine_name", lambda *_, **__: "graph")
    shapes = []
    real = GraphEngine._step

    def step(engine: GraphEngine, rows: int, width: int) -> Any:
        shapes.append(rows)
        return real(engine, rows, width)

    monkeypatch.setattr(GraphEngine, "_step", step)
    must_succeed(sft(run_folder, "sft.max_steps=1"))
    ours, plain = (lines(folder / "sft/best_of.jsonl") for folder in (run_folder, straight[0]))
    assert shapes and [row["completion_ids"] for row in ours] == [row["completion_ids"] for row in plain]


@pytest.mark.full
def test_a_run_that_ends_while_it_samples_or_trains_gives_the_same_bytes(
    run_folder: Path, straight: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run_folder, "sft", CONFIG)
    real, calls = HFEngine.generate, list[int]()

    def generate(engine: HFEngine, prompts: Prompts) -> Any:
        calls.append(len(prompts))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(engine, prompts)

    monkeypatch.setattr(HFEngine, "generate", generate)
    assert sft(run_folder).exit_code and len(calls) == 4 and not (run_folder / "sft/best_of.jsonl").exists()
    with signal_at(3):
        assert sft(run_folder).exit_code == 143
    calls.clear()
    must_succeed(sft(run_folder), "resumes at step 3 of 6", "best of 5 answers to 20 prompts")
    assert not calls, "the answers are read, not sampled again"
    for name in ("best_of.jsonl", "model/model.safetensors"):
        assert (run_folder / "sft" / name).read_bytes() == (straight[0] / "sft" / name).read_bytes()


@pytest.mark.full
@pytest.mark.usefixtures("no_page")
def test_an_evaluation_has_it_as_a_policy_with_a_higher_reward(trained_folder: Path) -> None:
    """On its own prompts, whose best answers it has learned by heart."""
    folder = trained_folder / "best_of"
    folder.mkdir()
    parents = {"model": {"path": "../sft_model"}, "data": {"train": "../prompts.jsonl"}}
    settings = {"max_steps": 150, "learning_rate": 5e-3, "max_length": 48}
    write(folder, "sft", {**parents, "best_of": {**BEST_OF, "reward": "../reward_model", "n": 8}, "sft": settings})
    must_succeed(rlhf("sft", "-c", folder / "sft.yaml"))
    quick = {"n": 20, "best_of": [], "modes": ["sampled"], "temperature": 1.0}
    config = {**EVAL, "data": {"prompts": "prompts.jsonl"}, "policies": {"best_of": "./best_of/sft"}, "eval": quick}
    write(trained_folder, "eval", config)
    report, result = evaluate(trained_folder)
    models, rate = report["models"], report["win_rate"]["best_of_vs_sft"]["reward"]
    assert models["best_of"]["reward_mean"] > models["sft"]["reward_mean"] + 0.5 and rate["value"] > 0.6
    assert models["best_of"]["kl"] > 1 and "PPO over best_of by judge short" in result.stdout


REFUSED = [
    ({"best_of": {"n": 1}}, "C06", "best_of.n"),
    ({"best_of": {"reward": "./gone"}}, "M01", "best_of.reward: no such folder"),
    ({"best_of": {"reward": "./sft_model"}}, "M02", "sft_model has no trained reward head"),
    ({"best_of": {"response_length": 48}}, "C17", "needs room for a prompt in sft.max_length 48"),
    ({"best_of": {"response_length": 40}, "data": {"eval": None}}, "D05", "raise sft.max_length (now 48"),
    ({"sft": {"packing": True}}, "C17", "sft.packing does not go with best_of"),
    ({"model": {"chat_template": "chatml"}}, "C17", "model.chat_template does not go with best_of"),
    ({"model": {"path": None, "new": {"tokenizer": {"train": "prompts.jsonl", "vocab_size": 280}}}}, "C17",
     "model.new does not go with best_of"),
    ({"data": {"train": "judges.jsonl"}}, "D02", "judges.jsonl:1: the row needs {prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "text"), REFUSED)
def test_errors_are_one_line_with_their_code(run_folder: Path, changes: dict[str, Any], code: str, text: str) -> None:
    (run_folder / "judges.jsonl").write_text('{"text": "no prompt"}\n' * 20)
    sections = {name: {**CONFIG.get(name, {}), **keys} for name, keys in changes.items()}
    write(run_folder, "sft", {**CONFIG, **sections})
    result = rlhf("check", run_folder / "sft.yaml")
    fails(result, code, text)
    assert result.stderr.count("error[") == 1


@pytest.mark.full
def test_a_reward_model_with_other_tokens_gets_the_text_encoded_again(run_folder: Path) -> None:
    write(run_folder, "sft", CONFIG)
    tokenizer = json.loads((run_folder / "reward_model/tokenizer.json").read_text())
    (one, i), (other, j) = list(tokenizer["model"]["vocab"].items())[-2:]
    tokenizer["model"]["vocab"] |= {one: j, other: i}
    (run_folder / "reward_model/tokenizer.json").write_text(json.dumps(tokenizer))
    assert "one label; encoded again for it" in must_succeed(rlhf("check", run_folder / "sft.yaml")).stdout
    must_succeed(sft(run_folder), "best_of.reward: has its own tokenizer or template")


def test_check_and_plan_know_what_is_sampled(run_folder: Path) -> None:
    write(run_folder, "sft", {**CONFIG, "data": {"train": "prompts.jsonl"}})
    cut = must_succeed(rlhf("check", run_folder / "sft.yaml", "best_of.truncate_prompt_words=2", "--json")).stdout
    assert next(row["longest"] for row in json.loads(cut)["checked"] if row["what"] == "data.train") < 12
    found = json.loads(must_succeed(rlhf("check", run_folder / "sft.yaml", "--json")).stdout)["checked"]
    assert any(row["what"] == "best_of" and row["found"].startswith("5 answers of up to 8 tokens") for row in found)

    def plan(n: int) -> dict[str, Any]:
        options = "--json", "--flops", "1e9", f"best_of.n={n}"
        return json.loads(must_succeed(rlhf("plan", run_folder / "sft.yaml", *options)).stdout)["stages"]["sft"]

    few, many = plan(5), plan(10)
    rollout, judge, step = few["phases"]
    assert [phase["name"] for phase in few["phases"]] == ["rollout", "judge", "step"]
    assert (few["rows"], few["prompt_tokens"], few["response_tokens"]) == (20, 12, 8)
    scorer = AutoModelForSequenceClassification.from_pretrained(run_folder / "reward_model")
    weights = sum(p.nbytes for model in (load_causal_lm(run_folder / "sft_model"), scorer) for p in model.parameters())
    assert rollout["bytes"]["weights"] == judge["bytes"]["weights"] == pytest.approx(weights, rel=1e-3)
    assert step["bytes"]["weights"] < weights
    for name in ("rollout", "judge"):
        assert many["once_seconds"][name] == pytest.approx(2 * few["once_seconds"][name])
    assert many["step_seconds"] == few["step_seconds"]
