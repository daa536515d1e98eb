"""Bad config files and overrides: syntax, unsafe content, secrets; all problems at once, and never a traceback."""

import random
import time
from pathlib import Path

import pytest
from bad_configs import HEAD, messages, only

from rlhf_cli.config.loading import keys, load
from rlhf_cli.config.training import CONFIGS
from rlhf_cli.errors import RLHFError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_problems_come_at_once_in_the_order_of_the_file() -> None:
    ppo = "ppo:\n  gamma: 2\n  kl_coeff: 1\n  lam: x\n  lam: 1\n  fp16: true\n"
    text = f"{HEAD['ppo']}{ppo}output: {{keep: 1}}\nsede: 3\n"
    found = [message.split(": ")[0:2] for message in messages("ppo", text, "data.prompt=x", "no")]
    assert found == [
        ["error[C06]", "ppo.yaml:4"], ["error[C01]", "ppo.yaml:5"], ["error[C05]", "ppo.yaml:6"],
        ["error[C03]", "ppo.yaml:7"], ["error[C17]", "ppo.yaml:8"],
        ["error[C06]", "ppo.yaml:9"], ["error[C01]", "ppo.yaml:10"],
        ["error[C11]", "--set no"], ["error[C01]", "--set data.prompt"],
    ]  # fmt: skip


def test_a_duplicate_key_names_the_first_line() -> None:
    text = f"{HEAD['sft']}seed: 1\nsft: {{packing: true, packing: false}}\nseed: 2\n"
    assert messages("sft", text) == [
        "error[C03]: sft.yaml:4: duplicate key sft.packing, first set on line 4\nhint: keep one of the two lines",
        "error[C03]: sft.yaml:5: duplicate key seed, first set on line 3\nhint: keep one of the two lines",
    ]


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (
            "sft:\n\tpacking: true\n",
            "error[C08]: sft.yaml:2:1: tabs cannot be used for indentation or before a value\nhint: use spaces",
        ),
        ("sft: {packing: true\nseed: 1\n", "error[C08]: sft.yaml:2:5: not valid YAML: "),
        ("seed: 1\n  run: x\n", "error[C08]: sft.yaml:2:6: not valid YAML: mapping values are not allowed here"),
        ("a: [1, 2\n", "error[C08]: sft.yaml:2:1: not valid YAML: "),
        ("a: &x 1\nb: *y\n", "error[C08]: sft.yaml:2:4: not valid YAML: found undefined alias"),
        ("a: 1\n---\nb: 2\n", "error[C08]: sft.yaml:2:1: not valid YAML: but found another document"),
        ("a: \x07\n", "error[C08]: sft.yaml:1: the character U+0007 is not allowed"),
        ("? [a, b]\n: 1\n", "error[C08]: sft.yaml:1: a key must be a single word"),
    ],
)
def test_a_fault_of_syntax_has_line_and_column(text: str, start: str) -> None:
    assert only("sft", text).startswith(start)


def test_a_value_that_needs_quotes_is_told_so() -> None:
    message = only("eval", "eval:\n  require:\n    a.b: >= 0.6\n")
    assert message.startswith("error[C08]: eval.yaml:3:11: ")
    assert message.endswith("hint: put a value that starts with a special character in quotes")


CONVERT = "hint: convert it: iconv -f latin1 -t utf8 sft.yaml"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ": the config is empty\nhint: `rlhf init` writes example configs"),
        (b"# nothing\n", ": the config is empty\nhint: `rlhf init` writes example configs"),
        (b"- a\n", ": the config is a list, not keys and values"),
        (b"hello\n", ": the config is a single value, not keys and values"),
        (b"seed: 1\nrun: caf\xe9\n", f":2: byte 0xE9 is not UTF-8\n{CONVERT}"),
        ("seed: 1".encode("utf-16"), f":1: byte 0xFF is not UTF-8\n{CONVERT}"),
    ],
)  # fmt: skip
def test_what_is_no_config_is_named(content: bytes, expected: str) -> None:
    assert only("sft", content) == f"error[C09]: sft.yaml{expected}"


