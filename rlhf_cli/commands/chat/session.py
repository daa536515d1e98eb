"""A chat session: generates and shows replies, scores them, and exports the conversation."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from rlhf_cli import terminal
from rlhf_cli.commands.chat.generate import (
    ConversationFormat,
    LoadedModel,
    Reply,
    ReplyMetrics,
    SamplingParams,
    StreamingReply,
    Turn,
)
from rlhf_cli.commands.chat.models import ChatModels
from rlhf_cli.config.base import Options
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import EnsembleScores, Rollout
from rlhf_cli.ppo.scores import weighted_sum
from rlhf_cli.rewards.model import EnsembleReward, RetokenizingReward
from rlhf_cli.rewards.source import RewardFn, RewardSource
from rlhf_cli.stages import ppo_setup, setup
from rlhf_cli.stages.eval import sequence_kl


class ReplyScorer:
    """Scores replies as PPO and the evaluation do. `sft` is the loaded SFT model; None: no KL is measured.

    Raises RLHFError as the stages do if a reward model cannot be loaded.
    """

    def __init__(
        self, chat_models: ChatModels, options: Options, tokenizer: Any, stop_token_id: int | None, sft: Any
    ) -> None:
        self.config, self.sft, self.stop_token_id, self.missing = (
            chat_models.config,
            sft,
            stop_token_id,
            [*chat_models.missing],
        )
        texts, rewards = self._texts(chat_models, options)
        config = chat_models.config.model_copy(update={"rewards": rewards})
        writing = setup.PolicyText(chat_models.models[0].parent, tokenizer, stop_token_id, [])
        cache = ppo_setup.RewardModelCache(config, options, chat_models.parents, writing)
        self.sources: dict[str, RewardSource] = ppo_setup.build_reward_sources(config, texts, cache)

    def _texts(self, chat_models: ChatModels, options: Options) -> tuple[dict[str, RewardFn], dict[str, Any]]:
        """Build the sources that read text; return them, and the config sections of all available sources."""
        texts: dict[str, RewardFn] = {}
        rewards: dict[str, Any] = {}
        for name in chat_models.rewards:
            section = {name: chat_models.config.rewards[name]}
            try:
                texts |= ppo_setup.build_reward_fns(
                    chat_models.config.model_copy(update={"rewards": section}), options, chat_models.parents
                )
            except RLHFError as error:
                self.missing.append(f"no {name}: {error.problems[0].text}")
            else:
                rewards |= section
        return texts, rewards

    def score(self, policy: Any, prompt: str | Conversation, ids: list[int], response: list[int]) -> ReplyMetrics:
        """Return the metrics of one reply of `policy`, given as token ids. The KL is at the training temperature.

        Raises RLHFError R05 if a source fails or returns no finite number, R01 if the KL is not finite.
        """
        for source in self.sources.values():
            for model in source.members.values() if isinstance(source, EnsembleReward) else [source]:
                if isinstance(model, RetokenizingReward):
                    model.add_prompt(ids, prompt)
        rollout = Rollout.from_lists([ids], [response], stop_token_id=self.stop_token_id).to(policy.device)
        scores = {name: self._score(name, source, rollout) for name, source in self.sources.items()}
        kl = None
        if self.sft is not None and policy is not self.sft:
            (kl,) = sequence_kl(policy, self.sft, rollout, self.config.ppo.temperature, max_rows=1)
            if not math.isfinite(kl):
                raise RLHFError("R01", f"the KL of the reply is {kl}: the logits of a model are not finite")
        return ReplyMetrics(scores, self._total(scores), kl)

    def _score(self, name: str, source: RewardSource, rollout: Rollout) -> float:
        scores = source(rollout)
        score = float(scores.score if isinstance(scores, EnsembleScores) else scores)
        if not math.isfinite(score):
            raise RLHFError("R05", f"reward `{name}` gave {score}", hint="return a finite number")
        return score

    def _total(self, scores: Mapping[str, float]) -> float | None:
        """Return the weighted sum that PPO maximizes; None if it equals the only score, or a term is missing."""
        terms = {name: source for name, source in self.config.rewards.items() if source.weight}
        is_plain = len(terms) == 1 and all(term.weight == 1 and not term.clip for term in terms.values())
        if is_plain or not terms.keys() <= scores.keys():
            return None
        raw = {name: torch.tensor([scores[name]]) for name in terms}
        weights = {name: source.weight for name, source in terms.items()}
        clips = {name: source.clip for name, source in terms.items() if source.clip is not None}
        return float(weighted_sum(raw, weights, clips))


class ChatSession:
    """The models, their sampling parameters, and the turns since the last /clear.

    `live`: on a terminal, where Ctrl-C stops a reply and errors are printed; otherwise both end the command.
    """

    def __init__(
        self,
        models: list[LoadedModel],
        scorer: ReplyScorer,
        prompt_format: ConversationFormat,
        stop_token_id: int | None,
        sampling: SamplingParams,
        *,
        live: bool,
    ) -> None:
        self.models, self.scorer, self.prompt_format = models, scorer, prompt_format
        self.stop_token_id, self.live = stop_token_id, live
        self.sampling = sampling
        self.system: str | None = None
        self.turns: list[Turn] = []
        self.stopped = False  # Ctrl-C ended the last reply

    def send(self, prompt: str) -> None:
        """Add a turn. Raises RLHFError C13, D06, D08 for an invalid prompt, and as `ReplyScorer.score` does."""
        if turn := self._generate_turn(prompt, self.turns):
            self.turns.append(turn)

    def retry(self) -> None:
        """Replace the last reply. Raises RLHFError as `send` does."""
        *history, last = self.turns
        if turn := self._generate_turn(last.prompt, history):
            self.turns[-1] = turn

    def _generate_turn(self, text: str, history: Sequence[Turn]) -> Turn | None:
        """Generate and show all replies; None if Ctrl-C came before the first token."""
        replies = []
        for model in self.models:
            prompt = self.prompt_format.prompt(self.system, history, model.name, text)
            replies.append(StreamingReply(model, self.prompt_format, prompt, self.stop_token_id, self.sampling))
        self.sampling, self.stopped = replace(self.sampling, reply_index=self.sampling.reply_index + 1), False
        turn, compared = Turn(text, {}), len(replies) > 1
        side_by_side = compared and terminal.fits_side_by_side(len(replies))
        if side_by_side:
            self._show_side_by_side(replies)
        for reply in replies:
            if not side_by_side and not self.stopped:
                terminal.print_partial(f"{reply.model.name}: " if compared else "")
                self._show(reply)
            self._finish(reply, turn, compared=compared)
        if self.live:
            terminal.out()
        return turn if turn.replies else None

    def _show(self, reply: StreamingReply) -> None:
        try:
            for piece in reply:
                terminal.print_partial(piece)
        except KeyboardInterrupt:
            self._stop()
        terminal.out()

    def _show_side_by_side(self, replies: list[StreamingReply]) -> None:
        """Show the replies in columns, generating one token of each in turn."""
        with terminal.Columns([reply.model.name for reply in replies]) as columns:
            try:
                for pieces in zip_longest(*replies, fillvalue=""):
                    for column, piece in enumerate(pieces):
                        columns.add(column, piece)
            except KeyboardInterrupt:
                self._stop()

    def _stop(self) -> None:
        if not self.live:
            raise KeyboardInterrupt
        self.stopped = True

    def _finish(self, stream: StreamingReply, turn: Turn, *, compared: bool) -> None:
        """Add a reply to the turn, and show its metrics."""
        if not stream.ids:
            return
        stopped = self.stopped and not stream.ended
        reply = Reply(stream.text, len(stream.ids), stream.ended, stopped, stream.seconds, stream.sampling)
        try:
            metrics = self.scorer.score(stream.model.model, stream.prompt, stream.prompt_ids, stream.ids)
            reply = replace(reply, metrics=metrics)
        except RLHFError as error:
            if not self.live:
                raise
            terminal.say(str(error))
        except KeyboardInterrupt:
            if self.stopped:  # the second one
                raise
            self._stop()
        turn.replies[stream.model.name] = reply
        terminal.log_dim((f"{stream.model.name}  " if compared else "") + format_metrics(reply))


def format_metrics(reply: Reply) -> str:
    """Return the metrics of a reply as one line."""
    metrics = reply.metrics
    scores = metrics.scores if metrics.total is None else {**metrics.scores, "sum": metrics.total}
    parts = [f"{name} {score:.3f}" for name, score in scores.items()]
    parts += [f"KL {metrics.kl:.2f}"] if metrics.kl is not None else []
    ending = "ended" if reply.ended else "stopped" if reply.stopped else "cut off"
    parts.append(f"{reply.length} token{'s' * (reply.length != 1)}, {ending}")
    return "  ".join([*parts, f"{reply.length / reply.seconds:.0f} tokens/s"])


def export_rows(session: ChatSession) -> Iterator[dict[str, Any]]:
    """Yield a row {messages} per model; in the single-turn plain-text format, a row {prompt, completion} per reply.

    The key `chat` holds the model, and the sampling parameters and metrics of each reply.
    """
    for model in session.models:
        turns = [turn for turn in session.turns if model.name in turn.replies]
        if not session.prompt_format.is_multi_turn:
            yield from (_single_turn_row(model, turn, turn.replies[model.name]) for turn in turns)
        elif turns:
            messages = session.prompt_format.conversation(session.system, turns, model.name)
            replies = [_reply_fields(turn.replies[model.name]) for turn in turns]
            yield {"messages": messages, "chat": {**_model_fields(model), "replies": replies}}


def _single_turn_row(model: LoadedModel, turn: Turn, reply: Reply) -> dict[str, Any]:
    return {"prompt": turn.prompt, "completion": reply.text, "chat": {**_model_fields(model), **_reply_fields(reply)}}


def _model_fields(model: LoadedModel) -> dict[str, Any]:
    info = model.info
    return {"model": info.name, "from": info.description} | ({"sha256": info.sha256} if info.sha256 else {})


def _reply_fields(reply: Reply) -> dict[str, Any]:
    """Return the sampling parameters and metrics of a reply; unknown metrics are left out."""
    sampling, metrics = reply.sampling, reply.metrics
    optional = {"scores": metrics.scores or None, "sum": metrics.total, "kl": metrics.kl}
    return {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": sampling.seed,
        "draw": sampling.reply_index,
        "length": reply.length,
        "ended": reply.ended,
        **{name: value for name, value in optional.items() if value is not None},
    }
