"""`rlhf export RUN --out DIR --push OWNER/NAME`: export a run's model as a self-contained Hugging Face folder."""
