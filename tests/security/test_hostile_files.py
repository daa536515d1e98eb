"""Guarantees for files from other people (docs/results/guarantees.md lists them with all their tests)."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
import run_cli
import torch
import yaml
from bad_configs import messages
from bad_inputs import check, foreign_scorer, refused, replace, rlhf
from canaries import Trap
from fake_config import FakeConfig, make_stage
from run_cli import must_succeed

from rlhf_cli import config, errors, jsonl, runs, terminal
from rlhf_cli.config import loading
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError
from rlhf_cli.files import json_sha256
from rlhf_cli.models import load, save, tokenizers
from rlhf_cli.pipeline import children
from rlhf_cli.progress import Progress

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
HOSTILE = "\x1b[2J\x1b]8;;http://x\x07\x9b2J[link=file:///etc/passwd]<script>\x7f"
ACTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a terminal may obey


# 1. Custom code of a model


def plant_code(model: Path, file: str) -> Path:
    """Add Python code to a model's folder, which `file` names; return the file that the code would write."""
    mark = model.parent / "executed"
    kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    (model / "own.py").write_text(OWN.format(mark=str(mark)))
    settings = json.loads((model / file).read_text())
    names = {"AutoTokenizer": ["own.Own", None]} if "tokenizer" in file else {kind: f"own.{kind}" for kind in kinds}
    (model / file).write_text(json.dumps({**settings, "auto_map": names}))
    return mark


OWN = """
open({mark!r}, "w").close()
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
class AutoConfig(LlamaConfig): pass
class Body(LlamaModel): config_class = AutoConfig
transformers.AutoModel.register(AutoConfig, Body)  # for the body of a classifier
class AutoModelForCausalLM(LlamaForCausalLM): config_class = AutoConfig
class AutoModelForSequenceClassification(LlamaForSequenceClassification): config_class = AutoConfig
"""


@pytest.mark.full
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("stage", "model", "place"),
    [
        ("sft", "model", "sft.yaml:1: "),
        ("reward", "model", "reward.yaml:1: "),
        ("ppo", "model", "ppo.yaml:1: "),
        ("ppo", "scorer", "ppo.yaml:1: "),
        ("ppo", "critic", "ppo.yaml:1: "),
        ("eval", "scorer", "eval.yaml:"),
    ],
)
def test_m08_code_in_a_models_folder_is_never_run(folder: Path, stage: str, model: str, place: str, file: str) -> None:
    """transformers has a built-in class for this model, and would load it without that code."""
    foreign_scorer(folder)
    shutil.copytree("scorer", "critic")
    replace("ppo.yaml", "reward: scorer", "reward: scorer, value: critic")
    models = "models: {sft: model, ppo: model, reward: scorer}\n"
    Path("eval.yaml").write_text(models + "data: {prompts: prompts.jsonl}\neval: {n: 2}\n")
    mark = plant_code(folder / model, file)
    result = rlhf(stage)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert result.exit_code == 2 and "Traceback" not in result.stderr, result.stderr
    assert lines and all(line.startswith("error[M08]") and f"{model} needs Python code" in line for line in lines)
    assert "hint: read that code, then add --trust-remote-code" in result.stderr
    assert not mark.exists() and not (folder / stage / "manifest.json").exists()


@pytest.mark.full
def test_trust_remote_code_runs_the_code_and_is_recorded(folder: Path) -> None:
    mark = plant_code(folder / "model", "config.json")
    for stage in ("sft", "reward"):
        must_succeed(rlhf(stage, "--trust-remote-code"))
        assert json.loads(Path(stage, "manifest.json").read_text())["trust_remote_code"] is True
    assert mark.exists()
    mark.unlink()
    for stage in ("sft", "reward"):
        out = ("export", ".", "--stage", stage, "--out", f"out_{stage}")
        refusal = run_cli.rlhf(*out)
        assert refusal.exit_code == 2 and "error[M08]" in refusal.stderr and not mark.exists()
        done = run_cli.rlhf(*out, "--trust-remote-code")
        assert done.exit_code == 0 and Path(f"out_{stage}/own.py").is_file(), done.stderr
        assert mark.exists()
        mark.unlink()
    shutil.rmtree("sft")
    shutil.rmtree("model")
    shutil.copytree(folder / "reward/model", "unused")  # the saved model has the code, and is refused, too
    with pytest.raises(RLHFError, match="M08"):
        load.load_reward_model("unused")


