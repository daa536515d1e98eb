"""Evaluation results: report.json of `rlhf eval`, the reward model's report card, and how both are printed.

Computes and renders from scored responses; loads no models.
"""
