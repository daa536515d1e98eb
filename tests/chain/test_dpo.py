"""`rlhf dpo`, the optional stage, in the other commands: run, check, plan, init, status, report, chat, export, eval.

And what `rlhf init --baselines` writes.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bad_inputs import check, replace
from run_cli import ROOT, child, fails, must_succeed, rlhf, run_here

from rlhf_cli import jsonl
from rlhf_cli.models.load import load_causal_lm
from tests.conftest import World

EVAL = """
models: {ppo: ./dpo, reward: null}
data: {prompts: pairs.jsonl}
judges: {mine: "judge:score"}
eval: {n: 16, best_of: [], interpolate: [], temperature: 1.0, response_length: 24}
"""
JUDGE = "def score(prompts, responses):\n    return [float('bright' in text or 'kind' in text) for text in responses]\n"
SIZES = "max_length: 64, learning_rate: 3.0e-3"
SFT = f"model: {{path: ./model}}\ndata: {{train: rows.jsonl}}\nsft: {{max_steps: 30, {SIZES}}}\n"
DPO = f"data: {{train: pairs.jsonl, eval: pairs.jsonl}}\ndpo: {{max_steps: 60, {SIZES}}}\n"


@pytest.fixture
def run_folder(folder: Path) -> Path:
    """A folder with sft.yaml and dpo.yaml, and without other stages."""
    for name in ("reward", "ppo"):
        (folder / f"{name}.yaml").unlink()
    (folder / "sft.yaml").write_text(SFT)
    (folder / "dpo.yaml").write_text(DPO)
    return folder


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that `rlhf run` made, with an evaluation of RUN/dpo."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    folder.mkdir()
    shutil.copytree(world.base, folder / "model")
    shutil.copy(world.sft, folder / "rows.jsonl")
    shutil.copy(world.pairs, folder / "pairs.jsonl")
    for name, text in (("sft.yaml", SFT), ("dpo.yaml", DPO), ("eval.yaml", EVAL), ("judge.py", JUDGE)):
        (folder / name).write_text(text)
    must_succeed(run_here(folder))
    return folder


@pytest.mark.full
def test_a_run_with_dpo_yaml_trains_it_and_evaluates_it_as_a_policy(finished: Path) -> None:
    manifest = json.loads((finished / "dpo/manifest.json").read_text())
    assert manifest["metrics"]["accuracy"] > 0.9 and manifest["parents"]["model.path"]["path"] == "../sft"
    report = json.loads((finished / "eval/report.json").read_text())
    assert report["win_rate"]["ppo_vs_sft"]["mine"]["value"] > 0.5 and report["models"]["ppo"]["kl"] > 0
    again = must_succeed(rlhf("run", finished))
    assert len(re.findall("up to date", again.stderr + again.stdout)) == 3
    status = json.loads(must_succeed(rlhf("status", finished, "--json")).stdout)
    found = {stage["stage"]: stage for stage in status["stages"]}
    assert list(found) == ["sft", "dpo", "eval"] and found["dpo"]["state"] == "finished"
    assert found["dpo"]["headline"] == {name: manifest["metrics"][name] for name in ("accuracy", "accuracy_ci95")}
    page = finished.parent / "page.html"
    must_succeed(rlhf("report", finished, "--out", page))
    text = page.read_text()
    assert "<h3>dpo <span" in text and "Pair accuracy" in text


@pytest.mark.full
def test_its_model_chats_is_exported_and_served(finished: Path, tmp_path: Path) -> None:
    replies = must_succeed(rlhf("chat", finished, "--stage", "dpo", input="Tell me about the sun.\n"))
    assert replies.stdout.strip() and "KL" in replies.stderr and "mine/dpo" in replies.stderr
    fails(rlhf("chat", finished, "--compare", "sft,dpo"), "C07", "not sft,ppo or ppo,sft")
    must_succeed(rlhf("export", finished, "--stage", "dpo", "--out", tmp_path / "policy"))
    exported, own = (load_causal_lm(path) for path in (tmp_path / "policy", finished / "dpo/model"))
    assert all((a == b).all() for a, b in zip(exported.parameters(), own.parameters(), strict=True))
    assert "trained with DPO" in (tmp_path / "policy/README.md").read_text()
    served = must_succeed(rlhf("serve", finished, "--stage", "dpo")).stdout
    assert "--served-model-name dpo" in served and "dpo/model" in served
    planned = json.loads(must_succeed(rlhf("plan", finished, "--json", "--flops", "1e9")).stdout)["stages"]
    assert planned["eval"]["response_tokens"] == 24  # its policy has no settings of PPO


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    """Killed by SIGKILL in the real command, when it writes its second checkpoint or later."""
    folder = shutil.copytree(finished, tmp_path / "mine", ignore=shutil.ignore_patterns("dpo", "eval", "eval.yaml"))
    (folder / "dpo.yaml").write_text(DPO.replace("max_steps: 60", "max_steps: 200") + "output: {save_steps: 20}\n")
    straight = shutil.copytree(folder, tmp_path / "straight")
    printed = must_succeed(child("dpo", "--config", straight / "dpo.yaml")).stderr
    assert all(line.startswith(("dpo ", "warning[", "hint: ")) for line in printed.splitlines()), printed
    command = [sys.executable, "-m", "rlhf_cli", "dpo", "--config", str(folder / "dpo.yaml")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        while len(list(folder.glob("dpo/state/checkpoint-*"))) < 2 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not (folder / "dpo/manifest.json").exists()
    must_succeed(child("dpo", "--config", folder / "dpo.yaml"), "resumes at step ")
    for name in ("model/model.safetensors", "model/config.json"):
        assert (folder / "dpo" / name).read_bytes() == (straight / "dpo" / name).read_bytes()
    found, expected = ([row for _, row in jsonl.read_jsonl(path / "dpo/metrics.jsonl")] for path in (folder, straight))
    assert [{**row, "time_s": 0} for row in found] == [{**row, "time_s": 0} for row in expected]
    assert found[-1]["step"] == 200


def test_the_stage_is_optional(run_folder: Path) -> None:
    def stages() -> list[str]:
        printed = must_succeed(rlhf("run", ".", "--dry-run"))
        return re.findall(r"^(\w+) ", printed.stdout, re.MULTILINE)

    assert stages()[:2] == ["sft", "dpo"]
    (run_folder / "dpo.yaml").unlink()
    assert "dpo" not in stages()
    names = [each["stage"] for each in json.loads(must_succeed(rlhf("status", ".", "--json")).stdout)["stages"]]
    assert names == ["sft"]


def test_check_reads_its_pairs_with_the_tokenizer_that_sft_leaves(run_folder: Path) -> None:
    found = {
        row["what"]: row["found"] for row in json.loads(check(".", "--json").stdout)["checked"] if row["stage"] == "dpo"
    }
    assert found["model.path"] == "sft, which the sft stage is to make"
    assert found["batches"].startswith("96 pairs, 2") and found["batches"].endswith("8 x 1 = 8 pairs; in all 60 steps")


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new", "code", "text"),
    [
        ("train: pairs.jsonl", "train: gone.jsonl", "D01", "dpo.yaml:1: data.train: "),
        ("train: pairs.jsonl", "train: rows.jsonl", "D02", "rows.jsonl:1: the row needs {prompt, chosen, rejected}"),
        ("data:", "model: {path: ./gone}\ndata:", "M01", "dpo.yaml:1: model.path: no such folder gone"),
        ("data:", "model: {path: ./dpo}\ndata:", "M10", "model.path names the folder that this stage writes"),
        ("data:", "model: {adapters: {kind: lora, lora_dropout: 0.1}}\ndata:", "C17", "dpo training turns dropout off"),
        ("max_steps: 60", "label_smoothing: 0.1", "C17", "label_smoothing 0.1 does not go with loss_type: sigmoid"),
        ("max_steps: 60", "loss_type: robust", "C17", "label_smoothing 0 does not go with loss_type: robust"),
        ("max_steps: 60", "loss_type: hinge", "C07", "dpo.loss_type"),
        ("max_steps: 60", "beta: 0", "C06", "dpo.beta"),
        ("dpo:", "trainer: {sync_ref_model: true}\ndpo:", "C02", "sync_ref_model"),
    ],
)
def test_errors_are_one_line_with_their_code(run_folder: Path, old: str, new: str, code: str, text: str) -> None:
    replace("dpo.yaml", old, new)
    result = check(".")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    assert result.exit_code == 2 and len(errors) == 1, result.output
    assert errors[0].startswith(f"error[{code}]") and text in errors[0]


@pytest.mark.full
def test_the_memory_has_a_reference_unless_adapters_are_turned_off_instead(run_folder: Path) -> None:
    def step(*more: str) -> tuple[dict[str, int], float]:
        result = must_succeed(rlhf("plan", "dpo.yaml", "--json", "--flops", "1e9", "model.path=./model", *more))
        plan = json.loads(result.stdout)["stages"]["dpo"]
        (found,) = (each for each in plan["phases"] if each["name"] == "step")
        assert list(plan["parameters"]) == ["policy", "reference"] and plan["rows"] == 96
        return found["bytes"], found["flops"]

    weights = 4 * load_causal_lm("model").num_parameters()
    (full, flops), (once, _), (lora, _) = (
        step(), step("trainer.precompute_ref_log_probs=true"), step("model.adapters.kind=lora")
    )  # fmt: skip
    assert (full["weights"], once["weights"]) == pytest.approx((2 * weights, weights), rel=1e-3)
    assert full["optimizer"] == 2 * weights and step("model.adapters.kind=lora", "--mode", "full") == (full, flops)
    assert lora["weights"] == pytest.approx(weights + lora["optimizer"] / 2, rel=1e-3)  # one base, and the adapters
    Path("reward.yaml").write_text(DPO.replace("dpo:", "reward:"))
    other = must_succeed(rlhf("plan", "reward.yaml", "--json", "--flops", "1e9", "model.path=./model"))
    (reward,) = (each for each in json.loads(other.stdout)["stages"]["reward"]["phases"] if each["name"] == "step")
    assert flops > 4 / 3 * reward["flops"]  # the reference reads the pairs, too, and there are logits
