"""`rlhf convert`: TRL's values under this tool's keys; every option is converted or listed with a reason."""

import json
import math
import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import CHARACTERS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ppo_folder import lines, must_succeed
from run_cli import ROOT, is_one_error, rlhf

from rlhf_cli import config
from rlhf_cli.commands.convert.mapping import (
    BATCH_KEYS,
    NEW,
    OLD,
    OPTIONS,
    VERSIONS,
    Conversion,
    convert_old_batch,
    convert_settings,
    target_key,
)
from rlhf_cli.commands.convert.read import TRLSettings, read_settings
from rlhf_cli.commands.convert.write import page
from rlhf_cli.config.ppo import PPOConfig, PPOSettings
from rlhf_cli.errors import RLHFError
from rlhf_cli.trees import at
from tests.conftest import SHARED

pytestmark = pytest.mark.usefixtures("here")
# trl/trainer/model_config.py and trl/scripts/utils.py of TRL 1.12, and arguments of generate().
SCRIPT_OPTIONS = """
    model_name_or_path model_revision dtype torch_dtype trust_remote_code attn_implementation use_peft lora_r
    lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora
    use_dora load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage dataset_name
    dataset_config dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers"""
GENERATE_OPTIONS = (
    "max_new_tokens min_length top_k top_p do_sample pad_token_id eos_token_id repetition_penalty num_beams"
)
OPTIONS_OF = {OLD: OPTIONS[OLD] + GENERATE_OPTIONS.split(), NEW: OPTIONS[NEW] + SCRIPT_OPTIONS.split()}
# TRL 0.11's first example: GPT-2 on film reviews. TRL 1.12's example: TL;DR.
SENTIMENT = {
    "model_name": "lvwerra/gpt2-imdb", "query_dataset": "stanfordnlp/imdb", "learning_rate": 1.41e-5,
    "reward_model": "sentiment-analysis:lvwerra/distilbert-imdb", "log_with": "wandb", "batch_size": 16,
    "mini_batch_size": 16, "adap_kl_ctrl": True, "max_new_tokens": 32, "top_k": 0.0, "do_sample": True,
}  # fmt: skip
TLDR = {
    "dataset_name": "trl-lib/tldr", "dataset_test_split": "validation", "output_dir": "models/minimal/ppo_tldr",
    "learning_rate": 3e-6, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4,
    "total_episodes": 1_000_000, "model_name_or_path": "EleutherAI/pythia-1b-deduped",
    "sft_model_path": "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr", "stop_token": "eos", "eval_steps": 100,
    "reward_model_path": "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr", "missing_eos_penalty": 1.0,
    "local_rollout_forward_batch_size": 16, "eval_strategy": "steps",
}  # fmt: skip
FORMS = {
    ".yaml": lambda options: yaml.safe_dump({"ppo_config": options}),
    ".json": lambda options: json.dumps({"training_args": options}),
    ".sh": lambda options: "#!/bin/bash\npython examples/scripts/ppo.py \\\n" + "\n".join(
        f"  --{name} '{value}'" for name, value in options.items()
    ) + " > ppo.log 2>&1 | tee all.log\n",
    ".txt": lambda options: "\ufeff" + FORMS[".sh"](options).replace("\n", "\r\n"),  # of Windows
    ".py": lambda options: f"config = trl.PPOConfig({', '.join(f'{name}={each!r}' for name, each in options.items())})",
}  # fmt: skip


