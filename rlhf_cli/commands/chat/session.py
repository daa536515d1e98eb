"""A chat session: prompts in the format of the training data, streamed replies, and export of the conversation."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import BaseModel, Field

from rlhf_cli import data, terminal
from rlhf_cli.commands.common.models import ChatModel, ReplyMetrics, ReplyScorer
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.texts import render_transcript
from rlhf_cli.data.tokens import Conversation, render
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import load
from rlhf_cli.models.batch import Prompts, stop_ids
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages.common import prompt_forms

_MARKER = "system-prompt-marker"


class ReplySampling(BaseModel, frozen=True):
    """Sampling parameters of a reply. Its noise depends on the seed and `draw`, the number of the reply."""

    temperature: float = Field(ge=0, allow_inf_nan=False)
    max_new_tokens: int = Field(ge=1)
    seed: int = Field(ge=0, lt=2**32)
    draw: int = 0

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


@dataclass
class Reply:
    """A model's reply: its tokens so far, the seconds they took, and how it ended."""

    model: ChatModel
    prompt: str | Conversation
    prompt_ids: list[int]
    sampling: ReplySampling
    ids: list[int] = field(default_factory=list)
    text: str = ""  # without special tokens
    seconds: float = 0.0
    ending: str = "cut off"  # else ended, with the stop token, or stopped, by Ctrl-C
    metrics: ReplyMetrics = field(default_factory=ReplyMetrics)

    @property
    def room(self) -> int:
        """Return the maximum length that the context and the sampling leave."""
        context = load.context_length(self.model.weights.config)
        if context is None:
            return self.sampling.max_new_tokens
        return min(self.sampling.max_new_tokens, context - len(self.prompt_ids))

    def summary(self) -> str:
        """Return the metrics as one line."""
        metrics = self.metrics
        parts = [f"{name} {score:.3f}" for name, score in metrics.scores.items()]
        if metrics.sum is not None:
            parts.append(f"sum {metrics.sum:.3f}")
        if metrics.kl is not None:
            parts.append(f"KL {metrics.kl:.2f}")
        length = len(self.ids)
        parts.append(f"{length} {'token' if length == 1 else 'tokens'}, {self.ending}")
        parts.append(f"{length / self.seconds:.0f} tokens/s")
        return "  ".join(parts)

    def fields(self) -> dict[str, Any]:
        """Return the sampling parameters and metrics as JSON; unknown metrics are absent."""
        known = {name: value for name, value in asdict(self.metrics).items() if value not in (None, {})}
        return {**self.sampling.model_dump(), "length": len(self.ids), "ended": self.ending == "ended", **known}


@dataclass(frozen=True)
class Turn:
    """A prompt and the models' replies to it, by name. A model stopped before its first token has no reply."""

    prompt: str
    replies: dict[str, Reply]


@dataclass
class ChatSession:
    """The models, their sampling parameters, and the turns since the last /clear.

    `live`: on a terminal, where Ctrl-C stops a reply; otherwise it ends the command.
    """

    models: list[ChatModel]
    scorer: ReplyScorer
    prompt_format: ConversationFormat
    sampling: ReplySampling
    live: bool
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    stopped: bool = False  # Ctrl-C ended the last reply

    def send(self, prompt: str) -> None:
        """Add a turn. Raises RLHFError C13, D06, D08 for an invalid prompt, and as `ReplyScorer.score` does."""
        self._add_turn(prompt, self.turns)

    def retry(self) -> None:
        """Replace the last reply. Raises RLHFError as `send` does."""
        *history, last = self.turns
        self._add_turn(last.prompt, history)

    def _add_turn(self, text: str, history: list[Turn]) -> None:
        """Generate and show the replies; those that have a token are added to the history before they are scored."""
        replies = [self._new_reply(model, text, history) for model in self.models]
        self.sampling = self.sampling.model_copy(update={"draw": self.sampling.draw + 1})
        self.stopped = False

        turn = Turn(text, {})
        for reply in replies:
            name = reply.model.name
            is_compared = len(replies) > 1
            self._generate(reply, f"{name}: " if is_compared else "")
            if reply.ids:
                turn.replies[name] = reply
                self.turns = [*history, turn]
                reply.metrics = self.scorer.score(reply.model, reply.prompt, reply.prompt_ids, reply.ids)
                terminal.say(f"{name}  {reply.summary()}" if is_compared else reply.summary(), dim=True)
            if self.stopped:
                break
        if self.live:
            terminal.answer()

    def _new_reply(self, model: ChatModel, text: str, history: list[Turn]) -> Reply:
        """Return an empty reply. Raises RLHFError C13 if the context has no room for it."""
        prompt = self.prompt_format.prompt(self.system, history, model.name, text)
        reply = Reply(model, prompt, self.prompt_format.encode(prompt), self.sampling)
        if reply.room < 1:
            limit = f"the context of {model.name} has {load.context_length(model.weights.config)}, reply included"
            text = f"the prompt has {len(reply.prompt_ids)} tokens, and {limit}"
            raise RLHFError("C13", text, hint="/clear starts a new conversation, /undo removes the last turn")
        return reply

    def _generate(self, reply: Reply, label: str) -> None:
        """Generate a reply and print it meanwhile, until Ctrl-C.

        Sampled by PPO's engine: the full softmax at the temperature, including the stop token. The noise depends only
        on the seed and the number of the reply, so that compared models get the same.
        """
        sampling = reply.sampling
        tokenizer = self.prompt_format.tokenizer
        seed = derive_seed(sampling.seed, "chat", sampling.draw)
        prompts = replace(Prompts.from_lists([reply.prompt_ids]), seeds=(seed,), response_length=reply.room)
        stop = self.scorer.stop_token_id
        engine = HFEngine(reply.model.weights, stop, tokenizer.pad_token_id or 0, sampling.temperature)

        def tokens() -> Iterator[int]:
            for token in engine.stream(prompts):
                reply.ids.append(token)
                yield token

        terminal.answer(label, end="")
        start = time.perf_counter()
        try:
            for piece in data.decode_stream(tokenizer, tokens()):
                terminal.answer(piece, end="")
        except KeyboardInterrupt:
            if not self.live:
                raise
            self.stopped = True
            reply.ending = "stopped"
        reply.seconds = time.perf_counter() - start
        terminal.answer()
        reply.text = tokenizer.decode(reply.ids, skip_special_tokens=True)
        if reply.ids and reply.ids[-1] in stop_ids(stop):
            reply.ending = "ended"


def export_rows(session: ChatSession) -> Iterator[dict[str, Any]]:
    """Yield a row {messages} per model; in the single-turn plain-text format, a row {prompt, completion} per reply.

    The key `chat` holds the model, and the sampling parameters and metrics of each reply.
    """
    for model in session.models:
        turns = [turn for turn in session.turns if model.name in turn.replies]
        about: dict[str, Any] = {"model": model.name, "from": model.description}
        if model.sha256:
            about["sha256"] = model.sha256
        if session.prompt_format.kind == "text":
            for turn in turns:
                reply = turn.replies[model.name]
                yield {"prompt": turn.prompt, "completion": reply.text, "chat": about | reply.fields()}
        elif turns:
            messages = session.prompt_format.conversation(session.system, turns, model.name)
            replies = [turn.replies[model.name].fields() for turn in turns]
            yield {"messages": messages, "chat": about | {"replies": replies}}
