"""Models to the hub. The token is the user's own: HF_TOKEN, or what `hf auth login` stored."""

import glob
import hashlib
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    logging,
    validate_repo_id,
)

from rlhf_cli import processes, terminal
from rlhf_cli.checkpoints.files import file_sha256, names_in
from rlhf_cli.checkpoints.parents import MODEL_SUFFIXES
from rlhf_cli.errors import RLHFError, quoted, shown, word
from rlhf_cli.sources.hub import is_offline

CARD = "README.md"
OURS = ("state.json",)  # the seal of a snapshot, of use beside its run alone
# What is read of a repository by whoever loads its model. One of an older upload that the new one has not would be
# taken together with the new files, or in their place: one file of weights goes before parts, adapters on top of both.
READ = (
    "model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json",
    "adapter_config.json", "adapter_model.*", "config.json", "generation_config.json", "tokenizer*", "vocab.*",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
)  # fmt: skip
NO_TOKEN = "`hf auth login`, or HF_TOKEN in the environment"


@dataclass(frozen=True)
class Pushed:
    """What came of a push."""

    address: str  # of the repository
    private: bool
    commit: str
    changed: bool  # False: all of it was there already
    removed: tuple[str, ...]  # files of an older upload


def require_token(repo: str, where: str | None = None) -> None:
    """Raises RLHFError C17 where `repo` cannot be written: no token, or a hub that may not be asked."""
    text = f"pushing to {repo} needs "
    if get_token() is None:
        raise RLHFError("C17", f"{text}a token of the hub", where=where, hint=NO_TOKEN)
    if is_offline():
        raise RLHFError("C17", f"{text}the hub, and HF_HUB_OFFLINE is set", where=where, hint="unset HF_HUB_OFFLINE")


def require_access(repo: str, *, public: bool) -> None:
    """Ask the hub whether `repo` can be pushed to, before any work. Nothing is made there.

    Raises RLHFError C05 for what is no OWNER/NAME; C17 as `require_token`, and where the repository is there and not as
    private, or as public, as is asked for; E07 where the hub cannot be asked, or does not let this token write.
    """
    _require_name(repo)
    require_token(repo)
    hub = HfApi()
    try:
        me = hub.whoami()
        found = _found(hub, repo)
        if found:
            hub.auth_check(repo, write=True)
    except Exception as error:  # of HTTP, of the network: each library has classes of its own
        raise _refused(repo, error) from error
    if found is None:
        _require_namespace(repo, me)
    elif bool(found.private) == public:
        raise _seen_by_others(repo, public)


def push(folder: Path, repo: str, message: str, *, public: bool = False, bars: bool = False) -> Pushed:
    """Put a model's folder into `repo` OWNER/NAME in one commit, made private unless `public` where it is new.

    What is read of a model there and is not in the folder is removed by the same commit; all else stays, as does all
    that older commits hold. Then each file there is held against the one here, by its hash. Raises RLHFError R17.
    """
    names = [name for name in names_in(folder) if name not in OURS]
    _require_plain(folder, names)
    hub, removed = HfApi(), list[str]()
    try:
        with _client(bars):
            hub.create_repo(repo, private=not public, exist_ok=True)
            before = hub.model_info(repo)
            there = [file.rfilename for file in before.siblings or []]
            removed = [name for name in there if name not in names and _is_read(name)]
            commit = hub.upload_folder(
                repo_id=repo,
                folder_path=folder,
                commit_message=terminal.clean(message),
                allow_patterns=[glob.escape(name) for name in names],
                delete_patterns=[glob.escape(name) for name in removed] or None,
            ).oid
            _require_same(hub.model_info(repo, revision=commit, files_metadata=True).siblings or [], folder, names)
    except Exception as error:  # a network has many ways to fail
        text = f"the push to {repo} failed, {shown(folder)} is whole: {_said(error)}"
        raise RLHFError("R17", text, hint=f"go on with: {_by_hand(folder, repo, public, removed)}") from error
    private = bool(before.private)
    return Pushed(f"{hub.endpoint}/{repo}", private, commit, commit != before.sha, tuple(removed))


def push_best(folder: Path, repo: str, message: str) -> None:
    """`push` within a training, which goes on whatever becomes of it: warns R09.

    Of several processes the first one does it.
    """
    if not processes.is_first():
        return
    try:
        push(folder, repo, message)
    except RLHFError as error:
        terminal.warn("R09", error.problems[0].text, hint=error.problems[0].hint)


