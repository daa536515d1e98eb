"""The figures of a run: which come first, and marks of the first alarms."""

import re
from pathlib import Path

import pytest
from report_run import metrics, write_run

from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.report import diagnosis, figures, page, svg
from rlhf_cli.runs.read import read_run

pytestmark = pytest.mark.usefixtures("figures")


@pytest.mark.full
def test_unhealthy_figures_come_first_and_first_alarms_are_marked(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    log = metrics(policy__approxkl_avg=[0.5] * 20, policy__clipfrac_avg=[0.2] * 20, objective__repetition=[0.0] * 20)
    write_jsonl(folder / "ppo/metrics.jsonl", log)
    firings = [{"step": step, "signal": signal} for step, signal in ((3, "kl"), (5, "eos"), (6, "kl"), (9, "eos"))]
    write_jsonl(folder / "ppo/watchdog.jsonl", firings)
    html = page.of_run(read_run(folder))
    ppo = html[html.index('id="health"') : html.index('id="reward"')]
    shown = re.findall(r'<figure class="card (\w+).*?<code>(.*?)</code>', ppo, re.S)
    first = [("bad", "policy/approxkl_avg"), ("look", "policy/clipfrac_avg"), ("good", "objective/scores")]
    assert shown[:3] == first and shown[-1] == ("good", "objective/repetition"), "constant metrics are last"
    assert set(re.findall(r'-series-alarm-(\d+)"', html)) == {"3", "5"}


@pytest.mark.full
def test_only_figures_with_a_finding_are_open(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    write_jsonl(folder / "ppo/metrics.jsonl", metrics(policy__approxkl_avg=[0.5] * 20))
    rising = [{"step": step, "loss": 3.0 + 0.1 * step} for step in range(8)]
    write_jsonl(folder / "sft/metrics.jsonl", rising)
    run = read_run(folder)
    health = figures.health(run, diagnosis.diagnose(run))
    assert [each.key for each in health.open] == ["policy/approxkl_avg", "loss"]
    assert {"objective/scores", "accuracy"} <= {each.key for each in health.folded}
    html = page.of_run(run)
    folded = html[html.index('<details id="folded">') :]
    for each in health.folded:
        assert f'href="#{each.anchor}"' in html and f'id="{each.anchor}"' in folded, each.title


@pytest.mark.full
def test_values_show_on_hover_and_stand_in_the_table_of_the_figure(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    run = read_run(folder)
    shown = figures.ppo(run, diagnosis.diagnose(run).readings)
    (kl,) = [each for each in shown if each.key == "objective/kl_k1"]
    assert kl.values and kl.values.columns[:2] == ("series", "update")
    assert [list(row[1:]) for row in kl.values.rows[:2]] == [[1, 0.0], [2, 0.2]] and len(kl.values.rows) == 20
    assert "update 20, nats per response 3.8</title>" in str(kl.markup) or "update 20, nats 3.8</title>" in str(
        kl.markup
    )


def test_a_logarithmic_scale_is_for_positive_values_of_different_size() -> None:
    assert svg.can_be_logarithmic({"a": [(1, 0.1), (2, 1.0)]})
    for values in ((0.0, 10.0), (-1.0, 10.0), (1.0, 9.0)):
        assert not svg.can_be_logarithmic({"a": list(enumerate(values))})


def test_a_small_change_of_a_large_value_is_drawn_small() -> None:
    """Responses that end, 0.984 to 1, are no cliffs."""
    low, high = svg.drawn_range([0.984, 1.0])
    assert (low, high) == pytest.approx((0.942, 1.042))
    assert svg.drawn_range([0.0, 4.0]) == (0.0, 4.0) and svg.drawn_range([0.0, 0.0]) == (0.0, 0.0)


def test_a_long_log_has_fewer_places_with_values() -> None:
    points = [(step, step % 7) for step in range(5000)]
    assert str(svg.sparkline("KL", ("", "update", "KL"), points)).count("<title>") <= svg.MAX_SPOTS
    assert svg.sparkline("KL", ("", "update", "KL"), points[:1]) is None
