"""Print the comparison of a repeated update, as tables and lines or as JSON."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_cli import terminal
from rlhf_cli.commands.verify.comparison import TOLERANCE, Quantity, worst
from rlhf_cli.commands.verify.replay import ReplayReport, open_run, verify_update
from rlhf_cli.config.base import Options
from rlhf_cli.rewards.function import no_bytecode_files

# Rounding error to expect of a quantity, relative; larger ones are reported.
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

    columns = ["quantity", "numbers", "largest", "recorded", "float64", report.dtype]
    rows = [_row(quantity) for quantity in report.quantities]
    terminal.table(columns, rows, title=f"update {report.step} of {report.run}: largest differences")
    terminal.out()
    for line in summary_lines(report):
        terminal.out(line)
    return 0 if report.agrees else 1


def _row(quantity: Quantity) -> list[str]:
    differences = (quantity.recorded, quantity.float64, quantity.rounding)
    cells = [_shown(difference) for difference in differences]
    return [quantity.name, str(quantity.count), f"{quantity.largest:.4g}", *cells]


def _shown(difference: float | None) -> str:
    if difference is None:
        return ""
    return f"{difference:.1e}" if difference else "0"


def summary_lines(report: ReplayReport) -> list[str]:
    """Return the results of the three comparisons as lines of text."""
    skipped = [f"skipped   {name}: {why}, only rounding decides it" for name, why in report.only_rounding.items()]
    return [
        f"recorded  {_recorded_text(report)}",
        f"{report.dtype:9} {_rounding_text(report)}",
        *skipped,
        f"verify    update {report.step} {_result_text(report)}",
    ]


def _recorded_text(report: ReplayReport) -> str:
    """Return how the run's files compare with the trainer now."""
    compared = [quantity for quantity in report.quantities if quantity.recorded is not None]
    changed = [quantity for quantity in compared if quantity.recorded]
    if not changed:
        return f"all {len(compared)} quantities equal the run's to the last bit"
    reason = ", ".join(report.versions) or "another machine, number of threads, or version of the code"
    first = f"first {changed[0].name} by {changed[0].recorded:.1e}"
    return f"{len(changed)} of {len(compared)} quantities differ from the run's, {first}: {reason}"


def _rounding_text(report: ReplayReport) -> str:
    """Return how the trainer in the run's dtype compares with the float64 reference."""
    errors = {
        quantity.name: quantity.relative(quantity.rounding)
        for quantity in report.quantities
        # not the average: its change may be as small as float32's step of a weight
        if quantity.rounding and not quantity.name.startswith("average")
    }
    if not errors:
        return "no rounding error"
    for name, error in errors.items():
        if error > ROUNDING[report.dtype]:
            return f"rounding changes {name} by {error:.1e} of its size: more than expected"
    name, error = max(errors.items(), key=lambda item: item[1])
    return f"rounding changes a quantity by at most {error:.1e} of its size ({name})"


def _result_text(report: ReplayReport) -> str:
    """Return how the trainer in float64 compares with the reference."""
    wrong = [quantity.name for quantity in report.quantities if quantity.error > TOLERANCE]
    if wrong:
        return f"differs: {wrong[0]} is the first of {len(wrong)} quantities that do not agree to {TOLERANCE:g}"
    largest = worst(report.quantities)
    return f"agrees to {TOLERANCE:g}: at most {largest.error:.1e} of a quantity's size ({largest.name})"


def _as_json(report: ReplayReport) -> dict[str, Any]:
    return {
        "run": report.run,
        "step": report.step,
        "agrees": report.agrees,
        "exact": not any(quantity.recorded for quantity in report.quantities),  # the run's values, to the last bit
        "tolerance": TOLERANCE,
        "number_format": report.dtype,
        "told": summary_lines(report),
        "quantities": [_quantity_as_json(quantity) for quantity in report.quantities],
    }


def _quantity_as_json(quantity: Quantity) -> dict[str, Any]:
    """Return a quantity without what is not compared, with infinities and nan as text: JSON has no such numbers."""
    values = asdict(quantity) | {"error": quantity.error}
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
        if value is not None
    }
