"""What was said so far, and how it becomes the prompt of the next reply: as the training's data would have it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_cli import data
from rlhf_cli.data import transcripts
from rlhf_cli.data.tokens import Conversation, render
from rlhf_cli.errors import RLHFError
from rlhf_cli.inputs.forms import Kind, Written, kind

_MARK = "a-system-prompt-stands-here"


@dataclass(frozen=True)
class Sampling:
    """How a reply is drawn. `draws` counts the replies of a seed, so that each has noise of its own."""

    temperature: float
    max_new_tokens: int
    seed: int
    draws: int = 0


@dataclass(frozen=True)
class Numbers:
    """What is known of a reply. Empty where nothing is."""

    scores: Mapping[str, float] = field(default_factory=dict)  # raw, by source
    total: float | None = None  # the sources by weight, where that is not one of them alone
    kl: float | None = None  # sum over the tokens of log pi - log pi_sft, nats


@dataclass(frozen=True)
class Reply:
    """What a model said, how it was drawn, and what is to be known of it."""

    text: str
    length: int  # tokens
    ended: bool  # by itself, with the stop token
    stopped: bool  # by Ctrl-C
    seconds: float
    how: Sampling
    numbers: Numbers = field(default_factory=Numbers)


@dataclass(frozen=True)
class Turn:
    """Something said, and each model's reply to it, by name; a model that was stopped before it spoke has none."""

    said: str
    replies: dict[str, Reply]


@dataclass(frozen=True)
class Form:
    """How prompts are written: by the chat template, as a transcript ("Human:", "Assistant:"), or as they are typed.

    Plain text has no turns: each prompt stands by itself, as PPO saw them.
    """

    kind: Kind
    tokenizer: Any

    @classmethod
    def of(cls, written: Written | None, tokenizer: Any) -> "Form":
        """The form in which prompts `written` in a way (None: unknown) go to a model."""
        return cls(kind(written, tokenizer), tokenizer)

    @property
    def has_turns(self) -> bool:
        return self.kind != "text"

    @property
    def takes_system(self) -> bool:
        """Whether a system prompt reaches the model."""
        if self.kind != "template":
            return False
        messages = [{"role": "system", "content": _MARK}, {"role": "user", "content": "text"}]
        try:
            return _MARK in render(self.tokenizer, messages, generation_prompt=True)
        except RLHFError:  # some templates refuse one
            return False

    def conversation(self, system: str | None, turns: Sequence[Turn], name: str) -> Conversation:
        """The turns as a model has had them, as messages."""
        messages = [{"role": "system", "content": system}] if system else []
        for turn in turns:
            if name in turn.replies:
                messages.append({"role": "user", "content": turn.said})
                messages.append({"role": "assistant", "content": turn.replies[name].text})
        return messages

    def prompt(self, system: str | None, turns: Sequence[Turn], name: str, said: str) -> str | Conversation:
        """A row's prompt: what `said` is, to a model that has had these turns."""
        if self.kind == "text":
            return said
        messages = [*self.conversation(system, turns, name), {"role": "user", "content": said}]
        if self.kind == "template":
            return messages
        return transcripts.render([{**each, "content": each["content"].strip()} for each in messages])

    def encode(self, prompt: str | Conversation) -> list[int]:
        """The ids that every stage makes of a prompt. Raises RLHFError D06, D08."""
        ids, _ = data.encode(self.tokenizer, prompt, None)
        if not ids:
            raise RLHFError("D08", "the tokenizer leaves nothing of the prompt")
        return ids
