"""The memory benchmark: bytes counted right, stages watched on a tiny world, and what its tables say of them."""

import ast
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from benchmarks.memory import __main__ as program  # noqa: E402
from benchmarks.memory import held, ours, tables, world  # noqa: E402
from benchmarks.memory.__main__ import CASES  # noqa: E402
from benchmarks.speed.job import Job  # noqa: E402
from benchmarks.speed.tables import markdown  # noqa: E402
from rlhf_cli import config  # noqa: E402
from rlhf_cli.errors import RLHFError  # noqa: E402

BY_NAME = {case.name: case for case in CASES}


# Bytes


def test_what_is_shared_counts_once():
    one, other = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
    assert held.size(held.weights([one, other])) == 2 * 400
    other.weight = one.weight
    other.register_buffer("part", one.weight.detach()[:5])
    assert held.size(held.weights([one, other])) == 400


def test_four_bits_count_with_their_scales():
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(128, 64, False, torch.float32, True, "nf4")
    layer.weight = bnb.nn.Params4bit(torch.randn(64, 128), False, quant_type="nf4", compress_statistics=True)
    layer.to("cpu")
    packed, blocks = 64 * 128 // 2, 64 * 128 // 64
    # A byte for the scale of a block; for all of these a scale and a mean; tables of 16 and 256 values.
    assert held.size(held.weights([layer])) == packed + blocks + 4 * (1 + 1 + 16 + 256)


def test_the_most_of_a_training_is_what_an_optimizer_step_leaves():
    model = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    models: dict[str, nn.Module] = {"policy": model, "reference": nn.Linear(5, 5, bias=False)}
    kept = weakref.ref(models["reference"])
    with held.watched(models) as found:
        for _ in range(2):
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert (found["weights"], found["gradients"], found["one"]) == (4100, 4000, 100)
    assert found["optimizer"] == 2 * 4000 + 4  # and the number of the step
    gc.collect()
    assert kept() is None  # what is read again at the end finds room
    later = nn.Linear(1000, 10)
    later(torch.ones(1, 1000)).sum().backward()
    torch.optim.AdamW(later.parameters()).step()
    assert found["optimizer"] == 2 * 4000 + 4  # it is over


def test_the_peak_is_of_the_training_and_the_whole_of_the_process():
    before = held.libraries()
    early = torch.ones(25_000_000)
    del early
    with held.watched({}) as found:
        late = torch.ones(10_000_000)
        del late
    told = held.told(found, before)
    assert 39e6 < told["training"] < 60e6 and 99e6 < told["peak"] < 120e6 and told["libraries"] == before


def test_a_small_tensor_keeps_a_whole_file_in_memory(tmp_path):
    save_file({"large": torch.ones(5_000_000), "small": torch.ones(10)}, tmp_path / "weights.safetensors")
    before, tensors = held._mapped(), load_file(tmp_path / "weights.safetensors")
    tensors["large"].sum()
    small = tensors.pop("small")
    tensors.clear()
    assert held._mapped() - before >= 20_000_000
    del small
    assert held._mapped() == before


# Stages


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> Path:
    """Two tiny worlds, one of them a little larger."""
    folder = tmp_path_factory.mktemp("worlds")
    shape = world.SMALL.model | {"num_hidden_layers": 2, "intermediate_size": 128}
    sizes = {"big": world.Size(shape, words=60, response=12), "small": world.SMALL}
    for name, size in sizes.items():
        world.write(folder / name, size, CASES)
    return folder


@pytest.fixture(scope="module")
def measured(worlds) -> dict[str, Any]:
    """Some cases, each reward model before the PPO that reads it."""
    names = ("sft-qlora", "reward-full", "reward-lora", "ppo-full", "ppo-one-base")
    cases = [BY_NAME[name] for name in names]
    return {
        case.name: ours.measure(case.stage, *(case.config(worlds / part) for part in ("big", "small")))
        for case in cases
    }


@pytest.mark.slow
def test_weights_are_those_of_the_plan(measured):
    for name, found in measured.items():
        assert found["weights"] == pytest.approx(found["plan"]["weights"], rel=0.05), name
        assert found["libraries"] > 2e8 and found["peak"] >= found["training"], name


