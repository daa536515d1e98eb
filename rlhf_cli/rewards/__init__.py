"""Reward sources. A source is any callable `Rollout -> (B,) float32`, or `-> EnsembleScores` for an ensemble.

`function.py` has the protocol, functions and built-in rewards. `model.py` has reward models and ensembles. Every other
file has one kind of reward that reads text, with a `make` that builds it from its section in ppo.yaml.
"""
