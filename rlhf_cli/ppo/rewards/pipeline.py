"""`pipeline:`: one label's number of a text classifier, by transformers' text-classification pipeline."""

from dataclasses import dataclass
from typing import Any

from transformers import TextClassificationPipeline

from rlhf_cli.errors import RLHFError, nearest, placed, shown
from rlhf_cli.models import devices, load, tokenizers
from rlhf_cli.ppo.rewards.source import Place, TextReward

# What the pipeline does to the logits; None: what the model's config asks for, softmax or sigmoid.
APPLIED = {"logit": "none", "probability": None}


@dataclass(frozen=True)
class Classifier:
    """A text reward: the number of `label` that a classifier gives the response, or the prompt and the response.

    What is longer than the model's context is cut off at its end.
    """

    pipeline: TextClassificationPipeline
    label: str
    number: str = "logit"
    reads: str = "response"
    batch_size: int = 64

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        texts = [
            prompt + response if self.reads == "both" else response
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        how: dict[str, Any] = {"function_to_apply": APPLIED[self.number], "top_k": None, "batch_size": self.batch_size}
        context = load.context_length(self.pipeline.model.config)
        found = self.pipeline(texts, truncation=context is not None, max_length=context, padding=True, **how)
        return [next(one["score"] for one in row if one["label"] == self.label) for row in found]


def make(section: Any, place: Place) -> TextReward:
    """The classifier of `pipeline:`. Raises RLHFError C07 for a label it does not have, M01, M02, M06-M08."""
    assert place.model is not None, "the caller gives the model's folder"
    trust = place.trust_remote_code
    with placed(place.where("pipeline")):
        config = load.read_classifier_config(place.model, trust)
    label = _label(section.label, [str(name) for name in config.id2label.values()], place)
    if not place.load:
        return _not_loaded
    with placed(place.where("pipeline")):
        tokenizer = tokenizers.load_tokenizer(place.model, trust_remote_code=trust)
        model = load.load_classifier(place.model, trust_remote_code=trust)
        tokenizers.check_vocabulary(model, tokenizer)
    tokenizer.padding_side = "right"  # where an encoder counts positions from
    pipeline = TextClassificationPipeline(model=model.eval(), tokenizer=tokenizer, device=devices.device())
    return Classifier(pipeline, label, section.number, section.reads, section.batch_size)


def _not_loaded(prompts: list[str], responses: list[str]) -> list[float]:
    raise AssertionError("made to be looked at, not to be asked")


def _label(label: str | None, known: list[str], place: Place) -> str:
    assert place.model is not None
    if label is None and len(known) == 1:
        return known[0]
    if label not in known:
        what = "label is missing" if label is None else f'label: "{label}" is not one of the model'
        near = label and nearest(label, known)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
        text = f"{what}; {shown(place.model)} has {len(known)}"
        raise RLHFError("C07", text, where=place.where("label"), hint=hint)
    return label
