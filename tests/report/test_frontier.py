"""Judges' scores over KL: snapshots, other policies, the limit and the selected policy."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import report_run
from matplotlib.figure import Figure as Canvas
from report_run import report, with_limit, with_policies, write_run

from rlhf_cli.report import charts, frontier, page
from rlhf_cli.runs.read import at_step, read_run
from rlhf_cli.runs.report import Report
from tests.report.test_charts import group
from tests.report.test_page import drawn

pytestmark = pytest.mark.usefixtures("figures")


def test_the_recommended_policy_has_a_ring() -> None:
    evaluation = with_policies()
    root = drawn(frontier.draw_panel, "gold", Report.model_validate(evaluation), frontier.ON_PAGE)
    assert len(list(group(root, "recommended-update-10").iter("use"))) == 1
    assert len(list(group(root, "PPO-snapshots").iter("use"))) == 4, "SFT and three policies"
    evaluation["selected"]["share"] = 0.7
    root = drawn(frontier.draw_panel, "gold", Report.model_validate(evaluation), frontier.ON_PAGE)
    assert len(list(group(root, "recommended-share-0-7").iter("use"))) == 1
    del evaluation["selected"]["share"]
    for has_snapshots in (True, False):
        last = {**evaluation, "selected_step": 20, "selected": evaluation["selected"] | {"policy": "ppo", "step": 20}}
        if not has_snapshots:
            del last["frontier"]
        root = drawn(frontier.draw_panel, "gold", Report.model_validate(last), frontier.ON_PAGE)
        assert len(list(group(root, "recommended-update-20").iter("use"))) == 1
        assert "recommended: the SFT model" not in ElementTree.tostring(root, "unicode")
    del evaluation["selected_step"], evaluation["selected"]
    root = drawn(frontier.draw_panel, "gold", Report.model_validate(evaluation), frontier.ON_PAGE)
    assert "recommended" not in ElementTree.tostring(root, "unicode")


@pytest.mark.full
def test_policies_beside_and_between_sft_and_ppo_are_on_the_frontier(tmp_path: Path) -> None:
    evaluation = with_policies()
    for has_snapshots in (True, False):
        shown = {key: row for key, row in evaluation.items() if has_snapshots or not key.startswith(("front", "sel"))}
        root = drawn(frontier.draw_panel, "gold", Report.model_validate(shown), frontier.ON_PAGE)
        text = ElementTree.tostring(root, "unicode")
        assert len(list(group(root, "between-SFT-and-PPO").iter("use"))) == 4, "SFT, two shares and PPO"
        assert len(list(group(root, "dpo").iter("use"))) == 1
        assert all(f">{label}<" in text for label in ("0.3", "0.7", "dpo")), "labels beside the points"
        assert len(list(group(root, "PPO-snapshots" if has_snapshots else "PPO").iter("use"))) == (
            4 if has_snapshots else 2
        )
    text = page_with_frontiers(write_run(tmp_path / "run", evaluation=evaluation))
    assert "PPO over dpo by judge gold: 0.630 [0.570, 0.690] at 12.30 nats against 4.00 nats: PPO is better." in text
    assert "Share 0.3: 0.5 at 2 nats; share 0.7: 0.6 at 5 nats; dpo: 0.4 at 4 nats." in text
    assert "SFT + share (PPO - SFT)" in text and text.count("<td>PPO over dpo</td>") == 2
    at_ten = at_step(read_run(tmp_path / "run"), "10").report
    assert at_ten is not None and at_ten.interpolated is None and "ppo_vs_dpo" not in at_ten.win_rate


def test_a_share_above_1_is_beyond_ppo_on_the_line() -> None:
    evaluation = with_policies()
    beyond = {**evaluation["interpolated"][1], "share": 1.3, "kl": 14.0}
    evaluation["interpolated"].append(beyond)
    points = plotted("gold", evaluation)["between SFT and PPO"]
    assert [kl for kl, _ in points] == [0.0, 2.0, 5.0, evaluation["models"]["ppo"]["kl"], 14.0]


def page_with_frontiers(run: Path) -> str:
    """The page without its other figures, which take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        report_run.draws_nothing(patch)
        kinds = {True: report_run.DRAW_SVG, False: charts.draw_svg}
        patch.setattr(charts, "draw_svg", lambda name, *rest: kinds[name.startswith("frontier")](name, *rest))
        return page.of_run(read_run(run))


def plotted(judge: str, evaluation: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """The points of a panel by the label of their series."""
    axis = Canvas().subplots()
    frontier.draw_panel(judge, Report.model_validate(evaluation), frontier.IN_FILE, axis)
    lines = {each.get_label(): each[0] for each in axis.containers} | {
        line.get_label(): line for line in axis.get_lines() if not str(line.get_label()).startswith("_")
    }
    return {str(label): [*map(tuple, line.get_xydata().tolist())] for label, line in lines.items()}


@pytest.mark.full
@pytest.mark.parametrize("has_snapshots", [True, False])
@pytest.mark.parametrize("policies", [True, False])
def test_the_panel_of_the_reward_has_the_scores_of_the_limit(
    tmp_path: Path, *, has_snapshots: bool, policies: bool
) -> None:
    """They are 1 below the judge's means; the other panels have no limit, and its absence changes no other point."""
    evaluation = with_limit(with_policies() if policies else report())
    if not has_snapshots:
        for key in ("frontier", "selected_step", "selected"):
            del evaluation[key]
    own = plotted("reward", {key: row for key, row in evaluation.items() if key != "limit"})
    shown = plotted("reward", evaluation)
    assert shown.pop("limit") == [(0.0, -1.0), (1.0, 0.5)]
    assert shown == {
        label: [(pytest.approx(kl), pytest.approx(mean - 1)) for kl, mean in each] for label, each in own.items()
    }
    ppo = {"PPO snapshots", "recommended: update 10"} if has_snapshots else {"PPO"}
    others = {"between SFT and PPO", "dpo"} if policies else set()
    assert shown.keys() == {"SFT and its best of n (KL bound)"} | ppo | others
    assert plotted("gold", evaluation).keys() == shown.keys()
    html = page_with_frontiers(write_run(tmp_path / "run", evaluation=evaluation))
    assert html.count('series-limit"') == 1 and "The picture shows the score by the reward model, less 1 for" in html
    frontier.draw_file(Report.model_validate(evaluation), tmp_path / "frontier.svg")
    assert 'series-limit"' in (tmp_path / "frontier.svg").read_text()
