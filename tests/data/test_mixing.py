"""A list of sources under data.train: exact counts, the rows that a weight draws, and lists that are refused."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from bad_inputs import check, refused

from rlhf_cli import config as configs
from rlhf_cli import jsonl, runs
from rlhf_cli.config.base import Config
from rlhf_cli.stages.common import training_rows

PAIRS = [{"prompt": f"Say {number}", "chosen": f" yes {number}", "rejected": " no"} for number in range(10)]
RATED = [{"question": f"Why {number}", "responses": [" a", " b"], "scores": [1, 2]} for number in range(6)]
LABELS = []
for each in range(4):
    LABELS.append({"prompt": f"Who {each}", "completion": " you", "label": True})
    LABELS.append({"prompt": f"Who {each}", "completion": " me", "label": False})
THREE: list[dict[str, Any]] = [
    {"path": "pairs.jsonl", "weight": 0.5},
    {"path": "rated.jsonl", "weight": 2.5, "columns": {"prompt": "question"}},
    {"path": "labels.jsonl"},
]


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    files = {
        "pairs": PAIRS,
        "rated": RATED,
        "labels": LABELS,
        "answers": [{"prompt": "Say", "completion": " yes"}],
        "margins": [{**row, "margin": 1} for row in PAIRS],
        "talks": [talk(row) for row in PAIRS],
    }
    for name, rows in files.items():
        jsonl.write_jsonl(folder / f"{name}.jsonl", rows)
    return folder


def talk(row: dict[str, Any]) -> dict[str, Any]:
    """Return a pair of texts as messages."""
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {name: [{"role": role, "content": row[name]}] for name, role in roles.items()}


def write(train: Any, **further: Any) -> None:
    tree = {
        "model": {"path": "model"},
        "data": {"train": train},
        "reward": {"max_steps": 1, "max_length": 100, "per_device_train_batch_size": 2},
        **further,
    }
    Path("reward.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))


def reward() -> Config:
    return configs.load("reward", "reward.yaml")


def prompts(tokenizer: Any, split: str = "train") -> list[str]:
    rows = training_rows.read_split(reward(), split, tokenizer)  # type: ignore[arg-type]
    return [tokenizer.decode(row["prompt_ids"]) for row in rows]


def test_each_source_is_used_as_often_as_its_weight_says(here: Path, tokenizer: Any) -> None:
    write(THREE)
    found = prompts(tokenizer)
    counts = Counter(found)
    assert len(found) == 5 + 15 + 4
    of_pairs = [count for prompt, count in counts.items() if prompt.startswith("Say")]
    of_rated = [count for prompt, count in counts.items() if prompt.startswith("Why")]
    assert of_pairs == [1] * 5 and sorted(of_rated) == [2, 2, 2, 3, 3, 3]
    assert [counts[f"Who {number}"] for number in range(4)] == [1] * 4
    assert prompts(tokenizer) == found

    write(THREE, seed=1)
    assert Counter(prompts(tokenizer)) != counts


def test_held_out_rows_of_a_list_are_used_once(here: Path, tokenizer: Any) -> None:
    write(THREE)
    text = Path("reward.yaml").read_text()
    Path("reward.yaml").write_text(text.replace("data:", "data:\n  eval_fraction: 0.4\n  split_seed: 2"))
    training, held_out = prompts(tokenizer), prompts(tokenizer, "eval")
    assert len(held_out) == len(set(held_out)) and not set(held_out) & set(training)
    assert len(held_out) + len({*training}) <= 20 and any(prompt.startswith("Why") for prompt in held_out)


def test_the_counts_and_the_files_of_a_list_are_said(here: Path) -> None:
    write(THREE)
    result = check("reward.yaml")
    assert result.exit_code == 0, result.stderr
    said = "5 rows of pairs.jsonl (10 x 0.5), 15 rows of rated.jsonl (6 x 2.5), 4 rows of labels.jsonl (4 x 1)"
    assert said in result.stderr.replace("\n", " ") and "24 rows" in result.stdout

    title, *table = result.stdout[result.stdout.index("sources of") :].splitlines()
    assert title == "sources of reward data.train"
    assert [line.split("  ") for line in map(_narrow, table[:4])] == [
        ["source", "form", "rows", "weight", "share", "used"],
        ["pairs.jsonl", "{prompt, chosen, rejected}", "10", "0.5", "20.8%", "5"],
        ["rated.jsonl", "lists of answers and scores by scores", "6", "2.5", "62.5%", "15"],
        ["labels.jsonl", "one rated answer a row by label", "4", "1", "16.7%", "4"],
    ]


def _narrow(line: str) -> str:
    """Return a line of a table with two spaces between its cells."""
    return re.sub(" {2,}", "  ", line)


def test_the_table_of_sources_as_json(here: Path) -> None:
    write(THREE)
    [rows] = [each for each in json.loads(check("reward.yaml", "--json").stdout)["checked"] if "sources" in each]
    assert [(each["source"], each["rows"], each["used"]) for each in rows["sources"]] == [
        ("pairs.jsonl", 10, 5),
        ("rated.jsonl", 6, 15),
        ("labels.jsonl", 4, 4),
    ]
    write("pairs.jsonl")
    assert "sources" not in check("reward.yaml", "--json").stdout


def test_the_hash_of_each_source_decides_whether_a_stage_is_up_to_date(here: Path) -> None:
    write(THREE)
    old = runs.compute_identity(reward(), {}, reward().sources())
    assert list(old["data"]) == ["data.train.0", "data.train.1", "data.train.2"]

    jsonl.write_jsonl(here / "rated.jsonl", RATED[1:])
    new = runs.compute_identity(reward(), {}, reward().sources())
    assert [key for key in old["data"] if old["data"][key] != new["data"][key]] == ["data.train.1"]

    write([*THREE[:2], {**THREE[2], "weight": 2}])
    assert runs.compute_identity(reward(), {}, reward().sources())["config"] != new["config"]


def test_a_saved_list_is_read_from_elsewhere(here: Path) -> None:
    write(THREE)
    elsewhere = here / "run" / "reward"
    elsewhere.mkdir(parents=True)
    (elsewhere / "config.yaml").write_text(yaml.safe_dump(reward().dump(relative_to=elsewhere)))
    assert configs.load("reward", elsewhere / "config.yaml").sources()["data.train"].parts[1].name == str(
        here / "rated.jsonl"
    )


def test_each_source_has_margins_of_its_own(here: Path, tokenizer: Any) -> None:
    stars = {"path": "rated.jsonl", "columns": {"prompt": "question"}, "margin_per_point": 0.25}
    write([stars, {"path": "margins.jsonl"}, {"path": "labels.jsonl", "margin_per_point": 2}])
    found = training_rows.read_split(reward(), "train", tokenizer)  # type: ignore[arg-type]
    assert [row["margin"] for row in found] == [0.25] * 6 + [1.0] * 10 + [2.0] * 4

    write([{**stars, "min_rating_gap": 0.5, "pairs_per_prompt": "all"}])
    [part] = reward().sources()["data.train"].parts
    assert (part.min_rating_gap, part.pairs_per_prompt, part.margin_per_point) == (0.5, "all", 0.25)


def test_margins_in_some_sources_are_of_no_use_to_dpo(here: Path, tokenizer: Any) -> None:
    write([{"path": "pairs.jsonl"}, {"path": "margins.jsonl"}])
    text = Path("reward.yaml").read_text()
    Path("dpo.yaml").write_text(text.replace("reward:", "dpo:"))
    config = configs.load("dpo", "dpo.yaml")
    found = training_rows.read_split(config, "train", tokenizer)  # type: ignore[arg-type]
    assert len(found) == 20 and not any("margin" in row for row in found)


def test_labels_of_held_out_prompts_are_refused_anywhere_in_a_list(here: Path) -> None:
    labels = here / "labels" / "compare"
    labels.mkdir(parents=True)
    (labels / "settings.json").write_text('{"compares": true}')
    for name in ("labels", "candidates"):
        jsonl.write_jsonl(labels / f"{name}.jsonl", [])
    write([{"path": "pairs.jsonl"}, {"path": "labels/compare"}])
    assert refused(check("reward.yaml", "-q"), "C17", "reward.yaml:6", "holds labels of the evaluation's prompts")


# What stands under data.train, code, place, what is said.
BAD: list[tuple[Any, str, str, tuple[str, ...]]] = [
    ([], "C06", "reward.yaml:4", ("data.train: needs at least 1, got 0",)),
    ([{"path": "pairs.jsonl", "weight": 0}], "C06", "reward.yaml:6", ("data.train.0.weight: must be > 0, got 0",)),
    ([{"path": "pairs.jsonl", "weight": -1}], "C06", "reward.yaml:6", ("data.train.0.weight: must be > 0, got -1",)),
    (["pairs.jsonl"], "C05", "reward.yaml:5", ('data.train.0: expected keys and values, got "pairs.jsonl"',)),
    ([{"path": "pairs.jsonl", "weigth": 2}], "C01", "reward.yaml:6", ("data.train.0.weigth", "did you mean weight?")),
    ([{"weight": 2}], "C05", "reward.yaml:5", ("data.train.0.path is missing",)),
    ([{"path": "none.jsonl"}], "D01", "reward.yaml:5", ("data.train.0: no such file none.jsonl",)),
    (
        [{"path": "pairs.jsonl"}, {"path": "answers.jsonl"}],
        "D02",
        "answers.jsonl:1",
        (
            "the row of data.train.1 (reward.yaml:6) needs",
            "columns found: prompt, compl",
            "e.g. data.train.1.columns: {",
        ),
    ),
    (
        [{"path": "pairs.jsonl"}, {"path": "margins.jsonl"}],
        "D23",
        "reward.yaml:6",
        ('margins.jsonl has "margin", pairs.jsonl has not', "hint: give all sources a margin, or none"),
    ),
    (
        [{"path": "margins.jsonl"}, {"path": "pairs.jsonl", "columns": {"promt": "x"}}],
        "D02",
        "reward.yaml:6",
        ('data.train.1.columns names "promt"',),
    ),
    (
        [{"path": "pairs.jsonl"}, {"path": "talks.jsonl"}],
        "D23",
        "reward.yaml:6",
        ("the prompts of talks.jsonl are conversations, those of pairs.jsonl texts", "format: turns"),
    ),
    (
        [{"path": "pairs.jsonl", "weight": 0.01}],
        "D23",
        "reward.yaml:5",
        ("weight 0.01 of pairs.jsonl leaves none of its 10 rows", "raise it to at least 0.1"),
    ),
]


@pytest.mark.parametrize(("train", "code", "place", "says"), BAD)
def test_bad_lists(train: Any, code: str, place: str, says: tuple[str, ...], here: Path) -> None:
    write(train)
    assert refused(check("reward.yaml", "-q"), code, place, *says)
