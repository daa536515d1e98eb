"""Preference pairs of `rlhf init preferences`: read a file of pairs in the form that suits the base model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_cli import data, terminal
from rlhf_cli.config.sections import MAX_DROPPED
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.texts import Pair
from rlhf_cli.errors import RLHFError
from rlhf_cli.stages.common.reading import WARN_DROPPED_FRACTION


@dataclass(frozen=True)
class FormattedPairs:
    """The pairs of a file in the form in which they are written."""

    file: data.PairFile
    pairs: list[Pair]
    description: str  # one line: what the prompts are
    chat_template: str | None = None  # to set in sft.yaml

    @property
    def from_texts(self) -> bool:
        """Whether the pairs of the file are texts."""
        return _are_texts(self.file.pairs)


def read_pairs(source: DataSource, tokenizer: Any, *, plain: bool) -> FormattedPairs:
    """Read the valid pairs of a source in the form that suits the tokenizer; warnings count the other rows.

    With a chat template, prompts become conversations unless `plain`. Without one, conversations use chatml unless
    `plain`, and transcripts stay text. A text prompt with a system text is a conversation.
    Raises RLHFError D01-D12, D16 if too many rows are not usable.
    """
    file = data.preference_pairs(source, reads_system_texts=not plain)
    _check_dropped(source, file)

    has_template = bool(tokenizer.chat_template)
    if _are_texts(file.pairs):
        return _format_texts(file, plain=plain, has_template=has_template)
    return _format_conversations(file, plain=plain, has_template=has_template)


def _check_dropped(source: DataSource, file: data.PairFile) -> None:
    """Warn (D16) if many rows are not usable. Raises RLHFError D16 if most are not, for any reason."""
    share = file.num_dropped / file.num_read
    if share <= WARN_DROPPED_FRACTION:
        return
    text = f"{file.num_dropped} of {file.num_read} rows are dropped: {file.dropped}"
    hint = "look at these rows: a column may be read as what it is not"
    if share > MAX_DROPPED:
        raise RLHFError("D16", f"{text}; at most {MAX_DROPPED:.0%} may be", where=source.shown(), hint=hint)
    terminal.warn("D16", text, where=source.shown(), hint=hint)


def _are_texts(pairs: Sequence[Pair]) -> bool:
    return all(isinstance(pair.prompt, str) for pair in pairs)


def _format_conversations(file: data.PairFile, *, plain: bool, has_template: bool) -> FormattedPairs:
    """Keep conversations, or write them as dialogues where no chat template is to be used."""
    reasons = (plain, file.transcripts)
    as_text = all(reasons) if has_template else any(reasons)
    if as_text:
        text = "dialogues in one text"
        if not plain:
            text += ", as the model has no chat template"
        return FormattedPairs(file, [pair.as_text() for pair in file.pairs], text)
    if has_template:
        return FormattedPairs(file, file.pairs, "conversations")
    text = "conversations, in chatml: the model has no chat template"
    return FormattedPairs(file, file.pairs, text, chat_template="chatml")


def _format_texts(file: data.PairFile, *, plain: bool, has_template: bool) -> FormattedPairs:
    """Make conversations of texts where a chat template or a system text asks for it; else separate the answers."""
    has_system_texts = any(pair.system for pair in file.pairs)
    if not plain and (has_template or has_system_texts):
        text = "conversations, by the model's chat template" if has_template else "conversations, in chatml"
        if has_system_texts:
            text += ", with system messages"
        conversations = [as_conversation(pair) for pair in file.pairs]
        return FormattedPairs(file, conversations, text, chat_template=None if has_template else "chatml")

    num_joined = sum(_joins_words(pair) for pair in file.pairs)
    if num_joined > len(file.pairs) / 2:
        text = "plain text, a space put before each answer"
        return FormattedPairs(file, [_with_space(pair) for pair in file.pairs], text)
    return FormattedPairs(file, file.pairs, "plain text")


def as_conversation(pair: Pair) -> Pair:
    """Return a pair of texts as a conversation of its system text and prompt."""
    messages = [{"role": "user", "content": str(pair.prompt)}]
    if pair.system:
        messages.insert(0, {"role": "system", "content": pair.system})
    return replace(pair, prompt=messages, chosen=pair.chosen.strip(), rejected=pair.rejected.strip())


def _joins_words(pair: Pair) -> bool:
    """Return True if the chosen answer would join the last word of the prompt."""
    return not str(pair.prompt)[-1:].isspace() and not pair.chosen[:1].isspace()


def _with_space(pair: Pair) -> Pair:
    return replace(pair, chosen=f" {pair.chosen}", rejected=f" {pair.rejected}")
