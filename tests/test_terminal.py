"""What goes where on a terminal and off it."""

import io
import subprocess
import sys

import pytest

from rlhf_cli import terminal


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.forget_warnings()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def test_results_go_to_stdout_and_log_lines_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.out("result")
    terminal.say("log")
    assert capsys.readouterr() == ("result\n", "log\n")


def test_control_characters_are_taken_out() -> None:
    assert terminal.clean("a\x1b[31mb\x07\x9b2J\rc\x7f\x00\td\ne é😀") == "a[31mb2Jc\td\ne é😀"


@pytest.mark.parametrize("write", [terminal.say, terminal.out, lambda text: terminal.warn("T02", text)])
def test_no_way_out_lets_control_characters_through(write, capsys: pytest.CaptureFixture[str]) -> None:
    write("x\x1b]0;title\x07y")
    terminal.table(["a\x1b"], [["b\x1b[2J"]], title="c\x1b")
    assert "\x1b" not in "".join(capsys.readouterr())


def test_a_warning_is_said_once_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        terminal.warn("T02", "no pad token", where="a.yaml:3", hint="nothing to do")
    terminal.warn("T02", "no pad token", where="b.yaml:3")
    lines = ["warning[T02]: a.yaml:3: no pad token", "warning[T02]: b.yaml:3: no pad token"]
    assert terminal.warnings_said() == lines
    assert capsys.readouterr().err == f"{lines[0]}\nhint: nothing to do\n{lines[1]}\n"
    terminal.forget_warnings()
    assert terminal.warnings_said() == []


def test_a_table_off_a_terminal_is_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 60
    terminal.table(["name", "value"], [["日本", "1"], ["x", long], ["two\nlines", "[bold]b[/bold]"]], title="t")
    lines = capsys.readouterr().out.splitlines()
    expected = [
        "t",
        "name        value",
        "日本        1",
        f"x           {long}".rstrip(),
        "two\\nlines  [bold]b[/bold]",
    ]
    assert lines == expected


def test_a_table_on_a_terminal_is_drawn_with_markup_off(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Tty()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.table(["name"], [["[link=http://x]here[/link]"], ["a\x1b[31mred"]], title="[red]t")
    drawn = screen.getvalue()
    assert "[link=http://x]here[/link]" in drawn and "[red]t" in drawn and "a[31mred" in drawn
    assert "┃" in drawn
    assert "\x1b[31m" not in drawn


def test_every_row_needs_all_columns() -> None:
    with pytest.raises(AssertionError):
        terminal.table(["a", "b"], [["1"]])


def test_progress_off_a_terminal_is_a_line_at_most_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.Progress("ppo\x1b", 30, "update") as bar:
        for step in range(1, 31):
            now[0] += 1
            bar.advance(note=f"reward\x1b {step}")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "ppo 10/30 update, 1 update/s, 20 s left, reward 10",
        "ppo 20/30 update, 1 update/s, 10 s left, reward 20",
        "ppo 30/30 update, 1 update/s, 30 s in all, reward 30",
    ]


def test_slow_steps_are_counted_in_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.Progress("ppo", 1000) as bar:
        now[0] += 40
        bar.advance(10)
    assert capsys.readouterr().err.splitlines()[0] == "ppo 10/1000 step, 4 s/step, 1 h 6 min left"


def test_progress_that_breaks_still_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), terminal.Progress("sft", 3) as bar:
        bar.advance()
        raise RuntimeError
    assert capsys.readouterr().err.startswith("sft 1/3 step")


def test_progress_on_a_terminal_is_a_live_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, results = Tty(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", results)
    with terminal.Progress("ppo", 2) as bar:
        bar.advance(note="[bold]reward\x1b[2J 1")
        terminal.out("result")
        terminal.say("a log line")
        bar.advance()
    assert "2/2" in screen.getvalue() and "[bold]reward[2J 1" in screen.getvalue() and "a log line" in screen.getvalue()
    assert results.getvalue() == "result\n"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Tty()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "dumb")
    terminal.table(["a"], [["b"]])
    assert screen.getvalue() == "a\nb\n"


def test_what_an_encoding_cannot_show_is_escaped() -> None:
    code = "from rlhf_cli import terminal; terminal.out('caf\\u00e9 \\ud800')"
    environment = {"PYTHONIOENCODING": "ascii", "PATH": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert result.stdout == b"caf\\xe9 \\ud800\n"


def test_rich_is_loaded_only_for_a_terminal() -> None:
    code = "from rlhf_cli import terminal; import sys; terminal.table(['a'], [['b']]); print('rich' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "a\nb\nFalse\n"
