"""`rlhf export RUN --out DIR --push OWNER/NAME`: a model of a run as a plain Hugging Face folder, which needs nothing
else of the run, on this machine or on the hub.

Adapters are added into their base's weights, in full precision. What was written is loaded again as anybody would, and
held against the run's own model, before it takes its place.
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rlhf_cli import __version__, checkpoints, room, terminal
from rlhf_cli.checkpoints import LAST, Chosen, Parent, shown
from rlhf_cli.config import Options
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError, all_of, nearest
from rlhf_cli.export import card, sameness
from rlhf_cli.inputs import machine
from rlhf_cli.models import hub, load, lora, save, tokenizers
from rlhf_cli.progress import Progress

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HERE = "."  # what the card of a folder calls it: its code is run there


@dataclass(frozen=True)
class Repository:
    """Where on the hub a model goes."""

    name: str  # OWNER/NAME
    public: bool


def run(
    folder: Path,
    out: Path | None,
    options: Options,
    *,
    stage: str | None = None,
    step: str = LAST,
    dtype: str | None = None,
    to: Repository | None = None,
    show_prompt: bool = False,
) -> None:
    """Export, push where there is a repository to push `to`, and say what was done.

    The folder holds no path of this machine and no pickle; without `out` it lies in the run, until it is pushed. Only
    with `show_prompt` its card holds a text of the run's data, a held-out prompt.
    Raises RLHFError as `checkpoints.choose` does for the model; C07 for an unknown `dtype`; C15 where `out` is not
    empty, or another process is writing it; E03 where there is no room; M12 where what was written gives other logits
    or tokens; M01, M07, M08 for a model that cannot be loaded; C05, C17 and E07 where the repository cannot be pushed
    to, before any work; R17 where the push fails.
    """
    chosen = list[Chosen]()
    all_of(
        partial(_check_format, dtype),
        *([partial(checkpoints.require_free, out.resolve())] if out else []),
        lambda: chosen.append(checkpoints.choose(folder, stage, step)),
        *([partial(hub.require_access, to.name, public=to.public)] if to else []),
    )
    (found,) = chosen
    example = card.held_out(found) if show_prompt else None
    passing = checkpoints.passing_folder(found.model.path.resolve().parent)
    with nullcontext(out.resolve()) if out else passing as target:
        what, same = _write(found, target, options, dtype, to, example)
        terminal.out(f"export   {what}" + (f": {shown(out)}" if out else ""))
        terminal.out(f"export   {same}")
        if to:
            _push(found, target, to)


def _write(
    found: Chosen,
    target: Path,
    options: Options,
    dtype: str | None,
    to: Repository | None,
    example: str | Conversation | None,
) -> tuple[str, str]:
    """Make the folder, held against the run's own model; returns what it is, and how it was checked, in words."""
    source = found.model.model
    with Progress("export", 4, "part") as bar:
        kept = load.read_config(source, options.trust_remote_code).dtype or torch.float32
        written = FORMATS[dtype] if dtype else kept
        _check_room(found.model, target, written)
        tokenizer = tokenizers.load_tokenizer(source, trust_remote_code=options.trust_remote_code)
        model = load.load_unmerged(source, trust_remote_code=options.trust_remote_code).eval()
        bar.advance(note="loaded")
        rows = sameness.rows_of(found.model, tokenizer, lora.unwrap(model).config)
        own = sameness.logits(lora.unwrap(model), rows)
        bar.advance(note="the run's own logits")
        model = lora.merge_and_unload(model).to(written)
        run_name = found.model.path.resolve().parent.name
        name, address = (to.name.partition("/")[2], to.name) if to else (f"{run_name}-{found.model.stage}", HERE)
        about = card.subject(found, model, tokenizer, _named(written), name, address, example)
        numbers = model.num_parameters()
        with checkpoints.new_folder(target) as scratch:
            save.save_model(model, tokenizer, scratch, card.write(about))
            for path in scratch.glob("*.safetensors"):  # safetensors lets nobody else read them
                path.chmod((scratch / "README.md").stat().st_mode)
            del model, about  # the folder's is loaded in its place
            bar.advance(note="written")
            difference = sameness.require(scratch, rows, own, written, tokenizer, options.trust_remote_code)
            bar.advance(note="loaded again")
    merged = " with its adapters merged" if found.model.base else ""
    alike = f"to {difference:.1e} of the largest" if difference else "to the last bit"
    return (
        f"{found}{merged}, {numbers:,} parameters in {_named(written)}",
        f"loaded again with transformers, its logits are the run's own {alike}, on {rows}",
    )


def _push(found: Chosen, target: Path, to: Repository) -> None:
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    terminal.say(f"push     {room.size(size)} to {to.name}")
    at = f" after PPO update {found.step}" if found.step is not None else ""
    run_name = found.model.path.resolve().parent.name
    message = f"{found.model.stage} of run {run_name}{at}, exported by rlhf-cli {__version__}"
    done = hub.push(target, to.name, message, public=to.public, bars=terminal.is_terminal(sys.stderr))
    seen = "private" if done.private else "public"
    what = f"commit {done.commit[:12]}" if done.changed else f"unchanged since commit {done.commit[:12]}"
    terminal.out(f"push     {done.url} ({seen}), {what}, each file's hash the same there as here")
    if done.removed:
        terminal.out(f"push     removed there, of an older upload: {', '.join(done.removed)}")


def _named(number_format: torch.dtype) -> str:
    return str(number_format).removeprefix("torch.")


def _check_format(dtype: str | None) -> None:
    if dtype is not None and dtype not in FORMATS:
        near = nearest(dtype, FORMATS)
        hint = near and f"did you mean {near}?"
        raise RLHFError("C07", f"--dtype {dtype}: not one of {', '.join(FORMATS)}", hint=hint)


def _check_room(model: Parent, target: Path, written: torch.dtype) -> None:
    """Raises RLHFError E03 where memory or disk cannot hold the model. A lower bound: heads are not counted."""
    count = machine.numbers(model)
    needed, there = count * machine.WEIGHT, room.memory()
    if needed > there:
        text = f"{count:,} numbers need {room.size(needed)} of memory at least, this machine has {room.size(there)}"
        raise RLHFError("E03", text, where=shown(model.path), hint="use a larger machine: a GPU is not needed")
    needed, free = count * written.itemsize, room.free(target)
    if free is not None and needed > free:
        text = f"the model needs {room.size(needed)} at least, {room.size(free)} are free"
        hint = "make room there, or name a folder on another disk"
        raise RLHFError("E03", text, where=shown(target), hint=hint)
