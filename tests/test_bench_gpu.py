"""The GPU benchmark, tiny and on the CPU: its arithmetic, its scripted stop, and one run of it all."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_ppo_library import python
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parent.parent))

from benchmarks import gpu


@pytest.fixture
def bench() -> gpu.Bench:
    return gpu.Bench(gpu.TINY, torch.device("cpu"), None)


@pytest.mark.parametrize(("name", "parameters"), [("0.5b", 494_032_768), ("1.5b", 1_543_714_304)])
def test_the_models_have_the_size_of_the_published_ones(name, parameters):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(gpu.config(name, 151936))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_flops_are_those_that_torch_counts(bench):
    """torch counts attention over all pairs of tokens; a causal model needs those up to the diagonal."""
    model, length = gpu.model(bench, "tiny"), 9
    model.set_attn_implementation("eager")  # torch counts no attention in its own kernel for the CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(1, length, dtype=torch.int64), logits_to_keep=4, use_cache=False)
    shape = model.config
    a_pair = 4 * shape.num_hidden_layers * shape.hidden_size
    above_the_diagonal = length * (length - 1) // 2
    assert gpu.forward_flops(shape, [length], 4) == counter.get_total_flops() - a_pair * above_the_diagonal
    assert gpu.forward_flops(shape, [3, 5]) == gpu.forward_flops(shape, [3]) + gpu.forward_flops(shape, [5])


def test_a_response_is_counted_through_its_first_stop_token():
    responses = torch.tensor([[5, 1, 0, 0], [4, 4, 4, 4], [1, 1, 1, 5]])
    assert gpu.through_stop(responses, 1) == [2, 4, 1] and gpu.through_stop(responses, None) == [4, 4, 4]


@pytest.mark.parametrize("engine", [*gpu.OTHERS, *gpu.ENGINES])
def test_the_scripted_stop_makes_lengths_geometric(bench, engine):
    bench.sizes = replace(bench.sizes, response=30)
    model = gpu.model(bench, "tiny")
    torch.manual_seed(0)
    lengths, seconds, _ = gpu._timed_rollout(bench, engine, model, 200, 5)
    assert seconds > 0 and len(lengths) == 200 and max(lengths) > 15
    assert sum(lengths) / 200 == pytest.approx(5, abs=1.3)  # 4 standard errors of sqrt(20) / sqrt(200)
    assert gpu._timed_rollout(bench, engine, model, 8, None)[0] == [30] * 8


@pytest.mark.slow
def test_a_whole_run_fills_table_and_file(tmp_path, capsys, monkeypatch):
    """What runs out of memory or fails is a row, and what comes after it still runs."""

    def full(model):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr(gpu.forward, "enable_gradient_checkpointing", full)
    monkeypatch.setitem(gpu.OTHERS, "generate_batch", lambda *_: 1 / 0)
    monkeypatch.setattr(gpu, "version", {"torch": "2", "transformers": "5"}.get)
    assert gpu.main(["--tiny", "--device", "cpu", "--json", str(tmp_path / "gpu.json")]) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["date"] and found["card"] == "CPU" and found["versions"]["torch"] == "2"
    rows = {row["what"]: row for row in found["rows"]}
    assert [row["what"] for row in found["rows"] if row["part"] == "update"] == [f"tiny {v}" for v in gpu.VARIANTS]
    assert {row["what"].split()[1].rstrip(",") for row in found["rows"] if row["part"] == "rollout"} == {
        *gpu.OTHERS, *gpu.ENGINES,
    }  # fmt: skip
    failed = {what: row["failed"] for what, row in rows.items() if "failed" in row}
    assert failed == {
        "tiny policy and value model, gradient checkpointing": (
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"
        ),
        "tiny generate_batch, 8 rows, full, float32 weights": "ZeroDivisionError: division by zero",
        "tiny generate_batch, 8 rows, ragged, float32 weights": "ZeroDivisionError: division by zero",
    }
    assert rows["tiny value head, LoRA"]["skipped"] == "peft is not installed"
    assert rows["tiny policy and value model"]["update_s"] > 0 and rows["tiny value head"]["tflops"] >= 0
    printed = capsys.readouterr().out
    assert all(what in printed for what in rows)


@pytest.mark.slow
def test_one_part_alone_with_torch_transformers_and_pydantic_alone(tmp_path):
    path = tmp_path / "gpu.json"
    arguments = ["--tiny", "--device", "cpu", "--only", "rollout", "--json", str(path)]
    missing = {"trl", "datasets", "accelerate", "peft", "bitsandbytes", "psutil", "kernels", "matplotlib"}
    python(f"from benchmarks import gpu; assert gpu.main({arguments}) == 0", missing)
    assert {row["part"] for row in json.loads(path.read_text())["rows"]} == {"card", "rollout"}
