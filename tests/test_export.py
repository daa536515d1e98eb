"""`rlhf export`: the same logits from a folder that stands by itself, for every kind of run; refusals; a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import adapter_folder
import families
import pytest
import torch
from adapter_folder import widen, write
from bad_inputs import replace
from conftest import World
from huggingface_hub import ModelCard
from ppo_folder import rlhf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import Result

from rlhf_cli import jsonl, runs, system
from rlhf_cli.commands import export
from rlhf_cli.models import lora, save, tokenizers
from rlhf_cli.models.load import init_reward_model, load_causal_lm, load_unmerged

pytestmark = pytest.mark.training
KINDS = {"causal": AutoModelForCausalLM, "scorer": AutoModelForSequenceClassification}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LONG = ("-s", "ppo.total_episodes=40", "-s", "output.save_steps=2", "-s", "output.snapshots=2")
LORA = ("-s", "models.adapters={kind: lora, r: 3}", "-s", "ppo.learning_rate=1e-2")
JUDGE = "def short(prompts, responses):\n    return [-len(response) for response in responses]\n"


@pytest.fixture(scope="module")
def trained(adapters_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters alone, PPO on one base, evaluated with a judge that selects. Not to be changed."""
    folder = shutil.copytree(adapters_run, tmp_path_factory.mktemp("export") / "run")
    (folder / "judges.py").write_text(JUDGE)
    text = adapter_folder.EVAL.replace("eval: {", "judges: {short: 'judges:short'}\neval: {select: short, ")
    (folder / "eval.yaml").write_text(text)
    adapter_folder.run(folder, "ppo", *LORA, *LONG)
    adapter_folder.run(folder, "eval")
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run, beside which the test stands."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained, tmp_path / "run").relative_to(tmp_path)


