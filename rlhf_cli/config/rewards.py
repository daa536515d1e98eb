"""`rewards` of ppo.yaml: kinds of reward sources and their options."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.base import ModelPath, Name, Section

PAGE = "[docs/rewards.md]"
KINDS = ("model", "models", "function", "builtin", "url", "pipeline")
# Options that only some kinds of source accept.
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
            "not the name of an environment variable",
            {"hint": "set the value in the environment, and write the variable's name here"},
        )
    return name


EnvName = Annotated[str, AfterValidator(_env_name)]


class RewardSource(Section):
    """Reward source. Its kind is the one key set among model, models, function, builtin, url and pipeline."""

    model: ModelPath | None = Field(
        None,
        description=(
            "Reward model: a folder or an id on the Hugging Face Hub. If its tokenizer or chat template differs from "
            f"the policy's, responses are decoded and encoded again for it. {PAGE}"
        ),
    )
    models: dict[Name, ModelPath] = Field(
        default_factory=dict,
        description=f"Ensemble: reward models by name, whose scores `combine` reduces to one. {PAGE}",
    )
    function: str | None = Field(
        None,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description=(
            "Python function module:function. It takes two lists, prompts and responses, and returns one number per "
            f"response; it may be async. {PAGE}"
        ),
    )
    builtin: str | None = Field(
        None,
        description=(
            "Built-in reward function: length, regex, keyword or repetition. docs/rewards.md lists their parameters. "
            f"{PAGE}"
        ),
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description=f"Parameters of `builtin` by name. Default: those of the function. {PAGE}",
    )
    url: str | None = Field(
        None,
        pattern=r"^https?://[^\s/@?#]+(/[^\s@#]*)?$",
        description=(
            'URL of an HTTP endpoint that receives {"prompts": [...], "responses": [...]} and returns {"scores": '
            f"[...]}}. {PAGE}"
        ),
    )
    timeout: float = Field(
        60.0,
        gt=0,
        description=(
            "Timeout of a request to `url`, in seconds. Higher values tolerate a slow endpoint and notice a dead one "
            f"later. {PAGE}"
        ),
    )
    retries: int = Field(
        3,
        ge=0,
        le=20,
        description=(
            "Number of retries if `url` cannot be reached, times out, or returns status 429 or 5xx. The waits are 1, "
            f"2, 4, ... seconds, at most 30. {PAGE}"
        ),
    )
    headers: dict[str, EnvName] = Field(
        default_factory=dict,
        description=(
            "HTTP headers for `url`. The value of each is the NAME of an environment variable, for example "
            f"{{Authorization: REWARD_AUTHORIZATION}}; a config must not contain secrets. {PAGE}"
        ),
    )
    pipeline: ModelPath | None = Field(
        None,
        description=(
            "Text classifier: a folder or an id on the Hugging Face Hub, run by the text-classification pipeline of "
            f"transformers. {PAGE}"
        ),
    )
    label: str | None = Field(
        None,
        description=(
            "Label of `pipeline` whose output is the reward. Required if the model has several. Default: its only "
            f"label. {PAGE}"
        ),
    )
    number: Literal["logit", "probability"] = Field(
        "logit",
        description=(
            "Output of `pipeline` that is used as the reward: logit or probability. A probability saturates if the "
            "classifier is certain, so its differences vanish. [TRL 0.11, examples/notebooks/gpt2-sentiment.ipynb]"
        ),
    )
    reads: Literal["response", "both"] = Field(
        "response",
        description=f"Input of `pipeline`: the response, or prompt and response joined (both). {PAGE}",
    )
    batch_size: int = Field(
        64,
        gt=0,
        description=(
            "Number of rows per request to `url` or per batch of `pipeline`. Higher values are faster and need more "
            f"memory. {PAGE}"
        ),
    )
    combine: Literal["mean", "min", "mean_minus_std"] = Field(
        "mean",
        description=(
            "Reduction of the ensemble's scores: mean, min, or mean_minus_std, the mean minus std_coef times the "
            "standard deviation (Coste et al. 2023, arXiv 2310.02743, uses the variance). The standard deviation is "
            f"logged as objective/disagreement/NAME. {PAGE}"
        ),
    )
    std_coef: float = Field(
        1.0,
        ge=0,
        description=(
            "Coefficient of the standard deviation for combine: mean_minus_std. Higher values punish disagreement "
            f"more. {PAGE}"
        ),
    )
    clip: float | None = Field(
        None,
        gt=0,
        description=(
            "Limit of this source's raw score: clipped to -clip .. clip before weighting. Lower values limit the "
            f"effect of outliers. Default: no clipping. {PAGE}"
        ),
    )
    weight: float = Field(
        1.0,
        description=(
            "Weight of this source in the sum. 0 makes it a held-out judge: scored, logged and watched by "
            f"ppo.watchdog, but not optimised; the first held-out judge selects the best policy. {PAGE}"
        ),
    )

    @property
    def kind(self) -> str:
        """Return the key that sets the kind of the source."""
        return next(kind for kind in KINDS if getattr(self, kind))

    @model_validator(mode="after")
    def _check_kind_and_options(self) -> Self:
        if sum(bool(getattr(self, kind)) for kind in KINDS) != 1:
            raise PydanticCustomError(
                "C17",
                "set exactly one of {kinds}",
                {
                    "kinds": f"{', '.join(KINDS[:-1])} and {KINDS[-1]}",
                    "hint": "a source named `reward` without a kind is the reward model",
                },
            )
        if len(self.models) == 1:
            raise PydanticCustomError(
                "C17", "an ensemble needs at least two models", {"hint": "use model for a single one"}
            )
        if self.clip is not None and self.weight == 0:
            text = "clip has no effect on a source of weight 0"
            raise PydanticCustomError("C17", text, {"hint": "remove it", "key": "clip"})
        for key, kinds in OPTIONS.items():
            needs = "combine: mean_minus_std" if key == "std_coef" else " or ".join(kinds)
            used = self.kind in kinds and (key != "std_coef" or self.combine == "mean_minus_std")
            if not used and getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                text = f"{key} has no effect without {needs}"
                raise PydanticCustomError("C17", "{text}", {"text": text, "hint": "remove it", "key": key})
        return self
