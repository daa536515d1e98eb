"""Loading a good config: defaults, paths, overrides, old names; what is written down of it, and its identity.

Modules: `config/base.py`, `config/sections.py`, `config/machinery/section.py`.
"""

import json
import os
from pathlib import Path

import pytest
import yaml
from bad_configs import MINIMAL, loaded, messages, written
from run_cli import ROOT

from rlhf_cli import config, runs
from rlhf_cli.config.loading import load
from rlhf_cli.config.machinery.fields import RENAMED, with_current_names
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.errors import RLHFError

FULL = {
    "sft": """\
seed: 7
model:
  new: {model_type: llama, hidden_size: 32, tokenizer: {train: data/text.jsonl, vocab_size: 400}}
  chat_template: chat.jinja
data: {train: data/train.jsonl, eval: ../shared/eval.jsonl, columns: {prompt: question}}
sft: {learning_rate: 1e-3, warmup_steps: 5}
trainer: {neftune_noise_alpha: 5, optim: sgd}
""",
    "reward": "model: {path: ./sft}\ndata: {train: pairs.jsonl, on_identical: drop}\nreward: {normalize: none}\n",
    "dpo": "model: {path: ./sft}\ndata: {train: pairs.jsonl}\ndpo: {beta: 0.2, loss_type: ipo}\n",
    "ppo": """\
models: {reward: org/reward-model, value: ./value-start}
data: {prompts: prompts.jsonl}
rewards: {reward: , short: {function: rewards.short:score, weight: 0.5}, other: {model: ../other}}
ppo: {num_train_epochs: 2, response_length: {min: 8, max: 16}}
""",
    "eval": """\
judges: {gold: "judges.gold:judge", second: ./second-reward}
data: {prompts: held-out.jsonl}
eval: {n: 8, modes: [sampled], best_of: [], require: {win_rate.ppo_vs_sft.gold.value: ">= 0.6"}}
""",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_whole_weights_are_not_trained_in_bfloat16(stage: str, here: Path) -> None:
    """Small updates would be lost without a word; under adapters the base is frozen, and may be bfloat16."""
    section = "models" if stage == "ppo" else "model"
    (message,) = messages(stage, MINIMAL[stage], f"{section}.dtype=bfloat16")
    assert message.startswith(f"error[C17]: --set {section}.dtype: {section}.dtype bfloat16 loses most updates")
    assert f"set {section}.adapters" in message
    load(stage, f"{stage}.yaml", [f"{section}.dtype=bfloat16", f"{section}.adapters={{kind: lora}}"])


@pytest.mark.parametrize("stage", CONFIGS)
def test_a_minimal_config_loads_with_all_defaults(stage: str, here: Path) -> None:
    result = loaded(here / "run", stage)
    assert (result.folder, result.file) == (here / "run" / stage, here / "run" / f"{stage}.yaml")
    assert (result.stage, result.seed, result.output.keep, result.output.snapshots) == (stage, 0, 2, 8)


def test_models_default_to_the_runs_own_stages(here: Path) -> None:
    ppo = loaded(here / "configs", "ppo", f"run: ../runs/a\n{MINIMAL['ppo']}")
    assert ppo.folder == here / "runs" / "a" / "ppo"
    assert (ppo.models.sft, ppo.models.reward) == tuple(str(here / "runs" / "a" / name) for name in ("sft", "reward"))
    assert ppo.models.value == "reward"
    compared = loaded(here / "e", "eval").models
    assert (compared.sft, compared.ppo, compared.reward) == tuple(str(here / "e" / n) for n in ("sft", "ppo", "reward"))
    assert loaded(here / "e", "reward").model.path == str(here / "e" / "sft")
    named = loaded(here / "r", "ppo", f"models: {{sft: sft, reward: RUN/other}}\n{MINIMAL['ppo']}")
    assert (named.models.sft, named.models.reward) == (str(here / "r" / "sft"), str(here / "r" / "other"))


def test_rewards_default_to_the_reward_model(here: Path) -> None:
    ppo = loaded(here, "ppo")
    assert {name: (each.model, each.weight) for name, each in ppo.rewards.items()} == {
        "reward": (ppo.models.reward, 1.0)
    }
    weighted = loaded(here, "ppo", "", "rewards.reward.weight=2", "rewards.long.function=a.b:c").rewards
    assert (weighted["reward"].model, weighted["reward"].weight) == (ppo.models.reward, 2.0)
    assert (weighted["long"].model, weighted["long"].function) == (None, "a.b:c")


@pytest.mark.parametrize("word", ["reward", "policy_head"])
def test_the_value_models_words_are_no_paths(word: str, here: Path) -> None:
    (here / word).mkdir()
    ppo = loaded(here, "ppo", f"models: {{value: {word}, reward: {word}}}\n{MINIMAL['ppo']}")
    assert (ppo.models.value, ppo.models.reward) == (word, str(here / word))
    assert ppo.dump(relative_to=here)["models"]["value"] == ppo.identity()["models"]["value"] == word


@pytest.mark.parametrize("stage", ["ppo", "eval"])
def test_prompts_are_cut_to_a_number_or_a_range_of_words(stage: str, here: Path) -> None:
    def words(*overrides: str) -> tuple[int, int] | None:
        return loaded(here, stage, "", *overrides).sources()["data.prompts"].first_words

    assert words() is None and words("data.truncate_prompt_words=8") == (8, 8)
    assert words("data.truncate_prompt_words.min=2", "data.truncate_prompt_words.max=8") == (2, 8)
    with pytest.raises(RLHFError, match="min is greater than max"):
        words("data.truncate_prompt_words.min=8", "data.truncate_prompt_words.max=2")
    with pytest.raises(RLHFError, match="belongs under best_of"):
        loaded(here, "sft", "", "data.truncate_prompt_words=8")


def test_a_chat_template_is_a_file_a_text_or_chatml(here: Path) -> None:
    (here / "chat.jinja").write_text("{{ messages }}")
    for value, expected in [("chat.jinja", str(here / "chat.jinja")), ("chatml", "chatml"), ("'{{ m }}'", "{{ m }}")]:
        text = MINIMAL["sft"].replace("path: base", f"path: base, chat_template: {value}")
        assert loaded(here, "sft", text).model.chat_template == expected
    with pytest.raises(RLHFError, match=r"error\[C07\].*chat_template `chatlm` is not a file"):
        loaded(here, "sft", "", "model.chat_template=chatlm")


@pytest.mark.parametrize("bad", ["{date: tomorrow}", "{date: 20250131}", "{messages: x}", "{'a b': 1}", "{a: [1]}",
                                 "{generation_prompt: ''}", "{generation_prompt: false}"])  # fmt: skip
def test_the_variables_of_a_chat_template_are_in_the_identity(bad: str, here: Path) -> None:
    named = loaded(here, "sft", "", "data.chat_template_kwargs={enable_thinking: false, date: 2025-01-31}").identity()
    plain = loaded(here, "sft").identity()
    before = {"config": {**plain, "data": {k: v for k, v in plain["data"].items() if k != "chat_template_kwargs"}}}
    assert runs.identity_difference(before, {"config": plain}, {"data.chat_template_kwargs": None}) == []
    assert named["data"]["chat_template_kwargs"] == {"enable_thinking": False, "date": "2025-01-31"}
    with pytest.raises(RLHFError, match="chat_template_kwargs"):
        loaded(here, "sft", "", f"data.chat_template_kwargs={bad}")


def test_an_evaluation_is_of_the_snapshots_that_ppo_kept(here: Path) -> None:
    config, identities = loaded(here, "eval", "", "models.ppo=./policy"), []
    Path("policy").mkdir()
    for kept in (8, 3):
        Path("policy/identity.json").write_text(json.dumps({"config": {"output": {"snapshots": kept}}}))
        identities.append({"stage": "eval", "config": config.identity()})
    assert runs.identity_difference(*identities) == ["snapshots_of_ppo 8 -> 3"]


def test_the_code_of_a_reward_is_beside_the_config_or_where_rlhf_runs(here: Path) -> None:
    config = loaded(here, "ppo", "", "rewards.f.function=style:score", "rewards.g.function=pack.age:score")
    away, pack = Path.cwd(), here / "pack/age/__init__.py"
    for file, before in ((away / "style.py", None), (here / "style.py", away / "style.py")):
        assert config.code().get("rewards.f.function") == before
        file.touch()
    pack.parent.mkdir(parents=True)
    pack.touch()
    assert config.code() == {"rewards.f.function": here / "style.py", "rewards.g.function": pack}
    assert runs.identity_difference({}, {"data": {"rewards.f.function": "a"}}) == []  # not hashed by older versions
    assert runs.identity_difference({}, {"parents": {"judges.f": "a"}}) == ["judges.f: was not set"]


def test_the_code_of_a_judge_in_rlhf_is_the_same_from_every_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a clone, in which rlhf_cli/ is a folder, is not stale elsewhere."""
    config = loaded(here, "eval", "", "judges.gold=rlhf_cli.demo.gold:gold", "judges.other=json.decoder:scanstring")
    away = config.code()
    monkeypatch.chdir(ROOT)
    assert away == config.code() == {"judges.gold": ROOT / "rlhf_cli/demo/gold.py"}


def test_new_weights_keep_every_field_and_an_empty_section_means_its_defaults(here: Path) -> None:
    new = loaded(here, "sft", FULL["sft"].replace("chat.jinja", "chatml")).model.new
    assert new.config_fields() == {"model_type": "llama", "hidden_size": 32}
    assert new.tokenizer.train == str(here / "data" / "text.jsonl")
    assert loaded(here, "sft", f"sft:\noutput:\n{MINIMAL['sft']}").sft.max_length == 1024


def test_overrides_win_and_their_paths_start_from_the_working_directory(here: Path) -> None:
    lines = ["*.seed=3", "sft.learning_rate=1e-3", "data.train=x.jsonl", "data.columns.prompt=question", "run=../other"]
    sft = loaded(here / "run", "sft", "", *lines, "output.run_name=first", "output.run_name=second")
    assert (sft.seed, sft.sft.learning_rate, sft.output.run_name) == (3, 1e-3, "second")
    assert (sft.data.train, sft.data.columns) == (str(here / "cwd" / "x.jsonl"), {"prompt": "question"})
    assert sft.folder == here / "other" / "sft"


def test_an_override_may_hold_a_requirement_and_a_section(here: Path) -> None:
    line = "eval.require.win_rate.ppo_vs_sft.gold.value=>= 0.6"
    result = loaded(here, "eval", "", line, "eval.modes=[sampled]", "judges={gold: 'a:b'}")
    assert result.eval.require == {"win_rate.ppo_vs_sft.gold.value": ">= 0.6"}
    assert (result.eval.modes, result.judges) == (["sampled"], {"gold": "a:b"})


def test_the_location_of_a_key_is_its_line_its_section_or_its_override(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    written(here, "sft", "seed: 1\nmodel:\n  path: base\ndata:\n  train: a.jsonl\n")
    sft = load("sft", "sft.yaml", ["sft.max_length=8"])
    assert (sft.where("data.train"), sft.where("data.eval")) == ("sft.yaml:5", "sft.yaml:4")
    assert sft.where("sft.max_length") == "--set sft.max_length"
    assert load("sft", "sft.yaml", ["data={train: b.jsonl}"]).where("data.train") == "--set data"
    assert sft.where("sft.packing") == sft.where("nothing") == "sft.yaml"


def test_a_config_cannot_be_changed(here: Path) -> None:
    sft = loaded(here, "sft")
    for section, key in ((sft, "seed"), (sft.sft, "learning_rate")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(section, key, 1)


def test_the_stages_that_accept_an_override() -> None:
    expected = {
        "ppo.kl_coef": ["ppo"], "sft.packing": ["sft"], "rewards.short.weight": ["ppo"],
        "data.prompts": ["ppo", "eval"], "data.first_words.min": ["ppo", "eval"],
        "data.columns.prompt": [*CONFIGS], "*.seed": [*CONFIGS],
        "trainer.packing_strategy": ["sft"], "trainer.optim": ["sft", "reward", "dpo"],
        "dpo.beta": ["dpo"], "eval.require.a.b": ["eval"],
        "ppo.kl_coeff": [], "nothing": [],
    }  # fmt: skip
    assert {key: [stage for stage in CONFIGS if config.accepts_key(stage, key)] for key in expected} == expected


# Renamed keys

OLD_PPO = f"""{MINIMAL["ppo"].replace("prompts.jsonl", "prompts.jsonl, first_words: {min: 2, max: 6}")}\
rewards:
  mood.1: {{pipeline: ./classifier, number: probability, reads: both}}
"""


def test_an_old_name_works_with_a_warning_and_keeps_a_run_up_to_date(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = OLD_PPO.replace("first_words", "truncate_prompt_words").replace("number", "output").replace("reads", "input")
    new = loaded(here, "ppo", text)
    assert with_current_names(yaml.safe_load(OLD_PPO)) == yaml.safe_load(text)
    assert capsys.readouterr().err == ""
    old = loaded(here, "ppo", OLD_PPO)
    assert old.identity() == new.identity() and old.where("data.truncate_prompt_words.max").endswith("ppo.yaml:1")
    lines = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [line.partition("ppo.yaml:")[2] for line in lines] == [
        "1: data.first_words is now data.truncate_prompt_words",
        "4: rewards.mood.1.number is now rewards.mood.1.output",
        "4: rewards.mood.1.reads is now rewards.mood.1.input",
    ]
    load("ppo", written(here, "config", OLD_PPO))  # the name of a file that a stage wrote
    assert capsys.readouterr().err == ""
    recorded = json.loads(json.dumps(new.identity()))
    for name in RENAMED:
        *_, section, key = name.split(".")
        table = recorded["data"] if section == "data" else recorded["rewards"]["mood.1"]
        table[key] = table.pop(RENAMED[name].rpartition(".")[2])
    assert runs.identity_difference({"config": recorded}, {"config": new.identity()}) == []


def test_an_old_name_works_as_an_override_and_beside_the_new_one_is_a_duplicate(here: Path) -> None:
    text = OLD_PPO.replace("mood.1", "mood")
    ppo = loaded(here, "ppo", text, "data.first_words.max=9", "rewards.mood.reads=response")
    assert ppo.sources()["data.prompts"].first_words == (2, 9) and ppo.rewards["mood"].input == "response"
    both = OLD_PPO.replace("first_words:", "truncate_prompt_words: 3, first_words:")
    with pytest.raises(
        RLHFError, match=r"error\[C03\].*data.first_words is the old name of data.truncate_prompt_words"
    ):
        loaded(here, "ppo", both)


# What is written down


@pytest.mark.parametrize("stage", CONFIGS)
def test_the_dump_loads_again_as_the_same_config_and_the_identity_has_no_place(stage: str, here: Path) -> None:
    for name in ("run", "other"):
        (here / name).mkdir()
        (here / name / "chat.jinja").write_text("{{ messages }}")
    first, other = (loaded(here / name, stage, FULL[stage]) for name in ("run", "other"))
    assert first.identity() == other.identity() and str(here) not in json.dumps(first.identity())
    again = load(stage, written(first.folder, "config", yaml.safe_dump(first.dump(relative_to=first.folder))))
    assert (again.dump(), again.identity(), again.folder) == (first.dump(), first.identity(), first.folder)
    json.dumps(first.dump(), allow_nan=False)
    assert str(here) not in json.dumps(first.dump(relative_to=first.folder))


@pytest.mark.parametrize(
    ("stage", "override", "is_in_identity"),
    [
        *(
            (stage, override, False)
            for stage, override in [
                ("sft", "output.save_steps=5"), ("sft", "output.run_name=x"), ("sft", "sft.logging_steps=3"),
                ("sft", "run=x"), ("sft", "sft.eval_steps=3"), ("sft", "data.train=x.jsonl"),
                ("reward", "reward.per_device_eval_batch_size=2"), ("ppo", "ppo.num_sample_generations=0"),
                ("ppo", "models.sft=./x"), ("ppo", "models.sft=org/x"), ("eval", "eval.require.n=> 1"),
                ("eval", "output.keep=3"), ("ppo", "output.report_to=[wandb]"), ("ppo", "output.project=x"),
                ("sft", "output.snapshots=1"), ("ppo", "ppo.max_logprob_gap=1"),
                *((stage, "data.max_dropped=0.5") for stage in CONFIGS),
            ]
        ),
        *(
            (stage, override, True)
            for stage, override in [
                ("sft", "sft.learning_rate=1e-3"), ("sft", "seed=1"), ("ppo", "output.snapshots=1"),
                ("sft", "trainer.optim=sgd"), ("sft", "data.columns.prompt=q"), ("reward", "reward.normalize=none"),
                ("ppo", "ppo.kl_coef=0.1"), ("ppo", "rewards.reward.weight=2"), ("ppo", "rewards.f.function=a:b"),
                ("ppo", "models.value=./x"), ("ppo", "data.truncate_prompt_words=3"), ("eval", "eval.n=4"),
                ("eval", "judges.gold=a:b"),
            ]
        ),
    ],
)  # fmt: skip
def test_the_identity_has_exactly_what_can_change_the_result(
    stage: str, override: str, is_in_identity: bool, here: Path
) -> None:
    configs = loaded(here, stage), loaded(here, stage, "", override)
    before, after = ({"stage": stage, "config": json.loads(json.dumps(each.identity()))} for each in configs)
    assert bool(runs.identity_difference(before, after)) == is_in_identity


def test_a_rollout_server_counts_by_how_it_gets_the_weights(here: Path) -> None:
    server = "models: {engine: {vllm: {url: 'http://HOST:8000'%s}}%s}\n" + MINIMAL["ppo"]
    one = loaded(here, "ppo", server % ("", "")).identity()
    assert one["models"]["engine"] == {"vllm": {"sync": "disk"}}
    other = (server % (", wait: 1.0, retries: 9, sleep: true", "")).replace("HOST", "other")
    assert one == loaded(here, "ppo", other).identity()
    adapted = server % ("%s", ", adapters: {kind: lora}")
    assert loaded(here, "ppo", adapted % "").identity()["models"]["engine"] == {"vllm": {"sync": "lora"}}
    assert loaded(here, "ppo", adapted % ", sync: disk").models.server_sync == "disk"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("{vllm: {}}", "error[C05]: ppo.yaml:1: models.engine.vllm.url is missing"),
        ("{vllm: {url: h}}", 'error[C05]: ppo.yaml:1: models.engine.vllm.url: "h" has the wrong form'),
        ("{vllm: {url: 'http://h', sync: lora}}", "error[C17]: ppo.yaml:1: sync: lora sends adapters, and all weights"),
        ("tgi", 'error[C07]: ppo.yaml:1: models.engine: "tgi" is not one of auto, hf, graph'),
    ],
)
def test_a_wrong_engine_is_one_problem(engine: str, message: str, here: Path) -> None:
    (problem,) = messages("ppo", f"models: {{engine: {engine}}}\n{MINIMAL['ppo']}")
    assert problem.startswith(message)


def test_shards_are_neither_compiled_nor_sampled_by_the_graph_engine(here: Path) -> None:
    config = loaded(here, "ppo", MINIMAL["ppo"], "ppo.fsdp=true")
    assert config.engine_name(gpu=True) == "hf" == loaded(here, "ppo", MINIMAL["ppo"]).engine_name(gpu=False)
    assert loaded(here, "ppo", MINIMAL["ppo"]).engine_name(gpu=True) == "graph"
    (problem,) = messages("ppo", f"models: {{engine: graph}}\n{MINIMAL['ppo']}", "ppo.fsdp=true")
    assert "engine: graph cannot sample from sharded weights" in problem
    server = f"models: {{engine: {{vllm: {{url: 'http://h'}}}}}}\n{MINIMAL['ppo']}"
    assert loaded(here, "ppo", server, "ppo.fsdp=true").engine_name(gpu=True) == "vllm"
    (problem,) = messages("ppo", f"models: {{compile: true}}\n{MINIMAL['ppo']}", "ppo.fsdp=true")
    assert "compile cannot be combined with ppo.fsdp" in problem


def test_a_path_to_the_value_model_counts_but_not_which_and_a_template_by_its_text(here: Path) -> None:
    one, other = (loaded(here, "ppo", "", f"models.value=./{name}").identity() for name in "xy")
    assert one == other
    identities = []
    for text in ("{{ one }}", "{{ two }}"):
        (here / "chat.jinja").write_text(text)
        path_and_template = MINIMAL["sft"].replace("base", "base, chat_template: chat.jinja")
        identities.append(loaded(here, "sft", path_and_template).identity())
    assert identities[0] != identities[1]


def test_the_data_files_of_each_stage(here: Path) -> None:
    (here / "chat.jinja").write_text("{{ messages }}")
    sources = {stage: loaded(here, stage, text).sources() for stage, text in FULL.items()}
    assert {
        f"{stage} {key}": os.path.relpath(source.name, here)
        for stage, by_key in sources.items()
        for key, source in by_key.items()
    } == {
        "sft model.new.tokenizer.train": "data/text.jsonl",
        "sft data.train": "data/train.jsonl",
        "sft data.eval": "../shared/eval.jsonl",
        "reward data.train": "pairs.jsonl",
        "dpo data.train": "pairs.jsonl",
        "ppo data.prompts": "prompts.jsonl",
        "eval data.prompts": "held-out.jsonl",
    }