@pytest.mark.full
def test_a_planted_module_in_the_working_directory_is_not_imported(folder: Path) -> None:
    """`rlhf run` starts child processes by `python -m`, which by default imports from the working directory."""
    for name in ("yaml", "pydantic"):
        Path(f"{name}.py").write_text("raise SystemExit('planted')")
    child = children.child_command(config.load("sft", "sft.yaml"), [], Options(), fresh=False)
    assert run_cli.must_succeed(run_cli.python(*child[1:], "--dry-run")).stderr == ""
    assert "planted" in run_cli.python("-m", "rlhf_cli", "sft", "-c", "sft.yaml", "--dry-run").stderr


# 2. Pickles


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "name"),
    [
        *(("sft", f"model.{suffix}") for suffix in ("pt", "pth", "ckpt", "pkl")),
        *((stage, "pytorch_model.bin") for stage in ("sft", "reward", "ppo")),
    ],
)
def test_m07_weights_in_a_pickle_are_never_read(folder: Path, stage: str, name: str) -> None:
    foreign_scorer(folder)
    Path("model/model.safetensors").unlink()
    torch.save({"weight": Trap(folder / "executed")}, Path("model", name))
    place, says = f"{stage}.yaml:1: ", (f"only as a pickle ({name})", "hint: if you trust it: ", "_pretrained(FOLDER)")
    assert refused(rlhf(stage), "M07", place, *says) and "error[M07]" in check(f"{stage}.yaml").stderr
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    Path("model/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy("model/config.json", "model/other.safetensors")
    assert refused(rlhf(stage), "M07", place, *says) and not Path("executed").exists()


def test_m01_a_pickle_named_like_safetensors(folder: Path) -> None:
    torch.save({"weight": Trap(folder / "executed")}, "model/model.safetensors")
    assert refused(rlhf("sft"), "M01", "sft.yaml:1: model cannot be loaded") and not Path("executed").exists()


# 3. Secrets in configs


@pytest.mark.parametrize(
    "line",
    [
        f"model: {{path: owner/{TOKEN}}}",
        "data: {train: 'https://me:PASSWORD@host/rows.jsonl'}",
        "model: {path: 'https://me:PASSWORD@host/model'}",
        "model: {path: 'https://host/model?api_key=PASSWORD'}",
        f"{TOKEN}: 1",
        f"trainer: {{{TOKEN}: {{weight: 1}}}}",
        "trainer: {hub_token: PASSWORD}",
        "wandb_api_key: PASSWORD",
        f"x: [{TOKEN}, {TOKEN}]",
    ],
)
@pytest.mark.usefixtures("here")
def test_c16_secrets_in_a_config(line: str) -> None:
    errors_found = messages("sft", f"seed: 1\n{line}\n")
    assert any(message.startswith("error[C16]: sft.yaml:2: ") for message in errors_found), errors_found
    assert "PASSWORD" not in "".join(errors_found) and TOKEN not in "".join(errors_found)


HOOK = "Zx3Yw8Vu5Ts2Rq7Po6Nm1Lk4"


@pytest.mark.parametrize(
    "url",
    [
        "https://PLANTED@host/score",
        "https://me:PLANTED@host/score",
        *(
            f"https://host/score?model=rm&{name}=PLANTED"
            for name in (
                "sig", "Signature", "auth", "code", "pwd", "token", "key", "apiKey", "X-Amz-Signature",
                "x-goog-credential", "X-Amz-Security-Token", "subscription-key", "AWSAccessKeyId", "session_id", "pass",
                "%74oken", "%2574oken", "s%69g", "a.key",
            )
        ),
        "https://host/score?a=b;sig=PLANTED",
        "host/score?sig=PLANTED",
        "https://host/score?sig={SIG}PLANTED",
        f"https://host/services/T012/B345/{HOOK}",
        f"https://host/score?id={HOOK}",
        "https://host/3f2504e04f8911d39a0c0305e82c3301/score",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("here")
def test_c16_secrets_in_the_url_of_a_reward(url: str) -> None:
    others = "data: {prompts: x}\nppo: {total_episodes: 64}\n"
    (found,) = messages("ppo", f"seed: 1\nrewards:\n  far: {{url: '{url}'}}\n{others}")
    assert found.startswith("error[C16]: ppo.yaml:3: rewards.far.url"), found
    assert "write {VARIABLE} in its place" in found
    assert not any(secret in found for secret in ("PLANTED", HOOK, "3f2504e04f89"))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/score?max_tokens=512&normalize=true&author=me&encoding=utf8&design=2",
        "https://host/models/Skywork-Reward-V2-Llama-3.1-8B-40M/RewardModelServerV2",
        "https://api.host.com/v2/3f2504e0-4f89-11d3-9a0c-0305e82c3301/runsync",
        "https://k3x9f2b7q8w1z5c6v4n0.endpoints.host.com/score?code={FUNCTION_CODE}&sig={SIG}",
        "https://host/services/{HOOK}",
    ],
)
@pytest.mark.usefixtures("here")
def test_urls_without_a_secret(url: str) -> None:
    others = "data: {prompts: x}\nppo: {total_episodes: 64}\n"
    Path("ppo.yaml").write_text(f"rewards:\n  far: {{url: '{url}'}}\n{others}")
    assert loading.load("ppo", "ppo.yaml").rewards["far"].url == url


# 4. YAML


@pytest.mark.full
@pytest.mark.parametrize("unit", ["\n", "a: |\n x\n", "# x\n", "x", "[", "hf_a ", '"\\x41', "%YAML 1.1\n", "a_", "1:"])
def test_a_file_of_the_largest_size_takes_under_a_second(unit: str, here: Path) -> None:
    begin = time.process_time()
    messages("sft", (unit * 250_000)[:250_000])
    messages("sft", "a: |\n" + (" " + unit * 250_000)[:249_990])
    assert time.process_time() - begin < 2  # of two files


# 6. Terminals and logs


def test_hostile_names_in_errors_and_warnings_are_harmless(folder: Path) -> None:
    """Names of a data file, a model's folder, a column, and a config's key and value."""
    Path("sft.yaml").write_text(yaml.safe_dump({"model": {"path": f"./{HOSTILE.replace('/', '')}"}, HOSTILE: HOSTILE}))
    first = rlhf("sft")
    name = HOSTILE.replace("/", "") + ".jsonl"
    jsonl.write_jsonl(folder / name, [{"prompt": HOSTILE, HOSTILE: 1}])
    Path("sft.yaml").write_text(yaml.safe_dump({"model": {"path": "model"}, "data": {"train": name}}))
    results = [first, rlhf("sft"), check("sft.yaml"), check("sft.yaml", "--json"), run_cli.rlhf(HOSTILE)]
    for result in results:
        assert result.exit_code == 2 and not ACTIVE.search(result.output), result.output
    assert "[2J" in results[1].stderr and results[1].stderr.startswith("error[D02]")
    terminal.warn("T02", HOSTILE, where=HOSTILE, hint=HOSTILE)
    assert not ACTIVE.search("".join(terminal.emitted_warnings()) + str(terminal.emitted_problems()[-1]))


def test_a_traceback_has_no_control_characters_or_secrets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(f"{HOSTILE} {TOKEN}")

    monkeypatch.setattr("rlhf_cli.config.loading.load", fail)
    result = rlhf("sft", "--debug")
    assert "Traceback" in result.stderr and "error[R00]: OSError" in result.stderr
    assert not ACTIVE.search(result.stderr) and TOKEN not in result.stderr


def test_written_json_has_no_control_characters(tmp_path: Path) -> None:
    """DEL and C1, too, which json does not escape; the round trip is exact."""
    runs.write_json(tmp_path / "a.json", {HOSTILE: [HOSTILE]})
    jsonl.write_jsonl(tmp_path / "b.jsonl", [{"text": HOSTILE}])
    jsonl.append_jsonl(tmp_path / "b.jsonl", {"text": HOSTILE})
    for path in tmp_path.iterdir():
        assert not ACTIVE.search(path.read_text(encoding="utf-8"))
    assert json.loads((tmp_path / "a.json").read_text()) == {HOSTILE: [HOSTILE]}
    assert [row["text"] for _, row in jsonl.read_jsonl(tmp_path / "b.jsonl")] == [HOSTILE, HOSTILE]


# 7. Redaction


def test_secrets_are_redacted_in_all_output(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("SOME_TOKEN", "short")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-aws-0123")
    monkeypatch.setenv("DEPLOY_PRIVATE_KEY", "of-ssh-0123")
    text = f"https://me:pass@host/x?t={TOKEN} s3://key@bucket 0123456789abcdef short me@host a://b/c@d"
    clean = "https://[secret]@host/x?t=[secret] s3://[secret]@bucket [secret] short me@host a://b/c@d"
    text, clean = f"{text} of-aws-0123 of-ssh-0123", f"{clean} [secret] [secret]"
    assert errors.redact(text) == clean
    terminal.say(text)
    terminal.out(text)
    terminal.table([text], [[text]], title=text)
    terminal.warn("T02", text, where=text, hint=text)
    with Progress(text, 1) as bar:
        bar.advance(note=text)
    out, err = capsys.readouterr()
    assert (out + err).count(clean) == 10 and "pass@" not in out + err and TOKEN not in out + err
    assert terminal.emitted_warnings() == [f"warning[T02]: {clean}: {clean}"]


def test_a_token_in_a_path_is_not_shown(folder: Path) -> None:
    folder_of_token = folder / TOKEN
    shutil.copytree("model", folder_of_token)
    (folder_of_token / "model.safetensors").unlink()
    for word in (".", "./nothing"):
        config = {"model": {"path": word}, "data": {"train": "../rows.jsonl"}}
        (folder_of_token / "sft.yaml").write_text(yaml.safe_dump(config))
        result = rlhf("sft", "-c", f"{TOKEN}/sft.yaml")
        assert refused(result, "M01", "[secret]/sft.yaml:") and TOKEN not in result.output


def test_env_shows_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("CANARY", "a-canary-of-no-form")
    shown = run_cli.rlhf("env", "--json").output
    assert TOKEN not in shown and "canary" not in shown


# 8. Paths


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "link"])
def test_s03_a_checkpoint_entry_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    state = runs.commit_state(tmp_path / "state", "step_000001", lambda p: (p / "w").touch(), keep=2)
    (tmp_path / "secret").write_text("mine")
    (state / "link").symlink_to(tmp_path / "secret")
    manifest = json.loads((state / "state.json").read_text())
    manifest["files"][name] = {"sha256": "0", "bytes": 4}
    del manifest["sha256"]  # whoever writes such an entry writes a hash that fits
    (state / "state.json").write_text(json.dumps(manifest | {"sha256": json_sha256(manifest)}))
    with pytest.raises(RLHFError, match="S03") as error:
        runs.latest_state(tmp_path / "state")
    assert error.value.exit_code == 2 and (tmp_path / "secret").read_text() == "mine"


