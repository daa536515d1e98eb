"""The options of TRL 0.11 and 1.12 with their defaults, and the settings parsed from a file."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

NUMBER = re.compile(r"[-+]?[\d_]*\.?\d[\d_]*\.?([eE][-+]?\d+)?")
WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None, "": None}


@dataclass(frozen=True)
class Setting:
    """An option of the file, by TRL's name. `where` is FILE:LINE.

    `call` is the function call that sets it, if its name there differs.
    """

    name: str
    value: Any
    where: str
    call: str = ""

    @property
    def shown(self) -> str:
        """Return its name in the file."""
        return self.call or self.name


@dataclass(frozen=True)
class UnparsedValue:
    """A setting whose value cannot be determined without running the file."""

    name: str
    where: str
    reason: str


@dataclass
class ParsedFile:
    """The settings of a file. `signs` are the TRL classes that it names."""

    settings: list[Setting] = field(default_factory=list)
    unparsed: list[UnparsedValue] = field(default_factory=list)
    signs: set[str] = field(default_factory=set)

    def add(self, name: str, value: Any, where: str, call: str = "") -> None:
        """Add an option and its value."""
        self.settings.append(Setting(name, value, where, call))

    def add_unparsed(self, name: str, where: str, reason: str) -> None:
        """Add a setting that could not be parsed, once."""
        if (value := UnparsedValue(name, where, reason)) not in self.unparsed:
            self.unparsed.append(value)


def value_of(text: str) -> Any:
    """Parse a text as transformers' argument parser and Python's JSON do."""
    if text in WORDS:
        return WORDS[text]
    try:
        if NUMBER.fullmatch(text):
            return float(text) if re.search(r"[.eE]", text) else int(text)
        return json.loads(text) if text[0] in "{[" else text
    except (ValueError, RecursionError):
        return text


OLD, NEW = "0.11", "1.12"
UNCLIPPED = 1e9  # max_grad_norm without effect
SOURCES = {
    OLD: "TRL 0.11, trl/trainer/ppo_config.py; remarks: ppo_trainer.py",
    NEW: "TRL 1.12, trl/experimental/ppo/ppo_config.py; remarks: ppo_trainer.py",
}


@dataclass(frozen=True)
class Option:
    """The default of a TRL option, and a remark on its effect."""

    default: Any
    remark: str = ""
    computed: bool = False  # by TRL, overriding the user's value
    ignored: bool = False  # accepted, without effect


def _computed() -> Option:
    return Option(None, computed=True)


# ScriptNames that identify the version: classes, and options of the newer scripts.
SIGNS = {
    "PPOv2Config": NEW,
    "AutoModelForCausalLMWithValueHead": OLD,
    "AutoModelForSeq2SeqLMWithValueHead": OLD,
}
NEW_OPTIONS = {"model_name_or_path", "dataset_train_split", "dataset_test_split", "eval_strategy", "use_peft"}
_LOGGED = "only logged"
OPTIONS: dict[str, dict[str, Option]] = {
    OLD: {
        "exp_name": Option(None, "default: the script's name"),
        "seed": Option(0, "the random generators differ"),
        "log_with": Option(None),
        "task_name": Option(None, _LOGGED),
        "model_name": Option("gpt2", _LOGGED + "; the examples load it"),
        "query_dataset": Option("stanfordnlp/imdb", _LOGGED + "; the examples load it"),
        "reward_model": Option(
            "sentiment-analysis:lvwerra/distilbert-imdb", _LOGGED + "; TASK:MODEL becomes rewards.classifier.pipeline"
        ),
        "remove_unused_columns": Option(True),
        "tracker_kwargs": Option({}),
        "accelerator_kwargs": Option({}),
        "project_kwargs": Option({}),
        "tracker_project_name": Option("trl"),
        "push_to_hub_if_best_kwargs": Option({}),
        "steps": Option(20000, "only a loop over total_ppo_epochs stopped at it", ignored=True),
        "learning_rate": Option(1.41e-5),
        "adap_kl_ctrl": Option(True),
        "init_kl_coef": Option(0.2),
        "kl_penalty": Option("kl"),
        "target": Option(6.0),
        "horizon": Option(10000.0),
        "gamma": Option(1.0),
        "lam": Option(0.95),
        "cliprange": Option(0.2),
        "cliprange_value": Option(0.2),
        "vf_coef": Option(0.1),
        "batch_size": Option(128, "episodes of an update"),
        "forward_batch_size": Option(None, "replaced mini_batch_size"),
        "mini_batch_size": Option(128, "rows of a forward pass"),
        "gradient_accumulation_steps": Option(1, "forward passes of an optimizer step"),
        "world_size": _computed(),
        "ppo_epochs": Option(4),
        "max_grad_norm": Option(None, "null: no clipping"),
        "optimize_cuda_cache": Option(None),
        "optimize_device_cache": Option(False),
        "early_stopping": Option(False),
        "target_kl": Option(1.0),
        "compare_steps": Option(1),
        "ratio_threshold": Option(10.0, "made the step with a loss of 0"),
        "use_score_scaling": Option(False),
        "use_score_norm": Option(False),
        "score_clip": Option(None),
        "whiten_rewards": Option(False),
        "gradient_checkpointing": Option(False),
        "is_encoder_decoder": Option(None),
        "is_peft_model": Option(None, "detected from the model"),
        "backward_batch_size": _computed(),
        "global_backward_batch_size": _computed(),
        "global_batch_size": _computed(),
        "dataset_num_proc": Option(None),
    },
    NEW: {
        # PPOConfig
        "dataset_num_proc": Option(None),
        "num_mini_batches": Option(1, "split a batch, mostly without more optimizer steps"),
        "total_episodes": Option(None),
        "local_rollout_forward_batch_size": Option(64),
        "num_sample_generations": Option(10),
        "response_length": Option(53),
        "stop_token": Option(None, "null: a response never ended early"),
        "stop_token_id": Option(None),
        "temperature": Option(0.7),
        "missing_eos_penalty": Option(None),
        "sft_model_path": Option("EleutherAI/pythia-160m"),
        "world_size": _computed(),
        "num_total_batches": _computed(),
        "micro_batch_size": _computed(),
        "local_batch_size": _computed(),
        "batch_size": _computed(),
        "local_mini_batch_size": _computed(),
        "mini_batch_size": _computed(),
        "push_to_hub": Option(False),
        "reward_model_path": Option("EleutherAI/pythia-160m"),
        "model_adapter_name": Option(None),
        "ref_adapter_name": Option(None),
        "num_ppo_epochs": Option(4),
        "whiten_rewards": Option(False),
        "kl_coef": Option(0.05),
        "kl_estimator": Option("k1"),
        "cliprange": Option(0.2),
        "vf_coef": Option(0.1),
        "cliprange_value": Option(0.2),
        "gamma": Option(1.0),
        "lam": Option(0.95),
        "ds3_gather_for_generation": Option(True),
        # TrainingArguments that affect PPO
        "learning_rate": Option(3e-6),
        "per_device_train_batch_size": Option(8),
        "gradient_accumulation_steps": Option(1),
        "num_train_epochs": Option(3.0),
        "lr_scheduler_type": Option("linear"),
        "warmup_ratio": Option(None),
        "warmup_steps": Option(0, "a number below 1 was a ratio"),
        "weight_decay": Option(0.0),
        "adam_beta1": Option(0.9),
        "adam_beta2": Option(0.999),
        "adam_epsilon": Option(1e-8),
        "optim": Option("adamw_torch_fused"),
        "max_grad_norm": Option(1.0, "never applied", ignored=True),
        "gradient_checkpointing": Option(True, "without effect", ignored=True),
        "bf16": Option(True, "in effect with transformers 4, not with 5.23"),
        "fp16": Option(False),
        "seed": Option(42, "the random generators differ"),
        "output_dir": Option(None),
        "run_name": Option(None),
        "report_to": Option("none"),
        "save_steps": Option(500),
        "save_total_limit": Option(None),
    },
}
# Fixed behavior of each TRL trainer, by key, with the reason.
FIXED_BEHAVIOR: dict[str, dict[str, tuple[Any, str]]] = {
    OLD: {
        "models.value": ("policy_head", "AutoModelForCausalLMWithValueHead"),
        "ppo.num_train_epochs": (1.0, "your own loop; TRL's examples make one pass over the prompts"),
        "ppo.lr_scheduler_type": ("constant", "no schedule, unless one was passed to PPOTrainer"),
        "ppo.temperature": (1.0, "log-probs were computed at temperature 1"),
        "ppo.missing_eos_penalty": (None, "TRL had no such penalty"),
        "ppo.max_grad_norm": (UNCLIPPED, "gradients were not clipped: a limit that is never reached"),
    },
    NEW: {
        "ppo.stop_token": ("none", "null: a response never ended early; eos: at the SFT checkpoint's stop token"),
        "ppo.max_grad_norm": (
            UNCLIPPED,
            "gradients were not clipped: a limit that is never reached; 1.0 is recommended",
        ),
        "ppo.ratio_threshold": (None, "no minibatch was ever skipped"),
    },
}


def detect_version(read: ParsedFile) -> tuple[str, str]:
    """Return the TRL version of a file, and the reason."""
    specific = {
        OLD: OPTIONS[OLD].keys() - OPTIONS[NEW].keys(),
        NEW: (OPTIONS[NEW].keys() | NEW_OPTIONS) - OPTIONS[OLD].keys(),
    }
    names = dict.fromkeys(setting.name for setting in read.settings if not setting.call)
    evidence = {version: [name for name in names if name in specific[version]] for version in (OLD, NEW)}
    for sign in sorted(read.signs & SIGNS.keys()):
        evidence[SIGNS[sign]].insert(0, sign)
    version = OLD if len(evidence[OLD]) > len(evidence[NEW]) else NEW
    contrary = evidence[NEW if version == OLD else OLD]
    if not evidence[version]:
        return version, "no option is specific to a version; use --trl 0.11 for the older one"
    reason = f"{_listed(evidence[version])} {'exist' if len(evidence[version]) > 1 else 'exists'} only in that version"
    return version, reason + (f"; {_listed(contrary)} only in the other: check, or set --trl" if contrary else "")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
