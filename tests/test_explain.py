"""`rlhf explain`: its output, and that the sources of all defaults exist and state the same values."""

import re
import runpy
import shlex
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from cost import cost
from test_cli import ROOT, child, is_one_error, rlhf

from rlhf_cli import cli, config
from rlhf_cli.config import trl_fields
from rlhf_cli.config.json_schema import DefaultSource, parse_source, split_description
from rlhf_cli.config.paths import field_kind
from rlhf_cli.config.ppo_options import RECIPES, PPOSettings
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.error_codes import CODES

HERE = Path(__file__).parent
KEYS = [
    (stage, key, field)
    for stage in CONFIGS
    for key, field in config.keys(stage).items()
    if field_kind(field).model is not field.annotation  # a section has no value of its own
]
SOURCES = {
    (stage, key): source
    for stage, key, field in KEYS
    if (source := parse_source(split_description(field.description)[1] or ""))
}
IN_RECIPES = [(recipe, name, text) for recipe, keys in RECIPES.items() for name, (_, text) in keys.items()]
EVERY_SOURCE = [*SOURCES.values(), *(source for *_, text in IN_RECIPES if (source := parse_source(text)))]
PAGES = (
    "quick-start", "concepts", "your-own-data", "config", "ppo", "rewards", "evaluation", "tuning", "scaling",
    "commands", "architecture", "reliability",
)  # fmt: skip
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


def said(*arguments: str) -> str:
    result = rlhf("explain", *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    return result.stdout


# Sources


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        (
            "Ouyang et al. 2022, arXiv 2203.02155, section 3.5",
            "paper",
            {"authors": "Ouyang et al.", "year": "2022", "where": "arXiv 2203.02155", "part": "section 3.5"},
        ),
        (
            "Schulman 2020, http://joschu.net/blog/kl-approx.html, equation 10; an unbiased one",
            "paper",
            {"authors": "Schulman", "year": "2020", "where": "http://joschu.net/blog/kl-approx.html"},
        ),
        ("Huang et al. 2024, arXiv 2403.17031, detail 23", "paper", {"part": "detail 23"}),
        (
            "TRL 1.12, trl/experimental/ppo/ppo_config.py; TRL's own default is 3",
            "system",
            {"name": "TRL", "version": "1.12", "file": "trl/experimental/ppo/ppo_config.py"},
        ),
        ("Stanford Alpaca 7f08532, README.md", "system", {"name": "Stanford Alpaca", "version": "7f08532"}),
        ("docs/rewards.md", "page", {"page": "docs/rewards.md"}),
        ("docs/config.md, section Project defaults; why", "page", {"section": "Project defaults"}),
        ("`make demo`", "command", {"command": "make demo"}),
        ("`rlhf check runs/demo`; why", "command", {"command": "rlhf check runs/demo"}),
    ],
)
def test_a_source_is_a_paper_a_system_a_page_or_a_command(text: str, kind: str, parts: dict[str, str]) -> None:
    source = parse_source(text)
    assert source and source.kind == kind and parts.items() <= source.parts.items()
    assert source.remark == (text.partition("; ")[2] or None)


@pytest.mark.parametrize(
    "text",
    [
        "ours", "none", "", "TRL 1.16", "transformers TrainingArguments", "InstructGPT, N+ details", "`ls tests`",
        "Ouyang et al. 2022, arXiv 2203.02155", "Ouyang et al. 2022, arXiv 2203, section 3", "`make demo`;",
        "Huang et al., arXiv 2403.17031, detail 23", "TRL, trl/trainer/sft_config.py", "TRL 1.16, SFTConfig",
        "pytest tests/test_explain.py", "Ouyang et al. 2022, arXiv 2203.02155, page 3", "docs/config.md, Defaults",
        "`pytest tests/test_explain.py`", "`python benchmarks/ppo_update.py`", "docs/results/demo.txt", "`docs/ppo.md`",
    ],
)  # fmt: skip
def test_anything_else_is_no_source(text: str) -> None:
    assert parse_source(text) is None


def test_the_bracket_at_the_end_is_the_source_and_no_other() -> None:
    assert split_description("Picks a split, [SPLIT], of it. [`make demo`]") == (
        "Picks a split, [SPLIT], of it.",
        "`make demo`",
    )
    assert split_description("Ends in a [SPLIT]") == ("Ends in a [SPLIT]", None)


