"""The learning benchmark: scores at a KL, paired intervals, best of n, and a curve that was interrupted."""

import itertools
import json
import math
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from benchmarks.learning import __main__ as learning  # noqa: E402
from benchmarks.learning import curves, judged, tables  # noqa: E402


def test_means_are_over_five_updates():
    curve = [(float(i), 10.0 * i) for i in range(7)]
    assert curves.moving_means(curve) == [(2.0, 20.0), (3.0, 30.0), (4.0, 40.0)]
    assert curves.moving_means(curve[:3]) == [(1.0, 10.0)]


def test_a_score_lies_on_the_straight_line_between_two_means():
    curve = [(score, kl) for score, kl in zip([0.0, 1.0, 2.0], [0.0, 4.0, 8.0], strict=True)]
    assert curves.score_at(curve, 5, window=1) == (1.25, True)
    assert curves.score_at(curve, 8, window=1) == (2.0, True)
    # five updates in a row: means at KL 20, 30, 40
    assert curves.score_at([(float(i), 10.0 * i) for i in range(7)], 25) == (2.5, True)


def test_the_first_crossing_from_below_counts():
    curve = [(0.0, 0.0), (1.0, 6.0), (3.0, 4.0), (9.0, 6.0)]
    score, reached = curves.score_at(curve, 5, window=1)
    assert reached and score == pytest.approx(5 / 6)


def test_a_curve_that_never_gets_there_counts_with_its_end():
    assert curves.score_at([(0.0, 0.0), (1.0, 6.0), (0.5, 3.0)], 10, window=1) == (0.5, False)
    assert curves.score_at([(0.5, 3.0), (1.0, 6.0)], 2, window=1) == (0.5, False)
    with pytest.raises(ValueError, match="empty"):
        curves.score_at([], 5)


def test_the_paired_interval_is_students():
    # differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t(0.975, 2) = 4.303
    found = curves.paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found.differences == [1.0, 2.0, 3.0] and found.mean == 2.0
    assert found.high - 2 == pytest.approx(4.303 / math.sqrt(3)) == pytest.approx(2 - found.low)
    assert curves.paired([1.0], [0.0]).high == math.inf


def test_the_table_of_t_is_right():
    stats = pytest.importorskip("scipy.stats")
    assert {n: round(float(stats.t.ppf(0.975, n)), 3) for n in curves.T975} == curves.T975


def test_best_of_n_is_the_mean_over_all_draws():
    draw = random.Random(0)
    scores = [draw.gauss(0, 1) for _ in range(7)]
    for n in range(1, 8):
        draws = [max(some) for some in itertools.combinations(scores, n)]
        assert curves.best_of(scores, n) == pytest.approx(sum(draws) / len(draws))
    with pytest.raises(ValueError, match="best of 8 of 7"):
        curves.best_of(scores, 8)


def test_best_of_n_is_unbiased():
    # of n uniform draws the highest is n / (n + 1) on average
    draw = random.Random(1)
    found = [curves.best_of([draw.random() for _ in range(8)], 4) for _ in range(4000)]
    assert sum(found) / len(found) == pytest.approx(0.8, abs=0.005)


def test_an_interrupted_curve_has_no_line_twice(tmp_path):
    file = tmp_path / "curve.jsonl"
    lines = [{"update": update, "objective/scores": float(update)} for update in (1, 2, 3, 4)]
    # the state is of update 2; 3 and 4 were written after it, and a line was cut off
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"update": 5, "obj', encoding="utf-8")
    assert curves.cut_back(file, 2) == lines[:2] == curves.read_lines(file)
    with file.open("a", encoding="utf-8") as more:
        more.write(json.dumps(lines[2]) + "\n")
    assert [line["update"] for line in curves.read_lines(file)] == [1, 2, 3]
    assert curves.cut_back(tmp_path / "none.jsonl", 0) == []


def test_a_folder_is_replaced_whole(tmp_path):
    from benchmarks.learning.train import replace_folder

    place = tmp_path / "state"
    replace_folder(place, lambda folder: (folder / "old").write_text("1"))

    def broken(folder: Path) -> None:
        (folder / "new").write_text("2")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_folder(place, broken)
    assert [file.name for file in place.iterdir()] == ["old"]
    replace_folder(place, lambda folder: (folder / "new").write_text("3"))
    assert [file.name for file in tmp_path.rglob("*")] == ["state", "new"]


def test_the_judges_lines_are_read():
    text = "judge accuracy, 5-fold: 0.77\nsft: P(pos) 0.490 reward -0.50 length 21.1\n"
    text += "060: P(pos) 0.851 win 0.926 [0.895, 0.957] reward -0.02 KL 16.4 length 23.9\n    a film : fine\n"
    point = {"positive": 0.851, "win": 0.926, "low": 0.895, "high": 0.957, "reward": -0.02, "kl": 16.4, "length": 23.9}
    assert judged.parse(text) == {"060": point}


def test_the_best_point_within_a_kl():
    points = {"005": {"reward": 1, "kl": 3}, "010": {"reward": 2, "kl": 12}, "015": {"reward": 3, "kl": 13}}
    assert judged.best_within(points, 12) == "010"
    assert judged.best_within(points, 1) is None


def test_candidates_are_tried_from_the_highest_score_down():
    curve = [(float(i), 0.5 * i) for i in range(60)]
    curve[50:] = [(45.0, 3.0)] * 10
    saved = [f"{update:03d}" for update in range(5, 61, 5)]
    # by training the KL is u / 2 up to 50 updates, then 3; 12 is allowed, and the mean around 50 is 11.5
    assert judged.candidates(curve, saved, 10)[:4] == ["050", "055", "060", "020"]


def test_the_comparison_is_over_the_seeds_that_both_have():
    line = [(float(i), float(i)) for i in range(30)]
    higher = [(score + 1, kl) for score, kl in line]
    found = tables.compare({0: higher, 1: higher, 7: line}, {0: line, 1: line, 2: line})
    assert found["ours_minus_trl"]["5"]["seeds"] == [0, 1]
    assert found["ours_minus_trl"]["10"]["differences"] == [1.0, 1.0]
    text = tables.markdown(found | {"best_of": [{"n": 1, "score": 0.0}], "judged": {}})
    assert "| rlhf, seed 7 | 5.00 | 10.00 | 15.00 | 27.00 | 27.0 |" in text
    assert "1 degrees of freedom" in text and "never at that KL" not in text


def test_without_the_shared_folder_it_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    arguments = ["learning", "--shared", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert learning.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "is missing" in err
