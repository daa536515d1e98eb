"""Comparison of an exported folder, loaded again with transformers, with the run's model."""

from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.errors import RLHFError
from rlhf_cli.jsonl import read_jsonl
from rlhf_cli.models import load, tokenizers
from rlhf_cli.models.tokenizers import template_sha256, tokenizer_sha256
from rlhf_cli.runs.parents import Parent

STORED_ROWS = 6
RANDOM_ROWS = 2
ROW_LENGTH = 64  # tokens
TOLERANCE = 1e-4  # of the largest logit
ROUNDINGS = 10  # tolerance of lower precision, in rounding errors: 0.8 % each in bfloat16, 0.1 % in float16
Rows = list[list[int]]


def stored_rows(model: Parent, tokenizer: Any) -> Rows:
    """Return token ids of a reward model's probes, or of answers in the evaluation or in PPO's training."""
    if probes := model.manifest.probes[:STORED_ROWS]:
        return [probe.prompt_ids + probe.response_ids for probe in probes]
    run_folder = model.path.resolve().parent
    for path in (run_folder / "eval/samples.jsonl", run_folder / "ppo/samples.jsonl"):
        with suppress(RLHFError):  # missing or incomplete
            samples = [row for _, row in islice(read_jsonl(path), STORED_ROWS)]
            texts = [row["prompt"] + row["response"] for row in samples if {"prompt", "response"} <= row.keys()]
            tokenized = tokenizer(texts, add_special_tokens=False)["input_ids"]
            rows = [ids for ids in tokenized if ids]
            if rows:
                return rows
    return []


def with_random_rows(stored: Rows, model_config: Any) -> Rows:
    """Add rows of random tokens, which cover the vocabulary better, and shorten all."""
    length = min(ROW_LENGTH, load.context_length(model_config) or ROW_LENGTH)
    size = (RANDOM_ROWS if stored else STORED_ROWS + RANDOM_ROWS, length)
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(model_config.get_text_config().vocab_size, size, generator=generator).tolist()
    return [ids[-length:] for ids in stored] + random


@torch.no_grad()
def logits(model: Any, rows: Rows) -> list[Tensor]:
    """Return the model's logits of each row, computed without padding."""
    return [model(input_ids=torch.tensor([ids])).logits[0] for ids in rows]


def verify_export(
    folder: Path, rows: Rows, expected: list[Tensor], dtype: torch.dtype, tokenizer: Any, trust: bool
) -> float:
    """Return the largest difference between a folder's and the `expected` logits, relative to the largest of these.

    Both are in float32, so that only the weights are compared. Raises RLHFError M12 if the difference exceeds the
    rounding to `dtype`, or if weights or tokenizer differ.
    """
    kind = AutoModelForSequenceClassification if expected[0].shape == (1,) else AutoModelForCausalLM
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=trust,
        output_loading_info=True,
    )  # fmt: skip
    mismatched = sorted({*report["missing_keys"], *report["unexpected_keys"]})
    if mismatched:
        raise _mismatch(f"the weights of {', '.join(mismatched[:3])} are missing or unexpected")

    exported = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    for name, sha256_of in (("tokenizer", tokenizer_sha256), ("chat template", template_sha256)):
        if sha256_of(exported) != sha256_of(tokenizer):
            raise _mismatch(f"its {name} differs")
    if token_difference := tokenizers.first_difference(tokenizer, exported):
        raise _mismatch(f"its tokenizer differs: {token_difference}")

    pairs = zip(expected, logits(model.eval(), rows), strict=True)
    largest_difference = max(float((row - exported_row).abs().max()) for row, exported_row in pairs)
    difference = largest_difference / max(float(row.abs().max()) for row in expected)
    allowed = TOLERANCE if dtype == torch.float32 else ROUNDINGS * torch.finfo(dtype).eps
    if not difference <= allowed:  # also true of nan
        raise _mismatch(f"its logits differ by {difference:.1e} of the largest, {allowed:.1e} is allowed")
    return difference


def _mismatch(text: str) -> RLHFError:
    hint = "nothing was written; try other versions of transformers or peft, or remove --dtype"
    return RLHFError("M12", f"loaded again, the exported folder is not the run's model: {text}", hint=hint)
