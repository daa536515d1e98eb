"""`rlhf eval`: sample responses of the policies to held-out prompts, score them, and write the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlhf_cli import data, jsonl, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.evaluation.limit import build_limit
from rlhf_cli.evaluation.responses import (
    EvalResponses,
    EvalSampling,
    SnapshotSeries,
    concat_responses,
    sample_rows,
    select_best_of_n,
)
from rlhf_cli.evaluation.summary import build_report
from rlhf_cli.models import devices, forward, interpolation, load, lora, row_trial
from rlhf_cli.models.batch import MicroBatch, Prompts, Rollout, split_into_micro_batches
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.progress import Progress, track_progress
from rlhf_cli.rewards.function import score_texts
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.rewards.signature import RewardFn, TextRows
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.report import FILE_NAME, FrontierPoint, Report
from rlhf_cli.stages.common import lifecycle, model_loading, reading, scoring
from rlhf_cli.stages.eval.inputs import (
    check_columns_read,
    check_interpolation,
    columns_read,
    find_snapshots,
    judge_functions,
    missing_eos_penalty,
    ppo_settings,
    sampling_params,
    warn_of_selection_by_reward,
)
from rlhf_cli.stages.ppo.shared_models import SharedBaseModels
from rlhf_cli.tracking import Trackers

NEAR_GREEDY_TEMPERATURE = 0.01  # TRL 1.12's evaluation generations
MAX_TRACKED_PROMPTS = 32  # in trackers; samples.jsonl has all
JudgeFn = Callable[[TextRows], list[float]]


def run(config: EvalConfig, options: Options) -> None:
    """Write RUN/eval with report.json and samples.jsonl. All ranks sample, the first rank writes.

    Raises RLHFError as `setup.run_stage`.
    """
    lifecycle.run_stage(config, options, _evaluate)


def _evaluate(config: EvalConfig, stage: lifecycle.StageRun) -> None:
    options, parents = stage.options, stage.parents
    model_loading.check_same_tokenization(config, options, parents)
    check_interpolation(config, options, parents)
    sft, ppo = parents["models.sft"], parents["models.ppo"]
    tokenizer = model_loading.load_tokenizer(config, options, sft)
    model_config = load.read_config(sft.model, options.trust_remote_code)
    stop_id = model_loading.stop_token_id(tokenizer, sft, model_config.get_text_config().vocab_size)
    sampling = sampling_params(config, ppo_settings(ppo), ppo.path, stop_id)
    with stage.process_group.main_process_first():
        usable = reading.read_prompts(config, "data.prompts", tokenizer, model_config, sampling.response_length)
    if usable.num_dropped or len(usable) < config.eval.n:
        terminal.say(f"eval     {reading.describe_rows(usable, 'held-out prompts')}; eval.n is {config.eval.n}")
    functions = judge_functions(config)
    check_columns_read(config, functions, usable)
    prompts = usable[: config.eval.n]
    columns = columns_read(config, functions, prompts)
    warn_of_selection_by_reward(config)
    series = find_snapshots(config, ppo)
    evaluated, draws = evaluate_policies(config, stage, tokenizer, prompts, sampling, series, functions)
    runs.require_unchanged(parents)

    def write() -> Report:
        report = build_report(config, evaluated, columns, sampling, parents, series)
        if config.eval.limit:
            limit = build_limit(draws, evaluated, missing_eos_penalty(ppo_settings(ppo)))
            report = report.with_changes(limit=limit)
        samples = config.folder / "samples.jsonl"
        samples.unlink(missing_ok=True)  # of a killed process; a link may lead elsewhere
        jsonl.write_jsonl(samples, sample_rows(evaluated, columns))
        runs.write_json(config.folder / FILE_NAME, report.to_json())
        track(config, report, evaluated, columns)  # after report.json: a tracker's failure must not change the report
        return report

    report = stage.process_group.run_on_main(write)
    contents = report.to_json()
    stage.complete({"metrics": {name: contents[name] for name in ("win_rate", "models")}})


# Sampling and scoring


def evaluate_policies(
    config: EvalConfig,
    stage: lifecycle.StageRun,
    tokenizer: Any,
    prompts: list[data.Prompt],
    sampling: EvalSampling,
    series: SnapshotSeries,
    functions: Mapping[str, RewardFn],
) -> tuple[list[EvalResponses], list[EvalResponses]]:
    """Sample and score each policy in each mode, PPO's snapshots and interpolations, and best of n of the SFT policy.

    Returns their responses, and the SFT policy's draws for best of n and the limit, the latter without texts.
    At most one other policy is in memory besides the SFT policy. Each rank samples a part of the prompts.
    """
    parents, modes = stage.parents, config.eval.modes
    loaded = EvaluatedModels(config, stage, tokenizer)
    policy_text = scoring.PolicyText(parents["models.sft"], tokenizer, sampling.stop_token_id, prompts)
    judges = load_judges(loaded, policy_text, functions)
    evaluator = PolicyEvaluator(config, tokenizer, prompts, sampling, judges, stage.process_group)
    names = [name for name in ("base", "sft", "ppo") if f"models.{name}" in parents]
    ppo, ends = parents["models.ppo"], {"ppo": series.step}
    policies = [EvaluatedPolicy(name, parents[f"models.{name}"], modes, ends.get(name)) for name in names]
    policies += [EvaluatedPolicy(name, parents[f"policies.{name}"], modes) for name in config.policies]
    snapshots = {step: replace(ppo, model=path) for step, path in series.snapshots.items()}
    policies += [EvaluatedPolicy(f"ppo_{model.model.name}", model, step=step) for step, model in snapshots.items()]
    shares = sorted(set(config.eval.interpolate))
    policies += [EvaluatedPolicy(f"interpolated_{share:g}", ppo, share=share) for share in shares]
    for_best_of, num_draws = max(config.eval.best_of, default=0), config.eval.draws
    if config.eval.limit:
        more = f"{(num_draws - for_best_of) * len(prompts):,} more than the evaluation draws without it"
        terminal.say(f"eval     limit: {num_draws} SFT answers to each of {len(prompts)} prompts, {more}")
    evaluated: list[EvalResponses] = []
    draws: list[EvalResponses] = []

    with Progress("eval", sum(len(each.modes) for each in policies) + num_draws, "round") as bar:
        for each in policies:
            policy = loaded.sft if each.name == "sft" else loaded.policy(each.parent, each.share)
            for mode in each.modes:
                responses = evaluator.evaluate(each.name, mode, policy, loaded.sft)
                evaluated.append(replace(responses, step=each.step, share=each.share))
                bar.advance(note=f"{each.name} {mode}")
            del policy  # before the next one is loaded
        for draw in range(1, num_draws + 1):
            if draw == for_best_of + 1:  # the limit needs no other judge
                evaluator = replace(evaluator, judges={"reward": judges["reward"]})
            draws.append(evaluator.evaluate("sft", "sampled", loaded.sft, loaded.sft, draw=draw))
            if draw > for_best_of:
                draws[-1] = replace(draws[-1], prompts=[], responses=[])
            bar.advance(note=f"best of {draw}" if draw <= for_best_of else f"limit {draw}")
    return evaluated + [select_best_of_n(draws[:n]) for n in config.eval.best_of], draws


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy that answers the prompts: its name in the report, and its model."""

    name: str
    parent: Parent
    modes: Sequence[str] = ("sampled",)
    step: int | None = None  # number of PPO updates, for a policy on the frontier
    share: float | None = None  # of the way from SFT to the model


