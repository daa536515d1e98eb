"""A stand-in for a vLLM server, which answers by HFEngine with the weights that it was sent.

`python stand_in_vllm.py MODEL HOST PORT` serves a folder until it is killed.
"""

import atexit
import copy
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rlhf_cli.http_client import HTTPClient
from rlhf_cli.models.batch import Prompts, StopTokenId
from rlhf_cli.ppo import losses
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.vllm_client import VLLMClient
from rlhf_cli.ppo.vllm_engine import VLLMEngine
from rlhf_cli.ppo.vllm_server import SentPolicy, VLLMServer

BASE = "sft"
AWAKE_OR_ASLEEP = ("/health", "/v1/models", "/is_sleeping", "/wake_up", "/sleep?level=1", "/weight_info")
LOADING = threading.Lock()  # while transformers loads weights, it patches its classes for all threads


class TopK:
    """A model whose `k` largest logits alone count; all if `k` is 0."""

    def __init__(self, model: Any, k: int) -> None:
        self.model, self.k = model, k

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        if self.k:
            least = output.logits.topk(self.k).values[..., -1:]
            output.logits = torch.where(output.logits < least, -1e9, output.logits)
        return output


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a rollout opens many connections at once


class StandIn:
    """Serves `model`. `faults`: functions (path, body) -> answer for the next requests, instead of the right answers.

    A fault returns (status, bytes), or None for the right answer, or raises ConnectionError to answer with nothing.
    """

    def __init__(self, model: Any, max_model_len: int = 256, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.first, self.max_model_len = model, max_model_len
        self.lock, self.faults = threading.Lock(), list[Callable[[str, Any], Any]]()
        self.requests: list[tuple[str, Any]] = []
        self.processed = True  # --logprobs-mode processed_logprobs
        self.restart()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                self.answer(json.loads(self.rfile.read(length) or b"null"))

            def do_GET(self) -> None:
                self.answer(None)

            def answer(self, body: Any) -> None:
                try:
                    status, content = outer.answer(self.path, body)
                except ConnectionError:
                    self.close_connection = True
                    return
                with suppress(OSError):  # the client has timed out
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = Listener(address, Handler)
        self.url = f"http://{address[0]}:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def restart(self) -> None:
        """Forget all weights but the first."""
        self.models: dict[str, Any] = {BASE: self.first}
        self.version = "default"
        self.asleep = False

    def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        with self.lock:
            self.requests.append((path, body))
            fault = self.faults.pop(0) if self.faults else None
            if fault and (answer := fault(path, body)):
                return answer
            if self.asleep and path not in AWAKE_OR_ASLEEP:
                return 400, b"the server sleeps"
            with torch.no_grad():
                return self._answers.get(path, lambda self, body: (404, b"no such path"))(self, body)

    def _complete(self, body: Any) -> tuple[int, bytes]:
        if body["model"] not in self.models:
            return 404, b"The model does not exist"
        assert (body["top_p"], body["min_p"], body["repetition_penalty"], body["ignore_eos"]) == (1.0, 0.0, 1.0, True)
        model = TopK(self.models[body["model"]], body["top_k"])
        engine = HFEngine(model, tuple(body["stop_token_ids"]), 0, body["temperature"], bf16=False)
        prompts = replace(Prompts.from_lists([body["prompt"]]), seeds=(body["seed"],))
        rollout = engine.generate(replace(prompts, response_length=body["max_tokens"]))
        ids, logprobs = rollout.response_tokens(0), rollout.logprobs[0].tolist()
        if not self.processed:
            rows = torch.tensor([body["prompt"] + ids])
            logits = model.model(input_ids=rows).logits[0, len(body["prompt"]) - 1 : -1]
            logprobs = losses.token_logprobs(logits, torch.tensor(ids), 1.0).tolist()
        choice = {"token_ids": ids, "prompt_token_ids": body["prompt"], "logprobs": {"token_logprobs": logprobs}}
        return 200, json.dumps({"choices": [choice]}).encode()

    def _load_adapter(self, body: Any) -> tuple[int, bytes]:
        if body["lora_name"] in self.models or not Path(body["lora_path"]).is_dir():
            return 400, b"loaded already, or no such folder"
        with LOADING:
            adapted = PeftModel.from_pretrained(copy.deepcopy(self.first), body["lora_path"]).eval()
        self.models[body["lora_name"]] = adapted.get_base_model()
        return 200, b"Success: LoRA adapter added successfully."

    def _unload_adapter(self, body: Any) -> tuple[int, bytes]:
        return (200, b"Success") if self.models.pop(body["lora_name"], None) else (404, b"no such adapter")

    def _reload(self, body: Any) -> tuple[int, bytes]:
        with LOADING:
            self.models[BASE] = AutoModelForCausalLM.from_pretrained(body["kwargs"]["weights_path"]).eval()
        return 200, b'{"results": [null]}'

    def _set_asleep(self, asleep: bool) -> tuple[int, bytes]:
        self.asleep = asleep
        return 200, b""

    def _set_version(self, body: Any) -> tuple[int, bytes]:
        self.version = body["new_version"]
        return 200, b"{}"

    def _list(self, body: Any) -> tuple[int, bytes]:
        models = [
            {"id": name, "parent": None if name == BASE else BASE, "max_model_len": self.max_model_len}
            for name in self.models
        ]
        return 200, json.dumps({"object": "list", "data": models}).encode()

    _answers: ClassVar[dict[str, Callable[["StandIn", Any], tuple[int, bytes]]]] = {
        "/health": lambda self, body: (200, b""),
        "/v1/models": _list,
        "/v1/completions": _complete,
        "/v1/load_lora_adapter": _load_adapter,
        "/v1/unload_lora_adapter": _unload_adapter,
        "/sleep?level=1": lambda self, body: self._set_asleep(True),
        "/wake_up": lambda self, body: self._set_asleep(False),
        "/is_sleeping": lambda self, body: (200, json.dumps({"is_sleeping": self.asleep}).encode()),
        "/pause?mode=wait": lambda self, body: (200, b"{}"),
        "/resume": lambda self, body: (200, b"{}"),
        "/reset_prefix_cache": lambda self, body: (200, b""),
        "/collective_rpc": _reload,
        "/update_weight_version": _set_version,
        "/weight_info": lambda self, body: (200, json.dumps({"weight_version": self.version}).encode()),
    }


def served(model: Any, stop: StopTokenId, pad: int, temperature: float = 1.0, **_: Any) -> VLLMEngine:
    """Return an engine that samples from a stand-in with these weights; each sync sends those of `model`."""
    stand_in, folder = StandIn(copy.deepcopy(model)), Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def write(role: str, update: int) -> tuple[str, Path]:
        path = folder / f"{role}-update-{update}"
        model.save_pretrained(path)
        return path.name, path

    probe = replace(Prompts.from_lists([[5, 6, 7], [8, 9], [4]]), seeds=(1, 2, 3), response_length=8)
    policy = SentPolicy(copy.deepcopy(model), probe, stop, pad, temperature, bf16=False, max_gap=0.1)
    policy.weights = (stand_in.version, folder)
    client = VLLMClient(stand_in.url, "disk", HTTPClient())
    server = VLLMServer(client, policy, max_wait=5.0, longest_row=60, report=print, served=BASE)
    return VLLMEngine([server], policy, write, temperature)


if __name__ == "__main__":
    _, served_model, host, port = sys.argv
    StandIn(AutoModelForCausalLM.from_pretrained(served_model).eval(), address=(host, int(port)))
    threading.Event().wait()
