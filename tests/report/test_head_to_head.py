"""Head to head: the PPO policies of several runs on the prompts that their evaluations share."""

import json
from pathlib import Path
from typing import Any

import pytest
from report_run import answers, begin, change, configs, finish, report, text_of, win, write_run
from run_cli import must_succeed, rlhf

from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.report import compare
from rlhf_cli.report.head_to_head import HeadToHead, head_to_head
from rlhf_cli.runs.read import read_run


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    run = write_run(folder)
    write_jsonl(run / "eval/samples.jsonl", rows)
    finish(run / "eval", parents=("sft", "reward", "ppo"))
    return run


def shifted(n: int, gold: float) -> list[dict[str, Any]]:
    """Answers whose scores by gold are `gold` higher from the third prompt on; those of the first two are equal."""
    found = answers(n)
    for row in found:
        if row["model"] == "ppo" and row["index"] > 1:
            row["scores"] = row["scores"] | {"gold": row["scores"]["gold"] + gold}
    return found


def direct(*folders: Path) -> HeadToHead | None:
    runs = [read_run(folder) for folder in folders]
    return head_to_head([run.name for run in runs], runs, compare.comparable_judges(runs))


def test_policies_are_compared_on_the_prompts_that_all_answered(tmp_path: Path) -> None:
    other = shifted(30, 1.0)
    other[30 + 5]["prompt"] = "another prompt in the same place"
    found = direct(write(tmp_path / "a", answers(20)), write(tmp_path / "b", other))
    assert found is not None and found.judges == ["gold", "reward"], "the one that decides is first"
    gold, reward = found.matches
    assert (gold.rate.n, gold.rate.ties) == (19, 2) and gold.rate.value == pytest.approx(1 / 19), "two ties, no win"
    assert gold.row[0] == "a over b" and gold.row[-1] == "b is better"
    assert reward.rate.value == 0.5 and reward.row[-1] == "not distinguishable"
    shown = found.side_by_side
    assert [pair.gain for pair in shown.pairs] == [1.0] * 17 + [0.0] * 2 and shown.names == ["a", "b"]
    assert [title for _, title, _ in shown.groups] == ["Largest gains of b", "Smallest gains of b"]


def test_only_what_is_comparable_is_compared(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, answers(8)) for name in "abc"]
    found = direct(*folders)
    assert found is not None
    assert [each.first + each.second for each in found.matches] == ["ab", "ab", "ac", "ac", "bc", "bc"], "two judges"
    begin(folders[0] / "eval", configs()["eval"] | {"judges": {"gold": "other:gold"}})
    assert compare.comparable_judges([read_run(each) for each in folders]) == ["reward"]
    change(folders[1] / "ppo/manifest.json", model_sha256="trained again")
    change(folders[2] / "ppo/manifest.json", model_sha256="trained again")
    assert direct(*folders) is None, "evaluations that are out of date"
    elsewhere = [row | {"prompt": "elsewhere"} for row in answers(8)]
    assert direct(folders[0], write(tmp_path / "d", elsewhere)) is None, "no prompt is shared"


@pytest.mark.usefixtures("figures")
def test_the_page_has_all_runs_in_one_figure_and_their_answers(tmp_path: Path) -> None:
    runs = [read_run(write(tmp_path / name, shifted(12, gain))) for name, gain in (("a", 0.0), ("b", 2.0))]
    html = compare.of_runs(runs).page()
    text = text_of(html)
    assert "a over b gold 12 8.3 % [" in text and "Largest gains of b" in text and "12 prompts, 24 answers" in text
    figure = html[html.index('data-figure="runs-0"') :]
    assert "<title>a: update 10, KL 4.25, score 0.8, from 0.7, to 0.9</title>" in figure
    evaluation = report()
    evaluation["win_rate"]["ppo_vs_sft"]["people"] = win(0.6)
    folders = [write_run(tmp_path / name, evaluation=evaluation) for name in "cd"]
    html = compare.of_runs([read_run(folder) for folder in folders]).page()
    assert "PPO over SFT, people" in html and html.count('data-figure="runs-') == 2, "people give no means"


@pytest.mark.usefixtures("figures")
def test_the_json_of_a_comparison_has_what_its_page_says(here: Path) -> None:
    for name, gain in (("a", 0.0), ("b", 2.0)):
        write(here / name, shifted(12, gain))
    begin(here / "b/ppo", configs()["ppo"] | {"seed": 3})
    printed = json.loads(must_succeed(rlhf("report", "a", "b", "--json")).stdout)
    assert [run["run"] for run in printed["runs"]] == ["a", "b"]

    gold, reward = printed["head_to_head"]
    assert (gold["first"], gold["second"], gold["judge"], reward["judge"]) == ("a", "b", "gold", "reward")
    (match, _) = compare.of_runs([read_run(Path(name)) for name in "ab"]).direct.matches
    low, high = gold["win_rate"]["ci95"]
    assert gold["win_rate"] == match.rate.model_dump(mode="json", exclude_none=True)
    assert (gold["win_rate"]["n"], gold["win_rate"]["ties"]) == (12, 2) and low < gold["win_rate"]["value"] < high
    assert printed["settings"] == [{"stage": "ppo", "key": "seed", "values": ["0", "3"]}]

    text = text_of(Path(printed["page"]).read_text(encoding="utf-8"))
    assert " ".join(match.row) in text and "ppo seed 0 3" in text
    alone = json.loads(must_succeed(rlhf("report", "a", "--json")).stdout)
    assert alone.keys() == {"page", "runs"}