@pytest.mark.slow
def test_what_learns_is_counted_on_the_live_trainer(measured):
    full, one_base = measured["ppo-full"], measured["ppo-one-base"]
    assert full["weights"] == pytest.approx(4 * full["one"], rel=0.01)
    assert full["gradients"] == pytest.approx(2 * full["one"], rel=0.01)  # policy and value model
    assert full["optimizer"] == pytest.approx(2 * full["gradients"], rel=0.01)
    assert one_base["one"] == full["one"]
    adapters = (one_base["weights"] - one_base["one"]) / 3  # of policy, value and reward model; two of them learn
    assert 0 < one_base["gradients"] == pytest.approx(2 * adapters, rel=0.02)
    for found in (full, one_base):
        assert found["gradients"] + found["optimizer"] == pytest.approx(found["plan"]["learning"], rel=0.01)


@pytest.mark.slow
def test_four_bits_take_less(measured):
    full, packed = measured["reward-full"], measured["sft-qlora"]
    assert packed["weights"] < 0.7 * full["weights"] and packed["gradients"] < 0.5 * full["gradients"]
    assert full["gradients"] == pytest.approx(full["weights"], rel=0.01)


@pytest.mark.slow
def test_the_peers_job_is_ours(worlds, measured):
    asked = Job.read(world.job(worlds / "big", world.BIG))
    assert Path(asked.sft, "config.json").exists() and Path(asked.reward, "config.json").exists()
    assert [len(rows) for rows in asked.batches()] == [world.BIG.rows] * world.BIG.updates
    settings = config.load("ppo", BY_NAME["ppo-full"].config(worlds / "small")).ppo
    ours_ = Job.read(world.job(worlds / "small", world.SMALL))
    assert settings.total_episodes == ours_.batch * ours_.updates and settings.response_length == ours_.response_length
    assert settings.num_ppo_epochs == ours_.epochs and settings.per_device_train_batch_size == ours_.rows
    assert settings.stop_token == "none" and ours_.dense


def test_a_stage_that_fails_is_no_measurement(tmp_path, capsys):
    with pytest.raises(RuntimeError, match="ended with 2"):
        ours.run("ppo", "--config", str(tmp_path / "ppo.yaml"))
    assert "ppo.yaml" in capsys.readouterr().err


# Tables


def example(weights: float, **changes: Any) -> dict[str, Any]:
    plan = {"weights": weights, "learning": 30e6, "peak": 100e6, "holes": 30e6}
    found = {"weights": weights, "gradients": 10e6, "optimizer": 20e6, "one": 100e6}
    return {**found, "mapped": 77e6, "libraries": 600e6, "peak": 130e6, "training": 110e6, "plan": plan, **changes}


def parts(one_base: float = 115e6) -> dict[str, Any]:
    peer = {key: number for key, number in example(300e6, peak=260e6).items() if key not in ("plan", "one")}
    return {case.name: example(400e6) for case in CASES} | {"ppo-one-base": example(one_base), tables.PEER: peer}


def test_every_figure_stands_beside_the_plans():
    told = ["x", "60 / 60 (1.00)", "30 / 30 (1.00)", "130 / 100 (1.30)", "110"]
    assert tables.row("x", example(60e6), "returns") == told
    assert tables.row("x", example(60e6), "keeps") == [*told[:3], "130 / 130 (1.00)", "110"]
    stage = example(60e6, plan={"weights": 50e6, "peak": 100e6, "holes": 0})
    assert tables.row("x", stage, "returns") == ["x", "60 / 50 (1.20)", "30", "130 / 100 (1.30)", "110"]


def test_the_tables_say_what_was_found():
    text = markdown(list(tables.tables(parts(), "returns")))
    assert "takes 2.61 times the weights of our one base, 2.00 times its peak" in text
    assert (
        "qlora: 77 MB of the peak are pages" in text
        and "PPO has no qlora" in text
        and "| TRL 1.12, peft_config | 300 |" in text
    )
    assert "| <= 1.15 | 1.150 | yes |" in text and "malloc returns" in text
    assert all(f"| {case.title} | " in text for case in CASES)
    assert "| 1.160 | no |" in markdown(list(tables.tables(parts(one_base=116e6), "keeps")))


