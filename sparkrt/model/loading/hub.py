"""Model repositories on a hub: fetched into the hub's own cache, or found there when offline."""

from __future__ import annotations

import re
from pathlib import Path

from sparkrt.errors import LoadError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form owner/name, which a relative path may have, too: look for a file first."""
    return _ID.fullmatch(model) is not None


def fetch(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a repository's files, downloaded (with a progress bar) unless cached. Without `weights`, text files only.

    `HF_HUB_OFFLINE` and the other variables of the hub's client apply. Raises LoadError where it cannot be had.
    """
    from huggingface_hub import snapshot_download  # 0.2 s, and most start-ups are of local folders
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

    patterns = [*_TEXT_FILES, "*.safetensors"] if weights else _TEXT_FILES
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise LoadError(f"{model}: the repository is gated; accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise LoadError(f"{model}: neither a folder here nor a repository on the hub (a private one needs HF_TOKEN)") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise LoadError(f"{model}: neither a folder here nor in the hub's cache, and the hub cannot be reached") from error
    except (OSError, ValueError) as error:  # the client's other errors are of these kinds
        raise LoadError(f"{model}: cannot be fetched from the hub: {error}") from error
