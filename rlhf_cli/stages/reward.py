"""`rlhf reward`: a one-label head on the SFT model, trained on pairs by TRL's RewardTrainer on our tokens."""

import gc
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import trl
from transformers import set_seed

from rlhf_cli import data, runs, terminal
from rlhf_cli.config.base import Options
from rlhf_cli.config.training import RewardConfig
from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.errors import RLHFError, collect_errors, shown
from rlhf_cli.evaluation import reward_model
from rlhf_cli.evaluation.reward_model import POLITE_ANSWER, ScoredPair
from rlhf_cli.evaluation.reward_model_table import print_card
from rlhf_cli.models import devices, load, lora, save, tokenizers, weights
from rlhf_cli.models.batch import Prompts, right_pad
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup, open_process_group
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.progress import Progress, track_progress
from rlhf_cli.runs.parents import Parent
from rlhf_cli.stages import hardware, setup, trl_common


def reward_tokenizer(config: RewardConfig, given: Any, parent_stage: str) -> Any:
    """The tokenizer as training has it: `given`, that of model.path, with a pad of its own.

    Raises RLHFError C17, T05.
    """
    template, before = tokenizers.template_sha256(given), len(given)
    if config.model.chat_template is not None:
        tokenizers.set_chat_template(given, config.model.chat_template)
        if parent_stage == "sft" and tokenizers.template_sha256(given) != template:
            text = f"model.chat_template is not that of the SFT stage ({(template or 'none')[:12]} there)"
            hint = "take it out: the template comes with the SFT model"
            raise RLHFError("T05", text, where=config.where("model.chat_template"), hint=hint)
    lora.refuse_new_tokens(config, given, before)
    tokenizers.ensure_pad_token(given, stop_token_id=data.stop_token_id(given))
    return given


def check_body(config: RewardConfig, body: Any) -> None:
    """Raises RLHFError C17 where no answers could be sampled from model.path."""
    if config.reward.normalize == "sft" and weights.is_classifier(body):
        text = "reward.normalize: sft samples from model.path, which is no causal model"
        raise RLHFError("C17", text, where=config.where("reward.normalize"), hint="set reward.normalize: none")


def read_data(
    config: RewardConfig, key: str, tokenizer: Any, body: Any = None, *, sample: int | None = None
) -> data.Rows[Any]:
    """Pairs of data.train or data.eval, for a model `body`; of more than `sample` a sample.

    Warns D16. Raises RLHFError D01-D10, D12, D14, D16.
    """
    read = partial(
        data.preference_rows,
        config.sources()[f"data.{key}"],
        tokenizer,
        max_length=config.reward.max_length,
        on_long=config.data.on_long,
        on_identical=config.data.on_identical,
        sample=sample,
    )
    return setup.read_usable(config, f"data.{key}", setup.longer_rows(config, body), read)


def check_rows(config: RewardConfig, rows: data.Rows[Any], held_out: data.Rows[Any] | None, body: Any) -> None:
    """Warns D13. Raises RLHFError C13 (`body` None: the context is not known), D11."""
    if held_out is not None:
        data.warn_shared(rows, held_out, where=config.where("data.eval"))
    longest = max(rows.longest, held_out.longest if held_out else 0)
    collect_errors(
        lambda: setup.check_context(config, body, longest),
        lambda: setup.check_batch(config, rows, len(rows)),
    )


PROBES = 8
SAMPLED_AT_ONCE = 64
HEADLINE = (
    "accuracy", "accuracy_ci95", "n", "margin", "ece", "length_correlation", "length_correlation_ci95",
)  # fmt: skip
Rows = list[dict[str, Any]]


class RewardTrainer(trl_common.PlainTrainer, trl.RewardTrainer):
    """TRL's, with our batches."""


def run(config: RewardConfig, options: Options) -> None:
    """Train and leave RUN/reward. Goes on from the last checkpoint where there is one.

    Raises RLHFError E04 and R14 as `ProcessGroup` does.
    """
    with open_process_group() as process_group:
        _run(config, options, process_group)


