"""Every sentence that claims an effect appears in at most 6.5 % of 1000 simulated runs without the effect, and in runs
with the effect: in the report, in the terminal output and in comparisons."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_worlds as worlds
from report_run import draws_nothing

import rlhf_cli
from rlhf_cli import statistics
from rlhf_cli.commands.report.rules import NEAR, RULES
from rlhf_cli.evaluation import reward_model
from rlhf_cli.evaluation.reward_model import PROBE_LABELS

RUNS, MOST = 1000, 0.065
EFFECTS, LEAST = 40, 0.2  # runs with an effect, and the share that states it: some have only 32 prompts
# Modules with statements. Each of their texts is in CLAIMS below, or in SILENT, one per line, if it claims no effect: a
# number, the absence of a result, a file name, or advice on what another text claims.
MODULES = (
    "commands/report/diagnosis", "commands/report/rules", "commands/report/compare", "commands/report/figures",
    "evaluation/render", "evaluation/reward_model",
)  # fmt: skip
SILENT = Path(__file__).with_name("sentences.txt")
# Words of a direction or a judgement; texts of the other modules with such a word are listed as well.
WORDS = re.compile(
    r"\b(beats?|beaten|loses|lost|worse|better|best|rose|rises|fell|falls|differs? by|more than noise|wrong|"
    r"over-confident|hardly|alarm|memorizes|gained|healthy|undertrained|exploit(s|ed)?)\b"
)
World = tuple[Callable[..., Iterator[str]], dict[str, Any]]


@dataclass(frozen=True)
class Claim:
    """A sentence that claims an effect: its text in the code, and worlds without the effect and with it."""

    text: str
    without: World
    having: World
    pattern: str = ""  # where the text alone would not find it

    @property
    def regex(self) -> str:
        return self.pattern or re.escape(self.text).replace(r"\{\}", ".*?")


def claim(
    world: Callable[..., Iterator[str]], text: str, *, none: dict[str, Any] | None = None, **effect: Any
) -> Claim:
    return Claim(text, (world, none or {}), (world, effect))


BAD, HACKED = {"gold": -1.0}, {"gold": -1.0, "reward": 1.5}
CLAIMS = (
    # SFT, and the losses of the reward model
    claim(worlds.trained, "the training loss rose", rises=30.0),
    claim(worlds.trained, "the held-out loss rose again", again=40.0),
    claim(worlds.trained, "lower {}; it memorizes its rows: more rows help as well", again=40.0, rises=-8.0),
    claim(worlds.trained, "{}: the ratio is above {}", apart=2.5),
    claim(worlds.trained, "add rows: it memorizes the ones it has", apart=4.0, falls=8.0, rises=-8.0),
    claim(worlds.trained, "{} of its trigrams are repeated in PPO's first update (healthy: at most ", repeated=0.4),
    claim(worlds.evaluation, "only {} (healthy: at least {}); the others are cut off", ended=0.6),
    claim(worlds.evaluation, " ({} end near-greedy)", none={"ended": 0.6}, ended=0.6, greedy=1.0),
    claim(worlds.evaluation, "it is undertrained: its likeliest answers end, its sampled ones do not",
          none={"ended": 0.6}, ended=0.6, greedy=1.0),
    # the reward model
    claim(worlds.accurate, "{}: the pairs may differ in something trivial, such as length",
          none={"accuracy": 0.95}, accuracy=1.0),
    claim(worlds.rewarded, "the score depends on the length of the answer: rank correlation ", length=0.9),
    claim(worlds.rewarded, "the scores are miscalibrated: ECE {}, limit {}; {}", sure=5.0),
    *(
        Claim("{} scores above the chosen answer for {} of ", (worlds.rewarded, {}),
              (worlds.rewarded, {"probe": 0.4}), f"{name} scores above the chosen answer")
        for name in PROBE_LABELS.values()
    ),
    # PPO's log
    claim(worlds.scored, "It rises by {}, more than noise.", scores=8.0),
    claim(worlds.scored, "It falls by {}, more than noise.", scores=-8.0),
    claim(worlds.scored, "{} The policy has moved: KL {} nats from SFT.", none={"kl": NEAR}, kl=2.0),
    claim(worlds.scored, "{} The policy has hardly moved: KL {} nats from SFT.", none={"kl": NEAR}, kl=0.0),
    *(
        Claim("{}, and still outside at the end.", (worlds.updated, {}), (worlds.updated, {"beyond": 1.0}),
              f"{re.escape(rule.title)}.*still outside at the end")
        for rule in RULES if rule.range
    ),
    Claim("{}, and beyond the alarm limit at update {}.", (worlds.updated, {}),
          (worlds.evaluation, {"ill": True}), "beyond the alarm limit"),
    # PPO against SFT
    claim(worlds.evaluation, "PPO beats SFT by {}", gold=1.0),
    claim(worlds.evaluation, "PPO loses to SFT by {}", **BAD),
    claim(worlds.evaluation, "beats SFT", gold=1.0),
    Claim("PPO {} by {}", (worlds.evaluation, {"gold": None}), (worlds.evaluation, {"gold": None, "reward": 1.0}),
          "PPO beats SFT by the reward model"),
    claim(worlds.evaluation, "read the largest losses of PPO under Samples; an earlier policy may be better: see "
          "Reward against KL", **BAD),
    claim(worlds.evaluation, "PPO beats SFT: win rate", gold=1.0),
    claim(worlds.evaluation, "PPO loses to SFT: win rate", **BAD),
    claim(worlds.evaluation, "The training stages look healthy, but the outcome is bad: check the samples and the "
          "reward model.", **BAD),
    claim(worlds.evaluation, "The outcome is bad, but no training stage is. Worth a look first", **BAD, ended=0.6),
    # reward hacking
    claim(worlds.evaluation, "PPO raised the reward and lost by {}", **HACKED),
    claim(worlds.evaluation, "exploited errors of the reward model", **HACKED),
    claim(worlds.evaluation, "add pairs that reject what PPO exploits: see Samples, largest losses of PPO", **HACKED),
    claim(worlds.evaluation, ": reward hacking (docs/rewards.md)", **HACKED),
    claim(worlds.evaluation, ", which {} does not confirm", reward=1.5),
    claim(worlds.evaluation, "it raised the reward and lost by {}", none={"ill": True}, **HACKED, ill=True),
    claim(worlds.evaluation, "over-optimized its reward model", none={"ill": True}, **HACKED, ill=True),
    # snapshots, and other runs
    claim(worlds.snapshots, "worse by more than noise", gain=2.0),
    claim(worlds.snapshots, ", worse by more than noise", gain=2.0),
    claim(worlds.compared, "differ by more than chance in the prompts; another seed may move both", gap=0.4),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def fast() -> Iterator[None]:
    """Without drawings, and with fewer resamples than in a run, which makes claims more likely."""
    with pytest.MonkeyPatch.context() as patch:
        draws_nothing(patch)
        patch.setattr(reward_model, "NUM_RESAMPLES", 100)
        patch.setattr(statistics, "RESAMPLES", 400)
        yield


@cache
def statements(world: Callable[..., Iterator[str]], options: tuple[tuple[str, Any], ...], runs: int) -> list[str]:
    """All statements about each of these runs of a world."""
    return ["\n".join(world(np.random.default_rng([seed, runs]), **dict(options))) for seed in range(runs)]


def share(one: Claim, world: World, runs: int) -> float:
    pattern, options = re.compile(one.regex, re.MULTILINE), tuple(sorted(world[1].items()))
    return sum(bool(pattern.search(text)) for text in statements(world[0], options, runs)) / runs


@pytest.mark.parametrize("one", CLAIMS, ids=lambda one: (one.pattern or one.text)[:40])
def test_a_claim_depends_on_its_effect(one: Claim) -> None:
    assert share(one, one.without, RUNS) <= MOST
    assert share(one, one.having, EFFECTS) >= LEAST


def test_every_sentence_is_classified() -> None:
    """A new or changed text belongs into CLAIMS, with worlds that test it, or into tests/cli/sentences.txt."""
    silent = SILENT.read_text(encoding="utf-8").splitlines()
    assert silent == sorted(set(silent)) and not set(silent) & {one.text for one in CLAIMS}
    counts = Counter((one.text, one.pattern) for one in CLAIMS)
    assert max(counts.values()) == 1, "a claim is listed twice"
    root = Path(rlhf_cli.__file__).parent
    texts = set().union(*(texts_of(root / f"{name}.py") for name in MODULES))
    fields = [text for rule in RULES for text in (rule.title, rule.words, rule.unit, rule.if_low, rule.if_high)]
    texts |= set(filter(is_phrase, fields))
    for folder in ("commands/report", "evaluation"):
        texts |= {text for path in (root / folder).glob("*.py") for text in texts_of(path) if WORDS.search(text)}
    known = {one.text for one in CLAIMS} | set(silent)
    assert sorted(texts - known) == [], "not classified"
    assert sorted(known - texts) == [], "not in the code"


def texts_of(path: Path) -> set[str]:
    """The texts of two words and more in a module, `{}` for values, without docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    inside = {
        id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node
    }
    inside |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = set()
    for node in nodes:
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        if is_phrase(text):
            texts.add(text.replace("\n", " "))
    return texts


def is_phrase(text: str) -> bool:
    return " " in text and len(re.findall(r"[A-Za-z]{2,}", text)) > 1
