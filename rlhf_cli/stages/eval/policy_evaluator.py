"""Sampling and scoring of an evaluation's policies."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rlhf_cli import data, terminal
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError
from rlhf_cli.evaluation.responses import EvalResponses, EvalSampling, TokenKL, concat_responses, select_best_of_n
from rlhf_cli.evaluation.selection import share_at_limit
from rlhf_cli.models import devices, forward
from rlhf_cli.models.batch import MicroBatch, Prompts, Rollout, split_into_micro_batches
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.progress import Progress, track_progress
from rlhf_cli.rewards.model import RewardModels, model_scores
from rlhf_cli.rewards.signature import TextRows
from rlhf_cli.stages.common import lifecycle, scoring
from rlhf_cli.stages.eval.evaluated_models import (
    EvaluatedModels,
    EvaluatedPolicy,
    JudgeFn,
    interpolated_policy,
    load_judges,
    policies_to_evaluate,
)
from rlhf_cli.stages.eval.evaluation_inputs import EvaluationInputs
from rlhf_cli.stages.eval.people_judges import PeopleJudge
from rlhf_cli.stages.eval.policy_engines import Engine, PolicyEngines, open_engines

T = TypeVar("T")
NEAR_GREEDY_TEMPERATURE = 0.01  # TRL 1.12's evaluation generations


@dataclass(frozen=True)
class Evaluated:
    """The scored answers of an evaluation."""

    responses: list[EvalResponses]  # of all policies, and SFT's best of n
    draws: list[EvalResponses]  # of SFT for best of n and the limit, the latter without texts
    labelled: dict[str, tuple[EvalResponses, EvalResponses]]  # of PPO and SFT, by the judge whose labels are of them


def evaluate_policies(config: EvalConfig, stage: lifecycle.StageRun, inputs: EvaluationInputs) -> Evaluated:
    """Sample and score each policy in each mode, PPO's snapshots and interpolations, and best of n of the SFT policy.

    At most one other policy is in memory besides the SFT policy. Each rank samples a part of the prompts.
    """
    sft = stage.parents["models.sft"]
    loaded = EvaluatedModels(config, stage, inputs.tokenizer)
    prompts = [*inputs.prompts, *chain.from_iterable(judge.prompts for judge in inputs.people.values())]
    policy_text = scoring.PolicyText(sft, inputs.tokenizer, inputs.sampling.stop_token_id, prompts)
    evaluator = PolicyEvaluator(
        config,
        inputs.tokenizer,
        inputs.prompts,
        sampling=inputs.sampling,
        judges=load_judges(loaded, policy_text, inputs.functions),
        process_group=stage.process_group,
    )
    policies = policies_to_evaluate(config, stage.parents, inputs.series, inputs.shares)
    _announce_limit(config, len(inputs.prompts))

    num_rounds = sum(len(policy.modes) for policy in policies) + config.eval.draws
    with open_engines(loaded, inputs, policies) as engines, Progress("eval", num_rounds, "round") as bar:
        evaluated = _evaluate_each(policies, engines, evaluator, bar)
        share = _share_at_limit(config, inputs.shares, evaluated)
        if share is not None:
            bar.total += 1
            at_limit = interpolated_policy(stage.parents["models.ppo"], share)
            evaluated += _evaluate_each([at_limit], engines, evaluator, bar)
        draws = _draw_from_sft(config, engines, evaluator, bar)
    best_of_n = [select_best_of_n(draws[:n]) for n in config.eval.best_of]
    return Evaluated(
        responses=evaluated + best_of_n,
        draws=draws,
        labelled={name: _score_labelled(judge, evaluator) for name, judge in inputs.people.items()},
    )


def _share_at_limit(config: EvalConfig, shares: Sequence[float], evaluated: Sequence[EvalResponses]) -> float | None:
    """Return the share just within eval.max_kl, if the shares by default have none near it."""
    limit = config.eval.kl_limit
    has_default_shares = config.eval.interpolate is None and len(shares) > 0
    if limit is None or not has_default_shares:
        return None

    kl_by_share = {}
    for each in evaluated:
        share = 1.0 if each.model == "ppo" else each.share
        if share is not None and each.kl is not None:  # near-greedy responses have none
            kl_by_share[share] = fmean(each.kl)
    return share_at_limit(kl_by_share, limit)


def _score_labelled(judge: PeopleJudge, evaluator: "PolicyEvaluator") -> tuple[EvalResponses, EvalResponses]:
    """Return the labelled answers of PPO and SFT with the scores of all other judges."""
    ppo, sft = (evaluator.score(judge.responses(model), judge.prompts) for model in ("ppo", "sft"))
    return ppo, sft


def _announce_limit(config: EvalConfig, num_prompts: int) -> None:
    """Print how many answers the limit draws, and how many more than the evaluation without it."""
    if config.eval.limit:
        draws = config.eval.draws
        more = (draws - max(config.eval.best_of, default=0)) * num_prompts
        terminal.say(
            f"eval     limit: {draws} SFT answers to each of {num_prompts} prompts, {more:,} more than the evaluation "
            "draws without it"
        )


def _evaluate_each(
    policies: Sequence[EvaluatedPolicy], engines: PolicyEngines, evaluator: "PolicyEvaluator", bar: Progress
) -> list[EvalResponses]:
    """Return the responses of each policy in each of its modes."""
    loaded = engines.loaded
    evaluated = []
    for each in policies:
        policy = loaded.sft if each.name == "sft" else loaded.policy(each.parent, each.share)
        engine = engines.engine(each.name, each.parent, policy, each.share)
        for mode in each.modes:
            responses = evaluator.evaluate(each.name, mode, policy, loaded.sft, engine)
            evaluated.append(replace(responses, step=each.step, share=each.share))
            bar.advance(note=f"{each.name} {mode}")
        del policy, engine  # before the next one is loaded
    return evaluated


def _draw_from_sft(
    config: EvalConfig, engines: PolicyEngines, evaluator: "PolicyEvaluator", bar: Progress
) -> list[EvalResponses]:
    """Return the SFT policy's draws for best of n, and then those for the limit: by the reward alone, without texts."""
    if not config.eval.draws:
        return []
    sft = engines.loaded.sft
    engine = engines.engine("sft", engines.loaded.sft_parent, sft)
    for_best_of = max(config.eval.best_of, default=0)
    draws = []
    for draw in range(1, config.eval.draws + 1):
        is_for_best_of = draw <= for_best_of
        if draw == for_best_of + 1:
            evaluator = replace(evaluator, judges={"reward": evaluator.judges["reward"]})
        responses = evaluator.evaluate("sft", "sampled", sft, sft, engine, draw=draw)
        draws.append(responses if is_for_best_of else replace(responses, prompts=[], responses=[]))
        bar.advance(note=f"best of {draw}" if is_for_best_of else f"limit {draw}")
    return draws


