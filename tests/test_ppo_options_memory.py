"""Options that make PPO fit: reference and reward models that wait elsewhere, averages of 8 bits."""

import json
import os
import signal
from pathlib import Path

import pytest
import tiny
import torch
from ppo_folder import PPO, ppo, rlhf, untimed, write
from test_cli import is_one_error
from torch import nn

from rlhf_cli import runs
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.models import save, tokenizers
from rlhf_cli.ppo.optimizer import adamw_8bit, embedding_weights
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.ppo.trainer import PPOTrainer as Trainer
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.stages import hardware

WIDE = {"hidden_size": 64, "intermediate_size": 128}  # matrices of 4096 numbers and more, which 8 bits begin with


# offload


def places(model: nn.Module) -> list[int]:
    return [weight.data_ptr() for weight in [*model.parameters(), *model.buffers()]]


@pytest.mark.parametrize("changes", [{}, {"kl_in": "loss", "kl_estimator": "full"}, {"packing": False}])
def test_models_that_wait_elsewhere_change_no_bit(changes):
    made = {
        wait: tiny.trainer(
            offload=wait, rewards={"reward": ModelReward(tiny.scorer(), 4, offloaded=wait)}, policy_seed=3, **changes
        )
        for wait in (False, True)
    }
    stats = {wait: [each.step(tiny.prompts(seed=step)) for step in range(2)] for wait, each in made.items()}
    for ours, theirs in zip(stats[True], stats[False], strict=True):
        assert {k: v for k, v in ours.items() if not k.endswith("_s")} == {
            k: v for k, v in theirs.items() if not k.endswith("_s")
        }
    assert all(torch.equal(tiny.weights(made[True].__dict__[m]), tiny.weights(made[False].__dict__[m]))
               for m in ("policy", "value"))  # fmt: skip


@pytest.mark.parametrize("exact", [False, True])
def test_a_copy_is_on_the_device_while_a_model_is_read_and_at_no_other_time(exact, monkeypatch):
    """On a CPU the device's memory is the same, but the copy is another."""
    scorer = tiny.scorer()
    changes = {"kl_in": "loss", "kl_estimator": "full"} if exact else {}
    made = tiny.trainer(rewards={"reward": ModelReward(scorer, 4, offloaded=True)}, offload=True, **changes)
    home = {"ref": places(made.ref), "reward": places(scorer)}
    away: dict[str, set[str]] = {}

    def watched(name: str, model: nn.Module) -> None:
        def look(*_):
            assert not set(places(model)) & set(home[name]), f"{name} is read where it waits"
            away.setdefault(phase, set()).add(name)

        model.register_forward_pre_hook(look)

    watched("ref", made.ref.get_decoder())
    watched("reward", scorer.base_model)
    waits = {"ref": made.ref, "reward": scorer}

    def at_home(*_):
        assert all(places(waits[name]) == home[name] for name in (() if exact and phase == "update" else ("ref",)))
        assert places(scorer) == home["reward"]

    made.value.base_model.register_forward_pre_hook(lambda *_: at_home() if phase == "update" else None)
    phase = "rollout"
    rollout = made.generate(tiny.prompts())
    phase = "judge"
    experience = made.make_experience(rollout)
    phase = "update"
    made.update(experience)
    assert away == {"judge": {"ref", "reward"}} | ({"update": {"ref"}} if exact else {})
    assert all(places(waits[name]) == home[name] for name in waits)


def test_the_stage_lets_models_wait_and_writes_the_same_bytes(run_folder, monkeypatch):
    """This machine's CPU stands for a GPU."""
    table = {"generate_ref_response": True, "num_sample_generations": 2}
    write(run_folder, "ppo", PPO | {"ppo": PPO["ppo"] | table})
    assert ppo(run_folder).exit_code == 0
    plain = left(run_folder)
    seen = []
    load = Trainer.__init__
    monkeypatch.setattr(hardware, "_on_cpu", lambda: False)
    monkeypatch.setattr(Trainer, "__init__", lambda self, *a, **k: (load(self, *a, **k), seen.append(self))[0])
    result = ppo(run_folder, "--fresh", "-s", "ppo.offload=true")
    assert result.exit_code == 0 and "E01" not in result.stderr, result.stderr
    assert seen[0].settings.offload and seen[0].rewards["reward"].offloaded
    assert left(run_folder) == plain


def left(folder: Path) -> tuple[object, ...]:
    files = json.loads((folder / "ppo/manifest.json").read_text())["files"]
    weights = {name: told["sha256"] for name, told in files.items() if name.endswith(".safetensors")}
    return weights, untimed(folder / "ppo/metrics.jsonl"), untimed(folder / "ppo/samples.jsonl")


def test_on_a_cpu_there_is_nowhere_to_send_them_which_is_said(run_folder):
    if torch.cuda.is_available():
        pytest.skip("this machine computes on a GPU")
    result = ppo(run_folder, "-s", "ppo.offload=true")
    assert result.exit_code == 0 and result.stderr.count("warning[E01]") == 1
    assert "ppo.offload: offload moves models from a GPU to CPU memory, and this machine has no GPU" in result.stderr


def test_what_the_policy_uses_cannot_be_sent_away(run_folder):
    shared = ppo(run_folder, "-s", "ppo.offload=true", "-s", "ppo.num_shared_layers=1")
    assert is_one_error(shared, "C17") and "num_shared_layers, whose layers the policy uses" in shared.stderr
    one_base = ppo(run_folder, "-s", "ppo.offload=true", "-s", "models.adapters.kind=lora")
    assert is_one_error(one_base, "C17") and "offload cannot be combined with models.adapters" in one_base.stderr


