"""Checks of `rlhf check` that need torch: tokenizers, templates, every row of data, and optionally models."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from rlhf_cli import data, distributed, runs
from rlhf_cli.config import stages
from rlhf_cli.config.base import Config, Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig, PPOSettings, check_num_shared_layers, scale_to_world_size
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sft import BestOfSettings, SFTConfig
from rlhf_cli.config.stages import TRLConfig
from rlhf_cli.errors import RLHFError, at_location, shown
from rlhf_cli.evaluation import reward_card
from rlhf_cli.judges.costs import most_costs
from rlhf_cli.models import build, load, lora, row_trial, tokenizers
from rlhf_cli.models.initial import check_initial
from rlhf_cli.pipeline.check_report import CheckReport, StageCheck
from rlhf_cli.ppo.rollout import uses_cache
from rlhf_cli.rewards import trial
from rlhf_cli.rewards.results import RewardFormError
from rlhf_cli.rewards.signature import RewardFn
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import is_policy_key, is_scorer_key
from rlhf_cli.stages.common import (
    batch_sizes,
    machine,
    model_loading,
    reading,
    scoring,
    trainable_model,
    training_rows,
)
from rlhf_cli.stages.eval import evaluation_inputs, pairwise_judges, people_judges
from rlhf_cli.stages.ppo import prompt_rows, reward_judges, reward_sources, setup

Row = TypeVar("Row")
Prompts = data.Rows[Any] | None


@dataclass(frozen=True)
class StartModel:
    """The model that a stage starts from: an existing folder, or the output of a stage that has yet to run."""

    parent: Parent | None = None  # None if nothing is known about it
    tokenizer: Any = None
    model_config: Any = None  # of transformers


@dataclass(frozen=True)
class Scorer:
    """A reward model that a stage reads."""

    model_config: Any  # of transformers
    tokenizer: Any  # its own, if it does not read the policy's tokens


class StageValidator:
    """Checks stages in the order of the chain. A stage may start from the output that an earlier one would write."""

    def __init__(self, report: CheckReport, options: Options, *, deep: bool, runs_here: bool) -> None:
        """Check what `options.nproc` processes would do. Raises RLHFError C07, E04 for that number."""
        self.report = report
        self.options = options
        self.num_processes = distributed.resolve_num_processes(options.nproc) if options.nproc else 1
        self.deep = deep
        self.runs_here = runs_here
        self.pending_outputs: dict[Path, StartModel] = {}
        self.trained_on: list[data.Rows[Any]] = []
        self.policy_settings: dict[Path, PPOSettings] = {}

    def check(self, stage: StageCheck) -> None:
        """Check one stage."""
        if not stage.finished:  # a finished stage needs no memory or disk space
            self.report.attempt(machine.check, stage.config, stage.parents, runs_here=self.runs_here)

        config = stage.config
        if isinstance(config, PPOConfig):
            self._check_ppo(stage, config)
        elif isinstance(config, EvalConfig):
            self._check_eval(stage, config)
        else:
            assert isinstance(config, TRLConfig)
            self._check_training(stage, config)
        if self.deep:
            self._load_models(stage)

    def _processes(self, stage: StageCheck) -> int:
        """Return in how many processes a stage would run; a finished one, which does not run again, counts as one."""
        return 1 if stage.finished else self.num_processes

    # SFT, reward model and DPO

    def _check_training(self, stage: StageCheck, config: TRLConfig) -> None:
        """Check the model, the rows and the batches; the number of packed sequences is not yet known."""
        start = self._check_start(stage, config)
        if isinstance(config, SFTConfig) and "data.train" in stage.data:
            self.report.attempt(training_rows.log_packing, config)

        def read(split: str) -> data.Rows[Any]:
            return training_rows.read_split(config, split, start.tokenizer, start.model_config)

        rows = self._read_rows(stage, "data.train", partial(read, "train"))
        held_out = self._read_rows(stage, "data.eval", partial(read, "eval"))
        if isinstance(config, RewardConfig):
            self._check_reward_models(stage, start.tokenizer)
        if isinstance(config, SFTConfig) and config.best_of:
            self._check_best_of(stage, config.best_of, start, rows, held_out)
        if rows is not None:
            processes = self._processes(stage)
            with self.report.collecting():
                training_rows.check_rows(config, rows, held_out, start.model_config, processes=processes)
            is_packed = isinstance(config, SFTConfig) and config.sft.packing
            settings = stages.settings_of(config)
            if settings.max_steps or not is_packed:
                batch_sizes.warn_long_intervals(config, settings.steps(len(rows), processes))
            batches = batch_sizes.describe_batches(config, rows, processes, packed=0 if is_packed else None)
            self.report.add(config.stage, "batches", batches)
        self._add_pending_output(stage, start)

    def _check_start(self, stage: StageCheck, config: TRLConfig) -> StartModel:
        """Check the model that a training starts from; return it with the tokenizer to train with."""
        start = self._load_start(stage, "model.path")
        model_config = start.model_config
        tokenizer = None
        with self.report.collecting():
            if isinstance(config, SFTConfig) and config.model.new is not None:
                model_config = trainable_model.new_model_config(config)
                tokenizer = self._new_tokenizer(stage, config)
            if start.parent and model_config is not None:
                if isinstance(config, RewardConfig):
                    trainable_model.check_can_sample(config, model_config)
                    check_initial(config, self.options, stage.parents)
                lora.check_adapters(config, model_config)
            if start.parent and start.tokenizer:
                if isinstance(config, SFTConfig):
                    _check_vocabulary(model_config, start.tokenizer, config.where("model.path"))
                tokenizer = trainable_model.prepare_tokenizer(config, start.tokenizer, start.parent.stage)
        return StartModel(start.parent, tokenizer, model_config)

    def _check_best_of(
        self, stage: StageCheck, best_of: BestOfSettings, start: StartModel, rows: Prompts, held_out: Prompts
    ) -> None:
        """Check the reward model that selects the answers SFT is trained on."""
        scorers = self._check_reward_models(stage, start.tokenizer)
        if rows is not None:
            self._check_retokenized(stage, scorers, [*rows, *(held_out or [])])
            sampled = f"{best_of.n} answers of up to {best_of.response_length} tokens to each prompt are sampled"
            self.report.add("sft", "best_of", f"{sampled}, the best is trained on")

    def _new_tokenizer(self, stage: StageCheck, config: SFTConfig) -> Any:
        """Train the tokenizer of model.new and build the model if `deep`, since both take time."""
        assert config.model.new
        if not self.deep:
            text = "sft model.new: its tokenizer and lengths in tokens; use --deep to train it now"
            self.report.not_checked.append(text)
            return None
        if trainable_model.TOKENIZER_DATA_KEY not in stage.data:
            return None
        tokenizer = trainable_model.prepare_tokenizer(config, trainable_model.train_tokenizer(config))
        with at_location(config.where("model.new")):
            model = build.new_causal_lm(config.model.new.config_fields(), tokenizer)
            row_trial.require_rows_alone(model)
        return tokenizer

    # PPO

    def _check_ppo(self, stage: StageCheck, config: PPOConfig) -> None:
        start = self._check_policies(stage)
        build_reward_fns = partial(reward_sources.build_reward_fns, load_models=False)
        reward_fns = self.report.attempt(build_reward_fns, config, self.options, stage.parents) or {}
        self.report.attempt(reward_sources.check_ensembles, config, stage.parents)
        self.report.attempt(check_initial, config, self.options, stage.parents)
        self.report.attempt(setup.check_hub_push, config, stage.parents.get("models.sft"))
        if not stage.finished:
            self.report.attempt(reward_card.check_required, config, stage.parents)
        with self.report.collecting():
            if start.model_config is not None:
                check_num_shared_layers(config, start.model_config)
                lora.check_adapters(config, start.model_config)

        scorers = self._check_reward_models(stage, start.tokenizer)
        with self.report.collecting():
            _check_ends(config, start, scorers)
        self._check_prompts(stage, config, start, scorers, reward_fns)
        self._add_pending_output(stage, start)
        self.policy_settings[config.folder] = config.ppo

    def _check_prompts(
        self,
        stage: StageCheck,
        config: PPOConfig,
        start: StartModel,
        scorers: Mapping[str, Scorer],
        reward_fns: Mapping[str, RewardFn],
    ) -> None:
        """Read the rows of PPO, and call its reward functions on some."""
        length = config.ppo.max_response_length

        def read(key: str) -> data.Rows[data.Prompt]:
            return reading.read_prompts(config, key, start.tokenizer, start.model_config, length)

        prompts = self._read_rows(stage, "data.prompts", partial(read, "data.prompts"))
        held_out = self._read_rows(stage, "data.eval_prompts", partial(read, "data.eval_prompts"))
        read_ptx = partial(prompt_rows.read_ptx, config, start.tokenizer, start.model_config)
        self._read_rows(stage, "data.ptx_data", read_ptx)
        if prompts is None:
            return

        self._check_retokenized(stage, scorers, [*prompts, *(held_out or [])])
        processes = self._processes(stage)
        config = self.report.attempt(scale_to_world_size, config, processes) or config
        self.report.attempt(prompt_rows.check_prompt_counts, config, prompts, held_out)
        functions = {name: config.rewards[name].function for name in reward_fns}
        with self.report.collecting():
            reward_sources.check_reward_columns(config, reward_fns, prompts, held_out)
            self._try_functions(stage, "rewards", functions, prompts, start.tokenizer)
        if not stage.finished:
            self._check_reward_judges(config, prompts)
        self.report.add("ppo", "batches", prompt_rows.describe_batches(config, prompts, processes))

    def _check_reward_judges(self, config: PPOConfig, prompts: Sequence[data.Prompt]) -> None:
        """Check how often the run may ask the judges among its rewards, and add what they cost at most."""
        self.report.attempt(reward_judges.check_calls_of_run, config, len(prompts))
        num_pairs = reward_judges.most_pairs(config, len(prompts))
        self._add_costs(config, num_pairs, prompts, response_length=config.ppo.max_response_length)

    def _add_costs(
        self,
        config: PPOConfig | EvalConfig,
        num_pairs: int,
        prompts: Sequence[data.Prompt] | None,
        *,
        response_length: int,
    ) -> None:
        """Add what judges cost at most; without the prompts, beside their tokens."""
        section = "rewards" if isinstance(config, PPOConfig) else "judges"
        prompt_tokens = fmean(len(prompt.ids) for prompt in prompts) if prompts else 0.0
        with self.report.collecting():
            costs = most_costs(config, num_pairs, prompt_tokens=prompt_tokens, response_tokens=response_length)
            for name, cost in costs.items():
                self.report.add(config.stage, f"{section}.{name}", str(cost))

    # Evaluation

    def _check_eval(self, stage: StageCheck, config: EvalConfig) -> None:
        start = self._check_policies(stage)
        judges = self.report.attempt(evaluation_inputs.judge_functions, config) or {}
        evaluation_inputs.warn_of_selection_by_reward(config)
        if stage.parents.keys() >= {"models.sft", "models.ppo"}:
            self.report.attempt(evaluation_inputs.shares_between, config, self.options, stage.parents)

        scorers = self._check_reward_models(stage, start.tokenizer)
        length = self._response_length(stage, config)
        read = partial(reading.read_prompts, config, "data.prompts", start.tokenizer, start.model_config, length)
        rows = self._read_rows(stage, "data.prompts", read)
        if not stage.finished:  # a finished evaluation calls nothing
            self._check_pairwise_judges(config, rows, length)
        if rows is None:
            return

        self._check_people(stage, config, rows)
        self._check_retokenized(stage, scorers, list(rows))
        functions = {name: config.judges[name] for name in judges}
        with self.report.collecting():
            evaluation_inputs.check_columns_read(config, judges, rows)
            self._try_functions(stage, "judges", functions, rows, start.tokenizer)
        for train_rows in self.trained_on:
            data.warn_shared(train_rows, rows, where=config.where("data.prompts"))

    def _check_pairwise_judges(
        self, config: EvalConfig, rows: Sequence[data.Prompt] | None, response_length: int
    ) -> None:
        """Check the judges that compare answers, and add what they cost at most; without rows, beside the prompts."""
        count = config.eval.n if rows is None else min(config.eval.n, len(rows))
        self.report.attempt(pairwise_judges.check_judges, config, count)
        self._add_costs(config, count, rows, response_length=response_length)

    def _check_people(self, stage: StageCheck, config: EvalConfig, rows: Sequence[data.Prompt]) -> None:
        """Check the labels of people, which must be of the models that are evaluated."""
        if not config.people_judges or not stage.data.issuperset(config.sources()):
            return
        if not stage.parents.keys() >= {"models.sft", "models.ppo"}:
            self.report.not_checked.append("eval judges: the labels of people, since their models are still to be made")
            return
        people = self.report.attempt(people_judges.read_people, config, stage.parents, rows) or {}
        for name, judge in people.items():
            self.report.add("eval", f"judges.{name}", people_judges.describe(judge))

    def _response_length(self, stage: StageCheck, config: EvalConfig) -> int:
        """Return the length of responses that an evaluation samples: its own, or that of PPO."""
        with self.report.collecting():
            folder = Path(config.models.ppo)
            policy = stage.parents.get("models.ppo")
            settings = evaluation_inputs.ppo_settings(policy) if policy else self.policy_settings.get(folder)
            if settings or policy:
                return evaluation_inputs.sampling_params(config, settings, folder, None).response_length
        return config.eval.response_length or 0

    # Functions and models of several stages

    def _try_functions(
        self,
        stage: StageCheck,
        section: str,
        sources: Mapping[str, object],
        prompts: Sequence[data.Prompt],
        tokenizer: Any,
    ) -> None:
        """Call the sources of a section that are module:function on two rows, unless the stage is finished."""
        config = stage.config
        functions = {name: source for name, source in sources.items() if isinstance(source, str)}
        if stage.finished or not functions:
            return

        rows = trial.made_up_rows(prompts, tokenizer, _first_end(tokenizer))
        tried = f"{len(rows.prompts)} rows with a made-up response"
        job = trial.Trial(functions, config.file.parent, rows, every_row=section == "judges")
        for name, outcome in trial.try_functions(job).items():
            key = f"{section}.{name}"
            if isinstance(outcome, RewardFormError):
                with self.report.collecting(), at_location(config.where(key)):
                    raise outcome
            elif isinstance(outcome, RLHFError):
                self.report.not_checked.append(f"{config.stage} {key}: on {tried}, {outcome.problems[0].text}")
            else:
                self.report.add(config.stage, key, f"called on {tried}; scores: {', '.join(map(_score, outcome))}")

    def _check_policies(self, stage: StageCheck) -> StartModel:
        """Return the start of PPO and evaluation; check that all models that generate tokenize like models.sft."""
        config = stage.config
        start = self._load_start(stage, "models.sft")
        known = self._known_parents(stage)
        if "models.sft" in known:
            self.report.attempt(model_loading.check_same_tokenization, config, self.options, known)
        for key, parent in stage.parents.items():
            if is_policy_key(key):
                with self.report.collecting(), at_location(config.where(key)):
                    self._check_policy(config.stage, key, parent, start.tokenizer)
        return start

    def _check_policy(self, stage: str, key: str, parent: Parent, tokenizer: Any) -> None:
        model_config = load.read_causal_lm_config(parent.model, self.options.trust_remote_code)
        if key != "models.sft":
            self.report.add(stage, key, f"{shown(parent.path)}: {model_config.model_type}")
        if tokenizer:
            _check_vocabulary(model_config, tokenizer)

    def _check_reward_models(self, stage: StageCheck, tokenizer: Any) -> dict[str, Scorer]:
        """Check the reward models that exist, each folder once; return them by key."""
        scorers: dict[str, Scorer] = {}
        seen: set[Path] = set()
        known = self._known_parents(stage)
        policy = known.get("models.sft") or known.get("model.path")
        for key, parent in stage.parents.items():
            if not is_scorer_key(key) or parent.path in seen:
                continue
            seen.add(parent.path)
            with self.report.collecting(), at_location(stage.config.where(key)):
                scorer = self._read_scorer(stage.config, key, parent, policy)
                scorers[key] = scorer
                if tokenizer is not None:
                    _check_vocabulary(scorer.model_config, scorer.tokenizer or tokenizer)
        return scorers

    def _read_scorer(self, config: Config, key: str, parent: Parent, policy: Parent | None) -> Scorer:
        model_config = load.read_reward_model_config(parent.model, self.options.trust_remote_code)
        tokenizer = scoring.load_own_tokenizer(config, self.options, policy, parent) if policy else None
        found = f"{shown(parent.path)}: {model_config.model_type}, one label"
        if tokenizer:
            found += "; encoded again for it"
        self.report.add(config.stage, key, found)
        return Scorer(model_config, tokenizer)

    def _known_parents(self, stage: StageCheck) -> dict[str, Parent]:
        """Return the input models that exist or that earlier stages will write."""
        known = dict(stage.parents)
        for key, folder in stage.pending.items():
            parent = self.pending_outputs.get(folder, StartModel()).parent
            if parent:
                known[key] = replace(parent, key=key)
        return known

    def _check_retokenized(self, stage: StageCheck, scorers: Mapping[str, Scorer], prompts: list[data.Prompt]) -> None:
        """Check the prompts as tokenized by reward models that have their own tokenizer."""
        for key, scorer in scorers.items():
            if scorer.tokenizer:
                with self.report.collecting():
                    scoring.retokenize_prompts(stage.config, key, scorer.tokenizer, prompts, scorer.model_config)

    def _load_start(self, stage: StageCheck, key: str) -> StartModel:
        """Return the model that the stage starts from, with a tokenizer that the caller may modify."""
        if key in stage.pending:
            return self._pending_start(stage, key, stage.pending[key])
        if key not in stage.parents:
            return StartModel()

        config = stage.config
        parent = stage.parents[key]
        remote_code = self.options.trust_remote_code
        with self.report.collecting():
            tokenizer = model_loading.load_tokenizer(config, self.options, parent)
            with at_location(config.where(key)):
                model_config = load.read_config(parent.model, remote_code)
            found = f"{shown(parent.path)}: {model_config.model_type}, {len(tokenizer)} tokens"
            self.report.add(config.stage, key, found)

            read_model_config = load.read_init_config if config.stage == "reward" else load.read_causal_lm_config
            with self.report.collecting(), at_location(config.where(key)):
                read_model_config(parent.model, remote_code)
            return StartModel(parent, tokenizer, model_config)
        return StartModel()

    def _pending_start(self, stage: StageCheck, key: str, folder: Path) -> StartModel:
        """Return the model that an earlier stage will write."""
        start = self.pending_outputs.get(folder, StartModel())
        if start.tokenizer is None:
            reason = f"the {folder.name} stage's tokenizer is not known before it runs"
            self.report.not_checked.append(f"{stage.config.stage} {key}: {reason}, so no lengths in tokens")
        return replace(start, tokenizer=deepcopy(start.tokenizer))

    def _load_models(self, stage: StageCheck) -> None:
        """Load each model that exists as the stage loads it, one at a time."""
        seen: set[Path] = set()
        for key, parent in stage.parents.items():
            if parent.path not in seen:
                seen.add(parent.path)
                with self.report.collecting():
                    self._load_model(stage.config, key, parent)

    def _load_model(self, config: Config, key: str, parent: Parent) -> None:
        loader = _loader(config, key)
        tokenizer = model_loading.load_tokenizer(config, self.options, parent)
        model = model_loading.load_model(loader, config, self.options, parent, tokenizer)
        if parent.manifest.probes and loader is load.load_reward_model:
            scoring.check_probes(model, parent, where=config.where(key))
        if loader is not load.load_classifier:  # a pipeline passes masks
            row_trial.require_rows_alone(model, config.where(key))
        if is_policy_key(key) and config.stage in ("ppo", "eval"):
            with at_location(config.where(key)):
                uses_cache(model)
        self.report.add(config.stage, key, f"loaded, {model.num_parameters():,} parameters")

    def _add_pending_output(self, stage: StageCheck, start: StartModel) -> None:
        """Record the model that this stage will write, for the checks of later stages."""
        config = stage.config
        manifest = runs.Manifest()
        if start.tokenizer is not None:
            fields = tokenizers.manifest_fields(start.tokenizer, _first_end(start.tokenizer))
            manifest = runs.Manifest.model_validate(fields)
        parent = Parent("", config.folder, config.stage, config.folder / "model", sha256="", manifest=manifest)
        for each in (config, *config.other_members):
            written = replace(parent, path=each.folder, model=each.folder / "model")
            self.pending_outputs[each.folder] = replace(start, parent=written)

    def _read_rows(self, stage: StageCheck, key: str, read: Callable[[], data.Rows[Row]]) -> data.Rows[Row] | None:
        """Read the rows of a data key and add a line on them; None if the key has no file, or after an error."""
        rows = self.report.attempt(read) if key in stage.data else None
        if rows is None:
            return None

        noun = "prompts" if key.endswith("prompts") else "rows"
        sources = {"sources": rows.sources} if rows.sources else {}
        self.report.add(
            stage.config.stage,
            key,
            _describe_rows(rows, noun),
            rows=len(rows),
            read=rows.num_read,
            asked=rows.num_expected,
            left_out=rows.num_dropped,
            longest=rows.longest,
            **sources,
        )
        if key in ("data.train", "data.prompts") and stage.config.stage != "eval":
            self.trained_on.append(rows)
        return rows


def _check_ends(config: PPOConfig, start: StartModel, scorers: Mapping[str, Scorer]) -> None:
    """Check the tokens that end an answer, of the policy and of the reward models. Raises RLHFError C06, T06."""
    if start.parent is None or start.tokenizer is None or start.model_config is None:
        return
    vocabulary = max(len(start.tokenizer), start.model_config.get_text_config().vocab_size)
    setup.stop_token_id(config, start.tokenizer, start.parent, vocabulary)
    for key, scorer in scorers.items():
        end = scoring.end_token_ids(scorer.tokenizer or start.tokenizer)
        scoring.warn_pad_is_end_token(scorer.model_config, end, config.where(key))


def _check_vocabulary(model_config: Any, tokenizer: Any, where: str | None = None) -> None:
    """Raise RLHFError if a tokenizer has ids that a model does not have."""
    tokenizers.check_vocabulary_size(model_config.get_text_config().vocab_size, tokenizer, where)


def _first_end(tokenizer: Any) -> int | None:
    """Return the first of the tokens that end an answer."""
    ends = scoring.end_token_ids(tokenizer) if tokenizer else ()
    return ends[0] if ends else None


def _loader(config: Config, key: str) -> Callable[..., Any]:
    """Return the function with which a stage loads the model at a config key."""
    if key.endswith(".pipeline"):
        return load.load_classifier
    if config.stage == "reward":
        return load.init_reward_model
    return load.load_causal_lm if is_policy_key(key) else load.load_reward_model


def _describe_rows(rows: data.Rows[Any], noun: str) -> str:
    text = f"{len(rows)} {noun}"
    if rows.longest:
        text += f", at most {rows.longest} tokens"
    if rows.num_dropped:
        text += f"; {rows.dropped_text()}"
    return f"{text}; columns: {rows.columns}"


def _score(score: float | None) -> str:
    return "none" if score is None else f"{score:.4g}"
