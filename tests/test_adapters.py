"""`model.adapters`: what trains, what a stage leaves, and what later stages make of it, through the real commands."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs import check, refused, replace, rlhf, warned
from conftest import World
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlhf_cli import checkpoints, rows
from rlhf_cli.config import Options, load
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import loading, tokenizers
from rlhf_cli.stages import reward, sft, trl_training

pytestmark = pytest.mark.training

SFT = """model: {path: BASE, adapters: {kind: lora, r: 4}}
data: {train: rows.jsonl, eval: rows.jsonl}
sft: {max_length: 64, max_steps: 12, learning_rate: 1e-2, logging_steps: 3, eval_steps: 5}
output: {save_steps: 4}
"""
REWARD = """model: {path: BASE, adapters: {kind: lora, r: 4}}
data: {train: pairs.jsonl, eval: pairs.jsonl}
reward: {max_length: 64, max_steps: 8, learning_rate: 1e-2, normalize_samples: 16, logging_steps: 2, eval_steps: 3}
output: {save_steps: 3}
"""
PPO = """data: {prompts: prompts.jsonl}
ppo: {total_episodes: 16, per_device_train_batch_size: 8, gradient_accumulation_steps: 1, response_length: 6}
"""
EVAL = """data: {prompts: prompts.jsonl}
eval: {n: 8, best_of: [], modes: [sampled]}
"""


def write(folder: Path, world: World, *, base: str = "model", parent: str = "sft") -> Path:
    """A folder whose stages train adapters: SFT beside `base`, the reward model beside `parent`."""
    folder.mkdir(exist_ok=True)
    for name, path in (("rows", world.sft), ("pairs", world.pairs), ("prompts", world.sft)):
        shutil.copy(path, folder / f"{name}.jsonl")
    if base == "model":
        shutil.copytree(world.base, folder / base)
    texts = {"sft": SFT.replace("BASE", base), "reward": REWARD.replace("BASE", parent), "ppo": PPO, "eval": EVAL}
    for stage, text in texts.items():
        (folder / f"{stage}.yaml").write_text(text)
    return folder


def run(folder: Path, stage: str, *arguments: str) -> dict[str, Any]:
    """Run a stage by its command and return its manifest."""
    result = rlhf(stage, "-c", str(folder / f"{stage}.yaml"), *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads((folder / stage / "manifest.json").read_text())


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters for SFT, and for the reward model beside them. Not to be changed."""
    folder = write(tmp_path_factory.mktemp("adapters") / "run", world)
    for stage in ("sft", "reward"):
        run(folder, stage)
    return folder


