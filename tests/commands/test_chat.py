"""`rlhf chat`: metrics as in the evaluation, prompts as in PPO, at a terminal, through a pipe, and errors."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ppo_folder
import pytest
import report_run
import torch
from chat_run import CONTEXT, PROMPT, Terminal, make
from ppo_folder import lines, must_succeed, write
from typer.testing import Result

from rlhf_cli import data, jsonl, terminal
from rlhf_cli.commands.chat import loop
from rlhf_cli.commands.chat.session import ChatSession, ConversationFormat, Reply, Turn
from rlhf_cli.commands.common.models import ReplyMetrics
from rlhf_cli.config.base import Options
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import tokenizers
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo import rollout
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.runs import locks
from rlhf_cli.stages.common import prompt_forms

pytestmark = pytest.mark.full


@pytest.fixture
def run(chat_origin: Path, here: Path) -> Path:
    """A copy of the trained run in the working directory."""
    return Path(shutil.copytree(chat_origin, "run"))


@pytest.fixture
def one_line_replies(chat_origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no reply have a line break or an end, which a draw may bring."""
    tokenizer, plain = tokenizers.load_tokenizer(chat_origin / "sft/model"), rollout.sample
    never = torch.tensor([*tokenizer("\n")["input_ids"], tokenizer.eos_token_id])

    def sample(logits: torch.Tensor, *how: Any) -> Any:
        return plain(logits.index_fill(1, never, -torch.inf), *how)

    monkeypatch.setattr(rollout, "sample", sample)


def piped(*arguments: object, typed: str | bytes = "what is a cat?\n") -> Result:
    """Run the command with its input from a pipe."""
    return ppo_folder.rlhf("chat", *arguments, input=typed)


def opened(folder: Path, **options: Any) -> ChatSession:
    return loop.open_session(folder, loop.ChatOptions(**options), Options())


def is_error(result: Result, code: str, *texts: str) -> bool:
    """Return True if the output ends with this error, with at most one hint."""
    first, *hints = result.stderr[result.stderr.index("error[") :].splitlines()
    assert first.startswith(f"error[{code}]: ") and all(hint.startswith("hint: ") for hint in hints), result.stderr
    return result.exit_code == 2 and len(hints) <= 1 and all(text in result.stderr for text in texts)


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_command_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/commands.md").read_text(encoding="utf-8")
    for name, command in loop.COMMANDS.items():
        assert f"`/{name} {command.argument}`".replace(" `", "`") in page, name


# Metrics


def test_the_metrics_are_those_of_the_evaluation(run: Path) -> None:
    """The chat's engine samples each stored answer again, and its scorer gives the same metrics."""
    session = opened(run, compare="sft,ppo")
    stored = [row for row in lines(run / "eval/samples.jsonl") if row["mode"] == "sampled"]
    assert {row["model"] for row in stored} == {"sft", "ppo"} and any(abs(row["kl"]) > 0.1 for row in stored)
    for row in stored:
        model = next(model for model in session.models if model.name == row["model"])
        ids = session.prompt_format.encode(row["prompt"])
        seed = derive_seed(0, "eval/sampled", 0, row["index"])
        prompts = replace(Prompts.from_lists([ids]), seeds=(seed,), response_length=12)
        engine = HFEngine(model.weights, session.scorer.stop_token_id, 0, session.sampling.temperature)
        response = list(engine.stream(prompts))
        assert session.prompt_format.tokenizer.decode(response, skip_special_tokens=True) == row["response"]
        metrics = session.scorer.score(model, row["prompt"], ids, response)
        assert metrics.scores == pytest.approx(row["scores"], abs=1e-5) and metrics.sum is None
        assert (metrics.kl or 0.0) == pytest.approx(row["kl"], rel=1e-6, abs=1e-5)
        assert (metrics.kl is None) == (row["model"] == "sft")  # 0 by definition


PPO = {"data": {"prompts": "prompts.jsonl"}, "ppo": {"total_episodes": 32, "response_length": 12, "temperature": 0.7}}


