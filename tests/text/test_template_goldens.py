"""Chat templates of real models render the text that `transformers` renders (goldens by tools/make_template_goldens.py)."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from sparkrt.errors import RequestError
from sparkrt.text import sandbox as module
from sparkrt.text.template import ChatTemplate
from tests.text.inputs import need

GOLDENS = Path(__file__).parent.parent / "goldens" / "templates"
TINY = Path(__file__).parent.parent.parent / "sparkrt" / "assets" / "sparkrt-tiny" / "chat_template.jinja"
RENDERED = json.loads((GOLDENS / "rendered.json").read_text())
OTHERS = json.loads((GOLDENS / "others.json").read_text())
MODELS = sorted(RENDERED["expected"])


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "now", lambda: datetime.fromisoformat(RENDERED["now"]))


def template_of(model: str) -> ChatTemplate:
    file = TINY if model == "sparkrt-tiny" else GOLDENS / f"{model}.jinja"
    return ChatTemplate({"default": file.read_text()}, RENDERED["special_tokens"])


def render(template: ChatTemplate, scenario: str) -> str | dict[str, Any]:
    given = RENDERED["scenarios"][scenario]
    try:
        return template.render(given["messages"], **given["arguments"])
    except RequestError as error:
        return {"error": error.message}


@pytest.mark.parametrize("scenario", RENDERED["scenarios"])
@pytest.mark.parametrize("model", MODELS)
def test_renders_what_transformers_renders(model: str, scenario: str) -> None:
    expected = RENDERED["expected"][model][scenario]
    actual = render(template_of(model), scenario)
    if expected == {"error": None}:  # failed there in another way than raise_exception
        assert isinstance(actual, dict)
    else:
        assert actual == expected


def test_all_models_render_nearly_all_scenarios() -> None:
    """So that the goldens are not a list of errors: what fails is what the templates refuse on purpose."""
    texts = {model: sum(isinstance(text, str) for text in RENDERED["expected"][model].values()) for model in MODELS}
    assert min(texts.values()) >= len(RENDERED["scenarios"]) - 6, texts


@pytest.mark.inputs
@pytest.mark.parametrize("file", sorted(OTHERS))
def test_other_templates_of_the_collection(file: str) -> None:
    template = ChatTemplate({"default": (need("llama.cpp") / file).read_text()}, RENDERED["special_tokens"])
    for scenario, expected in OTHERS[file].items():
        actual = render(template, scenario)
        if expected == {"error": None}:
            assert isinstance(actual, dict), scenario
        elif isinstance(expected, str):
            assert isinstance(actual, str), (scenario, actual)
            assert hashlib.sha256(actual.encode()).hexdigest()[:16] == expected, scenario
        else:
            assert actual == expected, scenario