class EvaluatedModels:
    """Loads the policies and reward models of an evaluation; adapters of models.sft share its weights.

    They are frozen; with bf16 their matrices are stored in bfloat16.
    """

    def __init__(self, config: EvalConfig, stage: lifecycle.StageRun, tokenizer: Any) -> None:
        self.config, self.stage, self.tokenizer = config, stage, tokenizer
        self.bf16, parent = devices.use_bf16(config.eval.bf16), stage.parents["models.sft"]
        self.sft = self._load(parent, tokenizer)
        self.base = SharedBaseModels(config, stage.options, parent, self.sft)

    def policy(self, parent: Parent, share: float | None = None) -> Any:
        """Return a policy: an adapter on the weights of models.sft, or a model with its own.

        With a share it is SFT + share * (policy - SFT): of an adapter by its scale, which copies no weights.
        """
        is_adapter = self.base.own_weights_reason(parent, self.tokenizer) is None
        if is_adapter and (share is None or interpolation.scales_exactly(parent)):
            policy = self.base.load_policy(parent)
            if share is not None:
                lora.scale_adapters(policy, share)
            return policy.requires_grad_(False).eval()
        if share is None:
            return self._load(parent, self.tokenizer)
        models = [parent, self.stage.parents["models.sft"]] if self.bf16 else [parent]  # the SFT model is rounded then
        options = self.config, self.stage.options
        policy, *sft = [
            model_loading.load_model(load.load_causal_lm, *options, model, self.tokenizer) for model in models
        ]
        interpolation.interpolate(policy, sft[0] if sft else self.sft, share)
        return model_loading.place_frozen(policy, bf16=self.bf16)

    def _load(self, parent: Parent, tokenizer: Any) -> Any:
        options, bf16 = (self.config, self.stage.options), self.bf16
        model = model_loading.load_model(load.load_causal_lm, *options, parent, tokenizer, bf16_matrices=bf16)
        row_trial.require_rows_alone(model, self.config.where(parent.key))
        return model_loading.place_frozen(model, bf16=self.bf16)


