"""Smoke tests: each benchmark runs in tiny sizes on the CPU. TRL 1.12 is replaced by canned results."""

import importlib
import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from operator import attrgetter
from pathlib import Path

import pytest
import safetensors.torch
import tiny
import torch
from cost import cpu_seconds
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from typer.testing import CliRunner
from without_packages import python

from benchmarks import chain, fast_paths, gpu_check, placement, reward_models, scale
from benchmarks.learning import __main__ as learning
from benchmarks.memory import __main__ as memory
from benchmarks.speed import __main__ as speed
from benchmarks.speed import cli_time, floor, ours, reference, synthetic
from benchmarks.speed.workload import Job
from rlhf_cli.cli import app
from rlhf_cli.files import file_sha256

ROOT = Path(__file__).parents[2]

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
JUDGE = """import sys
for path in sys.argv[2:]:
    print(f"{path.split('/')[-2]}: P(pos) 0.851 win 0.926 [0.895, 0.957] reward -0.02 KL 11.4 length 23.9")
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder like the developers' shared folder, with tiny models."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "data/rt-polarity").mkdir(parents=True)
    (folder / "bench").mkdir()
    texts = [f"a film with heart and a plot that holds to scene {n}" for n in range(60)]
    for name in ("pos", "neg"):
        (folder / f"data/rt-polarity/{name}.txt").write_text("\n".join(texts), encoding="utf-8")
    reference.fresh_model(texts, folder / "models/reviews-sft", vocabulary=300, **SIZES)
    scorer = LlamaForSequenceClassification.from_pretrained(folder / "models/reviews-sft", num_labels=1)
    scorer.save_pretrained(folder / "models/reviews-rm")
    curve = [{"objective/scores": float(n), "objective/kl": 2.0 * n} for n in range(12)]
    (folder / "bench/trl_curves.jsonl").write_text(json.dumps({"seed": 0, "curve": curve}) + "\n", encoding="utf-8")
    (folder / "bench/judge.py").write_text(JUDGE, encoding="utf-8")
    return folder


def run(monkeypatch, module, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
    return module.main()


@pytest.mark.slow
def test_speed(shared, tmp_path, monkeypatch):
    calls: list[str] = []

    def run_module(module: str, *arguments, **_) -> object:
        calls.append(module)
        if module.endswith("synthetic"):
            model, part = arguments[2:]
            body = synthetic.config(model)
            return synthetic.growth(model) if part == "growth" else synthetic.padding(body, batch=8, mean=16, repeats=1)
        return ours.measure(replace(Job.read(arguments[0]), batch=8, rows=4, epochs=1, response_length=6))

    monkeypatch.setattr(speed, "run_module", run_module)
    tiny = {"SHARES": (0.0, 0.5), "LENGTHS": (2, 3, 4, 5), "BATCHES": (2, 4, 6, 8), "VOCABULARIES": range(300, 500, 50)}
    for name, value in tiny.items():
        monkeypatch.setattr(synthetic, name, value)
    out = tmp_path / "out"
    command = ("--shared", shared, "--out", out, "--rounds", 1, "--updates", 2, "--peer", sys.executable)
    command += ("--only", "ragged", "dense", "padding", "growth", "start")
    assert run(monkeypatch, speed, *command) == 0
    result, prompts = (json.loads((out / f"{name}.json").read_text()) for name in ("bench", "prompts"))
    dense = result["dense"]["ours"][0]
    assert dense["real_tokens"] == sum(map(len, prompts[8:16])) + 8 * 6  # the first update is a warm-up
    assert sum(dense["phases"].values()) == pytest.approx(dense["cpu_s"], rel=0.3) and dense["over_floor"] > 1
    assert [point["real_tokens"] for point in result["padding"]] == [128, 128] and result["start"]["heavy"] == []
    assert len(result["goals"]) > 5 and (out / "bench.svg").stat().st_size > 0
    assert "| dense | TRL 1.12 |" in (out / "bench.md").read_text()
    calls.clear()
    assert run(monkeypatch, speed, *command) == 0 and not calls  # results are reused
    assert run(monkeypatch, speed, *command, "--set", "vf_coef=0.5") == 2  # another job


@pytest.mark.slow
@pytest.mark.full
def test_memory(tmp_path, monkeypatch):
    kinds = ("weights", "gradients", "optimizer", "one", "mapped", "libraries", "peak", "training")
    canned = dict.fromkeys(kinds, 1e6) | {"plan": dict.fromkeys(("weights", "learning", "peak", "holes"), 1e6)}

    def run_module(module: str, stage: str, *arguments, **_) -> dict:
        real = module.endswith("ours") and arguments[0].parent.name in ("reward-full", "ppo-full")
        return importlib.import_module(module).measure(stage, *arguments) if real else canned

    monkeypatch.setattr(memory, "run_module", run_module)
    monkeypatch.setattr(memory.cases, "BIG", memory.cases.SMALL)
    assert run(monkeypatch, memory, "--peer", sys.executable, "--out", tmp_path) == 0
    ppo = json.loads((tmp_path / "memory.json").read_text())["bytes"]["ppo-full"]
    assert ppo["weights"] == pytest.approx(4 * ppo["one"], rel=0.01)
    assert ppo["gradients"] == pytest.approx(2 * ppo["one"], rel=0.01)  # policy and value model
    assert ppo["optimizer"] == pytest.approx(2 * ppo["gradients"], rel=0.01)
    assert ppo["weights"] == pytest.approx(ppo["plan"]["weights"], rel=0.05)
    assert all(f"| {case.title} | " in (tmp_path / "memory.md").read_text() for case in memory.CASES)


@pytest.mark.slow
@pytest.mark.full
def test_learning(shared, tmp_path, monkeypatch):
    sets = [
        "--set",
        "total_episodes=128",
        "--set",
        "num_ppo_epochs=1",
        "--set",
        "response_length=8",
        "--set",
        "average=0.5",
    ]
    command = ("--shared", shared, "--out", tmp_path, "--seeds", 0, "--samples", 2, *sets)
    out = tmp_path / "default"
    judge = lambda _: lambda texts: [float(len(text)) for text in texts]  # noqa: E731
    monkeypatch.setattr(learning.heldout.Evaluator, "judge", property(judge))
    monkeypatch.setattr(learning.heldout, "SHARES", (0.5, 1.0))
    assert run(monkeypatch, learning, *command) == 0
    text = (out / "learning.md").read_text()
    assert "| TRL 1.12, seed 0 | 2.50 | 5.00 | 7.50 | 9.00 | 18.0 |" in text  # interpolated means of five updates
    assert "| rlhf, seed 0 |" in text and "\\* never at that KL" in text  # the run ends at a KL near 0
    assert (tmp_path / "learning.svg").stat().st_size > 0
    monkeypatch.delattr(learning.train, "load_policy")  # a complete run is not repeated
    assert run(monkeypatch, learning, *command) == 0 and (out / "learning.md").read_text() == text
    lines = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    points = [(line["recipe"], line["seeds"], line["weights"], line["share"]) for line in lines]
    assert points == [("default", "0", weights, share) for weights in ("policy", "average") for share in (0.5, 1.0)]
    for line in lines:
        assert line["n"] == 8 * min(64, 2 * 60) and abs(line["kl"]) < 1 and 0 <= line["judge"] <= 1
    assert len({line["kl"] for line in lines}) == 4 and "| default, seed 0, average |" in text


def test_the_recipes_differ_as_they_say():
    default, trl, frontier = (learning.ppo_settings(name, []) for name in ("default", "trl", "frontier"))
    assert default == trl and (frontier.kl_in, frontier.num_updates()) == ("both", 2 * default.num_updates())
    assert learning.ppo_settings("frontier", ["kl_coef=0.3"]).kl_coef == 0.3


def test_the_mean_of_several_policies(tmp_path):
    models = [tiny.causal(seed=seed) for seed in (0, 1, 2)]
    for seed, model in enumerate(models):
        model.save_pretrained(tmp_path / str(seed))
    mean = learning.heldout.load_mean([tmp_path / str(seed) for seed in (0, 1, 2)])
    expected = [sum(weights) / 3 for weights in zip(*(model.parameters() for model in models), strict=True)]
    assert all(torch.allclose(own, weight) for own, weight in zip(mean.parameters(), expected, strict=True))


def test_the_kl_of_a_score_between_the_shares_of_a_policy():
    """The gain over SFT's -0.42 is proportional to the root of the KL here."""
    points = [(0.0, -0.42, 0.0, 0.5), (1.0, 1.58, 4.0, 0.7), (2.0, 3.58, 16.0, 0.9)]
    key = {"recipe": "a", "seeds": "0 1", "weights": "average"}
    lines = [dict(zip(("share", "score", "kl", "judge"), point, strict=True), **key) for point in points]
    heldout = learning.heldout
    assert [heldout.kl_for(lines, score) for score in (0.58, 2.58, 4.0)] == [
        pytest.approx(1.0),
        pytest.approx(9.0),
        None,
    ]
    alone = [line | {"seeds": "1", "weights": "policy"} for line in lines[:2]]
    rows = heldout.table([*reversed(lines), *alone])[2:4]
    assert rows == [
        "| a, seed 1 | 1.30 | - | - | 0.70 | 0: -0.42, 0.00; 1: 1.58, 4.00 |",
        "| a, mean of seeds 0 1, average | 1.30 | 4.58 | 8.12 | 0.70 | 0: -0.42, 0.00; 1: 1.58, 4.00; 2: 3.58, 16.00 |",
    ]


