"""A language model as a reward of `rlhf ppo`, which a stand-in plays: what it is asked, faults, kills, processes.

Modules: `stages/ppo/reward_judges.py`, `stages/ppo/sft_answers.py`.
"""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stand_in_judge
from group import child, command
from ppo_folder import PPO, PROMPTS, fails, lines, must_succeed, ppo, rlhf, settings, untimed, weights, write
from run_cli import forked
from stand_in_judge import MODEL, StandIn

from rlhf_cli.errors import RLHFError
from rlhf_cli.judges import endpoint
from rlhf_cli.judges.answers import Answer, AnswerFile
from rlhf_cli.models.parallel import SINGLE_PROCESS
from rlhf_cli.stages.ppo.sft_answers import SFTAnswers

pytestmark = pytest.mark.full
# Two updates of eight responses, and eight of the finished policy, in both orders.
CALLS = 2 * (16 + 8)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with stand_in_judge.stand_in(stand_in_judge.longer) as server:
        yield server


def judged(folder: Path, server: StandIn, *, weight: float = 1.0, **openai: Any) -> Path:
    """Return the folder, whose ppo.yaml has the judge as its only reward."""
    judge = {"openai": {"url": server.url, "model": MODEL, **openai}, "weight": weight}
    keys = {**PPO["ppo"], "total_episodes": 16, "num_sample_generations": 1}
    write(folder, "ppo", {**PPO, "rewards": {"llm": judge}, "ppo": keys})
    return folder


def texts_of(bodies: list[Any]) -> set[tuple[str, str, str]]:
    """Return prompt, first and second answer of each request about the run's prompts."""
    found = set()
    for body in bodies:
        match = stand_in_judge.TEXTS.search(body["messages"][0]["content"])
        assert match
        if match[1].startswith("tell me about"):
            found.add((match[1], match[2], match[3]))
    return found


@pytest.fixture(scope="module")
def straight(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], str]:
    """A run with a judge that is asked one question at a time, the requests, and what was printed."""
    folder = Path(shutil.copytree(origin, tmp_path_factory.mktemp("judged") / "run"))
    with pytest.MonkeyPatch.context() as patch, stand_in_judge.stand_in(stand_in_judge.longer) as server:
        patch.delenv("OPENAI_API_KEY", raising=False)
        result = must_succeed(ppo(judged(folder, server, concurrency=1)))
        return folder, list(server.requests), result.stderr


def results(folder: Path) -> list[Any]:
    """Return all that a run with a judge leaves, but for times."""
    files = ["ppo/sft_answers.jsonl", "ppo/samples.jsonl"]
    contents = [(folder / name).read_bytes() for name in files]
    logged = untimed(folder / "ppo/metrics.jsonl")
    return [weights(folder), weights(folder, "value"), logged, *contents, stand_in_judge.answered(folder)]


def test_each_response_is_compared_with_the_sft_models_answer_in_both_orders(
    straight: tuple[Path, list[Any], str],
) -> None:
    folder, requests, output = straight
    rows = lines(folder / "ppo/sft_answers.jsonl")
    answers = {row["prompt"]: row["answer"].strip() for row in rows}
    assert set(answers) <= set(PROMPTS) and len(answers) == len(rows)

    shown = texts_of(requests)
    assert {(prompt, second, first) for prompt, first, second in shown} == shown
    assert all(answers[prompt] in (first, second) for prompt, first, second in shown)
    scores = set()
    for row in lines(folder / "ppo/samples.jsonl"):
        ours, theirs = len(row["response"].strip()), len(answers[row["prompt"]])
        assert row["scores"]["llm"] == (ours > theirs) - (ours < theirs), row
        scores.add(row["scores"]["llm"])
    assert len(scores) > 1 and len(requests) <= 28 + CALLS
    assert f"ppo      judge llm: {len(requests)} calls now; all answers together took " in output
    assert "; both orders agree on 1.000 of " in output


def test_a_run_that_is_killed_between_two_answers_ends_in_the_same_bytes(
    straight: tuple[Path, list[Any], str], run_folder: Path, server: StandIn
) -> None:
    whole, requests, _ = straight
    judged(run_folder, server, concurrency=1)
    for answers in (28 + 5, 28 + 5 + 20):  # in the first update, and in another one

        def die_after(answers: int = answers) -> None:
            add = AnswerFile.add

            def add_or_die(file: AnswerFile, key: str, answer: Answer) -> None:
                add(file, key, answer)
                if len(lines(file.path)) == answers:
                    os.kill(os.getpid(), signal.SIGKILL)

            AnswerFile.add = add_or_die  # type: ignore[method-assign]  # in a fork alone

        assert forked("ppo", "-c", run_folder / "ppo.yaml", before=die_after).returncode == -signal.SIGKILL
        assert len(lines(run_folder / "judges/llm.jsonl")) == answers
    result = must_succeed(ppo(run_folder))
    assert results(run_folder) == results(whole)
    assert len(server.requests) == len(requests), "nothing is asked twice"
    assert "answers were on disk" in result.stderr


