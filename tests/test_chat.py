"""`rlhf chat`: the evaluation's numbers, PPO's prompts, at a terminal, through a pipe, and what is refused."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import ppo_folder
import pytest
from chat_run import CONTEXT, PROMPT, Terminal, make
from ppo_folder import lines, write
from typer.testing import CliRunner, Result

from rlhf_cli import data, jsonl, terminal
from rlhf_cli.cli import app
from rlhf_cli.commands import chat
from rlhf_cli.commands.chat import COMMANDS
from rlhf_cli.commands.chat.generate import ConversationFormat, Reply, ReplyMetrics, SamplingParams, Turn
from rlhf_cli.commands.chat.models import resolve_models
from rlhf_cli.commands.chat.session import ChatSession
from rlhf_cli.config.base import Options
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import load, tokenizers
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.runs import locks

pytestmark = pytest.mark.training


@pytest.fixture
def run(chat_origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the trained run, beside which the test stands."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(chat_origin, tmp_path / "run").relative_to(tmp_path)


def piped(*arguments: object, said: str = "what is a cat?\n") -> Result:
    """The command with its input from a pipe."""
    return CliRunner().invoke(app, ["chat", *map(str, arguments)], input=said)


def opened(folder: Path, **wishes: Any) -> ChatSession:
    """All of a chat but the talking."""
    found = resolve_models(folder, wishes.pop("stage", None), wishes.pop("step", "last"), wishes.pop("compare", None))
    return chat._load(found, chat._sampling(found.config, chat.ChatOptions(**wishes)), Options())


def refused(result: Result, code: str, *says: str, exit_code: int = 2) -> bool:
    """One error, with a hint at most, behind the opening."""
    first, *hints = result.stderr[result.stderr.index("error[") :].splitlines()
    assert first.startswith(f"error[{code}]: ") and all(hint.startswith("hint: ") for hint in hints), result.stderr
    return result.exit_code == exit_code and len(hints) <= 1 and all(text in result.stderr for text in says)


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_page_tells_every_command() -> None:
    page = (Path(__file__).parent.parent / "docs/commands.md").read_text(encoding="utf-8")
    for name, command in COMMANDS.items():
        assert f"`/{name} {command.argument}`".replace(" `", "`") in page, name


# The numbers


def test_the_numbers_are_the_evaluations(run: Path) -> None:
    """Each stored answer drawn again by chat's own engine, and scored by chat's own judge."""
    session = opened(run, compare="sft,ppo")
    stored = [row for row in lines(run / "eval/samples.jsonl") if row["mode"] == "sampled"]
    assert {row["model"] for row in stored} == {"sft", "ppo"} and any(abs(row["kl"]) > 0.1 for row in stored)
    for row in stored:
        model = next(model for model in session.models if model.name == row["model"])
        ids = session.prompt_format.encode(row["prompt"])
        asked = Prompts.from_lists([ids])
        asked = replace(asked, seeds=(derive_seed(0, "eval/sampled", 0, row["index"]),), response_length=12)
        response = list(HFEngine(model.model, session.stop_token_id, 0, session.sampling.temperature).stream(asked))
        assert session.prompt_format.tokenizer.decode(response, skip_special_tokens=True) == row["response"]
        numbers = session.scorer.score(model.model, row["prompt"], ids, response)
        assert numbers.scores == pytest.approx(row["scores"], abs=1e-5) and numbers.total is None
        assert (numbers.kl or 0.0) == pytest.approx(row["kl"], abs=1e-5)
        assert (numbers.kl is None) == (row["model"] == "sft")  # 0 by definition


def test_several_rewards_are_told_one_by_one_and_summed_as_ppo_does(run: Path) -> None:
    (run / "judges.py").write_text("def short(prompts, responses):\n    return [-len(text) for text in responses]\n")
    rewards = {
        "reward": {"clip": 0.25},
        "short": {"function": "judges:short", "weight": 0.5},
        "words": {"builtin": "length", "parameters": {"most": 1}, "weight": 0},
    }
    shutil.rmtree(run / "ppo")
    write(run, "ppo", {**PPO, "rewards": rewards})
    before = tree(run)
    result = piped(run, "--stage", "sft", "--temperature", "0")
    assert result.exit_code == 0, result.output
    (said,) = result.stdout.splitlines()
    told = dict(part.rsplit(" ", 1) for part in result.stderr.splitlines()[-1].split("  ")[:4])
    scores = {name: float(value) for name, value in told.items()}
    assert scores["short"] == -len(said) and scores["words"] == min(0, 1 - len(said.split()))
    assert scores["sum"] == pytest.approx(min(max(scores["reward"], -0.25), 0.25) + 0.5 * scores["short"], abs=1e-3)
    assert tree(run) == before  # no compiled judges.py either


PPO = {"data": {"prompts": "prompts.jsonl"}, "ppo": {"total_episodes": 32, "response_length": 12, "temperature": 0.7}}


def test_the_same_seed_draws_the_same_and_a_comparison_draws_alike(run: Path) -> None:
    said = "what is a cat?\nwhat is a cat?\n"
    alone = [piped(run, "--stage", "sft", said=said).stdout.splitlines() for _ in range(2)]
    assert alone[0] == alone[1] and alone[0][0] != alone[0][1]
    assert piped(run, "--stage", "sft", "--seed", "1", said=said).stdout.splitlines() != alone[0]
    both = piped(run, "--compare", "sft,ppo", said=said).stdout.splitlines()
    policy = piped(run, said=said).stdout.splitlines()
    pairs = zip(alone[0], policy, strict=True)
    assert both == [line for sft, ppo in pairs for line in (f"sft: {sft}", f"ppo: {ppo}")]
    other = piped(run, "--compare", "ppo,sft", said=said).stdout.splitlines()
    assert [other[1], other[0], other[3], other[2]] == both


# How prompts are written

LAST = {"role": "assistant", "content": "Bye."}
SAID = [("Hello, you.", " Hi there. "), ("And now?", "Bye.")]
REFUSES = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
REFUSES += "{% endfor %}"
IGNORES = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def form(chat_origin: Path, written: str | None, template: str | None = None) -> ConversationFormat:
    tokenizer = tokenizers.load_tokenizer(chat_origin / "sft/model", chat_template=template)
    return ConversationFormat.detect(written, tokenizer)


def turns() -> list[Turn]:
    how = SamplingParams(1.0, 9, 0)
    return [Turn(said, {"ppo": Reply(reply, 3, True, False, 1.0, how)}) for said, reply in SAID[:1]]


def dialogue() -> list[dict[str, str]]:
    return [
        {"role": "user", "content": SAID[0][0]},
        {"role": "assistant", "content": SAID[0][1]},
        {"role": "user", "content": SAID[1][0]},
    ]


@pytest.mark.parametrize(
    ("template", "row", "kind"),
    [
        ("chatml", {"prompt": dialogue()}, "template"),
        ("chatml", {"messages": [{"role": "system", "content": "Be kind."}, *dialogue(), LAST]}, "template"),
        (
            None,
            {"prompt": "\n\nHuman: Hello, you.\n\nAssistant:  Hi there. \n\nHuman: And now?\n\nAssistant:"},
            "transcript",
        ),
        ("chatml", {"prompt": "\n\nHuman: Hello, you.\n\nAssistant: ok\n\nHuman: And now?\n\nAssistant:"}, "template"),
        (None, {"prompt": "And now?"}, "text"),
        ("chatml", {"prompt": "And now?"}, "text"),
    ],
)
def test_a_prompt_has_the_ids_that_ppo_would_read(
    chat_origin: Path,
    tmp_path: Path,
    template: str | None,
    row: dict,
    kind: str,
) -> None:
    """Against `data.prompt_rows` of a file whose row says the same."""
    jsonl.write_jsonl(tmp_path / "prompts.jsonl", [row])
    made = form(chat_origin, data.prompt_form(tmp_path / "prompts.jsonl"), template)
    (wanted,) = data.prompt_rows(tmp_path / "prompts.jsonl", made.tokenizer, max_length=None)
    before = turns() if made.is_multi_turn else []
    if "Assistant: ok" in str(row):
        reply = replace(before[0].replies["ppo"], text="ok")
        before = [replace(before[0], replies={"ppo": reply})]
    system = "Be kind." if "messages" in row else None
    prompt = made.prompt(system, before, "ppo", "And now?")
    assert made.kind == kind and made.encode(prompt) == wanted.ids
    assert made.prompt(system, before, "sft", "And now?") != prompt or not made.is_multi_turn  # to each its own turns


@pytest.mark.parametrize(("template", "takes"), [("chatml", True), (REFUSES, False), (IGNORES, False), (None, False)])
def test_whether_a_system_prompt_reaches_the_model(chat_origin: Path, template: str | None, takes: bool) -> None:
    assert form(chat_origin, None, template).supports_system_prompt is takes


def test_what_the_trainings_prompts_were_is_unknown(chat_origin: Path) -> None:
    assert form(chat_origin, None, "chatml").kind == "template" and form(chat_origin, None).kind == "text"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of conversations without PPO. Not to be changed."""
    return make(tmp_path_factory.mktemp("chats"), template="chatml")


