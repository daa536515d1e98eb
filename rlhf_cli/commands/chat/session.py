"""A chat session: prompts in the format of the training data, streamed replies, and export of the conversation."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rlhf_cli import data, terminal
from rlhf_cli.commands.common.models import ChatModel, ReplyMetrics, ReplyScorer
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.texts import render_transcript
from rlhf_cli.data.tokens import Conversation, render
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import load
from rlhf_cli.models.batch import Prompts, StopTokenId, stop_ids
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages.common import prompt_forms

_MARKER = "system-prompt-marker"


@dataclass(frozen=True)
class ReplySampling:
    """Sampling parameters of a reply. Its noise depends on the seed and `reply_index`, the number of the reply."""

    temperature: float
    max_new_tokens: int
    seed: int
    reply_index: int = 0

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, at most {self.max_new_tokens} tokens, seed {self.seed}"


@dataclass(frozen=True)
class ConversationFormat:
    """Format of prompts: the chat template, a transcript ("Human:", "Assistant:"), or plain text.

    Plain text is single-turn: each prompt is sent without the history, as in PPO.
    """

    kind: prompt_forms.PromptFormat
    tokenizer: Any

    @property
    def supports_system_prompt(self) -> bool:
        """Return True if the chat template renders a system prompt."""
        messages = [{"role": "system", "content": _MARKER}, {"role": "user", "content": "text"}]
        with suppress(RLHFError):  # some templates reject one
            return self.kind == "template" and _MARKER in render(self.tokenizer, messages, generation_prompt=True)
        return False

    def conversation(self, system: str | None, turns: Sequence["Turn"], name: str) -> Conversation:
        """Return the turns that model `name` replied to, as messages."""
        messages = [{"role": "system", "content": system}] if system else []
        for turn in turns:
            if name in turn.replies:
                messages.append({"role": "user", "content": turn.prompt})
                messages.append({"role": "assistant", "content": turn.replies[name].text})
        return messages

    def prompt(self, system: str | None, turns: Sequence["Turn"], name: str, text: str) -> str | Conversation:
        """Return the prompt of the next reply of model `name`: the history and the new `text`."""
        if self.kind == "text":
            return text
        messages = [*self.conversation(system, turns, name), {"role": "user", "content": text}]
        if self.kind == "template":
            return messages
        return render_transcript([{**message, "content": message["content"].strip()} for message in messages])

    def encode(self, prompt: str | Conversation) -> list[int]:
        """Return the prompt's token ids, as in every stage. Raises RLHFError D06, D08."""
        ids, _ = data.encode(self.tokenizer, prompt, None)
        if not ids:
            raise RLHFError("D08", "the prompt has no tokens")
        return ids


class Reply:
    """A model's reply, generated while its text is iterated over.

    `ids` are its tokens so far, `seconds` the time they took; `stopped`: Ctrl-C ended it.
    Sampled by PPO's engine: the full softmax at the temperature, including the stop token. The noise depends only on
    the seed and the number of the reply, so that compared models get the same.
    Raises RLHFError C13 if the context has no room for a reply, D06 and D08 as `ConversationFormat.encode` does.
    """

    def __init__(
        self, model: ChatModel, prompt_format: ConversationFormat, prompt: str | Conversation,
        stop_token_id: StopTokenId, sampling: ReplySampling,
    ) -> None:  # fmt: skip
        self.model = model
        self.tokenizer = prompt_format.tokenizer
        self.prompt = prompt
        self.stop_token_id = stop_token_id
        self.sampling = sampling
        self.prompt_ids = prompt_format.encode(prompt)
        self.ids: list[int] = []
        self.seconds = 0.0
        self.stopped = False
        self.metrics = ReplyMetrics()

        context = load.context_length(model.weights.config)
        self._room = sampling.max_new_tokens
        if context is not None:
            self._room = min(self._room, context - len(self.prompt_ids))
        if self._room < 1:
            limit = f"the context of {model.name} has {context}, reply included"
            text = f"the prompt has {len(self.prompt_ids)} tokens, and {limit}"
            raise RLHFError("C13", text, hint="/clear starts a new conversation, /undo removes the last turn")

    def __iter__(self) -> Iterator[str]:
        return data.decode_stream(self.tokenizer, self._tokens())

    def _tokens(self) -> Iterator[int]:
        seed = derive_seed(self.sampling.seed, "chat", self.sampling.reply_index)
        prompts = replace(Prompts.from_lists([self.prompt_ids]), seeds=(seed,), response_length=self._room)
        pad_token_id = self.tokenizer.pad_token_id or 0
        engine = HFEngine(self.model.weights, self.stop_token_id, pad_token_id, self.sampling.temperature)
        stream = engine.stream(prompts)
        while True:
            start = time.perf_counter()
            token = next(stream, None)
            self.seconds += time.perf_counter() - start
            if token is None:
                return
            self.ids.append(token)
            yield token

    @property
    def text(self) -> str:
        """Text so far, without special tokens."""
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=True))

    @property
    def ended(self) -> bool:
        """Return True if it ended with the stop token."""
        return bool(self.ids) and self.ids[-1] in stop_ids(self.stop_token_id)


