"""Checks of `rlhf check` that need torch: tokenizers, templates, every row of data, and optionally models."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from rlhf_cli import data
from rlhf_cli.config import stages
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig, check_num_shared_layers
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.config.stages import TRLConfig
from rlhf_cli.errors import RLHFError, at_location, shown
from rlhf_cli.evaluation import reward_card
from rlhf_cli.models import build, load, lora, row_trial, tokenizers
from rlhf_cli.pipeline.check_files import Report, StageCheck
from rlhf_cli.ppo.rollout import uses_cache
from rlhf_cli.rewards import trial
from rlhf_cli.rewards.results import RewardFormError
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import is_policy_key, is_scorer_key
from rlhf_cli.stages.common import lifecycle, machine, model_loading, reading, scoring, training
from rlhf_cli.stages.eval import inputs
from rlhf_cli.stages.ppo import setup, shared_models


class StartModel(NamedTuple):
    """The model that a stage starts from: an existing folder, or the output of a stage that has yet to run."""

    parent: Parent | None = None  # None if nothing is known about it
    tokenizer: Any = None
    model_config: Any = None  # of transformers


class StageValidator:
    """Checks stages in the order of the chain. A stage may start from the output that an earlier one would write."""

    def __init__(self, report: Report, options: Options, *, deep: bool, runs_here: bool) -> None:
        self.report, self.options, self.deep, self.runs_here = report, options, deep, runs_here
        self.pending_outputs: dict[Path, StartModel] = {}
        self.trained_on: list[data.Rows[Any]] = []
        self.policy_settings: dict[Path, PPOSettings] = {}

    def check(self, stage: StageCheck) -> None:
        """Check one stage."""
        checks = {"ppo": self._check_ppo, "eval": self._check_eval}
        if not stage.finished:  # a finished stage needs no memory or disk space
            self.report.attempt(machine.check, stage.config, stage.parents, runs_here=self.runs_here)
        checks.get(stage.config.stage, self._check_training)(stage)
        if self.deep:
            self._load_models(stage)

    def _check_training(self, stage: StageCheck) -> None:
        """Check SFT, the reward model or DPO; the number of packed sequences is not yet known."""
        config = cast(TRLConfig, stage.config)
        parent, own_tokenizer, model_config = self._load_start(stage, "model.path")
        tokenizer = None
        with self.report.collecting():
            if isinstance(config, SFTConfig) and config.model.new is not None:
                model_config = training.new_model_config(config)
                tokenizer = self._new_tokenizer(stage)
            if parent and model_config is not None:
                if isinstance(config, RewardConfig):
                    training.check_can_sample(config, model_config)
                lora.check_adapters(config, model_config)
            if parent and own_tokenizer:
                if isinstance(config, SFTConfig):
                    vocab_size = model_config.get_text_config().vocab_size
                    tokenizers.check_vocabulary_size(vocab_size, own_tokenizer, config.where("model.path"))
                tokenizer = training.prepare_tokenizer(config, own_tokenizer, parent.stage)
        if isinstance(config, SFTConfig) and "data.train" in stage.data:
            self.report.attempt(training.log_packing, config)
        rows, held_out = (
            self._read_rows(stage, f"data.{key}", partial(training.read_data, config, key, tokenizer, model_config))
            for key in ("train", "eval")
        )
        best_of = config.best_of if isinstance(config, SFTConfig) else None
        scorers = self._check_reward_models(stage, tokenizer) if best_of else {}
        if rows is not None and best_of:
            self._check_retokenized(stage, scorers, [*rows, *(held_out or [])])
            sampled = f"{best_of.n} answers of up to {best_of.response_length} tokens to each prompt are sampled"
            self.report.add("sft", "best_of", f"{sampled}, the best is trained on")
        if rows is not None:
            with self.report.collecting():
                training.check_rows(config, rows, held_out, model_config)
            packed, settings = isinstance(config, SFTConfig) and config.sft.packing, stages.settings_of(config)
            if not packed or settings.max_steps:
                lifecycle.warn_long_intervals(config, settings.steps(len(rows)))
            batches = training.describe_batches(config, rows, packed=0 if packed else None)
            self.report.add(config.stage, "batches", batches)
        self._add_pending_output(stage, tokenizer, model_config)

    def _new_tokenizer(self, stage: StageCheck) -> Any:
        """Train the tokenizer of model.new and build the model if `deep`, since both take time."""
        if not self.deep:
            text = "sft model.new: its tokenizer and lengths in tokens; use --deep to train it now"
            self.report.not_checked.append(text)
        elif training.TOKENIZER_DATA_KEY in stage.data:
            config = cast(SFTConfig, stage.config)
            assert config.model.new
            tokenizer = training.prepare_tokenizer(config, training.train_tokenizer(config))
            with at_location(config.where("model.new")):
                model = build.new_causal_lm(config.model.new.config_fields(), tokenizer)
                row_trial.require_rows_alone(model)
            return tokenizer
        return None

    def _check_ppo(self, stage: StageCheck) -> None:
        config = cast(PPOConfig, stage.config)
        parent, tokenizer, model_config = self._check_policies(stage)
        attempt = self.report.attempt
        reward_fns = (
            attempt(shared_models.build_reward_fns, config, self.options, stage.parents, load_models=False) or {}
        )
        attempt(setup.check_hub_push, config, stage.parents.get("models.sft"))
        if not stage.finished:
            attempt(reward_card.check_required, config, stage.parents)
        with self.report.collecting():
            if model_config is not None:
                check_num_shared_layers(config, model_config)
                lora.check_adapters(config, model_config)
        scorers = self._check_reward_models(stage, tokenizer)
        with self.report.collecting():
            if parent is not None and tokenizer is not None and model_config is not None:
                vocabulary = max(len(tokenizer), model_config.get_text_config().vocab_size)
                setup.stop_token_id(config, tokenizer, parent, vocabulary)
                for key, (scorer, own_tokenizer) in scorers.items():
                    end = scoring.end_token_ids(own_tokenizer or tokenizer)
                    shared_models.warn_pad_is_end_token(scorer, end, config.where(key))
        read, length = partial(reading.read_prompts, config), config.ppo.max_response_length
        prompts, held_out = (
            self._read_rows(stage, key, partial(read, key, tokenizer, model_config, length))
            for key in ("data.prompts", "data.eval_prompts")
        )
        self._read_rows(stage, "data.ptx_data", partial(setup.read_ptx, config, tokenizer, model_config))
        if prompts is not None:
            self._check_retokenized(stage, scorers, [*prompts, *(held_out or [])])
            attempt(setup.check_prompt_counts, config, prompts, held_out)
            sections = {name: config.rewards[name] for name in reward_fns}
            functions = {name: section.function for name, section in sections.items() if section.function}
            with self.report.collecting():
                shared_models.check_reward_columns(config, reward_fns, prompts, held_out)
                self._try_functions(stage, "rewards", functions, prompts, tokenizer)
            self.report.add("ppo", "batches", setup.describe_batches(config, prompts))
        self._add_pending_output(stage, tokenizer, model_config)
        self.policy_settings[config.folder] = config.ppo

    def _check_eval(self, stage: StageCheck) -> None:
        config = cast(EvalConfig, stage.config)
        _, tokenizer, model_config = self._check_policies(stage)
        judges = self.report.attempt(inputs.judge_functions, config) or {}
        inputs.warn_of_selection_by_reward(config)
        if stage.parents.keys() >= {"models.sft", "models.ppo"}:
            self.report.attempt(inputs.check_interpolation, config, self.options, stage.parents)
        scorers = self._check_reward_models(stage, tokenizer)
        length = config.eval.response_length or 0
        with self.report.collecting():
            settings, policy = self.policy_settings.get(Path(config.models.ppo)), stage.parents.get("models.ppo")
            if policy is not None:
                settings = inputs.ppo_settings(policy)
            if settings is not None or policy is not None:
                length = inputs.sampling_params(config, settings, Path(config.models.ppo), None).response_length
        rows = self._read_rows(
            stage,
            "data.prompts",
            partial(reading.read_prompts, config, "data.prompts", tokenizer, model_config, length),
        )
        if rows is not None:
            self._check_retokenized(stage, scorers, list(rows))
            functions = {
                name: judge for name, judge in config.judges.items() if name in judges and isinstance(judge, str)
            }
            with self.report.collecting():
                inputs.check_columns_read(config, judges, rows)
                self._try_functions(stage, "judges", functions, rows, tokenizer)
            for train_rows in self.trained_on:
                data.warn_shared(train_rows, rows, where=config.where("data.prompts"))

    def _try_functions(
        self, stage: StageCheck, section: str, specs: Mapping[str, str], prompts: Sequence[data.Prompt], tokenizer: Any
    ) -> None:
        """Call the functions of a section on two rows, unless the stage is finished.

        `specs`: name -> module:function.
        """
        config = stage.config
        if stage.finished or not specs:
            return
        ends = scoring.end_token_ids(tokenizer) if tokenizer else ()
        rows = trial.made_up_rows(prompts, tokenizer, ends[0] if ends else None)
        tried = f"{len(rows.prompts)} rows with a made-up response"
        job = trial.Trial(specs, config.file.parent, rows, every_row=section == "judges")
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
        config, options = stage.config, self.options
        start = self._load_start(stage, "models.sft")
        known = self._known_parents(stage)
        if "models.sft" in known:
            self.report.attempt(model_loading.check_same_tokenization, config, options, known)
        for key, parent in stage.parents.items():
            if is_policy_key(key):
                with self.report.collecting(), at_location(config.where(key)):
                    model_config = load.read_causal_lm_config(parent.model, options.trust_remote_code)
                    if key != "models.sft":
                        self.report.add(config.stage, key, f"{shown(parent.path)}: {model_config.model_type}")
                    if start.tokenizer:
                        vocab_size = model_config.get_text_config().vocab_size
                        tokenizers.check_vocabulary_size(vocab_size, start.tokenizer, None)
        return start

    def _check_reward_models(self, stage: StageCheck, tokenizer: Any) -> dict[str, tuple[Any, Any]]:
        """Check the reward models that exist, each folder once.

        Returns key -> transformers config, and its tokenizer if it does not read the policy's tokens.
        """
        scorers: dict[str, tuple[Any, Any]] = {}
        seen: set[Path] = set()
        known = self._known_parents(stage)
        policy = known.get("models.sft") or known.get("model.path")
        for key, parent in stage.parents.items():
            if is_scorer_key(key) and parent.path not in seen:
                seen.add(parent.path)
                with self.report.collecting(), at_location(stage.config.where(key)):
                    scorer = load.read_reward_model_config(parent.model, self.options.trust_remote_code)
                    own_tokenizer = policy and scoring.load_own_tokenizer(stage.config, self.options, policy, parent)
                    note = "; encoded again for it" if own_tokenizer else ""
                    text = f"{shown(parent.path)}: {scorer.model_type}, one label{note}"
                    self.report.add(stage.config.stage, key, text)
                    scorers[key] = scorer, own_tokenizer
                    if tokenizer is not None:
                        vocab_size = scorer.get_text_config().vocab_size
                        tokenizers.check_vocabulary_size(vocab_size, own_tokenizer or tokenizer, None)
        return scorers

    def _known_parents(self, stage: StageCheck) -> dict[str, Parent]:
        """Return the input models that exist or that earlier stages will write."""
        pending = {key: self.pending_outputs.get(folder) for key, folder in stage.pending.items()}
        known = {key: replace(each.parent, key=key) for key, each in pending.items() if each and each.parent}
        return stage.parents | known

    def _check_retokenized(
        self, stage: StageCheck, scorers: dict[str, tuple[Any, Any]], prompts: list[data.Prompt]
    ) -> None:
        """Check the prompts as tokenized by reward models that have their own tokenizer."""
        for key, (model_config, tokenizer) in scorers.items():
            if tokenizer:
                self.report.attempt(scoring.retokenize_prompts, stage.config, key, tokenizer, prompts, model_config)

    def _load_start(self, stage: StageCheck, key: str) -> StartModel:
        """Return the model that the stage starts from, with a tokenizer that the caller may modify."""
        config, options = stage.config, self.options
        if key in stage.pending:
            start = self.pending_outputs.get(stage.pending[key], StartModel())
            if start.tokenizer is None:
                reason = f"the {stage.pending[key].name} stage's tokenizer is not known before it runs"
                self.report.not_checked.append(f"{config.stage} {key}: {reason}, so no lengths in tokens")
            return start._replace(tokenizer=deepcopy(start.tokenizer))
        if key not in stage.parents:
            return StartModel()
        parent = stage.parents[key]
        with self.report.collecting():
            tokenizer = model_loading.load_tokenizer(config, options, parent)
            with at_location(config.where(key)):
                model_config = load.read_config(parent.model, options.trust_remote_code)
            self.report.add(
                config.stage, key, f"{shown(parent.path)}: {model_config.model_type}, {len(tokenizer)} tokens"
            )
            read_model_config = load.read_init_config if config.stage == "reward" else load.read_causal_lm_config
            with self.report.collecting(), at_location(config.where(key)):
                read_model_config(parent.model, options.trust_remote_code)
            return StartModel(parent, tokenizer, model_config)
        return StartModel()

    def _load_models(self, stage: StageCheck) -> None:
        """Load each model that exists as the stage loads it, one at a time."""
        config, options, seen = stage.config, self.options, set[Path]()
        for key, parent in stage.parents.items():
            if parent.path in seen:
                continue
            seen.add(parent.path)
            loader: Callable[..., Any] = load.load_causal_lm if is_policy_key(key) else load.load_reward_model
            loader = load.init_reward_model if config.stage == "reward" else loader
            loader = load.load_classifier if key.endswith(".pipeline") else loader
            with self.report.collecting():
                model = model_loading.load_model(
                    loader, config, options, parent, model_loading.load_tokenizer(config, options, parent)
                )
                if parent.manifest.get("probes") and loader is load.load_reward_model:
                    scoring.check_probes(model, parent, where=config.where(key))
                if loader is not load.load_classifier:  # a pipeline passes masks
                    row_trial.require_rows_alone(model, config.where(key))
                if is_policy_key(key) and config.stage in ("ppo", "eval"):
                    with at_location(config.where(key)):
                        uses_cache(model)
                self.report.add(config.stage, key, f"loaded, {model.num_parameters():,} parameters")

    def _add_pending_output(self, stage: StageCheck, tokenizer: Any, model_config: Any) -> None:
        """Record the model that this stage will write, for the checks of later stages."""
        config = stage.config
        manifest: Mapping[str, Any] = {}
        if tokenizer is not None:
            ends = scoring.end_token_ids(tokenizer)
            manifest = tokenizers.manifest_fields(tokenizer, ends[0] if ends else None)
        parent = Parent("", config.folder, config.stage, config.folder / "model", "", dict(manifest))
        self.pending_outputs[config.folder] = StartModel(parent, tokenizer, model_config)

    def _read_rows(self, stage: StageCheck, key: str, read: Callable[[], data.Rows[Any]]) -> data.Rows[Any] | None:
        rows: data.Rows[Any] | None = self.report.attempt(read) if key in stage.data else None
        if rows is not None:
            result = f"{len(rows)} {'prompts' if key.endswith('prompts') else 'rows'}"
            result += f", at most {rows.longest} tokens" if rows.longest else ""
            result += f"; {rows.dropped_text()}" if rows.num_dropped else ""
            result += f"; columns: {rows.columns}"
            self.report.add(
                stage.config.stage, key, result, rows=len(rows), read=rows.num_read, asked=rows.num_expected,
                left_out=rows.num_dropped, longest=rows.longest,
            )  # fmt: skip
            if key in ("data.train", "data.prompts") and stage.config.stage != "eval":
                self.trained_on.append(rows)
        return rows


def _score(score: float | None) -> str:
    return "none" if score is None else f"{score:.4g}"
