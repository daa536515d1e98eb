"""`rlhf init preferences`: from one file of pairs and a base model to a run that works."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run_cli import must_succeed, rlhf
from typer.testing import Result

from rlhf_cli import config, jsonl, runs, terminal
from rlhf_cli.commands.init import preferences, sizes
from rlhf_cli.commands.init.limits import count_tokens
from rlhf_cli.commands.init.pairs import read_pairs
from rlhf_cli.commands.init.sizes import EPISODES_PER_UPDATE, Speed
from rlhf_cli.config.base import Options
from rlhf_cli.config.sources import DataSource
from rlhf_cli.models import load, tokenizers, weight_files
from rlhf_cli.pipeline.check import check_configs
from tests.commands.init.test_sizes import PROMPTS, chat
from tests.config.test_json_schema import complaints
from tests.conftest import World

SHARED = Path(__file__).parents[4] / "shared"
HH, STORIES = SHARED / "data/hh-harmless/pairs.jsonl.gz", SHARED / "models/stories260K"
shared = pytest.mark.skipif(not STORIES.exists(), reason="../shared, the developers' data and models, is missing")
PART_FILES = {"sft": "sft", "pairs": "pairs", "prompts": "prompts", "held-out": "heldout"}
ROWS = [(prompt, f"Bright and calm, {number}.", f"Dull and cold, {number}.") for number, prompt in enumerate(PROMPTS)]
FORMS = {
    "columns": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in ROWS],
    "conversations": [
        {
            "chosen": [*chat(p), {"role": "assistant", "content": c}],
            "rejected": [*chat(p), {"role": "assistant", "content": r}],
        }
        for p, c, r in ROWS
    ],
    "transcripts": [
        {key: f"\n\nHuman: {p}\n\nAssistant: {text}" for key, text in (("chosen", c), ("rejected", r))}
        for p, c, r in ROWS
    ],
}


@pytest.fixture(autouse=True)
def _fixed_speed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement, which takes seconds on a busy machine, except where a run is trained."""
    if request.node.originalname != "test_a_file_of_pairs_leads_to_a_finished_run":
        monkeypatch.setattr(sizes, "measure_speed", lambda folder: Speed(training=20_000.0, generation=4_000.0))


def init(folder: Path, data: Path, base: Path, *more: str) -> Result:
    return rlhf("init", "preferences", "--data", data, "--base", base, folder, "--minutes", 1, *more)


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [row for _, row in jsonl.read_jsonl(run / f"data/{name}.jsonl")]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Path]:
    for name, content in FORMS.items():
        jsonl.write_jsonl(tmp_path / f"{name}.jsonl", content)
    return {name: tmp_path / f"{name}.jsonl" for name in FORMS}


