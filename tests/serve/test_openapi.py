"""Our own OpenAPI document: complete, and what a real server keeps to.

`pytest tests/serve/test_openapi.py --hypothesis-profile=long` asks 25 times as much.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from sparkrt.serve import protocol
from sparkrt.serve.app import OPERATIONS
from sparkrt.serve.openapi import document
from tests.serve import ROOT
from tests.serve.harness import PATIENCE, Server, running

DOCUMENT = document(OPERATIONS)
WORDS = tomllib.loads((ROOT / "sparkrt/serve/openapi.toml").read_text(encoding="utf-8"))
ROUTES = [(method, re.sub(r":\w+}", "}", path)) for method, path, *_ in OPERATIONS]
CHECKS: list[Any] = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 20  # of each route; what a profile says, if one is named


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Its answers are short whatever is asked for, and it can sleep."""
    with running("--max-model-len", "64", "--enable-sleep-mode") as server:
        yield server


def _fields() -> Iterator[tuple[str, str, Any]]:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            yield name, field, about


def test_every_field_has_a_type_and_words() -> None:
    for name, field, about in _fields():
        assert "$ref" in about or about.get("description"), f"[fields] of openapi.toml lacks {name}.{field} or {field}"


def test_no_words_are_left_over() -> None:
    known = {f"{name}.{field}" for name, field, _ in _fields()} | {field for _, field, _ in _fields()}
    assert not WORDS["fields"].keys() - known
    assert {key for key in WORDS if " " in key} <= {f"{method} {path}" for method, path in ROUTES}


def test_every_reference_leads_somewhere() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert {name.rsplit("/", 1)[1] for name in re.findall(r"#/components/schemas/\w+", str(DOCUMENT))} <= schemas.keys()


def test_every_struct_of_a_body_is_in_it() -> None:
    assert {kind.__name__ for kind in protocol.REFUSED} <= DOCUMENT["components"]["schemas"].keys()


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[" ".join(route) for route in ROUTES])
def test_a_server_keeps_to_it(small: Server, method: str, path: str) -> None:
    """Whatever the body: no 5xx, and status, type and shape of the answer are those of the document."""
    schema: Any = schemathesis.openapi.from_dict(DOCUMENT)
    default = settings.get_current_profile_name() == "default"
    examples = EXAMPLES if default else settings().max_examples

    @given(case=st.one_of(schema[path][method].as_strategy(generation_mode=mode) for mode in GenerationMode))
    @settings(max_examples=examples, deadline=None, database=None, derandomize=default, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            _bound(case.body)
        case.call_and_validate(base_url=small.url, checks=CHECKS, timeout=PATIENCE)

    ask()
    if example := WORDS.get(f"{method} {path}", {}).get("example"):
        for stream in (False, True):
            response = small.http.request(method, path, json={**example, "stream": stream})
            assert response.status_code == 200, response.text
            schema[path][method].validate_response(response)
    small.http.post("/wake_up")
    small.check_alive()


def _bound(body: dict[str, Any]) -> None:
    """Many answers are right, and slow."""
    if isinstance(body.get("n"), int) and body["n"] > 3:
        body["n"] = 3
