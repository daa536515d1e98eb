"""`rlhf export`: a self-contained folder with the same logits, for every kind of run; refusals; a kill.

Modules: `commands/export/comparison.py`.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapter_folder
import families
import pytest
import report_run
import torch
from adapter_folder import logits, widen, write
from bad_inputs import replace
from fake_config import other_process
from huggingface_hub import ModelCard
from ppo_folder import must_succeed, rlhf
from run_cli import forked
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import Result

from rlhf_cli import jsonl, system
from rlhf_cli.commands.export import model_folder
from rlhf_cli.models import lora, save, tokenizers
from rlhf_cli.models.load import init_reward_model, load_causal_lm, load_unmerged
from tests.conftest import World

pytestmark = pytest.mark.full
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LONG = ("-s", "ppo.total_episodes=40", "-s", "output.save_steps=2", "-s", "output.snapshots=2")
LORA = ("-s", "models.adapters={kind: lora, r: 3}", "-s", "ppo.learning_rate=1e-2")
JUDGE = "def short(prompts, responses):\n    return [-len(response) for response in responses]\n"


@pytest.fixture(scope="module")
def trained(adapters_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters, PPO on one base, evaluated with a judge that selects. Not to be changed."""
    folder = shutil.copytree(adapters_run, tmp_path_factory.mktemp("export") / "run")
    (folder / "judges.py").write_text(JUDGE)
    text = adapter_folder.EVAL.replace("eval: {", "judges: {short: 'judges:short'}\neval: {select: short, ")
    (folder / "eval.yaml").write_text(text)
    adapter_folder.run(folder, "ppo", *LORA, *LONG)
    adapter_folder.run(folder, "eval")
    return folder


@pytest.fixture
def copied(trained: Path, here: Path) -> Path:
    """A copy of that run in the working directory."""
    return Path(shutil.copytree(trained, "run"))


@pytest.fixture
def full(here: Path, trained_folder: Path) -> None:
    """A finished PPO run on whole foreign models, as the working directory."""


@pytest.fixture
def new_run(world: World, here: Path) -> Path:
    """Configs of a run that has not started."""
    return write(here / "run", world)


def with_adapter(base: Any, adapter: Path) -> torch.Tensor:
    """Return the logits of a base with an adapter that peft alone adds to it."""
    from peft import PeftModel

    return logits(PeftModel.from_pretrained(base, adapter))


def plain(folder: Path, kind: Any = AutoModelForCausalLM) -> Any:
    """Load the model of a folder with transformers alone."""
    return kind.from_pretrained(folder, dtype=torch.float32)


def scorer(folder: Path) -> Any:
    return plain(folder, AutoModelForSequenceClassification)


def same(theirs: torch.Tensor, own: torch.Tensor, share: float = 1e-4) -> bool:
    return bool((theirs - own).abs().max() <= share * own.abs().max())


def exported(run: Path, *arguments: object, out: str = "out") -> Path:
    """Export with the command, and check what holds for every export."""
    result = must_succeed(rlhf("export", run, "--out", out, *arguments))
    folder, names = Path(out), {path.name for path in Path(out).rglob("*")}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert not [name for name in names if name.endswith(PICKLES) or name.startswith(("adapter", "state", "merged"))]
    for path in folder.iterdir():
        content = path.read_bytes()
        assert str(Path.cwd()).encode() not in content and b"../" not in content, path
        assert path.stat().st_mode == (folder / "README.md").stat().st_mode
    assert result.stdout.splitlines()[-1].startswith("export   loaded again with transformers, its output ")
    assert not [*folder.parent.glob(".tmp-*"), *folder.parent.glob(f".{folder.name}.lock")]
    return folder


def is_error(result: Result, code: str, *texts: str, exit_code: int = 2) -> bool:
    """Return True for one error with at most one hint, nothing on stdout, and no output."""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    assert len(errors) == 1 and errors[0].startswith(f"error[{code}]: "), result.stderr
    assert all(text in result.stderr for text in texts), result.stderr
    assert (result.exit_code, result.stdout) == (exit_code, "") and "Traceback" not in result.stderr
    assert not Path("out").exists() and not list(Path().glob(".*out*"))
    return True


# The same model


