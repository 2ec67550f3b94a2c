"""The page at `/` in Chromium: no script error, no request to anywhere else, usable without a mouse and without eyes."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

from tests.serve import ROOT
from tests.serve.harness import PATIENCE, Server, running
from tools.fetch_browser import browser as find_browser

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
FLAGS += ["--disable-dev-shm-usage"]  # containers have little of it
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}]
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
FILES = ROOT / "sparkrt" / "serve" / "page"
Opener = Callable[..., Page]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium, or python -m playwright install chromium")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        except Error as error:
            pytest.skip(f"{path} does not start here (its libraries may be missing): {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser, echo: Server) -> Iterator[Opener]:
    """Opens the page of a server (`echo`, unless another is given); at the end nothing may have gone wrong unseen.

    `faults`: what the test is about to make go wrong, and Chromium's console will therefore tell.
    """
    seen: list[str] = []
    contexts = []

    def open_page(server: Server = echo, faults: str = "(?!)", known: bool = True, **options: Any) -> Page:
        context = chromium.new_context(**options)
        context.set_default_timeout(1000 * PATIENCE)
        contexts.append(context)
        page = context.new_page()

        def heard(what: str) -> None:
            if not re.search(faults, what):
                seen.append(what)

        def asked(request: Any) -> None:
            if not request.url.startswith(server.url + "/"):
                seen.append(f"a request to {request.url}")

        page.on("console", lambda message: heard(message.text))
        page.on("pageerror", lambda error: heard(str(error)))
        page.on("request", asked)
        page.goto(server.url)
        if known:
            expect(page.locator("#model")).not_to_be_empty()
        return page

    expect.set_options(timeout=1000 * PATIENCE)
    yield open_page
    for context in contexts:
        context.close()
    assert not seen


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def last(page: Page) -> Any:
    """The answer, once it is complete."""
    answer = page.get_by_role("article", name="Answer").last
    expect(answer).to_have_attribute("aria-busy", "false")
    return answer


def audit(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    assert not found, json.dumps([(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found], indent=1)


def test_an_answer_streams_and_stays_over_a_reload(open_page: Opener, echo: Server) -> None:
    page = open_page()
    page.get_by_role("button", name="Say hello").click()
    expect(last(page)).to_contain_text("你好 🎉 and that is all")
    say(page, "FOREVER, please")
    answer = page.get_by_role("article", name="Answer").last
    expect(answer).to_contain_text("all there is to say about it.One two")  # it comes while it is made
    expect(answer).to_have_attribute("aria-busy", "true")
    page.reload()  # in the middle of it
    expect(page.get_by_role("article")).to_have_count(4)
    expect(last(page)).to_contain_text("stopped")
    expect(last(page)).to_contain_text("all there is to say about it.One two")
    echo.wait_idle()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("article")).to_have_count(0)
    page.reload()
    expect(page.get_by_role("heading", name="What would you like to ask?")).to_be_visible()


def test_an_answer_can_be_stopped(open_page: Opener, echo: Server) -> None:
    page = open_page()
    say(page, "FOREVER")
    expect(page.locator("#live .tile", has_text="Running")).to_contain_text("1")  # the panel sees it
    page.get_by_role("button", name="Stop").click()
    expect(last(page)).to_contain_text(re.compile(r"stopped · \d+ tokens · [\d.]+ tokens/s · first after [\d.]+ m?s"))
    echo.wait_idle()
    expect(page.locator("#live .tile", has_text="Running")).to_contain_text("0")


def test_it_works_with_the_keyboard_alone(open_page: Opener) -> None:
    page = open_page()
    page.keyboard.type("first")  # the message box has the focus
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("⟦answer⟧")
    page.keyboard.press("Enter")
    expect(last(page).locator(".prose")).to_have_text("answer")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("FOREVER")
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="Answer").last).to_contain_text("answeranswer")  # the script goes round
    page.keyboard.press("Escape")
    expect(last(page)).to_contain_text("stopped")
    page.get_by_role("heading", name="sparkrt").click()  # to the top
    order = []
    for _ in range(12):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"))
    assert order[:3] == ["New chat", "Settings", "Conversation"]
    turn = ["Edit your message", "Copy your message", "Answer anew", "Copy the answer"]
    assert order[3:11] == [*turn, *turn]
    assert page.evaluate("document.activeElement.id") == "ask"
    outline = page.evaluate("getComputedStyle(document.querySelector('#form')).outlineWidth")
    assert outline == "2px"  # focus can be seen


def test_thinking_is_folded(open_page: Opener) -> None:
    page = open_page()
    say(page, "⟦<think>\nsecret thoughts\n</think>\n\nThe answer.⟧")
    answer = last(page)
    expect(answer.locator(".prose")).to_have_text("The answer.")
    expect(answer.get_by_text("secret thoughts")).to_be_hidden()
    answer.get_by_text("Thought for").press("Enter")
    expect(answer.get_by_text("secret thoughts")).to_be_visible()
    audit(page)


def test_calls_are_shown_and_answered(open_page: Opener) -> None:
    page = open_page()
    page.get_by_label("Functions the model may call").fill(json.dumps(TOOLS))
    say(page, f"⟦{CALL}⟧")
    call = last(page).get_by_role("region", name="Call of weather")
    expect(call).to_contain_text("city")
    expect(call).to_contain_text("Oslo")
    audit(page)
    with page.expect_request("**/v1/chat/completions") as request:
        say(page, "⟦It rains.⟧")
    asked, made, returned = request.value.post_data_json["messages"]
    assert asked["role"] == "user"
    assert json.loads(made["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    assert returned == {"role": "tool", "content": "⟦It rains.⟧", "tool_call_id": made["tool_calls"][0]["id"]}
    expect(last(page).locator(".prose")).to_have_text("It rains.")
    page.get_by_label("Max tokens").fill("20")  # a call that is cut is not waited for
    say(page, f"⟦{CALL.replace('Oslo', 'Oslo or elsewhere ' * 20)}⟧")
    expect(last(page)).to_contain_text("cut at the token limit")
    with page.expect_request("**/v1/chat/completions") as request:
        say(page, "⟦Go on.⟧")
    assert request.value.post_data_json["messages"][-1]["role"] == "user"
    expect(last(page).locator(".prose")).to_have_text("Go on.")


def test_settings_are_sent_and_kept(open_page: Opener) -> None:
    page = open_page()
    page.get_by_label("System prompt").fill("Be brief.")
    for name, value in (("Temperature", "0.5"), ("Top p", "0.9"), ("Top k", "7"), ("Max tokens", "3")):
        page.get_by_label(name).fill(value)
    page.get_by_label("Thinking").select_option("Off")
    page.reload()
    with page.expect_request("**/v1/chat/completions") as request:
        say(page, "Hello")
    body = request.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 3, "chat_template_kwargs": {"enable_thinking": False}}
    assert wanted.items() <= body.items()
    expect(last(page)).to_contain_text("cut at the token limit · 3 tokens")
    page.get_by_label("Functions the model may call").fill("[{")
    say(page, "Hello")  # not sent
    assert "Functions: " in page.evaluate("document.activeElement.validationMessage")
    page.get_by_role("button", name="Reset settings").click()
    expect(page.get_by_label("Temperature")).to_have_value("")


def test_a_question_can_be_edited_and_an_answer_made_anew(open_page: Opener) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    say(page, "⟦**one**⟧")
    last(page).get_by_role("button", name="Copy the answer").click()
    expect(last(page).get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "**one**"
    say(page, "⟦two⟧")
    last(page)
    page.get_by_role("button", name="Edit your message").first.press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("⟦three⟧")
    page.keyboard.press("Enter")
    expect(last(page).locator(".prose")).to_have_text("three")
    expect(page.get_by_role("article")).to_have_count(2)
    with page.expect_request("**/v1/chat/completions") as request:
        last(page).get_by_role("button", name="Answer anew").click()
    assert len(request.value.post_data_json["messages"]) == 1
    expect(last(page).locator(".prose")).to_have_text("three")


@pytest.mark.parametrize(
    ("text", "status", "shown"),
    [
        ("REFUSE", "400", "The server refused this request. the engine does not like this"),
        ("FULL", "503", "The server is busy, or about to stop. the engine is full"),
        ("FAIL", "500", "The server failed."),  # in the middle of the stream, or before anything of it was sent
    ],
)
def test_what_the_server_says_is_shown(open_page: Opener, text: str, status: str, shown: str) -> None:
    page = open_page(faults=f"status of {status}")
    say(page, text)
    expect(last(page).get_by_role("alert")).to_contain_text(shown)
    audit(page)
    page.get_by_role("button", name="Edit your message").click()
    page.get_by_role("textbox", name="Your message").fill("Hello")
    page.keyboard.press("Enter")
    expect(last(page)).to_contain_text("all there is to say")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_server_that_goes_away_and_comes_back(open_page: Opener) -> None:
    with running(module="tests.serve.fake_engine") as server:
        page = open_page(server, faults="ERR_|status of 503")
        say(page, "FOREVER")
        expect(page.get_by_role("article", name="Answer")).to_contain_text("One two")
        server.kill()
        expect(last(page).get_by_role("alert")).to_be_visible()
        expect(page.get_by_role("status").filter(has_text="Not reachable")).to_be_visible()
        last(page).get_by_role("button", name="Try again").click()
        expect(last(page).get_by_role("alert")).to_contain_text("The server cannot be reached.")


def test_it_asks_for_the_key(open_page: Opener) -> None:
    with running("--api-key", "sesame", module="tests.serve.fake_engine", key="sesame") as server:
        page = open_page(server, faults="status of 401", known=False)
        audit(page)
        for key in ("wrong", "sesame"):
            page.get_by_label("Key", exact=True).fill(key)
            page.keyboard.press("Enter")
            expect(page.get_by_text("was not accepted")).to_be_visible(visible=key == "wrong")
        expect(page.locator("#model")).not_to_be_empty()
        say(page, "Hello")
        expect(last(page)).to_contain_text("all there is to say")
        assert page.evaluate("JSON.stringify(localStorage)").count("sesame") == 0
        page.reload()  # it is not asked for again
        expect(page.locator("#model")).not_to_be_empty()
        expect(page.get_by_role("dialog")).to_be_hidden()


def test_markup_in_an_answer_stays_text(open_page: Opener) -> None:
    page = open_page()
    hostile = "<img src=x onerror=alert(1)> <script>alert(1)</script> [a](javascript:alert(1)) ![b](http://a.example/b.png)"
    say(page, f"⟦{hostile} `<b>` and \n```html\n<i>\n```⟧")
    prose = last(page).locator(".prose")
    expect(prose.locator("img, script, b, i")).to_have_count(0)
    expect(prose).to_contain_text("<img src=x onerror=alert(1)> <script>alert(1)</script> [a](javascript:alert(1))")
    assert prose.locator("a").evaluate_all("links => links.map(link => link.protocol)") == ["http:"]
    expect(prose.locator("figure code")).to_have_text("<i>")


MARKDOWN = {
    "# One\ntext": "<h3>One</h3><p>text</p>",
    "a **b** _c_ `d*e*`": "<p>a <strong>b</strong> <em>c</em> <code>d*e*</code></p>",
    "2 * 3 * 4, snake_case_name": "<p>2 * 3 * 4, snake_case_name</p>",
    "- a\n- b\n  - c\n\n3. d": '<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol start="3"><li>d</li></ol>',
    "> a\n> b": "<blockquote><p>a\nb</p></blockquote>",
    "a\n\n---\nb": "<p>a</p><hr><p>b</p>",
    "| a | b |\n|---|---|\n| 1 | 2 |": (
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>"
    ),
    "~~~\nopen": "<pre><code>open</code></pre>",
    "``` `x`": "<p>``` <code>x</code></p>",
    "": "",
}


def test_markdown(open_page: Opener) -> None:
    page = open_page()
    script = """async (text) => {
        const { render } = await import("/page/markdown.js");
        const root = render(document.createElement("div"), text), serial = new XMLSerializer();
        for (const node of root.querySelectorAll("figcaption")) node.remove();
        for (const node of root.querySelectorAll("figure, .wide")) node.replaceWith(...node.childNodes);
        for (const node of root.querySelectorAll("pre, a"))
            for (const name of node.getAttributeNames()) node.removeAttribute(name);
        return root.innerHTML;
    }"""
    for text, wanted in MARKDOWN.items():
        assert page.evaluate(script, text) == wanted, text
    # a stream arrives at what the whole text gives, and what did not change stays
    whole = "\n\n".join(MARKDOWN)
    same = """async (text) => {
        const { render } = await import("/page/markdown.js"), root = document.createElement("div");
        render(root, text.slice(0, 12));
        const first = root.firstChild;
        for (let at = 12; at <= text.length; at += 1) render(root, text.slice(0, at));
        return root.innerHTML === render(document.createElement("div"), text).innerHTML && first === root.firstChild;
    }"""
    assert page.evaluate(same, whole)


def test_characters_arrive_whole(open_page: Opener) -> None:
    """Cases U01 and U04: a token for each byte; half a surrogate pair."""
    page = open_page(faults="status of 400")
    page.evaluate(
        "new MutationObserver(() => { window.broken ||= document.body.textContent.includes('\\ufffd') })"
        ".observe(document.body, { subtree: true, childList: true, characterData: true })"
    )
    say(page, "⟪你好 🎉 é⟫")
    expect(last(page).locator(".prose")).to_have_text("你好 🎉 é")
    assert not page.evaluate("window.broken")
    page.evaluate("document.querySelector('#ask').value = 'a\\ud800'")
    page.keyboard.press("Enter")
    expect(last(page).get_by_role("alert")).to_contain_text("The server refused this request.")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_it_is_accessible(open_page: Opener, scheme: Any, width: int) -> None:
    page = open_page(color_scheme=scheme, reduced_motion="reduce", viewport={"width": width, "height": 800})
    audit(page)
    say(
        page,
        "⟦# Head\n\na [link](http://a.example/) and `code`\n\n```py\nx = 1\n```\n\n> said\n\n| a | b |\n|---|---|\n| 1 | 2 |⟧",
    )
    expect(last(page).locator("table")).to_be_visible()
    if width < 1000:
        assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing is cut off
        page.get_by_role("button", name="Settings", exact=True).click()
        audit(page)
        expect(page.get_by_role("button", name="Close")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Settings", exact=True)).to_be_focused()
    audit(page)
    expect(page.get_by_role("status").filter(has_text="link and code")).to_have_count(1)  # read out once, when complete


def test_its_files_are_plain_few_and_in_the_wheel(echo: Server) -> None:
    response = echo.http.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    for path in FILES.iterdir():
        if path.suffix in (".py", "") or path.name.startswith("."):
            continue
        assert any(fnmatch(path.name, pattern) for pattern in patterns["sparkrt.serve.page"]), path.name
        url = "/" if path.name == "index.html" else f"/page/{path.name}"
        got = echo.http.get(url)
        assert got.content == path.read_bytes()
        assert got.headers["content-security-policy"] == policy
        again = echo.http.get(url, headers={"if-none-match": got.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert echo.http.get("/page/__init__.py").status_code == 404
