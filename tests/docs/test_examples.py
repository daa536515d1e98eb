"""The pages of rewards, adapters and the config: examples load, and every option is listed with its default."""

import inspect
import re
import runpy
from pathlib import Path

import pytest
import yaml

from rlhf_cli import config
from rlhf_cli.commands import explain
from rlhf_cli.config.ppo import BUILTINS, KINDS, RewardSourceSettings
from rlhf_cli.config.sections import Adapters, LoRA
from rlhf_cli.rewards import builtin
from rlhf_cli.rewards.function import RewardContext, call_reward_fn, make_reward_fn
from rlhf_cli.rewards.signature import TextRows

ROOT = Path(__file__).parents[2]
REWARD_PAGES = ("rewards", "reward-functions", "verifiers", "reward-endpoints", "reward-hacking")
REWARDS = "\n".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in REWARD_PAGES)
ADAPTERS = (ROOT / "docs/adapters.md").read_text(encoding="utf-8")
REWARD_EXAMPLES = re.findall(r"```yaml\n(.*?)```", REWARDS, re.DOTALL)
ADAPTER_EXAMPLES = re.findall(r"```yaml\n# (sft|reward|ppo)\.yaml.*?\n(.*?)```", ADAPTERS, re.DOTALL)


def test_the_page_of_all_keys_is_current() -> None:
    page = runpy.run_path(str(ROOT / "scripts/config_reference.py"))["page"]()
    assert page == (ROOT / "docs/config.md").read_text(encoding="utf-8"), "run: python scripts/config_reference.py"


def test_what_replaces_the_options_of_other_systems_exists() -> None:
    """Each name in the right column of docs/coming-from.md is a key, or the value of one."""
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    names = set()
    for line in page.splitlines():
        if line.startswith("|") and line.count("|") == 3:
            for quoted in re.findall(r"`([^`]+)`", line.split("|")[2]):
                names |= set(re.findall(r"[a-z_.]*_[a-z_]+(?=: |$)|^[a-z]+\.[a-z_]+", quoted))
    known = {key.path for _, key in explain._all_keys()}
    known |= {path.rpartition(".")[2] for path in known}
    assert len(names) > 25
    assert sorted(names - known) == []


@pytest.mark.full
def test_the_page_of_one_gpu_is_current() -> None:
    """Its first example; each takes seven seconds."""
    script = runpy.run_path(str(ROOT / "scripts/one_gpu_page.py"))
    example = script["section"](script["EXAMPLES"][0])
    assert example in (ROOT / "docs/one-gpu.md").read_text(encoding="utf-8"), "run: python scripts/one_gpu_page.py"


@pytest.mark.parametrize("text", REWARD_EXAMPLES)
def test_an_example_of_rewards_loads(text: str, tmp_path: Path) -> None:
    rest = "" if "\nppo:\n" in text else "ppo:\n"
    (tmp_path / "ppo.yaml").write_text(f"{text}{rest}  total_episodes: 64\ndata: {{prompts: p.jsonl}}\n")
    for source in config.load("ppo", tmp_path / "ppo.yaml").rewards.values():
        if source.kind == "builtin":
            reward = make_reward_fn("builtin", source, RewardContext(tmp_path, str))
            record = {"prompt": "p", "answer": "1", "form": "b", "schema": {}, "tests": "assert True"}
            scores = call_reward_fn(reward, TextRows(["p"], ["a b c"], (), (record,)))
            assert len(list(scores)) == 1


def test_every_kind_option_and_parameter_of_rewards_has_an_example() -> None:
    written = [source for text in REWARD_EXAMPLES for source in yaml.safe_load(text)["rewards"].values() if source]
    assert {key for source in written for key in source} == set(RewardSourceSettings.model_fields) >= set(KINDS)
    for name in BUILTINS:
        (line,) = re.findall(rf"^\| `{name}` \|.*$", REWARDS, re.MULTILINE)
        parameters = set(inspect.signature(builtin.builder(name)).parameters)
        examples = [set(source["parameters"]) for source in written if source.get("builtin") == name]
        alternatives = {"numeric": "latex", "regex": "column", "json_schema": "column"}.get(name)  # in a second example
        assert parameters - {alternatives} in examples or [{each} for each in parameters] == examples
        assert parameters == set().union(*examples)
        assert all(f"`{each}`" in line for each in parameters)


@pytest.mark.parametrize(("stage", "text"), ADAPTER_EXAMPLES)
def test_an_example_of_adapters_loads(stage: str, text: str, tmp_path: Path) -> None:
    (tmp_path / f"{stage}.yaml").write_text(text, encoding="utf-8")
    loaded = config.load(stage, tmp_path / f"{stage}.yaml")
    assert (loaded.models if stage == "ppo" else loaded.model).adapters.kind in ("lora", "qlora")


def test_every_key_of_adapters_is_listed_with_its_default() -> None:
    assert {stage for stage, _ in ADAPTER_EXAMPLES} == {"sft", "reward", "ppo"}
    listed = {}
    for names, default in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+?) \|", ADAPTERS, re.MULTILINE):
        keys = re.findall(r"\w+", names)
        listed |= dict(zip(keys, default.split(", ") if ", " in default else [default] * len(keys), strict=True))
    fields = Adapters.model_fields
    assert listed.keys() == fields.keys() == LoRA.model_fields.keys() | {"lora_dropout"}
    defaults = {key: "required" if field.is_required() else field.default for key, field in fields.items()}
    assert {key: yaml.safe_load(text) for key, text in listed.items()} == defaults


@pytest.mark.parametrize(
    ("stage", "text", "rate"),
    [
        ("sft", "model: {path: base, ADAPTERS}\ndata: {train: rows.jsonl}\n", "2e-4"),
        ("reward", "model: {ADAPTERS}\ndata: {train: pairs.jsonl}\n", "1e-4"),
        ("ppo", "models: {ADAPTERS}\ndata: {prompts: a}\nppo: {total_episodes: 8, response_length: 8}\n", "3e-5"),
    ],
)
def test_the_learning_rates_of_adapters(stage: str, text: str, rate: str, tmp_path: Path) -> None:
    sentence = "ten times those of full training: 2e-4 for SFT, 1e-4 for the reward model, 3e-5 for PPO."
    assert sentence in " ".join(ADAPTERS.split())
    (tmp_path / f"{stage}.yaml").write_text(text.replace("ADAPTERS", "adapters: {kind: lora}"))
    found = getattr(config.load(stage, tmp_path / f"{stage}.yaml"), stage).learning_rate
    assert found == float(rate) == pytest.approx(10 * config.keys(stage)[f"{stage}.learning_rate"].default(None))