def test_an_answer_of_the_sft_model_is_of_its_prompt_and_seed(
    straight: tuple[Path, list[Any], str], run_folder: Path, server: StandIn
) -> None:
    def answers(folder: Path, *options: str) -> dict[str, str]:
        must_succeed(ppo(folder, *settings("total_episodes=4", "gradient_accumulation_steps=1", *options)))
        return {row["key"]: row["answer"] for row in lines(folder / "ppo/sft_answers.jsonl")}

    whole = {row["key"]: row["answer"] for row in lines(straight[0] / "ppo/sft_answers.jsonl")}
    judged(run_folder, server, probe=False)
    other_batch = answers(run_folder, "models.adapters={kind: lora}")
    both = whole.keys() & other_batch.keys()
    assert both and {key: whole[key] for key in both} == {key: other_batch[key] for key in both}


def test_the_file_of_sfts_answers_is_read_but_for_an_unfinished_line(
    straight: tuple[Path, list[Any], str], tmp_path: Path
) -> None:
    whole = (straight[0] / "ppo/sft_answers.jsonl").read_bytes()
    path = tmp_path / "sft_answers.jsonl"
    trainer: Any = SimpleNamespace(process_group=SINGLE_PROCESS)
    last = lines(straight[0] / "ppo/sft_answers.jsonl")[-1]["prompt"]
    path.write_bytes(whole[:-1])  # without its line break
    answers = SFTAnswers(path, trainer, None, None)  # type: ignore[arg-type]  # nothing is drawn
    assert path.read_bytes() == whole and answers.answer(last)

    path.write_bytes(whole[:-20])
    answers = SFTAnswers(path, trainer, None, None)  # type: ignore[arg-type]
    assert whole.startswith(path.read_bytes()) and path.read_bytes().endswith(b"\n")
    with pytest.raises(KeyError):
        answers.answer(last)

    path.write_bytes(whole + b'{"key": 1}\n')
    with pytest.raises(RLHFError, match="not an answer of SFT"):
        SFTAnswers(path, trainer, None, None)  # type: ignore[arg-type]
    path.unlink()
    path.symlink_to(straight[0] / "ppo/sft_answers.jsonl")
    with pytest.raises(RLHFError) as caught:
        SFTAnswers(path, trainer, None, None)  # type: ignore[arg-type]
    assert caught.value.problems[0].code == "S03"


def test_a_chat_says_why_it_shows_no_score_of_it(straight: tuple[Path, list[Any], str]) -> None:
    result = rlhf("chat", straight[0], input="tell me about the sea number 1\n")
    assert "no llm: it compares an answer with the SFT model's" in must_succeed(result).output


FAULTS = [
    (stand_in_judge.nonsense, "answers '{\"winner\":', and not one of"),
    (stand_in_judge.prose, "answers 'Both answers have their merits"),
    (stand_in_judge.busy_for_an_hour, "answered 429: 'rate limit reached', and asks to wait 3600 s (1 try"),
    (stand_in_judge.broken, "answered 500: 'internal error' ("),
    (stand_in_judge.slow, "gave no answer within 0.4 s ("),
    (stand_in_judge.closed, "cannot be reached: Server disconnected"),
    (lambda body: stand_in_judge.failure(404, "The model does not exist."), "answered 404: 'The model does not"),
]


@pytest.mark.slow
def test_each_fault_ends_an_update_with_one_line_and_the_same_command_resumes(
    straight: tuple[Path, list[Any], str], run_folder: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.01)
    whole, requests, _ = straight
    judged(run_folder, server, concurrency=1, max_wait=0.3, timeout=0.4)
    server.faults = [lambda body: None] * 28  # the probe
    for number, (fault, says) in enumerate(FAULTS, start=1):
        server.faults += [lambda body: None] * 5
        server.every = fault
        result = ppo(run_folder)
        fails(result, "R05", "reward `llm`: judge llm: ", says, exit_code=1)
        assert len(stand_in_judge.answered(run_folder)) == 28 + 5 * number, "the answers before it are kept"

    server.requests.clear()
    server.every = stand_in_judge.without_schema  # and two that are no errors
    server.faults = [stand_in_judge.busy] * 2
    must_succeed(ppo(run_folder))
    refused = [body for body in server.requests if "response_format" in body]
    assert results(run_folder) == results(whole)
    assert len(server.requests) == len(requests) - 28 - 5 * len(FAULTS) + 1 + 2 and len(refused) == 1 + 2


