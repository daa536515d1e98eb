"""Defects found in other PPO trainers (research/peers.md, 1h), and that they are not ours: behaviour, not settings.

The rows that have no test here:
5   TRL 1.12: LoRA leaves the value model fully trainable. Here: tests/test_one_base.py,
    test_adapters_and_the_value_head_learn_and_nothing_else.
13  verl: two of its pages give different numbers for one model. Not a thing that a program can tell.
"""

import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import ppo_folder as stage
import pytest
import tiny
import torch
import typer
import yaml
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_cli import config
from rlhf_cli.cli import app
from rlhf_cli.config.paths import annotation_kind, field_kind
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import save
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer

ROOT = Path(__file__).parents[1]
training = pytest.mark.training


def plain_descent(made, rate: float = 1.0) -> None:
    """SGD in place of AdamW: the step is the gradient itself."""
    made.optimizer = torch.optim.SGD([*made.policy.parameters(), *made.value.parameters()], lr=rate)
    made.scheduler = torch.optim.lr_scheduler.ConstantLR(made.optimizer, 1.0)


def count_steps(monkeypatch) -> list[int]:
    """Optimizer steps of each update of any run from now on."""
    steps: list[int] = []
    update, step = PPOTrainer.update, torch.optim.AdamW.step
    monkeypatch.setattr(PPOTrainer, "update", lambda *given: (steps.append(0), update(*given))[1])

    def counted(*given, **named):
        steps[-1] += 1
        return step(*given, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    return steps


# TRL


@pytest.mark.parametrize("limit", [1e-3, 1e-2])
def test_trl_01_max_grad_norm_limits_the_step(limit):
    for model in ("policy", "value"):
        made, judged = tiny.judged(max_grad_norm=limit, num_ppo_epochs=1, vf_coef=1.0)
        plain_descent(made)
        before = tiny.weights(getattr(made, model))
        made.update(judged)
        assert (tiny.weights(getattr(made, model)) - before).norm().item() == pytest.approx(limit, rel=2e-2)


@pytest.mark.parametrize("model", ["policy", "value"])
def test_trl_02_gradient_checkpointing_recomputes_every_layer_of_policy_and_value(model):
    """A layer's forward pass runs once to judge, and in the update once, or twice where it is recomputed."""
    passes = {}
    for on in (False, True):
        made, judged = tiny.judged(gradient_checkpointing=on, num_ppo_epochs=1)
        assert len(judged.minibatches[0]) == 1, "one micro-batch"
        calls: list[int] = []
        for layer in getattr(made, model).model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        made.update(judged)
        passes[on] = len(calls)
    assert passes == {False: 2, True: 4}, "two layers"


@training
@pytest.mark.parametrize("minibatches,epochs", [(1, 2), (2, 1), (4, 3)])
def test_trl_03_num_mini_batches_makes_that_many_optimizer_steps_an_epoch(run_folder, monkeypatch, minibatches, epochs):
    steps = count_steps(monkeypatch)
    chosen = ("-s", f"ppo.num_mini_batches={minibatches}", "-s", f"ppo.num_ppo_epochs={epochs}")
    assert stage.ppo(run_folder, *chosen, "-s", "ppo.total_episodes=16").exit_code == 0
    assert steps == [minibatches * epochs] * 2


@training
def test_trl_04_the_last_prompt_batch_of_a_pass_makes_as_many_steps_as_any_other(run_folder, monkeypatch):
    """20 prompts, 8 an update: the third and the fifth update reach over the end of a pass."""
    steps = count_steps(monkeypatch)
    stage.write(run_folder, "ppo", {**stage.PPO, "ppo": {**stage.PPO["ppo"], "total_episodes": None}})
    chosen = ("-s", "ppo.num_train_epochs=2.0", "-s", "ppo.num_mini_batches=2", "-s", "ppo.num_ppo_epochs=1")
    assert stage.ppo(run_folder, *chosen).exit_code == 0
    assert steps == [2] * 5
    rows = stage.lines(run_folder / "ppo/metrics.jsonl")
    assert [row["episode"] for row in rows] == [8, 16, 24, 32, 40]


@training
def test_trl_06_the_value_model_is_saved_and_loads_as_the_one_that_was_trained(trained_once):
    run_folder = trained_once[0]
    saved, report = AutoModelForSequenceClassification.from_pretrained(
        run_folder / "ppo/value", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    trained = save.load_tree(run_folder / "ppo/state/step_000004")["trainer"]
    assert {"policy", "value", "optimizer", "scheduler", "kl_coef", "moments", "updates"} <= set(trained)
    assert all(torch.equal(saved.state_dict()[name], tensor) for name, tensor in trained["value"].items())
    start = AutoModelForSequenceClassification.from_pretrained(run_folder / "reward_model")
    assert not torch.equal(tiny.weights(saved), tiny.weights(start))


@pytest.mark.parametrize("pad", [tiny.EOS, 11])
def test_trl_07_pad_equal_to_eos_hides_no_eos_from_training_or_scoring(pad):
    """The same two updates, whatever the padding: same responses, scores on the EOS, metrics and weights."""
    runs = []
    for chosen in (tiny.PAD, pad):
        made = tiny.trainer(policy_seed=3)
        made.engine = HFEngine(made.policy, tiny.EOS, chosen, 0.7)
        stats = [made.step(tiny.prompts(seed=step)) for step in range(2)]
        judged = made.experience
        ends = judged.rollout.ended.nonzero()[:, 0].tolist()
        assert ends and all(judged.rollout.response_tokens(row)[-1] == tiny.EOS for row in ends)
        numbers = [{k: v for k, v in step.items() if not k.endswith(("_s", "_per_s"))} for step in stats]
        runs.append((numbers, tiny.weights(made.policy), tiny.weights(made.value)))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1]) and torch.equal(runs[0][2], runs[1][2])
    free = tiny.trainer(kl_coef=0.0)
    ended = Rollout.from_lists([[5]], [[3, tiny.EOS]], stop_token_id=tiny.EOS, pad=tiny.EOS)
    assert free.make_experience(ended, scores=[2.0]).rewards.tolist() == [[0.0, 2.0]]


