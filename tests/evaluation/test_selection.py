"""`rlhf eval` over PPO's snapshots: the frontier, the selected policy, and the figure."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ppo_folder import EVAL, PPO, evaluate, lines, must_succeed, ppo, rlhf, write
from safetensors.torch import load_file, save_file

from rlhf_cli import jsonl, runs
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
QUICK = {"n": 10, "best_of": [2], "modes": ["sampled"], "per_device_batch_size": 64}
PLANTED = {
    **EVAL,
    "models": {"sft": "sft_model", "reward": None},
    "judges": {"reward": "planted_judges:hackable", "gold": "planted_judges:gold", "same": "planted_judges:same"},
    "eval": {**QUICK, "n": 32, "select": "gold"},
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


def test_a_point_is_its_snapshot_alone_and_nothing_is_selected_by_default(run: Path) -> None:
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
    assert not {"selected_step", "selected", "no_frontier"} & report.keys() and "selected" not in result.stdout
    assert "Frontier: snapshots of the PPO run" in result.stdout
    report, result = evaluate(run, "--fresh", "-s", "eval.frontier=false")
    assert not {"frontier", "no_frontier"} & report.keys() and "rontier" not in result.stdout
    assert not (run / "eval/frontier.svg").exists()


@pytest.mark.slow  # the bound itself: tests/test_statistics.py
def test_the_selected_policy_is_good_on_other_prompts(planted: Path) -> None:
    """The reward rises to the end; the policy selected by gold is within 2 % of the best on other prompts."""

    def golds(report: dict[str, Any]) -> dict[int, float]:
        return {point["step"]: point["judges"]["gold"]["mean"] for point in report["frontier"]}

    write(planted, "eval", {**PLANTED, "eval": {**PLANTED["eval"], "n": 128}})
    report, result = evaluate(planted)
    rewards = [point["reward"] for point in report["frontier"] if point["step"] in PUSH]
    gold, selected = golds(report), report["selected_step"]
    assert rewards == sorted(rewards) and gold[selected] == max(gold.values()) > 2 * gold[12], "gold rises and falls"
    for point in report["frontier"]:
        scores = point["judges"]["gold"]
        assert scores["from_best"] == pytest.approx(gold[point["step"]] - gold[selected])
        assert point["step"] == selected or scores["from_best_ci95"][1] < 0
    assert report["selected"]["kl"] == next(row["kl"] for row in report["frontier"] if row["step"] == selected)
    assert report["selected"]["within_noise"] == [] and 0 <= report["selected"]["optimism"] < 0.02
    assert f"selected: update {selected}, by the highest mean of gold among 8 of 8 policies\n" in result.stdout
    elsewhere = golds(evaluate(planted, "--fresh", "-s", f"data.prompts={planted / 'others.jsonl'}")[0])
    assert elsewhere[selected] >= 0.98 * max(elsewhere.values())
    require = 'eval.require={"selected.kl": "> 9"}'
    by_reward, result = evaluate(planted, "--fresh", "-s", "eval.select=reward", "-s", require)
    assert by_reward["selected_step"] == 12 and gold[12] < 0.5 * gold[selected]
    (warning,) = [line for line in result.stderr.splitlines() if line.startswith("warning[C18]")]
    assert "eval.select: the reward is what PPO was trained on" in warning
    assert "in report.json, printed above: C18" in result.stdout


def test_the_best_policy_within_a_bound_is_selected(planted: Path) -> None:
    report, result = evaluate(planted, "-s", "eval.select={judge: gold, kl_max: 4}")
    near = [point for point in report["frontier"] if point["kl"] <= 4]
    best = max(near, key=lambda point: point["judges"]["gold"]["mean"])
    assert 1 < len(near) < len(report["frontier"]) and report["selected_step"] == best["step"]
    rule = f"the highest mean of gold among {len(near)} of 8 policies with a KL of at most 4"
    assert report["selected"]["rule"] == rule and f"update {best['step']}, by {rule}\n" in result.stdout
    report, _ = evaluate(planted, "--fresh", "-s", "eval.select=same")
    kl = {point["step"]: point["kl"] for point in report["frontier"]}
    assert report["selected_step"] == min(kl, key=kl.__getitem__), "of equal policies the one with the smaller KL"


def test_an_unmet_bound_is_an_error_and_damaged_snapshots_are_skipped(planted: Path) -> None:
    snapshots = planted / "ppo/snapshots"
    for step in (1, 2):  # so near to SFT that the mean of their samples' log-ratios may be below 0
        shutil.rmtree(snapshots / f"step_{step:06d}")
    weights = snapshots / "step_000010/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\0")
    (snapshots / "step_000008/state.json").unlink()
    command = ("eval", "-c", planted / "eval.yaml", "-s", "eval.select={judge: gold, kl_max: 0.001}")
    results = [rlhf(*command) for _ in range(2)]  # the second one finds the evaluation finished
    for result in results:
        assert result.exit_code == 1 and result.stderr.count("error[R06]: --set eval.select: ") == 1
        assert "0 of 4 policies with a KL of at most 0.001; the lowest KL is" in result.stderr
        assert "selected: none" in result.stdout
    report = json.loads((planted / "eval/report.json").read_text())
    lowest = min(point["kl"] for point in report["frontier"])
    assert all(f"the lowest KL is {lowest:.4g} nats" in result.stderr for result in results)
    assert "selected_step" not in report and [point["step"] for point in report["frontier"]] == [3, 4, 6, 12]
    for step, reason in ((10, "is damaged: model.safetensors"), (8, "was not finished")):
        (line,) = [line for line in results[0].stderr.splitlines() if f"step_{step:06d} {reason}" in line]
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
    assert f"<!-- selected: update {report['selected_step']} -->".encode() in drawn
    for end, ticks in ((0.3, [0, 0.1, 0.2]), (40.0, [0, 0.2, 1, 5, 10, 20, 30, 40]), (0.05, [0])):
        assert frontier.ticks(end) == ticks
