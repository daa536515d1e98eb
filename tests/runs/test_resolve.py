"""References to models: which a config needs, those that are missing, and tokenizers that differ."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_config import FakeConfig, make_stage

from rlhf_cli import runs
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs.manifest import Manifest
from rlhf_cli.runs.parents import Parent


def ppo_config(run: Path, value: str = "reward", **rewards: SimpleNamespace) -> Any:
    paths = {"sft": str(run / "sft"), "policy": None, "reward": str(run / "reward")}
    models = SimpleNamespace(**paths, value=value, revision=None)
    return SimpleNamespace(
        stage="ppo", models=models, rewards=rewards, folder=run / "ppo", where=lambda key: f"ppo.yaml:{key}"
    )


def source(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"model": None, "models": {}, "pipeline": None, **fields})


MEMBERS = ["rewards.vote.models.a", "rewards.vote.models.b"]


@pytest.mark.parametrize(
    ("value", "rewards", "expected"),
    [
        ("reward", {}, ["models.reward"]),
        ("reward", {"short": source()}, ["models.reward"]),
        ("/v", {"short": source()}, ["models.value"]),
        ("/v", {"r": source(pipeline="/models/z")}, ["models.value", "rewards.r.pipeline"]),
        ("reward", {"other": source(model="/models/x")}, ["models.reward", "rewards.other.model"]),
        ("/v", {"vote": source(models={"a": "/models/x", "b": "/models/y"})}, ["models.value", *MEMBERS]),
    ],
)
def test_ppo_needs_the_reward_model_only_if_something_reads_it(value: str, rewards: Any, expected: list[str]) -> None:
    keys = [reference.key for reference in runs.references(ppo_config(Path("run"), value, **rewards))]
    assert keys == ["models.sft", *expected]


def test_judges_that_are_functions_are_not_parents() -> None:
    models = SimpleNamespace(sft="/s", ppo="/p", reward="/r", base=None, previous=None)
    config = SimpleNamespace(
        stage="eval", models=models, policies={}, judges={"gold": "rlhf_cli.demo.gold:judge", "other": "/o"}
    )
    keys = [reference.key for reference in runs.references(config)]
    assert keys == ["models.sft", "models.ppo", "models.reward", "judges.other"]
    models.base = "/b"
    assert "models.base" in [reference.key for reference in runs.references(config)]


def test_all_missing_parents_are_reported_at_once_and_a_stage_is_not_its_own(tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        runs.open_parents(ppo_config(tmp_path))
    assert [problem.where for problem in caught.value.problems] == ["ppo.yaml:models.sft", "ppo.yaml:models.reward"]
    folder = make_stage(tmp_path, "sft")
    config = FakeConfig(tmp_path, "sft", model=SimpleNamespace(path=str(folder), revision=None))
    with pytest.raises(RLHFError, match="names the folder that this stage writes"):
        runs.open_parents(config)


def parent(key: str, tokenizer: str | None = None, template: str | None = None) -> Parent:
    manifest = {"tokenizer_sha256": tokenizer, "template_sha256": template} if tokenizer else {}
    return Parent(
        key,
        Path("/runs") / key,
        "reward" if manifest else "foreign",
        Path("/m"),
        "0" * 64,
        Manifest.model_validate(manifest),
    )


def test_parents_with_other_tokenizers_or_templates_are_refused_with_both_hashes() -> None:
    a = parent("models.sft", "a" * 64, "1" * 64)
    runs.check_same_tokenizer(a, a, where="ppo.yaml:5")
    for other, code, hashes in (
        (parent("models.reward", "b" * 64, "1" * 64), "T04", ("a" * 12, "b" * 12)),
        (parent("models.reward", "a" * 64, "2" * 64), "T05", ("1" * 12, "2" * 12)),
        (parent("models.reward", "a" * 64, None), "T05", ("1" * 12, "none")),
    ):
        with pytest.raises(RLHFError) as caught:
            runs.check_same_tokenizer(a, other, where="ppo.yaml:5")
        assert (caught.value.problems[0].code, caught.value.problems[0].where) == (code, "ppo.yaml:5")
        assert all(sha in str(caught.value) for sha in hashes)
    a, foreign = parent("models.sft", "a", "1"), parent("models.reward")
    runs.check_same_tokenizer(a, foreign, where="w")  # unknown
    known = {"models.reward": Manifest(tokenizer_sha256="a", template_sha256=None)}
    runs.check_same_tokenizer(a, foreign, where="w", foreign=known)
    known["models.reward"] = Manifest(tokenizer_sha256="b", template_sha256=None)
    with pytest.raises(RLHFError, match="T04"):
        runs.check_same_tokenizer(a, foreign, where="w", foreign=known)
