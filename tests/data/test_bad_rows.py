"""Bad data through the real CLI: each says code, place and fix in a line or two, and exits as promised."""

import os
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import check, foreign_scorer, refused, replace, rlhf, warned

from rlhf_cli import jsonl
from rlhf_cli.models.tokenizers import CHATML

GOOD = {"prompt": "Tell me about the sun.", "completion": " The sun is bright."}
PAIR = {"prompt": "Tell me about the sun.", "chosen": " It is bright.", "rejected": " It is dull."}
DROP = "hint: correct the row, or set data.on_bad: drop"


def write(name: str, *contents: Any) -> None:
    jsonl.write_jsonl(Path(f"{name}.jsonl"), contents)


@pytest.mark.parametrize("name", ["/dev/null", "pipe.jsonl"])
def test_d01_not_a_file(folder: Path, name: str) -> None:
    os.mkfifo(folder / "pipe.jsonl")
    replace("sft.yaml", "rows.jsonl", name)
    assert refused(rlhf("sft"), "D01", "sft.yaml:2: ", f"{name} is a device or a pipe, a data file is needed")


def test_d02_column_missing(folder: Path) -> None:
    jsonl.write_jsonl(folder / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "worse": "c"}])
    assert refused(rlhf("reward"), "D02", "pairs.jsonl", "e.g. data.columns: {rejected: worse}")
    jsonl.write_jsonl(folder / "pairs.jsonl", [{"prompt": "a", "chosen": "b"}])  # never one that has its place already
    assert refused(rlhf("reward"), "D02", "pairs.jsonl", "e.g. data.columns: {rejected: NAME}")


ASKED, ANSWERED = {"from": "human", "value": "Tell me about the sun."}, {"from": "gpt", "value": "It is bright."}
WORSE = {"from": "gpt", "value": "It is dull."}
ALPACA = {"instruction": "Tell me about it.", "input": "The sun.", "output": "It is bright."}
RANKED = {"instruction": "Tell me about it.", "input": "", "chosen": "It is bright.", "rejected": "It is dull."}


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "row", "columns"),
    [
        ("sft", {"conversations": [ASKED, ANSWERED]}, ""),
        ("sft", {"messages": [ASKED, ANSWERED]}, ""),
        ("sft", {"dialog": [ASKED, ANSWERED]}, "{messages: dialog}"),
        ("sft", ALPACA, ""),
        ("sft", RANKED, "{completion: chosen}"),
        ("reward", {"conversations": [ASKED], "chosen": ANSWERED, "rejected": WORSE}, ""),
        ("reward", {**RANKED, "margin": 1.5}, ""),
    ],
)
def test_rows_of_sharegpt_and_alpaca_are_read_as_they_are(
    folder: Path, stage: str, row: dict[str, Any], columns: str
) -> None:
    (folder / "model/chat_template.jinja").write_text(CHATML.replace("<|im_end|>", "<eos>"))
    write("theirs", *[row] * 64)
    options = ["-s", "data.train=theirs.jsonl"]
    if columns == "{completion: chosen}":
        assert refused(rlhf(stage, *options), "D02", "theirs.jsonl:1", f"e.g. data.columns: {columns}")
    done = check(f"{stage}.yaml", *options, *(["-s", f"data.columns={columns}"] if columns else []))
    assert done.exit_code == 0 and "64 rows" in done.output, done.output
    assert "theirs.jsonl: ShareGPT or Alpaca, read as {" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("row", "code", "says"),
    [
        ({"instruction": "hi", "input": 3, "output": "yo"}, "D06", '"input" is the number 3'),
        ({"instruction": "hi", "output": None}, "D06", '"output" is null'),
        ({**ALPACA, "system": 3}, "D06", '"system" is the number 3'),
        ({**ALPACA, "history": [["a"]]}, "D12", "[['a']]"),
        ({**ALPACA, "history": 1}, "D12", "history"),
        ({**ALPACA, "history": [["a", None]]}, "D06", '"history" is null'),
        ({"conversations": [{**ASKED, "value": None}, ANSWERED]}, "D06", '"value" is null'),
        ({"conversations": [{**ASKED, "from": ["human"]}, ANSWERED]}, "D12", "is not a turn of"),
        ({"prompt": "a"}, "D12", "columns prompt match neither"),
        ({"text": "a"}, "D12", "columns text match neither"),
        ({"conversations": [ASKED, {"from": "tool", "value": "1"}]}, "D12", "is not a turn of"),
        ({"conversations": [ASKED]}, "D09", '"messages" has no assistant message'),
    ],
)
def test_a_row_that_cannot_be_converted_is_reported_by_line(
    folder: Path, row: dict[str, Any], code: str, says: str
) -> None:
    write("theirs", ALPACA, row)
    assert refused(rlhf("sft", "-s", "data.train=theirs.jsonl"), code, "theirs.jsonl:2", says)


