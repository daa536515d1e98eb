"""Options that say something together, or in other units than here: each function places those of one topic."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from rlhf_cli.commands.convert import options
from rlhf_cli.commands.convert.options import Placed, Placing, Unplaced, fitting, home, in_our_words, is_off, takes_none
from rlhf_cli.commands.convert.versions import HABITS, NEW, OLD, OPTIONS, UNCLIPPED
from rlhf_cli.config.aliases import ALIASES
from rlhf_cli.config.messages import translate_validation_error
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.ppo_options import BELONGS_TO
from rlhf_cli.errors import Problem, RLHFError

OF_ADAPTERS = {name for name in ALIASES if name.startswith("lora_")} | {"lora_alpha", "use_rslora", "use_dora"}
OF_PEFT = {"lora_r": ("models.adapters.r", 8), "lora_alpha": ("models.adapters.lora_alpha", 8)}
ROWS, PARTS, MINIBATCHES = "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"
# Options by the key that each comes to: rows of a pass, passes of an update, steps of an epoch; rows once more.
OURS = (ROWS, PARTS, MINIBATCHES, ROWS)
SIZES = {
    OLD: ("mini_batch_size", "batch_size", PARTS, "forward_batch_size"),
    NEW: (ROWS, PARTS, MINIBATCHES),
}
LARGEST = 10**9
SPLIT = re.compile(r"[\w.-]+")
LABELS = {"lvwerra/distilbert-imdb": "POSITIVE"}  # the label whose logit TRL's examples took
OWN_REWARD = 'TRL 0.11 was handed scores by your code; such as rewards: {mine: {function: "module:function"}}'
COLUMN = "{prompt: NAME} where the column of the prompts is not called prompt"


def batches(placing: Placing) -> None:
    """Sizes, whichever the file has, in our three keys."""
    for name in SIZES[placing.version]:
        setting = placing.take(name)
        if setting and (type(setting.value) is not int or not 1 <= setting.value <= LARGEST):
            placing.refuse(setting, "no whole number of 1 or more that a batch could have")
            del placing.given[name]
    names = SIZES[placing.version][:3]
    if placing.version == OLD and placing.has("forward_batch_size"):
        names = ("forward_batch_size", *names[1:])
        if unused := placing.given.get("mini_batch_size"):
            placing.refuse(unused, "forward_batch_size replaced it")
    first, second, third = (placing.value(name) for name in names)
    if placing.version == OLD:
        found, note = options.of_old(second, first, third)
    else:
        found, note = options.of_new(first, second, third, grown="PPOv2Config" in placing.read.signs)
    values, told = (found.rows, found.parts, found.minibatches), placing.has(*names)
    for last, value, name in zip(OURS[:3], values, names, strict=True):
        key, said = f"ppo.{last}", note if last == MINIBATCHES else ""
        where = placing.given[name].where if placing.has(name) else ""
        placing.placed[key] = Placed(key, value, name, placing.value(name), said, told, where)


def length(placing: Placing) -> None:
    """Episodes or passes, whichever TRL went by."""
    passes, counted = placing.take("num_train_epochs"), "it counted episodes, rounded up to whole updates"
    episodes = [setting for name in ("total_episodes", "steps") if (setting := placing.take(name))]
    for setting in episodes:
        placing.put("ppo.total_episodes", setting.value, setting, counted if setting.name == "steps" else "")
    if passes and "ppo.total_episodes" in placing.placed:
        placing.refuse(passes, "total_episodes overrules it, there too")
    elif passes:
        placing.put("ppo.num_train_epochs", passes.value, passes)


def responses(placing: Placing) -> None:
    """Where a response ends."""
    for name in ("stop_token_id", "eos_token_id"):
        setting = placing.take(name)
        if setting and isinstance(setting.value, int) and setting.value < 0:
            placing.put("ppo.stop_token", "none", setting, "no token has this id: a response never ends early")
        elif setting:
            note = "where the model has no such token, as some made sure of: stop_token: none"
            placing.put("ppo.stop_token_id", setting.value, setting, note if name == "eos_token_id" else "")
    stop, by_id = placing.take("stop_token"), "ppo.stop_token_id" in placing.placed
    if stop and by_id:
        placing.refuse(stop, "stop_token_id says it")
    elif stop:
        placing.put("ppo.stop_token", stop.value, stop)
    drawn = placing.given.get("response_length")
    if drawn and isinstance(drawn.value, dict) and placing.take("response_length"):
        note = "drawn anew for each update, not for each response"
        placing.put("ppo.response_length", drawn.value, drawn, note)
    if placing.version == OLD and not placing.has("response_length", "max_new_tokens"):
        placing.to_say["ppo.response_length"] = (
            "it stood in the arguments of your generate(); 53 is this tool's default"
        )


def models(placing: Placing) -> None:
    """Policy, reward and value model; a classifier's pipeline is a reward of its own kind."""
    policy = [each for name in ("sft_model_path", "model_name") if (each := placing.take(name))]
    for setting in policy:
        placing.put("models.sft", setting.value, setting)
    if policy:
        placing.leave("model_name_or_path", "TRL took the tokenizer from it; here it is the one of models.sft")
    elif start := placing.take("model_name_or_path"):
        placing.put("models.sft", start.value, start)
    else:
        placing.to_say["models.sft"] = "the policy's start and its reference; RUN/sft, which `rlhf sft` makes, is taken"
    ref = placing.given.get("ref_model_path")
    if ref and ref.value in [setting.value for setting in policy] and placing.take("ref_model_path"):
        placing.done(ref, "the reference is models.sft")
    reward = placing.given.get("reward_model")
    if reward and isinstance(reward.value, str) and ":" in reward.value and placing.take("reward_model"):
        model = reward.value.partition(":")[2]
        placing.put("rewards.classifier.pipeline", model, reward)
        more = {"reads": ("both", "prompt and response as one text, as in TRL's examples; the number is a logit")}
        if model in LABELS:
            more["label"] = (LABELS[model], "the label whose number the examples took")
        else:
            placing.to_say["rewards.classifier.label"] = "the label whose number is the reward, where there are several"
        for key, (value, note) in more.items():
            placed = Placed(f"rewards.classifier.{key}", value, "", None, note, where=reward.where)
            placing.placed[placed.key] = placed
    elif not placing.has("reward_model", "reward_model_path"):
        if placing.version == OLD:
            placing.to_say["rewards"] = OWN_REWARD
        else:
            placing.to_say["models.reward"] = "RUN/reward, which `rlhf reward` makes, is taken"


