"""What `rlhf label` reads of a run: the policies that answer, the prompts, and how answers are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_cli import data
from rlhf_cli.commands.common.models import (
    ChatModel,
    load_scorer,
    load_weights,
    open_reference,
    parse_compare,
    resolve_policy,
    run_config,
)
from rlhf_cli.commands.label.answer_engines import AnswerEngines, LocalAnswers, open_servers
from rlhf_cli.commands.label.candidates import CandidateSampler
from rlhf_cli.commands.label.prompts import evaluation, held_out_prompts, labelled_before, without_held_out
from rlhf_cli.config.base import Options
from rlhf_cli.config.eval import EvalConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.datasets import Rows
from rlhf_cli.data.labels import CANDIDATES, COMPARES, SETTINGS
from rlhf_cli.data.sampling import prompt_batch
from rlhf_cli.data.texts import prompt_key
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import files_sha256, read_json_object, write_json
from rlhf_cli.models import devices, load, tokenizers
from rlhf_cli.progress import Progress
from rlhf_cli.runs.layout import POLICY_STAGES, has_output
from rlhf_cli.runs.resolve import LAST
from rlhf_cli.stages.common import reading
from rlhf_cli.stages.common.engines import Drawing
from rlhf_cli.stages.common.model_loading import set_turns

NO_PROMPTS = "none"  # of a run without ppo.yaml
ORDERS = ("random", "uncertain")


@dataclass(frozen=True)
class LabelOptions:
    """Options of the command line; None: as in the run's config."""

    sources: str | None = None  # --from
    compare: str | None = None
    prompts: Path | None = None
    answers: int = 2
    order: str = "random"
    n: int = 100
    name: str | None = None
    seed: int = 0
    servers: bool = False
    annotators: str = "me"
    overlap: float = 0.2
    by: str | None = None
    terminal: bool = False
    port: int = 0
    export: Path | None = None
    import_: Path | None = None
    format: str | None = None  # of another tool, for both

    @property
    def folder_name(self) -> str:
        """Return NAME of RUN/labels/NAME: what was given, or what the labels are."""
        if self.name is not None:
            return self.name
        judge = self.by.replace(":", ".") if self.by else None
        if self.compare is not None:
            return f"compare.{judge}" if judge else "compare"
        return judge or "people"

    @property
    def scores(self) -> bool:
        """Return True if the order of the pairs needs the scores of reward models."""
        return self.order == "uncertain"


@dataclass(frozen=True)
class LabelInputs:
    """The run to label answers of."""

    run: Path
    policies: list[ChatModel]  # those that answer
    config: PPOConfig  # of the newest policy's run: the sampling and the rewards
    tokenizer: Any
    prompts: Rows[data.Prompt]
    rows: list[int]  # of the prompts that may be answered, in the order in which they are
    labelled_before: frozenset[bytes]  # keys of the prompts that the rounds before labelled: they come last
    answers: int  # to each prompt, as many of each policy


def resolve_run(folder: Path, label_options: LabelOptions) -> tuple[Path, ChatModel]:
    """Return the folder of the run, and its newest policy: the SFT model's for --from sft, whatever PPO's state is."""
    run = folder.parent if has_output(folder) else folder
    if label_options.sources == "sft":
        return run, resolve_policy(run, "sft", LAST)
    return run, resolve_policy(folder, None, LAST)


