"""The peer: TRL 1.12's PPO with `peft_config`, what its training holds and its peak; one line of JSON.

    .peer/bin/python -m benchmarks.memory.peer BIG.json SMALL.json RANK ALPHA

Each file is a `benchmarks.speed.job.Job`; the small one loads the libraries. It runs in an environment of its own
(benchmarks/speed/peer.txt), which has nothing of ours.
"""

import json
import sys
import tempfile
from typing import Any

import torch
import transformers
from peft import LoraConfig

from benchmarks.memory import held
from benchmarks.speed.job import Job
from benchmarks.speed.peer import trainer


def train(job: Job, rank: int, alpha: int) -> held.Found:
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        ppo = trainer(job, folder, lora, use_cpu=not torch.cuda.is_available())
        models: dict[str, Any] = {"policy": ppo.policy_model, "value": ppo.value_model, "reward": ppo.reward_model}
        with held.watched(models) as found:
            ppo.train()
    return found


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    (big, small), scale = map(Job.read, sys.argv[1:3]), tuple(map(int, sys.argv[3:]))
    train(small, *scale)
    before = held.libraries()
    print(json.dumps(held.told(train(big, *scale), before)))


if __name__ == "__main__":
    main()
