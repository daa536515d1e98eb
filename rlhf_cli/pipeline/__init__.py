"""The configs of a run folder as one thing: load, decide, run, status and check."""
