"""Run code on a machine that lacks some packages."""

import run_cli

# The packages are not to be found, as on a machine without them. What transformers itself imports (yaml, through
# huggingface_hub) is refused to our own modules only.
BLOCK = """
import builtins, importlib.machinery, sys
plain, find = builtins.__import__, importlib.machinery.PathFinder.find_spec
refused_to_us = {{"yaml", "rich", "typer", "scipy"}}
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    ours = (globals or {{}}).get("__name__", "").startswith("rlhf_cli")
    if ours and level == 0 and name.partition(".")[0] in refused_to_us:
        raise ImportError(name + " is not installed here")
    return plain(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else find(name, path, target)
sys.meta_path = [Finder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""


def python(code: str, blocked: set[str]) -> None:
    bare = {"OMP_NUM_THREADS": "1", "PATH": ""}
    options = {"cwd": run_cli.ROOT / "tests/helpers", "env": bare}
    run_cli.must_succeed(run_cli.python("-c", BLOCK.format(blocked=blocked) + code, **options))
