"""`model.adapters`: trained weights, the files of a stage, and later stages, through the real commands."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import run_cli
import tiny
import torch
import trl_stage
from adapter_folder import adapter_settings, logits, run, widen, write
from bad_inputs import refused, replace, rlhf, warned
from ppo_folder import untimed
from run_cli import must_succeed, python
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_cli import jsonl, runs
from rlhf_cli.config.loading import load
from rlhf_cli.config.sections import Adapters
from rlhf_cli.models import lora, tokenizers, weight_files
from rlhf_cli.models.load import load_causal_lm, load_reward_model
from rlhf_cli.planning import fits
from rlhf_cli.planning.target import Target
from rlhf_cli.stages.common import trl_callback
from tests.conftest import World

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_page")]


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))


# What adapters reach


@pytest.mark.parametrize(
    ("family", "sizes", "left_out"),
    [
        ("mixtral", {"num_local_experts": 8}, "experts.gate_up_proj, experts.down_proj"),
        (
            "qwen3_moe",
            {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 8},
            "experts.gate_up_proj, experts.down_proj",
        ),
        ("llama", {}, ""),
    ],
)
def test_experts_without_adapters_are_counted(
    folder: Path, tokenizer: Any, family: str, sizes: dict[str, int], left_out: str
) -> None:
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    model = tiny.causal(family, vocab_size=len(tokenizer), num_key_value_heads=2, **sizes, **special)
    model.save_pretrained("model")
    matrices = {name: each.numel() for name, each in model.named_parameters() if each.ndim > 1}
    del matrices["model.embed_tokens.weight"], matrices["lm_head.weight"]
    linear = sum(size for name, size in matrices.items() if not left_out or ".self_attn." in name)
    share, names = lora.reached_share(model)
    assert ", ".join(names) == left_out and share == pytest.approx(linear / sum(matrices.values()))
    assert (share < 0.1) == bool(left_out)
    said = f"adapters are added to {share:.0%} of the weights in the model's matrices; not to {left_out}"
    options = ("-s", "model.adapters.kind=lora")
    chosen = run_cli.rlhf("check", "sft.yaml", *options, "-s", "model.adapters.target_modules=[q_proj]")
    assert "C18" not in must_succeed(chosen).stderr
    if family == "mixtral":
        in_4_bits = run_cli.rlhf("check", "sft.yaml", "-s", "model.adapters.kind=qlora").stderr
        assert "adapters are added to and 4 bits store" in in_4_bits
    results = [
        run_cli.rlhf("check", "sft.yaml", *options),
        run_cli.rlhf("plan", "sft.yaml", *options),
        rlhf("sft", *options),
    ]
    for result in results:
        must_succeed(result)
        assert ("warning[C18]: sft.yaml" in result.stderr and said in result.stderr) == bool(left_out), result.stderr
    trained = load_file("sft/model/adapter_model.safetensors")
    assert {name.split(".")[-3] for name in trained if "lora_A" in name} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not any("experts" in name for name in trained)


# The files of a stage


def test_a_stage_writes_only_the_adapters_and_the_path_of_their_base(adapters_run: Path) -> None:
    for stage, base in (("sft", "../../model"), ("reward", "../../sft/model")):
        folder = adapters_run / stage / "model"
        adapter_settings(folder, base)
        tensors = load_file(folder / "adapter_model.safetensors")
        heads = {name for name in tensors if ".lora_" not in name}
        assert heads == (set() if stage == "sft" else {"base_model.model.score.weight"})
        assert not [path for path in (adapters_run / stage / "state").rglob("*") if path.name == "README.md"]
        assert str(adapters_run) not in "".join(path.read_text() for path in (adapters_run / stage).rglob("*.json"))
    manifest = json.loads((adapters_run / "sft/manifest.json").read_text())
    last = [row for _, row in jsonl.read_jsonl(adapters_run / "sft/metrics.jsonl") if "eval_loss" in row][-1]
    assert last["step"] == 12 and last["eval_loss"] == pytest.approx(manifest["metrics"]["eval_loss"], rel=1e-3)
    assert "LoRA" in (adapters_run / "sft/model/README.md").read_text()


def test_loading_merges_the_adapter_as_peft_does(adapters_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import PeftModel

    torch.manual_seed(7)
    merged = load_causal_lm(adapters_run / "sft/model")
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(7)))
    plain = AutoModelForCausalLM.from_pretrained(adapters_run / "model", dtype=torch.float32)
    before = logits(plain)
    expected = logits(PeftModel.from_pretrained(plain, adapters_run / "sft/model"))
    assert torch.allclose(logits(merged), expected, atol=1e-5) and not torch.allclose(before, expected, atol=1e-2)
    assert type(merged) is type(load_causal_lm(adapters_run / "model")) and not hasattr(merged, "peft_config")
    assert all(weight.requires_grad for weight in merged.parameters())  # PPO trains them all
    assert tiny.description(merged) == tiny.description(load_causal_lm(adapters_run / "sft/model", empty=True))
    scorer, empty = (load_reward_model(adapters_run / "reward/model", empty=each) for each in (False, True))
    assert tiny.description(scorer) == tiny.description(empty)
    assert (merged.generation_config.eos_token_id, merged.config.pad_token_id) == (1, 0)
    monkeypatch.chdir(adapters_run / "sft/model")  # plain from_pretrained() resolves the relative path of the base
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(".", dtype=torch.float32)), expected, atol=1e-5)


def test_adapters_are_merged_in_float32_into_a_base_stored_in_bf16(adapters_copy: Path) -> None:
    load_causal_lm(adapters_copy / "model", dtype="bfloat16").save_pretrained(adapters_copy / "model")
    wide, narrow = (load_causal_lm(adapters_copy / "sft/model", bf16_matrices=each) for each in (False, True))
    assert lora.has_bf16_matrices(narrow) and not lora.has_bf16_matrices(wide)
    lora.autocast_matrices(wide.requires_grad_(False))
    assert all(map(torch.equal, wide.state_dict().values(), narrow.state_dict().values()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2's embedding and head are tied
def test_adapters_on_a_bf16_base_change_no_bit_under_autocast(family: str) -> None:
    """The embedding stays in float32, also where it is the head's matrix."""
    found = []
    for bf16 in (True, False):
        torch.manual_seed(3)
        model, options = tiny.causal(family), {"vocab_size": tiny.VOCABULARY, "base": "a/b", "revision": None}
        adapted = lora.add_adapters(model, Adapters(kind="lora"), device=model.device, bf16=bf16, **options)
        assert lora.has_bf16_matrices(model) == bf16 and model.get_input_embeddings().weight.dtype == torch.float32
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(adapted.eval()(input_ids=torch.arange(12)[None]).logits)
    assert torch.equal(*found)


