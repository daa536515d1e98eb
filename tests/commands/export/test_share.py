"""`rlhf export --push` and ppo.push_to_hub_if_best against a local hub: uploads, refusals, interrupted uploads.

Modules: `models/hub.py`.
"""

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import canaries
import huggingface_hub.constants
import ppo_folder
import pytest
import torch
from ppo_folder import must_succeed, ppo, rlhf
from run_cli import fails, python
from safetensors.torch import load
from stand_in_hub import TOKEN, Commit, Hub, Repo, environment, model_hub, use
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import Result

from rlhf_cli import __version__

pytestmark = pytest.mark.full
PUSH_BEST = ("-s", "ppo.push_to_hub_if_best=lab/policy")


@pytest.fixture(scope="module")
def trained(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a PPO run in `first`, on whole foreign models. Not to be changed."""
    folder = shutil.copytree(origin, tmp_path_factory.mktemp("push") / "run")
    ppo_folder.write(folder, "ppo", ppo_folder.PPO | {"run": "first"})
    must_succeed(ppo(folder))
    return folder


@pytest.fixture
def run(trained: Path, here: Path) -> Path:
    """A copy of the run in the working directory."""
    return Path(shutil.copytree(trained / "first", "first"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with model_hub() as hub:
        use(hub, monkeypatch)
        yield hub


def push(run: Path, *arguments: object) -> Result:
    return rlhf("export", run, "--push", "me/policy", *arguments)


def fetched(hub: Hub, to: Path) -> Path:
    """Write the files of the repository to a folder."""
    for name, content in hub.repos["me/policy"].head.files.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(content)
    return to


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    ids = torch.arange(2, 14)[None]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits


def hint_of(result: Result, code: str, *texts: str, exit_code: int) -> str:
    """Check that a command failed with one error and one hint; return the hint."""
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error[", "hint: ", "warning["))]
    assert lines[0].startswith(f"error[{code}]: ") and lines[1].startswith("hint: ") and len(lines) == 2, result.stderr
    assert all(text in result.stderr for text in texts), result.stderr
    assert result.exit_code == exit_code and "Traceback" not in result.stderr and TOKEN not in result.output
    return lines[1].removeprefix("hint: ")


# The repository after a push


def test_a_push_is_one_commit_to_a_private_repository(run: Path, hub: Hub) -> None:
    result = must_succeed(push(run))
    repo = hub.repos["me/policy"]
    title = f"ppo of run first after PPO update 4, exported by rlhf-cli {__version__}"
    assert repo.private and [commit.title for commit in repo.commits[1:]] == [title]
    assert repo.head.files.keys() - {".gitattributes"} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert not any(canaries.is_pickle(content) for content in repo.head.files.values())
    last = f"push     {hub.address}/me/policy (private), commit {repo.head.oid[:12]}"
    assert result.stdout.splitlines()[-1].startswith(last) and TOKEN not in result.output
    assert not [*run.glob(".export*"), *Path().glob("policy*")] and ".export" not in result.output
    own = load((run / "ppo/model/model.safetensors").read_bytes())
    uploaded = load(repo.head.files["model.safetensors"])
    assert own.keys() == uploaded.keys() and all(torch.equal(own[name], uploaded[name]) for name in own)
    again = push(run)
    assert again.exit_code == 0 and ", unchanged since commit " in again.stdout, again.stderr
    assert len(repo.commits) == 2 and "No files have been modified" not in again.stderr
    assert ", commit " in push(run, "--step", "2").stdout
    assert repo.head.title.startswith("ppo of run first after PPO update 2")
    changed = {name for name, content in repo.head.files.items() if repo.commits[1].files[name] != content}
    assert changed == {"README.md", "model.safetensors"}


def test_what_was_pushed_loads_from_the_hub_by_the_cards_own_code(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pushed by a process with secrets in its environment and its folder's name; the code is transformers' alone."""
    secret = canaries.SECRETS["HUB_TOKEN"]
    hub.token = canaries.SECRETS["HF_TOKEN"]
    shutil.move(run, secret)
    for name, value in environment(hub, tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "policy").mkdir()
    command = ("export", secret, "--push", "me/policy", "--out", "policy/kept")
    export = must_succeed(canaries.rlhf(tmp_path / "home", *command))
    (commit,) = hub.repos["me/policy"].commits[1:]
    assert commit.title.startswith("ppo of run [secret] after PPO update 4")
    assert "\x1b" not in export.stderr and "%|" not in export.stderr, "no bars off a terminal"
    uploaded = fetched(hub, tmp_path / "uploaded")
    assert canaries.leaks(uploaded, tmp_path / "policy/kept", tmp_path / "home") == []
    assert all((uploaded / path.name).read_bytes() == path.read_bytes() for path in Path("policy/kept").iterdir())
    (code,) = re.findall(r"```python\n(.*?)```", (uploaded / "README.md").read_text(), re.DOTALL)
    assert "rlhf_cli" not in code
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {}
    exec(code, names)
    assert torch.equal(names["model"](input_ids=torch.arange(2, 14)[None]).logits, logits(Path(secret) / "ppo/model"))
    assert f"GET /me/policy/resolve/{commit.oid}/model.safetensors" in hub.requests


def test_a_repository_is_public_only_with_the_option(run: Path, hub: Hub) -> None:
    assert "/me/policy (public), commit " in must_succeed(push(run, "--public", "--out", "out")).stdout
    assert not hub.repos["me/policy"].private
    assert "everyone could read the upload" in push(run).stderr
    assert push(run, "--public").stdout.count("unchanged since commit ") == 1


def test_weights_of_an_older_push_are_removed(run: Path, hub: Hub, tmp_path: Path) -> None:
    """A loader prefers one file to shards, adds adapters and uses any chat template. Other files stay."""
    mine = {"notes.txt": b"mine", "onnx/config.json": b"{}", "handler.py": b"pass\n"}
    old = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"old", "tokenizer_[old].json": b"old"}
    old |= {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}"}
    repo = hub.repos["me/policy"] = Repo(commits=[Commit("by hand", mine | old)])
    result = must_succeed(push(run))
    assert mine.keys() < repo.head.files.keys() and sorted(repo.head.deleted) == sorted(old)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("push     removed ")]
    assert sorted(line.rpartition(": ")[2].split(", ")) == sorted(old)
    assert torch.equal(logits(fetched(hub, tmp_path / "uploaded")), logits(run / "ppo/model"))