def opening(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else prompt[0]["content"]
    return text.removeprefix("\n\nHuman: ").removesuffix("\n\nAssistant:")


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_parts_without_a_common_prompt(
    form: str, data: dict[str, Path], world: World, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = must_succeed(init(run, data[form], world.base))
    prompts = {name: {opening(row["prompt"]) for row in rows(run, file)} for name, file in PART_FILES.items()}
    counts = {name: len(part) for name, part in prompts.items()}
    assert counts == {"sft": 30, "pairs": 45, "prompts": 15, "held-out": 10}
    assert set().union(*prompts.values()) == set(PROMPTS)
    assert "a win rate of 0.50 on 10 held-out prompts is measured to +-0.26 (95 %)" in result.output
    for name in ("sft_eval", "pairs_eval"):
        assert {opening(row["prompt"]) for row in rows(run, name)} == prompts["held-out"]
    first = rows(run, "pairs")[0]
    expected = {p: (c, r) for p, c, r in ROWS}[opening(first["prompt"])]
    texts = [first[key] if isinstance(first[key], str) else first[key][0]["content"] for key in ("chosen", "rejected")]
    assert tuple(text.strip() for text in texts) == expected
    for stage in preferences.REQUIRED_STAGES:
        assert complaints(run / f"{stage}.yaml") == []  # by the schema that it names
    prompt, template = rows(run, "prompts")[0]["prompt"], config.load("sft", run / "sft.yaml").model.chat_template
    assert isinstance(prompt, list) == (template == "chatml") == (form == "conversations")
    assert form != "columns" or rows(run, "sft")[0]["completion"].startswith(" Bright")
    assert form != "transcripts" or prompt.endswith("\n\nAssistant:")


def test_options_of_rated_answers(data: dict[str, Path], world: World, tmp_path: Path) -> None:
    rated = tmp_path / "rated.jsonl"
    content = [{"prompt": p, "responses": [c, r, f"{r} No."], "scores": [9, 4, 1]} for p, c, r in ROWS]
    jsonl.write_jsonl(rated, content)
    run = tmp_path / "run"
    options = ("--pairs-per-prompt", "all", "--min-rating-gap", "4", "--margin-per-point", "0.5")
    result = must_succeed(init(run, rated, world.base, *options))
    assert f"200 pairs of {len(PROMPTS)} prompts" in result.output.replace("\n", " ")
    assert Counter(row["margin"] for row in rows(run, "pairs")) == {2.5: 45, 4.0: 45}
    said = (
        '  # The pairs were made of the ratings in "scores" of rated.jsonl, with\n'
        "  # pairs_per_prompt: all, min_rating_gap: 4, margin_per_point: 0.5\n"
    )
    assert said in (run / "reward.yaml").read_text().replace(str(tmp_path) + "/", "")
    assert config.load("reward", run / "reward.yaml").stage == "reward"

    assert (
        "noted: --min-rating-gap had no effect"
        in init(tmp_path / "a", data["columns"], world.base, *options[2:4]).output
    )
    assert "made of the ratings" not in (tmp_path / "a/reward.yaml").read_text()
    assert (
        "error[C07]: --pairs-per-prompt al: expected one or all"
        in init(tmp_path / "b", rated, world.base, "--pairs-per-prompt", "al").stderr
    )


@pytest.mark.full
def test_with_a_chat_template_prompts_are_conversations(data: dict[str, Path], world: World, tmp_path: Path) -> None:
    base = tmp_path / 'a: "chat" #1'  # a name that YAML must quote
    tokenizer = world.tokenizer()
    tokenizers.set_chat_template(tokenizer, "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}")
    shutil.copytree(world.base, base)
    tokenizer.save_pretrained(base)
    for form in FORMS:
        assert init(tmp_path / f"chat {form}", data[form], base).exit_code == 0
        assert isinstance(rows(tmp_path / f"chat {form}", "prompts")[0]["prompt"], list)
        model = config.load("sft", tmp_path / f"chat {form}/sft.yaml").model
        assert model.chat_template is None and model.path == str(base)
        assert "chat_template_kwargs" not in (tmp_path / f"chat {form}/sft.yaml").read_text()
    assert init(tmp_path / "plain", data["columns"], base, "--plain").exit_code == 0
    assert isinstance(rows(tmp_path / "plain", "prompts")[0]["prompt"], str)


@pytest.mark.full
def test_a_template_with_thoughts_and_dates_gets_neither(data: dict[str, Path], world: World, tmp_path: Path) -> None:
    base, tokenizer = tmp_path / "base", world.tokenizer()
    template = (
        "{{ strftime_now('%Y') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}<none>{% endif %}{% endif %}"
    )
    tokenizers.set_chat_template(tokenizer, template)
    shutil.copytree(world.base, base)
    tokenizer.save_pretrained(base)
    result = init(tmp_path / "run", data["columns"], base)
    assert result.exit_code == 0 and "T07" not in result.output
    values = {"enable_thinking": False, "date": "2024-07-26"}
    assert config.load("sft", tmp_path / "run/sft.yaml").data.chat_template_kwargs == values


def test_bad_rows_are_dropped_and_counted(world: World, tmp_path: Path) -> None:
    good = FORMS["columns"]
    bad = [{**good[0], "chosen": ""}, {**good[1], "rejected": good[1]["chosen"]}, {**good[2], "rejected": 7}, good[3]]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [*good, *bad])
    jsonl.write_jsonl(tmp_path / "none.jsonl", [{**row, "chosen": [{"role": "user", "content": "?"}]} for row in good])
    none = init(tmp_path / "none", tmp_path / "none.jsonl", world.base).stderr.splitlines()
    assert none[-2].startswith(f"error[D05]: {tmp_path}/none.jsonl:1: ") and "hint: correct the row" in none[-1]
    result = init(tmp_path / "run", tmp_path / "pairs.jsonl", world.base)
    assert result.exit_code == 0 and "104 rows read, 100 pairs used" in result.stdout
    for code, line in (("D09", 101), ("D07", 102), ("D06", 103), ("D15", 104)):
        assert f"warning[{code}]: " in result.stderr and f"(first: line {line})" in result.stderr, code


COLUMN_ERRORS = [
    (
        [],
        (
            "error[D02]: ",
            "question, better, worse",
            "e.g. --column prompt=question --column chosen=better --column rejected=worse\n",
        ),
    ),
    (["prompt"], ("error[C11]: --column prompt: expected NAME=COLUMN",)),
    (
        ["prompt=question,chosen=better"],
        ("error[C11]", "repeat the option: --column prompt=question --column chosen=better"),
    ),
    (["prompt=question"], ("e.g. --column chosen=better --column rejected=worse\n",)),  # none that is mapped already
    (["question=prompt"], ('--column names "question"', "hint: swap the two: --column prompt=question?")),
]


def test_other_column_names(world: World, tmp_path: Path) -> None:
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [{"question": p, "better": c, "worse": r} for p, c, r in ROWS])
    names = ["prompt=question", "chosen=better", "rejected=worse"]

    def with_columns(folder: str, names: list[str]) -> Result:
        options = [word for name in names for word in ("--column", name)]
        return init(tmp_path / folder, tmp_path / "pairs.jsonl", world.base, *options)

    assert with_columns("run", names).exit_code == 0
    for names, texts in COLUMN_ERRORS:
        result = with_columns("again", names)
        assert result.exit_code == 2 and all(text in result.stderr for text in texts), result.stderr


