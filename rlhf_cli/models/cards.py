"""Model cards: the README of a model's folder."""

from pathlib import Path

# How the paragraphs begin that are of a stage's own folder, not of the model.
ALONE, MADE = "These are adapters alone", "Made by rlhf-cli"


def told_in(folder: Path) -> list[str]:
    """What the card that a stage left with a model says of it, paragraph by paragraph; nothing where it has none."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    if text.startswith("---\n"):
        text = text.partition("\n---\n")[2]
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
    return [each for each in paragraphs if each and not each.startswith((ALONE, MADE))]
