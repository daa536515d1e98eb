"""Write docs/config.md: every key of every file, as `rlhf explain --all` prints it.

Run `python scripts/config_reference.py`. Keys, bounds, defaults and sources come from rlhf_cli/config/.
"""

import re
from itertools import groupby
from pathlib import Path

from rlhf_cli.commands.explain import Entry, every_key

PAGE = Path(__file__).parents[1] / "docs/config.md"
HEAD = """# Config reference

This page lists every key of every file with its default, type, bounds and meaning. `python scripts/config_reference.py`
generates it from the code, and a test checks that it is current. In a terminal, use `rlhf explain KEY` and
`rlhf explain --all`; for editors, use `rlhf schema STAGE`.

The source of each default stands in brackets: a paper, a file of another system, or a page of this documentation.

## Project defaults

These defaults follow no paper or other system:

- `run`: the folder of the config, so that a folder with its configs and results can be moved or copied.
- `stage`: the stage of the command, so that a file does not have to repeat it.
- `seed`: 0. A fixed seed makes a run repeatable without any option.
- `model.path` of reward.yaml and dpo.yaml, `models.sft`, `models.reward`, `models.ppo`: the results of the earlier
  stages in the same run folder, so that four short configs form a chain. In sft.yaml neither `model.path` nor
  `model.new` has a default, because the base model is always a choice of the user.
- `model.new.model_type`: llama, the architecture of the demo and of the reviews preset.
- `data.columns`: no mapping. Datasets with the usual column names need none.
- `data.format`: auto. Transcripts as in hh-rlhf are recognised by the first row; `plain`, `transcripts` and `turns`
  override it.
- `data.train.NUMBER.columns`, `data.train.NUMBER.format`, `data.train.NUMBER.pairs_per_prompt`,
  `data.train.NUMBER.min_rating_gap`, `data.train.NUMBER.margin_per_point`: as the keys of `data` with these names.
- `data.max_rows`: all rows. The limit is for trial runs and for large datasets on the Hugging Face Hub.
- `data.eval_fraction`, `data.split_seed`: no split, because many datasets have a held-out file or split. The seed of
  a split is 0 in every stage, so that all stages hold out the same prompts.
- `data.on_bad`, `data.on_identical`: error. Bad rows and identical answers usually mean a wrong file, a wrong column
  or a fault in the data, which should be seen before training.
- `data.min_rating_gap`: 0. The scale of the ratings is not known.
- `data.on_long`: drop. Some rows above the limit are normal and must not stop a run; the number is reported (D10).
- `data.max_dropped`: 0.8. If more than four in five rows are dropped, the remaining rows no longer represent the data.
- `data.truncate_prompt_words`, `best_of.truncate_prompt_words`: prompts are not cut. Only texts without prompts need
  it.
- `data.eval_prompts`: none. The sample tables then show the current rollout, so that a run needs one file of prompts.
- `sft.eval_steps`, `reward.eval_steps`, `dpo.eval_steps`: once per epoch, enough to see where the held-out loss starts
  to rise.
- `reward.keep`: best. A later step that is worse on held-out pairs by more than chance is not worth its scores; without
  such a difference the last step is kept, as if nothing had been chosen.
- `sft.group_by_length`, `reward.group_by_length`, `dpo.group_by_length`: true. Less padding means less time for the
  same rows.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD]
    for title, entries in every_key().items():
        parts.append(f"## {title}\n")
        for section, keys in groupby(entries, _section):
            parts += [f"### `{section}`\n"] if section else []
            parts += [_item(entry) for entry in keys]
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _section(entry: Entry) -> str:
    return entry.keys[0].partition(".")[0] + ":" if "." in entry.keys[0] else ""


def _item(entry: Entry) -> str:
    names = ", ".join(f"`{key}`" for key in entry.keys)
    lines = [f"- {names} = `{entry.default}`: {_plain(entry.value)}. {_plain(entry.meaning)}"]
    lines += [f"[{_plain(entry.source)}]"] if entry.source else []
    lines += [f"<br>{_plain(recipe)}" for recipe in entry.recipes]
    return " ".join(lines)


def _plain(text: str) -> str:
    """Escape Markdown outside of backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*<\[\]|])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
