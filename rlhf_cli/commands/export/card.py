"""The model card of an exported folder: facts from the run's files, for the template card.md.jinja.

Every number is read from the run's files; unknown facts are omitted. Texts from files are escaped, by `text` or `code`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from rlhf_cli import __version__, data
from rlhf_cli.config.machinery.fields import key_at
from rlhf_cli.config.machinery.paths import FUNCTION
from rlhf_cli.config.ppo import KINDS
from rlhf_cli.config.sources import hub_dataset, split_name
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.data.texts import is_transcript, render_transcript
from rlhf_cli.data.tokens import Conversation, header_of_answers
from rlhf_cli.errors import CODES, RLHFError
from rlhf_cli.evaluation import report_text, reward_card
from rlhf_cli.evaluation.sample_pairs import deciding_judge
from rlhf_cli.jsonl import is_number
from rlhf_cli.report import diagnosis, tables
from rlhf_cli.report.rules import ILL, Reading, readings
from rlhf_cli.report.tables import visible
from rlhf_cli.runs.layout import POLICY_STAGES, STAGES
from rlhf_cli.runs.manifest import ParentEntry
from rlhf_cli.runs.model_files import read_adapter
from rlhf_cli.runs.parents import FOREIGN, is_hub_id
from rlhf_cli.runs.read import Run, Stage, at_step, read_stage_with_logs
from rlhf_cli.runs.report import (
    InterpolatedPolicy,
    RewardModelAccuracy,
    RewardModelCard,
    SelectedPolicy,
)
from rlhf_cli.runs.resolve import ResolvedModel
from rlhf_cli.runs.settings import from_defaults, value_text
from rlhf_cli.stages.common import prompt_forms
from rlhf_cli.statistics import with_interval
from rlhf_cli.tracking.logs import read_log
from rlhf_cli.trees import flatten

TEMPLATE = Path(__file__).with_name("card.md.jinja")
TASKS = dict.fromkeys(POLICY_STAGES, "text-generation") | {"reward": "text-classification"}
TAGS = {"ppo": "ppo", "sft": "sft", "dpo": "dpo", "reward": "reward-model"}
LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "tokenizers", "safetensors")
COURSE = ("objective/scores", "objective/kl_k1", "objective/response_length", "objective/eos_fraction")
# Settings that are shown even at their default.
MAIN_SETTINGS = """
    recipe total_episodes num_train_epochs learning_rate per_device_train_batch_size gradient_accumulation_steps
    max_length num_ppo_epochs num_mini_batches response_length temperature kl_coef kl_estimator gamma lam cliprange
    vf_coef missing_eos_penalty"""
# Sections and settings that are not shown: logging, saving, network services.
HIDDEN = {"output", "run", "logging_steps", "num_sample_generations", "push_to_hub_if_best"}
HIDDEN |= {"url", "headers", "timeout", "retries", "batch_size"}
OWN_JUDGE = "the reward model that PPO was trained on: a win by it alone proves nothing"
WARNING = re.compile(r"warning\[([A-Z]\d\d)\]")
REWARD_FLAGS = ("R10", "R11", "R12")  # warnings that are shown with the reward model
EXAMPLE = "Write a prompt here, of the kind that it was trained on."

Prompt = str | Conversation


def text(value: str) -> str:
    """Return a value on one line, with Markdown and HTML characters escaped."""
    return re.sub(r"([\\`*_{}\[\]<>~$&#])", r"\\\1", _one_line(value))


def _one_line(value: str) -> str:
    return visible(" ".join(str(value).split()))


def code(value: str) -> str:
    """Return a value on one line as a code span; empty if the value is."""
    plain = _one_line(value)
    if "`" not in plain:
        return f"`{plain}`" if plain else ""
    longest = max(len(ticks) for ticks in re.findall("`+", plain))
    fence = "`" * (longest + 1)
    return f"{fence} {plain} {fence}"


def sha256_of(stage: Stage) -> str:
    return str(stage.manifest.model_sha256)


def short(sha256: Any) -> str:
    return code(str(sha256)[:12])


@dataclass
class Card:
    """The facts of a model card: the model, the stages that produced it, and the evaluation of this model.

    `name` is the model's name at its destination, `address` the argument of from_pretrained(), `example` a held-out
    prompt that may be shown, `share` that of a model between SFT and PPO. `stages` are those that produced the model,
    its own first, if they have not changed since.
    """

    chosen: ResolvedModel
    model: Any
    tokenizer: Any
    dtype: str
    name: str
    address: str
    example: Prompt | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        self.point = self._interpolated_point()
        if self.share is not None:  # the evaluation is of other policies, except for its point
            self.chosen = replace(self.chosen, report=None)

        self.stage = read_stage_with_logs(self.chosen.model.stage, self.chosen.model.path)
        self.updates = max((row["step"] for row in self.stage.metrics), default=0)
        if not self.chosen.last:
            self.stage = _without_later_updates(self.stage, self.chosen.step or 0)
        self.stages = list(_lineage(self.stage))
        self.run = self._run()
        self.evaluation = self.run.stages["eval"]
        self.report = self.run.report

        form = prompt_forms.training_prompt_form(self.chosen.model)
        self.prompts = prompt_forms.prompt_format(form, self.tokenizer)
        header = header_of_answers(self.tokenizer) if self.prompts == "template" else ""
        self.answer_header = json.dumps(header) if header else ""  # as Python writes it
        self.adapter = read_adapter(self.chosen.model.model)

    def _interpolated_point(self) -> InterpolatedPolicy | None:
        """Return the scores of a policy between SFT and PPO, if the evaluation has this share."""
        report = self.chosen.report
        if report is None or not self.chosen.last:
            return None
        return next((point for point in report.interpolated or [] if point.share == self.share), None)

    @property
    def is_evaluated(self) -> bool:
        """Return True if the evaluation is of this model."""
        return self.report is not None and self.stage.name in self.report.models

    @property
    def selected(self) -> SelectedPolicy | None:
        """Return how the evaluation selected this model, if it did."""
        if self.report is None or self.chosen.step is None or self.chosen.step != self.report.selected_step:
            return None
        return self.report.selected

    def _run(self) -> Run:
        """Return the run with the evaluation of the chosen step; without one if it was not evaluated."""
        chosen = self.chosen
        root = chosen.model.path.resolve().parent
        stages = {name: Stage(name, root / name) for name in STAGES}
        stages |= {stage.name: stage for stage in reversed(self.stages)}
        if chosen.report:
            stages["eval"] = read_stage_with_logs("eval", root / "eval")

        alarms = read_log(chosen.model.path / "watchdog.jsonl")
        run = Run(
            name=root.name,
            folder=root,
            stages=stages,
            report=chosen.report,
            answers=(),
            samples=(),
            firings=tuple(row for row in alarms if row["step"] <= (chosen.step or 0)),
            notes=(),
        )
        if chosen.last:
            return run
        with suppress(RLHFError):
            return at_step(run, str(chosen.step))
        return replace(run, report=None)

    # Parents

    @property
    def hub_base(self) -> ParentEntry | None:
        """Return the manifest entry of the base model if it is on the hub."""
        stage = self.stage
        for _ in self.stages:
            parents = stage.manifest.parents
            entry = parents.get("models.sft") or parents.get("model.path")
            if entry is None:
                return None
            if entry.stage == FOREIGN:
                return entry if is_hub_id(entry.path) else None
            stage = self._stage_of(entry.sha256) or stage
        return None

    def _stage_of(self, sha256: str) -> Stage | None:
        """Return the stage that wrote a model."""
        return next((stage for stage in self.stages if sha256_of(stage) == sha256), None)

    @property
    def reward_stages(self) -> list[Stage]:
        """Return the reward stages of the card: the model's own stage, or those that PPO was trained on."""
        stages = [stage for stage in self.stages if stage.name == "reward"]
        return [stage for stage in stages if stage is self.stage or sha256_of(stage) in self._reward_hashes]

    @property
    def _reward_hashes(self) -> set[str]:
        return {entry.sha256 for key, entry in self.stage.manifest.parents.items() if key.startswith("rewards.")}

    def label(self, sha256: str, default: str) -> str:
        """Return the name of the stage with this model; for a stage of another run with that run and the hash."""
        stage = self._stage_of(sha256)
        if stage is None or stage.folder.resolve().parent == self.run.folder:
            return default
        return f"{text(stage.folder.resolve().parent.name)}/{stage.name} {sha256[:4]}"

    def parent(self, entry: ParentEntry) -> str:
        """Return the name and hash of an input model, without local paths."""
        if entry.stage != FOREIGN:
            return f"{self.label(entry.sha256, entry.stage)} {short(entry.sha256)}"
        name = entry.path if is_hub_id(entry.path) else PurePosixPath(entry.path).name
        if entry.revision:
            name += f" at {entry.revision}"
        return f"{code(name)} {short(entry.sha256)}"

    def data_name(self, stage: Stage, key: str) -> str:
        """Return the name of a stage's data: a hub dataset or a file name, never a path."""
        keys = (key, "data.train", "data.prompts")  # the evaluation data may be a part of the training data
        path = next((path for path in map(stage.setting, keys) if path), None)
        name, split = split_name(path) if isinstance(path, str) else ("", None)
        if not hub_dataset(name):
            name = PurePosixPath(name).name
        return f"{name}[{split}]" if split else name

    @property
    def is_result(self) -> bool:
        """Return True if the model is the result of its stage, neither a snapshot nor an interpolation."""
        return self.chosen.last and self.share is None

    # Training

    def stage_rows(self) -> Iterator[list[str]]:
        for stage in self.stages:
            _, _, steps, duration, _, device = tables.stage_row(stage)
            parents = stage.manifest.parents.items()
            started = "; ".join(self.parent(entry) for key, entry in parents if not key.startswith("rewards."))
            seed = "" if stage.manifest.seed is None else str(stage.manifest.seed)
            model = short(sha256_of(stage))
            if stage is self.stage and not self.is_result:
                model += " at its end"
            label = self.label(sha256_of(stage), stage.name)
            yield [label, started or "fresh weights", steps, duration, text(device), seed, model]

    def rewards(self) -> Iterator[tuple[str, str, list[str], float]]:
        """Yield (name, kind, models, weight) of PPO's rewards."""
        parents = self.stage.manifest.parents.items()
        rewards = self.stage.setting("rewards") or {}
        for name, source in rewards.items():
            kind = next(kind for kind in KINDS if source.get(kind))
            models = [self.parent(entry) for key, entry in parents if key.startswith(f"rewards.{name}.")]
            yield name, kind, models, source["weight"]

    def data_rows(self) -> Iterator[list[str]]:
        evaluations = [self.evaluation] if self.is_evaluated else []
        for stage in self.stages + evaluations:
            label = self.label(sha256_of(stage), stage.name)
            for _, key, _, rows, sha256 in tables.data_rows([stage]):
                name = code(self.data_name(stage, key))
                yield [label, code(key), name, rows, short(sha256)]

    def setting_rows(self) -> Iterator[list[str]]:
        """Yield the main settings of each stage, and those that differ from their defaults; no local paths."""
        for stage in self.stages:
            label = self.label(sha256_of(stage), stage.name)
            for key, (value, default) in _shown_settings(stage).items():
                yield [label, code(key), code(value), code(default)]

    # Evaluation

    def judges(self) -> dict[str, str]:
        sft = self.report.models.get("sft") if self.report else None
        return {name: self._judge(name) for name in (sft.judges if sft else ())}

    def _judge(self, name: str) -> str:
        """Return what a judge is."""
        judge = self.evaluation.setting(f"judges.{name}")
        if isinstance(judge, Mapping):
            return f"the built-in function {code(str(judge.get('builtin')))}: a higher score is better"
        if FUNCTION.fullmatch(str(judge)):
            return f"the Python function {code(judge)}: a higher score is better"
        key = "models.reward" if name == "reward" else f"judges.{name}"
        parent = self.evaluation.manifest.parents.get(key)
        return OWN_JUDGE if parent and parent.sha256 in self._reward_hashes else "a reward model"

    def outcome(self) -> list[str]:
        """Return the result of the evaluation in sentences, with a caveat if only PPO's own reward model decides it."""
        first, *others = diagnosis.sentences(self.run)
        rates = self.report.ppo_over_sft if self.report else {}
        if rates and self.judges().get(deciding_judge(rates)) == OWN_JUDGE:
            first += " PPO was trained to please that judge: alone this proves nothing."
        return [text(sentence) for sentence in (first, *others)]

    def win_rates(self) -> report_text.Table:
        """Return the table of this model's win rates."""
        assert self.report, "the model is evaluated"
        columns, rows = report_text.win_rate_table(self.report)
        label = report_text.model_label(self.stage.name)
        return columns, [row for row in rows if row[0].startswith(f"{label} over ")]

    def policy_table(self) -> report_text.Table:
        """Return KL, length and scores of the policies; for an SFT model without those of PPO."""
        assert self.report, "the model is evaluated"
        columns, rows = report_text.policies_table(self.report)
        return columns, [row for row in rows if self.stage.name == "ppo" or not row[0].startswith("PPO")]

    def policy(self, name: str) -> str:
        """Return which model an evaluated policy is; empty if the card does not show it."""
        entry = self.evaluation.manifest.parents.get(f"models.{name}")
        if name == self.stage.name:
            return "this model"
        return self.parent(entry) if entry and (name != "ppo" or self.stage.name == "ppo") else ""

    def _interpolation(self) -> str:
        """Return what an interpolated model is, and its KL and scores if the evaluation measured this share."""
        if self.share is None:
            return ""
        is_what = f"Its weights are SFT + {self.share:g} (PPO - SFT), between the SFT model and this policy"
        if self.point is None:
            return f"{is_what}. Its KL from the SFT model is unknown."
        scores = [f"{name} {report_text.mean_text(each)}" for name, each in self.point.judges.items()]
        kl = with_interval(self.point.kl, self.point.kl_ci95)
        return (
            f"{is_what}. On held-out prompts its KL from the SFT model is {kl} nats; mean scores: {', '.join(scores)}."
        )

    def metric_rows(self) -> list[list[str]]:
        metrics = self.stage.manifest.metrics if self.is_result else {}
        rows = []
        for name, value in metrics.items():
            if isinstance(value, int):
                rows.append([code(name), str(value)])
            elif isinstance(value, float):
                rows.append([code(name), with_interval(value, metrics.get(f"{name}_ci95"))])
        return rows

    def reward_reports(self) -> list[tuple[Stage, RewardModelAccuracy | None]]:
        """Return the reward stages with their evaluation on held-out pairs; None if there were none."""
        return [(stage, stage.manifest.reward_model) for stage in self.reward_stages]

    def warnings(self) -> Iterator[str]:
        """Yield the findings and warnings of the run, the most severe of each stage first."""
        shown = [stage.name for stage in self.stages if stage.name != "reward"]
        shown += [stage.name for stage in self.reward_stages]
        if self.stage.name == "ppo":
            shown.append("eval")
        for name in dict.fromkeys(shown):
            for finding in diagnosis.findings(self.run, name):
                if finding.grade in ILL:
                    yield f"Found in the run, {name}: {text(finding.text)}."

        for each in self._warning_codes():
            yield f"Warning of the evaluation, {each}: {CODES[each].title}. {CODES[each].meaning}"

    def _warning_codes(self) -> list[str]:
        """Return the codes of the evaluation's warnings, without those that are shown with the reward model."""
        lines = (self.report.warnings if self.report else None) or []
        codes = set(WARNING.findall("\n".join(lines)))
        return sorted(codes & CODES.keys() - {*REWARD_FLAGS})

    # Code and metadata

    def sampling(self) -> dict[str, Any] | None:
        """Return temperature and maximum tokens of the evaluation, or else of training; None if unknown."""
        temperature = self.report.temperature if self.report else None
        if temperature is None:
            temperature = self.stage.setting("ppo.temperature")

        length = self.report.response_length if self.report else None
        if length is None:
            length = self.stage.setting("ppo.response_length")
        if isinstance(length, Mapping):
            length = length.get("max")

        known = is_number(temperature) and isinstance(length, int)
        return {"temperature": temperature, "length": length} if known else None

    def prompt(self) -> Prompt:
        """Return the prompt of the example in the format of training: messages for a chat template, else text."""
        prompt = EXAMPLE if self.example is None else self.example
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.prompts == "template":
            return [{key: visible(turn[key]) for key in ("role", "content")} for turn in messages]
        is_question = isinstance(prompt, str) and not is_transcript(prompt)
        return visible(render_transcript(messages if self.prompts == "transcript" and is_question else prompt))

    def datasets(self) -> list[str]:
        """Return the datasets of the hub that the stages were trained on."""
        names = set()
        for stage in self.stages:
            for key in stage.manifest.data:
                path = stage.setting(key)
                name = hub_dataset(path) if isinstance(path, str) else None
                if name and key not in ("data.eval", "data.eval_prompts"):
                    names.add(name)
        return sorted(names)

    def results(self) -> Iterator[EvalResult]:
        """Yield the win rates of sampled responses, or a reward model's accuracy, with the interval in the name."""
        if self.stage.name == "reward":
            ((_, report),) = self.reward_reports()
            if report:
                name = f"Accuracy on held-out pairs, {_interval_and_n(report.accuracy_ci95, report.n)}"
                dataset = self.data_name(self.stage, "data.eval")
                yield self._result(dataset, "accuracy", report.accuracy, name=name)
        for pair, rates in self.report.win_rate.items() if self.report else ():
            for judge, rate in rates.items() if pair.startswith(f"{self.stage.name}_vs_") else ():
                label = report_text.pair_label(pair)
                name = f"Win rate, {label} by {judge}, {_interval_and_n(rate.ci95, rate.n)}"
                dataset = self.data_name(self.evaluation, "data.prompts")
                yield self._result(dataset, "win_rate", rate.value, name=name)

    def _result(self, dataset: str, metric: str, value: float, *, name: str) -> EvalResult:
        return EvalResult(
            task_type=TASKS[self.stage.name],
            dataset_type=hub_dataset(dataset) or "local-file",
            dataset_name=visible(dataset),
            metric_type=metric,
            metric_value=round(value, 4),
            metric_name=visible(name),
        )

    def metadata(self) -> ModelCardData:
        """Return the metadata for the hub. Unknown fields, such as the license, are omitted."""
        base = self.hub_base.path if self.hub_base else None
        results = list(self.results())
        return ModelCardData(
            library_name="transformers",
            pipeline_tag=TASKS[self.stage.name],
            base_model=base,
            base_model_relation="finetune" if base else None,
            datasets=self.datasets() or None,
            tags=["rlhf", TAGS[self.stage.name], "rlhf-cli"],
            model_name=visible(self.name) if results else None,
            eval_results=results or None,
        )

    def __str__(self) -> str:
        functions: dict[str, Any] = {
            "text": text,
            "code": code,
            "with_interval": with_interval,
            "is_number": is_number,
            "model_label": report_text.model_label,
            "card_rows": reward_card.card_rows,
            "is_card": lambda report: isinstance(report, RewardModelCard),
        }
        facts: dict[str, Any] = {
            "card": self,
            "kind": self.stage.name,
            "version": __version__,
            "own_judge": OWN_JUDGE,
            "prompt": repr(self.prompt()),
            "sampling": self.sampling(),
            "stop_token": self._stop_token(),
            "course": self._course(),
            "interpolation": self._interpolation(),
            "libraries": LIBRARIES,
            "versions": tables.versions(self.stages),
        }
        card = ModelCard.from_template(self.metadata(), template_path=str(TEMPLATE), **functions, **facts)
        return f"{card}\n"

    def _stop_token(self) -> str | None:
        """Return the stop token as code, None if it is the EOS token."""
        stop = data.stop_token_id(self.tokenizer)
        is_eos = stop == self.tokenizer.eos_token_id
        return None if is_eos else json.dumps(self.tokenizer.convert_ids_to_tokens(stop))

    def _course(self) -> list[Reading]:
        """Return the main metrics of PPO."""
        if self.stage.name != "ppo":
            return []
        return [reading for reading in readings(self.stage) if reading.key in COURSE]