@pytest.fixture
def full(ppo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished PPO run of whole models that no stage of ours made, in which the test stands."""
    monkeypatch.chdir(shutil.copytree(ppo_run, tmp_path, dirs_exist_ok=True))
    return Path()


def some_ids() -> torch.Tensor:
    return torch.randint(2, 250, (3, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=some_ids()).logits


def beside(base: Any, adapter: Path) -> torch.Tensor:
    """The logits of an adapter beside a base, put there and read by peft alone."""
    from peft import PeftModel

    return logits(PeftModel.from_pretrained(base, adapter))


def plain(folder: Path, kind: str = "causal") -> Any:
    """The model of a folder, by transformers alone."""
    return KINDS[kind].from_pretrained(folder, dtype=torch.float32)


def same(theirs: torch.Tensor, own: torch.Tensor, share: float = 1e-4) -> bool:
    return bool((theirs - own).abs().max() <= share * own.abs().max())


def exported(run: Path, *arguments: object, out: str = "out") -> Path:
    """Export by the command; what every export must hold is looked at here."""
    result = rlhf("export", run, "--out", out, *arguments)
    assert result.exit_code == 0, result.stderr
    folder, names = Path(out), {path.name for path in Path(out).rglob("*")}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert not [name for name in names if name.endswith(PICKLES) or name.startswith(("adapter", "state", "merged"))]
    for path in folder.iterdir():
        content = path.read_bytes()
        assert str(Path.cwd()).encode() not in content and b"../" not in content, path
        assert path.stat().st_mode == (folder / "README.md").stat().st_mode
    last = result.stdout.splitlines()[-1]
    assert last.startswith("export   loaded again with transformers, its logits are the run's own to ")
    assert not [*folder.parent.glob(".tmp-*"), *folder.parent.glob(f".{folder.name}.lock")]
    return folder


def refused(result: Result, code: str, *says: str, exit_code: int = 2) -> bool:
    """One line and a hint at most, nothing on stdout, and nothing left."""
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error[")]
    assert len(errors) == 1 and errors[0].startswith(f"error[{code}]: "), result.stderr
    assert all(text in result.stderr for text in says), result.stderr
    assert (result.exit_code, result.stdout) == (exit_code, "") and "Traceback" not in result.stderr
    assert not Path("out").exists() and not list(Path().glob(".*out*"))
    return True


# The same model


def test_a_whole_sft_model(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "run", world)
    replace("run/sft.yaml", ", adapters: {kind: lora, r: 4}", "")
    adapter_folder.run(folder, "sft", "-s", "sft.max_steps=2")
    out = exported(folder, out="to/be/made")
    assert torch.equal(logits(plain(out)), logits(plain(folder / "sft/model")))
    assert load_file(out / "model.safetensors").keys() == load_file(folder / "sft/model/model.safetensors").keys()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (folder / "sft/model" / name).read_bytes()


def test_adapters_of_sft_and_of_the_reward_model_on_them(copied: Path) -> None:
    sft = exported(copied, "--stage", "sft", out="sft")
    own = beside(plain(copied / "model"), copied / "sft/model")
    assert same(logits(plain(sft)), own) and not same(logits(plain(copied / "model")), own, 0.05)
    reward = exported(copied / "reward", out="reward")
    own = beside(init_reward_model(copied / "sft/model"), copied / "reward/model")
    assert same(logits(plain(reward, "scorer")), own)
    told = json.loads((reward / "config.json").read_text())
    manifest = json.loads((copied / "reward/manifest.json").read_text())
    assert [told[name] for name in ("reward_mean", "reward_std")] == [
        manifest[name] for name in ("reward_mean", "reward_std")
    ]


@pytest.mark.parametrize(
    "kind", ["{kind: qlora, r: 4}", "{kind: lora, r: 4, use_dora: true, use_rslora: true}"], ids=["qlora", "dora"]
)
def test_adapters_of_other_kinds_go_into_the_full_precision_base(
    world: World, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "run", world)
    widen(folder, world)
    for stage in ("sft", "reward"):
        adapter_folder.run(folder, stage, "-s", f"{stage}.max_steps=4", "-s", f"model.adapters={kind}")
    own = beside(plain(folder / "model"), folder / "sft/model")
    assert same(logits(plain(exported(folder, out="sft"))), own) and not same(
        logits(plain(folder / "model")), own, 0.05
    )
    own = beside(init_reward_model(folder / "sft/model"), folder / "reward/model")
    assert same(logits(plain(exported(folder, "--stage", "reward", out="reward"), "scorer")), own)


def test_gpt2_with_a_new_pad_token(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrices lie the other way, its embeddings are tied to its head, and they have grown."""
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "run", world, base="gpt2")
    families.write_causal(folder / "gpt2", "gpt2", [row["text"] for _, row in jsonl.read_jsonl(world.text)])
    for stage in ("sft", "reward"):
        adapter_folder.run(folder, stage, "-s", f"{stage}.max_steps=4")
    known = len(tokenizers.load_tokenizer(folder / "gpt2"))
    out = exported(folder, out="sft")
    model, base = plain(out), plain(folder / "gpt2")
    lora.grow_embeddings(base, known + 1)
    assert same(logits(model), beside(base, folder / "sft/model"))
    assert model.get_input_embeddings().weight.shape[0] == known + 1 == len(AutoTokenizer.from_pretrained(out))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    scorer = plain(exported(folder, "--stage", "reward", out="reward"), "scorer")
    own = beside(init_reward_model(folder / "sft/model"), folder / "reward/model")
    assert same(logits(scorer), own)


def test_whole_policies_of_ppo(full: Path) -> None:
    for step, folder in (("last", "ppo/model"), ("2", "ppo/snapshots/step_000002"), ("4", "ppo/model")):
        out = exported(full, "--step", step, out=f"step_{step}")
        assert torch.equal(logits(plain(out)), logits(plain(Path(folder))))
    assert not torch.equal(logits(plain(Path("step_2"))), logits(plain(Path("step_4"))))


def test_policies_on_one_base_stand_by_themselves(copied: Path) -> None:
    """Last, selected and another; read by transformers alone, the run gone (test_export_push.py: without us, too)."""
    picked = json.loads((copied / "eval/report.json").read_text())["selected_step"]
    steps = {int(path.name[-6:]): path for path in (copied / "ppo/snapshots").iterdir()}
    assert picked in steps and min(steps) < 5
    wanted = {"last": copied / "ppo/model", "selected": steps[picked], str(min(steps)): steps[min(steps)]}
    own = {step: beside(load_causal_lm(copied / "sft/model"), folder) for step, folder in wanted.items()}
    for step in wanted:
        exported(copied, "--step", step, out=step)
    assert not same(own["last"], own[str(min(steps))], 0.01)
    shutil.rmtree(copied)
    for step in wanted:
        assert same(logits(plain(Path(step))), own[step]) and len(AutoTokenizer.from_pretrained(step)) > 0


