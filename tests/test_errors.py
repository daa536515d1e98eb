"""The words and exit codes of errors."""

import os
import pickle
import re
from pathlib import Path

import pytest

from rlhf_cli.errors import CODES, Problem, RLHFError, closest_match, closest_path
from tests.conftest import SHARED


def test_what_users_wrote_cannot_break_the_line() -> None:
    problem = Problem("C01", "unknown key a\nb", "x.yaml:1", "keys here: c\u2028d")
    assert str(problem) == "error[C01]: x.yaml:1: unknown key a b\nhint: keys here: c d"


@pytest.mark.parametrize(
    ("codes", "exit_code"),
    [(["C01"], 2), (["R01"], 1), (["R01", "D07"], 2), (["M05"], 1), (["R06"], 1), (["M10"], 2), (["M09", "R05"], 1)],
)
def test_the_exit_code_is_2_where_a_check_could_have_seen_it(codes: list[str], exit_code: int) -> None:
    error = RLHFError.from_problems([Problem(code, "text") for code in codes])
    assert error.exit_code == exit_code
    assert str(error).splitlines() == [f"error[{code}]: text" for code in codes]


def test_an_error_crosses_processes_whole() -> None:
    error = RLHFError.from_problems([Problem("C01", "one", "f:1", "fix"), Problem("D07", "two")])
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


def test_every_code_has_a_meaning_and_a_fix_and_tells_when_it_only_warns() -> None:
    for name, code in CODES.items():
        assert re.fullmatch(r"[CDTMERJS][0-9]{2}", name) and code.exit in (0, 1, 2)
        assert code.title and code.meaning.endswith(".") and code.fix, name
    warned = [
        code
        for file in (Path(__file__).parents[1] / "rlhf_cli").rglob("*.py")
        for code in re.findall(r'terminal\.warn\(\s*"([A-Z][0-9]{2})"', file.read_text(encoding="utf-8"))
    ]
    assert {"R02", "R13", "M05"} <= set(warned)
    assert [code for code in warned if CODES[code].exit and not CODES[code].warns] == []
    assert not any(code.warns for code in CODES.values() if code.exit == 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("kl_coeff", "kl_coef"), ("KL_COEF", "kl_coef"), ("gam", "gamma"), ("zzzzz", None), ("", None)],
)
def test_the_nearest_name(name: str, expected: str | None) -> None:
    assert closest_match(name, ["kl_coef", "gamma", "lam"]) == expected


def test_the_nearest_file_may_be_in_a_misspelt_folder_and_only_a_folder_is_named_for_one(here: Path) -> None:
    (here / "data").mkdir()
    (here / "data" / "train.jsonl").touch()
    assert closest_path("data/trian.jsonl") == "data/train.jsonl"
    assert closest_path("dta/train.jsonl") == "data/train.jsonl"
    assert closest_path("data/zzz") is None
    (here / "demo.log").touch()
    assert closest_path("demo") == "demo.log" and closest_path("demo", is_candidate=os.path.isdir) is None
    (here / "demmo").mkdir()
    (here / "demmo/sft.yaml").touch()
    assert closest_path("demo", is_candidate=os.path.isdir) == "demmo" and closest_path("demo.log/sft.yaml") is None


# Exit codes


def rows() -> dict[str, str]:
    """Code -> exit column, of BAD-INPUTS.md."""
    path = SHARED / "BAD-INPUTS.md"
    if not path.is_file():
        pytest.skip("../shared/BAD-INPUTS.md is not there")
    return dict(re.findall(r"(?m)^\| ([A-Z]\d\d) \|.*\| ([^|]+) \|$", path.read_text(encoding="utf-8")))


def test_exit_codes_are_those_of_the_shared_table() -> None:
    """Of several exit codes the worst one; a code that only warns has 0."""
    assert rows().keys() <= CODES.keys()
    for code, exits in rows().items():
        assert CODES[code].exit == max(map(int, re.findall(r"\b[012]\b", exits)), default=0) or code == "R02", code
    assert CODES["R02"].exit == 1  # "1 after 10"
