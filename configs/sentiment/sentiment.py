"""The reward of this recipe: how positive a review reads, by a classifier trained on labelled ones."""

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

CLASSIFIER = "lvwerra/distilbert-imdb"  # if only as a pickle, transformers reads it without running code (weights_only)
LABEL = "POSITIVE"


def score(prompts: list[str], responses: list[str]) -> list[float]:
    """The classifier's logit of LABEL for each prompt with its response.

    The logit, not the probability: a probability has next to no slope where the classifier is sure.
    """
    tokenizer, model = classifier()
    texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt").to(model.device)
    with torch.no_grad():
        logits = model(**batch).logits
    return logits[:, model.config.label2id[LABEL]].tolist()


@cache
def classifier() -> tuple[Any, Any]:
    model = AutoModelForSequenceClassification.from_pretrained(CLASSIFIER)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoTokenizer.from_pretrained(CLASSIFIER), model.to(device).eval()


if __name__ == "__main__":
    print(score(["this movie was really "] * 2, ["bad!!", "good!!"]))
