"""Pairs to other tools and back."""

import json
from pathlib import Path
from typing import Any

import pytest
from label_run import PAIRS, session

from rlhf_cli.commands.label import exchange
from rlhf_cli.data.labels import preference_row
from rlhf_cli.errors import RLHFError


def labelled(form: str, rows: list[dict[str, Any]], choices: list[str]) -> list[dict[str, Any]]:
    """Return the tool's export of its import, with a choice of one annotator in each of the first rows."""
    for row, choice in zip(rows, choices, strict=False):
        if form == "argilla":
            row["responses"] = {"choice": [{"value": choice, "user_id": "ann"}]}
        else:
            result = {"type": "choices", "from_name": "choice", "to_name": "first", "value": {"choices": [choice]}}
            done = {"completed_by": {"id": 7, "email": "ann"}, "lead_time": 4.5, "was_cancelled": False}
            row["annotations"] = [{**done, "result": [result]}, {**done, "was_cancelled": True, "result": []}]
    for row in rows:
        if form == "labelstudio":
            row.setdefault("annotations", [])
    return rows


@pytest.mark.parametrize("form", exchange.FORMATS)
def test_labels_come_back_for_the_answers_that_were_shown(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here = session(tmp_path)
    exchange.export_pairs(here, tmp_path / "pairs.json", form)
    rows = json.loads((tmp_path / "pairs.json").read_text())
    texts = [row["fields" if form == "argilla" else "data"] for row in rows]
    assert len(rows) == len(PAIRS) and "sft" not in json.dumps(rows)

    choices = ["2", "1", "tie", "2", "bad"]
    (tmp_path / "done.json").write_text(json.dumps(labelled(form, rows, choices)))
    exchange.import_labels(here, tmp_path / "done.json", form)
    labels = here.store.labels
    assert [label.annotator for label in labels] == ["ann"] * 5
    for label, text, choice in zip(labels, texts, choices, strict=False):
        if choice in ("1", "2"):
            chosen = text["first" if choice == "1" else "second"]
            assert preference_row(label, label.choice)["chosen"] == chosen
        else:
            assert label.choice == choice

    exchange.import_labels(here, tmp_path / "done.json", form)  # a second time
    assert len(here.store.labels) == 5
    assert "5 new labels" in (output := capsys.readouterr().out) and "0 new labels" in output


@pytest.mark.parametrize("form", exchange.FORMATS)
def test_labels_of_other_answers_are_refused_with_their_row(tmp_path: Path, form: str) -> None:
    here = session(tmp_path)
    exchange.export_pairs(here, tmp_path / "pairs.json", form)
    rows = labelled(form, json.loads((tmp_path / "pairs.json").read_text()), ["1", "2"])
    rows[1]["fields" if form == "argilla" else "data"]["first"] = "an answer of another model"
    (tmp_path / "done.json").write_text(json.dumps(rows))
    with pytest.raises(RLHFError) as caught:
        exchange.import_labels(here, tmp_path / "done.json", form)
    (problem,) = caught.value.problems
    assert problem.code == "D12" and str(problem.where).endswith("done.json: row 2")
    assert here.store.labels == []


@pytest.mark.parametrize("form", exchange.FORMATS)
@pytest.mark.parametrize(
    ("text", "code"),
    [("{", "D03"), ("{}", "D12"), ('[{"id": "0:0-1"}]', "D12"), ("[1]", "D12")],
)
def test_a_file_that_is_no_export_is_refused(tmp_path: Path, form: str, text: str, code: str) -> None:
    (tmp_path / "done.json").write_text(text)
    with pytest.raises(RLHFError) as caught:
        exchange.import_labels(session(tmp_path), tmp_path / "done.json", form)
    assert caught.value.problems[0].code == code


def test_a_label_that_contradicts_one_is_not_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = session(tmp_path)
    exchange.export_pairs(here, tmp_path / "pairs.json", "argilla")
    rows = json.loads((tmp_path / "pairs.json").read_text())
    for choice in ("tie", "bad"):
        (tmp_path / "done.json").write_text(json.dumps(labelled("argilla", rows, [choice])))
        exchange.import_labels(here, tmp_path / "done.json", "argilla")
    assert [label.choice for label in here.store.labels] == ["tie"]
    assert "0 new labels, 1 not stored" in capsys.readouterr().out
