"""docs/rewards.md: every example loads, every kind has one, every parameter of a built-in is told."""

import inspect
import re
from pathlib import Path

import pytest
import yaml

from rlhf_cli import config
from rlhf_cli.config.ppo import KINDS, RewardSource
from rlhf_cli.rewards.function import BUILTIN_REWARDS, RewardContext, make_reward_fn

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
DATA = "data: {prompts: p.jsonl}\n"
EPISODES = "total_episodes: 64\n"


def loaded(folder: Path, text: str) -> config.PPOConfig:
    rest = f"  {EPISODES}{DATA}" if "\nppo:\n" in text else f"{DATA}ppo:\n  {EPISODES}"
    (folder / "ppo.yaml").write_text(text + rest, encoding="utf-8")
    return config.load("ppo", folder / "ppo.yaml")


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_loads(text: str, tmp_path: Path) -> None:
    found = loaded(tmp_path, text)
    for source in found.rewards.values():
        if source.kind == "builtin":
            scores = make_reward_fn("builtin", source, RewardContext(tmp_path, str))(["p"], ["a b c"])
            assert len(list(scores)) == 1


def test_every_kind_and_every_option_has_an_example(tmp_path: Path) -> None:
    written = [source for text in EXAMPLES for source in yaml.safe_load(text)["rewards"].values() if source]
    keys = {key for source in written for key in source}
    assert keys == set(RewardSource.model_fields)
    assert set(KINDS) <= keys


def test_every_parameter_of_a_builtin_is_documented() -> None:
    written = {s["builtin"]: s["parameters"] for text in EXAMPLES for s in yaml.safe_load(text)["rewards"].values()
               if s and len(yaml.safe_load(text)["rewards"]) == len(BUILTIN_REWARDS) and "builtin" in s}  # fmt: skip
    assert written.keys() == BUILTIN_REWARDS.keys()
    for name, ready in BUILTIN_REWARDS.items():
        (line,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
        parameters = set(inspect.signature(ready).parameters)
        assert set(written[name]) == parameters and all(f"`{each}`" in line for each in parameters)
