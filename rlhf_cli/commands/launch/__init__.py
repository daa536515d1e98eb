"""Print the file that runs a run's stages on several machines, for a scheduler: `rlhf launch ENGINE RUN`."""
