"""CPU seconds and peak memory of rlhf's PPO updates, as one line of JSON.

    python -m benchmarks.speed.ours JOB.json

JOB.json is a `workload.Job`, written by `python -m benchmarks.speed`; `peer.py` reads the same file.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks.speed import floor
from benchmarks.speed.counters import PhaseTimer, memory_mb, summary
from benchmarks.speed.workload import Job
from rlhf_cli.config.ppo import PPOSettings
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.experience import Experience
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward

IMPORTS_MB = memory_mb("VmRSS")  # memory after the imports


def settings(job: Job) -> PPOSettings:
    return PPOSettings(
        **{
            "total_episodes": job.batch * job.updates,
            "per_device_train_batch_size": job.rows,
            "gradient_accumulation_steps": job.batch // job.rows,
            "num_ppo_epochs": job.epochs,
            "temperature": 1.0,
            "response_length": job.response_length,
            "learning_rate": job.learning_rate,
            "lr_scheduler_type": "constant",
            "kl_coef": job.kl_coef,
            "missing_eos_penalty": job.missing_eos_penalty,
            "stop_token": "none" if job.dense else "eos",
            **job.settings,
        }
    )


def trainer(job: Job) -> PPOTrainer:
    ppo = settings(job)
    policy, ref = (LlamaForCausalLM.from_pretrained(job.sft) for _ in range(2))
    value, scorer = (LlamaForSequenceClassification.from_pretrained(job.reward, num_labels=1) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(job.sft)
    stop = None if job.dense else tokenizer.eos_token_id
    engine = HFEngine(policy, stop, tokenizer.pad_token_id, batch_size=ppo.local_rollout_forward_batch_size)
    reward = ModelReward(scorer.eval().requires_grad_(False), job.rows)
    return PPOTrainer(policy, ref, value, {"reward": reward}, engine, ppo, seed=job.seed)


def minimum_work(shape: floor.Shape, experience: Experience, epochs: int) -> int:
    """Return the multiply-adds that an update on this experience needs at least."""
    rollout = experience.rollout
    lengths = zip(rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist(), strict=True)
    return floor.multiply_adds(shape, lengths, epochs)


def measure(job: Job) -> dict[str, Any]:
    """Measure updates, and the machine's rate between them, so that other processes slow both down alike."""
    ppo, timer = trainer(job), PhaseTimer()
    shape = floor.Shape.of(ppo.policy.config)
    for method, phase in (("generate", "rollout"), ("make_experience", "judge"), ("update", "update")):
        timer.wrap(ppo, method, phase)
    real, padded, work, rates = [], [], [], []
    for rows in job.batches():
        rates.append(floor.rates(shape))
        with timer.measure("step"):
            stats = ppo.step(Prompts.from_lists(rows))
        assert ppo.experience is not None
        real.append(int(stats["tokens/real"]))
        padded.append(int(stats["tokens/padded"]))
        work.append(minimum_work(shape, ppo.experience, ppo.settings.num_ppo_epochs))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = summary(timer, real, padded, rates, IMPORTS_MB, versions=versions)
    bounds = [2 * multiply_adds / max(result["gflops"].values()) / 1e9 for multiply_adds in work[1:] or work]
    updates = timer.seconds["update"][1:] or timer.seconds["update"]
    ratios = [seconds / bound for seconds, bound in zip(updates, bounds, strict=True)]
    return result | {"floor_s": round(median(bounds), 3), "over_floor": round(median(ratios), 3)}


def silence_libraries() -> None:
    """Turn off progress bars and warnings of transformers: stdout must only contain the result."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def main() -> None:
    job = Job.read(Path(sys.argv[1]))
    silence_libraries()
    torch.set_num_threads(job.threads)
    print(json.dumps(measure(job)))


if __name__ == "__main__":
    main()