def run_convert(text: str, suffix: str = ".yaml", *arguments: str) -> tuple[PPOConfig, str, str]:
    """Return the config that the command writes, its text, and what the command prints."""
    file = Path(f"theirs{suffix}")
    file.write_text(text, encoding="utf-8")
    folder = f"run{len(list(Path.cwd().iterdir()))}"
    result = rlhf("convert", file, folder, *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return config.load("ppo", f"{folder}/ppo.yaml"), Path(f"{folder}/ppo.yaml").read_text(), result.stdout


def converted(version: str, **options: Any) -> Conversion:
    return convert_settings(TRLSettings(options), version)


def loaded(conversion: Conversion) -> PPOConfig:
    Path("ppo.yaml").write_text(page(conversion, "theirs"), encoding="utf-8")
    return config.load("ppo", "ppo.yaml")


def read(text: str, suffix: str) -> TRLSettings:
    Path(f"theirs{suffix}").write_text(text, encoding="utf-8")
    return read_settings(Path(f"theirs{suffix}"))


def values(text: str, suffix: str = ".py") -> dict[str, Any]:
    return read(text, suffix).options


# Examples of TRL


@pytest.mark.parametrize("suffix", FORMS)
@pytest.mark.parametrize(
    ("version", "example", "expected"),
    [
        (OLD, SENTIMENT, {
            "models.sft": "lvwerra/gpt2-imdb", "models.value": "policy_head", "data.prompts": "stanfordnlp/imdb",
            "rewards.classifier.pipeline": "lvwerra/distilbert-imdb", "rewards.classifier.input": "both",
            "ppo.per_device_train_batch_size": 16, "ppo.num_mini_batches": 1,
            "ppo.gradient_accumulation_steps": 1, "ppo.kl_coef": 0.2, "ppo.adap_kl_ctrl": True,
            "ppo.response_length": 32, "ppo.num_train_epochs": 1.0, "output.report_to": ["wandb"],
        }),
        (NEW, TLDR, {
            "models.sft": TLDR["sft_model_path"], "models.reward": TLDR["reward_model_path"],
            "models.value": "reward", "data.prompts": "trl-lib/tldr", "data.eval_prompts": "trl-lib/tldr[validation]",
            "ppo.total_episodes": 1_000_000, "ppo.per_device_train_batch_size": 16, "ppo.stop_token": "eos",
            "ppo.gradient_accumulation_steps": 4, "ppo.num_mini_batches": 1, "ppo.missing_eos_penalty": 1.0,
            "ppo.local_rollout_forward_batch_size": 16,
        }),
    ],
)  # fmt: skip
def test_the_examples_of_trl_in_every_form(version: str, example: Any, expected: dict[str, Any], suffix: str) -> None:
    result, text, output = run_convert(FORMS[suffix](example), suffix)
    assert output.startswith(f"theirs{suffix} is of TRL {version}: only that version has ")
    assert {key: at(result.model_dump(), key) for key in expected} == expected
    assert ("# output_dir: models/minimal/ppo_tldr (" in text and "# model_name_or_path: " in text) == (version == NEW)
    assert output.splitlines()[-1].endswith("ppo.yaml; next: rlhf check " + output.split()[-1])


# TRL's values


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (OLD, {
            "learning_rate": 1.41e-5, "adap_kl_ctrl": True, "kl_coef": 0.2, "kl_estimator": "k1", "target": 6.0,
            "horizon": 10_000, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1,
            "num_ppo_epochs": 4, "early_stopping": False, "target_kl": 1.0, "ratio_threshold": 10.0,
            "score_clip": None, "use_score_scaling": False, "use_score_norm": False, "whiten_rewards": False,
            "gradient_checkpointing": False, "per_device_train_batch_size": 128, "gradient_accumulation_steps": 1,
            "num_mini_batches": 1,
            # Fixed behaviour of its trainer and examples: no clipping, schedule or penalty, one pass, temperature 1.
            "max_grad_norm": 1e9, "lr_scheduler_type": "constant", "missing_eos_penalty": None,
            "num_train_epochs": 1.0, "temperature": 1.0, "stop_token": "eos", "weight_decay": 0.0, "bf16": False,
        }),
        (NEW, {
            "kl_coef": 0.05, "kl_estimator": "k1", "cliprange": 0.2, "vf_coef": 0.1, "cliprange_value": 0.2,
            "gamma": 1.0, "lam": 0.95, "num_ppo_epochs": 4, "num_mini_batches": 1, "whiten_rewards": False,
            "response_length": 53, "temperature": 0.7, "missing_eos_penalty": None, "num_sample_generations": 10,
            "learning_rate": 3e-6, "local_rollout_forward_batch_size": 64, "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "total_episodes": None, "bf16": True,
            "lr_scheduler_type": "linear", "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
            "adam_epsilon": 1e-8, "optim": "adamw_torch_fused", "fp16": False,
            # Fixed behaviour: nothing ended a response, clipped a gradient or skipped a minibatch.
            "stop_token": "none", "stop_token_id": None, "max_grad_norm": 1e9, "ratio_threshold": None,
            "gradient_checkpointing": False, "adap_kl_ctrl": False, "early_stopping": False, "score_clip": None,
        }),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{"sft_model_path": "a/b"}, {"use_peft": True}])
def test_options_that_the_file_omits_have_trls_values(version: str, expected: Any, options: Any) -> None:
    """Adapters raise this tool's learning rate, not TRL's."""
    result = loaded(converted(version, **options))
    assert {key: getattr(result.ppo, key) for key in expected} == expected
    assert result.ppo.num_warmup(100) == 0
    assert result.models.value == {OLD: "policy_head", NEW: "reward"}[version]


