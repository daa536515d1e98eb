"""What options of other systems are called here: PPO, GRPO and DPO of TRL, OpenRLHF, verl, transformers, peft.

One table for all who meet such a name: an error's hint (unknown.py), `rlhf explain`, and `rlhf convert`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_cli.config.base import TRACKERS


@dataclass(frozen=True)
class Foreign:
    """An option of theirs: our key for it, or why there is none.

    `key` is a path from the top of the file, or the last name of one. `why` tells in what its numbers differ, or, where
    there is no key, why there is none. `words` are our words, as YAML has them, for values of theirs.
    """

    key: str | None
    why: str = ""
    words: Mapping[str, str] = field(default_factory=dict)


def _none(why: str, *names: str) -> dict[str, Foreign]:
    return dict.fromkeys(names, Foreign(None, why))


_IN_A_LIST = {name: f"[{name}]" for name in TRACKERS}
_EPISODES = "times gradient_accumulation_steps it is the episodes of an update"
_COUNTED = "it counts minibatches: batch size / mini_batch_size"

FOREIGN: dict[str, Foreign] = {
    # The objective
    "kl_penalty": Foreign("kl_estimator", words={"kl": "k1", "abs": "abs", "mse": "k2", "full": "full"}),
    "init_kl_coef": Foreign("kl_coef"),
    "beta": Foreign("kl_coef"),
    "kl_target": Foreign("target"),
    "kl_horizon": Foreign("horizon"),
    "vf_loss_coef": Foreign("vf_coef"),
    "vf_loss": Foreign("vf_coef"),
    "clip_range": Foreign("cliprange"),
    "clip_range_value": Foreign("cliprange_value"),
    "eps_clip": Foreign("cliprange"),
    "clip_ratio": Foreign("cliprange"),
    "epsilon": Foreign("cliprange"),
    "epsilon_high": Foreign("cliprange_high", "the range above 1"),
    "clip_ratio_high": Foreign("cliprange_high", "the range above 1"),
    "clip_ratio_c": Foreign("dual_clip"),
    "value_clip": Foreign("cliprange_value"),
    "lambd": Foreign("lam"),
    "entropy_loss_coef": Foreign("entropy_coef"),
    "entropy_coeff": Foreign("entropy_coef"),
    "penalty_reward_value": Foreign("missing_eos_penalty"),
    "non_eos_penalty": Foreign("missing_eos_penalty"),
    "reward_clip_range": Foreign("score_clip", "one number, the limit on both sides"),
    "overlong_buffer_len": Foreign("overlong_penalty", "{tokens: n, factor: f}"),
    # How much, how often, how fast
    "ppo_epochs": Foreign("num_ppo_epochs"),
    "steps": Foreign("total_episodes"),
    "epochs": Foreign("num_train_epochs"),
    "num_epochs": Foreign("num_train_epochs"),
    "mini_batch_size": Foreign("num_mini_batches", _COUNTED),
    "local_mini_batch_size": Foreign("num_mini_batches", _COUNTED),
    "batch_size": Foreign("per_device_train_batch_size", _EPISODES),
    "local_batch_size": Foreign("per_device_train_batch_size", _EPISODES),
    "micro_batch_size": Foreign("per_device_train_batch_size"),
    "micro_train_batch_size": Foreign("per_device_train_batch_size"),
    "micro_rollout_batch_size": Foreign("local_rollout_forward_batch_size"),
    "rollout_batch_size": Foreign("per_device_train_batch_size", _EPISODES),
    "backward_batch_size": Foreign("per_device_train_batch_size"),
    "forward_batch_size": Foreign("per_device_train_batch_size"),
    "n_samples_per_prompt": Foreign("num_samples_per_prompt"),
    "num_generations": Foreign("num_samples_per_prompt"),
    "lr": Foreign("learning_rate"),
    "actor_learning_rate": Foreign("learning_rate"),
    "critic_learning_rate": Foreign("value_learning_rate"),
    "freezing_actor_steps": Foreign("value_only_updates"),
    "critic_warmup": Foreign("value_only_updates"),
    "grad_clip": Foreign("max_grad_norm"),
    "max_norm": Foreign("max_grad_norm"),
    "mixed_precision": Foreign("bf16", words={"bf16": "true", "no": "false"}),
    "max_seq_length": Foreign("max_length"),
    **_none("ppo.total_episodes or ppo.num_train_epochs sets the length", "max_steps"),
    **_none("schedules have no arguments", "lr_scheduler_kwargs"),
    **_none("the optimizer has only adam_beta1, adam_beta2, adam_epsilon and weight_decay", "optim_args"),
    **_none("gradient checkpointing has no options", "gradient_checkpointing_kwargs"),
    # Sampling
    "max_new_tokens": Foreign("response_length"),
    "generate_max_len": Foreign("response_length"),
    "eos_token_id": Foreign("stop_token_id"),
    **_none(
        "PPO samples from the full softmax, from which log-probs are computed",
        "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "min_length", "min_new_tokens",
    ),
    **_none("PPO always samples its responses", "do_sample", "num_beams"),
    **_none(
        "the trained model generates the responses in its own process, without a separate engine",
        "vllm", "gpu_memory_utilization", "tensor_model_parallel_size", "enforce_eager",
    ),
    **_none("only sft.yaml and reward.yaml accept trainer.use_liger_kernel: true", "liger", "use_liger"),
    **_none("response_length counts only the response", "max_length"),
    **_none("the pad token of the SFT checkpoint is used, or one is added", "pad_token_id"),
    # Models
    "sft_model_path": Foreign("models.sft"),
    "model_name": Foreign("models.sft"),
    "model_name_or_path": Foreign("models.sft"),
    "model_revision": Foreign("models.revision"),
    "torch_dtype": Foreign("models.dtype"),
    "reward_model_path": Foreign("models.reward"),
    "reward_model": Foreign("models.reward"),
    "value_model_path": Foreign("models.value"),
    **_none("the reference is models.sft, frozen", "ref_model_path", "ref_adapter_name"),
    **_none("encoder-decoder models cannot be trained", "is_encoder_decoder"),
    **_none("`trust_remote_code` is an option of the command line", "trust_remote_code"),
    # Adapters
    "lora_r": Foreign("r"),
    "rank": Foreign("r"),
    "alpha": Foreign("lora_alpha"),
    "dropout": Foreign("lora_dropout"),
    "lora_target_modules": Foreign("target_modules"),
    "use_peft": Foreign("models.adapters", "{kind: lora, r: 16, lora_alpha: 32}"),
    "is_peft_model": Foreign("models.adapters", "{kind: lora}"),
    **_none("each model has its own adapters, which need no names", "model_adapter_name", "reward_adapter"),
    **_none("PPO turns dropout off", "lora_dropout"),
    **_none(
        "PPO does not quantise base weights; models.dtype: bfloat16 halves their memory",
        "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant",
        "quantization_config",
    ),
    **_none(
        "only adapters on linear layers and the value head are trained",
        "lora_modules_to_save", "lora_target_parameters", "lora_bias",
    ),
    **_none("the task type follows from the model", "lora_task_type"),
    # Data
    "query_dataset": Foreign("data.prompts"),
    "dataset_name": Foreign("data.prompts"),
    "dataset_config": Foreign("data.subset"),
    "dataset_train_split": Foreign("data.prompts", "OWNER/NAME[SPLIT]"),
    "dataset_test_split": Foreign("data.eval_prompts", "OWNER/NAME[SPLIT]"),
    **_none("append the folder to the dataset name, OWNER/NAME/FOLDER", "data_dir"),
    **_none("rows are tokenised once and cached", "dataset_num_proc"),
    **_none("data.max_rows streams the first rows of a dataset that is not in the Hub cache", "dataset_streaming"),
    **_none("only the needed columns are read", "remove_unused_columns"),
    # What comes of a run
    "exp_name": Foreign("output.run_name"),
    "task_name": Foreign("output.run_name"),
    "save_total_limit": Foreign("output.keep"),
    "push_to_hub_if_best_kwargs": Foreign("push_to_hub_if_best", "only the repository's name"),
    "log_with": Foreign("output.report_to", words=_IN_A_LIST),
    "experiment_name": Foreign("output.run_name"),
    "wandb_run_name": Foreign("output.run_name"),
    "tracker_project_name": Foreign("output.project"),
    "project_name": Foreign("output.project"),
    "wandb_project": Foreign("output.project"),
    **_none("set environment variables of the tracker, e.g. WANDB_ENTITY or TRACKIO_SPACE_ID", "tracker_kwargs"),
    **_none("each update is compared with the best one so far", "compare_steps"),
    **_none("the output is RUN/ppo, in the folder of the config", "output_dir", "logging_dir", "project_kwargs"),
    **_none("nothing is overwritten; --fresh starts over", "overwrite_output_dir"),
    **_none("a stopped run resumes automatically", "resume_from_checkpoint"),
    **_none(
        "each update writes a line of metrics.jsonl", "logging_steps", "logging_strategy", "logging_first_step"
    ),
    **_none("output.save_steps sets the interval", "save_strategy"),
    **_none(
        "evaluation is a separate stage, `rlhf eval`",
        "eval_strategy", "eval_steps", "eval_on_start", "eval_delay", "per_device_eval_batch_size", "do_eval",
    ),
    **_none(
        "`rlhf export` writes a folder that can be pushed",
        "push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "hub_always_push", "hub_revision",
    ),
    # Machines
    **_none("it is detected", "world_size", "local_rank"),
    **_none("`--nproc` is an option of the command line", "num_processes"),
    **_none("memory is released automatically", "optimize_device_cache", "optimize_cuda_cache"),
    **_none("ppo.bf16 and `--nproc` replace the options of accelerate", "accelerator_kwargs", "accelerator_config"),
    **_none(
        "ppo.fsdp shards the models over several processes (docs/scale.md); ZeRO is for SFT and the reward model",
        "deepspeed",
    ),
    **_none("ppo.fsdp: true has no further options (docs/scale.md)", "fsdp_config"),
    **_none("the policy is gathered for rollouts automatically", "ds3_gather_for_generation"),
    **_none("gradients are reduced in one step", "ignore_bias_buffers", "ddp_find_unused_parameters"),
}  # fmt: skip


def foreign(name: str) -> Foreign | None:
    """What a name of theirs is here; vLLM has many options, and all of them one answer."""
    return FOREIGN.get(name) or (FOREIGN["vllm"] if "vllm" in name else None)
