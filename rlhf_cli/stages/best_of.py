"""Best-of-n SFT: sample n answers of model.path to each prompt; the one that the reward model prefers is trained on.

This is rejection-sampling fine-tuning: Touvron et al. 2023 (Llama 2), arXiv 2307.09288, section 3.2.3; Dong et al. 2023
(RAFT), arXiv 2304.06767.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any

from torch import Tensor

from rlhf_cli import data, jsonl, terminal
from rlhf_cli.config.sft import BestOf, SFTConfig
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError
from rlhf_cli.files import write_text
from rlhf_cli.models import devices, load, row_trial
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.progress import Progress
from rlhf_cli.rewards.model import ModelReward
from rlhf_cli.stages.common import lifecycle, model_loading, scoring, training
from rlhf_cli.stages.ppo.shared_models import SharedBaseModels, warn_pad_is_end_token

FILE = "best_of.jsonl"  # in the stage's folder: one row a prompt, those of data.train before those of data.eval
Answer = dict[str, Any]


@dataclass(frozen=True)
class BestRows:
    """Rows to train on and held-out ones, {input_ids, labels}, and the manifest's metrics of the training rows."""

    rows: Any
    eval_rows: list[dict[str, list[int]]]
    metrics: dict[str, float]


def best_rows(config: SFTConfig, stage: lifecycle.StageRun) -> BestRows:
    """Return the best answers to the prompts of data.train and data.eval; sample them unless FILE has them all.

    An answer depends only on the seed, its row and its number, so that a run that is started again has the same ones.
    Raises RLHFError as `training_setup.read_rows` and `load_sampler`, and R01 for a score that is not finite.
    """
    assert config.best_of
    parent, process_group, path = stage.parents["model.path"], stage.process_group, config.folder / FILE
    tokenizer = training.prepare_tokenizer(config, model_loading.load_tokenizer(config, stage.options, parent))
    with process_group.main_process_first():
        model_config = load.read_config(parent.model, stage.options.trust_remote_code)
        prompts, eval_prompts = training.read_rows(config, tokenizer, model_config)
    numbered = [("train", *each) for each in enumerate(prompts)] + [("eval", *each) for each in enumerate(eval_prompts)]
    answers = process_group.run_on_main(lambda: _read(path, len(numbered)))
    if not answers:
        sampler = load_sampler(config, stage, tokenizer, [*prompts, *eval_prompts])
        answers = sampler.best_answers(numbered, process_group)
        del sampler
        devices.release_memory()  # before the model to train is loaded
        text = "".join(jsonl.to_json(answer, allow_nan=False) + "\n" for answer in answers)
        process_group.run_on_main(lambda: write_text(path, text))
    rows, count = [_token_row(*each) for each in zip(numbered, answers, strict=True)], len(prompts)
    metrics = summarize(answers[:count])
    scores = f"mean score {metrics['best_of_mean_score']:.2f} -> {metrics['best_of_score']:.2f}"
    ended = f"{metrics['best_of_ended']:.0%} of the best ones end"
    terminal.say(f"sft      best of {config.best_of.n} answers to {count} prompts: {scores}; {ended}")
    train_rows = training.add_labels(config, prompts.with_rows(rows[:count]))
    eval_rows = training.add_labels(config, prompts.with_rows(rows[count:]))
    return BestRows(train_rows, list(eval_rows), metrics)