def without_source(keys: list[tuple]) -> list[str]:
    return [f"{stage}: {key}" for stage, key, field in keys if not field.is_required() and (stage, key) not in SOURCES]


def test_every_default_has_a_source() -> None:
    assert without_source([each for each in KEYS if not each[1].startswith("ppo.")]) == []


def test_every_default_of_ppo_has_a_source() -> None:
    assert without_source([each for each in KEYS if each[1].startswith("ppo.")]) == []


def test_every_value_of_a_recipe_has_a_source() -> None:
    assert [(recipe, name) for recipe, name, text in IN_RECIPES if not parse_source(text)] == []
    assert {name for _, name, _ in IN_RECIPES} <= PPOSettings.model_fields.keys()


def test_a_required_key_has_none() -> None:
    for stage, key, field in KEYS:
        assert not (field.is_required() and (stage, key) in SOURCES), key


def exists(command: str) -> bool:
    """Whether a command that a user can run is there: a target of make, or a subcommand."""
    tool, first, *_ = shlex.split(command)
    if tool == "make":
        return bool(re.search(rf"^[a-z -]*\b{first}\b[a-z -]*:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return first in {each.name or each.callback.__name__ for each in cli.app.registered_commands}


def test_every_command_that_is_named_is_there() -> None:
    commands = {source.parts["command"] for source in EVERY_SOURCE if source.kind == "command"}
    assert [command for command in sorted(commands) if not exists(command)] == []
    assert exists("make demo") and exists("rlhf check runs/demo")
    assert not exists("make nothing") and not exists("rlhf nothing")


def test_every_page_that_is_named_is_there() -> None:
    pages = {(source.parts["page"], source.parts.get("section")) for source in EVERY_SOURCE if source.kind == "page"}
    assert len(pages) > 3 and {page for page, _ in pages} <= {f"docs/{name}.md" for name in PAGES}
    if (ROOT / "docs/evaluation.md").is_file():  # all of them are written
        assert [page for page, _ in sorted(pages, key=str) if not (ROOT / page).is_file()] == []
    for page, section in pages:
        assert not section or f"\n## {section}\n" in (ROOT / page).read_text(encoding="utf-8"), (page, section)


def test_the_projects_own_defaults_give_a_reason_for_each() -> None:
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    reasons = text.partition("## Project defaults\n")[2].partition("\n## ")[0]
    keys = {key for (_, key), source in SOURCES.items() if source.parts.get("section") == "Project defaults"}
    assert len(keys) > 20 and [key for key in sorted(keys) if f"`{key}`" not in reasons] == []


@pytest.fixture
def _pinned() -> None:
    """Sources are held against the versions of constraints.txt; other ones may well differ."""
    pins, here = trl_fields.source_versions(), {name: version(name) for name in trl_fields.source_versions()}
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
def test_every_file_of_an_installed_system_is_there() -> None:
    files = {file for source in EVERY_SOURCE if (file := installed(source))}
    assert files and [str(file) for file in files if not file.is_file()] == []


def defaults_of(file: str) -> dict[str, object]:
    """Field -> default of each field that a config class itself declares."""
    import transformers
    from trl.trainer import base_config, reward_config, sft_config

    kind = next(
        getattr(module, DATACLASSES[file])
        for module in (sft_config, reward_config, base_config, transformers)
        if hasattr(module, DATACLASSES[file])
    )
    describe = runpy.run_path(str(ROOT / "scripts" / "trl_fields.py"))["_fields"]
    return {name: field["default"] for name, field in describe(kind).items() if name in vars(kind)["__annotations__"]}


@pytest.mark.usefixtures("_pinned")
def test_defaults_are_those_of_the_config_class_that_is_their_source() -> None:
    read = {file: defaults_of(file) for file in DATACLASSES}
    differ, checked = [], 0
    for stage, key, field in KEYS:
        source, name = SOURCES.get((stage, key)), key.rpartition(".")[2]
        # A remark says in what the two differ, or under what name it is there.
        if not source or source.remark or not installed(source) or source.parts["file"] not in read:
            continue
        theirs, ours = read[source.parts["file"]].get(name, "no such field"), field.get_default()
        checked += 1
        if theirs != ours or isinstance(theirs, bool) != isinstance(ours, bool):
            differ.append(f"{stage}: {key} is {ours}, in {source.parts['file']} it is {theirs}")
    assert differ == [] and checked > 20


def test_what_a_remark_tells_of_trls_own_default_is_so() -> None:
    told = {
        (stage, key): match[1]
        for (stage, key), source in SOURCES.items()
        if stage in trl_fields.TRAINERS and (match := re.search(r"TRL's own default is (\S+)$", source.remark or ""))
    }
    assert {key for _, key in told} >= {"sft.num_train_epochs", "reward.gradient_checkpointing"}
    for (stage, key), theirs in told.items():
        default = trl_fields.fields_of(stage)[key.rpartition(".")[2]]["default"]
        words = {"null": None, "true": True, "false": False}
        assert default == (words[theirs] if theirs in words else type(default)(theirs)), key


# What it says


def test_a_key_is_told_in_full() -> None:
    assert said("reward.center_rewards_coefficient").splitlines() == [
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
        ("data.train", "a file, a folder or a dataset of the hub", "required"),
        ("data.on_bad", "one of error, drop", "error"),
        ("data.first_words", "a whole number, at least 1, or {min, max}, or null", "null"),
        ("reward.warmup_ratio", "a number, at least 0 and below 1", "0.03"),
        ("sft.adam_epsilon", "a number, above 0", "1e-8"),
        ("sft.packing", "true or false", "false"),
        ("models.value", "one of reward, policy_head, a folder or a hub id", "reward"),
        ("eval.best_of", "a list, each a whole number, at least 2", "[2, 4, 8]"),
        ("eval.modes", "a list, each one of sampled, greedy", '["sampled", "greedy"]'),
        ("judges", "names, each with module:function, a folder or a hub id", "{}"),
        ("ppo.response_length", "a whole number, at least 1, or {min, max}", "53"),
        ("ppo.micro_batch_tokens", "a whole number, at least 1, or auto", "auto"),
    ],
)
def test_types_and_defaults_are_told_in_words(key: str, value: str, default: str) -> None:
    text = said(key)
    assert f"\n  value     {value}\n  default   {default}\n" in text


def test_a_last_name_finds_every_key_of_that_name() -> None:
    titles = [line for line in said("learning_rate").splitlines() if line and not line.startswith(" ")]
    assert titles[:3] == [f"{stage}.learning_rate   ({stage}.yaml)" for stage in ("sft", "reward", "ppo")]
    assert titles[3:] == ["also with learning_rate in the name:", "ppo.yaml"]
    assert "\n  ppo.value_learning_rate  " in said("learning_rate") and "\nalso" not in said("ppo.learning_rate")


def test_a_word_finds_the_keys_and_metrics_that_have_it_in_their_names() -> None:
    for name in ("KL", "kl"):
        text = said(name)
        assert text.startswith("ppo.watchdog.kl   (ppo.yaml)\n")
        assert all(f"\n  {key} " in text for key in ("ppo.kl_coef", "ppo.target_kl", "eval.select.kl_max"))
        assert "\n  objective/kl_k1  KL to the SFT policy\n" in text and text.count("ppo.watchdog.kl ") == 1
    text = said("Entropy")
    assert text.startswith("no key is called Entropy; this has to do with it:\n\nppo.yaml\n  ppo.entropy_coef  0.0  ")
    assert "policy/entropy_avg" in text
    assert said("KL_Coef") == said("kl_coef") and said("PPO.KL_COEF") == said("ppo.kl_coef")
    assert "\n  objective/kl_k1  KL" in said("objective/kl_k1")


def test_a_word_of_no_name_finds_the_keys_whose_meanings_have_it() -> None:
    assert "\n  ppo.optim  " in said("bytes") and "\n  ppo.packing  " in said("Padding")


def test_what_files_share_is_told_once() -> None:
    assert said("seed").startswith("seed   (sft.yaml, reward.yaml, ppo.yaml, eval.yaml)\n")
    assert said("bf16").startswith("sft.bf16, reward.bf16   (sft.yaml, reward.yaml)\n")
    assert said("data.eval").count("default   null") == 2  # rows in one file, pairs in the other


def test_a_section_tells_keys_of_the_same_name_elsewhere() -> None:
    assert said("reward").endswith("\n\nalso models.reward   (ppo.yaml, eval.yaml)\n")
    assert "also " not in said("bf16") + said("output")


def test_names_of_the_users_own_are_told_by_what_holds_them() -> None:
    assert said("rewards.style.weight").startswith("rewards.style.weight   (ppo.yaml)\n")
    assert said("rewards.NAME.weight").startswith("rewards.NAME.weight   (ppo.yaml)\n")
    assert "rewards.NAME.function" in said("rewards.style")
    assert said("data.columns.prompt").startswith("data.columns   (sft.yaml, ")
    assert said("judges.gold").startswith("judges   (eval.yaml)\n")
    assert said("model.new.hidden_size").startswith("model.new   (sft.yaml)\n")
    assert is_one_error(rlhf("explain", "rewards.style.wieght"), "C01")


@pytest.mark.parametrize("section", ["ppo", "data", "output", "models", "eval"])
def test_a_section_lists_its_keys_one_line_each(section: str) -> None:
    first, *lines = said(section).splitlines()
    assert first.startswith(f"{section}   (")
    for key in {key for _, key, _ in KEYS if key.startswith(f"{section}.")}:
        assert any(line.startswith(f"  {key} ") or f", {key} " in line for line in lines), key
    assert max(map(len, lines)) <= 100


def test_a_key_tells_what_recipes_make_of_it() -> None:
    assert IN_RECIPES
    for recipe, name, text in IN_RECIPES:
        for told in (said(f"ppo.{name}"), said("--all")):
            assert f" recipe {recipe}: " in told and f"[{text}]" in " ".join(told.split())
    assert not any(" recipe " in said(f"{stage}.learning_rate") for stage in ("sft", "reward"))


def test_a_code_is_told_in_either_case() -> None:
    assert said("d10") == said("D10")
    assert said("D10").splitlines()[0] == "D10  too long"
    assert "  fix       Set data.on_long: drop, raise the limit, or shorten the rows.\n" in said("D10")
    assert [said(code).splitlines()[-1].split()[1] for code in ("T01", "R01", "C01")] == ["0:", "1:", "2:"]


@pytest.mark.parametrize(
    ("old", "text", "new"),
    [
        ("init_kl_coef", "init_kl_coef is called kl_coef here\n", "ppo.kl_coef"),
        ("ppo.kl_penalty", "called kl_estimator here; kl is k1, mse is k2\n", "ppo.kl_estimator"),
        ("mini_batch_size", "called num_mini_batches here; it counts minibatches", "ppo.num_mini_batches"),
        ("sft.lr", "sft.lr is called learning_rate here\n", "sft.learning_rate"),
        ("reward_model_path", "called models.reward here\n", "models.reward"),
        ("beta", "beta is called kl_coef here\n", "ppo.kl_coef"),
        ("epsilon", "epsilon is called cliprange here\n", "ppo.cliprange"),
        ("num_generations", "num_generations is called num_samples_per_prompt here\n", "ppo.num_samples_per_prompt"),
        ("micro_train_batch_size", "called per_device_train_batch_size here\n", "ppo.per_device_train_batch_size"),
        ("rollout_batch_size", "called per_device_train_batch_size here; times", "ppo.per_device_train_batch_size"),
    ],
)
def test_an_old_name_tells_the_new_one(old: str, text: str, new: str) -> None:
    found = said(old)
    assert text in found and f"\n{new}   (" in found
    assert old != "sft.lr" or "ppo.learning_rate" not in found


def test_a_field_of_trls_is_told_as_that() -> None:
    both = said("trainer.optim")
    assert both.startswith("trainer.optim   (sft.yaml, reward.yaml)\n") and both.count("default") == 1
    assert "The field optim of TRL's SFTConfig and RewardConfig, unchanged." in both
    assert "source    TRL 1.16, trl/trainer/sft_config.py\n" in both
    assert said("packing_strategy").startswith("trainer.packing_strategy   (sft.yaml)\n")
    assert said("output_dir") == "trainer.output_dir is set by the pipeline: use run\n"
    assert said("trainer.packing") == "trainer.packing belongs under sft: write it as sft.packing\n"
    result = rlhf("explain", "trainer.optm")
    assert is_one_error(result, "C01") and "did you mean optim?" in result.stderr


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("kl_coff", "unknown key kl_coff", "did you mean kl_coef?"),
        ("ppo.kl_coff", "unknown key ppo.kl_coff", "did you mean ppo.kl_coef?"),
        ("pp", "unknown key pp", "did you mean "),
        ("qqqq", "unknown key qqqq", "rlhf explain --all lists all keys and codes"),
        ("D99", "unknown code D99", "there are D01 to D16"),
        ("X01", "unknown code X01", "rlhf explain --all lists all codes"),
        ("vllm", "there is no key vllm", "responses are generated by the trained model"),
        ("use_vllm", "there is no key use_vllm", "responses are generated by the trained model"),
        ("ppo.vllm_mode", "there is no key ppo.vllm_mode", "responses are generated by the trained model"),
        ("gpu_memory_utilization", "there is no key gpu_memory_utilization", "responses are generated by"),
        ("liger", "there is no key liger", "sft.yaml and reward.yaml accept trainer.use_liger_kernel: true"),
    ],
)
def test_what_is_unknown_is_told_with_the_nearest(name: str, text: str, hint: str) -> None:
    result = rlhf("explain", name)
    assert is_one_error(result, "C01")
    assert text in result.stderr and f"hint: {hint}" in result.stderr


