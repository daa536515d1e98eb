"""What PPOSettings rejects, and the recipes."""

import ppo_folder as stage
import pytest
from pydantic import ValidationError

from rlhf_cli.config.ppo import BELONGS_TO, RECIPES, PPOSettings


def settings(**changes) -> PPOSettings:
    return PPOSettings(**{"total_episodes": 640, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"adap_kl_ctrl": True, "horizon": 13},
        {"value_only_updates": 9},
        {"overlong_penalty": {"tokens": 9, "factor": 1.0}, "response_length": 9},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1},
        {"lr_scheduler_type": "constant", "warmup_steps": 0, "value_warmup_steps": 0},
        {"fp16": False},
    ],
)
def test_values_at_the_limit_are_accepted(changes):
    settings(**changes)


SWITCHED = {"target": 3.0, "horizon": 500, "target_kl": 0.5, "use_score_norm": True}


@pytest.mark.parametrize("key,switch", BELONGS_TO.items())
def test_a_key_without_its_switch_is_rejected(key, switch):
    with pytest.raises(ValidationError) as caught:
        settings(**{key: SWITCHED[key]})
    (error,) = caught.value.errors()
    assert error["type"] == "C17" and error["msg"] == f"{key} has no effect without {switch}"
    assert error["ctx"]["hint"] == f"add {switch}: true"
    assert getattr(settings(**{key: SWITCHED[key], switch: True}), key) == SWITCHED[key]


GROUPS = {"advantage": "rloo", "num_samples_per_prompt": 4}
OF_VALUES = {
    "gamma": 0.9, "lam": 1.0, "cliprange_value": 0.5, "vf_coef": 1.0, "value_learning_rate": 1e-5,
    "value_warmup_steps": 0, "value_only_updates": 1,
}  # fmt: skip


@pytest.mark.parametrize("key,value", OF_VALUES.items())
def test_a_key_of_the_value_model_needs_one(key, value):
    with pytest.raises(ValidationError, match=f"{key} has no effect with advantage rloo"):
        settings(**GROUPS, **{key: value})
    settings(**{key: value}, lr_scheduler_type="linear")


def test_groups_need_two_responses_and_leave_a_recipe_only_what_has_an_effect():
    with pytest.raises(ValidationError, match="whiten_rewards would reward or penalize the length"):
        settings(**GROUPS, whiten_rewards=True)
    with pytest.raises(ValidationError, match="compares the responses to a prompt, and num_samples_per_prompt is 1"):
        settings(advantage="grpo")
    plain, chosen = (settings(recipe=name, **GROUPS).model_dump() for name in ("classic", "reasoning"))
    changed = {key for key in chosen if chosen[key] != plain[key]}
    assert changed == {"recipe", *RECIPES["reasoning"]} - OF_VALUES.keys()


@pytest.mark.parametrize("advantage,value,says", [
    ("gae", "none", "ppo.advantage gae needs a value model"),
    ("rloo", "reward", "models.value reward has no effect with ppo.advantage rloo"),
    ("rloo", None, ""), ("gae", "policy_head", ""),
])  # fmt: skip
def test_models_value_and_the_advantage_fit(run_folder, advantage, value, says):
    written = {} if value is None else {"value": value}
    numbers = {**stage.PPO["ppo"], "advantage": advantage, "num_samples_per_prompt": 2}
    stage.write(run_folder, "ppo", {**stage.PPO, "models": {**stage.PPO["models"], **written}, "ppo": numbers})
    result = stage.ppo(run_folder, "--dry-run")
    if says:
        stage.fails(result, "C17", says)
    else:
        assert f"  value: {value or 'none'}" in stage.must_succeed(result).stdout


@pytest.mark.parametrize(("source", "value"), [({"builtin": "repetition"}, "policy_head"), (None, "reward")])
def test_without_a_reward_model_the_value_model_is_a_head_on_the_policy(run_folder, source, value):
    config = {**stage.PPO, "rewards": {"fresh": {"builtin": "repetition"}, "reward": source}}
    config["models"] = {name: path for name, path in config["models"].items() if name != "value"}
    stage.write(run_folder, "ppo", config)
    assert f"  value: {value}\n" in stage.must_succeed(stage.ppo(run_folder, "--dry-run")).stdout


@pytest.mark.full
def test_value_only_updates_are_compared_with_passes_over_the_prompts(run_folder):
    """20 prompts, 8 per update: one pass is three updates, which only the prompts determine."""
    numbers = {**stage.PPO["ppo"], "total_episodes": None, "num_train_epochs": 1.0}
    stage.write(run_folder, "ppo", {**stage.PPO, "ppo": {**numbers, "value_only_updates": 3}})
    result = stage.ppo(run_folder)
    assert result.exit_code == 2 and "error[C17]" in result.stderr and "hint: at most 2" in result.stderr
    assert "value_only_updates 3 leaves no updates for the policy out of 3 updates" in result.stderr
    assert not (run_folder / "ppo/metrics.jsonl").exists()
    assert stage.ppo(run_folder, "-s", "ppo.value_only_updates=2").exit_code == 0


