"""The speed benchmark: tokens counted right, the floor's arithmetic, fits and verdicts, and tiny runs of every part."""

import ast
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from benchmarks import fast_paths  # noqa: E402
from benchmarks.speed import demo, figure, floor, goals, ours, reference, start, synthetic, tables  # noqa: E402
from benchmarks.speed.__main__ import files  # noqa: E402
from benchmarks.speed.job import Job, Laps, real_tokens  # noqa: E402
from benchmarks.speed.kept import Kept  # noqa: E402
from benchmarks.speed.workload import Reference, prompts  # noqa: E402
from rlhf_cli.cli import app  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
GOOD = [f"a {word} film with heart and a plot that holds to the last scene" for word in ("fine", "warm", "great")] * 20
BAD = [f"a {word} mess without a plot and an end that nobody needs" for word in ("dull", "cold", "poor")] * 20


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    for name, lines in (("good", GOOD), ("bad", BAD)):
        lines = [f"{line} {number}" for number, line in enumerate(lines)]
        (folder / name).write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return folder / "good", folder / "bad"


@pytest.fixture(scope="module")
def models(texts, tmp_path_factory) -> Reference:
    folder = tmp_path_factory.mktemp("models")
    reference.fresh_model(GOOD + BAD, folder / "sft", vocabulary=300, **SIZES)
    scorer = LlamaForSequenceClassification.from_pretrained(folder / "sft", num_labels=1)
    scorer.save_pretrained(folder / "reward")
    return Reference(folder / "sft", folder / "reward", *texts)


def job(models: Reference, folder: Path, **changes) -> Job:
    rows = folder / "prompts.json"
    rows.write_text(json.dumps(prompts(models)), encoding="utf-8")
    sizes = {"updates": 2, "batch": 8, "rows": 4, "epochs": 2, "response_length": 6}
    return Job(str(models.sft), str(models.reward), str(rows), **(sizes | changes))


# Tokens


def test_tokens_are_counted_through_the_first_stop_token():
    prompts, responses = [[5, 6, 7], [8]], [[9, 2, 0, 0], [4, 4, 4, 4]]
    assert real_tokens(prompts, responses, stop=2) == 3 + 1 + 2 + 4
    assert real_tokens(prompts, [[9, 2, 2, 7], [2]], stop=2) == 4 + 2 + 1
    assert real_tokens(prompts, responses, stop=None) == 4 + 8


def test_both_sides_get_the_same_prompts_and_rounds_get_new_ones(models, tmp_path):
    one = job(models, tmp_path)
    one.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == one
    rows = prompts(models)
    assert one.batches() == [rows[:8], rows[8:16]]
    assert job(models, tmp_path, first=116).batches() == [rows[116:] + rows[:4], rows[4:12]]


def test_prompts_begin_sentences(models):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.sft)
    lines = [
        line for path in (models.positive, models.negative) for line in path.read_text(encoding="utf-8").split("\n")
    ]
    for ids in prompts(models):
        assert ids[0] == tokenizer.bos_token_id == 1
        head = tokenizer.decode(ids[1:]).strip()
        assert 3 <= len(head.split()) <= 12 and any(line.startswith(head) for line in lines)


def test_the_count_of_our_side_is_that_of_its_rows(models, tmp_path):
    asked = job(models, tmp_path, dense=True)
    found = ours.measure(asked)
    assert found["real_tokens"] == sum(map(len, asked.batches()[1])) + 8 * 6
    assert found["padded_tokens"] >= found["real_tokens"] and len(found["updates"]) == 2
    assert set(found["phases"]) == {"rollout", "judge", "update"}
    assert sum(found["phases"].values()) == pytest.approx(found["cpu_s"], rel=0.2)
    assert 0 < found["imports_mb"] < found["peak_mb"] and found["over_floor"] > 1


def test_our_side_counts_no_padding_where_responses_end_early(models, tmp_path):
    found = ours.measure(job(models, tmp_path, updates=1, response_length=64, settings={"packing": False}))
    ppo = ours.trainer(job(models, tmp_path, settings={"vf_coef": 0.5}))
    assert ppo.settings.vf_coef == 0.5 and ppo.settings.missing_eos_penalty == 1.0
    asked = job(models, tmp_path)
    rollout = ppo.generate(ours.Prompts.from_lists(asked.batches()[0]))
    rows = range(len(rollout))
    lists = [rollout.prompt_tokens(row) for row in rows], rollout.ids[:, rollout.prompt_width :].tolist()
    assert real_tokens(*lists, stop=2) == int(rollout.mask.sum())
    assert found["real_tokens"] < found["padded_tokens"]


