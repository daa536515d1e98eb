"""Verifiers by hand, what they refuse, and what code under unit tests cannot do."""

import json
import os
import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_code
import psutil
import pytest
import without_packages

from rlhf_cli.data.datasets import Prompt
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.errors import RLHFError
from rlhf_cli.rewards import answers, sandbox, sandboxed
from rlhf_cli.rewards.function import RewardContext, make_reward_fn, score_texts
from rlhf_cli.rewards.signature import TextRows, check_columns

OBJECT = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
NESTED = {"type": "array", "items": {"$ref": "#"}}
STANDARD = "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: 'int'\n"
PATCHED = ("exec", "compile")
DEEP, LONG = "[" * 50_000, "x" * 100_000


def build(name: str, **parameters: Any) -> Any:
    section: Any = SimpleNamespace(builtin=name, parameters=parameters)
    return make_reward_fn("builtin", section, RewardContext(Path(), lambda key: f"ppo.yaml:{key}"))


def scores(name: str, rows: list[tuple[str, Any]], **parameters: Any) -> list[float | None]:
    """Score responses beside the values of their rows' column, `answer` or that of `parameters`."""
    column = parameters.get("column", "tests" if name == "unit_tests" else "answer")
    responses = [response for response, _ in rows]
    records = tuple({"prompt": "", column: value} for _, value in rows)
    texts = TextRows([""] * len(rows), responses, (), records)
    return score_texts("check", build(name, **parameters), texts, every_row=False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "parameters", "rows"),
    [
        ("exact_match", {}, [("Paris.", "paris", 1), (" 'The  Sea' ", "the sea", 1), ("-5", "5", 0), ("5", 5, 1)]),
        ("exact_match", {}, [("no", ["yes", "NO!"], 1), ("ﬁve", "five", 1), ("true", True, 1), (LONG, "x", 0)]),
        ("exact_match", {}, [("", "!", 0), ("?", "!", 0), ("!", "!", 1), ("", "", 1)]),
        ("exact_match", {"ignore_case": False}, [("Paris", "paris", 0), ("x", None, None)]),
        ("exact_match", {"extract": "<a>(.*?)</a>"}, [("<a>1</a> <a>\nTwo</a>", "two", 1), ("two", "two", 0)]),
        ("exact_match", {"extract": r"\d+", "column": "n"}, [("1 or 2", "2", 1), ("1 or 2", "1", 0)]),
        ("numeric", {}, [("is 72.", "so 70\n#### 72", 1), ("1,234", 1234, 1), ("-$3", "-3", 1), ("3-5", 5, 1)]),
        ("numeric", {}, [("1/2", 0.5, 1), ("x = .5", "1/2", 1), ("6e-3", 0.006, 1), ("50%", 50, 1), ("f(2)-1", 1, 1)]),
        ("numeric", {}, [("none", 1, 0), ("1/0", 1, 0), ("1,2,3", 3, 1), ("\N{MINUS SIGN}3", -3, 1), ("v1.2.3", 3, 0)]),
        ("numeric", {}, [("9" * 100_000, 9, 0), ("1e999", 1, 0), ("7.0", [6, 7], 1), ("7", None, None)]),
        ("numeric", {}, [("is 3/4.", "3/4", 1), ("3/4...", 0.75, 1), ("10 / 2,000", 2000, 1), ("1/2/2024", 1, 1)]),
        ("numeric", {}, [("\N{EN DASH}5", -5, 1), ("3\N{EN DASH}5", 5, 1), ("2 1/2", 2.5, 1), ("-2 1/2", "-5/2", 1)]),
        ("numeric", {"tolerance": 0.3}, [("1.3", 1, 1), ("0.7", 1, 1), ("1.31", 1, 0)]),
        ("numeric", {"tolerance": 0.01}, [("3.14", 3.1416, 1), ("3.1", 3.1416, 0)]),
        ("numeric", {"extract": "<a>(.*?)</a>"}, [("<a>1 + 1 = 2</a> of 3", 2, 1), ("2", 2, 0)]),
        ("numeric", {"latex": True}, [(r"\boxed{\frac{1}{2}}", "0.5", 1), ("$x^2+2x+1$", "(x+1)^2", 1), (LONG, 1, 0)]),
        ("numeric", {"latex": True}, [(r"\boxed{3}", r"so \boxed{4}", 0), ("$" + "(" * 5000, 1, 0)]),
        ("regex", {"column": "answer"}, [("abc", "a.c", 1), ("abc", "^b", 0), ("abc", None, None)]),
        ("json_schema", {"schema": OBJECT}, [('{"a": 1}', 0, 1), ('{"a": "x"}', 0, 0), ("NaN", 0, 0), (DEEP, 0, 0)]),
        ("json_schema", {"schema": OBJECT}, [('So:\n```json\n{"a": 2}\n```\nDone', 0, 1), ('So {"a": 2}', 0, 0)]),
        ("json_schema", {"schema": OBJECT}, [('```sh\nls\n```\nor\n```JSON\r\n{"a": 2}\r\n```\r\n', 0, 1)]),
        ("json_schema", {"schema": NESTED}, [("[[]]", 0, 1), ("[" * 400 + "]" * 400, 0, 0)]),
        ("json_schema", {"column": "form"}, [("1", {"type": "integer"}, 1), ("1", '{"type": "string"}', 0)]),
        ("unit_tests", {}, [("def f(x): return x", "assert f(1) == 1", 1), ("def f(x): return x", "f(1) / 0", 0)]),
        ("unit_tests", {}, [("a = 1", ["assert a", "assert a > 1"], 0), ("a = 1", [], None), ("a", None, None)]),
        ("unit_tests", {"partial": True}, [("a = 1", ["assert a", "assert a > 1"], 0.5), ("1 / 0", ["", ""], 0)]),
        ("unit_tests", {}, [("```sh\nls\n```\nThen:\n```py\na = 1\n```\nIt prints\n```\na\n```\n.", "assert a", 1)]),
        ("unit_tests", {}, [("```\na = 1\n```\nor\n```\na = 2\n```\nIt prints\n```text\n1\n```", "assert a == 2", 1)]),
        ("unit_tests", {}, [("```python\r\na = 1\r\n```\r\n```Python3\r\na = 2\r\n```\r\n", "assert a == 2", 1)]),
        ("unit_tests", {}, [("a = 1", ["assert a"] * 300, 1), (STANDARD, "pickle.loads(pickle.dumps(P(1))).x", 1)]),
        ("unit_tests", {}, [(f"import builtins\nbuiltins.{each} = lambda *a: ''", "1 / 0", 0) for each in PATCHED]),
        ("unit_tests", {}, [("a = 1  # " + LONG, "assert a", 1), ("(" * 50_000, "", 0), ("a = '\0'", "", 0)]),
    ],
)
def test_scores_by_hand(name: str, parameters: dict[str, Any], rows: list[tuple[str, Any, Any]]) -> None:
    found = scores(name, [(response, value) for response, value, _ in rows], **parameters)
    assert found == [score for *_, score in rows]


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("exact_match", {"column": "completions"}, "none that every function gets"),
        ("exact_match", {"column": "the answer"}, "letters, digits and _"),
        ("exact_match", {"extract": "(a"}, "not a regular expression"),
        ("exact_match", {"extract": ""}, "matches everything"),
        ("numeric", {"tolerance": -1.0}, "greater than or equal to 0"),
        ("numeric", {"tolerance": 0.1, "latex": True}, "no effect with latex"),
        ("regex", {"pattern": "a", "column": "b"}, "give pattern or column, not both"),
        ("json_schema", {}, "give schema or column"),
        ("json_schema", {"schema": {"type": "objekt"}}, "not a JSON Schema"),
        ("json_schema", {"schema": {"items": {"$ref": "http://x/y"}}}, "does not contain its reference 'http://x/y'"),
        ("unit_tests", {"megabytes": 1}, "greater than or equal to 64"),
    ],
)
def test_c17_wrong_parameters(name: str, parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(RLHFError, match=says) as caught:
        build(name, **parameters)
    assert caught.value.problems[0].code == "C17"


@pytest.mark.parametrize(
    ("name", "parameters", "value", "says"),
    [
        ("numeric", {}, "a word", "the answer 'a word' has no number"),
        ("numeric", {"latex": True}, r"\frac{", "math_verify cannot read"),
        ("numeric", {"extract": "<a>(.*?)</a>"}, "five", "the answer 'five' has no number"),
        ("numeric", {}, ["1", "five"], "the answer 'five' has no number"),
        ("regex", {"column": "answer"}, 5, "a pattern must be text, not 5"),
        ("json_schema", {"column": "answer"}, ["a"], "must be an object, true or false, not ['a']"),
        ("json_schema", {"column": "answer"}, "5", "must be an object, true or false, not 5"),
        ("json_schema", {"column": "answer"}, {"$ref": "#/a"}, "does not contain its reference '#/a'"),
        ("unit_tests", {"column": "answer"}, "assert (", "a test is not Python: '(' was never closed"),
        ("unit_tests", {"column": "answer"}, "def test_f():\n    assert f(1)", "functions, which nothing calls"),
        ("exact_match", {}, {"a": 1}, "a text, a number or a list of them"),
        ("regex", {"column": "answer"}, "(a", "not a regular expression"),
        ("json_schema", {"column": "answer"}, "{", "unexpected end"),
        ("json_schema", {"column": "answer"}, {"type": "objekt"}, "not a JSON Schema"),
    ],
)
def test_d06_an_answer_that_cannot_be_read_is_found_before_anything_is_loaded(
    name: str, parameters: dict[str, Any], value: Any, says: str
) -> None:
    rows = [
        Prompt([], "", RowLocation(Path("rows.jsonl"), line), {"answer": each})
        for line, each in ((1, None), (2, value))
    ]
    with pytest.raises(RLHFError) as caught:
        check_columns({"right": build(name, **parameters)}, rows, "rows.jsonl", str)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("D06", "rows.jsonl:2") and says in problem.text
    with pytest.raises(RLHFError, match=r'rows.jsonl:1: "answer" is null or missing, but a judge must score every row'):
        check_columns({"right": build(name, **parameters)}, rows, "rows.jsonl", str, scored=1)
    if name == "unit_tests":  # no R05: in the process such a test fails, or defines a function
        return
    with pytest.raises(RLHFError, match="R05"):  # in data that were not checked
        scores(name, [("1", value)], **parameters)


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("prompt", "rlhf reads this column of rows.jsonl itself; further columns: text\nhint: copy it"),
        ("answer", "rows.jsonl has no such column; further columns: text\nhint: add the column, or set parameters."),
    ],
)
def test_d02_a_column_that_the_rows_lack_or_that_rlhf_reads(column: str, says: str) -> None:
    rows = [Prompt([], "", RowLocation(Path("rows.jsonl"), 1), {"text": "a"})]
    with pytest.raises(RLHFError, match="D02") as caught:
        check_columns({"right": build("numeric", column=column)}, rows, "rows.jsonl", str)
    assert says in str(caught.value)