# Refusals before any work


@pytest.mark.parametrize(
    "name", ["policy", "me/my/policy", "me/policy.git", "me/a--b", "me/-a", "me/ü", "../x", "me/", ""]
)
def test_c05_invalid_names_of_repositories(run: Path, hub: Hub, name: str) -> None:
    result = rlhf("export", run, "--push", name)
    hint_of(result, "C05", f"--push {name}: ", exit_code=2)
    assert hub.requests == [] and result.stdout == ""


def test_access_is_checked_before_any_work(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_cli.models.load.load_unmerged", None)
    monkeypatch.setattr("rlhf_cli.models.hub.push", None)
    hub.repos |= {
        "me/public": Repo(private=False),
        "me/private": Repo(),
        "them/it": Repo(private=False, writable=False),
    }

    def check(code: str, *texts: str, repo: str = "me/policy", more: tuple[str, ...] = ()) -> None:
        result = rlhf("export", run, "--push", repo, *more)
        hint_of(result, code, *texts, exit_code=2)
        assert result.stdout == "" and hub.writes() == [] and not [*run.glob(".export*")]

    check("C17", "me/public is a public repository: everyone could read", "add --public", repo="me/public")
    check("C17", "--public would publish all of its", "/me/private/settings", repo="me/private", more=("--public",))
    check("E07", "the token has no write access to them/it", repo="them/it", more=("--public",))
    check("E07", "them/new does not exist, and the token of me cannot create it", "owners me, lab", repo="them/new")
    check("E07", "the token of me cannot create it", repo="readers/new")
    hub.role = "read"
    check("E07", "me/policy does not exist, and the token of me cannot create it", "write access")
    with monkeypatch.context() as patched:
        patched.setenv("HF_TOKEN", "hf_another")
        check("E07", "the hub rejects the token", "`hf auth login`")
        patched.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        check("C17", "HF_HUB_OFFLINE is set")
        patched.setattr("rlhf_cli.models.hub.get_token", lambda: None)
        check("C17", "pushing to me/policy needs a token of the hub", "`hf auth login`")
    hub.faults["whoami"] = 500
    check("E07", f"{hub.address} cannot be reached for me/policy", "500")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    check("E07", "http://127.0.0.1:9 cannot be reached", "refused")


def test_all_errors_are_reported_at_once(run: Path, hub: Hub) -> None:
    result = rlhf("export", run, "--push", "policy", "--step", "77", "--dtype", "f8")
    errors = [line[:10] for line in result.stderr.splitlines() if line.startswith("error")]
    assert errors == ["error[C07]", "error[C06]", "error[C05]"]
    assert "error[C11]: a folder or a repository is needed" in rlhf("export", run).stderr
    assert "error[C11]: --public belongs to --push" in rlhf("export", run, "--out", "out", "--public").stderr
    assert not Path("out").exists()


# Interrupted pushes


@pytest.mark.parametrize(
    ("fault", "status"),
    [("PUT /store/", 500), ("PUT /store/", 0), ("/commit/", 403), ("/commit/", 0), ("preupload", 503), ("create", 500)],
)  # fmt: skip
def test_r17_the_folder_is_complete_and_the_hint_resumes(run: Path, hub: Hub, fault: str, status: int) -> None:
    hub.faults[fault] = status
    hint = hint_of(push(run, "--out", "out"), "R17", "the push to me/policy failed, out is complete: ", exit_code=1)
    assert len(hub.repos.get("me/policy", Repo()).commits) == 1, "all files or none"
    assert hint == "resume with: hf upload me/policy out --private"
    assert torch.equal(logits(Path("out")), logits(run / "ppo/model"))


def test_the_command_of_the_hint_completes_the_push(run: Path, hub: Hub, tmp_path: Path) -> None:
    hub.repos["me/policy"] = Repo()
    hub.repos["me/policy"].commits.append(Commit("old", {"model-00001-of-00002.safetensors": b"old"}))
    hub.faults["/commit/"] = 403
    hint = hint_of(push(run), "R17", "the push to me/policy failed, first/.export is complete", exit_code=1)
    assert hint == "resume with: hf upload me/policy first/.export --private --delete model-00001-of-00002.safetensors"
    hub.faults.clear()
    command = ("-m", "huggingface_hub.cli.hf", *shlex.split(hint.partition("hf ")[2]))
    must_succeed(python(*command, env=os.environ | environment(hub, tmp_path / "cache")))
    files = hub.repos["me/policy"].head.files
    assert "model-00001-of-00002.safetensors" not in files and load(files["model.safetensors"])
    assert push(run).exit_code == 0 and not [*run.glob(".export*")]


def test_a_stopped_push_leaves_nothing_in_the_run(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **options: object) -> None:
        assert (run / ".export/model.safetensors").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf_cli.models.hub.push", stop)
    assert push(run).exit_code == 130
    assert not [*run.glob(".*export*"), *run.glob(".tmp*")]


def test_only_files_of_a_model_are_pushed(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    save = PreTrainedModel.save_pretrained

    def with_pickle(self: PreTrainedModel, folder: Path, **options: object) -> None:
        save(self, folder, **options)
        torch.save({"lr": 1.0}, Path(folder) / "training_args.bin")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", with_pickle)
    hint_of(push(run), "R17", "training_args.bin is not a file of a model: nothing was uploaded", exit_code=1)
    assert hub.writes() == []


# ppo.push_to_hub_if_best


def test_the_best_policy_is_pushed_each_time_it_is_beaten(run_folder: Path, hub: Hub) -> None:
    result = ppo(run_folder, *PUSH_BEST)
    assert result.exit_code == 0 and "R09" not in result.stderr, result.stderr
    repo = hub.repos["lab/policy"]
    titles = [commit.title for commit in repo.commits[1:]]
    assert repo.private and titles[0].startswith("Policy after 0 PPO updates, objective/scores - 0.05 * objective/kl")
    best = json.loads((run_folder / "ppo/manifest.json").read_text())["best"]["step"]
    assert titles[-1].startswith(f"Policy after {best} PPO updates")
    config = (run_folder / f"ppo/snapshots/step_{best:06d}/config.json").read_bytes()
    assert load(repo.head.files["model.safetensors"]) and repo.head.files["config.json"] == config
    assert "state.json" not in repo.head.files and TOKEN not in result.output


def test_r09_training_continues_if_the_hub_fails(run_folder: Path, hub: Hub) -> None:
    hub.faults["POST "] = 500
    result = ppo(run_folder, *PUSH_BEST)
    assert result.exit_code == 0 and (run_folder / "ppo/manifest.json").is_file(), result.stderr
    (warning,) = {line for line in result.stderr.splitlines() if line.startswith("warning[R09]")}
    assert "the push to lab/policy failed, " in warning and "/ppo/snapshots/step_000000 is complete: " in warning
    hints = [line for line in result.stderr.splitlines() if line.startswith("hint: resume with: ")]
    assert hints and all("hf upload lab/policy " in line for line in hints)
    assert all(line.endswith(" --private --exclude state.json") for line in hints)


def test_c17_without_a_token_nothing_is_trained(run_folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["lab/policy"] = Repo()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    result = ppo(run_folder, *PUSH_BEST)
    error = "error[C17]: --set ppo.push_to_hub_if_best: pushing to lab/policy needs the hub, and HF_HUB_OFFLINE is set"
    assert result.exit_code == 2 and error in result.stderr
    monkeypatch.setattr("rlhf_cli.models.hub.get_token", lambda: None)
    fails(ppo(run_folder, *PUSH_BEST), "C17", "error[C17]: --set ppo.push_to_hub_if_best: ", "hint: `hf auth login`")
    assert hub.requests == []
