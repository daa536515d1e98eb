"""`rlhf label RUN`: answers of a run's policy, compared by people or by a judge."""