@pytest.mark.parametrize(
    ("version", "options", "expected"),
    [
        (OLD, {"kl_penalty": "kl"}, {"kl_estimator": "k1"}),
        (OLD, {"kl_penalty": "mse"}, {"kl_estimator": "k2"}),
        (OLD, {"kl_penalty": "full"}, {"kl_estimator": "full"}),
        (OLD, {"steps": 5000}, {"total_episodes": 5000}),
        (OLD, {"horizon": 5000, "target": 3}, {"horizon": 5000, "target": 3, "adap_kl_ctrl": True}),
        (OLD, {"max_grad_norm": None}, {"max_grad_norm": 1e9}),
        (OLD, {"eos_token_id": 50256}, {"stop_token_id": 50256}),
        (OLD, {"exp_name": "first", "seed": 3}, {"run_name": "first", "seed": 3}),
        (OLD, {"score_clip": 0.5, "use_score_scaling": True}, {"score_clip": 0.5, "use_score_scaling": True}),
        (OLD, {"steps": 100, "num_mini_batches": 2, "stop_token": "eos"}, {"num_mini_batches": 1}),
        (NEW, {"max_grad_norm": 0.5}, {"max_grad_norm": 0.5}),
        (NEW, {"max_grad_norm": 0}, {"max_grad_norm": 1e9}),
        (NEW, {"stop_token_id": 7}, {"stop_token_id": 7}),
        (NEW, {"total_episodes": 100, "num_train_epochs": 2.0}, {"total_episodes": 100}),
        (NEW, {"dataset_name": "a/b", "dataset_config": "c"}, {"prompts": "a/b", "subset": "c"}),
        (NEW, {"dataset_name": "a/b", "dataset_train_split": "x"}, {"prompts": "a/b[x]"}),
        (NEW, {"model_name_or_path": "a/b", "torch_dtype": "bfloat16", "use_peft": True}, {"dtype": "bfloat16"}),
        (NEW, {"bf16": False, "save_steps": 50, "save_total_limit": 3}, {"bf16": False, "save_steps": 50, "keep": 3}),
        (NEW, {"use_peft": True, "lora_r": 4, "lora_target_modules": "q"}, {"r": 4, "target_modules": ["q"]}),
        (NEW, {"fp16": False}, {"bf16": True}),
        (NEW, {"non_eos_penalty": True}, {"missing_eos_penalty": 1}),
        (NEW, {"penalty_reward_value": -10, "non_eos_penalty": True}, {"missing_eos_penalty": 10}),
        (NEW, {"penalty_reward_value": -10, "non_eos_penalty": False}, {"missing_eos_penalty": None}),
        (NEW, {"penalty_reward_value": -10}, {"missing_eos_penalty": None}),
    ],
)
def test_an_option_sets_its_key(version: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    conversion = converted(version, **options)
    assert loaded(conversion)
    assert {key.rpartition(".")[2]: row.value for key, row in conversion.rows.items()}.items() >= expected.items()


def test_the_page_of_all_options_is_current() -> None:
    text = (ROOT / "docs/results/trl-options.md").read_text(encoding="utf-8")
    generated = runpy.run_path(str(ROOT / "scripts/from_trl_page.py"))["page"](text)
    assert generated == text, "run: python scripts/from_trl_page.py"


# Batches


def old_trainer(batch: int, rows: int, accumulated: int) -> tuple[int, int]:
    """Return the episodes of an update and the optimizer steps of an epoch in TRL 0.11, by its loops."""
    passes = steps = seen = 0
    for backward in range(0, batch, rows * accumulated):
        for start in range(backward, min(batch, backward + rows * accumulated), rows):
            seen += min(rows, batch - start)
            passes += 1
            steps += passes % accumulated == 0
    return seen, steps


def test_batches_of_0_11_by_brute_force() -> None:
    checked = 0
    for batch in (8, 12, 16, 48, 128):
        for rows in (1, 2, 3, 4, 8, 16, 128):
            for accumulated in (1, 2, 3, 4):
                per_device, parts, minibatches = convert_old_batch(rows, batch, accumulated)
                assert per_device * parts == batch
                if batch % (rows * accumulated) == 0:  # TRL rejects others
                    assert (per_device, (batch, minibatches)) == (rows, old_trainer(batch, rows, accumulated))
                    checked += 1
    assert checked >= 20


@pytest.mark.parametrize(
    ("text", "batch", "note"),
    [
        ("PPOv2Config({})", (2, 16, 4), "32 episodes per update, optimizer steps per epoch: 4"),
        ("PPOConfig({})", (2, 4, 4), "; TRL made other numbers of them, see docs/convert.md"),
    ],
)
def test_batches_of_the_newer_trainer(text: str, batch: tuple[int, int, int], note: str) -> None:
    sizes = "per_device_train_batch_size=2, gradient_accumulation_steps=4, num_mini_batches=4, kl_coef=1"
    conversion = convert_settings(read(text.format(sizes), ".py"), NEW)
    assert tuple(conversion.rows[f"ppo.{key}"].value for key in BATCH_KEYS) == batch
    assert conversion.rows["ppo.num_mini_batches"].note.endswith(note)


def test_invalid_batch_sizes() -> None:
    invalid = converted(OLD, batch_size="many", mini_batch_size=0, steps=100)
    assert invalid.unconverted.keys() == {"batch_size", "mini_batch_size"}
    assert loaded(invalid).ppo.episodes_per_update == 128


# Every option is converted or has a reason


@pytest.mark.parametrize("version", [OLD, NEW])
def test_every_option_sets_a_key_or_has_a_reason(version: str) -> None:
    for name in OPTIONS_OF[version]:
        conversion = converted(version, **{name: 2})
        reason = conversion.unconverted.get(name, "")
        assert "no such setting" not in reason
        assert reason or name in {row.option for row in conversion.rows.values()}, name
        if name in VERSIONS[version]["computed"]:
            assert reason == f"2 (TRL {version} computed it)"
        elif name in PPOSettings.model_fields:
            assert target_key(name) == f"ppo.{name}"


@pytest.mark.parametrize(
    ("version", "options", "name", "reason"),
    [
        (NEW, {"torch_compile": True}, "torch_compile", "PPO has no such setting here"),
        (NEW, {"total_episodes": 9, "num_train_epochs": 2}, "num_train_epochs", "overridden by total_episodes"),
        (NEW, {"lora_r": 4}, "lora_r", "without use_peft: true all weights are trained"),
        (NEW, {"fp16": True}, "fp16", "set bf16: true"),
        (NEW, {"cliprange": 2.0}, "cliprange", "must be > 0 and < 1, got 2.0"),
        (NEW, {"lr_scheduler_type": "cosine_with_restarts"}, "lr_scheduler_type", "not one of linear, cosine"),
        (NEW, {"optim": "adafactor"}, "optim", "not one of adamw_torch_fused"),
        (NEW, {"dtype": "bfloat16", "sft_model_path": "a/b"}, "dtype", "loses most updates of whole weights"),
        (NEW, {"dtype": "float16", "sft_model_path": "a/b"}, "dtype", "not one of auto, float32, bfloat16"),
        (NEW, {"kl_coef": "high"}, "kl_coef", "expected a number >= 0"),
        (NEW, {"total_episodes": 0}, "total_episodes", "must be >= 1, got 0"),
        (NEW, {"deepspeed": "zero2.json"}, "deepspeed", "docs/several-gpus.md"),
        (NEW, {"load_in_4bit": True}, "load_in_4bit", "models.dtype: bfloat16"),
        (NEW, {"dataset_name": "a/b", "dataset_train_split": "train[:1%]"}, "dataset_train_split", "data.max_rows"),
        (NEW, {"recipe": "reasoning"}, "recipe", "no such setting"),
        (OLD, {"push_to_hub_if_best_kwargs": {"repo_id": "a/b"}}, "push_to_hub_if_best_kwargs", "OWNER/NAME"),
        (OLD, {"adap_kl_ctrl": False, "target": 3.0}, "target", "no effect without adap_kl_ctrl"),
        (OLD, {"init_kl_coef": 0.0}, "adap_kl_ctrl", "which is 0"),
        (OLD, {"target_kl": 0.1}, "target_kl", "no effect without early_stopping"),
        (OLD, {"top_p": 0.9}, "top_p", "full softmax"),
        (OLD, {"is_encoder_decoder": True}, "is_encoder_decoder", "not supported"),
    ],
)
def test_an_option_without_effect_is_listed_and_the_rest_loads(
    version: str, options: dict[str, Any], name: str, reason: str
) -> None:
    conversion = converted(version, learning_rate=1e-5, **options)
    assert loaded(conversion).ppo.learning_rate == 1e-5
    assert reason in conversion.unconverted[name]


NAMES = sorted({*OPTIONS_OF[OLD], *OPTIONS_OF[NEW], "deepspeed", "zzz", "model", "ppo"})
ODD = st.one_of(
    st.sampled_from([None, True, False, 0, 1, 2, 8, 64, 0.5, 1e-5, -1, 3.0, 1e400, math.nan, "", "eos", "a/b", "../x"]),
    st.sampled_from(
        [[], [1, "x"], {}, {"repo_id": "a/b"}, {"a": {"b": []}}, "a\nb: c", "#\u2028x", "é: 1", "null", "yes", "..."]
    ),
    st.text(CHARACTERS, max_size=8).filter(lambda text: "\0" not in text),  # YAML has none
    st.integers(-(10**17), 10**17),
)


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@example(OLD, {"batch_size": 50_000})  # the default horizon allows fewer, and so does that of ppo.horizon
@given(st.sampled_from([OLD, NEW]), st.dictionaries(st.sampled_from(NAMES), ODD, max_size=6))
def test_with_any_values_the_file_loads_and_no_option_is_lost(version: str, options: dict[str, Any]) -> None:
    conversion = converted(version, **options)
    assert loaded(conversion)
    results = {row.option for row in conversion.rows.values()} | conversion.unconverted.keys()
    given = {name for name, value in options.items() if value not in (None, "")}
    assert given - {"dataset_train_split", "dataset_test_split"} <= results  # they are part of other values


# Files


def test_a_script_is_never_run_and_only_literals_are_read() -> None:
    text = (
        "import os, sys, pathlib\npathlib.Path('RAN').touch()\nsys.exit(3)\nRATE = 1e-5\n"
        "config = PPOConfig(learning_rate=RATE, kl_coef=pathlib.Path('RAN').touch() or 0.1, seed=3, vf_coef=0.5,\n"
        "    gamma=1, response_length=9 * 9, run_name=b'x', **os.environ)\n"
        "class Trap(dict):\n    def __init__(self): pathlib.Path('RAN').touch()\n"
        "PPOConfig(lam=0.1)\nLoraConfig(r=4, task_type='CAUSAL_LM', target_modules=['q_proj', 'v_proj'])\n"
        "load_dataset('a/b')\n"
    )
    result, written, output = run_convert(text, ".py")
    assert not Path("RAN").exists()
    assert (result.seed, result.ppo.vf_coef, result.ppo.kl_coef, result.ppo.lam) == (3, 0.5, 0.05, 0.95)
    assert result.ppo.learning_rate == 1e-5
    assert result.models.adapters and (result.models.adapters.r, result.models.adapters.lora_alpha) == (4, 8)
    assert read(text, ".py").unread == {
        "kl_coef": "not a literal, line 5", "response_length": "not a literal, line 6",
        "run_name": "not a literal, line 6", "**": "not a literal, line 6",
        "PPOConfig in line 9": "only the first one is converted",
    }  # fmt: skip
    both = "def debug():\n    return PPOConfig(seed=1)\nconfig = PPOConfig(seed=2)\n"
    assert (values(both), list(read(both, ".py").unread)) == ({"seed": 1}, ["PPOConfig in line 3"])
    line = "ppo.kl_coef: not read: not a literal, line 5\n"
    assert f"\n{line}" in output and f"\n# {line}" in written


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("RATE = 1e-6\nPPOConfig(seed=1, learning_rate=RATE)", 1e-6),
        ("learning_rate = 1e-6\ndef main():\n    return PPOConfig(seed=1, learning_rate=learning_rate)", 1e-6),
        ("RATE = 1e-6\nRATE *= 2\nPPOConfig(seed=1, learning_rate=RATE)", None),
        ("RATE = 1e-6\nif fast:\n    RATE = 1e-5\nPPOConfig(seed=1, learning_rate=RATE)", None),
        ("RATE = 1e-6\ndef main(RATE):\n    PPOConfig(seed=1, learning_rate=RATE)", None),
        ("rest = {'learning_rate': 1e-6}\nPPOConfig(seed=1, **rest)", 1e-6),
        ("RATE = 1e-6 * 2\nPPOConfig(seed=1, learning_rate=RATE)", None),
        ("def main():\n    RATE = 1e-6\n    PPOConfig(seed=1, learning_rate=RATE)", None),
    ],
)
def test_a_constant_of_the_module_is_read_if_nothing_else_sets_it(text: str, rate: float | None) -> None:
    source = read(text, ".py")
    assert source.options.get("learning_rate") == rate
    assert ("learning_rate" in source.unread) == (rate is None)


