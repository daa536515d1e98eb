"""Write a run's model as a self-contained folder, and push it to the Hub.

Adapters are merged into their base in full precision. The written folder is loaded again with transformers and compared
with the run's model before it is moved into place.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf_cli import __version__, config, data, runs, system, terminal
from rlhf_cli.commands.common.share import check_share, load_between
from rlhf_cli.commands.export import merging
from rlhf_cli.commands.export.card import Prompt, render_card
from rlhf_cli.commands.export.comparison import logits, stored_rows, verify_export, with_random_rows
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError, collect_errors, did_you_mean, shown
from rlhf_cli.models import hub, interpolation, load, lora, save, tokenizers, weight_files
from rlhf_cli.planning import model_size
from rlhf_cli.progress import Progress
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import LAST, ResolvedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HERE = "."  # the address of a folder in its model card: code runs in the folder
EXAMPLE_ROWS = 1000  # searched for a short prompt
EXAMPLE_LENGTH = 400  # characters of one


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
    step: str | None = None,
    dtype: str | None = None,
    repository: Repository | None = None,
    show_prompt: bool = False,
    interpolate: float | None = None,
    merge: Sequence[str] = (),
) -> None:
    """Export a model, push it if there is a repository, and print what was done.

    With `merge`, `FOLDER=WEIGHT` of other policies, the model is the weighted mean with them, and with `interpolate`, a
    share, SFT + share * (PPO - SFT) in the weights; without a `step` both are of the last policy. The folder contains
    no local paths and no pickles; without `out` it is a temporary folder in the run. Its card shows a text of the run's
    data, a held-out prompt, only with `show_prompt`.
    Raises RLHFError as `runs.resolve_model` does; C06 and C11 for `interpolate` and `merge`, C17 for policies of
    different SFT models, M01 and M10 if PPO's SFT model is missing or was changed; C07 for an unknown `dtype`; C15 if
    `out` is not empty or in use; E03 if memory or disk do not suffice; M12 if the exported logits or tokens differ;
    M01, M07, M08 if the model cannot be loaded; C05, C17 and E07, before any work, if the repository cannot be pushed
    to; R17 if the push fails.
    """
    resolved: list[ResolvedModel] = []
    checks: list[Callable[[], object]] = [partial(_check_dtype, dtype), partial(check_share, interpolate)]
    if out:
        checks.append(partial(runs.require_empty, out.resolve()))
    if step is None and (merge or interpolate is not None):
        step = LAST
    checks.append(lambda: resolved.append(_resolve(folder, stage, step, interpolate, merge)))
    if repository:
        checks.append(partial(hub.require_access, repository.name, public=repository.public))
    collect_errors(*checks)

    (chosen,) = resolved
    run_folder = chosen.model.path.resolve().parent
    if repository:
        name = repository.name.partition("/")[2]
        address = repository.name
    else:
        name = f"{run_folder.name}-{chosen.model.stage}"
        address = HERE
    example = held_out_prompt(run_folder) if show_prompt else None
    card = partial(render_card, chosen, name=name, address=address, example=example)

    place = f": {shown(out)}" if out else ""
    with nullcontext(out.resolve()) if out else runs.scratch_folder(run_folder) as target:
        values = _write(chosen, target, options, dtype=dtype, card=card, place=place)
        values["folder"] = shown(out) if out else None
        if repository:
            values["push"] = _push(chosen, target, repository)
    terminal.conclude(shown(out) if out else str(values["push"]["url"]), values)


def _resolve(
    folder: Path, stage: str | None, step: str | None, share: float | None, merge: Sequence[str]
) -> ResolvedModel:
    """Return the model of the command line, merged with others, and with a share between that and the SFT model."""
    chosen = runs.resolve_model(folder, stage, step)
    if share is None and not merge:
        return chosen
    ppo = chosen.model
    if ppo.stage != "ppo":
        option = "--merge" if merge else "--interpolate"
        text = f"{option}: {shown(ppo.path)} was written by the {ppo.stage} stage, not by PPO"
        raise RLHFError("C11", text, hint=f"omit {option}")
    if share is None:
        share = chosen.share  # of the recommended policy
    if share is not None:
        runs.sft_of(ppo)
    return replace(chosen, share=share, merged=merging.resolve_merged(ppo, merge))


def held_out_prompt(run_folder: Path) -> Prompt:
    """Return a prompt of the evaluation's data: the first short one, or else the shortest of the first rows.

    Raises RLHFError M01 if the run has no evaluation, and as the data reader does.
    """
    file = run_folder / "eval" / "config.yaml"
    if not file.is_file():
        text = f"--show-prompt: {shown(run_folder)} has no evaluation to take a prompt from"
        raise RLHFError("M01", text, hint="run `rlhf eval` first, or remove --show-prompt")
    source = config.load("eval", file).sources()["data.prompts"]
    rows = data.prompt_rows(replace(source, max_rows=EXAMPLE_ROWS), None, max_length=None)
    prompts: list[Prompt] = [row.text for row in rows]
    short_prompts = [prompt for prompt in prompts if len(str(prompt)) <= EXAMPLE_LENGTH]
    return short_prompts[0] if short_prompts else min(prompts, key=lambda prompt: len(str(prompt)))


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise RLHFError("C07", f"--dtype {dtype}: not one of {', '.join(DTYPES)}", hint=did_you_mean(dtype, DTYPES))


def _write(
    chosen: ResolvedModel,
    target: Path,
    options: Options,
    *,
    dtype: str | None,
    card: "partial[str]",
    place: str,
) -> dict[str, Any]:
    """Write the folder, compare it with the run's model, print the result, and return it for --json."""
    source = chosen.model.model
    trust = options.trust_remote_code
    with Progress("export", 4, "part") as bar:
        export_dtype = DTYPES[dtype] if dtype else load.read_config(source, trust).dtype or torch.float32
        dtype_name = str(export_dtype).removeprefix("torch.")
        reads_sft = chosen.share is not None and not interpolation.scales_exactly(chosen.model)
        copies = 2 if reads_sft or chosen.merged else 1
        _check_room(chosen.model, target, export_dtype, copies)

        tokenizer = tokenizers.load_tokenizer(source, trust_remote_code=trust)
        if chosen.merged:
            model = merging.load_merged(chosen.model, chosen.merged, chosen.share, trust).eval()
        elif chosen.share is not None:
            model = load_between(chosen.model, chosen.share, trust).eval()
        else:
            model = load.load_unmerged(source, trust_remote_code=trust).eval()
        bar.advance(note="loaded")

        stored = stored_rows(chosen.model, tokenizer)
        rows = with_random_rows(stored, lora.unwrap(model).config)
        expected = logits(lora.unwrap(model), rows)
        bar.advance(note="logits of the run's model")

        model = lora.merge_and_unload(model).to(export_dtype)
        parameters = model.num_parameters()
        with runs.new_folder(target) as scratch:
            save.save_model(model, tokenizer, scratch, card(model, tokenizer, dtype=dtype_name))
            for path in scratch.glob("*.safetensors"):  # safetensors makes them readable only by the owner
                path.chmod((scratch / "README.md").stat().st_mode)
            del model  # frees memory for the exported model
            bar.advance(note="written")
            difference = verify_export(scratch, rows, expected, export_dtype, tokenizer, trust)
            bar.advance(note="loaded again")

    merged = " with its adapters merged" if chosen.model.base else ""
    whose = "run's"
    if chosen.change_of_weights:
        whose = "merged" if chosen.merged else "interpolated"
    equal = f"equals the {whose} model to {difference:.1e} of the largest logit" if difference else "is bit-identical"
    on = f"{len(stored)} stored rows and {len(rows) - len(stored)} rows of random tokens"
    terminal.out(f"export   {chosen}{merged}, {parameters:,} parameters in {dtype_name}{place}")
    terminal.out(f"export   loaded again with transformers, its output {equal}, on {on}")
    return {
        "model": shown(chosen.model.path),
        "stage": chosen.model.stage,
        "step": chosen.step,
        "share": chosen.share,
        "merged": {shown(other.model.path): other.weight for other in chosen.merged},
        "parameters": parameters,
        "dtype": dtype_name,
        "difference": difference,
        "push": None,
    }


