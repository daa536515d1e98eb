"""Models, tokenizers and data sizes of stages, including those that earlier stages have yet to make."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rlhf_cli import data, runs, terminal
from rlhf_cli.commands.plan.meta import Lengths
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.loading import load
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.config.training import CONFIGS, RewardConfig, SFTConfig
from rlhf_cli.data import sources
from rlhf_cli.data.sources import read_rows
from rlhf_cli.errors import at_location
from rlhf_cli.models import tokenizers
from rlhf_cli.models.load import read_config
from rlhf_cli.stages import eval_setup, hardware, ppo_setup, reward_setup, setup, sft_setup

MAX_TOKENIZED_ROWS = 5000  # rows of which all are tokenised; of more at most so many, spread over the file
Certainty = Literal["exact", "about", "at most"]


@dataclass(frozen=True)
class DataSize:
    """Rows that are not left out: their lengths, what they are, and how many.

    `how` true the number is: "about" from a sample, "at most" where no row's length is known.
    """

    lengths: Lengths
    unit: str
    rows: int
    left_out: int = 0
    asked: int = 0
    how: Certainty = "exact"


def measure_data(config: Config, body: Any, tokenizer: Any, response: int) -> DataSize:
    """Of the data of a stage that starts from a model `body`. Raises RLHFError D01-D14, D16, C13."""
    sources.locate({key: source for key, source in config.sources().items() if sources.is_local(source)})
    with terminal.muted_warnings():
        if isinstance(config, SFTConfig):
            return _examples(config, tokenizer, body)
        if isinstance(config, RewardConfig):
            pairs = reward_setup.read_data(config, "train", tokenizer, body, sample=MAX_TOKENIZED_ROWS)
            mean = _mean(row[side] for row in pairs for side in ("chosen_ids", "rejected_ids"))
            return _data_size(pairs, Lengths(pairs.longest - 1, 1, mean), "pairs")
        if isinstance(config, PPOConfig):
            prompts = ppo_setup.read_prompts(config, "prompts", tokenizer, body, sample=MAX_TOKENIZED_ROWS)
            return _data_size(prompts, Lengths(prompts.longest, response), "prompts")
        assert isinstance(config, EvalConfig)
        prompts = eval_setup.read_prompts(config, tokenizer, body, response, sample=MAX_TOKENIZED_ROWS)
        found = _data_size(prompts, Lengths(prompts.longest, response), "prompts")
        return replace(found, rows=min(config.eval.n, found.rows))


def max_data_size(config: Config, prompt: int, response: int) -> DataSize:
    """Of data whose rows are not to be tokenised: they are as long as they may be. Raises RLHFError D01-D04, D12."""
    if isinstance(config, SFTConfig):
        lengths = Lengths(1, config.sft.max_length - 1)
    elif isinstance(config, RewardConfig):
        lengths = Lengths(config.reward.max_length - 1, 1)
    else:
        lengths = Lengths(prompt, response)
    if isinstance(config, EvalConfig):
        return DataSize(lengths, "prompts", config.eval.n, how="at most")
    source = config.sources()["data.prompts" if isinstance(config, PPOConfig) else "data.train"]
    count = sum(1 for _ in sources.read_rows(source)) if steps_go_by_rows(config) else 0
    # A conversation is an example for each of its answers, and a part may be held out.
    return DataSize(lengths, "rows", count, how="about" if isinstance(config, SFTConfig) else "at most")


def steps_go_by_rows(config: Config) -> bool:
    """Whether more rows make more steps."""
    if isinstance(config, SFTConfig | RewardConfig):
        return (config.sft if isinstance(config, SFTConfig) else config.reward).max_steps is None
    return isinstance(config, PPOConfig) and config.ppo.total_episodes is None


def _examples(config: SFTConfig, tokenizer: Any, body: Any) -> DataSize:
    """The longest row, and the most tokens of a row that the loss counts."""
    strategy = sft_setup.packing_strategy(config, log=False)
    rows = sft_setup.read_data(config, "train", tokenizer, strategy, body, sample=MAX_TOKENIZED_ROWS)
    if strategy:
        lengths = Lengths(1, config.sft.max_length - 1)
        sequences = sft_setup.num_sequences(config, rows) * rows.stride
        return replace(_data_size(rows, lengths, "sequences"), rows=sequences, how="about")
    most = max((sum(row["completion_mask"]) for row in rows), default=1)
    counted = min(most, rows.longest - 1) if config.sft.completion_only_loss else rows.longest - 1
    mean = _mean(row["input_ids"] for row in rows)
    return _data_size(rows, Lengths(rows.longest - counted, counted, mean), "rows")


def _data_size(rows: data.Rows[Any], lengths: Lengths, unit: str) -> DataSize:
    count, left_out, asked = (number * rows.stride for number in (len(rows), rows.num_dropped, rows.num_expected))
    return DataSize(lengths, unit, count, left_out, asked, "exact" if rows.stride == 1 else "about")


def _mean(rows: Iterable[list[int]]) -> float:
    lengths = list(map(len, rows))
    return sum(lengths) / max(1, len(lengths))


TOKENIZER_ROWS = 1000  # rows that a tokenizer is trained on here


@dataclass(frozen=True)
class ModelSpec:
    """A model's transformers config, and its tokenizer; None where that is still to be made and no data is read.

    `exact`: whether the stage's tokenizer will be the very same.
    """

    body: Any
    tokenizer: Any
    exact: bool = True


class ModelResolver:
    """Finds what stages start from. A folder that is not finished is what the config beside it will make of it.

    `prompt`: tokens of the longest prompt; no data is read then, and other rows are as long as they may be.
    """

    def __init__(self, configs: Sequence[Config], options: Options, prompt: int | None) -> None:
        self.options, self.prompt = options, prompt
        self.made = {config.folder: config for config in configs}
        self.known: dict[Path, ModelSpec] = {}
        self.read: dict[Any, DataSize] = {}

    def start(self, config: Config, key: str) -> ModelSpec:
        """What the key of a config names; of sft.yaml what it trains. Raises RLHFError M01, M04, M07, M08, M10."""
        if not isinstance(config, SFTConfig):
            return self._named(config, key)
        start = self._fresh(config) if config.model.new else self._named(config, key)
        if start.tokenizer is None:
            return start
        tokenizer = sft_setup.prepare_tokenizer(config, deepcopy(start.tokenizer))
        body = deepcopy(start.body)
        text = body.get_text_config()
        text.vocab_size = max(text.vocab_size, len(tokenizer))
        return replace(start, body=body, tokenizer=tokenizer)

    def _named(self, config: Config, key: str) -> ModelSpec:
        (reference,) = (one for one in runs.references(config) if one.key == key)
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
        sft, *others = runs.references(config)
        return {one.key for one in others if hardware.is_scorer_key(one.key) and not self._stands_on(config, one, sft)}

    def _stands_on(self, config: Config, reference: runs.Reference, sft: runs.Reference) -> bool:
        path = Path(reference.path)
        maker = None if (path / "manifest.json").exists() else self._maker(path)
        if isinstance(maker, RewardConfig):
            return maker.model.adapters is not None and maker.model.path == sft.path
        below = runs.open_reference(config, reference, hashed=False).base
        there = Path(sft.path).is_dir()
        return below is not None and below.path == (
            Path(sft.path) if there else runs.open_reference(config, sft, hashed=False).path
        )

    def _maker(self, folder: Path) -> Config | None:
        beside = folder.parent / f"{folder.name}.yaml"
        if folder not in self.made and folder.name in CONFIGS and beside.is_file():
            maker = load(folder.name, beside)
            self.made.setdefault(maker.folder, maker)  # its `run:` may lead elsewhere
        return self.made.get(folder)

    def _of(self, maker: Config) -> ModelSpec:
        return self.start(maker, "model.path" if isinstance(maker, SFTConfig | RewardConfig) else "models.sft")

    def _there(self, config: Config, reference: runs.Reference) -> ModelSpec:
        parent = runs.open_reference(config, reference, hashed=False)
        with at_location(config.where(reference.key)):
            body = read_config(parent.model, self.options.trust_remote_code)
        return ModelSpec(body, setup.load_tokenizer(config, self.options, parent))

    def _fresh(self, config: SFTConfig) -> ModelSpec:
        """model.new: a tokenizer of the first rows alone, whose rows are somewhat longer."""
        assert config.model.new
        wanted = config.model.new.tokenizer.vocab_size
        body = sft_setup.new_model_config(config, wanted)
        if self.prompt is not None:
            return ModelSpec(body, None)
        source = config.sources()[sft_setup.TOKENIZER_DATA_KEY]
        most = min(TOKENIZER_ROWS, source.max_rows or TOKENIZER_ROWS)
        with at_location(config.where("model.new.tokenizer")):
            tokenizer = tokenizers.train_tokenizer(replace(source, max_rows=most), wanted)
        return ModelSpec(body, tokenizer, exact=next(islice(read_rows(source), most, None), None) is None)

    def settings(self, config: EvalConfig) -> PPOSettings | None:
        """The settings of the policy that is evaluated, where a stage of ours made it or will."""
        policy = self._trainer(config)
        return policy.ppo if policy else None

    def snapshots(self, config: EvalConfig) -> int:
        """Certainty many policies on the way are evaluated beside PPO's last one: its best one may come on top."""
        policy = self._trainer(config)
        return max(0, policy.output.snapshots - 1) if policy and config.eval.frontier else 0

    def _trainer(self, config: EvalConfig) -> PPOConfig | None:
        folder = Path(config.models.ppo)
        if (folder / "manifest.json").exists():
            return load("ppo", folder / "config.yaml")
        maker = self._maker(folder)
        return maker if isinstance(maker, PPOConfig) else None

    def remaining(self, config: Config, start: ModelSpec) -> DataSize:
        """What remains of the stage's data. Raises RLHFError D01-D14, D16, C13, C17."""
        response = self._response(config)
        limit = getattr(getattr(config, config.stage), "max_length", None)
        key = config.stage, limit, response  # what would save memory changes no more of it
        if key not in self.read:
            if self.prompt is not None:
                self.read[key] = max_data_size(config, self.prompt, response)
            else:
                found = measure_data(config, start.body, start.tokenizer, response)
                self.read[key] = found if start.exact else replace(found, how="about")
        return self.read[key]

    def _response(self, config: Config) -> int:
        """Tokens of the longest response; 0 of a stage that writes none."""
        if isinstance(config, PPOConfig):
            return config.ppo.max_response_length
        if isinstance(config, EvalConfig):
            return eval_setup.sampling_params(
                config, self.settings(config), Path(config.models.ppo), None
            ).response_length
        return 0