# The floor


def test_the_floor_by_hand():
    shape = floor.Shape(hidden=2, intermediate=3, layers=1, heads=1, kv_heads=1, head_size=2, vocabulary=5)
    # q and o 8, k and v 8, MLP 18; a pair 2 + 2; two positions and three pairs before the last token
    assert (shape.linear, shape.pair) == (34, 4)
    body = 2 * 34 + 3 * 4
    assert floor.multiply_adds(shape, [(1, 2)], epochs=4) == 4 * 3 * (2 * body + 2 * 2 * 5 + 2 * 2)
    assert floor.multiply_adds(shape, [(1, 2), (1, 2)], epochs=1) == 2 * 3 * (2 * body + 2 * 2 * 5 + 2 * 2)


def test_the_floor_is_what_torch_counts():
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "tie_word_embeddings": True}
    config = LlamaConfig(**SIZES, **sizes, attn_implementation="eager")
    model, shape, prompt, response = LlamaForCausalLM(config), floor.Shape.of(config), 3, 5
    n = prompt + response - 1
    with FlopCounterMode(display=False) as counted:
        hidden = model.model(torch.randint(50, (1, n))).last_hidden_state
        model.lm_head(hidden[:, prompt - 1 :]).sum().backward()
    # eager attention makes all n^2 pairs; the value model is the same body with one number in place of the head
    unseen = 3 * (n * n - n * (n + 1) // 2) * shape.pair
    policy = counted.get_total_flops() / 2 - unseen
    value = policy - 3 * response * shape.hidden * (shape.vocabulary - 1)
    assert policy + value == floor.multiply_adds(shape, [(prompt, response)], epochs=1)


def test_attention_is_a_small_share_of_short_rows():
    shape = floor.Shape(hidden=2, intermediate=3, layers=1, heads=1, kv_heads=1, head_size=2, vocabulary=5)
    assert floor.attention_share(shape, 1, 2) == pytest.approx(2 * 3 * 4 / (2 * 80 + 24))


def test_the_machine_has_a_rate():
    shape = floor.Shape(hidden=8, intermediate=16, layers=1, heads=1, kv_heads=1, head_size=8, vocabulary=32)
    assert all(rate > 0 for rate in floor.rates(shape).values())


# Verdicts


@pytest.mark.parametrize("power", [0.5, 1.0, 1.05, 2.0])
def test_the_exponent_of_a_power_law(power):
    assert goals.exponent([(x, 3.5 * x**power) for x in (16, 32, 64, 128)]) == pytest.approx(power)


def test_a_goal_holds_at_its_bound_and_not_beyond():
    assert [goals.Verdict("", found, 2.7, 3.0).holds for found in (2.69, 2.7, 3.0)] == ["no", "yes", "yes, stretch too"]
    assert [goals.Verdict("", found, 1.5, below=True).holds for found in (1.5, 1.51)] == ["yes", "no"]
    assert goals.Verdict("", 1, 2.7, 3.0).wanted == ">= 2.7 (stretch 3)"


def sides(ours_tokens: float = 1000, **changes) -> dict:
    phases = {"rollout": 2.0, "judge": 2.0, "update": 4.0}
    peer = {
        "cpu_s": 20.0,
        "imports_mb": 400,
        "peak_mb": 1650,
        "real_tokens": 1000,
        "padded_tokens": 3000,
        "gflops": {"a": 90, "b": 80},
    }
    mine = {
        **peer,
        "cpu_s": 8.0,
        "peak_mb": 900,
        "real_tokens": ours_tokens,
        "floor_s": 3.0,
        "over_floor": 1.4,
        "gflops": {"a": 80, "b": 100},
    }
    return {"ours": [mine | {"phases": phases} | changes], "peer": [peer | {"phases": phases}]}


def parts() -> dict:
    growth = [{"tokens": 100 * n, "vocabulary": 100 * n, "cpu_s": 0.5 * n} for n in (1, 2, 4, 8)]
    profiled = {"command": ["rlhf", "ppo"], "phases": {"imports torch": 2.0, "update": 6.0}, "counts": {}}
    return {
        "ragged": sides(),
        "dense": sides(1040),
        "padding": [
            {"share": share, "real_tokens": 100, "padded_tokens": 120, "cpu_s": cost}
            for share, cost in ((0.0, 1.0), (0.5, 1.08))
        ],
        "growth": dict.fromkeys(("length", "batch", "vocabulary"), growth) | {"attention_share_at_longest": 0.04},
        "start": {"cpu_s": 0.1, "heavy": []},
        "demo": demo.profile([profiled]),
    }


def test_rounds_are_merged_by_their_medians():
    rounds = [sides(cpu_s=seconds, peak_mb=peak)["ours"][0] for seconds, peak in ((8, 900), (30, 910), (9, 1400))]
    both = goals.compared({"ours": rounds, "peer": sides()["peer"]})
    assert both["cpu"] == 20 / 9 and both["memory"] == 1250 / 510
    assert both["cpu_at_one_rate"] == pytest.approx(20 / 9 * 90 / 100)  # ours had the better moments
    assert both["ours"]["over_floor"] == 1.4


def test_the_table_says_when_the_tokens_do_not_compare():
    def said(tokens: float) -> str:
        return tables.side_by_side({"ragged": sides(tokens)}).notes[0]

    expected = (
        "ragged: the sides' real tokens are 5.0 % apart; at one rate of arithmetic TRL takes 2.25 times our CPU seconds"
    )
    assert said(1050) == expected
    assert "MORE THAN 5 %" in said(1051) and "MORE THAN 5 %" in said(949)


def test_every_goal_has_its_line():
    found = {one.name: one for one in goals.verdicts(parts())}
    assert found["ragged: CPU s an update, TRL / ours"].found == 2.5
    assert found["ragged: CPU s an update, TRL / ours"].holds == "no"
    assert found["dense: CPU s an update, TRL / ours"].holds == "yes, stretch too"
    assert found["ragged: peak memory above imports, TRL / ours"].found == 2.5
    assert found["cost a real token, padding 0 to 80 %: max / min"].found == pytest.approx(1.08)
    assert found["exponent of growth: batch, in tokens"].found == pytest.approx(1)
    assert len(found) == 12 and sum(one.holds == "no" for one in found.values()) == 1
    text = tables.markdown(list(tables.tables(parts())))
    assert "| dense | rlhf | 1040 | 3000 | 8.00 | 2.00 | 2.00 | 4.00 | 7.69 | 900 | 500 | 3.00 | 100 |" in text
    assert "| 50 % | 100 | 120 | 10.80 | 1.08 | 2.00 |" in text
    assert "4.0 % of the arithmetic at the longest" in text


def test_a_help_that_loads_torch_misses_its_goal():
    (verdict,) = goals.verdicts({"start": {"cpu_s": 0.1, "heavy": ["torch"]}})
    assert verdict.holds == "no" and "loads torch!" in verdict.name


def test_the_figure_is_drawn_of_whatever_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    figure.draw(parts(), tmp_path / "all.svg")
    figure.draw({"padding": parts()["padding"]}, tmp_path / "one.svg")
    sizes = [(tmp_path / f"{name}.svg").stat().st_size for name in ("all", "one")]
    assert sizes[0] > sizes[1] > 0


# Synthetic episodes


@pytest.mark.parametrize("share", synthetic.SHARES)
def test_lengths_have_the_mean_and_the_padding_that_were_asked_for(share):
    lengths = synthetic.ragged_lengths(64, 32, share)
    assert len(lengths) == 64 and sum(lengths) == 64 * 32 and min(lengths) >= synthetic.SHORTEST
    rows = synthetic.rollout(lengths, 100)
    assert 1 - rows.mask.float().mean() == pytest.approx(share, abs=0.01)
    assert sorted(rows.lengths.tolist()) == sorted(lengths)


def test_lengths_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="cannot have 32 on average"):
        synthetic.ragged_lengths(4, 32, 0.8)


