"""Models to the hub. The token is the user's own: HF_TOKEN, or what `hf auth login` stored."""

from pathlib import Path

from huggingface_hub import HfApi, get_token

from rlhf_cli import processes, terminal
from rlhf_cli.errors import RLHFError, shown


def require_token(repo: str, where: str) -> None:
    """Raises RLHFError C17 where there is no token to write `repo` with: better now than after the training."""
    if get_token() is None:
        text = f"pushing to {repo} needs a token of the hub"
        raise RLHFError("C17", text, where=where, hint="`hf auth login`, or HF_TOKEN in the environment")


def push(folder: Path, repo: str, message: str) -> None:
    """Put a model's folder into `repo` OWNER/NAME, made private where it is new. Warns R09 where that fails.

    Of several processes the first one does it.
    """
    if not processes.is_first():
        return
    hub = HfApi()
    try:
        hub.create_repo(repo, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, ignore_patterns=["state.json"])
    except Exception as error:  # a network has many ways to fail, and none may end a training
        text = f"{shown(folder)} was not pushed to {repo}: {' '.join(str(error).split())[:200]}"
        terminal.warn("R09", text, hint=f"it stays here; hf upload {repo} {shown(folder)}")
