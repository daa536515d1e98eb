"""Labels by a judge: functions, reward models, and names that are none."""

import shutil
from pathlib import Path

import pytest
import stand_in_judge
import torch
import yaml
from label_run import label
from ppo_folder import fails, lines, must_succeed
from stand_in_judge import MODEL, stand_in
from transformers import AutoModelForSequenceClassification

from rlhf_cli import data
from rlhf_cli.judges import endpoint
from rlhf_cli.models import tokenizers

pytestmark = pytest.mark.full


@pytest.fixture
def run(label_origin: Path, here: Path) -> Path:
    return Path(shutil.copytree(label_origin, "run"))


@pytest.mark.parametrize(("judge", "name"), [("short", "short"), ("judges:short", "judges.short")])
def test_a_function_prefers_the_answer_with_the_higher_score(run: Path, judge: str, name: str) -> None:
    must_succeed(label(run, "--by", judge, "--n", 8))
    rows = lines(run / f"labels/{name}/labels.jsonl")
    assert len(rows) == 8 and {row["annotator"] for row in rows} == {judge}
    for row in rows:
        first, second = map(len, row["answers"])
        assert row["choice"] == ("tie" if first == second else "first" if first < second else "second")
    assert {tuple(row["order"]) for row in rows} == {(0, 1), (1, 0)}


def test_a_reward_model_prefers_the_answer_that_it_scores_higher(run: Path) -> None:
    must_succeed(label(run, "--by", "reward", "--n", 4))
    model = AutoModelForSequenceClassification.from_pretrained(run / "reward/model").eval()
    tokenizer = tokenizers.load_tokenizer(run / "sft/model")

    ended: dict[str, bool] = {}
    for row in lines(run / "labels/reward/candidates.jsonl"):
        ended.update(zip(row["answers"], row["ended"], strict=True))
    assert not all(ended.values())

    def score(prompt: str, answer: str) -> float:
        ids, response = data.encode(tokenizer, prompt, answer)
        if not ended[answer]:
            response = response[:-1]  # without a stop token
        with torch.no_grad():
            return float(model(torch.tensor([ids + response])).logits)

    for row in lines(run / "labels/reward/labels.jsonl"):
        first, second = (score(row["prompt"], answer) for answer in row["answers"])
        assert row["choice"] == ("first" if first > second else "second")


def test_an_answer_that_a_chat_template_cannot_render_is_encoded(run: Path) -> None:
    """Qwen3's template removes the thoughts of earlier turns; a policy may also sample the tags of one."""
    tokenizer = tokenizers.load_tokenizer(run / "sft/model")
    tokenizers.set_chat_template(tokenizer, "chatml")
    content = "message['content']"
    tokenizer.chat_template = tokenizer.chat_template.replace(content, f"{content}.split('</think>')[-1]")
    prompt = [{"role": "user", "content": "hi"}]
    answer = "<think>a</think> b </think> c"
    _, whole = data.encode_answer(tokenizer, prompt, answer, ended=True)
    _, cut = data.encode_answer(tokenizer, prompt, answer, ended=False)
    assert whole[:-1] == cut and tokenizer.decode(cut) == answer


def test_a_language_model_labels_by_both_orders_and_is_not_asked_twice(run: Path) -> None:
    def longer(prompt: str, first: str, second: str) -> str:
        return "tie" if len(first) == len(second) else "1" if len(first) > len(second) else "2"

    with stand_in(longer) as server:
        settings = yaml.safe_load((run / "eval.yaml").read_text())
        judge = {"url": server.url, "model": MODEL, "probe": False, "max_calls": 12}
        settings["judges"]["llm"] = {"openai": judge}
        (run / "eval.yaml").write_text(yaml.safe_dump(settings))
        too_many = label(run, "--by", "llm", "--n", 7)
        assert too_many.exit_code == 2 and "error[C17]" in too_many.stderr and "set max_calls: 14" in too_many.stderr
        assert not server.requests and not (run / "labels").exists()
        output = must_succeed(label(run, "--by", "llm", "--n", 6)).stderr
        assert "label    judge llm: at most 12 calls, about " in output and "label    judge llm: 12 calls now" in output
        rows = lines(run / "labels/llm/labels.jsonl")
        asked = len(server.requests)
        must_succeed(label(run, "--by", "llm", "--n", 6, "--name", "again"))
        assert len(server.requests) == asked

    assert len(rows) == 6
    for row in rows:
        first, second = (len(answer.strip()) for answer in row["answers"])
        assert row["choice"] == ("tie" if first == second else "first" if first > second else "second")


