"""The reward of this recipe. Any function of two lists that returns one number a response will do; it may be async."""


def score(prompts: list[str], responses: list[str]) -> list[float]:
    """How much of its prompt a response takes up: the share of the prompt's long words that stand in it."""
    return [share(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


def share(prompt: str, response: str) -> float:
    asked, said = (set(text.lower().replace(".", " ").replace("?", " ").split()) for text in (prompt, response))
    long = {word for word in asked if len(word) > 3}
    return len(long & said) / len(long) if long else 0.0


if __name__ == "__main__":
    print(score(["Please suggest a stew with salmon."] * 2, ["Try a stew with salmon.", "Go by train."]))
