"""Bad lines of a config: each with its code, its place and its fix."""

import json
import runpy
from importlib.metadata import version
from pathlib import Path

import pytest
from bad_configs import HEAD, only

from rlhf_cli.config.aliases import ALIASES
from rlhf_cli.config.loading import keys, load
from rlhf_cli.config.training import CONFIGS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cases(table: str) -> list[tuple[str, str, list[str]]]:
    """(line, code, [text, hint]) of each case: a line of YAML, and indented below it what must be said."""
    found: list[tuple[str, str, list[str]]] = []
    for line in table.strip().splitlines():
        if not line.startswith("    "):
            found.append((line, "", []))
        elif line.startswith("    hint: "):
            found[-1][2].append(line.strip())
        else:
            code, _, text = line.strip().partition(" ")
            found[-1] = (found[-1][0], code, [text])
    return found


def expected(code: str, where: str, said: list[str]) -> str:
    return "\n".join([f"error[{code}]: {where}: {said[0]}", *said[1:]])


def in_ppo(line: str) -> str:
    """A ppo.yaml with this line as its fifth."""
    return f"{HEAD['ppo']}ppo:\n  total_episodes: 64\n  {line}\n"


PPO_LINES = r"""
kl_coeff: 0.1
    C01 unknown key ppo.kl_coeff
    hint: did you mean kl_coef?
Gamma: 1
    C01 unknown key ppo.Gamma
    hint: did you mean gamma?
zzzz: 1
    C01 unknown key ppo.zzzz
    hint: `rlhf explain ppo` lists the keys
init_kl_coef: 0.2
    C01 unknown key ppo.init_kl_coef
    hint: write kl_coef: 0.2
kl_penalty: mse
    C01 unknown key ppo.kl_penalty
    hint: write kl_estimator: k2
kl_penalty: kl
    C01 unknown key ppo.kl_penalty
    hint: write kl_estimator: k1
ppo_epochs: 4
    C01 unknown key ppo.ppo_epochs
    hint: write num_ppo_epochs: 4
steps: 100
    C01 unknown key ppo.steps
    hint: write total_episodes: 100
sft_model_path: m
    C01 unknown key ppo.sft_model_path
    hint: write models.sft: m
exp_name: first
    C01 unknown key ppo.exp_name
    hint: write output.run_name: first
log_with: wandb
    C01 unknown key ppo.log_with
    hint: write output.report_to: [wandb]
report_to: [wandb]
    C02 ppo.report_to belongs under output:
    hint: write it as output.report_to
tracker_project_name: mine
    C01 unknown key ppo.tracker_project_name
    hint: write output.project: mine
critic_learning_rate: 9e-6
    C01 unknown key ppo.critic_learning_rate
    hint: write value_learning_rate: 9e-06
overlong_buffer_len: 16
    C01 unknown key ppo.overlong_buffer_len
    hint: use overlong_penalty; {tokens: n, factor: f}
top_k: 50
    C01 unknown key ppo.top_k
    hint: responses are sampled from the full softmax, which the log-probs are computed from; remove the line
is_encoder_decoder: true
    C01 unknown key ppo.is_encoder_decoder
    hint: encoder-decoder models are not supported; remove the line
vf_loss: 0.1
    C01 unknown key ppo.vf_loss
    hint: write vf_coef: 0.1
mini_batch_size: 4
    C01 unknown key ppo.mini_batch_size
    hint: use num_mini_batches; it counts minibatches: batch size / mini_batch_size
snapshots: 3
    C02 ppo.snapshots belongs under output:
    hint: write it as output.snapshots
seed: 3
    C02 ppo.seed belongs at the top of the file
    hint: write it as seed
completion_only_loss: true
    C02 ppo.completion_only_loss belongs in sft.yaml, under sft:
gamma: one
    C05 ppo.gamma: expected a number > 0 and <= 1, got "one"
gamma: "0.9"
    C05 ppo.gamma: expected a number > 0 and <= 1, got "0.9"
    hint: remove the quotes: 0.9
gamma:
    C05 ppo.gamma: expected a number > 0 and <= 1, got nothing
gamma: [1]
    C05 ppo.gamma: expected a number > 0 and <= 1, got a list
num_ppo_epochs: 8.5
    C05 ppo.num_ppo_epochs: expected a whole number >= 1, got 8.5
num_ppo_epochs: 1e1
    C05 ppo.num_ppo_epochs: expected a whole number >= 1, got 10.0
    hint: write 10
whiten_rewards: 1
    C05 ppo.whiten_rewards: expected true or false, got 1
gamma: 2
    C06 ppo.gamma: must be > 0 and <= 1, got 2
gamma: .nan
    C06 ppo.gamma: must be a finite number > 0 and <= 1, got nan
kl_coef: .inf
    C06 ppo.kl_coef: must be a finite number >= 0, got inf
kl_coef: 1e999
    C06 ppo.kl_coef: must be a finite number >= 0, got inf
kl_coef: -1
    C06 ppo.kl_coef: must be >= 0, got -1
kl_coef: true
    C06 ppo.kl_coef: expected a number >= 0, got true
num_ppo_epochs: false
    C06 ppo.num_ppo_epochs: expected a whole number >= 1, got false
kl_in: rewards
    C07 ppo.kl_in: "rewards" is not one of reward, loss
    hint: did you mean reward?
kl_in: 3
    C07 ppo.kl_in: 3 is not one of reward, loss
micro_batch_tokens: aut
    C07 ppo.micro_batch_tokens: "aut" is not one of auto, a whole number
    hint: did you mean auto?
micro_batch_tokens: true
    C06 ppo.micro_batch_tokens: expected a whole number >= 1 or auto, got true
response_length: [3]
    C05 ppo.response_length: expected a whole number >= 1 or keys and values, got a list
response_length: {min: 3}
    C05 ppo.response_length.max is missing
    hint: max: Maximum length limit in tokens
response_length: {min: 3, max: 2}
    C06 ppo.response_length: min is greater than max
    hint: swap them
whiten_rewards: off
    C10 ppo.whiten_rewards: expected true or false, got "off"
    hint: write true or false
whiten_rewards: True
    C10 ppo.whiten_rewards: expected true or false, got "True"
    hint: write true or false
num_ppo_epochs: 012
    C10 ppo.num_ppo_epochs: expected a whole number >= 1, got "012"
    hint: write a plain decimal number
gamma: 1:30
    C10 ppo.gamma: expected a number > 0 and <= 1, got "1:30"
    hint: write a plain decimal number
num_ppo_epochs: 1_000
    C10 ppo.num_ppo_epochs: expected a whole number >= 1, got "1_000"
    hint: write a plain decimal number
num_train_epochs: 1
    C17 ppo: set exactly one of total_episodes and num_train_epochs
    hint: e.g. total_episodes: 10000
"""

