"""`rlhf eval`: sample responses of the policies to held-out prompts, score them, and write the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_cli import data, jsonl, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.evaluation.responses import (
    EvalResponses,
    SamplingParams,
    SnapshotSeries,
    concat_responses,
    sample_rows,
    select_best_of_n,
)
from rlhf_cli.evaluation.summary import build_report
from rlhf_cli.models import devices, forward, load
from rlhf_cli.models.batch import Prompts, Rollout, micro_batches
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup, open_process_group
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.progress import Progress, track_progress
from rlhf_cli.rewards.function import score_texts
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages import eval_setup, hardware, setup
from rlhf_cli.tracking import Trackers

NEAR_GREEDY_TEMPERATURE = 0.01  # TRL 1.12's evaluation generations
MAX_TRACKED_PROMPTS = 32  # in trackers; samples.jsonl has all
JudgeFn = Callable[[list[str], list[str]], list[float]]  # (prompts, responses) -> scores


def run(config: EvalConfig, options: Options) -> None:
    """Write RUN/eval with report.json and samples.jsonl. Raises RLHFError E04 and R14 as `ProcessGroup` does."""
    with open_process_group() as process_group:
        _run(config, options, process_group)


def _run(config: EvalConfig, options: Options, process_group: ProcessGroup) -> None:
    parents = runs.open_parents(config)
    identity = runs.compute_identity(config, parents, config.sources())
    status = process_group.run_on_main(
        lambda: runs.start_stage(config, identity, parents, fresh=options.fresh, device=devices.device_name())
    )
    if status == "finished":
        terminal.say(f"eval     finished already: {runs.shown(config.folder)}")
        return
    report = _evaluate(config, options, parents, process_group)
    metrics = {"win_rate": report["win_rate"], "models": report["models"]}
    fields = {"metrics": metrics, "trust_remote_code": options.trust_remote_code}
    process_group.run_on_main(lambda: runs.complete_stage(config, identity, parents=parents, fields=fields))


def _evaluate(
    config: EvalConfig, options: Options, parents: dict[str, Parent], process_group: ProcessGroup
) -> dict[str, Any]:
    """Write samples.jsonl and report.json; return the report. All ranks sample, the first rank writes."""
    hardware.check(config, parents)
    setup.check_same_tokenization(config, options, parents)
    sft, ppo = parents["models.sft"], parents["models.ppo"]
    tokenizer = setup.load_tokenizer(config, options, sft)
    settings = eval_setup.ppo_settings(ppo)
    sampling = eval_setup.sampling_params(config, settings, ppo.path, data.stop_token_id(tokenizer))
    model_config = load.read_config(sft.model, options.trust_remote_code)
    with process_group.main_process_first():
        usable = eval_setup.read_prompts(config, tokenizer, model_config, sampling.response_length)
    if usable.num_dropped or len(usable) < config.eval.n:
        available = setup.describe_rows(usable, "held-out prompts")
        terminal.say(f"eval     {available}; eval.n asks for {config.eval.n}")
    prompts = usable[: config.eval.n]
    eval_setup.warn_of_selection_by_reward(config)
    series = eval_setup.find_snapshots(config, ppo)
    evaluated = evaluate_policies(config, options, parents, tokenizer, prompts, sampling, series, process_group)
    runs.require_unchanged(parents)

    def write() -> dict[str, Any]:
        report = build_report(config, evaluated, len(prompts), sampling, parents, series)
        jsonl.write_jsonl(config.folder / "samples.jsonl", sample_rows(evaluated))
        runs.write_json(config.folder / "report.json", report)
        track(config, report, evaluated)  # after report.json: a tracker's failure must not change the report
        return report

    return process_group.run_on_main(write)


# Sampling and scoring


@dataclass(frozen=True)
class _PolicyToEvaluate:
    name: str
    parent: Parent
    modes: Sequence[str]
    step: int | None = None


def evaluate_policies(
    config: EvalConfig,
    options: Options,
    parents: Mapping[str, Parent],
    tokenizer: Any,
    prompts: list[data.Prompt],
    sampling: SamplingParams,
    series: SnapshotSeries,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> list[EvalResponses]:
    """Sample and score each policy in each mode, PPO's snapshots, and best of n of the SFT policy.

    At most one other policy is in memory beside the SFT policy. Each rank samples a part of the prompts.
    """
    policy_text = setup.PolicyText(parents["models.sft"], tokenizer, sampling.stop_token_id, prompts)
    judges = load_judges(config, options, parents, policy_text)
    evaluator = PolicyEvaluator(config, tokenizer, prompts, sampling, judges, process_group)
    policies, num_draws = _policies(config, parents, series), max(config.eval.best_of, default=0)
    evaluated: list[EvalResponses] = []
    draws: list[EvalResponses] = []

    def load_policy(parent: Parent) -> Any:
        return setup.load_causal_lm(config, options, parent, tokenizer).to(devices.device()).eval()

    sft = load_policy(parents["models.sft"])
    with Progress("eval", sum(len(entry.modes) for entry in policies) + num_draws, "round") as bar:

        def evaluate(policy: Any, entry: _PolicyToEvaluate) -> None:
            for mode in entry.modes:
                evaluated.append(replace(evaluator.evaluate(entry.name, mode, policy, sft), step=entry.step))
                bar.advance(note=f"{entry.name} {mode}")

        for entry in policies:
            evaluate(sft if entry.name == "sft" else load_policy(entry.parent), entry)
        for draw in range(num_draws):
            draws.append(evaluator.evaluate("sft", "sampled", sft, sft, draw=draw + 1))
            bar.advance(note=f"best of {draw + 1}")
    return evaluated + [select_best_of_n(draws[:n]) for n in config.eval.best_of]


def _policies(config: EvalConfig, parents: Mapping[str, Parent], series: SnapshotSeries) -> list[_PolicyToEvaluate]:
    names = [name for name in ("base", "sft", "ppo") if f"models.{name}" in parents]
    policies = [
        _PolicyToEvaluate(name, parents[f"models.{name}"], config.eval.modes, series.step if name == "ppo" else None)
        for name in names
    ]
    for step, path in series.snapshots.items():
        snapshot = replace(parents["models.ppo"], model=path)
        policies.append(_PolicyToEvaluate(f"ppo_{path.name}", snapshot, ["sampled"], step))
    return policies


def load_judges(
    config: EvalConfig, options: Options, parents: Mapping[str, Parent], policy_text: setup.PolicyText
) -> dict[str, JudgeFn | ModelReward]:
    """Load the judges by name: reward models and functions. `reward` is the model PPO was trained on."""

    def reward_model(parent: Parent) -> ModelReward:
        own_tokenizer = setup.load_own_tokenizer(config, options, policy_text.sft, parent)
        model = (
            setup.load_reward_model(config, options, parent, own_tokenizer or policy_text.tokenizer)
            .to(devices.device())
            .eval()
        )
        return setup.build_model_reward(
            config, parent.key, policy_text, model, own_tokenizer, rows=config.eval.per_device_batch_size
        )

    functions = eval_setup.judge_functions(config)
    judges: dict[str, JudgeFn | ModelReward] = {}
    if "models.reward" in parents:
        judges["reward"] = reward_model(parents["models.reward"])
    for name in config.judges:
        if name in functions:
            judges[name] = partial(score_texts, name, functions[name])
        else:
            judges[name] = reward_model(parents[f"judges.{name}"])
    return judges


@dataclass
class PolicyEvaluator:
    """Samples a policy's responses to the prompts and scores them with all judges."""

    config: EvalConfig
    tokenizer: Any
    prompts: list[data.Prompt]
    sampling: SamplingParams
    judges: dict[str, JudgeFn | ModelReward]
    process_group: ProcessGroup

    def evaluate(self, name: str, mode: str, policy: Any, sft: Any, draw: int = 0) -> EvalResponses:
        """Sample and score one response per prompt.

        Seeds derive from (seed, mode, draw, row) and are the same for every policy, so that comparisons are paired.
        Model judges score each rank's own rows; functions are called once, by the first rank, with all rows.
        """
        temperature = self.sampling.temperature if mode == "sampled" else NEAR_GREEDY_TEMPERATURE
        seeds = tuple(derive_seed(self.config.seed, f"eval/{mode}", draw, row) for row in range(len(self.prompts)))
        prompts = replace(
            Prompts.from_lists([prompt.ids for prompt in self.prompts]),
            seeds=seeds,
            response_length=self.sampling.response_length,
        )
        responses = concat_responses(
            self.process_group.map_rows(
                len(prompts),
                lambda part: self._sample(name, mode, policy, sft, prompts.rows(part), temperature),
            )
        )
        scores = {
            judge: responses.scores[judge]
            if isinstance(source, ModelReward)
            else self.process_group.run_on_main(partial(source, responses.prompts, responses.responses))
            for judge, source in self.judges.items()
        }
        return replace(responses, scores=scores)

    def _sample(
        self, name: str, mode: str, policy: Any, sft: Any, prompts: Prompts, temperature: float
    ) -> EvalResponses:
        """Sample responses and score them with the judges that are models."""
        batch_size = self.config.eval.per_device_batch_size
        pad_id = self.tokenizer.pad_token_id or 0
        rollout = HFEngine(policy, self.sampling.stop_token_id, pad_id, temperature, batch_size).generate(prompts)
        prompt_texts, response_texts = rollout.texts(self.tokenizer)
        kl = None
        if mode == "sampled" and policy is sft:
            kl = [0.0] * len(prompt_texts)
        elif mode == "sampled":
            kl = sequence_kl(policy, sft, rollout, temperature, max_rows=batch_size)
        scores = {
            judge: source(rollout).tolist() for judge, source in self.judges.items() if isinstance(source, ModelReward)
        }
        ended, lengths = rollout.ended.tolist(), rollout.response_lengths.tolist()
        return EvalResponses(name, mode, prompt_texts, response_texts, ended, lengths, scores, kl)


