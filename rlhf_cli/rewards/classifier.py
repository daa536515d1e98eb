"""`pipeline:`: the score of one label, by transformers' text-classification pipeline."""

from dataclasses import dataclass

from transformers import TextClassificationPipeline

from rlhf_cli.config.ppo import RewardSourceSettings
from rlhf_cli.errors import RLHFError, at_location, did_you_mean, shown
from rlhf_cli.models import devices, load, tokenizers
from rlhf_cli.rewards.function import RewardContext
from rlhf_cli.rewards.signature import RewardFn

# Function the pipeline applies to the logits; None: the one in the model's config, softmax or sigmoid.
FUNCTION_TO_APPLY = {"logit": "none", "probability": None}


@dataclass(frozen=True)
class ClassifierReward:
    """A reward function: the score of `label` for the response, or for the prompt and the response as one text.

    Text beyond the model's context is truncated at its end.
    """

    pipeline: TextClassificationPipeline
    label: str
    output: str = "logit"
    input: str = "response"
    batch_size: int = 64
    context: int | None = None  # tokens

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        texts = responses
        if self.input == "both":
            texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        rows = self.pipeline(
            texts,
            truncation=self.context is not None,
            max_length=self.context,
            padding=True,
            top_k=None,
            function_to_apply=FUNCTION_TO_APPLY[self.output],
            batch_size=self.batch_size,
        )
        scores = [{entry["label"]: entry["score"] for entry in row} for row in rows]
        return [by_label[self.label] for by_label in scores]


def make(section: RewardSourceSettings, context: RewardContext) -> RewardFn:
    """Load the classifier of `pipeline:`. Raises RLHFError C07 for an unknown label, M01, M02, M06-M08."""
    assert context.model is not None, "the caller gives the model's folder"
    trust = context.trust_remote_code
    with at_location(context.where("pipeline")):
        config = load.read_classifier_config(context.model, trust)
    label = _resolve_label(section.label, [str(name) for name in config.id2label.values()], context)
    if not context.load:  # only to validate the section
        return lambda prompts, responses: []

    with at_location(context.where("pipeline")):
        tokenizer = tokenizers.load_tokenizer(context.model, trust_remote_code=trust)
        model = load.load_classifier(context.model, trust_remote_code=trust)
        tokenizers.check_vocabulary(model, tokenizer, guarded=False)
    tokenizer.padding_side = "right"  # encoders count positions from the left
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.eos_token_id
    longest = load.context_length(model.config)
    for name, module in model.named_modules():  # RoBERTa counts positions from after the padding's
        if longest and name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            longest -= module.padding_idx + 1
    pipeline = TextClassificationPipeline(model=model.eval(), tokenizer=tokenizer, device=devices.device())
    return ClassifierReward(pipeline, label, section.output, section.input, section.batch_size, longest)


def _resolve_label(label: str | None, known: list[str], context: RewardContext) -> str:
    assert context.model is not None
    if label is None and len(known) == 1:
        return known[0]
    if label in known:
        return label
    problem = "label is missing"
    hint = None
    if label is not None:
        problem = f'label: "{label}" is not one of the model'
        hint = did_you_mean(label, known)
    text = f"{problem}; {shown(context.model)} has {len(known)}"
    raise RLHFError("C07", text, where=context.where("label"), hint=hint or f"there are {', '.join(known)}")