TWICE = '{"prompt": "a", "completion": "b", "prompt" : "c"}'
LIKE_A_KEY = r'{"prompt": "\":\":\" a", "completion": "b"}'
OTHER_TYPES = {"prompt": [], "completion": "a"}
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
# stage, overrides, the file as rows or as bytes, code, place, what the message says
BAD_DATA = [
    ("sft", ["data.train=row.jsonl"], [GOOD], "D01", "--set data.train: ", ("hint: did you mean rows.jsonl?",)),
    ("sft", [], b'{"prompt": "a", "completion": "b"}\n{"prompt": "a" "completion": "b"}\n', "D03",
     "rows.jsonl:2:16: ", ()),
    ("sft", [], f"{LIKE_A_KEY}\n{TWICE}\n".encode(), "D03", "rows.jsonl:2: ",
     ('the key "prompt" occurs twice in one object', "hint: remove one of the two")),
    ("sft", [], b'{"prompt": "a", "completion": "b"}\n{"prompt": "\xe9t\xe9"}\n', "D04", "rows.jsonl:2: ",
     ("byte 0xE9 at position 13", "hint: convert", "iconv")),
    ("reward", [], [ALPACA], "D02", "pairs.jsonl:1", ("hint: each row has one answer, but a pair needs two",)),
    ("sft", ["sft.max_length=2"], [GOOD] * 8, "D05", "rows.jsonl", ("8 read", "longer than 2 tokens")),
    ("sft", [], [GOOD, {**GOOD, "completion": None}], "D06", "rows.jsonl:2: ", ('"completion" is null', DROP)),
    ("sft", [], [GOOD, {**GOOD, "prompt": 7}], "D06", "rows.jsonl:2: ", ('"prompt" is the number 7', DROP)),
    ("reward", [], [PAIR, {**PAIR, "rejected": PAIR["chosen"]}], "D07", "pairs.jsonl:2: ",
     ('"chosen" equals "rejected"', "data.on_identical")),
    ("sft", [], [GOOD, {**GOOD, "prompt": " "}], "D08", "rows.jsonl:2: ", ("the prompt is empty", DROP)),
    ("reward", [], [{"chosen": "Yes.", "rejected": "No."}], "D08", "pairs.jsonl:1: ",
     ("the prompt is empty", "no common prefix", "hint: add a prompt column, or")),
    ("sft", [], [GOOD, {**GOOD, "completion": ""}], "D09", "rows.jsonl:2: ", ('"completion" is empty', DROP)),
    ("sft", [], [GOOD, {**GOOD, "completion": "<eos>"}], "D09", "rows.jsonl:2: ",
     ("no tokens besides the stop token", DROP)),
    ("reward", [], [PAIR, {**PAIR, "chosen": "\n"}], "D09", "pairs.jsonl:2: ", ('"chosen" is empty', DROP)),
    ("sft", [], [GOOD, {"prompt": "a"}], "D12", "rows.jsonl:2: ", ('no column "completion"', "line 1 has one", DROP)),
    ("sft", [], [GOOD, OTHER_TYPES], "D12", "rows.jsonl:2: ", ("a conversation here, text in line 1", DROP)),
    ("sft", [], [{"messages": TURNS}] * 8, "D14", "rows.jsonl:1: ",
     ("no chat template", "hint: set model.chat_template")),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("stage", "overrides", "content", "code", "place", "says"), BAD_DATA)
def test_bad_data_is_reported_by_line(
    folder: Path, stage: str, overrides: list[str], content: Any, code: str, place: str, says: tuple[str, ...]
) -> None:
    name = {"sft": "rows", "reward": "pairs"}[stage]
    if isinstance(content, bytes):
        Path(f"{name}.jsonl").write_bytes(content)
    else:
        write(name, *content)
    result = rlhf(stage, *(word for override in overrides for word in ("-s", override)))
    assert refused(result, code, place, *says) and result.stderr.count("error[") == 1


