"""`rlhf export RUN --out DIR --push OWNER/NAME`: a model of a run as a plain Hugging Face folder, which needs nothing
else of the run, on this machine or on the hub.

Adapters are added into their base's weights, in full precision. What was written is loaded again as anybody would, and
held against the run's own model, before it takes its place.
"""

import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli import __version__, runs, system, terminal
from rlhf_cli.commands.export import card, card_context
from rlhf_cli.config.base import Options
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError, closest_match, collect_errors, shown
from rlhf_cli.jsonl import read_jsonl
from rlhf_cli.models import hub, load, lora, save, tokenizer_diff, tokenizers
from rlhf_cli.models.tokenizers import PAD, template_sha256, tokenizer_sha256
from rlhf_cli.progress import Progress
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.references import LAST, ResolvedModel
from rlhf_cli.stages import hardware

STORED, DRAWN, LENGTH = 6, 2, 64  # rows, rows, tokens
TOLERANCE = 1e-4  # of the largest logit
ROUNDINGS = 10  # what fewer digits may do, in roundings of a number: 0.8 % each in bfloat16, 0.1 % in float16


@dataclass(frozen=True)
class Rows:
    """Tokens to compare on: `stored` of them are of texts that the run has left."""

    ids: list[list[int]]
    stored: int

    def __str__(self) -> str:
        drawn = len(self.ids) - self.stored
        return f"{self.stored} stored rows and {drawn} of random tokens" if self.stored else f"{drawn} random rows"


def rows_of(model: Parent, tokenizer: Any, config: Any) -> Rows:
    """Held-out rows that the run has left, and some of random tokens: they reach what no text holds."""
    stored = _probes(model) or _answers(model, tokenizer)
    length = min(LENGTH, load.context_length(config) or LENGTH)
    generator = torch.Generator().manual_seed(0)
    size = (DRAWN if stored else STORED + DRAWN, length)
    drawn = torch.randint(config.get_text_config().vocab_size, size, generator=generator).tolist()
    return Rows([*(ids[-length:] for ids in stored), *drawn], len(stored))


def _probes(model: Parent) -> list[list[int]]:
    """What a reward stage has stored, with its scores."""
    return [probe["prompt_ids"] + probe["response_ids"] for probe in model.manifest.get("probes", [])[:STORED]]


def _answers(model: Parent, tokenizer: Any) -> list[list[int]]:
    """Prompts and answers of the evaluation, held-out ones, else of PPO's training."""
    run = model.path.resolve().parent
    for path in (run / "eval/samples.jsonl", run / "ppo/samples.jsonl"):
        with suppress(RLHFError):  # not there, or half written
            found = [row for _, row in islice(read_jsonl(path), STORED)]
            texts = [row["prompt"] + row["response"] for row in found if {"prompt", "response"} <= row.keys()]
            if ids := [ids for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] if ids]:
                return ids
    return []


@torch.no_grad()
def logits(model: Any, rows: Rows) -> list[Tensor]:
    """What the model makes of each row, by itself: no padding has a say."""
    return [model(input_ids=torch.tensor([ids])).logits[0] for ids in rows.ids]


def require(folder: Path, rows: Rows, own: list[Tensor], written: torch.dtype, tokenizer: Any, trust: bool) -> float:
    """The largest difference between a folder's logits and the run's `own`, as a share of the largest of these.

    Both in float32, so that it is the weights that are compared. Raises RLHFError M12 where it is more than rounding
    to the format `written` makes, or where weights or tokens are others.
    """
    kind = AutoModelForSequenceClassification if own[0].shape == (1,) else AutoModelForCausalLM
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=trust,
        output_loading_info=True,
    )  # fmt: skip
    if odd := sorted({*report["missing_keys"], *report["unexpected_keys"]}):
        raise _another(f"the weights of {', '.join(odd[:3])} are missing, or not in the model")
    again = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    for name, read in (("tokenizer", tokenizer_sha256), ("chat template", template_sha256)):
        if read(again) != read(tokenizer):
            raise _another(f"its {name} is another one")
    if apart := tokenizer_diff.first_difference(tokenizer, again, PAD):
        raise _another(f"its tokenizer is another one: {apart}")
    theirs = logits(model.eval(), rows)
    difference = max(float((ours - other).abs().max()) for ours, other in zip(own, theirs, strict=True))
    difference /= max(float(each.abs().max()) for each in own)
    allowed = TOLERANCE if written == torch.float32 else ROUNDINGS * torch.finfo(written).eps
    if not difference <= allowed:  # nan, too
        raise _another(f"its logits differ by {difference:.1e} of the largest, {allowed:.1e} is allowed")
    return difference


