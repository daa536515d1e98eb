"""The four stages on random weights in the shape of a real model: what each takes, beside what `rlhf plan` says.

    python -m benchmarks.chain --model Qwen3-0.6B --out runs/chain [--adapters lora] [--json chain.json]
    python -m benchmarks.chain --pairs pairs.jsonl --gpu h100 --out runs/whole [--json whole.json]

`rlhf init preferences` writes the run; then a few steps of each stage run in a process each. Recorded for each stage:
its peak memory (VmHWM; on a GPU torch.cuda.max_memory_allocated), its time, and how often each file of weights is read.
Then the seconds for a GB of hashing, saving and loading a model of a quarter, a half and all of the layers.

With --pairs the stages are as long as `rlhf init preferences` writes them for these pairs and SmolLM2-135M's shape, and
PPO makes 40 updates of 128 answers. The tokenizer is trained on the pairs, the weights are random.
"""

import argparse
import copy
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Any
from unittest.mock import patch

import safetensors
import safetensors.torch
import torch
import yaml

from benchmarks.placement import MODELS, STAGES, write_inputs
from benchmarks.speed.processes import child_environment, fail
from rlhf_cli.jsonl import read_jsonl

STEPS = {"max_steps": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
FEW: dict[str, dict[str, Any]] = {
    "sft": {**STEPS, "gradient_accumulation_steps": 2},
    "reward": {**STEPS, "gradient_accumulation_steps": 2, "normalize_samples": 8},
    "ppo": {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_samples_per_prompt": 2,
        "total_episodes": 16, "num_ppo_epochs": 1, "num_sample_generations": 0,
    },
    "eval": {"n": 8, "best_of": [2], "per_device_batch_size": 8},
}  # fmt: skip
WORDS = {"prompt": 24, "answer": 48}
WHOLE_PPO = {"total_episodes": 40 * 128, "per_device_train_batch_size": 64, "gradient_accumulation_steps": 2}


# In the process of a stage: it imports transformers after `counting_reads` has replaced safetensors' functions


def run_stage(stage: str, config: str) -> dict[str, Any]:
    """Run a stage's command; return its exit code, its peak memory in bytes and the reads of each file of weights."""
    reads: Counter[str] = Counter()
    with counting_reads(reads):
        from rlhf_cli.cli import app

        try:
            app([stage, "--config", config])
            code: Any = 0
        except SystemExit as stop:
            code = stop.code
    return {"exit_code": code or 0, "peak": peak_bytes(), "reads": dict(reads)}


def peak_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


@contextmanager
def counting_reads(reads: Counter[str]) -> Iterator[None]:
    """Context manager that counts how often each .safetensors file is read: opened by Python, or tensors taken."""
    real, lock = safetensors.safe_open, Lock()

    class CountedFile:
        """safe_open that counts itself when the first numbers of a tensor are taken; shapes are in the header."""

        def __init__(self, path: Any, *arguments: Any, **options: Any) -> None:
            self.path, self.file, self.counted = str(path), real(path, *arguments, **options), False

        def __enter__(self) -> "CountedFile":
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            if name in ("get_tensor", "get_tensors"):
                self.count()
            return getattr(self.file, name)

        def count(self) -> None:
            with lock:  # transformers reads tensors in several threads
                reads[self.path] += not self.counted
                self.counted = True

        def get_slice(self, name: str) -> "CountedSlice":
            return CountedSlice(self, self.file.get_slice(name))

    class CountedSlice:
        def __init__(self, file: CountedFile, part: Any) -> None:
            self.file, self.part = file, part

        def __getattr__(self, name: str) -> Any:
            return getattr(self.part, name)

        def __getitem__(self, index: Any) -> Any:
            self.file.count()
            return self.part[index]

    def count_open(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".safetensors") and arguments[1] == "r":
            reads[str(arguments[0])] += 1

    sys.addaudithook(count_open)
    with patch.object(safetensors, "safe_open", CountedFile), patch("safetensors.torch.safe_open", CountedFile):
        yield


# In the benchmark's own process


def prepare(folder: Path, model: str, adapters: str) -> Path:
    """Write the data, a base model of random bfloat16 weights and the run's folder, with few steps a stage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    run = folder / "run"
    if run.exists():
        return run
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder, MODELS[model], **WORDS)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "base")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "base")
    options = ["--data", folder / "pairs.jsonl", "--base", folder / "base", "--adapters", adapters, "--minutes", "60"]
    rlhf("init", "preferences", run, *options)
    for stage, changes in FEW.items():
        path = run / f"{stage}.yaml"
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for key in ("num_train_epochs", "local_rollout_forward_batch_size"):
            content[stage].pop(key, None)
        content[stage] |= changes
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return run


def prepare_whole(folder: Path, pairs: Path, gpu: str | None) -> Path:
    """Write a base model of random weights and the run's folder, as it is but for the size of PPO."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.gpu import SHAPES
    from rlhf_cli.models import tokenizers

    run = folder / "run"
    if run.exists():
        return run
    folder.mkdir(parents=True, exist_ok=True)
    sizes = dict(SHAPES["135m"])
    tokenizer = tokenizers.train_tokenizer(pairs, sizes["vocab_size"])
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(
        sizes.pop("model_type"), tie_word_embeddings=True, max_position_embeddings=8192, **ids, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    rlhf("init", "preferences", run, "--data", pairs, "--base", folder / "base", *(["--gpu", gpu] if gpu else []))
    path = run / "ppo.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["ppo"] |= WHOLE_PPO
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return run


def rlhf(*arguments: Any) -> str:
    command = [sys.executable, "-m", "rlhf_cli", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(run: Path, threads: int) -> Iterator[dict[str, Any]]:
    """Run the stages one after the other, each planned first; yield a row for each."""
    for stage in STAGES:
        shutil.rmtree(run / stage, ignore_errors=True)
        plan = json.loads(rlhf("plan", run, "--json"))["stages"][stage]
        start = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.chain", "--stage", stage, str(run / f"{stage}.yaml")]
        child = subprocess.run(command, env=child_environment(threads), stdout=subprocess.PIPE, text=True)
        result = json.loads(child.stdout.splitlines()[-1])
        if result["exit_code"]:
            raise RuntimeError(f"{stage} exited with {result['exit_code']}")
        on_gpu = torch.cuda.is_available()
        planned = max(phase["total"] for phase in plan["phases"]) if on_gpu else plan["memory_bytes"]
        yield {
            "stage": stage,
            "peak_gb": round(result["peak"] / 1e9, 2),
            "plan_gb": round(planned / 1e9, 2),
            "plan_over_peak": round(planned / result["peak"], 2),
            "seconds": round(time.perf_counter() - start, 1),
            "plan_seconds": round(plan["seconds"], 1),
            **(ppo_seconds(run) if stage == "ppo" else {}),
            "most_reads_of_a_file": max(result["reads"].values(), default=0),
            "reads": {str(Path(path).relative_to(run.parent)): count for path, count in result["reads"].items()},
        }


def ppo_seconds(run: Path) -> dict[str, float]:
    """Return the median seconds of the parts of an update."""
    rows = [row for _, row in read_jsonl(run / "ppo/metrics.jsonl")]
    names = ("time/rollout_s", "time/judge_s", "time/update_s")
    return {name: round(median(row[name] for row in rows), 3) for name in names}


def seconds_per_gb(folder: Path, model: str) -> Iterator[dict[str, Any]]:
    """Yield the seconds for a GB of hashing, saving and loading the model with some of its layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhf_cli.files import file_sha256
    from rlhf_cli.models import load

    layers = MODELS[model]["num_hidden_layers"]
    for count in (layers // 4, layers // 2, layers):
        sizes = copy.deepcopy(MODELS[model]) | {"num_hidden_layers": count}
        some, path = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)), folder / "some"
        shutil.rmtree(path, ignore_errors=True)
        saving = seconds(lambda some=some, path=path: some.save_pretrained(path))
        del some
        files = sorted(path.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files) / 1e9
        hashing = seconds(lambda files=files: [file_sha256(file) for file in files])
        loading = seconds(lambda path=path: load.load_causal_lm(path))
        rates = {"hash": hashing, "save": saving, "load": loading}
        rounded = {f"{name}_s_per_gb": round(took / size, 2) for name, took in rates.items()}
        yield {"layers": count, "gb": round(size, 2), **rounded}
    shutil.rmtree(folder / "some")


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-0.6B")
    parser.add_argument("--pairs", type=Path, help="a whole run on these pairs, with SmolLM2-135M's shape")
    parser.add_argument("--gpu", help="of --pairs: option of `rlhf init preferences`")
    parser.add_argument("--adapters", choices=("none", "lora", "qlora"), default="lora")
    parser.add_argument("--out", type=Path, default=Path("runs/chain"))
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stage", nargs=2, metavar=("STAGE", "CONFIG"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        print(json.dumps(run_stage(*args.stage)))
        return 0
    rows: dict[str, list[dict[str, Any]]] = {"stages": [], "files": []}
    model = "SmolLM2-135M" if args.pairs else args.model
    try:
        if args.pairs:
            run = prepare_whole(args.out.resolve(), args.pairs.resolve(), args.gpu)
            parts = {"stages": measure(run, args.threads)}
        else:
            run = prepare(args.out.resolve(), args.model, args.adapters)
            parts = {"stages": measure(run, args.threads), "files": seconds_per_gb(args.out, args.model)}
        for part, measured in parts.items():
            for row in measured:
                rows[part].append(row)
                print("  ".join(f"{name} {value}" for name, value in row.items() if name != "reads"), flush=True)
                if args.json:
                    about = {"model": model, "adapters": args.adapters, "torch": torch.__version__}
                    args.json.write_text(json.dumps({**about, **rows}, indent=1) + "\n", encoding="utf-8")
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
