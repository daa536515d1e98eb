"""Labels of people as a judge: how often they prefer the answers of one model to those of another."""

from collections.abc import Sequence

from rlhf_cli.data.labels import PREFERENCES, Label
from rlhf_cli.evaluation.comparison import win_rate
from rlhf_cli.evaluation.pairwise import with_agreement, with_first_slot
from rlhf_cli.evaluation.responses import EvalResponses
from rlhf_cli.runs.report import WinRate


def comparing_labels(labels: Sequence[Label], models: Sequence[str]) -> list[Label]:
    """Return the labels, other than skipped ones, of pairs with an answer of each of two models."""
    return [label for label in labels if label.choice != "skip" and sorted(label.sources) == sorted(models)]


def labelled_responses(labels: Sequence[Label], model: str, judge: str) -> EvalResponses:
    """Return the labelled answers of a model; 1 for a better one, 0 for a worse one, 0.5 for a tie or a bad pair.

    Prompts are their rows, as the labels name them: two labels of one prompt depend on one another.
    """
    places = [label.sources.index(model) for label in labels]
    answers = [label.answers[place] for label, place in zip(labels, places, strict=True)]
    points = []
    for label, place in zip(labels, places, strict=True):
        is_decided = label.choice in PREFERENCES
        points.append(float(PREFERENCES.index(label.choice) == place) if is_decided else 0.5)
    return EvalResponses(
        model=model,
        mode="sampled",
        prompts=[label.prompt_name for label in labels],
        responses=answers,
        ended=[label.ended[place] for label, place in zip(labels, places, strict=True)],
        lengths=[len(answer) for answer in answers],
        scores={judge: points},
        kl=None,
    )


def people_win_rate(judge: str, labels: Sequence[Label], policy: EvalResponses, baseline: EvalResponses) -> WinRate:
    """Return the win rate of `policy` by labels; with scores of other judges, how far these agree with the labels."""
    rate = win_rate(judge, policy, baseline).with_changes(difference=None, difference_ci95=None)  # of no scores
    rate = with_agreement(rate, judge, policy, baseline)

    decided = [label for label in labels if label.choice in PREFERENCES]
    first_wins = [float(label.prefers_shown_first) for label in decided]
    return with_first_slot(rate, first_wins, [label.prompt_name for label in decided])