def test_a_command_line() -> None:
    text = (
        "#!/bin/bash\nset -e\nexport RATE=3e-6\n# python ppo.py --seed 9\n"
        "torchrun --nproc-per-node 4 --standalone \\\n  ppo.py --learning_rate ${RATE} --output_dir=runs/x#1 \\\n"
        "  --whiten_rewards --no_gradient_checkpointing --lora_target_modules q_proj v_proj --kl-coef -1  # note\n"
        '  --stop_token \'<|end|>\' --tracker_kwargs \'{"wandb": {"name": "a b"}}\' --ppo.lam 0.9 2>&1 | tee log &\n'
    )
    assert values(text, ".sh") == {
        "output_dir": "runs/x#1", "whiten_rewards": True, "gradient_checkpointing": False, "stop_token": "<|end|>",
        "lora_target_modules": ["q_proj", "v_proj"], "kl_coef": -1, "lam": 0.9,
        "tracker_kwargs": {"wandb": {"name": "a b"}},
    }  # fmt: skip
    assert read(text, ".sh").unread == {
        "options of the launcher": "use `rlhf ppo --nproc N` for several processes",
        "learning_rate": "known only to the shell",
    }
    assert values("cd x && python ppo.py --kl_coef 0.1; echo done\n", ".sh") == {"kl_coef": 0.1}
    assert values("accelerate launch --x 1 -m my.ppo --kl_coef 0.1\n", ".txt") == {"kl_coef": 0.1}
    assert values("--kl_coef 0.1\n--num_ppo_epochs=2\n", ".txt") == {"kl_coef": 0.1, "num_ppo_epochs": 2}


