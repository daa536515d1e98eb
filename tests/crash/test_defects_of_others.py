"""Defects found in other PPO trainers, and that ours does not have them: behaviour, not settings.

Tested elsewhere:
3   TRL 1.12: fewer optimizer steps than num_mini_batches x num_ppo_epochs
      -> test_ppo_options.py::test_num_mini_batches_and_num_ppo_epochs_make_the_optimizer_steps
5   TRL 1.12: LoRA leaves the value model fully trainable
      -> test_one_base.py::test_adapters_and_the_value_head_learn_and_nothing_else
7   TRL: with pad == EOS, the EOS is not trained
      -> test_ppo_rollout.py::test_pad_equal_to_eos_changes_nothing
      -> test_ppo_trainer.py::test_padding_ids_change_nothing
9   OpenRLHF: the adaptive KL coefficient is never updated
      -> test_ppo_options_scores.py::test_adap_kl_ctrl_by_hand_over_three_updates
13  verl: two of its pages give different numbers for one model. No program can detect that.
"""

import json
import re
import shlex
from pathlib import Path

import ppo_folder as stage
import pytest
import tiny
import torch
import typer
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_cli import config
from rlhf_cli.cli import app
from rlhf_cli.config.fields import fields_of
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import save
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer

ROOT = Path(__file__).parents[2]
training = pytest.mark.training


def count_steps(monkeypatch) -> list[int]:
    """The optimizer steps of each update of any run from now on."""
    steps: list[int] = []
    update, step = PPOTrainer.update, torch.optim.AdamW.step
    monkeypatch.setattr(PPOTrainer, "update", lambda *args: (steps.append(0), update(*args))[1])

    def counted(*args, **kwargs):
        steps[-1] += 1
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    return steps


# TRL


@pytest.mark.parametrize("limit", [1e-3, 1e-2])
@pytest.mark.parametrize("model", ["policy", "value"])
def test_trl_01_max_grad_norm_limits_the_step(limit, model):
    """With SGD the step is the clipped gradient itself."""
    trainer, experience = tiny.trainer_and_experience(max_grad_norm=limit, num_ppo_epochs=1, vf_coef=1.0)
    trainer.optimizer = torch.optim.SGD([*trainer.policy.parameters(), *trainer.value.parameters()], lr=1.0)
    trainer.scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, 1.0)
    before = tiny.weights(getattr(trainer, model))
    assert trainer.update(experience)[f"{model}/grad_norm"] > limit
    assert (tiny.weights(getattr(trainer, model)) - before).norm().item() == pytest.approx(limit, rel=2e-2)


@pytest.mark.parametrize("model", ["policy", "value"])
def test_trl_02_gradient_checkpointing_recomputes_every_layer_of_policy_and_value(model):
    """In the update, a layer's forward pass runs once, or twice if it is recomputed."""
    passes = {}
    for on in (False, True):
        trainer, experience = tiny.trainer_and_experience(gradient_checkpointing=on, num_ppo_epochs=1)
        assert len(experience.minibatches[0]) == 1, "one micro-batch"
        calls: list[int] = []
        for layer in getattr(trainer, model).model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trainer.update(experience)
        passes[on] = len(calls)
    assert passes == {False: 2, True: 4}, "two layers"


@training
def test_trl_04_an_update_that_crosses_the_end_of_a_pass_makes_all_steps(run_folder, monkeypatch):
    """20 prompts, 8 per update: the third and the fifth update cross the end of a pass."""
    steps = count_steps(monkeypatch)
    stage.write(run_folder, "ppo", {**stage.PPO, "ppo": {**stage.PPO["ppo"], "total_episodes": None}})
    chosen = stage.settings("num_train_epochs=2.0", "num_mini_batches=2", "num_ppo_epochs=1")
    assert stage.ppo(run_folder, *chosen).exit_code == 0
    assert steps == [2] * 5
    rows = stage.lines(run_folder / "ppo/metrics.jsonl")
    assert [row["episode"] for row in rows] == [8, 16, 24, 32, 40]


@training
def test_trl_06_the_value_model_is_saved_and_loads_as_the_one_that_was_trained(trained_once):
    run_folder, classifier = trained_once[0], AutoModelForSequenceClassification
    saved, report = classifier.from_pretrained(run_folder / "ppo/value", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    trained = save.load_tree(run_folder / "ppo/state/step_000004")["trainer"]
    assert {"policy", "value", "optimizer", "scheduler", "kl_coef", "moments", "updates"} <= set(trained)
    assert all(torch.equal(saved.state_dict()[name], tensor) for name, tensor in trained["value"].items())
    start = classifier.from_pretrained(run_folder / "reward_model")
    assert not torch.equal(tiny.weights(saved), tiny.weights(start))


# OpenRLHF


def documents() -> dict[str, str]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in found}


def blocks(text: str, *languages: str) -> list[str]:
    return [code for language, code in re.findall(r"(?ms)^```(\w*)\n(.*?)^```", text) if language in languages]