def test_several_rewards_are_shown_and_summed_as_in_ppo(run: Path) -> None:
    (run / "judges.py").write_text("def short(prompts, responses):\n    return [-len(text) for text in responses]\n")
    rewards = {
        "reward": {"clip": 0.25},
        "short": {"function": "judges:short", "weight": 0.5},
        "words": {"builtin": "length", "parameters": {"most": 1}, "weight": 0},
    }
    shutil.rmtree(run / "ppo")
    write(run, "ppo", {**PPO, "rewards": rewards})
    before = tree(run)
    result = must_succeed(piped(run, "--stage", "sft", "--temperature", "0"))
    (reply,) = result.stdout.splitlines()
    metrics = dict(part.rsplit(" ", 1) for part in result.stderr.splitlines()[-1].split("  ")[:4])
    scores = {name: float(value) for name, value in metrics.items()}
    assert scores["short"] == -len(reply) and scores["words"] == min(0, 1 - len(reply.split()))
    assert scores["sum"] == pytest.approx(min(max(scores["reward"], -0.25), 0.25) + 0.5 * scores["short"], abs=1e-3)
    assert tree(run) == before  # no compiled judges.py either


@pytest.mark.usefixtures("one_line_replies")
def test_equal_seeds_give_equal_replies_in_a_comparison_too(run: Path) -> None:
    def replies(*arguments: object) -> list[str]:
        return piped(run, *arguments, typed="what is a cat?\nwhat is a cat?\n").stdout.splitlines()

    sft = replies("--stage", "sft")
    assert sft == replies("--stage", "sft") != replies("--stage", "sft", "--seed", "1") and sft[0] != sft[1]
    compared = [line for a, b in zip(sft, replies(), strict=True) for line in (f"sft: {a}", f"ppo: {b}")]
    assert replies("--compare", "sft,ppo") == compared
    assert replies("--compare", "ppo,sft") == [compared[1], compared[0], compared[3], compared[2]]


# Formats of prompts

LAST = {"role": "assistant", "content": "Bye."}
REJECTS = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
REJECTS += "{% endfor %}"
IGNORES = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
DIALOGUE = [
    {"role": "user", "content": "Hello, you."},
    {"role": "assistant", "content": " Hi there. "},
    {"role": "user", "content": "And now?"},
]
TRANSCRIPT = "\n\nHuman: Hello, you.\n\nAssistant: {}\n\nHuman: And now?\n\nAssistant:"


def detect(chat_origin: Path, written: Any, template: str | None = None) -> ConversationFormat:
    tokenizer = tokenizers.load_tokenizer(chat_origin / "sft/model")
    if template is not None:
        tokenizers.set_chat_template(tokenizer, template)
    return ConversationFormat(prompt_forms.prompt_format(written, tokenizer), tokenizer)


@pytest.mark.parametrize(
    ("template", "row", "kind", "reply"),
    [
        ("chatml", {"prompt": DIALOGUE}, "template", " Hi there. "),
        (
            "chatml",
            {"messages": [{"role": "system", "content": "Be kind."}, *DIALOGUE, LAST]},
            "template",
            " Hi there. ",
        ),
        (None, {"prompt": TRANSCRIPT.format(" Hi there. ")}, "transcript", " Hi there. "),
        ("chatml", {"prompt": TRANSCRIPT.format("ok")}, "template", "ok"),
        (None, {"prompt": "And now?"}, "text", ""),
        ("chatml", {"prompt": "And now?"}, "text", ""),
    ],
)
def test_a_prompt_has_the_token_ids_of_ppo(
    chat_origin: Path, tmp_path: Path, template: str | None, row: dict, kind: str, reply: str
) -> None:
    """As `data.prompt_rows` reads the same conversation from a file."""
    jsonl.write_jsonl(tmp_path / "prompts.jsonl", [row])
    form = detect(chat_origin, data.prompt_form(tmp_path / "prompts.jsonl"), template)
    (expected,) = data.prompt_rows(tmp_path / "prompts.jsonl", form.tokenizer, max_length=None)
    turns = [Turn("Hello, you.", {"ppo": cast(Reply, SimpleNamespace(text=reply))})] if reply else []
    system = "Be kind." if "messages" in row else None
    prompt = form.prompt(system, turns, "ppo", "And now?")
    assert form.kind == kind and form.encode(prompt) == expected.ids
    assert form.prompt(system, turns, "sft", "And now?") != prompt or not turns  # each model has its own turns


