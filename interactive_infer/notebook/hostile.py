"""A model's text made fit for messages, markup and terminals, where it is data and nothing else."""

from __future__ import annotations

import html


def sound(text: str) -> str:
    """`text` without halves of characters, which no message can carry: each becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def markup(text: str) -> str:
    """`text` as HTML that shows it. NUL, which HTML cannot hold, is shown as its symbol."""
    return html.escape(sound(text)).replace("\0", "\u2400")


def printable(text: str) -> str:
    """`text` for a terminal: control characters, which could steer it, are shown as escapes and not obeyed."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
