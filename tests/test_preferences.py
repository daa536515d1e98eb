"""`rlhf init preferences`: parts that share no prompt, sizes that fit, and a folder that runs as it is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import World
from report_run import draws_nothing
from test_schema import complaints
from typer.testing import CliRunner, Result

from rlhf_cli import config, jsonl
from rlhf_cli.cli import app
from rlhf_cli.commands.init import lengths, split
from rlhf_cli.commands.init.lengths import Lengths, Speed
from rlhf_cli.commands.init.sizes import (
    EPISODES_PER_UPDATE,
    SizingInputs,
    choose_sizes,
    count_parameters,
    learning_rate,
)
from rlhf_cli.config.yaml_io import align_comments
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.data.texts import Pair, split_key
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import tokenizers

NAMES = ("sun", "moon", "star", "cloud", "rain", "snow", "wind", "storm", "river", "lake")
ASKED = [f"Tell me about the {one} and the {other}." for one in NAMES for other in NAMES]
PART_FILES = {"sft": "sft", "pairs": "pairs", "prompts": "prompts", "held-out": "heldout"}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def pair(prompt: Any, number: int = 1) -> Pair:
    return Pair(RowLocation(Path("pairs.jsonl"), number), prompt, f"Good {number}.", f"Bad {number}.", None)


# --- the parts


def test_no_prompt_is_in_two_parts_and_no_pair_is_lost() -> None:
    pairs = [pair(prompt, number) for number, prompt in enumerate(ASKED * 3)]
    parts = split.split_pairs(pairs, seed=0)
    prompts = [{one.prompt for one in part} for part in parts.values()]
    assert sum(map(len, prompts)) == len(set().union(*prompts)) == len(ASKED)
    assert sorted(one.chosen for part in parts.values() for one in part) == sorted(one.chosen for one in pairs)
    assert [len(found) for found in prompts] == [30, 45, 15, 10]


def test_conversations_that_open_alike_stay_together() -> None:
    longer = [[*chat(text), {"role": "assistant", "content": "Yes?"}, *chat("More.")] for text in ASKED]
    parts = split.split_pairs(
        [pair(prompt) for text, two in zip(ASKED, longer, strict=True) for prompt in (chat(text), two)], 0
    )
    openings = [{split_key(one.prompt) for one in part} for part in parts.values()]
    assert sum(map(len, openings)) == len(set().union(*openings)) == len(ASKED)
    assert all(len(part) == 2 * len(found) for part, found in zip(parts.values(), openings, strict=True))


def test_the_seed_decides_the_parts() -> None:
    pairs = [pair(prompt) for prompt in ASKED]
    assert split.split_pairs(pairs, 1) == split.split_pairs(pairs, 1) != split.split_pairs(pairs, 2)


def test_of_many_prompts_no_more_than_needed_are_held_out() -> None:
    parts = split.split_pairs([pair(f"prompt {number}") for number in range(20_000)], 0)
    assert len(parts["held-out"]) == 1000 and len(parts["pairs"]) == 10_000


def test_a_part_is_not_in_the_order_of_the_file() -> None:
    for part in split.split_pairs([pair(prompt, number) for number, prompt in enumerate(ASKED)], 0).values():
        numbers = [one.location.number for one in part]
        assert numbers != sorted(numbers)


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(RLHFError) as caught:
        split.split_pairs([pair(prompt) for prompt in ASKED[:19] * 9], 0)
    assert caught.value.problems[0].code == "D11" and "19 different prompts" in str(caught.value)


# --- the sizes

COUNTS = {"sft": 300, "pairs": 450, "prompts": 150, "held-out": 100}
KNOWN = SizingInputs(
    prompts=COUNTS,
    pairs=COUNTS,
    rows={"sft": 300, "sft_eval": 100, "pairs": 450, "pairs_eval": 100, "prompts": 150, "heldout": 100},
    lengths=Lengths(96, 152, 0.95, prompt_mean=20.0, answer_mean=50.0, row_mean=70.0),
    parameters=600_000,
    hidden=128,
    layers=3,
    vocabulary=768,
    device="CPU, 2 cores",
    memory=16 * 10**9,
    speed=Speed(training=20_000.0, generation=4_000.0),
)


def with_rows(**counts: int) -> SizingInputs:
    return replace(KNOWN, rows={**KNOWN.rows, **counts})


def test_learning_rates_meet_their_anchors() -> None:
    assert [learning_rate(stage, 10**9) for stage in ("sft", "reward", "ppo")] == ["2e-5", "1e-5", "3e-6"]
    assert [learning_rate(stage, 600_000) for stage in ("sft", "reward", "ppo")] == ["1e-3", "9e-4", "2e-4"]
    assert learning_rate("ppo", 124_000_000) == "1e-5"  # gpt2 in TRL's sentiment example: 1.41e-5


@pytest.mark.parametrize("prompts", [2, 3, 9, 31, 64, 5000])
def test_an_update_never_asks_for_more_prompts_than_there_are(prompts: int) -> None:
    sizes = choose_sizes(replace(KNOWN, prompts={**KNOWN.prompts, "prompts": prompts}), None)
    assert sizes.ppo_rows * sizes.ppo_parts == EPISODES_PER_UPDATE and sizes.total_episodes % EPISODES_PER_UPDATE == 0
    assert EPISODES_PER_UPDATE // sizes.samples <= prompts


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (6, 2), (9, 4), (299, 8), (300, 16), (5000, 32)])
def test_a_batch_is_never_larger_than_half_the_rows(rows: int, batch: int) -> None:
    sft = choose_sizes(with_rows(sft=rows), None).sft
    assert sft.rows * sft.parts == batch


@pytest.mark.parametrize(
    ("rows", "epochs", "steps"), [(32, 8, 32), (96, 8, 96), (300, 6, 114), (600, 3, 114), (20_000, 1, 625)]
)
def test_few_rows_are_passed_over_more_often_but_not_for_ever(rows: int, epochs: int, steps: int) -> None:
    sizes = choose_sizes(with_rows(sft=rows, pairs=rows), 10_000)
    assert (sizes.sft.epochs, sizes.sft.steps, sizes.sft.max_steps) == (epochs, steps, None)
    assert sizes.reward.epochs <= 2


def test_a_short_time_means_fewer_steps_and_says_so() -> None:
    free, short = choose_sizes(KNOWN, 600), choose_sizes(KNOWN, 2)
    assert free.sft.max_steps is None and free.minutes and free.minutes < 30
    assert short.minutes and short.minutes <= 3 and short.total_episodes < free.total_episodes
    slow = choose_sizes(replace(KNOWN, speed=Speed(20.0, 4.0)), 10)
    assert slow.sft.max_steps == slow.sft.steps == 10 and slow.updates == 10
    assert slow.minutes and slow.minutes > 15 and "takes longer than 10 minutes" in slow.notes[-1]


def test_without_a_measurement_the_data_alone_decides() -> None:
    sizes = choose_sizes(replace(KNOWN, speed=None), 1)
    assert sizes.minutes is None and sizes.sft.max_steps is None and sizes.updates == 50


def test_short_memory_means_fewer_rows_at_once_and_the_same_batches() -> None:
    large = replace(KNOWN, parameters=500_000_000, hidden=1024, layers=24, vocabulary=150_000, memory=24 * 10**9)
    wide, narrow = choose_sizes(replace(large, memory=80 * 10**9), None), choose_sizes(large, None)
    assert narrow.ppo_rows < wide.ppo_rows and narrow.ppo_rows * narrow.ppo_parts == EPISODES_PER_UPDATE
    assert narrow.sft.rows * narrow.sft.parts == wide.sft.rows * wide.sft.parts
    assert narrow.checkpointing and not choose_sizes(KNOWN, None).checkpointing
    none = choose_sizes(replace(large, parameters=7 * 10**9), None)
    assert "needs about 280 GB" in none.notes[0]


def test_evaluations_take_a_part_of_the_time_and_no_more() -> None:
    """A slow model makes few steps, and is not evaluated on all rows for longer than they take."""
    many = with_rows(sft=3000, pairs=3000, sft_eval=4000, pairs_eval=1306)
    for trained, fewest in ((5.0, True), (600.0, False)):
        slow = choose_sizes(replace(many, speed=Speed(trained, generation=200.0)), 30)
        for training, texts in ((slow.sft, 1), (slow.reward, 2)):
            a_row = texts * 70 / trained / 3
            assert training.max_steps and (training.held_out == 64) == fewest
            assert training.held_out < training.of_held_out
            assert fewest or training.held_out * a_row <= 0.25 * 0.2 * 30 * 60 < training.of_held_out * a_row
            told = f"{training.held_out} of {training.of_held_out} rows, as the time allows"
            assert training.evaluated("rows") == told
    quick = choose_sizes(replace(many, speed=Speed(training=60_000.0, generation=20_000.0)), 30)
    assert quick.sft.held_out == 4000 and quick.sft.evaluated("rows") == "all 4000 rows"


def test_how_many_prompts_are_judged_and_why() -> None:
    def judged(prompts: int, speed: Speed) -> str:
        sizes = choose_sizes(replace(KNOWN, prompts={**COUNTS, "held-out": prompts}, speed=speed), 30)
        return f"{sizes.eval_n}: {sizes.judged}"

    quick, slow = Speed(training=10**6, generation=10**6), Speed(training=100.0, generation=10.0)
    assert judged(100, quick) == "100: all 100 held-out prompts"
    assert judged(1000, quick) == "512: of 1000 held-out prompts: these measure a win rate to 0.04"
    assert judged(1000, slow) == "64: 64 of 1000 held-out prompts, as the time allows"


def test_each_pass_is_evaluated() -> None:
    """Eight passes over few rows are evaluated eight times, so on fewer rows each time."""
    few, many = (with_rows(sft=sft, pairs=sft, sft_eval=4000) for sft in (96, 6000))
    often, once = (choose_sizes(replace(known, speed=Speed(2000.0, 200.0)), 30).sft for known in (few, many))
    assert often.epochs == 8 and often.max_steps is None and once.max_steps and once.max_steps * 32 < 2 * 6000
    assert often.held_out < once.held_out


def test_parameters_are_counted_without_loading(world: World) -> None:
    from rlhf_cli.models import load

    assert count_parameters(world.base) == load.load_causal_lm(world.base).num_parameters()


def test_comments_stand_in_one_column() -> None:
    text = "# head\n\na:\n  b: 1  # one\n  much_longer_key: [1, 2]       # two\n  c: 3\n\n"
    lines = align_comments(text).splitlines()
    assert [line.find("# ") for line in lines] == [0, -1, -1, 34, 34, -1]
    assert align_comments("x: " + "y" * 40 + "  # z").endswith("y  # z\n")


# --- the command


@pytest.fixture(autouse=True)
def known_speed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured where a run is trained: beside other work that takes seconds."""
    if not request.node.get_closest_marker("training"):
        monkeypatch.setattr(lengths, "measure_speed", lambda folder: KNOWN.speed)