def _check_room(model: Parent, target: Path, dtype: torch.dtype, copies: int) -> None:
    """Raise RLHFError E03 if memory or disk cannot hold the model. A lower bound: heads are not counted."""
    count = weight_files.count_parameters(model)
    needed = copies * count * model_size.FLOAT32
    available = system.total_memory()
    if needed > available:
        limit = f"{system.format_bytes(available)} are available"
        text = f"{count:,} parameters need at least {system.format_bytes(needed)} of memory, {limit}"
        raise RLHFError("E03", text, where=shown(model.path), hint="use a larger machine: a GPU is not needed")

    needed = count * dtype.itemsize
    free = system.free_disk_bytes(target)
    if free is not None and needed > free:
        text = f"the model needs at least {system.format_bytes(needed)}, {system.format_bytes(free)} are free"
        raise RLHFError("E03", text, where=shown(target), hint="free disk space, or use a folder on another disk")


def _push(chosen: ResolvedModel, target: Path, repository: Repository) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    terminal.say(f"push     {system.format_bytes(size)} to {repository.name}")

    message = _commit_message(chosen)
    bars = terminal.is_terminal(sys.stderr)
    push = hub.push(target, repository.name, message, public=repository.public, bars=bars)

    visibility = "private" if push.private else "public"
    since = "" if push.changed else "unchanged since "
    terminal.out(f"push     {push.url} ({visibility}), {since}commit {push.commit[:12]}")
    if push.removed:
        names = ", ".join(push.removed)
        terminal.out(f"push     removed files of an older upload: {names}")
    return asdict(push)


def _commit_message(chosen: ResolvedModel) -> str:
    """Return the title of the upload's commit: the stage, its run by name, the step and how the weights differ."""
    run_name = chosen.model.path.resolve().parent.name
    at = f" after PPO update {chosen.step}" if chosen.step is not None else ""
    which = f"{chosen.model.stage} of run {run_name}{at}{chosen.change_of_weights}"
    return f"{which}, exported by rlhf-cli {__version__}"
