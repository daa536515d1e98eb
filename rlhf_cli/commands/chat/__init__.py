"""`rlhf chat RUN`: chat with a run's model; each reply is shown with its rewards and its KL from the SFT model."""