def test_a_name_or_all_is_needed() -> None:
    assert is_one_error(rlhf("explain"), "C11")
    assert is_one_error(rlhf("explain", "seed", "--all"), "C11")


def test_an_unknown_key_of_a_config_points_here(tmp_path: Path) -> None:
    (tmp_path / "ppo.yaml").write_text("data: {prompts: p.jsonl}\nppo: {total_episodes: 64, zzzz: 1}\n")
    assert "hint: `rlhf explain ppo` lists the keys\n" in rlhf("ppo", "-c", tmp_path / "ppo.yaml").stderr


# All of it


def listed(text: str) -> list[tuple[str, str, str, str]]:
    """(stage, key, default, all of it in one line) as `rlhf explain --all` lists them."""
    found, stages = [], []
    for block in text.split("\n\n"):
        first, *rest = block.splitlines()
        if rest and set(rest[0]) == {"-"}:
            stages = re.findall(r"(\w+)\.yaml", first)
        elif match := re.fullmatch(r"([\w., ]+?): (.+?)   \(.*", first):
            keys = match[1].split(", ")
            assert len(keys) in (1, len(stages))
            whole = " ".join(block.split())
            found += [(stage, key, match[2], whole) for stage, key in zip(stages, keys * len(stages), strict=False)]
    return found