def test_the_gain_over_sft_for_each_root_of_kl():
    """Of the last 10 of each 20 updates: (score + 0.4) / root of KL; an incomplete 20 counts for nothing."""
    curve = [(9.0, 9.0)] * 10 + [(0.4, 1.0)] * 10 + [(9.0, 9.0)] * 10 + [(0.8, 1.0), (2.8, 7.0)] * 5 + [(9.0, 9.0)] * 19
    assert learning.curves.gains(curve, -0.4) == pytest.approx([0.8, 1.1])


@pytest.mark.slow
@pytest.mark.full
def test_gpu_needs_only_torch_transformers_and_pydantic(tmp_path):
    path, code = tmp_path / "gpu.json", "from benchmarks import gpu; gpu.ENGINES['graph'] = lambda *_, **__: 1 / 0; "
    missing = {"trl", "datasets", "accelerate", "peft", "bitsandbytes", "psutil", "kernels", "matplotlib"}
    python(code + f"assert gpu.main(['--tiny', '--device', 'cpu', '--json', '{path}']) == 1", missing)
    rows = {(row["part"], row["what"]): row for row in json.loads(path.read_text())["rows"]}
    assert rows["rollout", "tiny-8 graph"]["failed"].startswith("ZeroDivisionError")
    assert rows["rollout", "tiny-8 hf"]["step_ms"] > 0
    for phase in ("reward", "judge", "update"):
        assert rows["update", f"tiny-8 {phase}"]["seconds"] > 0
        assert len(rows["kernels", f"tiny-8 {phase}"]["longest"]) == 10
    assert rows["update", "tiny-8 without rollout"]["first_ratio_error"] == 0