def _require_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
        fault = None if "/" in repo else "it names no owner"
    except HFValidationError as error:
        fault = str(error).partition(":")[0].rstrip(".")
    if fault:
        raise RLHFError("C05", f"--push {repo}: {fault}", hint="OWNER/NAME, of letters, digits, -, _ and .")


def _found(hub: HfApi, repo: str) -> Any:
    """What the hub tells of a repository; None where there is none that this token can see."""
    try:
        return hub.model_info(repo)
    except RepositoryNotFoundError:
        return None


def _require_namespace(repo: str, me: Mapping[str, Any]) -> None:
    """Raises RLHFError E07 where nothing new may be made under this owner, as far as the hub tells that beforehand."""
    owner, name = repo.split("/")[0], str(me.get("name"))
    role = me.get("auth", {}).get("accessToken", {}).get("role")
    groups = [group for group in me.get("orgs", []) if group.get("roleInOrg") != "read"]
    mine = [name, *(str(group.get("name")) for group in groups)]
    if role == "read":
        raise RLHFError(
            "E07", f"the token of {name} may read alone, and not make {repo}", hint="take one that may write"
        )
    if owner.casefold() not in map(str.casefold, mine):
        text = f"{repo} is not there, and {name} cannot make it: {owner} is neither {' nor '.join(mine)}"
        raise RLHFError("E07", text, hint=f"--push {name}/{repo.split('/')[1]}")


def _seen_by_others(repo: str, public: bool) -> RLHFError:
    settings = f"{HfApi().endpoint}/{repo}/settings"
    if public:
        text = f"{repo} is there, and private: --public would show all that it has ever held"
        return RLHFError("C17", text, hint=f"leave --public out; or make it public at {settings}")
    text = f"{repo} is there, and public: all can see what is pushed to it"
    return RLHFError("C17", text, hint="add --public if that is meant; or name another repository")


def _refused(repo: str, error: Exception) -> RLHFError:
    """Why the hub lets nobody push, in a line."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        return RLHFError("E07", f"the hub does not take the token that is to write {repo}", hint=NO_TOKEN)
    if status == 403:
        return RLHFError(
            "E07", f"the token may not write {repo}", hint="take one that may, or name a repository of yours"
        )
    text = f"{HfApi().endpoint} cannot be asked about {repo}: {_said(error)}"
    return RLHFError("E07", text, hint="leave --push out; `hf upload` does it later")


def _require_plain(folder: Path, names: Collection[str]) -> None:
    """Raises RLHFError R17 for a file that is no part of a model as we write it: no pickle ever leaves."""
    odd = [name for name in names if name != CARD and Path(name).suffix not in MODEL_SUFFIXES]
    if odd:
        text = f"{shown(folder / odd[0])} is no file of a model: nothing was sent"
        raise RLHFError("R17", text, hint="look where it comes from; what is sent is safetensors, JSON and text alone")


def _is_read(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in READ) and "/" not in name


def _require_same(there: Collection[Any], folder: Path, names: Collection[str]) -> None:
    """Raises ValueError where a file of the hub is not that of the folder, or is read with those that are."""
    found = {file.rfilename: file for file in there}
    if other := [name for name in found if name not in names and _is_read(name)]:
        raise ValueError(f"{other[0]} of another upload is there too")
    for name in names:
        content, told = folder / name, found.get(name)
        if told is None:
            raise ValueError(f"the hub does not list {name}")
        if told.lfs is not None:
            same = told.lfs.sha256 == file_sha256(content)
        else:  # git's own hash of a file
            own = content.read_bytes()
            same = told.blob_id == hashlib.sha1(b"blob %d\0" % len(own) + own).hexdigest()
        if not same:
            raise ValueError(f"{name} has another content there than here")


def _by_hand(folder: Path, repo: str, public: bool, removed: Collection[str]) -> str:
    """The command that goes on with a push: `hf` makes what is new public unless it is told."""
    command = ["hf", "upload", word(repo), quoted(folder), *([] if public else ["--private"])]
    command += [part for name in OURS if (folder / name).exists() for part in ("--exclude", name)]
    return " ".join([*command, *(part for name in removed for part in ("--delete", word(name)))])


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def _client(bars: bool) -> Iterator[None]:
    """Within, the hub's client draws its bars, or none, and says nothing else: what fails is raised."""
    level, off = logging.get_verbosity(), are_progress_bars_disabled()
    with warnings.catch_warnings(action="ignore"):
        logging.set_verbosity_error()
        (enable_progress_bars if bars else disable_progress_bars)()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            (disable_progress_bars if off else enable_progress_bars)()