def test_a_chat_template_goes_with_it(copied: Path) -> None:
    tokenizer = tokenizers.load_tokenizer(copied / "model")
    tokenizer.chat_template = tokenizers.CHATML
    tokenizer.save_pretrained(copied / "model")
    adapter_folder.run(copied, "sft", "--fresh")
    out = exported(copied, "--stage", "sft")
    said = AutoTokenizer.from_pretrained(out).apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert said == "<|im_start|>user\nHi<|im_end|>\n"


def test_number_formats(full: Path) -> None:
    own = logits(plain(Path("ppo/model")))
    for name, share in (("float16", 0.01), ("bfloat16", 0.08)):
        out = exported(full, "--dtype", name, out=name)
        (held,) = {tensor.dtype for tensor in load_file(out / "model.safetensors").values()}
        assert held == getattr(torch, name) and json.loads((out / "config.json").read_text())["dtype"] == name
        assert same(logits(plain(out)), own, share) and not same(logits(plain(out)), own, 1e-6)


def test_a_run_in_bfloat16_keeps_it(copied: Path) -> None:
    """Base and adapters are added in float32, and rounded once."""
    adapter_folder.run(copied, "ppo", "--fresh", *LORA, "-s", "models.dtype=bfloat16", "-s", "ppo.bf16=true")
    held = load_file(exported(copied) / "model.safetensors")
    whole = load_causal_lm(copied / "ppo/model").state_dict()
    assert held and all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in held.items())


# The card


