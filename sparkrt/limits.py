"""What the operating system lets a process have."""

from __future__ import annotations

import contextlib

FILES = 10_240  # where the system names no limit: the most that macOS takes


def raise_file_limit() -> None:
    """Let this process and its children open as many files as they may: a connection is one, and 1,024 are the usual start."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = FILES if hard == resource.RLIM_INFINITY else hard
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