OTHER_LINES = r"""
sft learning_rate: 1e-4
    C02 learning_rate belongs under sft:
    hint: write it as sft.learning_rate
sft ppo: {}
    C02 ppo belongs in ppo.yaml
sft kl_coef: 1
    C02 kl_coef belongs in ppo.yaml, under ppo:
sft sft: {neftune_noise_alpha: 5}
    C02 sft.neftune_noise_alpha belongs under trainer:
    hint: write it as trainer.neftune_noise_alpha
sft sft: {lr: 1e-4}
    C01 unknown key sft.lr
    hint: write learning_rate: 0.0001
sft sft: 3
    C05 sft: expected keys and values, got 3
sft output: {run_name: 3}
    C05 output.run_name: expected text, got 3
    hint: write it in quotes: "3"
sft output: {report_to: [wandb, tensorbord]}
    C07 output.report_to.1: "tensorbord" is not one of tensorboard, wandb, trackio
    hint: did you mean tensorboard?
sft output: {report_to: wandb}
    C05 output.report_to: expected a list, got "wandb"
    hint: write [wandb]
sft output: {project: a/b}
    S03 output.project: not a valid name
    hint: use letters, digits, `_`, `-` and `.`, starting with a letter or digit
sft output: {keep: 1}
    C06 output.keep: must be >= 2, got 1
sft output: {run_name: ../x}
    S03 output.run_name: not a valid name
    hint: use letters, digits, `_`, `-` and `.`, starting with a letter or digit
sft sft: {warmup_steps: 3, warmup_ratio: 0.1}
    C17 sft: warmup_steps and warmup_ratio cannot be combined
    hint: remove one of them
sft sft: {packing: 1}
    C05 sft.packing: expected true or false, got 1
sft sft: {max_length: "8"}
    C05 sft.max_length: expected a whole number > 1, got "8"
    hint: remove the quotes: 8
sft sft: {weight_decay: true}
    C06 sft.weight_decay: expected a number >= 0, got true
sft sft: {weight_decay: .inf}
    C06 sft.weight_decay: must be a finite number >= 0, got inf
sft seed: -1
    C06 seed: must be >= 0 and < 4294967296, got -1
sft run: 3
    C05 run: expected text, got 3
    hint: write it in quotes: "3"
reward model: {new: {}}
    C02 model.new belongs in sft.yaml, under model:
eval eval: {modes: []}
    C06 eval.modes: needs at least 1, got 0
eval eval: {modes: [greedy, beam]}
    C07 eval.modes.1: "beam" is not one of sampled, greedy
eval eval: {best_of: [2, 1]}
    C06 eval.best_of.1: must be >= 2, got 1
eval eval: {require: {a.b: 0.6}}
    C05 eval.require.a.b: expected text, got 0.6
    hint: write it in quotes: "0.6"
eval eval: {require: {a.b: high}}
    C07 eval.require.a.b: expected a comparison operator and a number
    hint: e.g. ">= 0.6"
"""

