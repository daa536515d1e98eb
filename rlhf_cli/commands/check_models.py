"""What a check sees with the stages' libraries: tokenizers, templates, every row; if asked, models."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from rlhf_cli import data
from rlhf_cli.commands.check import Report, Stage
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.ppo_options import PPOSettings
from rlhf_cli.config.training import RewardConfig, SFTConfig
from rlhf_cli.errors import at_location, shown
from rlhf_cli.evaluation import reward_cards
from rlhf_cli.models import build, load, lora, tokenizers
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages import eval_setup, hardware, ppo_setup, reward_setup, setup, sft_setup
from rlhf_cli.stages.hardware import POLICY_KEYS


@dataclass(frozen=True)
class Start:
    """What a stage starts from, as far as it is known: from a folder, or from a stage that is still to run."""

    parent: Parent
    tokenizer: Any = None
    body: Any = None  # the model's transformers config


class Trial:
    """Goes through the stages in the order of the chain; each may start from what an earlier one would leave."""

    def __init__(self, report: Report, options: Options, *, deep: bool, runs_here: bool) -> None:
        self.report, self.options, self.deep, self.runs_here = report, options, deep, runs_here
        self.promised: dict[Path, Start] = {}
        self.trained_on: list[data.Rows[Any]] = []
        self.policy_settings: dict[Path, PPOSettings] = {}

    def run(self, stage: Stage) -> None:
        """Look at one stage."""
        tries = {"sft": self._sft, "reward": self._reward, "ppo": self._ppo, "eval": self._eval}
        with self.report.collecting():
            if not stage.finished:  # else nothing is trained, and no room needed
                hardware.check(stage.config, stage.parents, runs_here=self.runs_here)
        tries[stage.config.stage](stage)
        if self.deep:
            self._load_models(stage)

    def _sft(self, stage: Stage) -> None:
        config = cast(SFTConfig, stage.config)
        start, tokenizer = self._start(stage, "model.path"), None
        body = start.body if start else None
        with self.report.collecting():
            if config.model.new is not None:
                body = sft_setup.new_model_config(config, config.model.new.tokenizer.vocab_size)
                tokenizer = self._new_tokenizer(stage)
            elif start and start.tokenizer and body:
                lora.check_target_modules(config, body)
                tokenizers.check_vocabulary_size(
                    body.get_text_config().vocab_size, start.tokenizer, config.where("model.path")
                )
                tokenizer = sft_setup.prepare_tokenizer(config, start.tokenizer)
        if "data.train" in stage.data:
            strategy = None
            with self.report.collecting():
                strategy = sft_setup.packing_strategy(config)
            rows, held_out = (
                self._rows(stage, f"data.{key}", partial(sft_setup.read_data, config, key, tokenizer, strategy, body))
                for key in ("train", "eval")
            )
            if rows is not None:
                with self.report.collecting():
                    sft_setup.check_rows(config, rows, held_out, body, strategy)
                self._steps(config, rows, packed=strategy is not None)
        self._promise(stage, tokenizer, body)

    def _new_tokenizer(self, stage: Stage) -> Any:
        """The tokenizer of model.new takes its time, and so does a model: both are made where models are looked at."""
        if not self.deep:
            self.report.skip("sft model.new: its tokenizer, so no lengths in tokens; the stage trains it (or --deep)")
        elif sft_setup.TOKENIZER_DATA_KEY in stage.data:
            config = cast(SFTConfig, stage.config)
            assert config.model.new
            tokenizer = sft_setup.prepare_tokenizer(config, None)
            with at_location(config.where("model.new")):
                build.new_causal_lm(config.model.new.config_fields(), tokenizer)
            return tokenizer
        return None

    def _reward(self, stage: Stage) -> None:
        config = cast(RewardConfig, stage.config)
        start, tokenizer = self._start(stage, "model.path"), None
        body = start.body if start else None
        with self.report.collecting():
            if start and body is not None:
                reward_setup.check_can_sample(config, body)
                lora.check_target_modules(config, body)
            if start and start.tokenizer:
                tokenizer = reward_setup.prepare_tokenizer(config, start.tokenizer, start.parent.stage)
        rows, held_out = (
            self._rows(stage, f"data.{key}", partial(reward_setup.read_data, config, key, tokenizer, body))
            for key in ("train", "eval")
        )
        if rows is not None:
            with self.report.collecting():
                reward_setup.check_rows(config, rows, held_out, body)
            self._steps(config, rows, packed=False)
        self._promise(stage, tokenizer, body)

    def _ppo(self, stage: Stage) -> None:
        config = cast(PPOConfig, stage.config)
        start = self._chain(stage)
        tokenizer, body = (start.tokenizer, start.body) if start else (None, None)
        with self.report.collecting():
            ppo_setup.build_reward_fns(config, self.options, stage.parents, load_models=False)
        with self.report.collecting():
            ppo_setup.check_hub_push(config, stage.parents.get("models.sft"))
        with self.report.collecting():
            if not stage.finished:
                reward_cards.check_required(config, stage.parents)
        with self.report.collecting():
            if body is not None:
                ppo_setup.check_num_shared_layers(config, body)
                lora.check_target_modules(config, body)
        scorers, own = self._scorers(stage, tokenizer)
        with self.report.collecting():
            if tokenizer is not None and body is not None:
                vocabulary = max(len(tokenizer), body.get_text_config().vocab_size)
                stop = ppo_setup.stop_token_id(config, tokenizer, vocabulary)
                for key, scorer in scorers.items():
                    stops = data.stop_token_id(own[key]) if key in own else stop
                    ppo_setup.warn_pad_is_stop_token(scorer, stops, config.where(key))
        prompts, held_out = (
            self._rows(stage, f"data.{key}", partial(ppo_setup.read_prompts, config, key, tokenizer, body))
            for key in ("prompts", "eval_prompts")
        )
        self._rows(stage, "data.ptx_data", partial(ppo_setup.read_ptx, config, tokenizer, body))
        if prompts is not None:
            self._retold(stage, scorers, own, [*prompts, *(held_out or [])])
            with self.report.collecting():
                ppo_setup.check_prompt_counts(config, prompts, held_out)
            self.report.add("ppo", "batches", ppo_setup.describe_batches(config, prompts))
        self._promise(stage, tokenizer, body)
        self.policy_settings[config.folder] = config.ppo

    def _eval(self, stage: Stage) -> None:
        config = cast(EvalConfig, stage.config)
        start = self._chain(stage)
        tokenizer, body = (start.tokenizer, start.body) if start else (None, None)
        with self.report.collecting():
            eval_setup.judge_functions(config)
        eval_setup.warn_of_selection_by_reward(config)
        scorers, own = self._scorers(stage, tokenizer)
        length = config.eval.response_length or 0
        with self.report.collecting():
            settings, policy = self.policy_settings.get(Path(config.models.ppo)), stage.parents.get("models.ppo")
            if policy is not None:
                settings = eval_setup.ppo_settings(policy)
            if settings is not None or policy is not None:
                length = eval_setup.sampling_params(config, settings, Path(config.models.ppo), None).response_length
        rows = self._rows(stage, "data.prompts", partial(eval_setup.read_prompts, config, tokenizer, body, length))
        if rows is not None:
            self._retold(stage, scorers, own, list(rows))
            for other in self.trained_on:
                data.warn_shared(other, rows, where=config.where("data.prompts"))

    def _chain(self, stage: Stage) -> Start | None:
        """Where PPO and evaluation start; every model but those that only score must read text as models.sft does."""
        config, options = stage.config, self.options
        start = self._start(stage, "models.sft")
        known = dict(stage.parents)
        for key, folder in stage.waits.items():
            if promised := self.promised.get(folder):
                known[key] = replace(promised.parent, key=key)
        if "models.sft" in known:
            with self.report.collecting():
                setup.check_same_tokenization(config, options, known)
        for key, parent in stage.parents.items():
            if key in POLICY_KEYS:
                with self.report.collecting(), at_location(config.where(key)):
                    body = load.read_causal_lm_config(parent.model, options.trust_remote_code)
                    if key != "models.sft":
                        self.report.add(config.stage, key, f"{shown(parent.path)}: {body.model_type}")
                    if start and start.tokenizer:
                        tokenizers.check_vocabulary_size(body.get_text_config().vocab_size, start.tokenizer, None)
        return start

    def _scorers(self, stage: Stage, tokenizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Key -> transformers config, of each reward model that is there; one that several keys name is told once.

        Beside it key -> tokenizer, of those that do not read the policy's tokens.
        """
        found: dict[str, Any] = {}
        own: dict[str, Any] = {}
        seen: set[Path] = set()
        start = self._policy(stage)
        for key, parent in stage.parents.items():
            if hardware.is_scorer_key(key) and parent.path not in seen:
                seen.add(parent.path)
                with self.report.collecting(), at_location(stage.config.where(key)):
                    scorer = load.read_reward_model_config(parent.model, self.options.trust_remote_code)
                    theirs = start and setup.load_own_tokenizer(stage.config, self.options, start, parent)
                    how = "; encoded anew for it" if theirs else ""
                    told = f"{shown(parent.path)}: {scorer.model_type}, one label{how}"
                    self.report.add(stage.config.stage, key, told)
                    found[key] = scorer
                    own |= {key: theirs} if theirs else {}
                    if tokenizer is not None:
                        tokenizers.check_vocabulary_size(scorer.get_text_config().vocab_size, theirs or tokenizer, None)
        return found, own

    def _policy(self, stage: Stage) -> Parent | None:
        """The policy that is there, or that an earlier stage of the run would leave, as far as it is known."""
        if parent := stage.parents.get("models.sft"):
            return parent
        promised = self.promised.get(stage.waits["models.sft"]) if "models.sft" in stage.waits else None
        return replace(promised.parent, key="models.sft") if promised else None

    def _retold(self, stage: Stage, scorers: dict[str, Any], own: dict[str, Any], prompts: list[data.Prompt]) -> None:
        """The prompts, as reward models with a tokenizer of their own will read them."""
        for key, theirs in own.items():
            with self.report.collecting():
                setup.retokenize_prompts(stage.config, key, theirs, prompts, scorers[key])

    def _start(self, stage: Stage, key: str) -> Start | None:
        """What the stage starts from; the tokenizer is the caller's to change."""
        config, options = stage.config, self.options
        if key in stage.waits:
            start = self.promised.get(stage.waits[key])
            if start is None or start.tokenizer is None:
                why = f"the {stage.waits[key].name} stage's tokenizer is not known before it runs"
                self.report.skip(f"{config.stage} {key}: {why}, so no lengths in tokens")
            return replace(start, tokenizer=deepcopy(start.tokenizer)) if start else None
        if key not in stage.parents:
            return None
        parent = stage.parents[key]
        with self.report.collecting():
            tokenizer = setup.load_tokenizer(config, options, parent)
            with at_location(config.where(key)):
                body = load.read_config(parent.model, options.trust_remote_code)
            self.report.add(config.stage, key, f"{shown(parent.path)}: {body.model_type}, {len(tokenizer)} tokens")
            look = load.read_init_config if config.stage == "reward" else load.read_causal_lm_config
            with self.report.collecting(), at_location(config.where(key)):
                look(parent.model, options.trust_remote_code)
            return Start(parent, tokenizer, body)
        return None

    def _load_models(self, stage: Stage) -> None:
        """Each model that is there, loaded as the stage loads it, one at a time."""
        config, options, seen = stage.config, self.options, set[Path]()
        for key, parent in stage.parents.items():
            if parent.path in seen:
                continue
            seen.add(parent.path)
            load_model = (
                setup.load_causal_lm if config.stage == "sft" or key in POLICY_KEYS else setup.load_reward_model
            )
            load_model = setup.init_reward_model if config.stage == "reward" else load_model
            load_model = setup.load_classifier if key.endswith(".pipeline") else load_model
            with self.report.collecting():
                model = load_model(config, options, parent, setup.load_tokenizer(config, options, parent))
                if parent.manifest.get("probes") and load_model is setup.load_reward_model:
                    setup.check_probes(model, parent, where=config.where(key))
                self.report.add(config.stage, key, f"loaded, {model.num_parameters():,} parameters")

    def _promise(self, stage: Stage, tokenizer: Any, body: Any) -> None:
        """What later stages of the run will find, where this one is still to run."""
        config = stage.config
        manifest: Mapping[str, Any] = {}
        if tokenizer is not None:
            with self.report.collecting():
                manifest = tokenizers.manifest_fields(tokenizer, data.stop_token_id(tokenizer))
        parent = Parent("", config.folder, config.stage, config.folder / "model", "", dict(manifest))
        self.promised[config.folder] = Start(parent, tokenizer, body)

    def _rows(self, stage: Stage, key: str, read: Callable[[], data.Rows[Any]]) -> data.Rows[Any] | None:
        if key not in stage.data:
            return None
        with self.report.collecting():
            rows = read()
            unit = "prompts" if key.endswith("prompts") else "rows"
            found = f"{len(rows)} {unit}" + (f", at most {rows.longest} tokens" if rows.longest else "")
            if rows.num_dropped:
                found += f"; {rows.dropped_text()}"
            numbers = {
                "rows": len(rows),
                "read": rows.num_read,
                "asked": rows.num_expected,
                "left_out": rows.num_dropped,
            }
            self.report.add(stage.config.stage, key, found, **numbers, longest=rows.longest)
            if key in ("data.train", "data.prompts") and stage.config.stage != "eval":
                self.trained_on.append(rows)
            return rows
        return None

    def _steps(self, config: SFTConfig | RewardConfig, rows: data.Rows[Any], *, packed: bool) -> None:
        """What the batch sizes come to. How many sequences packed rows make is known once they are packed."""
        settings = config.sft if isinstance(config, SFTConfig) else config.reward
        if not packed or settings.max_steps:
            setup.warn_long_intervals(config, settings.steps(len(rows)))
        self.report.add(config.stage, "batches", setup.describe_batches(config, rows, packed=0 if packed else None))
