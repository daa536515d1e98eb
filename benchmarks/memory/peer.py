"""Memory of TRL 1.12's PPO with `peft_config`, as one line of JSON.

    .peer/bin/python -m benchmarks.memory.peer BIG.json SMALL.json RANK ALPHA

Both files are a `benchmarks.speed.workload.Job`; the small one only loads the libraries. It runs in a separate
environment (benchmarks/speed/peer.txt) without rlhf_cli.
"""

import json
import sys
import tempfile
from typing import Any

import torch
import transformers
from peft import LoraConfig

from benchmarks.memory import tensors
from benchmarks.speed.peer import trainer
from benchmarks.speed.workload import Job


def train(job: Job, rank: int, alpha: int) -> tensors.Bytes:
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        ppo = trainer(job, folder, lora, use_cpu=not torch.cuda.is_available())
        models: dict[str, Any] = {"policy": ppo.policy_model, "value": ppo.value_model, "reward": ppo.reward_model}
        with tensors.watch_training(models) as maxima:
            ppo.train()
    return maxima


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    (big, small), lora = map(Job.read, sys.argv[1:3]), tuple(map(int, sys.argv[3:]))
    train(small, *lora)
    libraries = tensors.current_bytes()
    print(json.dumps(tensors.above_libraries(train(big, *lora), libraries)))


if __name__ == "__main__":
    main()
