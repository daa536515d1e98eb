"""A reward model's report card: what its scores on evaluation pairs and on probes say of it. Numbers only, no torch."""

from rlhf_cli.reward_card.faults import flags
from rlhf_cli.reward_card.measures import ScoredPair, measure
from rlhf_cli.reward_card.probes import build, judge, spread
from rlhf_cli.reward_card.shown import lines, margins, print_card

__all__ = ["ScoredPair", "build", "flags", "judge", "lines", "margins", "measure", "print_card", "spread"]