def test_padding_and_growth_are_measured(models, monkeypatch):
    body = synthetic.config(str(models.sft))
    monkeypatch.setattr(synthetic, "SHARES", (0.0, 0.5))
    points = synthetic.padding(body, batch=8, mean=16, repeats=1)
    assert [point["real_tokens"] for point in points] == [128, 128]
    assert [point["share"] for point in points] == [0.0, 0.5] and points[0]["padded_tokens"] == 128
    for name, sizes in (("LENGTHS", (2, 3)), ("BATCHES", (2, 4)), ("VOCABULARIES", (300, 600))):
        monkeypatch.setattr(synthetic, name, sizes)
    monkeypatch.setattr(synthetic, "GROWN_BATCH", 4)
    monkeypatch.setattr(synthetic, "GROWN_LENGTH", 5)
    grown = synthetic.growth(str(models.sft))
    assert [point["tokens"] for point in grown["length"]] == [4 * 10, 4 * 11]
    assert [point["tokens"] for point in grown["batch"]] == [2 * 13, 4 * 13]
    assert [point["vocabulary"] for point in grown["vocabulary"]] == [300, 600]
    assert all(point["cpu_s"] > 0 for name in ("length", "batch", "vocabulary") for point in grown[name])


def test_single_parts_are_measured(monkeypatch, capsys):
    monkeypatch.setattr(fast_paths, "REPEATS", 1)
    fast_paths.main()
    told = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(told) == 6 and all(float(number) > 0 for line in told for number in line[-3:])