@torch.no_grad()
def sequence_kl(policy: Any, ref: Any, rollout: Rollout, temperature: float, *, max_rows: int) -> list[float]:
    """Return the sum over each response's tokens of log pi - log ref, in nats.

    Its mean over rows estimates KL(pi || ref) on pi's own samples.
    """
    totals: Tensor = torch.zeros(len(rollout), dtype=torch.float64, device=rollout.ids.device)
    row_index = torch.arange(len(rollout), device=rollout.ids.device)
    for micro_rows in track_progress("kl: micro-batch", micro_batches(rollout.lengths, row_index, max_rows=max_rows)):
        micro = rollout.micro_batch(micro_rows)
        logprobs, ref_logprobs = (
            losses.token_logprobs(forward.response_logits(model, micro), micro.targets, temperature)
            for model in (policy, ref)
        )
        totals.index_add_(0, micro.response_index[0], (logprobs - ref_logprobs).double())
    return totals.tolist()


# Trackers


def track(config: EvalConfig, report: Mapping[str, Any], evaluated: Sequence[EvalResponses]) -> None:
    """Log `models`, `win_rate` and samples to the trackers at step 0, and each frontier point at its step."""
    with Trackers(config) as trackers:
        if not trackers:
            return
        headline = {name: report[name] for name in ("models", "win_rate", "selected_step") if name in report}
        best_of = {str(entry["n"]): entry for entry in report.get("best_of", [])}
        trackers.metrics({"step": 0, **flatten_metrics({**headline, "best_of": best_of})})
        sampled = [e for e in evaluated if e.mode == "sampled" and e.model in report["models"]]
        trackers.table(0, "samples", [row for row in sample_rows(sampled) if row["index"] < MAX_TRACKED_PROMPTS])
        for point in report.get("frontier", []):
            fields = {key: value for key, value in point.items() if key != "step"}
            trackers.metrics({"step": point["step"], **flatten_metrics({"frontier": fields})})


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
