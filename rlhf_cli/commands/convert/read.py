"""Reads what TRL was told out of a file: YAML, JSON, a Python script, or a command line in a script or a text."""

import ast
import json
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_cli.commands.convert.names import Names, NotPlain, called, entries
from rlhf_cli.commands.convert.versions import Read, value_of
from rlhf_cli.config import yaml_io
from rlhf_cli.errors import RLHFError

VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=([^\s$`]*)")
USED = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
OPTION = re.compile(r"--[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
REDIRECTION = re.compile(r"\s\d*(?:>>?|<)(?:&\d|\s*[^\s\\]+)")
NEXT = {";", "&&", "||", "|", "&"}
# Launchers' options that say something of the run; the first three are names of one thing.
LAUNCHER = {
    "num_processes": "num_processes",
    "nproc_per_node": "num_processes",
    "num_gpus": "num_processes",
    "mixed_precision": "mixed_precision",
}

Command = list[tuple[str, int]]  # words, each with the line that it stands on


def read_command_line(text: str, name: str) -> Read:
    """The options of the first command that runs PPO; of a text that names no such script, of the first one at all."""
    found, variables = Read(), dict[str, str]()
    asked = [each for each in _commands(text, variables) if any(OPTION.fullmatch(word) for word, _ in each)]
    ours = [each for each in asked if "ppo" in each[_script(each)][0].lower()] or asked
    for other in ours[1:]:
        word, line = other[_script(other)]
        found.lose(word, f"{name}:{line}", "another command; the first one is read")
    if ours:
        _options(ours[0], name, variables, found)
    return found


def _commands(text: str, variables: dict[str, str]) -> Iterator[Command]:
    """Commands over continued lines; a line that begins with `--` goes on with the one before, `\\` or not."""
    words: Command = []
    going_on = False
    for number, line in enumerate(text.splitlines(), 1):
        if words and not going_on and not line.lstrip().startswith("--"):
            yield words
            words = []
        bare = line.rstrip().rstrip("\\")
        going_on = line.rstrip() != bare
        if not words and (assigned := VARIABLE.fullmatch(bare.strip())):
            variables[assigned[1]] = assigned[2].strip("'\"")
            continue
        for part in _split(REDIRECTION.sub(" ", bare)):
            if part in NEXT:
                yield words
                words = []
            else:
                words.append((part, number))
    yield words


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote that this line does not close
        return line.split()


def _script(command: Command) -> int:
    """Where the Python file or the module stands that the options behind it are for."""
    words = [word for word, _ in command]
    files = [at for at, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")]
    modules = [at + 1 for at, word in enumerate(words[:-1]) if word == "-m"]
    return (files or modules[-1:] or [0])[0]


def _options(command: Command, name: str, variables: dict[str, str], found: Read) -> None:
    script, at = _script(command), 0
    while at < len(command):
        (word, line), at = command[at], at + 1
        if not OPTION.fullmatch(word):
            continue
        launcher = at <= script
        option, equals, rest = word[2:].partition("=")
        values = [rest] if equals else []
        while not equals and at < len(command) and at != script and not OPTION.fullmatch(command[at][0]):
            values.append(command[at][0])
            at += 1
        option = option.replace("-", "_")
        where = f"{name}:{line}"
        if launcher and option not in LAUNCHER:
            found.lose(f"--{option}", where, "an option of the launcher; docs/scaling.md has ours")
        else:
            _add(LAUNCHER[option] if launcher else option.rpartition(".")[2], values, where, variables, found)


def _add(name: str, texts: list[str], where: str, variables: dict[str, str], found: Read) -> None:
    told = [USED.sub(lambda used: variables.get(used[1] or used[2], used[0]), text) for text in texts]
    if unknown := next((text for text in told if "$" in text or "`" in text), None):
        found.lose(name, where, f"what {unknown} is, the shell alone knows")
        return
    values: list[Any] = [value_of(text) for text in told]
    if values:
        found.add(name, values[0] if len(values) == 1 else values, where)
    else:  # transformers' parser has --no_NAME for what is on by default
        found.add(name.removeprefix("no_"), not name.startswith("no_"), where)


CONFIGS = ("PPOConfig", "PPOv2Config")
HOLDERS = (*CONFIGS, "ModelConfig", "ScriptArguments", "GenerationConfig")
SIGNS = (*CONFIGS, "LoraConfig", "AutoModelForCausalLMWithValueHead", "AutoModelForSeq2SeqLMWithValueHead")


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# Of calls that hold more than settings, the arguments that are some, and what they are called as settings.
OF_TRAINER = _same("num_shared_layers", "optimizer", "optimizers", "lr_scheduler", "callbacks")
OF_GENERATE = _same(
    "max_new_tokens", "temperature", "top_k", "top_p", "do_sample", "num_beams", "min_length", "repetition_penalty",
    "eos_token_id", "generate_ref_response",
)  # fmt: skip
OF_MODEL = {
    **_same("load_in_8bit", "load_in_4bit", "torch_dtype", "dtype", "attn_implementation", "trust_remote_code"),
    **_same("reward_adapter"),
    "revision": "model_revision",
}
OF_LORA = {
    **_same("lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
    "r": "lora_r",
    "bias": "lora_bias",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
}
OF_DATASET = {
    "path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split", "data_dir": "data_dir",
}  # fmt: skip
FILES = ("json", "csv", "parquet", "text")  # what load_dataset calls its readers of files
LENGTHS = ("out", "resp", "gen")  # in the name of what samples the responses' lengths, not the prompts'


def read_script(text: str, name: str) -> Read:
    """The settings of a script. Raises RLHFError C08 for what is no Python, C09 for a script without a config."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own, about escapes in the script
            tree = ast.parse(text)
        return _Script(tree, name).settings()
    except SyntaxError as error:
        raise RLHFError("C08", f"not valid Python: {error.msg}", where=f"{name}:{error.lineno or 1}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise RLHFError("C08", "no Python that a person would write", where=name) from error


class _Script:
    """One pass over a script."""

    def __init__(self, tree: ast.Module, name: str) -> None:
        self.tree, self.name = tree, name
        self.names, self.read = Names(tree, HOLDERS), Read()

    def settings(self) -> Read:
        """All that the script tells, in its order."""
        nodes = list(ast.walk(self.tree))
        words = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.read.signs = words & set(SIGNS)
        told = [node for node in nodes if isinstance(node, ast.Call | ast.Assign)]
        configs = 0
        for node in sorted(told, key=lambda node: (node.lineno, node.col_offset)):
            configs += called(node) in CONFIGS
            if isinstance(node, ast.Assign):
                self._assigned(node)
            elif called(node) in CONFIGS and configs > 1:
                self._lost(f"{called(node)}(...)", node, "another config; the first one is read")
            else:
                self._call(node, called(node))
        if not configs and words & {"HfArgumentParser", "TrlParser"}:
            text, hint = "its settings come from the command line", "write that command into a file, and read that one"
            raise RLHFError("C09", text, where=self.name, hint=hint)
        if any(setting.call == "LengthSampler" for setting in self.read.settings):  # what it draws is no secret
            self.read.unread = [each for each in self.read.unread if each.what != "max_new_tokens"]
        return self.read

    def _assigned(self, node: ast.Assign) -> None:
        """`generation_kwargs = {...}` and `generation_kwargs["temperature"] = ...`."""
        target, key = node.targets[0], None
        if isinstance(target, ast.Subscript):
            key, target = target.slice, target.value
        name = target.id.lower() if isinstance(target, ast.Name) else ""
        if "gen" not in name or not ("kwargs" in name or "config" in name):
            return
        if isinstance(key, ast.Constant):
            self._add(str(key.value), node.value)
        elif key is None and isinstance(node.value, ast.Dict):
            for option, value in entries(node.value).items():
                self._add(option, value)

    def _call(self, node: ast.Call, name: str) -> None:
        keywords = self.names.keywords(node)
        if name in HOLDERS:
            for option, value in keywords.items():
                self._add(option, value)
            if node.args:
                self._lost(f"{name}(...)", node, "options stand there without their names")
        elif name == "LoraConfig":
            self.read.add("use_peft", True, self._where(node), name)
            self._some(keywords, OF_LORA, name)
        elif name in ("PPOTrainer", "PPOv2Trainer"):
            self._some(keywords, OF_TRAINER)
        elif name == "create_reference_model":
            self._some(_named(node, keywords, "model", "num_shared_layers"), OF_TRAINER)
        elif name == "generate":
            self._some(keywords, OF_GENERATE)
        elif name == "load_dataset":
            self._dataset(node, _named(node, keywords, "path", "name"))
        elif name == "pipeline":
            self._pipeline(node, _named(node, keywords, "task", "model"))
        elif name == "LengthSampler":
            self._lengths(node, _named(node, keywords, "min_value", "max_value"))
        elif name == "from_pretrained":
            self._model(node, _named(node, keywords, "pretrained_model_name_or_path"))

    def _some(self, keywords: dict[str, ast.expr], names: dict[str, str], call: str = "") -> None:
        for option, value in keywords.items():
            if option in names and not (isinstance(value, ast.Constant) and value.value is None):
                self._add(names[option], value, f"{call}.{option}" if names[option] != option else "")

    def _dataset(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        if any(setting.name == "dataset_name" for setting in self.read.settings):
            self._lost("load_dataset(...)", node, "another dataset; the first one is read")
            return
        path = keywords.get("path")
        if isinstance(path, ast.Constant) and path.value in FILES and "data_files" in keywords:
            keywords = {"path": keywords["data_files"]}
        self._some(keywords, OF_DATASET, "load_dataset")

    def _pipeline(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        try:
            task, model = (self.names.value(keywords[name]) for name in ("task", "model"))
            self.read.add("reward_model", f"{task}:{model}", self._where(node), "pipeline")
        except (NotPlain, KeyError):
            self._lost("pipeline(...)", node, "the running script alone knows its task and model")

    def _lengths(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        if not any(word in self.names.target(node) for word in LENGTHS):
            self._lost("LengthSampler(...)", node, "it cuts the prompts; data.first_words does so, by words")
            return
        try:
            least, beyond = (self.names.value(keywords[name]) for name in ("min_value", "max_value"))
            self.read.add("response_length", {"min": least, "max": beyond - 1}, self._where(node), "LengthSampler")
        except (NotPlain, KeyError, TypeError):
            self._lost("LengthSampler(...)", node, "the running script alone knows the lengths")

    def _model(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        """A model's name; its class, and the variable that it is given to, tell which model it is."""
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        kind, target = owner.id if isinstance(owner, ast.Name) else "", self.names.target(node)
        path = keywords.get("pretrained_model_name_or_path")
        if "model" not in kind.lower() or path is None:  # a tokenizer's, or a config's
            return
        if "Seq2Seq" in kind:
            self.read.add("is_encoder_decoder", True, self._where(node), kind)
        if "value" in target or "critic" in target:
            self._add("value_model_path", path, kind)
        elif "Classification" in kind or "reward" in target:
            self._add("reward_model_path", path, kind)
        elif "ref" in target:
            self._add("ref_model_path", path, kind)
        else:
            self._add("sft_model_path", path, kind)
            self._some(keywords, OF_MODEL, kind)

    def _add(self, name: str, node: ast.expr, call: str = "") -> None:
        try:
            self.read.add(name, self.names.value(node), self._where(node), call)
        except NotPlain as error:
            if not (name.endswith("token_id") and isinstance(node, ast.Attribute)):  # the tokenizer's own
                self._lost(name, node, f"what {error} is, the running script alone knows")

    def _lost(self, what: str, node: ast.expr, why: str) -> None:
        self.read.lose(what, self._where(node), why)

    def _where(self, node: ast.expr) -> str:
        return f"{self.name}:{node.lineno}"


def _named(node: ast.Call, keywords: dict[str, ast.expr], *names: str) -> dict[str, ast.expr]:
    """The arguments by name, also those that stand without one."""
    return {**dict(zip(names, node.args, strict=False)), **keywords}


# Options whose values are keys and values themselves; any other such key is a section.
HOLDS_KEYS = re.compile(r"(?!.*gen).*_kwargs|accelerator_config|fsdp_config|deepspeed|quantization_config")
PEFT = ("peft_config", "lora_config", "peft", "lora")  # sections of peft's own names


def read(path: Path) -> Read:
    """The settings in a file. Raises RLHFError C08, C09 or S02 where it cannot be read."""
    name, suffix = str(path), path.suffix.lower()
    if suffix == ".ipynb":
        hint = f"save it as a script: jupyter nbconvert --to script {name}"
        raise RLHFError("C09", "a notebook is not read", where=name, hint=hint)
    if suffix in yaml_io.SUFFIXES:
        source = yaml_io.read(path)
        if source.problems:
            raise RLHFError.from_problems(source.problems)
        return _tree(source.tree, lambda key: f"{name}:{source.lines[key]}")
    text = yaml_io.read_text(path)
    if suffix == ".json":
        return _json(text, name)
    return read_script(text, name) if suffix == ".py" else read_command_line(text, name)


def _json(text: str, name: str) -> Read:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise RLHFError("C08", f"not valid JSON: {error.msg}", where=f"{name}:{error.lineno}") from error
    except (ValueError, RecursionError) as error:
        raise RLHFError("C08", "no JSON that a person would write", where=name) from error
    if not isinstance(tree, dict):
        raise RLHFError("C09", "this holds no keys and values", where=name)

    def where(key: str) -> str:
        at = text.find(json.dumps(key.rpartition(".")[2]))
        return f"{name}:{text.count(chr(10), 0, at) + 1}" if at >= 0 else name

    return _tree(tree, where)


def _tree(tree: Mapping[str, Any], where: Callable[[str], str]) -> Read:
    """Keys and values, those of sections one level below too."""
    found = Read()
    for key, value in tree.items():
        if not isinstance(value, dict) or HOLDS_KEYS.fullmatch(key):
            found.add(key, _typed(value), where(key))
            continue
        if key in PEFT:
            found.signs.add("LoraConfig")
            found.add("use_peft", True, where(key))
        for inner, below in value.items():
            name = OF_LORA.get(str(inner), str(inner)) if key in PEFT else str(inner)
            found.add(name, _typed(below), where(f"{key}.{inner}"))
    return found


def _typed(value: Any) -> Any:
    """A text of YAML 1.1 or of a form such as "3e-6", which TRL's parser would have turned into a value."""
    return value_of(value) if isinstance(value, str) else value