def prompts(placing: Placing) -> None:
    """A data set and its splits."""
    data = placing.take("dataset_name") or placing.take("query_dataset")
    train, test = placing.take("dataset_train_split"), placing.take("dataset_test_split")
    folder = placing.given.get("data_dir")
    if data and folder and isinstance(folder.value, str) and placing.take("data_dir"):
        data = replace(data, value=f"{data.value}/{folder.value}")
        placing.done(folder, f"data.prompts: {data.value}")
    if data is None:
        for split in filter(None, (train, test)):
            placing.refuse(split, "of a data set that the file does not name")
        return
    placing.to_say["data.columns"] = COLUMN
    for setting, key in ((train, "data.prompts"), (test, "data.eval_prompts")):
        name = data.value
        if setting and not (isinstance(setting.value, str) and SPLIT.fullmatch(setting.value)):
            placing.refuse(setting, "no name of a split alone; data.max_rows takes the first rows")
        elif setting:
            whole = setting.value == "train" and key == "data.prompts"
            name = data.value if whole else f"{data.value}[{setting.value}]"
            placing.done(setting, f"{key}: {name}")
        if key == "data.prompts" or name != data.value:
            placing.put(key, name, data)


def adapters(placing: Placing) -> None:
    """LoRA, where it was asked for."""
    asked = placing.given.get("use_peft") or placing.given.get("is_peft_model")
    if not (asked and fitting("ppo.bf16", asked.value) is True):
        if asked and placing.take(asked.name):
            (placing.refuse if asked.value else placing.done)(asked, "the whole model is trained")
        for name in sorted(OF_ADAPTERS & placing.left.keys()):
            placing.leave(name, "without use_peft the whole model is trained, there too")
        return
    for name in ("use_peft", "is_peft_model"):
        if flag := placing.take(name):
            placing.put("models.adapters.kind", "lora", flag)
    if "LoraConfig" in placing.read.signs:
        for name, (key, value) in OF_PEFT.items():
            if not placing.has(name):
                placing.placed[key] = Placed(key, value, name, value, "peft's own", False)
    if not placing.has("lora_target_modules"):
        text = "peft had a list for each kind of model, such as [q_proj, v_proj]; all-linear here"
        placing.to_say["models.adapters.target_modules"] = text


def training(placing: Placing) -> None:
    """The optimizer's options that are spelt otherwise."""
    limit = placing.given.get("max_grad_norm")
    if limit and not limit.value and placing.take("max_grad_norm"):
        placing.put("ppo.max_grad_norm", UNCLIPPED, limit, "nothing is clipped: a limit that is never reached")
    steps, ratio = placing.given.get("warmup_steps"), placing.given.get("warmup_ratio")
    if steps and isinstance(steps.value, float) and 0 < steps.value < 1 and placing.take("warmup_steps"):
        placing.put("ppo.warmup_ratio", steps.value, steps)
    if steps and steps.value and ratio and ratio.value:
        placing.leave("warmup_ratio", "warmup_steps overrules it, there too")
    half = placing.given.get("fp16")
    if half and fitting("ppo.fp16", half.value) is True:
        placing.unfilled.add("ppo.bf16")
    cut = placing.given.get("fsdp")
    if cut and cut.value and placing.take("fsdp"):
        placing.put("ppo.fsdp", True, cut, "each process keeps a part of the models; docs/scaling.md")
    best = placing.given.get("push_to_hub_if_best_kwargs")
    if best and isinstance(best.value, dict) and best.value and placing.take("push_to_hub_if_best_kwargs"):
        placing.put("ppo.push_to_hub_if_best", best.value.get("repo_id"), best)
    if count := placing.take("num_processes"):
        placing.processes = count.value
        placing.done(count, f"--nproc {count.value} on the command line")