def test_a_missing_config_names_those_near(here: Path) -> None:
    (here / "runs").mkdir()
    (here / "runs" / "reward.yaml").touch()
    (here / "runs" / "sft.yaml").touch()

    def message(path: str) -> str:
        with pytest.raises(RLHFError) as caught:
            load("sft", path)
        return str(caught.value).removeprefix(f"error[C09]: {path}: ")

    assert message("runs/stf.yaml") == "no such file\nhint: did you mean runs/sft.yaml?"
    assert message("run/sft.yaml") == "no such file\nhint: did you mean runs/sft.yaml?"
    there = "hint: configs in this folder: runs/reward.yaml, runs/sft.yaml"
    assert message("runs/q.yaml") == f"no such file\n{there}"
    assert message("runs") == f"is a folder, not a config file\n{there}"


def test_a_byte_order_mark_and_windows_lines_are_fine() -> None:
    Path("sft.yaml").write_bytes(b"\xef\xbb\xbf" + HEAD["sft"].replace("\n", "\r\n").encode())
    assert load("sft", "sft.yaml").where("data.train") == "sft.yaml:2"


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("ppo.lam", "error[C11]: --set ppo.lam: expected KEY=VALUE\nhint: e.g. --set ppo.kl_coef=0.1"),
        ("=1", "error[C11]: --set =1: expected KEY=VALUE"),
        ("ppo..lam=1", "error[C11]: --set ppo..lam: expected KEY=VALUE"),
        ("ppo.lam=[1", "error[C11]: --set ppo.lam: not valid YAML: "),
        ("ppo.lam=!!python/none x", "error[C11]: --set ppo.lam: the tag !!python/none is not allowed"),
        ("seed.x=1", "error[C11]: --set seed.x: seed is a single value without keys"),
        ("ppo.lam=x", 'error[C05]: --set ppo.lam: expected a number >= 0 and <= 1, got "x"'),
        ("ppo.kl_coeff=1", "error[C01]: --set ppo.kl_coeff: unknown key ppo.kl_coeff\nhint: did you mean kl_coef?"),
        ("kl_coef=1", "error[C02]: --set kl_coef: kl_coef belongs under ppo:\nhint: write it as ppo.kl_coef"),
        ("ppo=3", "error[C05]: --set ppo: expected keys and values, got 3"),
    ],
)
def test_a_bad_override(override: str, start: str) -> None:
    assert only("ppo", f"seed: 1\n{HEAD['ppo']}ppo: {{total_episodes: 64}}\n", override).startswith(start)


def test_a_file_of_another_stage_is_told_as_one_thing() -> None:
    assert (
        only("sft", f"stage: ppo\n{HEAD['ppo']}")
        == "error[C07]: sft.yaml:1: this config is for ppo, not for sft\nhint: run it with: rlhf ppo --config sft.yaml"
    )
    assert only("sft", "data: {train: pairs.jsonl}\nreward: {}\nsed: 1\n").startswith(
        "error[C07]: sft.yaml: this config is for reward, not for sft"
    )
    assert only("sft", "stage: [x]\n") == "error[C07]: sft.yaml:1: stage: a list is not one of sft, reward, ppo, eval"


@pytest.mark.parametrize(
    "line",
    [
        "trainer: {hub_token: SECRET}", "output: {run_name: SECRET}", "hf_token: SECRET",
        "model: {path: a, revision: SECRET}",
        "data: {train: t, columns: {prompt: SECRET}}", "sft: {lr_scheduler_type: SECRET}", "x: [SECRET]",
    ],
)  # fmt: skip
def test_a_secret_is_refused_and_never_repeated(line: str) -> None:
    secret = "hf_" + "aB3" * 11
    found = messages("sft", f"seed: 1\n{line.replace('SECRET', secret)}\n")
    assert any(message.startswith("error[C16]: sft.yaml:2: ") and "HF_TOKEN" in message for message in found)
    assert secret not in "".join(found)
    assert only("sft", HEAD["sft"], f"model.revision={secret}") == (
        "error[C16]: --set model.revision: model.revision contains a secret\n"
        "hint: remove it, and set it in the environment, e.g. HF_TOKEN"
    )


