"""Raw scores of the saved reward model, and the probes that PPO must reproduce."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import build, devices, forward
from rlhf_cli.models.batch import right_pad
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.progress import track_progress
from rlhf_cli.stages.common import held_out
from rlhf_cli.stages.common.training_rows import PairRows

NUM_PROBES = 8


def use_bf16(config: RewardConfig) -> bool:
    """Return True if the stage computes in bfloat16."""
    return devices.use_bf16(config.reward.bf16)


@torch.no_grad()
def raw_scores(
    scorer: Any,
    rows: list[list[int]],
    size: int,
    process_group: ProcessGroup = SINGLE_PROCESS,
    *,
    bf16: bool = False,
) -> list[float]:
    """Return the logit at the last token of each row of ids, in batches of `size` rows of similar length.

    The batches are shared among the ranks, and all of them get all scores.
    """
    rank_scores: dict[int, float] = {}
    batches = held_out.batches_by_length([len(ids) for ids in rows], size)
    for batch in track_progress("score: batch", process_group.shard(batches)):
        scores = _batch_scores(scorer, [rows[i] for i in batch], bf16=bf16)
        rank_scores.update(zip(batch, scores, strict=True))
    return held_out.gather_rows(process_group, rank_scores)


def _batch_scores(scorer: Any, rows: list[list[int]], *, bf16: bool) -> list[float]:
    """Return the logit at the last token of each row of a batch."""
    ids, mask = right_pad(rows, build.pad_token_id(scorer.config) or 0)
    with devices.autocast(bf16=bf16):
        output = scorer.base_model(
            input_ids=ids.to(scorer.device),
            attention_mask=mask.long().to(scorer.device),
            use_cache=False,
        )
    last = output.last_hidden_state[range(len(rows)), mask.sum(1) - 1]
    logits = scorer.score(last.to(scorer.score.weight.dtype))  # rounding a score to bfloat16 would lose two digits
    scores: list[float] = logits[:, 0].float().tolist()
    if not all(map(math.isfinite, scores)):
        text = "the finished model gives scores that are not finite: the training diverged"
        raise RLHFError("R01", text, hint="lower reward.learning_rate and start over with --fresh")
    return scores


def scaled_scores(
    scorer: Any,
    rows: PairRows,
    names: Sequence[str],
    size: int,
    process_group: ProcessGroup = SINGLE_PROCESS,
    *,
    bf16: bool = False,
) -> list[float]:
    """Return the scores, as PPO sees them, of the answer of each row that `names` names: chosen_ids or rejected_ids."""
    ids = [row[name] for row, name in zip(rows, names, strict=True)]
    lengths = [len(answer) - len(row["prompt_ids"]) for row, answer in zip(rows, ids, strict=True)]
    raw = raw_scores(scorer, ids, size, process_group, bf16=bf16)
    return list(map(partial(forward.scale_scores, scorer.config), raw, lengths))


def reference_probes(scorer: Any, rows: PairRows, *, bf16: bool = False) -> list[dict[str, Any]]:
    """Return some rows, chosen and rejected alternating, with the normalized scores PPO must reproduce (M09)."""
    rows = rows[:NUM_PROBES]
    names = ["rejected_ids" if number % 2 else "chosen_ids" for number in range(len(rows))]
    probes = []
    for row, name, score in zip(rows, names, scaled_scores(scorer, rows, names, 1, bf16=bf16), strict=True):
        start = len(row["prompt_ids"])
        probes.append({"prompt_ids": row[name][:start], "response_ids": row[name][start:], "score": score})
    return probes