SWITCH = (["yes", 1, None], [True, False])
BOUNDS = {
    "kl_coef": ([-1, float("nan"), True], [0.0]),
    "gamma": ([1.5], [0.5]),
    "temperature": ([0], [2.0]),
    "cliprange": ([1.0], [0.9]),
    "num_ppo_epochs": (["4"], [1]),
    "top_k": ([5], []),
    "push_to_hub_if_best": (["name", "a/b/c", "own er/name", True], ["owner/my-model_1.0", None]),
    "recipe": (["modern", "", None, 1], ["classic", "reasoning", "frontier"]),
    "generate_ref_response": SWITCH,
    "use_score_scaling": SWITCH,
    "adap_kl_ctrl": SWITCH,
    "early_stopping": SWITCH,
    "score_clip": ([0.0, -1.0, True], [0.1, None]),
    "target": ([0.0, -6.0, None], [6.0]),
    "horizon": ([0, -1, 1.5, None], [10000]),
    "kl_stop": ([0.0, -1.0], [15.0, None]),
    "max_logprob_gap": ([0.0, -0.1], [0.01, 3.0]),
    "rollout_correction": ([{}, {"mode": "mask"}, {"mode": "sequence_mask", "cap": 1.0}], [{"mode": "sequence_mask"}]),
    "require_reward": ([{}, {"accuracy": 1.1}, {"ece": -0.1}, 0.6], [{"accuracy_low": 0.5}, None]),
    "watchdog": (
        [
            {"kl": 0.0}, {"length": 1.0}, {"repetition": 1.0}, {"window": 0}, {"action": "bark"},
            {"actions": {"x": "stop"}},
        ],
        [None, {}, {"kl": None, "actions": {"judge": "stop"}}, {"action": "raise_kl_coef", "kl_factor": 2.0}],
    ),
    "cliprange_high": ([0.0, -0.1], [0.28, 3.0, None]),
    "dual_clip": ([1.0, 0.5], [3.0, None]),
    "entropy_coef": ([-0.1, None], [0.0, 0.01]),
    "average": ([0.0, 1.0, True], [0.01, 0.99, None]),
    "ptx_coef": ([-1.0, None], [0.0, 27.8]),
    "target_kl": ([0.0, -1.0, None], [1.0]),
    "ratio_threshold": ([1.0, 0.5], [1.5, None]),
    "value_learning_rate": ([-1e-6], [0.0, 1e-5, None]),
    "value_warmup_steps": ([-1, 0.5], [0, 3, None]),
    "value_only_updates": ([-1, 0.5, None], [0, 3]),
    "num_shared_layers": ([0, -1, 1.5], [1, None]),
    "lr_scheduler_type": (["sqrt", None], ["polynomial", "inverse_sqrt"]),
    "overlong_penalty": (
        [5, {"tokens": 0, "factor": 1.0}, {"tokens": 5, "factor": 0.0}, {"tokens": 5}, {"tokens": 5, "facter": 1}],
        [None, {"tokens": 5, "factor": 0.5}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", BOUNDS)
def test_bounds_of_each_key(key):
    bad, good = BOUNDS[key]
    for value in bad:
        with pytest.raises(ValidationError) as caught:
            settings(**{key: value})
        assert any(key in map(str, error["loc"]) for error in caught.value.errors()), value
    for value in good:
        settings(**{key: value})


# Recipes


def test_recipe_classic_is_the_defaults():
    assert PPOSettings(total_episodes=64, recipe="classic") == PPOSettings(total_episodes=64)
    assert RECIPES["classic"] == {} and set(RECIPES) == {"classic", "reasoning", "frontier"}


@pytest.mark.parametrize("name,times", [("reasoning", 9), ("frontier", 5)])
def test_a_recipe_sets_its_defaults_and_nothing_else(name, times):
    plain, chosen = (PPOSettings(total_episodes=640, recipe=recipe).model_dump() for recipe in ("classic", name))
    changed = {key for key in chosen if chosen[key] != plain[key]}
    assert changed == {"recipe", *RECIPES[name]}, "a recipe names no key that it leaves at its default"
    defaults = {key: value for key, (value, _) in RECIPES[name].items() if key != "value_learning_rate"}
    assert {key: chosen[key] for key in defaults} == defaults
    assert chosen["value_learning_rate"] == pytest.approx(times * chosen["learning_rate"])


def test_the_value_models_rate_of_the_frontier_follows_the_policys():
    assert settings(recipe="frontier", learning_rate=1e-4).value_learning_rate == 5e-4
    assert settings(recipe="frontier", learning_rate=1e-4, value_learning_rate=1e-5).value_learning_rate == 1e-5
    assert settings(recipe="frontier", fsdp=True).average is None


@pytest.mark.parametrize("key", RECIPES["reasoning"])
def test_a_written_key_wins_over_the_recipe(key):
    written = PPOSettings(total_episodes=64).model_dump()[key]
    chosen = PPOSettings(**{"total_episodes": 64, "recipe": "reasoning", key: written}).model_dump()
    others = PPOSettings(total_episodes=64, recipe="reasoning").model_dump()
    assert chosen == {**others, key: written}


@pytest.mark.parametrize(
    "written,warmup",
    [({}, 0.03), ({"warmup_steps": 5}, None), ({"lr_scheduler_type": "constant"}, None), ({"warmup_ratio": 0.1}, 0.1)],
)
@pytest.mark.parametrize("mode", ["python", "json"])
def test_a_recipes_settings_written_out_are_the_same_settings(written, warmup, mode):
    """Its warm-up gives way to a written one, and to a schedule that has none."""
    chosen = PPOSettings(total_episodes=64, recipe="reasoning", **written)
    assert PPOSettings(**chosen.model_dump(mode=mode)) == chosen and chosen.warmup_ratio == warmup