@pytest.mark.parametrize("name", ["../model.safetensors", "/tmp/model.safetensors"])
def test_parts_of_weights_outside_of_their_folder_are_refused(folder: Path, name: str) -> None:
    shutil.move("model/model.safetensors", "model.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    Path("model/model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(rlhf("sft"), "S03", "model/model.safetensors.index.json: ", f'the part "{name}" points out')


@pytest.mark.parametrize("index", [{"weight_map": []}, {}, [], {"weight_map": {"a": [1]}}])
def test_m01_an_index_without_file_names(folder: Path, index: object) -> None:
    Path("model/model.safetensors.index.json").write_text(json.dumps(index))
    Path("model/model.safetensors").rename("model/model-00001.safetensors")
    place, says = "model/model.safetensors.index.json: ", '"weight_map" must give the file of each weight'
    assert refused(rlhf("sft"), "M01", place, says, "hint: download the file again")
    assert check("sft.yaml").stderr.count(says) == 1


@pytest.mark.parametrize("name", ["..", "../x", "/x", "a/b", ".hidden", "a b", HOSTILE, "x" * 101])
def test_a_run_name_is_a_plain_word(folder: Path, name: str) -> None:
    replace("sft.yaml", "sft:", yaml.safe_dump({"output": {"run_name": name}}) + "sft:")
    assert refused(rlhf("sft"), "S03", "sft.yaml:4: ", "output.run_name") and not Path("sft").exists()


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A user's folder outside of the run, which looks like a state."""
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    return folder


def test_deleting_old_checkpoints_never_follows_a_link(tmp_path: Path, precious: Path) -> None:
    state = tmp_path / "run/ppo/state"
    state.mkdir(parents=True)
    for name in ("step_000001", ".tmp-step_000003-1", ".trash-step_000002-1"):
        (state / name).symlink_to(precious)
    (state / ".tmp-file").symlink_to(precious / "thesis.tex")
    (state / ".trash-x-1").mkdir()
    (state / ".trash-x-1/inner").symlink_to(precious)
    for step in (5, 6):
        runs.commit_state(state, f"step_{step:06d}", lambda path: (path / "w").touch(), keep=2)
    assert sorted(path.name for path in state.iterdir()) == ["step_000005", "step_000006"]
    assert [path.name for path in precious.iterdir()] == ["thesis.tex"]


def test_fresh_moves_a_link_and_not_its_target(tmp_path: Path, precious: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "sft").symlink_to(precious)
    config = FakeConfig(run)
    identity = runs.compute_identity(config, {}, {})
    with pytest.raises(RLHFError, match="C15"):
        runs.start_stage(config, identity, {}, fresh=False)
    assert runs.start_stage(config, identity, {}, fresh=True) == "new"
    assert not (run / "sft").is_symlink() and (run / ".old/sft-1").is_symlink()
    assert [path.name for path in precious.iterdir()] == ["thesis.tex"]


def test_neither_a_saved_model_nor_a_manifest_follows_a_link(folder: Path, tmp_path: Path, precious: Path) -> None:
    (tmp_path / "out").symlink_to(precious)
    model, tokenizer = load.load_causal_lm("model"), tokenizers.load_tokenizer("model")
    save.save_model(model, tokenizer, tmp_path / "out", "A card.")  # in place of the link
    assert (tmp_path / "out/model.safetensors").is_file() and not (tmp_path / "out").is_symlink()
    assert [path.name for path in precious.iterdir()] == ["thesis.tex"]
    config = FakeConfig(tmp_path / "run")
    make_stage(tmp_path / "run", "sft")
    (config.folder / "snapshots").symlink_to(precious)
    runs.complete_stage(config, runs.compute_identity(config, {}, {}), parents={}, fields={})
    assert not any("thesis" in name for name in json.loads((config.folder / "manifest.json").read_text())["files"])


# 9. Chat templates


@pytest.mark.full
@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for x in range(1000000000) %}a{% endfor %}",
        "{{ messages.append(messages) }}",
    ],
)
def test_a_chat_template_cannot_reach_python(folder: Path, template: str) -> None:
    Path("t.jinja").write_text(template)
    replace("sft.yaml", "path: model", "path: model, chat_template: t.jinja")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    jsonl.write_jsonl(folder / "rows.jsonl", [{"messages": turns}] * 8)
    assert refused(rlhf("sft"), "D06", "", "the chat template rejects") and not Path("ran").exists()