def test_sections_of_yaml_and_json() -> None:
    text = (
        "training_args:\n  learning_rate: 3e-6\n  bf16: True\n  report_to: 'none'\n  run_name: null\n"
        "  tracker_kwargs: {a: {b: 1}}\ngeneration_kwargs: {top_k: 0.0}\n"
        "peft_config: {r: 4, target_modules: [q]}\nseed: 1_0\n"
    )
    expected = {
        "learning_rate": 3e-6, "bf16": True, "report_to": "none", "run_name": None, "tracker_kwargs": {"a": {"b": 1}},
        "top_k": 0.0, "use_peft": True, "r": 4, "lora_alpha": 8, "target_modules": ["q"], "seed": 10,
    }  # fmt: skip
    assert values(text, ".yaml") == expected
    assert values(json.dumps(yaml.safe_load(text)), ".json") == expected


@pytest.mark.parametrize(
    ("suffix", "content", "code", "message"),
    [
        (".py", b"x = (\n", "C08", "theirs.py:1: not valid Python: "),
        (".py", b"\0", "C08", "theirs.py:1: not valid Python"),
        (".py", b"x = " + b"-" * 50_000 + b"1", "C08", "not valid Python: "),
        (".py", b"print(1)\n", "C09", "the file has no option of TRL's PPO"),
        (".py", b"p = HfArgumentParser((PPOConfig,))\n", "C09", "the file has no option of TRL's PPO"),
        (".py", b"x = '\xff'\n", "C09", "byte 0xFF is not UTF-8"),
        (".yaml", b"a: [1\n", "C08", "theirs.yaml:2:1: not valid YAML"),
        (".yaml", b"kl_coef: 1\nkl_coef: 2\n", "C03", "theirs.yaml:2: duplicate key"),
        (".yaml", b"a: !!python/object:os.system x\n", "S02", "is not allowed"),
        (".yaml", b"", "C09", "empty"),
        (".json", b'{"a": 1 "b": 2}', "C08", "theirs.json:1:12: not valid YAML"),
        (".json", b"[" * 20_000, "S02", "too deeply nested"),
        (".sh", b"echo hello\n", "C09", "the file has no option of TRL's PPO"),
        (".sh", b"it's open --kl_coef 0.1", "C08", "not a valid command line: No closing quotation"),
        (".sh", b"python sft.py --a\npython ppo.py --kl_coef 1", "C09", "the file has several commands"),
        (".sh", b"python sft.py --a && python -m ppo --kl_coef 1", "C09", "the file has several commands"),
        (".txt", b"x" * 300_000, "S02", "larger than 250 kB"),
        (".ipynb", b"{}", "C09", "notebooks are not supported"),
    ],
)
def test_a_broken_file_is_one_error_and_writes_nothing(suffix: str, content: bytes, code: str, message: str) -> None:
    Path(f"theirs{suffix}").write_bytes(content)
    assert is_one_error(rlhf("convert", f"theirs{suffix}", "run"), code, message)
    assert not Path("run").exists()


