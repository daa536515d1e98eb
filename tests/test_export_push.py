"""`rlhf export --push` against a hub on this machine: what goes there, what is refused before, what breaks off."""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import canaries
import huggingface_hub.constants
import ppo_folder
import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import are_progress_bars_disabled
from ppo_folder import rlhf
from safetensors.torch import load
from stand_in_pushes import TOKEN, Commit, Hub, Repo, environment, serving, use
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import Result

from rlhf_cli import __version__, terminal

pytestmark = pytest.mark.training
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/me/policy")


@pytest.fixture(scope="module")
def trained(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a PPO run in `first`, of whole models that no stage of ours made. Not to be changed."""
    folder = shutil.copytree(origin, tmp_path_factory.mktemp("push") / "made")
    ppo_folder.write(folder, "ppo", ppo_folder.PPO | {"run": "first"})
    result = ppo_folder.ppo(folder)
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, beside which the test stands."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained / "first", tmp_path / "first").relative_to(tmp_path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    with serving() as found:
        use(found, monkeypatch)
        yield found


def push(run: Path, *arguments: object) -> Result:
    return rlhf("export", run, "--push", "me/policy", *arguments)


def fetched(hub: Hub, to: Path) -> Path:
    """The files of the repository as a folder."""
    for name, content in hub.repos["me/policy"].head.files.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(content)
    return to


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    """What a loader makes of a folder, whichever of the weights in it it takes."""
    ids = torch.arange(2, 14)[None]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits


def failed(result: Result, code: str, *says: str, exit_code: int) -> str:
    """The hint of an error that is one line and a hint."""
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error[", "hint: ", "warning["))]
    assert lines[0].startswith(f"error[{code}]: ") and lines[1].startswith("hint: ") and len(lines) == 2, result.stderr
    assert all(text in result.stderr for text in says), result.stderr
    assert result.exit_code == exit_code and "Traceback" not in result.stderr and TOKEN not in result.output
    return lines[1].removeprefix("hint: ")


# What is there afterwards


def test_a_push_is_one_commit_to_a_private_repository_and_nothing_stays_here(run: Path, hub: Hub) -> None:
    result = push(run)
    assert result.exit_code == 0, result.stderr
    repo = hub.repos["me/policy"]
    assert repo.private and [commit.title for commit in repo.commits[1:]] == [
        f"ppo of run first after PPO update 4, exported by rlhf-cli {__version__}"
    ]
    sent = set(repo.head.files) - {".gitattributes"}
    assert sent == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert not any(canaries.is_pickle(content) for content in repo.head.files.values())
    last = result.stdout.splitlines()[-1]
    said = f"push     {hub.address}/me/policy (private), commit {repo.head.oid[:12]}; file hashes verified"
    assert last.startswith(said) and TOKEN not in result.output
    assert not [*run.glob(".export*"), *Path().glob("policy*")] and ".export" not in result.output
    own = load((run / "ppo/model/model.safetensors").read_bytes())
    there = load(repo.head.files["model.safetensors"])
    assert own.keys() == there.keys() and all(torch.equal(own[name], there[name]) for name in own)
    assert 'from_pretrained("me/policy")' in repo.head.files["README.md"].decode()


def test_what_was_pushed_loads_from_the_hub_by_the_cards_own_code(run: Path, hub: Hub, monkeypatch, tmp_path) -> None:
    """The command, in a process full of secrets and in a folder that is named like one; then who follows the card."""
    secret = canaries.SECRETS["HUB_TOKEN"]
    hub.token = canaries.SECRETS["HF_TOKEN"]
    shutil.move(run, secret)
    for name, value in environment(hub, tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "policy").mkdir()
    command = ("-m", "rlhf_cli", "export", secret, "--push", "me/policy", "--out", "policy/kept")
    done = canaries.run(tmp_path / "home", *command)
    assert done.returncode == 0, done.stderr
    (commit,) = hub.repos["me/policy"].commits[1:]
    assert commit.title.startswith("ppo of run [secret] after PPO update 4")
    assert "\x1b" not in done.stderr and "%|" not in done.stderr, "no bars off a terminal"
    there = fetched(hub, tmp_path / "there")
    assert canaries.leaks(there, tmp_path / "policy/kept", tmp_path / "home") == []
    assert all((there / path.name).read_bytes() == path.read_bytes() for path in (tmp_path / "policy/kept").iterdir())
    (code,) = re.findall(r"```python\n(.*?)```", (there / "README.md").read_text(), re.DOTALL)
    code += "import sys; assert not [name for name in sys.modules if name.startswith('rlhf_cli')]\n"
    code += "import torch; torch.save(model(input_ids=torch.arange(2, 14)[None]).logits.detach(), 'logits.pt')\n"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean["HF_TOKEN"] = hub.token
    loaded = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert torch.equal(torch.load("logits.pt"), logits(Path(secret) / "ppo/model"))
    assert f"GET /me/policy/resolve/{commit.oid}/model.safetensors" in hub.asked


def test_public_is_what_was_asked_for(run: Path, hub: Hub) -> None:
    result = push(run, "--public", "--out", "out")
    assert result.exit_code == 0 and "/me/policy (public), commit " in result.stdout
    assert not hub.repos["me/policy"].private
    shutil.rmtree("out")
    assert "all can see what is pushed" in push(run).stderr
    assert push(run, "--public").stdout.count("unchanged since commit ") == 1


def test_pushed_again_all_that_changed_is_told(run: Path, hub: Hub) -> None:
    assert push(run).exit_code == 0
    again = push(run)
    assert again.exit_code == 0 and ", unchanged since commit " in again.stdout, again.stderr
    assert len(hub.repos["me/policy"].commits) == 2 and again.stderr.count("No files have been modified") == 0
    other = push(run, "--step", "2")
    assert ", commit " in other.stdout and hub.repos["me/policy"].head.title.startswith(
        "ppo of run first after PPO update 2"
    )
    changed = {name for name, content in hub.repos["me/policy"].head.files.items()
               if hub.repos["me/policy"].commits[1].files[name] != content}  # fmt: skip
    assert changed == {"README.md", "model.safetensors"}


@pytest.mark.parametrize("first", ["in parts", "in one file"])
def test_no_weights_of_an_older_push_are_taken_for_the_new_ones(
    run: Path, hub: Hub, first: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One file goes before parts, whoever was there first; adapters would be put on top, a template be used."""
    in_parts = functools.partialmethod(PreTrainedModel.save_pretrained, max_shard_size="20KB")
    with monkeypatch.context() as patched:
        if first == "in parts":
            patched.setattr(PreTrainedModel, "save_pretrained", in_parts)
        assert push(run, "--step", "2").exit_code == 0
    repo, mine = hub.repos["me/policy"], {"notes.txt": b"mine", "onnx/config.json": b"{}", "handler.py": b"pass\n"}
    left = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"old", "tokenizer_[old].json": b"old"}
    repo.commits.append(Commit("by hand", repo.head.files | mine | left))
    before = set(repo.head.files)
    if first == "in one file":
        monkeypatch.setattr(PreTrainedModel, "save_pretrained", in_parts)
    result = push(run)
    assert result.exit_code == 0, result.stderr
    files = repo.head.files
    assert mine.keys() < files.keys() and not left.keys() & files.keys()
    weights = {name for name in files if name.endswith(".safetensors")}
    assert (weights == {"model.safetensors"}) == (first == "in parts") and (
        "model.safetensors.index.json" in files
    ) == (first == "in one file")
    gone = sorted(before - set(files))
    assert sorted(repo.head.deleted) == gone and left.keys() <= set(gone)
    (said,) = [line for line in result.stdout.splitlines() if line.startswith("push     removed ")]
    assert sorted(said.rpartition(": ")[2].split(", ")) == gone
    assert torch.equal(logits(fetched(hub, tmp_path / "there")), logits(run / "ppo/model"))


