"""The requests to a vLLM server: what it serves, weights, sleep, responses.

The server needs `--logprobs-mode processed_logprobs` and VLLM_SERVER_DEV_MODE=1, and `--enable-sleep-mode` if it shares
the trainer's GPU; `rlhf serve` prints the command.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_cli.errors import RLHFError
from rlhf_cli.http_client import HTTPClient, NoAnswerError, RefusalError

HEALTH_INTERVAL_S = 2.0
HEALTH_TIMEOUT_S = 10.0
HTTP_NOT_FOUND = 404
LOST_PATHS = ("/v1/completions", "/v1/unload_lora_adapter")  # not found: an adapter that a restarted server had
IS_SLEEPING = "/is_sleeping"
CANNOT_SLEEP = "start it as `rlhf serve RUN --rollouts` prints, or remove models.engine.vllm.sleep"
PLAIN_SAMPLING = {  # what a server may do besides temperature, switched off; it answers ids and their log-probs
    "return_token_ids": True,
    "logprobs": 0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": True,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "skip_special_tokens": False,
}


class ServerLostError(Exception):
    """The server gives no answer, or has lost the weights that it was given: it may have been restarted."""


@dataclass
class VLLMClient:
    """The requests to a vLLM server (0.28 or newer). Raises ServerLostError, and RLHFError R20 for a wrong answer."""

    url: str
    sync: Literal["lora", "disk"]
    client: HTTPClient
    sleeps: bool = False  # except in a rollout: it shares the trainer's GPU
    served: str = ""  # name of the model that the server was started with
    loaded: list[str] = field(default_factory=list)  # adapters, oldest first

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        """Return the JSON object that answers a POST, or a GET without a body; {} for any other answer."""
        return self.call_all(path, [body])[0]

    def call_all(self, path: str, bodies: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the answers of requests that are sent at the same time, as `call` does."""

        async def send() -> list[bytes]:
            async with self.client.connections() as connections:

                def request(body: Any) -> Awaitable[bytes]:
                    data = None if body is None else json.dumps(body).encode()
                    return self.client.request(connections, self.url + path, data)

                return await asyncio.gather(*map(request, bodies))

        try:
            answers = asyncio.run(send())
        except NoAnswerError as error:
            raise ServerLostError(f"{path} {error}") from None
        except RefusalError as error:
            if error.status == HTTP_NOT_FOUND and path in LOST_PATHS:
                raise ServerLostError(f"{path} {error}") from None
            if error.status == HTTP_NOT_FOUND and path == IS_SLEEPING:
                raise self.error(f"{path} {error}: it cannot sleep", hint=CANNOT_SLEEP) from None
            raise self.error(f"{path} {error}") from None
        return [_read_json(answer) for answer in answers]

    def wait(self, seconds: float) -> None:
        """Wait until the server answers. Raises RLHFError R20 after `seconds`."""
        probe = replace(self, client=HTTPClient(HEALTH_TIMEOUT_S, 0))
        end = time.monotonic() + seconds

        while True:
            try:
                probe.call("/health")
                return
            except ServerLostError as lost:
                if time.monotonic() >= end:
                    raise self.error(str(lost)) from None
            time.sleep(HEALTH_INTERVAL_S)

    def read_models(self, needed_tokens: int) -> None:
        """Read what the server serves. Raises RLHFError R20 if its rows are shorter than `needed_tokens`."""
        models = self.call("/v1/models").get("data") or []
        base = next((model for model in models if not model.get("parent")), None)
        if base is None:
            raise self.error("/v1/models names no model: is it a vLLM server?")
        self.served = base["id"]
        self.loaded = [model["id"] for model in models if model.get("parent")]

        limit = base.get("max_model_len") or needed_tokens
        if limit < needed_tokens:
            text = f"serves rows of {limit} tokens; prompt and response have up to {needed_tokens}"
            raise self.error(text, hint=f"start it with --max-model-len {needed_tokens}")

    def wake_up(self) -> None:
        """Wake the server up, if it sleeps. It has its weights again, and an empty cache."""
        if self.sleeps and self.call(IS_SLEEPING).get("is_sleeping"):
            self.call("/wake_up", {})
            self.call("/reset_prefix_cache", {})

    def sleep(self) -> None:
        """Make the server free its GPU memory; the weights go to main memory. Level 2 would drop them."""
        self.call("/sleep?level=1", {})

    def load(self, version: str, folder: Path) -> str:
        """Make the server use the weights in `folder`; return the name of the model that has them."""
        self.wake_up()
        if self.sync == "lora":
            self._load_adapter(version, folder)
            return version

        self.call("/pause?mode=wait", {})
        try:
            arguments = {"weights_path": str(folder)}
            self.call("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
            self.call("/reset_prefix_cache", {})
            self.call("/update_weight_version", {"new_version": version})
        finally:
            self.call("/resume", {})

        self.require_version(version)
        return self.served

    def _load_adapter(self, version: str, folder: Path) -> None:
        """Load an adapter, under a new name each time: the prefix cache is keyed by name. Unload all but two."""
        if version not in self.loaded:
            self.call("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(folder)})
            self.loaded.append(version)

        run = _run_of(version)
        ours = [name for name in self.loaded if _run_of(name) == run]
        for name in ours[:-2]:
            self.call("/v1/unload_lora_adapter", {"lora_name": name})
            self.loaded.remove(name)

    def require_version(self, version: str) -> None:
        """Raise ServerLostError if the server has other whole weights."""
        if self.sync != "disk":
            return

        found = self.call("/weight_info").get("weight_version")
        if found != version:
            raise ServerLostError(f"/weight_info answered version {found!r}, not {version!r}")

    def complete(self, rows: Sequence[list[int]], seeds: Sequence[int], options: dict[str, Any]) -> list[Any]:
        """Return the choice of each row of ids, which the server continues by `options` and the row's seed."""
        self.wake_up()
        bodies = []
        for ids, seed in zip(rows, seeds, strict=True):
            body = {**PLAIN_SAMPLING, **options, "prompt": ids, "seed": seed}
            bodies.append(body)
        answers = self.call_all("/v1/completions", bodies)

        choices = []
        for ids, answer in zip(rows, answers, strict=True):
            choice, *_ = answer.get("choices") or [{}]
            read = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            if read != ids:
                raise self.error(f"read other tokens than the prompt's: {str(read)[:80]}")
            choices.append(choice)
        return choices

    def error(self, text: str, hint: str = "the same command resumes; docs/engines.md has its options") -> RLHFError:
        """Return RLHFError R20."""
        return RLHFError("R20", f"{self.url} {text}", hint=hint)


def _read_json(answer: bytes) -> dict[str, Any]:
    """Return a JSON object; {} for anything else."""
    try:
        value = json.loads(answer)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _run_of(version: str) -> str:
    """Return what the versions of one run have in common."""
    return version.rpartition("-update-")[0]
