"""`rlhf reward`: train a one-label head on the SFT model with TRL's RewardTrainer, and evaluate it."""

from contextlib import ExitStack
from typing import Any

from rlhf_cli import data
from rlhf_cli.config.base import Options
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.evaluation.reward_card import print_card
from rlhf_cli.models import devices
from rlhf_cli.runs.report import KeptStep
from rlhf_cli.stages.common import lifecycle, training_rows, trl_training
from rlhf_cli.stages.reward.card import label_errors, make_report_card
from rlhf_cli.stages.reward.ensemble import measure_ensemble, open_members, train_other_members
from rlhf_cli.stages.reward.normalize import ModelsInMemory, load_normalized
from rlhf_cli.stages.reward.scores import reference_probes, use_bf16
from rlhf_cli.stages.reward.training import load_tokenizer_and_models, make_trainer

SCORES = "It scores a prompt with its answer at the last token, the token that ended the answers of its training."
CARD = {  # by reward.normalize
    "none": SCORES,
    "sft": f"{SCORES} The raw score is `logits[:, 0]`. `reward_mean` and `reward_std` in config.json are those of the "
    "SFT model's own answers; the score that PPO uses is `(raw - reward_mean) / reward_std`.",
}
DEBIASED = (
    " Where config.json has a `reward_length_slope`, first `reward_length_slope * (tokens - reward_length_mean)` is "
    "subtracted from the raw score; the tokens are those of the answer with its end."
)


def run(config: RewardConfig, options: Options) -> None:
    """Train a reward model and write RUN/reward; resume from the last checkpoint if there is one.

    Raises RLHFError as `lifecycle.run_stage`.
    """
    lifecycle.run_stage(config, options, _train)


def _train(config: RewardConfig, stage: lifecycle.StageRun) -> None:
    process_group = stage.process_group
    train_other_members(config, stage, _train)
    tokenizer, model, sft_model = load_tokenizer_and_models(config, stage.options, stage.parents)
    stop_id = data.stop_token_id(tokenizer)
    with process_group.main_process_first():
        rows, eval_rows = training_rows.read_train_and_eval(config, tokenizer, model.config)
    fields = lifecycle.manifest_fields(rows, tokenizer, stop_id)

    stage.begin_training()
    trainer = make_trainer(config, model, tokenizer, rows, eval_rows, process_group)
    del model
    with ExitStack() as trackers:
        steps, log, base, kept_step = trl_training.train_and_save(
            trainer,
            config,
            stage,
            rows,
            tokenizer,
            stop_token_id=stop_id,
            note=_card_note(config),
            trackers=trackers,
        )
        del trainer
        devices.release_memory()  # before a model is loaded again

        # Everything measured describes the saved files.
        in_memory = ModelsInMemory(sft_model, base)
        del sft_model, base
        scorer, scale, trend = load_normalized(config, stage, in_memory, tokenizer, rows)
        card, metrics, pairs = make_report_card(
            config, scorer, tokenizer, eval_rows, trend, process_group=process_group
        )
        if card and kept_step is None:  # else the log has an evaluation of the last step
            trl_training.log_final_evaluation(log, steps, metrics)

    if config.reward.ensemble:
        fields["members"] = open_members(config)
    if card:
        card = card.with_changes(
            label_errors=label_errors(rows),
            kept_step=kept_step,
            ensemble=measure_ensemble(config, stage, scorer, eval_rows, pairs) if config.reward.ensemble else None,
        )
        fields["card"] = card.to_json()
    fields["metrics"] = card.headline() if card else {}
    fields["probes"] = reference_probes(scorer, eval_rows or rows, bf16=use_bf16(config))
    if use_bf16(config):
        fields["probes_dtype"] = "bfloat16"
    stage.complete({**fields, **scale, **_step_fields(steps, kept_step)})
    if card:
        print_card(card)


def _step_fields(steps: int, kept: KeptStep | None) -> dict[str, Any]:
    """Return the manifest's fields about the model's step; `model_is` only if there was a choice."""
    if kept is None:
        return {"step": steps}
    return {"model_is": "the last step" if kept.step == steps else "the best step", "step": kept.step}


def _card_note(config: RewardConfig) -> str:
    """Return the sentences of the model card on the scores."""
    return CARD[config.reward.normalize] + (DEBIASED if config.reward.length_debias else "")
