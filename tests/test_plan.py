"""`rlhf plan`: what stages take of memory and time, told without a weight loaded, and true of the real stages."""

import json
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
from safetensors import safe_open
from torch import Tensor
from typer.testing import CliRunner, Result

from rlhf_cli import progress, system, terminal
from rlhf_cli.cli import app
from rlhf_cli.commands import plan as advice
from rlhf_cli.commands.plan import _show, duration, meta
from rlhf_cli.commands.plan.measure import MemoryCounter
from rlhf_cli.commands.plan.memory import Target
from rlhf_cli.commands.plan.meta import Lengths
from rlhf_cli.commands.plan.models import ModelResolver
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.jsonl import append_jsonl, read_jsonl
from rlhf_cli.models import build, devices, forward, lora
from rlhf_cli.models.build import META
from rlhf_cli.models.load import load_causal_lm, load_reward_model, read_config
from rlhf_cli.ppo.forward_backward import ModelRunner
from rlhf_cli.stages import hardware

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine computes on a GPU")


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which come where a plan takes ten seconds, on a busy machine."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e9)


@pytest.fixture
def three(folder: Path) -> Path:
    foreign_scorer(folder)
    replace("ppo.yaml", "total_episodes: 64", "total_episodes: 640\n  response_length: 24")
    return folder


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def counted_anew(*arguments: str) -> dict[str, dict[str, Any]]:
    """Stage -> what --json says; at a fixed rate, so that nothing is measured."""
    result = plan(*arguments, "--json", "--flops", "1e9")
    said = [line for line in result.stderr.splitlines() if not line.startswith("plan ")]  # its progress, if it is slow
    assert (result.exit_code, said) == (0, []), result.stderr
    return {stage["stage"]: stage for stage in json.loads(result.stdout)["stages"]}


KNOWN: dict[Any, dict[str, dict[str, Any]]] = {}


def found(*arguments: str) -> dict[str, dict[str, Any]]:
    """The same, counted once for the same arguments in a folder of the same files."""
    files = frozenset((str(path), path.read_bytes()) for path in Path().rglob("*") if path.is_file())
    if (arguments, files) not in KNOWN:
        KNOWN[arguments, files] = counted_anew(*arguments)
    return KNOWN[arguments, files]


GPU = ("--gpu", "80")  # a machine that is not here


