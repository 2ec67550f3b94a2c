"""Where templates come from, what a request may pass them, and that none can run away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkrt.errors import LoadError, RequestError
from sparkrt.text import sandbox as module
from sparkrt.text.template import ChatTemplate, check_kwargs
from tests.text.vocabularies import TINY, tiny

HI = [{"role": "user", "content": "Hi"}]


def template(text: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, special)


def render(text: str, messages: Any = HI, **arguments: Any) -> str:
    return template(text).render(messages, **arguments)


def test_the_bundled_template() -> None:
    bundled = ChatTemplate.from_folder(TINY, tiny())
    assert bundled.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_are_variables_and_absent_ones_undefined() -> None:
    text = "{{ bos_token }}{{ eos_token is defined }}{{ documents is none }}"
    assert template(text, bos_token="<s>").render(HI) == "<s>FalseTrue"


def test_filters_and_blocks_of_transformers() -> None:
    assert render('{{ {"b": "<é>&\'", "a": 1} | tojson }}') == '{"b": "<é>&\'", "a": 1}'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": [\n  2\n ],\n "b": 1\n}'
    assert render("{{ 'é' | tojson(ensure_ascii=true) }}{{ [1,2] | tojson(separators=(',', ':')) }}") == '"\\u00e9"[1,2]'
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"  # trim_blocks, lstrip_blocks
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}") == "21"
    assert render("{% set n = namespace(self=1, x=2) %}{% set n.x = 3 %}{{ n.x }}{{ n.self }}") == "31"


def test_strftime_now(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import datetime

    monkeypatch.setattr(module, "now", lambda: datetime(2026, 2, 3))
    assert render("{{ strftime_now('%d %b %Y') }}") == "03 Feb 2026"


def test_tool_use_template_is_taken_when_there_are_tools() -> None:
    both = ChatTemplate({"default": "d", "tool_use": "t{{ tools | length }}"}, {})
    assert both.render(HI) == both.render(HI, tools=[]) == "d"
    assert both.render(HI, tools=[{"type": "function"}]) == "t1"
    with pytest.raises(RequestError, match=r"no default one \(rag, tool_use\)"):
        ChatTemplate({"rag": "r", "tool_use": "t"}, {}).render(HI)


def test_no_template_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate({}, {}).render(HI)


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    def load() -> dict[str, str]:
        return ChatTemplate.from_folder(tmp_path, tiny()).texts

    assert load() == {}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config"}))
    assert load() == {"default": "config"}
    config.write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]})
    )
    assert load() == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load() == {"default": "json"}
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert load() == {"default": "jinja"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert load() == {"default": "jinja", "rag": "rag"}


def test_broken_templates_are_load_errors_that_say_where(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_text("ok\n{% for %}")
    with pytest.raises(LoadError, match=r"chat template 'default', line 2: "):
        ChatTemplate.from_folder(tmp_path, tiny())
    file.write_bytes(b"\xff")
    with pytest.raises(LoadError, match=r"chat_template\.jinja: cannot be read"):
        ChatTemplate.from_folder(tmp_path, tiny())
    file.unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [1]}')
    with pytest.raises(LoadError, match=r"tokenizer_config\.json: chat_template should be"):
        ChatTemplate.from_folder(tmp_path, tiny())


def test_gguf_and_option(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t", "tokenizer.chat_templates": ["tool_use"]}
    assert ChatTemplate.from_gguf(metadata, tiny()).texts == {"default": "d", "tool_use": "t"}
    assert ChatTemplate.from_gguf({}, tiny()).texts == {}
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }}")
    for option in (str(file), file.read_text()):
        assert ChatTemplate.from_option(option, tiny()).render(HI) == "Hi"
    with pytest.raises(LoadError, match=r"--chat-template nowhere\.jinja: no such file"):
        ChatTemplate.from_option("nowhere.jinja", tiny())


def test_a_raise_comes_out_with_its_text() -> None:
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('System message must be at the beginning.') }}")
    assert caught.value.message == "System message must be at the beginning."
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages[0].nothing.more }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing | tojson }}",
        "{{ 1 / 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{% include 'other' %}",
    ],
)
def test_whatever_else_goes_wrong_is_a_request_error(text: str) -> None:
    with pytest.raises(RequestError, match="cannot render these messages"):
        render(text)


def test_kwargs_are_variables() -> None:
    text = "{{ enable_thinking is defined and not enable_thinking }} {{ bos_token }}"
    assert template(text, bos_token="<s>").render(HI, enable_thinking=False) == "True <s>"
    assert template(text, bos_token="<s>").render(HI, bos_token="B") == "False B"
    assert template("{{ self }}{{ this }}").render(HI, **{"this": 1, "odd name": 2}).endswith("1")


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"]
)
def test_kwargs_cannot_replace_the_request(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_kwargs({"enable_thinking": True, name: "{% for i in range(9) %}{% endfor %}"})
    assert caught.value.param == f"chat_template_kwargs.{name}"
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.chat_template"):
        template("x").render(HI, chat_template="y")


@pytest.mark.parametrize("bad", [None, [], "x", 3])
def test_kwargs_must_be_an_object(bad: Any) -> None:
    with pytest.raises(RequestError, match="expected an object"):
        check_kwargs(bad)


def test_surrogates_and_rich_objects_in_tools_and_kwargs() -> None:
    with pytest.raises(RequestError, match=r"tools\[0\]\.name: character 0 is U\+D800"):
        template("x").render(HI, tools=[{"name": "\ud800"}])
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.x: expected JSON data"):
        template("x").render(HI, x=object())
    with pytest.raises(RequestError, match="tools: expected a list"):
        template("x").render(HI, tools={"a": 1})


def test_the_callers_data_stays_as_it_was() -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]
    tools = [{"a": [1]}]
    template("{{ messages }}").render(messages, tools=tools, add_generation_prompt=False, continue_final_message=False)
    assert messages == [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]
    assert tools == [{"a": [1]}]


CONTINUED = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two, "}]


def test_continue_final_message() -> None:
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    open_end = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(text, CONTINUED, **open_end) == "<user>Count</><assistant>One, two, "
    assert render(text.replace("m.content", "m.content | trim"), CONTINUED, **open_end) == "<user>Count</><assistant>One, two,"
    with pytest.raises(RequestError, match="exclude each other"):
        render(text, CONTINUED, continue_final_message=True)
    with pytest.raises(RequestError, match="changes the final message"):
        render(text.replace("m.content", "m.content | upper"), CONTINUED, **open_end)
    with pytest.raises(RequestError, match="changes the final message"):
        render("{{ messages[0].content }}", CONTINUED, **open_end)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "steps"),
        ("{{ 'x' * 200000000 }}", "elements"),
        ("{{ 200000000 * 'x' }}", "elements"),
        ("{{ [0] * 200000000 }}", "elements"),
        ("{{ ('x' * 30000000) + ('y' * 30000000) }}", "elements"),
        ("{% for i in range(9) %}{{ 'x' * 5000000 }}{% endfor %}", "characters"),
        ("{{ 9 ** (9 ** 9) }}", "power"),
        ("{{ range(100001) | list }}", "100000"),
        ("{% for i in range(40) %}{{ 10 ** 20000 * 10 ** 20000 }}{% endfor %}", "power"),
    ],
)
def test_no_template_runs_away(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(text)


def test_a_long_conversation_is_within_the_budget() -> None:
    bundled = ChatTemplate.from_folder(TINY, tiny())
    messages = [{"role": role, "content": "x" * 100} for _ in range(5000) for role in ("user", "assistant")]
    assert bundled.render(messages).count("<|im_start|>") == 10_001
