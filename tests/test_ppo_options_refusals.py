"""What the settings refuse, and what a recipe says."""

import ppo_folder as stage
import pytest
from pydantic import ValidationError

from rlhf_cli.config.ppo_options import BELONGS_TO, RECIPES, PPOSettings

# Named here and proven where a run on disk is made (tests/test_stage_ppo.py): generate_ref_response, kl_stop,
# push_to_hub_if_best, and require_reward (tests/test_require_reward.py).


def refused(code: str, **changes) -> dict:
    """The error of that code, out of all that these settings are refused for."""
    with pytest.raises(ValidationError) as caught:
        PPOSettings(**{"total_episodes": 640, **changes})
    found = [error for error in caught.value.errors() if error["type"] == code]
    assert found, caught.value.errors()
    return found[0]


@pytest.mark.parametrize("key,value", [("target", 3.0), ("horizon", 500), ("target_kl", 0.5), ("use_score_norm", True)])
def test_a_key_without_its_switch_is_refused(key, value):
    error = refused("C17", **{key: value})
    switch = BELONGS_TO[key]
    assert error["msg"] == f"{key} has no effect without {switch}" and error["ctx"]["hint"] == f"add {switch}: true"
    assert getattr(PPOSettings(total_episodes=640, **{key: value, switch: True}), key) == value


def test_every_pair_of_key_and_switch_is_tried():
    assert set(BELONGS_TO) == {"target", "horizon", "target_kl", "use_score_norm"}


@pytest.mark.parametrize("warm", [{"warmup_steps": 1}, {"warmup_ratio": 0.1}, {"value_warmup_steps": 3}])
def test_constant_with_a_warmup_is_refused(warm):
    error = refused("C17", lr_scheduler_type="constant", **warm)
    assert error["msg"] == f"{next(iter(warm))} has no effect with lr_scheduler_type constant"
    PPOSettings(total_episodes=64, lr_scheduler_type="constant_with_warmup", **warm)
    PPOSettings(total_episodes=64, lr_scheduler_type="constant", **dict.fromkeys(warm, 0))


def test_adap_kl_ctrl_with_nothing_to_multiply_is_refused():
    assert "which is 0" in refused("C17", adap_kl_ctrl=True, kl_coef=0.0)["msg"]


def test_a_horizon_that_could_turn_the_coefficient_negative_is_refused():
    """A factor of 1 - 0.2 x 64 / horizon must stay above zero: a negative coefficient pays for going astray."""
    for horizon in (1, 12):
        error = refused("C06", adap_kl_ctrl=True, horizon=horizon)
        assert f"horizon {horizon}" in error["msg"] and error["ctx"]["hint"] == "at least 13"
    PPOSettings(total_episodes=64, adap_kl_ctrl=True, horizon=13)


def test_overlong_tokens_beyond_the_limit_are_refused():
    penalty = {"tokens": 9, "factor": 1.0}
    for length in (8, {"min": 8, "max": 20}):
        error = refused("C06", overlong_penalty=penalty, response_length=length)
        assert error["msg"] == "overlong_penalty.tokens 9 is more than response_length 8"
        assert error["ctx"]["hint"] == "at most 8"
    PPOSettings(total_episodes=64, overlong_penalty=penalty, response_length=9)


def test_value_only_updates_that_leave_the_policy_none_are_refused():
    for count in (10, 11):
        error = refused("C17", value_only_updates=count)
        assert error["msg"] == f"value_only_updates {count} leaves no updates for the policy out of 10 updates"
        assert error["ctx"]["hint"] == "at most 9"
    assert PPOSettings(total_episodes=640, value_only_updates=9).value_only_updates == 9
    assert refused("C17", total_episodes=64, value_only_updates=1)["ctx"]["hint"] == "raise total_episodes"


@pytest.mark.training
def test_value_only_updates_are_held_against_passes_over_the_prompts_too(run_folder):
    """20 prompts, 8 an update: one pass is three updates, which only the prompts tell."""
    numbers = {**stage.PPO["ppo"], "total_episodes": None, "num_train_epochs": 1.0}
    stage.write(run_folder, "ppo", {**stage.PPO, "ppo": {**numbers, "value_only_updates": 3}})
    result = stage.ppo(run_folder)
    assert result.exit_code == 2 and "error[C17]" in result.stderr and "hint: at most 2" in result.stderr
    assert "value_only_updates 3 leaves no updates for the policy out of 3 updates" in result.stderr
    assert not (run_folder / "ppo/metrics.jsonl").exists()
    assert stage.ppo(run_folder, "-s", "ppo.value_only_updates=2").exit_code == 0


