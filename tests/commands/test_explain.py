"""`rlhf explain`: its output, and that the sources of all defaults exist and state the same values.

Modules: `config/machinery/fields.py`.
"""

import re
import runpy
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from cost import cost
from run_cli import ROOT, child, is_one_error, rlhf

from rlhf_cli import config
from rlhf_cli.commands.explain import every_key
from rlhf_cli.config.machinery import trl_fields
from rlhf_cli.config.machinery.fields import DefaultSource, parse_source, split_description, texts_by_class
from rlhf_cli.config.ppo import RECIPES, PPOSettings
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.errors import CODES

KEYS = [(stage, key) for stage in CONFIGS for key in config.keys(stage).values() if not key.is_section]
SOURCES = {(stage, key.path): source for stage, key in KEYS if key.source and (source := parse_source(key.source))}
IN_RECIPES = [(recipe, name, text) for recipe, keys in RECIPES.items() for name, (_, text) in keys.items()]
EVERY_SOURCE = [*SOURCES.values(), *(source for *_, text in IN_RECIPES if (source := parse_source(text)))]
DATACLASSES = {
    "trl/trainer/sft_config.py": "SFTConfig",
    "trl/trainer/reward_config.py": "RewardConfig",
    "trl/trainer/base_config.py": "_BaseConfig",
    "src/transformers/training_args.py": "TrainingArguments",
}


@pytest.fixture(autouse=True)
def _a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "100")


def explain(*arguments: str) -> str:
    result = rlhf("explain", *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return result.stdout


# Sources


@pytest.mark.parametrize(
    "text",
    [
        "ours", "", "TRL 1.16", "InstructGPT, N+ details", "`ls tests`", "Ouyang et al. 2022, arXiv 2203.02155",
        "Ouyang et al. 2022, arXiv 2203, section 3", "`make demo`", "Huang et al., arXiv 2403.17031, detail 23",
        "TRL, trl/trainer/sft_config.py", "TRL 1.16, SFTConfig", "Ouyang et al. 2022, arXiv 2203.02155, page 3",
        "docs/config.md, Defaults", "`python benchmarks/ppo.py`", "docs/results/demo.txt", "`docs/ppo.md`",
    ],
)  # fmt: skip
def test_anything_else_is_no_source(text: str) -> None:
    assert parse_source(text) is None


def test_the_bracket_at_the_end_is_the_source_and_no_other() -> None:
    meaning = "Picks a split, [SPLIT], of it."
    assert split_description(f"{meaning} [docs/ppo.md]") == (meaning, "docs/ppo.md")
    assert split_description("Ends in a [SPLIT]") == ("Ends in a [SPLIT]", None)


def test_every_default_and_every_value_of_a_recipe_has_a_source_and_no_required_key_has_one() -> None:
    assert [key.path for stage, key in KEYS if key.field.is_required() == ((stage, key.path) in SOURCES)] == []
    assert [(recipe, name) for recipe, name, text in IN_RECIPES if not parse_source(text)] == []
    assert {name for _, name, _ in IN_RECIPES} <= PPOSettings.model_fields.keys()


def test_every_text_belongs_to_a_key() -> None:
    keys = [key for stage in CONFIGS for key in config.keys(stage).values() if key.owner]
    known = {(name, key.name) for key in keys for name in ("shared", *(cls.__name__ for cls in key.owner.__mro__))}
    texts = {(table, name) for table, names in texts_by_class().items() for name in names if table != "sources"}
    assert texts <= known


def test_every_page_that_is_named_exists() -> None:
    pages = {(source.parts["page"], source.parts.get("section")) for source in EVERY_SOURCE if source.kind == "page"}
    assert len(pages) > 3
    for page, section in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not section or f"\n## {section}\n" in text, (page, section)


def test_the_projects_own_defaults_give_a_reason_for_each() -> None:
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    reasons = text.partition("## Project defaults\n")[2].partition("\n## ")[0]
    keys = {key for (_, key), source in SOURCES.items() if source.parts.get("section") == "Project defaults"}
    assert len(keys) > 20 and [key for key in sorted(keys) if f"`{key}`" not in reasons] == []


@pytest.fixture
def _pinned() -> None:
    """Skip if other versions than those of constraints.txt are installed."""
    pins, here = trl_fields.made_from(), {name: version(name) for name in trl_fields.made_from()}
    if here != pins:
        pytest.skip(f"the sources are of {pins}, installed are {here}")


def installed(source: DefaultSource) -> Path | None:
    """The file of a system's source here, if that system is installed in that version."""
    package = source.parts.get("name", "").lower()
    spec = find_spec(package) if re.fullmatch(r"\w+", package) else None
    if spec is None:
        return None
    if not f"{version(package)}.".startswith(f"{source.parts['version']}."):
        return None
    assert spec.origin
    return Path(spec.origin).parents[1] / source.parts["file"].removeprefix("src/")


@pytest.mark.usefixtures("_pinned")
def test_every_file_of_an_installed_system_exists() -> None:
    files = {file for source in EVERY_SOURCE if (file := installed(source))}
    assert files and [str(file) for file in files if not file.is_file()] == []


def defaults_of(file: str) -> dict[str, object]:
    """Field -> default of each field that a config class itself declares."""
    import transformers
    from trl.trainer import base_config, reward_config, sft_config

    modules = (sft_config, reward_config, base_config, transformers)
    kind = next(getattr(module, DATACLASSES[file]) for module in modules if hasattr(module, DATACLASSES[file]))
    describe = runpy.run_path(str(ROOT / "scripts" / "trl_fields.py"))["_fields"]
    return {name: field["default"] for name, field in describe(kind).items() if name in vars(kind)["__annotations__"]}


@pytest.mark.usefixtures("_pinned")
def test_defaults_are_those_of_the_config_class_that_is_their_source() -> None:
    read = {file: defaults_of(file) for file in DATACLASSES}
    differ, checked = [], 0
    for stage, key in KEYS:
        source = SOURCES.get((stage, key.path))
        # A remark says in what the two differ, or under what name it is there.
        if not source or source.remark or not installed(source) or source.parts["file"] not in read:
            continue
        theirs, ours = read[source.parts["file"]].get(key.name, "no such field"), key.field.get_default()
        checked += 1
        if theirs != ours or isinstance(theirs, bool) != isinstance(ours, bool):
            differ.append(f"{stage}: {key.path} is {ours}, in {source.parts['file']} it is {theirs}")
    assert differ == [] and checked > 20


def test_a_remark_about_trls_own_default_is_true() -> None:
    values = {
        (stage, path): match[1]
        for (stage, path), source in SOURCES.items()
        if stage in trl_fields.TRAINERS and (match := re.search(r"TRL's own default is (\S+)$", source.remark or ""))
    }
    assert {path for _, path in values} >= {"sft.num_train_epochs", "reward.gradient_checkpointing"}
    for (stage, path), theirs in values.items():
        default = trl_fields.fields_of(stage)[path.rpartition(".")[2]]["default"]
        words = {"null": None, "true": True, "false": False}
        assert default == (words[theirs] if theirs in words else type(default)(theirs)), path


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
