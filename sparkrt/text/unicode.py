"""What is not Unicode text: halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""

from __future__ import annotations

from sparkrt.errors import RequestError


def check_surrogates(text: str, param: str | None) -> None:
    """RequestError naming `param` if `text` holds a lone surrogate. Cheap: encoding is a C loop."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"{param or 'text'}: character {error.start} is U+{code:04X}, half of a surrogate pair; expected valid Unicode text",
            param=param,
        ) from None
