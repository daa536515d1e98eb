"""Record updates of TRL 1.12's PPO, tensor by tensor, for tests/ppo/test_golden.py. `make golden` runs it.

    .peer/bin/python -m benchmarks.golden --out runs/golden --shared ../shared

It runs in the environment of TRL 1.12 (speed/peer.txt). OUT/tiny is recorded with models that it creates from a seed,
OUT/reviews with the models of the reference workload, if the shared folder has them. Each folder gets three recordings,
with TRL's settings and metrics in their metadata:

    trl_update_k1, trl_update_k3    one update with learning rate 0, with each KL estimator
    trl_steps                       three epochs of one optimizer step over two micro-batches, each recorded

The tensors are the local variables of TRL's `train`, under their names there. The recorder reads them when TRL calls
its accelerator (a micro-batch) and its log (the update), and computes nothing itself.
"""

import argparse
import json
import random
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from benchmarks.speed import peer, workload
from benchmarks.speed.workload import Job

ROWS, TEMPERATURE, NOISE = 16, 0.7, 0.05  # prompts; sampling; relative change of each weight
UPDATE = ("query_responses", "responses", "logprobs", "ref_logprobs", "values", "scores", "sequence_lengths",
          "padding_mask", "padding_mask_p1", "kl", "non_score_reward", "rewards", "advantages", "returns",
          "context_length")  # fmt: skip
MICRO_BATCH = ("new_logprobs", "vpred", "ratio", "pg_loss", "vf_loss", "loss")
SETTINGS = ("temperature", "kl_coef", "kl_estimator", "gamma", "lam", "cliprange", "cliprange_value", "vf_coef",
            "missing_eos_penalty", "num_ppo_epochs")  # fmt: skip
SPECIAL = ("<pad>", "<s>", "</s>")
TINY = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # with the usual 0.02 all distributions would be nearly uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Recorder:
    """Records the local variables of TRL's `train` while it runs."""

    def __init__(self, ppo: Any) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.metadata = {name: str(getattr(ppo.args, name)) for name in SETTINGS}
        tokenizer = ppo.processing_class
        self.metadata |= {"pad": str(tokenizer.pad_token_id), "eos": str(tokenizer.eos_token_id)}
        self.backward, ppo.accelerator.backward = ppo.accelerator.backward, self.micro_batch
        self.log, ppo.log = ppo.log, self.update

    def keep(self, name: str, value: Any) -> None:
        tensor = torch.as_tensor(value).detach()
        tensor = tensor.long() if tensor.dtype == torch.bool else tensor
        self.tensors[name] = tensor.reshape(tensor.shape or (1,)).clone().contiguous()

    def micro_batch(self, loss: torch.Tensor) -> None:
        variables = sys._getframe(1).f_locals
        name = f"epoch{variables['ppo_epoch_idx']}.micro{variables['gradient_accumulation_idx']}"
        self.keep(f"{name}.rows", variables["micro_batch_inds"])
        for tensor in MICRO_BATCH:
            self.keep(f"{name}.{tensor}", variables[tensor])
        self.backward(loss)

    def update(self, metrics: dict[str, Any], *args: Any) -> None:
        variables = sys._getframe(1).f_locals
        for tensor in UPDATE:
            self.keep(tensor, variables[tensor])
        for kind in ("pg_clipfrac", "vf_clipfrac"):  # TRL counts them after `backward`
            for epoch, minibatches in enumerate(variables[f"{kind}_stats"]):
                for micro, share in enumerate(minibatches[0]):
                    self.keep(f"epoch{epoch}.micro{micro}.{kind}", share)
        self.metadata |= {name: str(value) for name, value in metrics.items()}
        self.log(metrics, *args)

    def write(self, path: Path, *, steps: bool) -> None:
        """Write the tensors; those of micro-batches only if `steps`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor for name, tensor in self.tensors.items() if steps or not name.startswith("epoch")}
        save_file(tensors, path, self.metadata)


def perturb(model: torch.nn.Module) -> None:
    """Change each weight a little, so that the KL to the reference is not zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights += NOISE * weights.abs().median() * torch.randn(weights.shape, generator=generator)


