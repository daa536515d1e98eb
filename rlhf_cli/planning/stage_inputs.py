"""Models, tokenizers and data sizes of stages, including those that earlier stages have yet to write."""

from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rlhf_cli import data, runs, terminal
from rlhf_cli.config import stages
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.config.eval import EvalConfig
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
from rlhf_cli.planning import stage_models
from rlhf_cli.planning.memory import Lengths
from rlhf_cli.runs import resolve
from rlhf_cli.runs.parents import read_manifest
from rlhf_cli.stages.common import batch_sizes, model_loading, reading, trainable_model, training_rows
from rlhf_cli.stages.eval import evaluation_inputs

MAX_TOKENIZED_ROWS = 5000  # of a larger file so many rows are tokenized, spread over the file
TOKENIZER_ROWS = 1000  # rows that the tokenizer of model.new is trained on
Certainty = Literal["exact", "about", "at most"]


@dataclass(frozen=True)
class DataSize:
    """Rows that a stage uses: their lengths, their unit and their number; and the dropped rows.

    `how` certain the number is: "about" if estimated from a sample, "at most" if no row was tokenized.
    `evaluated`: rows of data.eval. `answers`: tokens of an average prompt and of the longest chosen answer of pairs.
    """

    lengths: Lengths
    unit: str
    rows: int
    left_out: int = 0
    asked: int = 0
    how: Certainty = "exact"
    evaluated: int = 0
    answers: Lengths = field(default_factory=lambda: Lengths(1, 1))


def measure_data(config: Config, body: Any, tokenizer: Any, response: int) -> DataSize:
    """Read the data of a stage that starts from a model with config `body`. Raises RLHFError D01-D14, D16, C13."""
    sources.locate({key: source for key, source in config.sources().items() if sources.is_local(source)})
    with terminal.muted_warnings():
        if isinstance(config, SFTConfig) and not config.best_of:
            return _measure_examples(config, tokenizer, body)
        if isinstance(config, RewardConfig | DPOConfig):
            pairs = training_rows.read_split(config, "train", tokenizer, body, sample=MAX_TOKENIZED_ROWS)
            mean = _mean_length(row[side] for row in pairs for side in batch_sizes.PAIR_SIDES)
            longest = max((len(row["chosen_ids"]) - len(row["prompt_ids"]) for row in pairs), default=1)
            answers = Lengths(round(_mean_length(row["prompt_ids"] for row in pairs)), longest)
            logits = 1  # of a row
            if isinstance(config, DPOConfig):
                sides = [len(row[side]) - len(row["prompt_ids"]) for row in pairs for side in batch_sizes.PAIR_SIDES]
                logits = min(max(sides, default=1), pairs.longest - 1)
            size = _data_size(pairs, Lengths(pairs.longest - logits, logits, mean), "pairs")
            return replace(size, evaluated=_count_evaluated(config), answers=answers)
        if isinstance(config, SFTConfig):
            prompts = training_rows.read_split(config, "train", tokenizer, body, sample=MAX_TOKENIZED_ROWS)
        else:
            assert isinstance(config, PPOConfig | EvalConfig)
            prompts = reading.read_prompts(config, "data.prompts", tokenizer, body, response, sample=MAX_TOKENIZED_ROWS)
    mean = _mean_length(prompt.ids for prompt in prompts)
    size = _data_size(prompts, Lengths(prompts.longest, response, prompt_mean=mean), "prompts")
    size = replace(size, evaluated=_count_evaluated(config))
    return replace(size, rows=min(config.eval.n, size.rows)) if isinstance(config, EvalConfig) else size


def max_data_size(config: Config, prompt: int, response: int) -> DataSize:
    """Return the size of data that is not tokenized: rows have their maximum length. Raises RLHFError D01-D04, D12."""
    if isinstance(config, EvalConfig):
        return DataSize(Lengths(prompt, response), "prompts", config.eval.n, how="at most")
    lengths = Lengths(prompt, response)
    if isinstance(config, TRLConfig) and not response:
        longest = stages.settings_of(config).max_length - 1
        lengths = Lengths(longest, 1) if isinstance(config, RewardConfig) else Lengths(1, longest)
    source = config.sources()["data.prompts" if isinstance(config, PPOConfig) else "data.train"]
    count = sum(1 for _ in sources.raw_rows(source)) if steps_follow_rows(config) else 0
    # A conversation gives an example for each of its answers, and a part may be held out.
    return DataSize(lengths, "rows", count, how="about" if isinstance(config, SFTConfig) else "at most")


def steps_follow_rows(config: Config) -> bool:
    """Return True if more rows make more steps."""
    if isinstance(config, TRLConfig):
        return stages.settings_of(config).max_steps is None
    return isinstance(config, PPOConfig) and config.ppo.total_episodes is None


def _measure_examples(config: SFTConfig, tokenizer: Any, body: Any) -> DataSize:
    """Return the longest row as prompt and response: the response is the most tokens of a row that the loss counts."""
    rows = training_rows.read_split(config, "train", tokenizer, body, sample=MAX_TOKENIZED_ROWS)
    if config.sft.packing:
        lengths = Lengths(1, config.sft.max_length - 1)
        sequences = training_rows.num_sequences(config, rows) * rows.stride
        size = _data_size(rows, lengths, "sequences")
        evaluated = round(_count_evaluated(config) * sequences / max(1, size.rows))
        return replace(size, rows=sequences, how="about", evaluated=evaluated)
    most = max((sum(row["completion_mask"]) for row in rows), default=1)
    counted = min(most, rows.longest - 1) if config.sft.completion_only_loss else rows.longest - 1
    mean = _mean_length(row["input_ids"] for row in rows)
    size = _data_size(rows, Lengths(rows.longest - counted, counted, mean), "rows")
    return replace(size, evaluated=_count_evaluated(config))