def test_a_conversation_goes_on_and_is_saved_as_messages(chats: Path, tmp_path: Path) -> None:
    said = f"/system Be kind.\nHello.\n/max 4\nAnd now?\n/retry\n/save {tmp_path / 'said.jsonl'}\n/clear\nAnd now?\n"
    result = piped(chats, said=said)
    assert result.exit_code == 0, result.output
    assert "no PPO policy: PPO was not started, so the SFT model replies" in result.stderr
    assert "prompts: the chat template, with the earlier turns" in result.stderr
    assert "temperature 0.7, at most 53 tokens, as in PPO" in result.stderr  # there is no ppo.yaml
    ((_, row),) = jsonl.read_jsonl(tmp_path / "said.jsonl")
    contents = [message["content"] for message in row["messages"]]
    assert contents[::2] == ["Be kind.", contents[2], contents[4]] and contents[1:4:2] == ["Hello.", "And now?"]
    first, second = row["chat"]["replies"]
    assert (first["max_new_tokens"], second["max_new_tokens"], second["draw"]) == (53, 4, 2) and second["length"] <= 4
    assert row["chat"]["model"] == "sft" and "kl" not in first and set(first["scores"]) == {"reward"}
    tokenizer = tokenizers.load_tokenizer(chats / "sft/model")
    again = data.sft_rows(tmp_path / "said.jsonl", tokenizer, max_length=None)
    (prompt,) = data.prompt_rows(tmp_path / "said.jsonl", tokenizer, max_length=None)
    assert len(again) == 2 and prompt.ids == data.encode(tokenizer, row["messages"][:4], None)[0]


