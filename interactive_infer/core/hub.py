"""A repository's files from the Hub, through the Hub's own cache; from the cache alone without a network."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ModelNotFoundError
from .quiet import Progress

TIMEOUT_S = 10.0
"""How long the Hub may take to answer one question: without a network the error comes soon, never a hang."""


def download(
    repo_id: str, wanted: Callable[[list[str]], list[str]], progress: Progress, *, argument: str = "model"
) -> Path:
    """The folder with `repo_id`'s newest files of those that `wanted` picks from the repository's list.

    Without a network it is what an earlier download has left in the cache.

    Raises:
        ModelNotFoundError: no such repository, no access, or no network and nothing in the cache; it names
            `argument`.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    progress("downloading", 0.0)
    try:
        info = HfApi().model_info(repo_id, timeout=TIMEOUT_S)
        files = wanted([file.rfilename for file in info.siblings or ()])
        folder = snapshot_download(
            repo_id,
            revision=info.sha,
            allow_patterns=files,
            etag_timeout=TIMEOUT_S,
            tqdm_class=_bar(progress),
        )
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{argument}={repo_id!r}: access to this repository must be asked for. Accept its terms on its "
            "Hub page, then log in with 'hf auth login' or set HF_TOKEN."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"{argument}={repo_id!r}: there is no such folder here and no such repository on the Hub "
            "(a private one needs 'hf auth login' or HF_TOKEN). Check the name."
        ) from error
    except Exception as error:  # no network, offline mode, a time-out: as many types as HTTP libraries
        try:
            folder = snapshot_download(repo_id, local_files_only=True)
        except Exception:
            raise ModelNotFoundError(
                f"{argument}={repo_id!r}: there is no such folder here, it is not in the Hub's cache, and the "
                f"Hub cannot be reached ({type(error).__name__}: {error}). Connect to the network once, or "
                "give a folder."
            ) from error
    progress("downloading", 1.0)
    return Path(folder)


def _bar(progress: Progress) -> Any:
    """A tqdm that counts bytes and prints nothing."""
    import tqdm

    class Bar(tqdm.tqdm):
        monitor_interval = 0  # no thread of tqdm's

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            kwargs |= {"file": io.StringIO(), "disable": False}
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            drawn = super().update(n)
            if self.unit == "B" and self.total:
                progress("downloading", min(1.0, self.n / self.total))
            return drawn

    return Bar
