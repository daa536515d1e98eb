"""`rlhf export`: write or push a model."""

from pathlib import Path
from typing import Annotated

from rlhf_cli import system
from rlhf_cli.cli.errors import only_run
from rlhf_cli.cli.options import (
    Debug,
    JsonAtEnd,
    ModelStage,
    Quiet,
    StageFolder,
    Step,
    TrustRemoteCode,
    Verbose,
    flag,
    heavy_imports,
    option,
)
from rlhf_cli.errors import RLHFError


def export(
    folder: StageFolder = None,
    out: Annotated[Path | None, option("--out", "DIR", "New or empty folder to write to.")] = None,
    push: Annotated[
        str | None, option("--push", "OWNER/NAME", "Hub repository to upload to; created as private.")
    ] = None,
    public: Annotated[bool, flag("--public", "With --push: create a public repository.")] = False,
    step: Step = None,
    stage: ModelStage = None,
    dtype: Annotated[
        str | None, option("--dtype", "DTYPE", "float32, bfloat16 or float16. Default: the dtype of the run.")
    ] = None,
    interpolate: Annotated[
        float | None,
        option(
            "--interpolate", "SHARE", "Export SFT + SHARE * (PPO - SFT), with 0 < SHARE <= 2; above 1 it is beyond PPO."
        ),
    ] = None,
    merge: Annotated[
        list[str] | None,
        option(
            "--merge",
            "FOLDER=WEIGHT",
            "Export a mean of weights: WEIGHT of FOLDER, a DPO or another PPO run from the same SFT model, the rest of "
            "this policy. Repeatable.",
        ),
    ] = None,
    show_prompt: Annotated[
        bool, flag("--show-prompt", "Show a held-out prompt of your data in the model card.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: JsonAtEnd = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Write a plain Hugging Face model folder, or push it to the Hub.

    Adapters are merged. The export is loaded with transformers and must reproduce the logits of the run, or it is
    deleted. --push uploads it as one commit and, without --out, keeps no local copy.
    """
    if out is None and push is None:
        hint = "rlhf export RUN --out DIR, --push OWNER/NAME"
        raise RLHFError("C11", "a folder or a repository is needed", hint=hint)
    if public and push is None:
        raise RLHFError("C11", "--public belongs to --push", hint="remove it, or add --push OWNER/NAME")
    from rlhf_cli.config.base import Options

    run = folder or only_run()
    with heavy_imports():
        from rlhf_cli.commands.export import model_folder

    options = Options(trust_remote_code=trust_remote_code, debug=debug)
    repository = model_folder.Repository(push, public) if push is not None else None
    with system.translate_resource_errors(out or run):
        model_folder.run(
            run, out, options, stage=stage, step=step, dtype=dtype, repository=repository, show_prompt=show_prompt,
            interpolate=interpolate, merge=merge or (),
        )  # fmt: skip
