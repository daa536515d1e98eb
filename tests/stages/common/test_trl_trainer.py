"""TRL's trainers: their arguments, batches and loss."""

from pathlib import Path

import pytest
import torch
import trl
from trl_stage import metrics_of, train, trainer_of

from rlhf_cli import jsonl
from tests.conftest import World
from tests.stages.test_sft import config_of, fails

pytestmark = pytest.mark.full


def test_the_loops_loss_is_a_mean_over_tokens_like_the_headline(world: World, tmp_path: Path) -> None:
    """Rows of different length, in batches of one: the mean of the batches' means would be another number."""
    rows = [{"prompt": "Say it.", "completion": " moon" * count} for count in (1, 1, 1, 2, 3, 12, 24, 1)]
    jsonl.write_jsonl(tmp_path / "rows.jsonl", rows)
    sizes = {"num_train_epochs": 2, "max_steps": None, "learning_rate": 1e-12, "per_device_eval_batch_size": 1}
    config = config_of(world, tmp_path, tmp_path / "rows.jsonl", sft=sizes)
    headline = train(config)["metrics"]
    first, last = (line["eval_loss"] for line in metrics_of(config) if "eval_loss" in line)
    assert first == pytest.approx(headline["eval_loss"], rel=1e-4) and last == headline["eval_loss"]


def test_batches_have_rows_of_similar_length_with_group_by_length(world: World, tmp_path: Path) -> None:
    jsonl.write_jsonl(tmp_path / "long.jsonl", [{"prompt": "a", "completion": " b" * (1 + n % 40)} for n in range(160)])

    def padding(group: bool) -> int:
        trainer = trainer_of(config_of(world, tmp_path, tmp_path / "long.jsonl", sft={"group_by_length": group}))[0]
        return sum(int((batch["attention_mask"] == 0).sum()) for batch in trainer.get_train_dataloader())

    assert padding(True) < 0.2 * padding(False)


def test_other_fields_of_trl_reach_it_or_are_refused_in_one_line(world: World, tmp_path: Path) -> None:
    config = config_of(world, tmp_path, trainer={"neftune_noise_alpha": 5.0, "optim": "sgd"}, seed=7)
    args = trainer_of(config)[0].args
    assert (args.neftune_noise_alpha, args.optim, args.seed) == (5.0, "sgd", 7)
    assert not args.bf16 or torch.cuda.is_available()
    assert (args.max_steps, args.warmup_steps, args.save_steps) == (8, 0.03, 0.1)
    assert isinstance(args, trl.SFTConfig)
    schedules = {"cosine_warmup_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": 1}}
    for name, options in schedules.items():
        trainer = trainer_of(config_of(world, tmp_path, sft={"lr_scheduler_type": name}))[0]
        assert trainer.args.lr_scheduler_kwargs == options
        trainer.create_scheduler(8, trainer.create_optimizer())
    fails(config_of(world, tmp_path, trainer={"padding_free": True}), "C17", "padding_free")
