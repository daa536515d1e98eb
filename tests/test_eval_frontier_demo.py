"""The demo without a KL penalty: what `eval.select` picks of it is good on prompts that it never saw (minutes)."""

import json
from pathlib import Path
from typing import Any

import pytest
from ppo_folder import lines, rlhf

from rlhf_cli import jsonl

pytestmark = pytest.mark.slow
FAR = ("ppo.kl_coef=0", "ppo.total_episodes=12800", "output.snapshots=16")


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo of seed 1, over-optimised, with its held-out prompts in two halves."""
    folder = tmp_path_factory.mktemp("far") / "run"
    assert rlhf("init", "demo", folder, "--seed", 1).exit_code == 0
    for stage, sets in (("sft", ()), ("reward", ()), ("ppo", FAR)):
        result = rlhf(stage, "-c", folder / f"{stage}.yaml", *(text for one in sets for text in ("-s", one)))
        assert result.exit_code == 0, result.output
    prompts = lines(folder / "data/heldout.jsonl")
    for half in (0, 1):
        jsonl.write_jsonl(folder / f"data/half-{half}.jsonl", prompts[half::2])
    return folder


def judged(far: Path, half: int, judge: str) -> dict[str, Any]:
    sets = [f"data.prompts={far}/data/half-{half}.jsonl", f"eval.select={judge}", "eval.require={}"]
    sets += ["eval.modes=[sampled]", "eval.best_of=[]"]
    result = rlhf("eval", "-c", far / "eval.yaml", "--fresh", *(text for one in sets for text in ("-s", one)))
    assert result.exit_code == 0, result.output
    return json.loads((far / "eval/report.json").read_text())


def golds(report: dict[str, Any]) -> dict[int, float]:
    return {point["step"]: point["judges"]["gold"]["mean"] for point in report["frontier"]}


def test_the_pick_by_gold_is_within_two_percent_of_the_best_on_other_prompts(far: Path) -> None:
    ours, others = judged(far, 0, "gold"), judged(far, 1, "reward")
    assert len(ours["frontier"]) >= 16 and ours["frontier"][-1]["step"] == 200
    picked = ours["selected_step"]
    assert golds(ours)[picked] == max(golds(ours).values())
    assert golds(others)[picked] >= 0.98 * max(golds(others).values())
    sft = others["models"]["sft"]["judges"]["gold"]["mean"]
    assert golds(others)[picked] > sft + 0.15
    assert golds(others)[others["selected_step"]] < sft, "by the reward it would be worse than before PPO"
    assert golds(others)[200] < sft