# The chain


def test_help_is_quick_and_loads_no_torch():
    found = start.measure()
    assert found["heavy"] == [] and 0 < found["cpu_s"] < 2


WATCHED = """
import hashlib, importlib, time
from rlhf_cli.config.sources import DataSource
from rlhf_cli.data.sources import read_rows
def spin(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until: pass
importlib.import_module("hashlib")
for _ in range(2):
    with open("rows.jsonl", "rb") as file: hashlib.file_digest(file, "sha256")
rows = list(read_rows(DataSource("rows.jsonl"))) + list(read_rows(DataSource("rows.jsonl")))
assert len(rows) == 6
next(read_rows(DataSource("rows.jsonl")))
import heavy
spin(0.1)
"""


def test_a_process_is_watched_from_outside(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n" * 3)
    (tmp_path / "heavy.py").write_text(
        "import time\nuntil = time.process_time() + 0.2\nwhile time.process_time() < until: pass\n"
    )
    (tmp_path / "run.py").write_text(WATCHED)
    (tmp_path / "out").mkdir()
    watch = {
        "PYTHONPATH": f"{demo.WATCH}{os.pathsep}{ROOT}",
        "WATCH_OUT": str(tmp_path / "out"),
        "WATCH_BELOW": str(tmp_path),
    }
    subprocess.run([sys.executable, "run.py", "ppo"], env={**os.environ, **watch}, cwd=tmp_path, check=True)
    (file,) = (tmp_path / "out").iterdir()
    found = json.loads(file.read_text())
    assert found["command"] == ["run.py", "ppo"]
    assert found["counts"]["hashes"] == {"rows.jsonl": 2}
    assert found["counts"]["reads"] == {"rows.jsonl": 2}  # and a look at the first row
    assert 0.2 <= found["phases"]["imports heavy"] < 0.3 and 0.1 <= found["phases"]["other"] < 0.25
    stage = demo.profile([found])["stages"]["ppo"]
    assert stage["doubles"] == ["hashes rows.jsonl 2 times", "reads the rows of rows.jsonl 2 times"]
    assert stage["cpu_s"] == pytest.approx(sum(found["phases"].values()), abs=0.01)
    assert stage["phases"]["imports"] >= stage["imports"]["heavy"] >= 0.2


def test_what_is_watched_is_there():
    """Each function of the table stands where it is looked for, in the module or the class itself."""
    source = (demo.WATCH / "sitecustomize.py").read_text(encoding="utf-8")
    said = next(each for each in ast.parse(source).body if isinstance(each, ast.Assign) and "WATCHED" in ast.dump(each))
    table = eval(ast.unparse(said.value))
    assert len(table) > 8
    for module, functions in table.items():
        file = importlib.util.find_spec(module).origin
        for path, *_ in functions:
            inside = ast.parse(Path(file).read_text(encoding="utf-8"))
            for part in path.split("."):
                inside = next(each for each in inside.body if getattr(each, "name", None) == part)


def test_a_profile_is_by_command():
    def process(*command: str, **counts) -> dict:
        return {
            "command": list(command),
            "phases": {"imports torch": 1.0, "imports trl": 0.5, "training": 2.5},
            "counts": counts,
        }

    processes = [
        process("rlhf", "sft", "--config", "demo/sft.yaml", models={"a": 2}, reads={"x.jsonl": 2, "y.jsonl": 1}),
        process("rlhf", "sft", "--config", "demo/base/sft.yaml", models={"a": 1}),
        process("rlhf", "run", "demo", tokenised={"100 rows, 7": 2}),
    ]
    found = demo.profile(processes)
    assert set(found["stages"]) == {"sft", "sft (base)", "run"} and found["cpu_s"] == 12
    assert found["stages"]["sft"]["doubles"] == ["loads a 2 times", "reads the rows of x.jsonl 2 times"]
    assert found["stages"]["sft (base)"]["doubles"] == []
    assert found["stages"]["run"]["doubles"] == ["tokenises 100 rows, 7 2 times"]
    assert demo.start_up(found["stages"]["sft"]) == 1.5
    assert found["stages"]["sft"]["imports"] == {"torch": 1.0, "trl": 0.5}


# Running


def test_a_part_is_measured_once(tmp_path):
    kept = Kept(tmp_path)
    assert kept.get("start", lambda: 1) == 1 and kept.get("start", lambda: 2) == 1 and kept.has(files("start", 1))
    assert kept.get("ragged/ours-0", lambda: 3) == 3 and not kept.has(files("ragged", 1))
    assert (
        kept.get("ragged/peer-0", lambda: 4) == 4 and kept.has(files("ragged", 1)) and not kept.has(files("ragged", 2))
    )
    assert not kept.stale
    other = Kept(tmp_path)
    other.code = "other"
    assert other.get("start", lambda: 5) == 1 and other.get("ragged/peer-0", lambda: 5) == 4
    assert other.stale == {"start"}  # ours has changed, the peer has not
    other.drop("start")
    other.drop("ragged")
    assert other.get("start", lambda: 5) == other.get("ragged/peer-0", lambda: 5) == 5


def test_laps_leave_the_first_one_out():
    laps = Laps()
    for seconds in (9.0, 1.0, 2.0, 3.0):
        laps.add("step", seconds)
    laps.add("once", 4.0)
    assert laps.medians() == {"step": 2.0, "once": 4.0}


def test_without_models_it_says_so_in_one_line(tmp_path):
    command = [sys.executable, "-m", "benchmarks.speed", "--shared", str(tmp_path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "is missing" in done.stderr and "--pos" in done.stderr


def test_the_peer_needs_nothing_of_ours():
    for name in ("peer", "job", "floor"):
        tree = ast.parse((ROOT / f"benchmarks/speed/{name}.py").read_text(encoding="utf-8"))
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not any(module.startswith("rlhf_cli") for module in imported)
        assert {module for module in imported if module.startswith("benchmarks")} <= {
            "benchmarks.speed.job",
            "benchmarks.speed.floor",
        }


def test_the_reference_models_run_is_one_that_check_accepts(texts, tmp_path):
    sizes = SIZES | {"num_attention_heads": 2, "num_key_value_heads": 2}
    reference.prepare(*texts, tmp_path / "run", vocabulary=300, **sizes)
    done = CliRunner().invoke(app, ["check", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "run/data/texts.jsonl").read_text().splitlines()]
    assert len(lines) == 120 and all(row["prompt"] == "<bos>" for row in lines)
    counts = [len((tmp_path / f"run/data/{name}.jsonl").read_text().splitlines()) for name in ("pairs", "pairs_eval")]
    assert counts == [54, 6]
    from transformers import AutoTokenizer

    from rlhf_cli import data

    encoded = data.encode(AutoTokenizer.from_pretrained(tmp_path / "run/base"), "<bos>", random.choice(GOOD))
    assert encoded[0] == [1] and encoded[1][-1] == 2 and 2 not in encoded[1][:-1]
