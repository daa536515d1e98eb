"""What a stage starts from, whether it is there yet or not: the shape of each model, the tokenizer, lengths of rows."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_cli import checkpoints, data, sources, terminal
from rlhf_cli.config import CONFIGS, Config, EvalConfig, Options, PPOConfig, RewardConfig, SFTConfig, load
from rlhf_cli.errors import placed
from rlhf_cli.inputs import eval as of_eval
from rlhf_cli.inputs import machine, models
from rlhf_cli.inputs import sft as of_sft
from rlhf_cli.models import loading, tokenizers
from rlhf_cli.plan.ghosts import Lengths
from rlhf_cli.ppo.settings import PPOSettings
from rlhf_cli.sources import Source

SAMPLE = 1000  # rows whose tokens are counted


@dataclass(frozen=True)
class Start:
    """A model's transformers config, and its tokenizer; None where that is still to be made and no data is read."""

    body: Any
    tokenizer: Any


class Chain:
    """Finds what stages start from. A folder that is not finished is what the config beside it will make of it.

    `prompt`: tokens of the longest prompt; no data is read then, and other rows are as long as they may be.
    """

    def __init__(self, configs: Sequence[Config], options: Options, prompt: int | None) -> None:
        self.options, self.prompt = options, prompt
        self.made = {config.folder: config for config in configs}
        self.known: dict[Path, Start] = {}

    def start(self, config: Config, key: str) -> Start:
        """What the key of a config names; of sft.yaml what it trains. Raises RLHFError M01, M04, M07, M08, M10."""
        if not isinstance(config, SFTConfig):
            return self._named(config, key)
        start = self._fresh(config) if config.model.new else self._named(config, key)
        if start.tokenizer is None:
            return start
        tokenizer = of_sft.tokenizer(config, deepcopy(start.tokenizer))
        body = deepcopy(start.body)
        text = body.get_text_config()
        text.vocab_size = max(text.vocab_size, len(tokenizer))
        return Start(body, tokenizer)

    def _named(self, config: Config, key: str) -> Start:
        (reference,) = (one for one in checkpoints.references(config) if one.key == key)
        path = Path(reference.path)
        if path not in self.known:
            is_there = path == config.folder or (path / "manifest.json").exists()  # its own folder is refused below
            maker = None if is_there else self._maker(path)
            self.known[path] = self._of(maker) if maker else self._there(config, reference)
        return self.known[path]

    def apart(self, config: Config) -> set[str]:
        """Keys of the models that are no adapters of models.sft's weights, where PPO trains adapters."""
        if not isinstance(config, PPOConfig) or not config.models.adapters:
            return set()
        sft, *others = checkpoints.references(config)
        return {one.key for one in others if machine.is_scorer(one.key) and not self._stands_on(config, one, sft)}

    def _stands_on(self, config: Config, reference: checkpoints.Reference, sft: checkpoints.Reference) -> bool:
        path = Path(reference.path)
        maker = None if (path / "manifest.json").exists() else self._maker(path)
        if isinstance(maker, RewardConfig):
            return maker.model.adapters is not None and maker.model.path == sft.path
        below = checkpoints.open_reference(config, reference, hashed=False).base
        there = Path(sft.path).is_dir()
        return below is not None and below.path == (
            Path(sft.path) if there else checkpoints.open_reference(config, sft, hashed=False).path
        )

    def _maker(self, folder: Path) -> Config | None:
        beside = folder.parent / f"{folder.name}.yaml"
        if folder not in self.made and folder.name in CONFIGS and beside.is_file():
            self.made[folder] = load(folder.name, beside)
        return self.made.get(folder)

    def _of(self, maker: Config) -> Start:
        return self.start(maker, "model.path" if isinstance(maker, SFTConfig | RewardConfig) else "models.sft")

    def _there(self, config: Config, reference: checkpoints.Reference) -> Start:
        parent = checkpoints.open_reference(config, reference, hashed=False)
        with placed(config.where(reference.key)):
            body = loading.read_config(parent.model, self.options.trust_remote_code)
        return Start(body, models.tokenizer(config, self.options, parent))

    def _fresh(self, config: SFTConfig) -> Start:
        """model.new: a tokenizer of the first rows alone, whose rows are somewhat longer."""
        assert config.model.new
        wanted = config.model.new.tokenizer.vocab_size
        body = of_sft.new_body(config, wanted)
        if self.prompt is not None:
            return Start(body, None)
        with placed(config.where("model.new.tokenizer")):
            tokenizer = tokenizers.train_tokenizer(_first(config.sources()[of_sft.TRAINED_ON]), wanted)
        return Start(body, tokenizer)

    def settings(self, config: EvalConfig) -> PPOSettings | None:
        """The settings of the policy that is evaluated, where a stage of ours made it or will."""
        policy = self._trainer(config)
        return policy.ppo if policy else None

    def snapshots(self, config: EvalConfig) -> int:
        """How many policies on the way are evaluated beside PPO's last one: its best one may come on top."""
        policy = self._trainer(config)
        return max(0, policy.output.snapshots - 1) if policy and config.eval.frontier else 0

    def _trainer(self, config: EvalConfig) -> PPOConfig | None:
        folder = Path(config.models.ppo)
        if (folder / "manifest.json").exists():
            return load("ppo", folder / "config.yaml")
        maker = self._maker(folder)
        return maker if isinstance(maker, PPOConfig) else None

    def lengths(self, config: Config, start: Start) -> Lengths:
        """Tokens of the longest rows. Raises RLHFError D01-D14, C13, C17."""
        if self.prompt is None:
            sources.locate({key: source for key, source in config.sources().items() if source.is_here()})
        with terminal.muted_warnings():
            if isinstance(config, SFTConfig):
                return _of_examples(config, start.tokenizer, whole=self.prompt is not None)
            if isinstance(config, RewardConfig):
                return Lengths(config.reward.max_length - 1, 1) if self.prompt else _of_pairs(config, start.tokenizer)
            response = self._response(config)
            return Lengths(self.prompt or _of_prompts(config, start, response), response)

    def _response(self, config: Config) -> int:
        if isinstance(config, PPOConfig):
            return config.ppo.max_response_length
        assert isinstance(config, EvalConfig)
        return of_eval.sampling(config, self.settings(config), Path(config.models.ppo), None).response_length


