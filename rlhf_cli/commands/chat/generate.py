"""Conversation history, prompts in the format of the training data, and streaming generation."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_cli import data
from rlhf_cli.commands.chat.models import ChatModel
from rlhf_cli.data import other_formats
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.tokens import Conversation, render
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import load
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages import setup

_MARKER = "a-system-prompt-stands-here"


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a reply. Its noise depends on the seed and `reply_index`, the number of the reply."""

    temperature: float
    max_new_tokens: int
    seed: int
    reply_index: int = 0


@dataclass(frozen=True)
class ReplyMetrics:
    """Scores and KL of a reply; empty if they could not be computed."""

    scores: Mapping[str, float] = field(default_factory=dict)  # raw, by source
    total: float | None = None  # weighted sum of the sources; None if it equals the only score
    kl: float | None = None  # sum over the tokens of log pi - log pi_sft, nats


@dataclass(frozen=True)
class Reply:
    """A model's reply, its sampling parameters and its metrics."""

    text: str
    length: int  # tokens
    ended: bool  # with the stop token
    stopped: bool  # by Ctrl-C
    seconds: float
    sampling: SamplingParams
    metrics: ReplyMetrics = field(default_factory=ReplyMetrics)


@dataclass(frozen=True)
class Turn:
    """A prompt and the models' replies to it, by name. A model stopped before its first token has no reply."""

    prompt: str
    replies: dict[str, Reply]


@dataclass(frozen=True)
class ConversationFormat:
    """Format of prompts: the chat template, a transcript ("Human:", "Assistant:"), or plain text.

    Plain text is single-turn: each prompt is sent without the history, as in PPO.
    """

    kind: setup.PromptFormat
    tokenizer: Any

    @classmethod
    def detect(cls, written: setup.PromptForm | None, tokenizer: Any) -> "ConversationFormat":
        """Return the format for a model whose training prompts were `written` in a way (None: unknown)."""
        return cls(setup.prompt_format(written, tokenizer), tokenizer)

    @property
    def is_multi_turn(self) -> bool:
        return self.kind != "text"

    @property
    def supports_system_prompt(self) -> bool:
        """Return True if the chat template renders a system prompt."""
        if self.kind != "template":
            return False
        messages = [{"role": "system", "content": _MARKER}, {"role": "user", "content": "text"}]
        try:
            return _MARKER in render(self.tokenizer, messages, generation_prompt=True)
        except RLHFError:  # some templates reject one
            return False

    def conversation(self, system: str | None, turns: Sequence[Turn], name: str) -> Conversation:
        """Return the turns that model `name` replied to, as messages."""
        messages = [{"role": "system", "content": system}] if system else []
        for turn in turns:
            if name in turn.replies:
                messages.append({"role": "user", "content": turn.prompt})
                messages.append({"role": "assistant", "content": turn.replies[name].text})
        return messages

    def prompt(self, system: str | None, turns: Sequence[Turn], name: str, text: str) -> str | Conversation:
        """Return the prompt of the next reply of model `name`: the history and the new `text`."""
        if self.kind == "text":
            return text
        messages = [*self.conversation(system, turns, name), {"role": "user", "content": text}]
        if self.kind == "template":
            return messages
        return other_formats.render_transcript(
            [{**message, "content": message["content"].strip()} for message in messages]
        )

    def encode(self, prompt: str | Conversation) -> list[int]:
        """Return the prompt's token ids, as in every stage. Raises RLHFError D06, D08."""
        ids, _ = data.encode(self.tokenizer, prompt, None)
        if not ids:
            raise RLHFError("D08", "the prompt has no tokens")
        return ids


@dataclass(frozen=True)
class LoadedModel:
    """A model that replies, with its weights."""

    info: ChatModel
    model: Any

    @property
    def name(self) -> str:
        return self.info.name


class StreamingReply:
    """A reply as it is generated: iterate over its text. `ids` are its tokens so far, `seconds` the time they took.

    Sampled by PPO's engine: the full softmax at the temperature, including the stop token. The noise depends only on
    the seed and the number of the reply, so that compared models get the same.
    Raises RLHFError C13 if the context has no room for a reply, D06 and D08 as `ConversationFormat.encode` does.
    """

    def __init__(
        self,
        model: LoadedModel,
        prompt_format: ConversationFormat,
        prompt: str | Conversation,
        stop_token_id: int | None,
        sampling: SamplingParams,
    ) -> None:
        self.model, self.tokenizer, self.prompt = model, prompt_format.tokenizer, prompt
        self.stop_token_id, self.sampling = stop_token_id, sampling
        self.prompt_ids, self.ids = prompt_format.encode(prompt), list[int]()
        self.seconds = 0.0
        context = load.context_length(model.model.config)
        room = (
            sampling.max_new_tokens if context is None else min(sampling.max_new_tokens, context - len(self.prompt_ids))
        )
        if room < 1:
            limit = f"the context of {model.name} has {context}, reply included"
            text = f"the prompt has {len(self.prompt_ids)} tokens, and {limit}"
            raise RLHFError("C13", text, hint="/clear starts a new conversation, /undo removes the last turn")
        prompts = Prompts.from_lists([self.prompt_ids])
        prompts = replace(
            prompts, seeds=(derive_seed(sampling.seed, "chat", sampling.reply_index),), response_length=room
        )
        engine = HFEngine(model.model, stop_token_id, self.tokenizer.pad_token_id or 0, sampling.temperature)
        self._stream = engine.stream(prompts)

    def __iter__(self) -> Iterator[str]:
        return data.decode_stream(self.tokenizer, self._tokens())

    def _tokens(self) -> Iterator[int]:
        while True:
            start = time.perf_counter()
            token = next(self._stream, None)
            self.seconds += time.perf_counter() - start
            if token is None:
                return
            self.ids.append(token)
            yield token

    @property
    def ended(self) -> bool:
        """Return True if the last token is the stop token."""
        return self.ids[-1:] == [self.stop_token_id]

    @property
    def text(self) -> str:
        """Return the text so far, without special tokens."""
        return self.tokenizer.decode(self.ids, skip_special_tokens=True)