@pytest.mark.slow
@pytest.mark.full
def test_gpu_check_reports_what_does_not_hold(tmp_path, monkeypatch):
    path = tmp_path / "check.json"
    command = ["--tiny", "--only", "number", "memory", "--json", str(path)]
    assert gpu_check.main(command) == 0
    assert len(json.loads(path.read_text())["rows"]) == 10
    monkeypatch.setattr(gpu_check.forward, "float32_logits", lambda *models: nullcontext())
    assert gpu_check.main(command) == 1
    failed = [row for row in json.loads(path.read_text())["rows"] if "failed" in row]
    assert [row["what"] for row in failed] == ["product of a bfloat16 head"] and "bfloat16" in failed[0]["failed"]


def test_chain_counts_reads_of_numbers_and_not_of_headers(tmp_path):
    path, reads = tmp_path / "model.safetensors", Counter()
    save_file({"a": torch.zeros(3), "b": torch.ones(2)}, path)
    with chain.counting_reads(reads):
        with safetensors.safe_open(path, "pt") as file:
            assert file.get_slice("a").get_shape() == [3] and not reads
            assert file.get_tensor("b").sum() == 2 and file.get_slice("a")[:].sum() == 0
        assert reads[str(path)] == 1
        file_sha256(path)
        assert reads[str(path)] == 2 and safetensors.torch.load_file(path).keys() == {"a", "b"}
    assert reads[str(path)] == 3


