"""RUN/ppo/sft_answers.jsonl: SFT's answer to each prompt, with which a judge compares the policy's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.data.tokens import PromptText
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.files import append_rows, appended_rows, json_sha256, repair_end
from rlhf_cli.judges.question import shown_prompt
from rlhf_cli.models.batch import Prompts, Rollout
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.trainer import PPOTrainer

FILE = "sft_answers.jsonl"
EDITED_HINT = "remove the line: the answer is drawn again"


class SFTAnswers:
    """The reference's answer to each prompt, sampled as in training by seed and prompt, when it is first needed.

    It is kept on disk, because a row's tokens may depend on the other rows of its batch in a near-tie. Raises RLHFError
    D03 for a line that is no answer, S03 for a link out of the folder.
    """

    def __init__(self, path: Path, trainer: PPOTrainer, engine: HFEngine, tokenizer: Any) -> None:
        self.path = path
        self.trainer = trainer
        self.engine = engine
        self.tokenizer = tokenizer
        self._answers: dict[str, str] = trainer.process_group.run_on_main(lambda: _read(path))

    def answer(self, prompt: PromptText) -> str:
        """Return the answer to a prompt that `draw` has seen."""
        return self._answers[json_sha256(prompt)]

    def draw(self, rollout: Rollout) -> None:
        """Draw the answers to the rollout's prompts that have none; each process draws a part."""
        missing: dict[str, int] = {}  # key -> its first row
        for row, record in enumerate(rollout.records):
            key = json_sha256(record["prompt"])
            if key not in self._answers:
                missing.setdefault(key, row)
        if not missing:
            return

        rows = list(missing.values())
        _, texts = self._generate(rollout, rows, list(missing)).texts(self.tokenizer)
        self._answers.update(zip(missing, texts, strict=True))
        lines = []
        for (key, row), text in zip(missing.items(), texts, strict=True):
            lines.append({"key": key, "prompt": shown_prompt(rollout.records[row]["prompt"]), "answer": text})
        self.trainer.process_group.run_on_main(lambda: append_rows(self.path, lines))

    def _generate(self, rollout: Rollout, rows: list[int], keys: list[str]) -> Rollout:
        """Sample the reference's responses to the prompts of some rows."""
        trainer = self.trainer
        prompts = replace(
            Prompts.from_lists([rollout.prompt_tokens(row) for row in rows]),
            seeds=tuple(derive_seed(trainer.seed, "SFT's answer", int(key, 16)) for key in keys),
            response_length=trainer.settings.max_response_length,
        )
        self.engine.batch_size = getattr(trainer.engine, "batch_size", None)  # what fits; no token depends on it
        with trainer.ref_on_device():
            return trainer.draw(prompts, self.engine)


def _read(path: Path) -> dict[str, str]:
    """Return the answers by the hash of the prompt. A last line that a killed process left unfinished is removed."""
    repair_end(path)
    answers = {}
    for number, row in appended_rows(path, hint=EDITED_HINT):
        key = row.get("key")
        answer = row.get("answer")
        if not isinstance(key, str) or not isinstance(answer, str):
            where = f"{shown(path)}:{number}"
            raise RLHFError("D03", "the line is not an answer of SFT", where=where, hint=EDITED_HINT)
        answers[key] = answer
    return answers
