"""The best step of a reward training: what each evaluation ranks right, and the checkpoint of the best one."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from rlhf_cli import runs, terminal
from rlhf_cli.errors import RLHFError
from rlhf_cli.evaluation.kept_step import best_step, describe, keep_step
from rlhf_cli.runs.report import KeptStep

WORTH = {"0": 0.0, "=": 0.5, "1": 1.0}  # of a pair that is ranked wrong, tied or right


class BestStep(TrainerCallback, ExportableState):
    """The evaluated steps of a training; with `keeps_best` the checkpoint of the best one stays until the end.

    It is a checkpoint as those to resume from: its hashes are verified, and a killed run finds it again.
    """

    def __init__(self, prompts: Sequence[Hashable], *, keeps_best: bool) -> None:
        self.prompts = prompts  # of the held-out pairs
        self.keeps_best = keeps_best
        self.right: dict[int, str] = {}  # by step, a letter of WORTH for each held-out pair
        self.margins: list[float] = []  # of the evaluation in progress

    def note(self, margins: Tensor) -> None:
        """Take the margins of a batch of an evaluation, from all processes."""
        self.margins += margins.float().tolist()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what is ranked right; save a checkpoint of the best step so far, which stays beside the newest ones."""
        letters = ["=" if margin == 0 else str(int(margin > 0)) for margin in self.margins]
        self.margins = []
        self.right[state.global_step] = "".join(letters)
        if self.keeps_best and best_step(self._worths()) == state.global_step:
            control.should_save = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add this callback to the state of a checkpoint of an older version, where transformers looks it up."""
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    @property
    def spared(self) -> set[str]:
        """The folder of the checkpoint that stays beside the newest ones."""
        return {f"checkpoint-{best_step(self._worths())}"} if self.keeps_best and self.right else set()

    def _worths(self) -> dict[int, list[float]]:
        return {step: [WORTH[letter] for letter in letters] for step, letters in self.right.items()}

    def state(self) -> dict[str, Any]:
        """Return the evaluated steps for the checkpoint: JSON has no integers as keys."""
        return {"args": {}, "attributes": {"right": [[step, letters] for step, letters in self.right.items()]}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the evaluated steps of a checkpoint; one of an older version, or without a step, has none."""
        saved = state.get("stateful_callbacks", {}).get(type(self).__name__)
        if saved:
            self.right = dict(saved["attributes"]["right"])

    def keep(self, trainer: Any) -> tuple[KeptStep | None, Path | None]:
        """Return which step is the model, and its checkpoint if that is not the last step; None without a choice.

        Prints it. Warns M05 if the checkpoint is damaged; then the model is the last step's.
        """
        if len(self.right) < 2:
            return None, None

        kept = keep_step(self._worths(), self.prompts, keeps_best=self.keeps_best)
        checkpoint = None
        if kept.step != max(self.right):
            folder = Path(trainer.args.output_dir)
            checkpoint = trainer.process_group.run_on_main(lambda: _find_checkpoint(folder, kept.step))
            if checkpoint is None:
                return None, None
        terminal.say(f"reward   the model is that of {describe(kept)}")
        return kept, checkpoint


def _find_checkpoint(folder: Path, step: int) -> Path | None:
    """Return the checkpoint of the best step; warn (M05) and return None if it is damaged or missing."""
    try:
        return runs.state_at(folder, step)
    except RLHFError as error:
        terminal.warn("M05", f"{error.problems[0].text}; the model is that of the last step")
        return None