@pytest.mark.full
def test_r05_a_pattern_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_PATTERN_SECONDS", 0.2)
    slow = "(a+)+b"
    for name, parameters in (
        ("regex", {"pattern": slow}),
        ("exact_match", {"extract": slow}),
        ("json_schema", {"schema": {"pattern": slow}}),
    ):
        text = f'"{"a" * 40}"' if name == "json_schema" else "a" * 40
        with pytest.raises(RLHFError, match=r"R05.*took more than 0.2 s on 4\d characters"):
            scores(name, [(text, "a")], **parameters)


def test_e09_a_package_that_is_missing() -> None:
    code = """
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from rlhf_cli.errors import RLHFError
from rlhf_cli.rewards.function import RewardContext, make_reward_fn
for name, parameters, package in (("numeric", {"latex": True}, "math_verify"), ("json_schema", {}, "jsonschema")):
    try:
        section = SimpleNamespace(builtin=name, parameters=parameters)
        make_reward_fn("builtin", section, RewardContext(Path(), lambda key: key))
    except RLHFError as error:
        (problem,) = error.problems
        assert problem.code == "E09" and package in problem.text and "[verifiers]" in problem.hint, problem
    else:
        raise AssertionError(name)
"""
    without_packages.python(code, {"math_verify", "jsonschema"})


