"""`rlhf plan`: what it counts, what it prints, and which errors it reports.

Modules: `commands/common/plan/advice.py`, `commands/common/plan/data_size.py`, `commands/common/plan/inputs.py`,
`commands/common/plan/run_plan.py`, `commands/common/plan/stage_plan.py`.
"""

import itertools
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
from bad_inputs import check, replace
from plans import GPU, on_a_cpu, phase, plan, plan_json, planned, ppo, size
from typer.testing import CliRunner

from rlhf_cli import system, terminal
from rlhf_cli.cli import app
from rlhf_cli.commands.common.plan import stage_plan
from rlhf_cli.commands.plan.show import show
from rlhf_cli.config.loading import load
from rlhf_cli.config.stages import MODES
from rlhf_cli.models import build, lora
from rlhf_cli.models.load import load_causal_lm, load_reward_model, read_config
from rlhf_cli.planning.memory import KINDS
from rlhf_cli.planning.model_size import DEFAULT_ADAPTERS
from rlhf_cli.planning.target import Target
from rlhf_cli.runs.resolve import models_in_memory

pytestmark = pytest.mark.usefixtures("no_progress_lines")


def size_bytes(tensors: Any) -> int:
    """Return the bytes of distinct tensors."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


def policy_and_scorer() -> tuple[int, int]:
    return load_causal_lm("model").num_parameters(), load_reward_model("scorer").num_parameters()


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


@pytest.mark.full
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


@pytest.mark.full
def test_frozen_matrices_take_half_with_bf16(three: Path) -> None:
    """The weights of the four models, as PPOTrainer has them; and those of an evaluation."""
    models = load_causal_lm("model"), load_causal_lm("model"), load_reward_model("scorer"), load_reward_model("scorer")
    for frozen in models[1::2]:
        lora.autocast_matrices(frozen.requires_grad_(False))
    expected = sum(size_bytes([*model.parameters(), *model.buffers()]) for model in models)
    assert size(ppo("ppo.bf16=true"), "judge")["weights"] == pytest.approx(expected, abs=200)
    assert size(ppo(*GPU), "judge") == size(ppo(*GPU, "ppo.bf16=true"), "judge")
    write = "models: {sft: model, ppo: model, reward: scorer}\ndata: {prompts: prompts.jsonl}\neval: {n: 9, "
    (three / "eval.yaml").write_text(write + "temperature: 1.0, response_length: 8, best_of: [], frontier: false}\n")
    sizes = [size_bytes([*model.parameters(), *model.buffers()]) for model in models]
    (half,) = planned("eval.yaml", "eval.bf16=true").values()
    assert size(half, "judge")["weights"] == pytest.approx(2 * sizes[1] + sizes[3], abs=200)


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


@pytest.mark.full
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
    assert size(packed, "read again")["weights"] == 4 * sum(full["parameters"].values())
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


def test_the_total_of_the_stages(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_plan, "advise", lambda *_: [])
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


def test_the_chain_is_planned_before_any_stage_ran(three: Path) -> None:
    """reward.yaml and ppo.yaml start from the model that sft.yaml will write, which has the shape of its own start."""
    replace("reward.yaml", "model: {path: model}\n", "")
    replace("ppo.yaml", "models: {sft: model, reward: scorer}\n", "")
    (three / "eval.yaml").write_text("data: {prompts: prompts.jsonl}\neval: {n: 9, best_of: []}\n")
    stages = planned(".")
    assert list(stages) == ["sft", "reward", "ppo", "eval"]
    assert stages["ppo"]["parameters"]["policy"] == stages["sft"]["parameters"]["policy"]
    assert stages["eval"]["response_tokens"] == stages["ppo"]["response_tokens"] == 24
    served = ("eval.yaml", "-s", "models.engine={vllm: {url: 'http://127.0.0.1:1'}}", "--flops", "1e9")
    assert [phase["name"] for phase in planned(*served)["eval"]["phases"]] == ["judge"]
    assert "without the rollouts of the server" in plan(*served).stdout
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
    """Seven snapshots, as PPO's eighth is its result; three shares; once the draws of the limit, also best of n's."""
    text = "models: {sft: model}\ndata: {prompts: prompts.jsonl}\neval: {n: 9, best_of: []}\n"
    (three / "eval.yaml").write_text(text)
    long, short = (planned("eval.yaml", "-s", f"eval.frontier={on}")["eval"]["phases"] for on in ("true", "false"))
    for one, other in zip(long, short, strict=True):
        assert one["flops"] / other["flops"] == pytest.approx((4 + 3 + 7) / (4 + 3), rel=0.01)
    sizes = "eval: {n: 9, frontier: false, interpolate: [], best_of: []}\n"
    text = f"models: {{sft: model}}\ndata: {{prompts: prompts.jsonl}}\n{sizes}"
    (three / "eval.yaml").write_text(text)
    without = planned("eval.yaml")["eval"]["phases"]
    for rounds, best_of in ((16, 4), (20, 16)):
        sets = ("-s", "eval.limit.samples=12", "-s", f"eval.best_of=[{best_of}]")
        for one, other in zip(planned("eval.yaml", *sets)["eval"]["phases"], without, strict=True):
            assert one["flops"] / other["flops"] == pytest.approx(rounds / 4, rel=0.01)


@pytest.mark.full
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
    assert layers == size_bytes([*load_causal_lm("model").model.layers[0].parameters()])


def plan_weights(phases: list[dict[str, Any]]) -> int:
    return next(each["bytes"]["weights"] for each in phases if each["name"] == "judge")


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("case", BROKEN)
def test_errors_are_those_of_check(three: Path, case: str) -> None:
    name, old, new = BROKEN[case]
    replace(name, old, new)
    result = plan(name)
    assert (result.exit_code, result.stdout) == (2, "") and "Traceback" not in result.stderr
    assert result.stderr == check(name).stderr and result.stderr.startswith("error[")


@pytest.mark.full
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
    show(plans.parsed(found), Target.of(gpu[1], 1))
    out = capsys.readouterr().out
    assert "does not fit" in out and all(f", with {combination}" in out for combination in combinations)


@pytest.mark.full
def test_the_table_and_an_optimizer_that_is_not_counted(three: Path) -> None:
    (only,) = planned("sft.yaml", "--gpu", "0.0001", "trainer.optim=adafactor").values()
    assert only["fits"] is None
    result = plan(".")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    ppo = lines[next(number for number, line in enumerate(lines) if line.startswith("ppo: ")) :]
    assert ppo[1].split() == ["rollout,", "64", "rows", "judge,", "16", "rows", "update,", "16", "rows"]
    assert [line.split()[0] for line in ppo[2:11]] == [*KINDS, "total", "memory", "time"]


def test_quiet_prints_a_line_a_stage(three: Path) -> None:
    result = plan("ppo.yaml", "-q", "--gpu", "0.0001", "--flops", "1e12")
    (line,) = result.stdout.splitlines()
    assert line.startswith("ppo ") and " of 107.4 kB: does not fit; " in line and result.stderr == ""


@pytest.mark.slow
@pytest.mark.full
def test_plan_imports_neither_trl_nor_peft(three: Path) -> None:
    code = "import sys; from rlhf_cli.cli import app\ntry: app(['plan', '.', '--flops', '1e9'])\n"
    code += "finally: print({'trl', 'peft'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
