"""The process that runs code of a model: fingerprints of values, the end of its run, and files that it hides."""

import collections
import http
import itertools
import marshal
import math
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest

from rlhf_cli.rewards import sandboxed
from rlhf_cli.rewards.verifiers import unit_tests
from tests.rewards.test_verifiers import build


class Point(NamedTuple):
    x: int
    y: int


def test_a_process_whose_run_ended_before_it_started_runs_no_code(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.write_bytes(marshal.dumps(("token", "while True: pass", [], 60.0, 128)))
    with job.open() as file:
        done = subprocess.run(
            [sys.executable, "-I", sandboxed.__file__, "1"], stdin=file, capture_output=True, timeout=30
        )
    assert done.stdout == b"the run has ended"


def test_values_have_one_fingerprint_if_they_are_equal() -> None:
    """By Python's own comparison of all pairs."""
    collection = [collections.Counter("aab"), collections.OrderedDict(b=1, a=2), {"a": 2, "b": 1}, {"b": 1, "a": 2}, {}]
    numbers = [
        0,
        1,
        1.0,
        True,
        -0.0,
        0.5,
        Fraction(1, 2),
        Decimal("0.5"),
        Decimal("0.1"),
        0.1,
        1 + 0j,
        1j,
        2**70,
        2.0**70,
    ]
    numbers += [10**400, math.inf, -math.inf, Decimal("-Infinity"), math.nan, -1, http.HTTPStatus.OK, 200]
    texts = ["", "a", "1", "\ud800", "[1]", b"", b"a", bytearray(b"a"), "'", '"', "a','b", None, ...]
    lists = [[], (), [1], (1,), [1.0], [[1]], ["a", "b"], ["a','b"], [(), []], Point(1, 2), (1, 2), [1, 2], ["1"]]
    sets = [set(), {1}, frozenset({1.0}), {(1, 2)}, {1: 0}.keys(), {"a", "b"}, {"b", "a"}, {1, 2}, {frozenset()}]
    values = [*numbers, *texts, *lists, *sets, *collection]
    for one, other in itertools.product(values, values):
        same = sandboxed.fingerprint(one) == sandboxed.fingerprint(other)
        assert same == (one == other) or one is other is math.nan, (one, other)
    assert {sandboxed.fingerprint(each) for each in (object(), print, [object()], iter([]))} == {"-"}


def test_e01_linux_that_cannot_hide_files_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sandboxed, "_landlock", lambda *arguments: -1)  # ENOSYS
    assert not sandboxed._hide_files()
    monkeypatch.setattr(unit_tests, "hides_files", lambda **limits: False)
    build("unit_tests")
    build("unit_tests")
    assert capsys.readouterr().err.count("warning[E01]: builtin unit_tests: ") == 1