def load_judges(
    loaded: EvaluatedModels, policy_text: scoring.PolicyText, functions: Mapping[str, RewardFn]
) -> dict[str, JudgeFn | ModelReward]:
    """Load the judges by name: reward models, and `functions`. `reward` is the model PPO was trained on."""
    config, stage = loaded.config, loaded.stage
    keys = {"reward": "models.reward"} if "models.reward" in stage.parents else {}
    keys |= {name: f"judges.{name}" for name in config.judges}
    judges: dict[str, JudgeFn | ModelReward] = {}
    for name, key in keys.items():
        if key.startswith("judges.") and name in functions:
            judges[name] = partial(score_texts, name, functions[name])
            continue
        parent, rows = stage.parents[key], config.eval.per_device_batch_size
        own_tokenizer = scoring.load_own_tokenizer(config, stage.options, policy_text.sft, parent)
        model = loaded.base.load_frozen_scorer(parent, own_tokenizer or policy_text.tokenizer, bf16=loaded.bf16)
        options: dict[str, Any] = {"rows": rows, "bf16": loaded.bf16}
        judges[name] = scoring.build_model_reward(config, key, policy_text, parent, model, own_tokenizer, **options)
    return judges


@dataclass
class PolicyEvaluator:
    """Samples a policy's responses to the prompts and scores them with all judges."""

    config: EvalConfig
    tokenizer: Any
    prompts: list[data.Prompt]
    sampling: EvalSampling
    judges: dict[str, JudgeFn | ModelReward]
    process_group: ProcessGroup

    def evaluate(self, name: str, mode: str, policy: Any, sft: Any, draw: int = 0) -> EvalResponses:
        """Sample and score one response per prompt.

        Seeds derive from (seed, mode, draw, row) and are the same for every policy, so that comparisons are paired.
        Model judges score each rank's own rows; functions are called once, by the first rank, with all rows.
        """
        temperature = self.sampling.temperature if mode == "sampled" else NEAR_GREEDY_TEMPERATURE
        seeds = tuple(derive_seed(self.config.seed, f"eval/{mode}", draw, row) for row in range(len(self.prompts)))
        prompts = Prompts.of(self.prompts)
        prompts = replace(prompts, seeds=seeds, response_length=self.sampling.response_length)
        sampled = self.process_group.map_rows(
            len(prompts), lambda part: self._sample(name, mode, policy, sft, prompts.rows(part), temperature)
        )
        parts, ids = zip(*sampled, strict=True)
        responses, scores = concat_responses(parts), {}
        prompt_ids = [prompt.ids for prompt in self.prompts]
        rows = TextRows.from_tokens(self.tokenizer, prompt_ids, [*chain.from_iterable(ids)], prompts.records)
        for judge, source in self.judges.items():
            if isinstance(source, ModelReward):
                scores[judge] = responses.scores[judge]
            else:
                scores[judge] = self.process_group.run_on_main(partial(source, rows))
        return replace(responses, scores=scores)

    def _sample(
        self, name: str, mode: str, policy: Any, sft: Any, prompts: Prompts, temperature: float
    ) -> tuple[EvalResponses, list[list[int]]]:
        """Sample responses and score them with the judges that are models; return the responses' token ids, too."""
        batch_size = self.config.eval.per_device_batch_size
        pad_id = self.tokenizer.pad_token_id or 0
        bf16 = self.config.eval.bf16
        engine = HFEngine(policy, self.sampling.stop_token_id, pad_id, temperature, batch_size, bf16=bf16)
        rollout = engine.generate(prompts)
        rows = TextRows.of(rollout, self.tokenizer)
        kl = [0.0] * len(rollout) if mode == "sampled" else None
        if mode == "sampled" and policy is not sft:
            with devices.autocast(bf16=devices.use_bf16(bf16)):
                kl = sequence_kl(policy, sft, rollout, temperature, max_rows=batch_size)
        models = {judge: source for judge, source in self.judges.items() if isinstance(source, ModelReward)}
        scores = {judge: model(rollout).tolist() for judge, model in models.items()}
        ended, lengths = rollout.ended.tolist(), rollout.response_lengths.tolist()
        responses = EvalResponses(name, mode, rows.prompts, rows.responses, ended, lengths, scores, kl)
        return responses, list(rows.completion_ids)


