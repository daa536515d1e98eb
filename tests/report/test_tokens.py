"""A response token by token."""

from rlhf_cli.report import tokens


def test_the_heat_map_is_of_the_last_sample_with_token_values() -> None:
    values = {"text": ["a", "\n", ""], "reward": [0.5, -2.0, 0.0], "kl": [0.0] * 3, "value": [1.0, 2.0], "advantage": 3}
    rows = [
        {"step": 1, "prompt": "old", "tokens": values | {"text": ["x"] * 3}},
        {"step": 2, "prompt": "p", "tokens": values},
        {"step": 3, "prompt": "without"},
    ]
    found = tokens.last_heat_map(rows)
    assert found and (found.step, found.prompt) == (2, "p")
    (reward, _, top, shades), (kl, _, _, kl_shades) = found.strips
    assert (reward, kl, top) == ("reward", "log-ratio", "2"), "columns of other lengths are skipped"
    arrow, dot, minus = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\N{MIDDLE DOT}", "\N{MINUS SIGN}"
    assert shades == [("a", "0.5", 0.25), (arrow, f"{minus}2", -1.0), (dot, "0", 0.0)]
    assert {shade for _, _, shade in kl_shades} == {0.0}
    assert tokens.last_heat_map([{"step": 3}, {"step": 4, "tokens": {"text": ["a"]}}]) is None
