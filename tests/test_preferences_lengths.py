"""`rlhf init preferences`: answers come first, what does not fit beside them is left out, and what it says is so."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import World
from test_preferences import init, known_speed  # noqa: F401  (a fixture)
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_cli import config, jsonl, terminal
from rlhf_cli.commands import check
from rlhf_cli.commands.init import lengths, preferences, split
from rlhf_cli.commands.init.lengths import Length, Speed
from rlhf_cli.config.base import Options
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.readers import RowLocation
from rlhf_cli.data.texts import Pair
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import devices, tokenizers

SHARED = Path(__file__).parent.parent.parent / "shared"
HH, ALPACA = (SHARED / f"data/{name}/pairs.jsonl.gz" for name in ("hh-harmless", "alpaca-pairs"))
STORIES, REVIEWS = SHARED / "models/stories260K", SHARED / "models/reviews-sft"
shared = pytest.mark.skipif(not STORIES.exists(), reason="../shared, the developers' data and models, is not here")


def fitted(found: list[tuple[int, int, int]], context: int | None) -> tuple[list[Pair], lengths.Lengths]:
    """Pairs of these tokens of prompt, chosen and rejected answer, each of a prompt of its own, at that context."""
    pairs = [Pair(RowLocation(Path("x"), i), f"prompt {i}", "yes", "no", None) for i in range(len(found))]
    return lengths.fit_lengths(pairs, [Length(*each) for each in found], context)


def warned(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _each_warning_is_said() -> None:
    terminal.reset()


# --- the rule


def test_answers_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of 30 to 525 tokens in 512 positions: answers of 10 to 109 keep their 90th percentile."""
    used, limits = fitted([(30 + 5 * i, 10 + i, 20) for i in range(100)], 512)
    assert limits.response_length == 104  # of 10 + i the 90 smallest reach 99
    assert len(used) == 76 and used[-1].prompt == "prompt 75"  # 30 + 5 x 75 + 104 = 509
    assert limits.max_length == 496  # 405 + 85
    assert limits.ended == 1.0 and limits.answer_mean == 10 + 75 / 2
    assert warned(capsys).splitlines() == [
        "warning[D10]: --data: 24 of 100 pairs (24 %) left out: "
        "24 whose prompts leave less than 104 of 512 positions to an answer",
        "hint: take a base model with 1024 positions, where 100 % of the pairs fit, or bring shorter pairs",
    ]


def test_what_fits_is_left_alone_and_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    used, limits = fitted([(20, 90, 100)] * 50, 512)
    assert len(used) == 50 and (limits.response_length, limits.max_length) == (96, 120) and warned(capsys) == ""


