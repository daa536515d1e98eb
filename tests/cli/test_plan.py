"""`rlhf plan`: memory and time of stages without loading weights, compared with models, hand counts and real stages."""

import itertools
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from bad_inputs import check, foreign_scorer, replace
from plan_cases import Case, measured, write
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner, Result

from rlhf_cli import progress, system, terminal
from rlhf_cli.cli import app
from rlhf_cli.commands import plan as command
from rlhf_cli.commands.plan import show
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.jsonl import append_jsonl, read_jsonl
from rlhf_cli.models import build, devices, forward, lora
from rlhf_cli.models.load import load_causal_lm, load_reward_model, read_config
from rlhf_cli.planning import duration, memory
from rlhf_cli.planning.memory import Lengths
from rlhf_cli.planning.phase_memory import DEFAULT_ADAPTERS, KINDS, MODES
from rlhf_cli.planning.stage_inputs import ModelResolver
from rlhf_cli.planning.stage_models import Target, gpu_table, models_in_memory

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine computes on a GPU")
GPU = ("--gpu", "80")
KNOWN: dict[Any, dict[str, dict[str, Any]]] = {}  # plans by arguments and files


@pytest.fixture(autouse=True)
def _no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e9)


@pytest.fixture
def three(folder: Path) -> Path:
    foreign_scorer(folder)
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 640\n  response_length: 24")
    return folder


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def plan_json(*arguments: str) -> dict[str, dict[str, Any]]:
    """Return stage -> its plan, at a fixed rate unless one is in the arguments, so that nothing is measured."""
    result = plan("--json", *(() if "--flops" in arguments else ("--flops", "1e9")), *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    stages: dict[str, dict[str, Any]] = json.loads(result.stdout)["stages"]
    return stages


def planned(*arguments: str) -> dict[str, dict[str, Any]]:
    """Return plan_json, computed once for the same arguments and files."""
    files = frozenset((str(path), path.read_bytes()) for path in Path().rglob("*") if path.is_file())
    if (arguments, files) not in KNOWN:
        KNOWN[arguments, files] = plan_json(*arguments)
    return KNOWN[arguments, files]


def phase(stage: dict[str, Any], name: str) -> dict[str, Any]:
    (only,) = (each for each in stage["phases"] if each["name"] == name)
    return only


def size(stage: dict[str, Any], name: str) -> dict[str, int]:
    """Return the bytes of a phase by kind."""
    kinds: dict[str, int] = phase(stage, name)["bytes"]
    return kinds


def ppo(*arguments: str) -> dict[str, Any]:
    return planned("ppo.yaml", *arguments)["ppo"]


def policy_and_scorer() -> tuple[int, int]:
    return load_causal_lm("model").num_parameters(), load_reward_model("scorer").num_parameters()


# Weights, gradients, optimizer


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(
    ("make", "from_config"),
    [(tiny.causal, build.causal_lm_from_config), (tiny.scorer, build.reward_model_from_config)],
)
def test_parameters_are_those_of_the_files(make: Any, from_config: Any, family: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    model = from_config(read_config(tmp_path))
    assert model.num_parameters() == sum(w.numel() for w in load_file(tmp_path / "model.safetensors").values())
    assert all(weight.device == build.META for weight in model.parameters())


def test_ppo_keeps_four_models_and_trains_two(three: Path) -> None:
    policy, scorer = policy_and_scorer()
    assert ppo()["parameters"] == {"policy": policy, "reference": policy, "value": scorer, "reward": scorer}
    for name in ("rollout", "judge", "update"):
        kinds = size(ppo(), name)
        assert 0 <= kinds["weights"] - 4 * (2 * policy + 2 * scorer) < 500  # buffers
        gradients = 4 * (policy + scorer) if name == "update" else 0
        assert (kinds.get("gradients", 0), kinds["optimizer"]) == (gradients, 8 * (policy + scorer))


def test_value_heads_shared_layers_and_advantages_without_values_save_memory(three: Path) -> None:
    policy = load_causal_lm("model")
    head = size(ppo("models.value=policy_head"), "update")
    assert head["gradients"] == 4 * (policy.num_parameters() + policy.config.hidden_size)
    frozen = sum(w.numel() for part in (policy.model.embed_tokens, policy.model.layers[0]) for w in part.parameters())
    full, part = size(ppo(), "update"), size(ppo("ppo.num_shared_layers=1"), "update")
    saved = {kind: full[kind] - part[kind] for kind in ("weights", "gradients", "optimizer")}
    assert saved == pytest.approx({"weights": 4 * frozen, "gradients": 4 * frozen, "optimizer": 8 * frozen}, abs=100)
    policy, scorer = policy_and_scorer()
    without, full = ppo("ppo.advantage=rloo", "ppo.num_samples_per_prompt=2"), ppo()
    assert without["parameters"] == {"policy": policy, "reference": policy, "reward": scorer}
    saved = {kind: size(full, "update")[kind] - size(without, "update")[kind] for kind in ("gradients", "optimizer")}
    assert saved == {"gradients": 4 * scorer, "optimizer": 8 * scorer}
    assert 0 <= size(full, "judge")["weights"] - size(without, "judge")["weights"] - 4 * scorer < 500  # buffers
    assert phase(full, "update")["flops"] > phase(without, "update")["flops"]


def test_the_average_is_in_main_memory(three: Path) -> None:
    policy, _ = policy_and_scorer()
    on_cpu, on_gpu = ([ppo(*where, *more) for more in ((), ("ppo.average=0.9",))] for where in ((), GPU))
    added = [size(on_cpu[1], name)["weights"] - size(on_cpu[0], name)["weights"] for name in ("rollout", "update")]
    assert added == [4 * policy] * 2 and on_gpu[0]["phases"] == on_gpu[1]["phases"]


def test_no_weights_are_read(three: Path) -> None:
    before = planned(".")
    for path in three.rglob("model.safetensors"):
        path.write_bytes(b"nothing that loads")
    after = planned(".")
    assert [(name, stage["phases"]) for name, stage in after.items()] == [(n, s["phases"]) for n, s in before.items()]


@on_a_cpu
def test_the_check_before_a_run_counts_the_same(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = size(ppo(), "update")
    fixed = kinds["weights"] + kinds["gradients"] + kinds["optimizer"]
    monkeypatch.setattr(system, "total_memory", lambda: fixed)
    assert "E03" not in check("ppo.yaml").stderr
    monkeypatch.setattr(system, "total_memory", lambda: fixed - 1)
    assert "warning[E03]" in check("ppo.yaml").stderr


def test_a_frozen_model_is_loaded_once_per_folder(three: Path) -> None:
    replace("ppo.yaml", "ppo:", "rewards: {one: {model: scorer}, two: {model: scorer}, reward: {}}\nppo:")
    uses = models_in_memory(load("ppo", Path("ppo.yaml")))
    assert [use.role for use in uses] == ["policy", "reference", "value", "reward"]


def test_8_bit_moments_take_a_quarter_except_those_of_embeddings(three: Path) -> None:
    """By the minimum size of 8 bits, and the scale of each block of 256 numbers (bitsandbytes)."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": read_config("model").vocab_size}
    models = {"model": tiny.causal("llama", **shape), "scorer": tiny.scorer("llama", **shape)}
    moments = dict.fromkeys(models, 0)
    for name, model in models.items():
        model.save_pretrained(name)
        for weight in model.parameters():
            numbers = weight.numel()
            is_32_bit = weight is model.get_input_embeddings().weight or numbers < 4096
            moments[name] += 8 * numbers if is_32_bit else 2 * (numbers + 4 * -(-numbers // 256))
    assert moments["model"] < 7 * models["model"].num_parameters()  # some are in 8 bits
    small, full = size(ppo("ppo.optim=adamw_8bit"), "update"), size(ppo(), "update")
    assert (small["optimizer"], small["weights"]) == (sum(moments.values()), full["weights"])
    assert size(planned("sft.yaml", "trainer.optim=adamw_8bit")["sft"], "step")["optimizer"] == moments["model"]


@pytest.mark.parametrize("compares", [False, True])
def test_offloaded_models_are_in_memory_while_they_are_read(three: Path, compares: bool) -> None:
    policy, scorer = policy_and_scorer()
    assert ppo("ppo.offload=true")["phases"] == ppo()["phases"]  # on the CPU
    loss = [*GPU, "ppo.bf16=false", *["ppo.kl_in=loss", "ppo.kl_estimator=full"] * compares]
    stage, full = ppo("ppo.offload=true", *loss), ppo(*loss)
    weights = {each["name"]: each["bytes"]["weights"] for each in stage["phases"]}
    trained = 4 * (policy + scorer)
    assert weights["rollout"] == pytest.approx(trained, abs=500)
    assert weights["update"] == pytest.approx(trained + 4 * policy * compares, abs=500)
    assert weights["judge"] in [pytest.approx(trained + 4 * each, abs=500) for each in (policy, scorer)]
    assert size(stage, "update")["activations"] == size(full, "update")["activations"]


def test_frozen_matrices_take_half_with_bf16(three: Path) -> None:
    """The weights of the four models, as PPOTrainer has them; and those of an evaluation."""
    models = load_causal_lm("model"), load_causal_lm("model"), load_reward_model("scorer"), load_reward_model("scorer")
    for frozen in models[1::2]:
        lora.autocast_matrices(frozen.requires_grad_(False))
    expected = sum(memory.size_bytes([*model.parameters(), *model.buffers()]) for model in models)
    assert size(ppo("ppo.bf16=true"), "judge")["weights"] == pytest.approx(expected, abs=200)
    assert size(ppo(*GPU), "judge") == size(ppo(*GPU, "ppo.bf16=true"), "judge")
    write = "models: {sft: model, ppo: model, reward: scorer}\ndata: {prompts: prompts.jsonl}\neval: {n: 9, "
    (three / "eval.yaml").write_text(write + "temperature: 1.0, response_length: 8, best_of: [], frontier: false}\n")
    sizes = [memory.size_bytes([*model.parameters(), *model.buffers()]) for model in models]
    (half,) = planned("eval.yaml", "eval.bf16=true").values()
    assert size(half, "judge")["weights"] == pytest.approx(2 * sizes[1] + sizes[3], abs=200)


# Activations, logits, cache


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_activations_are_what_autograd_keeps(family: str, bf16: bool) -> None:
    """Bytes kept by tensors without content, compared with those that a real forward pass keeps."""
    model, storages = tiny.causal(family), dict[int, int]()
    forward.disable_dropout(model)
    weights = {weight.untyped_storage().data_ptr() for weight in [*model.parameters(), *model.buffers()]}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        _states = model.base_model(input_ids=torch.zeros(4, 48, dtype=torch.int64), use_cache=False)
    real = sum(size for place, size in storages.items() if place not in weights)
    kept = memory.kept_bytes(model.config, 48, bf16=bf16)
    assert 4 * kept.row + kept.copies == pytest.approx(real, rel=0.05)


def test_a_llama_layer_keeps_the_bytes_of_the_formula() -> None:
    """4 L (8 H + 2 H K / A + 4 I): the difference between three layers and two."""
    length, hidden, intermediate = 40, 32, 64
    two, three = (memory.kept_bytes(tiny.config("llama", num_hidden_layers=n), length).row for n in (2, 3))
    numbers = 8 * hidden + 2 * hidden * 2 // 4 + 4 * intermediate
    assert three - two == pytest.approx(4 * length * numbers, rel=0.02)


def test_checkpointing_bf16_and_smaller_batches_take_less(three: Path) -> None:
    def update(*changes: str) -> dict[str, int]:
        return size(ppo(*changes), "update")

    full = update()
    assert update("ppo.gradient_checkpointing=true")["activations"] < 0.8 * full["activations"]
    assert update("ppo.bf16=true")["activations"] < full["activations"]
    half = update("ppo.per_device_train_batch_size=8", "ppo.gradient_accumulation_steps=8")
    assert half["activations"] == pytest.approx(full["activations"] / 2, rel=0.05)
    tokens = 8 * (ppo()["prompt_tokens"] + ppo()["response_tokens"])
    assert update(f"ppo.micro_batch_tokens={tokens}") == pytest.approx(half, rel=0.01)
    part = update("ppo.logits_at_a_time=96")  # of 16 x 24 response tokens
    assert part.get("logits", 0) <= full["logits"] / 4


@pytest.mark.parametrize("rows", [64, 16])
def test_the_cache_has_keys_and_values_of_all_layers(three: Path, rows: int) -> None:
    """At the larger of two moments: after the prompts were read, or at the last token."""
    config = read_config("model")
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    stage = ppo("--prompt-length", "20", f"ppo.local_rollout_forward_batch_size={rows}")
    token = 2 * 4 * config.num_hidden_layers * width * rows
    assert size(stage, "rollout")["cache"] in (token * 20, token * (20 + 24))
    half = ppo("--prompt-length", "20", f"ppo.local_rollout_forward_batch_size={rows}", "ppo.bf16=true")
    assert 2 * size(half, "rollout")["cache"] in (token * 20, token * (20 + 24))


# Modes


def test_adapters_share_one_base_and_4_bits_take_less(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "BLOCK_SIZE", 32)  # this model's rows are too short for 4 bits
    stages = {mode: plan_json("ppo.yaml", "--mode", mode)["ppo"] for mode in MODES}
    kinds = {mode: size(stage, "update") for mode, stage in stages.items()}
    config = read_config("model")
    hidden, intermediate = config.hidden_size, config.intermediate_size
    keys = hidden * config.num_key_value_heads // config.num_attention_heads
    layer = 2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + intermediate)
    trained = 2 * config.num_hidden_layers * DEFAULT_ADAPTERS.r * layer + hidden
    assert kinds["lora"]["gradients"] == kinds["qlora"]["gradients"] == 4 * trained < kinds["full"]["gradients"]
    assert kinds["lora"]["optimizer"] == 8 * trained
    adapters = 4 * (trained - hidden)
    third = adapters // 2 + 2 * 4 * hidden  # the reward model's adapters, and two heads
    one_base = 4 * stages["full"]["parameters"]["policy"] + adapters + third
    assert kinds["lora"]["weights"] == pytest.approx(one_base, abs=500)
    assert kinds["qlora"]["weights"] < kinds["lora"]["weights"]
    former = plan_json("ppo.yaml", "--mode", "one-base")["ppo"]
    assert (former["mode"], former["phases"]) == ("lora", stages["lora"]["phases"])


def test_an_unknown_mode_is_refused(three: Path) -> None:
    result = plan("ppo.yaml", "--mode", "qlorra")
    assert result.exit_code == 2 and "error[C07]: --mode qlorra" in result.stderr
    assert "hint: did you mean qlora?" in result.stderr


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_stage_is_planned_with_the_adapters_of_its_config(three: Path, stage: str) -> None:
    """With their rank, targets and kind; --mode overrides them."""
    config = read_config("model")
    head = config.hidden_size if stage == "reward" else 0
    full = planned(f"{stage}.yaml")[stage]
    replace(f"{stage}.yaml", "path: model", "path: model, adapters: {kind: qlora, r: 5, target_modules: [q_proj]}")
    packed = planned(f"{stage}.yaml")[stage]
    plain = planned(f"{stage}.yaml", "model.adapters.kind=lora")[stage]
    assert [each["mode"] for each in (full, packed, plain)] == ["full", "qlora", "lora"]
    assert planned(f"{stage}.yaml", "--mode", "full")[stage]["phases"] == full["phases"]
    trained = config.num_hidden_layers * 5 * 2 * config.hidden_size + head
    assert all(size(each, "step")["optimizer"] == 8 * trained for each in (packed, plain))
    weights = [size(each, "step")["weights"] for each in (packed, plain, full)]
    assert weights[1] == weights[2] + 4 * (trained - head) and weights[0] < weights[2]
    assert size(packed, "read again") == {"weights": 4 * sum(full["parameters"].values())}
    assert "read again" not in [each["name"] for each in plain["phases"]]
    replace("model/config.json", '"tie_word_embeddings": true', '"tie_word_embeddings": false')
    untied = size(planned(f"{stage}.yaml", "model.adapters.kind=lora")[stage], "step")["weights"]
    # SFT's own head; that of the SFT model, with which the reward stage samples answers.
    assert untied == weights[1] + 4 * config.vocab_size * config.hidden_size
    if stage == "reward":
        unscaled = planned("reward.yaml", "model.adapters.kind=lora", "reward.normalize=none")["reward"]
        assert size(unscaled, "step")["weights"] == weights[1]


def test_ppo_is_planned_with_the_adapters_of_its_config(three: Path) -> None:
    """A full reward model is in memory once more, and the value model's adapters stand beside it."""
    adapters = "models.adapters={kind: lora, r: 3, target_modules: [q_proj]}"
    stage = ppo(adapters)
    numbers, head = stage["parameters"], read_config("model").hidden_size
    trained = read_config("model").num_hidden_layers * 3 * 2 * head
    kinds = size(stage, "update")
    assert stage["mode"] == "lora" and kinds["gradients"] == 4 * (2 * trained + head)
    both = 4 * (numbers["policy"] + numbers["reward"] + 2 * trained)
    assert kinds["weights"] == pytest.approx(both, abs=500)
    assert ppo(adapters, "--mode", "full")["phases"] == ppo()["phases"]
    replace("ppo.yaml", "reward: scorer", "reward: reward")
    replace("reward.yaml", "path: model", "path: model, adapters: {kind: lora}")
    shared = size(ppo(adapters), "judge")
    assert shared["weights"] == pytest.approx(4 * (numbers["policy"] + 3 * trained + 2 * head), abs=500)
    replace("reward.yaml", "path: model", "path: other")  # another base
    Path("model").rename("other")
    Path("model").symlink_to("other")
    again = size(ppo(adapters), "judge")
    assert again["weights"] == pytest.approx(both, abs=500)


# Other machines


def test_each_of_several_processes_does_its_share(three: Path) -> None:
    alone, both = (planned(".", "--nproc", count) for count in ("1", "2"))
    for stage in ("sft", "reward", "ppo"):
        shared = [
            {**each, "flops": each["flops"] / (1 + (each["name"] == "normalize"))} for each in alone[stage]["phases"]
        ]
        assert both[stage]["phases"] == shared
    assert (alone["ppo"]["steps"], both["ppo"]["steps"]) == (10, 5)
    small = ("sft.per_device_train_batch_size=4", "sft.max_steps=null", "sft.gradient_accumulation_steps=1")
    steps = [planned("sft.yaml", *small, "--nproc", count)["sft"]["steps"] for count in ("1", "2")]
    assert steps[0] == 2 * steps[1]
    assert "; each of 2 processes" in plan("ppo.yaml", "--nproc", "2", "--flops", "1e9").stdout


def test_a_gpu_that_is_not_here(three: Path) -> None:
    """Its memory decides, TRL trains in bfloat16 by default, and --flops is required."""
    result = plan("sft.yaml", *GPU, "--flops", "4e14")
    assert "a GPU of 80 GiB has 85.9 GB: fits" in result.stdout and "libraries" not in result.stdout
    large = "sft.per_device_train_batch_size=64"
    assert "does not fit" in plan("sft.yaml", large, "--gpu", "0.001", "--flops", "4e14").stdout
    here, there = (size(planned("sft.yaml", *more)["sft"], "step") for more in ((), GPU))
    if not torch.cuda.is_available():
        assert there["activations"] != here["activations"]
    refused = plan("ppo.yaml", *GPU)
    assert refused.exit_code == 2 and "error[C11]: --gpu plans for a GPU that need not be here" in refused.stderr


def test_the_graph_engine_has_a_copy_in_bfloat16_on_a_gpu(three: Path) -> None:
    hf, graph = (planned("ppo.yaml", f"models.engine={name}", *GPU)["ppo"] for name in ("hf", "graph"))
    copied = 2 * hf["parameters"]["policy"]
    for one, other in zip(hf["phases"], graph["phases"], strict=True):
        assert other["total"] - one["total"] == copied
    on_cpu, plain = (planned("ppo.yaml", f"models.engine={name}")["ppo"]["phases"] for name in ("graph", "hf"))
    assert [phase["total"] for phase in on_cpu] == [phase["total"] for phase in plain]


def test_gpus_by_name(three: Path) -> None:
    """Each has its memory, a rate and a source; a name that is a number is a name."""
    for name, gpu in gpu_table().items():
        target = Target.of(name.upper(), 1)
        assert (target.memory, target.peak_flops, target.planned) == (round(gpu["gib"] * 2**30), gpu["flops"], True)
        assert 20 < gpu["gib"] < 200 and 5e13 < gpu["flops"] < 2e15 and len(gpu["source"]) > 10
    assert Target.of("4090", 1).memory < Target.of("24", 1).memory
    result = json.loads(plan("sft.yaml", "--gpu", "h100", "--json").stdout)
    stage = result["stages"]["sft"]
    assert result["device"] == "a GPU h100 of 79.6 GiB" and stage["fits"] is True
    assert stage["step_seconds"]["step"] == pytest.approx(phase(stage, "step")["flops"] / (0.4 * 989e12))
    for name, hint in (
        ("h10", "did you mean h100?"),
        ("big", "for example --gpu h100"),
        ("-1", "for example --gpu h100"),
    ):
        refused = plan("sft.yaml", f"--gpu={name}")
        assert refused.exit_code == 2 and f"error[C07]: --gpu {name}: not a size in GiB" in refused.stderr
        assert f"hint: {hint}\n" in refused.stderr


def test_fsdp_shards_layers_embeddings_and_heads(three: Path) -> None:
    """Each of 4 processes keeps a quarter, and what is gathered beside it."""
    models = {"policy": load_causal_lm("model"), "value": load_reward_model("scorer")}

    def size(weights: Any) -> int:
        return 4 * sum(weight.numel() for weight in {id(w): w for w in weights}.values())

    layers = {name: size(model.model.layers.parameters()) for name, model in models.items()}
    heads = {"policy": [models["policy"].lm_head.weight], "value": []}
    words = {name: size([model.get_input_embeddings().weight, *heads[name]]) for name, model in models.items()}
    layer = size(models["policy"].model.layers[0].parameters())
    trained = sum(layers.values()) + sum(words.values())
    full = ppo(*GPU, "--nproc", "4", "ppo.bf16=false")
    sharded = ppo(*GPU, "--nproc", "4", "ppo.bf16=false", "ppo.fsdp=true")
    assert ppo("ppo.fsdp=true")["phases"] == ppo()["phases"]  # one process
    hybrid = ppo(*GPU, "--nproc", "8", "--machines", "2", "ppo.bf16=false", "ppo.fsdp=hybrid")
    for name, kind in itertools.product(("rollout", "judge", "update"), ("weights", "gradients", "optimizer")):
        assert phase(hybrid, name)["bytes"].get(kind) == phase(sharded, name)["bytes"].get(kind), (name, kind)
    refused = plan("ppo.yaml", "--nproc", "3", "--machines", "2")
    assert refused.exit_code == 2 and "error[C07]: --machines 2: 3 processes" in refused.stderr

    def saved(name: str, kind: str) -> int:
        return phase(full, name)["bytes"].get(kind, 0) - phase(sharded, name)["bytes"].get(kind, 0)

    gathered = sum(words.values()) + layer
    gone = 0.75 * (trained + layers["policy"])  # the reference's layers, too
    assert saved("judge", "weights") == saved("update", "weights") == pytest.approx(gone - gathered, abs=8)
    assert saved("rollout", "weights") == pytest.approx(gone - layers["policy"] - words["policy"], abs=8)
    assert saved("judge", "gradients") == 0
    assert saved("update", "gradients") == pytest.approx(0.75 * trained - gathered, abs=8)
    assert saved("update", "optimizer") == pytest.approx(2 * 0.75 * trained, rel=0.01)
    assert saved("update", "activations") == 0


# Time


def test_time_is_operations_over_the_rate(three: Path) -> None:
    slow, fast = (ppo("--flops", rate) for rate in ("1e9", "4e9"))
    for name, seconds in slow["step_seconds"].items():
        assert seconds == pytest.approx(phase(slow, name)["flops"] / 1e9) and seconds == 4 * fast["step_seconds"][name]
    assert slow["steps"] == 10 and slow["seconds"] == pytest.approx(10 * sum(slow["step_seconds"].values()))
    assert not slow["run"] and slow["share"] == 1


def test_operations_are_six_per_weight_and_token(three: Path) -> None:
    """2 forward, 4 backward (Kaplan et al. 2020, section 2.1), of weights in products, and those of attention."""
    stage = ppo("--prompt-length", "40", "ppo.num_ppo_epochs=3", "ppo.num_mini_batches=2")
    config = read_config("model")
    body = sum(w.numel() for w in load_causal_lm("model").model.layers.parameters() if w.ndim == 2)
    width = 40 + 24 - 1  # the last token is not read
    tokens, answers = 64 * width, 64 * 24
    attention = 14 * config.num_hidden_layers * config.hidden_size * 64 * width * width  # 4 forward, 10 backward
    head = 6 * config.vocab_size * config.hidden_size * answers
    assert phase(stage, "update")["flops"] == pytest.approx(3 * (2 * (6 * body * tokens + attention) + head), rel=0.02)
    judge = 4 * (2 * body * tokens + attention * 4 / 14) + head * 2 / 3
    assert phase(stage, "judge")["flops"] == pytest.approx(judge, rel=0.02)


@on_a_cpu
def test_passes_of_small_models_are_measured(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is no matrix product, in the threads that the stage will have. 64 episodes, 16 rows at a time."""
    threads, backbone = set(), type(load_causal_lm("model").model)
    plain = backbone.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        threads.add(torch.get_num_threads())
        time.sleep(0.05)
        return plain(*args, **kwargs)

    monkeypatch.setattr(backbone, "forward", slow)
    monkeypatch.setattr(duration, "MAX_ROUNDS", 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(devices, "DEFAULT_THREADS", 2)
    before = torch.get_num_threads()
    stage = json.loads(plan("ppo.yaml", "ppo.num_ppo_epochs=2", "--json").stdout)["stages"]["ppo"]
    torch.set_num_threads(before)
    assert stage["run"] and set(stage["step_seconds"]) == {"rollout", "judge", "update"} and threads == {1}
    passes = 64 / 16 * 3.5  # of four models, two of which have a head
    assert passes * 0.05 < stage["step_seconds"]["judge"] < 5 * passes * 0.05
    assert 2 * stage["step_seconds"]["judge"] < stage["step_seconds"]["update"] * 3
    assert stage["share"] < 0.95  # it slept


def test_time_is_a_lower_bound_for_large_models_and_other_machines(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_measured(*more: str) -> bool:
        return bool(json.loads(plan("sft.yaml", *more, "--json").stdout)["stages"]["sft"]["run"])

    assert not is_measured(*GPU, "--flops", "4e14")
    monkeypatch.setattr(devices, "SMALL_MODEL_PARAMETERS", 100)
    assert not is_measured() and ": at least " in plan("sft.yaml").stdout


@on_a_cpu
def test_the_time_of_a_deep_model_follows_from_shallow_ones(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(model: Any, *_: Any, bf16: bool) -> duration.PassTimes:
        layers = model.config.num_hidden_layers
        return duration.PassTimes(2 + 3 * layers, 1 + layers, layers / 2, 4 + 2 * layers, 1)

    monkeypatch.setattr(duration, "measure_passes", measure)
    monkeypatch.setattr(duration, "SHALLOW_LAYERS", (0, 1))
    monkeypatch.setattr(duration, "MAX_SHALLOW_TOKENS", 10**9)
    times = []
    for small in (10**9, 100):
        monkeypatch.setattr(devices, "SMALL_MODEL_PARAMETERS", small)
        stages = json.loads(plan(".", "--json").stdout)["stages"].values()
        times.append({stage["stage"]: stage["step_seconds"] for stage in stages})
        assert all(stage["run"] for stage in stages)
    for stage, seconds in times[0].items():
        assert times[1][stage] == pytest.approx(seconds), stage


def test_held_out_rows_are_counted_once_a_stage(three: Path) -> None:
    """SFT reads them after each epoch, the reward stage twice, with five probes of each pair at the end."""

    def evaluate(stage: str, epochs: int) -> float:
        steps = f"{stage}.max_steps=null", f"{stage}.num_train_epochs={epochs}"
        rows = "rows.jsonl" if stage == "sft" else "pairs.jsonl"
        return float(phase(planned(f"{stage}.yaml", *steps, f"data.eval={rows}")[stage], "evaluate")["flops"])

    assert evaluate("sft", 6) == pytest.approx(3 * evaluate("sft", 2))
    epochs = "sft.max_steps=null", "sft.num_train_epochs=2", "sft.per_device_train_batch_size=1"
    held, split = "data.eval=rows.jsonl", ("data.eval_fraction=0.25",)
    read = [phase(planned("sft.yaml", *epochs, *each)["sft"], "evaluate")["flops"] for each in ((held,), split)]
    assert read[1] / read[0] == pytest.approx(0.25, rel=0.1)
    assert phase(planned("sft.yaml", *epochs, held, "--nproc", "2")["sft"], "evaluate")["flops"] == read[0] / 2
    assert evaluate("reward", 2) / evaluate("reward", 1) == pytest.approx((2 * 2 + 5) / (2 + 5))
    reward = planned("reward.yaml", "reward.normalize=sft", "reward.normalize_samples=64")["reward"]
    assert phase(reward, "normalize")["flops"] > 0 and "normalize" in reward["once_seconds"]
    assert reward["seconds"] == pytest.approx(
        reward["steps"] * sum(reward["step_seconds"].values()) + sum(reward["once_seconds"].values())
    )


def test_measured_rows_have_the_average_length(three: Path) -> None:
    assert Lengths(20, 80, mean=50).average == Lengths(10, 40) and Lengths(20, 80).average == Lengths(20, 80)
    assert Lengths(20, 80, prompt_mean=5).average == Lengths(5, 80)  # a response may reach its limit
    assert Lengths(20, 80, prompt_mean=5, response_mean=31.4).average == Lengths(5, 31)
    (_, row), *_ = read_jsonl(Path("rows.jsonl"))
    append_jsonl(Path("rows.jsonl"), {**row, "completion": 3 * row["completion"]})
    chain, config = ModelResolver([], Options(), None), load("sft", Path("sft.yaml"))
    start = chain.start(config, "model.path")
    lengths = chain.data_size(config, start).lengths
    texts = [row["prompt"] + row["completion"] for _, row in read_jsonl(Path("rows.jsonl"))]
    mean = sum(len(start.tokenizer(text)["input_ids"]) for text in texts) / len(texts)
    assert lengths.mean == pytest.approx(mean, abs=1.01) and lengths.mean < lengths.row  # and the end token


@pytest.mark.parametrize(("share", "printed"), [(0.95, False), (0.25, True)])
def test_other_processes_are_reported(
    share: float, printed: bool, capsys: pytest.CaptureFixture[str], three: Path
) -> None:
    times = {"step_seconds": {"update": 10}, "seconds": 40, "share": share, "run": True}
    show({**ppo(), "steps": 4, **times}, Target.of(None, 1))
    out = capsys.readouterr().out
    assert "4 x 10 s: about 40 s" in out and ("25% of the processor now; alone about 10 s" in out) == printed


def test_the_total_of_the_stages(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "advice", lambda *_: [])
    result = json.loads(plan(".", "--flops", "1e9", "--json").stdout)
    stages, total = result["stages"], result["total"]
    fullest = max(stages, key=lambda stage: stages[stage]["memory_bytes"])
    seconds = sum(stage["seconds"] for stage in stages.values())
    assert total["seconds"] == pytest.approx(seconds) and total["starts"] == 3
    assert (total["memory_bytes"], total["fullest"]) == (stages[fullest]["memory_bytes"], fullest) and total["fits"]
    (line,) = (line for line in plan(".", "--flops", "1e9").stdout.splitlines() if line.startswith("in all   "))
    assert line.startswith(f"in all   at least {terminal.duration(total['seconds'])} for 3 stages; at most ")
    assert "in all   " not in plan("sft.yaml", "--flops", "1e9").stdout
    assert "does not fit" in plan(".", "--gpu", "0.004", "--flops", "4e14").stdout.splitlines()[-2]


# The command


def test_the_chain_is_planned_before_any_stage_ran(three: Path) -> None:
    """reward.yaml and ppo.yaml start from the model that sft.yaml will write, which has the shape of its own start."""
    replace("reward.yaml", "model: {path: model}\n", "")
    replace("ppo.yaml", "models: {sft: model, reward: scorer}\n", "")
    (three / "eval.yaml").write_text("data: {prompts: prompts.jsonl}\neval: {n: 9, best_of: []}\n")
    stages = planned(".")
    assert list(stages) == ["sft", "reward", "ppo", "eval"]
    assert stages["ppo"]["parameters"]["policy"] == stages["sft"]["parameters"]["policy"]
    assert stages["eval"]["response_tokens"] == stages["ppo"]["response_tokens"] == 24
    assert ppo()["parameters"] == stages["ppo"]["parameters"]  # with sft.yaml beside it
    assert not (three / "sft").exists()


def test_where_a_stage_starts(three: Path) -> None:
    """Not from its own output; a folder ./sft beside sft.yaml is a model if the stage writes elsewhere."""
    refused = plan("sft.yaml", "model.path=sft")
    assert refused.exit_code == 2 and "error[M10]" in refused.stderr
    assert "model.path names the folder that this stage writes" in refused.stderr
    Path("model").rename("sft")
    replace("sft.yaml", "model: {path: model}", "model: {path: ./sft}\nrun: elsewhere")
    assert planned("sft.yaml")["sft"]["rows"] > 0


def test_snapshots_and_the_draws_of_the_limit_are_evaluated_too(three: Path) -> None:
    """Seven snapshots, as PPO's eighth is its result; and once the draws of the limit, also those of best of n."""
    text = "models: {sft: model}\ndata: {prompts: prompts.jsonl}\neval: {n: 9, best_of: []}\n"
    (three / "eval.yaml").write_text(text)
    long, short = (planned("eval.yaml", "-s", f"eval.frontier={on}")["eval"]["phases"] for on in ("true", "false"))
    for one, other in zip(long, short, strict=True):
        assert one["flops"] / other["flops"] == pytest.approx((4 + 7) / 4, rel=0.01)
    text = "models: {sft: model}\ndata: {prompts: prompts.jsonl}\neval: {n: 9, frontier: false, best_of: []}\n"
    (three / "eval.yaml").write_text(text)
    without = planned("eval.yaml")["eval"]["phases"]
    for rounds, best_of in ((16, 4), (20, 16)):
        sets = ("-s", "eval.limit.samples=12", "-s", f"eval.best_of=[{best_of}]")
        for one, other in zip(planned("eval.yaml", *sets)["eval"]["phases"], without, strict=True):
            assert one["flops"] / other["flops"] == pytest.approx(rounds / 4, rel=0.01)


def test_an_evaluation_counts_the_responses_that_ppo_measured(three: Path) -> None:
    text = "models: {sft: model, reward: scorer}\ndata: {prompts: prompts.jsonl}\n"
    text += "eval: {n: 9, best_of: [], frontier: false}\n"
    (three / "eval.yaml").write_text(text)
    before = planned("eval.yaml")["eval"]
    trained = CliRunner().invoke(app, ["ppo", "-c", "ppo.yaml", "-s", "ppo.total_episodes=8"])
    assert trained.exit_code == 0, trained.stderr
    manifest = json.loads((three / "ppo/manifest.json").read_text())
    after, mean = planned("eval.yaml")["eval"], manifest["metrics"]["objective/response_length"]
    assert before["mean_response_tokens"] is None and after["mean_response_tokens"] == mean < 24
    assert phase(after, "rollout")["flops"] < phase(before, "rollout")["flops"]
    assert [each["total"] for each in after["phases"]] == [each["total"] for each in before["phases"]]  # at the limit
    assert f"with responses of {mean:.0f} tokens as PPO measured" in plan("eval.yaml", "--flops", "1e9").stdout


def test_policies_and_interpolations_are_sampled_one_at_a_time(three: Path) -> None:
    """A policy takes two modes and a share one; in memory is the largest of the policies beside SFT."""
    sizes = "eval: {n: 9, best_of: [], frontier: false, temperature: 1, response_length: 8, per_device_batch_size: 4}\n"
    (three / "eval.yaml").write_text(f"models: {{sft: model, ppo: model}}\ndata: {{prompts: prompts.jsonl}}\n{sizes}")
    shutil.copytree("model", "other")

    def phases(*changes: str) -> list[dict[str, Any]]:
        return planned("eval.yaml", *(part for change in changes for part in ("-s", change)))["eval"]["phases"]

    base = phases()
    for one, other in zip(phases("policies={a: model, b: other}", "eval.interpolate=[0.3, 0.5]"), base, strict=True):
        assert one["flops"] / other["flops"] == pytest.approx((4 + 4 + 2) / 4, rel=0.01)
        assert one["bytes"] == other["bytes"]
    body = json.loads(Path("other/config.json").read_text())
    large = load_causal_lm("model").config.from_dict({**body, "num_hidden_layers": body["num_hidden_layers"] + 4})
    build.causal_lm_from_config(large, device=torch.device("cpu")).save_pretrained("other")
    layers = (plan_weights(phases("policies={b: other}")) - plan_weights(base)) / 4
    assert layers == memory.size_bytes([*load_causal_lm("model").model.layers[0].parameters()])


def plan_weights(phases: list[dict[str, Any]]) -> int:
    return next(each["bytes"]["weights"] for each in phases if each["name"] == "judge")


def test_a_new_model_is_planned_without_its_weights(three: Path) -> None:
    new = (
        "model: {new: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 3, num_attention_heads: 2, "
        "tie_word_embeddings: true, max_position_embeddings: 256, tokenizer: {train: rows.jsonl, vocab_size: 300}}}"
    )
    replace("sft.yaml", "model: {path: model}", new)
    replace("sft.yaml", "max_steps: 1", "max_steps: 1, max_length: 128")
    replace("ppo.yaml", "models: {sft: model, reward: scorer}", "models: {value: policy_head}")
    replace("reward.yaml", "model: {path: model}\n", "")
    stages = planned(".")
    policy, layer = stages["sft"]["parameters"]["policy"], 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
    vocabulary, rest = divmod(policy - 3 * layer - 16, 16)
    assert rest == 0 and 256 <= vocabulary <= 310
    assert stages["ppo"]["parameters"]["policy"] == policy and "value" not in stages["ppo"]["parameters"]
    (three / "rows.jsonl").unlink()
    assert "error[D01]" in plan("sft.yaml").stderr
    without_data = planned("sft.yaml", "--prompt-length", "9")["sft"]
    assert without_data["parameters"]["policy"] == pytest.approx(policy, rel=0.2)


def test_lengths_are_those_of_the_data(three: Path) -> None:
    items = json.loads(CliRunner().invoke(app, ["check", ".", "--json"]).stdout)["checked"]
    longest = {(item["stage"], item["what"]): item.get("longest") for item in items}
    stages = planned(".")
    assert stages["ppo"]["prompt_tokens"] == longest["ppo", "data.prompts"]
    for stage in ("sft", "reward"):
        assert stages[stage]["prompt_tokens"] + stages[stage]["response_tokens"] == longest[stage, "data.train"]


BROKEN = {
    "a key that does not exist": ("ppo.yaml", "total_episodes: 640", "total_episodez: 640"),
    "a missing model": ("ppo.yaml", "sft: model", "sft: nodel"),
    "missing data": ("ppo.yaml", "prompts: prompts.jsonl", "prompts: promts.jsonl"),
    "a response that leaves no room": ("ppo.yaml", "response_length: 24", "response_length: 2400"),
    "too many shared layers": ("ppo.yaml", "response_length: 24", "num_shared_layers: 9"),
    "another stage's file": ("ppo.yaml", "models: ", "stage: ppoo\nmodels: "),
}


@pytest.mark.parametrize("case", BROKEN)
def test_errors_are_those_of_check(three: Path, case: str) -> None:
    name, old, new = BROKEN[case]
    replace(name, old, new)
    result = plan(name)
    assert (result.exit_code, result.stdout) == (2, "") and "Traceback" not in result.stderr
    assert result.stderr == check(name).stderr and result.stderr.startswith("error[")


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo", "eval"])
def test_advice_is_a_combination_that_fits(
    three: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """First with adapters, then without; each is planned again with its settings, and needs what it says."""
    monkeypatch.setattr(lora, "BLOCK_SIZE", 32)
    (three / "eval.yaml").write_text(
        "models: {sft: model, ppo: model, reward: scorer}\ndata: {prompts: prompts.jsonl}\n"
        "eval: {n: 64, temperature: 1.0, response_length: 24, best_of: [], frontier: false}\n"
    )
    assert not planned(f"{stage}.yaml")[stage]["advice"]
    full = planned(f"{stage}.yaml", *GPU)[stage]["memory_bytes"]
    gpu = ("--gpu", str(0.6 * full / 2**30))
    found = plan_json(f"{stage}.yaml", *gpu)[stage]
    assert found["fits"] is False and any(each["fits"] for each in found["advice"])
    for each in found["advice"]:
        again = plan_json(f"{stage}.yaml", *gpu, *shlex.split(each["set"]))[stage]
        assert (again["memory_bytes"], again["fits"]) == (each["memory_bytes"], each["fits"])
    combinations = [each["set"] for each in found["advice"]]
    assert stage == "eval" or ("adapters={kind: lora}" in combinations[0] and "adapters" not in combinations[-1])
    show(found, Target.of(gpu[1], 1))
    out = capsys.readouterr().out
    assert "does not fit" in out and all(f", with {combination}" in out for combination in combinations)


def test_the_table_and_an_optimizer_that_is_not_counted(three: Path) -> None:
    (only,) = planned("sft.yaml", "--gpu", "0.0001", "trainer.optim=adafactor").values()
    assert only["fits"] is None
    result = plan(".")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    ppo = lines[next(number for number, line in enumerate(lines) if line.startswith("ppo: ")) :]
    assert ppo[1].split() == ["rollout,", "64", "rows", "judge,", "16", "rows", "update,", "16", "rows"]
    assert [line.split()[0] for line in ppo[2:11]] == [*KINDS, "total", "memory", "time"]


def test_plan_imports_neither_trl_nor_peft(three: Path) -> None:
    code = "import sys; from rlhf_cli.cli import app\ntry: app(['plan', '.', '--flops', '1e9'])\n"
    code += "finally: print({'trl', 'peft'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


# Accuracy

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4}
SIZES |= {"num_hidden_layers": 2, "num_key_value_heads": 2}
UPDATES = {"total_episodes": 32, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
UPDATES |= {"num_ppo_epochs": 1, "response_length": 32, "stop_token": "none", "missing_eos_penalty": None}
LONG = {"total_episodes": 16, "per_device_train_batch_size": 8, "response_length": 440, "micro_batch_tokens": 4096}
DEEP = {"hidden_size": 192, "intermediate_size": 500, "num_hidden_layers": 16}
SFT = {"max_steps": 2, "per_device_train_batch_size": 8}
CASES = {
    "a large vocabulary": Case("ppo", {**SIZES, "vocab_size": 50_000}, UPDATES, prompt=16),
    "deep and narrow": Case("ppo", {**SIZES, **DEEP}, UPDATES, prompt=48),
    "long responses": Case("ppo", {**SIZES, "num_hidden_layers": 6}, {**UPDATES, **LONG}, prompt=16),
    "sft": Case("sft", {**SIZES, "vocab_size": 16_000, "num_hidden_layers": 4}, SFT, prompt=64, answer=128),
}
# glibc's malloc keeps freed memory below these sizes: a process holds more than its tensors (docs/scaling.md).
MALLOC_RETURNS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@on_a_cpu
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_within_a_quarter_of_the_real_one(case: str, tmp_path: Path) -> None:
    stage = planned(str(write(CASES[case], tmp_path / "planned")))[CASES[case].stage]
    peak = measured(CASES[case], tmp_path / "exact", **MALLOC_RETURNS)
    assert peak > 300e6 and max(each["total"] for each in stage["phases"]) == pytest.approx(peak, rel=0.25)
    assert stage["memory_bytes"] - stage["libraries"] == pytest.approx(
        measured(CASES[case], tmp_path / "usual"), rel=0.25
    )