@pytest.mark.parametrize("seen", [True, False])
def test_the_clients_bars_are_for_a_terminal(run: Path, hub: Hub, seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, upload, before = [], HfApi.upload_folder, are_progress_bars_disabled()

    def looked_at(*args: object, **how: object) -> object:
        drawn.append(not are_progress_bars_disabled())
        return upload(*args, **how)

    monkeypatch.setattr(HfApi, "upload_folder", looked_at)
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: seen)
    result = push(run)
    assert result.exit_code == 0 and drawn == [seen] and ("%|" in result.stderr) <= seen, result.stderr
    assert are_progress_bars_disabled() == before


# What is refused before any work


@pytest.mark.parametrize(
    "name", ["policy", "me/my/policy", "me/policy.git", "me/a--b", "me/-a", "me/ü", "../x", "me/", ""]
)
def test_c05_names_that_the_hub_would_not_take(run: Path, hub: Hub, name: str) -> None:
    result = rlhf("export", run, "--push", name)
    failed(result, "C05", f"--push {name}: ", exit_code=2)
    assert hub.asked == [] and result.stdout == ""


def test_what_is_refused_before_any_work(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **how: object) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr("rlhf_cli.models.load.load_unmerged", never)
    monkeypatch.setattr("rlhf_cli.models.hub.push", never)

    def refused(code: str, *says: str, repo: str = "me/policy", more: tuple[str, ...] = ()) -> None:
        result = rlhf("export", run, "--push", repo, *more)
        failed(result, code, *says, exit_code=2)
        assert result.stdout == "" and hub.writes() == [] and not [*run.glob(".export*")]

    hub.repos |= {
        "me/public": Repo(private=False),
        "me/private": Repo(),
        "them/policy": Repo(private=False, ours=False),
    }
    refused("C17", "me/public is there, and public: all can see", "add --public", repo="me/public")
    refused("C17", "--public would show all", "/me/private/settings", repo="me/private", more=("--public",))
    refused("E07", "the token may not write them/policy", repo="them/policy", more=("--public",))
    refused("E07", "them/new is not there, and me cannot make it: them is neither me nor lab", repo="them/new")
    refused("E07", "readers is neither me nor lab", "--push me/new", repo="readers/new")
    hub.role = "read"
    refused("E07", "the token of me may read alone")
    with monkeypatch.context() as patched:
        patched.setenv("HF_TOKEN", "hf_another")
        refused("E07", "the hub does not take the token", "`hf auth login`")
        patched.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        refused("C17", "HF_HUB_OFFLINE is set")
        patched.setattr("rlhf_cli.models.hub.get_token", lambda: None)
        refused("C17", "pushing to me/policy needs a token of the hub", "`hf auth login`")
    hub.faults["whoami"] = 500
    refused("E07", f"{hub.address} cannot be asked about me/policy", "500")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("E07", "http://127.0.0.1:9 cannot be asked", "refused")