RAY = """# python examples/scripts/ppo.py --kl_coef 0.05
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json='{"working_dir": "/src"}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray --pretrain acme/sft --reward_pretrain acme/rm --actor_num_nodes 1 \\
   --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 --rollout_batch_size 1024 && echo done
"""
VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_files=a.parquet \\\n"
VERL += " actor_rollout_ref.model.path=acme/sft actor_rollout_ref.actor.optim.lr=1e-6 critic.optim.lr=1e-5"
TRLX = "train: {seq_length: 8}\nmodel: {model_path: gpt2}\nmethod: {name: ppoconfig, init_kl_coef: 0.05}\n"
FACTORY = "stage: ppo\ndo_train: true\nmodel_name_or_path: acme/8b\nreward_model: saves/rm\nlearning_rate: 1e-5\n"
HANDBOOK = "model_name_or_path: acme/7b\ndataset_mixer: {acme/pairs: 1.0}\nbeta: 0.01\nlearning_rate: 5e-7\n"
DOTTED = "python train.py --actor.model_name_or_path acme/sft --reward.model_name_or_path acme/rm --actor.adam.lr 5e-7"
CHAT = "deepspeed main.py --actor_model_name_or_path acme/sft --critic_model_name_or_path acme/rm --kl_coef 0.1"


@pytest.mark.parametrize(
    ("text", "suffix", "system"),
    [
        (RAY, ".sh", "OpenRLHF"),
        (RAY, ".txt", "OpenRLHF"),
        (DOTTED, ".sh", "OpenRLHF"),
        (VERL, ".sh", "verl"),
        ("actor_rollout_ref: {model: {path: a}}\nseed: 1", ".yaml", "verl"),
        (TRLX, ".yaml", "trlx"),
        ("import trlx\nconfig = PPOConfig(ppo_epochs=4)\n", ".py", "trlx"),
        (FACTORY, ".yaml", "LLaMA-Factory"),
        ("finetuning_type: lora\nseed: 1", ".yaml", "LLaMA-Factory"),
        ("llamafactory-cli train ppo.yaml learning_rate=1e-5", ".sh", "LLaMA-Factory"),
        (HANDBOOK, ".yaml", "alignment-handbook"),
        ("dataset_mixture: {datasets: [{id: a}]}\nseed: 1", ".yml", "alignment-handbook"),
        (CHAT, ".sh", "DeepSpeed-Chat"),
    ],
)
def test_c09_a_file_of_another_system_by_its_name(text: str, suffix: str, system: str) -> None:
    Path(f"theirs{suffix}").write_text(text)
    result = rlhf("convert", f"theirs{suffix}", "run")
    assert is_one_error(result, "C09", f"theirs{suffix}: it is a file of {system}")
    assert "set by hand: models.sft; models.reward or rewards; data.prompts;" in result.stderr
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ("prompt_data = 1\nnum_rollouts = 2\nPPOConfig(kl_coef=0.1)\n", ".py"),  # names of others' options
        ("stage: ppo\nppo: {kl_coef: 0.1}\n", ".yaml"),  # of rlhf itself
    ],
)
def test_a_script_of_trl_and_a_file_of_rlhf_are_not_of_another_system(text: str, suffix: str) -> None:
    assert values(text, suffix)["kl_coef"] == 0.1


