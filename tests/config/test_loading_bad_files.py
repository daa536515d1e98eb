"""Bad config files and overrides: all problems at once, and never a traceback; secrets.

Modules: `config/machinery/secret_values.py`.
"""

from pathlib import Path

import pytest
from bad_configs import HEAD, messages, only

from rlhf_cli.config.loading import keys, load
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.errors import RLHFError

pytestmark = pytest.mark.usefixtures("here")


def test_all_problems_come_at_once_in_the_order_of_the_file() -> None:
    ppo = "ppo:\n  gamma: 2\n  kl_coeff: 1\n  lam: x\n  lam: 1\n  fp16: true\n"
    text = f"{HEAD['ppo']}{ppo}output: {{keep: 1}}\nsede: 3\n"
    codes_and_places = [message.split(": ")[0:2] for message in messages("ppo", text, "data.prompt=x", "no")]
    assert codes_and_places == [
        ["error[C06]", "ppo.yaml:4"], ["error[C01]", "ppo.yaml:5"], ["error[C05]", "ppo.yaml:6"],
        ["error[C03]", "ppo.yaml:7"], ["error[C17]", "ppo.yaml:8"],
        ["error[C06]", "ppo.yaml:9"], ["error[C01]", "ppo.yaml:10"],
        ["error[C11]", "--set no"], ["error[C01]", "--set data.prompt"],
    ]  # fmt: skip


TOKEN = "hf_" + "aB3" * 11


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
        (f"models.sft={TOKEN}", "error[C16]: --set models.sft: models.sft contains a secret\nhint: remove it"),
        ("ppo=3", "error[C05]: --set ppo: expected keys and values, got 3"),
    ],
)
def test_a_bad_override(override: str, start: str) -> None:
    message = only("ppo", f"seed: 1\n{HEAD['ppo']}ppo: {{total_episodes: 64}}\n", override)
    assert message.startswith(start) and TOKEN not in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"stage: ppo\n{HEAD['ppo']}",
            ":1: this config is for ppo, not for sft\nhint: run it with: rlhf ppo --config ",
        ),
        ("data: {train: pairs.jsonl}\nreward: {}\nsed: 1\n", ": this config is for reward, not for sft"),
        ("stage: [x]\n", ":1: stage: a list is not one of sft, reward, dpo, ppo, eval"),
    ],
)
def test_a_file_of_another_stage_is_one_problem(text: str, message: str) -> None:
    assert only("sft", text).startswith(f"error[C07]: sft.yaml{message}")


ODD_VALUES = ["null", "true", "3", "-1", "2.5", ".nan", "x", "[]", "[1,x]", "{}", "{a: {b: c}}", "[[]]", "'1'", "off"]


@pytest.mark.full
def test_values_of_every_kind_at_every_key_give_a_config_or_an_error() -> None:
    for stage in CONFIGS:
        Path("x.yaml").write_text(HEAD[stage])
        for key in keys(stage):
            for value in ODD_VALUES:
                try:
                    load(stage, "x.yaml", [f"{key.replace('NAME', 'name')}={value}"])
                except RLHFError as error:
                    assert all(problem.where for problem in error.problems), (key, value)
