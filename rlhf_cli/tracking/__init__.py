"""Metrics of a run: the logs metrics.jsonl and samples.jsonl, and the trackers of `output.report_to`."""