def test_t08_a_message_that_the_template_leaves_out(folder: Path) -> None:
    template = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    (folder / "model/chat_template.jinja").write_text(template)
    write("rows", {"messages": [TURNS[0], {"role": "tool", "content": "It is 7."}, TURNS[1]]})
    says = ('leaves out the text of message 2, of the role "tool"', "hint: use the roles user, assistant and system")
    assert refused(rlhf("sft"), "T08", "rows.jsonl:1: ", *says)


def test_d03_a_duplicate_key_in_a_list(folder: Path) -> None:
    (folder / "rows.json").write_text(f"[{LIKE_A_KEY}, {TWICE}]")
    assert refused(rlhf("sft", "-s", "data.train=rows.json"), "D03", "rows.json:1: ", 'the key "prompt" occurs twice')


def test_bad_rows_are_shown_up_to_five_and_counted(folder: Path) -> None:
    write("rows", GOOD, *[{**GOOD, "prompt": ""}] * 7)
    result = rlhf("sft")
    assert refused(result, "D08", "rows.jsonl:2: ", "7 of 8 rows are bad; the first 5 are shown", "data.on_bad: drop")
    assert result.stderr.count("error[D08]") == 6


def test_d10_rows_that_are_too_long(folder: Path) -> None:
    long = {**GOOD, "completion": " The sun is bright." * 9}
    write("rows", *[GOOD] * 8, long, long)
    replace("sft.yaml", "max_steps: 1", "max_length: 30")
    says = ("2 of 10 rows dropped: longer than 30 tokens (first: line 9); the longest has ", "data.on_long: error")
    assert warned(check("sft.yaml"), "D10", "rows.jsonl: ", *says)
    result = rlhf("sft", "-s", "data.on_long=error")
    assert refused(result, "D10", "rows.jsonl:9: ", "the limit is 30", "hint: set data.on_long: drop")


@pytest.mark.parametrize(("stage", "name", "row"), [("sft", "rows", GOOD), ("reward", "pairs", PAIR)])
def test_d11_fewer_rows_than_an_optimizer_step_takes(folder: Path, stage: str, name: str, row: dict[str, str]) -> None:
    write(name, *[{**row, "prompt": f"{number}"} for number in range(20)])
    says = (
        f"{name}.jsonl has 20 usable rows, fewer than one optimizer step takes (8 x 4 = 32 usable rows)",
        f"hint: set {stage}.gradient_accumulation_steps to 2 at most",
    )
    result = rlhf(stage, "-s", f"{stage}.gradient_accumulation_steps=4")
    assert refused(result, "D11", f"{stage}.yaml:3: ", *says)


def test_d11_fewer_prompts_than_an_update_takes(folder: Path) -> None:
    foreign_scorer(folder)
    write("prompts", *[{"prompt": f"{number}"} for number in range(20)])
    says = ("20 usable prompts, fewer than one update takes (16 x 4 episodes = 64)", "hint: lower", "bring 64 prompts")
    assert refused(rlhf("ppo"), "D11", "ppo.yaml:3: ", *says)


@pytest.mark.parametrize(
    ("stage", "key", "row"),
    [
        ("sft", "train: rows.jsonl, eval", GOOD),
        ("reward", "train: pairs.jsonl, eval", PAIR),
        ("ppo", "prompts: prompts.jsonl, eval_prompts", GOOD),
    ],
)
def test_d13_evaluation_prompts_that_are_trained_on(folder: Path, stage: str, key: str, row: dict[str, str]) -> None:
    foreign_scorer(folder)
    write("held-out", row, {**row, "prompt": "Something else?"})
    replace(f"{stage}.yaml", key.rpartition(",")[0], f"{key}: held-out.jsonl")
    says = f"1 of 2 evaluation prompts also occur in {key.split()[1].rstrip(',')}"
    assert warned(check(f"{stage}.yaml"), "D13", f"{stage}.yaml:2: ", says, "hint: remove them")


def test_d15_pairs_that_repeat_or_contradict_another(folder: Path) -> None:
    turned = {**PAIR, "chosen": PAIR["rejected"], "rejected": PAIR["chosen"]}
    write("pairs", PAIR, *[{**PAIR, "prompt": f"{number}"} for number in range(7)], PAIR, turned)
    result = check("reward.yaml")
    assert warned(result, "D15", "pairs.jsonl: ", "1 of 10 pairs occur twice in the file (first: line 1 and line 9)")
    says = "1 of 10 pairs contradict another pair, with chosen and rejected swapped (first: line 1 and line 10)"
    assert says in result.stderr
