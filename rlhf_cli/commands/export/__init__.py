"""`rlhf export RUN --out DIR --push OWNER/NAME`: export a run's model as a self-contained Hugging Face folder.

Adapters are merged into their base in full precision. The written folder is loaded again with transformers and compared
with the run's model before it is moved into place.
"""

import os
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli import __version__, config, data, runs, system, terminal
from rlhf_cli.commands.export.card import Card, Prompt
from rlhf_cli.config.base import Options
from rlhf_cli.errors import RLHFError, collect_errors, did_you_mean, shown
from rlhf_cli.jsonl import read_jsonl
from rlhf_cli.models import hub, interpolation, load, lora, save, tokenizers, weight_files
from rlhf_cli.models.tokenizers import template_sha256, tokenizer_sha256
from rlhf_cli.planning import model_size
from rlhf_cli.progress import Progress
from rlhf_cli.runs.parents import Parent, is_hub_id, open_parent, verify_parents
from rlhf_cli.runs.resolve import LAST, ResolvedModel

STORED_ROWS, RANDOM_ROWS, ROW_LENGTH = 6, 2, 64
TOLERANCE = 1e-4  # of the largest logit
ROUNDINGS = 10  # tolerance of lower precision, in rounding errors: 0.8 % each in bfloat16, 0.1 % in float16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HERE = "."  # the address of a folder in its model card: code runs in the folder
EXAMPLE_ROWS, EXAMPLE_LENGTH = 1000, 400  # rows searched for a short prompt, and its maximum characters


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
    interpolate: float | None = None,
) -> None:
    """Export a model, push it if there is a repository, and print what was done.

    With `interpolate`, a share, the model is SFT + share * (PPO - SFT) in the weights. The folder contains no local
    paths and no pickles; without `out` it is a temporary folder in the run. Its card shows a text of the run's data, a
    held-out prompt, only with `show_prompt`.
    Raises RLHFError as `runs.resolve_model` does; C06 and C11 for `interpolate`, M01 and M10 if PPO's SFT model is
    missing or was changed; C07 for an unknown `dtype`; C15 if `out` is not empty or in use; E03 if memory or disk do
    not suffice; M12 if the exported logits or tokens differ; M01, M07, M08 if the model cannot be loaded; C05, C17 and
    E07, before any work, if the repository cannot be pushed to; R17 if the push fails.
    """
    resolved = list[ResolvedModel]()
    collect_errors(
        partial(_check_dtype, dtype),
        partial(_check_share, interpolate),
        *([partial(runs.require_empty, out.resolve())] if out else []),
        lambda: resolved.append(runs.resolve_model(folder, stage, step)),
        *([partial(hub.require_access, repository.name, public=repository.public)] if repository else []),
    )
    (chosen,) = resolved
    between = Interpolation(interpolate, _sft_of(chosen.model)) if interpolate else None
    run_folder = chosen.model.path.resolve().parent
    example = held_out_prompt(run_folder) if show_prompt else None
    with nullcontext(out.resolve()) if out else runs.scratch_folder(run_folder) as target:
        name = repository.name.partition("/")[2] if repository else f"{run_folder.name}-{chosen.model.stage}"
        card = partial(Card, chosen, name=name, address=repository.name if repository else HERE, example=example)
        card = partial(card, share=interpolate)
        _write(chosen, target, options, dtype, card, f": {shown(out)}" if out else "", between)
        if repository:
            _push(chosen, target, repository, between)


def held_out_prompt(run_folder: Path) -> Prompt:
    """Return a prompt of the evaluation's data: the first short one, or else the shortest of the first rows.

    Raises RLHFError M01 if the run has no evaluation, and as the data reader does.
    """
    file = run_folder / "eval" / "config.yaml"
    if not file.is_file():
        text = f"--show-prompt: {shown(run_folder)} has no evaluation to take a prompt from"
        raise RLHFError("M01", text, hint="run `rlhf eval` first, or remove --show-prompt")
    source = config.load("eval", file).sources()["data.prompts"]
    prompts = [row.text for row in data.prompt_rows(replace(source, max_rows=EXAMPLE_ROWS), None, max_length=None)]
    short_prompts = [prompt for prompt in prompts if len(str(prompt)) <= EXAMPLE_LENGTH]
    return short_prompts[0] if short_prompts else min(prompts, key=lambda prompt: len(str(prompt)))


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise RLHFError("C07", f"--dtype {dtype}: not one of {', '.join(DTYPES)}", hint=did_you_mean(dtype, DTYPES))


