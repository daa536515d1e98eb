"""Our side: CPU seconds and peak memory of PPO updates, as one line of JSON.

    python -m benchmarks.speed.ours JOB.json

JOB.json is a `job.Job`; `python -m benchmarks.speed` writes it, and the peer reads the same.
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
from benchmarks.speed.job import Job, Laps, memory_mb, report
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.experience import Experience
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward

BASELINE = memory_mb("VmRSS")  # what the imports alone take


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
    chosen = settings(job)
    policy, ref = (LlamaForCausalLM.from_pretrained(job.sft) for _ in range(2))
    value, scorer = (LlamaForSequenceClassification.from_pretrained(job.reward, num_labels=1) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(job.sft)
    stop = None if job.dense else tokenizer.eos_token_id
    engine = HFEngine(policy, stop, tokenizer.pad_token_id, batch_size=chosen.local_rollout_forward_batch_size)
    reward = ModelReward(scorer.eval().requires_grad_(False), job.rows)
    return PPOTrainer(policy, ref, value, {"reward": reward}, engine, chosen, seed=job.seed)


def work(shape: floor.Shape, experience: Experience, epochs: int) -> int:
    """Multiply-adds that an update phase on this experience cannot do without."""
    rollout = experience.rollout
    lengths = zip(rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist(), strict=True)
    return floor.multiply_adds(shape, lengths, epochs)


def measure(job: Job) -> dict[str, Any]:
    """Updates, and between them the machine's rate, so that both meet the same neighbours on a shared machine."""
    ppo, laps = trainer(job), Laps()
    shape = floor.Shape.of(ppo.policy.config)
    for method, phase in (("generate", "rollout"), ("make_experience", "judge"), ("update", "update")):
        laps.around(ppo, method, phase)
    real, padded, least, rates = [], [], [], []
    for rows in job.batches():
        rates.append(floor.rates(shape))
        with laps.lap("step"):
            stats = ppo.step(Prompts.from_lists(rows))
        assert ppo.experience is not None
        real.append(int(stats["tokens/real"]))
        padded.append(int(stats["tokens/padded"]))
        least.append(work(shape, ppo.experience, job.epochs))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    found = report(laps, real, padded, rates, BASELINE, versions=versions)
    seconds = [2 * madds / max(found["gflops"].values()) / 1e9 for madds in least[1:] or least]
    updates = laps.seconds["update"][1:] or laps.seconds["update"]
    over = [spent / bound for spent, bound in zip(updates, seconds, strict=True)]
    return found | {"floor_s": round(median(seconds), 3), "over_floor": round(median(over), 3)}


def quiet() -> None:
    """No bars and no warnings of the libraries: the only output is the result."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def main() -> None:
    job = Job.read(Path(sys.argv[1]))
    quiet()
    torch.set_num_threads(job.threads)
    print(json.dumps(measure(job)))


if __name__ == "__main__":
    main()
