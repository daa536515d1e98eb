"""Profile a Python process from outside: CPU seconds by phase, and how often it loads, hashes and reads what.

Python imports a module of this name at start-up from any folder on PYTHONPATH, also in child processes, so rlhf_cli
needs no code for it. Each process writes WATCH_OUT/PID.json when it exits; file names are relative to WATCH_BELOW.
"""

import atexit
import json
import os
import sys
import time
from _thread import get_ident
from collections import Counter

_frozen = sys.modules["_frozen_importlib"]
_main, _phases, _stack, _mark = get_ident(), Counter(), ["other"], [0.0]
_counts = {kind: Counter() for kind in ("models", "tokenizers", "hashes", "reads", "tokenised")}
_below = os.path.realpath(os.environ.get("WATCH_BELOW", "/"))

# Module -> (function, its phase, the kind under which its calls are counted by argument).
WATCHED = {
    "hashlib": [("file_digest", "hashing", "hashes")],
    "rlhf_cli.data.readers": [("read", "reading rows", "reads")],
    "transformers.modeling_utils": [("PreTrainedModel.from_pretrained", "loading models", "models")],
    "transformers.models.auto.tokenization_auto": [
        ("AutoTokenizer.from_pretrained", "loading tokenizers", "tokenizers")
    ],
    "transformers.trainer": [("Trainer.train", "training", None), ("Trainer.evaluate", "evaluating", None)],
    "rlhf_cli.runs.checkpoints": [("commit_state", "saving", None)],
    "rlhf_cli.data.datasets": [(name, "reading rows", None) for name in ("sft_rows", "preference_rows", "prompt_rows")],
    "rlhf_cli.data.tokens": [("encode_many", "tokenising", "tokenised")],
    "rlhf_cli.models.save": [("save_model", "saving", None)],
    "rlhf_cli.models.forward": [("rollout_scores", "judge", None)],
    "rlhf_cli.stages.eval.policy_evaluator": [("_log_ratios", "KL", None)],
    "rlhf_cli.ppo.rollout": [("HFEngine.generate", "rollout", None)],
    "rlhf_cli.ppo.trainer": [("PPOTrainer.make_experience", "judge", None), ("PPOTrainer.update", "update", None)],
}


def _switch() -> None:
    """Add the CPU seconds since the last switch to the innermost phase."""
    now = time.process_time()
    _phases[_stack[-1]] += now - _mark[0]
    _mark[0] = now


def _in_phase(phase, call, *args, **kwargs):
    if get_ident() != _main:
        return call(*args, **kwargs)
    _switch()
    _stack.append(phase)
    try:
        return call(*args, **kwargs)
    finally:
        _switch()
        _stack.pop()


def _argument(kind, args):
    """Return a name for the argument of a call: a file, a folder, a number of rows with their hash, or None."""
    if kind == "tokenised":
        return f"{len(args[1])} rows, {hash((str(args[1]), str(args[2])))}"
    first = next((arg for arg in args if not isinstance(arg, type)), None)
    if first is None:  # from_pretrained(None, state_dict=...) reads no file
        return None
    return _relative(first.name if hasattr(first, "read") else first)


def _relative(path):
    path = os.path.realpath(str(path))
    return os.path.relpath(path, _below) if path.startswith(_below) else path


def _count_read(name, rows):
    """Yield the rows of a file, and count a read at its second row: reading only the first does not count."""
    for number, row in enumerate(rows):
        _counts["reads"][name] += number == 1
        yield row


def _watch(owner, name, phase, kind):
    call = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    inner = getattr(call, "__func__", call)

    def watched(*args, **kwargs):
        if kind == "reads":
            return _count_read(_argument(kind, args), inner(*args, **kwargs))
        if kind and (argument := _argument(kind, args)):
            _counts[kind][argument] += 1
        return _in_phase(phase, inner, *args, **kwargs)

    watched.__wrapped__ = inner
    watched.__name__, watched.__qualname__, watched.__doc__ = inner.__name__, inner.__qualname__, inner.__doc__
    setattr(owner, name, type(call)(watched) if isinstance(call, classmethod | staticmethod) else watched)


def _hook(module):
    """Wrap the functions of a module, once: importlib also looks up modules that are loaded already."""
    for path, phase, kind in WATCHED.pop(getattr(module, "__name__", None), ()):
        *owners, name = path.split(".")
        owner = module
        for part in owners:
            owner = getattr(owner, part)
        _watch(owner, name, phase, kind)


def _watch_imports():
    load = _frozen._find_and_load

    def timed(name, import_):
        module = _in_phase(f"imports {name.partition('.')[0]}", load, name, import_)
        _hook(sys.modules.get(name))
        return module

    _frozen._find_and_load = timed
    for name in list(WATCHED):
        _hook(sys.modules.get(name))


def _write():
    _switch()
    profile = {"command": sys.argv, "phases": _phases, "counts": {kind: +counts for kind, counts in _counts.items()}}
    with open(os.path.join(os.environ["WATCH_OUT"], f"{os.getpid()}.json"), "w", encoding="utf-8") as file:
        json.dump(profile, file)


if "WATCH_OUT" in os.environ:
    _phases["interpreter"] = _mark[0] = time.process_time()
    _watch_imports()
    atexit.register(_write)
