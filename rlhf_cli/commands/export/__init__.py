"""`rlhf export RUN --out DIR --push OWNER/NAME`: export a run's model as a self-contained Hugging Face folder.

Adapters are merged into their base in full precision. The written folder is loaded again with transformers and compared
with the run's model before it is moved into place.
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
from rlhf_cli.runs.resolve import LAST, ResolvedModel
from rlhf_cli.stages import hardware

STORED_ROWS, RANDOM_ROWS, ROW_LENGTH = 6, 2, 64
TOLERANCE = 1e-4  # of the largest logit
ROUNDINGS = 10  # tolerance of lower precision, in rounding errors: 0.8 % each in bfloat16, 0.1 % in float16


@dataclass(frozen=True)
class Rows:
    """Rows of tokens to compare models on; the first `stored` are texts of the run."""

    ids: list[list[int]]
    stored: int

    def __str__(self) -> str:
        random = len(self.ids) - self.stored
        return f"{self.stored} stored rows and {random} of random tokens" if self.stored else f"{random} random rows"


def rows_of(model: Parent, tokenizer: Any, config: Any) -> Rows:
    """Return rows of the run's held-out texts, and rows of random tokens, which cover the vocabulary better."""
    stored = _probes(model) or _answers(model, tokenizer)
    length = min(ROW_LENGTH, load.context_length(config) or ROW_LENGTH)
    generator = torch.Generator().manual_seed(0)
    size = (RANDOM_ROWS if stored else STORED_ROWS + RANDOM_ROWS, length)
    random = torch.randint(config.get_text_config().vocab_size, size, generator=generator).tolist()
    return Rows([*(ids[-length:] for ids in stored), *random], len(stored))


def _probes(model: Parent) -> list[list[int]]:
    """Return the probe rows in a reward model's manifest."""
    return [probe["prompt_ids"] + probe["response_ids"] for probe in model.manifest.get("probes", [])[:STORED_ROWS]]


def _answers(model: Parent, tokenizer: Any) -> list[list[int]]:
    """Return prompts and responses of the evaluation, or else of PPO's training."""
    run = model.path.resolve().parent
    for path in (run / "eval/samples.jsonl", run / "ppo/samples.jsonl"):
        with suppress(RLHFError):  # missing or incomplete
            samples = [row for _, row in islice(read_jsonl(path), STORED_ROWS)]
            texts = [row["prompt"] + row["response"] for row in samples if {"prompt", "response"} <= row.keys()]
            if ids := [ids for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] if ids]:
                return ids
    return []


@torch.no_grad()
def logits(model: Any, rows: Rows) -> list[Tensor]:
    """Return the model's logits of each row, computed without padding."""
    return [model(input_ids=torch.tensor([ids])).logits[0] for ids in rows.ids]


def verify_export(
    folder: Path, rows: Rows, expected: list[Tensor], dtype: torch.dtype, tokenizer: Any, trust: bool
) -> float:
    """Return the largest difference between a folder's and the `expected` logits, relative to the largest of these.

    Both are in float32, so that only the weights are compared. Raises RLHFError M12 if the difference exceeds the
    rounding to `dtype`, or if weights or tokenizer differ.
    """
    kind = AutoModelForSequenceClassification if expected[0].shape == (1,) else AutoModelForCausalLM
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=trust,
        output_loading_info=True,
    )  # fmt: skip
    if mismatched := sorted({*report["missing_keys"], *report["unexpected_keys"]}):
        raise _mismatch(f"the weights of {', '.join(mismatched[:3])} are missing or unexpected")
    exported = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    for name, sha256_of in (("tokenizer", tokenizer_sha256), ("chat template", template_sha256)):
        if sha256_of(exported) != sha256_of(tokenizer):
            raise _mismatch(f"its {name} differs")
    if token_difference := tokenizer_diff.first_difference(tokenizer, exported, PAD):
        raise _mismatch(f"its tokenizer differs: {token_difference}")
    pairs = zip(expected, logits(model.eval(), rows), strict=True)
    difference = max(float((row - exported_row).abs().max()) for row, exported_row in pairs)
    difference /= max(float(row.abs().max()) for row in expected)
    allowed = TOLERANCE if dtype == torch.float32 else ROUNDINGS * torch.finfo(dtype).eps
    if not difference <= allowed:  # also true of nan
        raise _mismatch(f"its logits differ by {difference:.1e} of the largest, {allowed:.1e} is allowed")
    return difference


def _mismatch(text: str) -> RLHFError:
    hint = "nothing was written; try other versions of transformers or peft, or leave --dtype out"
    return RLHFError("M12", f"loaded again, the exported folder is not the run's model: {text}", hint=hint)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HERE = "."  # the address of a folder in its model card: code runs in the folder