def test_a_judge_that_prefers_a_place_ends_the_run_before_its_first_update(run_folder: Path, server: StandIn) -> None:
    server.every = stand_in_judge.same_slot
    fails(ppo(judged(run_folder, server)), "J02", "16 of 16 pairs", exit_code=1)
    assert len(server.requests) == 28 and not (run_folder / "ppo/metrics.jsonl").exists()


def test_a_response_that_is_too_long_for_the_judge_has_no_score(run_folder: Path, server: StandIn) -> None:
    server.every = lambda body: stand_in_judge.too_long(body, 0 if "the sea" in str(body["messages"]) else 9999)
    judged(run_folder, server, probe=False)
    result = ppo(run_folder)
    fails(result, "R05", "no reward has a score for row", "too long for a judge has none", exit_code=1)
    assert result.stderr.count("judge llm: pairs that are too long for it are skipped: ") == 1
    must_succeed(ppo(run_folder, "--fresh", "-s", "rewards.brief={builtin: length, parameters: {most: 3}}"))
    shares = [row["objective/unscored/llm"] for row in lines(run_folder / "ppo/metrics.jsonl")]
    assert max(shares) > 0 and max(shares) < 1


def test_check_and_plan_say_the_calls_and_refuse_more(run_folder: Path, server: StandIn) -> None:
    judged(run_folder, server)
    assert f"at most {28 + CALLS} calls, about " in must_succeed(rlhf("check", run_folder / "ppo.yaml")).stdout
    plan = json.loads(must_succeed(rlhf("plan", run_folder / "ppo.yaml", "--json")).stdout)["stages"]["ppo"]
    assert plan["judges"]["llm"]["calls"] == 28 + CALLS
    of_two = 28 + 2 * (16 + 16)  # one update of both processes
    assert f"at most {of_two} calls" in must_succeed(rlhf("check", run_folder / "ppo.yaml", "--nproc", 2)).stdout
    text = must_succeed(rlhf("plan", run_folder / "ppo.yaml", "--nproc", 2)).stdout
    assert f"at most {of_two} calls" in text
    assert "its answers take time that is not counted above: at most 12 s for each second of a call, 8 at once" in text
    tables = ("num_sample_generations=2", "generate_ref_response=true", f"data.eval_prompts={run_folder}/heldout.jsonl")
    more = must_succeed(rlhf("check", run_folder / "ppo.yaml", *settings(*tables))).stdout
    assert f"at most {28 + CALLS + 2 * 2 * 2 * 8} calls" in more
    for stage in ("check", "ppo"):
        for value, says in (("max_calls=75", "are 76 calls"), ("key_env=NOT_SET", "NOT_SET is not set")):
            fails(rlhf(stage, run_folder / "ppo.yaml", "-s", f"rewards.llm.openai.{value}"), "C17", says)
    assert server.requests == [] and not (run_folder / "judges").exists()


def test_a_finished_run_is_verified_without_a_call_and_resumes_at_another_address(
    straight: tuple[Path, list[Any], str], tmp_path: Path, server: StandIn
) -> None:
    folder = Path(shutil.copytree(straight[0], tmp_path / "run"))
    judged(folder, server, concurrency=2)
    assert "finished already" in must_succeed(ppo(folder)).stderr
    before = results(folder)
    must_succeed(rlhf("verify", folder, "--step", "1"))
    assert server.requests == [] and results(folder) == before


@pytest.mark.distributed
@pytest.mark.parametrize("fsdp", ["false", "true"])
def test_two_processes_draw_and_one_asks(run_folder: Path, server: StandIn, fsdp: str) -> None:
    folder = judged(run_folder, server)
    must_succeed(child(*command(folder / "ppo.yaml", *settings(f"fsdp={fsdp}"))))
    assert len({body["messages"][0]["content"] for body in server.requests}) == len(server.requests)
    one = {row["key"]: row["answer"] for row in lines(folder / "ppo/sft_answers.jsonl")}
    must_succeed(ppo(folder, "-s", f"run={folder}/other", *settings("gradient_accumulation_steps=4")))
    other = {row["key"]: row["answer"] for row in lines(folder / "other/ppo/sft_answers.jsonl")}
    assert one == other
