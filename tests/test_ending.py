"""The last lines of `rlhf run`: what the page says, and where to go from there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_run import report, write_run

from rlhf_cli import ending
from rlhf_cli.report import brief, write_beside


@pytest.mark.parametrize("met", [True, False])
@pytest.mark.parametrize("gold", [0.63, 0.2], ids=["good", "found out"])
def test_the_page_comes_first_where_there_is_something_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gold: float, met: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(Path("run"), told=report(gold=gold))
    configs: dict[str, Any] = {stage: SimpleNamespace(folder=run / stage) for stage in ("ppo", "eval")}

    def said() -> list[str]:
        capsys.readouterr()
        ending.show(run, configs, {"ppo": [], "eval": []}, met=met)
        return capsys.readouterr().out.splitlines()

    onward = ["rlhf chat run --compare sft,ppo", "rlhf export run --out DIR --step selected"] if met else []
    assert said() == ([f"next: {'; '.join(onward)}"] if onward else []), "no page was drawn"
    assert write_beside(run / "eval")
    page = ["open run/eval/report.html in a browser"] if gold < 0.5 or not met else []
    assert said() == [f"the page says: {brief(run).headline}", f"next: {'; '.join([*page, *onward])}"]
    assert ("The stage to mend first" in brief(run).headline) == (gold < 0.5)