def test_a_table_fits_100_columns():
    plan = {**example(1_234e6)["plan"], "learning": 1_234e6, "peak": 1_234e6}
    one = example(1_234e6, plan=plan, gradients=617e6, optimizer=617e6, peak=1_234e6, training=1_234e6)
    for table in tables.tables(dict.fromkeys(parts(), one), "returns"):
        widths = [max(map(len, cells)) for cells in zip(table.columns, *table.rows, strict=True)]
        assert sum(widths) + 3 * len(widths) + 1 <= 100  # as it is drawn on a terminal
        assert all(len(note) <= 100 for note in table.notes)


def test_ppo_has_no_qlora(worlds):
    path = BY_NAME["ppo-one-base"].config(worlds / "small")
    with pytest.raises(RLHFError, match=r"models\.adapters\.kind"):
        config.load("ppo", path, ["models.adapters.kind=qlora"])


def test_every_case_is_a_config_that_loads(worlds):
    kinds = set()
    for case in CASES:
        found = config.load(case.stage, case.config(worlds / "big"))
        adapters = getattr(found, "models" if case.stage == "ppo" else "model").adapters
        kinds.add((case.stage, adapters.kind if adapters else "full"))
    assert kinds == {(stage, kind) for stage in ("sft", "reward") for kind in ("full", "lora", "qlora")} | {
        ("ppo", "full"), ("ppo", "lora"),
    }  # fmt: skip


def test_the_model_is_large_enough_to_count():
    shape = world.BIG.model
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    numbers = layers * (4 * hidden**2 + 3 * hidden * shape["intermediate_size"]) + shape["vocabulary"] * hidden
    assert 4 * numbers >= 300e6


def test_the_peer_needs_nothing_of_ours():
    for name in ("peer", "held"):
        tree = ast.parse((ROOT / f"benchmarks/memory/{name}.py").read_text(encoding="utf-8"))
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported = {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
        assert not any(name.startswith("rlhf_cli") for name in imported)
        ours_ = {name for name in imported if name.startswith("benchmarks")}
        allowed = ("benchmarks.memory.held", "benchmarks.speed.job.", "benchmarks.speed.peer.")
        assert all(name.startswith(allowed) for name in ours_)


def test_each_case_is_asked_once_in_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    asked: list[tuple[Any, ...]] = []

    def ask(module: str, *arguments: Any, **how: Any) -> dict[str, Any]:
        asked.append((module.rpartition(".")[2], *arguments[:-1], how))
        return example(100e6) if module.endswith("ours") else parts()[tables.PEER]

    monkeypatch.setattr(program, "ask", ask)
    monkeypatch.setattr(world, "BIG", world.SMALL)
    command = ["memory", "--peer", sys.executable, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert program.main() == 0
    told = capsys.readouterr().out
    assert [(side, *rest[:2]) for side, *rest in asked[:-1]] == [
        ("ours", case.stage, case.config(tmp_path / "world/big")) for case in CASES
    ]
    side, *jobs, how = asked[-1]
    assert side == "peer" and all(Path(job).is_file() for job in jobs[:2]) and how["python"] == Path(sys.executable)
    assert all(how["MALLOC_TRIM_THRESHOLD_"] == "65536" for *_, how in asked)
    assert json.loads((tmp_path / "memory.json").read_text())["bytes"].keys() == parts().keys()
    assert "| one base | 100 / 100 (1.00) |" in (tmp_path / "memory.md").read_text() and "one base" in told
    assert program.main() == 0 and len(asked) == len(CASES) + 1  # what was measured is kept
    monkeypatch.setattr(sys, "argv", [*command, "--malloc", "keeps"])
    assert program.main() == 0 and len(asked) == 2 * (len(CASES) + 1)
    assert not any("MALLOC_TRIM_THRESHOLD_" in how for *_, how in asked[len(CASES) + 1 :])


def test_without_the_peer_it_says_so_in_one_line(tmp_path):
    command = [sys.executable, "-m", "benchmarks.memory", "--peer", str(tmp_path / "none"), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert done.stderr.count("\n") == 1 and "make bench-memory" in done.stderr