# OpenRLHF


def documents() -> dict[str, str]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in found}


def blocks(text: str, *languages: str) -> list[str]:
    return [code for language, code in re.findall(r"(?ms)^```(\w*)\n(.*?)^```", text) if language in languages]


def shell_commands(text: str) -> list[list[str]]:
    """Every command line in the text's code, as words: code blocks, and `code` in a sentence."""
    lines = [
        line for block in blocks(text, "", "sh", "bash", "console") for line in re.sub(r"\\\n", " ", block).splitlines()
    ]
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    lines += re.findall(r"(?s)`((?:rlhf|make) [^`|]+)`", prose)
    found = []
    for line in lines:
        for part in re.split(r"&&|;|\bdo\b|(?<!\S)\|(?!\S)", line.removeprefix("$ ")):
            if re.match(r"\s*(rlhf|make)\s+[a-z-]", part):
                found.append(shlex.split(part, comments=True))
    return found


COMMANDS = [(name, words) for name, text in documents().items() for words in shell_commands(text)]


def test_openrlhf_08_the_readers_of_commands_find_them():
    ours = [words for _, words in COMMANDS if words[0] == "rlhf"]
    assert len(ours) > 15 and {"init", "run", "check", "ppo", "eval"} <= {words[1] for words in ours}
    assert shell_commands(
        "```\nfor s in 1 2; do rlhf ppo -c x \\\n  --set a.b=1  # so\ndone\n```\nor `rlhf run d`"
    ) == [
        ["rlhf", "ppo", "-c", "x", "--set", "a.b=1"],
        ["rlhf", "run", "d"],
    ]


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


def test_openrlhf_08_a_made_up_flag_or_key_would_be_found():
    for bad in ("rlhf ppo -c x --actor.model_name_or_path y", "rlhf init demo d --generate_max_len 3"):
        with pytest.raises(Exception, match=r"[Nn]o such option"):
            test_openrlhf_08_every_command_of_the_documents_exists_with_its_flags_and_keys("here", shlex.split(bad))
    for bad in ("rlhf ppo -c x -s ppo.chosen_key=1", "rlhf run d prompt_max_len=1", "rlhf train x", "make it"):
        with pytest.raises(AssertionError):
            test_openrlhf_08_every_command_of_the_documents_exists_with_its_flags_and_keys("here", shlex.split(bad))