def test_answers_that_mostly_cannot_end_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of 300 fit the context beside their prompt, not half of it: the length is that of the others."""
    used, limits = fitted([(10, 300, 5)] * 79 + [(10, 5, 5)] * 21, 512)
    assert (len(used), limits.response_length, limits.ended) == (100, 32, 0.21)
    assert "warning[D10]: --data: only 21 % of the chosen answers end within response_length 32: " in warned(capsys)


def test_few_that_are_left_out_are_counted_without_advice(capsys: pytest.CaptureFixture[str]) -> None:
    _, limits = fitted([(20, 40, 50)] * 199 + [(20, 40, 490)], 512)
    assert limits.max_length == 72
    assert (
        warned(capsys)
        == "warning[D10]: --data: 1 of 200 pairs (1 %) left out: 1 longer than 72 tokens, much longer than the others\n"
    )


@pytest.mark.parametrize(
    ("answers", "context", "response"),
    [
        ([2] * 40, 512, 8),  # one word and the end token
        ([10] * 39 + [40], 512, 32),  # never below 32 where answers are longer
        ([10] * 40, 512, 16),
        ([20] * 20 + [30] * 5, 48, 32),  # half of the context would be 24
        ([100] * 30 + [400] * 10, 512, 104),  # those of 400 do not fit half of the context
        ([250] * 40, 512, 256),
        ([300] * 40, None, 304),
    ],
)
def test_the_length_of_a_response(answers: list[int], context: int | None, response: int) -> None:
    used, limits = fitted([(10, answer, 5) for answer in answers], context)
    assert limits.response_length == response
    kept = [answer for answer in answers if 10 + answer <= (context or 4096)]
    assert len(used) == len(kept) and limits.ended == sum(each <= response for each in kept) / len(kept)


def test_where_too_few_would_be_left_it_says_how_many_positions_are_enough() -> None:
    found = [(200, 4000 + i, 4100) for i in range(60)]  # 3000 words
    with pytest.raises(RLHFError) as caught:
        fitted(found, 512)
    (problem,) = caught.value.problems
    text = "60 of 60 pairs (100 %) do not fit: 60 whose chosen answers are longer than half of 512 positions"
    assert (problem.code, problem.text) == ("D10", text)
    assert problem.hint == "take a base model with 8192 positions, where 100 % of the pairs fit, or bring shorter pairs"
    used, limits = fitted(found, 8192)
    assert len(used) == 60 and limits.response_length == 4056


def test_a_fifth_of_the_pairs_and_twenty_prompts_must_be_left() -> None:
    short, long = (20, 40, 40), (500, 40, 40)
    assert len(fitted([short] * 20 + [long] * 79, 512)[0]) == 20
    for found in ([short] * 19 + [long] * 10, [short] * 20 + [long] * 81):
        with pytest.raises(RLHFError) as caught:
            fitted(found, 512)
        assert caught.value.problems[0].code == "D10" and "1024 positions" in str(caught.value)
    assert len(fitted([short] * 18 + [long], 512)[0]) == 18  # too few prompts before anything was left out: D11 says so


def test_quantiles() -> None:
    assert [lengths.quantile(range(1, 101), share) for share in (0.0, 0.5, 0.9, 1.0)] == [1, 50, 90, 100]
    assert lengths.quantile([7], 0.9) == 7


# --- real pairs


def measured(source: Path, model: Path, limit: int = 10**9) -> tuple[list[Pair], list[Length]]:
    tokenizer = tokenizers.load_tokenizer(model)
    pairs = split.read_pairs(DataSource(str(source), "--data", on_bad="drop"), tokenizer, plain=False).pairs[:limit]
    return pairs, lengths.measure_lengths(tokenizer, pairs)


@pytest.fixture(scope="module")
def hh() -> tuple[list[Pair], list[Length]]:
    return measured(HH, STORIES)


@shared
@pytest.mark.parametrize(
    ("context", "response", "used"), [(512, 176, 0.65), (1024, 208, 0.94), (2048, 208, 0.98)], ids=str
)
def test_real_dialogues(
    hh: tuple[list[Pair], list[Length]], context: int, response: int, used: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted by hand, one pair at a time."""
    kept, limits = lengths.fit_lengths(*hh, context)
    of = dict(zip(map(id, hh[0]), hh[1], strict=True))
    taken = [of[id(pair)] for pair in kept]
    assert limits.response_length == response and used < len(kept) / len(hh[0]) < used + 0.05
    assert all(one.prompt + response <= context and one.row <= limits.max_length <= context for one in taken)
    left = [one for one in hh[1] if one.prompt + response > context or one.row > limits.max_length]
    assert len(left) == len(hh[0]) - len(kept)
    assert f"{len(left)} of {len(hh[0])} pairs ({round(100 * len(left) / len(hh[0]))} %) left out" in warned(capsys)
    fitting = sorted(one.chosen for one in hh[1] if one.chosen <= context // 2)
    assert fitting[int(0.9 * len(fitting)) - 1] <= response <= fitting[int(0.9 * len(fitting))] + 8


@shared
def test_what_is_written_for_real_dialogues_is_so(tmp_path: Path, hh: Any) -> None:
    """The share that ends within the response's length, and the rows: `rlhf check` finds none to leave out."""
    run = tmp_path / "run"
    result = init(run, HH, STORIES)
    assert result.exit_code == 0 and "598 pairs (34 %) left out" in result.stderr
    told = int(re.findall(r"response_length: 176 +# maximum tokens; (\d+) of 100", (run / "ppo.yaml").read_text())[0])
    prompts = {row["prompt"] for part in ("sft", "pairs", "prompts", "heldout") for row in read(run, part)}
    used = [length for pair, length in zip(*hh, strict=True) if pair.prompt in prompts]
    assert len(used) == 396 and abs(told - 100 * sum(length.chosen <= 176 for length in used) / len(used)) <= 0.5
    terminal.reset()
    assert check.run(run, [], Options(), deep=False, as_json=False, quiet=True) == 0
    assert [problem.code for problem in terminal.emitted_problems() if problem.code in ("D10", "D11")] == []


@shared
def test_reviews(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first words of a sentence as the prompt, its rest as the better answer, another one's as the worse."""
    good, bad = ((SHARED / f"data/rt-polarity/{name}.txt").read_text().splitlines()[:1000] for name in ("pos", "neg"))
    found = [(better.split(), worse.split()) for better, worse in zip(good, bad, strict=True)]
    pairs = [
        {"prompt": " ".join(better[:4]), "chosen": " ".join(better[4:]), "rejected": " ".join(worse[4:])}
        for better, worse in found
        if len(better) > 4 and len(worse) > 4 and better[4:] != worse[4:]
    ]
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", pairs)
    kept, limits = lengths.fit_lengths(*measured(tmp_path / "pairs.jsonl", REVIEWS), 256)
    assert len(kept) > 0.98 * len(pairs) and limits.response_length == 40 and limits.max_length == 80
    assert 0.9 <= limits.ended < 0.95


def read(run: Path, name: str) -> list[dict[str, Any]]:
    return [row for _, row in jsonl.read_jsonl(run / f"data/{name}.jsonl")]


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """A model with a chat template, many words and SmolLM2's 2048 positions, but few weights."""
    folder = tmp_path / "chat model"
    tokenizer = AutoTokenizer.from_pretrained(REVIEWS)
    tokenizers.set_chat_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, **sizes)).save_pretrained(
        folder
    )
    return folder