@pytest.fixture
def mine(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run elsewhere, in which the test stands."""
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "moved"))
    return tmp_path / "moved"


def some_ids() -> torch.Tensor:
    return torch.randint(2, 300, (3, 12), generator=torch.Generator().manual_seed(0))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=some_ids()).logits


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))


# What a stage leaves


def test_a_stage_leaves_the_adapters_alone_and_names_their_base(trained: Path) -> None:
    for stage, base in (("sft", "model"), ("reward", "sft")):
        folder = trained / stage / "model"
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"}
        assert "merged/config.json" in names and "config.json" not in names and "model.safetensors" not in names
        told = json.loads((folder / "adapter_config.json").read_text())
        inside = base if base == "model" else f"{base}/model"
        assert told["base_model_name_or_path"] == f"../../{inside}" and (folder / f"../../{inside}").is_dir()
        assert told["target_modules"] == sorted(told["target_modules"]) and len(told["target_modules"]) == 7
        tensors = load_file(folder / "adapter_model.safetensors")
        heads = {name for name in tensors if ".lora_" not in name}
        assert heads == (set() if stage == "sft" else {"base_model.model.score.weight"})
        assert not [path for path in (trained / stage / "state").rglob("*") if path.name == "README.md"]
        assert str(trained) not in "".join(path.read_text() for path in (trained / stage).rglob("*.json"))


def test_what_is_read_is_peft_s_own_sum(trained: Path) -> None:
    from peft import PeftModel

    ours = loading.load_causal(trained / "sft/model")
    plain = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
    before = logits(plain)
    theirs = logits(PeftModel.from_pretrained(plain, trained / "sft/model"))
    assert torch.allclose(logits(ours), theirs, atol=1e-5) and not torch.allclose(before, theirs, atol=1e-2)
    assert type(ours) is type(loading.load_causal(trained / "model")) and not hasattr(ours, "peft_config")
    assert all(weight.requires_grad for weight in ours.parameters())  # PPO trains them all
    assert (ours.generation_config.eos_token_id, ours.config.pad_token_id) == (1, 0)


def test_plain_from_pretrained_reads_it_from_within_its_folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained / "sft/model")  # where the relative name of the base holds
    plain = AutoModelForCausalLM.from_pretrained(".", dtype=torch.float32)
    assert torch.allclose(logits(plain), logits(loading.load_causal(trained / "sft/model")), atol=1e-5)


def test_reading_draws_no_random_numbers(trained: Path) -> None:
    torch.manual_seed(7)
    loading.load_causal(trained / "sft/model")
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1))


def test_the_reward_model_is_read_with_its_own_head_and_scale(trained: Path) -> None:
    manifest = json.loads((trained / "reward/manifest.json").read_text())
    scorer = loading.load_scorer(trained / "reward/model")
    head = load_file(trained / "reward/model/adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(scorer.score.weight, head) and scorer.num_labels == 1
    assert (scorer.config.reward_mean, scorer.config.reward_std) == (manifest["reward_mean"], manifest["reward_std"])
    assert manifest["metrics"]["accuracy"] > 0.9
    body = loading.load_causal(trained / "sft/model").model.layers[0].mlp.up_proj.weight
    assert not torch.allclose(scorer.model.layers[0].mlp.up_proj.weight, body, atol=1e-4)  # beside SFT's comes its own


def test_the_card_and_the_headline_are_of_what_readers_get(trained: Path) -> None:
    manifest = json.loads((trained / "sft/manifest.json").read_text())
    last = [row for _, row in rows.read_jsonl(trained / "sft/metrics.jsonl") if "eval_loss" in row][-1]
    assert last["step"] == 12 and last["eval_loss"] == pytest.approx(manifest["metrics"]["eval_loss"], rel=1e-3)
    assert "LoRA" in (trained / "sft/model/README.md").read_text()


# What learns


def trainer_of(folder: Path, stage: str, *changes: str) -> Any:
    """The stage's trainer, before it trains."""
    config = load(stage, folder / f"{stage}.yaml", changes)
    parents = checkpoints.open_parents(config)
    if stage == "sft":
        tokenizer, model = sft.start(config, Options(), parents)
        return sft.make_trainer(config, model, tokenizer, *sft.read(config, tokenizer, model.config, None), None)
    tokenizer, model = reward.start(config, Options(), parents["model.path"])
    return reward.make_trainer(config, model, tokenizer, *reward.read(config, tokenizer, model.config))


KINDS = ("{kind: lora, r: 4}", "{kind: qlora, r: 4}", "{kind: lora, r: 4, use_dora: true}")


@pytest.mark.parametrize("stage", ["sft", "reward"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_and_the_head_learn_and_nothing_else(world: World, tmp_path: Path, stage: str, kind: str) -> None:
    folder = write(tmp_path / "run", world, parent="model")
    trainer = trainer_of(folder, stage, f"model.adapters={kind}")
    model = trainer.model
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    learns = {name for name, weight in model.named_parameters() if weight.requires_grad}
    head = {"base_model.model.score.modules_to_save.default.weight"} if stage == "reward" else set()
    assert head <= learns and all(".lora_" in name for name in learns - head)
    assert len([name for name in learns if ".lora_A." in name]) == 7 * 2  # each matrix of both layers
    assert any("magnitude" in name for name in learns) == ("dora" in kind)
    assert {weight.dtype for name, weight in model.named_parameters() if name in learns} == {torch.float32}
    packed = {name for name, weight in model.named_parameters() if weight.dtype == torch.uint8}
    assert len(packed) == (14 if "qlora" in kind else 0)
    trainer.args.max_steps, trainer.args.eval_strategy, trainer.args.save_strategy = 3, "no", "no"
    trainer.train()
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == learns


def test_target_modules_choose_the_layers(world: World, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", world)
    told = "model.adapters={kind: qlora, r: 3, lora_alpha: 5, use_rslora: true, target_modules: [q_proj, v_proj]}"
    model = trainer_of(folder, "sft", told).model
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(names) == 2 * 2 * 2 and all(".q_proj." in name or ".v_proj." in name for name in names)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.r["default"] == 3 and layer.scaling["default"] == pytest.approx(5 / 3**0.5)
    packed = [name for name, weight in model.named_parameters() if weight.dtype == torch.uint8]
    assert len(packed) == 14  # what gets no adapters is held in 4 bits too


def test_gradient_checkpointing_leaves_the_gradients_alone(world: World, tmp_path: Path) -> None:
    folder, found = write(tmp_path / "run", world), []
    for wish in ("false", "true"):
        trainer = trainer_of(folder, "sft", f"sft.gradient_checkpointing={wish}")
        for weight in trainer.model.parameters():
            weight.data += 0.01 if weight.requires_grad else 0  # B starts at zero, and A would have no gradient
        if wish == "true":
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer.model.train()
        batch = next(iter(trainer.get_eval_dataloader()))
        trainer.compute_loss(trainer.model, batch).backward()
        found.append([weight.grad for weight in trainer.model.parameters() if weight.requires_grad])
    assert any(layer.gradient_checkpointing for layer in trainer.model.modules() if hasattr(layer, "mlp"))
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found, strict=True))
    assert all(one.abs().sum() > 0 for one in found[0])


def test_4_bits_learn_and_the_cpu_is_called_slow(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E02: it works, and the loss goes down."""
    monkeypatch.chdir(write(tmp_path / "run", world))
    replace("sft.yaml", "kind: lora", "kind: qlora")
    result = rlhf("sft", "-s", "sft.max_steps=24")
    where = ("weights in 4 bits work on", "slowly", "hint: lora is faster")
    assert torch.cuda.is_available() or warned(result, "E02", "sft.yaml:1: ", *where)
    losses = [row["loss"] for _, row in rows.read_jsonl(Path("sft/metrics.jsonl")) if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    manifest = json.loads(Path("sft/manifest.json").read_text())
    assert manifest["versions"]["bitsandbytes"] and sizes(Path("sft")) < 60_000


def test_other_families_go_through_sft_and_reward(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2: its matrices lie the other way, its heads are tied, and it has no pad token."""
    import families

    folder = write(tmp_path / "run", world, base="gpt2")
    families.write_causal(folder / "gpt2", "gpt2", [row["text"] for _, row in rows.read_jsonl(world.text)])
    monkeypatch.chdir(folder)
    manifest = run(folder, "sft", "-s", "model.adapters={kind: qlora, r: 4}")
    assert manifest["special_tokens"]["pad"] == len(tokenizers.load_tokenizer(folder / "gpt2"))
    scored = run(folder, "reward")
    assert scored["metrics"]["accuracy"] > 0.6 and scored["tokenizer_sha256"] == manifest["tokenizer_sha256"]
    run(folder, "ppo")
    assert loading.load_causal(folder / "ppo/model").get_input_embeddings().weight.shape[0] == (
        manifest["special_tokens"]["pad"] + 1
    )


def test_rows_for_a_new_pad_token_are_the_same_for_every_reader(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not saved: each reader makes the mean of the base's rows."""
    monkeypatch.chdir(write(tmp_path / "run", world))
    settings = json.loads(Path("model/tokenizer_config.json").read_text())
    settings.pop("pad_token")
    Path("model/tokenizer_config.json").write_text(json.dumps(settings))
    run(tmp_path / "run", "sft")
    one, two = (loading.load_causal("sft/model").get_input_embeddings().weight for _ in range(2))
    known = len(world.tokenizer())
    assert one.shape[0] == known + 1 and torch.equal(one, two)
    assert torch.allclose(one[known], one[:known].mean(0), atol=1e-6)
    assert not [name for name in load_file("sft/model/adapter_model.safetensors") if "embed" in name]


# A kill and a resume


CASES = {
    "sft": ("model.adapters={kind: lora, r: 4, lora_dropout: 0.1}",),
    "reward": ("model.adapters={kind: qlora, r: 4, use_dora: true}",),
}


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_stopped_stage_ends_in_the_bytes_of_a_straight_one(
    world: World, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped behind an evaluation, between two regular checkpoints; then once more from a checkpoint after a kill."""
    folders = [write(tmp_path / name, world, parent="model") for name in ("straight", "stopped")]
    whole = run(folders[0], stage, *CASES[stage])
    real = trl_training.Follower.on_step_end

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, args, state, control, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(trl_training.Follower, "on_step_end", on_step_end)
        assert rlhf(stage, "-c", str(folders[1] / f"{stage}.yaml"), *CASES[stage]).exit_code == 143
    assert (folders[1] / stage / "state/checkpoint-5").is_dir()
    assert run(folders[1], stage, *CASES[stage])["model_sha256"] == whole["model_sha256"]
    one, two = ((folder / stage / "model/adapter_model.safetensors").read_bytes() for folder in folders)
    assert one == two and untimed(folders[0] / stage) == untimed(folders[1] / stage)
    shutil.rmtree(folders[1] / stage / "model")  # killed after the last checkpoint
    (folders[1] / stage / "manifest.json").unlink()
    again = run(folders[1], stage, *CASES[stage])
    assert again["model_sha256"] == whole["model_sha256"] and again["metrics"] == whole["metrics"]


def untimed(folder: Path) -> list[dict[str, Any]]:
    lines = [row for _, row in rows.read_jsonl(folder / "metrics.jsonl")]
    return [{name: value for name, value in line.items() if name != "time_s"} for line in lines]


# The chain


def test_the_chain_goes_on_from_adapters_wherever_the_run_lies(mine: Path) -> None:
    run(mine, "ppo")
    report = run(mine, "eval") and json.loads((mine / "eval/report.json").read_text())
    assert {"sft", "ppo"} <= report["models"].keys() and abs(report["models"]["sft"]["kl"]) < 1e-3
    assert (mine / "ppo/model/model.safetensors").is_file() and (mine / "ppo/value/model.safetensors").is_file()
    policy, start = loading.load_causal("ppo/model"), loading.load_causal("sft/model")
    moved = [not torch.equal(a, b) for a, b in zip(policy.parameters(), start.parameters(), strict=True)]
    assert all(moved)  # PPO trains all weights of the sum
    for stage in ("sft", "reward", "ppo"):
        assert "finished already" in rlhf(stage).stderr


def test_reward_adapters_may_stand_on_the_base_too(mine: Path) -> None:
    """And SFT's beside them is read all the same."""
    replace("reward.yaml", "path: sft", "path: model")
    manifest = run(mine, "reward", "--fresh")
    assert manifest["parents"]["model.path"]["path"] == "../model" and manifest["metrics"]["accuracy"] > 0.9
    run(mine, "ppo")


def test_a_whole_reward_model_may_stand_on_sft_adapters(mine: Path) -> None:
    replace("reward.yaml", ", adapters: {kind: lora, r: 4}", "")
    whole = run(mine, "reward", "--fresh")
    assert (mine / "reward/model/model.safetensors").is_file() and whole["metrics"]["accuracy"] > 0.9
    assert whole["parents"]["model.path"]["path"] == "../sft"


def test_the_hash_of_an_adapter_covers_its_base(trained: Path) -> None:
    from rlhf_cli.checkpoints.adapters import whole_sha256

    manifest = json.loads((trained / "sft/manifest.json").read_text())
    assert manifest["model_sha256"] == whole_sha256(manifest["files"], manifest["parents"])
    other = {"model.path": {**manifest["parents"]["model.path"], "sha256": "0" * 64}}
    assert manifest["model_sha256"] != whole_sha256(manifest["files"], other)


def test_a_base_of_the_hub_is_named_by_its_id(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for revision in ("a" * 40, "b" * 40):
        shutil.copytree(world.base, tmp_path / "hub/models--some--model/snapshots" / revision)
    (tmp_path / "hub/models--some--model/refs").mkdir()
    (tmp_path / "hub/models--some--model/refs/main").write_text("a" * 40)
    folder = write(tmp_path / "run", world, base="some/model")
    manifest = run(folder, "sft", "-s", f"model.revision={'b' * 40}", "-s", "sft.max_steps=1")
    told = json.loads((folder / "sft/model/adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["revision"]) == ("some/model", "b" * 40)
    assert manifest["parents"]["model.path"]["revision"] == "b" * 40
    assert logits(loading.load_causal(folder / "sft/model")).isfinite().all()
    assert run(folder, "reward", "-s", "reward.max_steps=1")["parents"]["model.path"]["path"] == "../sft"
    shutil.rmtree(tmp_path / "hub/models--some--model/snapshots" / ("b" * 40))
    monkeypatch.chdir(folder)
    assert refused(rlhf("ppo"), "M04", "ppo.yaml", "its base some/model is not there", "hint: fetch it: hf download")


# What is refused


def test_m04_the_base_is_gone(mine: Path) -> None:
    (mine / "model").rename(mine / "elsewhere")
    says = ("sft holds an adapter, and its base model is not there", "hint: put it back there; or train the adapter")
    assert refused(rlhf("ppo"), "M04", "ppo.yaml", *says) and not (mine / "ppo").exists()
    seen = check("ppo.yaml")
    assert seen.exit_code == 2 and "error[M04]" in seen.stdout + seen.stderr
    with pytest.raises(RLHFError, match="M04"):
        loading.load_causal(mine / "sft/model")


def test_m04_the_base_has_changed_since(mine: Path) -> None:
    tensors = load_file("model/model.safetensors")
    save_file({name: tensor + 1e-3 for name, tensor in tensors.items()}, "model/model.safetensors", {"format": "pt"})
    says = ("sft holds an adapter, and its base model has changed since (", "hint: bring the old base back, or train")
    assert refused(rlhf("ppo"), "M04", "ppo.yaml", *says)


def test_m04_the_sft_stage_below_a_reward_adapter_was_made_anew(mine: Path) -> None:
    run(mine, "sft", "--fresh", "-s", "seed=1")
    says = ("reward holds an adapter, and its base sft has changed since (", "--fresh")
    assert refused(rlhf("ppo"), "M04", "ppo.yaml", *says)


def test_m10_a_flipped_bit_in_an_adapter_or_in_the_one_below(mine: Path) -> None:
    for stage in ("sft", "reward"):
        path = mine / stage / "model/adapter_model.safetensors"
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        says = (f"{stage} is damaged: model/adapter_model.safetensors: its content is not what was written",)
        # What only the reward model stands on is held against its hash too.
        assert refused(rlhf("ppo", "-s", "models.sft=model"), "M10", "", *says)
        path.write_bytes(good)


def test_m01_an_adapter_of_another_model(mine: Path) -> None:
    tensors = load_file("sft/model/adapter_model.safetensors")
    for changed in (
        {"base_model.model.model.layers.9.x.lora_A.weight": torch.zeros(4, 4)},
        {next(iter(tensors)): None},
    ):
        kept = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(kept, "sft/model/adapter_model.safetensors")
        with pytest.raises(RLHFError, match="does not fit its base"):
            loading.load_causal("sft/model")


@pytest.mark.parametrize(
    ("told", "code", "says"),
    [
        ("{kind: lora, lora_r: 8}", "C01", ("unknown key model.adapters.lora_r", "write r: 8")),
        ("{kind: dora}", "C07", ("model.adapters.kind", "lora, qlora")),
        ("{r: 8}", "C05", ("model.adapters.kind is missing",)),
        ("{kind: lora, r: 0}", "C06", ("model.adapters.r", "> 0")),
        ("{kind: lora, lora_dropout: 1.0}", "C06", ("model.adapters.lora_dropout", "< 1")),
        ("{kind: lora, target_modules: all}", "C07", ("target_modules", "all-linear", "a list")),
    ],
)
def test_keys_that_are_wrong(world: World, tmp_path: Path, told: str, code: str, says: tuple[str, ...]) -> None:
    folder = write(tmp_path / "run", world)
    with pytest.raises(RLHFError) as caught:
        load("sft", folder / "sft.yaml", [f"model.adapters={told}"])
    assert caught.value.problems[0].code == code and all(text in str(caught.value) for text in says), caught.value


def test_c07_a_layer_that_the_model_does_not_have(mine: Path) -> None:
    replace("sft.yaml", "r: 4", "target_modules: [q_prj]")
    replace("reward.yaml", "r: 4", "target_modules: [lm_head]")
    says = (
        "model.adapters.target_modules: no linear layer inside of the model is called q_prj\nhint: did you mean q_proj?"
    )
    for stage, name in (("sft", "q_prj"), ("reward", "lm_head")):
        result = check(f"{stage}.yaml")
        assert result.exit_code == 2 and f"is called {name}" in result.stderr
    assert refused(rlhf("sft", "--fresh"), "C07", "sft.yaml:1: ", says)


def test_c17_adapters_beside_fresh_weights(world: World, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", world)
    new = "model={new: {hidden_size: 32, tokenizer: {train: rows.jsonl, vocab_size: 300}}, adapters: {kind: lora}}"
    with pytest.raises(RLHFError, match="model.adapters needs trained weights") as caught:
        load("sft", folder / "sft.yaml", [new])
    assert caught.value.problems[0].code == "C17"


def test_c17_a_template_with_tokens_that_adapters_would_not_train(mine: Path) -> None:
    replace("sft.yaml", "path: model,", "path: model, chat_template: chatml,")
    says = ("adds <|im_start|> and <|im_end|>, whose embeddings adapters do not train", "hint: take a template of")
    assert refused(rlhf("sft", "--fresh"), "C17", "sft.yaml:1: ", *says)
    assert "adds <|im_start|>" in check("sft.yaml").stdout + check("sft.yaml").stderr


def test_c17_a_dropout_that_reward_training_turns_off(world: World, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", world)
    told = "model.adapters={kind: lora, lora_dropout: 0.1}"
    with pytest.raises(RLHFError, match="lora_dropout has no effect") as caught:
        load("reward", folder / "reward.yaml", [told])
    assert caught.value.problems[0].code == "C17"
    config = load("reward", folder / "reward.yaml", [told, "trainer.disable_dropout=false"])
    assert config.model.adapters and config.model.adapters.lora_dropout == 0.1


# Defaults, and what training in full pays


def test_full_unless_adapters_are_asked_for(world: World, tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(f"model: {{path: {world.base}}}\ndata: {{train: {world.sft}}}\n")
    config = load("sft", tmp_path / "sft.yaml")
    assert config.model.adapters is None
    trainer = trainer_of(tmp_path, "sft")
    assert all(weight.requires_grad for weight in trainer.model.parameters())


def test_adapters_have_a_learning_rate_of_their_own(world: World, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", world)
    for stage, rates in (("sft", (2e-5, 2e-4)), ("reward", (1e-5, 1e-4))):
        path = folder / f"{stage}.yaml"
        path.write_text(path.read_text().replace(", learning_rate: 1e-2", ""))
        full = load(stage, path, ["model.adapters=null"])
        small = load(stage, path)
        assert (getattr(full, stage).learning_rate, getattr(small, stage).learning_rate) == rates
        told = load(stage, path, [f"{stage}.learning_rate=3e-3"])
        assert getattr(told, stage).learning_rate == 3e-3


def test_neither_library_is_imported_by_what_reads_whole_models(trained: Path) -> None:
    """Of ours. transformers' schedules and TRL's trainers import peft themselves where it is installed."""
    code = (
        "import sys\nfrom rlhf_cli import cli, check\nfrom rlhf_cli.check import trial\nfrom rlhf_cli.stages import eval\n"
        "from rlhf_cli.models import loading\n"
        f"loading.load_causal({str(trained / 'model')!r})\nprint({{'peft', 'bitsandbytes'}} & sys.modules.keys())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "set()\n"


def test_memory_is_counted_through_adapters(mine: Path) -> None:
    """E03 counts what is trained once, what stands still too, and of an adapter the base below it."""
    from rlhf_cli.inputs import machine

    numbers = sum(tensor.numel() for tensor in load_file("model/model.safetensors").values())
    for stage, counts in (("sft", (0, numbers)), ("reward", (0, numbers)), ("ppo", (2 * numbers, 2 * numbers))):
        config = load(stage, mine / f"{stage}.yaml")
        assert machine._counts(config, checkpoints.open_parents(config)) == counts