def test_formats_and_system_prompts(chat_origin: Path) -> None:
    assert detect(chat_origin, None, "chatml").kind == "template" and detect(chat_origin, None).kind == "text"
    for template, supported in (("chatml", True), (REJECTS, False), (IGNORES, False), (None, False)):
        assert detect(chat_origin, None, template).supports_system_prompt is supported


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of conversations without PPO; do not change it."""
    return make(tmp_path_factory.mktemp("chats"), template="chatml")


def test_a_conversation_is_saved_as_messages(chats: Path, tmp_path: Path) -> None:
    file = tmp_path / "saved.jsonl"
    result = piped(chats, typed=f"/system Be kind.\nHello.\n/max 4\nAnd now?\n/retry\n/save {file}\n/clear\nAnd now?\n")
    assert result.exit_code == 0, result.output
    for text in (
        "no PPO policy: PPO was not started, so the SFT model replies",
        "prompts: the chat template, with the earlier turns",
        "temperature 0.7, at most 53 tokens, seed 0",  # there is no ppo.yaml
    ):
        assert text in result.stderr, text
    ((_, row),) = jsonl.read_jsonl(file)
    contents = [message["content"] for message in row["messages"]]
    assert contents[::2] == ["Be kind.", contents[2], contents[4]] and contents[1:4:2] == ["Hello.", "And now?"]
    first, second = row["chat"]["replies"]
    assert (first["max_new_tokens"], second["max_new_tokens"], second["draw"]) == (53, 4, 2) and second["length"] <= 4
    assert row["chat"]["model"] == "sft" and "kl" not in first and set(first["scores"]) == {"reward"}
    tokenizer = tokenizers.load_tokenizer(chats / "sft/model")
    (prompt,) = data.prompt_rows(file, tokenizer, max_length=None)
    assert len(data.sft_rows(file, tokenizer, max_length=None)) == 2
    assert prompt.ids == data.encode(tokenizer, row["messages"][:4], None)[0]


def test_plain_text_is_saved_as_prompts_and_completions(run: Path) -> None:
    result = piped(run, "--compare", "sft,ppo", typed="a\nb\n/undo\n/save saved.jsonl\n/save saved.jsonl\n")
    assert is_error(result, "C15", "saved.jsonl exists already and is not overwritten")
    rows = [(row["prompt"], row["chat"]["model"], "kl" in row["chat"]) for row in lines(Path("saved.jsonl"))]
    assert rows == [("a", "sft", False), ("a", "ppo", True)]
    tokenizer = tokenizers.load_tokenizer(run / "sft/model")
    assert len(data.sft_rows(Path("saved.jsonl"), tokenizer, max_length=None)) == 2


# At a terminal


def test_a_chat_at_a_terminal(run: Path, tmp_path: Path) -> None:
    before = tree(run)
    with Terminal(run, cwd=tmp_path) as at:
        start = at.until(PROMPT).replace("\r\n", " ")
        assert "ppo: run/ppo after update 4" in start and "temperature 0.7, at most 12 tokens, seed 0" in start
        assert "reward (run/reward), KL from run/sft at temperature 0.7, in nats" in start
        shown = at.type("what is a cat?\r")
        assert "\x1b[2mreward " in shown and "  KL " in shown and "tokens/s\x1b[0m" in shown  # dim
        assert "did you mean /temp?" in at.type("/tmep 0\r")
        assert "error[C06]: /temp x: a number from 0 up is needed" in at.type("/temp x\r")
        assert "/seed N" in at.type("/help\r")
        at.type("/temp 0\r")
        at.type(f"/max {CONTEXT - 100}\r")
        # The first words of a long reply are shown while it is generated, and Ctrl-C stops the rest.
        assert "tokens/s" not in at.type("a long story, if you please\r", "please\r\n") + at.until(" ")
        length = int(at.type("\x03").split(" tokens, stopped")[0].split()[-1])
        assert 0 < length < CONTEXT - 200
        assert "at most 3 tokens" in at.type("/max 3\r")
        at.type('"""\r', "... ")
        at.type("two\r", "... ")
        for text in ('lines"""\r', "\x1b[200~pasted\n/twice\x1b[201~\r", "/retry\r"):
            assert "3 tokens, cut off" in at.type(text)
        assert "saved: saved.jsonl, 4 rows" in at.type("/save saved.jsonl\r")
        assert "exists already and is not overwritten" in at.type("/save saved.jsonl\r")
        at.type("half a li", "half a li")
        assert "Ctrl-C again, Ctrl-D or /quit ends the chat" in at.type("\x03")
        assert at.ends("\x03") == 0
    first, long, block, paste = lines(tmp_path / "saved.jsonl")
    assert first["prompt"] == "what is a cat?" and block["prompt"] == "two\nlines"
    assert long["chat"]["length"] == length and long["completion"].strip()
    assert paste["prompt"] == "pasted\n/twice" and paste["chat"]["draw"] == 4  # the second reply to it
    assert tree(run) == before