def _check_share(share: float | None) -> None:
    if share is not None and not 0 < share < 1:
        text = f"--interpolate {share:g}: not between 0 (the SFT model) and 1 (the PPO policy)"
        raise RLHFError("C06", text, hint="for example --interpolate 0.5")


@dataclass(frozen=True)
class Interpolation:
    """SFT + share * (PPO - SFT), and the SFT model that PPO started from."""

    share: float
    sft: Parent

    def __str__(self) -> str:
        return f" at share {self.share:g} from its SFT model"

    def apply(self, model: Any, policy: Parent, trust_remote_code: bool) -> Any:
        """Return the interpolated model of the policy's loaded model; of adapters without a copy of the weights."""
        if interpolation.scales_exactly(policy):
            lora.scale_adapters(model, self.share)
            return model
        model = lora.merge_and_unload(model)
        sft = load.load_causal_lm(self.sft.model, trust_remote_code=trust_remote_code)
        interpolation.interpolate(model, sft, self.share)
        return model


def _sft_of(ppo: Parent) -> Parent:
    """Return the SFT model that PPO started from. Raises RLHFError C11 for another stage, M01 or M10 if it changed."""
    if ppo.stage != "ppo":
        text = f"--interpolate: {shown(ppo.path)} was written by the {ppo.stage} stage, and only PPO starts from SFT"
        raise RLHFError("C11", text, hint="omit --interpolate")
    entry = ppo.manifest["parents"]["models.sft"]
    path = entry["path"] if is_hub_id(entry["path"]) else os.path.abspath(ppo.path / entry["path"])
    sft = open_parent(path, expect=("sft",), key="models.sft", where="", revision=entry.get("revision"))
    verify_parents({sft.key: sft})
    if sft.sha256 != entry["sha256"]:
        text = f"--interpolate: {shown(sft.path)} is no longer the model that PPO was trained with"
        raise RLHFError("M10", text, hint="run PPO again, or restore the old SFT model")
    return sft


def _write(
    chosen: ResolvedModel,
    target: Path,
    options: Options,
    dtype: str | None,
    card: "partial[Card]",
    place: str,
    between: Interpolation | None,
) -> None:
    """Write the folder, compare it with the run's model, and print the result."""
    source, trust = chosen.model.model, options.trust_remote_code
    with Progress("export", 4, "part") as bar:
        export_dtype = DTYPES[dtype] if dtype else load.read_config(source, trust).dtype or torch.float32
        dtype_name = str(export_dtype).removeprefix("torch.")
        copies = 2 if between and not interpolation.scales_exactly(chosen.model) else 1
        _check_room(chosen.model, target, export_dtype, copies)
        tokenizer = tokenizers.load_tokenizer(source, trust_remote_code=trust)
        model = load.load_unmerged(source, trust_remote_code=trust).eval()
        model = between.apply(model, chosen.model, trust) if between else model
        bar.advance(note="loaded")
        stored = _stored_rows(chosen.model, tokenizer)
        rows = _with_random_rows(stored, lora.unwrap(model).config)
        expected = logits(lora.unwrap(model), rows)
        bar.advance(note="logits of the run's model")
        model = lora.merge_and_unload(model).to(export_dtype)
        parameters = model.num_parameters()
        with runs.new_folder(target) as scratch:
            save.save_model(model, tokenizer, scratch, str(card(model, tokenizer, dtype=dtype_name)))
            for path in scratch.glob("*.safetensors"):  # safetensors makes them readable only by the owner
                path.chmod((scratch / "README.md").stat().st_mode)
            del model  # frees memory for the exported model
            bar.advance(note="written")
            difference = verify_export(scratch, rows, expected, export_dtype, tokenizer, trust)
            bar.advance(note="loaded again")
    merged = " with its adapters merged" if chosen.model.base else ""
    whose = "interpolated" if between else "run's"
    equal = f"equals the {whose} model to {difference:.1e} of the largest logit" if difference else "is bit-identical"
    on = f"{len(stored)} stored rows and {len(rows) - len(stored)} rows of random tokens"
    terminal.out(f"export   {chosen}{between or ''}{merged}, {parameters:,} parameters in {dtype_name}{place}")
    terminal.out(f"export   loaded again with transformers, its output {equal}, on {on}")