def record(job: Job, estimator: str) -> Recorder:
    """Record one update of TRL. All generators are seeded: TRL seeds only torch, but shuffles with numpy."""
    transformers.set_seed(job.seed)
    with tempfile.TemporaryDirectory() as folder:
        ppo = peer.trainer(job, folder)
        ppo.args.temperature, ppo.args.kl_estimator = TEMPERATURE, estimator
        perturb(ppo.policy_model)
        recorder = Recorder(ppo)
        ppo.train()
    return recorder


def record_all(job: Job, folder: Path) -> None:
    """Write the three recordings of a job; the updates have learning rate 0 and one micro-batch."""
    frozen = replace(job, rows=ROWS, epochs=1, learning_rate=0.0, response_length=64)
    for estimator in ("k1", "k3"):
        record(frozen, estimator).write(folder / f"trl_update_{estimator}.safetensors", steps=False)
    record(job, "k1").write(folder / "trl_steps.safetensors", steps=True)


def make_tiny(folder: Path) -> Job:
    """Write a policy and a reward model with random weights, and random prompts."""
    names = [*SPECIAL, *(f"w{token}" for token in range(len(SPECIAL), TINY["vocab_size"]))]
    vocabulary = {name: token for token, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    pad, bos, eos = SPECIAL
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, bos_token=bos, eos_token=eos)
    torch.manual_seed(0)
    policy = LlamaForCausalLM(LlamaConfig(**TINY))
    forbid_padding(policy)
    policy.save_pretrained(folder / "sft")
    LlamaForSequenceClassification(LlamaConfig(**TINY, num_labels=1)).save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "sft")
    rng = random.Random(0)
    lengths = [rng.randint(2, 9) for _ in range(ROWS)]
    rows = [[1, *(rng.randrange(len(SPECIAL), TINY["vocab_size"]) for _ in range(length))] for length in lengths]
    return _job(folder, folder / "sft", folder / "reward", rows, learning_rate=1e-2)


def forbid_padding(policy: LlamaForCausalLM) -> None:
    """Make the padding token improbable at every position, because TRL ends a response at a sampled padding token.

    One feature gets the same value at each position, and its weight makes the logit of the token very negative.
    """
    with torch.no_grad():
        policy.model.embed_tokens.weight[:, 0] = 2.0
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        row = policy.lm_head.weight[TINY["pad_token_id"]]
        row.zero_()
        row[0] = -30.0


def find_reviews(folder: Path, shared: Path) -> Job | None:
    """Return a job with the models and first prompts of the reference workload, or None if they are missing."""
    reference = workload.Reference.shared(shared)
    if reference.missing():
        return None
    return _job(folder, reference.sft, reference.reward, workload.prompts(reference)[:ROWS], learning_rate=1e-3)


def _job(folder: Path, sft: Path, reward: Path, prompts: list[list[int]], learning_rate: float) -> Job:
    """Write the prompts. The learning rate must clip about half of the tokens after the first epoch."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    return Job(
        str(sft),
        str(reward),
        str(folder / "prompts.json"),
        updates=1,
        batch=ROWS,
        rows=ROWS // 2,
        epochs=3,
        response_length=24,
        learning_rate=learning_rate,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/golden"))
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="the reference workload's models")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        jobs = {
            "tiny": make_tiny(Path(temporary, "tiny")),
            "reviews": find_reviews(Path(temporary, "reviews"), args.shared),
        }
        for name, job in jobs.items():
            if job is None:
                print(f"{name}: {args.shared} has no models of the reference workload; skipped")
                continue
            record_all(job, args.out / name)
            print(f"{name}: three recordings in {args.out / name}")


if __name__ == "__main__":
    main()
