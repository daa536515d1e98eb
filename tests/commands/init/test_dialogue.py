"""`rlhf init` on a terminal: it asks for what is missing, and shows the options that the answers stand for."""

from collections.abc import Callable
from pathlib import Path

import pytest
from run_cli import is_one_error, rlhf

from rlhf_cli import terminal
from rlhf_cli.commands.init import dialogue, preferences


@pytest.fixture
def answers(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A terminal with these answers; returns the questions that were asked."""

    def give(*texts: str | None) -> list[str]:
        left = list(texts)
        questions: list[str] = []
        monkeypatch.setattr(terminal, "is_interactive", lambda: True)
        monkeypatch.setattr(terminal, "ask", lambda prompt: questions.append(prompt) or left.pop(0))
        return questions

    return give


def test_nothing_is_asked_off_a_terminal_or_without_need(
    here: Path, answers: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(terminal, "ask", lambda prompt: pytest.fail(prompt))
        assert is_one_error(rlhf("init"), "C11", "a preset and a folder are needed")
    questions = answers()
    assert rlhf("init", "ci", "new").exit_code == 0 and rlhf("init", "--list").exit_code == 0
    assert questions == [], "all is given"
    assert is_one_error(rlhf("init", "dmo", "x"), "C07"), "an error stays one"
    assert is_one_error(rlhf("init", "dmo"), "C07", "no preset 'dmo'", "did you mean demo?")


def test_a_preset_and_its_folder_are_asked_for(answers: Callable) -> None:
    Path("runs/ci").mkdir(parents=True)
    questions = answers("cii", "ci", "")
    result = rlhf("init")
    assert result.exit_code == 0 and Path("runs/ci-2/ppo.yaml").is_file()
    assert questions == ["Preset [demo]: ", "Preset [demo]: ", "Folder to create [runs/ci-2]: "]
    lines = result.stderr.splitlines()
    assert lines == ["did you mean ci?", "  PRESET ci", "  DIR runs/ci-2", "rlhf init ci runs/ci-2"]


def test_pairs_and_a_model_are_asked_for(answers: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, preferences.PreferencesOptions]] = []
    monkeypatch.setattr(preferences, "init", lambda *given: calls.append(given))
    answers("", "my pairs.jsonl", "", "me/model", "h100", "new")
    result = rlhf("init", "preferences", "--minutes", "10")
    ((folder, options),) = calls
    assert (folder, options.data, options.base, options.gpu) == (Path("new"), "my pairs.jsonl", "me/model", "h100")
    assert options.minutes == 10
    command = "rlhf init preferences new --data 'my pairs.jsonl' --base me/model --gpu h100"
    assert result.stderr.splitlines() == [
        "  --data 'my pairs.jsonl'", "  --base me/model", "  --gpu h100", "  DIR new", command
    ]  # fmt: skip


def test_a_round_needs_two_folders(answers: Callable) -> None:
    answers("runs/first", "")
    given = dialogue.InitArguments("next", None, None, None, None, None)
    assert dialogue.ask_missing(given).command() == "rlhf init next runs/first runs/first-2"


def test_the_end_of_the_input_is_an_error(answers: Callable) -> None:
    answers(None)
    assert is_one_error(rlhf("init", "ci"), "C11", "DIR is missing")