@dataclass
class PolicyEvaluator:
    """Samples a policy's responses to the prompts and scores them with all judges."""

    config: EvalConfig
    tokenizer: Any
    prompts: list[data.Prompt]
    sampling: EvalSampling
    judges: dict[str, JudgeFn | RewardModels]
    process_group: ProcessGroup

    def evaluate(
        self,
        name: str,
        mode: str,
        policy: Any,
        sft: Any,
        engine: Engine,
        *,
        draw: int = 0,
    ) -> EvalResponses:
        """Sample one response per prompt by `engine`, which draws from the policy, and score them.

        Seeds derive from (seed, mode, draw, row) and are the same for every policy, so that comparisons are paired.
        Model judges score each rank's own rows; functions are called once, by the first rank, with all rows.
        """
        seeds = [derive_seed(self.config.seed, f"eval/{mode}", draw, row) for row in range(len(self.prompts))]
        prompts = replace(
            Prompts.of(self.prompts),
            seeds=tuple(seeds),
            response_length=self.sampling.response_length,
        )
        engine.temperature = self._temperature(mode)
        sampled = self._map_responses(engine, prompts, partial(self._judge, name, mode, policy, sft))
        responses = concat_responses([part for part, _ in sampled])
        ids = list(chain.from_iterable(part_ids for _, part_ids in sampled))

        rows = TextRows.from_tokens(self.tokenizer, [prompt.ids for prompt in self.prompts], ids, prompts.records)
        scores: dict[str, list[float]] = {}
        for judge, source in self.judges.items():
            if isinstance(source, RewardModels):
                scores[judge] = responses.scores[judge]
            else:
                scores[judge] = self.process_group.run_on_main(partial(source, rows))
        _require_finite(name, {"KL": responses.kl or [], **scores})
        return replace(responses, scores=scores)

    def score(self, answers: EvalResponses, prompts: Sequence[data.Prompt]) -> EvalResponses:
        """Return given answers with the scores of all judges beside those that they have."""
        encoded = []
        for prompt, answer, ended in zip(prompts, answers.responses, answers.ended, strict=True):
            encoded.append(data.encode_answer(self.tokenizer, prompt.text, answer, ended=ended))
        prompt_ids, response_ids = zip(*encoded, strict=True)
        rollout = Rollout.from_lists(prompt_ids, response_ids, stop_token_id=self.sampling.stop_token_id)
        rollout = replace(rollout, records=Prompts.of(prompts).records).to(devices.device())
        rows = TextRows.of(rollout, self.tokenizer)

        scores = dict(answers.scores)
        for judge, source in self.judges.items():
            if isinstance(source, RewardModels):
                scores[judge] = model_scores(source, rollout).tolist()
            else:
                scores[judge] = self.process_group.run_on_main(partial(source, rows))
        _require_finite(answers.model, scores)
        return replace(answers, scores=scores)

    def _temperature(self, mode: str) -> float:
        return self.sampling.temperature if mode == "sampled" else NEAR_GREEDY_TEMPERATURE

    def _map_responses(self, engine: Engine, prompts: Prompts, function: Callable[[Rollout], T]) -> list[T]:
        """Call a function on each rank's part of the engine's responses; return the results in order.

        A server draws all rows for the first rank: its draws depend on the batch.
        """
        group = self.process_group
        if isinstance(engine, HFEngine):
            results = group.map_rows(len(prompts), lambda part: function(engine.generate(prompts.rows(part))))
            engine.release_memory()
            return results
        rollout = group.run_on_main(lambda: engine.generate(prompts), engine.join).to(devices.device())
        engine.release_memory()  # the judges may need what a server that sleeps frees
        return group.map_rows(len(prompts), lambda part: function(rollout.rows(part)))

    def _judge(
        self,
        name: str,
        mode: str,
        policy: Any,
        sft: Any,
        rollout: Rollout,
    ) -> tuple[EvalResponses, list[list[int]]]:
        """Score responses with the judges that are models; return the responses' token ids, too."""
        settings = self.config.eval
        temperature = self._temperature(mode)
        rows = TextRows.of(rollout, self.tokenizer)

        kl = None
        tokens = None
        if mode == "sampled":
            kl = [0.0] * len(rollout)
            if policy is not sft:
                with devices.autocast(bf16=devices.use_bf16(settings.bf16)):
                    ratios = _log_ratios(policy, sft, rollout, temperature, max_rows=settings.per_device_batch_size)
                kl = ratios.sums
                if name == "ppo":
                    tokens = [_token_kl(rollout, ratios.tokens, row) for row in range(len(rollout))]
        scores = {
            judge: model_scores(source, rollout).tolist()
            for judge, source in self.judges.items()
            if isinstance(source, RewardModels)
        }
        responses = EvalResponses(
            model=name,
            mode=mode,
            prompts=rows.prompts,
            responses=rows.responses,
            ended=rollout.ended.tolist(),
            lengths=rollout.response_lengths.tolist(),
            scores=scores,
            kl=kl,
            tokens=tokens,
        )
        return responses, list(rows.completion_ids)


