"""Upload models to the Hugging Face Hub, with the user's token: HF_TOKEN, or the one that `hf auth login` stored."""

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import (
    disable_progress_bars,
    enable_progress_bars,
    filter_repo_objects,
    logging,
    validate_repo_id,
)

from rlhf_cli import distributed, terminal
from rlhf_cli.data.sources import is_offline
from rlhf_cli.errors import RLHFError, shell_path, shell_word, short_reason, shown
from rlhf_cli.files import list_files
from rlhf_cli.runs.model_files import MODEL_SUFFIXES

CARD = "README.md"
LOCAL_FILES = ("state.json",)  # a snapshot's checksum file, useful only in its run
# Files that from_pretrained() reads. One that an older upload left would be combined with the new files or replace
# them: a single weights file takes precedence over shards, and an adapter is added to both.
LOADED_FILES = (
    "model*.safetensors", "model*.safetensors.index.json", "shard-*.safetensors", "pytorch_model*.bin",
    "pytorch_model.bin.index.json", "adapter_config.json", "adapter_model.*", "config.json", "generation_config.json",
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
)  # fmt: skip
LOGIN = "`hf auth login`, or HF_TOKEN in the environment"


@dataclass(frozen=True)
class PushResult:
    """Result of a push."""

    url: str  # of the repository
    private: bool
    commit: str
    changed: bool  # False if the repository had the same files before
    removed: tuple[str, ...]  # files of an older upload


def require_token(repo: str, where: str | None = None) -> None:
    """Raise RLHFError C17 if `repo` cannot be written: there is no token, or HF_HUB_OFFLINE is set."""
    if get_token() is None:
        raise RLHFError("C17", f"pushing to {repo} needs a token of the hub", where=where, hint=LOGIN)
    if is_offline():
        text = f"pushing to {repo} needs the hub, and HF_HUB_OFFLINE is set"
        raise RLHFError("C17", text, where=where, hint="unset HF_HUB_OFFLINE")


def require_access(repo: str, *, public: bool) -> None:
    """Check that `repo` can be pushed to, before any work and without creating it.

    Raises RLHFError C05 if it is not OWNER/NAME; C17 as `require_token`, and if an existing repository's visibility
    differs from `public`; E07 if the Hub cannot be reached, or the token has no write access.
    """
    try:
        validate_repo_id(repo)
        problem = None if "/" in repo else "the owner is missing"
    except HFValidationError as error:
        problem = str(error).partition(":")[0].rstrip(".")
    if problem:
        raise RLHFError("C05", f"--push {repo}: {problem}", hint="OWNER/NAME, of letters, digits, -, _ and .")
    require_token(repo)
    hub = HfApi()
    try:
        user = hub.whoami()
        try:
            private: bool | None = bool(hub.model_info(repo).private)
            hub.auth_check(repo, write=True)
        except RepositoryNotFoundError:  # or one that this token cannot read
            private = None
    except Exception as error:  # HTTP and network libraries have different exceptions
        raise _access_error(repo, error) from error
    if private is None:
        _require_namespace(repo, user)
    elif private and public:
        text = f"{repo} is a private repository: --public would publish all of its history"
        raise RLHFError("C17", text, hint=f"remove --public; or make it public at {hub.endpoint}/{repo}/settings")
    elif not private and not public:
        text = f"{repo} is a public repository: everyone could read the upload"
        raise RLHFError("C17", text, hint="add --public if you want that, or name another repository")


def _require_namespace(repo: str, user: dict[str, Any]) -> None:
    """Raise RLHFError E07 if the token cannot create repositories of this owner, as far as the Hub's answer shows."""
    owners = [str(user.get("name"))]
    for organization in user.get("orgs", []):
        if organization.get("roleInOrg") != "read":
            owners.append(str(organization.get("name")))

    token = user.get("auth", {}).get("accessToken", {})
    owner, _, _ = repo.partition("/")
    is_owner = owner.casefold() in map(str.casefold, owners)
    if token.get("role") == "read" or not is_owner:
        text = f"{repo} does not exist, and the token of {owners[0]} cannot create it"
        raise RLHFError("E07", text, hint=f"use a token with write access, and one of the owners {', '.join(owners)}")


def _access_error(repo: str, error: Exception) -> RLHFError:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        return RLHFError("E07", f"the hub rejects the token for {repo}", hint=LOGIN)
    if status == 403:
        hint = "use a token with write access, or name a repository of yours"
        return RLHFError("E07", f"the token has no write access to {repo}", hint=hint)
    text = f"{HfApi().endpoint} cannot be reached for {repo}: {short_reason(error)}"
    return RLHFError("E07", text, hint="remove --push; `hf upload` can upload later")


def push(folder: Path, repo: str, message: str, *, public: bool = False, bars: bool = False) -> PushResult:
    """Upload a model's folder to `repo` OWNER/NAME in one commit; a new repository is private unless `public`.

    The same commit deletes files of the repository that loading would read and the folder does not have. All other
    files and older commits stay. Raises RLHFError R17.
    """
    names = [name for name in list_files(folder) if name not in LOCAL_FILES]
    unknown = [name for name in names if name != CARD and Path(name).suffix not in MODEL_SUFFIXES]
    if unknown:  # such as a pickle: `save.save_model` does not write it
        text = f"{shown(folder / unknown[0])} is not a file of a model: nothing was uploaded"
        raise RLHFError("R17", text, hint="remove it; only safetensors, JSON and text files are uploaded")
    hub = HfApi()
    removed: list[str] = []
    try:
        if not terminal.has_mode("verbose"):
            logging.set_verbosity_error()
        set_progress_bars = enable_progress_bars if bars else disable_progress_bars
        set_progress_bars()
        with warnings.catch_warnings(action="ignore"):
            hub.create_repo(repo, private=not public, exist_ok=True)
            before = hub.model_info(repo)
            existing = [file.rfilename for file in before.siblings or [] if "/" not in file.rfilename]
            loaded = filter_repo_objects(existing, allow_patterns=[*LOADED_FILES])
            removed = [name for name in loaded if name not in names]
            operations: list[Any] = [CommitOperationAdd(name, folder / name) for name in names]
            operations += [CommitOperationDelete(name) for name in removed]
            text = terminal.clean(message)
            # The hub refuses it if another process has pushed since.
            commit = hub.create_commit(repo, operations, commit_message=text, parent_commit=before.sha).oid
    except Exception as error:  # a network has many ways to fail
        text = f"the push to {repo} failed, {shown(folder)} is complete: {short_reason(error)}"
        raise RLHFError("R17", text, hint=f"resume with: {_upload_command(folder, repo, public, removed)}") from error
    return PushResult(f"{hub.endpoint}/{repo}", bool(before.private), commit, commit != before.sha, tuple(removed))


def push_best(folder: Path, repo: str, message: str) -> None:
    """Push from the main process during training; a failure is the warning R09, and training continues."""
    if not distributed.is_main_process():
        return
    try:
        push(folder, repo, message)
    except RLHFError as error:
        terminal.warn("R09", error.problems[0].text, hint=error.problems[0].hint)


def _upload_command(folder: Path, repo: str, public: bool, removed: Collection[str]) -> str:
    """Return the `hf` command that repeats a push; without --private `hf` creates a public repository."""
    command = ["hf upload", shell_word(repo), shell_path(folder)]
    if not public:
        command.append("--private")
    for name in LOCAL_FILES:
        if (folder / name).exists():
            command.append(f"--exclude {name}")
    for name in removed:
        command.append(f"--delete {shell_word(name)}")
    return " ".join(command)