def _count_evaluated(config: Config) -> int:
    if (source := config.sources().get("data.eval")) is None:
        return 0
    return round(sum(1 for _ in sources.raw_rows(source)) * (source.share.fraction if source.share else 1))


def _data_size(rows: data.Rows[Any], lengths: Lengths, unit: str) -> DataSize:
    kept, dropped, expected = (number * rows.stride for number in (len(rows), rows.num_dropped, rows.num_expected))
    return DataSize(lengths, unit, kept, dropped, expected, "exact" if rows.stride == 1 else "about")


def _mean_length(rows: Iterable[list[int]]) -> float:
    lengths = list(map(len, rows))
    return sum(lengths) / max(1, len(lengths))


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
        self.options, self.prompt = options, prompt
        self.writers = {config.folder: config for config in configs}
        self.specs: dict[Path, ModelSpec] = {}
        self.data_sizes: dict[Any, DataSize] = {}

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
            exists = path == config.folder or (path / "manifest.json").exists()  # its own folder is refused below
            writer = None if exists else self._writer(path)
            if writer is None:
                parent = runs.open_reference(config, reference, hashed=False)
                with at_location(config.where(key)):
                    body = read_config(parent.model, self.options.trust_remote_code)
                self.specs[path] = ModelSpec(body, model_loading.load_tokenizer(config, self.options, parent))
            else:
                self.specs[path] = self.start(writer, "model.path" if isinstance(writer, TRLConfig) else "models.sft")
        return self.specs[path]

    def _writer(self, folder: Path) -> Config | None:
        """Return the config that writes a folder: one of the run's, or the one beside it."""
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
        other.specs, adapters = dict(self.specs), Adapters(kind=config.models.adapters.kind)
        for folder, writer in self.writers.items():
            if isinstance(writer, RewardConfig) and not writer.model.adapters:
                model = writer.model.model_copy(update={"adapters": adapters})
                other.writers = {**other.writers, folder: writer.model_copy(update={"model": model})}
        return other

    def separate_models(self, config: Config) -> set[str]:
        """Return the keys of reward and value models that are not adapters of the policy's weights, where they may be.

        They may be in SFT with best_of, and in PPO if it trains adapters.
        """
        if not (config.models.adapters if isinstance(config, PPOConfig) else getattr(config, "best_of", None)):
            return set()
        sft, *others = runs.references(config)
        scorers = [reference for reference in others if resolve.is_scorer_key(reference.key)]
        return {reference.key for reference in scorers if not self._is_adapter(config, reference, sft)}

    def adapters_of_sft(self, config: EvalConfig) -> set[str]:
        """Return the keys of models that are adapters of models.sft's weights."""
        in_memory = {use.key for use in stage_models.models_in_memory(config)}
        references = {reference.key: reference for reference in runs.references(config)}
        others = [references[key] for key in in_memory - {"models.sft"}]
        return {each.key for each in others if self._is_adapter(config, each, references["models.sft"])}

    def _is_adapter(self, config: Config, reference: runs.Reference, sft: runs.Reference) -> bool:
        path = Path(reference.path)
        writer = None if (path / "manifest.json").exists() else self._writer(path)
        if isinstance(writer, PPOConfig):
            return writer.models.adapters is not None and writer.models.sft == sft.path
        if isinstance(writer, TRLConfig):
            return writer.model.adapters is not None and writer.model.path == sft.path
        base = runs.open_reference(config, reference, hashed=False).base
        if base is None:
            return False
        folder = Path(sft.path)
        return base.path == (folder if folder.is_dir() else runs.open_reference(config, sft, hashed=False).path)

    def trainer(self, config: EvalConfig) -> PPOConfig | None:
        """Return the config of the policy that is evaluated, if a stage of this package trains it."""
        folder = Path(config.models.ppo)
        if (folder / "manifest.json").exists():
            return load("ppo", folder / "config.yaml") if read_manifest(folder)[0].stage != "dpo" else None
        writer = self._writer(folder)
        return writer if isinstance(writer, PPOConfig) else None

    def data_size(self, config: Config, start: ModelSpec) -> DataSize:
        """Return the size of the stage's data. Raises RLHFError D01-D14, D16, C13, C17."""
        response = self._response_length(config)
        limit = getattr(getattr(config, config.stage), "max_length", None)
        key = config.stage, limit, response  # other settings that save memory do not change the data
        if key not in self.data_sizes:
            if self.prompt is not None:
                self.data_sizes[key] = max_data_size(config, self.prompt, response)
            else:
                size = measure_data(config, start.body, start.tokenizer, response)
                lengths = replace(size.lengths, response_mean=self._mean_response(config, response))
                self.data_sizes[key] = replace(size, lengths=lengths, how=size.how if start.exact else "about")
        return self.data_sizes[key]

    def _response_length(self, config: Config) -> int:
        """Return the tokens of the longest response; 0 if the stage generates none."""
        if isinstance(config, PPOConfig):
            return config.ppo.max_response_length
        if isinstance(config, SFTConfig) and config.best_of:
            return config.best_of.response_length
        if isinstance(config, EvalConfig):
            trainer, policy = self.trainer(config), Path(config.models.ppo)
            settings = trainer.ppo if trainer else None
            return evaluation_inputs.sampling_params(config, settings, policy, None).response_length
        return 0

    def _mean_response(self, config: Config, limit: int) -> float:
        """Return the tokens of an average response of a finished policy, as PPO measured it; 0 if not known."""
        if not isinstance(config, EvalConfig):
            return 0
        manifest, problem = runs.read_manifest(Path(config.models.ppo))
        return 0 if problem else min(limit, manifest.metrics.get("objective/response_length", 0))