def _another(text: str) -> RLHFError:
    hint = "nothing was left; other versions of transformers or peft may help, or without --dtype the run's own format"
    return RLHFError("M12", f"loaded again, the exported folder is not the run's model: {text}", hint=hint)


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
    chosen = list[ResolvedModel]()
    collect_errors(
        partial(_check_format, dtype),
        *([partial(runs.require_empty, out.resolve())] if out else []),
        lambda: chosen.append(runs.resolve_model(folder, stage, step)),
        *([partial(hub.require_access, to.name, public=to.public)] if to else []),
    )
    (found,) = chosen
    example = card.held_out(found) if show_prompt else None
    passing = runs.scratch_folder(found.model.path.resolve().parent)
    with nullcontext(out.resolve()) if out else passing as target:
        what, same = _write(found, target, options, dtype, to, example)
        terminal.out(f"export   {what}" + (f": {shown(out)}" if out else ""))
        terminal.out(f"export   {same}")
        if to:
            _push(found, target, to)


def _write(
    found: ResolvedModel,
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
        rows = rows_of(found.model, tokenizer, lora.unwrap(model).config)
        own = logits(lora.unwrap(model), rows)
        bar.advance(note="the run's own logits")
        model = lora.merge_and_unload(model).to(written)
        run_name = found.model.path.resolve().parent.name
        name, address = (to.name.partition("/")[2], to.name) if to else (f"{run_name}-{found.model.stage}", HERE)
        about = card_context.subject(found, model, tokenizer, _named(written), name, address, example)
        numbers = model.num_parameters()
        with runs.new_folder(target) as scratch:
            save.save_model(model, tokenizer, scratch, card.write(about))
            for path in scratch.glob("*.safetensors"):  # safetensors lets nobody else read them
                path.chmod((scratch / "README.md").stat().st_mode)
            del model, about  # the folder's is loaded in its place
            bar.advance(note="written")
            difference = require(scratch, rows, own, written, tokenizer, options.trust_remote_code)
            bar.advance(note="loaded again")
    merged = " with its adapters merged" if found.model.base else ""
    alike = f"to {difference:.1e} of the largest" if difference else "to the last bit"
    return (
        f"{found}{merged}, {numbers:,} parameters in {_named(written)}",
        f"loaded again with transformers, its logits are the run's own {alike}, on {rows}",
    )


def _push(found: ResolvedModel, target: Path, to: Repository) -> None:
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    terminal.say(f"push     {system.format_bytes(size)} to {to.name}")
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
        near = closest_match(dtype, FORMATS)
        hint = near and f"did you mean {near}?"
        raise RLHFError("C07", f"--dtype {dtype}: not one of {', '.join(FORMATS)}", hint=hint)


def _check_room(model: Parent, target: Path, written: torch.dtype) -> None:
    """Raises RLHFError E03 where memory or disk cannot hold the model. A lower bound: heads are not counted."""
    count = hardware.count_parameters(model)
    needed, there = count * hardware.WEIGHT_BYTES, system.total_memory()
    if needed > there:
        room = system.format_bytes(there)
        text = f"{count:,} numbers need {system.format_bytes(needed)} of memory at least, this machine has {room}"
        raise RLHFError("E03", text, where=shown(model.path), hint="use a larger machine: a GPU is not needed")
    needed, free = count * written.itemsize, system.free_disk_bytes(target)
    if free is not None and needed > free:
        text = f"the model needs {system.format_bytes(needed)} at least, {system.format_bytes(free)} are free"
        hint = "make room there, or name a folder on another disk"
        raise RLHFError("E03", text, where=shown(target), hint=hint)
