"""One server process of each kind for a whole test run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest

from tests.rigs import r1
from tests.serve.harness import PATIENCE, Server, running

SCRIPT = "abcDEFGHIJkl 你🎉é!"  # every byte once: each is a token of its own
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

THINKING_TEMPLATE = (
    "{# <function= #}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined %}<think>\n"
    "{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}{% endif %}"
)


@dataclass
class Reciter:
    """A server whose model recites SCRIPT after a line feed, one token for each byte of its characters beyond ASCII."""

    server: Server
    ids: list[int]  # of SCRIPT
    eos: int


@pytest.fixture(scope="session")
def tiny() -> Iterator[Server]:
    """The bundled model."""
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reciter]:
    path = tmp_path_factory.mktemp("r1")
    _, ids, by_token = r1(path, [SCRIPT])
    with running(
        str(path), "--max-model-len", "192", "--max-num-seqs", "256", "--served-model-name", "reciter", "alias"
    ) as server:
        yield Reciter(server, ids, by_token["<|im_end|>"])


@pytest.fixture(scope="session")
def dice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that draws uniformly, behind a chat template that refuses late system messages."""
    path = tmp_path_factory.mktemp("dice")
    r1(path, ["x"], alpha=0)
    template = path / "strict.jinja"
    template.write_text(STRICT_TEMPLATE, encoding="utf-8")
    with running(str(path), "--served-model-name", "dice", "--chat-template", str(template)) as server:
        yield server


@pytest.fixture(scope="session")
def fake() -> Iterator[Server]:
    """The engine of fake_engine.py; tests that break it start their own."""
    with running(module="tests.serve.fake_engine") as server:
        yield server


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same engine behind a template that opens thinking where `enable_thinking` says so, and shows calls as XML."""
    template = tmp_path_factory.mktemp("echo") / "thinking.jinja"
    template.write_text(THINKING_TEMPLATE, encoding="utf-8")
    with running("--chat-template", str(template), module="tests.serve.fake_engine") as server:
        yield server


@pytest.fixture
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(autouse=True, scope="session")
def _no_proxy() -> None:
    """Nothing between these tests and their servers."""
    import os

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        os.environ.pop(name, None)
