"""report.json as an object: what is written is what was read, in the order of the file."""

import json
from pathlib import Path

import pytest
from report_run import CARD, report, with_limit, with_policies

from rlhf_cli.errors import RLHFError
from rlhf_cli.runs.report import Report, RewardModelCard, read_report, reward_model_result

METRICS = {"accuracy": 0.75, "accuracy_ci95": [0.69, 0.80]}


@pytest.mark.parametrize("contents", [report(), with_policies(), with_limit(with_policies())])
def test_a_report_is_written_as_it_was_read(contents: dict) -> None:
    contents |= {"reward_model": {**CARD, "ci95": CARD["accuracy_ci95"]}, "by_a_newer_version": {"x": [1]}}
    del contents["reward_model"]["accuracy_ci95"]
    assert Report.model_validate(contents).to_json() == contents


def test_the_card_begins_with_its_headline_and_ends_with_the_interval() -> None:
    card = reward_model_result(RewardModelCard.model_validate(CARD), METRICS)
    assert isinstance(card, RewardModelCard)
    written = Report.model_validate(report()).with_changes(reward_model=card).to_json()["reward_model"]
    keys = ["accuracy", "n", "margin", "ece", "length_correlation", "length_correlation_ci95"]
    assert list(written)[: len(keys)] == keys and list(written)[-1] == "ci95"
    assert list(card.to_json()) == list(CARD), "in the manifest the card has its own order"


def test_an_accuracy_alone_is_no_card() -> None:
    result = reward_model_result(None, METRICS)
    assert result and not isinstance(result, RewardModelCard) and result.headline() == METRICS
    assert reward_model_result(None, {}) is None


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"n": "256"}, "n: input should be a valid integer"),
        ({"frontier": [{"step": 5}]}, "frontier.0.kl: field required"),
        ({"reward_model": {**CARD, "ece": None}}, "reward_model.card.ece: input should be a valid number"),
    ],
)
def test_a_damaged_value_is_named_by_its_key(tmp_path: Path, change: dict, place: str) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report() | change))
    with pytest.raises(RLHFError) as caught:
        read_report(tmp_path)
    assert caught.value.problems[0].text.endswith(f"is damaged: report.json: {place}")
