"""A judge behind a real vLLM server on a CPU (`make vllm-test`): a random model whose replies the JSON Schema forms."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from ppo_folder import PROMPTS

from rlhf_cli import jsonl
from rlhf_cli.config.judges import OpenAIJudge
from rlhf_cli.errors import RLHFError
from rlhf_cli.judges.pairwise import Pair, PairwiseJudge
from rlhf_cli.judges.question import WINNERS
from rlhf_cli.models import save, tokenizers
from tests.ppo.test_vllm_server import VLLM, serving

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not VLLM, reason="RLHF_VLLM is not set: make vllm-test sets it")]
# A random model would write blanks for ever where the schema allows them.
OPTIONS = "--served-model-name tiny --dtype float32 --max-model-len 4096 "
OPTIONS += """--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'"""
PAIRS = [Pair(prompt, f"It is {n}.", f"No, it is {n + 1}.") for n, prompt in enumerate(PROMPTS[:4])]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("judge")
    jsonl.write_jsonl(folder / "texts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    tokenizer = tokenizers.train_tokenizer(folder / "texts.jsonl", 280)
    tokenizers.set_chat_template(tokenizer, "chatml")
    sizes = {"vocab_size": len(tokenizer), "head_dim": 32, "max_position_embeddings": 4096, "eos_token_id": 1}
    save.save_model(tiny.causal(**sizes), tokenizer, folder / "model", "")
    with serving(f"vllm serve {folder / 'model'} {OPTIONS}", folder / "log") as (address, _):
        yield f"{address}/v1"


def judge_of(url: str, folder: Path, model: str = "tiny") -> PairwiseJudge:
    settings = OpenAIJudge(url=url, model=model, key_env=None, parameters={"max_tokens": 40}, max_wait=10.0)
    return PairwiseJudge.of("llm", settings, folder, lambda key: key)


def test_every_reply_names_a_winner_and_is_kept(url: str, tmp_path: Path) -> None:
    judge = judge_of(url, tmp_path)
    found = judge.compare(PAIRS)
    assert {each.winner for each in found} | {each.swapped_winner for each in found} <= set(WINNERS)
    assert judge.cost.calls == 8 and judge.cost.prompt_tokens > 8 * 100 and judge.endpoint.sends_schema
    again = judge_of(url, tmp_path)
    assert again.compare(PAIRS) == found and again.cost.asked == 0


def test_a_model_that_it_does_not_serve_is_one_line(url: str, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        judge_of(url, tmp_path, "nobody").compare(PAIRS)
    (problem,) = caught.value.problems
    assert problem.code == "J03" and "answered 404" in problem.text and "nobody" in problem.text


def test_a_random_model_fails_the_probe(url: str, tmp_path: Path) -> None:
    with pytest.raises(RLHFError) as caught:
        judge_of(url, tmp_path).pass_probe()
    assert caught.value.problems[0].code == "J02"
