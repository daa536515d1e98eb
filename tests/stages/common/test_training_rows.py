"""Rows of a training: TRL gets our tokens and labels, and packed rows do not see one another."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from trl_stage import train, trainer_of

from rlhf_cli import data, jsonl
from tests.conftest import World
from tests.stages.test_sft import config_of

pytestmark = pytest.mark.full


@pytest.mark.parametrize("completion_only", [True, False])
def test_trl_gets_our_tokens_and_labels_unchanged(world: World, tmp_path: Path, completion_only: bool) -> None:
    config = config_of(world, tmp_path, sft={"completion_only_loss": completion_only})
    trainer, token_rows, tokenizer = trainer_of(config)
    expected = []
    for _, row in jsonl.read_jsonl(world.sft):
        prompt, response = data.encode(tokenizer, row["prompt"], row["completion"])
        expected.append((prompt + response, ([-100] * len(prompt) if completion_only else prompt) + response))
    assert [(row["input_ids"], row["labels"]) for row in token_rows] == expected
    seen, names = [], ("input_ids", "labels", "attention_mask")
    for batch in trainer.get_train_dataloader():
        assert batch.keys() == set(names)
        for ids, labels, mask in zip(*(batch[name].tolist() for name in names), strict=True):
            length = sum(mask)
            assert set(ids[length:]) <= {tokenizer.pad_token_id} and set(labels[length:]) <= {-100}
            assert labels[length - 1] == ids[length - 1] == tokenizer.eos_token_id
            seen.append((ids[:length], labels[:length]))
    assert sorted(seen) == sorted(expected)


def test_packed_rows_do_not_attend_to_one_another(world: World, tmp_path: Path) -> None:
    config = config_of(world, tmp_path, sft={"packing": True, "max_length": 64, "max_steps": 2})
    trainer, token_rows, _ = trainer_of(config)
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch.pop("labels")
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), labels.shape[1]]
    assert len(starts) > 16  # eight sequences of at least two rows
    known = {tuple(row["input_ids"]): row["labels"] for row in token_rows}
    with torch.no_grad():
        together = trainer.model.eval()(**batch, use_cache=False).logits[0]
        for start, stop in pairwise(starts):
            ids = batch["input_ids"][:, start:stop]
            assert torch.allclose(trainer.model(ids, use_cache=False).logits[0], together[start:stop], atol=1e-4)
            assert labels[0, start + 1 : stop].tolist() == known[tuple(ids[0].tolist())][1:]
    assert train(config)["step"] == 2
