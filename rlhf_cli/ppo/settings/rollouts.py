"""How many episodes, and how their responses are made."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhf_cli.ppo.settings.base import TLDR, TRL, TRL_STEP, Range, Settings

BENCHMARK = "[`python benchmarks/ppo_update.py`]"


class LengthRange(Range):
    """A response length drawn anew for each update, uniform over min..max, both included."""

    min: int = Field(ge=1, description="Shortest length in tokens.")
    max: int = Field(ge=1, description="Longest length in tokens.")


class OverlongPenalty(Settings):
    """-factor x max(0, length - (limit - tokens)) / tokens: it grows over the last `tokens` before the limit."""

    tokens: int = Field(ge=1, description="Tokens before the length limit over which the penalty grows.")
    factor: float = Field(gt=0, description="The penalty at the limit.")


class RolloutSettings(Settings):
    """Episodes of a run and of an update; the rules of sampling."""

    total_episodes: int | None = Field(
        None,
        ge=1,
        description=(
            "Episodes (= responses) in all. Give this or num_train_epochs. More are more updates: time, reward and KL "
            f"grow with them; of too many the reward rises while answers get worse. {TRL}"
        ),
    )
    num_train_epochs: float | None = Field(
        None,
        gt=0,
        description=f"Passes over the prompts. Give this or total_episodes. {TRL[:-1]}; 3 there, and overruled]",
    )
    per_device_train_batch_size: int = Field(
        16,
        ge=1,
        description=(
            "Rows of a micro-batch at most; packed ones: as many as have no more tokens than so many of the longest. "
            f"Times gradient_accumulation_steps = episodes of an update (16 x 4 = 64 there and here). {TLDR}"
        ),
    )
    gradient_accumulation_steps: int = Field(
        4, ge=1, description=f"Micro-batches of full size that make up an update's episodes. {TLDR}"
    )
    num_mini_batches: int = Field(1, ge=1, description=f"Minibatches of an epoch; each makes one optimizer step. {TRL}")
    num_ppo_epochs: int = Field(
        4,
        ge=1,
        description=(
            "Passes over an update's episodes. More make more of each episode and take as much longer; the later ones "
            f"are clipped more, and KL may jump. {TRL}"
        ),
    )
    num_samples_per_prompt: int = Field(
        1,
        ge=1,
        description="Responses to each prompt of an update. [OpenRLHF 021d1b09, openrlhf/cli/train_ppo_ray.py]",
    )
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description=(
            "Most tokens (of padded rows with their padding) that one forward pass of judge or update holds, besides "
            "what per_device_train_batch_size allows; auto: 640 on a CPU, on a GPU no other bound. "
            f"{BENCHMARK}"
        ),
    )
    packing: bool = Field(
        True,
        description=(
            "Lay the rows of a forward pass of judge or update end to end, so that nothing is computed for padding; "
            f"models whose attention is not sdpa are padded all the same, which is said. {BENCHMARK}"
        ),
    )
    logits_at_a_time: Annotated[int, Field(ge=1)] | Literal["auto", "all"] = Field(
        "auto",
        description=(
            "Response tokens whose logits judge and update hold at a time; auto: as many as make 1 million logits on a "
            "CPU, 134 million on a GPU, at least 64; all: those of a whole micro-batch, and the gradients of embedding "
            f"and head are autograd's, not added in place. {BENCHMARK}"
        ),
    )
    local_rollout_forward_batch_size: int | None = Field(
        None,
        ge=1,
        description=(
            "Rows generated, and scored by reward models, at a time; none: all rows are generated together, and "
            f"per_device_train_batch_size rows scored. {BENCHMARK}"
        ),
    )
    num_sample_generations: int = Field(
        10, ge=0, description=f"Tables of prompts, responses and scores shown during training. {TRL}"
    )
    generate_ref_response: bool = Field(
        False, description=f"Beside each response in those tables, one of the reference with its score. {TRL_STEP}"
    )

    push_to_hub_if_best: str | None = Field(
        None,
        pattern=r"^[\w.-]+/[\w.-]+$",
        description=(
            "Repository OWNER/NAME of the hub that receives the policy whenever score less KL penalty, or a held-out "
            f"judge's score, is at its best; made private where it is new. {TRL_STEP}"
        ),
    )

    response_length: Annotated[int, Field(ge=1)] | LengthRange = Field(
        53,
        description=(
            "Most tokens of a response, or {min, max} to draw the limit anew for each update. More take more time and "
            f"memory; with fewer than answers need they are cut off, and missing_eos_penalty strikes them. {TRL}"
        ),
    )
    temperature: float = Field(
        0.7,
        gt=0,
        description=(
            "Sampling temperature; log-probs use the same one. Higher ones try more different answers, and more bad "
            f"ones; lower ones leave PPO less to choose from. {TRL}"
        ),
    )
    stop_token: Literal["eos", "none"] = Field(
        "eos",
        description=(
            "eos: a response ends with the stop token of the SFT checkpoint; none: it never ends early. "
            "[Huang et al. 2024, arXiv 2403.17031, section 7]"
        ),
    )
    stop_token_id: int | None = Field(
        None, ge=0, description=f"A stop token by its id, in place of stop_token; none: the SFT checkpoint's. {TRL}"
    )
    missing_eos_penalty: float | None = Field(
        1.0,
        ge=0,
        description=(
            "Subtracted from the score of a response that reached its length limit without the stop token. "
            f"{TLDR[:-1]}; none in its PPOConfig]"
        ),
    )
    overlong_penalty: OverlongPenalty | None = Field(
        None,
        description=(
            "{tokens: n, factor: f}: -f * max(0, length - (response_length - n)) / n is added to the score "
            "(Yu et al. 2025, arXiv 2503.14476, equation 13). [OpenRLHF 021d1b09, openrlhf/cli/train_ppo_ray.py]"
        ),
    )

    @model_validator(mode="after")
    def _stops_one_way(self) -> Self:
        if self.stop_token == "none" and self.stop_token_id is not None:
            text = "stop_token none and a stop_token_id contradict each other"
            raise PydanticCustomError("C17", text, {"hint": "take one of them out"})
        return self

    @model_validator(mode="after")
    def _penalty_fits(self) -> Self:
        limit = self.response_length.min if isinstance(self.response_length, LengthRange) else self.response_length
        if self.overlong_penalty and self.overlong_penalty.tokens > limit:
            text = f"overlong_penalty.tokens {self.overlong_penalty.tokens} is more than response_length {limit}"
            raise PydanticCustomError("C06", "{text}", {"text": text, "hint": f"at most {limit}"})
        return self

    @model_validator(mode="after")
    def _divides(self) -> Self:
        batch = self.episodes_per_update
        for key in ("num_mini_batches", "num_samples_per_prompt"):
            parts = getattr(self, key)
            if batch % parts:
                divisors = [divisor for divisor in range(1, batch + 1) if batch % divisor == 0]
                near = sorted(sorted(divisors, key=lambda divisor: abs(divisor - parts))[:2])
                sizes = f"{self.per_device_train_batch_size} x {self.gradient_accumulation_steps}"
                text = f"{sizes} = {batch} episodes an update cannot be divided by {key} {parts}"
                hint = f"nearest that fit: {' or '.join(map(str, near))}"
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
