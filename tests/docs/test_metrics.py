"""docs/ppo*.md and docs/metrics.md say what the code has: functions, tests, recipes, and every key of every log."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest
import tiny
import torch
from doc_tables import ALGORITHM, ALGORITHM_PAGES, EVALUATION, METRICS, cells, section
from ppo_folder import PPO, PROMPTS, lines, must_succeed, ppo, rlhf, write

from rlhf_cli.config.ppo import RECIPES, PPOSettings
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.function import FunctionReward
from rlhf_cli.rewards.model import EnsembleReward
from rlhf_cli.tracking.logs import MetricsLog
from tests.conftest import World

ROOT = Path(__file__).parents[2]


def keys(*titles: str) -> set[str]:
    """The names in the first column of a section's tables."""
    rows = [row for title in titles for row in cells(section(METRICS + EVALUATION, title))]
    return {name for row in rows for name in re.findall(r"`(.+?)`", row[0])}


def described(key: str, known: set[str]) -> str | None:
    """The entry that stands for a real key: itself, or one with placeholders in capitals."""
    return next((name for name in known if re.fullmatch(re.sub("[A-Z]{2,}", "[^/]+", name), key)), None)


def agree(real: set[str], known: set[str]) -> None:
    """Each real key is described, and each described key is real."""
    found = {key: described(key, known) for key in real}
    assert sorted(key for key, name in found.items() if name is None) == [], "keys that the page lacks"
    assert sorted(known - set(found.values())) == [], "keys that nothing writes"


def logged(path: Path) -> set[str]:
    """The keys of all lines of a log."""
    return {key for line in lines(path) for key in line}


def scores(rollout) -> torch.Tensor:
    return rollout.response_lengths.float()


@pytest.fixture(scope="module")
def ppo_keys(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What stands in PPO's log with every option that adds a key, written by the log itself."""
    some = FunctionReward("some", lambda prompts, responses: [None, *[1.0] * (len(prompts) - 1)], tiny.Words())
    sources = {"length": scores, "vote": EnsembleReward({"one": scores, "two": scores}), "some": some}
    plain, options = tiny.trainer(rewards=sources), {"ptx_coef": 1.0, "rollout_correction": {"mode": "sequence_mask"}}
    parts = (plain.policy, plain.ref, plain.value, sources, plain.engine, tiny.settings(**options))
    stats = PPOTrainer(*parts, ptx=[([5], [6, 2])]).step(tiny.prompts())
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    MetricsLog(path).log(1, stats)
    return logged(path)


def test_every_key_of_ppo_is_described_and_every_described_key_exists(ppo_keys: set[str]) -> None:
    agree(ppo_keys, keys("PPO metrics"))
    assert len(keys("Key metrics")) == 5 and keys("Key metrics") < keys("PPO metrics")


@pytest.mark.full
@pytest.mark.usefixtures("no_page")
def test_every_key_of_a_stages_own_log_is_described(run_folder: Path) -> None:
    (run_folder / "columns.py").write_text("def score(completions, n):\n    return n\n")
    write_jsonl(run_folder / "prompts.jsonl", [{"prompt": prompt, "n": n} for n, prompt in enumerate(PROMPTS)])
    rewards = {"reward": {}, "n": {"function": "columns:score"}}
    write(run_folder, "ppo", {**PPO, "rewards": rewards, "ppo": {**PPO["ppo"], "generate_ref_response": True}})
    assert ppo(run_folder).exit_code == 0
    known = keys("PPO metrics")
    assert [key for key in logged(run_folder / "ppo/metrics.jsonl") if described(key, known) is None] == []
    agree(logged(run_folder / "ppo/samples.jsonl"), keys("samples.jsonl"))
    policies = f"policies={{NAME: {run_folder / 'sft_model'}}}"
    changes = ("eval.select=short", "eval.limit.samples=4", "eval.interpolate=[0.5]", policies)
    options = [part for change in changes for part in ("-s", change)]
    assert rlhf("eval", "-c", run_folder / "eval.yaml", *options).exit_code == 0
    report = json.loads((run_folder / "eval/report.json").read_text())
    # Of a reward stage, of a PPO without snapshots, of a language model as judge.
    others = {"reward_model", "no_frontier", "judge_costs"}
    for name in keys("Keys") - others:
        found = report
        for part in name.split("."):
            found = found[part]


@pytest.mark.full
def test_every_key_of_sft_and_reward_is_described(folder: Path, world: World) -> None:
    real = {}
    for stage, rows in (("sft", "rows"), ("reward", "pairs")):
        changes = [
            f"data.eval={rows}.jsonl",
            *(f"{stage}.{key}" for key in ("logging_steps=1", "eval_steps=1", "max_steps=2")),
        ]
        must_succeed(rlhf(stage, "-c", f"{stage}.yaml", *changes))
        real[stage] = logged(folder / stage / "metrics.jsonl") - {"step", "time_s"}
    agree(real["sft"], keys("SFT metrics"))
    agree(real["reward"], keys("Reward model metrics") | {"lr", "grad_norm", "num_tokens", "epoch", "eval_num_tokens"})


# docs/ppo*.md


@cache
def names(path: Path) -> set[str]:
    """Functions, classes and methods of a file: `name` and `Class.name`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(
    "page", [*ALGORITHM_PAGES, "metrics.md", "report-json.md", "frontier.md", "results/guarantees.md"]
)
def test_every_test_that_is_named_exists(page: str) -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))
    missing = [place for place in named if not (ROOT / place[0]).is_file() or place[1] not in names(ROOT / place[0])]
    assert sorted(missing) == []


def test_every_function_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]+/\w+\.py)(?::([\w.]+))?`", ALGORITHM)
    others = ("tests/", "trl/", "verl/", "openrlhf/", "ppo2/")
    code = [(file, name) for file, name in named if not file.startswith(others)]
    assert len(code) > 30
    for file, name in code:
        path = ROOT / "rlhf_cli" / file
        assert path.is_file() and (not name or name in names(path)), f"{file}:{name}"


def test_every_option_of_the_algorithm_is_on_a_page() -> None:
    mentioned = set(re.findall(r"\w+", ALGORITHM))
    outside = {"bf16", "fp16", "num_sample_generations", "generate_ref_response", "local_rollout_forward_batch_size"}
    trainer = {"num_train_epochs", "warmup_steps", "warmup_ratio", "lr_scheduler_type", "weight_decay"}
    adam = {key for key in PPOSettings.model_fields if key.startswith("adam_")}
    assert sorted(set(PPOSettings.model_fields) - mentioned - outside - trainer - adam) == []


def test_the_recipes_are_the_table_of_ppo_md() -> None:
    rows = {row[0].strip("`"): row[1:] for row in cells(section(ALGORITHM, "Recipes"))}
    assert rows.keys() == RECIPES["reasoning"].keys() | RECIPES["frontier"].keys()
    for key in rows:
        values = [RECIPES[name].get(key, (PPOSettings.model_fields[key].default,))[0] for name in RECIPES]
        texts = ["none" if each is None else f"{each:g}" if isinstance(each, float) else str(each) for each in values]
        assert rows[key] == texts, key
