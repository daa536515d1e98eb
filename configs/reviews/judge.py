"""A judge of another kind than the reward model: TF-IDF over words and pairs of words, and logistic regression.

It learns from data/judge, sentences that no model of this run has ever seen. `python judge.py` prints its accuracy.
"""

from functools import cache
from pathlib import Path

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from rlhf_cli.jsonl import read_jsonl

DATA = Path(__file__).parent / "data"


def score(prompts: list[str], responses: list[str]) -> list[float]:
    """How likely each sentence, prompt and response together, stands in a good review: 0 to 1."""
    sentences = [prompt.removeprefix("review:") + response for prompt, response in zip(prompts, responses, strict=True)]
    return trained().predict_proba(sentences)[:, 1].tolist()


@cache
def trained() -> Pipeline:
    texts, labels = labelled("judge")
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    return make_pipeline(words, LogisticRegression(C=4, max_iter=1000)).fit(texts, labels)


def labelled(part: str) -> tuple[list[str], list[bool]]:
    rows = [row for _, row in read_jsonl(DATA / part / "labelled.jsonl")]
    return [row["text"] for row in rows], [row["good"] for row in rows]


if __name__ == "__main__":
    for part in ("judge", "held-out"):
        print(f"{part:<9} accuracy {trained().score(*labelled(part)):.3f}")
