"""A model's text made fit for messages and markup, where it is data and nothing else."""

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