def _first(source: Source) -> Source:
    return replace(source, max_rows=min(SAMPLE, source.max_rows or SAMPLE))


def _of_examples(config: SFTConfig, tokenizer: Any, *, whole: bool) -> Lengths:
    """The longest row, and the most tokens of a row that the loss counts."""
    limit = config.sft.max_length
    if whole or config.sft.packing:
        return Lengths(1, limit - 1)
    rows = data.sft_rows(_first(config.sources()["data.train"]), tokenizer, max_length=limit, on_long="drop")
    most = max((sum(row["completion_mask"]) for row in rows), default=1)
    counted = min(most, rows.longest - 1) if config.sft.completion_only_loss else rows.longest - 1
    return Lengths(rows.longest - counted, counted, _mean(row["input_ids"] for row in rows))


def _mean(rows: Iterable[list[int]]) -> float:
    lengths = list(map(len, rows))
    return sum(lengths) / max(1, len(lengths))


def _of_pairs(config: RewardConfig, tokenizer: Any) -> Lengths:
    source = _first(config.sources()["data.train"])
    rows = data.preference_rows(
        source, tokenizer, max_length=config.reward.max_length, on_long="drop", on_identical="drop"
    )
    mean = _mean(row[side] for row in rows for side in ("chosen_ids", "rejected_ids"))
    return Lengths(rows.longest - 1, 1, mean)


def _of_prompts(config: Config, start: Start, response: int) -> int:
    key = "ppo.response_length" if config.stage == "ppo" else "eval.response_length"
    room = loading.prompt_room(start.body, response, config.where(key))
    return data.prompt_rows(_first(config.sources()["data.prompts"]), start.tokenizer, max_length=room).longest
