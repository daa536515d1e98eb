"""ppo.push_to_hub_if_best against a hub on this machine that takes uploads."""

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from ppo_folder import ppo
from safetensors.torch import load
from stand_in_pushes import TOKEN, Hub, Repo, serving, use

PUSHING = ("-s", "ppo.push_to_hub_if_best=lab/policy")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as found:
        use(found, monkeypatch)
        yield found


@pytest.mark.training
def test_the_best_policy_is_pushed_each_time_it_is_beaten(run_folder: Path, hub: Hub) -> None:
    done = ppo(run_folder, *PUSHING)
    assert done.exit_code == 0 and "R09" not in done.stderr, done.stderr
    repo = hub.repos["lab/policy"]
    pushed = repo.commits[1:]
    assert repo.private and pushed[0].title.startswith(
        "Policy after 0 PPO updates, objective/scores - objective/kl_coef"
    )
    best = json.loads((run_folder / "ppo/manifest.json").read_text())["best"]["step"]
    assert pushed[-1].title.startswith(f"Policy after {best} PPO updates")
    kept = run_folder / f"ppo/snapshots/step_{best:06d}"
    files = repo.head.files
    assert load(files["model.safetensors"]) and files["config.json"] == (kept / "config.json").read_bytes()
    assert "state.json" not in files and TOKEN not in done.output


@pytest.mark.training
def test_r09_a_hub_that_is_down_ends_no_training(run_folder: Path, hub: Hub) -> None:
    hub.faults["POST "] = 500
    done = ppo(run_folder, *PUSHING)
    assert done.exit_code == 0 and (run_folder / "ppo/manifest.json").is_file(), done.stderr
    (said,) = {line for line in done.stderr.splitlines() if line.startswith("warning[R09]")}
    assert "the push to lab/policy failed, " in said and "/ppo/snapshots/step_000000 is whole: " in said
    hints = [line for line in done.stderr.splitlines() if line.startswith("hint: go on with: ")]
    assert hints and all("hf upload lab/policy " in line for line in hints)
    assert all(line.endswith(" --private --exclude state.json") for line in hints)


def test_a_push_without_a_token_is_refused_before_anything_loads(
    run_folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["lab/policy"] = Repo()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused = ppo(run_folder, *PUSHING)
    said = "error[C17]: --set ppo.push_to_hub_if_best: pushing to lab/policy needs the hub, and HF_HUB_OFFLINE is set"
    assert refused.exit_code == 2 and said in refused.stderr
    monkeypatch.setattr("rlhf_cli.models.hub.get_token", lambda: None)
    refused = ppo(run_folder, *PUSHING)
    assert refused.exit_code == 2 and "error[C17]: --set ppo.push_to_hub_if_best: " in refused.stderr
    assert "hint: `hf auth login`" in refused.stderr and hub.asked == []
