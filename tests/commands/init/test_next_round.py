"""`rlhf init next RUN DIR`: the folder of a further round, and what it refuses."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import chat_run
import pytest
import yaml
from ppo_folder import PROMPTS, as_stage, fails, must_succeed, rlhf, write

from rlhf_cli import jsonl, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.files import write_json
from rlhf_cli.models.load import read_config
from rlhf_cli.stages.common import model_loading, training_rows

SIZES = {"total_episodes": 16, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "response_length": 6}


def pairs(prompt: Any = lambda text: text, answer: Any = lambda text: text, **extra: object) -> list[dict[str, Any]]:
    """Return a pair of each prompt."""
    rows = zip(PROMPTS, reversed(PROMPTS), strict=True)
    return [{"prompt": prompt(p), "chosen": answer(f" yes {q}"), "rejected": answer(" no"), **extra} for p, q in rows]


def transcripts(row: dict[str, Any]) -> dict[str, str]:
    """Return a pair in the format of hh-rlhf."""
    return {name: f"\n\nHuman: {row['prompt']}\n\nAssistant:{row[name]}" for name in ("chosen", "rejected")}


def label_rows(prompts: list[Any], choice: str = "second") -> list[dict[str, Any]]:
    """Return labels of which the second answer is the better one."""
    fixed = {"sources": ["ppo", "ppo"], "order": [1, 0], "annotator": "me", "seconds": 1.0, "time": 0.0}
    return [
        {"pair": f"{n}:0-1", "prompt": prompt, "answers": [" worse", " better"], "choice": choice, **fixed}
        for n, prompt in enumerate(prompts)
    ]


def write_labels(run: Path, name: str, rows: list[dict[str, Any]], **settings: object) -> None:
    folder = run / "labels" / name
    folder.mkdir(parents=True)
    write_json(folder / "settings.json", settings)
    jsonl.write_jsonl(folder / "labels.jsonl", rows)
    jsonl.write_jsonl(folder / "candidates.jsonl", [])


def finish(run: Path, reward_data: dict[str, Any], **sections: Any) -> None:
    """Make the reward and PPO stages of a folder finished ones."""
    for stage in ("reward", "ppo"):
        shutil.rmtree(run / stage, ignore_errors=True)
    as_stage(run, "reward", run / "reward_model", {"data": reward_data, **sections})
    as_stage(run, "ppo", run / "sft_model", {"data": {"prompts": "prompts.jsonl"}, "ppo": SIZES})
    terminal.reset()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with finished stages and two folders of labels, in runs/one."""
    folder = tmp_path_factory.mktemp("rounds") / "one"
    folder.mkdir()
    chat_run.make(folder)
    jsonl.write_jsonl(folder / "pairs.jsonl", pairs())
    jsonl.write_jsonl(folder / "held_out.jsonl", pairs(lambda text: f"so {text}"))
    finish(folder, {"train": "pairs.jsonl", "eval": "held_out.jsonl"})
    judges = {"short": "judges:short", "own": "RUN/reward"}
    people = {"people": {"labels": "labels/compare"}}
    write(folder, "eval", {**chat_run.EVAL, "judges": judges | people, "output": {"run_name": "one"}})
    (folder / "judges.py").write_text("def short(prompts, responses):\n    return [-len(each) for each in responses]\n")
    write_labels(folder, "people", label_rows(["what is new?", "and what else?"]))
    write_labels(folder, "compare", label_rows(["what is a held-out prompt?"]), compares=True)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run, in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, "one")
    return Path("one")


