"""The figures of a run: which come first, and marks of the first alarms."""

import re
from pathlib import Path

import pytest
from report_run import metrics, write_run

from rlhf_cli.jsonl import write_jsonl
from rlhf_cli.report import page
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
    ppo = html[html.index('id="ppo"') : html.index('id="frontier"')]
    shown = re.findall(r'<figure class="card (\w+).*?<code>(.*?)</code>', ppo, re.S)
    first = [("bad", "policy/approxkl_avg"), ("look", "policy/clipfrac_avg"), ("good", "objective/scores")]
    assert shown[:3] == first and shown[-1] == ("good", "objective/repetition"), "constant metrics are last"
    assert set(re.findall(r'-series-alarm-(\d+)"', html)) == {"3", "5"}
