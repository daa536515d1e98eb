"""RLHF in one file: SFT, a reward model and PPO, in a world of 14 words. `python examples/ppo_loop.py` takes a minute.

This is the plain form of what `rlhf_cli/ppo` does fast, by the same equations; a test compares the numbers of the two.
gae, policy_loss and value_loss are in `rlhf_cli/ppo/losses.py`, make_experience and update in `trainer.py` there.
Each row is computed alone, so there is no padding and no mask. T is the number of tokens of a response.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

# The world: someone has to be greeted, and people prefer a friendly greeting that says the right name.

NAMES = ["anna", "ben", "clara"]
FRIENDLINESS = {"welcome": 2, "hello": 1, "nice": 1, "hey": 0, "you": 0, "again": 0, "oh": -1, "what": -2}
WORDS = ["<end>", "greet", ":", *NAMES, *FRIENDLINESS]
END = WORDS.index("<end>")


def encode(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def decode(ids: list[int]) -> str:
    return " ".join(WORDS[token] for token in ids)


def draw_prompt() -> str:
    return f"greet {random.choice(NAMES)} :"


def draw_answer() -> str:
    words = random.choices([*NAMES, *FRIENDLINESS], k=random.randint(1, 4))
    return " ".join([*words, "<end>"])


def quality(prompt: str, answer: str) -> float:
    """Return what people think of an answer. Only the preference pairs and the last line know it."""
    name, words = prompt.split()[1], set(answer.split())
    names = sum(3 if word == name else -2 for word in words if word in NAMES)
    return names + sum(FRIENDLINESS.get(word, 0) for word in words) - 0.3 * len(answer.split())


# Models


def llama_config() -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(WORDS), "bos_token_id": None, "eos_token_id": END, "pad_token_id": None}
    return LlamaConfig(**sizes, **tokens, num_labels=1, initializer_range=0.1)


@dataclass
class Row:
    """A prompt with a response, as token ids."""

    prompt: list[int]
    response: list[int]

    @property
    def ids(self) -> Tensor:
        return torch.tensor([self.prompt + self.response])


def encode_pair(prompt: str, answer: str) -> Row:
    return Row(encode(prompt), encode(answer))


def response_logprobs(model: LlamaForCausalLM, row: Row, temperature: float) -> Tensor:
    """Return the log-probability of each response token, (T,)."""
    logits = model(row.ids).logits[0, :-1] / temperature  # position t predicts token t + 1
    logprobs = logits.log_softmax(-1).gather(-1, row.ids[0, 1:, None])[:, 0]
    return logprobs[len(row.prompt) - 1 :]


def token_scores(model: LlamaForSequenceClassification, row: Row) -> Tensor:
    """Return the model's score after each token of the prompt and the response, (P + T,)."""
    return model.score(model.base_model(row.ids).last_hidden_state)[0, :, 0]


def response_values(model: LlamaForSequenceClassification, row: Row) -> Tensor:
    """Return the value before each response token, (T,): the score after the token in front of it."""
    return token_scores(model, row)[len(row.prompt) - 1 : -1]


def score(model: LlamaForSequenceClassification, row: Row) -> Tensor:
    """Return the score of a response, a scalar: the one after its last token."""
    return token_scores(model, row)[-1]


# Stage 1: supervised fine-tuning


def train_sft(steps: int) -> LlamaForCausalLM:
    policy = LlamaForCausalLM(llama_config())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)

    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(8):
            row = encode_pair(draw_prompt(), draw_answer())
            logits = policy(row.ids).logits[0, len(row.prompt) - 1 : -1]
            (cross_entropy(logits, torch.tensor(row.response)) / 8).backward()
        optimizer.step()
    return policy


# Stage 2: a reward model of preference pairs (Bradley and Terry 1952; Ouyang et al. 2022, equation 1)


