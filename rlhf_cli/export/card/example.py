"""The prompt in a card's code: one that says what goes there, or a held-out prompt of the run's own where asked for."""

from dataclasses import replace

from rlhf_cli import config as configs
from rlhf_cli import data
from rlhf_cli.checkpoints import Chosen, shown
from rlhf_cli.data import transcripts
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError
from rlhf_cli.export.card.subject import Subject
from rlhf_cli.report.texts import visible

ASKED = "Write a prompt here, of the kind that it was trained on."
ROWS, LONGEST = 1000, 400  # that are looked at for a short one, and its characters

Prompt = str | Conversation


def held_out(chosen: Chosen) -> Prompt:
    """A prompt of the evaluation's data, as it is written there: the first short one, else the shortest of the first.

    Raises RLHFError M01 where the run has no evaluation, and as the reading of its data does.
    """
    file = chosen.model.path.resolve().parent / "eval" / "config.yaml"
    if not file.is_file():
        text = f"--show-prompt: no evaluation in {shown(file.parents[1])}, of which a prompt could be shown"
        raise RLHFError("M01", text, hint="run `rlhf eval` first, or leave --show-prompt out")
    source = configs.load("eval", file).sources()["data.prompts"]
    found = data.prompt_rows(replace(source, max_rows=ROWS), None, max_length=None)
    texts = [row.text for row in found]
    return next((text for text in texts if len(str(text)) <= LONGEST), min(texts, key=lambda text: len(str(text))))


def of(about: Subject) -> Prompt:
    """The prompt for the card's code, written as those of the training go to the model: messages where a chat template
    writes them, else a text.
    """
    prompt = ASKED if about.example is None else about.example
    if about.prompts == "template":
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [{key: visible(turn[key]) for key in ("role", "content")} for turn in turns]
    if about.prompts == "transcript" and isinstance(prompt, str) and not transcripts.looks_like_one(prompt):
        prompt = [{"role": "user", "content": prompt}]
    return visible(transcripts.render(prompt))
