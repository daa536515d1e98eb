"""PPO in several processes: the numbers of one process, one log, stops, kills, launchers.

Modules: `models/parallel.py`.
"""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import group_cases
import pytest
import torch
from chaos.fingerprint import differences, fingerprint
from group import HELPERS, TORCHRUN, TWO_MACHINES, child, command, imported_at_start, stop_and_resume
from ppo_folder import ONE, PPO, lines, must_succeed, ppo, rlhf, weights, write, write_models
from run_cli import is_one_error
from stand_in_vllm import StandIn

from rlhf_cli.errors import RLHFError
from rlhf_cli.models import parallel
from rlhf_cli.models.load import load_causal_lm
from rlhf_cli.models.parallel import SINGLE_PROCESS
from tests.reference.comparison import compare_run, disagreements

pytestmark = pytest.mark.distributed


# The numbers

NAMES = [f"{name}, torch.float64" for name in group_cases.CASES]
NAMES += [f"{name}, torch.float32" for name in group_cases.ROUGHLY]
NAMES += ["a head on the policy, torch.float64", "one row, torch.float64"]
SHARDED_KEYS = {"loss/policy_avg", "loss/value_avg", "policy/grad_norm", "value/grad_norm", "objective/kl"}


@pytest.fixture(scope="module", params=["false", "true", '"hybrid"'])  # values of ppo.fsdp
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """The results of tests/helpers/group_cases.py in one process, and in each of two, or of two on two machines."""
    folder = tmp_path_factory.mktemp("group")
    count, code = (4, TWO_MACHINES) if "hybrid" in request.param else (2, "")
    words = *TORCHRUN[:-1], count, HELPERS / "group_cases.py", folder / "results", request.param
    must_succeed(child(*words, PYTHONPATH=imported_at_start(folder, code)))
    group = [torch.load(folder / f"results.{rank}", weights_only=False) for rank in range(count)]
    return group_cases.results(SINGLE_PROCESS), *group


@pytest.mark.parametrize("name", NAMES)
def test_several_processes_train_like_one(both, name: str) -> None:
    one, first, *others = (each[name] for each in both)
    limit = 1e-12 if "float64" in name else 1e-5
    assert all(one["rollouts"] == each["rollouts"] for each in (first, *others))
    for model in one.keys() & first.keys() & {"policy", "value", "average"}:
        assert all(torch.equal(first[model], each[model]) for each in others)  # to the last bit
        assert (one[model] - first[model]).norm() <= limit * one[model].norm(), model
    assert all(each["stats"] == first["stats"] for each in others)
    for expected, stats in zip(one["stats"], first["stats"], strict=True):
        # Only rounding; and the padding depends on the micro-batches.
        noisy = {"policy/first_ratio_error", "val/ratio_var", *(["tokens/padded"] if "padded" in name else [])}
        keys = SHARDED_KEYS & stats.keys() if first["share"] < 1 else stats.keys() - noisy
        assert expected.keys() == stats.keys()
        same, other = ({key: each[key] for key in keys} for each in (expected, stats))
        assert same == pytest.approx(other, rel=1e3 * limit, abs=10 * limit)
    assert first["kl_coef"] == pytest.approx(one["kl_coef"], rel=1e3 * limit)
    assert all((each["kl_coef"], each["moments"]) == (first["kl_coef"], first["moments"]) for each in others)


def test_a_round_of_two_processes_is_that_of_one(run_folder: Path, ppo_run: Path) -> None:
    options = ("-s", f"models.policy={ppo_run / 'ppo'}", "-s", ONE)
    must_succeed(child(*command(run_folder / "ppo.yaml", *options, "-s", "ppo.fsdp=true")))
    one = ("-s", "ppo.gradient_accumulation_steps=4", "-s", f"run={run_folder}/one")
    must_succeed(ppo(run_folder, *options, *one))
    both = [run_folder, run_folder / "one"]
    ours, alone = ([row["response"] for row in lines(folder / "ppo/samples.jsonl")] for folder in both)
    assert ours == alone
    (of_two,), (of_one,) = (lines(folder / "ppo/metrics.jsonl") for folder in both)
    for key in sorted(SHARDED_KEYS):
        assert of_two[key] == pytest.approx(of_one[key], rel=1e-3, abs=1e-5), key
    assert of_one["objective/kl"] != 0


def test_each_process_has_about_half_of_sharded_weights(both) -> None:
    one, *group = (results["plain, torch.float32"]["share"] for results in both)
    assert one == 1
    assert group == [1, 1] or all(0.5 <= share < 0.52 for share in group)  # norms and the value head are replicated