def test_c09_the_cases_of_other_systems() -> None:
    cases = SHARED / "cases"
    if not cases.exists():
        pytest.skip("needs ../shared/cases")
    for name, system in (("convert_openrlhf.sh", "OpenRLHF"), ("convert_llamafactory.yaml", "LLaMA-Factory")):
        assert is_one_error(rlhf("convert", cases / name, "run"), "C09", f"it is a file of {system}, not of TRL")
    must_succeed(rlhf("convert", cases / "convert_reward_url.yaml", "run"))
    assert config.load("ppo", "run/ppo.yaml").rewards["server"].url == "http://localhost:8000"


def test_a_command_of_trl_is_not_taken_for_another_system() -> None:
    command = (
        "accelerate launch --config_file ds/zero3.yaml --num_processes 8 examples/openrlhf/ppo.py --lora_r 4 "
        "--dataset_name acme/verl --model_name_or_path acme/trlx --output_dir stage/ppo --ppo_config.kl_coef 0.1"
    )
    result, _, _ = run_convert(command, ".sh")
    assert (result.ppo.kl_coef, result.data.prompts) == (0.1, "acme/verl")


@pytest.mark.parametrize(("option", "version"), [("reward_model", OLD), ("reward_model_path", NEW)])
def test_a_url_is_the_address_of_a_server(option: str, version: str) -> None:
    settings = f"{option}: https://rm.example:8000/score\nmodel_name_or_path: a\n"
    result, text, output = run_convert(settings, ".yaml", "--trl", version)
    (source,) = result.rewards.values()
    assert (source.kind, source.url) == ("url", "https://rm.example:8000/score")
    assert result.models.value == "policy_head" and "must answer" in text
    assert f"TRL {version}" in output and "models.reward" not in output and "rewards:" not in output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["convert", "none.py", "run"], "C09"),
        (["convert", ".", "run"], "C09"),
        (["convert", "ok.yaml", "run", "--trl", "1.1"], "C07"),
        (["convert", "ok.yaml", "ok.yaml/run"], "E03"),
        (["convert", "ok.yaml", "full"], "C15"),
        (["convert", "ok.yaml", "link"], "C15"),
        (["init", "--from-trl", "ok.yaml"], "C11"),
        (["init", "ci", "run", "--from-trl", "ok.yaml"], "C11"),
        (["init", "--from-trl", "ok.yaml", "run", "--data", "x"], "C11"),
        (["init", "--from-trl", "ok.yaml", "run", "--seed", "3"], "C11"),
        (["init", "ci", "run", "--trl", "1.12"], "C11"),
    ],
)
def test_a_wrong_command_line_writes_nothing(arguments: list[str], code: str) -> None:
    Path("ok.yaml").write_text("kl_coef: 0.1\n")
    for folder in ("full", "link"):
        Path(folder).mkdir()
    Path("full/ppo.yaml").write_text("mine")
    Path("link/ppo.yaml").symlink_to("elsewhere")
    assert is_one_error(rlhf(*arguments), code)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["full", "link", "ok.yaml"]
    assert Path("full/ppo.yaml").read_text() == "mine" and len(list(Path("link").iterdir())) == 1


def test_other_files_of_the_folder_are_kept_and_the_old_command_works() -> None:
    Path("ok.yaml").write_text("kl_coef: 0.1\n")
    Path("run").mkdir()
    Path("run/notes").write_text("mine")
    assert rlhf("init", "--from-trl", "ok.yaml", "run").exit_code == 0
    assert sorted(path.name for path in Path("run").iterdir()) == ["notes", "ppo.yaml"]


@pytest.mark.parametrize(
    ("text", "arguments", "line"),
    [
        ("init_kl_coef: 0.2\nppo_epochs: 4", (), "TRL 0.11: only that version has init_kl_coef, ppo_epochs"),
        ("kl_coef: 0.1\nnum_ppo_epochs: 4\nsteps: 9", (), "TRL 1.12: only that version has kl_coef, num_ppo_epochs"),
        ("learning_rate: 1e-5", (), "TRL 1.12: no option is specific to a version; use --trl 0.11 "),
        ("learning_rate: 1e-5", ("--trl", "0.11"), "a.yaml is of TRL 0.11: set by --trl"),
    ],
)
def test_the_version_is_detected(text: str, arguments: tuple[str, ...], line: str) -> None:
    Path("a.yaml").write_text(text)
    assert line in rlhf("convert", "a.yaml", "run", *arguments).stdout.splitlines()[0]


