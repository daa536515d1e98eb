"""Parse TRL settings from a file: YAML, JSON, a Python script, or a command line in a shell script or text."""

import ast
import json
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_cli.commands.convert.names import DynamicValueError, ScriptNames, called, entries
from rlhf_cli.commands.convert.versions import ParsedFile, value_of
from rlhf_cli.config import yaml_io
from rlhf_cli.errors import RLHFError

VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=([^\s$`]*)")
USED = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
OPTION = re.compile(r"--[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
REDIRECTION = re.compile(r"\s\d*(?:>>?|<)(?:&\d|\s*[^\s\\]+)")
NEXT = {";", "&&", "||", "|", "&"}
# Options of launchers that are converted; the first three are synonyms.
LAUNCHER = {
    "num_processes": "num_processes",
    "nproc_per_node": "num_processes",
    "num_gpus": "num_processes",
    "mixed_precision": "mixed_precision",
}

Command = list[tuple[str, int]]  # words with their line numbers


def read_command_line(text: str, name: str) -> ParsedFile:
    """Parse the options of the first command that runs a PPO script, or else of the first command."""
    source, variables = ParsedFile(), dict[str, str]()
    commands = [words for words in _commands(text, variables) if any(OPTION.fullmatch(word) for word, _ in words)]
    commands = [words for words in commands if "ppo" in words[_script(words)][0].lower()] or commands
    for command in commands[1:]:
        word, line = command[_script(command)]
        source.add_unparsed(word, f"{name}:{line}", "another command; only the first one is converted")
    if commands:
        _options(commands[0], name, variables, source)
    return source


def _commands(text: str, variables: dict[str, str]) -> Iterator[Command]:
    """Yield commands, joining continued lines; a line that starts with `--` continues the previous one without `\\`."""
    words: Command = []
    continues = False
    for number, line in enumerate(text.splitlines(), 1):
        if words and not continues and not line.lstrip().startswith("--"):
            yield words
            words = []
        bare = line.rstrip().rstrip("\\")
        continues = line.rstrip() != bare
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
    except ValueError:  # an unclosed quote
        return line.split()


def _script(command: Command) -> int:
    """Return the index of the Python file or module that the following options are for."""
    words = [word for word, _ in command]
    files = [i for i, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")]
    modules = [i + 1 for i, word in enumerate(words[:-1]) if word == "-m"]
    return (files or modules[-1:] or [0])[0]


def _options(command: Command, name: str, variables: dict[str, str], source: ParsedFile) -> None:
    script, i = _script(command), 0
    while i < len(command):
        (word, line), i = command[i], i + 1
        if not OPTION.fullmatch(word):
            continue
        is_launcher = i <= script
        option, equals, rest = word[2:].partition("=")
        values = [rest] if equals else []
        while not equals and i < len(command) and i != script and not OPTION.fullmatch(command[i][0]):
            values.append(command[i][0])
            i += 1
        option = option.replace("-", "_")
        where = f"{name}:{line}"
        if is_launcher and option not in LAUNCHER:
            source.add_unparsed(f"--{option}", where, "a launcher option; see docs/scaling.md")
        else:
            _add(LAUNCHER[option] if is_launcher else option.rpartition(".")[2], values, where, variables, source)


def _add(name: str, texts: list[str], where: str, variables: dict[str, str], source: ParsedFile) -> None:
    expanded = [USED.sub(lambda match: variables.get(match[1] or match[2], match[0]), text) for text in texts]
    if unknown := next((text for text in expanded if "$" in text or "`" in text), None):
        source.add_unparsed(name, where, f"{unknown} is only known to the shell")
        return
    values: list[Any] = [value_of(text) for text in expanded]
    if values:
        source.add(name, values[0] if len(values) == 1 else values, where)
    else:  # transformers' parser has --no_NAME to turn an option off
        source.add(name.removeprefix("no_"), not name.startswith("no_"), where)


CONFIGS = ("PPOConfig", "PPOv2Config")
HOLDERS = (*CONFIGS, "ModelConfig", "ScriptArguments", "GenerationConfig")
SIGNS = (*CONFIGS, "LoraConfig", "AutoModelForCausalLMWithValueHead", "AutoModelForSeq2SeqLMWithValueHead")


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# Arguments of other calls that are settings, and their names as settings.
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
FILES = ("json", "csv", "parquet", "text")  # file formats of load_dataset
LENGTHS = ("out", "resp", "gen")  # in the variable of a sampler of response lengths, not prompt lengths


def read_script(text: str, name: str) -> ParsedFile:
    """Parse a script. Raises RLHFError C08 if it is not valid Python, C09 if it contains no config."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python, about escapes in the script
            tree = ast.parse(text)
        return _Script(tree, name).settings()
    except SyntaxError as error:
        raise RLHFError("C08", f"not valid Python: {error.msg}", where=f"{name}:{error.lineno or 1}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise RLHFError("C08", "Python nested too deeply", where=name) from error


class _Script:
    """Parser of one script."""

    def __init__(self, tree: ast.Module, name: str) -> None:
        self.tree, self.name = tree, name
        self.names, self.parsed = ScriptNames(tree, HOLDERS), ParsedFile()

    def settings(self) -> ParsedFile:
        """Return the settings of the script, in order."""
        nodes = list(ast.walk(self.tree))
        words = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.parsed.signs = words & set(SIGNS)
        statements = [node for node in nodes if isinstance(node, ast.Call | ast.Assign)]
        configs = 0
        for node in sorted(statements, key=lambda node: (node.lineno, node.col_offset)):
            configs += called(node) in CONFIGS
            if isinstance(node, ast.Assign):
                self._assigned(node)
            elif called(node) in CONFIGS and configs > 1:
                self._lost(f"{called(node)}(...)", node, "another config; only the first one is converted")
            else:
                self._call(node, called(node))
        if not configs and words & {"HfArgumentParser", "TrlParser"}:
            text, hint = "its settings come from the command line", "save that command in a file, and convert that file"
            raise RLHFError("C09", text, where=self.name, hint=hint)
        if any(setting.call == "LengthSampler" for setting in self.parsed.settings):  # it sets max_new_tokens
            self.parsed.unparsed = [value for value in self.parsed.unparsed if value.name != "max_new_tokens"]
        return self.parsed

    def _assigned(self, node: ast.Assign) -> None:
        """Read `generation_kwargs = {...}` and `generation_kwargs["temperature"] = ...`."""
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
                self._lost(f"{name}(...)", node, "positional arguments are not converted")
        elif name == "LoraConfig":
            self.parsed.add("use_peft", True, self._where(node), name)
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
        if any(setting.name == "dataset_name" for setting in self.parsed.settings):
            self._lost("load_dataset(...)", node, "another dataset; only the first one is converted")
            return
        path = keywords.get("path")
        if isinstance(path, ast.Constant) and path.value in FILES and "data_files" in keywords:
            keywords = {"path": keywords["data_files"]}
        self._some(keywords, OF_DATASET, "load_dataset")

    def _pipeline(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        try:
            task, model = (self.names.value(keywords[name]) for name in ("task", "model"))
            self.parsed.add("reward_model", f"{task}:{model}", self._where(node), "pipeline")
        except (DynamicValueError, KeyError):
            self._lost("pipeline(...)", node, "its task and model are only known at run time")

    def _lengths(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        if not any(word in self.names.target(node) for word in LENGTHS):
            self._lost("LengthSampler(...)", node, "it truncates prompts; use data.first_words, which counts words")
            return
        try:
            minimum, end = (self.names.value(keywords[name]) for name in ("min_value", "max_value"))
            self.parsed.add("response_length", {"min": minimum, "max": end - 1}, self._where(node), "LengthSampler")
        except (DynamicValueError, KeyError, TypeError):
            self._lost("LengthSampler(...)", node, "the lengths are only known at run time")

    def _model(self, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        """Read a model's name; its class and variable determine its role."""
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        kind, target = owner.id if isinstance(owner, ast.Name) else "", self.names.target(node)
        path = keywords.get("pretrained_model_name_or_path")
        if "model" not in kind.lower() or path is None:  # of a tokenizer or config
            return
        if "Seq2Seq" in kind:
            self.parsed.add("is_encoder_decoder", True, self._where(node), kind)
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
            self.parsed.add(name, self.names.value(node), self._where(node), call)
        except DynamicValueError as error:
            if not (name.endswith("token_id") and isinstance(node, ast.Attribute)):  # of the tokenizer
                self._lost(name, node, f"{error} is only known at run time")

    def _lost(self, name: str, node: ast.expr, reason: str) -> None:
        self.parsed.add_unparsed(name, self._where(node), reason)

    def _where(self, node: ast.expr) -> str:
        return f"{self.name}:{node.lineno}"


def _named(node: ast.Call, keywords: dict[str, ast.expr], *names: str) -> dict[str, ast.expr]:
    """Return all arguments by name, including positional ones."""
    return {**dict(zip(names, node.args, strict=False)), **keywords}


# Options with a dict as value; other keys with a dict are sections.
HOLDS_KEYS = re.compile(r"(?!.*gen).*_kwargs|accelerator_config|fsdp_config|deepspeed|quantization_config")
PEFT = ("peft_config", "lora_config", "peft", "lora")  # sections with peft's option names


def read_settings(path: Path) -> ParsedFile:
    """Parse a file. Raises RLHFError C08, C09 or S02 if it cannot be read."""
    name, suffix = str(path), path.suffix.lower()
    if suffix == ".ipynb":
        hint = f"save it as a script: jupyter nbconvert --to script {name}"
        raise RLHFError("C09", "notebooks are not supported", where=name, hint=hint)
    if suffix in yaml_io.SUFFIXES:
        source = yaml_io.read(path)
        if source.problems:
            raise RLHFError.from_problems(source.problems)
        return _tree(source.tree, lambda key: f"{name}:{source.lines[key]}")
    text = yaml_io.read_text(path)
    if suffix == ".json":
        return _json(text, name)
    return read_script(text, name) if suffix == ".py" else read_command_line(text, name)


def _json(text: str, name: str) -> ParsedFile:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise RLHFError("C08", f"not valid JSON: {error.msg}", where=f"{name}:{error.lineno}") from error
    except (ValueError, RecursionError) as error:
        raise RLHFError("C08", "JSON nested too deeply", where=name) from error
    if not isinstance(tree, dict):
        raise RLHFError("C09", "the file is not a JSON object", where=name)

    def where(key: str) -> str:
        position = text.find(json.dumps(key.rpartition(".")[2]))
        return f"{name}:{text.count(chr(10), 0, position) + 1}" if position >= 0 else name

    return _tree(tree, where)


def _tree(tree: Mapping[str, Any], where: Callable[[str], str]) -> ParsedFile:
    """Return the keys and values, including those of sections."""
    source = ParsedFile()
    for key, value in tree.items():
        if not isinstance(value, dict) or HOLDS_KEYS.fullmatch(key):
            source.add(key, _typed(value), where(key))
            continue
        if key in PEFT:
            source.signs.add("LoraConfig")
            source.add("use_peft", True, where(key))
        for inner, below in value.items():
            name = OF_LORA.get(str(inner), str(inner)) if key in PEFT else str(inner)
            source.add(name, _typed(below), where(f"{key}.{inner}"))
    return source


def _typed(value: Any) -> Any:
    """Parse strings such as "3e-6" that TRL's parser converts to a value."""
    return value_of(value) if isinstance(value, str) else value
