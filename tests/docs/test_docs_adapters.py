"""docs/scaling.md, Adapters: every example loads, and every key is listed with its default."""

import re
from pathlib import Path

import pytest

from rlhf_cli import config
from rlhf_cli.config.common import Adapters, PPOAdapters

TEXT = (Path(__file__).parents[2] / "docs/scaling.md").read_text(encoding="utf-8")
PAGE = TEXT.partition("## Adapters")[2].partition("\n## ")[0]
EXAMPLES = re.findall(r"```yaml\n# (sft|reward|ppo)\.yaml.*?\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("stage", "text"), EXAMPLES)
def test_an_example_loads(stage: str, text: str, tmp_path: Path) -> None:
    (tmp_path / f"{stage}.yaml").write_text(text, encoding="utf-8")
    found = config.load(stage, tmp_path / f"{stage}.yaml")
    section = found.models if stage == "ppo" else found.model
    assert section.adapters.kind in ("lora", "qlora")


def test_every_key_is_listed_with_its_default() -> None:
    assert {stage for stage, _ in EXAMPLES} == {"sft", "reward", "ppo"}
    listed = {}
    for names, default in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+?) \|", PAGE, re.MULTILINE):
        keys = re.findall(r"\w+", names)
        values = default.split(", ") if ", " in default else [default] * len(keys)
        listed |= dict(zip(keys, values, strict=True))
    fields = Adapters.model_fields
    assert listed.keys() == fields.keys() == PPOAdapters.model_fields.keys() | {"lora_dropout"}
    for key, text in listed.items():
        default = "required" if fields[key].is_required() else fields[key].default
        assert text == (str(default).lower() if isinstance(default, bool) else f"{default:g}" if key != "kind"
                        and isinstance(default, int | float) else default), key  # fmt: skip


def test_the_learning_rates_are_those_of_the_code(tmp_path: Path) -> None:
    text = " ".join(PAGE.split())
    assert "ten times those of full training: 2e-4 for SFT, 1e-4 for the reward model, 3e-5 for PPO." in text
    lora = "adapters: {kind: lora}"
    for stage, text, rate in (
        ("sft", f"model: {{path: base, {lora}}}\ndata: {{train: rows.jsonl}}\n", 2e-4),
        ("reward", f"model: {{{lora}}}\ndata: {{train: pairs.jsonl}}\n", 1e-4),
        (
            "ppo",
            f"models: {{{lora}}}\ndata: {{prompts: a}}\nppo: {{total_episodes: 8, response_length: 8}}\n",
            3e-5,
        ),
    ):
        (tmp_path / f"{stage}.yaml").write_text(text, encoding="utf-8")
        found = config.load(stage, tmp_path / f"{stage}.yaml")
        assert getattr(found, stage).learning_rate == rate
        assert rate == pytest.approx(10 * config.keys(stage)[f"{stage}.learning_rate"].default(None))