def init(folder: Path, data: Path, base: Path, *more: str) -> Result:
    command = ["init", "preferences", "--data", str(data), "--base", str(base), str(folder), "--minutes", "1", *more]
    return CliRunner().invoke(app, command)


def contents(path: Path) -> list[dict]:
    return [row for _, row in jsonl.read_jsonl(path)]


PAIRS = [(prompt, f"Bright and calm, {number}.", f"Dull and cold, {number}.") for number, prompt in enumerate(ASKED)]
FORMS = {
    "columns": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS],
    "conversations": [
        {
            "chosen": [*chat(p), {"role": "assistant", "content": c}],
            "rejected": [*chat(p), {"role": "assistant", "content": r}],
        }
        for p, c, r in PAIRS
    ],
    "transcripts": [
        {key: f"\n\nHuman: {p}\n\nAssistant: {text}" for key, text in (("chosen", c), ("rejected", r))}
        for p, c, r in PAIRS
    ],
}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Path]:
    for name, found in FORMS.items():
        jsonl.write_jsonl(tmp_path / f"{name}.jsonl", found)
    return {name: tmp_path / f"{name}.jsonl" for name in FORMS}


def opening(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else prompt[0]["content"]
    return text.removeprefix("\n\nHuman: ").removesuffix("\n\nAssistant:")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_parts_that_share_no_prompt(
    form: str, data: dict[str, Path], world: World, tmp_path: Path
) -> None:
    result = init(tmp_path / "run", data[form], world.base)
    assert result.exit_code == 0, result.output
    prompts = {
        name: {opening(row["prompt"]) for row in contents(tmp_path / f"run/data/{file}.jsonl")}
        for name, file in PART_FILES.items()
    }
    assert {name: len(found) for name, found in prompts.items()} == {
        "sft": 30, "pairs": 45, "prompts": 15, "held-out": 10
    }  # fmt: skip
    assert set().union(*prompts.values()) == set(ASKED)
    assert "a win rate of 0.50 on 10 held-out prompts is measured to +-0.26 (95 %)" in result.output
    for name in ("sft_eval", "pairs_eval"):
        found = {opening(row["prompt"]) for row in contents(tmp_path / f"run/data/{name}.jsonl")}
        assert found == prompts["held-out"]
    first = contents(tmp_path / "run/data/pairs.jsonl")[0]
    answers = {p: (c, r) for p, c, r in PAIRS}[opening(first["prompt"])]
    said = [first[key] if isinstance(first[key], str) else first[key][0]["content"] for key in ("chosen", "rejected")]
    assert tuple(text.strip() for text in said) == answers


def test_what_is_written_down_follows_from_texts_and_tokenizer(
    data: dict[str, Path], world: World, tmp_path: Path
) -> None:
    """Plain text, chatml for conversations, transcripts as text; with a template of its own, conversations."""
    for form in FORMS:
        assert init(tmp_path / form, data[form], world.base).exit_code == 0
        for stage in config.CONFIGS:
            assert complaints(tmp_path / form / f"{stage}.yaml") == []  # by the schema that it names
    assert contents(tmp_path / "columns/data/sft.jsonl")[0]["completion"].startswith(" Bright")
    assert config.load("sft", tmp_path / "conversations/sft.yaml").model.chat_template == "chatml"
    assert contents(tmp_path / "transcripts/data/prompts.jsonl")[0]["prompt"].endswith("\n\nAssistant:")
    own = tmp_path / "chat model"
    tokenizer = world.tokenizer()
    tokenizers.set_chat_template(tokenizer, "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}")
    _copy(world.base, own)
    tokenizer.save_pretrained(own)
    for form in FORMS:
        assert init(tmp_path / f"chat {form}", data[form], own).exit_code == 0
        assert isinstance(contents(tmp_path / f"chat {form}/data/prompts.jsonl")[0]["prompt"], list)
        assert config.load("sft", tmp_path / f"chat {form}/sft.yaml").model.chat_template is None
    assert init(tmp_path / "plain", data["columns"], own, "--plain").exit_code == 0
    assert isinstance(contents(tmp_path / "plain/data/prompts.jsonl")[0]["prompt"], str)


def _copy(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


def test_bad_rows_are_left_out_and_counted(world: World, tmp_path: Path) -> None:
    good = FORMS["columns"]
    bad = [{**good[0], "chosen": ""}, {**good[1], "rejected": good[1]["chosen"]}, {**good[2], "rejected": 7}, good[3]]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", [*good, *bad])
    result = init(tmp_path / "run", tmp_path / "pairs.jsonl", world.base)
    assert result.exit_code == 0 and "104 rows read, 100 pairs used" in result.stdout
    for code, line in (("D09", 101), ("D07", 102), ("D06", 103), ("D15", 104)):
        assert f"warning[{code}]: " in result.stderr and f"(first: line {line})" in result.stderr, code


def test_a_base_model_under_any_name(world: World, data: dict[str, Path], tmp_path: Path) -> None:
    base = tmp_path / 'a: "base" #1'
    _copy(world.base, base)
    assert init(tmp_path / "run", data["columns"], base).exit_code == 0
    assert config.load("sft", tmp_path / "run/sft.yaml").model.path == str(base)


def test_other_column_names(world: World, tmp_path: Path) -> None:
    renamed = [{"question": p, "better": c, "worse": r} for p, c, r in PAIRS]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", renamed)
    columns = ["--column", "prompt=question", "--column", "chosen=better", "--column", "rejected=worse"]
    assert init(tmp_path / "run", tmp_path / "pairs.jsonl", world.base, *columns).exit_code == 0
    result = init(tmp_path / "again", tmp_path / "pairs.jsonl", world.base)
    assert result.exit_code == 2 and "error[D02]: " in result.stderr and "question, better, worse" in result.stderr
    assert "e.g. --column prompt=question" in result.stderr
    result = init(tmp_path / "again", tmp_path / "pairs.jsonl", world.base, "--column", "prompt")
    assert result.exit_code == 2 and "error[C11]: --column prompt: expected NAME=COLUMN" in result.stderr
    result = init(tmp_path / "again", tmp_path / "pairs.jsonl", world.base, "--column", "prompt=question,chosen=better")
    assert (
        result.exit_code == 2 and "repeat the option: --column prompt=question --column chosen=better" in result.stderr
    )
    result = init(tmp_path / "again", tmp_path / "pairs.jsonl", world.base, "--column", "question=prompt")
    assert result.exit_code == 2 and '--column names "question"' in result.stderr
    assert "hint: swap the two: --column prompt=question?" in result.stderr


def test_what_is_refused(data: dict[str, Path], world: World, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/ppo.yaml").write_text("mine")
    result = init(tmp_path / "run", data["columns"], world.base)
    assert result.exit_code == 2 and "error[C15]: " in result.stderr and "ppo.yaml" in result.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ppo.yaml"]
    result = init(tmp_path / "new", tmp_path / "column.jsonl", world.base)
    assert result.exit_code == 2 and "error[D01]: --data: " in result.stderr and "columns.jsonl?" in result.stderr
    result = init(tmp_path / "new", data["columns"], tmp_path / "no model")
    assert result.exit_code == 2 and "error[M01]: --base: " in result.stderr
    result = CliRunner().invoke(app, ["init", "preferences", str(tmp_path / "new")])
    assert result.exit_code == 2 and "hint: rlhf init preferences --data pairs.jsonl --base MODEL" in result.stderr
    assert "error[C11]: --data, your file of pairs, and --base, the model to start from, are missing" in result.stderr
    result = CliRunner().invoke(app, ["init", "preferences", "--data", "x.csv", str(tmp_path / "new")])
    assert "error[C11]: --base, the model to start from, is missing\n" in result.stderr
    assert f"init preferences --data x.csv --base MODEL {tmp_path / 'new'}\n" in result.stderr
    result = CliRunner().invoke(app, ["init", "preferences", "--data", "x.csv"])
    assert result.stderr.startswith("error[C11]: DIR is missing") and "--data pairs.jsonl --base MODEL" in result.stderr
    for stage in ("sft", "ppo"):
        (tmp_path / "a run" / stage).mkdir(parents=True)
        (tmp_path / "a run" / stage / "identity.json").touch()
    result = init(tmp_path / "new", data["columns"], tmp_path / "a run")
    assert result.exit_code == 2 and "holds no model" in result.stderr
    assert f"hint: did you mean {tmp_path / 'a run/sft'} or {tmp_path / 'a run/ppo'}?\n" in result.stderr
    result = CliRunner().invoke(app, ["init", "ci", str(tmp_path / "new"), "--data", "x"])
    assert result.exit_code == 2 and "error[C11]: --data belongs to `rlhf init preferences`" in result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.training
def test_a_file_of_pairs_leads_to_a_finished_run(
    data: dict[str, Path], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws_nothing(monkeypatch)
    run = tmp_path / "run"
    assert init(run, data["transcripts"], world.base).exit_code == 0
    written = {stage: (run / f"{stage}.yaml").read_text() for stage in ("sft", "reward", "ppo", "eval")}
    for stage in written:  # here, where all is imported; `rlhf run` has its own tests
        sets = [f"ppo.total_episodes={2 * EPISODES_PER_UPDATE}"] if stage == "ppo" else []
        result = CliRunner().invoke(app, [stage, "--config", str(run / f"{stage}.yaml"), *sets])
        assert result.exit_code == 0, result.output
    found = json.loads((run / "eval/report.json").read_text())
    assert found["n"] == 10 and 0 <= found["win_rate"]["ppo_vs_sft"]["reward"]["value"] <= 1
    assert "accuracy" in found["reward_model"]
    assert written == {stage: (run / f"{stage}.yaml").read_text() for stage in written}
