"""What the tests of bad inputs share: the real CLI, and the form that its refusals and warnings have."""

from pathlib import Path
from typing import Any

import run_cli
from typer.testing import Result


def rlhf(stage: str, *arguments: str) -> Result:
    return run_cli.rlhf(stage, *(() if "-c" in arguments else ("-c", f"{stage}.yaml")), *arguments)


def refused(result: Result, code: str, place: str, *says: str, exit_code: int = 2) -> bool:
    """The message in its form: `error[CODE]: PLACE: ...`, a hint at most, no traceback, nothing on stdout."""
    progress = ("sft  ", "reward  ", "ppo  ", "data  ")
    first = next(line for line in result.stderr.splitlines() if not line.startswith(progress))
    assert first.startswith(f"error[{code}]: {place}"), result.stderr
    assert all(text in result.stderr for text in says), result.stderr
    assert (result.exit_code, result.stdout) == (exit_code, "") and "Traceback" not in result.stderr
    return True


def replace(path: str, old: str, new: str) -> None:
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def check(*arguments: str) -> Result:
    """`rlhf check`, by default of the folder."""
    return run_cli.rlhf("check", *(arguments or ["."]))


def warned(result: Result, code: str, place: str, *says: str) -> bool:
    """A warning in its form, and the command went on to its end."""
    lines = [line for line in result.stderr.splitlines() if line.startswith(f"warning[{code}]: {place}")]
    assert lines and all(text in result.stderr for text in says), result.stderr
    assert result.exit_code == 0 and "Traceback" not in result.stderr, result.stderr
    return True


def foreign_scorer(folder: Path, **changes: Any) -> None:
    """scorer/: a one-label classifier on the base model, as made by other software."""
    import torch

    from rlhf_cli.models import load, save, tokenizers

    torch.manual_seed(0)
    model = load.init_reward_model(folder / "model")
    for name, value in changes.items():
        setattr(model.config, name, value)
    save.save_model(model, tokenizers.load_tokenizer(folder / "model"), folder / "scorer", "A scorer.")