def shell_commands(text: str) -> list[list[str]]:
    """Every command line in code blocks and in `code` of a sentence, as words."""
    shell = "\n".join(blocks(text, "", "sh", "bash", "console"))
    lines = re.sub(r"\\\n", " ", shell).splitlines()
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    lines += re.findall(r"(?s)`((?:rlhf|make) [^`|]+)`", prose)
    found = []
    for line in lines:
        for part in re.split(r"&&|;|\bdo\b|(?<!\S)\|(?!\S)", line.removeprefix("$ ")):
            if re.match(r"\s*(rlhf|make)\s+[a-z-]", part):
                found.append(shlex.split(part, comments=True))
    return found


COMMANDS = [(name, words) for name, text in documents().items() for words in shell_commands(text)]


def test_openrlhf_08_the_readers_of_commands_work():
    ours = [words for _, words in COMMANDS if words[0] == "rlhf"]
    assert len(ours) > 15 and {"init", "run", "check", "ppo", "eval"} <= {words[1] for words in ours}
    text = "```\nfor s in 1 2; do rlhf ppo -c x \\\n  --set a.b=1  # so\ndone\n```\nor `rlhf run d`"
    assert shell_commands(text) == [["rlhf", "ppo", "-c", "x", "--set", "a.b=1"], ["rlhf", "run", "d"]]


@pytest.mark.parametrize("place,words", COMMANDS, ids=lambda x: x if isinstance(x, str) else " ".join(x)[:60])
def test_openrlhf_08_every_command_of_the_documents_exists_with_its_flags_and_keys(place, words):
    if words[0] == "make":
        targets = re.findall(r"(?m)^([a-z][a-z -]*):", (ROOT / "Makefile").read_text())
        known = {name for line in targets for name in line.split()}
        assert {word for word in words[1:] if "=" not in word} <= known | set(config.CONFIGS), place
        return
    group = typer.main.get_command(app)
    if words[1].startswith("--"):
        assert words[1] in {option for each in group.params for option in each.opts}, f"{place}: {words[1]}"
        return
    command = group.commands.get(words[1])
    assert command is not None, f"{place}: rlhf {words[1]}"
    parser = command.make_parser(command.context_class(command))
    given, _, _ = parser.parse_args(words[2:])  # raises for a flag that there is not
    written = [*(given.get("set_") or []), *(given.get("assignments") or [])]
    stages = [words[1]] if words[1] in config.CONFIGS else list(config.CONFIGS)
    for assignment in written:
        key, equals, _ = assignment.partition("=")
        assert equals and any(config.accepts_key(name, key) for name in stages), f"{place}: {key}"


@pytest.mark.parametrize(
    "place,block", [(name, block) for name, text in documents().items() for block in blocks(text, "yaml")]
)
def test_openrlhf_08_every_yaml_of_the_documents_has_keys_that_exist(place, block):
    def leaves(tree, prefix=""):
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    keys = list(leaves(yaml.safe_load(block)))
    assert keys and any(all(config.accepts_key(name, key) for key in keys) for name in config.CONFIGS), (place, keys)


def test_openrlhf_08_an_invented_flag_or_key_is_detected():
    for bad in ("rlhf ppo -c x --actor.model_name_or_path y", "rlhf init demo d --generate_max_len 3"):
        with pytest.raises(Exception, match=r"[Nn]o such option"):
            test_openrlhf_08_every_command_of_the_documents_exists_with_its_flags_and_keys("here", shlex.split(bad))
    for bad in ("rlhf ppo -c x -s ppo.chosen_key=1", "rlhf run d prompt_max_len=1", "rlhf train x", "make it"):
        with pytest.raises(AssertionError):
            test_openrlhf_08_every_command_of_the_documents_exists_with_its_flags_and_keys("here", shlex.split(bad))


# LLaMA-Factory


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_llama_factory_11_samples_have_the_distribution_of_the_log_probs(temperature):
    """Three tokens: counts of 6000 samples against exp(log-prob), chi-square with 2 degrees of freedom."""
    policy, ref = (tiny.causal(vocab_size=3, initializer_range=0.2) for _ in range(2))
    policy.generation_config.update(top_k=1, top_p=0.1, repetition_penalty=5.0, temperature=3.0, do_sample=True)
    chosen = tiny.settings(stop_token="none", response_length=1, temperature=temperature, total_episodes=64)
    engine = HFEngine(policy, None, tiny.PAD, temperature)
    trainer = PPOTrainer(policy, ref, tiny.scorer(vocab_size=3), {}, engine, chosen)
    tokens = trainer.generate(Prompts.from_lists([[1, 2]] * 6000)).ids[:, -1]
    each = trainer.make_experience(Rollout.from_lists([[1, 2]] * 3, [[0], [1], [2]]), scores=torch.zeros(3))
    expected = 6000 * each.logprobs[:, 0].exp()
    assert expected.sum().item() == pytest.approx(6000, rel=1e-5) and expected.min() > 100
    counts = torch.bincount(tokens, minlength=3)
    assert ((counts - expected) ** 2 / expected).sum().item() < 13.8  # exceeded once in a thousand seeds