def _without_later_updates(stage: Stage, step: int) -> Stage:
    return replace(stage, metrics=tuple(row for row in stage.metrics if row["step"] <= step))


def _shown_settings(stage: Stage) -> dict[str, tuple[str, str]]:
    """Return {key: (value, default)} of the main settings, and of those that differ from their defaults."""
    main = {f"{stage.name}.{name}" for name in MAIN_SETTINGS.split()}
    settings = {}
    for key, value in flatten(stage.config or {}).items():
        if key in main and value is not None:
            shown = value_text(value)
            settings[key] = (shown, shown)
    for each in from_defaults(stage):
        default = (each.default or "").removeprefix("-")
        settings[each.key] = (each.value, default)

    return {key: values for key, values in settings.items() if _may_be_shown(stage, key, values[0])}


def _may_be_shown(stage: Stage, key: str, value: str) -> bool:
    parts = key.split(".")
    config_key = key_at(CONFIGS[stage.name], parts)
    is_path = "/" in value or (config_key is not None and config_key.path_field is not None)
    return HIDDEN.isdisjoint(parts) and not is_path


def _interval_and_n(interval: Sequence[float] | None, n: int | None) -> str:
    bounds = f"95 % interval {interval[0]:.3f} to {interval[1]:.3f}, " if interval else ""
    return f"{bounds}n {n}"


def _lineage(stage: Stage) -> Iterator[Stage]:
    """Yield a stage and its ancestors, as far as they have not changed since."""
    hashes: set[str] = set()
    waiting = [stage]
    while waiting:
        stage = waiting.pop(0)
        if sha256_of(stage) in hashes:
            continue
        hashes.add(sha256_of(stage))
        yield stage
        for entry in stage.manifest.parents.values():
            above = read_stage_with_logs(entry.stage, stage.folder / entry.path) if entry.stage != FOREIGN else None
            if above and sha256_of(above) == entry.sha256 and above.state == "finished":
                waiting.append(above)
