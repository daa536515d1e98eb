"""Options that save memory: offloaded models, frozen matrices in bfloat16, optimizer moments of 8 bits."""

from pathlib import Path

import pytest
import tiny
import torch
from ppo_folder import EVAL, ONE, PPO, PROMPTS, manifest, ppo, settings, stop_in_update, untimed, write, write_models
from run_cli import is_one_error, must_succeed, rlhf
from torch import nn

from rlhf_cli import jsonl, runs
from rlhf_cli.models import devices, lora, save
from rlhf_cli.models.load import load_causal_lm
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.stages.common import machine

WIDE = {"hidden_size": 64, "intermediate_size": 128}  # matrices of 4096 numbers and more, the minimum of 8 bits


# offload


def places(model: nn.Module) -> list[int]:
    return [weight.data_ptr() for weight in [*model.parameters(), *model.buffers()]]


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, {"kl_in": "loss", "kl_estimator": "full"}, {"packing": False}])
def test_offloading_changes_no_bit(changes):
    runs = []
    for offload in (False, True):
        rewards = {"reward": ModelReward(tiny.scorer(), 4, offloaded=offload)}
        trainer = tiny.trainer(offload=offload, rewards=rewards, policy_seed=3, **changes)
        stats = [trainer.step(tiny.prompts(seed=step)) for step in range(2)]
        untimed_stats = [{key: n for key, n in each.items() if not key.endswith("_s")} for each in stats]
        runs.append((untimed_stats, tiny.weights(trainer.policy), tiny.weights(trainer.value)))
    assert runs[0][0] == runs[1][0] and all(torch.equal(runs[0][i], runs[1][i]) for i in (1, 2))


@pytest.mark.parametrize("exact", [False, True])
def test_a_copy_is_on_the_device_only_while_a_model_runs(exact, monkeypatch):
    """On a CPU the copy is in the same memory, at another address."""
    scorer = tiny.scorer()
    changes = {"kl_in": "loss", "kl_estimator": "full"} if exact else {}
    trainer = tiny.trainer(rewards={"reward": ModelReward(scorer, 4, offloaded=True)}, offload=True, **changes)
    home = {"ref": places(trainer.ref), "reward": places(scorer)}
    away: dict[str, set[str]] = {}

    def watch(name: str, model: nn.Module) -> None:
        def look(*_):
            assert not set(places(model)) & set(home[name]), f"{name} runs where it is stored"
            away.setdefault(phase, set()).add(name)

        model.register_forward_pre_hook(look)

    watch("ref", trainer.ref.get_decoder())
    watch("reward", scorer.base_model)
    phase = "rollout"
    rollout = trainer.generate(tiny.prompts())
    phase = "judge"
    experience = trainer.make_experience(rollout)
    assert places(scorer) == home["reward"] and places(trainer.ref) == home["ref"]
    phase = "update"
    trainer.update(experience)
    assert away == {"judge": {"ref", "reward"}} | ({"update": {"ref"}} if exact else {})
    assert places(scorer) == home["reward"] and places(trainer.ref) == home["ref"]


@pytest.mark.full
def test_the_stage_offloads_models_and_writes_the_same_bytes(run_folder, monkeypatch):
    """This machine's CPU takes the role of a GPU."""
    write(run_folder, "ppo", PPO | {"ppo": PPO["ppo"] | {"generate_ref_response": True, "num_sample_generations": 2}})
    assert ppo(run_folder).exit_code == 0
    plain = output(run_folder)
    trainers, init = [], PPOTrainer.__init__
    monkeypatch.setattr(devices, "_on_cpu", lambda: False)
    on_a_gpu = lambda settings: settings.model_copy(update={"bf16": False})  # noqa: E731
    monkeypatch.setattr(machine, "settings_for_this_machine", on_a_gpu)
    monkeypatch.setattr(PPOTrainer, "__init__", lambda self, *a, **k: (init(self, *a, **k), trainers.append(self))[0])
    result = ppo(run_folder, "--fresh", "-s", "ppo.offload=true")
    assert result.exit_code == 0 and "E01" not in result.stderr, result.stderr
    assert trainers[0].settings.offload and trainers[0].rewards["reward"].offloaded
    assert output(run_folder) == plain


# Frozen matrices in bfloat16


@pytest.mark.full
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_frozen_matrices_in_bfloat16_change_no_bit_under_autocast(family, monkeypatch):
    """Of the reference and the reward model; half of their matrices' bytes, and the KL of the first update stays 0."""
    experiences = []
    for stored in (True, False):
        if not stored:
            monkeypatch.setattr(lora, "autocast_matrices", lambda model: None)
        source = ModelReward(tiny.scorer(family), bf16=True)
        trainer = tiny.trainer(family=family, bf16=True, rewards={"reward": source})
        matrices = sum(weight.numel() for weight in {layer.weight for _, _, layer in lora.linear_layers(trainer.ref)})
        policy, ref = (sum(w.nbytes for w in each.parameters()) for each in (trainer.policy, trainer.ref))
        saved = policy - ref
        assert saved == 2 * matrices * stored
        experiences.append(trainer.make_experience(trainer.generate(tiny.prompts())))
    for name in ("ref_logprobs", "logprobs", "kl", "rewards"):
        assert torch.equal(*(getattr(experience, name) for experience in experiences)), name
    assert not experiences[0].kl.any()


