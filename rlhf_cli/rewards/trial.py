"""A trial of reward functions on two rows of the data, in a separate process, before anything is trained.

What a function loads, prints, changes or breaks stays in that process. Imports no torch.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from rlhf_cli.data.datasets import Prompt
from rlhf_cli.data.texts import joined
from rlhf_cli.errors import RLHFError
from rlhf_cli.rewards.function import load_function, score_texts
from rlhf_cli.rewards.signature import TextRows
from rlhf_cli.system import die_with_parent

ROWS = 2
RESPONSE = "This answer is made up."
SECONDS = 60.0  # in which one more function must answer
Outcome = list[Any] | RLHFError  # scores, or why there are none


@dataclass(frozen=True)
class Trial:
    """Functions `package.module:function` by name, and the rows that each is called with."""

    functions: Mapping[str, str]
    folder: Path  # of the config
    rows: TextRows
    every_row: bool  # None is no score


def made_up_rows(prompts: Sequence[Prompt], tokenizer: Any, stop_token_id: int | None) -> TextRows:
    """Return the first prompts with a made-up response; without a tokenizer (None) its token ids are made up, too."""
    prompts = prompts[:ROWS]
    records = [prompt.record for prompt in prompts]
    if tokenizer is None:
        texts = [joined(prompt.text) for prompt in prompts]
        ids = list(range(len(RESPONSE.split())))
        return TextRows(texts, [RESPONSE] * len(texts), [ids] * len(texts), records)
    ids = tokenizer.encode(RESPONSE, add_special_tokens=False)
    if stop_token_id is not None:
        ids.append(stop_token_id)
    return TextRows.from_tokens(tokenizer, [prompt.ids for prompt in prompts], [ids] * len(prompts), records)


def try_functions(trial: Trial) -> dict[str, Outcome]:
    """Call each function once; return what came of it.

    A RewardFormError says that it fails for any responses, any other RLHFError that it failed for these.
    """
    outcomes: dict[str, Outcome] = {}
    while left := {name: spec for name, spec in trial.functions.items() if name not in outcomes}:
        found, end = _run(replace(trial, functions=left))
        outcomes |= found
        unanswered = [name for name in left if name not in found]
        if unanswered:
            stopped_by = unanswered[0]
            outcomes[stopped_by] = RLHFError("R05", f"reward `{stopped_by}` {end}")
    return outcomes


def _run(trial: Trial) -> tuple[dict[str, Outcome], str]:
    """Return the outcomes of a process that calls the functions in turn, and how it ended."""
    with tempfile.TemporaryFile() as results, tempfile.TemporaryFile() as job:
        pickle.dump(trial, job)
        job.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-B", "-P", "-m", __name__],
            stdin=job,
            stdout=results,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        end = f"did not return within {SECONDS:.0f} s"
        size = -1
        try:
            while process.returncode is None and size < (size := os.fstat(results.fileno()).st_size):
                with suppress(subprocess.TimeoutExpired):
                    end = f"ended its process with status {process.wait(SECONDS)}"
        finally:
            with suppress(ProcessLookupError):  # what the functions started ends, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        results.seek(0)
        return dict(_read_outcomes(results)), end


def _read_outcomes(results: IO[bytes]) -> Iterator[tuple[str, Outcome]]:
    """Yield what was written until the process ended."""
    with suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(results)


def _call_functions() -> None:
    """Read a Trial from stdin; write each outcome to stdout, which functions cannot print to."""
    trial: Trial = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as out, open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        for name, spec in trial.functions.items():
            outcome: Outcome
            try:
                function = load_function(spec, folder=trial.folder)
                outcome = score_texts(name, function, trial.rows, every_row=trial.every_row)
            except RLHFError as error:
                outcome = error
            pickle.dump((name, outcome), out)
            out.flush()


if __name__ == "__main__":
    _call_functions()
