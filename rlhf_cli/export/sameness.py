"""Whether an exported folder is the model that it was made from: loaded as anybody would, with transformers alone."""

from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.checkpoints import Parent
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import load, tokenizer_diff
from rlhf_cli.models.tokenizers import PAD, template_sha256, tokenizer_sha256
from rlhf_cli.rows import read_jsonl

STORED, DRAWN, LENGTH = 6, 2, 64  # rows, rows, tokens
TOLERANCE = 1e-4  # of the largest logit
ROUNDINGS = 10  # what fewer digits may do, in roundings of a number: 0.8 % each in bfloat16, 0.1 % in float16


@dataclass(frozen=True)
class Rows:
    """Tokens to compare on: `stored` of them are of texts that the run has left."""

    ids: list[list[int]]
    stored: int

    def __str__(self) -> str:
        drawn = len(self.ids) - self.stored
        return f"{self.stored} stored rows and {drawn} of random tokens" if self.stored else f"{drawn} random rows"


def rows_of(model: Parent, tokenizer: Any, config: Any) -> Rows:
    """Held-out rows that the run has left, and some of random tokens: they reach what no text holds."""
    stored = _probes(model) or _answers(model, tokenizer)
    length = min(LENGTH, load.context_length(config) or LENGTH)
    generator = torch.Generator().manual_seed(0)
    size = (DRAWN if stored else STORED + DRAWN, length)
    drawn = torch.randint(config.get_text_config().vocab_size, size, generator=generator).tolist()
    return Rows([*(ids[-length:] for ids in stored), *drawn], len(stored))


def _probes(model: Parent) -> list[list[int]]:
    """What a reward stage has stored, with its scores."""
    return [probe["prompt_ids"] + probe["response_ids"] for probe in model.manifest.get("probes", [])[:STORED]]


def _answers(model: Parent, tokenizer: Any) -> list[list[int]]:
    """Prompts and answers of the evaluation, held-out ones, else of PPO's training."""
    run = model.path.resolve().parent
    for path in (run / "eval/samples.jsonl", run / "ppo/samples.jsonl"):
        with suppress(RLHFError):  # not there, or half written
            found = [row for _, row in islice(read_jsonl(path), STORED)]
            texts = [row["prompt"] + row["response"] for row in found if {"prompt", "response"} <= row.keys()]
            if ids := [ids for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] if ids]:
                return ids
    return []


@torch.no_grad()
def logits(model: Any, rows: Rows) -> list[Tensor]:
    """What the model makes of each row, by itself: no padding has a say."""
    return [model(input_ids=torch.tensor([ids])).logits[0] for ids in rows.ids]


def require(folder: Path, rows: Rows, own: list[Tensor], written: torch.dtype, tokenizer: Any, trust: bool) -> float:
    """The largest difference between a folder's logits and the run's `own`, as a share of the largest of these.

    Both in float32, so that it is the weights that are compared. Raises RLHFError M12 where it is more than rounding
    to the format `written` makes, or where weights or tokens are others.
    """
    kind = AutoModelForSequenceClassification if own[0].shape == (1,) else AutoModelForCausalLM
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=trust,
        output_loading_info=True,
    )  # fmt: skip
    if odd := sorted({*report["missing_keys"], *report["unexpected_keys"]}):
        raise _another(f"the weights of {', '.join(odd[:3])} are missing, or not in the model")
    again = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    for name, read in (("tokenizer", tokenizer_sha256), ("chat template", template_sha256)):
        if read(again) != read(tokenizer):
            raise _another(f"its {name} is another one")
    if apart := tokenizer_diff.first_difference(tokenizer, again, PAD):
        raise _another(f"its tokenizer is another one: {apart}")
    theirs = logits(model.eval(), rows)
    difference = max(float((ours - other).abs().max()) for ours, other in zip(own, theirs, strict=True))
    difference /= max(float(each.abs().max()) for each in own)
    allowed = TOLERANCE if written == torch.float32 else ROUNDINGS * torch.finfo(written).eps
    if not difference <= allowed:  # nan, too
        raise _another(f"its logits differ by {difference:.1e} of the largest, {allowed:.1e} is allowed")
    return difference


def _another(text: str) -> RLHFError:
    hint = "nothing was left; other versions of transformers or peft may help, or without --dtype the run's own format"
    return RLHFError("M12", f"loaded again, the exported folder is not the run's model: {text}", hint=hint)
