"""The damages of test_damage.py, done to a checkpoint of plain TRL and transformers: `resume_from_checkpoint=True`."""

import hashlib
import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from conftest import World
from damages import DAMAGES, OTHER, PROPERTY, SAME, SILENT, Matrix, harm
from datasets import Dataset

from rlhf_cli import jsonl

pytestmark = [pytest.mark.training, pytest.mark.damage]

RIGHT = "right"
COMPARED = ("step", "loss", "grad_norm", "learning_rate")  # num_tokens starts at 0 with every resume


class _Said(logging.Handler):
    """What a user would have read: log records of level WARNING and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.add(record.getMessage())


def train(base: Path, data: Path, run: Path, *, resume: bool) -> tuple[str, Any, set[str]]:
    """What users write. Returns the hash of the trained weights, the log, and the warnings."""
    transformers.utils.logging.set_verbosity_warning()  # the default, which our own stages change
    said = _Said()
    loggers = [logging.getLogger(name) for name in (None, "transformers", "trl", "accelerate")]
    for logger in loggers:
        logger.addHandler(said)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer = _trainer(base, data, run)
            trainer.train(resume_from_checkpoint=True if resume else None)
    finally:
        for logger in loggers:
            logger.removeHandler(said)
    digest = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    log = [{name: row.get(name) for name in COMPARED} for row in trainer.state.log_history[:-1]]  # then a summary
    return digest.hexdigest(), log, said.texts | {str(one.message) for one in warned}


def _trainer(base: Path, data: Path, run: Path) -> Any:
    args = trl.SFTConfig(
        output_dir=str(run),
        max_steps=6,
        save_steps=2,
        save_total_limit=3,
        logging_steps=1,
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        max_length=64,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    dataset = Dataset.from_list([row for _, row in jsonl.read_jsonl(data)])
    return trl.SFTTrainer(model=str(base), args=args, train_dataset=dataset)


@pytest.fixture(scope="module")
def straight(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, tuple[str, Any, set[str]]]:
    """The base model, with dropout; the folder of the straight run without its last checkpoint; how the run ended."""
    folder = tmp_path_factory.mktemp("hf")
    base = shutil.copytree(world.base, folder / "base")
    body = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(body | {"attention_dropout": 0.1}))
    end = train(base, world.sft, folder / "run", resume=False)
    shutil.rmtree(folder / "run/checkpoint-6")
    return base, folder / "run", end


def verdict(straight: Any, data: Path, run: Path, usual: set[str]) -> str:
    """Resume and say how it ends; `usual` is what is warned of anyway."""
    base, _, (weights, log, _) = straight
    try:
        again, its_log, said = train(base, data, run, resume=True)
    except Exception as error:
        return type(error).__name__
    if (again, its_log) == (weights, log):
        return RIGHT
    what = "wrong weights" if again != weights else "wrong log"
    return f"{what}, {'warned' if said - usual else SILENT}"


def test_the_same_damages_done_to_plain_hf_trainer(
    straight: Any, world: World, tmp_path: Path, record_property: Any
) -> None:
    base, whole, (weights, log, _) = straight
    again, its_log, usual = train(base, world.sft, Path(shutil.copytree(whole, tmp_path / "undamaged")), resume=True)
    assert (again, its_log) == (weights, log)  # of an undamaged checkpoint it keeps its promise
    matrix = Matrix(
        f"plain HF Trainer (TRL {trl.__version__}, transformers {transformers.__version__}): the same damages, "
        "resume_from_checkpoint=True",
        "right: it ended as the straight run did; SILENT: it did not, and nothing was warned of; else what was raised",
        theirs=True,
    )
    for name in sorted(path.name for path in (whole / "checkpoint-4").iterdir()):
        for how in DAMAGES:
            run = Path(shutil.copytree(whole, tmp_path / how / name))
            damaged = harm(run / "checkpoint-4" / name, how, run / "checkpoint-2" / name)
            matrix.put(name, how, verdict(straight, world.sft, run, usual) if damaged else SAME)
            shutil.rmtree(run)
    for how in ("missing", "empty", "half", OTHER):
        run = Path(shutil.copytree(whole, tmp_path / how / "folder"))
        _harm_folder(run, how)
        matrix.put("the whole folder", how, verdict(straight, world.sft, run, usual))
    record_property(PROPERTY, matrix.told())
    assert matrix.cells["optimizer.pt"]["missing"] == f"wrong weights, {SILENT}"  # else this table is of no use
    assert matrix.cells["the whole folder"]["missing"] == RIGHT


def _harm_folder(run: Path, how: str) -> None:
    newest = run / "checkpoint-4"
    files = sorted(newest.iterdir())
    if how in ("missing", OTHER):
        shutil.rmtree(newest)
    if how == OTHER:
        shutil.copytree(run / "checkpoint-2", newest)
    for path in {"empty": files, "half": files[::2]}.get(how, []):
        path.unlink()
