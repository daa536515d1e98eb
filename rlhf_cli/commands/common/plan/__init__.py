"""The plan of a run: memory and time of each stage, for `rlhf plan` and the file of `rlhf launch`."""
