"""Which prompts of a run may be labelled: none that it evaluates with, and last those that earlier rounds labelled."""

from collections.abc import Sequence
from pathlib import Path

from rlhf_cli import config as configs
from rlhf_cli import data, terminal
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.datasets import Rows
from rlhf_cli.data.labels import LABELS, are_of_held_out_prompts, is_labels_folder, read_labels
from rlhf_cli.data.sources import is_local
from rlhf_cli.data.texts import prompt_key, render_transcript
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs.layout import LABELS_FOLDER, SNAPSHOTS
from rlhf_cli.stages.ppo import setup


def evaluation(run: Path) -> EvalConfig:
    """Return the run's eval.yaml. Raises RLHFError as `config.load`."""
    config = configs.load("eval", run / "eval.yaml")
    assert isinstance(config, EvalConfig)
    return config


def held_out_prompts(run: Path, config: PPOConfig) -> frozenset[bytes]:
    """Return the keys of the prompts that the run evaluates with, of conversations also those as transcripts."""
    sources = [source for key, source in config.sources().items() if key == "data.eval_prompts"]
    if (run / "eval.yaml").is_file():
        sources.append(evaluation(run).sources()["data.prompts"])
    keys: frozenset[bytes] = frozenset()
    for source in sources:
        if not is_local(source):
            terminal.say(f"label    {source.shown()} is not in the cache: its prompts are not omitted")
            continue
        rows = data.prompt_rows(source, None, max_length=None)
        keys |= rows.prompts | {prompt_key(render_transcript(row.text)) for row in rows}
    return keys


def without_held_out(rows: Sequence[int], prompts: Rows[data.Prompt], held_out: frozenset[bytes]) -> list[int]:
    """Return the rows of prompts that are not held out; say how many are omitted. Raises RLHFError D05 for none."""
    kept = [row for row in rows if prompt_key(prompts[row].text) not in held_out]
    left_out = len(rows) - len(kept)
    if not kept:
        text = f"the run evaluates with all of these {len(rows)} prompts"
        hint = "name other prompts: --prompts FILE; --compare compares two models on held-out prompts"
        raise RLHFError("D05", text, where=prompts.source.shown(), hint=hint)
    if left_out:
        terminal.say(f"label    {left_out} of {len(rows)} prompts omitted: the run evaluates with them")
    return kept


def labelled_before(config: PPOConfig) -> frozenset[bytes]:
    """Return the keys of the prompts that have a label in a round before that of this config.

    Raises RLHFError as `read_labels`.
    """
    keys: set[bytes] = set()
    stage = _stage_before(config)
    while stage is not None:
        for folder in stage.parent.glob(f"{LABELS_FOLDER}/*"):
            if is_labels_folder(folder) and not are_of_held_out_prompts(folder):
                keys |= {prompt_key(label.prompt) for _, label in read_labels(folder / LABELS).values()}
        stage = _stage_before(setup.load_run_config(stage))
    return frozenset(keys)


def _stage_before(config: PPOConfig) -> Path | None:
    """Return the PPO stage of the round before, of which models.policy is the policy or a snapshot; None without."""
    if config.models.policy is None:
        return None
    policy = Path(config.models.policy)
    stage = policy.parent.parent if policy.parent.name == SNAPSHOTS else policy
    return stage if stage.name == "ppo" and (stage / "config.yaml").is_file() else None