def tree_hash(folder: Path) -> str:
    """Return a hash of the names, contents and times of all files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path} {path.stat().st_mtime_ns}".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def rows(path: str) -> list[dict[str, Any]]:
    return [row for _, row in jsonl.read_jsonl(Path(path))]


def test_the_round_goes_on_from_the_run_of_which_nothing_is_written(run: Path) -> None:
    before = tree_hash(run)
    result = must_succeed(rlhf("init", "next", run, "two"))
    assert tree_hash(run) == before
    assert "20 pairs of one, and new ones of its labels: people 2\n" in result.stdout  # not those of --compare
    assert result.stdout.endswith("two is ready; next: rlhf run two\n")

    trees = {stage: yaml.safe_load(Path(f"two/{stage}.yaml").read_text()) for stage in ("reward", "ppo", "eval")}
    assert not Path("two/sft.yaml").exists() and Path("two/judges.py").is_file()
    assert trees["reward"]["model"] == {"path": "../one/sft", "start": "../one/reward"}
    assert trees["reward"]["data"] == {"train": "data/pairs.jsonl", "eval": "data/pairs_eval.jsonl"}
    assert trees["ppo"]["models"] == {"sft": "../one/sft", "policy": "../one/ppo", "reward": "RUN/reward"}
    assert trees["ppo"]["data"] == {"prompts": "../one/prompts.jsonl"} and trees["ppo"]["ppo"] == SIZES
    models = {"sft": "../one/sft", "ppo": "RUN/ppo", "reward": "RUN/reward", "previous": "../one/ppo"}
    assert trees["eval"]["models"] == models and "output" not in trees["eval"]
    assert trees["eval"]["judges"] == {"short": "judges:short", "own": "RUN/reward"}
    assert rows("two/data/pairs.jsonl")[20:] == [
        {"prompt": prompt, "chosen": " better", "rejected": " worse"} for prompt in ("what is new?", "and what else?")
    ]
    assert rows("two/data/pairs.jsonl")[:20] == pairs() and rows("two/data/pairs_eval.jsonl") == rows(
        "one/held_out.jsonl"
    )

    checked = must_succeed(rlhf("check", "two"))
    assert "models.policy    one/ppo" in checked.stdout and "models.previous  one/ppo" in checked.stdout
    must_succeed(rlhf("run", "two", "--dry-run"))


def test_a_third_round_has_the_pairs_of_both_and_the_first_sft(run: Path) -> None:
    write_labels(run, "others", label_rows(["what do others say?"]))
    must_succeed(rlhf("init", "next", run, "two", "--labels", "people,others"))
    two = Path("two")
    for stage, model in (("reward", "reward_model"), ("ppo", "sft_model")):
        as_stage(two, stage, run / model, yaml.safe_load((two / f"{stage}.yaml").read_text()))
    terminal.reset()
    write_labels(two, "mine", label_rows(["a third?"], "first"))
    must_succeed(rlhf("init", "next", "two", "deep/three"))
    prompts = [row["prompt"] for row in rows("deep/three/data/pairs.jsonl")]
    assert prompts[20:] == ["what is new?", "and what else?", "what do others say?", "a third?"]
    config = load("ppo", "deep/three/ppo.yaml")
    assert [Path(path).resolve() for path in (config.models.sft, str(config.models.policy))] == [
        (run / "sft").resolve(), (two / "ppo").resolve(),
    ]  # fmt: skip
    must_succeed(rlhf("check", "deep/three"))


@pytest.mark.parametrize("form", ["columns", "margin", "transcripts", "split"])
def test_old_pairs_of_any_form_are_read_with_the_labels(run: Path, form: str) -> None:
    data: dict[str, Any] = {"train": "pairs.jsonl", "eval": "held_out.jsonl"}
    old = pairs()
    if form == "columns":
        old = [{"q": row["prompt"], "a": row["chosen"], "b": row["rejected"]} for row in old]
        data = {"train": "pairs.jsonl", "columns": {"prompt": "q", "chosen": "a", "rejected": "b"}, "max_rows": 15}
    elif form == "margin":
        old = pairs(margin=0.5)
    elif form == "transcripts":
        old = [transcripts(row) for row in old]
        data = {"train": "pairs.jsonl", "format": "plain"}
    elif form == "split":
        data = {"train": "pairs.jsonl", "eval_fraction": 0.3, "split_seed": 1}
    jsonl.write_jsonl(run / "pairs.jsonl", old)
    finish(run, data)
    must_succeed(rlhf("init", "next", run, "two"))
    checked = must_succeed(rlhf("check", "two"))
    counts = {"columns": 17, "margin": 22, "transcripts": 22, "split": None}
    if counts[form]:
        assert f"data.train       {counts[form]} rows" in checked.stdout, checked.stdout
    written = rows("two/data/pairs.jsonl")
    assert len(written) == (counts[form] or 22)
    kept = yaml.safe_load(Path("two/reward.yaml").read_text())["data"]
    assert kept.keys() <= {"train", "eval", "format", "eval_fraction", "split_seed"}


def test_pairs_of_a_list_are_written_as_often_as_their_weights_say(run: Path) -> None:
    jsonl.write_jsonl(run / "more.jsonl", pairs(lambda text: f"more {text}"))
    sources = [{"path": "pairs.jsonl", "weight": 0.5}, {"path": "more.jsonl", "weight": 2}]
    finish(run, {"train": sources})
    result = must_succeed(rlhf("init", "next", run, "two"))
    assert "50 pairs of one, and new ones of its labels: people 2\n" in result.stdout

    prompts = [row["prompt"] for row in rows("two/data/pairs.jsonl")]
    more = [f"more {text}" for text in PROMPTS]
    assert prompts[10:50] == more + more and set(prompts[:10]) < set(PROMPTS)
    assert yaml.safe_load(Path("two/reward.yaml").read_text())["data"] == {"train": "data/pairs.jsonl"}


def test_what_cannot_be_a_round_is_refused_and_writes_nothing(run: Path) -> None:
    fails(rlhf("init", "next", run, "two", "--labels", "peple"), "C07", "labels of compare, people", "did you mean")
    fails(rlhf("init", "next", run), "C11", "rlhf init next runs/round1 runs/round2")
    fails(rlhf("init", "next", run, "two", "--seed", 1), "C11", "no other option than --labels")
    fails(rlhf("init", "ci", "two", "--labels", "people"), "C11", "--labels belongs to `rlhf init next RUN DIR`")
    fails(rlhf("init", "ci", "two", "three"), "C11", "three belongs to `rlhf init next RUN DIR`")

    shutil.rmtree(run / "labels/people")
    fails(rlhf("init", "next", run, "two"), "D01", "one has no labels", "rlhf label one")
    write_labels(run, "ties", label_rows(["a?"], "tie"))
    fails(rlhf("init", "next", run, "two"), "D05", "labels/ties")
    (run / "ppo/manifest.json").unlink()
    fails(rlhf("init", "next", run, "two"), "M10", "one/ppo is not finished", "rlhf ppo --config one/ppo.yaml")
    (run / "reward.yaml").unlink()
    fails(rlhf("init", "next", run, "two"), "C11", "one has no reward.yaml")
    assert not Path("two").exists()


def test_c17_the_name_of_the_previous_policy_is_taken_once(run: Path) -> None:
    must_succeed(rlhf("init", "next", run, "two"))
    result = rlhf("check", "two", "-s", "policies={previous: ../one/sft}")
    assert result.exit_code == 2 and "policies.previous: the name is that of models.previous" in result.output
    required = ["-s", "eval.require={win_rate.ppo_vs_previous.short.value: '>= 0.5'}"]
    must_succeed(rlhf("check", "two", *required))
    result = rlhf("check", "two", *required, "-s", "models.previous=null")
    assert result.exit_code == 2 and "does not name a comparison of the report" in result.output


@pytest.mark.full
def test_labels_of_held_out_prompts_are_known_by_their_settings(run: Path) -> None:
    write_labels(run, "mine", label_rows(["what is held out?"]), compares=True)
    write_labels(run, "data.train", label_rows(["a name of a key?"]))
    result = must_succeed(rlhf("init", "next", run, "two"))
    assert "20 pairs of one, and new ones of its labels: data.train 1, people 2\n" in result.stdout
    fails(rlhf("init", "next", run, "three", "--labels", "people,mine"), "C17", "--labels mine", "without --compare")

    write(run, "reward", {"data": {"train": "labels/mine"}, "model": {"path": "sft"}, "run": "other"})
    for command in ("check", "reward"):
        result = rlhf(command, run / "reward.yaml")
        assert result.exit_code == 2 and "[C17]: one/reward.yaml:2: data.train: one/labels/mine" in result.output, (
            result.output
        )


@pytest.mark.full
def test_the_round_takes_over_what_the_command_line_changed(run: Path) -> None:
    judges = {"short": "judges:short", "people": {"labels": "labels/compare"}}
    required = {"models.ppo.kl": "<= 20", "win_rate.ppo_vs_sft.people.value": ">= 0.5"}
    write(run, "eval", {**chat_run.EVAL, "judges": judges})
    (run / "pkg").mkdir()
    (run / "pkg/own.py").write_text("from pkg.words import short\n")
    (run / "pkg/words.py").write_text((run / "judges.py").read_text())
    length = "{builtin: length, parameters: {most: 9}}"
    overrides = {
        "ppo": ["ppo.learning_rate=1e-4", f"rewards={{length: {length}}}", "data.prompts=one/held_out.jsonl"],
        "eval": [f"eval.require={required}", "judges.new=pkg.own:short"],
    }
    shutil.rmtree(run / "ppo")
    for stage, model in (("ppo", run / "sft_model"), ("eval", run / "sft_model")):
        as_stage(run, stage, model, yaml.safe_load((run / f"{stage}.yaml").read_text()), overrides=overrides[stage])
    terminal.reset()

    result = must_succeed(rlhf("init", "next", run, "two"))
    says = "two/ppo.yaml: as the stage was run, not as one/ppo.yaml says: "
    assert f"{says}models.value, data.prompts, rewards.reward, rewards.length, ppo.learning_rate\n" in result.stdout
    assert "eval.yaml: judges.people is omitted, and what is required of it: " in result.stdout
    ppo, evaluation = (yaml.safe_load(Path(f"two/{stage}.yaml").read_text()) for stage in ("ppo", "eval"))
    assert ppo["ppo"] == {**SIZES, "learning_rate": 1e-4}
    assert ppo["rewards"].keys() == {"length"} and ppo["data"] == {"prompts": "../one/held_out.jsonl"}
    assert evaluation["judges"] == {"short": "judges:short", "new": "pkg.own:short"}
    assert evaluation["eval"]["require"] == {"models.ppo.kl": "<= 20"}
    must_succeed(rlhf("check", "two"))


def test_the_members_of_an_ensemble_start_from_the_sft_model(run: Path) -> None:
    finish(run, {"train": "pairs.jsonl", "eval": "pairs.jsonl"}, reward={"ensemble": 2})
    must_succeed(rlhf("init", "next", run, "two"))
    reward = yaml.safe_load(Path("two/reward.yaml").read_text())
    assert reward["reward"]["ensemble"] == 2 and reward["model"].keys() == {"path"}


def test_paths_below_the_new_folder_are_no_hub_ids(run: Path) -> None:
    must_succeed(rlhf("init", "next", run, "."))
    trees = {stage: yaml.safe_load(Path(f"{stage}.yaml").read_text()) for stage in ("reward", "ppo", "eval")}
    assert trees["reward"]["model"] == {"path": "./one/sft", "start": "./one/reward"}
    assert trees["ppo"]["models"]["policy"] == trees["eval"]["models"]["previous"] == "./one/ppo"


def token_rows(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Return the rows that the reward stage of a folder trains on."""
    config = load("reward", folder / "reward.yaml")
    parent = runs.open_parents(config)["model.path"]
    tokenizer = model_loading.load_tokenizer(config, Options(), parent)
    rows = training_rows.read_split(config, "train", tokenizer, read_config(parent.model))
    return [(row["chosen_ids"], row["rejected_ids"]) for row in rows]


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
TALK = [{"role": "user", "content": "a?"}]
TRANSCRIPT = "\n\nHuman: a?\n\nAssistant:"
HH = [transcripts(row) for row in pairs()]


@pytest.mark.parametrize(
    ("template", "old", "form", "prompt"),
    [
        (None, HH, "auto", TRANSCRIPT),
        (None, HH, "plain", TRANSCRIPT),
        (TEMPLATE, HH, "auto", "a?"),
        (TEMPLATE, HH, "plain", TRANSCRIPT),
        (TEMPLATE, pairs(), "turns", "a?"),
        (TEMPLATE, pairs(), "auto", TALK),
    ],
)
def test_old_pairs_keep_their_tokens_beside_labels_of_another_form(
    tmp_path: Path, template: str | None, old: list[dict[str, Any]], form: str, prompt: Any
) -> None:
    run = tmp_path / "one"
    run.mkdir()
    chat_run.make(run, template=template)
    jsonl.write_jsonl(run / "pairs.jsonl", old)
    finish(run, {"train": "pairs.jsonl", "format": form})
    write_labels(run, "people", label_rows([prompt]))
    must_succeed(rlhf("init", "next", run, tmp_path / "two"))
    before, after = token_rows(run), token_rows(tmp_path / "two")
    assert after[:20] == before and len(after) == 21
