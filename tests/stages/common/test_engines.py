"""One choice of the engine for every stage and command: on a GPU graph, where it can sample from the model."""

from types import SimpleNamespace

import pytest
import tiny
import torch

from rlhf_cli.ppo.graph_engine import GraphEngine
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.stages.common import engines
from rlhf_cli.stages.common.engines import Drawing

DRAWING = Drawing("eval", tiny.EOS, tiny.PAD, temperature=0.7, bf16=False, batch_size=3)


def test_auto_is_graph_on_a_gpu_alone_and_hf_where_graph_cannot_sample(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = tiny.causal()
    windows = tiny.causal("mistral")
    assert type(engines.best_engine(llama, DRAWING)) is HFEngine

    monkeypatch.setattr(engines, "devices", SimpleNamespace(device=lambda: torch.device("cuda")))
    engine = engines.best_engine(llama, DRAWING)
    assert (type(engine), engine.temperature, engine.batch_size, engine.bf16) == (GraphEngine, 0.7, 3, False)
    assert engines.engine_class("auto", llama, "ppo", sharded=True) is HFEngine
    assert engines.engine_class("hf", llama, "eval") is HFEngine

    assert type(engines.best_engine(windows, DRAWING)) is HFEngine
    assert capsys.readouterr().err == ""
    assert type(engines.best_engine(windows, DRAWING, "graph")) is HFEngine
    assert engines.engine_class("auto", windows, "ppo") is HFEngine
    lines = capsys.readouterr().err.splitlines()
    reason = "models.engine: hf instead of graph for this mistral model: it has layers"
    assert [line.startswith(f"{stage:<8} {reason}") for stage, line in zip(("eval", "ppo"), lines, strict=True)]
