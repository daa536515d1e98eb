"""Whatever stands in a config or in a data file: no traceback, a code and a place, and nothing that is lost in silence.

300 cases, the same each time; `make fuzz CASES=50000` draws others.
"""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import fuzzing
import pytest
import yaml
from bad_inputs import check, foreign_scorer
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st

from rlhf_cli import jsonl
from rlhf_cli.config.loading import keys, load, stage_of
from rlhf_cli.errors import CODES
from rlhf_cli.rewards import trial
from tests.conftest import turns

pytestmark = pytest.mark.full
LINE = re.compile(r"(error|warning)\[(\w+)\]: (\S.*)")
TEXTS = {
    "sft": [
        "model: {path: model}\ndata: {train: rows.jsonl}\nsft: {max_steps: 1, max_length: 100}\n",
        "# A comment.\nstage: sft\nrun: .\nseed: 3\n\nmodel:\n  path: ./model\n  dtype: float32\n"
        "  chat_template: chatml\ndata:\n  train: messages.jsonl\n  eval: rows.jsonl\n  on_long: drop\n"
        "sft:\n  learning_rate: 1e-5\n  num_train_epochs: 1.5\n  packing: false\n  bf16: null\n"
        "trainer:\n  optim: adamw_torch\n  full_determinism: false\n"
        "output: {save_steps: 1, keep: 2, run_name: mine}\n",
    ],
    "reward": [
        "model: {path: model}\ndata: {train: pairs.jsonl}\nreward: {max_steps: 12, max_length: 100}\n",
        "model:\n  path: model\ndata:\n  train: pairs.jsonl\n  columns: {prompt: prompt}\n  eval_fraction: 0.5\n"
        "reward:\n  per_device_train_batch_size: 2\n  normalize: none\n  center_rewards_coefficient: 0.01\n",
        "model: {path: model}\ndata:\n  train:\n  - path: pairs.jsonl\n    weight: 0.5\n  - path: pairs.jsonl\n"
        "    weight: 2\n    format: plain\n    columns: {prompt: prompt}\n  pairs_per_prompt: all\n"
        "  min_rating_gap: 0.5\n  margin_per_point: 0.25\n"
        "reward:\n  max_steps: 2\n",
    ],
    "ppo": [
        "models: {sft: model, reward: scorer}\ndata: {prompts: prompts.jsonl}\nppo:\n  total_episodes: 64\n"
        "  response_length: 16\n",
        "models:\n  sft: model\n  reward: scorer\n  value: reward\ndata:\n  prompts: prompts.jsonl\n"
        "rewards:\n  reward: {weight: 1.0, clip: 5}\n  long: {function: 'builtins:len', weight: 0.5}\nppo:\n"
        "  total_episodes: 64\n  per_device_train_batch_size: 4\n  gradient_accumulation_steps: 2\n"
        "  num_mini_batches: 2\n  kl_in: loss\n  kl_estimator: k3\n  response_length: 16\n"
        "  temperature: 0.7\n  stop_token: eos\n",
    ],
    "eval": [
        "models: {sft: model, ppo: model, reward: scorer}\ndata: {prompts: prompts.jsonl}\n"
        "eval: {n: 8, best_of: [2], response_length: 16, temperature: 1.0}\n",
        "models:\n  sft: model\n  ppo: model\n  reward: scorer\njudges:\n  gold: 'builtins:len'\n  other: scorer\n"
        "data:\n  prompts: prompts.jsonl\neval:\n  n: 8\n  best_of: []\n  response_length: 16\n  temperature: 1.0\n"
        "  require: {win_rate.ppo_vs_sft.gold.value: '>= 0.6'}\n",
    ],
}  # fmt: skip


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tests' folder with all that TEXTS name, moved two deeper: `../..` holds nothing of other tests."""
    monkeypatch.setattr(trial, "try_functions", lambda job: {name: [1.0] for name in job.functions})  # starts none
    foreign_scorer(folder)
    shutil.copy(folder / "rows.jsonl", folder / "good-rows.jsonl")
    jsonl.write_jsonl(folder / "messages.jsonl", [{"messages": turns(f"Number {n}?", "Yes.")} for n in range(8)])
    deeper = folder / "two" / "deeper"
    files = list(folder.iterdir())
    deeper.mkdir(parents=True)
    for path in files:
        path.rename(deeper / path.name)
    monkeypatch.chdir(deeper)
    return deeper


