"""samples.jsonl of a PPO run: whose responses it shows, and a fault while they are scored."""

import pytest
from ppo_folder import (
    ONE,
    PPO,
    fails,
    lines,
    must_succeed,
    ppo,
    settings,
    steps,
    untimed,
    weights,
    write,
)

from rlhf_cli.errors import RLHFError
from rlhf_cli.stages.ppo import sample_tables

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_page")]


def test_eval_prompts_are_shown_in_place_of_the_rollout_and_change_no_training(trained_folder):
    """The first row of a table has a column per quantity of a token."""
    plain = weights(trained_folder)
    heldout = f"data.eval_prompts={trained_folder / 'heldout.jsonl'}"
    assert ppo(trained_folder, *settings(heldout, "num_sample_generations=4"), "--fresh").exit_code == 0
    samples = lines(trained_folder / "ppo/samples.jsonl")
    assert {row["step"] for row in samples} == {1, 2, 3, 4}
    assert all(row["prompt"].startswith("what is") for row in samples)
    assert weights(trained_folder) == plain and (trained_folder / ".old/ppo-1/manifest.json").is_file()
    coefs = {line["step"]: line["objective/kl_coef"] for line in lines(trained_folder / "ppo/metrics.jsonl")}
    first = [row for row in samples if "tokens" in row]
    assert [row["index"] for row in first] == [0] * 4
    for row, tokens in ((row, row["tokens"]) for row in first):
        assert {len(values) for values in tokens.values()} == {row["length"]}
        assert "".join(tokens["text"]).startswith(row["response"])
        assert sum(tokens["kl"]) == pytest.approx(row["kl"], abs=1e-5)
        assert sum(tokens["reward"]) == pytest.approx(row["score"] - coefs[row["step"]] * row["kl"], abs=1e-5)
    assert ppo(trained_folder, *settings("num_sample_generations=0", ONE), "--fresh").exit_code == 0
    assert not (trained_folder / "ppo/samples.jsonl").exists()


def test_generate_ref_response_adds_the_references_responses(trained_folder):
    rows = untimed(trained_folder / "ppo/metrics.jsonl")
    result = ppo(trained_folder, "--fresh", *settings("generate_ref_response=true"))
    assert result.exit_code == 0 and rows == untimed(trained_folder / "ppo/metrics.jsonl")
    samples = lines(trained_folder / "ppo/samples.jsonl")
    assert all(isinstance(row["ref_response"], str) and isinstance(row["ref_score"], float) for row in samples)
    assert any(row["ref_response"] != row["response"] for row in samples) and "its score" in result.stdout
    first = [(row["prompt"], row["ref_response"]) for row in samples if row["step"] == 2]
    assert len(first) == len(set(first)) == 8


def test_r05_in_a_sample_table_saves_nothing_of_an_update_that_is_not_finished(run_folder, monkeypatch):
    rewards = {"mine": {"builtin": "length", "parameters": {"most": 3}}}
    write(run_folder, "ppo", {**PPO, "models": {"sft": "sft_model", "value": "policy_head"}, "rewards": rewards})
    options = ["-s", "output.save_steps=2", "-s", "output.snapshots=4", "-s", "ppo.num_sample_generations=4"]
    plain = sample_tables.experience_to_show

    def broken(components):
        if components.trainer.updates == 3:
            raise RLHFError("R05", "reward `mine` failed", hint="")
        return plain(components)

    with monkeypatch.context() as patch:
        patch.setattr(sample_tables, "experience_to_show", broken)
        fails(ppo(run_folder, *options), "R05", "reward `mine` failed", exit_code=1)
    assert steps(run_folder / "ppo/state") == {2}
    must_succeed(ppo(run_folder, *options), "resumes at step 2 of 4")
    assert steps(run_folder / "ppo/snapshots") >= {1, 2, 3, 4}
    assert {row["step"] for row in lines(run_folder / "ppo/samples.jsonl")} == {1, 2, 3, 4}
