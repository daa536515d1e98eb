"""Reads a Python script's settings with `ast`: nothing of it is imported or run.

Read are calls such as `PPOConfig(...)`, dicts such as `generation_kwargs`, and what they name. What the text alone does
not tell is kept, with its line.
"""

import ast
import warnings

from rlhf_cli.errors import RLHFError
from rlhf_cli.from_trl.names import Names, NotPlain, called, entries
from rlhf_cli.from_trl.settings import Read

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


def read(text: str, name: str) -> Read:
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