def test_without_a_template_what_is_saved_is_prompts_and_completions(run: Path) -> None:
    result = piped(run, "--compare", "sft,ppo", said="a\nb\n/undo\n/save said.jsonl\n/save said.jsonl\n")
    assert refused(result, "C15", "said.jsonl exists already and is not overwritten")
    saved = lines(Path("said.jsonl"))
    assert [(row["prompt"], row["chat"]["model"], "kl" in row["chat"]) for row in saved] == [
        ("a", "sft", False),
        ("a", "ppo", True),
    ]
    tokenizer = tokenizers.load_tokenizer(run / "sft/model")
    assert len(data.sft_rows(Path("said.jsonl"), tokenizer, max_length=None)) == 2


# At a terminal


def test_a_talk(run: Path, tmp_path: Path) -> None:
    before = tree(run)
    with Terminal(run, cwd=tmp_path) as at:
        opening = at.until(PROMPT).replace("\r\n", " ")
        assert "ppo: run/ppo after update 4" in opening and "temperature 0.7, at most 12 tokens, as in PPO" in opening
        assert "reward (run/reward), KL from run/sft at temperature 0.7, in nats" in opening
        told = at.type("what is a cat?\r")
        assert "\x1b[2mreward " in told and "  KL " in told and "tokens/s\x1b[0m" in told  # dim
        assert "did you mean /temp?" in at.type("/tmep 0\r")
        assert "error[C06]: /temp x: a number from 0 up is needed" in at.type("/temp x\r")
        assert "/seed N" in at.type("/help\r")
        at.type("/temp 0\r")
        at.type(f"/max {CONTEXT - 100}\r")
        # While it is written, the first words of a long reply can be read, and the rest stopped.
        assert "tokens/s" not in at.type("a long story, if you please\r", "please\r\n") + at.until(" ")
        length = int(at.type("\x03").split(" tokens, stopped")[0].split()[-1])
        assert 0 < length < CONTEXT - 200
        assert "at most 3 tokens" in at.type("/max 3\r")
        at.type('"""\r', "... ")
        at.type("two\r", "... ")
        assert "3 tokens, cut off" in at.type('lines"""\r')
        assert "3 tokens, cut off" in at.type("\x1b[200~pasted\n/twice\x1b[201~\r")
        assert "3 tokens, cut off" in at.type("/retry\r")
        assert "saved: said.jsonl, 4 rows" in at.type("/save said.jsonl\r")
        assert "exists already and is not overwritten" in at.type("/save said.jsonl\r")
        at.type("half a li", "half a li")
        assert "Ctrl-C again, Ctrl-D or /quit ends the chat" in at.type("\x03")
        assert at.ends("\x04") == 0
    first, long, block, paste = lines(tmp_path / "said.jsonl")
    assert first["prompt"] == "what is a cat?" and block["prompt"] == "two\nlines"
    assert long["chat"]["length"] == length and long["completion"].strip()
    assert paste["prompt"] == "pasted\n/twice" and paste["chat"]["draw"] == 4  # the second reply to it
    assert tree(run) == before