def read_inputs(folder: Path, label_options: LabelOptions, options: Options) -> LabelInputs:
    """Resolve the policies and read the prompts; load no model.

    Raises RLHFError as `resolve_policy` and `reading.read_prompts`, and C11 for options that do not fit.
    """
    if label_options.order not in ORDERS:
        raise RLHFError("C07", f"--order {label_options.order}: not one of {', '.join(ORDERS)}")
    run, newest = resolve_run(folder, label_options)
    ppo = run_config(newest.parent)
    if label_options.servers and ppo.models.server is None:
        hint = "set models.engine: {vllm: {url: ...}} there, or omit --servers"
        raise RLHFError("C11", "--servers: the run's ppo.yaml names none", where=ppo.where("models.engine"), hint=hint)
    policies = _resolve_policies(run, newest, ppo, label_options)
    answers = _num_answers(policies, label_options)
    first = policies[0].parent
    tokenizer = tokenizers.load_tokenizer(first.model, trust_remote_code=options.trust_remote_code)
    set_turns(tokenizer, first)
    model_config = load.read_config(first.model, options.trust_remote_code)
    length = ppo.ppo.max_response_length

    config = _prompt_config(run, ppo, label_options)
    prompts = reading.read_prompts(config, "data.prompts", tokenizer, model_config, length)
    rows = prompt_batch(len(prompts), 1, len(prompts), label_options.seed)
    labelled: frozenset[bytes] = frozenset()
    if label_options.compare is None:
        rows = without_held_out(rows, prompts, held_out_prompts(run, ppo))
        labelled = labelled_before(ppo)
        rows.sort(key=lambda row: prompt_key(prompts[row].text) in labelled)
    return LabelInputs(
        run,
        policies,
        ppo,
        tokenizer=tokenizer,
        prompts=prompts,
        rows=rows,
        labelled_before=labelled,
        answers=answers,
    )


def _num_answers(policies: Sequence[ChatModel], label_options: LabelOptions) -> int:
    """Return the number of answers to a prompt, at least one of each model. Raises RLHFError C11 if it is uneven."""
    answers = max(label_options.answers, len(policies))
    if answers % len(policies):
        text = f"--answers {answers}: {len(policies)} models cannot give as many answers each"
        raise RLHFError("C11", text, hint=f"a multiple of {len(policies)}")
    return answers


def _resolve_policies(run: Path, newest: ChatModel, config: PPOConfig, label_options: LabelOptions) -> list[ChatModel]:
    """Return the models that --from or --compare names; without either the run's newest policy."""
    if label_options.compare is not None:
        if label_options.sources is not None:
            raise RLHFError("C11", "--compare and --from both select the models", hint="omit --from")
        return _compared(run, config, label_options.compare)
    if label_options.sources is None:
        return [newest]

    names = label_options.sources.split(",")
    if len(set(names)) < len(names) or not all(names):
        text = f"--from {label_options.sources}: name each model once"
        raise RLHFError("C11", text, hint="--from sft,ppo")
    policies = []
    for name in names:
        in_run = name in POLICY_STAGES
        policy = resolve_policy(run if in_run else Path(name), name if in_run else None, LAST)
        policies.append(replace(policy, name=name))
    return policies


def _compared(run: Path, config: PPOConfig, compare: str) -> list[ChatModel]:
    """Return PPO's policy and the SFT model that it started from, in the order of --compare."""
    names = parse_compare(compare)
    ppo = resolve_policy(run, "ppo", LAST)
    sft = open_reference(config, ppo)
    assert sft is not None, "only an SFT model has no reference"
    return [ppo if name == "ppo" else sft for name in names]


def _prompt_config(run: Path, config: PPOConfig, label_options: LabelOptions) -> PPOConfig | EvalConfig:
    """Return the config whose data.prompts are to be answered."""
    if label_options.compare is not None:
        if label_options.prompts is not None:
            text = "--compare takes the held-out prompts of the run's eval.yaml"
            raise RLHFError("C11", text, hint="omit --prompts, or name models with --from in place of --compare")
        return evaluation(run)
    if label_options.prompts is not None:
        changed = {"prompts": str(label_options.prompts.resolve()), "columns": {}}
        return config.model_copy(update={"data": config.data.model_copy(update=changed)})
    if config.data.prompts == NO_PROMPTS:
        raise RLHFError("C11", f"{shown(run)} has no ppo.yaml that names prompts", hint="name a file: --prompts FILE")
    return config