@torch.no_grad()
def sequence_kl(policy: Any, ref: Any, rollout: Rollout, temperature: float, *, max_rows: int) -> list[float]:
    """Return the sum over each response's tokens of log pi - log ref, in nats.

    Its mean over rows estimates KL(pi || ref) on pi's own samples.
    """
    totals: Tensor = torch.zeros(len(rollout), dtype=torch.float64, device=rollout.ids.device)
    row_index = torch.arange(len(rollout), device=rollout.ids.device)
    for micro_rows in track_progress(
        "kl: micro-batch", split_into_micro_batches(rollout.lengths, row_index, max_rows=max_rows)
    ):
        micro = rollout.micro_batch(micro_rows)
        logprobs, ref_logprobs = (_response_logprobs(model, micro, temperature) for model in (policy, ref))
        totals.index_add_(0, micro.response_index[0], (logprobs - ref_logprobs).double())
    return totals.tolist()


def _response_logprobs(model: Any, micro: MicroBatch, temperature: float) -> Tensor:
    """Return the log-prob (N,) of each response token."""
    hidden = forward.response_hidden_states(model, micro)
    parts = forward.logit_chunks(model, len(hidden))
    logits = (forward.lm_head_logits(model, hidden[part]) for part in parts)
    each = zip(logits, parts, strict=True)
    return torch.cat([losses.token_logprobs(z, micro.response_ids[part], temperature) for z, part in each])


# Trackers


def track(
    config: EvalConfig,
    report: Report,
    evaluated: Sequence[EvalResponses],
    columns: Sequence[Mapping[str, Any]],
) -> None:
    """Log `models`, `win_rate` and samples to the trackers at step 0, and each frontier point at its step."""
    with Trackers(config) as trackers:
        if not trackers:
            return
        trackers.metrics({"step": 0, **headline_metrics(report)})
        sampled = [each for each in evaluated if each.mode == "sampled" and each.model in report.models]
        rows = [row for row in sample_rows(sampled, columns) if row["index"] < MAX_TRACKED_PROMPTS]
        trackers.table(0, "samples", rows)
        for point in report.frontier or []:
            trackers.metrics({"step": point.step, **frontier_metrics(point)})


def headline_metrics(report: Report) -> dict[str, float]:
    """Return the numbers of a report's policies, win rates, best of n and policies between SFT and PPO."""
    return flatten_metrics(
        {
            "models": {name: scores.to_json() for name, scores in report.models.items()},
            "win_rate": {
                pair: {judge: rate.to_json() for judge, rate in rates.items()}
                for pair, rates in report.win_rate.items()
            },
            "selected_step": report.selected_step,
            "best_of": {str(each.n): each.to_json() for each in report.best_of or []},
            "interpolated": {str(each.share): each.to_json() for each in report.interpolated or []},
        }
    )


def frontier_metrics(point: FrontierPoint) -> dict[str, float]:
    """Return the numbers of a point of the frontier."""
    return flatten_metrics({"frontier": point.to_json(exclude={"step"})})


def flatten_metrics(tree: Any, name: str = "") -> dict[str, float]:
    """Return the numbers of a part of the report with keys joined by `/`; intervals get `low` and `high`."""
    if isinstance(tree, int | float) and not isinstance(tree, bool):
        return {name: tree}
    if isinstance(tree, list) and len(tree) == 2:
        tree = dict(zip(("low", "high"), tree, strict=True))
    metrics: dict[str, float] = {}
    for key, value in (tree if isinstance(tree, Mapping) else {}).items():
        metrics |= flatten_metrics(value, f"{name}/{key}" if name else key)
    return metrics
