"""Speed of reading and tokenising data. Run with -s to see the figures."""

import random
import resource
import time
from pathlib import Path

import pytest
from conftest import SHARED

from rlhf_cli import data, jsonl
from rlhf_cli.models import tokenizers


def write_pairs(path: Path, count: int) -> Path:
    """Write pairs of 1.4 kB: film reviews, or random words if the reviews are missing."""
    draw = random.Random(0)
    files = list((SHARED / "data" / "rt-polarity").glob("*.txt"))
    sentences = [line for file in sorted(files) for line in file.read_text().splitlines()]
    words = ["".join(draw.choices("etaoinshr", k=draw.randint(2, 8))) for _ in range(2000)]
    sentences = sentences or [" ".join(draw.choices(words, k=20)) for _ in range(2000)]
    columns = ("prompt", "chosen", "rejected")
    jsonl.write_jsonl(path, ({name: " ".join(draw.choices(sentences, k=4)) for name in columns} for _ in range(count)))
    return path


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "models/reviews-sft").is_dir(), reason="../shared/models/reviews-sft is missing")
def test_a_hundred_thousand_pairs_are_read_from_the_cache_in_half_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    path = write_pairs(tmp_path / "pairs.jsonl", 100_000)
    tokenizer, times = tokenizers.load_tokenizer(SHARED / "models/reviews-sft"), []
    for _ in range(2):
        wall, cpu = time.monotonic(), time.process_time()
        rows = data.preference_rows(path, tokenizer, max_length=4096)
        times.append(time.process_time() - cpu)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"\n{len(rows)} pairs: {time.monotonic() - wall:.1f} s, CPU {times[-1]:.1f} s; peak {peak:.2f} GB")
        del rows
    assert times[1] < times[0] / 2