@training
def test_openrlhf_09_the_adaptive_kl_coefficient_moves_during_a_run(trained_folder):
    def coefficients():
        return [row["objective/kl_coef"] for row in stage.lines(trained_folder / "ppo/metrics.jsonl")]

    assert coefficients() == [0.05] * 4
    on = ("-s", "ppo.adap_kl_ctrl=true", "-s", "ppo.horizon=100", "-s", "ppo.target=1000")
    assert stage.ppo(trained_folder, *on, "--fresh").exit_code == 0
    assert coefficients() == pytest.approx([0.05 * (1 - 0.2 * 8 / 100) ** k for k in range(4)])


# LLaMA-Factory


@pytest.mark.slow  # tests/test_packaging.py compares what is imported with what is declared
@training
def test_llama_factory_10_what_an_installation_brings_is_what_it_asks_for_and_everything_imports():
    for text in metadata.requires("rlhf-cli") or []:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            assert wanted.specifier.contains(metadata.version(wanted.name), prereleases=True), wanted
    files = (ROOT / "rlhf_cli").rglob("*.py")
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files}
    code = f"import importlib\nfor name in {sorted(names - {'rlhf_cli.__main__'})!r}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_llama_factory_11_what_is_sampled_is_what_the_log_probs_say(temperature):
    """A model of three tokens: counts of 6000 draws against exp(log-prob) of the judge, chi-square with 2 degrees."""
    policy, ref = (tiny.causal(vocab_size=3, initializer_range=0.2) for _ in range(2))
    policy.generation_config.update(top_k=1, top_p=0.1, repetition_penalty=5.0, temperature=3.0, do_sample=True)
    chosen = tiny.settings(stop_token="none", response_length=1, temperature=temperature, total_episodes=64)
    engine = HFEngine(policy, None, tiny.PAD, temperature)
    made = PPOTrainer(policy, ref, tiny.scorer(vocab_size=3), {}, engine, chosen)
    drawn = made.generate(Prompts.from_lists([[1, 2]] * 6000)).ids[:, -1]
    each = made.make_experience(Rollout.from_lists([[1, 2]] * 3, [[0], [1], [2]]), scores=torch.zeros(3))
    wanted = 6000 * each.logprobs[:, 0].exp()
    assert wanted.sum().item() == pytest.approx(6000, rel=1e-5) and wanted.min() > 100
    counts = torch.bincount(drawn, minlength=3)
    assert ((counts - wanted) ** 2 / wanted).sum().item() < 13.8  # passed by chance once in a thousand seeds


@pytest.mark.parametrize("key,value", [("top_k", 50), ("top_p", 0.7), ("repetition_penalty", 1.1), ("min_p", 0.05)])
def test_llama_factory_11_a_filter_on_sampling_is_refused_in_training(folder, key, value):
    with pytest.raises(RLHFError, match=f"unknown key ppo.{key}"):
        config.load("ppo", folder / "ppo.yaml", [f"ppo.{key}={value}"])


# verl


def test_verl_12_the_defaults_hold_a_kl_term():
    """As they stand, in both recipes and in every preset: the token rewards pay for the distance to the reference."""
    for recipe in ("classic", "reasoning"):
        assert PPOSettings(total_episodes=64, recipe=recipe).kl_coef > 0
    for path in ROOT.glob("configs/*/ppo.yaml"):
        assert yaml.safe_load(path.read_text())["ppo"].get("kl_coef", 0.05) > 0, path
    chosen = PPOSettings(total_episodes=64, response_length=8)
    policy, ref = tiny.causal(seed=3), tiny.causal()
    engine = HFEngine(policy, tiny.EOS, tiny.PAD, chosen.temperature)
    made = PPOTrainer(policy, ref, tiny.scorer(), {}, engine, chosen)
    judged = made.make_experience(tiny.rollout(), scores=torch.zeros(4))
    paid = 0.05 * (judged.logprobs - judged.ref_logprobs)
    torch.testing.assert_close(judged.rewards[judged.mask], -paid[judged.mask])
    assert paid.abs().max() > 1e-3 and judged.advantages.abs().max() > 0


# NeMo-RL


def sections(model, prefix: str = ""):
    """The key paths of all sections of a config class, itself among them as ``; of a table, an entry `x`."""
    yield prefix
    for name, field in model.model_fields.items():
        below = field_kind(field)
        entry = annotation_kind(below.entries).model if below.entries is not None else None
        if below.model and below.model.model_config.get("extra") != "allow":
            yield from sections(below.model, f"{prefix}{name}.")
        elif entry:
            yield from sections(entry, f"{prefix}{name}.x.")