# Through a pipe


@pytest.mark.usefixtures("one_line_replies")
def test_replies_go_to_stdout_and_all_else_to_stderr(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until stdout is closed, which ends the chat."""
    before = tree(run)
    result = piped(run, typed='a cat?\n\n/max 3\n"""\ntwo\nlines\n"""\n//etc\n/save saved.jsonl\n/quit\nnever\n')
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 3 and "\x1b" not in result.output
    metrics = [line for line in result.stderr.splitlines() if line.startswith("reward ")]
    assert [line.split("  ")[2] for line in metrics[1:]] == ["3 tokens, cut off"] * 2
    assert ">" not in result.output and "Ctrl-C" not in result.output
    assert [row["prompt"] for row in lines(Path("saved.jsonl"))] == ["a cat?", "two\nlines", "/etc"]
    assert tree(run) == before
    answers = iter([True, True, False])
    monkeypatch.setattr(terminal, "is_stdout_open", lambda: next(answers))
    result = piped(run, typed="a\nb\nc\n")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 2


def test_replies_cannot_control_the_terminal_and_characters_are_complete(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers.load_tokenizer(run / "sft/model")
    ids = tokenizer("a\x1b[31mé\x9b2J 🙂\r\x07b")["input_ids"]
    monkeypatch.setattr(HFEngine, "stream", lambda *_: iter([*ids, tokenizer.eos_token_id]))
    result = piped(run, typed="what is a cat?\n/save saved.jsonl\n")
    assert result.stdout == "a[31mé2J 🙂b\n" and f"{len(ids) + 1} tokens, ended" in result.stderr
    (row,) = Path("saved.jsonl").read_text().splitlines()
    assert "\\u001b[31mé\\u009b2J 🙂\\r\\u0007b" in row  # unchanged, but escaped


@pytest.mark.usefixtures("one_line_replies")
def test_the_first_error_ends_it(run: Path) -> None:
    unknown = piped(run, typed="a\n/tem 1\nb\n")
    assert is_error(unknown, "C07", "did you mean /temp?") and unknown.stdout.count("\n") == 1
    for typed, code, *texts in (
        ("/max 0\n", "C06", "/max 0: a whole number from 1 up is needed"),
        ("/seed 4294967296\n", "C06", "from 0 to 4294967295"),
        ("/temp nan\n", "C06", "/temp nan: a number from 0 up is needed"),
        ("/retry\n", "C11", "/retry: the conversation is empty"),
        ("/clear all\n", "C11", "/clear takes no argument: all"),
        ("/system Be kind.\n", "C11", "there is no chat template to take it"),
        ("a\n/save nowhere/saved.jsonl\n", "E03", "nowhere/saved.jsonl cannot be written"),
        ("a\n/save ~nobody/\0\n", "E03", "cannot be written: "),
        (b"a\ncaf\xe9\n", "D04", "stdin:2: byte 0xE9 at position 4"),
        ('a\n"""b\n', "C11", "stdin:2: the prompt that starts here has no closing"),
        ("cat " * CONTEXT, "C13", f"and the context of ppo has {CONTEXT}, reply included", "/clear"),
    ):
        assert is_error(piped(run, typed=typed), code, *texts), typed


