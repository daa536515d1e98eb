"""`rlhf init --from-trl`: TRL's numbers in our keys, a reason for all that has none, and nothing lost on the way."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from fuzzing import CHARACTERS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import rlhf
from trl_files import OF_GENERATION, OF_NEW, OF_OLD, OF_SCRIPTS, SENTIMENT, TLDR

from rlhf_cli import config
from rlhf_cli.commands.convert import map_options, output
from rlhf_cli.commands.convert import options as sizes
from rlhf_cli.commands.convert.options import OptionMapping
from rlhf_cli.commands.convert.versions import NEW, OLD, OPTIONS, SOURCES, UNCLIPPED, ParsedFile, Setting
from rlhf_cli.config import trl_fields
from rlhf_cli.config.json_schema import parse_source
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.ppo_options import PPOSettings

OLD_FIELDS, NEW_FIELDS, SCRIPT_FIELDS, GENERATION = (
    each.split() for each in (OF_OLD, OF_NEW, OF_SCRIPTS, OF_GENERATION)
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def moved(text: str, suffix: str = ".yaml", *more: str) -> tuple[PPOConfig, str, str]:
    """(the config that comes of a file, it as it stands on the disk, what was said)."""
    file = Path(f"theirs{suffix}")
    file.write_text(text, encoding="utf-8")
    folder = f"run{len(list(Path.cwd().iterdir()))}"
    result = rlhf("init", "--from-trl", file, folder, *more)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return config.load("ppo", f"{folder}/ppo.yaml"), Path(f"{folder}/ppo.yaml").read_text(), result.stdout


def placed(version: str, **options: Any) -> OptionMapping:
    """What becomes of options that a file has."""
    return map_options(
        ParsedFile([Setting(name, value, f"f:{at}") for at, (name, value) in enumerate(options.items(), 1)]), version
    )


def numbers(version: str, **options: Any) -> dict[str, Any]:
    """The values of our keys, by their last names, that options come to."""
    return {key.rpartition(".")[2]: each.value for key, each in placed(version, **options).mapped.items()}


def loaded(placing: OptionMapping) -> PPOConfig:
    Path("ppo.yaml").write_text(output.yaml_page(placing, "theirs"), encoding="utf-8")
    return config.load("ppo", "ppo.yaml")


# The two examples


@pytest.mark.parametrize("suffix", SENTIMENT)
def test_trls_example_of_0_11_in_every_form(suffix: str) -> None:
    found, text, said = moved(SENTIMENT[suffix], suffix)
    assert said.startswith(f"theirs{suffix} is of TRL 0.11: ")
    assert found.models.sft == "lvwerra/gpt2-imdb" and found.models.value == "policy_head"
    assert found.data.prompts == "stanfordnlp/imdb"
    (reward,) = found.rewards.values()
    assert (reward.pipeline, reward.label, reward.reads) == ("lvwerra/distilbert-imdb", "POSITIVE", "both")
    ours = found.ppo
    assert (ours.episodes_per_update, ours.num_mini_batches, ours.num_ppo_epochs) == (16, 1, 4)
    assert (ours.learning_rate, ours.lr_scheduler_type, ours.max_grad_norm) == (1.41e-5, "constant", UNCLIPPED)
    assert (ours.kl_coef, ours.adap_kl_ctrl, ours.target, ours.horizon) == (0.2, True, 6.0, 10_000)
    assert (ours.temperature, ours.response_length, ours.missing_eos_penalty) == (1.0, 32, None)
    assert (ours.num_train_epochs, ours.total_episodes) == (1.0, None)
    assert "report_to: [wandb]" in text and re.search(r"\nlog_with +wandb +output.report_to ", said)
    assert said.splitlines()[-1].endswith("ppo.yaml; next: rlhf check " + said.split()[-1])


@pytest.mark.parametrize("suffix", TLDR)
def test_trls_example_of_1_12_in_every_form(suffix: str) -> None:
    found, text, said = moved(TLDR[suffix], suffix)
    assert said.startswith(f"theirs{suffix} is of TRL 1.12: ")
    assert found.models.sft == "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr"
    assert found.models.reward == "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr"
    assert (found.models.value, list(found.rewards)) == ("reward", ["reward"])
    assert (found.data.prompts, found.data.eval_prompts) == ("trl-lib/tldr", "trl-lib/tldr[validation]")
    ours = found.ppo
    assert (ours.total_episodes, ours.episodes_per_update, ours.num_mini_batches) == (1_000_000, 64, 1)
    assert (ours.local_rollout_forward_batch_size, ours.missing_eos_penalty, ours.stop_token) == (16, 1.0, "eos")
    assert (ours.bf16, ours.temperature, ours.response_length, ours.kl_coef) == (True, 0.7, 53, 0.05)
    assert "# output_dir: models/minimal/ppo_tldr (" in text and "# model_name_or_path: " in text
    assert said.endswith(" --nproc 8\n") == (suffix == ".sh")


# TRL's numbers


def test_what_1_12_had_by_default_is_what_runs() -> None:
    theirs = {
        "kl_coef": 0.05, "kl_estimator": "k1", "cliprange": 0.2, "vf_coef": 0.1, "cliprange_value": 0.2, "gamma": 1.0,
        "lam": 0.95, "num_ppo_epochs": 4, "num_mini_batches": 1, "whiten_rewards": False, "response_length": 53,
        "temperature": 0.7, "missing_eos_penalty": None, "num_sample_generations": 10, "learning_rate": 3e-6,
        "local_rollout_forward_batch_size": 64, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
        "num_train_epochs": 3.0, "total_episodes": None, "lr_scheduler_type": "linear", "weight_decay": 0.0,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "optim": "adamw_torch_fused", "bf16": True,
        # By other names, or none: nothing ended a response, clipped a gradient or skipped a minibatch.
        "stop_token": "none", "stop_token_id": None, "max_grad_norm": 1e9, "ratio_threshold": None,
        "gradient_checkpointing": False, "adap_kl_ctrl": False, "early_stopping": False, "score_clip": None,
    }  # fmt: skip
    found = loaded(placed(NEW, sft_model_path="a/b")).ppo
    assert {key: getattr(found, key) for key in theirs} == theirs
    assert found.num_warmup(100) == 0 and found.fp16 is False


def test_what_0_11_had_by_default_is_what_runs() -> None:
    theirs = {
        "learning_rate": 1.41e-5, "adap_kl_ctrl": True, "kl_coef": 0.2, "kl_estimator": "k1", "target": 6.0,
        "horizon": 10_000, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1,
        "num_ppo_epochs": 4, "early_stopping": False, "target_kl": 1.0, "ratio_threshold": 10.0, "score_clip": None,
        "use_score_scaling": False, "use_score_norm": False, "whiten_rewards": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": 128, "gradient_accumulation_steps": 1, "num_mini_batches": 1,
        # Of its trainer and its examples: no clipping, no schedule, no penalty, one pass, temperature 1.
        "max_grad_norm": 1e9, "lr_scheduler_type": "constant", "missing_eos_penalty": None, "num_train_epochs": 1.0,
        "temperature": 1.0, "stop_token": "eos", "weight_decay": 0.0, "bf16": False,
    }  # fmt: skip
    found = loaded(placed(OLD, model_name="a/b"))
    assert {key: getattr(found.ppo, key) for key in theirs} == theirs
    assert found.models.value == "policy_head"


def test_only_what_differs_from_ours_is_written_for_what_a_file_left_out() -> None:
    ours = PPOSettings(total_episodes=1)
    for version in (OLD, NEW):
        for key, each in placed(version, sft_model_path="a/b").mapped.items():
            section, _, name = key.rpartition(".")
            assert each.from_file or section != "ppo" or getattr(ours, name) != each.value, key
    assert placed(NEW, kl_coef=0.05).mapped["ppo.kl_coef"].from_file  # what stands in the file stays in it


def test_adapters_do_not_change_the_rate_that_trl_had() -> None:
    found = loaded(placed(NEW, use_peft=True, lora_r=4, lora_target_modules="q_proj", sft_model_path="a/b"))
    assert found.ppo.learning_rate == 3e-6  # ours would be ten times that
    assert found.models.adapters and found.models.adapters.model_dump(exclude={"use_rslora", "use_dora"}) == {
        "kind": "lora", "r": 4, "lora_alpha": 32, "target_modules": ["q_proj"]
    }  # fmt: skip
    assert {"lora_r"} == {each.name for each in placed(NEW, kl_coef=0.1, lora_r=4).unsupported}


@pytest.mark.parametrize(
    ("version", "options", "expected"),
    [
        (OLD, {"kl_penalty": "kl"}, {"kl_estimator": "k1"}),
        (OLD, {"kl_penalty": "mse"}, {"kl_estimator": "k2"}),
        (OLD, {"kl_penalty": "abs"}, {"kl_estimator": "abs"}),
        (OLD, {"kl_penalty": "full"}, {"kl_estimator": "full"}),
        (OLD, {"steps": 5000}, {"total_episodes": 5000}),
        (OLD, {"horizon": 5000.0, "target": 3}, {"horizon": 5000, "target": 3, "adap_kl_ctrl": True}),
        (OLD, {"max_grad_norm": 0.5}, {"max_grad_norm": 0.5}),
        (OLD, {"max_grad_norm": None}, {"max_grad_norm": 1e9}),
        (OLD, {"temperature": 0.9}, {"temperature": 0.9}),
        (OLD, {"eos_token_id": -1}, {"stop_token": "none"}),
        (OLD, {"eos_token_id": 50256}, {"stop_token_id": 50256}),
        (OLD, {"push_to_hub_if_best_kwargs": {"repo_id": "me/it"}}, {"push_to_hub_if_best": "me/it"}),
        (OLD, {"exp_name": "first", "seed": 3}, {"run_name": "first", "seed": 3}),
        (OLD, {"score_clip": 0.5, "use_score_scaling": "yes"}, {"score_clip": 0.5, "use_score_scaling": True}),
        (NEW, {"max_grad_norm": 0.5}, {"max_grad_norm": 0.5}),
        (NEW, {"gradient_checkpointing": True}, {"gradient_checkpointing": True}),
        (NEW, {"stop_token": "eos"}, {"stop_token": "eos"}),
        (NEW, {"stop_token_id": 7}, {"stop_token_id": 7}),
        (NEW, {"total_episodes": 100, "num_train_epochs": 2.0}, {"total_episodes": 100}),
        (NEW, {"num_train_epochs": 2}, {"num_train_epochs": 2}),
        (NEW, {"warmup_steps": 0.1}, {"warmup_ratio": 0.1}),
        (NEW, {"warmup_steps": 5, "warmup_ratio": 0.1}, {"warmup_steps": 5}),
        (NEW, {"fsdp": "full_shard auto_wrap"}, {"fsdp": True}),
        (NEW, {"optim": "adamw_8bit", "kl_estimator": "k3"}, {"optim": "adamw_8bit", "kl_estimator": "k3"}),
        (NEW, {"dataset_name": "a/b", "dataset_config": "c"}, {"prompts": "a/b", "subset": "c"}),
        (NEW, {"dataset_name": "a/b", "dataset_train_split": "x"}, {"prompts": "a/b[x]"}),
        (NEW, {"dataset_name": "a/b", "data_dir": "c/d"}, {"prompts": "a/b/c/d"}),
        (NEW, {"model_name_or_path": "a/b", "torch_dtype": "bfloat16"}, {"sft": "a/b", "dtype": "bfloat16"}),
        (NEW, {"bf16": False, "save_steps": 50, "save_total_limit": 3}, {"bf16": False, "save_steps": 50, "keep": 3}),
        (NEW, {"mixed_precision": "bf16"}, {"bf16": True}),
    ],
)
def test_an_option_comes_to_a_key(version: str, options: dict[str, Any], expected: dict[str, Any]) -> None:
    placing = placed(version, **options)
    assert loaded(placing)
    assert numbers(version, **options).items() >= expected.items()


def test_one_of_two_that_say_how_long_is_left_with_the_reason() -> None:
    (left,) = placed(NEW, total_episodes=100, num_train_epochs=2.0).unsupported
    assert (left.name, left.reason) == ("num_train_epochs", "overridden by total_episodes, as in TRL")


def test_an_option_of_the_other_trl_is_not_lost_on_trls_own_values() -> None:
    assert numbers(OLD, steps=100, num_mini_batches=2, stop_token="eos").items() >= {"num_mini_batches": 2}.items()


def test_adapters_of_peft_have_its_own_defaults() -> None:
    found, _, _ = moved("PPOConfig(kl_coef=0.1)\nc = LoraConfig(task_type='CAUSAL_LM')\n", ".py")
    assert found.models.adapters and (found.models.adapters.r, found.models.adapters.lora_alpha) == (8, 8)


# Batches


def of_the_step_api(batch: int, rows: int, accumulated: int) -> tuple[int, int]:
    """(episodes of an update, optimizer steps of an epoch) as TRL 0.11's loops and accelerate's counter make them."""
    passes = steps = seen = 0
    for backward in range(0, batch, rows * accumulated):
        for start in range(backward, min(batch, backward + rows * accumulated), rows):
            seen += min(rows, batch - start)
            passes += 1
            steps += passes % accumulated == 0
    return seen, steps


def of_the_newer_trainer(rows: int, accumulated: int, minibatches: int, epochs: int) -> tuple[int, int]:
    """(episodes of an update, optimizer steps of all its epochs) as TRL since 0.17 makes them."""
    batch, passes, steps = rows * accumulated, 0, 0
    for _ in range(epochs):
        for start in range(0, batch, batch // minibatches):
            for _ in range(start, start + batch // minibatches, rows):
                passes += 1
                steps += passes % accumulated == 0
    return batch, steps


@pytest.mark.parametrize("batch", [8, 12, 16, 48, 128])
def test_0_11s_batches_by_brute_force(batch: int) -> None:
    checked = 0
    for rows in (1, 2, 3, 4, 8, 16, 128):
        for accumulated in (1, 2, 3, 4):
            found, said = sizes.convert_old_sizes(batch, rows, accumulated)
            assert found.episodes == batch
            if batch % (rows * accumulated):  # TRL refuses it
                assert "TRL rejects" in said
                continue
            assert (found.episodes, found.minibatches) == of_the_step_api(batch, rows, accumulated)
            assert found.rows == rows
            settings = PPOSettings(
                total_episodes=1,
                per_device_train_batch_size=found.rows,
                gradient_accumulation_steps=found.parts,
                num_mini_batches=found.minibatches,
            )
            assert settings.episodes_per_update == batch
            checked += 1
    assert checked >= 4


def test_1_12s_batches_by_brute_force() -> None:
    for rows in (1, 2, 4, 8):
        for accumulated in (1, 2, 3, 4, 6, 16):
            for minibatches in (1, 2, 4, 8):
                if rows * accumulated % minibatches:
                    continue
                epochs = accumulated  # so many passes that none is left over
                episodes, steps = of_the_newer_trainer(rows, accumulated, minibatches, epochs)
                assert sizes.trl_optimizer_steps(accumulated, minibatches) * epochs == steps
                found, said = sizes.convert_new_sizes(rows, accumulated, minibatches, grown=False)
                assert (found.episodes, found.minibatches) == (episodes, minibatches)
                assert (said.endswith("as in TRL")) == (steps == epochs * minibatches)
                before, _ = sizes.convert_new_sizes(rows, accumulated, minibatches, grown=True)
                assert (before.episodes, before.minibatches) == (episodes * minibatches, minibatches)


def test_batches_that_worked_otherwise_are_told() -> None:
    sizes_ = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 64, "num_mini_batches": 4}
    placing = placed(NEW, **sizes_)
    assert {key: placing.mapped[f"ppo.{key}"].value for key in sizes_} == sizes_
    note = placing.mapped["ppo.num_mini_batches"].note
    assert "4 optimizer steps per epoch here; 1 in TRL since 0.17 (for that: num_mini_batches: 1)" in note
    found, _, _ = moved("PPOv2Config(per_device_train_batch_size=2, num_mini_batches=4, kl_coef=0.1)\n", ".py")
    assert (found.ppo.episodes_per_update, found.ppo.num_mini_batches) == (8, 4)


def test_sizes_that_are_none_are_told_and_trls_own_taken() -> None:
    placing = placed(OLD, batch_size="many", mini_batch_size=0, steps=100)
    assert {each.name for each in placing.unsupported} == {"batch_size", "mini_batch_size"}
    assert loaded(placing).ppo.episodes_per_update == 128


# Every option has its place, or a reason


def test_the_options_are_those_of_trls_own_classes() -> None:
    assert list(OPTIONS[OLD]) == OLD_FIELDS
    assert set(NEW_FIELDS) <= OPTIONS[NEW].keys() <= {*NEW_FIELDS, *trl_fields.fields_of("reward"), "warmup_ratio"}
    assert all(parse_source(source) for source in SOURCES.values())


SAMPLES: dict[str, Any] = {
    "exp_name": "a", "task_name": "a", "model_name": "a/b", "query_dataset": "a/b", "reward_model": "x:a/b",
    "kl_penalty": "kl", "kl_estimator": "k1", "stop_token": "eos", "sft_model_path": "a/b",
    "lr_scheduler_type": "cosine", "reward_model_path": "a/b", "optim": "adamw_torch", "dtype": "float32",
    "torch_dtype": "float32", "batch_size": 128, "push_to_hub_if_best_kwargs": {"repo_id": "a/b"},
    "dataset_name": "a/b", "model_name_or_path": "a/b", "run_name": "a", "lora_target_modules": ["q"],
    "attn_implementation": "sdpa", "dataset_train_split": "x", "dataset_test_split": "x", "dataset_config": "x",
    "model_revision": "x", "temperature": 0.5, "lam": 0.5, "gamma": 0.5, "horizon": 5000.0,
    "cliprange": 0.5, "early_stopping": True,
}  # fmt: skip


def fate(version: str, name: str) -> str:
    """placed, nothing or why not: what becomes of an option of some sensible value, if it stands alone."""
    default = OPTIONS[version][name].default if name in OPTIONS[version] else True
    value = SAMPLES.get(name, not default if isinstance(default, bool) else 2)
    given = {name: value} if name != "num_mini_batches" else {name: value, "gradient_accumulation_steps": 2}
    needs = {"dataset_": {"dataset_name": "a/b"}, "lora_": {"use_peft": True}, "use_": {"use_peft": True}}
    for start, more in needs.items():
        if name.startswith(start) and version == NEW:
            given = {**more, **given}
    if name == "use_score_norm":
        given = {"use_score_scaling": True, **given}
    if name == "target_kl":
        given = {"early_stopping": True, **given}
    placing = placed(version, **given)
    where = f"f:{list(given).index(name) + 1}"
    if why := next((each.reason for each in placing.unsupported if each.where == where), None):
        return why
    written = [each.key for each in placing.mapped.values() if each.where == where]
    return f"placed as {written[0]}" if written else next(e.note for e in placing.skipped if e.where == where)


@pytest.mark.parametrize(
    ("version", "name"),
    [(OLD, name) for name in OLD_FIELDS + GENERATION] + [(NEW, name) for name in NEW_FIELDS + SCRIPT_FIELDS],
)
def test_every_option_is_placed_or_refused_with_a_reason(version: str, name: str) -> None:
    told = fate(version, name)
    assert told and "unknown" not in told and "Trainer" not in told, told
    option = OPTIONS[version].get(name)
    if option and option.computed:
        assert told == f"TRL {version} computed it"
    ours = PPOSettings.model_fields.keys() - {"fp16"}
    if name in ours and not (option and option.computed) and (version, name) != (OLD, "gradient_accumulation_steps"):
        assert told == f"placed as ppo.{name}"


def test_every_other_field_of_trainingarguments_is_in_one_honest_class() -> None:
    known = {*OPTIONS[NEW], *SCRIPT_FIELDS}
    for name in (
        trl_fields.fields_of("sft").keys() & trl_fields.fields_of("reward").keys() - known
    ):  # what both have of it
        assert "unknown" not in fate(NEW, name), name
    assert fate(NEW, "torch_compile") == "a setting of transformers' Trainer, which PPO does not use"
    assert fate(NEW, "label_smoothing_factor") == fate(NEW, "torch_compile")


def test_an_unknown_option_gets_the_nearest() -> None:
    (left,) = placed(NEW, response_lenght=64, kl_coef=0.1).unsupported
    assert left.reason == "unknown, both here and in TRL; did you mean response_length?"


@pytest.mark.parametrize(
    ("version", "options", "name", "why"),
    [
        (NEW, {"fp16": True}, "fp16", "set bf16: true"),
        (NEW, {"cliprange": 2.0}, "cliprange", "must be > 0 and < 1, got 2.0"),
        (NEW, {"lr_scheduler_type": "cosine_with_restarts"}, "lr_scheduler_type", "not one of linear, cosine"),
        (NEW, {"optim": "adafactor"}, "optim", "not one of adamw_torch_fused"),
        (NEW, {"dtype": "float16", "sft_model_path": "a/b"}, "dtype", "not one of auto, float32, bfloat16"),
        (NEW, {"kl_coef": "high"}, "kl_coef", "expected a number >= 0"),
        (NEW, {"total_episodes": 0}, "total_episodes", "must be >= 1, got 0"),
        (NEW, {"deepspeed": "zero2.json"}, "deepspeed", "docs/scaling.md"),
        (NEW, {"load_in_4bit": True}, "load_in_4bit", "models.dtype: bfloat16"),
        (NEW, {"dataset_name": "a/b", "dataset_train_split": "train[:1%]"}, "dataset_train_split", "data.max_rows"),
        (OLD, {"adap_kl_ctrl": False, "target": 3.0}, "target", "no effect without adap_kl_ctrl"),
        (OLD, {"init_kl_coef": 0.0}, "adap_kl_ctrl", "which is 0"),
        (OLD, {"target_kl": 0.1}, "target_kl", "no effect without early_stopping"),
        (OLD, {"top_p": 0.9}, "top_p", "full softmax"),
        (OLD, {"is_encoder_decoder": True}, "is_encoder_decoder", "not supported"),
    ],
)
def test_what_our_settings_refuse_loses_its_place_and_the_rest_loads(
    version: str, options: dict[str, Any], name: str, why: str
) -> None:
    placing = placed(version, learning_rate=1e-5, **options)
    assert loaded(placing).ppo.learning_rate == 1e-5
    (told,) = (each.reason for each in placing.unsupported if each.name == name)
    assert why in told, told
    assert not told.startswith("ppo: ")


def test_fp16_does_not_become_bf16_unasked() -> None:
    assert loaded(placed(NEW, fp16=True)).ppo.bf16 is False


NAMES = sorted(
    {*OLD_FIELDS, *NEW_FIELDS, *SCRIPT_FIELDS, *GENERATION, *OPTIONS[NEW], "deepspeed", "zzz", "model", "ppo"}
)
ODD = st.one_of(
    st.sampled_from([None, True, False, 0, 1, 2, 8, 64, 0.5, 1e-5, -1, 3.0, 1e400, math.nan, "", "eos", "a/b", "../x"]),
    st.sampled_from(
        [[], [1, "x"], {}, {"repo_id": "a/b"}, {"a": {"b": []}}, "a\nb: c", "#\u2028x", "é: 1", "null", "yes"]
    ),
    st.text(CHARACTERS, max_size=8),
    st.integers(),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([OLD, NEW]), st.dictionaries(st.sampled_from(NAMES), ODD, max_size=6))
def test_whatever_was_set_the_file_loads_and_no_option_is_lost(version: str, options: dict[str, Any]) -> None:
    placing = placed(version, **options)
    assert loaded(placing)
    told = [*placing.mapped.values(), *placing.skipped, *placing.unsupported]
    assert {f"f:{at}" for at in range(1, len(options) + 1)} <= {each.where for each in told}
