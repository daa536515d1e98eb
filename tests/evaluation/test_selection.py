"""`rlhf eval` over PPO's snapshots: the frontier, the recommended policy, and the figure."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ppo_folder import EVAL, PPO, evaluate, lines, must_succeed, ppo, rlhf, write
from safetensors.torch import load_file, save_file

from rlhf_cli import jsonl, runs, statistics
from rlhf_cli.evaluation import selection
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.models import tokenizers
from rlhf_cli.report import frontier
from rlhf_cli.runs.report import Report

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_page")]
# The reward prefers more letters e without a limit; gold prefers a share of one half.
JUDGES = """
def hackable(prompts, responses):
    return [response.count("e") / max(1, len(response)) for response in responses]

def gold(prompts, responses):
    return [1 - 2 * abs(share - 0.5) for share in hackable(prompts, responses)]

def same(prompts, responses):
    return [0.0] * len(responses)
"""
QUICK = {"n": 10, "best_of": [2], "modes": ["sampled"], "interpolate": [], "per_device_batch_size": 64}
PLANTED = {
    **EVAL,
    "models": {"sft": "sft_model", "reward": None},
    "judges": {"reward": "planted_judges:hackable", "gold": "planted_judges:gold", "same": "planted_judges:same"},
    "eval": {**QUICK, "n": 32, "max_kl": None, "select": "gold"},
}
PUSH = {1: 2.0, 2: 4.0, 3: 5.5, 6: 6.5, 8: 7.5, 10: 9.0, 12: 12.0}  # step -> added logit of the letter e


@pytest.fixture(scope="module")
def trained(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PPO run of four updates, and prompts for the evaluation."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(origin, folder)
    (folder / "planted_judges.py").write_text(JUDGES)  # Python imports a module name only once
    for name, ends in (("heldout", "qrstuvwx"), ("others", "ijklmnop")):
        prompts = [f"what is a {a}{b}?" for a in "abcdefghijklmnop" for b in ends]
        jsonl.write_jsonl(folder / f"{name}.jsonl", [{"prompt": prompt} for prompt in prompts])
    weights = load_file(folder / "sft_model/model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 6.0  # equal at every position: `push` uses it
    save_file(weights, folder / "sft_model/model.safetensors", metadata={"format": "pt"})
    write(folder, "ppo", {**PPO, "output": {"save_steps": 4, "snapshots": 2}})
    write(folder, "eval", {**EVAL, "eval": QUICK})
    must_succeed(ppo(folder))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def planted(run: Path) -> Path:
    """The run with snapshots that write e more and more often."""

    def push(path: Path, logit: float) -> None:
        shutil.copytree(run / "sft_model", path, dirs_exist_ok=True)
        token = tokenizers.load_tokenizer(path).convert_tokens_to_ids("e")
        weights = load_file(path / "model.safetensors")
        weights["lm_head.weight"][token, 0] += logit
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})

    shutil.rmtree(run / "ppo/snapshots")
    for step, logit in PUSH.items():
        folder = run / "ppo/snapshots"
        runs.commit_state(folder, f"step_{step:06d}", lambda path, logit=logit: push(path, logit), keep=None)
    write(run, "eval", PLANTED)
    return run


def evaluate_snapshot(run: Path, step: int) -> dict[str, Any]:
    """Return the report of one snapshot that is evaluated as the final model."""
    folder = run / "alone" / str(step)
    sets = {"run": folder, "models.ppo": run / f"ppo/snapshots/step_{step:06d}", "eval.temperature": 0.7}
    sets |= {"models.sft": run / "sft_model", "models.reward": run / "reward_model", "eval.response_length": 8}
    arguments = [text for key, value in sets.items() for text in ("-s", f"{key}={value}")]
    must_succeed(rlhf("eval", "-c", run / "eval.yaml", *arguments))
    return json.loads((folder / "eval/report.json").read_text())


def test_a_point_is_its_snapshot_alone(run: Path) -> None:
    """Bit for bit: every policy has the same noise."""
    report, result = evaluate(run)
    steps = [point["step"] for point in report["frontier"]]
    assert steps == sorted(steps) == runs.state_steps(run / "ppo/snapshots") and len(steps) >= 2
    final = json.loads((run / "ppo/manifest.json").read_text())["step"]
    for point in report["frontier"]:
        alone = report if point["step"] == final else evaluate_snapshot(run, point["step"])
        model = alone["models"]["ppo"]
        assert (point["kl"], point["kl_ci95"], point["reward"]) == (model["kl"], model["kl_ci95"], model["reward_mean"])
        assert point["response_length_mean"] == model["response_length_mean"]
        assert point["win_rate"] == alone["win_rate"]["ppo_vs_sft"]
        for judge, scores in point["judges"].items():
            assert {key: scores.get(key) for key in ("mean", "ci95")} == {"ci95": None, **model["judges"][judge]}
    assert len({point["kl"] for point in report["frontier"]}) == len(steps), "the policies differ"
    models = [row["model"] for row in lines(run / "eval/samples.jsonl")]
    others = {f"ppo_step_{step:06d}" for step in steps if step != final}
    assert set(models) == {"sft", "ppo", "best_of_2"} | others and all(models.count(name) == 10 for name in others)
    rounds = 2 + len(others) + 2
    assert f"eval {rounds}/{rounds} round" in result.stderr and (run / "eval/frontier.svg").is_file()
    assert "no_frontier" not in report and "Frontier: snapshots of the PPO run" in result.stdout
    report, result = evaluate(run, "--fresh", "-s", "eval.frontier=false")
    assert not {"frontier", "no_frontier", "selected"} & report.keys() and "rontier" not in result.stdout
    assert not (run / "eval/recommended.json").exists() and "recommended" not in result.stdout, "there is no choice"
    assert not (run / "eval/frontier.svg").exists()


@pytest.mark.slow  # the choice itself: below
def test_the_recommended_policy_is_good_on_other_prompts(planted: Path) -> None:
    """The reward rises to the end; the policy chosen by gold is within 2 % of the best on other prompts."""

    def golds(report: dict[str, Any]) -> dict[int, float]:
        return {point["step"]: point["judges"]["gold"]["mean"] for point in report["frontier"]}

    write(planted, "eval", {**PLANTED, "eval": {**PLANTED["eval"], "n": 128}})
    report, result = evaluate(planted)
    rewards = [point["reward"] for point in report["frontier"] if point["step"] in PUSH]
    gold, chosen = golds(report), report["selected_step"]
    assert rewards == sorted(rewards) and gold[chosen] == max(gold.values()) > 2 * gold[12], "gold rises and falls"
    rule = f"update {chosen} (the highest mean of gold on 64 prompts among 8 of 8 policies)"
    assert f"recommended: {rule}\n" in result.stdout and report["selected"]["reported_on"] == 64
    recommended = json.loads((planted / "eval/recommended.json").read_text())
    models = recommended.pop("models")
    assert recommended.pop("why") == rule and recommended == report["selected"]
    assert {name: model["path"] for name, model in models.items()} == {"sft": "../sft_model", "ppo": "../ppo"}
    manifest = json.loads((planted / "eval/manifest.json").read_text())
    assert manifest["metrics"]["recommended"]["step"] == chosen and "recommended.json" in manifest["files"]
    elsewhere = golds(evaluate(planted, "--fresh", "-s", f"data.prompts={planted / 'others.jsonl'}")[0])
    assert elsewhere[chosen] >= 0.98 * max(elsewhere.values())
    require = 'eval.require={"selected.kl": "> 9"}'
    by_reward, result = evaluate(planted, "--fresh", "-s", "eval.select=reward", "-s", require)
    assert by_reward["selected_step"] == 12 and gold[12] < 0.5 * gold[chosen]
    (warning,) = [line for line in result.stderr.splitlines() if line.startswith("warning[C18]")]
    assert "eval.select: the reward is what PPO was trained on" in warning
    assert "in report.json, printed above: C18" in result.stdout


def test_the_best_policy_within_a_bound_is_recommended(planted: Path) -> None:
    report, result = evaluate(planted, "-s", "eval.max_kl=4")
    near = {point["step"]: point for point in report["frontier"] if point["kl"] <= 3.5}  # on either half
    assert report["selected_step"] in near and "of 8 policies with a KL of at most 4)\n" in result.stdout
    assert report["selected"]["judges"]["gold"] != near[report["selected_step"]]["judges"]["gold"], "of other prompts"
    own, _ = evaluate(planted, "--fresh", "-s", "eval.select={judge: gold, kl_max: 4}", "-s", "eval.max_kl=9")
    assert own["selected"] == report["selected"], "the limit of eval.select goes before"
    report, _ = evaluate(planted, "--fresh", "-s", "eval.select=same")
    assert report["selected_step"] in (1, 2), "of equal policies the one with the smaller KL, of two on either half"


def test_sft_is_recommended_within_an_unmet_bound_and_damaged_snapshots_are_skipped(planted: Path) -> None:
    snapshots = planted / "ppo/snapshots"
    for step in (1, 2):  # so near to SFT that the mean of their samples' log-ratios may be below 0
        shutil.rmtree(snapshots / f"step_{step:06d}")
    weights = snapshots / "step_000010/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\0")
    (snapshots / "step_000008/state.json").unlink()
    report, result = evaluate(planted, "-s", "eval.max_kl=0.001")
    assert "recommended: the SFT model (none of 4 policies has a KL of at most 0.001)\n" in result.stdout
    assert json.loads((planted / "eval/recommended.json").read_text())["policy"] == "sft"
    assert "selected_step" not in report and [point["step"] for point in report["frontier"]] == [3, 4, 6, 12]
    for step, reason in ((10, "is damaged: model.safetensors"), (8, "was not finished")):
        (line,) = [line for line in result.stderr.splitlines() if f"step_{step:06d} {reason}" in line]
        assert line.startswith("warning[M05]") and line in report["warnings"]


@pytest.mark.parametrize("missing", ["snapshots", "stage"])
def test_the_reason_for_a_missing_frontier(run: Path, missing: str) -> None:
    arguments: list[object] = ["-s", "eval.select=short"]
    folder = run / "ppo/snapshots"
    if missing == "snapshots":
        shutil.rmtree(folder)
    else:
        folder = run / "ppo_model"
        for key, value in (("models.ppo", folder), ("eval.temperature", 1.0), ("eval.response_length", 8)):
            arguments += ["-s", f"{key}={value}"]
        shutil.copytree(run / "ppo/model", folder)
    report, result = evaluate(run, *arguments)
    reason = report["no_frontier"]
    assert reason.startswith(str(folder)) and not {"frontier", "selected", "selected_step"} & report.keys()
    assert result.stdout.count(f"no frontier: {reason}") == 1 and not (run / "eval/frontier.svg").exists()


@pytest.mark.usefixtures("figures")
def test_the_figure_is_deterministic(run: Path, tmp_path: Path) -> None:
    report, _ = evaluate(run, "-s", "eval.select=short")
    drawn = (run / "eval/frontier.svg").read_bytes()
    frontier.draw_file(Report.model_validate(report), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == drawn and drawn.rstrip().endswith(b"</svg>")
    assert drawn.count(b"<!-- short -->") == 1 and drawn.count(b"<!-- reward -->") == 1, "one panel per judge"
    assert f"<!-- recommended: update {report['selected_step']} -->".encode() in drawn
    for end, ticks in ((0.3, [0, 0.1, 0.2]), (40.0, [0, 0.2, 1, 5, 10, 20, 30, 40]), (0.05, [0])):
        assert frontier.ticks(end) == ticks


# The choice of the recommended policy


def planted_answers(model: str, scores: Any, kl: float, **keys: Any) -> EvalResponses:
    """Answers with scores by gold, one to each prompt, and the same KL of all."""
    n = len(scores)
    texts = [""] * n
    named = EvalResponses(model, "sampled", prompts(n), texts, [True] * n, [1] * n, {"gold": list(scores)}, [kl] * n)
    return replace(named, **keys)


def prompts(n: int) -> list[str]:
    return [f"prompt {row}" for row in range(n)]


def test_the_figures_of_the_best_of_nine_equal_policies_have_no_bias() -> None:
    """1000 evaluations of 128 prompts: the reported win rate over SFT is one half; on the choosing half it is above."""
    rng = np.random.default_rng(0)
    halves = selection.split_prompts(prompts(128))
    rates: dict[str, list[float]] = {"choosing": [], "reporting": []}
    for _ in range(1000):
        difficulty = rng.normal(size=128)
        sft, *policies = (
            planted_answers(str(step), (difficulty + rng.normal(size=128)).tolist(), 0.1 * step, step=step)
            for step in range(10)
        )
        chosen = selection.choose(policies, sft, halves.choosing, selection.Rule("gold", None)).policy
        points = np.array(statistics.win_points(chosen.scores["gold"], sft.scores["gold"]))
        rates["choosing"].append(points[halves.choosing].mean())
        rates["reporting"].append(points[halves.reporting].mean())
    assert abs(np.mean(rates["reporting"]) - 0.5) < 0.005
    assert np.mean(rates["choosing"]) > 0.55, "the winner's curse, which the reported figures are without"


def test_prompts_are_split_into_equal_halves_by_their_text() -> None:
    texts = prompts(101)
    halves = selection.split_prompts(texts)
    assert sorted(halves.choosing + halves.reporting) == list(range(101)) and len(halves.choosing) == 50
    backwards = selection.split_prompts(texts[::-1])
    assert {texts[row] for row in halves.choosing} == {texts[::-1][row] for row in backwards.choosing}
    repeated = selection.split_prompts(texts * 2)
    assert [row % 101 for row in repeated.choosing] == halves.choosing * 2, "the rows of a prompt are together"
    assert not selection.split_prompts(["the same"] * 4).choosing


def test_the_highest_mean_within_the_limit_is_taken_and_of_equal_ones_the_nearest() -> None:
    rows = list(range(8))
    sft = planted_answers("sft", [0.5] * 8, 0.0)
    last = planted_answers("ppo", [0.9] * 8, 12.0, step=9)
    share = planted_answers("interpolated_0.5", [0.7] * 8, 3.0, step=9, share=0.5)
    early = planted_answers("ppo_step_000003", [0.7] * 8, 5.0, step=3)

    def chosen(max_kl: float | None) -> tuple[str, str]:
        policy, why = selection.choose([last, early, share], sft, rows, selection.Rule("gold", max_kl))
        return policy.model, why

    assert chosen(None) == ("ppo", "the highest mean of gold on 8 prompts among 3 of 3 policies")
    near = "the highest mean of gold on 8 prompts among 2 of 3 policies with a KL of at most 10"
    assert chosen(10.0) == ("interpolated_0.5", near), "of equal means the lower KL"
    assert chosen(2.0) == ("sft", "none of 3 policies has a KL of at most 2")


def test_the_share_whose_kl_is_near_a_limit() -> None:
    """Of a policy whose KL is 20 share^2.5; none if a share is near the limit, or all are within it."""

    def kl(share: float) -> float:
        return 20 * share**2.5

    known = {share: kl(share) for share in (0.3, 0.5, 0.7, 1.0)}
    for limit in (2.0, 10.0, 15.0):
        share = selection.share_at_limit(known, limit)
        assert share and kl(share) == pytest.approx(0.95 * limit, rel=0.01)
    assert selection.share_at_limit(known, 0.5) == pytest.approx(0.3 * (0.475 / kl(0.3)) ** 0.5, abs=1e-3), "power 2"
    assert selection.share_at_limit(known, 20.0) is None, "all are within the limit"
    assert selection.share_at_limit(known, kl(0.5) * 1.1) is None, "0.5 is near enough"
    assert selection.share_at_limit({0.3: -0.01, 1.0: 4.0}, 1.0) == pytest.approx((0.95 / 4) ** 0.5, abs=1e-3)


def test_sft_is_recommended_if_the_best_policy_is_worse_beyond_chance() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=64)
    sft = planted_answers("sft", scores.tolist(), 0.0)
    for loss, is_sft in ((0.02, False), (1.0, True)):
        policies = [
            planted_answers(name, (scores + rng.normal(-loss, 0.5, 64)).tolist(), kl, step=step)
            for name, kl, step in (("ppo", 4.0, 8), ("ppo_step_000004", 2.0, 4))
        ]
        found = selection.recommend(policies, sft, selection.Rule("gold", 10.0))
        assert found is not None and found.is_sft == is_sft
        if is_sft:
            assert found.step is None and "below SFT's beyond chance" in found.rule
            assert found.win_rate is not None and found.win_rate["gold"].value == 0.5
            assert found.over_last is not None and found.over_last["gold"].value > 0.8


def test_one_prompt_that_differs_is_no_reason_to_recommend_sft() -> None:
    """Too few prompts for an interval do not show that a policy is worse."""
    sft = planted_answers("sft", [0.5] * 40, 0.0)
    scores = [0.4] + [0.5] * 39
    policies = [planted_answers("ppo", scores, 4.0, step=8), planted_answers("ppo_step_000004", scores, 2.0, step=4)]
    policy, _ = selection.choose(policies, sft, list(range(40)), selection.Rule("gold", 10.0))
    assert policy.step == 4


def test_figures_are_of_the_other_half_and_one_policy_is_no_choice() -> None:
    """One policy wins on every prompt that chooses and on no other one: it is chosen, and its figures say so."""
    halves = selection.split_prompts(prompts(40))
    lucky = np.zeros(40)
    lucky[halves.choosing] = 1.0
    sft = planted_answers("sft", [0.5] * 40, 0.0)
    last = planted_answers("ppo", [0.6] * 40, 4.0, step=9)
    policies = [last, planted_answers("ppo_step_000003", lucky.tolist(), 2.0, step=3)]
    found = selection.recommend(policies, sft, selection.Rule("gold", 10.0))
    assert found is not None and (found.step, found.chosen_on, found.reported_on) == (3, 20, 20)
    assert found.judges is not None and found.judges["gold"].mean == 0.0
    assert found.win_rate is not None and found.win_rate["gold"].value == 0.0
    assert found.over_last is not None and found.over_last["gold"].value == 0.0
    assert selection.recommend([last], sft, selection.Rule("gold", 10.0)) is None
