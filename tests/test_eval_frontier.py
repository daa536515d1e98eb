"""`rlhf eval` over PPO's snapshots: the frontier, what is picked of it, and the figure."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ppo_folder import EVAL, PPO, lines, ppo, rlhf, write
from safetensors.torch import load_file, save_file

from rlhf_cli import jsonl, runs
from rlhf_cli.evaluation.aggregate import win_rates
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.models import tokenizers

pytestmark = [pytest.mark.training, pytest.mark.usefixtures("no_page")]
# The planted reward likes the letter e without end; the truth wants it to be half of a response.
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
PUSH = {1: 2.0, 2: 4.0, 3: 5.5, 6: 6.5, 8: 7.5, 10: 9.0, 12: 12.0}  # step -> how far the snapshot's policy is hacked


@pytest.fixture(scope="module")
def trained(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of PPO of four updates, and prompts to evaluate on."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(origin, folder)
    (folder / "planted_judges.py").write_text(JUDGES)  # a name of its own: Python imports one only once
    for name, ends in (("heldout", "qrstuvwx"), ("others", "ijklmnop")):
        prompts = [f"what is a {a}{b}?" for a in "abcdefghijklmnop" for b in ends]
        jsonl.write_jsonl(folder / f"{name}.jsonl", [{"prompt": prompt} for prompt in prompts])
    weights = load_file(folder / "sft_model/model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 6.0  # what every position has in common: `push` moves by it
    save_file(weights, folder / "sft_model/model.safetensors", metadata={"format": "pt"})
    write(folder, "ppo", {**PPO, "output": {"save_steps": 4, "snapshots": 2}})
    write(folder, "eval", {**EVAL, "eval": QUICK})
    result = ppo(folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def planted(run: Path) -> Path:
    """The run with snapshots that write e more and more often."""
    shutil.rmtree(run / "ppo/snapshots")
    for step, far in PUSH.items():
        runs.commit_state(
            run / "ppo/snapshots", f"step_{step:06d}", lambda path, far=far: push(run, path, far), keep=None
        )
    write(run, "eval", PLANTED)
    return run


def push(run: Path, path: Path, far: float) -> None:
    shutil.copytree(run / "sft_model", path, dirs_exist_ok=True)
    token = tokenizers.load_tokenizer(path).convert_tokens_to_ids("e")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][token, 0] += far
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def evaluate(folder: Path, *arguments: object) -> tuple[dict[str, Any], Any]:
    """report.json, and the command's result."""
    result = rlhf("eval", "-c", folder / "eval.yaml", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads((folder / "eval/report.json").read_text()), result


def alone(run: Path, step: int) -> dict[str, Any]:
    """The report of one policy by itself, as the finished model of a PPO run would be asked."""
    path = run / f"ppo/snapshots/step_{step:06d}"
    sets = {"run": run / "alone" / str(step), "models.ppo": path, "eval.temperature": 0.7, "eval.response_length": 8}
    models = {key: run / name for key, name in (("models.sft", "sft_model"), ("models.reward", "reward_model"))}
    arguments = [text for key, value in {**sets, **models}.items() for text in ("-s", f"{key}={value}")]
    result = rlhf("eval", "-c", run / "eval.yaml", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads((run / "alone" / str(step) / "eval/report.json").read_text())


def test_a_point_is_its_snapshot_alone_and_nothing_is_picked_unasked(run: Path) -> None:
    """To the last bit: the draws are the same for every policy."""
    report, result = evaluate(run)
    steps = [point["step"] for point in report["frontier"]]
    assert steps == sorted(steps) == runs.state_steps(run / "ppo/snapshots") and len(steps) >= 2
    final = json.loads((run / "ppo/manifest.json").read_text())["step"]
    for point in report["frontier"]:
        told = report if point["step"] == final else alone(run, point["step"])
        model = told["models"]["ppo"]
        assert (point["kl"], point["kl_ci95"], point["reward"]) == (model["kl"], model["kl_ci95"], model["reward_mean"])
        assert point["response_length_mean"] == model["response_length_mean"]
        assert point["win_rate"] == told["win_rate"]["ppo_vs_sft"]
        for judge, found in point["judges"].items():
            assert {key: found[key] for key in ("mean", "ci95")} == model["judges"][judge]
    assert len({point["kl"] for point in report["frontier"]}) == len(steps), "they are policies of their own"
    told = [row["model"] for row in lines(run / "eval/samples.jsonl")]
    others = {f"ppo_step_{step:06d}" for step in steps if step != final}
    assert set(told) == {"sft", "ppo", "best_of_2"} | others and all(told.count(name) == 10 for name in others)
    rounds = 2 + len(others) + 2
    assert f"eval {rounds}/{rounds} round" in result.stderr
    assert (run / "eval/frontier.svg").is_file()
    assert not {"selected_step", "selected", "no_frontier"} & report.keys() and "selected" not in result.stdout
    assert "The frontier: PPO's policies along the way" in result.stdout
    report, result = evaluate(run, "--fresh", "-s", "eval.frontier=false")
    assert not {"frontier", "no_frontier"} & report.keys() and "frontier" not in result.stdout
    assert not (run / "eval/frontier.svg").exists()


@pytest.mark.slow  # the bound itself: tests/test_statistics.py
def test_the_pick_of_some_prompts_is_good_on_others(planted: Path) -> None:
    """The reward rises to the end; what gold picks is within 2 % of the best by gold on prompts that it never saw."""
    write(planted, "eval", {**PLANTED, "eval": {**PLANTED["eval"], "n": 128}})
    report, result = evaluate(planted)
    rewards = [point["reward"] for point in report["frontier"] if point["step"] in PUSH]
    assert rewards == sorted(rewards)
    golds = {point["step"]: point["judges"]["gold"]["mean"] for point in report["frontier"]}
    picked = report["selected_step"]
    assert golds[picked] == max(golds.values()) > 2 * golds[12], "it rises and falls"
    for point in report["frontier"]:
        told = point["judges"]["gold"]
        assert told["from_best"] == pytest.approx(golds[point["step"]] - golds[picked])
        assert told["from_best_ci95"][1] < 0 or (point["step"] == picked and told["from_best_ci95"] == [0, 0])
    assert report["selected"]["kl"] == next(point["kl"] for point in report["frontier"] if point["step"] == picked)
    assert report["selected"]["within_noise"] == [] and 0 <= report["selected"]["optimism"] < 0.02
    assert f"selected: update {picked}, by the highest mean of gold among 8 of 8 policies\n" in result.stdout
    elsewhere = evaluate(planted, "--fresh", "-s", f"data.prompts={planted / 'others.jsonl'}")[0]
    golds = {point["step"]: point["judges"]["gold"]["mean"] for point in elsewhere["frontier"]}
    assert golds[picked] >= 0.98 * max(golds.values())
    by_reward, said = evaluate(
        planted, "--fresh", "-s", "eval.select=reward", "-s", 'eval.require={"selected.kl": "> 9"}'
    )
    assert by_reward["selected_step"] == 12 and golds[12] < 0.5 * golds[picked]
    (warning,) = [line for line in said.stderr.splitlines() if line.startswith("warning[C18]")]
    assert "eval.select: the reward is what PPO was trained on" in warning and "report.json has C18" in said.stdout


def test_the_best_within_a_bound_is_picked(planted: Path) -> None:
    report, result = evaluate(planted, "-s", "eval.select={judge: gold, kl_max: 4}")
    near = [point for point in report["frontier"] if point["kl"] <= 4]
    best = max(near, key=lambda point: point["judges"]["gold"]["mean"])
    assert 1 < len(near) < len(report["frontier"]) and report["selected_step"] == best["step"]
    rule = f"the highest mean of gold among {len(near)} of 8 policies with a KL of at most 4"
    assert report["selected"]["rule"] == rule and f"update {best['step']}, by {rule}\n" in result.stdout
    result = rlhf("eval", "-c", planted / "eval.yaml", "--fresh", "-s", "eval.select=same")
    assert result.exit_code == 0, result.output
    report = json.loads((planted / "eval/report.json").read_text())
    kl = {point["step"]: point["kl"] for point in report["frontier"]}
    assert report["selected_step"] == min(kl, key=kl.__getitem__), "of equals the one with the smaller KL"


def test_a_bound_that_all_pass_ends_with_an_error_after_the_report_and_a_damaged_snapshot_is_left_out(
    planted: Path,
) -> None:
    shutil.rmtree(planted / "ppo/snapshots/step_000001")
    weights = planted / "ppo/snapshots/step_000010/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\0")
    (planted / "ppo/snapshots/step_000008/state.json").unlink()
    command = ("eval", "-c", planted / "eval.yaml", "-s", "eval.select={judge: gold, kl_max: 0.001}")
    told = []
    for _ in range(2):  # and again, finished
        result = rlhf(*command)
        told.append(result)
        assert result.exit_code == 1 and result.stderr.count("error[R06]: --set eval.select: ") == 1
        assert "0 of 5 policies with a KL of at most 0.001, the nearest has 0." in result.stderr
        assert "selected: none" in result.stdout
    report = json.loads((planted / "eval/report.json").read_text())
    assert "selected_step" not in report
    assert [point["step"] for point in report["frontier"]] == [2, 3, 4, 6, 12]
    for step, what in ((10, "is damaged: model.safetensors"), (8, "was not finished")):
        (line,) = [line for line in told[0].stderr.splitlines() if f"step_{step:06d} {what}" in line]
        assert line.startswith("warning[M05]") and line.endswith("; the frontier leaves it out")
        assert line in report["warnings"]


@pytest.mark.parametrize("gone", ["snapshots", "stage"])
def test_without_snapshots_it_is_said_why(run: Path, gone: str) -> None:
    arguments: list[object] = ["-s", "eval.select=short"]
    if gone == "snapshots":
        shutil.rmtree(run / "ppo/snapshots")
        why = f"{run / 'ppo/snapshots'} holds no policy on the way"
    else:
        for key, value in (("models.ppo", run / "ppo_model"), ("eval.temperature", 1.0), ("eval.response_length", 8)):
            arguments += ["-s", f"{key}={value}"]
        shutil.copytree(run / "ppo/model", run / "ppo_model")
        why = f"{run / 'ppo_model'} is no folder that our PPO wrote"
    report, result = evaluate(run, *arguments)
    assert report["no_frontier"] == why and not {"frontier", "selected", "selected_step"} & report.keys()
    assert result.stdout.count(f"no frontier: {why}") == 1 and not (run / "eval/frontier.svg").exists()


def test_the_figure_is_the_same_file_for_the_same_report(run: Path, tmp_path: Path) -> None:
    from rlhf_cli.commands.report import svg

    report, _ = evaluate(run, "-s", "eval.select=short")
    drawn = (run / "eval/frontier.svg").read_bytes()
    svg.draw(report, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == drawn and drawn.rstrip().endswith(b"</svg>")
    assert drawn.count(b"<!-- short -->") == 1 and drawn.count(b"<!-- reward -->") == 1, "a panel a judge"
    assert f"<!-- selected: update {report['selected_step']} -->".encode() in drawn
    report["selected_step"] = -1
    svg.draw(report, tmp_path / "other.svg")
    assert b"selected" not in (tmp_path / "other.svg").read_bytes()


@pytest.mark.parametrize(("end", "marks"), [(0.3, [0, 0.1, 0.2]), (40.0, [0, 0.2, 1, 5, 10, 20, 30, 40]), (0.05, [0])])
def test_marks_of_the_scale_are_round_and_stand_apart(end: float, marks: list[float]) -> None:
    from rlhf_cli.commands.report.svg import _ticks

    assert _ticks(end) == marks


def test_lengths_of_the_answers_control_the_win_rate() -> None:
    """A judge that counts tokens: at equal lengths nothing is left of ours, which are longer in nine of ten."""
    theirs = [20 + row % 7 for row in range(100)]
    ours = [length + (-1 if row % 10 == 0 else 1 + row % 5) for row, length in enumerate(theirs)]
    both = [
        EvalResponses(
            "m", "sampled", ["p"] * 100, ["r"] * 100, [True] * 100, lengths, {"long": [float(x) for x in lengths]}, None
        )
        for lengths in (ours, theirs)
    ]
    found = win_rates(*both, seed=0)["long"]
    assert found["value"] == 0.9 and abs(found["length_controlled"] - 0.5) < 0.25
    low, high = found["length_controlled_ci95"]
    assert low < found["length_controlled"] < high
    assert found["difference"] == pytest.approx(sum(ours) / 100 - sum(theirs) / 100)