def _token_kl(rollout: Rollout, log_ratios: Tensor, row: int) -> TokenKL:
    """Return the tokens of a response with the KL of each."""
    counts = rollout.response_mask[row]
    ids = rollout.ids[row, rollout.prompt_width :]
    return TokenKL(ids[counts].tolist(), log_ratios[row][counts].tolist())


def _require_finite(policy: str, numbers: Mapping[str, Sequence[float]]) -> None:
    """Raise RLHFError R01 if a score of a reward model, or the KL, of a policy's answer is not finite."""
    for name, values in numbers.items():
        for row, value in enumerate(values):
            if not math.isfinite(value):
                text = f"{name} of the answer of {policy} to prompt {row} is {value}"
                raise RLHFError("R01", text, hint="look for the stage whose training diverged: rlhf report RUN")


@torch.no_grad()
def sequence_kl(policy: Any, ref: Any, rollout: Rollout, temperature: float, *, max_rows: int) -> list[float]:
    """Return the sum over each response's tokens of log pi - log ref, in nats.

    Its mean over rows estimates KL(pi || ref) on pi's own samples.
    """
    return _log_ratios(policy, ref, rollout, temperature, max_rows=max_rows).sums


class LogRatios(NamedTuple):
    """Log pi - log ref of responses: the sum of each, and that of each token (B, R), 0 beyond the response."""

    sums: list[float]
    tokens: Tensor


def _log_ratios(policy: Any, ref: Any, rollout: Rollout, temperature: float, *, max_rows: int) -> LogRatios:
    device = rollout.ids.device
    totals = torch.zeros(len(rollout), dtype=torch.float64, device=device)
    tokens = torch.zeros(rollout.response_mask.shape, dtype=torch.float64, device=device)
    row_index = torch.arange(len(rollout), device=device)
    micro_batches = split_into_micro_batches(rollout.lengths, row_index, max_rows=max_rows)
    for rows in track_progress("kl: micro-batch", micro_batches):
        micro_batch = rollout.micro_batch(rows)
        logprobs = _response_logprobs(policy, micro_batch, temperature)
        ref_logprobs = _response_logprobs(ref, micro_batch, temperature)
        ratios = (logprobs - ref_logprobs).double()
        totals.index_add_(0, micro_batch.response_index[0], ratios)
        tokens[micro_batch.response_index] = ratios
    return LogRatios(totals.tolist(), tokens)


def _response_logprobs(model: Any, micro_batch: MicroBatch, temperature: float) -> Tensor:
    """Return the log-prob (N,) of each response token."""
    hidden = forward.response_hidden_states(model, micro_batch)
    parts = []
    for part in forward.logit_chunks(model, len(hidden)):
        logits = forward.lm_head_logits(model, hidden[part])
        parts.append(losses.token_logprobs(logits, micro_batch.response_ids[part], temperature))
    return torch.cat(parts)