def summarize(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the mean score of all answers and of the best ones, and the share of the best ones that end."""
    return {
        "best_of_mean_score": fmean(answer["mean_score"] for answer in answers),
        "best_of_score": fmean(answer["score"] for answer in answers),
        "best_of_ended": fmean(answer["ended"] for answer in answers),
    }


def _read(path: Any, count: int) -> list[Answer]:
    """Return the answers of an earlier start of this run, [] unless there are `count`. Raises RLHFError D03, D04."""
    answers = [row for _, row in jsonl.read_jsonl(path)] if path.exists() else []
    return answers if len(answers) == count else []


def _token_row(numbered: tuple[str, int, data.Prompt], answer: Answer) -> dict[str, list[int]]:
    """Return {input_ids, completion_mask} of the sampled tokens; an answer that did not end has no stop token."""
    prompt, completion = numbered[2].ids, answer["completion_ids"]
    return {"input_ids": prompt + completion, "completion_mask": [0] * len(prompt) + [1] * len(completion)}


def load_sampler(
    config: SFTConfig, stage: lifecycle.StageRun, tokenizer: Any, prompts: Sequence[data.Prompt]
) -> "BestOfSampler":
    """Load model.path and the reward model, both frozen. Raises RLHFError C13, D06, D14, M01-M03, M06-M09."""
    assert config.best_of
    options, parent, scorer = stage.options, stage.parents["model.path"], stage.parents["best_of.reward"]
    rows, bf16 = config.best_of.per_device_batch_size, devices.use_bf16(config.sft.bf16)
    policy = training.load_sft_model(config, options, parent, tokenizer)
    row_trial.require_rows_alone(policy, config.where(parent.key))
    model_loading.place_frozen(policy, bf16=bf16)
    stop_id = model_loading.stop_token_id(tokenizer, parent, policy.get_input_embeddings().weight.shape[0])
    own_tokenizer = scoring.load_own_tokenizer(config, options, parent, scorer)
    base = SharedBaseModels(config, options, parent, policy)
    model = base.load_frozen_scorer(scorer, own_tokenizer or tokenizer, bf16=bf16)
    where = config.where(scorer.key)
    if scorer.manifest.probes:
        scoring.check_probes(model, scorer, where=where)
    warn_pad_is_end_token(model.config, scoring.end_token_ids(own_tokenizer or tokenizer), where)
    text = scoring.PolicyText(parent, tokenizer, stop_id, prompts)
    reward = scoring.build_model_reward(config, scorer.key, text, scorer, model, own_tokenizer, rows=rows, bf16=bf16)
    engine = HFEngine(policy, stop_id, tokenizer.pad_token_id, config.best_of.temperature, rows, bf16=bf16)
    return BestOfSampler(config.best_of, config.seed, tokenizer, engine, reward)


@dataclass(frozen=True)
class BestOfSampler:
    """Samples answers with `engine` and selects by `reward`."""

    settings: BestOf
    seed: int
    tokenizer: Any
    engine: HFEngine
    reward: ModelReward

    def best_answers(self, prompts: Sequence[tuple[str, int, data.Prompt]], process_group: Any) -> list[Answer]:
        """Return the best answer to each of the prompts (set, row, prompt), in order, on all ranks."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i][2].ids))
        size = max(1, self.settings.per_device_batch_size // self.settings.n)
        parts = process_group.shard([order[first : first + size] for first in range(0, len(order), size)])

        def sample() -> dict[int, Answer]:
            found: dict[int, Answer] = {}
            with Progress(f"sft: best of {self.settings.n}", len(parts), "batch") as bar:
                for part in parts:
                    found |= zip(part, self._sample([prompts[i] for i in part]), strict=True)
                    bar.advance()
            return found

        answers = dict(chain.from_iterable(part.items() for part in process_group.gather_results(sample)))
        return [answers[i] for i in range(len(prompts))]

    def _sample(self, prompts: Sequence[tuple[str, int, data.Prompt]]) -> list[Answer]:
        n = self.settings.n
        seeds = [
            derive_seed(self.seed, f"best_of/{name}", row, number) for name, row, _ in prompts for number in range(n)
        ]
        repeated = [prompt.ids for _, _, prompt in prompts for _ in range(n)]  # a prompt is read once for its n rows
        batch = Prompts.from_lists(repeated, self.tokenizer.pad_token_id)
        rollout = self.engine.generate(
            replace(batch, seeds=tuple(seeds), response_length=self.settings.response_length)
        )
        ended = rollout.ended.cpu()
        scores, best = select_best(self.reward(rollout).float().cpu(), ended, n, self.settings.missing_eos_penalty or 0)
        answers: list[Answer] = []
        for (_, row, prompt), row_scores, number in zip(prompts, scores.tolist(), best.tolist(), strict=True):
            if not all(map(math.isfinite, row_scores)):
                text = f"the reward model's scores of answers to prompt {row} are not finite: {row_scores}"
                raise RLHFError("R01", text, hint=f"its prompt: {self.tokenizer.decode(prompt.ids)[:80]!r}")
            at = len(answers) * n + number
            ids = rollout.response_tokens(at)
            answers.append({
                "prompt": prompt.text, "completion": self.tokenizer.decode(ids, skip_special_tokens=True),
                "completion_ids": ids, "ended": bool(ended[at]), "score": row_scores[number],
                "mean_score": fmean(row_scores),
            })  # fmt: skip
        return answers


def select_best(rewards: Tensor, ended: Tensor, n: int, missing_eos_penalty: float) -> tuple[Tensor, Tensor]:
    """Return the scores (P, n) of n answers to each of P prompts, and the number (P,) of each prompt's best one.

    rewards (P n,) float32, ended (P n,) bool: a prompt's answers are adjacent. The score of an answer that does not end
    is reward - missing_eos_penalty, as in PPO. The first of equal scores is the best.
    """
    scores = (rewards - missing_eos_penalty * ~ended).reshape(-1, n)
    return scores, scores.argmax(1)