@dataclass(frozen=True)
class Repository:
    """The target of a push: a repository on the Hugging Face Hub."""

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
    repository: Repository | None = None,
    show_prompt: bool = False,
) -> None:
    """Export a model, push it if there is a repository, and print what was done.

    The folder contains no local paths and no pickles; without `out` it is a temporary folder in the run. Its card shows
    a text of the run's data, a held-out prompt, only with `show_prompt`.
    Raises RLHFError as `runs.choose` does; C07 for an unknown `dtype`; C15 if `out` is not empty or in use; E03 if
    memory or disk do not suffice; M12 if the exported logits or tokens differ; M01, M07, M08 if the model cannot be
    loaded; C05, C17 and E07, before any work, if the repository cannot be pushed to; R17 if the push fails.
    """
    chosen = list[ResolvedModel]()
    collect_errors(
        partial(_check_dtype, dtype),
        *([partial(runs.require_empty, out.resolve())] if out else []),
        lambda: chosen.append(runs.resolve_model(folder, stage, step)),
        *([partial(hub.require_access, repository.name, public=repository.public)] if repository else []),
    )
    (model,) = chosen
    example = card.held_out(model) if show_prompt else None
    temporary = runs.scratch_folder(model.model.path.resolve().parent)
    with nullcontext(out.resolve()) if out else temporary as target:
        description, check = _write(model, target, options, dtype, repository, example)
        terminal.out(f"export   {description}" + (f": {shown(out)}" if out else ""))
        terminal.out(f"export   {check}")
        if repository:
            _push(model, target, repository)


def _write(
    chosen: ResolvedModel,
    target: Path,
    options: Options,
    dtype: str | None,
    repository: Repository | None,
    example: str | Conversation | None,
) -> tuple[str, str]:
    """Write the folder and compare it with the run's model; return a description of the model and of the check."""
    source = chosen.model.model
    with Progress("export", 4, "part") as bar:
        original = load.read_config(source, options.trust_remote_code).dtype or torch.float32
        export_dtype = DTYPES[dtype] if dtype else original
        _check_room(chosen.model, target, export_dtype)
        tokenizer = tokenizers.load_tokenizer(source, trust_remote_code=options.trust_remote_code)
        model = load.load_unmerged(source, trust_remote_code=options.trust_remote_code).eval()
        bar.advance(note="loaded")
        rows = rows_of(chosen.model, tokenizer, lora.unwrap(model).config)
        expected = logits(lora.unwrap(model), rows)
        bar.advance(note="the run's own logits")
        model = lora.merge_and_unload(model).to(export_dtype)
        run_name = chosen.model.path.resolve().parent.name
        name, address = f"{run_name}-{chosen.model.stage}", HERE
        if repository:
            name, address = repository.name.partition("/")[2], repository.name
        context = card_context.build_context(
            chosen, model, tokenizer, _dtype_name(export_dtype), name, address, example
        )
        parameters = model.num_parameters()
        with runs.new_folder(target) as scratch:
            save.save_model(model, tokenizer, scratch, card.write(context))
            for path in scratch.glob("*.safetensors"):  # safetensors makes them readable only by the owner
                path.chmod((scratch / "README.md").stat().st_mode)
            del model, context  # frees memory for the exported model
            bar.advance(note="written")
            difference = verify_export(scratch, rows, expected, export_dtype, tokenizer, options.trust_remote_code)
            bar.advance(note="loaded again")
    merged = " with its adapters merged" if chosen.model.base else ""
    precision = f"to {difference:.1e} of the largest" if difference else "to the last bit"
    return (
        f"{chosen}{merged}, {parameters:,} parameters in {_dtype_name(export_dtype)}",
        f"loaded again with transformers, its logits are the run's own {precision}, on {rows}",
    )


def _push(chosen: ResolvedModel, target: Path, repository: Repository) -> None:
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    terminal.say(f"push     {system.format_bytes(size)} to {repository.name}")
    at = f" after PPO update {chosen.step}" if chosen.step is not None else ""
    run_name = chosen.model.path.resolve().parent.name
    message = f"{chosen.model.stage} of run {run_name}{at}, exported by rlhf-cli {__version__}"
    done = hub.push(target, repository.name, message, public=repository.public, bars=terminal.is_terminal(sys.stderr))
    visibility = "private" if done.private else "public"
    commit = f"commit {done.commit[:12]}" if done.changed else f"unchanged since commit {done.commit[:12]}"
    terminal.out(f"push     {done.url} ({visibility}), {commit}; file hashes verified")
    if done.removed:
        terminal.out(f"push     removed files of an older upload: {', '.join(done.removed)}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        near = closest_match(dtype, DTYPES)
        hint = near and f"did you mean {near}?"
        raise RLHFError("C07", f"--dtype {dtype}: not one of {', '.join(DTYPES)}", hint=hint)


def _check_room(model: Parent, target: Path, dtype: torch.dtype) -> None:
    """Raise RLHFError E03 if memory or disk cannot hold the model. A lower bound: heads are not counted."""
    count = hardware.count_parameters(model)
    needed, available = count * hardware.WEIGHT_BYTES, system.total_memory()
    if needed > available:
        limit = f"{system.format_bytes(available)} are available"
        text = f"{count:,} parameters need at least {system.format_bytes(needed)} of memory, {limit}"
        raise RLHFError("E03", text, where=shown(model.path), hint="use a larger machine: a GPU is not needed")
    needed, free = count * dtype.itemsize, system.free_disk_bytes(target)
    if free is not None and needed > free:
        text = f"the model needs at least {system.format_bytes(needed)}, {system.format_bytes(free)} are free"
        hint = "free disk space, or use a folder on another disk"
        raise RLHFError("E03", text, where=shown(target), hint=hint)
