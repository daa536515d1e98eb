"""A model that talks, and a reply while it is made."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlhf_cli import data
from rlhf_cli.chat.cast import Role
from rlhf_cli.chat.turns import Form, Sampling
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import load
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine


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
        return data.pieces(self.tokenizer, self._tokens())

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
