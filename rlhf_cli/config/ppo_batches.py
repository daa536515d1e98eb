"""Options of the rollouts: number of episodes, batch sizes and sampling."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.config.base import TLDR, TRL, TRL_STEP, Range, Settings

BENCHMARK = "[docs/scaling.md]"


class LengthRange(Range):
    """Response length, sampled uniformly from min..max (inclusive) for each update."""

    min: int = Field(ge=1, description="Minimum length limit in tokens.")
    max: int = Field(ge=1, description="Maximum length limit in tokens.")


class OverlongPenalty(Settings):
    """Penalty -factor x max(0, length - (limit - tokens)) / tokens, which grows over the last `tokens`."""

    tokens: int = Field(ge=1, description="Number of tokens before the length limit over which the penalty grows.")
    factor: float = Field(gt=0, description="Penalty at the length limit.")


class RolloutSettings(Settings):
    """Episodes of a run and of an update, and sampling."""

    total_episodes: int | None = Field(
        None,
        ge=1,
        description=(
            "Number of episodes (= responses) of the run. Set either this or num_train_epochs. More episodes give "
            "more updates: time, reward and KL grow with them, and too many raise the reward while answers get worse. "
            f"{TRL}"
        ),
    )
    num_train_epochs: float | None = Field(
        None,
        gt=0,
        description=(
            "Number of passes over the prompts. Set either this or total_episodes. [TRL 1.12, "
            "trl/experimental/ppo/ppo_config.py; 3 there, which total_episodes replaces]"
        ),
    )
    per_device_train_batch_size: int = Field(
        16,
        ge=1,
        description=(
            "Maximum rows per micro-batch. With packing, the token budget is this number times the longest row. Times "
            "gradient_accumulation_steps it is the number of episodes per update (16 x 4 = 64 there and here). Lower "
            f"values need less memory. {TLDR}"
        ),
    )
    gradient_accumulation_steps: int = Field(
        4,
        ge=1,
        description=(
            "Number of full micro-batches per update; times per_device_train_batch_size it is the number of episodes "
            f"per update. Higher values give larger, steadier updates and fewer of them. {TLDR}"
        ),
    )
    num_mini_batches: int = Field(
        1,
        ge=1,
        description=(
            "Number of minibatches per epoch; each makes one optimizer step. Higher values take more, noisier steps "
            f"per update. {TRL}"
        ),
    )
    num_ppo_epochs: int = Field(
        4,
        ge=1,
        description=(
            "Number of passes over the episodes of an update. More passes learn more from each episode and take "
            f"proportionally longer; later ones are clipped more, and the KL may jump. {TRL}"
        ),
    )
    num_samples_per_prompt: int = Field(
        1,
        ge=1,
        description=(
            "Number of responses per prompt in an update. Higher values use fewer distinct prompts per update. "
            "[OpenRLHF 021d1b09, openrlhf/cli/train_ppo_ray.py]"
        ),
    )
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description=(
            "Maximum tokens per forward pass of scoring and update, counting padding, in addition to the limit of "
            "per_device_train_batch_size. Lower values need less memory. auto: 640 on a CPU, no limit on a GPU. "
            f"{BENCHMARK}"
        ),
    )
    packing: bool = Field(
        True,
        description=(
            "Pack the rows of a forward pass of scoring and update into one sequence, so that nothing is computed for "
            f"padding. Models whose attention is not sdpa are padded instead, with a message. {BENCHMARK}"
        ),
    )
    logits_at_a_time: Annotated[int, Field(ge=1)] | Literal["auto", "all"] = Field(
        "auto",
        description=(
            "Number of response tokens whose logits are in memory at a time during scoring and update. Lower values "
            "need less memory. auto: at most 1 million logits on a CPU and 134 million on a GPU, but at least 64 "
            "tokens. all: a whole micro-batch, with the gradients of embedding and head computed by autograd and not "
            f"in place. {BENCHMARK}"
        ),
    )
    local_rollout_forward_batch_size: int | None = Field(
        None,
        ge=1,
        description=(
            "Number of rows that are generated together, and scored together by reward models. Lower values need less "
            "memory and take longer. Default: all rows of an update are generated together, and scored "
            f"per_device_train_batch_size at a time. {BENCHMARK}"
        ),
    )
    num_sample_generations: int = Field(
        10,
        ge=0,
        description=f"Number of sample tables (prompts, responses, scores) shown during training; 0 shows none. {TRL}",
    )
    generate_ref_response: bool = Field(
        False,
        description=f"Add a response of the reference model and its score to each row of those tables. {TRL_STEP}",
    )

    push_to_hub_if_best: str | None = Field(
        None,
        pattern=r"^[\w.-]+/[\w.-]+$",
        description=(
            "Repository OWNER/NAME on the Hugging Face Hub that receives the policy whenever it is the best so far, "
            "by score minus KL penalty or by a held-out judge. A new repository is private. Default: nothing is "
            f"uploaded. {TRL_STEP}"
        ),
    )

    response_length: Annotated[int, Field(ge=1)] | LengthRange = Field(
        53,
        description=(
            "Maximum length of a response in tokens, or {min, max} to sample the limit anew for each update. Higher "
            "values take more time and memory; with lower ones responses are cut off and get missing_eos_penalty. "
            f"{TRL}"
        ),
    )
    temperature: float = Field(
        0.7,
        gt=0,
        description=(
            "Sampling temperature, also used for log-probs. Higher values explore more but produce more bad "
            f"responses; lower values reduce exploration. {TRL}"
        ),
    )
    stop_token: Literal["eos", "none"] = Field(
        "eos",
        description=(
            "Stop token of responses. eos: the stop token of the SFT checkpoint; none: responses always have the full "
            "length. [Huang et al. 2024, arXiv 2403.17031, section 7]"
        ),
    )
    stop_token_id: int | None = Field(
        None,
        ge=0,
        description=f"Id of the stop token; replaces stop_token. Default: the id of the SFT checkpoint. {TRL}",
    )
    missing_eos_penalty: float | None = Field(
        1.0,
        ge=0,
        description=(
            "Penalty subtracted from the score of a response that reaches the length limit without the stop token. "
            "Higher values make responses end sooner; null turns it off. [TRL 1.12, examples/scripts/ppo/ppo_tldr.py; "
            "none in its PPOConfig]"
        ),
    )
    overlong_penalty: OverlongPenalty | None = Field(
        None,
        description=(
            "Penalty {tokens: n, factor: f} that grows before the length limit: -f * max(0, length - (response_length "
            "- n)) / n is added to the score (Yu et al. 2025, arXiv 2503.14476, equation 13). Default: off. [OpenRLHF "
            "021d1b09, openrlhf/cli/train_ppo_ray.py]"
        ),
    )

    @model_validator(mode="after")
    def _check_stop_token(self) -> Self:
        if self.stop_token == "none" and self.stop_token_id is not None:
            text = "stop_token none and stop_token_id cannot be combined"
            raise PydanticCustomError("C17", text, {"hint": "remove one of them"})
        return self

    @model_validator(mode="after")
    def _check_overlong_penalty(self) -> Self:
        limit = self.response_length.min if isinstance(self.response_length, LengthRange) else self.response_length
        if self.overlong_penalty and self.overlong_penalty.tokens > limit:
            text = f"overlong_penalty.tokens {self.overlong_penalty.tokens} is more than response_length {limit}"
            raise PydanticCustomError("C06", "{text}", {"text": text, "hint": f"at most {limit}"})
        return self

    @model_validator(mode="after")
    def _check_divisibility(self) -> Self:
        batch = self.episodes_per_update
        for key in ("num_mini_batches", "num_samples_per_prompt"):
            parts = getattr(self, key)
            if batch % parts:
                divisors = [divisor for divisor in range(1, batch + 1) if batch % divisor == 0]
                near = sorted(sorted(divisors, key=lambda divisor: abs(divisor - parts))[:2])
                sizes = f"{self.per_device_train_batch_size} x {self.gradient_accumulation_steps}"
                text = f"{sizes} = {batch} episodes per update cannot be divided by {key} {parts}"
                hint = f"nearest values that fit: {' or '.join(map(str, near))}"
                raise PydanticCustomError("C12", "{text}", {"text": text, "hint": hint, "key": key})
        return self

    @property
    def episodes_per_update(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def prompts_per_update(self) -> int:
        return self.episodes_per_update // self.num_samples_per_prompt

    @property
    def max_response_length(self) -> int:
        return self.response_length.max if isinstance(self.response_length, LengthRange) else self.response_length