# adamw_8bit


def wide(seed: int = 0, **changes) -> PPOTrainer:
    settings = tiny.settings(**changes)
    policy, ref = (tiny.causal("llama", each, **WIDE) for each in (3, 0))
    reward, value = tiny.scorer("llama", **WIDE), tiny.scorer("llama", **WIDE)
    engine = HFEngine(policy, tiny.EOS, tiny.PAD, settings.temperature)
    return PPOTrainer(policy, ref, value, {"reward": ModelReward(reward, 4)}, engine, settings, seed=seed)


def test_averages_take_a_quarter_but_those_of_embeddings_and_small_weights():
    made = wide(optim="adamw_8bit")
    made.step(tiny.prompts())
    states = {name: made.optimizer.state[weight] for name, weight in made.policy.named_parameters()}
    kinds = {name: state["state1"].dtype for name, state in states.items()}
    layer = "model.layers.0."
    assert kinds[layer + "mlp.gate_proj.weight"] == kinds[layer + "self_attn.q_proj.weight"] == torch.uint8
    assert kinds[layer + "input_layernorm.weight"] == kinds["model.embed_tokens.weight"] == torch.float32


def test_embeddings_stay_in_32_bits_however_large():
    table = nn.Embedding(256, 64)
    optimizer = adamw_8bit(
        [{"params": [table.weight]}], full_precision=embedding_weights([nn.Sequential(table)]), lr=0.1
    )
    other = nn.Linear(64, 256, bias=False)
    beside = adamw_8bit([{"params": [other.weight]}], full_precision=set(), lr=0.1)
    for weight, each in ((table.weight, optimizer), (other.weight, beside)):
        weight.grad = torch.ones_like(weight)
        each.step()
    assert optimizer.state[table.weight]["state1"].dtype == torch.float32
    assert beside.state[other.weight]["state1"].dtype == torch.uint8


def test_steps_of_8_bits_are_near_those_of_32():
    """The paper's blockwise rounding: steps of a like size in the like direction, and not the same."""
    moved = {}
    for name in ("adamw_torch", "adamw_8bit"):
        made = wide(optim=name, learning_rate=1e-3, weight_decay=0.1)
        before = torch.cat([tiny.weights(made.policy), tiny.weights(made.value)])
        experience = made.make_experience(made.generate(tiny.prompts()))
        made.update(experience)  # four epochs: four steps
        moved[name] = torch.cat([tiny.weights(made.policy), tiny.weights(made.value)]) - before
    one, other = moved.values()
    assert nn.functional.cosine_similarity(one, other, dim=0) > 0.98
    assert float(other.norm() / one.norm()) == pytest.approx(1, abs=0.05)
    assert not torch.equal(one, other)


def test_value_learning_rate_and_lr_0_hold_in_8_bits():
    made = wide(optim="adamw_8bit", learning_rate=0.0, value_learning_rate=1e-3)
    policy, value = tiny.weights(made.policy), tiny.weights(made.value)
    stats = made.step(tiny.prompts())
    assert torch.equal(tiny.weights(made.policy), policy) and not torch.equal(tiny.weights(made.value), value)
    assert (stats["lr"], stats["value/lr"]) == (0.0, 1e-3)


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    texts = [f"tell me about the {thing} number {n}" for n in range(4) for thing in ("sea", "moon", "bread", "cat")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    tokenizer = tokenizers.train_tokenizer(folder / "prompts.jsonl", 280)
    for name, make in (("sft_model", tiny.causal), ("reward_model", tiny.scorer)):
        model = make(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, bos_token_id=None, **WIDE)
        save.set_special_token_ids(model, tokenizer, 1)
        save.save_model(model, tokenizer, folder / name, "A tiny model.")
    write(folder, "ppo", PPO | {"ppo": PPO["ppo"] | {"optim": "adamw_8bit"}})
    return folder


def test_a_run_in_8_bits_resumes_to_the_same_bytes(wide_folder, monkeypatch):
    assert ppo(wide_folder).exit_code == 0
    straight = left(wide_folder)
    step, calls = PPOTrainer.step, []

    def stopped(self, prompts):
        calls.append(0)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, prompts)

    monkeypatch.setattr(PPOTrainer, "step", stopped)
    assert ppo(wide_folder, "--fresh").exit_code == 143
    state = save.load_tree(runs.state_at(wide_folder / "ppo/state", 2))["trainer"]["optimizer"]["state"]
    assert torch.uint8 in {t.dtype for each in state.values() for t in each["__bnb_optimizer_quant_state__"].values()}
    again = ppo(wide_folder)
    assert again.exit_code == 0 and "resumes at step 2" in again.stderr
    assert left(wide_folder) == straight


def test_a_run_in_8_bits_cannot_be_replayed_which_is_said(wide_folder):
    if not (wide_folder / "ppo/manifest.json").exists():
        assert ppo(wide_folder).exit_code == 0
    result = rlhf("verify", wide_folder / "ppo")
    assert is_one_error(result, "C06") and "ppo.optim" in result.stderr and "cannot be repeated" in result.stderr


def test_fp16_is_refused_with_bf16_as_the_hint():
    with pytest.raises(ValueError, match="PPO cannot train in fp16"):
        PPOSettings(total_episodes=8, fp16=True)
