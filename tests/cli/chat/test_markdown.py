# SPDX-License-Identifier: Apache-2.0
"""HTML of answers: sanitizing, and incremental rendering."""

import itertools
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.cli.chat import markdown

#: All that Markdown needs; nothing that runs, loads or asks.
TEXTS = ("a", "blockquote", "br", "code", "em", "hr", "li", "ol", "p", "pre", "s", "strong", "ul")
TABLES = ("table", "tbody", "td", "th", "thead", "tr")
ALLOWED = {*TEXTS, *TABLES, "button", "div", "span", "h3", "h4", "h5", "h6"}
ATTRIBUTES = {"aria-label", "class", "href", "rel", "role", "start", "tabindex", "target"} | {
    *("title", "type"),
}
PIECES = (
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "![x](http://a/b.png)"),
    *("[x](javascript:alert(1))", "<javascript:alert(1)>", '[a](http://b "\'\\"><script>")'),
    *('```"><script>\nx\n```\n', "`<b>`", "# h\n", "|a|b|\n|-|-:|\n|<i>|2|\n", "- x\n", "\n\n"),
    *("&lt;", "<!-- -->", "> q\n", "**b**", "[r]: data:text/html,x\n", "[r]", "    <u>\n", "~~s~~"),
)


class Tags(HTMLParser):
    """Tags, attributes and addresses in a piece of HTML."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.addresses = set(), set(), set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses |= {value for name, value in attrs if name == "href"}


def parsed(text):
    found = Tags()
    found.feed("".join(markdown.blocks(text)))
    return found


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=8))
def test_an_answer_brings_no_tag_that_runs_or_loads(pieces):
    found = parsed("".join(pieces))
    assert found.tags <= ALLOWED
    assert found.attributes <= ATTRIBUTES
    for address in found.addresses:
        assert not address.lower().lstrip().startswith(("javascript:", "vbscript:", "data:"))


def test_a_script_stays_text():
    (html,) = markdown.blocks("a <script>alert(1)</script> b")
    assert html == "<p>a &lt;script&gt;alert(1)&lt;/script&gt; b</p>\n"


def test_code_is_colored_and_reached_by_the_keyboard():
    (html,) = markdown.blocks("```python\nreturn 1\n```")
    assert '<span class="k">return</span>' in html
    assert '<pre tabindex="0"' in html


def test_code_is_colored_once(monkeypatch):
    """A growing text is rendered again with each piece."""
    colored = []
    monkeypatch.setattr(markdown, "highlight", lambda code, *_: colored.append(code) or "")
    for rest in ("", "more", "more and more"):
        markdown.blocks(f"```python\nonce = 1\n```\n{rest}")
    assert colored == ["once = 1\n"]


def test_code_that_takes_long_to_color_is_text(monkeypatch):
    """Lexers need quadratic time for some texts, and the page would freeze."""
    monkeypatch.setattr(markdown.time, "perf_counter", itertools.count().__next__)
    code = "return 1\n" * 200
    (html,) = markdown.blocks(f"```python\n{code}```")
    assert 50 < html.count('<span class="k">return</span>') < 100
    assert html.count("return") == 200


@pytest.mark.parametrize("language", ["", "no-such-language", '"><script>'])
def test_code_of_an_unknown_language_is_text(language):
    (html,) = markdown.blocks(f"```{language}\na < b\n```")
    assert "a &lt; b" in html and "<script" not in html


def test_headings_are_below_the_page_s_own():
    assert markdown.blocks("# a\n\n###### b") == ["<h3>a</h3>\n", "<h6>b</h6>\n"]


def test_a_column_is_aligned_without_a_style():
    (html,) = markdown.blocks("|a|\n|-:|\n|1|")
    assert '<td class="align-right">1</td>' in html and "style" not in html


def test_a_text_that_grows_changes_its_last_blocks_only():
    whole = "One.\n\n- two\n- three\n\n```python\nprint(4)\n```\n\nFive."
    shown = []
    for end in range(len(whole) + 1):
        now = markdown.blocks(whole[:end])
        same = markdown.changed(shown, now)
        assert same >= len(shown) - 1
        shown = [*shown[:same], *now[same:]]
    assert shown == markdown.blocks(whole)
    assert len(shown) == 4