@dataclass(frozen=True)
class Turn:
    """A prompt and the models' replies to it, by name. A model stopped before its first token has no reply."""

    prompt: str
    replies: dict[str, Reply]


class ChatSession:
    """The models, their sampling parameters, and the turns since the last /clear.

    `live`: on a terminal, where Ctrl-C stops a reply and errors are printed; otherwise both end the command.
    """

    def __init__(
        self, models: list[ChatModel], scorer: ReplyScorer, prompt_format: ConversationFormat,
        sampling: ReplySampling, *, live: bool,
    ) -> None:  # fmt: skip
        self.models = models
        self.scorer = scorer
        self.prompt_format = prompt_format
        self.sampling = sampling
        self.live = live
        self.system: str | None = None
        self.turns: list[Turn] = []
        self.stopped = False  # Ctrl-C ended the last reply

    def send(self, prompt: str) -> None:
        """Add a turn. Raises RLHFError C13, D06, D08 for an invalid prompt, and as `ReplyScorer.score` does."""
        self._add_turn(prompt, self.turns)

    def retry(self) -> None:
        """Replace the last reply. Raises RLHFError as `send` does."""
        *history, last = self.turns
        self._add_turn(last.prompt, history)

    def _add_turn(self, text: str, history: list[Turn]) -> None:
        """Generate and show all replies, and add them to the history, unless Ctrl-C came before the first token."""
        replies = []
        for model in self.models:
            prompt = self.prompt_format.prompt(self.system, history, model.name, text)
            replies.append(Reply(model, self.prompt_format, prompt, self.scorer.stop_token_id, self.sampling))
        self.sampling = replace(self.sampling, reply_index=self.sampling.reply_index + 1)
        self.stopped = False

        turn = Turn(text, {})
        for reply in replies:
            label = reply.model.name if len(replies) > 1 else ""
            if not self.stopped:
                self._show(reply, label)
            if reply.ids:
                turn.replies[reply.model.name] = reply
                self._score(reply, label)
        if self.live:
            terminal.out()
        if turn.replies:
            self.turns = [*history, turn]

    def _show(self, reply: Reply, label: str) -> None:
        """Print a reply while it is generated."""
        terminal.out(f"{label}: " if label else "", end="")
        try:
            for piece in reply:
                terminal.out(piece, end="")
        except KeyboardInterrupt:
            self._stop()
        terminal.out()

    def _stop(self) -> None:
        if not self.live:
            raise KeyboardInterrupt
        self.stopped = True

    def _score(self, reply: Reply, label: str) -> None:
        reply.stopped = self.stopped and not reply.ended
        try:
            reply.metrics = self.scorer.score(reply.model.weights, reply.prompt, reply.prompt_ids, reply.ids)
        except RLHFError as error:
            if not self.live:
                raise
            terminal.say(str(error))
        except KeyboardInterrupt:
            if self.stopped:  # the second one
                raise
            self._stop()
        metrics = format_metrics(reply)
        terminal.say(f"{label}  {metrics}" if label else metrics, dim=True)


def format_metrics(reply: Reply) -> str:
    """Return the metrics of a reply as one line."""
    metrics = reply.metrics
    parts = [f"{name} {score:.3f}" for name, score in metrics.scores.items()]
    if metrics.total is not None:
        parts.append(f"sum {metrics.total:.3f}")
    if metrics.kl is not None:
        parts.append(f"KL {metrics.kl:.2f}")

    length = len(reply.ids)
    tokens = "1 token" if length == 1 else f"{length} tokens"
    parts.append(f"{tokens}, {_ending(reply)}")
    parts.append(f"{length / reply.seconds:.0f} tokens/s")
    return "  ".join(parts)


def _ending(reply: Reply) -> str:
    if reply.ended:
        return "ended"
    return "stopped" if reply.stopped else "cut off"


def export_rows(session: ChatSession) -> Iterator[dict[str, Any]]:
    """Yield a row {messages} per model; in the single-turn plain-text format, a row {prompt, completion} per reply.

    The key `chat` holds the model, and the sampling parameters and metrics of each reply.
    """
    for model in session.models:
        turns = [turn for turn in session.turns if model.name in turn.replies]
        about: dict[str, Any] = {"model": model.name, "from": model.description}
        if model.sha256:
            about["sha256"] = model.sha256
        replies = [_reply_fields(turn.replies[model.name]) for turn in turns]
        if session.prompt_format.kind == "text":
            for turn, fields in zip(turns, replies, strict=True):
                yield {"prompt": turn.prompt, "completion": turn.replies[model.name].text, "chat": about | fields}
        elif turns:
            messages = session.prompt_format.conversation(session.system, turns, model.name)
            yield {"messages": messages, "chat": about | {"replies": replies}}


def _reply_fields(reply: Reply) -> dict[str, Any]:
    """Return the sampling parameters and metrics of a reply; unknown metrics are absent."""
    sampling, metrics = reply.sampling, reply.metrics
    optional = {"scores": metrics.scores or None, "sum": metrics.total, "kl": metrics.kl}
    return {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": sampling.seed,
        "draw": sampling.reply_index,
        "length": len(reply.ids),
        "ended": reply.ended,
        **{name: value for name, value in optional.items() if value is not None},
    }
