"""`rlhf chat RUN`: talk to what a run made, each reply with its reward and its distance from the SFT model.

Reads only: nothing in RUN changes, and no lock keeps a stage from running beside it.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.chat import commands
from rlhf_cli.chat.cast import Cast, cast
from rlhf_cli.chat.judge import Judge
from rlhf_cli.chat.lines import Lines
from rlhf_cli.chat.speech import Voice
from rlhf_cli.chat.talk import Talk
from rlhf_cli.chat.turns import Form, Sampling
from rlhf_cli.checkpoints import LAST, shown
from rlhf_cli.config import Options, PPOConfig
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import devices, load, tokenizers
from rlhf_cli.progress import Progress
from rlhf_cli.rewards import no_bytecode_files
from rlhf_cli.stages import ppo_setup


@dataclass(frozen=True)
class Wishes:
    """What a command line says of a chat; None: as the run has it."""

    stage: str | None = None
    step: str = LAST
    compare: str | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0


def run(folder: Path, wishes: Wishes, options: Options) -> None:
    """Talk until the input ends, /quit, or a second Ctrl-C.

    Off a terminal each line of stdin is a prompt or a command; replies go to stdout, all else to stderr, and the first
    error ends it. Raises RLHFError as `cast` does for the models, M01, M06-M08 for one that cannot be loaded, and off a
    terminal what `Talk.say` and the commands raise, and D04.
    """
    with no_bytecode_files():
        found = cast(folder, wishes.stage, wishes.step, wishes.compare)
        talk = _load(found, _sampling(found.config, wishes), options)
        for line in _opening(found, talk):
            terminal.say(f"chat     {line}")
        _converse(talk)


def _sampling(config: PPOConfig, wishes: Wishes) -> Sampling:
    """How replies are drawn at first: as in PPO's training, where nothing else is wished."""
    temperature, length = wishes.temperature, wishes.max_new_tokens
    if temperature is not None and not math.isfinite(temperature):
        raise RLHFError("C06", f"--temperature {temperature}: a number from 0 up is needed")
    return Sampling(
        config.ppo.temperature if temperature is None else temperature, length or config.ppo.max_response_length,
        wishes.seed,
    )  # fmt: skip


def _load(found: Cast, how: Sampling, options: Options) -> Talk:
    """All models in memory: those that answer, the SFT model, and the sources of reward."""
    first, trust = found.roles[0].model, options.trust_remote_code
    tokenizer = tokenizers.load_tokenizer(first.model, trust_remote_code=trust)
    parents = {role.model.model: role.model for role in found.roles}
    parents |= {found.sft.model: found.sft} if found.sft else {}
    loaded: dict[Path, Any] = {}
    with Progress("chat", len(parents) + len(found.rewards), "model", brief=True) as bar:
        for folder, parent in parents.items():
            model = load.load_causal_lm(folder, **load.load_kwargs(found.config.models, trust))
            tokenizers.check_vocabulary(model, tokenizer, shown(parent.path))
            loaded[folder] = model.to(devices.device()).eval()
            bar.advance(note=shown(parent.path))
        stop = ppo_setup.stop_token_id(
            found.config, tokenizer, loaded[first.model].get_input_embeddings().weight.shape[0]
        )
        judge = Judge(found, options, tokenizer, stop, loaded[found.sft.model] if found.sft else None)
        bar.advance(len(found.rewards), note="rewards")
    voices = [Voice(role, loaded[role.model.model]) for role in found.roles]
    return Talk(voices, judge, Form.of(found.written, tokenizer), stop, how, live=terminal.is_talk())


def _opening(found: Cast, talk: Talk) -> Iterator[str]:
    """Who talks, how prompts are written and replies drawn, and what the numbers are."""
    for role in found.roles:
        yield f"{role.name}: {role.told}"
    how, ppo, seed = talk.how, found.config.ppo, f"seed {talk.how.seed}"
    trained = f"temperature {ppo.temperature:g}, at most {ppo.max_response_length} tokens"
    drawn = f"temperature {how.temperature:g}, at most {how.max_new_tokens} tokens"
    yield f"{drawn}, as PPO has it; {seed}" if drawn == trained else f"{drawn}, {seed} (PPO: {trained})"
    yield _of_prompts(talk.form, found.written)
    told = [f"{name} ({_place(found.config.rewards[name])})" for name in talk.judge.sources]
    if found.sft and any(role.model is not found.sft for role in found.roles):
        name = found.sft.hub or shown(found.sft.path)
        told.append(f"KL from {name} at temperature {ppo.temperature:g}, in nats")
    yield from [f"below each reply: {', '.join(told)}"] if told else []
    yield from talk.judge.missing
    if talk.live:
        yield "/help lists the commands; Ctrl-C stops a reply, Ctrl-D ends the chat"


def _of_prompts(form: Form, written: str | None) -> str:
    if form.kind == "text":
        unused = "; the chat template was not used there" if form.tokenizer.chat_template else ""
        seen = "as in training" if written else "as there is no chat template"
        return f"prompts: plain text, {seen}{unused}; each stands by itself, without what was said before"
    what = "the chat template" if form.kind == "template" else "dialogues in one text (Human:, Assistant:)"
    return f"prompts: {what}, with what was said before" + ("" if written else "; those of the training are not here")


def _place(source: Any) -> str:
    """Where a source of reward comes from."""
    models = [source.model, source.pipeline, *source.models.values()]
    named = [shown(path) if os.path.isabs(path) else path for path in models if path]  # else a hub id
    return ", ".join(named) or source.function or source.builtin or source.url


def _converse(talk: Talk) -> None:
    lines = Lines()
    while terminal.is_heard():
        try:
            if (line := lines.next()) is None:
                return
            talk.stopped = False
            if commands.is_command(line):
                if not commands.obey(talk, line):
                    return
            elif line.strip():
                talk.say(line[1:] if line.startswith("//") else line)
        except RLHFError as error:
            if not talk.live:
                raise
            terminal.say(str(error))
        except KeyboardInterrupt:
            if not talk.live:
                raise
            terminal.out()
            if talk.stopped:
                return
            talk.stopped = True
            terminal.say("Ctrl-C again, Ctrl-D or /quit ends the chat")
