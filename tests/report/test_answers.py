"""The answers on the page: each row of samples.jsonl is in it, the largest gains and losses stand as elements."""

import base64
import gzip
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from report_run import answers, text_of, write_run

from rlhf_cli.evaluation.sample_pairs import response_pairs
from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.report import figures, page
from rlhf_cli.report.answers import SHOWN, packed, read_answers
from rlhf_cli.runs.read import read_run


def shown(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {title: [pair.index for pair in pairs] for _, title, pairs in read_answers(rows).groups}


def unpacked(text: str) -> dict[str, Any]:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_the_first_answers_are_the_largest_gains_and_losses() -> None:
    rows = answers(16)  # gains by gold, not by the reward model: index - 4
    assert shown(rows) == {"Largest gains of PPO": [*range(15, 4, -1)], "Largest losses of PPO": [*range(5)]}
    assert list(shown(rows[4:16] + rows[20:])) == ["Largest gains of PPO", "Smallest gains of PPO"], "a tie is no loss"
    many = shown(answers(120))
    assert many["Largest gains of PPO"] == [*range(119, 119 - SHOWN, -1)]
    assert many["Largest losses of PPO"] == [*range(SHOWN)]
    for n in range(12):
        assert sorted(itertools.chain.from_iterable(shown(answers(n)).values())) == list(range(n)), "each pair once"


def test_pairs_are_of_prompts_that_both_policies_answered_in_one_mode() -> None:
    rows = answers(4)
    greedy = [row | {"mode": "greedy", "response": "greedy"} for row in rows]
    kept = [row for row in rows if (row["model"], row["index"]) != ("sft", 2)]
    pairs = response_pairs([*greedy, *kept])
    assert [pair.index for pair in pairs] == [0, 1, 3] and pairs[0].ppo["response"] == "ppo says 0"
    assert len(response_pairs(greedy)) == 4, "if there are no sampled ones"
    assert response_pairs(rows[:4]) == [] and figures.lengths([]) is None


def test_a_pair_needs_a_score_of_both_answers_by_the_judge_that_decides() -> None:
    rows = answers(6)
    rows[0]["scores"] = {}
    rows[7]["scores"] = {"gold": None, "reward": 1.0}
    found = read_answers(rows)
    assert found.judge == "gold" and [pair.index for pair in found.pairs] == [5, 4, 3, 2]
    unscored = read_answers([row | {"scores": {}} for row in rows])
    assert unscored.judge is None and unscored.groups == [] and len(unscored.contents()["prompts"]) == 6


def test_every_row_is_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With texts that are safe to show, its scores by judge, and the policies in the order of training."""
    run = write_run(tmp_path / "run")
    monkeypatch.setenv("MY_API_KEY", "do-not-show-me")
    rows = answers(60)
    del rows[0]["kl"], rows[119]["kl"]  # as near-greedy answers
    rows[0]["response"] = "do-not-show-me\u202e</template><script>"
    rows = [row | {"columns": {"topic": "sea", "answer": 7}} for row in rows]
    snapshot = [row | {"model": "ppo_step_000010"} for row in rows[60:]]
    greedy = [row | {"mode": "greedy"} for row in snapshot]
    rows = [*greedy, *snapshot, *rows, {**rows[-1], "model": "best_of_4"}]
    rows[-1]["scores"] = {"gold": None, "reward": 0.123456}
    write_jsonl(run / "eval/samples.jsonl", rows)
    html = page.of_run(read_run(run))

    (packed_text,) = re.findall(r'<template id="data">([^<]*)</template>', html)
    data = unpacked(packed_text)
    found = [answer for prompt in data["prompts"] for answer in prompt["answers"] if answer]
    assert len(found) == len(rows) == 241 and "60 prompts, 241 answers" in text_of(html)
    assert data["judges"] == ["gold", "reward"], "the one that decides is first"
    names = ["SFT", "PPO, update 10", "PPO", "SFT, best of 4", "PPO, update 10, near-greedy"]
    assert data["policies"] == names
    first, last = data["prompts"][0], data["prompts"][-1]
    assert first["columns"] == {"topic": "sea", "answer": "7"}
    assert first["answers"][0]["text"] == "[secret][U+202E]</template><script>"
    assert last["answers"][3]["scores"] == [None, 0.123456] and first["answers"][3] is None
    assert html.count('<article class="pair">') == 2 * SHOWN + 1, "and the form of the script"
    assert '<select data-column="topic">' in html and "<option>sea</option>" in html


def test_the_answers_of_a_demo_keep_the_page_below_three_megabytes() -> None:
    """256 prompts, 14 policies, 50 random words an answer: more than the demo's, and less alike."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(2000)]
    rows = []
    for policy in range(14):
        for row in answers(256):
            if row["model"] == "ppo":
                rows.append(row | {"model": f"ppo_step_{policy:06d}", "response": " ".join(draw.choices(words, k=50))})
    assert len(rows) == 3584 and len(packed(read_answers(rows).contents())) < 2_000_000


def test_token_values_are_safe_to_show() -> None:
    rows = answers(1)
    rows[1]["tokens"] = {"text": ["\u202e", "a"], "kl": [0.1234567, -1]}
    (prompt,) = read_answers(rows).contents()["prompts"]
    assert prompt["answers"][1]["tokens"] == {"text": ["[U+202E]", "a"], "kl": [0.1234567, -1.0]}


def test_equal_contents_are_packed_to_equal_text() -> None:
    contents = read_answers(answers(3)).contents()
    assert packed(contents) == packed(contents) and unpacked(packed(contents)) == contents