def phase(told: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = (each for each in told["phases"] if each["name"] == name)
    return one


# Weights.


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_parameters_are_those_of_the_files(family: str, tmp_path: Path) -> None:
    for kind, make, shape_of in (
        ("causal", tiny.causal, build.causal_lm_from_config),
        ("scorer", tiny.scorer, build.reward_model_from_config),
    ):
        make(family).save_pretrained(tmp_path / kind)
        with safe_open(tmp_path / kind / "model.safetensors", "pt") as file:
            stored = sum(torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys())  # noqa: SIM118
        shape = shape_of(read_config(tmp_path / kind))
        assert sum(weight.numel() for weight in shape.parameters()) == stored
        assert all(weight.device == META for weight in shape.parameters())


def test_a_run_of_ppo_holds_four_models_two_of_which_learn(three: Path) -> None:
    policy, scorer = (made.num_parameters() for made in (load_causal_lm("model"), load_reward_model("scorer")))
    told = found("ppo.yaml")["ppo"]
    assert told["parameters"] == {"policy": policy, "reference": policy, "value": scorer, "reward": scorer}
    for name in ("rollout", "judge"):
        held = phase(told, name)["bytes"]
        assert 0 <= held["weights"] - 4 * (2 * policy + 2 * scorer) < 500  # the angles of rotations
        assert held["gradients"] == 4 * (policy + scorer)
        assert held["optimizer"] == pytest.approx(8 * (policy + scorer), abs=500)  # and a count of steps a weight


def test_a_head_on_the_policy_and_shared_layers_save_their_weights(three: Path) -> None:
    policy = load_causal_lm("model")
    head = found("ppo.yaml", "models.value=policy_head")["ppo"]
    width = policy.config.hidden_size
    assert phase(head, "rollout")["bytes"]["gradients"] == 4 * (policy.num_parameters() + width)
    shared = found("ppo.yaml", "ppo.num_shared_layers=1")["ppo"]
    frozen = sum(w.numel() for part in (policy.model.embed_tokens, policy.model.layers[0]) for w in part.parameters())
    both = found("ppo.yaml")["ppo"]
    saved = {
        kind: phase(both, "rollout")["bytes"][kind] - phase(shared, "rollout")["bytes"][kind]
        for kind in ("weights", "gradients", "optimizer")
    }
    assert saved == pytest.approx({"weights": 4 * frozen, "gradients": 4 * frozen, "optimizer": 8 * frozen}, abs=100)


def test_no_weights_are_read(three: Path) -> None:
    before = found(".")
    for path in three.rglob("model.safetensors"):
        path.write_bytes(b"nothing that loads")
    after = found(".")
    assert list(after) == list(before)
    assert all(after[stage]["phases"] == before[stage]["phases"] for stage in before)


@on_a_cpu
def test_the_bound_that_refuses_is_the_plans_less_heads(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One theory: E03 before a training counts the same models, as the least that they can take."""
    told = phase(found("ppo.yaml")["ppo"], "judge")["bytes"]
    fixed = told["weights"] + told["gradients"] + told["optimizer"]
    monkeypatch.setattr(system, "total_memory", lambda: fixed)
    assert "E03" not in check("ppo.yaml").stderr
    heads = (4 + 16) * load_reward_model("scorer").score.weight.numel()  # the value model's learns
    monkeypatch.setattr(system, "total_memory", lambda: fixed - heads - 600)  # angles, and counts of steps
    assert "warning[E03]" in check("ppo.yaml").stderr


def test_uses_name_each_folder_of_a_frozen_model_once(three: Path) -> None:
    from rlhf_cli.config.loading import load

    replace("ppo.yaml", "ppo:", "rewards: {one: {model: scorer}, two: {model: scorer}, reward: {}}\nppo:")
    uses = hardware.models_in_memory(load("ppo", Path("ppo.yaml")))
    assert [(use.role, use.trained) for use in uses] == [
        ("policy", True), ("reference", False), ("value", True), ("reward", False),
    ]  # fmt: skip


# Activations.


def kept(model: Any, device: Any, rows: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    return ids, model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def counted(family: str, rows: int, length: int, **sizes: Any) -> int:
    model = build.causal_lm_from_config(tiny.config(family, **sizes))
    forward.disable_dropout(model)
    with MemoryCounter([model], 0) as tally:
        _held = kept(model, META, rows, length)
        return tally.live["activations"]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_activations_are_what_autograd_keeps(family: str) -> None:
    """Bytes behind a forward pass on no content, against those that a real one saves."""
    model, saved = tiny.causal(family), dict[int, int]()
    forward.disable_dropout(model)
    weights = {weight.untyped_storage().data_ptr() for weight in [*model.parameters(), *model.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _held = kept(model, "cpu", 4, 48)
    real = sum(size for place, size in saved.items() if place not in weights)
    assert counted(family, 4, 48) == pytest.approx(real, rel=0.05)


def test_a_llamas_layer_keeps_what_the_docstring_says() -> None:
    """4 n L (8 H + 2 H K / A + 4 I): the difference between three layers and two."""
    rows, length, hidden, middle = 4, 40, 32, 64
    layer = counted("llama", rows, length, num_hidden_layers=3) - counted("llama", rows, length, num_hidden_layers=2)
    words = 8 * hidden + 2 * hidden * 2 // 4 + 4 * middle
    assert layer == pytest.approx(4 * rows * length * words, rel=0.02)


def test_checkpointing_and_bf16_and_smaller_batches_take_less(three: Path) -> None:
    plain = found("ppo.yaml")["ppo"]
    whole: dict[str, int] = phase(plain, "update")["bytes"]

    def update(*changes: str) -> dict[str, int]:
        held: dict[str, int] = phase(found("ppo.yaml", *changes)["ppo"], "update")["bytes"]
        return held

    assert update("ppo.gradient_checkpointing=true")["activations"] < 0.8 * whole["activations"]
    assert update("ppo.bf16=true")["activations"] < whole["activations"]
    half = update("ppo.per_device_train_batch_size=8", "ppo.gradient_accumulation_steps=8")
    assert half["activations"] == pytest.approx(whole["activations"] / 2, rel=0.05)
    tokens = 8 * (plain["prompt_tokens"] + plain["response_tokens"])
    assert update(f"ppo.micro_batch_tokens={tokens}") == pytest.approx(half, rel=0.01)
    part = update("ppo.logits_at_a_time=96")  # of 16 x 24 response tokens
    assert part["logits"] == pytest.approx(whole["logits"] / 4, rel=0.05)


def test_averages_of_8_bits_take_a_quarter_but_those_of_embeddings(three: Path) -> None:
    """By the least size that 8 bits begin with, and the scale of each block of 256 numbers (bitsandbytes)."""
    body = read_config("model")
    wide = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": body.vocab_size}
    models = {"policy": tiny.causal("llama", **wide), "value": tiny.scorer("llama", **wide)}
    for folder, model in zip(("model", "scorer"), models.values(), strict=True):
        model.save_pretrained(folder)
    held = dict.fromkeys(("ppo.yaml", "sft.yaml"), 0)
    for name, model in models.items():
        words = model.get_input_embeddings().weight
        for weight in model.parameters():
            small = weight is words or weight.numel() < 4096
            taken = 8 * weight.numel() if small else 2 * (weight.numel() + 4 * -(-weight.numel() // 256))
            held["ppo.yaml"] += taken
            held["sft.yaml"] += taken if name == "policy" else 0
    assert held["sft.yaml"] < 7 * models["policy"].num_parameters()  # some are in 8 bits
    for file, key, name in (("ppo.yaml", "ppo.optim", "update"), ("sft.yaml", "trainer.optim", "step")):
        (told,) = found(file, f"{key}=adamw_8bit").values()
        assert phase(told, name)["bytes"]["optimizer"] == pytest.approx(held[file], abs=3000)  # tables of 256 numbers
        (whole,) = found(file).values()
        assert phase(told, name)["bytes"]["weights"] == phase(whole, name)["bytes"]["weights"]


def test_what_is_sent_away_is_in_memory_while_it_is_read(three: Path) -> None:
    policy, scorer = (made.num_parameters() for made in (load_causal_lm("model"), load_reward_model("scorer")))
    nowhere, plain = (found("ppo.yaml", *more)["ppo"]["phases"] for more in (["ppo.offload=true"], []))
    assert nowhere == plain  # on a CPU
    for exact in (False, True):
        loss = [*GPU, *["ppo.kl_in=loss", "ppo.kl_estimator=full"] * exact]
        told, whole = (found("ppo.yaml", *more, *loss)["ppo"] for more in (["ppo.offload=true"], []))
        held = {each["name"]: each["bytes"]["weights"] for each in told["phases"]}
        learn = 4 * (policy + scorer)
        expected = {"rollout": learn, "update": learn + 4 * policy * exact}
        assert {name: held[name] for name in expected} == pytest.approx(expected, abs=500)  # angles
        assert held["judge"] in [pytest.approx(learn + 4 * size, abs=500) for size in (policy, scorer)]
        assert phase(told, "update")["bytes"]["activations"] == phase(whole, "update")["bytes"]["activations"]


def test_the_cache_is_keys_and_values_of_all_layers(three: Path) -> None:
    """At the fuller of two moments: the prompts were read, or the last token but one was written."""
    config = read_config("model")
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    for rows in (64, 16):
        few = found("ppo.yaml", "--prompt-length", "20", f"ppo.local_rollout_forward_batch_size={rows}")["ppo"]
        one = 2 * 4 * config.num_hidden_layers * width * rows
        assert phase(few, "rollout")["bytes"]["cache"] in (one * 20, one * (20 + 24))


# Modes.


def test_adapters_take_less_and_one_base_least(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "BLOCK_SIZE", 32)  # this model's rows are too short for 4 bits
    told = {mode: counted_anew("ppo.yaml", "--mode", mode)["ppo"] for mode in meta.MODES}
    held = {mode: phase(each, "judge")["bytes"] for mode, each in told.items()}
    assert held["full"]["gradients"] > held["lora"]["gradients"] == held["qlora"]["gradients"] > 0
    config = read_config("model")
    hidden, middle = config.hidden_size, config.intermediate_size
    keys = hidden * config.num_key_value_heads // config.num_attention_heads
    layer = 2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + middle)
    learns = 2 * config.num_hidden_layers * meta.STANDARD.r * layer + hidden
    assert held["lora"]["gradients"] == 4 * learns
    assert held["lora"]["optimizer"] == pytest.approx(8 * learns, abs=500)
    numbers = told["full"]["parameters"]
    small = 4 * (learns - hidden)
    three_bases = small + 4 * sum(numbers[name] for name in ("policy", "value", "reward"))
    assert held["lora"]["weights"] == pytest.approx(three_bases, abs=500)
    third = small // 2 + 2 * 4 * hidden  # the reward model's adapters, and two heads
    assert held["one-base"]["weights"] == pytest.approx(4 * numbers["policy"] + small + third, abs=500)
    assert held["qlora"]["weights"] < held["lora"]["weights"]


def test_an_unknown_mode_names_the_nearest(three: Path) -> None:
    result = plan("ppo.yaml", "--mode", "qlorra")
    assert result.exit_code == 2 and "error[C07]: --mode qlorra" in result.stderr
    assert "hint: did you mean qlora?" in result.stderr


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_stage_is_planned_with_the_adapters_of_its_config(three: Path, stage: str) -> None:
    """Their rank, their targets and their kind; --mode says otherwise."""
    config = read_config("model")
    head = config.hidden_size if stage == "reward" else 0
    full = found(f"{stage}.yaml")[stage]
    replace(f"{stage}.yaml", "path: model", "path: model, adapters: {kind: qlora, r: 5, target_modules: [q_proj]}")
    packed = found(f"{stage}.yaml")[stage]
    whole = found(f"{stage}.yaml", "model.adapters.kind=lora")[stage]
    assert [told["mode"] for told in (full, packed, whole)] == ["full", "qlora", "lora"]
    assert found(f"{stage}.yaml", "--mode", "full")[stage]["phases"] == full["phases"]
    learns = config.num_hidden_layers * 5 * 2 * config.hidden_size + head
    for told in (packed, whole):
        assert phase(told, "step")["bytes"]["optimizer"] == pytest.approx(8 * learns, abs=200)
    weights = {
        name: phase(told, "step")["bytes"]["weights"] for name, told in (("q", packed), ("w", whole), ("f", full))
    }
    assert weights["w"] == weights["f"] + 4 * (learns - head) and weights["q"] < weights["f"]
    numbers = sum(full["parameters"].values())
    assert phase(packed, "read again")["bytes"] == {"weights": 4 * numbers}
    assert [each["name"] for each in whole["phases"]] == ["step"]


def test_ppo_is_planned_with_the_adapters_of_its_config(three: Path) -> None:
    """A whole reward model is there once more, and the value model's adapters stand beside it. Nothing has run yet."""
    adapters = "models.adapters={kind: lora, r: 3, target_modules: [q_proj]}"
    whole = found("ppo.yaml", adapters)["ppo"]
    numbers, head = whole["parameters"], read_config("model").hidden_size
    learns = read_config("model").num_hidden_layers * 3 * 2 * head
    held = phase(whole, "judge")["bytes"]
    assert whole["mode"] == "one-base" and held["gradients"] == 4 * (2 * learns + head)
    both = 4 * (numbers["policy"] + numbers["reward"] + 2 * learns)
    assert held["weights"] == pytest.approx(both, abs=500)  # buffers
    assert found("ppo.yaml", adapters, "--mode", "full")["ppo"]["phases"] == found("ppo.yaml")["ppo"]["phases"]
    replace("ppo.yaml", "reward: scorer", "reward: reward")
    replace("reward.yaml", "path: model", "path: model, adapters: {kind: lora}")
    one = phase(found("ppo.yaml", adapters)["ppo"], "judge")["bytes"]
    assert one["weights"] == pytest.approx(4 * (numbers["policy"] + 3 * learns + 2 * head), abs=500)
    replace("reward.yaml", "path: model", "path: other")  # another base
    Path("model").rename("other")
    Path("model").symlink_to("other")
    again = phase(found("ppo.yaml", adapters)["ppo"], "judge")["bytes"]
    assert again["weights"] == pytest.approx(both, abs=500)


def test_help_says_what_is_planned_without_a_mode() -> None:
    said = " ".join(plan("--help").stdout.replace("│", " ").split())
    assert "Default: the adapters of each config" in said


# Other machines.


def test_each_of_several_processes_makes_its_share(three: Path) -> None:
    """What is planned is a process; an update is of all of them, and there are fewer."""
    alone, both = (found(".", "--nproc", count) for count in ("1", "2"))
    for stage in ("sft", "reward", "ppo"):
        assert both[stage]["phases"] == alone[stage]["phases"]
    assert (alone["ppo"]["steps"], both["ppo"]["steps"]) == (10, 5)
    small = ("sft.per_device_train_batch_size=4", "sft.max_steps=null", "sft.gradient_accumulation_steps=1")
    steps = [found("sft.yaml", *small, "--nproc", count)["sft"]["steps"] for count in ("1", "2")]
    assert steps[0] == 2 * steps[1]
    assert "; each of 2 processes" in plan("ppo.yaml", "--nproc", "2", "--flops", "1e9").stdout


def test_a_gpu_that_is_not_here(three: Path) -> None:
    """Its memory is what counts, bfloat16 is used unasked where TRL trains, and its rate must be told."""
    result = plan("sft.yaml", *GPU, "--flops", "4e14")
    assert "a GPU of 80 GiB has 85.9 GB: fits" in result.stdout and "libraries" not in result.stdout
    large = "sft.per_device_train_batch_size=64"
    assert "does not fit" in plan("sft.yaml", large, "--gpu", "0.001", "--flops", "4e14").stdout
    here, there = (phase(found("sft.yaml", *more)["sft"], "step")["bytes"] for more in ((), GPU))
    if not torch.cuda.is_available():
        assert there["activations"] != here["activations"]
    refused = plan("ppo.yaml", *GPU)
    assert refused.exit_code == 2 and "error[C11]: --gpu plans for a GPU that need not be here" in refused.stderr


def test_what_is_cut_up_over_processes(three: Path) -> None:
    """By hand: of 4 processes each keeps a quarter of layers, embeddings and heads, and what is together beside it."""
    models = {"policy": load_causal_lm("model"), "value": load_reward_model("scorer")}

    def size(weights: Any) -> int:
        return 4 * sum(weight.numel() for weight in {id(w): w for w in weights}.values())

    layers = {name: size(model.model.layers.parameters()) for name, model in models.items()}
    heads = {"policy": [models["policy"].lm_head.weight], "value": []}
    words = {name: size([model.get_input_embeddings().weight, *heads[name]]) for name, model in models.items()}
    layer = size(models["policy"].model.layers[0].parameters())
    learnt = sum(layers.values()) + sum(words.values())
    whole = found("ppo.yaml", *GPU, "--nproc", "4")["ppo"]
    cut = found("ppo.yaml", *GPU, "--nproc", "4", "ppo.fsdp=true")["ppo"]
    assert found("ppo.yaml", "ppo.fsdp=true")["ppo"]["phases"] == found("ppo.yaml")["ppo"]["phases"]  # in one process

    def less(name: str, kind: str) -> int:
        return phase(whole, name)["bytes"][kind] - phase(cut, name)["bytes"][kind]

    together = sum(words.values()) + layer
    gone = 0.75 * (learnt + layers["policy"])  # the reference's layers, too
    assert less("judge", "weights") == less("update", "weights") == pytest.approx(gone - together, abs=8)
    assert less("rollout", "weights") == pytest.approx(gone - layers["policy"] - words["policy"], abs=8)
    assert less("judge", "gradients") == pytest.approx(0.75 * learnt, abs=8)
    assert less("update", "gradients") == pytest.approx(0.75 * learnt - together, abs=8)
    assert less("update", "optimizer") == pytest.approx(2 * 0.75 * learnt, rel=0.01)
    assert less("update", "activations") == 0


# Time.


def test_time_is_operations_over_the_rate(three: Path) -> None:
    slow, fast = (
        json.loads(plan("ppo.yaml", "--json", "--flops", rate).stdout)["stages"][0] for rate in ("1e9", "4e9")
    )
    for name, seconds in slow["seconds"].items():
        assert seconds == pytest.approx(phase(slow, name)["flops"] / 1e9) and seconds == 4 * fast["seconds"][name]
    assert slow["steps"] == 10 and slow["hours"] == pytest.approx(10 * sum(slow["seconds"].values()) / 3600)


def test_operations_are_six_for_each_weight_and_token(three: Path) -> None:
    """2 forward, 4 backward (Kaplan et al. 2020, section 2.1), of weights in products, and attention's own beside."""
    told = found("ppo.yaml", "--prompt-length", "40", "ppo.num_ppo_epochs=3", "ppo.num_mini_batches=2")["ppo"]
    config = read_config("model")
    body = sum(w.numel() for w in load_causal_lm("model").model.layers.parameters() if w.ndim == 2)
    width = 40 + 24 - 1  # the last token is not read
    tokens, answers = 64 * width, 64 * 24
    attention = 14 * config.num_hidden_layers * config.hidden_size * 64 * width * width  # 4 forward, 10 backward
    head = 6 * config.vocab_size * config.hidden_size * answers
    expected = 3 * (2 * (6 * body * tokens + attention) + head)
    assert phase(told, "update")["flops"] == pytest.approx(expected, rel=0.02)
    assert phase(told, "judge")["flops"] == pytest.approx(
        4 * (2 * body * tokens + attention * 4 / 14) + head * 2 / 3, rel=0.02
    )


def test_the_rate_of_this_machine_is_measured() -> None:
    assert 1e8 < duration.measure_rate(1024, 256) < 1e16


@on_a_cpu
def test_a_small_models_phases_are_run(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no matrix product counts, in the threads that the stage will have. 64 episodes, 16 rows at a time."""
    threads = set()
    plain = ModelRunner.forward

    def slow(*args: Any) -> Any:
        threads.add(torch.get_num_threads())
        time.sleep(0.05)
        return plain(*args)

    monkeypatch.setattr(ModelRunner, "forward", slow)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(devices, "DEFAULT_THREADS", 2)
    before = torch.get_num_threads()
    told = json.loads(plan("ppo.yaml", "ppo.num_ppo_epochs=2", "--json").stdout)["stages"][0]
    torch.set_num_threads(before)
    assert told["run"] and set(told["seconds"]) == {"rollout", "judge", "update"} and 1 in threads
    assert 4 * 0.05 < told["seconds"]["judge"] < 100 * 0.05
    assert told["share"] < 0.95  # it slept
    assert told["hours"] == pytest.approx(10 * sum(told["seconds"].values()) / 3600)


def test_a_stage_that_would_start_from_itself_is_refused(three: Path) -> None:
    refused = plan("sft.yaml", "model.path=sft")
    assert refused.exit_code == 2 and "error[M10]" in refused.stderr
    assert "model.path names the folder that this stage writes" in refused.stderr


def test_a_plain_model_beside_a_config_that_writes_elsewhere(three: Path) -> None:
    """A folder ./sft beside sft.yaml is what the stage starts from where its `run:` is another folder."""
    Path("model").rename("sft")
    replace("sft.yaml", "model: {path: model}", "model: {path: ./sft}\nrun: elsewhere")
    assert found("sft.yaml")["sft"]["rows"] > 0


def test_of_large_models_and_other_machines_the_time_is_a_floor(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*more: str) -> dict[str, Any]:
        first: dict[str, Any] = json.loads(plan("sft.yaml", *more, "--json").stdout)["stages"][0]
        return first

    assert not told("--flops", "1e9")["run"] and told("--flops", "1e9")["share"] == 1
    assert not told(*GPU, "--flops", "4e14")["run"]
    monkeypatch.setattr(devices, "SMALL_MODEL_PARAMETERS", 100)
    assert not told()["run"]
    assert ": at least " in plan("sft.yaml").stdout


def test_rows_are_as_long_as_on_average_where_they_are_run(three: Path) -> None:
    assert Lengths(20, 80, mean=50).average == Lengths(10, 40) and Lengths(20, 80).average == Lengths(20, 80)
    (_, row), *_ = read_jsonl(Path("rows.jsonl"))
    append_jsonl(Path("rows.jsonl"), {**row, "completion": 3 * row["completion"]})
    chain, config = ModelResolver([], Options(), None), load("sft", Path("sft.yaml"))
    start = chain.start(config, "model.path")
    lengths = chain.remaining(config, start).lengths
    encoded = [
        start.tokenizer(line["prompt"] + line["completion"])["input_ids"] for _, line in read_jsonl(Path("rows.jsonl"))
    ]
    assert lengths.mean == pytest.approx(sum(map(len, encoded)) / len(encoded), abs=1.01)  # and the end of text
    assert lengths.mean < lengths.row


def test_what_other_work_leaves_of_the_processor_is_told(capsys: pytest.CaptureFixture[str], three: Path) -> None:
    _, share = devices.measure_cpu_share(lambda: time.sleep(0.1))
    assert share < 0.5
    told = found("ppo.yaml")["ppo"]
    for share, said in ((0.95, False), (0.25, True)):
        _show({**told, "steps": 4, "seconds": {"update": 10}, "share": share, "run": True}, Target.of(None, 1))
        out = capsys.readouterr().out
        assert "4 x 10 s: about 40 s, with all responses at their limit" in out
        assert ("other work leaves 25% of the processor just now; alone some 10 s" in out) == said


def test_the_total_of_the_stages(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "savings", lambda *_: [])
    result = json.loads(plan(".", "--flops", "1e9", "--json").stdout)
    stages, total = result["stages"], result["total"]
    assert total["hours"] == pytest.approx(sum(stage["hours"] for stage in stages)) and total["starts"] == 3
    assert total["needed"] == max(stage["needed"] for stage in stages)
    assert total["fullest"] == max(stages, key=lambda stage: stage["needed"])["stage"] and total["fits"]
    (line,) = (line for line in plan(".", "--flops", "1e9").stdout.splitlines() if line.startswith("in all   "))
    assert line.startswith(f"in all   at least {terminal.duration(3600 * total['hours'])} for 3 stages; at most ")
    assert line.endswith(f" of memory, in {total['fullest']}: fits")
    assert "in all   " not in plan("sft.yaml", "--flops", "1e9").stdout
    small = plan(".", "--gpu", "0.004", "--flops", "4e14").stdout
    assert "does not fit" in small.splitlines()[-2] and " starts, evaluations" in small.splitlines()[-1]


# The command.


def test_the_chain_is_planned_before_any_of_it_ran(three: Path) -> None:
    """reward.yaml and ppo.yaml start from what sft.yaml is still to make: of the shape of its own start."""
    replace("reward.yaml", "model: {path: model}\n", "")
    replace("ppo.yaml", "models: {sft: model, reward: scorer}\n", "")
    (three / "eval.yaml").write_text("data: {prompts: prompts.jsonl}\neval: {n: 9, best_of: []}\n")
    told = found(".")
    assert list(told) == ["sft", "reward", "ppo", "eval"]
    assert told["ppo"]["parameters"]["policy"] == told["sft"]["parameters"]["policy"]
    assert told["eval"]["response_tokens"] == told["ppo"]["response_tokens"] == 24
    assert found("ppo.yaml")["ppo"]["parameters"] == told["ppo"]["parameters"]  # by itself, with sft.yaml beside it
    assert not (three / "sft").exists()


def test_policies_on_the_way_answer_too(three: Path) -> None:
    """Beside two policies in two modes, seven snapshots in one: PPO's eighth is its result."""
    (three / "eval.yaml").write_text(
        "models: {sft: model}\ndata: {prompts: prompts.jsonl}\neval: {n: 9, best_of: []}\n"
    )
    told, short = (found("eval.yaml", "-s", f"eval.frontier={on}")["eval"]["phases"] for on in ("true", "false"))
    for one, other in zip(told, short, strict=True):
        assert one["flops"] / other["flops"] == pytest.approx((4 + 7) / 4, rel=0.01)


def test_fresh_weights_are_planned_without_them(three: Path) -> None:
    new = (
        "model: {new: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 3, num_attention_heads: 2, "
        "tie_word_embeddings: true, max_position_embeddings: 256, tokenizer: {train: rows.jsonl, vocab_size: 300}}}"
    )
    replace("sft.yaml", "model: {path: model}", new)
    replace("sft.yaml", "max_steps: 1", "max_steps: 1, max_length: 128")
    replace("ppo.yaml", "models: {sft: model, reward: scorer}", "models: {value: policy_head}")
    replace("reward.yaml", "model: {path: model}\n", "")
    told = found(".")
    layer = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
    policy = told["sft"]["parameters"]["policy"]
    assert (policy - 3 * layer - 16) % 16 == 0 and 256 <= (policy - 3 * layer - 16) // 16 <= 310
    assert told["ppo"]["parameters"]["policy"] == policy and "value" not in told["ppo"]["parameters"]
    (three / "rows.jsonl").unlink()
    assert "error[D01]" in plan("sft.yaml").stderr
    assert found("sft.yaml", "--prompt-length", "9")["sft"]["parameters"]["policy"] == pytest.approx(policy, rel=0.2)


def test_lengths_are_those_of_the_data(three: Path) -> None:
    said = json.loads(CliRunner().invoke(app, ["check", ".", "--json"]).stdout)["checked"]
    longest = {(one["stage"], one["what"]): one.get("longest") for one in said}
    told = found(".")
    assert told["ppo"]["prompt_tokens"] == longest["ppo", "data.prompts"]
    for stage in ("sft", "reward"):
        assert told[stage]["prompt_tokens"] + told[stage]["response_tokens"] == longest[stage, "data.train"]


BROKEN = {
    "a key that does not exist": ("ppo.yaml", "total_episodes: 640", "total_episodez: 640"),
    "a model that is not there": ("ppo.yaml", "sft: model", "sft: nodel"),
    "data that is not there": ("ppo.yaml", "prompts: prompts.jsonl", "prompts: promts.jsonl"),
    "a response that leaves no room": ("ppo.yaml", "response_length: 24", "response_length: 2400"),
    "more shared layers than there are": ("ppo.yaml", "response_length: 24", "num_shared_layers: 9"),
    "another stage's file": ("ppo.yaml", "models: ", "stage: ppoo\nmodels: "),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_said_as_by_check(three: Path, what: str) -> None:
    name, old, new = BROKEN[what]
    replace(name, old, new)
    result = plan(name)
    assert (result.exit_code, result.stdout) == (2, "") and "Traceback" not in result.stderr
    assert result.stderr == check(name).stderr and result.stderr.startswith("error[")


@on_a_cpu
def test_what_does_not_fit_is_told_with_what_would_help(
    three: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(told["fits"] and not told["advice"] for told in found(".").values())
    with monkeypatch.context() as small:
        small.setattr(system, "total_memory", lambda: 1000)
        told = counted_anew("ppo.yaml")["ppo"]
    advised = {one["set"]: one["saves"] for one in told["advice"]}
    assert not told["fits"] and list(advised.values()) == sorted(advised.values(), reverse=True)
    halves = "ppo.per_device_train_batch_size=8 ppo.gradient_accumulation_steps=8"
    assert {"models.value=policy_head", "ppo.gradient_checkpointing=true", halves} <= advised.keys()
    _show(told, Target.of(None, 1))
    shown = capsys.readouterr().out
    assert "does not fit" in shown and all(f"{what} saves" in shown for what in advised)
    peak = max(one["total"] for one in told["phases"])
    for what in (halves, *list(advised)[::6]):
        smaller = found("ppo.yaml", *what.split())["ppo"]
        assert peak - max(one["total"] for one in smaller["phases"]) == advised[what]


def test_the_table(three: Path) -> None:
    result = plan(".")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    ppo = lines[next(number for number, line in enumerate(lines) if line.startswith("ppo: ")) :]
    assert ppo[1].split() == ["rollout,", "64", "rows", "judge,", "16", "rows", "update,", "16", "rows"]
    assert [line.split()[0] for line in ppo[2:9]] == [
        "weights", "gradients", "optimizer", "cache", "logits", "activations", "total",
    ]  # fmt: skip
    assert ", responses of " in ppo[0] and "; rows of " in lines[0] and "time     a step: 0." in result.stdout
    assert ppo[9].startswith("memory   ") and ": fits" in ppo[9] and ppo[10].startswith("time     an update: rollout ")


def test_it_does_not_wait_for_trl(three: Path) -> None:
    code = (
        "import sys; from rlhf_cli.cli import app\ntry: app(['plan', '.', '--flops', '1e9'])\nexcept SystemExit: pass\n"
    )
    code += "print({'trl', 'peft'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


# The estimate against the real thing.


SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4}
SIZES |= {"num_hidden_layers": 2, "num_key_value_heads": 2}
UPDATES = {"total_episodes": 32, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
UPDATES |= {"num_ppo_epochs": 1, "response_length": 32, "stop_token": "none", "missing_eos_penalty": None}
CASES = {
    "a large vocabulary": Case("ppo", {**SIZES, "vocab_size": 50_000}, UPDATES, prompt=16),
    "deep and narrow": Case(
        "ppo", {**SIZES, "hidden_size": 192, "intermediate_size": 500, "num_hidden_layers": 16}, UPDATES, prompt=48
    ),
    "long responses": Case(
        "ppo",
        {**SIZES, "num_hidden_layers": 6},
        {
            **UPDATES,
            "total_episodes": 16,
            "per_device_train_batch_size": 8,
            "response_length": 440,
            "micro_batch_tokens": 4096,
        },
        prompt=16,
    ),
    "supervised": Case(
        "sft",
        {**SIZES, "vocab_size": 16_000, "num_hidden_layers": 4},
        {"max_steps": 2, "per_device_train_batch_size": 8},
        prompt=64,
        answer=128,
    ),
}
# glibc's malloc keeps what was freed below these sizes: a process holds more than its tensors (docs/scaling.md).
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@on_a_cpu
@pytest.mark.slow
@pytest.mark.parametrize("what", CASES)
def test_within_a_quarter_of_the_most_that_a_stage_held(what: str, tmp_path: Path) -> None:
    case = CASES[what]
    told = found(str(write(case, tmp_path / "planned")))[case.stage]
    most = measured(case, tmp_path / "exact", **GIVES_BACK)
    assert most > 300e6 and max(one["total"] for one in told["phases"]) == pytest.approx(most, rel=0.25)
    assert told["needed"] - told["libraries"] == pytest.approx(measured(case, tmp_path / "usual"), rel=0.25)
