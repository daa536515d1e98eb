"""`rlhf export RUN --out DIR`: a model of a run as a plain Hugging Face folder, which needs nothing else of the run.

Adapters are added into their base's weights, in full precision. What was written is loaded again as anybody would, and
held against the run's own model, before it takes its place.
"""

from functools import partial
from pathlib import Path

import torch

from rlhf_cli import checkpoints, room, terminal
from rlhf_cli.checkpoints import LAST, Chosen, Parent, shown
from rlhf_cli.config import Options
from rlhf_cli.errors import RLHFError, all_of, nearest
from rlhf_cli.export import card, sameness
from rlhf_cli.inputs import machine
from rlhf_cli.models import adapters, loading, tokenizers
from rlhf_cli.progress import Progress

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(
    folder: Path, out: Path, options: Options, *, stage: str | None = None, step: str = LAST, dtype: str | None = None
) -> Path:
    """Export, say what was exported, and return the folder, which holds no path of this machine and no pickle.

    Raises RLHFError as `checkpoints.choose` does for the model; C07 for an unknown `dtype`; C15 where `out` is not
    empty, or another process is writing it; E03 where there is no room; M12 where what was written gives other logits
    or tokens; M01, M07, M08 for a model that cannot be loaded.
    """
    target, chosen = out.resolve(), list[Chosen]()
    all_of(
        partial(_check_format, dtype),
        partial(checkpoints.require_free, target),
        lambda: chosen.append(checkpoints.choose(folder, stage, step)),
    )
    (found,) = chosen
    source = found.model.model
    with Progress("export", 4, "part") as bar:
        kept = loading.read_config(source, options.trust_remote_code).dtype or torch.float32
        written = FORMATS[dtype] if dtype else kept
        _check_room(found.model, target, written)
        tokenizer = tokenizers.load_tokenizer(source, trust_remote_code=options.trust_remote_code)
        model = loading.load_apart(source, trust_remote_code=options.trust_remote_code).eval()
        bar.advance(note="loaded")
        rows = sameness.rows_of(found.model, tokenizer, adapters.inside(model).config)
        own = sameness.logits(adapters.inside(model), rows)
        bar.advance(note="the run's own logits")
        model = adapters.fold(model).to(written)
        numbers, about = model.num_parameters(), card.write(found, model, _named(written))
        with checkpoints.new_folder(target) as scratch:
            loading.save_model(model, tokenizer, scratch, about)
            for path in scratch.glob("*.safetensors"):  # safetensors lets nobody else read them
                path.chmod((scratch / "README.md").stat().st_mode)
            del model  # the folder's is loaded in its place
            bar.advance(note="written")
            difference = sameness.require(scratch, rows, own, written, tokenizer, options.trust_remote_code)
            bar.advance(note="loaded again")
    merged = " with its adapters merged" if found.model.base else ""
    terminal.out(f"export   {found}{merged}, {numbers:,} parameters in {_named(written)}: {shown(target)}")
    alike = f"to {difference:.1e} of the largest" if difference else "to the last bit"
    terminal.out(f"export   loaded again with transformers, its logits are the run's own {alike}, on {rows}")
    return target


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