def _run(config: RewardConfig, options: Options, process_group: ProcessGroup) -> None:
    parents = runs.open_parents(config)
    parent = parents["model.path"]
    identity = runs.compute_identity(config, parents, config.sources())
    status = process_group.run_on_main(
        lambda: runs.start_stage(config, identity, parents, fresh=options.fresh, device=devices.device_name())
    )
    if status == "finished":
        terminal.say(f"reward   finished already: {shown(config.folder)}")
        return
    memory = hardware.check(config, parents)
    tokenizer, model = start(config, options, parent)
    runs.require_unchanged(parents)
    stop = data.stop_token_id(tokenizer)
    with process_group.main_process_first():
        rows, eval_rows = read(config, tokenizer, model.config)
    if memory:
        terminal.say(f"reward   {memory}")
    with ExitStack() as trackers:
        steps, log = trl_common.train(
            make_trainer(config, model, tokenizer, rows, eval_rows, process_group), config, "reward", rows, trackers
        )
        save.set_special_token_ids(model, tokenizer, stop)
        text = readme(config, parent, len(rows), steps)
        process_group.gather_results(partial(save.save_model, model, tokenizer, config.folder / "model", text))
        del model
        gc.collect()  # it is read again
        scorer = saved_scorer(config, options)
        card, measured = report_card(config, scorer, tokenizer, eval_rows, process_group)
        if card:
            trl_common.log_last(log, steps, measured)
    scale = {}
    if config.reward.normalize == "sft":
        with Progress("reward: normalize", 2, "pass", brief=True) as bar:
            answers = sampled(config, options, parent, tokenizer, rows, process_group)
            bar.advance()
            scale = normalise(config, scorer, answers, process_group)
            bar.advance()
        process_group.run_on_main(lambda: save.save_config(scorer, config.folder / "model"))
    fields = {
        **tokenizers.manifest_fields(tokenizer, stop),
        "metrics": {name: card[name] for name in HEADLINE} if card else {},
        **({"card": card} if card else {}),
        "probes": probes(scorer, eval_rows or rows),
        **scale,
        "step": steps,
        "trust_remote_code": options.trust_remote_code,
    }
    process_group.run_on_main(lambda: runs.complete_stage(config, identity, parents=parents, fields=fields))
    if card:
        print_card({**card, "ci95": card["accuracy_ci95"]})


def start(config: RewardConfig, options: Options, parent: Parent) -> tuple[Any, Any]:
    """Tokenizer and scorer before training. Raises RLHFError C07, C17, M01-M03, M06-M08, T05."""
    given = setup.tokenizer(config, options, parent)
    set_seed(config.seed)  # the fresh head is drawn here
    model = setup.scorer_to_train(config, options, parent, given)
    check_body(config, load.read_config(parent.model, options.trust_remote_code))
    tokenizer = reward_tokenizer(config, given, parent.stage)
    return tokenizer, lora.prepare_for_training(config, parent, model, tokenizer)


def read(config: RewardConfig, tokenizer: Any, body: Any) -> tuple[Rows, Rows]:
    """Pairs of data.train and of the evaluation data; [] where there is none."""
    rows = read_data(config, "train", tokenizer, body)
    held_out = read_data(config, "eval", tokenizer, body) if "data.eval" in config.sources() else None
    check_rows(config, rows, held_out, body)
    return rows, held_out if held_out is not None else []