def test_a_snapshot_of_sharded_weights_is_copied_to_the_first_process_only(both) -> None:
    _, first, *others = (results["plain, torch.float32"] for results in both)
    assert not any(each["gathered"] for each in others) and (first["gathered"] > 0) == (first["share"] < 1)


def test_adamw_by_any_kernel_takes_the_steps_of_one_process(both) -> None:
    """In the first process some weights are sharded and some whole."""
    expected = both[0]["adamw"]["loop"]
    for results in both:
        for name, after in results["adamw"].items():
            assert torch.allclose(after, expected, atol=1e-6), name


def test_the_cases_do_what_their_names_say(both) -> None:
    """Otherwise their parity would prove nothing."""
    one = both[0]
    skipped = [stats["policy/skipped_minibatches"] for stats in one["minibatches skipped, torch.float32"]["stats"]]
    epochs = [stats["policy/epochs"] for stats in one["stopped early, torch.float64"]["stats"]]
    assert any(skipped) and min(epochs) < 4
    assert one["scaled scores, adaptive coefficient, torch.float64"]["kl_coef"] != 0.05
    assert one["ptx, torch.float64"]["stats"][0]["loss/ptx_avg"] > 0


@pytest.mark.parametrize(("name", "code"), [("loss", "R01"), ("reward", "R05"), ("reward model", "R05")])
def test_an_error_of_one_process_is_raised_by_all(both, name: str, code: str) -> None:
    one, *group = (each[f"error in the {name}"] for each in both)
    assert all(each == one for each in group)
    assert one["output"].startswith(f"error[{code}]") and not one["changed"] and "hint: " in one["output"]
    assert "row 5" in one["output"] or name == "reward"


# The command


TWO = {"per_device_train_batch_size": 2}  # of PPO's 4: the same 8 episodes per update


@pytest.fixture
def group_folder(run_folder: Path) -> Path:
    write(run_folder, "ppo", PPO | {"ppo": PPO["ppo"] | TWO, "output": {"save_steps": 1, "keep": 9, "snapshots": 2}})
    return run_folder


LONG = PPO | {"ppo": PPO["ppo"] | TWO | {"total_episodes": 240}, "output": {"save_steps": 5}}


