"""Several vLLM servers as one engine, against stand-ins: blocks of rows, one lost, one with other weights."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from stand_in_vllm import StandIn

from rlhf_cli.ppo.rollout import HFEngine
from tests.ppo import test_vllm_engine
from tests.ppo.test_rollout import responses, seeded
from tests.ppo.test_vllm_engine import Pair, closes, refused

pytestmark = pytest.mark.full
quick = test_vllm_engine.quick


class Group(Pair):
    """A policy and its reference, and an engine of several stand-ins that serve the reference."""

    def __init__(self, folder: Path, sync: str, servers: list[Any], **options: Any) -> None:
        super().__init__(folder, sync, served=servers[0], **options)
        self.written: list[str] = []
        others = [StandIn(served or copy.deepcopy(self.ref)) for served in servers[1:]]
        self.stand_ins = [self.stand_in, *others]
        clients = [replace(self.client, url=other.url, loaded=[]) for other in others]
        self.engine.servers = [self.server, *(replace(self.server, client=client) for client in clients)]

    def write(self, role: str, update: int) -> tuple[str, Path]:
        self.written.append(f"{role} {update}")
        return super().write(role, update)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(sync: str, servers: list[Any], **options: Any) -> Group:
        groups.append(Group(tmp_path, sync, servers, **options))
        return groups[-1]

    yield make
    for group in groups:
        for stand_in in group.stand_ins:
            stand_in.http.shutdown()
            stand_in.http.server_close()


def completions(stand_in: StandIn) -> list[list[int]]:
    """Return the prompts that a server was asked to continue."""
    return [body["prompt"] for path, body in stand_in.requests if path == "/v1/completions"]


@pytest.mark.parametrize("sync", ["lora", "disk"])
def test_each_server_draws_its_block_of_the_rows_from_the_new_weights(make: Any, sync: str) -> None:
    group, prompts = make(sync, [None, None, None]), seeded(tiny.prompts(7), length=16)
    for update in range(2):
        group.sync(update)
        for stand_in in group.stand_ins:
            stand_in.requests.clear()
        rollout = group.engine.generate(prompts)
        assert responses(rollout) == responses(HFEngine(group.policy, tiny.EOS, tiny.PAD, 0.7).generate(prompts))
        rows = [ids[mask].tolist() for ids, mask in zip(prompts.ids, prompts.mask, strict=True)]
        blocks = [rows[:2], rows[2:4], rows[4:]]
        assert [sorted(completions(stand_in)) for stand_in in group.stand_ins] == [sorted(block) for block in blocks]
        group.train()
    reference = ["reference 0"] if sync == "disk" else []
    assert group.written == [*reference, "policy 0", "policy 1"]  # once for all servers
    assert group.reports == []


def test_more_servers_than_rows(make: Any) -> None:
    group, prompts = make("disk", [None, None, None]), seeded(tiny.prompts(2))
    group.sync(0)
    expected = HFEngine(group.policy, tiny.EOS, tiny.PAD, 0.7).generate(prompts)
    assert responses(group.engine.generate(prompts)) == responses(expected)


def test_a_server_that_dies_draws_its_block_again_and_the_others_do_not(make: Any) -> None:
    group, prompts = make("disk", [None, None]), seeded(tiny.prompts(6), length=16)
    group.sync(0)
    group.train()
    group.sync(1)
    expected = responses(group.engine.generate(prompts))
    living, dying = group.stand_ins

    def die(path: str, body: Any) -> Any:
        dying.restart()
        raise ConnectionError

    living.requests.clear()
    dying.faults = [die, *[closes] * 8]
    assert responses(group.engine.generate(prompts)) == expected
    assert len(completions(living)) == 3
    assert dying.url in group.reports[0] and all(living.url not in said for said in group.reports)


def test_r19_one_server_of_another_model_is_named(make: Any) -> None:
    group = make("lora", [None, tiny.causal(seed=5)])
    refused(lambda: group.sync(0), f"R19 the server at {group.stand_ins[1].url} does not draw from the weights of")


def test_r19_one_server_that_keeps_old_weights_is_named(make: Any) -> None:
    group = make("disk", [None, None])
    group.sync(0)
    group.train()
    stale = group.stand_ins[1]
    stale.faults = [lambda path, body: (200, b"{}") if path == "/collective_rpc" else None] * 3
    refused(lambda: group.sync(1), f"R19 the server at {stale.url} still has the weights of the sync before")


def test_r20_a_server_that_stays_away_ends_the_run(make: Any) -> None:
    group = make("disk", [None, None], max_wait=0.1)
    gone = group.stand_ins[1]
    gone.faults = [closes] * 1000
    refused(lambda: group.sync(0), f"R20 {gone.url} /health gave no answer")