@pytest.mark.full
def test_the_stages_store_frozen_matrices_in_bfloat16(run_folder, monkeypatch):
    """With ppo.bf16 and eval.bf16; without a GPU the default is float32."""
    stored, plain = [], lora.autocast_matrices
    monkeypatch.setattr(lora, "autocast_matrices", lambda model: (stored.append(type(model).__name__), plain(model)))
    write(run_folder, "eval", EVAL)
    assert ppo(run_folder, ONE).exit_code == 0 and rlhf("eval", "-c", run_folder / "eval.yaml").exit_code == 0
    assert stored == []
    must_succeed(ppo(run_folder, ONE, "--fresh", "--debug", "-s", "ppo.bf16=true"))
    assert sorted(stored) == ["LlamaForCausalLM", "LlamaForSequenceClassification"]
    assert load_causal_lm(run_folder / "ppo/model").dtype == torch.float32
    stored.clear()
    must_succeed(rlhf("eval", "-c", run_folder / "eval.yaml", "--fresh", "-s", "eval.bf16=true"))
    assert stored.count("LlamaForCausalLM") == 3
    assert "LlamaForSequenceClassification" in stored


def output(folder: Path) -> tuple[object, ...]:
    hashes = {name: entry["sha256"] for name, entry in manifest(folder)["files"].items() if name.endswith("tensors")}
    return hashes, untimed(folder / "ppo/metrics.jsonl"), untimed(folder / "ppo/samples.jsonl")


@pytest.mark.full
def test_e01_offload_without_a_gpu(run_folder):
    if torch.cuda.is_available():
        pytest.skip("this machine computes on a GPU")
    result = ppo(run_folder, "-s", "ppo.offload=true")
    assert result.exit_code == 0 and result.stderr.count("warning[E01]") == 1
    assert "ppo.offload: offload moves models from a GPU to CPU memory, and this machine has no GPU" in result.stderr


def test_c17_shared_weights_cannot_be_offloaded(run_folder):
    shared = ppo(run_folder, *settings("offload=true", "num_shared_layers=1"))
    assert is_one_error(shared, "C17", "num_shared_layers, whose layers the policy uses")
    adapters = ppo(run_folder, *settings("offload=true", "models.adapters.kind=lora"))
    assert is_one_error(adapters, "C17", "offload cannot be combined with models.adapters")


# adamw_8bit


def wide(seed: int = 0, **changes) -> PPOTrainer:
    chosen = tiny.settings(**changes)
    policy, ref = (tiny.causal("llama", each, vocab_size=64, **WIDE) for each in (3, 0))
    reward, value = (tiny.scorer("llama", vocab_size=64, **WIDE) for _ in range(2))
    engine = HFEngine(policy, tiny.EOS, tiny.PAD, chosen.temperature)
    return PPOTrainer(policy, ref, value, {"reward": ModelReward(reward, 4)}, engine, chosen, seed=seed)


def test_moments_have_8_bits_but_those_of_embeddings_and_small_weights():
    trainer = wide(optim="adamw_8bit")
    trainer.update(trainer.make_experience(tiny.rollout()))
    states = {name: trainer.optimizer.state[weight] for name, weight in trainer.policy.named_parameters()}
    kinds = {name: state["state1"].dtype for name, state in states.items()}
    assert trainer.policy.model.embed_tokens.weight.numel() == 4096, "enough for 8 bits"
    layer = "model.layers.0."
    assert kinds[layer + "mlp.gate_proj.weight"] == kinds[layer + "self_attn.q_proj.weight"] == torch.uint8
    assert kinds[layer + "input_layernorm.weight"] == kinds["model.embed_tokens.weight"] == torch.float32


def test_steps_of_8_bits_are_near_those_of_32():
    """Blockwise rounding: steps of similar size and direction, but not equal."""
    moved = {}
    for name in ("adamw_torch", "adamw_8bit"):
        trainer = wide(optim=name, learning_rate=1e-3, weight_decay=0.1)
        before = torch.cat([tiny.weights(trainer.policy), tiny.weights(trainer.value)])
        experience = trainer.make_experience(trainer.generate(tiny.prompts()))
        trainer.update(experience)  # four epochs: four steps
        moved[name] = torch.cat([tiny.weights(trainer.policy), tiny.weights(trainer.value)]) - before
    one, other = moved.values()
    assert nn.functional.cosine_similarity(one, other, dim=0) > 0.98
    assert float(other.norm() / one.norm()) == pytest.approx(1, abs=0.05)
    assert not torch.equal(one, other)


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    jsonl.write_jsonl(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    write_models(folder, **WIDE)
    write(folder, "ppo", PPO | {"ppo": PPO["ppo"] | {"optim": "adamw_8bit"}})
    return folder


@pytest.mark.full
def test_a_run_in_8_bits_resumes_to_the_same_bytes(wide_folder):
    assert ppo(wide_folder).exit_code == 0
    straight = output(wide_folder)
    stop_in_update(wide_folder, 2, "--fresh")
    state = save.load_tree(runs.state_at(wide_folder / "ppo/state", 2))["trainer"]["optimizer"]["state"]
    assert torch.uint8 in {t.dtype for each in state.values() for t in each["__bnb_optimizer_quant_state__"].values()}
    must_succeed(ppo(wide_folder), "resumes at step 2")
    assert output(wide_folder) == straight
    must_succeed(rlhf("verify", wide_folder / "ppo"))