# What code under test cannot do.


KINDS = [*hostile_code.ATTACKS, *hostile_code.FORGERIES]
EACH_ONCE = [name for name in KINDS if name not in hostile_code.LASTING]
THOUSAND = random.Random(0).choices(KINDS, k=1000)


@pytest.mark.full
@pytest.mark.parametrize(
    "names", [EACH_ONCE, pytest.param(THOUSAND, marks=pytest.mark.slow)], ids=["each once", "1000"]
)
def test_hostile_code_ends_no_run_is_never_right_and_leaves_nothing(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, (folder, temporary) = Path.home(), (tmp_path / "folder", tmp_path / "temporary")
    for path in (folder, temporary):
        path.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    (folder / "old").write_text("text")
    (folder / "answers.json").write_text(json.dumps({x: x * x + hostile_code.K for x in range(30)}))
    before = [(path, path.stat()[:9]) for path in folder.iterdir()]
    monkeypatch.setattr(sandbox, "WAIT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        drawn = list(hostile_code.responses(0, names, str(folder), server.getsockname()[1]))
        rows = [(code, tests) for _, code, tests, _ in drawn]
        found = scores("unit_tests", rows, seconds=1.0, megabytes=128)
        with pytest.raises(TimeoutError):
            server.accept()
    wrong = [
        (name, score, code, tests)
        for (name, code, tests, right), score in zip(drawn, found, strict=True)
        if score != right
    ]
    assert not wrong
    assert [(path, path.stat()[:9]) for path in folder.iterdir()] == before
    places = (home, Path.cwd(), Path("/"), Path("/tmp"), Path("/dev/shm"), temporary)
    assert not [path for place in places for path in place.glob(f"*{hostile_code.MARK}*")]
    assert not processes_of(os.getpid())


def processes_of(run: int) -> list[psutil.Process]:
    """Return the processes of the sandbox that a run has started."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if (each.info["cmdline"] or [])[-2:] == [sandboxed.__file__, str(run)]
    ]


@pytest.mark.full
@pytest.mark.parametrize("test", ["{0}", pytest.param("assert f({0}) == {0}", marks=pytest.mark.slow)])
def test_60000_tests_of_a_right_answer(test: str) -> None:
    assert scores("unit_tests", [("def f(x): return x", [test.format(index) for index in range(60_000)])]) == [1]


def test_c17_a_machine_that_cannot_limit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(RLHFError, match="cannot limit what the code does: it needs Linux, this is darwin"):
        build("unit_tests")