SYSTEM = "!!python/object/apply:os.system"
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (f"a: {SYSTEM} [touch pwned]\n", f"error[S02]: sft.yaml:1: the tag {SYSTEM} is not allowed"),
        ("seed: 1\nb: !mine 3\n", "error[S02]: sft.yaml:2: the tag !mine is not allowed"),
        ("a: !!int '3'\n", "error[S02]: sft.yaml:1: the tag !!int is not allowed"),
        (LAUGHS, "error[S02]: sft.yaml:"),
        ("a: &a [*a]\n", "error[S02]: sft.yaml:1: the aliases expand to too many values"),
        ("a: &a {b: *a}\n", "error[S02]: sft.yaml:1: the aliases expand"),
        ("a: " + "[" * 100_000, "error[S02]: sft.yaml:1: the config is too large or too deeply nested"),
        ("[1, " * 60_000, "error[S02]: sft.yaml:1: the config is too large"),
        ("a: [" + "1," * 120_000 + "]\n", "error[S02]: sft.yaml:1: the config is too large"),
        ("".join(f"k{n}: 1\n" for n in range(20_000)), "error[S02]: sft.yaml:5000: the config is too large"),
        ("a: 1\n" * 60_000, "error[S02]: sft.yaml: the config is larger than 250 kB"),
    ],
    ids=["python", "tag", "int", "laughs", "loop", "key loop", "deep", "deep list", "long list", "many keys", "large"],
)  # fmt: skip
def test_an_unsafe_file_is_refused_in_under_a_second(text: str, start: str, here: Path) -> None:
    begin = time.process_time()
    [message] = messages("sft", text)
    assert time.process_time() - begin < 1
    assert message.startswith(start)
    assert not (here / "pwned").exists()


def test_honest_anchors_work() -> None:
    Path("sft.yaml").write_text("model: {path: ./b}\ndata: {train: &rows ./t.jsonl, eval: *rows}\n")
    data = load("sft", "sft.yaml").data
    assert data.eval == data.train


PIECES = [
    "ppo", "sft", "data", "model", "trainer", "rewards", "eval", "run", "seed", "stage", "output", "response_length",
    "a.b", ": ", ":", "\n", "\n  ", "\n    ", "- ", "{", "}", "[", "]", ", ", "1", "1e-5", "off", "true", ".nan", "'",
    '"', "&a ", "*a", "!!str ", "# ", "| ", "> ", "\t", "é", "\x00", "\u2028", "null", "~", "-", "? ", "train",
    "path", "prompts", "min", "model_type",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_written_gives_a_config_or_an_error(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(120):
        stage = draw.choice(list(CONFIGS))
        text = draw.choice(["", HEAD[stage]]) + "".join(draw.choices(PIECES, k=draw.randint(1, 25)))
        overrides = [f"{draw.choice(PIECES)}.{draw.choice(PIECES)}={draw.choice(PIECES)}"] * draw.randint(0, 1)
        Path("x.yaml").write_text(text, encoding="utf-8")
        try:
            load(stage, "x.yaml", overrides)
        except RLHFError as error:
            assert error.exit_code == 2
            assert all(problem.where for problem in error.problems), str(error)


def test_values_of_every_kind_at_every_key_give_a_config_or_an_error() -> None:
    values = [
        "null",
        "true",
        "3",
        "-1",
        "2.5",
        ".nan",
        "text",
        "[]",
        "[1, x]",
        "{}",
        "{a: {b: c}}",
        "[[]]",
        '"1"',
        "off",
    ]
    for stage in CONFIGS:
        Path("x.yaml").write_text(HEAD[stage])
        for key in keys(stage):
            for value in values:
                try:
                    load(stage, "x.yaml", [f"{key.replace('NAME', 'name')}={value}"])
                except RLHFError as error:
                    assert all(problem.where for problem in error.problems), (key, value)