def test_a_comparison_stands_side_by_side_and_a_second_ctrl_c_ends_it(run: Path, tmp_path: Path) -> None:
    with Terminal(run, "--compare", "sft,ppo", cwd=tmp_path, columns=110, NO_COLOR="1") as at:
        opening = at.until(PROMPT)
        assert "sft: run/sft" in opening and "ppo: run/ppo after update 4" in opening
        shown = at.type("what is a cat?\r").splitlines()
        (header, *_) = [line for line in shown if "sft" in line and "ppo" in line]
        assert header.index("ppo") - header.index("sft") >= 48
        sft, ppo = (line for line in shown if "  reward " in line)
        assert "sft  reward " in sft and "ppo  reward " in ppo
        assert "KL" not in sft and "  KL " in ppo
        assert "\x1b[2m" not in "".join(shown) and "\x1b[3" not in "".join(shown)  # neither dim nor coloured
        at.type("/temp 0\r")
        at.type(f"/max {CONTEXT - 100}\r")
        at.type("a long story\r", "a long story")
        at.until("ppo")
        assert "stopped" in at.type("\x03")
        assert at.ends("\x03") == 0


# Through a pipe


def test_replies_go_to_stdout_and_all_else_to_stderr(run: Path) -> None:
    before = tree(run)
    result = piped(run, said='what is a cat?\n\n/max 3\n"""\ntwo\nlines\n"""\n//etc\n/save said.jsonl\n/quit\nnever\n')
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 3 and "\x1b" not in result.output
    numbers = [line for line in result.stderr.splitlines() if line.startswith("reward ")]
    assert [line.split("  ")[2] for line in numbers[1:]] == ["3 tokens, cut off"] * 2
    assert ">" not in result.output and "Ctrl-C" not in result.output
    assert [row["prompt"] for row in lines(Path("said.jsonl"))] == ["what is a cat?", "two\nlines", "/etc"]
    assert tree(run) == before


