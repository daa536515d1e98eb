"""The engine that asks a vLLM server, against a stand-in: ten faults of a sync, and a server that fails.

Modules: `ppo/vllm_client.py`.
"""

import copy
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from stand_in_vllm import BASE, StandIn

from rlhf_cli import http_client
from rlhf_cli.config.sections import LoRA
from rlhf_cli.errors import RLHFError
from rlhf_cli.http_client import HTTPClient
from rlhf_cli.models import lora, save
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.vllm_client import VLLMClient
from rlhf_cli.ppo.vllm_engine import VLLMEngine
from rlhf_cli.ppo.vllm_server import SentPolicy, VLLMServer
from tests.ppo.test_rollout import responses, seeded

pytestmark = pytest.mark.full
SYNCS = ("lora", "disk")


NUMBERS = itertools.count(1)  # of folders of weights: a server that is shared knows the former ones


class Nothing:
    def save_pretrained(self, folder: Path) -> None:
        """A tokenizer without files."""


class Pair:
    """A policy, its reference, a stand-in that serves the reference, and an engine; weights go to `folder`.

    `probe` is the number of rows and of tokens that each sync compares. The stand-in answers one row at a time.
    """

    def __init__(
        self,
        folder: Path,
        sync: str,
        temperature: float = 0.7,
        served: Any = None,
        *,
        url: str = "",
        ref: Any = None,
        probe: tuple[int, int] = (6, 8),
        **options: Any,
    ) -> None:
        self.folder, self.count, self.reports = folder, 0, list[str]()
        self.ref = ref or tiny.causal(tie_word_embeddings=sync == "disk")
        self.saved = copy.deepcopy(self.ref)
        if sync == "lora":
            settings = LoRA(kind="lora", r=4)
            made: Any = {
                "vocab_size": 0,
                "base": Path("base"),
                "device": torch.device("cpu"),
                "bf16": False,
                "key": "k",
            }
            self.saved = lora.add_adapters(self.saved, settings, revision=None, **made)
        self.policy = lora.unwrap(self.saved)
        self.stand_in = None if url else StandIn(served or copy.deepcopy(self.ref))
        self.client: Any = Planted(url or self.stand_in.url, sync, HTTPClient(60.0, 1))
        probed = seeded(tiny.prompts(probe[0]), length=probe[1])
        self.sent = SentPolicy(self.ref, probed, tiny.EOS, tiny.PAD, temperature, bf16=False, max_gap=0.1)
        values = {"max_wait": 5.0, "longest_row": 60, **options}
        self.server = VLLMServer(self.client, self.sent, report=self.reports.append, **values)
        self.engine = VLLMEngine([self.server], self.sent, self.write, temperature)

    def write(self, role: str, update: int) -> tuple[str, Path]:
        self.count = next(NUMBERS)
        path = self.folder / f"{role}_{self.count}"
        if role == "policy" and self.client.sync == "lora":
            save.save_model(self.saved, Nothing(), path, "")
        else:
            save.save_untied(self.ref if role == "reference" else self.policy, Nothing(), path)
        return f"run-{role}-update-{self.count}", path

    def train(self) -> None:
        """Change the policy as an update does."""
        generator = torch.Generator().manual_seed(self.count)
        with torch.no_grad():
            for weight in self.policy.parameters():
                if weight.requires_grad:
                    weight += 0.1 * torch.randn(weight.shape, generator=generator)

    def sync(self, update: int) -> None:
        self.engine.update_weights(update, self.policy)


class Planted(VLLMClient):
    """The requests with a fault: `plant` changes a request's body, or returns DROP to leave the request out."""

    plant: Callable[[str, Any], Any] = staticmethod(lambda path, body: body)

    def call_all(self, path: str, bodies: Any) -> list[dict[str, Any]]:
        changed = [self.plant(path, copy.deepcopy(body)) for body in bodies]
        return [{}] * len(changed) if DROP in changed else super().call_all(path, changed)


DROP = "left out"


def leave_out(*paths: str) -> Callable[[str, Any], Any]:
    return lambda path, body: DROP if path in paths else body


def change(key: str, value: Callable[[Any], Any]) -> Callable[[str, Any], Any]:
    return lambda path, body: {**body, key: value(body[key])} if path == "/v1/completions" else body


def old_part(pair: Pair, part: str) -> Callable[[str, Any], Any]:
    """Weights of which the `part` is that of the sync before."""
    before = pair.sent.weights[1]

    def plant(path: str, body: Any) -> Any:
        if path == "/collective_rpc":
            folder = Path(body["kwargs"]["weights_path"])
            for file in folder.glob("*.safetensors"):
                new, old = load_file(file), load_file(before / file.name)
                save_file({name: (old if part in name else new)[name] for name in new}, file, {"format": "pt"})
        return body

    return plant


