"""Verifier `exact_match`: the response is the answer."""

import unicodedata

from rlhf_cli.rewards.answers import Column, by_column, extraction, texts
from rlhf_cli.rewards.signature import RewardFn

END = ".,;:!? "
QUOTES = "\"'` \u2018\u2019\u201c\u201d"


def exact_match(*, column: Column = "answer", extract: str | None = None, ignore_case: bool = True) -> RewardFn:
    """Return 1 if the response, or what `extract` finds in it, is the answer in the column or one of its list; else 0.

    Compared after `normalised`.
    """
    find = extraction(extract)

    def score(response: str, value: object) -> float:
        found = find(response)
        answers = {normalised(text, ignore_case) for text in texts(value)}
        return float(found is not None and normalised(found, ignore_case) in answers)

    return by_column(column, score)


def normalised(text: str, ignore_case: bool) -> str:
    """Return the text in Unicode's form NFKC and single spaces, without quotes around it or punctuation at its end."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    text = text.rstrip(END).strip(QUOTES).rstrip(END) or text  # "!" stays "!"
    return text.casefold() if ignore_case else text