def test_it_ends_when_nobody_reads_any_more(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = iter([True, True, False])
    monkeypatch.setattr(terminal, "is_stdout_open", lambda: next(heard))
    result = piped(run, said="a\nb\nc\n")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 2


def test_what_a_model_writes_does_nothing_to_a_terminal_and_letters_come_whole(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers.load_tokenizer(run / "sft/model")
    ids = tokenizer("a\x1b[31mé\x9b2J 🙂\r\x07b")["input_ids"]
    monkeypatch.setattr(HFEngine, "stream", lambda *_: iter([*ids, tokenizer.eos_token_id]))
    result = piped(run, said="what is a cat?\n/save said.jsonl\n")
    assert result.stdout == "a[31mé2J 🙂b\n" and f"{len(ids) + 1} tokens, ended" in result.stderr
    (kept,) = Path("said.jsonl").read_text().splitlines()
    assert "\\u001b[31mé\\u009b2J 🙂\\r\\u0007b" in kept  # as it was said, and harmless


def test_the_first_error_ends_it(run: Path) -> None:
    def said(text: str | bytes) -> Result:
        return CliRunner().invoke(app, ["chat", str(run)], input=text)

    assert (
        refused(said("a\n/tem 1\nb\n"), "C07", "did you mean /temp?") and said("a\n/tem 1\nb\n").stdout.count("\n") == 1
    )
    assert refused(said("/max 0\n"), "C06", "/max 0: a whole number from 1 up is needed")
    assert refused(said("/seed 4294967296\n"), "C06", "from 0 to 4294967295")
    assert refused(said("/temp nan\n"), "C06", "/temp nan: a number from 0 up is needed")
    assert refused(said("/retry\n"), "C11", "/retry: the conversation is empty")
    assert refused(said("/clear all\n"), "C11", "/clear takes no argument: all")
    assert refused(said("/system Be kind.\n"), "C11", "there is no chat template to take it")
    assert refused(said("a\n/save nowhere/said.jsonl\n"), "E03", "nowhere/said.jsonl cannot be written")
    assert refused(said("a\n/save ~nobody/\0\n"), "E03", "cannot be written: ")
    assert refused(said(b"a\ncaf\xe9\n"), "D04", "stdin:2: byte 0xE9 at position 4")
    assert refused(said('a\n"""b\n'), "C11", "stdin:2: the prompt that starts here has no closing")
    assert refused(said("cat " * CONTEXT), "C13", f"and the context of ppo has {CONTEXT}, reply included", "/clear")


def test_a_reward_that_fails_is_told_and_ends_nothing_at_a_terminal(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = opened(run)
    session.scorer.sources["reward"] = lambda rollout: float("nan")
    with pytest.raises(RLHFError, match="gave nan"):
        session.send("a")
    session.live = True
    session.send("a")
    assert "error[R05]: reward `reward` gave nan" in capsys.readouterr().err and len(session.turns) == 1
    assert session.turns[0].replies["ppo"].metrics == ReplyMetrics()


def interrupted(after: int) -> Any:
    """A stream of tokens in which somebody presses Ctrl-C."""

    def stream(*_: Any) -> Any:
        yield from range(30, 30 + after)
        raise KeyboardInterrupt

    return stream


def test_ctrl_c_keeps_what_was_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(run, compare="sft,ppo")
    monkeypatch.setattr(HFEngine, "stream", interrupted(3))
    with pytest.raises(KeyboardInterrupt):  # through a pipe it ends the command
        session.send("a")
    session.live = True
    session.send("a")
    assert session.stopped and [list(turn.replies) for turn in session.turns] == [["sft"]]
    (reply,) = session.turns[0].replies.values()
    assert (reply.length, reply.ended, reply.stopped) == (3, False, True) and "reward" in reply.metrics.scores
    monkeypatch.setattr(HFEngine, "stream", interrupted(0))
    session.send("b")
    session.retry()
    assert [turn.prompt for turn in session.turns] == ["a"] and session.turns[0].replies == {"sft": reply}

    def impatient(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session.scorer, "score", impatient)
    monkeypatch.setattr(HFEngine, "stream", interrupted(3))
    with pytest.raises(KeyboardInterrupt):  # the second one
        session.send("c")
    monkeypatch.setattr(HFEngine, "stream", lambda *_: iter([30]))
    session.send("c")
    assert session.turns[-1].replies["sft"].metrics == ReplyMetrics() and session.turns[-1].prompt == "c"


def test_a_reply_has_the_room_that_the_context_leaves(run: Path) -> None:
    session = opened(run, stage="sft", temperature=0.0, max_new_tokens=9)
    for room in (9, 4):
        said = "Z" * (CONTEXT - room)  # a token each: the tokenizer has never seen one
        assert len(session.prompt_format.encode(said)) == CONTEXT - room
        session.send(said)
    assert [turn.replies["sft"].length for turn in session.turns] == [9, 4]


# Which models


def test_what_is_not_as_it_was_in_training_is_left_out_and_said(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPO on whole models that no stage of ours made, with a function that only watches."""
    monkeypatch.chdir(run_folder)
    short = {"function": "judges:short", "weight": 0}
    write(run_folder, "ppo", {**ppo_folder.PPO, "rewards": {"reward": {}, "short": short}})
    assert ppo_folder.ppo(run_folder).exit_code == 0

    def numbers(**wishes: str) -> str:
        result = piped(".", *(f"--{name}={value}" for name, value in wishes.items()))
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith("sft: ") == bool(wishes)
        return result.stderr

    whole = numbers(compare="sft,ppo")
    assert "sft: sft_model" in whole and "reward (reward_model), short (judges:short), KL from sft_model" in whole
    assert "  short -" in whole and "sum" not in whole  # which is not optimised
    Path("judges.py").write_text("def short(prompts, responses):\n    return [1.0 for _ in responses]\n")
    replaced = load.load_causal_lm("sft_model")
    replaced.lm_head.weight.data += 0.1
    replaced.save_pretrained("sft_model")
    shutil.rmtree("reward_model")
    told = numbers()
    assert "no short: judges.py has changed since PPO was trained with it" in told
    assert "no KL: sft_model is no longer the model that PPO was trained with" in told
    assert "no reward: rewards.reward.model: no such folder reward_model" in told
    assert "below each reply" not in told and told.splitlines()[-1].split(" tok")[0].isdecimal()  # a length is left
    assert refused(piped(".", "--compare", "sft,ppo"), "M10", "is no longer the model")
    assert refused(piped(".", "--stage", "sft"), "M01", "holds no sft stage")


def test_what_cannot_be_talked_to(run: Path) -> None:
    assert refused(piped("nowhere"), "M01", "no such folder nowhere")
    assert refused(piped(run, "--step", "99"), "C06", "run/ppo has no policy of that step", "there are ")
    assert refused(piped(run, "--step", "best"), "C07", "--step best: not last, selected or a number")
    assert refused(piped(run, "--step", "selected"), "C06", "selected no policy")
    assert refused(piped(run, "--stage", "reward"), "C11", "run/reward is a reward model, which generates no text")
    assert refused(piped(run, "--compare", "sft,pp"), "C07", "pp is not one of sft, ppo", "did you mean ppo?")
    assert refused(piped(run, "--compare", "ppo,ppo"), "C11", "name two different models")
    assert refused(piped(run, "--compare", "sft,ppo", "--stage", "sft"), "C11", "both select the models")
    assert refused(piped(run, "--temperature", "inf"), "C06", "--temperature inf: a number from 0 up")
    assert refused(piped(run, "--temperature", "-1"), "C11", "--temperature")
    (run / "ppo/manifest.json").unlink()
    assert refused(piped(run), "M10", "run/ppo is not finished", "--stage sft")
    assert piped(run / "sft").exit_code == 0


def test_a_snapshot_and_a_stages_folder(run: Path) -> None:
    result = piped(run, "--step", "2", said="a\n/save said.jsonl\n")
    assert result.exit_code == 0 and "ppo: run/ppo after update 2" in result.stderr
    (row,) = lines(Path("said.jsonl"))
    assert row["chat"]["from"] == "run/ppo after update 2" and "sha256" not in row["chat"]
    last = piped(run / "ppo", said="a\n")
    assert last.exit_code == 0 and last.stdout == piped(run, said="a\n").stdout != result.stdout


def test_a_stage_that_runs_beside_it_is_not_in_the_way(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("no lock may be taken")

    monkeypatch.setattr(locks, "lock_folder", never)
    assert piped(run).exit_code == 0
