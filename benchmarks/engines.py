"""Tokens per second of the rollout engines and of transformers' generate, on one model: docs/results/engines.md.

    python -m benchmarks.engines MODEL --rows 32 128 --bf16 --vllm http://127.0.0.1:8000

MODEL is a folder, which the vLLM server serves. Prompts are random ids, and every response has `--length` tokens.
Each engine generates once to warm up, and then `--repeats` times in turn with the others; the median counts.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlhf_cli.http_client import HTTPClient
from rlhf_cli.models.batch import Prompts
from rlhf_cli.ppo.graph_engine import GraphEngine, reason_against
from rlhf_cli.ppo.rollout import HFEngine
from rlhf_cli.ppo.vllm_client import VLLMClient
from rlhf_cli.ppo.vllm_server import SentPolicy, VLLMServer

PROMPT = 32  # tokens


def make_engines(model: Any, length: int, bf16: bool, url: str | None) -> dict[str, Callable[[Prompts], Any]]:
    """Return by name what generates a response to each prompt."""
    device = model.device

    def generate(prompts: Prompts) -> None:
        sizes = {"max_new_tokens": length, "min_new_tokens": length}
        inputs = {"input_ids": prompts.ids.to(device), "attention_mask": prompts.mask.long().to(device)}
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            ids = model.generate(**inputs, **sizes, do_sample=True, top_k=0, pad_token_id=0)
        assert ids.shape[1] == PROMPT + length

    engines: dict[str, Callable[[Prompts], Any]] = {"transformers generate": generate}
    engines["hf"] = HFEngine(model, None, 0, bf16=bf16).generate
    if reason_against(model) is None:
        engines["graph"] = GraphEngine(model, None, 0, bf16=bf16).generate
    if url:
        client = VLLMClient(url, "lora", HTTPClient(600.0, 0))
        client.read_models(PROMPT + length)
        assert client.served
        policy = SentPolicy(None, Prompts.from_lists([[1]]), None, 0, 1.0, bf16=bf16, max_gap=0.1)
        server = VLLMServer(client, policy, max_wait=0.0, longest_row=0, report=print, served=client.served)
        engines["vllm"] = lambda prompts: server.generate(prompts, 1.0)
    return engines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--length", type=int, default=64, help="tokens per response")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--vllm", help="URL of a server that serves the model")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device).eval()
    model.generation_config.eos_token_id = None
    engines = make_engines(model, given.length, given.bf16, given.vllm)
    print(f"| rows | {' | '.join(engines)} |\n|---|{'---|' * len(engines)}")
    for rows in given.rows:
        generator = torch.Generator().manual_seed(rows)
        ids = torch.randint(3, model.config.vocab_size, (rows, PROMPT), generator=generator)
        prompts = Prompts(ids, torch.ones_like(ids, dtype=torch.bool), tuple(range(rows)), given.length)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(given.repeats + 1):
            for name, generate in engines.items():
                start = time.perf_counter()
                generate(prompts)
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds[name] += [time.perf_counter() - start] if turn else []
        speeds = [f"{rows * given.length / statistics.median(each):,.0f}" for each in seconds.values()]
        print(f"| {rows} | {' | '.join(speeds)} |", flush=True)


if __name__ == "__main__":
    main()