def train_reward_model(steps: int) -> LlamaForSequenceClassification:
    model = LlamaForSequenceClassification(llama_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(8):
            prompt = draw_prompt()
            rejected, chosen = sorted((draw_answer(), draw_answer()), key=lambda answer: quality(prompt, answer))
            margin = score(model, encode_pair(prompt, chosen)) - score(model, encode_pair(prompt, rejected))
            (-logsigmoid(margin) / 8).backward()
        optimizer.step()
    return model


# Stage 3: PPO (Schulman et al. 2017; for language models Ziegler et al. 2019). The settings are named as in ppo.yaml.


@dataclass
class Settings:
    episodes: int = 16  # of an update; in ppo.yaml per_device_train_batch_size x gradient_accumulation_steps
    response_length: int = 8
    temperature: float = 1.0
    missing_eos_penalty: float = 1.0
    kl_coef: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    num_ppo_epochs: int = 4
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    learning_rate: float = 5e-4
    max_grad_norm: float = 1.0


@dataclass
class Experience:
    """What an update trains on, for a row: each tensor (T,)."""

    row: Row
    logprobs: Tensor  # of the policy that generated the response
    ref_logprobs: Tensor
    values: Tensor  # before each response token
    rewards: Tensor
    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def generate(policy: LlamaForCausalLM, prompt: list[int], settings: Settings) -> Row:
    """Sample a response up to its end token."""
    row = Row(prompt, [])
    while len(row.response) < settings.response_length and END not in row.response:
        probabilities = (policy(row.ids).logits[0, -1] / settings.temperature).softmax(-1)
        row.response.append(int(torch.multinomial(probabilities, 1)))
    return row


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Return the advantages, (T,), by generalised advantage estimation (Schulman et al. 2016, equation 16)."""
    advantages = torch.zeros_like(rewards)
    advantage = next_value = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        advantage = delta + gamma * lam * advantage
        advantages[t] = advantage
        next_value = values[t]
    return advantages


@torch.no_grad()
def make_experience(
    policy: LlamaForCausalLM,
    ref: LlamaForCausalLM,
    value: LlamaForSequenceClassification,
    score_row: Callable[[Row], float | Tensor],
    rows: list[Row],
    settings: Settings,
) -> list[Experience]:
    """Compute all that an update needs of the rows, before it changes the models; `score_row` is the reward model."""
    experiences = []
    for row in rows:
        logprobs = response_logprobs(policy, row, settings.temperature)
        ref_logprobs = response_logprobs(ref, row, settings.temperature)
        values = response_values(value, row)

        # The score is given at the last token, and each token costs its estimated KL from the reference.
        rewards = -settings.kl_coef * (logprobs - ref_logprobs)
        rewards[-1] += score_row(row)
        if row.response[-1] != END:
            rewards[-1] -= settings.missing_eos_penalty

        advantages = gae(rewards, values, settings.gamma, settings.lam)
        returns = advantages + values
        experiences.append(Experience(row, logprobs, ref_logprobs, values, rewards, advantages, returns))

    # Advantages are normalised over all response tokens of the update; the returns above are not.
    all_advantages = torch.cat([experience.advantages for experience in experiences])
    mean = all_advantages.mean()
    std = (all_advantages.var() + 1e-8).sqrt()
    for experience in experiences:
        experience.advantages = (experience.advantages - mean) / std
    return experiences


def policy_loss(logprobs: Tensor, old: Experience, settings: Settings) -> Tensor:
    """Return the clipped surrogate loss of each token, (T,) (Schulman et al. 2017, equation 7)."""
    ratio = torch.exp(logprobs - old.logprobs)
    clipped_ratio = ratio.clamp(1 - settings.cliprange, 1 + settings.cliprange)
    return -torch.min(ratio * old.advantages, clipped_ratio * old.advantages)


def value_loss(values: Tensor, old: Experience, settings: Settings) -> Tensor:
    """Return the clipped squared error of each token's value, (T,)."""
    low = old.values - settings.cliprange_value
    high = old.values + settings.cliprange_value
    error = (values - old.returns) ** 2
    clipped_error = (values.clamp(low, high) - old.returns) ** 2
    return torch.max(error, clipped_error) / 2


def update(
    policy: LlamaForCausalLM,
    value: LlamaForSequenceClassification,
    optimizer: torch.optim.Optimizer,
    experiences: list[Experience],
    settings: Settings,
) -> None:
    """Take an optimizer step an epoch, on the mean loss over all response tokens."""
    num_tokens = sum(len(experience.logprobs) for experience in experiences)

    for _ in range(settings.num_ppo_epochs):
        optimizer.zero_grad()
        for old in experiences:
            logprobs = response_logprobs(policy, old.row, settings.temperature)
            values = response_values(value, old.row)
            loss = policy_loss(logprobs, old, settings) + settings.vf_coef * value_loss(values, old, settings)
            (loss.sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
        torch.nn.utils.clip_grad_norm_(value.parameters(), settings.max_grad_norm)
        optimizer.step()


def train_ppo(sft: LlamaForCausalLM, reward_model: LlamaForSequenceClassification, updates: int) -> LlamaForCausalLM:
    """Train a copy of the SFT model, with the SFT model as reference and a copy of the reward model as value model."""
    settings = Settings()
    policy, value = copy.deepcopy(sft), copy.deepcopy(reward_model)
    optimizer = torch.optim.AdamW([*policy.parameters(), *value.parameters()], settings.learning_rate, weight_decay=0)

    for step in range(1, updates + 1):
        prompts = [encode(draw_prompt()) for _ in range(settings.episodes)]
        rows = [generate(policy, prompt, settings) for prompt in prompts]
        experiences = make_experience(policy, sft, value, lambda row: score(reward_model, row), rows, settings)
        update(policy, value, optimizer, experiences, settings)

        kl = sum(float((each.logprobs - each.ref_logprobs).sum()) for each in experiences) / len(rows)
        reward = sum(float(score(reward_model, row).detach()) for row in rows) / len(rows)
        print(f"update {step:2}  reward {reward:6.2f}  KL {kl:5.2f}  {decode(rows[0].prompt + rows[0].response)}")
    return policy


def mean_quality(policy: LlamaForCausalLM, answers: int = 200) -> float:
    total = 0.0
    for _ in range(answers):
        prompt = draw_prompt()
        total += quality(prompt, decode(generate(policy, encode(prompt), Settings()).response))
    return total / answers


def main(sft_steps: int = 100, reward_steps: int = 300, updates: int = 30) -> None:
    random.seed(0)
    torch.manual_seed(0)
    sft = train_sft(sft_steps)
    reward_model = train_reward_model(reward_steps)
    policy = train_ppo(sft, reward_model, updates)
    print(f"quality of an answer, which no model has seen: SFT {mean_quality(sft):.2f}, PPO {mean_quality(policy):.2f}")


if __name__ == "__main__":
    main()