def test_all_that_is_wrong_is_told_at_once(run: Path, hub: Hub) -> None:
    result = rlhf("export", run, "--push", "policy", "--step", "77", "--dtype", "f8")
    assert [line[:10] for line in result.stderr.splitlines() if line.startswith("error")] == [
        "error[C07]", "error[C06]", "error[C05]",
    ]  # fmt: skip
    assert "error[C11]: a folder or a repository is needed" in rlhf("export", run).stderr
    assert "error[C11]: --public belongs to --push" in rlhf("export", run, "--out", "out", "--public").stderr
    assert not Path("out").exists()


# What breaks on the way


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("PUT /store/", 500),
        ("PUT /store/", 0),
        ("/commit/", 403),
        ("/commit/", 0),
        ("/preupload/", 503),
        ("create", 500),
    ],
)
def test_r17_the_folder_is_whole_and_the_hint_goes_on(
    run: Path, hub: Hub, fault: str, status: int, tmp_path: Path
) -> None:
    hub.faults[fault] = status
    hint = failed(push(run, "--out", "out"), "R17", "the push to me/policy failed, out is whole: ", exit_code=1)
    repo = hub.repos.get("me/policy", Repo())
    assert len(repo.commits) == 1, "there is all of it, or nothing"
    assert hint == "go on with: hf upload me/policy out --private"
    assert torch.equal(logits(Path("out")), logits(run / "ppo/model"))


def test_the_command_of_the_hint_does_it(run: Path, hub: Hub, tmp_path: Path) -> None:
    hub.repos["me/policy"] = Repo()
    hub.repos["me/policy"].commits.append(Commit("old", {"model-00001-of-00002.safetensors": b"old"}))
    hub.faults["/commit/"] = 403
    hint = failed(push(run), "R17", "the push to me/policy failed, first/.export is whole", exit_code=1)
    assert hint == "go on with: hf upload me/policy first/.export --private --delete model-00001-of-00002.safetensors"
    hub.faults.clear()
    command = [sys.executable, "-m", "huggingface_hub.cli.hf", *shlex.split(hint.partition("hf ")[2])]
    done = subprocess.run(
        command, env=os.environ | environment(hub, tmp_path / "cache"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    files = hub.repos["me/policy"].head.files
    assert "model-00001-of-00002.safetensors" not in files and load(files["model.safetensors"])
    assert push(run).exit_code == 0 and not [*run.glob(".export*")], "what was left of the last time is in nobody's way"


def test_what_arrives_otherwise_than_it_was_sent_is_told(run: Path, hub: Hub) -> None:
    for name in ("model.safetensors", "config.json"):
        hub.lose = name
        failed(push(run), "R17", f"{name} has another content there than here", exit_code=1)
        hub.repos.clear()
    hub.beside = "model-00001-of-00002.safetensors"
    failed(push(run), "R17", "model-00001-of-00002.safetensors of another upload is there too", exit_code=1)


def test_a_push_that_is_stopped_leaves_nothing_in_the_run(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: object, **how: object) -> None:
        assert (run / ".export/model.safetensors").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf_cli.models.hub.push", stopped)
    assert push(run).exit_code == 130
    assert not [*run.glob(".*export*"), *run.glob(".tmp*")]


def test_what_is_no_part_of_a_model_is_not_sent(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    save = PreTrainedModel.save_pretrained

    def with_more(self: PreTrainedModel, folder: Path, **how: object) -> None:
        save(self, folder, **how)
        torch.save({"lr": 1.0}, Path(folder) / "training_args.bin")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", with_more)
    failed(push(run), "R17", "training_args.bin is no file of a model: nothing was sent", exit_code=1)
    assert hub.writes() == []
