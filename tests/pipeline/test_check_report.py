"""What `rlhf check` finds, as JSON and with --quiet."""

import json
from pathlib import Path
from typing import Any

from bad_inputs import check, replace

from rlhf_cli import jsonl


def json_report(file: str, *arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(check(file, *arguments, "--json").stdout)
    return report


def test_quiet_prints_errors_only(run_folder: Path) -> None:
    jsonl.write_jsonl(run_folder / "held-out.jsonl", [{"prompt": "And?"}] * 9 + [{"prompt": "And? " * 99}])
    assert "D10" in check(".").stderr
    quiet = check(".", "--quiet")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "", "")


def test_json(folder: Path) -> None:
    replace("sft.yaml", "path: model", "path: owner/model")
    jsonl.write_jsonl(folder / "rows.jsonl", [{"prompt": "a", "completion": ""}])
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    jsonl.write_jsonl(folder / "pairs.jsonl", [{**pair, "prompt": f"{n}"} for n in range(8)])
    replace("reward.yaml", "train: pairs.jsonl", "train: pairs.jsonl, eval: pairs.jsonl")
    report = json_report("sft.yaml")
    place, hint = "rows.jsonl:1", "correct the row, or set data.on_bad: drop"
    problem = {"code": "D09", "text": '"completion" is empty', "where": place, "hint": hint, "level": "error"}
    assert (report["ok"], report["problems"]) == (False, [problem])
    assert report["not_checked"][0].startswith("sft model.path: owner/model is not in the hub's cache")
    warned = json_report("reward.yaml")
    assert warned["ok"] and [(one["code"], one["level"]) for one in warned["problems"]] == [("D13", "warning")]
    jsonl.write_jsonl(folder / "pairs.jsonl", [{**pair, "chosen": f"{n}"} for n in range(8)])
    assert json_report("reward.yaml")["problems"] == []  # one prompt for all rows is no leak
    assert json_report("nowhere")["problems"][0]["code"] == "C09"
