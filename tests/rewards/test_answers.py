"""The answer in a response."""

import time

from rlhf_cli.rewards import answers


def test_a_response_does_not_keep_the_search_for_its_code_busy() -> None:
    before = time.process_time()
    for odd in ("a" * 20_000, " " * 20_000, " " * 10_000 + "a" * 10_000):
        text = f"```{odd}`\n"
        assert answers.last_code_block(text, "py") == text
    assert time.process_time() - before < 1  # 24 s if it tried each way to divide the line
