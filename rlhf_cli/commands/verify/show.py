"""Print the comparison of a repeated update, as tables and lines or as JSON."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.commands.verify.comparison import TOLERANCE, worst
from rlhf_cli.commands.verify.replay import ReplayReport, open_run, verify_update
from rlhf_cli.config.base import Options
from rlhf_cli.rewards.function import no_bytecode_files

ROUNDING = {"float32": 0.05, "bfloat16": 0.5}


def run(folder: Path, step: int | None, options: Options, *, as_json: bool) -> int:
    """Compare, print, and return 0 if the float64 values agree, else 1.

    Raises RLHFError C06 for a step that cannot be repeated or ppo.optim adamw_8bit, M01 if there is no run, C15 if its
    inputs changed, M05 for a damaged checkpoint, and as `rlhf ppo` does for its models and data.
    """
    with no_bytecode_files():
        report = verify_update(open_run(folder), step, options)
    if as_json:
        terminal.out(json.dumps(_as_json(report), indent=2))
        return 0 if report.agrees else 1
    rows = []
    for quantity in report.quantities:
        differences = (quantity.recorded, quantity.float64, quantity.rounding)
        cells = ["" if x is None else "0" if x == 0 else f"{x:.1e}" for x in differences]
        rows.append([quantity.name, str(quantity.count), f"{quantity.largest:.4g}", *cells])
    columns = ["quantity", "numbers", "largest", "recorded", "float64", report.dtype]
    terminal.table(columns, rows, title=f"update {report.step} of {report.run}: largest differences")
    terminal.out()
    for line in summary_lines(report):
        terminal.out(line)
    return 0 if report.agrees else 1


def summary_lines(report: ReplayReport) -> list[str]:
    """Return the results of the three comparisons as lines of text."""
    quantities, bound = report.quantities, ROUNDING[report.dtype]
    compared = [quantity for quantity in quantities if quantity.recorded is not None]
    changed = [quantity for quantity in compared if quantity.recorded]
    recorded = f"all {len(compared)} quantities equal the run's to the last bit"
    if changed:
        reason = ", ".join(report.versions) or "another machine, number of threads, or version of the code"
        first = f"first {changed[0].name} by {changed[0].recorded:.1e}"
        recorded = f"{len(changed)} of {len(compared)} quantities differ from the run's, {first}: {reason}"
    # not the average: its change may be as small as float32's step of a weight
    rounding_errors = [each for each in quantities if each.rounding and not each.name.startswith("average")]
    rounded = {quantity.name: quantity.relative(quantity.rounding) for quantity in rounding_errors}
    rounding = "no rounding error"
    if large := [name for name, error in rounded.items() if error > bound]:
        rounding = f"rounding changes {large[0]} by {rounded[large[0]]:.1e} of its size: more than expected"
    elif rounded:
        name, error = max(rounded.items(), key=lambda item: item[1])
        rounding = f"rounding changes a quantity by at most {error:.1e} of its size ({name})"
    skipped = [f"skipped   {name}: {why}, only rounding decides it" for name, why in report.only_rounding.items()]
    errors, largest = [quantity.name for quantity in quantities if quantity.error > TOLERANCE], worst(quantities)
    result = f"agrees to {TOLERANCE:g}: at most {largest.error:.1e} of a quantity's size ({largest.name})"
    if errors:
        result = f"differs: {errors[0]} is the first of {len(errors)} quantities that do not agree to {TOLERANCE:g}"
    lines = [f"recorded  {recorded}", f"{report.dtype:9} {rounding}", *skipped]
    return [*lines, f"verify    update {report.step} {result}"]


def _as_json(report: ReplayReport) -> dict[str, Any]:
    return {
        "run": report.run,
        "step": report.step,
        "agrees": report.agrees,
        "exact": not any(quantity.recorded for quantity in report.quantities),  # the run's values, to the last bit
        "tolerance": TOLERANCE,
        "number_format": report.dtype,
        "told": summary_lines(report),
        "quantities": [  # infinities and nan as text, which JSON cannot represent as numbers
            {
                name: str(x) if isinstance(x, float) and not math.isfinite(x) else x
                for name, x in each.items()
                if x is not None
            }
            for each in (asdict(quantity) | {"error": quantity.error} for quantity in report.quantities)
        ],
    }
