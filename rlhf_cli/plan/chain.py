"""What a stage starts from, whether it is there yet or not: the shape of each model, the tokenizer, the rows."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_cli import checkpoints
from rlhf_cli.config import CONFIGS, Config, EvalConfig, Options, PPOConfig, RewardConfig, SFTConfig, load
from rlhf_cli.errors import placed
from rlhf_cli.inputs import machine, models
from rlhf_cli.inputs import sft as of_sft
from rlhf_cli.models import tokenizers
from rlhf_cli.models.load import read_config
from rlhf_cli.plan import remaining
from rlhf_cli.plan.remaining import Remaining
from rlhf_cli.ppo.settings import PPOSettings
from rlhf_cli.sources import read_rows
from rlhf_cli.stages import eval_setup

SAMPLE = 1000  # rows that a tokenizer is trained on here


@dataclass(frozen=True)
class Start:
    """A model's transformers config, and its tokenizer; None where that is still to be made and no data is read.

    `exact`: whether the stage's tokenizer will be the very same.
    """

    body: Any
    tokenizer: Any
    exact: bool = True


class Chain:
    """Finds what stages start from. A folder that is not finished is what the config beside it will make of it.

    `prompt`: tokens of the longest prompt; no data is read then, and other rows are as long as they may be.
    """

    def __init__(self, configs: Sequence[Config], options: Options, prompt: int | None) -> None:
        self.options, self.prompt = options, prompt
        self.made = {config.folder: config for config in configs}
        self.known: dict[Path, Start] = {}
        self.read: dict[Any, Remaining] = {}

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
        return replace(start, body=body, tokenizer=tokenizer)

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
            maker = load(folder.name, beside)
            self.made.setdefault(maker.folder, maker)  # its `run:` may lead elsewhere
        return self.made.get(folder)

    def _of(self, maker: Config) -> Start:
        return self.start(maker, "model.path" if isinstance(maker, SFTConfig | RewardConfig) else "models.sft")

    def _there(self, config: Config, reference: checkpoints.Reference) -> Start:
        parent = checkpoints.open_reference(config, reference, hashed=False)
        with placed(config.where(reference.key)):
            body = read_config(parent.model, self.options.trust_remote_code)
        return Start(body, models.tokenizer(config, self.options, parent))

    def _fresh(self, config: SFTConfig) -> Start:
        """model.new: a tokenizer of the first rows alone, whose rows are somewhat longer."""
        assert config.model.new
        wanted = config.model.new.tokenizer.vocab_size
        body = of_sft.new_body(config, wanted)
        if self.prompt is not None:
            return Start(body, None)
        source = config.sources()[of_sft.TRAINED_ON]
        most = min(SAMPLE, source.max_rows or SAMPLE)
        with placed(config.where("model.new.tokenizer")):
            tokenizer = tokenizers.train_tokenizer(replace(source, max_rows=most), wanted)
        return Start(body, tokenizer, exact=next(islice(read_rows(source), most, None), None) is None)

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

    def remaining(self, config: Config, start: Start) -> Remaining:
        """What remains of the stage's data. Raises RLHFError D01-D14, D16, C13, C17."""
        response = self._response(config)
        limit = getattr(getattr(config, config.stage), "max_length", None)
        key = config.stage, limit, response  # what would save memory changes no more of it
        if key not in self.read:
            if self.prompt is not None:
                self.read[key] = remaining.unread(config, self.prompt, response)
            else:
                found = remaining.of(config, start.body, start.tokenizer, response)
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