@shared
def test_many_pairs_of_a_prompt(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFT learns four answers to a prompt at most, those chosen most often; evaluations are cut to the time."""
    monkeypatch.setattr(lengths, "measure_speed", lambda folder: Speed(training=60.0, generation=20.0))
    found = [json.loads(line) for line in gzip.decompress(ALPACA.read_bytes()).decode().splitlines()]
    asked = list(dict.fromkeys(row["prompt"] for row in found))[:100]
    found = [row for row in found if row["prompt"] in asked]
    assert len(found) > 20 * len(asked)
    jsonl.write_jsonl(tmp_path / "pairs.jsonl", found)
    run = tmp_path / "run"
    result = init(run, tmp_path / "pairs.jsonl", chat_model, "--minutes", "30")
    assert result.exit_code == 0, result.output
    assert "(1 %) left out: 8 longer than 2048 positions and 51 longer than 440 tokens, much" in result.stderr
    learned = [(row["prompt"][0]["content"], row["completion"][0]["content"]) for row in read(run, "sft")]
    assert len(set(learned)) == len(learned)
    counts = Counter(prompt for prompt, _ in learned)
    assert len(counts) == 30 and Counter(counts.values()).most_common(1)[0][0] == 4
    used, _ = lengths.fit_lengths(*measured(tmp_path / "pairs.jsonl", chat_model), 2048)
    for prompt, count in counts.items():
        chosen = Counter(pair.chosen for pair in used if pair.prompt[0]["content"] == prompt)
        assert count == min(4, len(chosen))
        least = min(chosen[answer] for asked, answer in learned if asked == prompt)
        assert sorted(chosen.values(), reverse=True)[count - 1] == least
    assert "# at most 4 answers per prompt, those chosen most often" in (run / "sft.yaml").read_text()
    assert config.load("ppo", run / "ppo.yaml").ppo.response_length >= 32
    held_out = len(read(run, "sft_eval")), len(read(run, "pairs_eval"))
    assert held_out == (37, 64)  # of 10 prompts, up to 4 answers to each; of more than 200 pairs what the time allows
    assert "# same form, held-out prompts, all 37 rows" in (run / "sft.yaml").read_text()
    assert re.search(r"64 of \d{3} pairs, as the time allows", (run / "reward.yaml").read_text())


def test_an_answer_that_is_chosen_often_is_preferred() -> None:
    said = ["a", "b", "c", "d", "e", "e", "d"]
    pairs = [Pair(RowLocation(Path("x"), i), "one", answer, f"no {i}", None) for i, answer in enumerate(said)]
    pairs += [Pair(RowLocation(Path("x"), 9), "another", "z", "no", None)]
    assert [(pair.prompt, pair.chosen) for pair in split.most_chosen(pairs)] == [
        ("one", "a"), ("one", "b"), ("one", "d"), ("one", "e"), ("another", "z"),
    ]  # fmt: skip


# --- the command


def written(path: Path, answer: str, prompts: int = 40) -> Path:
    found = [{"prompt": f"Say {i}.", "chosen": f"{answer} {i}", "rejected": f"No {i}"} for i in range(prompts)]
    jsonl.write_jsonl(path, found)
    return path


def test_pairs_of_one_word(world: World, tmp_path: Path) -> None:
    assert init(tmp_path / "run", written(tmp_path / "pairs.jsonl", "Yes"), world.base).exit_code == 0
    assert config.load("ppo", tmp_path / "run/ppo.yaml").ppo.response_length == 8


def test_pairs_of_three_thousand_words_are_refused_and_nothing_is_written(world: World, tmp_path: Path) -> None:
    result = init(tmp_path / "run", written(tmp_path / "pairs.jsonl", "moon " * 3000), world.base)
    assert result.exit_code == 2 and not (tmp_path / "run").exists()
    assert "error[D10]: --data: 40 of 40 pairs (100 %) do not fit: 40 whose chosen answers" in result.stderr
    assert re.search(r"hint: take a base model with \d+ positions, where 100 % of the pairs fit", result.stderr)


def test_the_share_left_out_is_said_before_anything_is_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = (written(tmp_path / f"{n}.jsonl", answer) for n, answer in enumerate(("Yes", "moon " * 125)))
    pairs = tmp_path / "pairs.jsonl"
    jsonl.write_jsonl(pairs, [row for _, row in jsonl.read_jsonl(short)] + [
        {**row, "prompt": f"Tell {row['prompt']}"} for _, row in list(jsonl.read_jsonl(long))[:20]
    ])  # fmt: skip
    said: list[str] = []
    capsys.readouterr()
    monkeypatch.setattr(preferences, "write_data", lambda *_: said.append(capsys.readouterr().err))
    monkeypatch.setattr(preferences, "write_configs", lambda *_: None)
    wish = preferences.InitRequest(str(pairs), str(world.base), {}, plain=False, minutes=1, seed=0)
    preferences.write_folder(tmp_path / "run", Path("templates"), wish)
    assert "20 of 60 pairs (33 %) left out: 20 longer than 128 positions" in said[0]
    assert "40 pairs used" in capsys.readouterr().out


# --- the speed


class Clock:
    """Stands for a machine's time; calls take what `durations` says, in turn, and then the last one."""

    def __init__(self, *durations: float) -> None:
        self.now, self.durations = 0.0, list(durations)

    def call(self) -> None:
        self.now += self.durations.pop(0) if len(self.durations) > 1 else self.durations[0]


def test_one_bad_second_is_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the only call that a single measurement would time."""
    clock = Clock(0.3, 2.0, 0.1)  # the first one warms up
    monkeypatch.setattr(lengths.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(devices, "measure_cpu_share", lambda measure: (measure(), 1.0))
    taken, share = lengths.fastest(clock.call)
    assert (taken, share) == (pytest.approx(0.1), 1.0)


def test_a_large_model_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seconds are so many that a bad one among them changes little."""
    clock = Clock(30.0, 20.0, 0.1)
    monkeypatch.setattr(lengths.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(devices, "measure_cpu_share", lambda measure: (measure(), 0.5))
    assert lengths.fastest(clock.call) == (pytest.approx(20.0), 0.5) and clock.now == 50.0


def test_beside_other_work_it_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for shares, taken, rounds in (([0.5, 0.95], 0.1, 2), ([0.5, 0.6, 0.4, 0.5, 0.3, 0.9], 0.1, 5)):
        clock, left = Clock(0.3, *[0.9] * lengths.MAX_CALLS, 0.1), list(shares)
        monkeypatch.setattr(lengths.time, "perf_counter", lambda clock=clock: clock.now)
        monkeypatch.setattr(devices, "measure_cpu_share", lambda measure, left=left: (measure(), left.pop(0)))
        assert lengths.fastest(clock.call) == (pytest.approx(taken), max(shares[:rounds]))
        assert len(left) == len(shares) - rounds


def test_a_speed_beside_other_work_is_told_as_such(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = written(tmp_path / "pairs.jsonl", "Yes")
    for share, told in ((0.55, True), (0.97, False)):
        monkeypatch.setattr(lengths, "measure_speed", lambda folder, share=share: Speed(9000.0, 900.0, share))
        result = init(tmp_path / f"run {share}", pairs, world.base)
        assert result.exit_code == 0
        assert ("other processes left 55% of the processor to that measurement" in result.stdout) == told