def test_paths_are_written_as_absolute_ones() -> None:
    for folder in ("models/sft", "data", "lora", "main"):  # the last two are no paths in the file
        Path(folder).mkdir(parents=True)
    Path("data/p.jsonl").write_text('{"prompt": "a"}\n')
    paths = "sft_model_path: models/sft\nreward_model_path: ./none\ndataset_name: data/p.jsonl\n"
    result, text, _ = run_convert(f"{paths}use_peft: true\nmodel_revision: main\n")
    assert result.models.adapters and (result.models.adapters.kind, result.models.revision) == ("lora", "main")
    assert result.models.sft == os.path.abspath("models/sft") and result.models.reward == os.path.abspath("none")
    assert result.data.prompts == os.path.abspath("data/p.jsonl") and "# sft_model_path: models/sft" in text


def test_no_secret_is_written_or_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "a" * 30
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    settings_ = (
        f"hub_token: {token}\nkl_coef: 0.1\nrun_name: 0123456789abcdef\nlogging_dir: https://me:pass@host/x\n"
        f"tracker_kwargs: {{wandb: {{api_key: abc}}}}\nzzz: {token}\n"
    )
    for text, suffix in ((settings_, ".yaml"), (f"PPOConfig(kl_coef=0.1, learning_rate=rate('{token}'))", ".py")):
        _, written, output = run_convert(text, suffix)
        assert not re.search(r"hf_a|0123456789|me:pass|abc\b", written + output)


def test_hostile_names_and_values_break_no_line() -> None:
    bad = "a\n\u2028\x1b[31mb: 1\nppo: {}"
    result, text, output = run_convert(json.dumps({"kl_coef": 0.1, "zzz": bad, bad: 1, "output_dir": "x"}), ".json")
    footer = text.partition("# Not converted:")[2]
    assert footer and all(line.startswith("#") for line in footer.splitlines()[1:])
    assert "\x1b" not in text + output and result.ppo.kl_coef == 0.1


TEXTS = {suffix: (form(SENTIMENT), form(TLDR)) for suffix, form in FORMS.items()}
PIECES = sorted({piece for texts in TEXTS.values() for text in texts for piece in re.findall(r"\w+|\W", text)})
FAULT = st.tuples(st.integers(0, 900), st.integers(0, 40), st.sampled_from(PIECES) | st.text(CHARACTERS, max_size=4))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(FORMS)), st.integers(0, 1), st.lists(FAULT, max_size=5))
def test_a_damaged_text_is_read_or_is_an_error(suffix: str, which: int, faults: list[tuple[int, int, str]]) -> None:
    text = TEXTS[suffix][which]
    for start, length, piece in faults:
        start %= len(text)
        text = text[:start] + piece + text[start + length :]
    Path(f"theirs{suffix}").write_text(text, encoding="utf-8", errors="replace")
    try:
        read_settings(Path(f"theirs{suffix}"))
    except RLHFError as error:
        assert {problem.code for problem in error.problems} <= {"C03", "C08", "C09", "S02"}


@pytest.mark.full
def test_a_converted_command_trains(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_folder)
    Path("ppo.sh").write_text(
        "python ppo.py --sft_model_path sft_model --reward_model_path reward_model --dataset_name prompts.jsonl \\\n"
        "  --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --total_episodes 16 --bf16 False \\\n"
        "  --response_length 8 --stop_token eos --num_ppo_epochs 2 --num_mini_batches 2 --kl_estimator k1 --seed 5\n"
    )
    assert rlhf("convert", "ppo.sh", "mine").exit_code == 0
    assert "8 episodes" in must_succeed(rlhf("check", "mine/ppo.yaml")).stdout
    must_succeed(rlhf("ppo", "--config", "mine/ppo.yaml"))
    rows = lines(Path("mine/ppo/metrics.jsonl"))
    assert [row["episode"] for row in rows] == [8, 16] and rows[0]["objective/kl"] == 0.0


def test_whole_numbers_may_be_written_as_floats_and_quotes_may_hold_operators() -> None:
    conversion = converted(NEW, total_episodes=1e4, response_length=64.0, learning_rate=1.0)
    ppo = loaded(conversion).ppo
    assert (ppo.total_episodes, ppo.response_length, ppo.learning_rate) == (10_000, 64, 1.0)

    command = "python ppo.py --run_name 'a; b | c > d' --total_episodes 64 2> errors.txt"
    result, _, output = run_convert(command, ".sh")
    assert result.ppo.total_episodes == 64 and "a; b | c > d" in output
