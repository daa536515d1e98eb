"""Judges that compare two answers: a language model behind an OpenAI-compatible endpoint, asked once for each text."""
