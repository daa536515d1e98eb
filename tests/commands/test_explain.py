"""`rlhf explain`: its output, of one key and of all."""

import pytest
from cost import cost
from run_cli import child, is_one_error, rlhf

from rlhf_cli.commands.explain import every_key
from rlhf_cli.errors import CODES
from tests.config.machinery.test_fields import IN_RECIPES, KEYS


@pytest.fixture(autouse=True)
def _a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "100")


def explain(*arguments: str) -> str:
    result = rlhf("explain", *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return result.stdout


# What it says


def test_a_key_is_explained_in_full() -> None:
    assert explain("reward.center_rewards_coefficient").splitlines() == [
        "reward.center_rewards_coefficient   (reward.yaml)",
        "  value     a number, at least 0, or null",
        "  default   0.01",
        "  meaning   Coefficient of a loss that pulls the sum of a pair's two scores towards 0, so that",
        "            scores keep a stable scale. Higher values centre them more strongly; null turns it off.",
        "  source    TRL 1.16, trl/trainer/reward_config.py; the value that it recommends, TRL's own default",
        "            is null",
    ]


@pytest.mark.parametrize(
    ("key", "value", "default"),
    [
        (
            "data.train",
            "a file, a folder or a dataset of the hub, or a list, each {path, weight, columns,\n            format}",
            "required",
        ),
        ("data.on_bad", "one of error, drop", "error"),
        ("data.truncate_prompt_words", "a whole number, at least 1, or {min, max}, or null", "null"),
        ("reward.warmup_ratio", "a number, at least 0 and below 1", "0.03"),
        ("sft.adam_epsilon", "a number, above 0", "1e-8"),
        ("sft.packing", "true or false", "false"),
        ("models.value", "one of reward, policy_head, none, a folder or a hub id", "reward"),
        ("eval.best_of", "a list, each a whole number, at least 2", "[2, 4, 8]"),
        ("eval.modes", "a list, each one of sampled, greedy", '["sampled", "greedy"]'),
        (
            "judges",
            "names, each with module:function, a folder or a hub id, or {builtin, parameters, openai,\n"
            "            labels}",
            "{}",
        ),
        ("ppo.response_length", "a whole number, at least 1, or {min, max}", "53"),
        ("ppo.micro_batch_tokens", "a whole number, at least 1, or auto", "auto"),
    ],
)
def test_types_and_defaults_are_words(key: str, value: str, default: str) -> None:
    assert f"\n  value     {value}\n  default   {default}\n" in explain(key)


BATCH = "called per_device_train_batch_size here"
# Argument of `rlhf explain`, and texts that it prints; ^ at the start, $ at the end, ! nowhere.
PRINTED = [
    ("learning_rate", "^sft.learning_rate   (sft.yaml)\n", "\nreward.learning_rate   (reward.yaml)\n"),
    ("KL", "^ppo.watchdog.kl   (ppo.yaml)\n  value     a number, above 0, or null\n"),
    ("Entropy", "^no key is called Entropy; this has to do with it:\n\nppo.yaml\n  ppo.entropy_coef  0.0  "),
    ("PPO.KL_COEF", "^ppo.kl_coef   (ppo.yaml)\n"),
    ("bytes", "\n  ppo.optim  "),  # in no name: the keys whose meanings have the word
    ("Padding", "\n  ppo.packing  "),
    ("seed", "^seed   (sft.yaml, reward.yaml, dpo.yaml, ppo.yaml, eval.yaml)\n"),
    ("bf16", "^sft.bf16, reward.bf16, dpo.bf16   (sft.yaml, reward.yaml, dpo.yaml)\n", "!also "),
    ("reward", "\n\nalso models.reward   (ppo.yaml)\n", "$\n\nalso models.reward   (eval.yaml)\n"),
    ("output", "$\n\nalso rewards.NAME.output   (ppo.yaml)\n"),
    # Names that the user chooses
    ("rewards.style.weight", "^rewards.style.weight   (ppo.yaml)\n"),
    ("rewards.NAME.weight", "^rewards.name.weight   (ppo.yaml)\n"),
    ("rewards.style.wieght", "^rewards   (ppo.yaml)\n", "\n  rewards.NAME.weight "),
    ("rewards.style", "rewards.NAME.function"),
    ("data.columns.prompt", "^data.columns   (sft.yaml, "),
    ("judges.gold", "^judges   (eval.yaml)\n"),
    ("model.new.hidden_size", "^model.new   (sft.yaml)\n"),
    # Codes
    ("d10", "^D10  too long\n", "\n  fix       Set data.on_long: drop, raise the limit, or shorten the rows.\n",
     "exit      2: "),
    ("T01", "exit      0: "),
    ("R01", "exit      1: ", "!only a warning"),
    ("R13", "exit      1: it fails at run time; only a warning by default (ppo.watchdog.action: warn)"),
    # Names of earlier versions and of other systems
    ("data.first_words", "^data.truncate_prompt_words   ("),
    ("rewards.style.reads", "^rewards.style.input   ("),
    ("init_kl_coef", "^init_kl_coef is called kl_coef here\n", "\nppo.kl_coef   ("),
    ("ppo.kl_penalty", "called kl_estimator here; kl is k1, mse is k2\n", "\nppo.kl_estimator   ("),
    ("mini_batch_size", "called num_mini_batches here; it counts minibatches", "\nppo.num_mini_batches   ("),
    ("sft.lr", "^sft.lr is called learning_rate here\n", "\nsft.learning_rate   (", "!ppo.learning_rate"),
    ("reward_model_path", "called models.reward here\n", "\nmodels.reward   ("),
    ("num_generations", "called num_samples_per_prompt here\n", "\nppo.num_samples_per_prompt   ("),
    ("micro_train_batch_size", f"{BATCH}\n", "\nppo.per_device_train_batch_size   ("),
    ("rollout_batch_size", f"{BATCH}; times", "\nppo.per_device_train_batch_size   ("),
    # Fields of TRL
    ("trainer.optim", "^trainer.optim   (sft.yaml, reward.yaml, dpo.yaml)\n",
     "The field optim of TRL 1.16's trainer, handed on as it is.\n"),
    ("packing_strategy", "^trainer.packing_strategy   (sft.yaml)\n"),
]  # fmt: skip


@pytest.mark.parametrize("case", PRINTED, ids=lambda case: case[0])
def test_what_explain_prints(case: tuple[str, ...]) -> None:
    name, *texts = case
    printed = explain(name)
    for text in texts:
        marks = {"^": printed.startswith, "$": printed.endswith, "!": lambda other: other not in printed}
        holds = marks[text[0]](text[1:]) if text[0] in marks else text in printed
        assert holds, (text, printed)


def test_keys_with_different_texts_in_two_files_are_two_entries() -> None:
    assert explain("data.eval").count("default   null") == 2  # rows in one file, pairs in the other
    assert explain("trainer.optim").count("default") == explain("kl").count("ppo.watchdog.kl ") == 1


@pytest.mark.parametrize("section", ["ppo", "data", "output", "models", "eval"])
def test_a_section_lists_its_keys_one_line_each(section: str) -> None:
    first, *lines = explain(section).splitlines()
    assert first.startswith(f"{section}   (") and max(map(len, lines)) <= 100
    for path in {key.path for _, key in KEYS if key.path.startswith(f"{section}.")}:
        assert any(line.startswith(f"  {path} ") or f", {path} " in line for line in lines), path


@pytest.mark.full
def test_a_key_shows_its_default_in_each_recipe() -> None:
    assert IN_RECIPES
    all_keys = explain("--all")
    for recipe, name, text in IN_RECIPES:
        for printed in (explain(f"ppo.{name}"), all_keys):
            assert f" recipe {recipe}: " in printed and f"[{text}]" in " ".join(printed.split())
    assert not any(" recipe " in explain(f"{stage}.learning_rate") for stage in ("sft", "reward"))


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("kl_coff", "unknown key kl_coff", "did you mean kl_coef?"),
        ("ppo.kl_coff", "unknown key ppo.kl_coff", "did you mean ppo.kl_coef?"),
        ("pp", "unknown key pp", "did you mean "),
        ("qqqq", "unknown key qqqq", "rlhf explain --all lists all keys and codes"),
        ("D99", "unknown key D99", "did you mean D19?"),
        ("use_vllm", "unknown key use_vllm", "a vLLM server generates the responses with models.engine"),
        ("ppo.vllm_mode", "unknown key ppo.vllm_mode", "a vLLM server generates the responses with models.engine"),
        ("gpu_memory_utilization", "unknown key gpu_memory_utilization", "a vLLM server generates the"),
        ("trainer.optm", "trainer.optm: not a field", "did you mean optim?"),
        ("liger", "unknown key liger", "sft.yaml and reward.yaml accept trainer.use_liger_kernel: true"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, text: str, hint: str) -> None:
    assert is_one_error(rlhf("explain", name), "C01", text, f"hint: {hint}")


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("output_dir", "trainer.output_dir is set by the pipeline", "use run"),
        ("trainer.packing", "trainer.packing belongs under sft:", "write it as sft.packing"),
    ],
)
def test_a_field_of_trl_that_trainer_does_not_accept(name: str, text: str, hint: str) -> None:
    assert is_one_error(rlhf("explain", name), "C02", text, f"hint: {hint}")


