"""What was done and seen, the tables of it, and when it shows nothing."""

from dataclasses import dataclass, field

from chaos.kills import Outcome
from chaos.points import Tried
from chaos.runs import STEPS
from rlhf_cli import terminal

LEAST_INSIDE, LEAST_COVERED = 0.1, 0.8


@dataclass
class Found:
    """All that was done and seen."""

    killed: dict[str, list[Outcome]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)  # fail points of a stage: names x moments
    tried: dict[str, list[Tried]] = field(default_factory=dict)
    troubles: list[Outcome] = field(default_factory=list)
    chains: list[Outcome] = field(default_factory=list)
    planted: dict[str, list[str]] = field(default_factory=dict)  # what differs with each planted fault
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def tell(found: Found, wanted: int) -> list[str]:
    """Print the tables; returns all that is wrong."""
    faults: list[str] = []
    rows = []
    for stage, outcomes in [*found.killed.items(), ("rlhf run", found.chains)]:
        told = [kill for outcome in outcomes for kill in outcome.kills]
        inside, steps = sum(kill.inside for kill in told), len({kill.step for kill in told} - {0})
        same = sum(not outcome.wrong for outcome in outcomes)
        share = f"{inside} ({inside / max(len(told), 1):.0%})"
        covered = f"{steps} of {STEPS}" if stage in found.killed else "-"
        early = sum(outcome.early for outcome in outcomes)
        rows.append([stage, str(len(told)), share, covered, str(early), str(len(outcomes)), str(same)])
        faults += [f"{one.name}: {text}" for one in outcomes for text in one.wrong]
        if stage in found.killed:
            faults += vacuous(stage, len(told), inside, steps, wanted)
    terminal.table(["killed", "kills", "inside a write", "steps hit", "before a step", "runs", "identical"], rows)
    rows = []
    for stage, parts in found.tried.items():
        hit, made, bad = (sum(getattr(part, name) for part in parts) for name in ("hit", "runs", "different"))
        rows.append([stage, str(found.names[stage]), str(hit), str(made), str(made - bad)])
        faults += [text for part in parts for text in part.wrong]
    terminal.out()
    terminal.table(["fail points", "there are", "hit", "runs", "identical"], rows)
    terminal.out()
    rows = [[one.name, one.how, "no" if one.wrong else "yes"] for one in found.troubles]
    terminal.table(["trouble", "ended", "clean, then identical"], rows)
    faults += [f"{one.name}: {text}" for one in found.troubles for text in one.wrong]
    terminal.out(f"\n{found.seconds:.0f} s, {found.cpu_seconds:.0f} CPU seconds")
    return faults


def vacuous(stage: str, made: int, inside: int, steps: int, wanted: int) -> list[str]:
    """Why these kills would show nothing. Few kills are asked to hit steps of their own, every second one."""
    faults = [f"{stage}: {made} kills hit, {wanted} were asked for"] if made < wanted else []
    if inside < LEAST_INSIDE * made:
        faults.append(f"{stage}: {inside} of {made} kills landed inside a write: vacuous")
    if steps < LEAST_COVERED * min(STEPS, made // 2):
        faults.append(f"{stage}: {made} kills hit {steps} of {STEPS} steps: vacuous")
    return faults
