"""`rlhf reward`."""