@pytest.mark.slow
def test_each_fault_of_a_language_model_is_one_line_and_no_answer_is_lost(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.01)
    faults = {
        stand_in_judge.nonsense: "J01",
        stand_in_judge.prose: "J01",
        stand_in_judge.busy_for_an_hour: "J03",
        stand_in_judge.broken: "J03",
        stand_in_judge.slow: "J03",
        stand_in_judge.closed: "J03",
        lambda body: stand_in_judge.failure(404, "The model does not exist."): "J03",
    }
    with stand_in() as server:
        settings = yaml.safe_load((run / "eval.yaml").read_text())
        judge = {"url": server.url, "model": MODEL, "probe": False, "concurrency": 1, "max_wait": 0.3, "timeout": 0.4}
        settings["judges"]["llm"] = {"openai": judge}
        (run / "eval.yaml").write_text(yaml.safe_dump(settings))
        for number, (fault, code) in enumerate(faults.items(), start=1):
            server.faults = [lambda body: None]
            server.every = fault
            result = label(run, "--by", "llm", "--n", 8)
            assert result.exit_code == 1 and result.stderr.count(f"error[{code}]: judge llm: ") == 1, result.stderr
            assert len(stand_in_judge.answered(run)) == number

        server.every = stand_in_judge.without_schema
        server.faults = [stand_in_judge.busy] * 2
        server.requests.clear()
        must_succeed(label(run, "--by", "llm", "--n", 8))
        assert len(lines(run / "labels/llm/labels.jsonl")) == 8
        assert len(server.requests) == len(stand_in_judge.answered(run)) - len(faults) + 1 + 2  # one with a schema

        (run / "judges/llm.jsonl").unlink()
        server.every = lambda body: stand_in_judge.too_long(body, 0)
        must_succeed(label(run, "--by", "llm", "--n", 8, "--name", "long"))
        assert {row["choice"] for row in lines(run / "labels/long/labels.jsonl")} <= {"skip", "tie"}


def test_a_judge_that_is_ended_continues_behind_its_last_label(run: Path) -> None:
    must_succeed(label(run, "--by", "short", "--n", 8))
    path = run / "labels/short/labels.jsonl"
    whole = lines(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    must_succeed(label(run, "--by", "short", "--n", 8))
    assert [(row["pair"], row["choice"]) for row in lines(path)] == [(row["pair"], row["choice"]) for row in whole]


def test_people_are_no_judge_that_labels(run: Path) -> None:
    settings = yaml.safe_load((run / "eval.yaml").read_text())
    settings["judges"]["people"] = {"labels": "labels/compare"}
    (run / "eval.yaml").write_text(yaml.safe_dump(settings))
    fails(label(run, "--by", "people"), "C07", "--by people: not one of short, reward")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--by", "shrt"], "C07", "did you mean"),
        (["--by", "judges:missing"], "C17", "cannot import"),
        (["--by", "short", "--import", "x", "--format", "argilla"], "C11", "nor asks a judge"),
        (["--by", "short", "--terminal"], "C11", "either a judge labels or people do"),
    ],
)
def test_a_judge_that_cannot_label_is_refused(run: Path, arguments: list[str], code: str, says: str) -> None:
    result = label(run, *arguments)
    assert result.exit_code == 2 and f"error[{code}]" in result.stderr and says in result.stderr
    assert not (run / "labels").exists()  # before anything is drawn
