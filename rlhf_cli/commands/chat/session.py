"""The state of a chat, and one turn of it: replies that are shown while they are made, and their numbers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from rlhf_cli import terminal
from rlhf_cli.commands.chat.generate import Form, Numbers, Reply, Sampling, Speech, Turn, Voice
from rlhf_cli.commands.chat.models import Cast
from rlhf_cli.config.base import Options
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError
from rlhf_cli.models.batch import EnsembleScores, Rollout
from rlhf_cli.ppo.scores import weighted_sum
from rlhf_cli.rewards.model import EnsembleReward, RetokenizingReward
from rlhf_cli.rewards.source import RewardFn, RewardSource
from rlhf_cli.stages import ppo_setup, setup
from rlhf_cli.stages.eval import sequence_kl


class Judge:
    """Scores replies as PPO and the evaluation do. `sft` is the loaded SFT model; None: no KL is measured.

    Raises RLHFError as the stages do for reward models that cannot be loaded.
    """

    def __init__(self, cast: Cast, options: Options, tokenizer: Any, stop_token_id: int | None, sft: Any) -> None:
        self.config, self.sft, self.stop_token_id, self.missing = cast.config, sft, stop_token_id, [*cast.missing]
        texts, rewards = self._texts(cast, options)
        config = cast.config.model_copy(update={"rewards": rewards})
        writing = setup.PolicyText(cast.roles[0].model, tokenizer, stop_token_id, [])
        cache = ppo_setup.RewardModelCache(config, options, cast.parents, writing)
        self.sources: dict[str, RewardSource] = ppo_setup.build_reward_sources(config, texts, cache)

    def _texts(self, cast: Cast, options: Options) -> tuple[dict[str, RewardFn], dict[str, Any]]:
        """The sources that read text, and the config's sections of all that can be asked."""
        texts: dict[str, RewardFn] = {}
        rewards: dict[str, Any] = {}
        for name in cast.rewards:
            alone = {name: cast.config.rewards[name]}
            try:
                texts |= ppo_setup.build_reward_fns(
                    cast.config.model_copy(update={"rewards": alone}), options, cast.parents
                )
            except RLHFError as error:
                self.missing.append(f"no {name}: {error.problems[0].text}")
            else:
                rewards |= alone
        return texts, rewards

    def numbers(self, policy: Any, prompt: str | Conversation, ids: list[int], response: list[int]) -> Numbers:
        """Of one reply of `policy` to a prompt, both as token ids. KL is read at the temperature of the training.

        Raises RLHFError R05 where a source fails or gives no finite number, R01 where KL is none.
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
                raise RLHFError("R01", f"the KL of the reply is {kl}: a model gives no finite logits for it")
        return Numbers(scores, self._total(scores), kl)

    def _score(self, name: str, source: RewardSource, rollout: Rollout) -> float:
        said = source(rollout)
        score = float(said.score if isinstance(said, EnsembleScores) else said)
        if not math.isfinite(score):
            raise RLHFError("R05", f"reward `{name}` gave {score}", hint="return a finite number")
        return score

    def _total(self, scores: Mapping[str, float]) -> float | None:
        """The sum that PPO maximises; None where it is the only score that counts, or one of its parts is missing."""
        parts_of_it = {name: source for name, source in self.config.rewards.items() if source.weight}
        alone = len(parts_of_it) == 1 and all(each.weight == 1 and not each.clip for each in parts_of_it.values())
        if alone or not parts_of_it.keys() <= scores.keys():
            return None
        raw = {name: torch.tensor([scores[name]]) for name in parts_of_it}
        weights = {name: source.weight for name, source in parts_of_it.items()}
        clips = {name: source.clip for name, source in parts_of_it.items() if source.clip is not None}
        return float(weighted_sum(raw, weights, clips))


class Talk:
    """Who talks, how replies are drawn, and what was said since the last /clear.

    `live`: a person types, who may stop a reply with Ctrl-C; else whatever is wrong ends the command.
    """

    def __init__(
        self, voices: list[Voice], judge: Judge, form: Form, stop_token_id: int | None, how: Sampling, *, live: bool
    ) -> None:
        self.voices, self.judge, self.form, self.stop_token_id, self.live = voices, judge, form, stop_token_id, live
        self.how = how
        self.system: str | None = None
        self.turns: list[Turn] = []
        self.stopped = False  # whether Ctrl-C has ended the last reply

    def say(self, said: str) -> None:
        """The next turn. Raises RLHFError C13, D06, D08 for what cannot be answered, R05 as `Judge.numbers` does."""
        if turn := self._answered(said, self.turns):
            self.turns.append(turn)

    def retry(self) -> None:
        """Another reply in place of the last one. Raises RLHFError as `say` does."""
        *before, last = self.turns
        if turn := self._answered(last.said, before):
            self.turns[-1] = turn

    def _answered(self, said: str, before: Sequence[Turn]) -> Turn | None:
        """The turn with all replies, each shown as it comes; None where Ctrl-C came before the first word."""
        speeches = []
        for voice in self.voices:
            prompt = self.form.prompt(self.system, before, voice.name, said)
            speeches.append(Speech(voice, self.form, prompt, self.stop_token_id, self.how))
        self.how, self.stopped = replace(self.how, draws=self.how.draws + 1), False
        turn, compared = Turn(said, {}), len(speeches) > 1
        together = compared and terminal.fits_side_by_side(len(speeches))
        if together:
            self._hear_together(speeches)
        for speech in speeches:
            if not together and not self.stopped:
                terminal.print_partial(f"{speech.voice.name}: " if compared else "")
                self._hear(speech)
            self._take(speech, turn, compared=compared)
        if self.live:
            terminal.out()
        return turn if turn.replies else None

    def _hear(self, speech: Speech) -> None:
        try:
            for piece in speech:
                terminal.print_partial(piece)
        except KeyboardInterrupt:
            self._stop()
        terminal.out()

    def _hear_together(self, speeches: list[Speech]) -> None:
        """A token of each in turn, beside one another."""
        with terminal.Columns([speech.voice.name for speech in speeches]) as columns:
            try:
                for pieces in zip_longest(*speeches, fillvalue=""):
                    for column, piece in enumerate(pieces):
                        columns.add(column, piece)
            except KeyboardInterrupt:
                self._stop()

    def _stop(self) -> None:
        if not self.live:
            raise KeyboardInterrupt
        self.stopped = True

    def _take(self, speech: Speech, turn: Turn, *, compared: bool) -> None:
        """Keep what was said, and tell its numbers."""
        if not speech.ids:
            return
        stopped = self.stopped and not speech.ended
        reply = Reply(speech.text, len(speech.ids), speech.ended, stopped, speech.seconds, speech.how)
        try:
            numbers = self.judge.numbers(speech.voice.model, speech.prompt, speech.prompt_ids, speech.ids)
            reply = replace(reply, numbers=numbers)
        except RLHFError as error:
            if not self.live:
                raise
            terminal.say(str(error))
        except KeyboardInterrupt:
            if self.stopped:  # the second one
                raise
            self._stop()
        turn.replies[speech.voice.name] = reply
        terminal.log_dim((f"{speech.voice.name}  " if compared else "") + told(reply))


def told(reply: Reply) -> str:
    """The numbers of a reply in a line."""
    numbers = reply.numbers
    scores = numbers.scores if numbers.total is None else {**numbers.scores, "sum": numbers.total}
    said = [f"{name} {score:.3f}" for name, score in scores.items()]
    said += [f"KL {numbers.kl:.2f}"] if numbers.kl is not None else []
    how = "ended" if reply.ended else "stopped" if reply.stopped else "cut off"
    said.append(f"{reply.length} token{'s' * (reply.length != 1)}, {how}")
    return "  ".join([*said, f"{reply.length / reply.seconds:.0f} tokens/s"])


def rows(talk: Talk) -> Iterator[dict[str, Any]]:
    """Of each model one row {messages}; of plain text, which has no turns, a row {prompt, completion} a reply.

    Under `chat` stands which model it was, how each reply was drawn, and its numbers.
    """
    for voice in talk.voices:
        turns = [turn for turn in talk.turns if voice.name in turn.replies]
        if not talk.form.has_turns:
            yield from (_alone(voice, turn, turn.replies[voice.name]) for turn in turns)
        elif turns:
            messages = talk.form.conversation(talk.system, turns, voice.name)
            replies = [_reply(turn.replies[voice.name]) for turn in turns]
            yield {"messages": messages, "chat": {**_model(voice), "replies": replies}}


def _alone(voice: Voice, turn: Turn, reply: Reply) -> dict[str, Any]:
    return {"prompt": turn.said, "completion": reply.text, "chat": {**_model(voice), **_reply(reply)}}


def _model(voice: Voice) -> dict[str, Any]:
    role = voice.role
    return {"model": role.name, "from": role.told} | ({"sha256": role.sha256} if role.sha256 else {})


def _reply(reply: Reply) -> dict[str, Any]:
    """How a reply was drawn, and its numbers; what is not known is absent."""
    how, numbers = reply.how, reply.numbers
    known = {"scores": numbers.scores or None, "sum": numbers.total, "kl": numbers.kl}
    return {
        "temperature": how.temperature,
        "max_new_tokens": how.max_new_tokens,
        "seed": how.seed,
        "draw": how.draws,
        "length": reply.length,
        "ended": reply.ended,
        **{name: value for name, value in known.items() if value is not None},
    }