TRAINER_LINES = r"""
neftune_noise_alfa: 5
    C01 unknown key trainer.neftune_noise_alfa: not a field of TRL's SFTConfig
    hint: did you mean neftune_noise_alpha?
learning_rat: 1
    C01 unknown key trainer.learning_rat: not a field of TRL's SFTConfig
    hint: did you mean sft.learning_rate?
max_length: 5
    C02 trainer.max_length belongs under sft:
    hint: write it as sft.max_length
output_dir: x
    C02 trainer.output_dir is set by the pipeline
    hint: use run
logging_dir: x
    C02 trainer.logging_dir is set by the pipeline
    hint: use run
report_to: wandb
    C02 trainer.report_to is set by the pipeline
    hint: use output.report_to
project: mine
    C02 trainer.project is set by the pipeline
    hint: use output.project
trackio_space_id: mine
    C02 trainer.trackio_space_id is set by the pipeline
    hint: remove the line
save_strategy: no
    C02 trainer.save_strategy is set by the pipeline
    hint: remove the line
push_to_hub: true
    C02 trainer.push_to_hub is set by the pipeline
    hint: remove the line
hub_model_id: x
    C02 trainer.hub_model_id is set by the pipeline
    hint: remove the line
resume_from_checkpoint: x
    C02 trainer.resume_from_checkpoint is set by the pipeline
    hint: remove the line
overwrite_output_dir: true
    C02 trainer.overwrite_output_dir is set by the pipeline
    hint: use --fresh
eval_strategy: steps
    C02 trainer.eval_strategy is set by the pipeline
    hint: use sft.eval_steps
neftune_noise_alpha: high
    C05 trainer.neftune_noise_alpha: expected null or a number, got "high"
label_smoothing_factor: true
    C06 trainer.label_smoothing_factor: expected a number, got true
label_smoothing_factor: .nan
    C06 trainer.label_smoothing_factor: must be a finite number, got nan
fp16: off
    C10 trainer.fp16: expected true or false, got "off"
    hint: write true or false
dataloader_num_workers: 1.5
    C05 trainer.dataloader_num_workers: expected a whole number, got 1.5
"""


SFT_STARTS = r"""
model: {}
    C17 set model.path or model.new
    hint: path starts from an existing model, new from random weights
model: {path: a, new: {tokenizer: {train: t, vocab_size: 9}}}
    C17 set model.path or model.new, not both
    hint: path starts from an existing model, new from random weights
model: {new: {hidden_size: 8}}
    C05 model.new.tokenizer is missing
    hint: tokenizer: Tokenizer to train for the new model
model: {path: a, chat_template: t.jinja}
    C07 model: chat_template `t.jinja` is not a file, the text of a template, or chatml
"""


