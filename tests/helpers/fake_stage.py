"""A stage that trains nothing: `rlhf STAGE` as the pipeline calls it, with the real configs and checkpoints.

Its weights depend on its learning rate (or KL coefficient), its seed, its data and its parents, and on nothing else.
"""

import argparse
import json
import os
import signal
import sys
import time

from rlhf_cli import config, runs
from rlhf_cli.errors import RLHFError

parser = argparse.ArgumentParser()
parser.add_argument("stage")
parser.add_argument("--config")
parser.add_argument("--set", action="append", default=[])
parser.add_argument("--fresh", action="store_true")
parser.add_argument("--trust-remote-code", action="store_true")
parser.add_argument("--quiet", action="store_true")


def work(loaded: config.Config, fresh: bool) -> None:
    parents = runs.open_parents(loaded)
    identity = runs.compute_identity(loaded, parents, loaded.sources())
    print(f"{loaded.stage} {runs.start_stage(loaded, identity, {}, fresh=fresh)}", flush=True)
    if os.environ.get("FAKE_FAILS") == loaded.stage:
        runs.begin_state(loaded.folder / "state", "step_000120")
        sys.exit(7)
    if os.environ.get("FAKE_WAITS") == loaded.stage:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
        (loaded.folder / "waiting").touch()
        try:
            time.sleep(60)
        finally:
            (loaded.folder / "stopped").touch()
    if loaded.stage == "eval":
        (loaded.folder / "report.json").write_text(json.dumps(REPORT))
    else:
        settings = identity["config"][loaded.stage]
        rates = [settings["learning_rate"], settings.get("kl_coef")]
        inputs = [*rates, loaded.seed, identity["data"], identity["parents"]]
        (loaded.folder / "model").mkdir()
        (loaded.folder / "model/model.safetensors").write_text(json.dumps(inputs))
    runs.complete_stage(loaded, identity, parents=parents, fields={})


SCORED = {"reward_mean": 0.5, "response_length_mean": 9.0, "eos_fraction": 1.0, "judges": {"reward": {"mean": 0.5}}}
REPORT = {
    "n": 2,
    "models": {"sft": SCORED, "ppo": SCORED},
    "win_rate": {"ppo_vs_sft": {"reward": {"value": 0.5, "ci95": [0.2, 0.8], "n": 2, "ties": 2}}},
}


def main(arguments: list[str]) -> int:
    """The exit code, as the command's."""
    options = parser.parse_args(arguments)
    try:
        work(config.load(options.stage, options.config, options.set), options.fresh)
    except RLHFError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
