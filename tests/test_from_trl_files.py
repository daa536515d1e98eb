"""What `rlhf init --from-trl` reads out of files, what it refuses, and what it leaves alone."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from fuzzing import CHARACTERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ppo_folder import lines
from test_cli import is_one_error, rlhf
from trl_files import SENTIMENT, TLDR

from rlhf_cli import config
from rlhf_cli.commands.convert import read as files
from rlhf_cli.commands.convert.versions import ParsedFile
from rlhf_cli.errors import RLHFError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str, suffix: str = ".py") -> ParsedFile:
    file = Path(f"theirs{suffix}")
    file.write_text(text, encoding="utf-8")
    return files.read_settings(file)


def values(text: str, suffix: str = ".py") -> dict[str, Any]:
    return {setting.name: setting.value for setting in read(text, suffix).settings}


def unread(text: str, suffix: str = ".py") -> list[tuple[str, str]]:
    return [(value.name, value.where) for value in read(text, suffix).unparsed]


# Python


def test_a_script_is_never_run() -> None:
    text = (
        "import os, sys, pathlib\n"
        "pathlib.Path('RAN').touch()\n"
        "sys.exit(3)\n"
        "config = PPOConfig(learning_rate=1e-5, kl_coef=pathlib.Path('RAN').touch() or 0.1, seed=3, **os.environ)\n"
        "class Trap(dict):\n    def __init__(self): pathlib.Path('RAN').touch()\n"
    )
    Path("train.py").write_text(text)
    result = rlhf("init", "--from-trl", "train.py", "run")
    assert result.exit_code == 0 and not Path("RAN").exists()
    found = config.load("ppo", "run/ppo.yaml")
    assert (found.seed, found.ppo.learning_rate, found.ppo.kl_coef) == (3, 1e-5, 0.05)
    assert "kl_coef  train.py:4  pathlib.Path('RAN').touch() or 0.1 is only known at run time" in (result.stdout)
    assert "\n# kl_coef (train.py:4): pathlib" in Path("run/ppo.yaml").read_text()


def test_plain_values_are_read() -> None:
    text = (
        "RATE: float = 3e-6\nTWICE = 2 * RATE\nNAMES = ['q_proj', 'v_proj']\nMORE = {'lam': 0.9, 'seed': 1 + 2 ** 3}\n"
        "PPOConfig(learning_rate=TWICE, kl_coef=-(-1) / 20, vf_coef=1e-1, num_ppo_epochs=9 // 4 % 3, **MORE)\n"
        "LoraConfig(r=4, target_modules=NAMES, bias='none')\n"
        "ModelConfig(torch_dtype=torch.bfloat16, attn_implementation=None)\n"
    )
    assert values(text) == {
        "learning_rate": 6e-6, "kl_coef": 0.05, "vf_coef": 0.1, "num_ppo_epochs": 2, "lam": 0.9, "seed": 9,
        "use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"], "lora_bias": "none",
        "torch_dtype": "bfloat16", "attn_implementation": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        "RATE", "float('1e-5')", "x[0]", "a if b else c", "f'{x}'", "-'a'", "'a' * 10**9", "9**9**9", "1 / 0",
        "1e15 * 10", "AGAIN", "LATER", "b'x'", "1j", "...", "{1, 2}", "[RATE]", "os.environ['X']", "args.rate",
        "lambda: 1", "(yield)",
    ],
)  # fmt: skip
def test_what_only_a_run_would_tell_is_told_with_its_line(value: str) -> None:
    before = "AGAIN = 1\nAGAIN = 2\nLOOP = LOOP\nfor LATER in range(3): pass\n\n"
    assert unread(f"{before}PPOConfig(\n  learning_rate={value},\n  kl_coef=0.1)\n") == [
        ("learning_rate", "theirs.py:7")
    ]


def test_constants_that_stand_for_one_another_in_a_circle_come_to_an_end() -> None:
    assert unread("A = B\nB = A\nPPOConfig(kl_coef=A)\n") == [("kl_coef", "theirs.py:3")]


def test_defaults_of_arguments_are_taken_where_nothing_else_gives_them() -> None:
    text = (
        "@dataclass\nclass ScriptArguments:\n    rate: float = field(default=1e-5, metadata={})\n    steps: int = 500\n"
        "    twice: int = 1\n    needed: str = field()\nclass Other:\n    twice: int = 2\n"
        "args = parser.parse_args_into_dataclasses()[0]\n"
        "c = PPOConfig(learning_rate=args.rate, steps=args.steps, batch_size=args.twice, model_name=args.needed)\n"
        "m = AutoModelForCausalLMWithValueHead.from_pretrained(c.learning_rate)\n"
    )
    assert values(text) == {"learning_rate": 1e-5, "steps": 500, "sft_model_path": 1e-5}
    assert [what for what, _ in unread(text)] == ["batch_size", "model_name"]
    text = "class A:\n    length: int = 128\nlength = A.length\nPPOConfig(response_length=length)\n"
    assert values(text) == {"response_length": 128}


@pytest.mark.parametrize(
    ("call", "expected"),
    [("build()", "a/b"), ("build(cfg)", "a/b"), ("build(cfg, 'c/d')", None), ("build(name='c/d')", None)],
)
def test_a_functions_default_counts_unless_a_call_gives_another_value(call: str, expected: str | None) -> None:
    text = (
        f"def build(cfg=None, name='a/b'):\n    return load_dataset(name, split='train')\nPPOConfig(seed=1)\n{call}\n"
    )
    assert values(text).get("dataset_name") == expected


def test_models_are_told_apart_by_class_and_variable() -> None:
    text = (
        "PPOConfig(seed=1)\ntokenizer = AutoTokenizer.from_pretrained('t')\n"
        "policy = AutoModelForCausalLM.from_pretrained('p', revision='r', device_map='auto')\n"
        "ref_policy = AutoModelForCausalLM.from_pretrained('q')\n"
        "reward_model = AutoModelForSequenceClassification.from_pretrained('w', num_labels=1)\n"
        "value_model = AutoModelForSequenceClassification.from_pretrained('v')\n"
        "ref_model = create_reference_model(policy, num_shared_layers=6)\n"
    )
    assert values(text) == {
        "seed": 1, "sft_model_path": "p", "model_revision": "r", "ref_model_path": "q", "reward_model_path": "w",
        "value_model_path": "v", "num_shared_layers": 6,
    }  # fmt: skip


def test_generation_is_read_from_dicts_and_calls() -> None:
    text = (
        "PPOConfig(seed=1)\ngen_kwargs = {'top_k': 0.0, 'pad_token_id': tokenizer.pad_token_id, 'temperature': T}\n"
        "gen_kwargs['max_new_tokens'] = 32\nother = {'top_p': 0.5}\n"
        "trainer.generate(q, generate_ref_response=True, length_sampler=s, **gen_kwargs)\n"
    )
    assert values(text) == {"seed": 1, "top_k": 0.0, "max_new_tokens": 32, "generate_ref_response": True}
    assert unread(text) == [("temperature", "theirs.py:2")]


def test_lengths_that_a_sampler_draws() -> None:
    text = (
        "PPOConfig(seed=1)\nLEAST = 4\ninput_size = LengthSampler(2, 8)\n"
        "output_length_sampler = LengthSampler(LEAST, max_value=16)\n"
        "generation_kwargs['max_new_tokens'] = output_length_sampler()\nother_gen = LengthSampler(a, b)\n"
    )
    assert values(text) == {"seed": 1, "response_length": {"min": 4, "max": 15}}
    assert unread(text) == [("LengthSampler(...)", "theirs.py:3"), ("LengthSampler(...)", "theirs.py:6")]


def test_the_first_of_two_configs_and_data_sets_is_read() -> None:
    text = "PPOConfig(seed=1)\nPPOConfig(seed=2)\nload_dataset('json', data_files='a.jsonl')\nload_dataset('c/d')\n"
    assert values(text) == {"seed": 1, "dataset_name": "a.jsonl"}
    assert unread(text) == [("PPOConfig(...)", "theirs.py:2"), ("load_dataset(...)", "theirs.py:4")]


# Command lines


def test_a_command_in_a_script_of_several() -> None:
    text = (
        "#!/bin/bash\nset -e\nexport RATE=3e-6\nOUT='runs/x'\n# python ppo.py --seed 9\n"
        "python sft.py --learning_rate 1e-4 && python reward.py --learning_rate 1e-5\n"
        "torchrun --nproc-per-node 4 --master_port 29500 \\\n"
        "  ppo.py --learning_rate ${RATE} --output_dir=$OUT/ppo \\\n"
        "  --whiten_rewards --no_gradient_checkpointing --lora_target_modules q_proj v_proj --kl-coef -1 --lam 0.9\n"
        '  --seed $SEED --tracker_kwargs \'{"wandb": {"name": "a b"}}\' 2>&1 | tee log.txt &\npython ppo.py --seed 5\n'
    )
    assert values(text, ".sh") == {
        "num_processes": 4, "learning_rate": 3e-6, "output_dir": "runs/x/ppo", "whiten_rewards": True,
        "gradient_checkpointing": False, "lora_target_modules": ["q_proj", "v_proj"], "kl_coef": -1, "lam": 0.9,
        "tracker_kwargs": {"wandb": {"name": "a b"}},
    }  # fmt: skip
    assert unread(text, ".sh") == [
        ("ppo.py", "theirs.sh:11"),
        ("--master_port", "theirs.sh:7"),
        ("seed", "theirs.sh:10"),
    ]


def test_a_module_and_a_text_without_a_script() -> None:
    assert values("python -m my.ppo_train --kl_coef 0.1\n", ".txt") == {"kl_coef": 0.1}
    assert values("--kl_coef 0.1\n--num_ppo_epochs=2\n", ".txt") == {"kl_coef": 0.1, "num_ppo_epochs": 2}
    assert values("it's open --kl_coef 0.1", ".txt") == {"kl_coef": 0.1}


# YAML and JSON


def test_yaml_as_trls_users_write_it() -> None:
    text = (
        "training_args:\n  learning_rate: 3e-6\n  bf16: True\n  report_to: 'none'\n  run_name: null\n"
        "  tracker_kwargs: {a: {b: 1}}\ngeneration_kwargs: {top_k: 0.0}\n"
        "peft_config: {r: 8, target_modules: [q]}\nseed: 1_0\n"
    )
    assert values(text, ".yaml") == {
        "learning_rate": 3e-6, "bf16": True, "report_to": "none", "run_name": None, "tracker_kwargs": {"a": {"b": 1}},
        "top_k": 0.0, "use_peft": True, "lora_r": 8, "lora_target_modules": ["q"], "seed": 10,
    }  # fmt: skip
    assert [setting.where for setting in read(text, ".yaml").settings][:2] == ["theirs.yaml:2", "theirs.yaml:3"]


def test_json_has_lines_too() -> None:
    text = json.dumps({"a": {"kl_coef": 0.1}, "seed": 1}, indent=1)
    assert [(each.name, each.where) for each in read(text, ".json").settings] == [
        ("kl_coef", "theirs.json:3"),
        ("seed", "theirs.json:5"),
    ]


# What is refused, whole


@pytest.mark.parametrize(
    ("suffix", "content", "code", "told"),
    [
        (".py", b"x = (\n", "C08", "theirs.py:1: not valid Python: "),
        (".py", b"\0", "C08", "theirs.py:1: not valid Python"),
        (".py", b"x = " + b"-" * 50_000 + b"1", "C08", "Python nested too deeply"),
        (".py", b"print(1)\n", "C09", "the file has no option of TRL's PPO"),
        (".py", b"p = HfArgumentParser((PPOConfig,))\n", "C09", "its settings come from the command line"),
        (".py", b"x = '\xff'\n", "C09", "byte 0xFF is not UTF-8"),
        (".yaml", b"a: [1\n", "C08", "theirs.yaml:2:1: not valid YAML"),
        (".yaml", b"kl_coef: 1\nkl_coef: 2\n", "C03", "theirs.yaml:2: duplicate key"),
        (".yaml", b"a: !!python/object:os.system x\n", "S02", "is not allowed"),
        (".yaml", b"", "C09", "empty"),
        (".json", b'{"a": 1,}', "C08", "theirs.json:1: not valid JSON"),
        (".json", b"[1]", "C09", "not a JSON object"),
        (".json", b"[" * 20_000, "C08", "JSON nested too deeply"),
        (".sh", b"echo hello\n", "C09", "the file has no option of TRL's PPO"),
        (".sh", b"python sft.py --packing\n", "C09", "the file has no option of TRL's PPO"),
        (".txt", b"x" * 300_000, "S02", "larger than 250 kB"),
        (".ipynb", b"{}", "C09", "notebooks are not supported"),
    ],
)
def test_a_broken_file_is_one_error_and_nothing_is_written(suffix: str, content: bytes, code: str, told: str) -> None:
    Path(f"theirs{suffix}").write_bytes(content)
    result = rlhf("init", "--from-trl", f"theirs{suffix}", "run")
    assert is_one_error(result, code) and told in result.stderr, result.stderr
    assert not Path("run").exists()


def test_what_is_not_there_or_no_file() -> None:
    assert is_one_error(rlhf("init", "--from-trl", "none.py", "run"), "C09")
    assert is_one_error(rlhf("init", "--from-trl", ".", "run"), "C09")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--from-trl", "ok.yaml"], "C11"),
        (["ci", "run", "--from-trl", "ok.yaml"], "C11"),
        (["--from-trl", "ok.yaml", "run", "--data", "x"], "C11"),
        (["--from-trl", "ok.yaml", "run", "--seed", "3"], "C11"),
        (["ci", "run", "--trl", "1.12"], "C11"),
        (["--from-trl", "ok.yaml", "run", "--trl", "1.1"], "C07"),
        (["--from-trl", "ok.yaml", "ok.yaml/run"], "E03"),
    ],
)
def test_a_command_line_that_does_not_go(arguments: list[str], code: str) -> None:
    Path("ok.yaml").write_text("kl_coef: 0.1\n")
    assert is_one_error(rlhf("init", *arguments), code)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["ok.yaml"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    Path("ok.yaml").write_text("kl_coef: 0.1\n")
    Path("run").mkdir()
    Path("run/ppo.yaml").write_text("mine")
    Path("run/notes").write_text("mine")
    assert is_one_error(rlhf("init", "--from-trl", "ok.yaml", "run"), "C15")
    assert Path("run/ppo.yaml").read_text() == "mine"
    Path("link").mkdir()
    Path("link/ppo.yaml").symlink_to(tmp_path / "elsewhere")
    assert is_one_error(rlhf("init", "--from-trl", "ok.yaml", "link"), "C15")
    assert not Path("elsewhere").exists()
    Path("run/ppo.yaml").unlink()
    assert rlhf("init", "--from-trl", "ok.yaml", "run").exit_code == 0
    assert Path("run/notes").read_text() == "mine"


# What is taken over


def test_which_trl_it_is_of() -> None:
    def told(text: str, *more: str) -> str:
        Path("a.yaml").write_text(text)
        result = rlhf("init", "--from-trl", "a.yaml", f"run{len(os.listdir())}", *more)
        assert result.exit_code == 0, result.stderr
        return result.stdout.splitlines()[0]

    assert told("init_kl_coef: 0.2\nppo_epochs: 4\n") == (
        "a.yaml is of TRL 0.11: init_kl_coef, ppo_epochs exist only in that version"
    )
    assert told("kl_coef: 0.1\nnum_ppo_epochs: 4\nsteps: 100\n") == (
        "a.yaml is of TRL 1.12: kl_coef, num_ppo_epochs exist only in that version; "
        "steps only in the other: check, or set --trl"
    )
    assert told("learning_rate: 1e-5\n").startswith(
        "a.yaml is of TRL 1.12: no option is specific to a version; use --trl 0.11 "
    )
    assert told("learning_rate: 1e-5\n", "--trl", "0.11") == "a.yaml is of TRL 0.11: set by --trl"


def test_paths_lead_from_the_new_folder_to_what_they_named() -> None:
    for folder in ("models/sft", "data"):
        Path(folder).mkdir(parents=True)
    Path("data/p.jsonl").write_text('{"prompt": "a"}\n')
    Path("a.yaml").write_text(
        "sft_model_path: models/sft\nreward_model_path: ./nowhere\nmodel_name_or_path: x\ndataset_name: data/p.jsonl\n"
    )
    assert rlhf("init", "--from-trl", "a.yaml", "runs/mine").exit_code == 0
    found = config.load("ppo", "runs/mine/ppo.yaml")
    assert found.models.sft == os.path.abspath("models/sft") and found.models.reward == os.path.abspath("nowhere")
    assert found.data.prompts == os.path.abspath("data/p.jsonl")
    assert "sft: ../../models/sft " in Path("runs/mine/ppo.yaml").read_text()


def test_no_secret_is_written_or_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "a" * 30
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    Path("a.yaml").write_text(
        f"hub_token: {token}\nkl_coef: 0.1\nrun_name: 0123456789abcdef\nlogging_dir: https://me:pass@host/x\n"
        f"tracker_kwargs: {{wandb: {{api_key: abc}}}}\nzzz: {token}\n"
    )
    Path("a.py").write_text(f"PPOConfig(kl_coef=0.1, learning_rate=rate('{token}'))")
    said = [rlhf("init", "--from-trl", file, file[-2:]) for file in ("a.yaml", "a.py")]
    assert [result.exit_code for result in said] == [0, 0], said[0].stderr
    for text in (*(result.output for result in said), Path("ml/ppo.yaml").read_text(), Path("py/ppo.yaml").read_text()):
        assert not re.search(r"hf_a|0123456789|me:pass|abc\b", text), text


def test_what_was_not_placed_stands_at_the_end_and_breaks_no_line() -> None:
    bad = "a\n\u2028\x1b[31mb: 1\nppo: {}"
    Path("a.json").write_text(json.dumps({"kl_coef": 0.1, "zzz": bad, bad: 1, "output_dir": "x"}))
    result = rlhf("init", "--from-trl", "a.json", "run")
    assert result.exit_code == 0 and "\x1b" not in result.stdout
    text = Path("run/ppo.yaml").read_text()
    (at,) = (number for number, line in enumerate(text.splitlines()) if line == "# Not supported:")
    assert all(line.startswith("#") for line in text.splitlines()[at:]) and "\x1b" not in text
    assert config.load("ppo", "run/ppo.yaml").ppo.kl_coef == 0.1


# Any text


PIECES = sorted({piece for text in (*SENTIMENT.values(), *TLDR.values()) for piece in re.findall(r"\w+|\W", text)})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([".py", ".sh", ".yaml", ".json"]),
    st.integers(0, 1),
    st.lists(
        st.tuples(st.integers(0, 3000), st.integers(0, 40), st.sampled_from(PIECES) | st.text(CHARACTERS, max_size=4)),
        max_size=5,
    ),
)
def test_a_text_with_faults_put_in_is_read_or_is_an_error_of_ours(
    suffix: str, which: int, faults: list[tuple[int, int, str]]
) -> None:
    text = (SENTIMENT, TLDR)[which][suffix]
    for at, taken, piece in faults:
        at %= len(text)
        text = text[:at] + piece + text[at + taken :]
    Path(f"theirs{suffix}").write_text(text, encoding="utf-8", errors="replace")
    try:
        files.read_settings(Path(f"theirs{suffix}"))
    except RLHFError as error:
        assert {problem.code for problem in error.problems} <= {"C03", "C08", "C09", "S02"}


# The file as the start of a run


@pytest.mark.training
def test_what_comes_of_a_command_trains(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_folder)
    Path("ppo.sh").write_text(
        "python ppo.py --sft_model_path sft_model --reward_model_path reward_model --dataset_name prompts.jsonl \\\n"
        "  --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --total_episodes 16 --bf16 False \\\n"
        "  --response_length 8 --stop_token eos --num_ppo_epochs 2 --num_mini_batches 2 --kl_estimator k1 --seed 5\n"
    )
    assert rlhf("init", "--from-trl", "ppo.sh", "mine").exit_code == 0
    checked = rlhf("check", "mine/ppo.yaml")
    assert checked.exit_code == 0 and "8 episodes" in checked.stdout, checked.output
    result = rlhf("ppo", "--config", "mine/ppo.yaml")
    assert result.exit_code == 0, result.output
    rows = lines(Path("mine/ppo/metrics.jsonl"))
    assert [row["episode"] for row in rows] == [8, 16] and rows[0]["objective/kl"] == 0.0