EVAL = "data: {prompts: prompts.jsonl}\nmodels: {sft: model, ppo: model, reward: scorer}\n"
EVERY = [(name, section) for name, model in config.CONFIGS.items() for section in sections(model)]


@pytest.mark.parametrize("name,section", EVERY, ids=lambda x: x or "top")
def test_nemo_14_a_key_that_does_not_exist_is_refused_in_every_section(folder, name, section):
    (folder / "eval.yaml").write_text(EVAL)
    with pytest.raises(RLHFError) as caught:
        config.load(name, folder / f"{name}.yaml", [f"{section}zzzz=1"])
    found = [problem for problem in caught.value.problems if f"{section}zzzz" in problem.text + str(problem.where)]
    assert found and found[0].code in ("C01", "C02"), caught.value


def test_nemo_14_every_section_is_tried():
    assert {("ppo", "ppo."), ("ppo", "rewards.x."), ("ppo", "ppo.overlong_penalty."), ("eval", "eval.")} <= set(EVERY)
    assert {section for name, section in EVERY if name == "sft"} >= {"", "model.", "data.", "sft.", "output."}


@pytest.mark.parametrize("key", sorted(PPOSettings.model_fields))
def test_nemo_14_a_slip_in_any_key_of_ppo_is_told_with_the_key_that_was_meant(folder, key):
    slip = key[: len(key) // 2] + key[len(key) // 2 + 1 :]
    with pytest.raises(RLHFError) as caught:
        config.load("ppo", folder / "ppo.yaml", [f"ppo.{slip}=1"])
    (problem,) = caught.value.problems
    assert problem.code == "C01" and f"did you mean {key}?" in str(problem.hint), problem


@pytest.mark.parametrize("name,field", [("sft", "packng"), ("reward", "centre_rewards")])
def test_nemo_14_nor_is_one_let_through_to_trl(folder, name, field):
    with pytest.raises(RLHFError) as caught:
        config.load(name, folder / f"{name}.yaml", [f"trainer.{field}=1"])
    assert f"trainer.{field}" in str(caught.value)


# DeepSpeed-Chat


def test_deepspeed_15_training_never_decodes_greedily():
    """Whatever the model's own generation config says: the draws are the same, and rows of one prompt differ."""
    found = []
    for greedy in (False, True):
        made = tiny.trainer(num_samples_per_prompt=8)
        if greedy:
            made.policy.generation_config.update(do_sample=False, top_k=1, num_beams=4, temperature=1e-3)
        rollout = made.generate(tiny.prompts(1))
        found.append([tuple(rollout.response_tokens(row)) for row in range(8)])
    assert found[0] == found[1] and len(set(found[0])) > 4


@training
def test_deepspeed_15_a_folder_that_asks_for_greedy_decoding_is_sampled_from(trained_folder):
    run_folder = trained_folder
    plain = (run_folder / "ppo/samples.jsonl").read_bytes()
    path = run_folder / "sft_model/generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": False, "temperature": None, "top_k": 1}))
    assert stage.ppo(run_folder, "--fresh").exit_code == 0
    assert (run_folder / "ppo/samples.jsonl").read_bytes() == plain


# ms-swift


@training
def test_ms_swift_16_policy_and_reward_model_are_each_read_once(run_folder, monkeypatch):
    """The reference, the value model and a second use of the reward model are made from what is loaded."""
    reads = []
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        plain = kind.from_pretrained.__func__

        def read(cls, folder, *given, plain=plain, **named):
            reads.append((cls.__name__, Path(folder).name))
            return plain(cls, folder, *given, **named)

        monkeypatch.setattr(kind, "from_pretrained", classmethod(read))
    again = {"reward": None, "again": {"model": "reward_model", "weight": 0.5}}
    stage.write(run_folder, "ppo", {**stage.PPO, "rewards": again})
    assert stage.ppo(run_folder, stage.ONE).exit_code == 0
    assert sorted(reads) == [
        ("AutoModelForCausalLM", "sft_model"),
        ("AutoModelForSequenceClassification", "reward_model"),
    ]
