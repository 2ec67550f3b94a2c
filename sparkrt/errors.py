"""The typed errors of sparkrt: who is at fault decides the class.

`RequestError` is the caller's fault (HTTP 4xx), `CapacityError` a lack of room (503 or queue), `LoadError` a checkpoint or
configuration that cannot be served (exit non-zero before serving), `EngineFatal` ends the engine process.
"""

from __future__ import annotations


class SparkrtError(Exception):
    """Base of every error sparkrt raises on purpose; its text is meant for the user."""


class RequestError(SparkrtError):
    """The request is wrong. `param` names the offending field, `code` is OpenAI's machine-readable reason."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class CapacityError(SparkrtError):
    """There is no room now; the same request may succeed later (HTTP 503, or queue)."""


class LoadError(SparkrtError):
    """A checkpoint, tokenizer or option cannot be served; the message names the file, the tensor or key, and what would work."""


class EngineFatal(SparkrtError):
    """The engine cannot go on (device lost, broken invariant): in-flight requests fail and the process exits non-zero."""