def test_a_reward_that_fails_does_not_end_a_chat_at_a_terminal(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = opened(run)
    session.scorer.sources["reward"] = lambda rollout: float("nan")
    with pytest.raises(RLHFError, match="gave nan"):
        session.send("a")
    session.turns = []
    session.live = True
    typed = iter(["a", None])
    monkeypatch.setattr(terminal, "ask", lambda prompt: next(typed))
    loop.run_loop(session)
    assert "error[R05]: reward `reward` gave nan" in capsys.readouterr().err and len(session.turns) == 1
    assert session.turns[0].replies["ppo"].metrics == ReplyMetrics()


def test_ctrl_c_keeps_the_partial_reply(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_after(count: int) -> None:
        def stream(*_: Any) -> Any:
            yield from range(30, 30 + count)
            raise KeyboardInterrupt

        monkeypatch.setattr(HFEngine, "stream", stream)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    session = opened(run, compare="sft,ppo")
    interrupt_after(3)
    with pytest.raises(KeyboardInterrupt):  # through a pipe it ends the command
        session.send("a")
    session.live = True
    session.send("a")
    assert session.stopped and [list(turn.replies) for turn in session.turns] == [["sft"]]
    (reply,) = session.turns[0].replies.values()
    assert (len(reply.ids), reply.ending) == (3, "stopped") and "reward" in reply.metrics.scores
    interrupt_after(0)
    session.send("b")
    session.retry()
    assert [turn.prompt for turn in session.turns] == ["a"] and session.turns[0].replies == {"sft": reply}
    monkeypatch.setattr(session.scorer, "score", interrupt)
    monkeypatch.setattr(HFEngine, "stream", lambda *_: iter([30]))
    with pytest.raises(KeyboardInterrupt):
        session.send("c")
    assert session.turns[-1].replies["sft"].metrics == ReplyMetrics() and session.turns[-1].prompt == "c"


def test_a_reply_is_limited_by_the_context(run: Path) -> None:
    session = opened(run, stage="sft", temperature=0.0, max_new_tokens=9)
    for room in (9, 4):
        prompt = "Z" * (CONTEXT - room)  # one unknown token per letter
        assert len(session.prompt_format.encode(prompt)) == CONTEXT - room
        session.send(prompt)
    assert [len(turn.replies["sft"].ids) for turn in session.turns] == [9, 4]


# Selection of models


def test_invalid_selections(run: Path) -> None:
    assert is_error(piped("nowhere"), "M01", "no such folder nowhere")
    for arguments, code, *texts in (
        (("--step", "99"), "C06", "run/ppo has no policy of that step", "there are "),
        (("--step", "best"), "C07", "--step best: not last, recommended or a number"),
        (("--step", "recommended"), "C06", "recommends no policy"),
        (("--stage", "reward"), "C11", "run/reward is a reward model, which generates no text"),
        (("--compare", "sft,pp"), "C07", "--compare sft,pp: not sft,ppo or ppo,sft"),
        (("--compare", "ppo,ppo"), "C07", "not sft,ppo or ppo,sft"),
        (("--compare", "sft,ppo", "--stage", "sft"), "C11", "both select the models"),
        (("--temperature", "inf"), "C06", "--temperature inf: a number from 0 up"),
        (("--temperature", "-1"), "C11", "--temperature"),
    ):
        assert is_error(piped(run, *arguments), code, *texts), arguments
    (run / "ppo/manifest.json").unlink()
    assert is_error(piped(run), "M10", "run/ppo is not finished", "--stage sft")
    assert piped(run / "sft").exit_code == 0


def test_the_recommended_policy_replies(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One between SFT and PPO has half of PPO's weights' way; instead of SFT a comparison has the last policy."""
    line = report_run.recommend(monkeypatch, "interpolated_0.5", step=4, share=0.5)
    result = must_succeed(piped(run))
    assert result.stderr.startswith(line) and "ppo: run/ppo after update 4 at share 0.5 from" in result.stderr
    half, last, sft = (
        opened(run, stage=stage, step=step).models[0].weights.state_dict()
        for stage, step in ((None, None), (None, "last"), ("sft", None))
    )
    assert half.keys() == sft.keys()
    for name, weight in half.items():
        assert torch.allclose(weight, (last[name] + sft[name]) / 2, atol=1e-6), name
    assert any(not torch.equal(half[name], last[name]) for name in half)

    line = report_run.recommend(monkeypatch, "sft")
    result = must_succeed(piped(run))
    assert result.stderr.startswith(line) and "chat     sft: run/sft\n" in result.stderr
    assert "PPO was not started" not in result.stderr
    compared = must_succeed(piped(run, "--compare", "sft,ppo"))
    assert "chat     ppo: run/ppo after update 4\n" in compared.stderr and line not in compared.stderr


def test_a_snapshot_and_a_stage_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither takes a lock, so a stage may run at the same time."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a lock was taken")

    monkeypatch.setattr(locks, "lock_folder", fail)
    result = piped(run, "--step", "2", typed="a\n/save saved.jsonl\n")
    assert result.exit_code == 0 and "ppo: run/ppo after update 2" in result.stderr
    (row,) = lines(Path("saved.jsonl"))
    assert row["chat"]["from"] == "run/ppo after update 2" and "sha256" not in row["chat"]
    last = piped(run / "ppo", typed="a\n")
    assert last.exit_code == 0 and last.stdout == piped(run, typed="a\n").stdout != result.stdout