@pytest.mark.parametrize("key,value", [("top_k", 50), ("top_p", 0.7), ("repetition_penalty", 1.1), ("min_p", 0.05)])
def test_llama_factory_11_a_filter_on_sampling_is_rejected_in_training(folder, key, value):
    with pytest.raises(RLHFError, match=f"unknown key ppo.{key}"):
        config.load("ppo", folder / "ppo.yaml", [f"ppo.{key}={value}"])


# verl


def test_verl_12_the_defaults_have_a_kl_term():
    """In both recipes and in every preset."""
    for recipe in ("classic", "reasoning"):
        assert PPOSettings(total_episodes=64, recipe=recipe).kl_coef > 0
    for path in ROOT.glob("configs/*/ppo.yaml"):
        assert yaml.safe_load(path.read_text())["ppo"].get("kl_coef", 0.05) > 0, path


# NeMo-RL


def sections(model, prefix: str = ""):
    """The key paths of all sections of a config class, itself among them as ``; of a table, an entry `x`."""
    yield prefix
    for name, key in fields_of(model).items():
        if key.section and not key.allows_any_key:
            yield from sections(key.section, f"{prefix}{name}.")
        elif key.entry and key.entry.section:
            yield from sections(key.entry.section, f"{prefix}{name}.x.")


EVAL = "data: {prompts: prompts.jsonl}\nmodels: {sft: model, ppo: model, reward: scorer}\n"
EVERY = [(name, section) for name, model in config.CONFIGS.items() for section in sections(model)]


@pytest.mark.parametrize("name,section", EVERY, ids=lambda x: x or "top")
def test_nemo_14_an_unknown_key_is_rejected_in_every_section(folder, name, section):
    (folder / "eval.yaml").write_text(EVAL)
    with pytest.raises(RLHFError) as caught:
        config.load(name, folder / f"{name}.yaml", [f"{section}zzzz=1"])
    found = [problem for problem in caught.value.problems if f"{section}zzzz" in problem.text + str(problem.where)]
    assert found and found[0].code in ("C01", "C02"), caught.value


def test_nemo_14_every_section_is_tried():
    assert {("ppo", "ppo."), ("ppo", "rewards.x."), ("ppo", "ppo.overlong_penalty."), ("eval", "eval.")} <= set(EVERY)
    assert {section for name, section in EVERY if name == "sft"} >= {"", "model.", "data.", "sft.", "output."}


@pytest.mark.parametrize("key", sorted(PPOSettings.model_fields))
def test_nemo_14_a_typo_in_any_key_of_ppo_is_rejected_with_the_right_key(folder, key):
    slip = key[: len(key) // 2] + key[len(key) // 2 + 1 :]
    with pytest.raises(RLHFError) as caught:
        config.load("ppo", folder / "ppo.yaml", [f"ppo.{slip}=1"])
    (problem,) = caught.value.problems
    assert problem.code == "C01" and f"did you mean {key}?" in str(problem.hint), problem


@pytest.mark.parametrize("name,field", [("sft", "packng"), ("reward", "centre_rewards")])
def test_nemo_14_a_typo_in_trls_fields_is_rejected(folder, name, field):
    with pytest.raises(RLHFError) as caught:
        config.load(name, folder / f"{name}.yaml", [f"trainer.{field}=1"])
    assert f"trainer.{field}" in str(caught.value)


# DeepSpeed-Chat


@training
def test_deepspeed_15_generation_config_does_not_make_training_greedy(trained_folder):
    plain = (trained_folder / "ppo/samples.jsonl").read_bytes()
    path = trained_folder / "sft_model/generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": False, "temperature": None, "top_k": 1}))
    assert stage.ppo(trained_folder, "--fresh").exit_code == 0
    assert (trained_folder / "ppo/samples.jsonl").read_bytes() == plain


# ms-swift


@training
def test_ms_swift_16_policy_and_reward_model_are_each_read_once(run_folder, monkeypatch):
    """The reference, the value model and a second use of the reward model are made from what is loaded."""
    reads = []
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        plain = kind.from_pretrained.__func__

        def read(cls, folder, *args, plain=plain, **kwargs):
            reads.append(Path(folder).name)
            return plain(cls, folder, *args, **kwargs)

        monkeypatch.setattr(kind, "from_pretrained", classmethod(read))
    again = {"reward": None, "again": {"model": "reward_model", "weight": 0.5}}
    stage.write(run_folder, "ppo", {**stage.PPO, "rewards": again})
    assert stage.ppo(run_folder, stage.ONE).exit_code == 0
    assert sorted(reads) == ["reward_model", "sft_model"]
