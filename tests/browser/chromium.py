"""Where a Chromium is. As a script: prints its path, or ends with status 1."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
]
"""What lets it run as root, in a container, without a screen or a network."""


def find() -> Path | None:
    """$INTERACTIVE_INFER_CHROMIUM, else the system's, else the one of `playwright install chromium`."""
    if given := os.environ.get("INTERACTIVE_INFER_CHROMIUM"):
        return Path(given)
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return Path(path)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = Path(playwright.chromium.executable_path)
    return path if path.exists() else None


if __name__ == "__main__":
    found = find()
    print(found or "no Chromium found")
    sys.exit(found is None)