@pytest.fixture(scope="module")
def straight(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long run without a stop."""
    folder = shutil.copytree(origin, tmp_path_factory.mktemp("straight") / "run")
    write(folder, "ppo", LONG)
    assert child(*command(folder / "ppo.yaml")).returncode == 0
    return folder / "ppo"


def test_the_stage_in_two_processes(group_folder: Path) -> None:
    result = must_succeed(child(*command(group_folder / "ppo.yaml")))
    output = result.stderr.splitlines()
    assert output[0] == "ppo      2 processes" and "2 x 2 x 2 processes = 8 episodes" in result.stderr
    assert len([line for line in output if "checkpoints took" in line]) == 1  # one process logs
    assert result.stdout.count("samples at step 2") == 1
    two = lines(group_folder / "ppo/metrics.jsonl")
    assert json.loads((group_folder / "ppo/identity.json").read_text())["environment"]["processes"] == 2
    verified = must_succeed(rlhf("verify", group_folder, "--step", "2"))
    assert "agrees up to rounding: " in verified.stdout and "processes 2 -> 1" in verified.stdout
    assert disagreements(compare_run(group_folder, 2)) == {}
    (group_folder / "ppo/manifest.json").unlink()  # one process does not resume what two began
    other = ppo(group_folder)
    assert is_one_error(other, "E04") and "was started with 2 processes and cannot resume with 1" in other.stderr
    assert "hint: resume with --nproc 2, or start over with --fresh" in other.stderr
    must_succeed(ppo(group_folder, "--fresh", "-s", "ppo.per_device_train_batch_size=4"))
    keys = ["objective/scores", "objective/kl", "policy/grad_norm", "loss/policy_avg", "loss/value_avg", "episode"]
    for ours, theirs in zip(lines(group_folder / "ppo/metrics.jsonl"), two, strict=True):
        assert [ours[key] for key in keys] == pytest.approx([theirs[key] for key in keys], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("fsdp", ["false", "true"])
def test_two_processes_train_on_what_two_servers_draw(group_folder: Path, fsdp: str) -> None:
    """The first process alone asks the servers; the responses are those that both draw themselves."""
    tied = fsdp == "true"  # the servers get a separate head
    write_models(group_folder, tie_word_embeddings=tied)
    servers = [StandIn(load_causal_lm(str(group_folder / "sft_model")).eval(), 64) for _ in range(2)]
    urls = f"[{servers[0].url}, {servers[1].url}]"
    words = command(group_folder / "ppo.yaml", "-s", f"ppo.fsdp={fsdp}")
    must_succeed(child(*words, "-s", f"models.engine={{vllm: {{url: {urls}, wait: 0.1, sleep: {fsdp}}}}}"))
    asked = [[path for path, _ in server.requests].count("/v1/completions") for server in servers]
    assert asked[0] == asked[1] > 20
    assert all(server.asleep == (fsdp == "true") for server in servers)
    names = ("samples.jsonl", "metrics.jsonl")
    by_servers = [lines(group_folder / "ppo" / name) for name in names]
    trained = weights(group_folder)

    must_succeed(child(*words, "--fresh"))
    samples, metrics = (lines(group_folder / "ppo" / name) for name in names)
    assert [row["response"] for row in by_servers[0]] == [row["response"] for row in samples]
    assert trained == weights(group_folder)
    for key in ("objective/scores", "objective/kl", "policy/grad_norm", "loss/policy_avg"):
        numbers = [[row[key] for row in rows] for rows in (by_servers[1], metrics)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-4), key


def test_r19_a_server_that_keeps_old_weights_of_a_sharded_policy_is_noticed(group_folder: Path) -> None:
    """Its last sync did not arrive; all processes end with the error of the first."""
    server = StandIn(load_causal_lm(str(group_folder / "sft_model")).eval(), 64)
    loaded: list[Any] = []

    def keep(path: str, body: Any) -> Any:
        loaded.extend([body] if path == "/collective_rpc" else [])
        return (200, b"{}") if path == "/collective_rpc" and len(loaded) > 2 else None

    server.faults = [keep] * 1000
    engine = f"models.engine={{vllm: {{url: '{server.url}', wait: 0.1}}}}"
    result = child(*command(group_folder / "ppo.yaml", "-s", "ppo.fsdp=true", "-s", engine))
    text = f"\nerror[R19]: step 2: the server at {server.url} still has the weights of the sync before"
    assert result.returncode == 1 and result.stderr.count(text) == 1, result.stderr
    assert [row["step"] for row in lines(group_folder / "ppo/metrics.jsonl")] == [1]


@pytest.mark.parametrize(
    ("number", "rank"),
    [(signal.SIGTERM, None), (signal.SIGINT, None), (signal.SIGKILL, 0), (signal.SIGKILL, 1)],
)
def test_stopped_or_killed_all_end_and_resume_to_the_same_bytes(
    group_folder: Path, straight: Path, number: int, rank: int | None
) -> None:
    write(group_folder, "ppo", LONG)
    stop_and_resume(group_folder / "ppo.yaml", "step_000005", number, rank)
    assert differences(fingerprint(group_folder / "ppo"), fingerprint(straight)) == []


CORRUPTED = """
import os

if os.environ.get("RANK") == "{rank}":
    from rlhf_cli.ppo.trainer import PPOTrainer

    step = PPOTrainer._train_minibatch

    def corrupted(self, *arguments, **options):
        if self.updates:
            weight = next(self.value.parameters()).data
            getattr(weight, "_local_tensor", weight).view(-1)[0] += 1
        return step(self, *arguments, **options)

    PPOTrainer._train_minibatch = corrupted
"""


@pytest.mark.parametrize(("fsdp", "processes"), [("false", 2), ("hybrid", 4)])
def test_a_process_whose_weights_differ_stops_the_run(group_folder: Path, fsdp: str, processes: int) -> None:
    """With fsdp: hybrid they are compared with the same shard of another machine."""
    rank, settings = processes // 2, (f"ppo.fsdp={fsdp}", f"ppo.per_device_train_batch_size={4 // processes}")
    code = (TWO_MACHINES if processes == 4 else "") + CORRUPTED.replace("{rank}", str(rank))
    words = command(group_folder / "ppo.yaml", *settings, processes=processes)
    result = child(*words, PYTHONPATH=imported_at_start(group_folder, code))
    assert result.returncode == 1 and result.stderr.count("error[") == 1, result.stderr
    text = f"error[R18]: process {rank}: the weights of the value model are no longer those of process 0"
    assert text in result.stderr
    assert [row["step"] for row in lines(group_folder / "ppo/metrics.jsonl")] == [1]


def test_a_wrong_config_is_reported_once_and_starts_no_process(group_folder: Path) -> None:
    result = child(*command(group_folder / "ppo.yaml", "-s", "ppo.gamma=2"))
    assert result.returncode == 2 and result.stderr.count("error[") == 1
    late = child(*command(group_folder / "ppo.yaml", "-s", "models.sft=nowhere"))  # found by the processes
    assert late.returncode == 2 and late.stderr.count("error[") == 1, late.stderr


def test_processes_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel, "RENDEZVOUS_TIMEOUT_S", 1.0)
    with pytest.raises(RLHFError, match="2 processes were requested, 1 started") as error:
        parallel.init_process_group()
    assert error.value.exit_code == 2
