"""Every sentence that claims an effect, on the page, in the last lines of a run and in a comparison: in 1000 runs
without that effect it stands in at most 6.5 %, and where there is one it is there."""

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
from rlhf_cli.commands.report.health import NEAR
from rlhf_cli.commands.report.rules import RULES
from rlhf_cli.evaluation import reward_model
from rlhf_cli.evaluation.reward_model import PROBE_LABELS

RUNS, MOST = 1000, 0.065
EFFECTS, LEAST = 40, 0.2  # runs with an effect, and the share of them that says so: some are of 32 prompts
# Where it is concluded. What their texts say is here below, or in SILENT, a line each, where it claims no effect: it
# tells a number, says that nothing can be told, names a file, or says what to do about what is claimed in another text.
CONCLUDE = (
    "commands/report/findings", "commands/report/summary", "commands/report/health", "commands/report/compare",
    "commands/report/charts", "evaluation/render", "evaluation/reward_model",
)  # fmt: skip
SILENT = Path(__file__).with_name("sentences.txt")
# What says a direction or a judgement; texts of other modules that have such a word are listed as well.
WORDS = re.compile(
    r"\b(beats?|beaten|loses|lost|worse|better|best|rose|rises|fell|falls|differs? by|beyond noise|wrong|too sure|"
    r"hardly|broken|by heart|gained|healthy)\b"
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
    claim(worlds.trained, "its loss rose", rises=30.0),
    claim(worlds.trained, "its loss on held-out rows rose again", again=40.0),
    claim(worlds.trained, "it learns its rows by heart: more rows help as well", again=40.0, rises=-8.0),
    claim(worlds.trained, "{}: up to {} times is healthy", apart=2.5),
    claim(worlds.trained, "give it more rows: these it knows by heart", apart=4.0, falls=8.0, rises=-8.0),
    claim(worlds.trained, "{} of what its answers say in runs of three tokens they have said before", repeated=0.4),
    claim(worlds.evaluation, "only {}, {} and more is healthy{}", ended=0.6),
    claim(worlds.evaluation, " ({} end near-greedy)", none={"ended": 0.6}, ended=0.6, greedy=1.0),
    claim(worlds.evaluation, "it knows how to end and is not sure of it: it has learned too little",
          none={"ended": 0.6}, ended=0.6, greedy=1.0),
    # the reward model
    claim(worlds.accurate, "{}: the pairs may differ in something trivial, such as their length",
          none={"accuracy": 0.95}, accuracy=1.0),
    claim(worlds.rewarded, "the score follows the length of the answer: correlation {} [{}, {}], limit {}", length=0.9),
    claim(worlds.rewarded, "the margins say other chances than come true: ECE {}, limit {}; {}", sure=5.0),
    *(
        Claim("{} scores above the chosen answer for {} of {} prompts, limit {}", (worlds.rewarded, {}),
              (worlds.rewarded, {"probe": 0.4}), f"{name} scores above the chosen answer")
        for name in PROBE_LABELS.values()
    ),
    # PPO's log
    claim(worlds.scored, "It rises by {}: the policy earns more of what it is trained on.", scores=8.0),
    claim(worlds.scored, "It falls by {}: the policy earns less than it began with.", scores=-8.0),
    claim(worlds.scored, "{} The policy has moved, {} nats from SFT.", none={"kl": NEAR}, kl=2.0),
    claim(worlds.scored, "{} The policy has hardly moved, {} nats from SFT.", none={"kl": NEAR}, kl=0.0),
    *(
        Claim("{}, at the end too.", (worlds.updated, {}), (worlds.updated, {"beyond": 1.0}),
              f"{re.escape(rule.title)}.*at the end too")
        for rule in RULES if not rule.rises
    ),
    Claim(", and at update {} so far outside that the run may be broken", (worlds.updated, {}),
          (worlds.evaluation, {"ill": True})),
    # PPO against SFT
    claim(worlds.evaluation, "PPO beats SFT by {}", gold=1.0),
    claim(worlds.evaluation, "PPO loses to SFT by {}", **BAD),
    claim(worlds.evaluation, "beats SFT", gold=1.0),
    claim(worlds.evaluation, "loses to SFT: it is better", **BAD),
    Claim("PPO {} by {}", (worlds.evaluation, {"gold": None}), (worlds.evaluation, {"gold": None, "reward": 1.0}),
          "PPO beats SFT by the reward itself"),
    claim(worlds.evaluation, "read where PPO lost most, under Samples; an earlier policy may be better "
          "(Reward against KL)", **BAD),
    claim(worlds.evaluation, "PPO beats SFT: it wins", gold=1.0),
    claim(worlds.evaluation, "PPO is worse than SFT: it wins", **BAD),
    claim(worlds.evaluation, "The training stages look healthy, the outcome does not: look at the samples, and at the "
          "reward model.", **BAD),
    claim(worlds.evaluation, "The outcome is bad, no training stage is. Worth a look first", **BAD, ended=0.6),
    # reward hacking
    claim(worlds.evaluation, "PPO raised the reward and lost by {}", **HACKED),
    claim(worlds.evaluation, "found what the reward model gets wrong", **HACKED),
    claim(worlds.evaluation, "add pairs that reject what paid: it stands under Samples, where PPO lost most", **HACKED),
    claim(worlds.evaluation, "{}: PPO found what the reward gets wrong (docs/rewards.md)", **HACKED),
    claim(worlds.evaluation, "{}, and {} does not confirm it", reward=1.5),
    claim(worlds.evaluation, "it raised the reward and lost by {}", none={"ill": True}, **HACKED, ill=True),
    claim(worlds.evaluation, "went farther than its reward model is right", none={"ill": True}, **HACKED, ill=True),
    # the policies on the way, and other runs
    Claim("not its last, {}", (worlds.along, {}), (worlds.along, {"gain": 2.0}), r"not its last, .*policies\.$"),
    claim(worlds.along, ", which is worse beyond noise", gain=2.0),
    claim(worlds.compared, "differ by more than chance in the prompts, though another seed may move both", gap=0.4),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Nothing is drawn, and fewer resamples than in a run: what chance does to them only makes claims likelier."""
    with pytest.MonkeyPatch.context() as patch:
        draws_nothing(patch)
        patch.setattr(reward_model, "NUM_RESAMPLES", 100)
        patch.setattr(statistics, "RESAMPLES", 400)
        yield


@cache
def said(world: Callable[..., Iterator[str]], given: tuple[tuple[str, Any], ...], runs: int) -> list[str]:
    """All that is said in each of so many runs of a world."""
    return ["\n".join(world(np.random.default_rng([seed, runs]), **dict(given))) for seed in range(runs)]


def share(one: Claim, world: World, runs: int) -> float:
    found, given = re.compile(one.regex, re.MULTILINE), tuple(sorted(world[1].items()))
    return sum(bool(found.search(text)) for text in said(world[0], given, runs)) / runs


@pytest.mark.parametrize("one", CLAIMS, ids=lambda one: (one.pattern or one.text)[:40])
def test_a_claim_goes_by_its_effect(one: Claim) -> None:
    assert share(one, one.without, RUNS) <= MOST
    assert share(one, one.having, EFFECTS) >= LEAST


def test_every_sentence_is_known_to_claim_an_effect_or_none() -> None:
    """A text that is new or that was changed is sorted here: into CLAIMS, with worlds that hold it to chance, or into
    tests/sentences.txt."""
    silent = SILENT.read_text(encoding="utf-8").splitlines()
    assert silent == sorted(set(silent)) and not set(silent) & {one.text for one in CLAIMS}
    root = Path(rlhf_cli.__file__).parent
    texts = set().union(*(texts_of(root / f"{name}.py") for name in CONCLUDE))
    for folder in ("commands/report", "evaluation"):
        texts |= {text for path in (root / folder).glob("*.py") for text in texts_of(path) if WORDS.search(text)}
    known = {one.text for one in CLAIMS} | set(silent)
    assert sorted(texts - known) == [], "not sorted"
    assert sorted(known - texts) == [], "no text of the code any more"


def texts_of(path: Path) -> set[str]:
    """The texts of two words and more in a module, `{}` where a value stands; docstrings are none."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    inside = {
        id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node
    }
    inside |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = set()
    for node in nodes:
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        if " " in text and len(re.findall(r"[A-Za-z]{2,}", text)) > 1:
            found.add(text.replace("\n", " "))
    return found


def test_texts_are_found_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text('"""No text."""\nx = f"PPO {1:.2f} by {y}" if z else "it fell again"\nk = "key"\n')
    assert texts_of(tmp_path / "m.py") == {"PPO {} by {}", "it fell again"}


def test_no_claim_stands_twice() -> None:
    counts = Counter((one.text, one.pattern) for one in CLAIMS)
    assert max(counts.values()) == 1