TOPICS: tuple[Callable[[Placing], None], ...] = (batches, length, responses, models, prompts, adapters, training)


PROMPTS = "data.prompts"
LENGTHS = ("ppo.num_train_epochs", "ppo.total_episodes")
# Keys of which only one may stand there.
ONE_OF = ({*LENGTHS}, {"ppo.stop_token", "ppo.stop_token_id"})


def complete(placing: Placing) -> None:
    """Make the placed keys a whole ppo.yaml, that loads.

    Raises RLHFError where our settings refuse something that no option of the file is to blame for.
    """
    own = _own(placing.version) | {key: placed for key, placed in placing.placed.items() if not placed.given}
    placing.placed = {key: placed for key, placed in placing.placed.items() if placed.given}
    config = _accepted(placing, own)
    for key, placed in list(placing.placed.items()):
        del placing.placed[key]
        if placed.given or not _is(config, tree_of(placing)):
            placing.placed[key] = placed


def tree_of(placing: Placing) -> dict[str, Any]:
    """The placed keys as the sections of a config."""
    tree: dict[str, Any] = {}
    for key, placed in placing.placed.items():
        *sections, last = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = placed.value
    return tree


def _own(version: str) -> dict[str, Placed]:
    """The values that a TRL of this version had for our keys of PPO, whatever its file said."""
    found: dict[str, Placed] = {}
    for name, option in OPTIONS[version].items():
        key, value = home(name), option.default
        if not key or not key.startswith("ppo.") or option.ignored or option.computed or is_off(name, value):
            continue
        if value is None and (not takes_none(key) or any(key in group for group in ONE_OF)):
            continue
        ours = fitting(key, in_our_words(name, value))
        found[key] = Placed(key, ours, name, value, option.remark, given=False)
    return found | {key: Placed(key, value, "", None, note, False) for key, (value, note) in HABITS[version].items()}


def _accepted(placing: Placing, own: dict[str, Placed]) -> PPOConfig:
    """The placed keys, filled up with TRL's own values, as a config; those that it refuses lose their places."""
    while True:
        _fill(placing, own)
        tree = tree_of(placing)
        try:
            return PPOConfig.model_validate(tree)
        except ValidationError as error:
            _blame(placing, own, translate_validation_error(error, tree, PPOConfig, lambda key: key)[0])


def _fill(placing: Placing, own: dict[str, Placed]) -> None:
    for key, placed in own.items():
        if key not in placing.unfilled and _is_free(key, placing):
            note = "a default: what the file has was not read" if key in placing.to_say else placed.note
            placing.placed[key] = replace(placed, note=note)
    if PROMPTS not in placing.placed:
        placing.placed[PROMPTS] = Placed(PROMPTS, "prompts.jsonl", "", None, "yours", False)
        placing.to_say[PROMPTS] = "rows {prompt}, or pairs, whose distinct prompts are taken"


def _blame(placing: Placing, own: dict[str, Placed], problem: Problem) -> None:
    """Take the key out that a problem is about. Raises RLHFError where there is none."""
    where, words = problem.where or "", re.findall(r"\w+", problem.text)
    about = [key for key in placing.placed if key == where or where.startswith(f"{key}.")]
    switch = [key for key in placing.placed if key == f"ppo.{BELONGS_TO.get(where.removeprefix('ppo.'))}"]
    named = [key for word in words for key in placing.placed if key.rpartition(".")[2] == word]
    below = [key for key in placing.placed if where and key.startswith(f"{where}.")]
    if not (blamed := about or switch or named or below):
        raise RLHFError.from_problems([problem])
    placed = placing.placed.pop(blamed[0])
    if not placed.given:
        own.pop(placed.key, None)
    text = problem.text.removeprefix(f"{where}: ").removeprefix(f"{where.partition('.')[0]}: ")
    why = f"{text}; {problem.hint}" if problem.hint else text
    placing.unplaced.append(Unplaced(placed.name or placed.key, placed.was, placed.where, why))


def _is_free(key: str, placing: Placing) -> bool:
    others = next((group for group in ONE_OF if key in group), {key})
    return not others & placing.placed.keys()


def _is(config: PPOConfig, tree: dict[str, Any]) -> bool:
    """Whether a tree without a key is the same config still."""
    try:
        return PPOConfig.model_validate(tree) == config
    except ValidationError:
        return False