@pytest.mark.parametrize(
    "key,bad,good",
    [
        ("push_to_hub_if_best", ["name", "a/b/c", "own er/name", True], ["owner/my-model_1.0", None]),
        ("recipe", ["modern", "", None, 1], ["classic", "reasoning"]),
        ("generate_ref_response", ["yes", 1, None], [True, False]),
        ("use_score_scaling", ["yes", 1, None], [True, False]),
        ("adap_kl_ctrl", ["yes", 1, None], [True, False]),
        ("early_stopping", ["yes", 1, None], [True, False]),
        ("score_clip", [0.0, -1.0, True], [0.1, None]),
        ("target", [0.0, -6.0, None], [6.0]),
        ("horizon", [0, -1, 1.5, None], [10000]),
        ("kl_stop", [0.0, -1.0], [15.0, None]),
        ("require_reward", [{}, {"accuracy": 1.1}, {"ece": -0.1}, 0.6], [{"accuracy_low": 0.5}, None]),
        (
            "watchdog",
            [
                {"kl": 0.0},
                {"length": 1.0},
                {"repetition": 1.0},
                {"window": 0},
                {"action": "bark"},
                {"actions": {"x": "stop"}},
            ],
            [None, {}, {"kl": None, "actions": {"judge": "stop"}}, {"action": "raise_kl_coef", "kl_factor": 2.0}],
        ),
        ("cliprange_high", [0.0, -0.1], [0.28, 3.0, None]),
        ("dual_clip", [1.0, 0.5], [3.0, None]),
        ("entropy_coef", [-0.1, None], [0.0, 0.01]),
        ("ptx_coef", [-1.0, None], [0.0, 27.8]),
        ("target_kl", [0.0, -1.0, None], [1.0]),
        ("ratio_threshold", [1.0, 0.5], [1.5, None]),
        ("value_learning_rate", [-1e-6], [0.0, 1e-5, None]),
        ("value_warmup_steps", [-1, 0.5], [0, 3, None]),
        ("value_only_updates", [-1, 0.5, None], [0, 3]),
        ("num_shared_layers", [0, -1, 1.5], [1, None]),
        ("lr_scheduler_type", ["sqrt", None], ["polynomial", "inverse_sqrt"]),
        (
            "overlong_penalty",
            [5, {"tokens": 0, "factor": 1.0}, {"tokens": 5, "factor": 0.0}, {"tokens": 5}, {"tokens": 5, "facter": 1}],
            [None, {"tokens": 5, "factor": 0.5}],
        ),
    ],
)
def test_bounds_of_each_key(key, bad, good):
    for value in bad:
        with pytest.raises(ValidationError) as caught:
            PPOSettings(**{"total_episodes": 640, key: value})
        assert any(key in map(str, error["loc"]) for error in caught.value.errors()), value
    for value in good:
        PPOSettings(**{"total_episodes": 640, key: value})


# Recipes


def test_recipe_classic_is_what_the_keys_say_themselves():
    assert PPOSettings(total_episodes=64, recipe="classic") == PPOSettings(total_episodes=64)
    assert RECIPES["classic"] == {} and set(RECIPES) == {"classic", "reasoning"}


def test_recipe_reasoning_sets_its_defaults_and_nothing_else():
    plain, chosen = (PPOSettings(total_episodes=640, recipe=name).model_dump() for name in ("classic", "reasoning"))
    changed = {key for key in chosen if chosen[key] != plain[key]}
    assert changed == {"recipe", *RECIPES["reasoning"]}, "a recipe names no key that it leaves at its default"
    assert {key: chosen[key] for key in RECIPES["reasoning"]} == {k: v for k, (v, _) in RECIPES["reasoning"].items()}
    # The school in a few numbers (research/peers.md, 4a): Monte-Carlo returns, one epoch, the full softmax.
    assert (chosen["lam"], chosen["num_ppo_epochs"], chosen["temperature"]) == (1.0, 1, 1.0)
    assert chosen["value_learning_rate"] == pytest.approx(9 * chosen["learning_rate"])


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
