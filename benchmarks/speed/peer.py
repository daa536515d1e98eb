"""The peer: PPO of TRL 1.12, the last release that had it, on the same job; one line of JSON.

    .peer/bin/python -m benchmarks.speed.peer JOB.json

It runs in an environment of its own (`peer.txt`), which has nothing of ours: of this repository it imports job.py and
floor.py alone. TRL shuffles its prompts; its data loader is replaced by the job's batches, so that each update starts
from the prompts that ours starts from.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from benchmarks.speed.floor import Shape, rates
from benchmarks.speed.job import Job, Laps, memory_mb, real_tokens, report

BASELINE = memory_mb("VmRSS")


def arguments(job: Job, folder: str, *, use_cpu: bool = True) -> PPOConfig:
    return PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=job.rows,
        gradient_accumulation_steps=job.batch // job.rows,
        num_mini_batches=1,
        num_ppo_epochs=job.epochs,
        total_episodes=job.batch * job.updates,
        response_length=job.response_length,
        stop_token=None if job.dense else "eos",
        missing_eos_penalty=job.missing_eos_penalty,
        temperature=1.0,
        kl_coef=job.kl_coef,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        local_rollout_forward_batch_size=job.batch,
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=use_cpu,
        seed=job.seed,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )


def trainer(job: Job, folder: str, lora: Any = None, *, use_cpu: bool = True) -> PPOTrainer:
    """TRL's trainer. With peft's settings, `lora`, the reference is the policy without its adapters."""
    policy = LlamaForCausalLM.from_pretrained(job.sft)
    ref = None if lora else LlamaForCausalLM.from_pretrained(job.sft)
    value, scorer = (LlamaForSequenceClassification.from_pretrained(job.reward, num_labels=1) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(job.sft, padding_side="left")
    batches = job.batches()
    rows = Dataset.from_list([{"input_ids": ids} for batch in batches for ids in batch])
    ppo = PPOTrainer(
        args=arguments(job, folder, use_cpu=use_cpu),
        processing_class=tokenizer,
        model=policy,
        ref_model=ref,
        reward_model=scorer,
        value_model=value,
        train_dataset=rows,
        eval_dataset=rows.select(range(job.batch)),
        peft_config=lora,
    )
    ppo.dataloader = [ppo.data_collator([{"input_ids": ids} for ids in batch]) for batch in batches]
    return ppo


class Watch:
    """Where an update's phases begin, and how many tokens it reads, told by the functions that TRL itself calls.

    The rollout ends when batch_generation returns; the update begins with the first forward pass of policy and value
    in one, which the phase before never makes; an update ends with its line of metrics.
    """

    def __init__(self, ppo: PPOTrainer, stop: int | None, pad: int) -> None:
        self.laps, self.real, self.padded = Laps(), list[int](), list[int]()
        self.stop, self.pad, self.both = stop, pad, ppo.model
        self.shape, self.rates = Shape.of(ppo.ref_model.config), list[dict[str, float]]()
        self.began = self.mark = time.process_time()
        self.updating = False
        self.write, self.read, self.log = ppo_trainer.batch_generation, ppo_trainer.forward, ppo.log
        ppo_trainer.batch_generation, ppo_trainer.forward, ppo.log = self.writes, self.reads, self.logs

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.laps.add(name, now - self.mark)
        self.mark = now

    def writes(self, model: Any, queries: Any, *args: Any) -> Any:
        found = self.write(model, queries, *args)
        self.lap("rollout")
        width = queries.shape[1]
        prompts = [[token for token in row if token != self.pad] for row in queries.tolist()]
        self.real.append(real_tokens(prompts, found[0][:, width:].tolist(), self.stop))
        self.padded.append(found[0].numel())
        return found

    def reads(self, model: Any, *args: Any) -> Any:
        if model is self.both and not self.updating:
            self.updating = True
            self.lap("judge")
        return self.read(model, *args)

    def logs(self, *args: Any, **kwargs: Any) -> None:
        self.log(*args, **kwargs)
        self.lap("update")
        self.laps.add("step", self.mark - self.began)
        self.rates.append(rates(self.shape))
        self.began, self.updating = time.process_time(), False
        self.mark = self.began


def measure(job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ppo = trainer(job, folder)
        tokenizer = ppo.processing_class
        watch = Watch(ppo, None if job.dense else tokenizer.eos_token_id, tokenizer.pad_token_id)
        ppo.train()
    versions = {part.__name__: part.__version__ for part in (torch, transformers, trl)}
    return report(watch.laps, watch.real, watch.padded, watch.rates, BASELINE, versions=versions)


def main() -> None:
    job = Job.read(Path(sys.argv[1]))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(job.threads)
    print(json.dumps(measure(job)))


if __name__ == "__main__":
    main()
