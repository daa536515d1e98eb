"""`rewards` of ppo.yaml: what a source of reward is, and which options go with which kind."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.base import ModelPath, Name, Section

ENSEMBLE = "[`pytest tests/test_rewards.py`]"
ONE_KIND = "[`pytest tests/test_config_lines.py::test_a_bad_source_of_reward`]"
REMOTE = "[`pytest tests/test_rewards_url.py`]"
KINDS = ("model", "models", "function", "builtin", "url", "pipeline")
# The options of some kinds of source alone.
OPTIONS = {
    "combine": ("models",),
    "std_coef": ("models",),
    "parameters": ("builtin",),
    "timeout": ("url",),
    "retries": ("url",),
    "headers": ("url",),
    "label": ("pipeline",),
    "number": ("pipeline",),
    "reads": ("pipeline",),
    "batch_size": ("url", "pipeline"),
}
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _env_name(name: str) -> str:
    if not ENV_NAME.fullmatch(name):  # not shown: it may be the secret itself
        raise PydanticCustomError(
            "C16",
            "this is no name of an environment variable",
            {"hint": "put the value into the environment, and the variable's name here"},
        )
    return name


EnvName = Annotated[str, AfterValidator(_env_name)]


class RewardSource(Section):
    """One source of reward; the key that is set of model, models, function, builtin, url and pipeline is its kind."""

    model: ModelPath | None = Field(
        None,
        description=(
            "A reward model: a folder or a hub id. One of another tokenizer or chat template than the policy's reads "
            f"its text, encoded anew. {ONE_KIND}"
        ),
    )
    models: dict[Name, ModelPath] = Field(
        default_factory=dict,
        description=f"An ensemble: reward models by name, whose scores `combine` makes one of. {ENSEMBLE}",
    )
    function: str | None = Field(
        None,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description=(
            "A Python function module:function of two lists, prompts and responses, that gives one number for each "
            f"response; it may be async. {ONE_KIND}"
        ),
    )
    builtin: str | None = Field(
        None,
        description=(
            f"A ready function: length, regex, keyword or repetition; docs/rewards.md has their parameters. {ONE_KIND}"
        ),
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="The parameters of `builtin`, by name. [`pytest tests/test_rewards_builtin.py`]",
    )
    url: str | None = Field(
        None,
        pattern=r"^https?://[^\s/@?#]+(/[^\s@#]*)?$",
        description=(
            'An HTTP endpoint: it is sent {"prompts": [...], "responses": [...]} and answers {"scores": [...]}. '
            f"{ONE_KIND}"
        ),
    )
    timeout: float = Field(60.0, gt=0, description=f"Seconds that `url` may take for an answer. {REMOTE}")
    retries: int = Field(
        3,
        ge=0,
        le=20,
        description=(
            "How often `url` is asked again where it cannot be reached, is too slow, or answers 429 or 5xx; after 1 "
            f"second, then 2, 4 and so on, 30 at most. {REMOTE}"
        ),
    )
    headers: dict[str, EnvName] = Field(
        default_factory=dict,
        description=(
            "HTTP headers for `url`, each with the NAME of the environment variable that holds its value, e.g. "
            f"{{Authorization: REWARD_AUTHORIZATION}}; a config holds no secrets. {REMOTE}"
        ),
    )
    pipeline: ModelPath | None = Field(
        None,
        description=(
            f"A text classifier: a folder or a hub id, read by transformers' text-classification pipeline. {ONE_KIND}"
        ),
    )
    label: str | None = Field(
        None,
        description=(
            "The label of `pipeline` whose number is the reward; none: the only one that the model has. "
            "[`pytest tests/test_rewards_pipeline.py`]"
        ),
    )
    number: Literal["logit", "probability"] = Field(
        "logit",
        description=(
            "Which number of `pipeline` is taken. A probability has next to no slope where the classifier is sure. "
            "[TRL 0.11, examples/notebooks/gpt2-sentiment.ipynb]"
        ),
    )
    reads: Literal["response", "both"] = Field(
        "response",
        description=(
            "What `pipeline` reads: the response, or the prompt and the response as one text. "
            "[`pytest tests/test_rewards_pipeline.py`]"
        ),
    )
    batch_size: int = Field(64, gt=0, description=f"Rows that `url` or `pipeline` gets at once. {REMOTE}")
    combine: Literal["mean", "min", "mean_minus_std"] = Field(
        "mean",
        description=(
            "How an ensemble's scores become one: their mean, the least, or the mean less std_coef times their "
            "standard deviation (Coste et al. 2023, arXiv 2310.02743, with the variance). The deviation is logged as "
            f"objective/disagreement/NAME. {ENSEMBLE}"
        ),
    )
    std_coef: float = Field(
        1.0, ge=0, description=f"Weight of the disagreement with combine: mean_minus_std. {ENSEMBLE}"
    )
    clip: float | None = Field(
        None, gt=0, description=f"This source's raw score is clipped to -clip .. clip before it is weighted. {ENSEMBLE}"
    )
    weight: float = Field(
        1.0,
        description=(
            "Factor of this source in the sum. 0 makes it a held-out judge: scored, logged, and watched by "
            "ppo.watchdog, but not optimised; the first of them says which policy is the best. "
            "[`pytest tests/test_config.py::test_rewards_default_to_the_reward_model`]"
        ),
    )

    @property
    def kind(self) -> str:
        """The key that says what the source is."""
        return next(kind for kind in KINDS if getattr(self, kind))

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(bool(getattr(self, kind)) for kind in KINDS) != 1:
            raise PydanticCustomError(
                "C17",
                "give one of {kinds}",
                {
                    "kinds": f"{', '.join(KINDS[:-1])} and {KINDS[-1]}",
                    "hint": "the name `reward` alone means the reward model",
                },
            )
        if len(self.models) == 1:
            raise PydanticCustomError("C17", "an ensemble needs two models", {"hint": "write model: for a single one"})
        if self.clip is not None and self.weight == 0:
            text = "clip has no effect on a source of weight 0"
            raise PydanticCustomError("C17", text, {"hint": "take it out", "key": "clip"})
        for key, kinds in OPTIONS.items():
            needs = "combine: mean_minus_std" if key == "std_coef" else " or ".join(kinds)
            used = self.kind in kinds and (key != "std_coef" or self.combine == "mean_minus_std")
            if not used and getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                text = f"{key} has no effect without {needs}"
                raise PydanticCustomError("C17", "{text}", {"text": text, "hint": "take it out", "key": key})
        return self