def outcome(result: Any, places: tuple[str, ...]) -> int:
    """The exit code of a check, whose messages must have their form, a code of the table and a place."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output, result.output
    errors = []
    for line in result.stderr.splitlines():
        if found := LINE.match(line):
            assert found[2] in CODES and found[2] != "R00", line
            errors += [found] if found[1] == "error" else []
        else:
            assert line.startswith(("hint: ", "sft      packing: ")), line
    assert result.exit_code == (2 if errors else 0), result.output
    for found in errors:
        assert CODES[found[2]].exit and found[3].startswith(places), found[0]
    return result.exit_code


@pytest.mark.parametrize("stage", TEXTS)
def test_configs_with_faults(stage: str, here: Path) -> None:
    """1200 cases: what is not refused stands in the resolved config as it was written."""
    path, ends = here / "x.yaml", Counter[int]()

    @cases(300)
    @given(
        st.sampled_from(TEXTS[stage]),
        fuzzing.yaml_steps,
        st.one_of(st.none(), st.none(), st.tuples(st.sampled_from(sorted(keys(stage))), st.sampled_from(fuzzing.ODD))),
    )
    def case(text: str, steps: Any, override: tuple[str, str] | None) -> None:
        path.write_bytes(fuzzing.mutated(text, steps))
        sets = ["-s", "=".join(override).replace("NAME", "reward")] if override else []
        ends[code := outcome(check("x.yaml", "-q", *sets), ("x.yaml", "--set ", *DATA))] += 1
        if code == 0 and not override:
            resolved = load(stage_of(path), path).dump()
            written_down = list(fuzzing.leaves(path))
            assert len({key for key, _ in written_down}) == len(written_down), "a key stands twice"
            for key, written in written_down:
                assert fuzzing.is_kept(resolved, key, written, here), (key, written)

    case()
    assert min(ends[0], ends[2]) >= sum(ends.values()) // 50, ends  # both were put to the test


DATA = ("model/", "scorer/", "rows.jsonl", "pairs.jsonl", "prompts.jsonl", "messages.jsonl")
FORMS = {
    "sft": [("rows", {"prompt": "Tell me", "completion": " Yes."}), ("rows", {"text": "Tell me of the sun."}),
            ("messages", {"messages": turns("Hi", "Yes?", "And?", "No.")}),
            ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                                       {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]}]})],
    "reward": [("pairs", {"prompt": "Tell me", "chosen": " Yes.", "rejected": " No."}),
               ("pairs", {"chosen": "Tell me. Yes.", "rejected": "Tell me. No.", "margin": 0.5}),
               ("pairs", {"prompt": turns("Hi"), "chosen": turns("Hi", "Yes?"), "rejected": turns("Hi", "No?")}),
               ("pairs", {"prompt": "Tell me", "responses": [" Yes.", " No.", " So?"], "scores": [3, 1.5, 3]}),
               ("pairs", {"instruction": "Tell me", "completions": [{"response": " Yes.", "overall_score": 8},
                                                                    {"response": " No.", "overall_score": 2}]}),
               ("pairs", {"prompt": "Tell me", "response_0": " No.", "response_1": " Yes.", "better_response_id": 1}),
               ("pairs", {"prompt": "Tell me", "response": " Yes.", "helpfulness": 4, "correctness": 3}),
               ("pairs", {"prompt": "Tell me", "response_1": " No.", "response_2": " Yes.", "preference_strength": 2}),
               ("pairs", {"context": turns("Hi"), "response1": "No?", "response2": "Yes?", "overall_preference": -3}),
               ("pairs", {"prompt": "Tell me", "chosen": " Yes.", "rejected": " No.", "overall_preference": 1}),
               *(("pairs", {"prompt": "Tell me", "completion": " Yes.", "label": label}) for label in (True, False))],
    "ppo": [("prompts", {"prompt": "Tell me"}), ("prompts", {"messages": turns("Hi", "Yes?")})],
    "eval": [("prompts", {"prompt": "Tell me"}), ("prompts", {"prompt": turns("Hi")})],
}  # fmt: skip


def rows_like(row: dict[str, Any]) -> list[dict[str, Any]]:
    """64 rows; of labels and single ratings every second one is of the other kind, on 32 prompts."""
    if "label" in row:
        return [row | {"prompt": f"Tell me {n // 2}", "label": row["label"] is bool(n % 2)} for n in range(64)]
    if "helpfulness" in row:
        return [
            row | {"prompt": f"Tell me {n // 2}", "response": f" Yes {n}.", "helpfulness": n % 5} for n in range(64)
        ]
    return [row] * 64


@pytest.mark.parametrize("stage", FORMS)
def test_data_with_faults(stage: str, here: Path) -> None:
    """600 cases: of what is not refused, each line was read, and used or counted as dropped."""
    ends = Counter[int]()
    (here / "x.yaml").write_text(TEXTS[stage][0].replace("path: model", "path: model, chat_template: chatml"))

    @cases(150)
    @given(st.sampled_from(FORMS[stage]), fuzzing.data_steps, st.sampled_from(["error", "error", "drop"]))
    def case(form: tuple[str, dict[str, Any]], steps: Any, on_bad: str) -> None:
        name, row = form
        key = {"ppo": "prompts", "eval": "prompts"}.get(stage, "train")
        (here / f"{name}.jsonl").write_bytes(raw := fuzzing.broken(rows_like(row), steps))
        settings = ["-s", f"data.{key}={name}.jsonl", "-s", f"data.on_bad={on_bad}"]
        quiet = check("x.yaml", "-q", *settings)
        ends[code := outcome(quiet, ("x.yaml", "--set ", *DATA))] += 1
        if code == 0:
            checked = json.loads(check("x.yaml", "--json", *settings).stdout)["checked"]
            [numbers] = [one for one in checked if one["what"] == f"data.{key}"]
            lines = [line for line in raw.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
            assert numbers["read"] == len(lines)
            assert not any(fuzzing.repeats_a_key(line) for line in lines)

    case()
    assert min(ends[0], ends[2]) >= sum(ends.values()) // 50, ends


@pytest.mark.parametrize("stage", TEXTS)
def test_a_good_config_stays_good(stage: str, here: Path) -> None:
    """200 cases: however it is written, in whatever order, and with other numbers within the bounds."""
    path = here / "x.yaml"
    number, seeds = st.floats(1e-9, 1), st.integers(0, 2**32 - 1)
    section = {"eval": "eval"}.get(stage, stage)

    @cases(50)
    @given(st.sampled_from(TEXTS[stage]), seeds, number, st.randoms(), st.sampled_from([True, None]))
    def case(text: str, seed: int, rate: float, draw: Any, flow: bool | None) -> None:
        tree = {**yaml.load(text, yaml.BaseLoader), "seed": seed}
        if stage != "eval":
            tree[section] = {**tree[section], "learning_rate": rate}
        items = list(tree.items())
        draw.shuffle(items)
        written = yaml.dump(dict(items), sort_keys=False, default_flow_style=flow, allow_unicode=True, width=40)
        path.write_text(re.sub(r"'([-\d.e]+|true|false|null)'", r"\1", written), encoding="utf-8")
        assert outcome(check("x.yaml", "-q"), ("x.yaml", *DATA)) == 0
        resolved = load(stage, path).dump()
        assert resolved["seed"] == seed and resolved[section].get("learning_rate", rate) == rate

    case()
