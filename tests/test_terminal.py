"""What goes where on a terminal and off it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_terminal import Tty
from run_cli import child, must_succeed, python, rlhf

from rlhf_cli import terminal
from rlhf_cli.pipeline import run


@pytest.fixture(autouse=True)
def _of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def test_results_go_to_stdout_and_log_lines_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.out("result")
    terminal.say("log")
    assert capsys.readouterr() == ("result\n", "log\n")


def test_a_quiet_command_prints_errors_and_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    def all_ways() -> tuple[str, str]:
        terminal.out("table")
        terminal.table(["a"], [["b"]])
        terminal.say("log")
        terminal.warn("T02", "no pad token")
        terminal.error("error")
        terminal.answer("reply")
        terminal.conclude("place", {"key": "ä"})
        return tuple(capsys.readouterr())

    assert all_ways() == ("table\na\nb\nreply\n", "log\nwarning[T02]: no pad token\nerror\n"), "the path is known"
    terminal.reset()
    terminal.set_mode("quiet")
    assert all_ways() == ("reply\nplace\n", "error\n")
    assert terminal.mode_options() == ["--quiet"] and terminal.stdout_of_children() == subprocess.DEVNULL
    terminal.reset()
    terminal.set_mode("json")
    expected = 'reply\n{\n  "key": "\\u00e4"\n}\n'
    assert all_ways() == (expected, "table\na\nb\nlog\nwarning[T02]: no pad token\nerror\n")
    assert terminal.mode_options() == [] and terminal.stdout_of_children() == terminal.STDERR


@pytest.mark.parametrize("write", [terminal.say, terminal.out, lambda text: terminal.warn("T02", text)])
def test_no_way_out_lets_control_characters_through(write, capsys: pytest.CaptureFixture[str]) -> None:
    write("x\x1b]0;title\x07y")
    terminal.table(["a\x1b"], [["b\x1b[2J"]], title="c\x1b")
    assert "\x1b" not in "".join(capsys.readouterr())
    assert terminal.clean("a\x1b[31mb\x07\x9b2J\rc\x7f\x00\td\ne é😀") == "a[31mb2Jc\td\ne é😀"


def test_a_warning_is_printed_once_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        terminal.warn("T02", "no pad token", where="a.yaml:3", hint="nothing to do")
    terminal.warn("T02", "no pad token", where="b.yaml:3")
    lines = ["warning[T02]: a.yaml:3: no pad token", "warning[T02]: b.yaml:3: no pad token"]
    assert terminal.emitted_warnings() == lines
    assert capsys.readouterr().err == f"{lines[0]}\nhint: nothing to do\n{lines[1]}\n"
    terminal.reset()
    assert terminal.emitted_warnings() == []


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


def test_a_table_on_a_terminal_is_drawn_with_markup_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Tty()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.table(["name"], [["[link=http://x]here[/link]"], ["a\x1b[31mred"]], title="[red]t")
    drawn = screen.getvalue()
    assert "[link=http://x]here[/link]" in drawn and "[red]t" in drawn and "a[31mred" in drawn
    assert "┃" in drawn
    assert "\x1b[31m" not in drawn
    screen = Tty()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "dumb")
    terminal.table(["a"], [["b"]])
    assert screen.getvalue() == "a\nb\n"


def test_what_an_encoding_cannot_show_is_escaped() -> None:
    code = "from rlhf_cli import terminal; terminal.out('caf\\u00e9 \\ud800')"
    result = python("-c", code, env={"PYTHONIOENCODING": "ascii", "PATH": ""})
    assert result.stdout == "caf\\xe9 \\ud800\n"


def test_rich_is_loaded_only_for_a_terminal() -> None:
    code = "from rlhf_cli import terminal; import sys; terminal.table(['a'], [['b']]); print('rich' in sys.modules)"
    assert python("-c", code).stdout == "a\nb\nFalse\n"


# A chat


def test_a_text_comes_piece_by_piece_and_cleaned(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("a\x1b[2J ", "b\n", "c"):
        terminal.out(text, end="")
    terminal.out()
    terminal.say("numbers\x07", dim=True)
    assert capsys.readouterr() == ("a[2J b\nc\n", "numbers\n")


@pytest.mark.parametrize(("no_color", "shown"), [("", "\x1b[2ma\x1b[0m\n"), ("1", "a\n")])
def test_an_aside_is_dim_on_a_terminal(monkeypatch: pytest.MonkeyPatch, no_color: str, shown: str) -> None:
    screen = Tty()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("NO_COLOR", no_color)
    terminal.say("a", dim=True)
    assert screen.getvalue() == shown


def test_no_prompt_is_printed_off_a_terminal_and_a_closed_stdin_has_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from rlhf_cli import terminal\nwhile (line := terminal.ask('> ')) is not None: print(ascii(line))"
    output = python("-c", code, input=b"a\n\ncaf\xe9\r\nlast", text=False)
    assert output.stdout.decode().splitlines() == ["'a'", "''", "'caf\\udce9'", "'last'"]
    monkeypatch.setattr(sys, "stdin", None)
    assert terminal.ask("> ") is None and not terminal.is_interactive()


def test_a_closed_reader_is_noticed() -> None:
    code = (
        "import os, sys; from rlhf_cli import terminal\n"
        "output = []\n"
        "for _ in range(2): terminal.out('x'); output.append(terminal.is_stdout_open())\n"
        "print(output, file=sys.stderr)"
    )
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(reader)
        os.close(writer)
        assert process.stderr and process.stderr.read().split()[-2:] == [b"[False,", b"False]"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_full_disk_of_the_log_ends_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run continues, as without a reader; a truncated stdout is recorded."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, name, full)
        for _ in range(3):
            (terminal.out if name == "stdout" else terminal.say)("a line")
        lost = terminal.stdout_error()
        assert (lost is not None and lost.errno == errno.ENOSPC) if name == "stdout" else lost is None
        monkeypatch.undo()
    terminal.reset()
    assert terminal.stdout_error() is None


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_result_that_is_lost_is_an_error_where_nothing_else_was_done(tmp_path: Path) -> None:
    def ended(*arguments: str) -> tuple[int, str]:
        with open("/dev/full", "w") as full:
            done = child(*arguments, cwd=tmp_path, capture_output=False, stdout=full, stderr=subprocess.PIPE)
        return done.returncode, done.stderr

    assert ended("init", "ci", "run")[0] == 0 and (tmp_path / "run/ppo.yaml").is_file()
    code, output = ended("ls")
    assert code == 1 and output.startswith("error[E03]: stdout cannot be written: No space left")
    assert len(output.splitlines()) == 2


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"), (0.0123, "0.012 s"), (4.68, "4.7 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min"),
        (723, "12 min 3 s"), (3599.7, "1 h"), (12_000, "3 h 20 min"), (7_210, "2 h"), (190_000, "2 d 4 h"),
    ],
)  # fmt: skip
def test_a_duration_has_at_most_two_units(seconds: float, expected: str) -> None:
    assert terminal.duration(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(-5, "just now"), (59, "just now"), (60, "1 min ago"), (7_199, "1 h ago"), (86_400 * 40, "40 d ago")],
)
def test_ages_have_one_unit(seconds: float, expected: str) -> None:
    assert terminal.ago(seconds) == expected


# Messages that one process of a command printed


WARN = "from rlhf_cli import terminal; terminal.warn('R10', 'too long', where='run/reward', hint='shorter')"
LINE = "warning[R10]: run/reward: too long\nhint: shorter\n"


def printed(code: str = WARN, **environment: str) -> str:
    return str(must_succeed(python("-c", code, env=os.environ | environment)).stderr)


def test_a_message_of_one_process_is_not_repeated_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal.share_seen_messages():
        assert (printed(), printed()) == (LINE, "")
        assert printed(WARN.replace("long", "short")) == LINE.replace("long", "short")
        assert terminal.is_first_time("ours") and not terminal.is_first_time("ours")
        assert printed("from rlhf_cli import terminal; assert not terminal.is_first_time('ours')") == ""
        assert not terminal.is_first_time(LINE.partition("\n")[0])
        assert printed("from rlhf_cli import terminal; assert terminal.is_first_time('the last of a child')") == ""
    assert not terminal.is_first_time("the last of a child"), "also behind the context"
    assert printed() == LINE, "another command"
    with terminal.share_seen_messages():
        monkeypatch.setenv(terminal.SEEN_FILE_VARIABLE, "/nowhere/seen")
        assert (printed(), printed()) == (LINE, LINE)


def test_the_stages_of_rlhf_run_are_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[str] = []
    ended = run.RunOutcome()
    monkeypatch.setattr(run, "run_folder", lambda *_, **__: outputs.extend(printed() for _ in range(2)) or ended)
    assert rlhf("run", ".").exit_code == 0
    assert outputs == [LINE, ""] and terminal.SEEN_FILE_VARIABLE not in os.environ


def test_a_printed_warning_is_kept_for_the_report_and_marked_by_the_first_rank() -> None:
    """The other ranks print nothing: what they find first, the first one must still print."""
    with terminal.share_seen_messages():
        printed()
        kept = "; import sys; print(terminal.emitted_warnings(), file=sys.stderr)"
        assert printed(WARN + kept) == f"{[LINE.partition(chr(10))[0]]}\n"
    with terminal.share_seen_messages():
        assert printed(RANK="1", WORLD_SIZE="2") == ""
        assert printed(RANK="0", WORLD_SIZE="2") == LINE