def card(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_the_card_tells_where_it_comes_from_and_what_is_known(copied: Path) -> None:
    report = json.loads((copied / "eval/report.json").read_text())
    last, picked = card(exported(copied, out="last")), card(exported(copied, "--step", "selected", out="picked"))
    for stage in ("ppo", "sft", "reward"):
        manifest = json.loads((copied / stage / "manifest.json").read_text())
        hashes = [manifest["model_sha256"], *manifest["data"].values()]
        assert all(f"`{sha256[:12]}`" in last for sha256 in hashes) and f"\n| {stage} | " in last
    step = report["selected_step"]
    assert (
        "policy after update 5 of 5, the last one." in last and f"policy after update {step} of 5. The eval" in picked
    )
    assert "adapters of rank 3, which are added" in last and "These are adapters alone" not in last
    assert f"transformers {runs.versions()['transformers']}" in last and "| `models.adapters.r` | `3` |" in last
    assert "| `objective/kl_k1` |" in last and "| `objective/kl_k1` |" not in picked  # that was the last one's
    told, point = report["models"]["ppo"], next(p for p in report["frontier"] if p["step"] == step)
    assert f" {told['reward_mean']:.3f} [" in last and f" {point['reward']:.3f} [" in picked
    for text, rates in ((last, report["win_rate"]["ppo_vs_sft"]), (picked, point["win_rate"])):
        assert f"| PPO over SFT, short | {100 * rates['short']['value']:.0f} % [" in text
        results = ModelCard(text).data.eval_results
        assert [each.metric_value for each in results] == [round(rate["value"], 4) for rate in rates.values()]
    assert "at its end |" in picked and "at its end |" not in last and "No evaluation" not in last + picked


def test_the_card_of_a_reward_model(copied: Path) -> None:
    text = card(exported(copied, "--stage", "reward"))
    assert "\n# run-reward\n" in text and "Write a prompt here" in text
    accuracy = json.loads((copied / "reward/manifest.json").read_text())["metrics"]["accuracy"]
    assert f"Right on {100 * accuracy:.0f} % [" in text and "`models.adapters" not in text and "| ppo |" not in text
    assert ModelCard(text).data.eval_results[0].metric_value == round(accuracy, 4)


def test_a_held_out_prompt_goes_along_only_where_it_is_asked_for(copied: Path) -> None:
    asked = json.loads((copied / "eval/samples.jsonl").read_text().splitlines()[0])["prompt"]
    assert f"prompt = {asked!r}" in card(exported(copied, "--show-prompt"))
    shutil.rmtree(copied / "eval")
    assert refused_two(rlhf("export", copied, "--out", "out2", "--show-prompt"), "M01", "run has no evaluation")


def test_no_evaluation_of_other_bytes_is_told(copied: Path) -> None:
    adapter_folder.run(copied, "ppo", "--fresh", *LORA, "-s", "seed=5")
    text = card(exported(copied))
    assert "No evaluation of this very model was found" in text and "it was not evaluated" in text
    assert ModelCard(text).data.eval_results is None and " over SFT" not in text
    result = rlhf("export", copied, "--out", "out2", "--step", "selected")
    assert refused_two(result, "M10", "run/eval holds no finished evaluation of run/ppo as it is")


def refused_two(result: Result, code: str, text: str) -> bool:
    return result.exit_code == 2 and result.stderr.startswith(f"error[{code}]: ") and text in result.stderr


# Which model


def test_without_a_word_it_is_the_policy(copied: Path) -> None:
    out = rlhf("export", copied, "--out", "one")
    assert out.stdout.startswith("export   run/ppo after update 5 with its adapters merged, "), out.stderr
    (copied / "ppo/manifest.json").unlink()
    assert refused(rlhf("export", copied, "--out", "out"), "M10", "run/ppo is not finished", "--stage sft")
    shutil.rmtree(copied / "ppo")
    out = rlhf("export", copied, "--out", "two")
    assert out.stdout.startswith("export   run/sft with its adapters merged, "), out.stderr


def test_what_cannot_be_chosen(copied: Path) -> None:
    def said(*arguments: object) -> Result:
        return rlhf("export", *arguments, "--out", "out")

    assert refused(said(copied, "--stage", "sfd"), "C07", "--stage sfd: not one of ppo, sft, reward", "mean sft?")
    assert refused(said(copied, "--step", "best"), "C07", "--step best: not last, selected or a number")
    assert refused(said(copied, "--dtype", "bfloat"), "C07", "--dtype bfloat: not one of", "did you mean bfloat16?")
    steps = ", ".join(sorted({str(int(path.name[-6:])) for path in (copied / "ppo/snapshots").iterdir()}))
    assert refused(said(copied, "--step", "99"), "C06", "run/ppo has no policy of that step", f"there are {steps};")
    assert refused(said(copied, "--step", "2", "--stage", "sft"), "C11", "the sft stage has one model only")
    assert refused(said(copied / "ppo", "--stage", "sft"), "M10", "run/ppo was written by the ppo stage, not by sft")
    assert refused(said(copied / "eval"), "M10", "run/eval was written by the eval stage")
    assert refused(said("nowhere"), "M01", "no such folder nowhere")
    assert refused(said(copied / "ppo/model"), "M01", "name the stage's folder: run/ppo")
    (copied / "eval/manifest.json").unlink()
    assert refused(said(copied, "--step", "selected"), "M10", "holds no finished evaluation of run/ppo", "rlhf eval")
    shutil.rmtree(copied / "reward")
    assert refused(said(copied, "--stage", "reward"), "M01", "run holds no reward stage", "hint: it holds ppo and sft")


def test_selected_needs_a_selection(full: Path) -> None:
    assert rlhf("eval", "-c", "eval.yaml", "-s", "eval.n=2", "-s", "eval.best_of=[]").exit_code == 0
    result = rlhf("export", ".", "--step", "selected", "--out", "out")
    assert refused(result, "C06", "the evaluation in eval selected no policy (eval.select names no judge)")


# What is not as it was written


def test_damage_is_found_before_anything_is_written(copied: Path) -> None:
    def flip(path: Path) -> bytes:
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        return before

    snapshot = min((copied / "ppo/snapshots").iterdir())
    weights = "adapter_model.safetensors"
    for path, step, code, exit_code, says in (
        (copied / "ppo/model" / weights, "last", "M10", 2, "run/ppo is damaged"),
        (copied / "sft/model" / weights, "last", "M10", 2, "run/sft is damaged"),
        (copied / "model/model.safetensors", "last", "M04", 2, "its base run/model has changed since"),
        (snapshot / weights, str(int(snapshot.name[-6:])), "M05", 1, f"{snapshot.name} is damaged"),
    ):
        before = flip(path)
        result = rlhf("export", copied, "--out", "out", "--step", step)
        assert refused(result, code, says, exit_code=exit_code)
        path.write_bytes(before)
    shutil.rmtree(copied / "model")
    assert refused(rlhf("export", copied, "--out", "out"), "M04", "its base run/model does not exist")


def forgotten(model: Any) -> Any:
    """A merge that leaves the adapters out."""
    return model.unload() if lora.is_peft_model(model) else model


def test_m12_another_model_is_not_left_behind(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(lora, "merge_and_unload", forgotten)
        assert refused(rlhf("export", copied, "--out", "out"), "M12", "its logits differ by", exit_code=1)
    save_model = save.save_model

    def changed(model: Any, tokenizer: Any, folder: Path, text: str) -> None:
        save_model(model, tokenizer, folder, text)
        (folder / "chat_template.jinja").write_text("{{ messages }}")

    monkeypatch.setattr(save, "save_model", changed)
    assert refused(rlhf("export", copied, "--out", "out"), "M12", "its chat template differs", exit_code=1)


def test_numbers_that_a_format_cannot_hold(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def large(*args: Any, **options: Any) -> Any:
        model = load_unmerged(*args, **options)
        model.get_input_embeddings().weight.data *= 1e6
        return model

    monkeypatch.setattr("rlhf_cli.models.load.load_unmerged", large)
    assert refused(rlhf("export", ".", "--out", "out", "--dtype", "float16"), "M12", "by nan of the", exit_code=1)


# Where it goes


def test_nothing_is_overwritten(full: Path) -> None:
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    Path("full/.hidden").write_text("mine too")
    result = rlhf("export", ".", "--out", "full", "--dtype", "f8")
    assert result.exit_code == 2 and result.stderr.count("error[") == 2  # all that is wrong at once
    assert "error[C15]: full is not empty: it holds .hidden and 1 more; nothing is overwritten" in result.stderr
    assert sorted(path.name for path in Path("full").iterdir()) == [".hidden", "mine.txt"]
    assert refused(rlhf("export", ".", "--out", "full/mine.txt"), "C15", "full/mine.txt is a file")
    assert refused(rlhf("export", ".", "--out", "full/mine.txt/in"), "E03", "full/mine.txt is a file")
    assert refused(rlhf("export", ".", "--out", "."), "C15", "cannot replace the working directory")
    Path("empty").mkdir()
    Path("link").symlink_to("empty")
    assert rlhf("export", ".", "--out", "link").exit_code == 0
    assert Path("link").is_symlink() and Path("empty/model.safetensors").is_file()


def test_e03_room_is_asked_for_first(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **how: Any) -> Any:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr("rlhf_cli.models.load.load_unmerged", never)
    numbers = sum(tensor.numel() for tensor in load_file("ppo/model/model.safetensors").values())
    for small, name in (("free_disk_bytes", "the model needs"), ("total_memory", "of memory, ")):
        with monkeypatch.context() as patched:
            patched.setattr(system, small, lambda *_: numbers)
            assert refused(rlhf("export", ".", "--out", "out"), "E03", name)


def test_c15_another_process_is_at_it(full: Path) -> None:
    code = (
        "import sys, pathlib; from rlhf_cli.runs.locks import lock_folder;"
        "lock_folder(pathlib.Path('out').resolve()); print('held', flush=True); sys.stdin.read()"
    )
    root = str(Path(__file__).parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
    ) as other:
        assert other.stdout and other.stdout.readline() == b"held\n"
        result = rlhf("export", ".", "--out", "out")
        assert result.exit_code == 2 and "error[C15]: another process is writing out" in result.stderr
        assert "or name another folder" in result.stderr and not Path("out").exists()
        other.communicate()


def test_a_kill_leaves_nothing_that_looks_whole(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when all but the last step is done; the next one clears up, of this folder alone."""
    if (child := os.fork()) == 0:
        monkeypatch.setattr(export, "verify_export", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        rlhf("export", ".", "--out", "out")
        os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (left,) = Path().glob(".tmp-out-*")
    assert ended == -signal.SIGKILL and not Path("out").exists() and (left / "model.safetensors").is_file()
    Path(".tmp-out-two-7").mkdir()
    assert rlhf("export", ".", "--out", "out").exit_code == 0
    assert not left.exists() and Path(".tmp-out-two-7").is_dir() and Path("out/model.safetensors").is_file()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_breaks_off_leaves_nothing(full: Path, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_some(model: Any, tokenizer: Any, folder: Path, text: str) -> None:
        model.save_pretrained(folder)
        raise error

    monkeypatch.setattr(save, "save_model", write_some)
    result = rlhf("export", ".", "--out", "out")
    if isinstance(error, OSError):
        assert refused(result, "E03", "could not write to disk", exit_code=1)
    assert result.exit_code != 0 and not Path("out").exists() and not list(Path().glob(".tmp-*"))
