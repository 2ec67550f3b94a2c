"""What the API process and the engine process say to each other: msgpack of these structs, one per ZeroMQ message."""

from __future__ import annotations

import msgspec

from sparkrt.engine.messages import Abort, EngineOutput, EngineRequest, EngineStats, ModelInfo


class Add(msgspec.Struct, tag=True):
    """The sequences of one HTTP request: all are admitted, or none."""

    requests: list[EngineRequest]


class Ping(msgspec.Struct, tag=True):
    """Are you there? Answered by `News`, between two steps."""


class Stop(msgspec.Struct, tag=True):
    """Let go of everything and exit 0."""


class Loading(msgspec.Struct, tag=True):
    """Progress of start-up: `done` of `total` units (bytes, tensors, ...) of the phase called `what`."""

    what: str
    done: int
    total: int


class Loaded(msgspec.Struct, tag=True):
    info: ModelInfo


class Admitted(msgspec.Struct, tag=True):
    request_ids: list[str]


class Refused(msgspec.Struct, tag=True):
    """A RequestError (or, with status 503, a CapacityError) met in the engine: nothing of the `Add` runs."""

    request_ids: list[str]
    message: str
    param: str | None
    code: str | None
    status: int


class News(msgspec.Struct, tag=True):
    """What a step produced, and the gauges after it."""

    outputs: list[EngineOutput]
    stats: EngineStats


class Failed(msgspec.Struct, tag=True):
    """The engine's last words; the process exits 1. `message` is one line meant for the user."""

    message: str


ToEngine = Add | Abort | Ping | Stop
FromEngine = Loading | Loaded | Admitted | Refused | News | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
