"""`rlhf label`: answers of a run's policy, compared by people or by a judge."""

from pathlib import Path
from typing import Annotated

from rlhf_cli import system
from rlhf_cli.cli import completion
from rlhf_cli.cli.options import (
    Debug,
    JsonAtEnd,
    Quiet,
    TrustRemoteCode,
    Verbose,
    argument,
    flag,
    heavy_imports,
    option,
)

FROM_TEXT = "Who answers: sft, ppo, dpo or a folder; several: sft,ppo. Default: the newest policy."
COMPARE_TEXT = "Compare two models on held-out prompts, without showing which is which."
PROMPTS_TEXT = "File of prompts. Default: those of PPO."
ANSWERS_TEXT = "Answers to each prompt, as many of each model; each two of them are a pair."
ORDER_TEXT = "random, or uncertain: pairs first on which the reward model is least certain."
NAME_TEXT = "Folder of the labels, RUN/labels/NAME. Default: people, compare, or the judge's name."
BY_TEXT = "A judge labels in place of people: one of eval.yaml, reward, or module:function."
EXPORT_TEXT = "Only write the labelled pairs {prompt, chosen, rejected} to FILE; with --format all pairs."
IMPORT_TEXT = "Add the labels of a file that the tool of --format exported."
FORMAT_TEXT = "argilla or labelstudio."
PORT_TEXT = "Port of the page on 127.0.0.1. Default: a free one."
SERVERS_TEXT = "The vLLM servers of ppo.yaml's models.engine, or of RLHF_ROLLOUT_URLS, draw the answers."
OVERLAP_TEXT = "Share of the pairs that all annotators label."

choices = completion.one_of


def label(
    folder: Annotated[Path, argument("RUN", "Run folder.", completion.runs)],
    sources: Annotated[str | None, option("--from", "MODELS", FROM_TEXT)] = None,
    compare: Annotated[str | None, option("--compare", "sft,ppo", COMPARE_TEXT, completion.chat_pairs)] = None,
    prompts: Annotated[Path | None, option("--prompts", "FILE", PROMPTS_TEXT)] = None,
    n: Annotated[int, option("--n", "N", "Number of pairs to label.", min=1)] = 100,
    name: Annotated[str | None, option("--name", "NAME", NAME_TEXT)] = None,
    answers: Annotated[int, option("--answers", "K", ANSWERS_TEXT, min=2, max=16)] = 2,
    order: Annotated[str, option("--order", "ORDER", ORDER_TEXT, choices(("random", "uncertain")))] = "random",
    servers: Annotated[bool, flag("--servers", SERVERS_TEXT)] = False,
    by: Annotated[str | None, option("--by", "JUDGE", BY_TEXT)] = None,
    at_terminal: Annotated[bool, flag("--terminal", "Label in the terminal, not in the browser.")] = False,
    port: Annotated[int, option("--port", "N", PORT_TEXT, min=0, max=65535)] = 0,
    annotators: Annotated[str, option("--annotators", "a,b", "Names of those who label.")] = "me",
    overlap: Annotated[float, option("--overlap", "X", OVERLAP_TEXT, min=0.0, max=1.0)] = 0.2,
    export: Annotated[Path | None, option("--export", "FILE", EXPORT_TEXT)] = None,
    import_: Annotated[Path | None, option("--import", "FILE", IMPORT_TEXT)] = None,
    form: Annotated[str | None, option("--format", "TOOL", FORMAT_TEXT, choices(("argilla", "labelstudio")))] = None,
    seed: Annotated[int, option("--seed", "N", "Random seed of the answers.", min=0, max=2**32 - 1)] = 0,
    trust_remote_code: TrustRemoteCode = False,
    as_json: JsonAtEnd = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Label pairs of the policy's answers, to train a reward model.

    People compare in the browser or the terminal, or a judge does. RUN/labels/NAME is data.train of a reward stage as
    it stands. Each label is on disk before the next pair is shown, and the same command continues where it ended.
    """
    from rlhf_cli.config.base import Options

    with heavy_imports():
        from rlhf_cli.commands.label import inputs, run

    label_options = inputs.LabelOptions(
        sources=sources,
        compare=compare,
        prompts=prompts,
        answers=answers,
        order=order,
        servers=servers,
        n=n,
        name=name,
        seed=seed,
        annotators=annotators,
        overlap=overlap,
        by=by,
        terminal=at_terminal,
        port=port,
        export=export,
        import_=import_,
        format=form,
    )
    with system.translate_resource_errors(folder):
        run.run(folder, label_options, Options(trust_remote_code=trust_remote_code, debug=debug))
