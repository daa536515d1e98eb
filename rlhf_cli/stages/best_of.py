"""Best-of-n SFT: sample n answers of model.path to each prompt; the one that the reward model prefers is trained on.

This is rejection-sampling fine-tuning: Touvron et al. 2023 (Llama 2), arXiv 2307.09288, section 3.2.3; Dong et al. 2023
(RAFT), arXiv 2304.06767.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from rlhf_cli import data, jsonl, terminal
from rlhf_cli.config.sft import BestOfSettings, SFTConfig
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError
from rlhf_cli.files import write_text
from rlhf_cli.models import devices, load, row_trial
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.models.parallel import ProcessGroup
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.progress import Progress
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.stages.common import held_out, lifecycle, model_loading, scoring, trainable_model, training_rows
from rlhf_cli.stages.common.engines import Drawing, best_engine
from rlhf_cli.stages.common.scoring import warn_pad_is_end_token
from rlhf_cli.stages.common.shared_base import SharedBaseModels

FILE = "best_of.jsonl"  # in the stage's folder: one row a prompt, those of data.train before those of data.eval
Answer = dict[str, Any]  # a row of FILE


@dataclass(frozen=True)
class BestRows:
    """Rows to train on and held-out ones, {input_ids, labels}, and the manifest's metrics of the training rows."""

    rows: data.Rows[dict[str, list[int]]]
    eval_rows: list[dict[str, list[int]]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class SourcePrompt:
    """A prompt and its place in the data, which alone decides the seeds of its answers."""

    split: str  # "train" or "eval"
    row: int
    prompt: data.Prompt


def best_rows(config: SFTConfig, stage: lifecycle.StageRun) -> BestRows:
    """Return the best answers to the prompts of data.train and data.eval; sample them unless FILE has them all.

    An answer depends only on the seed, its row and its number, so that a run that is started again has the same ones.
    Raises RLHFError as `training_rows.read_train_and_eval` and `load_sampler`, and R01 for a score that is not finite.
    """
    parent = stage.parents["model.path"]
    tokenizer = model_loading.load_tokenizer(config, stage.options, parent)
    tokenizer = trainable_model.prepare_tokenizer(config, tokenizer, parent_stage="")
    with stage.process_group.main_process_first():
        model_config = load.read_config(parent.model, stage.options.trust_remote_code)
        prompts, eval_prompts = training_rows.read_train_and_eval(config, tokenizer, model_config)

    sources = [SourcePrompt("train", row, prompt) for row, prompt in enumerate(prompts)]
    sources += [SourcePrompt("eval", row, prompt) for row, prompt in enumerate(eval_prompts)]
    answers = _read_or_sample(config, stage, tokenizer, sources)

    metrics = summarize(answers[: len(prompts)])
    _log_summary(config, metrics, len(prompts))
    rows = [_token_row(source.prompt, answer) for source, answer in zip(sources, answers, strict=True)]
    train_rows = training_rows.add_labels(config, prompts.with_rows(rows[: len(prompts)]))
    eval_rows = training_rows.add_labels(config, prompts.with_rows(rows[len(prompts) :]))
    return BestRows(train_rows, list(eval_rows), metrics)


def _read_or_sample(
    config: SFTConfig, stage: lifecycle.StageRun, tokenizer: Any, sources: Sequence[SourcePrompt]
) -> list[Answer]:
    """Return the answers of an earlier start of this run, or sample them and write them to FILE."""
    path = config.folder / FILE
    process_group = stage.process_group
    answers = process_group.run_on_main(lambda: _read(path, len(sources)))
    if answers:
        return answers

    sampler = load_sampler(config, stage, tokenizer, [source.prompt for source in sources])
    answers = sampler.best_answers(sources, process_group)
    del sampler
    devices.release_memory()  # before the model to train is loaded
    lines = [jsonl.to_json(answer, allow_nan=False) + "\n" for answer in answers]
    process_group.run_on_main(lambda: write_text(path, "".join(lines)))
    return answers


def _read(path: Path, count: int) -> list[Answer]:
    """Return the answers of an earlier start of this run, [] unless there are `count`. Raises RLHFError D03, D04."""
    if not path.exists():
        return []
    answers = [row for _, row in jsonl.read_jsonl(path)]
    return answers if len(answers) == count else []


def summarize(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the mean score of all answers and of the best ones, and the share of the best ones that end."""
    return {
        "best_of_mean_score": fmean(answer["mean_score"] for answer in answers),
        "best_of_score": fmean(answer["score"] for answer in answers),
        "best_of_ended": fmean(answer["ended"] for answer in answers),
    }


def _log_summary(config: SFTConfig, metrics: dict[str, float], num_prompts: int) -> None:
    """Print how much better the best answers are."""
    assert config.best_of
    scores = f"mean score {metrics['best_of_mean_score']:.2f} -> {metrics['best_of_score']:.2f}"
    ended = f"{metrics['best_of_ended']:.0%} of the best ones end"
    terminal.say(f"sft      best of {config.best_of.n} answers to {num_prompts} prompts: {scores}; {ended}")


def _token_row(prompt: data.Prompt, answer: Answer) -> dict[str, list[int]]:
    """Return {input_ids, completion_mask} of the sampled tokens; an answer that did not end has no stop token."""
    completion = answer["completion_ids"]
    return {
        "input_ids": prompt.ids + completion,
        "completion_mask": [0] * len(prompt.ids) + [1] * len(completion),
    }


def load_sampler(
    config: SFTConfig, stage: lifecycle.StageRun, tokenizer: Any, prompts: Sequence[data.Prompt]
) -> "BestOfSampler":
    """Load model.path and the reward model, both frozen. Raises RLHFError C13, D06, D14, M01-M03, M06-M09."""
    assert config.best_of
    parent = stage.parents["model.path"]
    bf16 = devices.use_bf16(config.sft.bf16)
    policy = trainable_model.load_sft_model(config, stage.options, parent, tokenizer)
    row_trial.require_rows_alone(policy, config.where(parent.key))
    model_loading.place_frozen(policy, bf16=bf16)
    stop_id = model_loading.stop_token_id(tokenizer, parent, policy.get_input_embeddings().weight.shape[0])

    drawing = Drawing(
        "sft",
        stop_id,
        tokenizer.pad_token_id,
        temperature=config.best_of.temperature,
        bf16=bf16,
        batch_size=config.best_of.per_device_batch_size,
    )
    engine = best_engine(policy, drawing)
    policy_text = scoring.PolicyText(parent, tokenizer, stop_id, prompts)
    reward = _load_reward(config, stage, policy, policy_text, bf16=bf16)
    return BestOfSampler(config.best_of, config.seed, tokenizer, engine, reward)


def _load_reward(
    config: SFTConfig,
    stage: lifecycle.StageRun,
    policy: Any,
    policy_text: scoring.PolicyText,
    *,
    bf16: bool,
) -> ModelReward:
    """Load best_of.reward, on the policy's weights if it is an adapter of them."""
    assert config.best_of
    parent = stage.parents["best_of.reward"]
    where = config.where(parent.key)
    own_tokenizer = scoring.load_own_tokenizer(config, stage.options, policy_text.sft, parent)
    tokenizer = own_tokenizer or policy_text.tokenizer
    base = SharedBaseModels(config, stage.options, policy_text.sft, policy)
    model = base.load_frozen_scorer(parent, tokenizer, bf16=bf16)
    if parent.manifest.probes:
        scoring.check_probes(model, parent, where=where)
    warn_pad_is_end_token(model.config, scoring.end_token_ids(tokenizer), where)
    return scoring.build_model_reward(
        config,
        parent.key,
        policy_text,
        parent=parent,
        model=model,
        own_tokenizer=own_tokenizer,
        rows=config.best_of.per_device_batch_size,
        bf16=bf16,
    )


@dataclass(frozen=True)
class BestOfSampler:
    """Samples answers with `engine` and selects by `reward`."""

    settings: BestOfSettings
    seed: int
    tokenizer: Any
    engine: HFEngine
    reward: ModelReward

    def best_answers(self, sources: Sequence[SourcePrompt], process_group: ProcessGroup) -> list[Answer]:
        """Return the best answer to each of the prompts, in order, on all ranks."""
        size = max(1, self.settings.per_device_batch_size // self.settings.n)
        batches = held_out.batches_by_length([len(source.prompt.ids) for source in sources], size)
        rank_batches = process_group.shard(batches)

        def sample() -> dict[int, Answer]:
            found: dict[int, Answer] = {}
            with Progress(f"sft: best of {self.settings.n}", len(rank_batches), "batch") as bar:
                for batch in rank_batches:
                    best = self._best_of_batch([sources[i] for i in batch])
                    found.update(zip(batch, best, strict=True))
                    bar.advance()
            return found

        return held_out.in_row_order(process_group.gather_results(sample))

    def _best_of_batch(self, sources: Sequence[SourcePrompt]) -> list[Answer]:
        """Return the best answer to each prompt of a batch."""
        n = self.settings.n
        rollout = self._sample(sources)
        ended = rollout.ended.cpu()
        rewards = self.reward(rollout).float().cpu()
        scores, best = select_best(rewards, ended, n, self.settings.missing_eos_penalty or 0)

        answers: list[Answer] = []
        for number, source in enumerate(sources):
            source_scores = scores[number].tolist()
            self._require_finite(source, source_scores)
            best_number = int(best[number])
            row = number * n + best_number
            ids = rollout.response_tokens(row)
            answers.append(
                {
                    "prompt": source.prompt.text,
                    "completion": self.tokenizer.decode(ids, skip_special_tokens=True),
                    "completion_ids": ids,
                    "ended": bool(ended[row]),
                    "score": source_scores[best_number],
                    "mean_score": fmean(source_scores),
                }
            )
        return answers

    def _sample(self, sources: Sequence[SourcePrompt]) -> Rollout:
        """Return n answers to each prompt, in adjacent rows: a prompt is read once for its n rows."""
        ids: list[list[int]] = []
        seeds: list[int] = []
        for source in sources:
            for number in range(self.settings.n):
                ids.append(source.prompt.ids)
                seeds.append(derive_seed(self.seed, f"best_of/{source.split}", source.row, number))
        prompts = replace(
            Prompts.from_lists(ids, self.tokenizer.pad_token_id),
            seeds=tuple(seeds),
            response_length=self.settings.response_length,
        )
        return self.engine.generate(prompts)

    def _require_finite(self, source: SourcePrompt, scores: Sequence[float]) -> None:
        """Raise RLHFError R01 for a score that is not finite."""
        if not all(map(math.isfinite, scores)):
            text = f"the reward model's scores of answers to prompt {source.row} are not finite: {scores}"
            prompt = self.tokenizer.decode(source.prompt.ids)[:80]
            raise RLHFError("R01", text, hint=f"its prompt: {prompt!r}")


def select_best(rewards: Tensor, ended: Tensor, n: int, missing_eos_penalty: float) -> tuple[Tensor, Tensor]:
    """Return the scores (P, n) of n answers to each of P prompts, and the number (P,) of each prompt's best one.

    rewards (P n,) float32, ended (P n,) bool: a prompt's answers are adjacent. The score of an answer that does not end
    is reward - missing_eos_penalty, as in PPO. The first of equal scores is the best.
    """
    scores = (rewards - missing_eos_penalty * ~ended).reshape(-1, n)
    return scores, scores.argmax(1)