def test_a_reward_model_is_loaded_with_its_own_head_and_scale(adapters_run: Path) -> None:
    manifest = json.loads((adapters_run / "reward/manifest.json").read_text())
    scorer = load_reward_model(adapters_run / "reward/model")
    head = load_file(adapters_run / "reward/model/adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(scorer.score.weight, head) and scorer.num_labels == 1
    assert (scorer.config.reward_mean, scorer.config.reward_std) == (manifest["reward_mean"], manifest["reward_std"])
    assert manifest["metrics"]["accuracy"] > 0.9
    body = load_causal_lm(adapters_run / "sft/model").model.layers[0].mlp.up_proj.weight
    # The reward adapter is added to SFT's.
    assert not torch.allclose(scorer.model.layers[0].mlp.up_proj.weight, body, atol=1e-4)


# Trainable weights


def trainer_of(folder: Path, stage: str, *changes: str) -> Any:
    return trl_stage.trainer_of(load(stage, folder / f"{stage}.yaml", changes))[0]


KINDS = ("{kind: lora, r: 4}", "{kind: qlora, r: 4}", "{kind: lora, r: 4, use_dora: true}")


@pytest.mark.parametrize("stage", ["sft", "reward"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_and_the_head_are_trained(world: World, tmp_path: Path, stage: str, kind: str) -> None:
    folder = write(tmp_path / "run", world, parent="model")
    widen(folder, world)
    trainer = trainer_of(folder, stage, f"model.adapters={kind}")
    model = trainer.model
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    head = {"base_model.model.score.modules_to_save.default.weight"} if stage == "reward" else set()
    assert head <= trainable and all(".lora_" in name for name in trainable - head)
    assert len([name for name in trainable if ".lora_A." in name]) == 7 * 2  # each matrix of both layers
    assert any("magnitude" in name for name in trainable) == ("dora" in kind)
    assert {weight.dtype for name, weight in model.named_parameters() if name in trainable} == {torch.float32}
    packed = {name for name, weight in model.named_parameters() if weight.dtype == torch.uint8}
    assert len(packed) == (14 if "qlora" in kind else 0)
    trainer.args.max_steps, trainer.args.eval_strategy, trainer.args.save_strategy = 3, "no", "no"
    trainer.train()
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == trainable


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_trained_weights_that_are_not_finite_are_found_without_a_copy(bad: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100).requires_grad_(False))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        assert trl_callback.has_finite_weights(model)
    assert max(event.cpu_memory_usage for event in profile.events()) < 100
    for layer, is_finite in ((model[1], True), (model[0], False)):  # frozen weights do not change
        layer.weight.data[99, 99] = bad
        assert trl_callback.has_finite_weights(model) == is_finite


def test_target_modules_choose_the_layers(world: World, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", world)
    widen(folder, world)
    adapters = "model.adapters={kind: qlora, r: 3, lora_alpha: 5, use_rslora: true, target_modules: [q_proj, v_proj]}"
    model = trainer_of(folder, "sft", adapters).model
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(names) == 2 * 2 * 2 and all(".q_proj." in name or ".v_proj." in name for name in names)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.r["default"] == 3 and layer.scaling["default"] == pytest.approx(5 / 3**0.5)
    packed = [name for name, weight in model.named_parameters() if weight.dtype == torch.uint8]
    assert len(packed) == 14  # layers without adapters are stored in 4 bits, too


def test_e02_4_bits_learn_and_a_cpu_is_called_slow(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E02: it works, and the loss goes down."""
    monkeypatch.chdir(write(tmp_path / "run", world))
    widen(Path(), world)
    replace("sft.yaml", "kind: lora", "kind: qlora")
    result = rlhf("sft", "-s", "sft.max_steps=24")
    where = ("weights in 4 bits work on", "slowly", "hint: lora is faster")
    assert torch.cuda.is_available() or warned(result, "E02", "sft.yaml:1: ", *where)
    losses = [row["loss"] for _, row in jsonl.read_jsonl(Path("sft/metrics.jsonl")) if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    manifest = json.loads(Path("sft/manifest.json").read_text())
    assert manifest["versions"]["bitsandbytes"] and sizes(Path("sft")) < 60_000


def test_qlora_quantizes_the_sum_of_base_and_adapter(adapters_copy: Path) -> None:
    """Merged into a base in 4 bits, a small adapter would be lost to rounding."""
    import bitsandbytes as bnb

    trainer = trainer_of(adapters_copy, "reward", "model.adapters.kind=qlora")
    layer = trainer.model.get_base_model().model.layers[0].mlp
    packed = layer.down_proj.base_layer.weight
    opened = bnb.functional.dequantize_4bit(packed.data, packed.quant_state)
    both, base = (load_causal_lm(name).model.layers[0].mlp for name in ("sft/model", "model"))
    away = (opened - both.down_proj.weight).norm() / opened.norm()
    assert away < 0.11 < (opened - base.down_proj.weight).norm() / opened.norm()
    # Rows of 32, which bitsandbytes would read wrongly on a CPU, stay as they are.
    assert torch.equal(layer.up_proj.base_layer.weight, both.up_proj.weight)


def test_gpt2_with_adapters_goes_through_the_stages(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 has transposed matrices, tied embeddings, and no pad token."""
    import families

    folder = write(tmp_path / "run", world, base="gpt2")
    families.write_causal(folder / "gpt2", "gpt2", [row["text"] for _, row in jsonl.read_jsonl(world.text)])
    monkeypatch.chdir(folder)
    manifest = run(folder, "sft", "-s", "model.adapters={kind: qlora, r: 4}")
    assert manifest["special_tokens"]["pad"] == len(tokenizers.load_tokenizer(folder / "gpt2"))
    scored = run(folder, "reward")
    assert scored["metrics"]["accuracy"] > 0.6 and scored["tokenizer_sha256"] == manifest["tokenizer_sha256"]
    run(folder, "ppo")
    embeddings = load_causal_lm(folder / "ppo/model").get_input_embeddings().weight
    assert len(embeddings) == manifest["special_tokens"]["pad"] + 1


def test_the_embedding_of_a_new_pad_token_is_the_same_in_every_load(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not saved: each load computes the mean of the base's rows."""
    monkeypatch.chdir(write(tmp_path / "run", world))
    settings = json.loads(Path("model/tokenizer_config.json").read_text())
    settings.pop("pad_token")
    Path("model/tokenizer_config.json").write_text(json.dumps(settings))
    trl_stage.rename_pad_token(Path("model"))
    run(tmp_path / "run", "sft")
    one, two = (load_causal_lm("sft/model").get_input_embeddings().weight for _ in range(2))
    known = len(world.tokenizer())
    assert one.shape[0] == known + 1 and torch.equal(one, two)
    assert load_causal_lm("sft/model", empty=True).get_input_embeddings().weight.shape == one.shape
    assert torch.allclose(one[known], one[:known].mean(0), atol=1e-6)
    assert not [name for name in load_file("sft/model/adapter_model.safetensors") if "embed" in name]


READS = """
import json, sys
from collections import Counter
from benchmarks.chain import counting_reads
reads = Counter()
with counting_reads(reads):
    from rlhf_cli import runs
    from rlhf_cli.cli import app
    for folder, stage in zip(sys.argv[1::2], sys.argv[2::2]):
        before = Counter(reads)
        try:
            app([stage, "--config", f"{folder}/{stage}.yaml"])
        except SystemExit as end:
            assert not end.code
        runs.release()
        print(json.dumps(reads - before))
"""


@pytest.mark.slow
def test_the_base_is_read_once_for_its_hash_and_once_for_its_weights(adapters_run: Path, tmp_path: Path) -> None:
    """Whole weights are read again for the answers of reward.normalize: training changed those in memory."""
    cases = (("sft", "sft", 2), ("reward", "reward", 2), ("whole", "reward", 3))
    for name, stage, _ in cases:
        shutil.rmtree(shutil.copytree(adapters_run, tmp_path / name) / stage)
    replace(f"{tmp_path}/whole/reward.yaml", "{path: sft, adapters: {kind: lora, r: 4}}", "{path: model}")
    words = [str(word) for name, stage, _ in cases for word in (tmp_path / name, stage)]
    done = must_succeed(python("-c", READS, *words))
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for (name, _, reads), found in zip(cases, printed, strict=True):
        counted = {Path(path).relative_to(tmp_path / name).as_posix(): count for path, count in found.items()}
        assert counted.pop("model/model.safetensors") == reads and counted
        assert {count for file, count in counted.items() if "/state/" not in file} == {2}


# Resume


CASES = {
    "sft": ("model.adapters={kind: lora, r: 4, lora_dropout: 0.1}",),
    "reward": ("model.adapters={kind: qlora, r: 4, use_dora: true}",),
}


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_resume_equals_a_straight_run(world: World, tmp_path: Path, stage: str) -> None:
    """Stopped after an evaluation between two regular checkpoints; then killed after the last checkpoint."""
    folders = [write(tmp_path / name, world, parent="model") for name in ("straight", "stopped")]
    whole = run(folders[0], stage, *CASES[stage])
    with trl_stage.signal_at(5):
        assert rlhf(stage, "-c", str(folders[1] / f"{stage}.yaml"), *CASES[stage]).exit_code == 143
    assert (folders[1] / stage / "state/checkpoint-5").is_dir()
    assert run(folders[1], stage, *CASES[stage])["model_sha256"] == whole["model_sha256"]
    one, two = ((folder / stage / "model/adapter_model.safetensors").read_bytes() for folder in folders)
    assert one == two and untimed(folders[0] / stage / "metrics.jsonl") == untimed(folders[1] / stage / "metrics.jsonl")
    shutil.rmtree(folders[1] / stage / "model")  # killed after the last checkpoint
    (folders[1] / stage / "manifest.json").unlink()
    again = run(folders[1], stage, *CASES[stage])
    assert again["model_sha256"] == whole["model_sha256"] and again["metrics"] == whole["metrics"]


# The chain


def test_ppo_and_eval_continue_from_adapters_in_a_moved_run(adapters_copy: Path) -> None:
    run(adapters_copy, "ppo")
    report = run(adapters_copy, "eval") and json.loads((adapters_copy / "eval/report.json").read_text())
    assert {"sft", "ppo"} <= report["models"].keys() and abs(report["models"]["sft"]["kl"]) < 1e-3
    assert all((adapters_copy / f"ppo/{name}/model.safetensors").is_file() for name in ("model", "value"))
    policy, start = load_causal_lm("ppo/model"), load_causal_lm("sft/model")
    moved = [not torch.equal(a, b) for a, b in zip(policy.parameters(), start.parameters(), strict=True)]
    assert all(moved)  # PPO trains all weights of the sum
    for stage in ("sft", "reward", "ppo"):
        assert "finished already" in rlhf(stage).stderr


def test_m04_a_base_of_the_hub_goes_by_its_id(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for revision in ("a" * 40, "b" * 40):
        shutil.copytree(world.base, tmp_path / "hub/models--some--model/snapshots" / revision)
    (tmp_path / "hub/models--some--model/refs").mkdir()
    (tmp_path / "hub/models--some--model/refs/main").write_text("a" * 40)
    folder = write(tmp_path / "run", world, base="some/model")
    manifest = run(folder, "sft", "-s", f"model.revision={'b' * 40}", "-s", "sft.max_steps=1")
    settings = json.loads((folder / "sft/model/adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("some/model", "b" * 40)
    assert manifest["parents"]["model.path"]["revision"] == "b" * 40
    assert logits(load_causal_lm(folder / "sft/model")).isfinite().all()
    assert run(folder, "reward", "-s", "reward.max_steps=1")["parents"]["model.path"]["path"] == "../sft"
    shutil.rmtree(tmp_path / "hub/models--some--model/snapshots" / ("b" * 40))
    monkeypatch.chdir(folder)
    assert refused(rlhf("ppo"), "M04", "ppo.yaml", "its base some/model does not exist", "hint: fetch it: hf download")


# Defaults, imports and memory


RLOO = ("models.value=none", "ppo.advantage=rloo", "ppo.num_samples_per_prompt=2")


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ([], (3e-6, None)),
        (["models.adapters={kind: lora}"], (3e-5, None)),
        (["models.adapters={kind: lora}", "ppo.recipe=reasoning"], (1e-5, 9e-5)),
        (["models.adapters={kind: lora}", "ppo.recipe=reasoning", *RLOO], (1e-5, None)),
        (["models.adapters={kind: lora}", "ppo.recipe=reasoning", "ppo.learning_rate=3e-3"], (3e-3, 9e-5)),
        (["models.adapters={kind: lora}", "ppo.recipe=frontier"], (3e-5, 1.5e-4)),
        (["models.adapters={kind: lora}", "ppo.recipe=frontier", "ppo.learning_rate=3e-3"], (3e-3, 1.5e-2)),
    ],
)
def test_the_learning_rates_of_ppo_with_adapters(
    world: World, tmp_path: Path, changes: list[str], rates: tuple[float, float | None]
) -> None:
    settings = load("ppo", write(tmp_path / "run", world) / "ppo.yaml", changes).ppo
    assert (settings.learning_rate, settings.value_learning_rate) == rates


def test_the_memory_check_counts_the_base_of_adapters(adapters_copy: Path) -> None:
    """Of an adapter its base, too; PPO without adapters has four whole models."""
    size = sum(tensor.nbytes for tensor in load_file("model/model.safetensors").values())
    for stage, models, trained in (("sft", 1, 0), ("reward", 1, 0), ("ppo", 4, 2)):
        config = load(stage, adapters_copy / f"{stage}.yaml")
        kinds = fits._fixed_memory(config, runs.open_parents(config), Target.of(None, 1)).kinds
        assert kinds["weights"] == pytest.approx(models * size, rel=0.25)
        assert kinds["gradients"] == pytest.approx(trained * size, rel=0.25, abs=0.2 * size)
    model = runs.open_parents(load("ppo", adapters_copy / "ppo.yaml"))["models.reward"]
    assert 4 * weight_files.count_parameters(model) == size
