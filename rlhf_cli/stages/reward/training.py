"""Models to train and sample from, and TRL's trainer of the reward stage."""

from collections.abc import Mapping
from typing import Any

import trl
from torch.utils.data import SequentialSampler
from transformers import set_seed

from rlhf_cli.config.base import Options
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.errors import at_location
from rlhf_cli.models import load, lora, row_trial
from rlhf_cli.models.initial import check_initial, find_initial
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages.common import batch_sizes, model_loading, trainable_model, trl_trainer
from rlhf_cli.stages.common.best_step import BestStep
from rlhf_cli.stages.common.training_rows import PairRows


class RewardTrainer(trl_trainer.TrainerMixin, trl.RewardTrainer):
    """TRL's trainer with length-grouped batches, and the margins of its evaluations."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return TRL's loss; in an evaluation also note the margins."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if self.best and not self.model.training:
            chosen, rejected = outputs.logits.detach().squeeze(-1).chunk(2)
            self.best.note(self.accelerator.gather_for_metrics(chosen - rejected))
        return (loss, outputs) if return_outputs else loss

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return a sampler in the order of the rows, whatever `trainer.train_sampling_strategy` is."""
        return SequentialSampler(eval_dataset)


def load_tokenizer_and_models(
    config: RewardConfig, options: Options, parents: Mapping[str, Parent]
) -> tuple[Any, Any, Any]:
    """Load the tokenizer, the model to train, and with LoRA the SFT model on the same weights, to sample from.

    The model to train is model.start if that is set, with its head.

    The SFT model is None if training changes these weights (without adapters, or to 4 bits), or if it is not needed.
    Raises RLHFError C07, C17, M01-M03, M06-M08, M10, T04, T05.
    """
    parent = parents["model.path"]
    tokenizer = model_loading.load_tokenizer(config, options, parent)
    with at_location(config.where(parent.key)):
        model_config = load.read_init_config(parent.model, options.trust_remote_code)
        trainable_model.check_can_sample(config, model_config)
    check_initial(config, options, parents)
    initial = find_initial(config, parents)

    adapters = config.model.adapters
    shares = adapters is not None and adapters.kind == "lora" and config.reward.normalize == "sft"
    set_seed(config.seed)  # for the random initial head
    bf16_base = lora.trains_on_bf16(config)
    model = model_loading.load_model(
        load.load_causal_lm if shares else load.init_reward_model,
        config,
        options,
        parent if adapters or initial is None else initial,
        tokenizer,
        bf16_matrices=bf16_base,
    )
    tokenizer = trainable_model.prepare_tokenizer(config, tokenizer, parent.stage)

    sft_model = None
    if shares:
        sft_model = trainable_model.grow_embeddings(model, tokenizer)
        model = load.init_reward_model_on(sft_model, parent.model, options.trust_remote_code)
        if model is None:
            sft_model = None
            kwargs = load.load_kwargs(config.model, options.trust_remote_code, bf16_matrices=bf16_base)
            model = load.init_reward_model(parent.model, **kwargs)

    row_trial.require_rows_alone(model, config.where(parent.key))
    trained = lora.prepare_for_training(config, parent, model, tokenizer)
    if adapters and initial:
        lora.load_adapter_weights(trained, initial.model)
    trained.config.reward_at_stop_token = True  # where its scores are read, also of a copy without the stage's manifest
    for field in lora.SCALE_FIELDS:  # of the reward model that it starts from
        vars(trained.config).pop(field, None)
    return tokenizer, trained, sft_model


def make_trainer(
    config: RewardConfig,
    model: Any,
    tokenizer: Any,
    rows: PairRows,
    eval_rows: PairRows,
    process_group: ProcessGroup,
) -> Any:
    """Return the trainer. The rows {chosen_ids, rejected_ids[, margin]} are tokenized, and none is too long."""
    args = trl_trainer.training_args(
        trl.RewardConfig,
        config,
        max_length=None,
        center_rewards_coefficient=config.reward.center_rewards_coefficient or None,
    )
    trainer = trl_trainer.build_trainer(
        RewardTrainer,
        config,
        args,
        rows=[_without_prompt_ids(row) for row in rows],
        eval_rows=[_without_prompt_ids(row) for row in eval_rows],
        lengths=batch_sizes.pair_lengths(config, rows),
        process_group=process_group,
        model=model,
        processing_class=tokenizer,
    )
    if eval_rows and not args.load_best_model_at_end:
        prompts = [tuple(row["prompt_ids"]) for row in eval_rows]
        trainer.best = BestStep(prompts, keeps_best=config.reward.keep == "best")
    return trainer


def _without_prompt_ids(row: dict[str, Any]) -> dict[str, Any]:
    """Return a pair as TRL's trainer takes it."""
    return {name: value for name, value in row.items() if name != "prompt_ids"}