def load_sampler(inputs: LabelInputs, label_options: LabelOptions, options: Options, folder: Path) -> CandidateSampler:
    """Load the policies, and for `--order uncertain` the run's reward models. Raises RLHFError as `load_weights`.

    `folder` is that of the labels.
    """
    config = inputs.config
    rewards = []
    if label_options.scores:
        rewards = [name for name, source in config.rewards.items() if source.kind in ("model", "models")]
        if not rewards:
            raise RLHFError("C11", "--order uncertain needs a reward model: the run has none", hint="--order random")

    policies = inputs.policies
    base = _served_base(inputs) if label_options.servers else policies[0]
    loaded = policies if base in policies else [*policies, base]
    with Progress("label", len(loaded) + len(rewards), "model", brief=True) as bar:
        load_weights(loaded, inputs.tokenizer, config, options, bar)
        scorer = load_scorer(config, policies[0], inputs.tokenizer, rewards, options, bar)
    if scorer.missing:
        raise RLHFError("C11", f"--order uncertain: {scorer.missing[0]}", hint="--order random")
    settings = config.ppo
    drawing = Drawing(
        "label",
        scorer.stop_token_id,
        inputs.tokenizer.pad_token_id or 0,
        temperature=settings.temperature,
        bf16=devices.use_bf16(None),
        batch_size=settings.local_rollout_forward_batch_size or settings.per_device_train_batch_size,
    )
    engines: AnswerEngines = LocalAnswers(drawing)
    if label_options.servers:
        engines = open_servers(
            config,
            drawing,
            policies,
            base,
            prompts=[prompt.ids for prompt in inputs.prompts],
            folder=folder,
            tokenizer=inputs.tokenizer,
        )
    return CandidateSampler(
        policies=policies,
        engines=engines,
        scorer=scorer,
        prompts=inputs.prompts,
        response_length=settings.max_response_length,
        per_prompt=inputs.answers,
        seed=label_options.seed,
    )


def _served_base(inputs: LabelInputs) -> ChatModel:
    """Return the SFT model, with which servers of adapters were started."""
    policies = inputs.policies
    sft = next((policy for policy in policies if policy.name == "sft"), None)
    reference = sft or open_reference(inputs.config, policies[0])
    assert reference is not None, "only an SFT model has no reference"
    return reference


def keep_settings(folder: Path, inputs: LabelInputs, label_options: LabelOptions) -> None:
    """Write what decides the candidates of a new folder.

    Raises RLHFError C15 if the folder's were drawn otherwise, D20 if its file does not say how.
    """
    settings = {
        "policies": {model.name: model.sha256 for model in inputs.policies},
        "prompts": files_sha256(sorted({prompt.location.path for prompt in inputs.prompts})),
        "answers": inputs.answers,
        "seed": label_options.seed,
        "temperature": inputs.config.ppo.temperature,
        "response_length": inputs.config.ppo.max_response_length,
        "scores": label_options.scores,
        "engine": "vllm" if label_options.servers else None,
    }
    path = folder / SETTINGS
    recorded = read_json_object(path)
    if recorded is None and (folder / CANDIDATES).exists():
        text = f"{shown(path)} does not say how the answers of its folder were drawn"
        raise RLHFError("D20", text, hint="restore the file, or give another --name to draw new answers")
    if recorded is None:
        purpose = {} if label_options.compare is None else {COMPARES: True}
        write_json(path, {key: value for key, value in settings.items() if value is not None} | purpose)
        return
    for key, value in settings.items():
        if recorded.get(key) != value:
            text = f"{shown(folder)} holds answers drawn with other {key}"
            if key not in ("policies", "prompts"):
                text = f"{shown(folder)} holds answers drawn with {key} {recorded.get(key)}, not {value}"
            raise RLHFError("C15", text, hint="write these to another folder: --name NAME")