def _check_room(model: Parent, target: Path, dtype: torch.dtype, copies: int) -> None:
    """Raise RLHFError E03 if memory or disk cannot hold the model. A lower bound: heads are not counted."""
    count = weight_files.count_parameters(model)
    needed, available = copies * count * model_size.FLOAT32, system.total_memory()
    if needed > available:
        limit = f"{system.format_bytes(available)} are available"
        text = f"{count:,} parameters need at least {system.format_bytes(needed)} of memory, {limit}"
        raise RLHFError("E03", text, where=shown(model.path), hint="use a larger machine: a GPU is not needed")
    needed, free = count * dtype.itemsize, system.free_disk_bytes(target)
    if free is not None and needed > free:
        text = f"the model needs at least {system.format_bytes(needed)}, {system.format_bytes(free)} are free"
        raise RLHFError("E03", text, where=shown(target), hint="free disk space, or use a folder on another disk")


# Comparison of the exported folder with the run's model

Rows = list[list[int]]


def _stored_rows(model: Parent, tokenizer: Any) -> Rows:
    """Return token ids of a reward model's probes, or of answers in the evaluation or in PPO's training."""
    if probes := model.manifest.get("probes", [])[:STORED_ROWS]:
        return [probe["prompt_ids"] + probe["response_ids"] for probe in probes]
    run_folder = model.path.resolve().parent
    for path in (run_folder / "eval/samples.jsonl", run_folder / "ppo/samples.jsonl"):
        with suppress(RLHFError):  # missing or incomplete
            samples = [row for _, row in islice(read_jsonl(path), STORED_ROWS)]
            texts = [row["prompt"] + row["response"] for row in samples if {"prompt", "response"} <= row.keys()]
            if rows := [ids for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] if ids]:
                return rows
    return []


def _with_random_rows(stored: Rows, model_config: Any) -> Rows:
    """Add rows of random tokens, which cover the vocabulary better, and shorten all."""
    length = min(ROW_LENGTH, load.context_length(model_config) or ROW_LENGTH)
    size = (RANDOM_ROWS if stored else STORED_ROWS + RANDOM_ROWS, length)
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(model_config.get_text_config().vocab_size, size, generator=generator).tolist()
    return [ids[-length:] for ids in stored] + random


@torch.no_grad()
def logits(model: Any, rows: Rows) -> list[Tensor]:
    """Return the model's logits of each row, computed without padding."""
    return [model(input_ids=torch.tensor([ids])).logits[0] for ids in rows]


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
    if token_difference := tokenizers.first_difference(tokenizer, exported):
        raise _mismatch(f"its tokenizer differs: {token_difference}")
    pairs = zip(expected, logits(model.eval(), rows), strict=True)
    difference = max(float((row - exported_row).abs().max()) for row, exported_row in pairs)
    difference /= max(float(row.abs().max()) for row in expected)
    allowed = TOLERANCE if dtype == torch.float32 else ROUNDINGS * torch.finfo(dtype).eps
    if not difference <= allowed:  # also true of nan
        raise _mismatch(f"its logits differ by {difference:.1e} of the largest, {allowed:.1e} is allowed")
    return difference


def _mismatch(text: str) -> RLHFError:
    hint = "nothing was written; try other versions of transformers or peft, or remove --dtype"
    return RLHFError("M12", f"loaded again, the exported folder is not the run's model: {text}", hint=hint)


def _push(chosen: ResolvedModel, target: Path, repository: Repository, between: Interpolation | None) -> None:
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    terminal.say(f"push     {system.format_bytes(size)} to {repository.name}")
    at = f" after PPO update {chosen.step}" if chosen.step is not None else ""
    run_name = chosen.model.path.resolve().parent.name
    message = f"{chosen.model.stage} of run {run_name}{at}{between or ''}, exported by rlhf-cli {__version__}"
    push = hub.push(target, repository.name, message, public=repository.public, bars=terminal.is_terminal(sys.stderr))
    visibility = "private" if push.private else "public"
    commit = f"commit {push.commit[:12]}" if push.changed else f"unchanged since commit {push.commit[:12]}"
    terminal.out(f"push     {push.url} ({visibility}), {commit}; file hashes verified")
    if push.removed:
        terminal.out(f"push     removed files of an older upload: {', '.join(push.removed)}")
