"""What was said so far, and how it becomes the prompt of the next reply: as the training's data would have it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_cli import data
from rlhf_cli.commands.chat.models import Role
from rlhf_cli.data import other_formats
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.tokens import Conversation, render
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import load
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages.setup import PromptForm, PromptFormat, prompt_format

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

    kind: PromptFormat
    tokenizer: Any

    @classmethod
    def of(cls, written: PromptForm | None, tokenizer: Any) -> "Form":
        """The form in which prompts `written` in a way (None: unknown) go to a model."""
        return cls(prompt_format(written, tokenizer), tokenizer)

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
        return other_formats.render_transcript([{**each, "content": each["content"].strip()} for each in messages])

    def encode(self, prompt: str | Conversation) -> list[int]:
        """The ids that every stage makes of a prompt. Raises RLHFError D06, D08."""
        ids, _ = data.encode(self.tokenizer, prompt, None)
        if not ids:
            raise RLHFError("D08", "the tokenizer leaves nothing of the prompt")
        return ids


@dataclass(frozen=True)
class Voice:
    """A model that answers, loaded."""

    role: Role
    model: Any

    @property
    def name(self) -> str:
        return self.role.name


class Speech:
    """A reply to a prompt, as text by iterating; its tokens so far are `ids`, the seconds that they took `seconds`.

    Drawn by PPO's own engine: the full softmax at the temperature, through the stop token. The noise depends on seed
    and draw alone, so that two models get the same.
    Raises RLHFError C13 where the context leaves no room, D06 and D08 as `Form.encode` does.
    """

    def __init__(
        self, voice: Voice, form: Form, prompt: str | Conversation, stop_token_id: int | None, how: Sampling
    ) -> None:
        self.voice, self.tokenizer, self.prompt, self.stop_token_id, self.how = (
            voice, form.tokenizer, prompt, stop_token_id, how,
        )  # fmt: skip
        self.prompt_ids, self.ids = form.encode(prompt), list[int]()
        self.seconds = 0.0
        context = load.context_length(voice.model.config)
        room = how.max_new_tokens if context is None else min(how.max_new_tokens, context - len(self.prompt_ids))
        if room < 1:
            text = f"the prompt has {len(self.prompt_ids)} tokens, and {voice.name} reads {context} with its reply"
            raise RLHFError("C13", text, hint="/clear begins anew, /undo takes the last turn back")
        asked = Prompts.from_lists([self.prompt_ids])
        asked = replace(asked, seeds=(derive_seed(how.seed, "chat", how.draws),), response_length=room)
        engine = HFEngine(voice.model, stop_token_id, self.tokenizer.pad_token_id or 0, how.temperature)
        self._stream = engine.stream(asked)

    def __iter__(self) -> Iterator[str]:
        return data.decode_stream(self.tokenizer, self._tokens())

    def _tokens(self) -> Iterator[int]:
        while True:
            began = time.perf_counter()
            token = next(self._stream, None)
            self.seconds += time.perf_counter() - began
            if token is None:
                return
            self.ids.append(token)
            yield token

    @property
    def ended(self) -> bool:
        """By itself, with the stop token."""
        return self.ids[-1:] == [self.stop_token_id]

    @property
    def text(self) -> str:
        """What was said so far, without special tokens."""
        return self.tokenizer.decode(self.ids, skip_special_tokens=True)