@pytest.mark.full
def test_invalid_requests_write_nothing(data: dict[str, Path], world: World, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/ppo.yaml").write_text("mine")
    (tmp_path / "has dpo").mkdir()
    (tmp_path / "has dpo/dpo.yaml").write_text("mine")
    for stage in ("sft", "ppo"):
        (tmp_path / "a run" / stage).mkdir(parents=True)
        (tmp_path / "a run" / stage / "identity.json").touch()
    new, columns, base = tmp_path / "new", str(data["columns"]), str(world.base)
    hint = f"hint: did you mean {tmp_path / 'a run/sft'} or {tmp_path / 'a run/ppo'}?\n"
    cases: list[tuple[list[Any], tuple[str, ...]]] = [
        (["preferences", tmp_path / "taken", "--data", columns, "--base", base], ("error[C15]: ", "ppo.yaml")),
        (
            ["preferences", tmp_path / "has dpo", "--data", columns, "--base", tmp_path / "no model", "--baselines"],
            ("error[C15]: ", "dpo.yaml"),  # before the model is read
        ),
        (
            ["preferences", new, "--data", tmp_path / "column.jsonl", "--base", base],
            ("error[D01]: --data: ", "columns.jsonl?"),
        ),
        (["preferences", new, "--data", columns, "--base", tmp_path / "no model"], ("error[M01]: --base: ",)),
        (["preferences", new, "--data", columns, "--base", tmp_path / "a run"], ("holds no model", hint)),
        (["preferences", new, "--data", "x", "--base", base, "--gpu", "h10"], ("error[C07]: ", "did you mean h100?")),
        (["preferences", new, "--data", "x", "--base", base, "--adapters", "qlor"], ("error[C07]: ", "mean qlora?")),
        (
            ["preferences", new],
            (
                "error[C11]: --data, your file of pairs, and --base, the model to start from, are missing",
                "hint: rlhf init preferences --data pairs.jsonl --base MODEL",
            ),
        ),
        (
            ["preferences", "--data", "x.csv", new],
            (
                "error[C11]: --base, the model to start from, is missing\n",
                f"init preferences --data x.csv --base MODEL {new}\n",
            ),
        ),
        (["preferences", "--data", "x.csv"], ("error[C11]: DIR is missing", "--data pairs.jsonl --base MODEL")),
        (["ci", new, "--data", "x"], ("error[C11]: --data belongs to `rlhf init preferences`",)),
        (["ci", new, "--gpu", "24"], ("error[C11]: --gpu belongs to presets of a large model, and ci has none",)),
        (["tldr", new, "--gpu", "h10"], ("error[C07]: --gpu h10", "did you mean h100?")),
        (["tldr", new, "--gpu", "h100", "--adapters", "lor"], ("error[C07]: --adapters lor", "did you mean lora?")),
        (
            ["tldr", new, "--gpu", "0.5", "--adapters", "qlora"],
            ("error[E03]: --gpu: with LoRA adapters on one 4-bit base and gradient ",),
        ),
    ]
    for arguments, texts in cases:
        result = rlhf("init", *arguments)
        assert result.exit_code == 2 and all(text in result.stderr for text in texts), result.stderr
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["ppo.yaml"] and not new.exists()


@pytest.mark.slow  # README.md trains such a run, too: tests/docs/test_blocks.py
@pytest.mark.full
def test_a_file_of_pairs_leads_to_a_finished_run(data: dict[str, Path], world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert init(run, data["transcripts"], world.base).exit_code == 0
    written = {stage: (run / f"{stage}.yaml").read_text() for stage in ("sft", "reward", "ppo", "eval")}
    for stage in written:  # in this process, where all is imported; `rlhf run` has its own tests
        sets = [f"ppo.total_episodes={2 * EPISODES_PER_UPDATE}"] if stage == "ppo" else []
        must_succeed(rlhf(stage, "--config", run / f"{stage}.yaml", *sets))
    report = json.loads((run / "eval/report.json").read_text())
    assert report["n"] == 10 and 0 <= report["win_rate"]["ppo_vs_sft"]["reward"]["value"] <= 1
    assert "accuracy" in report["reward_model"]
    assert written == {stage: (run / f"{stage}.yaml").read_text() for stage in written}


def test_pairs_of_the_reward_model_can_be_balanced_by_length(world: World, tmp_path: Path) -> None:
    answers = [(" yes" * (2 + i % 3), " no" * (1 + (7 * i + i // 40) % 5)) for i in range(240)]
    rows = [{"prompt": f"Q{i % 40}:", "chosen": one, "rejected": two} for i, (one, two) in enumerate(answers)]
    file = tmp_path / "pairs.jsonl"
    jsonl.write_jsonl(file, rows)
    plain, balanced = init(tmp_path / "a", file, world.base), init(tmp_path / "b", file, world.base, "--balance-length")
    for name in ("sft", "sft_eval", "prompts", "heldout"):
        assert (tmp_path / f"a/data/{name}.jsonl").read_text() == (tmp_path / f"b/data/{name}.jsonl").read_text()
    for name in ("pairs", "pairs_eval"):
        a, b = ([row for _, row in jsonl.read_jsonl(tmp_path / f"{run}/data/{name}.jsonl")] for run in "ab")
        longer = [len(row["chosen"]) > len(row["rejected"]) for row in b if len(row["chosen"]) != len(row["rejected"])]
        assert 0 < len(b) < len(a) and all(row in a for row in b) and 2 * sum(longer) == len(longer)
    assert "--balance-length" in plain.stdout
    assert "noted: of 108 and 24 pairs of the reward model" in balanced.stdout.replace("\n", " ")
    jsonl.write_jsonl(file, [{**row, "chosen": f"{row['rejected']} {i}"} for i, row in enumerate(rows)])
    plain, balanced = init(tmp_path / "c", file, world.base), init(tmp_path / "d", file, world.base, "--balance-length")
    assert "noted: the longer answer is the chosen one in 100 %" in plain.stdout and "--balance" not in plain.stdout
    text = "--balance-length would leave 0 of 108 pairs to train the reward model and 0 of 24 to measure it; at least 9"
    assert balanced.exit_code == 2 and f"error[D11]: --data: {text} and 2 are needed" in balanced.stderr
    assert "bring more pairs in which the shorter answer is the chosen one" in balanced.stderr


def test_sft_learns_at_most_four_answers_per_prompt(world: World, tmp_path: Path) -> None:
    pairs = [{"prompt": p, "chosen": f"{c} {n}", "rejected": r} for p, c, r in ROWS for n in range(6)]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    run = tmp_path / "run"
    assert init(run, tmp_path / "pairs.jsonl", world.base).exit_code == 0
    counts = Counter(row["prompt"] for row in rows(run, "sft"))
    assert (len(rows(run, "pairs")), len(rows(run, "sft_eval")), set(counts.values())) == (270, 40, {4})
    assert "# at most 4 answers per prompt, those chosen most often" in (run / "sft.yaml").read_text()


def test_parameters_are_counted_without_loading(world: World) -> None:
    base = runs.open_parent(str(world.base), expect=("sft",), key="--base", where="")
    model = load.load_causal_lm(world.base)
    assert weight_files.count_parameters(base, heads=True) == model.num_parameters()


# Lengths and speed, as written and printed


def write_answers(path: Path, answer: str, count: int = 40, prompt: str = "Say") -> list[dict[str, str]]:
    pairs = [{"prompt": f"{prompt} {i}.", "chosen": f"{answer} {i}", "rejected": f"No {i}"} for i in range(count)]
    jsonl.write_jsonl(path, pairs)
    return pairs


def test_a_slow_cpu_with_bfloat16_gets_it_and_fewer_passes(
    world: World, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "measure_speed", lambda folder: Speed(200.0, 400.0, bf16_gain=1.5))
    run = tmp_path / "run"
    assert "tokens a second in bfloat16" in must_succeed(init(run, data["columns"], world.base)).stdout
    made: dict[str, Any] = {stage: config.load(stage, run / f"{stage}.yaml") for stage in preferences.REQUIRED_STAGES}
    assert all(getattr(each, stage).bf16 for stage, each in made.items())
    assert (made["ppo"].ppo.num_ppo_epochs, made["ppo"].ppo.num_mini_batches) == (1, 4)


def test_answers_of_one_word_and_of_three_thousand(world: World, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    write_answers(pairs, "Yes")
    assert init(tmp_path / "short", pairs, world.base).exit_code == 0
    assert config.load("ppo", tmp_path / "short/ppo.yaml").ppo.response_length == 8
    write_answers(pairs, "moon " * 3000)
    result = init(tmp_path / "run", pairs, world.base)
    assert result.exit_code == 2 and not (tmp_path / "run").exists()
    assert "error[D10]: --data: 40 of 40 pairs (100 %) do not fit: " in result.stderr
    assert re.search(r"hint: take a base model with \d+ positions, where 100 % of the pairs fit", result.stderr)


def test_dropped_pairs_are_reported_before_anything_is_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, printed = tmp_path / "pairs.jsonl", list[str]()
    short = write_answers(path, "Yes")
    jsonl.write_jsonl(path, short + write_answers(path, "moon " * 125, 20, "Tell"))
    monkeypatch.setattr(preferences, "write_data", lambda *_: printed.append(capsys.readouterr().err))
    monkeypatch.setattr(preferences, "write_configs", lambda *_: None)
    options = preferences.PreferencesOptions(data=str(path), base=str(world.base), minutes=1)
    preferences.init(tmp_path / "run", options)
    assert "20 of 60 pairs (33 %) dropped: " in printed[0]
    assert "40 pairs used" in capsys.readouterr().out


# Real data


@pytest.mark.full
@shared
def test_configs_for_real_dialogues_are_true(tmp_path: Path) -> None:
    """The share that ends within response_length, and the rows: `rlhf check` finds none to drop."""
    run, tokenizer = tmp_path / "run", tokenizers.load_tokenizer(STORIES)
    pairs = read_pairs(DataSource(str(HH), "--data", on_bad="drop"), tokenizer, plain=False).pairs
    must_succeed(init(run, HH, STORIES), "598 pairs (33 %) dropped")
    text = (run / "ppo.yaml").read_text()
    ended = int(re.findall(r"response_length: 168 +# maximum tokens; (\d+) of 100", text)[0])
    prompts = {row["prompt"] for part in ("sft", "pairs", "prompts", "heldout") for row in rows(run, part)}
    lengths = count_tokens(tokenizer, [pair for pair in pairs if pair.prompt in prompts])
    assert len(lengths) == 399 and abs(ended - 100 * sum(each.chosen <= 168 for each in lengths) / 399) <= 0.5
    terminal.reset()
    assert check_configs(run, [], Options(), deep=False, as_json=False, quiet=True) == 0
    assert [problem.code for problem in terminal.emitted_problems() if problem.code in ("D10", "D11")] == []