@pytest.mark.parametrize(("line", "code", "said"), cases(PPO_LINES))
def test_a_bad_line_of_ppo(line: str, code: str, said: list[str]) -> None:
    place = "ppo.yaml:3" if code == "C17" else "ppo.yaml:5"
    assert only("ppo", in_ppo(line)) == expected(code, place, said)


@pytest.mark.parametrize(("line", "code", "said"), cases(OTHER_LINES))
def test_a_bad_line_of_another_stage(line: str, code: str, said: list[str]) -> None:
    stage, _, text = line.partition(" ")
    place = f"{stage}.yaml:{2 if stage == 'reward' else 3}"
    assert only(stage, f"{HEAD[stage]}{text}\n") == expected(code, place, said)


@pytest.mark.parametrize(("line", "code", "said"), cases(TRAINER_LINES))
def test_a_bad_field_of_the_trainer(line: str, code: str, said: list[str]) -> None:
    assert only("sft", f"{HEAD['sft']}trainer:\n  {line}\n") == expected(code, "sft.yaml:4", said)


def test_choices_that_are_many_are_all_listed() -> None:
    message = only("sft", f"{HEAD['sft']}trainer: {{optim: adamw_torchy}}\n")
    assert message.startswith('error[C07]: sft.yaml:3: trainer.optim: "adamw_torchy" is not one of adamw_torch, ')
    assert message.endswith("\nhint: did you mean adamw_torch?")


@pytest.mark.parametrize(("line", "code", "said"), cases(SFT_STARTS))
def test_where_sft_starts(line: str, code: str, said: list[str]) -> None:
    assert only("sft", f"{line}\ndata: {{train: t.jsonl}}\n") == expected(code, "sft.yaml:1", said)


def test_a_section_that_is_not_there_is_told_at_the_file() -> None:
    assert only("sft", "data: {train: t.jsonl}\n").startswith("error[C17]: sft.yaml: set model.path or model.new\n")
    assert only("reward", "seed: 1\n").startswith("error[C05]: reward.yaml: data.train is missing\nhint: train: Pairs")


def test_a_judge_cannot_be_called_reward_and_names_are_plain() -> None:
    message = only("eval", "data: {prompts: p}\njudges: {reward: 'a:b'}\n")
    assert message.startswith("error[C17]: eval.yaml:2: judges.reward: ")
    message = only("ppo", "data: {prompts: p}\nppo: {total_episodes: 64}\nrewards:\n  ../x: {function: 'a:b'}\n")
    assert message.startswith("error[S03]: ppo.yaml:4: rewards.../x: not a valid name")


@pytest.mark.parametrize(
    ("source", "start"),
    [
        ("{function: 'os.system'}", 'error[C05]: ppo.yaml:2: rewards.x.function: "os.system" has the wrong form'),
        ("{weight: 1}", "error[C17]: ppo.yaml:2: rewards.x: set exactly one of model, models, function, builtin"),
        (
            "{model: a, function: 'a:b'}",
            "error[C17]: ppo.yaml:2: rewards.x: set exactly one of model, models, function, builtin",
        ),
        ("{weigth: 1, model: a}", "error[C01]: ppo.yaml:2: unknown key rewards.x.weigth\nhint: did you mean weight?"),
        ("3", "error[C05]: ppo.yaml:2: rewards.x: expected keys and values, got 3"),
    ],
)
def test_a_bad_source_of_reward(source: str, start: str) -> None:
    assert only("ppo", f"data: {{prompts: p}}\nrewards: {{x: {source}}}\nppo: {{total_episodes: 64}}\n").startswith(
        start
    )


def test_batch_sizes_must_divide() -> None:
    message = only("ppo", in_ppo("num_mini_batches: 5"))
    assert message.startswith("error[C12]: ppo.yaml:5: ")
    assert "16 x 4 = 64 episodes" in message and "hint: nearest values that fit: 2 or 4" in message


