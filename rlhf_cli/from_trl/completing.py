"""What a file left out gets TRL's own value where ours is another; what our settings refuse loses its place."""

import re
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from rlhf_cli.config import PPOConfig
from rlhf_cli.config.problems import translate
from rlhf_cli.errors import Problem, RLHFError
from rlhf_cli.from_trl.placing import Placed, Placing, Unplaced, fitting, home, in_our_words, is_off, takes_none
from rlhf_cli.from_trl.versions import HABITS, OPTIONS
from rlhf_cli.ppo.settings import BELONGS_TO

PROMPTS = "data.prompts"
LENGTHS = ("ppo.num_train_epochs", "ppo.total_episodes")
# Keys of which only one may stand there.
ONE_OF = ({*LENGTHS}, {"ppo.stop_token", "ppo.stop_token_id"})


def complete(placing: Placing) -> None:
    """Make the placed keys a whole ppo.yaml, that loads.

    Raises RLHFError where our settings refuse something that no option of the file is to blame for.
    """
    own = _own(placing.version) | {key: placed for key, placed in placing.placed.items() if not placed.given}
    placing.placed = {key: placed for key, placed in placing.placed.items() if placed.given}
    config = _accepted(placing, own)
    for key, placed in list(placing.placed.items()):
        del placing.placed[key]
        if placed.given or not _is(config, tree_of(placing)):
            placing.placed[key] = placed


def tree_of(placing: Placing) -> dict[str, Any]:
    """The placed keys as the sections of a config."""
    tree: dict[str, Any] = {}
    for key, placed in placing.placed.items():
        *sections, last = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = placed.value
    return tree


def _own(version: str) -> dict[str, Placed]:
    """The values that a TRL of this version had for our keys of PPO, whatever its file said."""
    found: dict[str, Placed] = {}
    for name, option in OPTIONS[version].items():
        key, value = home(name), option.default
        if not key or not key.startswith("ppo.") or option.ignored or option.computed or is_off(name, value):
            continue
        if value is None and (not takes_none(key) or any(key in group for group in ONE_OF)):
            continue
        ours = fitting(key, in_our_words(name, value))
        found[key] = Placed(key, ours, name, value, option.remark, given=False)
    return found | {key: Placed(key, value, "", None, note, False) for key, (value, note) in HABITS[version].items()}


def _accepted(placing: Placing, own: dict[str, Placed]) -> PPOConfig:
    """The placed keys, filled up with TRL's own values, as a config; those that it refuses lose their places."""
    while True:
        _fill(placing, own)
        tree = tree_of(placing)
        try:
            return PPOConfig.model_validate(tree)
        except ValidationError as error:
            _blame(placing, own, translate(error, tree, PPOConfig, lambda key: key)[0])


def _fill(placing: Placing, own: dict[str, Placed]) -> None:
    for key, placed in own.items():
        if key not in placing.unfilled and _is_free(key, placing):
            note = "a default: what the file has was not read" if key in placing.to_say else placed.note
            placing.placed[key] = replace(placed, note=note)
    if PROMPTS not in placing.placed:
        placing.placed[PROMPTS] = Placed(PROMPTS, "prompts.jsonl", "", None, "yours", False)
        placing.to_say[PROMPTS] = "rows {prompt}, or pairs, whose distinct prompts are taken"


def _blame(placing: Placing, own: dict[str, Placed], problem: Problem) -> None:
    """Take the key out that a problem is about. Raises RLHFError where there is none."""
    where, words = problem.where or "", re.findall(r"\w+", problem.text)
    about = [key for key in placing.placed if key == where or where.startswith(f"{key}.")]
    switch = [key for key in placing.placed if key == f"ppo.{BELONGS_TO.get(where.removeprefix('ppo.'))}"]
    named = [key for word in words for key in placing.placed if key.rpartition(".")[2] == word]
    below = [key for key in placing.placed if where and key.startswith(f"{where}.")]
    if not (blamed := about or switch or named or below):
        raise RLHFError.of([problem])
    placed = placing.placed.pop(blamed[0])
    if not placed.given:
        own.pop(placed.key, None)
    text = problem.text.removeprefix(f"{where}: ").removeprefix(f"{where.partition('.')[0]}: ")
    why = f"{text}; {problem.hint}" if problem.hint else text
    placing.unplaced.append(Unplaced(placed.name or placed.key, placed.was, placed.where, why))


def _is_free(key: str, placing: Placing) -> bool:
    others = next((group for group in ONE_OF if key in group), {key})
    return not others & placing.placed.keys()


def _is(config: PPOConfig, tree: dict[str, Any]) -> bool:
    """Whether a tree without a key is the same config still."""
    try:
        return PPOConfig.model_validate(tree) == config
    except ValidationError:
        return False