def old_adapter(pair: Pair) -> Callable[[str, Any], Any]:
    before = pair.sent.weights[1]
    return lambda path, body: {**body, "lora_path": str(before)} if path == "/v1/load_lora_adapter" else body


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[Pair], Callable[[str, Any], Any]], str]] = {
    "weights that do not arrive": (("disk",), lambda pair: leave_out("/collective_rpc"), "R19 still has the weights"),
    "an adapter of the update before": (("lora",), old_adapter, "R19 still has the weights of the sync before"),
    "a head left behind": (("disk",), lambda pair: old_part(pair, "lm_head"), "R19 or only a part of them"),
    "a layer left behind": (("disk",), lambda pair: old_part(pair, "layers.1"), "R19 or only a part of them"),
    "the base instead of the adapter": (("lora",), lambda pair: change("model", lambda name: BASE), "R19 weights"),
    "a version that is not set": (("disk",), lambda pair: leave_out("/update_weight_version"), "R20 answered version"),
    "an adapter that is not loaded": (("lora",), lambda pair: leave_out("/v1/load_lora_adapter"), "R20 answered 404"),
    "another tokenizer": (SYNCS, lambda pair: change("prompt", lambda ids: [1, *ids]), "R20 read other tokens"),
    "a filter, log-probs of what it leaves": (SYNCS, lambda pair: change("top_k", lambda k: 3), "R19 differ by"),
    "another temperature": (SYNCS, lambda pair: change("temperature", lambda t: 0.5 * t), "R19 differ by"),
    "an end that is not ours": (SYNCS, lambda pair: change("max_tokens", lambda n: n // 2), "R20 ended a response"),
}  # fmt: skip
CASES = [(name, sync) for name, (syncs, _, _) in FAULTS.items() for sync in syncs]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pause(seconds: float) -> None:
        pass

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(http_client, "sleep", pause)
    monkeypatch.setattr("rlhf_cli.ppo.vllm_client.HEALTH_INTERVAL_S", 0.01)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(sync: str, **options: Any) -> Pair:
        pairs.append(Pair(tmp_path, sync, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.stand_in.http.shutdown()
        pair.stand_in.http.server_close()


def refused(action: Callable[[], Any], message: str) -> None:
    code, text = message.split(" ", 1)
    with pytest.raises(RLHFError) as error:
        action()
    (problem,) = error.value.problems
    assert problem.code == code and text in problem.text


def notices_fault(pair: Pair, fault: str) -> None:
    """Assert that a sync with the fault is refused, and that the same sync without it is accepted."""
    pair.sync(0)
    pair.train()
    _, plant, message = FAULTS[fault]
    pair.client.plant = plant(pair)
    refused(lambda: pair.sync(1), message)
    pair.client.plant = Planted.plant
    pair.sync(1)


@pytest.mark.parametrize("sync", SYNCS)
def test_after_each_sync_the_server_draws_from_the_new_weights(make, sync):
    """Log-probs agree to rounding, which alone has made 2e-5."""
    pair, prompts = make(sync), seeded(tiny.prompts(5), length=16)
    drawn = []
    for update in range(4):
        pair.sync(update)
        rollout = pair.engine.generate(prompts)
        expected = HFEngine(pair.policy, tiny.EOS, tiny.PAD, 0.7).generate(prompts)
        assert responses(rollout) == responses(expected) and torch.equal(rollout.ended, expected.ended)
        assert torch.allclose(rollout.logprobs, expected.logprobs, atol=1e-4)
        drawn.append(responses(rollout))
        pair.train()
    assert drawn[0] != drawn[1] != drawn[2] != drawn[3] and not pair.reports
    if sync == "lora":  # two are kept
        assert list(pair.stand_in.models) == [BASE, f"run-policy-update-{pair.count - 1}", pair.sent.weights[0]]


@pytest.mark.parametrize(("fault", "sync"), CASES)
def test_a_planted_fault_is_noticed_before_a_rollout(make, fault, sync):
    notices_fault(make(sync), fault)


def test_r19_r20_another_model_and_rows_longer_than_the_server_takes_are_noticed_at_the_start(make):
    refused(lambda: make("lora", served=tiny.causal(seed=5)).sync(0), "R19 the weights of models.sft")
    refused(
        lambda: make("disk", longest_row=300).sync(0),
        "R20 serves rows of 256 tokens; prompt and response have up to 300",
    )


def test_r19_log_probs_of_logits_that_are_not_processed(make):
    pair = make("disk")
    pair.stand_in.processed = False
    refused(lambda: pair.sync(0), "R19 no --logprobs-mode processed_logprobs")


def test_r19_a_filter_whose_log_probs_are_those_of_all_tokens(make):
    """The log-probs agree, the draws do not."""
    pair = make("disk", temperature=1.0, probe=(6, 16))
    pair.stand_in.processed = False
    pair.sync(0)
    pair.client.plant = change("top_k", lambda k: 2)
    refused(lambda: pair.sync(1), "R19 draws from another distribution")


def says(status: int, content: bytes = b"") -> Callable[[str, Any], Any]:
    return lambda path, body: (status, content) if path == "/v1/completions" else None


def closes(path: str, body: Any) -> Any:
    raise ConnectionError


@pytest.mark.parametrize("fault", [says(500), says(429), closes], ids=["500", "429", "no answer"])
def test_a_request_that_fails_once_is_sent_again(make, fault):
    pair, prompts = make("disk"), seeded(tiny.prompts(4))
    pair.sync(0)
    pair.stand_in.faults = [fault]
    expected = responses(HFEngine(pair.policy, tiny.EOS, tiny.PAD, 0.7).generate(prompts))
    assert responses(pair.engine.generate(prompts)) == expected and not pair.reports


@pytest.mark.parametrize("sync", SYNCS)
def test_a_server_that_dies_gets_the_weights_again_and_the_same_seeds(make, sync):
    pair, prompts = make(sync), seeded(tiny.prompts(6), length=16)
    pair.sync(0)
    pair.train()
    pair.sync(1)
    expected = responses(pair.engine.generate(prompts))

    def die(path: str, body: Any) -> Any:
        pair.stand_in.restart()
        raise ConnectionError

    pair.stand_in.faults = [lambda path, body: None, lambda path, body: None, die, *[closes] * 12]
    assert responses(pair.engine.generate(prompts)) == expected
    assert pair.reports and "sends the weights again" in pair.reports[0]


def test_a_restart_between_two_rollouts_is_noticed(make):
    """Whole weights: the server answers, with the weights that it was started with."""
    pair, prompts = make("disk"), seeded(tiny.prompts(6), length=16)
    pair.sync(0)
    pair.train()
    pair.sync(1)
    expected = responses(pair.engine.generate(prompts))
    pair.stand_in.restart()
    assert responses(pair.engine.generate(prompts)) == expected
    assert "version 'default'" in pair.reports[0]


@pytest.mark.parametrize("sync", SYNCS)
def test_a_server_that_sleeps_wakes_up_for_each_sync_also_after_a_restart(make, sync):
    """While it sleeps, the stand-in refuses every request for weights or tokens."""
    pair, prompts = make(sync), seeded(tiny.prompts(4))
    pair.client.sleeps = True
    for update in range(4):
        pair.sync(update)
        expected = responses(HFEngine(pair.policy, tiny.EOS, tiny.PAD, 0.7).generate(prompts))
        assert responses(pair.engine.generate(prompts)) == expected
        pair.engine.release_memory()
        assert pair.stand_in.asleep
        if update == 2:
            pair.stand_in.restart()
        pair.train()
    paths = [path for path, _ in pair.stand_in.requests]
    assert paths.count("/sleep?level=1") == 4 and paths.count("/wake_up") == 2


def test_r20_a_server_that_stays_away_ends_the_run(make):
    pair = make("disk", max_wait=0.1)
    pair.stand_in.faults = [closes] * 1000
    start = time.monotonic()
    refused(lambda: pair.sync(0), "R20 /health gave no answer")
    assert time.monotonic() - start < 5


ANSWER = {"token_ids": [5, tiny.EOS], "logprobs": {"token_logprobs": [-1.0, -2.0]}}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"logprobs": None}, "gives no token ids with their log-probs"),
        ({"token_ids": [5]}, "gives no token ids with their log-probs"),
        ({"token_ids": []}, "gives no token ids with their log-probs"),
        ({"token_ids": [tiny.EOS, 5]}, "ended a response after 2 of 8 tokens with token 5"),
        ({"token_ids": [5, 6]}, "ended a response after 2 of 8 tokens with token 6"),
        ({"logprobs": {"token_logprobs": [-1.0, float("nan")]}}, "log-prob that is not finite"),
    ],
)
def test_r20_answers_that_no_rollout_can_be_made_of(make, changes, text):
    pair, prompts = make("disk"), seeded(tiny.prompts(1))
    pair.sync(0)
    (ids,) = [prompts.ids[0][prompts.mask[0]].tolist()]
    choice = {**ANSWER, "prompt_token_ids": ids, **changes}
    pair.stand_in.faults = [says(200, json.dumps({"choices": [choice]}).encode())]
    refused(lambda: pair.engine.generate(prompts), f"R20 {text}")
    pair.stand_in.faults = [says(200, b'{"choices": [{"token')]
    refused(lambda: pair.engine.generate(prompts), "R20 read other tokens")


def test_untied_weights_are_those_of_the_model(tmp_path):
    model = tiny.causal(tie_word_embeddings=True)
    save.save_untied(model, Nothing(), tmp_path / "one")
    loaded, info = type(model).from_pretrained(tmp_path / "one", output_loading_info=True)
    assert not any(info.values()) and not loaded.config.tie_word_embeddings
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), loaded.parameters(), strict=False))
