"""Text from strangers, made safe for a terminal."""


def printable(text: str) -> str:
    """Line ends stay; every other character that a terminal might obey, or cannot show, becomes an escape."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def on_one_line(text: str) -> str:
    return printable(" ".join(text.split()))
