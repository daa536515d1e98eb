"""`rlhf eval`."""