def test_adapters_of_sft_and_of_the_reward_model_on_them(copied: Path) -> None:
    sft = exported(copied, "--stage", "sft", out="sft")
    own = with_adapter(plain(copied / "model"), copied / "sft/model")
    assert same(logits(plain(sft)), own) and not same(logits(plain(copied / "model")), own, 0.05)
    reward = exported(copied / "reward", out="reward")
    own = with_adapter(init_reward_model(copied / "sft/model"), copied / "reward/model")
    assert same(logits(scorer(reward)), own)
    config = json.loads((reward / "config.json").read_text())
    manifest = json.loads((copied / "reward/manifest.json").read_text())
    assert all(config[name] == manifest[name] for name in ("reward_mean", "reward_std"))


@pytest.mark.parametrize(
    "kind", ["{kind: qlora, r: 4}", "{kind: lora, r: 4, use_dora: true, use_rslora: true}"], ids=["qlora", "dora"]
)
def test_other_adapters_are_merged_into_the_full_precision_base(world: World, new_run: Path, kind: str) -> None:
    widen(new_run, world)
    for stage in ("sft", "reward"):
        adapter_folder.run(new_run, stage, "-s", f"{stage}.max_steps=4", "-s", f"model.adapters={kind}")
    own = with_adapter(plain(new_run / "model"), new_run / "sft/model")
    assert same(logits(plain(exported(new_run, out="sft"))), own)
    assert not same(logits(plain(new_run / "model")), own, 0.05)
    own = with_adapter(init_reward_model(new_run / "sft/model"), new_run / "reward/model")
    assert same(logits(scorer(exported(new_run, "--stage", "reward", out="reward"))), own)


def test_gpt2_with_a_new_pad_token(world: World, here: Path) -> None:
    """Transposed matrices, and embeddings that are tied to the head and have grown."""
    folder = write(here / "run", world, base="gpt2")
    families.write_causal(folder / "gpt2", "gpt2", [row["text"] for _, row in jsonl.read_jsonl(world.text)])
    for stage in ("sft", "reward"):
        adapter_folder.run(folder, stage, "-s", f"{stage}.max_steps=4")
    known = len(tokenizers.load_tokenizer(folder / "gpt2"))
    out = exported(folder, out="sft")
    model, base = plain(out), plain(folder / "gpt2")
    lora.grow_embeddings(base, known + 1)
    assert same(logits(model), with_adapter(base, folder / "sft/model"))
    assert model.get_input_embeddings().weight.shape[0] == known + 1 == len(AutoTokenizer.from_pretrained(out))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    reward = scorer(exported(folder, "--stage", "reward", out="reward"))
    own = with_adapter(init_reward_model(folder / "sft/model"), folder / "reward/model")
    assert same(logits(reward), own)


def test_whole_policies_of_ppo_in_each_dtype(full: None) -> None:
    for step, folder in (("last", "ppo/model"), ("2", "ppo/snapshots/step_000002"), ("4", "ppo/model")):
        out = exported(Path(), "--step", step, out=f"in/a/new/folder_{step}")
        assert torch.equal(logits(plain(out)), logits(plain(Path(folder))))
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (out / name).read_bytes() == Path("ppo/model", name).read_bytes()
    own = logits(plain(Path("ppo/model")))
    assert not torch.equal(logits(plain(Path("in/a/new/folder_2"))), own)
    for name, share in (("float16", 0.01), ("bfloat16", 0.08)):
        out = exported(Path(), "--dtype", name, out=name)
        (dtype,) = {tensor.dtype for tensor in load_file(out / "model.safetensors").values()}
        assert dtype == getattr(torch, name) and json.loads((out / "config.json").read_text())["dtype"] == name
        assert same(logits(plain(out)), own, share) and not same(logits(plain(out)), own, 1e-6)


def test_policies_on_one_base_need_neither_the_run_nor_the_base(copied: Path) -> None:
    """Also without this package: tests/commands/export/test_share.py."""
    selected = json.loads((copied / "eval/report.json").read_text())["selected_step"]
    steps = {int(path.name[-6:]): path for path in (copied / "ppo/snapshots").iterdir()}
    assert selected in steps and min(steps) < 5
    folders = {"last": copied / "ppo/model", "recommended": steps[selected], str(min(steps)): steps[min(steps)]}
    own = {step: with_adapter(load_causal_lm(copied / "sft/model"), folder) for step, folder in folders.items()}
    for step in folders:
        exported(copied, "--step", step, out=step)
    assert not same(own["last"], own[str(min(steps))], 0.01)
    shutil.rmtree(copied)
    for step in folders:
        assert same(logits(plain(Path(step))), own[step]) and len(AutoTokenizer.from_pretrained(step)) > 0


