"""Which responses samples.jsonl has with their tokens. Their scores and rows: tests/evaluation/test_selection.py."""

from rlhf_cli.evaluation.responses import WITH_TOKENS, EvalResponses, TokenKL, largest_changes, sample_rows


def scored(model: str, gold: list[float], tokens: list[TokenKL] | None = None) -> EvalResponses:
    n = len(gold)
    scores = {"reward": [0.0] * n, "gold": gold}
    texts = [""] * n
    return EvalResponses(model, "sampled", texts, texts, [True] * n, [1] * n, scores, [0.5] * n, tokens)


def test_the_largest_gains_and_losses_have_tokens() -> None:
    """By the judge that decides; of few prompts all, each once."""
    for n in (3, 15, 40):
        tokens = [TokenKL([row], [0.5]) for row in range(n)]
        gold = [float((7 * row) % n) for row in range(n)]
        sft = scored("sft", [0.0] * n)
        ppo = scored("ppo", gold, tokens)
        found = largest_changes([sft, ppo])
        by_gain = sorted(range(n), key=gold.__getitem__)
        assert found.keys() == set(by_gain[:WITH_TOKENS] + by_gain[-WITH_TOKENS:])
        assert all(each is tokens[row] for row, each in found.items())
        assert largest_changes([sft]) == {} == largest_changes([ppo])

    rows = list(sample_rows([sft, ppo], [{}] * 40, {3: {"text": ["a"], "kl": [0.5]}}))
    assert [(row["model"], row["index"]) for row in rows if "tokens" in row] == [("ppo", 3)]
