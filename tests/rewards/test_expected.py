"""Expected values of unit tests are taken out, where a passed test has compared them."""

import subprocess
import sys

import pytest

from rlhf_cli.rewards import sandbox

CHECK = "def check(g):\n    {}assert g(1) == 1\n    assert g(2) == 2\n"


@pytest.mark.full
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("test", "taken_out"),
    [
        ("assert f(1) == 1", 1),
        ("assert 1 == f(1), 'no'", 1),
        ("assert f(1) == 1 and f and -1 == f(-1)", 2),
        ("assert f(1) == 1 or f(2) == 3", 0),
        ("assert f(1) == f(1) != 2", 0),
        ("assert 1 == 1 and f(1) and f(1) is 1", 0),
        ("assert abs(f(1) - 1) < 1e-6\nassert abs(1.01 - f(1)) <= 0.02", 2),
        ("assert abs(f(1) - f(1)) < 1 and abs(f(0) - 1) > 0 and abs(f(1) - 1) < f(1)", 0),
        ("x = 1\nfor x in [1, 2]:\n    assert f(x) == x\nassert f(x) == 2", 1),
        ("try:\n    assert f(1) == 2\nexcept AssertionError:\n    pass\nif f(1):\n    assert f(2) == 2", 0),
        (CHECK.format("") + "check(f)\nassert f(3) == 3", 3),
        (CHECK.format("") + "[check(f) for _ in '12']", 0),
        (CHECK.format("for x in []:\n        return\n    ") + "check(f)", 0),
        (CHECK.format("yield\n    ") + "check(f)", 0),
        ("@staticmethod\n" + CHECK.format("") + "check(f)", 0),
        (CHECK.format("") + "def check(g):\n    assert g(5) == 5\ncheck(f)\ncheck(f)", 1),
        ("class C:\n    assert f(1) == 1\nassert [f(1), {2: f(2)}] == [1, {2: 2}]", 1),
        ("assert (y := f(3)) == 3\nassert y == 3", 2),
        ("assert {f(1)} == {1} == {1}\nassert f(1) != {}", 0),
    ],
)
def test_expected_values_are_taken_out_where_a_passed_test_has_compared_them(test: str, taken_out: int) -> None:
    """The right function passes, without a warning; one whose value equals all does not where a value is taken out."""
    split = sandbox._split((test,))[0]
    assert len(split.checks) == taken_out
    wrong = "def f(x):\n    class Equal:\n        __eq__ = lambda *a: True\n    return Equal()"
    assert sandbox.passed_tests("def f(x): return x", [test], seconds=1.0, megabytes=64) == [True]
    if taken_out:
        assert sandbox.passed_tests(wrong, [test], seconds=1.0, megabytes=64) == [False]


def test_assertions_are_not_removed_where_python_removes_them() -> None:
    code = "from rlhf_cli.rewards.sandbox import passed_tests\n"
    code += "print(passed_tests('f = lambda x: 0', ['assert f(1)', 'assert f(1) == 1'], seconds=1.0, megabytes=64))"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert done.stdout == "[False, False]\n", done.stderr
