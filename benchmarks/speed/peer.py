"""PPO of TRL 1.12, the last release that contains it, on the same job; one line of JSON.

    .peer/bin/python -m benchmarks.speed.peer JOB.json

It runs in a separate environment (`peer.txt`) without rlhf_cli: of this repository it imports only workload.py,
counters.py and floor.py. TRL shuffles its prompts, so its data loader is replaced by the batches of the job: each
update then starts from the same prompts as ours.
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

from benchmarks.speed.counters import PhaseTimer, memory_mb, real_tokens, summary
from benchmarks.speed.floor import Shape, rates
from benchmarks.speed.workload import Job

IMPORTS_MB = memory_mb("VmRSS")  # memory after the imports


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
    """Return TRL's trainer. With `lora`, a peft config, the reference is the policy without its adapters."""
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


class TRLTimer:
    """Phases and tokens of TRL's updates, measured at the functions that TRL calls.

    The rollout ends when batch_generation returns. The update starts with the first joint forward pass of policy and
    value model, which the scoring phase never makes. An update ends when its metrics are logged.
    """

    def __init__(self, ppo: PPOTrainer, stop: int | None, pad: int) -> None:
        self.timer, self.real, self.padded = PhaseTimer(), list[int](), list[int]()
        self.stop, self.pad, self.policy_and_value = stop, pad, ppo.model
        self.shape, self.rates = Shape.of(ppo.ref_model.config), list[dict[str, float]]()
        self.step_start = self.phase_start = time.process_time()
        self.updating = False
        self.trl_generate, self.trl_forward, self.trl_log = ppo_trainer.batch_generation, ppo_trainer.forward, ppo.log
        ppo_trainer.batch_generation, ppo_trainer.forward, ppo.log = self.generate, self.forward, self.log

    def end_phase(self, name: str) -> None:
        now = time.process_time()
        self.timer.add(name, now - self.phase_start)
        self.phase_start = now

    def generate(self, model: Any, queries: Any, *args: Any) -> Any:
        generated = self.trl_generate(model, queries, *args)
        self.end_phase("rollout")
        width = queries.shape[1]
        prompts = [[token for token in row if token != self.pad] for row in queries.tolist()]
        self.real.append(real_tokens(prompts, generated[0][:, width:].tolist(), self.stop))
        self.padded.append(generated[0].numel())
        return generated

    def forward(self, model: Any, *args: Any) -> Any:
        if model is self.policy_and_value and not self.updating:
            self.updating = True
            self.end_phase("judge")
        return self.trl_forward(model, *args)

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.trl_log(*args, **kwargs)
        self.end_phase("update")
        self.timer.add("step", self.phase_start - self.step_start)
        self.rates.append(rates(self.shape))
        self.step_start = self.phase_start = time.process_time()
        self.updating = False


def measure(job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ppo = trainer(job, folder)
        tokenizer = ppo.processing_class
        measured = TRLTimer(ppo, None if job.dense else tokenizer.eos_token_id, tokenizer.pad_token_id)
        ppo.train()
    versions = {part.__name__: part.__version__ for part in (torch, transformers, trl)}
    return summary(measured.timer, measured.real, measured.padded, measured.rates, IMPORTS_MB, versions=versions)


def main() -> None:
    job = Job.read(Path(sys.argv[1]))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(job.threads)
    print(json.dumps(measure(job)))


if __name__ == "__main__":
    main()