@pytest.mark.parametrize("arguments", [[], ["seed", "--all"]])
def test_a_name_or_all_is_needed(arguments: list[str]) -> None:
    assert is_one_error(rlhf("explain", *arguments), "C11")


# All of it


def test_all_lists_every_key_once_in_plain_text_of_a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    text, listed = " ".join(explain("--all").split()), []
    for entry in (entry for entries in every_key().values() for entry in entries):
        source = f" source {entry.source} " if entry.source else " "
        values = f" value {entry.value} default {entry.default} meaning {entry.meaning}{source}"
        assert f" {entry.name} ({', '.join(entry.files)}){values}" in text, entry.name
        paths = entry.keys if len(entry.keys) > 1 else entry.keys * len(entry.files)
        listed += zip((file.removesuffix(".yaml") for file in entry.files), paths, strict=True)
    assert sorted(listed) == sorted((stage, key.path) for stage, key in KEYS)
    assert " ppo.kl_coef (ppo.yaml) value a number, at least 0 default 0.05 " in text
    lines = set(explain("--all").splitlines())
    assert {f"{code}  {entry.exit}  {entry.title}" for code, entry in CODES.items()} <= lines
    text = explain("--all")
    assert max(map(len, text.splitlines())) <= 100 and "\x1b" not in text
    monkeypatch.setenv("COLUMNS", "80")
    wide = [line for line in explain("--all").splitlines() if len(line) > 80]
    assert all(len(line.split()) <= 2 for line in wide), "only a path or a command is longer"


@pytest.mark.full
def test_it_is_quick() -> None:
    assert cost(lambda: child("explain", "kl_coef")) <= 6  # 3.7 to 4.6 on a quiet machine