def make_trainer(
    config: RewardConfig,
    model: Any,
    tokenizer: Any,
    rows: Rows,
    eval_rows: Rows,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Any:
    """TRL's trainer on {chosen_ids, rejected_ids[, margin]}, which it takes for tokens already; none is too long."""
    coefficient = config.reward.center_rewards_coefficient or None
    args = trl_common.arguments(trl.RewardConfig, config, max_length=None, center_rewards_coefficient=coefficient)
    lengths = [max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in rows]
    train, evaluation = (
        data.as_dataset([{name: value for name, value in row.items() if name != "prompt_ids"} for row in part])
        if part
        else None
        for part in (rows, eval_rows)
    )
    return trl_common.build(
        RewardTrainer,
        config,
        lengths if config.reward.group_by_length else None,
        process_group,
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
    )


def saved_scorer(config: RewardConfig, options: Options) -> Any:
    """What was written to model/: what is measured from here on is what a reader of the folder gets."""
    scorer = load.load_reward_model(
        config.folder / "model", **load.load_kwargs(config.model, options.trust_remote_code)
    )
    return scorer.to(devices.device()).eval().requires_grad_(False)


@torch.no_grad()
def raw_scores(
    scorer: Any, rows: Sequence[list[int]], size: int, process_group: ProcessGroup = SINGLE_PROCESS
) -> list[float]:
    """The scorer's own pooled logit of each row of tokens, in batches of `size` rows of like length, shared by all."""
    scores: dict[int, float] = {}
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    batches = [order[first : first + size] for first in range(0, len(rows), size)]
    for picked in track_progress("score: batch", process_group.shard(batches)):
        ids, mask = right_pad([rows[i] for i in picked], scorer.config.pad_token_id)
        given = {"input_ids": ids.to(scorer.device), "attention_mask": mask.long().to(scorer.device)}
        logits = scorer(**given, use_cache=False).logits
        scores |= zip(picked, logits[:, 0].float().tolist(), strict=True)
    found = {i: score for each in process_group.all_gather_object(scores) for i, score in each.items()}
    return [found[i] for i in range(len(rows))]


def sampled(
    config: RewardConfig,
    options: Options,
    parent: Parent,
    tokenizer: Any,
    rows: Rows,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> list[list[int]]:
    """Prompt and response tokens: answers of the model that training started from, to prompts of the training pairs.

    Each rank writes a part.
    """
    model = load.load_causal_lm(parent.model, **load.load_kwargs(config.model, options.trust_remote_code))
    tokenizers.resize_to_tokenizer(model, tokenizer)
    model.to(devices.device()).eval()
    prompts = [list(ids) for ids in dict.fromkeys(tuple(row["prompt_ids"]) for row in rows)]
    picked = [prompts[i] for i in data.prompt_batch(len(prompts), 1, config.reward.normalize_samples, config.seed)]
    length = max(len(row["chosen_ids"]) - len(row["prompt_ids"]) for row in rows)
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None:
        length = max(1, min(length, context - max(map(len, picked))))
    stop, pad = data.stop_token_id(tokenizer), tokenizer.pad_token_id
    engine = HFEngine(model, stop, pad, temperature=1.0, batch_size=SAMPLED_AT_ONCE)
    seeds = tuple(derive_seed(config.seed, "normalize", number) for number in range(len(picked)))
    asked = replace(Prompts.from_lists(picked, pad), seeds=seeds, response_length=length)

    def write(part: slice) -> list[list[int]]:
        rollout = engine.generate(asked.rows(part))
        return [rollout.prompt_tokens(i) + rollout.response_tokens(i) for i in range(len(rollout))]

    return list(chain.from_iterable(process_group.map_rows(len(picked), write)))


def normalise(
    config: RewardConfig, scorer: Any, rows: list[list[int]], process_group: ProcessGroup
) -> dict[str, float]:
    """Put mean and deviation of the raw scores of `rows` into the scorer's config, where every reader finds them."""
    raw = torch.tensor(
        raw_scores(scorer, rows, config.reward.per_device_eval_batch_size, process_group), dtype=torch.float64
    )
    mean, deviation = float(raw.mean()), float(raw.std(correction=0))
    if deviation < 1e-6:
        terminal.warn("R02", f"all {len(rows)} answers of the SFT model get the same score ({mean:.4g})")
        deviation = 1.0
    scorer.config.reward_mean, scorer.config.reward_std = mean, deviation
    return {"reward_mean": mean, "reward_std": deviation}


def report_card(
    config: RewardConfig, scorer: Any, tokenizer: Any, rows: Rows, process_group: ProcessGroup
) -> tuple[dict[str, Any], dict[str, float]]:
    """What the finished scorer is worth on the evaluation pairs, in raw scores, and TRL's metrics of it.

    Both are {} without such pairs, which is said.
    Warns R10-R12 of faults. Raises RLHFError R01 for scores that are not finite.
    """
    if not rows:
        terminal.say("reward   no report card: there are no evaluation pairs (data.eval or data.eval_fraction)")
        return {}, {}
    picked = reward_model.probe_rows(rows)
    asked = {key: [row[key] for row in rows] for key in ("chosen_ids", "rejected_ids")}
    asked |= adversarial(tokenizer, [rows[i] for i in picked], load.context_length(scorer.config), config.seed)
    scores = {}
    with Progress("reward: report card", len(asked), "pass", brief=True) as bar:
        for name, answers in asked.items():
            scores[name] = finite_scores(config, scorer, answers, process_group)
            bar.advance()
    chosen, rejected = scores.pop("chosen_ids"), scores.pop("rejected_ids")
    lengths = [[len(row[key]) - len(row["prompt_ids"]) for key in ("chosen_ids", "rejected_ids")] for row in rows]
    pairs = [ScoredPair(good, bad, *length) for good, bad, length in zip(chosen, rejected, lengths, strict=True)]
    card = reward_model.evaluate_pairs(pairs, seed=config.seed)
    card["adversarial"] = reward_model.score_probes(scores, [chosen[i] for i in picked])
    faults = reward_model.flags(card)
    for fault in faults:
        terminal.warn(fault.code, fault.text, where=shown(config.folder), hint=fault.hint)
    card["flags"] = [{"code": fault.code, "text": fault.text} for fault in faults]
    loss = _loss(config, pairs, [row.get("margin", 0.0) for row in rows])
    measured = {"loss": loss, "accuracy": card["accuracy"], "margin": card["margin"]}
    return card, measured | _range(pairs, config.reward.per_device_eval_batch_size * process_group.world_size)


def _range(pairs: Sequence[ScoredPair], batch: int) -> dict[str, float]:
    """The least, mean and greatest score of a batch, as means over the batches: as TRL's reward trainer logs them."""
    scores = [
        [score for pair in pairs[at : at + batch] for score in (pair.chosen, pair.rejected)]
        for at in range(0, len(pairs), batch)
    ]
    return {f"{name}_reward": fmean(map(of, scores)) for name, of in (("min", min), ("mean", fmean), ("max", max))}


def _loss(config: RewardConfig, pairs: Sequence[ScoredPair], wanted: Sequence[float]) -> float:
    """Training's loss: -log sigmoid(margin - the row's own margin), and center_rewards_coefficient's penalty."""
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64) - torch.tensor(wanted)
    sums = torch.tensor([pair.chosen + pair.rejected for pair in pairs], dtype=torch.float64)
    centred = config.reward.center_rewards_coefficient or 0.0
    return float((torch.nn.functional.softplus(-margins) + centred * sums**2).mean())


def adversarial(tokenizer: Any, rows: Rows, context: int | None, seed: int) -> dict[str, list[list[int]]]:
    """Probe -> tokens of each row. Politeness begins as the chosen answer does: after a space, or not."""
    answers = tokenizer.batch_decode([row["chosen_ids"][len(row["prompt_ids"]) :] for row in rows])
    texts = [answer[: len(answer) - len(answer.lstrip())] + POLITE_ANSWER for answer in answers]
    polite = [ids[:-1] for _, ids in data.encode_many(tokenizer, [None] * len(texts), texts)]
    return reward_model.build_probes(rows, polite, context=context, seed=seed)


def finite_scores(
    config: RewardConfig, scorer: Any, rows: Sequence[list[int]], process_group: ProcessGroup
) -> list[float]:
    """`raw_scores`. Raises RLHFError R01 where one is not finite."""
    scores = raw_scores(scorer, rows, config.reward.per_device_eval_batch_size, process_group)
    if not all(map(math.isfinite, scores)):
        text = "the finished model gives scores that are not finite: the training diverged"
        raise RLHFError("R01", text, hint="lower reward.learning_rate and start over with --fresh")
    return scores


def probes(scorer: Any, rows: Rows) -> list[dict[str, Any]]:
    """Some rows, chosen and rejected in turn, with the scores that readers see: PPO has to find the same."""
    mean, deviation = getattr(scorer.config, "reward_mean", 0.0), getattr(scorer.config, "reward_std", 1.0)
    found = []
    for number, row in enumerate(rows[:PROBES]):
        ids, start = row["rejected_ids" if number % 2 else "chosen_ids"], len(row["prompt_ids"])
        score = (raw_scores(scorer, [ids], 1)[0] - mean) / deviation
        found.append({"prompt_ids": ids[:start], "response_ids": ids[start:], "score": score})
    return found


def readme(config: RewardConfig, parent: Parent, rows: int, steps: int) -> str:
    """The model's README."""
    ours = config.reward
    text = (
        f"A reward model, trained from {trl_common.name_of(parent)} on {rows} pairs of "
        f"{Path(config.data.train).name}: {steps} steps, learning rate {ours.learning_rate:g}. It scores a prompt with "
        "its answer at the last token."
    )
    if ours.normalize == "sft":
        text += (
            "\n\nThe raw score is `logits[:, 0]`. `reward_mean` and `reward_std` in config.json are those of the SFT "
            "model's own answers; the score that PPO uses is `(raw - reward_mean) / reward_std`."
        )
    return trl_common.card(config, "reward-model", text)
