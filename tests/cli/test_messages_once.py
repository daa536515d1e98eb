"""A message that one process of a command printed is not printed by another."""

import os

import pytest
from run_cli import must_succeed, python, rlhf

from rlhf_cli import terminal
from rlhf_cli.commands import run

WARN = "from rlhf_cli import terminal; terminal.warn('R10', 'too long', where='run/reward', hint='shorter')"
LINE = "warning[R10]: run/reward: too long\nhint: shorter\n"


def child(code: str = WARN, **environment: str) -> str:
    return str(must_succeed(python("-c", code, env=os.environ | environment)).stderr)


def test_a_message_of_one_process_is_not_repeated_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal.share_seen_messages():
        assert (child(), child()) == (LINE, "")
        assert child(WARN.replace("long", "short")) == LINE.replace("long", "short")
        assert terminal.is_first_time("ours") and not terminal.is_first_time("ours")
        assert child("from rlhf_cli import terminal; assert not terminal.is_first_time('ours')") == ""
        assert not terminal.is_first_time(LINE.partition("\n")[0])
    assert child() == LINE, "another command"
    with terminal.share_seen_messages():
        monkeypatch.setenv(terminal.SEEN_FILE_VARIABLE, "/nowhere/seen")
        assert (child(), child()) == (LINE, LINE)


def test_the_stages_of_rlhf_run_are_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[str] = []
    monkeypatch.setattr(run, "run", lambda *_: outputs.extend(child() for _ in range(2)) or 0)
    assert rlhf("run", ".").exit_code == 0
    assert outputs == [LINE, ""] and terminal.SEEN_FILE_VARIABLE not in os.environ


def test_a_printed_warning_is_kept_for_the_report() -> None:
    with terminal.share_seen_messages():
        child()
        kept = "; import sys; print(terminal.emitted_warnings(), file=sys.stderr)"
        assert child(WARN + kept) == f"{[LINE.partition(chr(10))[0]]}\n"


def test_only_the_first_rank_marks_messages_as_printed() -> None:
    """The others of a group print nothing: what they find first, the first one must still print."""
    with terminal.share_seen_messages():
        assert child(RANK="1", WORLD_SIZE="2") == ""
        assert child(RANK="0", WORLD_SIZE="2") == LINE