def test_a_code_that_warns_and_fails_tells_both() -> None:
    text = " ".join(said("R13").split())
    assert "exit 1: it fails at run time; only a warning by default (ppo.watchdog.action: warn)" in text
    assert "only a warning" not in said("R01")


def test_all_lists_every_key_once_with_its_default_and_source() -> None:
    text = said("--all")
    found = listed(text)
    assert sorted((stage, key) for stage, key, *_ in found) == sorted((stage, key) for stage, key, _ in KEYS)
    defaults = {(stage, key): default for stage, key, default, _ in found}
    assert defaults["ppo", "ppo.kl_coef"] == "0.05" and defaults["reward", "data.train"] == "required"
    for stage, key, _, block in found:
        if source := SOURCES.get((stage, key)):
            named = next(source.parts[part] for part in ("command", "page", "file", "where") if part in source.parts)
            assert any(named in part for part in block.split("[")[1:]), key
    assert all(re.search(rf"^{code}  {told.exit}  {told.title}$", text, re.MULTILINE) for code, told in CODES.items())


def test_all_is_plain_text_of_a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said("--all")
    assert max(map(len, text.splitlines())) <= 100 and "\x1b" not in text
    monkeypatch.setenv("COLUMNS", "80")
    wide = [line for line in said("--all").splitlines() if len(line) > 80]
    assert all(len(line.split()) <= 2 for line in wide), "only a path or a command is longer"


def test_it_needs_no_torch() -> None:
    script = "import sys; from rlhf_cli.cli import app\ntry: app(['explain', 'kl_coef'])\nfinally: print(*sys.modules)"
    result = child_of(script)
    assert not {"torch", "transformers", "trl", "numpy", "rich"} & set(result.splitlines()[-1].split())


def child_of(script: str) -> str:
    import subprocess
    import sys

    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True).stdout


def test_it_is_quick() -> None:
    assert cost(lambda: child("explain", "kl_coef")) <= 6  # 3.7 to 4.6 on a quiet machine
