"""Estimate memory and time of the stages of a run: `rlhf plan`."""
