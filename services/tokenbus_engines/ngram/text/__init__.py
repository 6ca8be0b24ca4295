"""What the model was taught: short pieces of plain prose and talk, written for it."""

from importlib.resources import files


def documents() -> list[str]:
    """Return every piece, its paragraphs in one line each and an empty line between them."""
    sources = sorted(
        (entry for entry in files(__name__).iterdir() if entry.name.endswith(".txt")), key=lambda entry: entry.name
    )
    texts = [part for source in sources for part in source.read_text("utf-8").split("\n---\n")]
    return ["\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")) for text in texts]
