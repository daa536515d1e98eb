"""What stages read, for their plan: models, tokenizers and data, of earlier stages that have yet to run, too."""

import math
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_cli import runs
from rlhf_cli.commands.common.plan.data_size import max_data_size, measure_data
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import SHARES, EvalConfig
from rlhf_cli.config.loading import load
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sections import Adapters
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.config.stages import CONFIGS, TRLConfig
from rlhf_cli.data import sources
from rlhf_cli.errors import at_location
from rlhf_cli.models import tokenizers
from rlhf_cli.models.load import read_config
from rlhf_cli.planning.estimate import DataSize, StageInputs
from rlhf_cli.planning.target import Target
from rlhf_cli.runs import resolve
from rlhf_cli.runs.layout import MANIFEST
from rlhf_cli.stages.common import model_loading, trainable_model
from rlhf_cli.stages.eval import evaluation_inputs

TOKENIZER_ROWS = 1000  # rows that the tokenizer of model.new is trained on


@dataclass(frozen=True)
class ModelSpec:
    """A model's transformers config, and its tokenizer; None if it does not exist yet and no data is read.

    `exact`: whether the stage's tokenizer will be the same.
    """

    body: Any
    tokenizer: Any
    exact: bool = True


class ModelResolver:
    """Finds the models that stages start from: a folder that is not finished is what its config will write.

    `prompt`: tokens of the longest prompt; no data is read then, and other rows have their maximum length.
    """

    def __init__(self, configs: Sequence[Config], options: Options, prompt: int | None) -> None:
        self.options = options
        self.prompt = prompt
        self.writers = {config.folder: config for config in configs}
        self.specs: dict[Path, ModelSpec] = {}
        self.data_sizes: dict[Any, DataSize] = {}

    def stage_inputs(self, config: Config, mode: str | None, target: Target) -> StageInputs:
        """Return what a stage reads; in a `mode` that is not the config's, all models may share the policy's weights.

        Raises RLHFError as `rlhf check` does, for missing or invalid models and data.
        """
        uses = resolve.models_in_memory(config)
        specs = {use.key: self.start(config, use.key) for use in uses}
        data = self.data_size(config, next(iter(specs.values())))
        bodies = {key: spec.body for key, spec in specs.items()}
        if isinstance(config, EvalConfig):
            sampled = self._num_sampled(config, data.rows, target)
            return StageInputs(bodies, data, self._adapters_of_first(config), sampled)
        adapters = set(bodies) if mode else self._adapters_of_first(config)
        return StageInputs(bodies, data, adapters)

    def start(self, config: Config, key: str) -> ModelSpec:
        """Return the model that a key names, or that sft.yaml trains. Raises RLHFError M01, M04, M07, M08, M10."""
        if not isinstance(config, SFTConfig) or key != "model.path":
            return self._referenced(config, key)
        spec = self._new_model(config) if config.model.new else self._referenced(config, key)
        if spec.tokenizer is None:
            return spec
        tokenizer = trainable_model.prepare_tokenizer(config, deepcopy(spec.tokenizer))
        body = deepcopy(spec.body)
        text = body.get_text_config()
        text.vocab_size = max(text.vocab_size, len(tokenizer))
        return replace(spec, body=body, tokenizer=tokenizer)

    def _referenced(self, config: Config, key: str) -> ModelSpec:
        (reference,) = (each for each in runs.references(config) if each.key == key)
        path = Path(reference.path)
        if path not in self.specs:
            writer = None if path == config.folder else self._writer(path)  # its own folder is refused below
            if writer:
                start = "model.path" if isinstance(writer, TRLConfig) else "models.sft"
                self.specs[path] = self.start(writer, start)
            else:
                self.specs[path] = self._existing(config, reference)
        return self.specs[path]

    def _existing(self, config: Config, reference: runs.Reference) -> ModelSpec:
        parent = runs.open_reference(config, reference, hashed=False)
        with at_location(config.where(reference.key)):
            body = read_config(parent.model, self.options.trust_remote_code)
        return ModelSpec(body, model_loading.load_tokenizer(config, self.options, parent))

    def _writer(self, folder: Path) -> Config | None:
        """Return the config that will write a folder, of the run or beside it; None if it is finished."""
        if (folder / MANIFEST).exists():
            return None
        beside = folder.parent / f"{folder.name}.yaml"
        if folder not in self.writers and folder.name in CONFIGS and beside.is_file():
            config = load(folder.name, beside)
            self.writers.setdefault(config.folder, config)  # its `run:` may name another folder
        return self.writers.get(folder)

    def _new_model(self, config: SFTConfig) -> ModelSpec:
        """Return model.new, with a tokenizer of the first rows only, whose rows are somewhat longer."""
        assert config.model.new
        vocabulary = config.model.new.tokenizer.vocab_size
        body = trainable_model.new_model_config(config)
        if self.prompt is not None:
            return ModelSpec(body, None)
        source = config.sources()[trainable_model.TOKENIZER_DATA_KEY]
        count = min(TOKENIZER_ROWS, source.max_rows or TOKENIZER_ROWS)
        with at_location(config.where("model.new.tokenizer")):
            tokenizer = tokenizers.train_tokenizer(replace(source, max_rows=count), vocabulary)
        complete = next(islice(sources.raw_rows(source), count, None), None) is None
        return ModelSpec(body, tokenizer, exact=complete)

    def with_adapters(self, config: Config) -> "ModelResolver":
        """Return a resolver in which reward.yaml has the kind of adapters that a ppo.yaml has, if it has none."""
        if not isinstance(config, PPOConfig) or not config.models.adapters:
            return self
        other = copy(self)
        other.specs = dict(self.specs)
        adapters = Adapters(kind=config.models.adapters.kind)
        for folder, writer in self.writers.items():
            if isinstance(writer, RewardConfig) and not writer.model.adapters:
                model = writer.model.model_copy(update={"adapters": adapters})
                other.writers = {**other.writers, folder: writer.model_copy(update={"model": model})}
        return other

    def _adapters_of_first(self, config: Config) -> set[str]:
        """Return the keys of models that are adapters of the first model's weights, where the stage can share them.

        That is in PPO if it trains adapters, in SFT with best_of, and in an evaluation.
        """
        if isinstance(config, PPOConfig) and not config.models.adapters:
            return set()
        in_memory = {use.key for use in resolve.models_in_memory(config)}
        references = runs.references(config)
        others = [each for each in references[1:] if each.key in in_memory]
        return {each.key for each in others if self._is_adapter(config, each, references[0])}

    def _is_adapter(self, config: Config, reference: runs.Reference, sft: runs.Reference) -> bool:
        writer = self._writer(Path(reference.path))
        if isinstance(writer, PPOConfig):
            return writer.models.adapters is not None and writer.models.sft == sft.path
        if isinstance(writer, TRLConfig):
            return writer.model.adapters is not None and writer.model.path == sft.path
        base = runs.open_reference(config, reference, hashed=False).base
        if base is None:
            return False
        folder = Path(sft.path)
        if not folder.is_dir():
            folder = runs.open_reference(config, sft, hashed=False).path
        return base.path == folder

    def trainer(self, config: EvalConfig) -> PPOConfig | None:
        """Return the config of the policy that is evaluated, if a stage of this package trains it."""
        folder = Path(config.models.ppo)
        if (folder / MANIFEST).exists():
            manifest, _ = runs.read_manifest(folder)
            return None if manifest.stage == "dpo" else load("ppo", folder / "config.yaml")
        writer = self._writer(folder)
        return writer if isinstance(writer, PPOConfig) else None

    def _num_sampled(self, config: EvalConfig, prompts: int, target: Target) -> int:
        """Return the responses that each process samples in an evaluation."""
        settings = config.eval
        policies = 2 + len(config.policies)
        policies += bool(config.models.base) + bool(config.models.previous)
        trainer = self.trainer(config)
        shares = settings.interpolate or []
        if settings.interpolate is None and trainer:
            shares = list(SHARES)  # as many with ppo.average; one more if max_kl cuts them off
        rounds = policies * len(settings.modes) + settings.draws + len(shares)
        if trainer and settings.frontier:
            # Beside PPO's last policy; its best one may be evaluated too.
            rounds += max(0, trainer.output.snapshots - 1)
        return math.ceil(prompts / target.processes) * rounds

    def data_size(self, config: Config, start: ModelSpec) -> DataSize:
        """Return the size of the stage's data. Raises RLHFError D01-D14, D16, C13, C17."""
        response = self._response_length(config)
        limit = getattr(getattr(config, config.stage), "max_length", None)
        key = config.stage, limit, response  # other settings that save memory do not change the data
        if key not in self.data_sizes:
            self.data_sizes[key] = self._data_size(config, start, response)
        return self.data_sizes[key]

    def _data_size(self, config: Config, start: ModelSpec, response: int) -> DataSize:
        if self.prompt is not None:
            return max_data_size(config, self.prompt, response)
        size = measure_data(config, start.body, start.tokenizer, response)
        lengths = replace(size.lengths, response_mean=self._mean_response(config, response))
        return replace(size, lengths=lengths, how=size.how if start.exact else "about")

    def _response_length(self, config: Config) -> int:
        """Return the tokens of the longest response; 0 if the stage generates none."""
        if isinstance(config, PPOConfig):
            return config.ppo.max_response_length
        if isinstance(config, SFTConfig) and config.best_of:
            return config.best_of.response_length
        if isinstance(config, EvalConfig):
            trainer = self.trainer(config)
            settings = trainer.ppo if trainer else None
            return evaluation_inputs.sampling_params(config, settings, Path(config.models.ppo), None).response_length
        return 0

    def _mean_response(self, config: Config, limit: int) -> float:
        """Return the tokens of an average response of a finished policy, as PPO measured it; 0 if not known."""
        if not isinstance(config, EvalConfig):
            return 0
        manifest, problem = runs.read_manifest(Path(config.models.ppo))
        return 0 if problem else min(limit, manifest.known_metrics.response_length or 0)