def test_a_recommended_policy_between_sft_and_ppo_is_built_by_default(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As --interpolate builds it, by export; by serve after an export."""
    line = report_run.recommend(monkeypatch, "interpolated_0.5", step=5, share=0.5)
    assert line.startswith("recommended: share 0.5 of update 5 (planned); ")
    exported(copied, "--step", "last", "--interpolate", "0.5", out="half")
    result = must_succeed(rlhf("export", copied, "--out", "default"))
    assert line in result.stderr and "update 5 at share 0.5 from its SFT model with its adapters" in result.stdout
    same_bytes = [Path(name, "model.safetensors").read_bytes() for name in ("half", "default")]
    assert same_bytes[0] == same_bytes[1] and "recommends it: share 0.5 of" in Path("default/README.md").read_text()

    with_itself = exported(copied, "--step", "recommended", "--merge", "run/ppo=0.4", out="with_itself")
    assert same(logits(plain(with_itself)), logits(plain(Path("half")))), "it keeps the share"

    served = must_succeed(rlhf("serve", copied))
    export = served.stderr.splitlines()[-1].removeprefix("serve    first: ").split()
    assert export[:2] == ["rlhf", "export"] and export[-2:] == ["--step", "recommended"]
    must_succeed(rlhf(*export[1:]))
    assert (Path(export[4]) / "model.safetensors").read_bytes() == same_bytes[0]
    again = must_succeed(rlhf("serve", copied))
    assert again.stderr == line and again.stdout == served.stdout and f"vllm serve {export[4]} " in again.stdout


def test_the_sft_model_is_taken_if_it_is_recommended_and_ppo_is_not_named(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = report_run.recommend(monkeypatch, "sft")
    for arguments, stage in (((), "sft"), (("--step", "recommended"), "sft"), (("--stage", "ppo"), "ppo")):
        result = must_succeed(rlhf("export", copied, "--out", f"{stage}{len(arguments)}{arguments[:1]}", *arguments))
        assert result.stdout.startswith(f"export   run/{stage} ") and (line in result.stderr) == (stage == "sft")


def test_a_bfloat16_run_is_merged_in_float32_and_rounded_once(copied: Path) -> None:
    adapter_folder.run(copied, "ppo", "--fresh", *LORA, "-s", "models.dtype=bfloat16", "-s", "ppo.bf16=true")
    tensors = load_file(exported(copied) / "model.safetensors")
    merged = load_causal_lm(copied / "ppo/model").state_dict()
    assert tensors and all(torch.equal(tensor, merged[name].bfloat16()) for name, tensor in tensors.items())


# The card of a real run (tests/commands/export/test_card.py: all of its parts)


def test_the_card_has_the_hashes_and_results_of_the_run(copied: Path) -> None:
    report = json.loads((copied / "eval/report.json").read_text())
    step, prompt = report["selected_step"], next(jsonl.read_jsonl(copied / "eval/samples.jsonl"))[1]["prompt"]
    last = (exported(copied, "--step", "last", out="last") / "README.md").read_text()
    selected = (exported(copied, "--step", "selected", "--show-prompt", out="selected") / "README.md").read_text()
    for stage in ("ppo", "sft", "reward"):
        manifest = json.loads((copied / stage / "manifest.json").read_text())
        hashes = [manifest["model_sha256"], *manifest["data"].values()]
        assert all(f"`{sha256[:12]}`" in last for sha256 in hashes) and f"\n| {stage} | " in last
    assert "adapters of rank 3, which are merged" in last and f"after update {step} of 5. The eval" in selected
    assert (exported(copied, "--show-prompt", out="default") / "README.md").read_text() == selected
    assert "| `objective/kl_k1` |" in last and "| `objective/kl_k1` |" not in selected, "of the last policy"
    assert f"prompt = {prompt!r}" in selected and repr(prompt) not in last
    for text, rates in ((last, report["win_rate"]["ppo_vs_sft"]), (selected, report["selected"]["win_rate"])):
        assert f"| PPO over SFT | short | {rates['short']['value']:.3f} [" in text
        results = ModelCard(text).data.eval_results
        assert [each.metric_value for each in results] == [round(rate["value"], 4) for rate in rates.values()]


def test_an_evaluation_of_another_model_is_not_used(copied: Path) -> None:
    adapter_folder.run(copied, "ppo", "--fresh", *LORA, "-s", "seed=5")
    text = (exported(copied, out="new") / "README.md").read_text()
    assert "This card has no evaluation of this model." in text and ModelCard(text).data.eval_results is None
    result = rlhf("export", copied, "--out", "out", "--step", "selected")
    assert is_error(result, "M10", "run/eval holds no finished evaluation of run/ppo as it is")
    shutil.rmtree(copied / "eval")
    assert is_error(rlhf("export", copied, "--out", "out", "--show-prompt"), "M01", "run has no evaluation")


# Which model


def test_the_default_is_ppo_or_sft_if_there_is_no_ppo(copied: Path) -> None:
    shutil.rmtree(copied / "eval")
    out = rlhf("export", copied, "--out", "one")
    assert "the last policy, after update 5: no evaluation recommends one of" in out.stderr
    assert out.stdout.startswith("export   run/ppo after update 5 with its adapters merged, "), out.stderr
    (copied / "ppo/manifest.json").unlink()
    assert is_error(rlhf("export", copied, "--out", "out"), "M10", "run/ppo is not finished", "--stage sft")
    shutil.rmtree(copied / "ppo")
    out = rlhf("export", copied, "--out", "two")
    assert out.stdout.startswith("export   run/sft with its adapters merged, "), out.stderr


def test_models_that_cannot_be_chosen(copied: Path) -> None:
    steps = ", ".join(sorted({str(int(path.name[-6:])) for path in (copied / "ppo/snapshots").iterdir()}))
    for arguments, code, *texts in (
        ((copied, "--stage", "sfd"), "C07", "--stage sfd: not one of ppo, sft, dpo, reward", "mean sft?"),
        ((copied, "--dtype", "bfloat"), "C07", "--dtype bfloat: not one of", "did you mean bfloat16?"),
        ((copied, "--step", "99"), "C06", "run/ppo has no policy of that step", f"there are {steps};"),
        ((copied, "--step", "2", "--stage", "sft"), "C11", "the sft stage has one model only"),
        ((copied / "ppo", "--stage", "sft"), "M10", "run/ppo was written by the ppo stage, not by sft"),
        ((copied / "eval",), "M10", "run/eval was written by the eval stage"),
        (("nowhere",), "M01", "no such folder nowhere"),
        ((copied / "ppo/model",), "M01", "name the stage's folder: run/ppo"),
    ):
        assert is_error(rlhf("export", *arguments, "--out", "out"), code, *texts)
    replace("run/eval.yaml", "select: short, ", "frontier: false, ")
    adapter_folder.run(copied, "eval", "--fresh")
    result = rlhf("export", copied, "--step", "selected", "--out", "out")
    assert is_error(result, "C06", "the evaluation in run/eval recommends no policy")
    shutil.rmtree(copied / "reward")
    result = rlhf("export", copied, "--stage", "reward", "--out", "out")
    assert is_error(result, "M01", "run holds no reward stage", "hint: it holds ppo and sft")


# Damage


def test_damage_is_found_before_anything_is_written(copied: Path) -> None:
    snapshot = min((copied / "ppo/snapshots").iterdir())
    weights = "adapter_model.safetensors"
    for path, step, code, exit_code, text in (
        (copied / "ppo/model" / weights, "last", "M10", 2, "run/ppo is damaged"),
        (copied / "sft/model" / weights, "last", "M10", 2, "run/sft is damaged"),
        (copied / "model/model.safetensors", "last", "M04", 2, "its base run/model has changed since"),
        (snapshot / weights, str(int(snapshot.name[-6:])), "M05", 1, f"{snapshot.name} is damaged"),
    ):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert is_error(rlhf("export", copied, "--out", "out", "--step", step), code, text, exit_code=exit_code)
        path.write_bytes(content)
    shutil.rmtree(copied / "model")
    assert is_error(rlhf("export", copied, "--out", "out"), "M04", "its base run/model does not exist")


def test_m12_a_folder_that_is_not_the_runs_model(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_adapters(model: Any) -> Any:
        return model.unload() if lora.is_peft_model(model) else model

    def with_another_template(model: Any, tokenizer: Any, folder: Path, text: str) -> None:
        save_model(model, tokenizer, folder, text)
        (folder / "chat_template.jinja").write_text("{{ messages }}")

    def large(*args: Any, **options: Any) -> Any:
        model = load_unmerged(*args, **options)
        lora.unwrap(model).get_input_embeddings().weight.data *= 1e6
        return model

    save_model = save.save_model
    patches: tuple[tuple[str, Callable[..., Any], str], ...] = (
        ("rlhf_cli.models.lora.merge_and_unload", without_adapters, "its logits differ by"),
        ("rlhf_cli.models.save.save_model", with_another_template, "its chat template differs"),
        ("rlhf_cli.models.load.load_unmerged", large, "by nan of the"),
    )
    for name, function, text in patches:
        with monkeypatch.context() as patched:
            patched.setattr(name, function)
            result = rlhf("export", copied, "--out", "out", "--dtype", "float16", "--step", "last")
            assert is_error(result, "M12", text, exit_code=1)


# The output folder


def test_e03_memory_and_disk_are_checked_before_loading(full: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_cli.models.load.load_unmerged", None)
    size = sum(tensor.numel() for tensor in load_file("ppo/model/model.safetensors").values())
    for function, text in (("free_disk_bytes", "the model needs"), ("total_memory", "of memory, ")):
        with monkeypatch.context() as patched:
            patched.setattr(system, function, lambda *_: size)
            assert is_error(rlhf("export", ".", "--out", "out"), "E03", text)


def test_nothing_is_overwritten_and_c15_another_process_writes_the_folder(full: None) -> None:
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    Path("full/.hidden").write_text("mine too")
    result = rlhf("export", ".", "--out", "full", "--dtype", "f8")
    assert result.exit_code == 2 and result.stderr.count("error[") == 2, "all errors at once"
    assert "error[C15]: full is not empty: it holds .hidden and 1 more; nothing is overwritten" in result.stderr
    assert sorted(path.name for path in Path("full").iterdir()) == [".hidden", "mine.txt"]
    assert is_error(rlhf("export", ".", "--out", "full/mine.txt"), "C15", "full/mine.txt is a file")
    assert is_error(rlhf("export", ".", "--out", "full/mine.txt/in"), "E03", "full/mine.txt is a file")
    assert is_error(rlhf("export", ".", "--out", "."), "C15", "cannot replace the working directory")
    Path("empty").mkdir()
    Path("link").symlink_to("empty")
    assert rlhf("export", ".", "--out", "link").exit_code == 0
    assert Path("link").is_symlink() and Path("empty/model.safetensors").is_file()
    with other_process("lock_folder", Path("out").resolve()):
        result = rlhf("export", ".", "--out", "out")
        assert result.exit_code == 2 and "error[C15]: another process is writing out" in result.stderr
        assert "or name another folder" in result.stderr and not Path("out").exists()


def test_a_killed_export_leaves_only_a_hidden_folder(full: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before its last step; the next export removes what is left of this folder, not of others."""
    with monkeypatch.context() as patched:
        patched.setattr(model_folder, "verify_export", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert forked("export", ".", "--out", "out").returncode == -signal.SIGKILL
    (left,) = Path().glob(".tmp-out-*")
    assert not Path("out").exists() and (left / "model.safetensors").is_file()
    Path(".tmp-out-two-7").mkdir()
    assert rlhf("export", ".", "--out", "out").exit_code == 0
    assert not left.exists() and Path(".tmp-out-two-7").is_dir() and Path("out/model.safetensors").is_file()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_export_leaves_nothing(full: None, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_some(model: Any, tokenizer: Any, folder: Path, text: str) -> None:
        model.save_pretrained(folder)
        raise error

    monkeypatch.setattr(save, "save_model", write_some)
    result = rlhf("export", ".", "--out", "out")
    if isinstance(error, OSError):
        assert is_error(result, "E03", "could not write to disk", exit_code=1)
    assert result.exit_code != 0 and not Path("out").exists() and not list(Path().glob(".tmp-*"))