def test_good_fields_of_the_trainer_pass() -> None:
    fields = "{neftune_noise_alpha: 5, label_smoothing_factor: 0, optim: sgd, lr_scheduler_kwargs: {num_cycles: 2}}"
    Path("sft.yaml").write_text(f"{HEAD['sft']}trainer: {fields}\n")
    assert load("sft", "sft.yaml").trainer["lr_scheduler_kwargs"] == {"num_cycles": 2}
    assert only("reward", f"{HEAD['reward']}trainer: {{packing_strategy: bfd}}\n").endswith(
        "RewardConfig\nhint: only SFTConfig has this field"
    )


def test_old_names_point_at_keys_that_exist() -> None:
    paths = {key for stage in CONFIGS for key in keys(stage)}
    renamed = {alias.key for alias in ALIASES.values() if alias.key}
    assert renamed <= paths | {key.rpartition(".")[2] for key in paths}
    assert not ALIASES.keys() & {key.partition(".")[2] for key in keys("ppo")}
    assert all(alias.key or alias.note for alias in ALIASES.values())


def test_the_list_of_trl_fields_is_current() -> None:
    pytest.importorskip("trl")
    root = Path(__file__).parents[1]
    text = (root / "rlhf_cli" / "config" / "trl_fields.json").read_text(encoding="utf-8")
    made_from = json.loads(text)["made_from"]
    pins = dict(line.split("==") for line in (root / "constraints.txt").read_text().split() if "==" in line)
    assert made_from == {name: pins[name] for name in made_from}, "run scripts/trl_fields.py with the pinned versions"
    if made_from != {name: version(name) for name in made_from}:
        pytest.skip(f"made from {made_from}, other versions are installed")
    script = runpy.run_path(str(root / "scripts" / "trl_fields.py"))
    assert script["render"](script["describe"]()) == text, "run scripts/trl_fields.py"


def test_a_requirement_of_a_judge_that_is_not_there() -> None:
    text = "data: {prompts: p}\njudges: {mine: 'a:b'}\neval:\n  require: {win_rate.ppo_vs_sft.mein.value: '>= 0.5'}\n"
    message = only("eval", text)
    assert message.startswith(
        "error[C17]: eval.yaml:4: eval.require: win_rate.ppo_vs_sft.mein.value does not name a judge"
    )
    assert message.endswith("\nhint: did you mean mine?")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            "select: mein",
            "C17]: eval.yaml:4: eval.select: mein does not name a judge of this file\nhint: did you mean mine?",
        ),
        (
            "select: {judge: zzzz}",
            "C17]: eval.yaml:4: eval.select: zzzz does not name a judge of this file\nhint: available judges: mine",
        ),
        ("select: {judge: mine, kl_max: 0}", "C06]: eval.yaml:4: eval.select.kl_max: must be > 0, got 0"),
        ("select: {judge: mine, kl: 3}", "C01]: eval.yaml:4: unknown key eval.select.kl"),
        ("select: {kl_max: 3}", "C05]: eval.yaml:4: eval.select.judge is missing"),
        ("select: ../x", "S03]: eval.yaml:4: eval.select: not a valid name"),
        ("{select: mine, frontier: false}", "C17]: eval.yaml:4: eval.select needs the frontier"),
        ('require: {selected.kl: "< 9"}', "C17]: eval.yaml:4: eval.require: selected.kl needs eval.select"),
        (
            '{select: mine, require: {selected.win_rate.mein.value: "> 0"}}',
            "C17]: eval.yaml:4: eval.require: selected.win_rate.mein.value does not name a judge",
        ),
    ],
)
def test_a_bad_choice_of_a_policy(section: str, said: str) -> None:
    section = section if section.startswith("{") else f"{{{section}}}"
    head = "data: {prompts: p}\njudges: {mine: 'a:b'}\nmodels: {reward: r}\n"
    assert only("eval", f"{head}eval: {section}\n").startswith(f"error[{said}")


def test_a_choice_is_a_name_or_a_name_and_a_bound() -> None:
    head = "data: {prompts: p}\njudges: {mine: 'a:b'}\n"
    for section, bound in (("mine", None), ("{judge: mine}", None), ("{judge: mine, kl_max: 8}", 8.0)):
        Path("eval.yaml").write_text(f"{head}eval: {{select: {section}}}\n")
        found = load("eval", Path("eval.yaml")).eval.selection
        assert found is not None and (found.judge, found.kl_max) == ("mine", bound)
