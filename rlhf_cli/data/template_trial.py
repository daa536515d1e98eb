"""A trial of a chat template in a separate process, before this one renders it: does it end, in time and memory?

`ends_by` starts this file as a script, with jinja2 alone. Signals cannot stop all that a template does: while it
compares or hashes nested lists, for example, Python handles none.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

TURNS = [{"role": "user", "content": "text"}, {"role": "assistant", "content": "text"}]
OTHERS = {"tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>"}
# What a template has too little of.
TIME = "time"
MEMORY = "memory"
DEPTH = "depth"
EXIT_CODES = {MEMORY: 3, DEPTH: 4}


def ends_by(template: str, *, seconds: float, max_bytes: int) -> str | None:
    """Return which limit ends a template on a question and on an answer, None if it ends by itself or in an error."""
    job = {"template": template, "seconds": seconds, "bytes": max_bytes}
    process = subprocess.Popen(
        [sys.executable, "-P", "-B", __file__],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        process.communicate(json.dumps(job).encode(), timeout=10 * seconds + 60)
    except subprocess.TimeoutExpired:
        return TIME
    finally:
        process.kill()
        process.wait()
    if process.returncode == -signal.SIGPROF:
        return TIME
    for limit, code in EXIT_CODES.items():
        if process.returncode == code:
            return limit
    return None


def _limit_this_process(seconds: float, max_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with suppress(OSError, ValueError):  # macOS has no such limit
        soft = max_bytes if hard < 0 else min(max_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process, whatever it does


def _render() -> None:
    """Read a job from stdin and render its template, in an environment like that of transformers."""
    job = json.load(sys.stdin)

    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    class Generation(Extension):
        """`{% generation %}`, which marks an assistant's text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    _limit_this_process(job["seconds"], job["bytes"])
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = json.dumps
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: form}
    try:
        template = environment.from_string(job["template"])
        template.render(messages=TURNS[:1], add_generation_prompt=True, **OTHERS)
        template.render(messages=TURNS, add_generation_prompt=False, **OTHERS)
    except MemoryError:
        os._exit(EXIT_CODES[MEMORY])
    except RecursionError:
        os._exit(EXIT_CODES[DEPTH])


if __name__ == "__main__":
    with suppress(Exception):
        _render()
