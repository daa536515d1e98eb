"""The fields of TRL's configs that `trainer:` accepts, and TRL's own defaults."""

import re

from rlhf_cli.config.machinery import trl_fields
from tests.config.machinery.test_fields import SOURCES


def test_a_remark_about_trls_own_default_is_true() -> None:
    values = {
        (stage, path): match[1]
        for (stage, path), source in SOURCES.items()
        if stage in trl_fields.TRAINERS and (match := re.search(r"TRL's own default is (\S+)$", source.remark or ""))
    }
    assert {path for _, path in values} >= {"sft.num_train_epochs", "reward.gradient_checkpointing"}
    for (stage, path), theirs in values.items():
        default = trl_fields.fields_of(stage)[path.rpartition(".")[2]]["default"]
        words = {"null": None, "true": True, "false": False}
        assert default == (words[theirs] if theirs in words else type(default)(theirs)), path