@pytest.mark.full
def test_a_row_of_the_table_of_gpus_is_current():
    """Through `rlhf init preferences` and `rlhf plan`; the table asserts that each stage of each row fits."""
    (row,) = placement.table(["Qwen3-0.6B"], [24])[2:]
    assert row in (ROOT / "docs/results/placement.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_the_plan_of_a_large_model_with_advice_takes_few_cpu_seconds(tmp_path, monkeypatch):
    """8 G parameters with whole weights, for a GPU that no stage fits: 50 plans of a stage.

    They take less CPU time than the imports of the command, torch and transformers among them.
    """
    placement.write_inputs(tmp_path, placement.MODELS["Qwen3-8B"])
    monkeypatch.chdir(tmp_path)
    data = ("run", "--data", "pairs.jsonl", "--base", "base")
    written = CliRunner().invoke(app, ["init", "preferences", *data, "--gpu", "2000", "--adapters", "none"])
    assert written.exit_code == 0, written.output
    command = [sys.executable, "-m", "rlhf_cli", "plan", "run", "--gpu", "24", "--flops", "4e14"]
    planned = subprocess.run(command, capture_output=True, text=True, check=True)
    assert planned.stdout.count("fits, with ") == 3 and planned.stdout.count("does not fit, with ") == 4
    imports = [sys.executable, "-c", "from rlhf_cli.commands.plan import run"]
    planning, importing = (
        min(cpu_seconds(lambda each=each: subprocess.run(each, check=True)) for _ in range(2))
        for each in (command, imports)
    )
    assert planning <= 2 * importing  # 1.1 to 1.6


def test_fast_paths(monkeypatch, capsys):
    monkeypatch.setattr(fast_paths, "REPEATS", 1)
    fast_paths.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 6 and all(float(number) > 0 for row in rows for number in row[-3:])


@pytest.mark.full
def test_scale(tmp_path, monkeypatch):
    monkeypatch.setitem(scale.MODELS, "tiny", (32, 64, 2, 4, 2, 300, True))
    monkeypatch.setattr(scale, "MODES", {"full": scale.MODES["full"]})
    assert run(monkeypatch, scale, "--models", "tiny", "--out", tmp_path) is None
    assert json.loads((tmp_path / "scale.json").read_text())["tiny"]["full"]["8"]["steps"] == 196


def test_modules_of_the_trl_environment_import_nothing_of_rlhf_cli():
    names = {"golden", "memory.peer", "memory.tensors", "speed.peer", "speed.workload", "speed.counters", "speed.floor"}
    for name in names:
        text = (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        imports = re.findall(r"^from (?:benchmarks\.|(?=rlhf_cli))(\S+) import (.+)", text, re.MULTILINE)
        assert all(base in names or {f"{base}.{each}" for each in part.split(", ")} <= names for base, part in imports)


def test_watched_functions_exist():
    for module, functions in runpy.run_path(cli_time.WATCH / "sitecustomize.py")["WATCHED"].items():
        for path, *_ in functions:
            assert callable(attrgetter(path)(importlib.import_module(module)))


def test_flops_equal_those_that_torch_counts():
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, vocab_size=50)
    config._attn_implementation = "eager"  # torch does not count fused attention on a CPU
    model, shape = LlamaForCausalLM(config), floor.Shape.of(config)
    prompt, response, n = 3, 5, 7  # positions: all but the last token
    with FlopCounterMode(display=False) as counter:
        hidden = model.model(torch.randint(50, (1, n))).last_hidden_state
        logits = model.lm_head(hidden[:, prompt - 1 :]).sum()
        forward = counter.get_total_flops()
        logits.backward()
    not_causal = (n * n - n * (n + 1) // 2) * shape.pair  # eager attention computes all n^2 pairs
    assert floor.forward_flops(shape, [n], response) == forward - 2 * not_causal
    policy = counter.get_total_flops() / 2 - 3 * not_causal
    value = policy - 3 * response * shape.hidden * (shape.vocabulary - 1)  # one output in place of the vocabulary
    assert floor.multiply_adds(shape, [(prompt, response)], epochs=1) == policy + value


def test_the_best_of_n_is_a_mean_over_all_subsets(monkeypatch):
    monkeypatch.setattr(reward_models, "BEST_OF", (1, 2, 4))
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 4, generator=generator)
    golds = torch.rand(3, 4, generator=generator)
    found = reward_models.best_of_n(scores, golds)
    for n in (1, 2, 4):
        subsets = [list(subset) for subset in combinations(range(4), n)]
        means = [golds[range(3), [s[int(row[s].argmax())] for row in scores]].mean() for s in subsets]
        assert found[f"best_of_{n}"] == pytest.approx(float(torch.stack(means).mean()))
