# SPDX-License-Identifier: Apache-2.0
"""Renders an answer's Markdown as HTML, block by block; HTML tags in the answer stay text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

#: Characters of code that are highlighted first, doubled until a pass takes too many seconds. Some
#: lexers take quadratic or cubic time for some texts.
_FIRST_COLORED, _MOST_SECONDS = 512, 0.15
_FORMATTER: HtmlFormatter[str] = HtmlFormatter(nowrap=True)


def blocks(text: str) -> list[str]:
    """Renders each paragraph, list, table and code block of `text`, in order.

    If a text grows, usually only its last blocks change.
    """
    return [
        _PARSER.renderer.render(block, _PARSER.options, {}) for block in _split(_PARSER.parse(text))
    ]


def changed(before: Sequence[str], now: Sequence[str]) -> int:
    """Returns the index of the first block that changed."""
    same = 0
    for old, new in zip(before, now, strict=False):
        if old != new:
            break
        same += 1
    return same


def _split(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    block: list[Token] = []
    for token in tokens:
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            yield block
            block = []


def _fence(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any
) -> str:
    # With its language, a copy button, and room to scroll.
    language = tokens[index].info.strip().split(maxsplit=1)[0] if tokens[index].info.strip() else ""
    shown = escape(language)
    return (
        f'<div class="code"><div class="code-bar"><span>{shown}</span>'
        '<button type="button" class="copy">Copy</button></div>'
        # A scrollable element must be reachable by keyboard.
        f'<pre tabindex="0" role="group" aria-label="{f"{shown} " if shown else ""}code"><code>'
        f"{_highlight(tokens[index].content, language)}</code></pre></div>\n"
    )


@lru_cache(maxsize=64)  # a growing text is rendered again with each chunk
def _highlight(code: str, language: str) -> str:
    try:
        lexer = get_lexer_by_name(language or "text", stripnl=False)
    except ClassNotFound:
        return escape(code)
    shown, size, seconds = "", _FIRST_COLORED, 0.0
    while seconds < _MOST_SECONDS:
        colored, began = code[:size], time.perf_counter()
        shown = str(highlight(colored, lexer, _FORMATTER))
        if size >= len(code):
            return shown
        size, seconds = 2 * size, time.perf_counter() - began
    return shown + escape(code[len(colored) :])


def _link_open(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any
) -> str:
    tokens[index].attrSet("target", "_blank")
    tokens[index].attrSet("rel", "noopener noreferrer")
    return renderer.renderToken(tokens, index, options, env)


def _table_open(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any
) -> str:
    return '<div class="table" tabindex="0" role="group" aria-label="table"><table>\n'


def _table_close(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any
) -> str:
    return "</table></div>\n"


def _cell_open(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any
) -> str:
    # The page's policy forbids inline styles, so a class sets the column's alignment.
    style = tokens[index].attrs.pop("style", None)
    if style is not None:
        tokens[index].attrSet("class", str(style).replace("text-align:", "align-"))
    return renderer.renderToken(tokens, index, options, env)


def _heading(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: Any
) -> str:
    # Below the page's own levels 1 and 2; level 2 names the speaker.
    tokens[index].tag = f"h{min(int(tokens[index].tag[1:]) + 2, 6)}"
    return renderer.renderToken(tokens, index, options, env)


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    # Images become links, so that the page loads nothing just because an answer names it. Link
    # addresses are checked by markdown-it-py.
    parser.disable("image")
    rules = {
        "fence": _fence,
        "code_block": _fence,
        "heading_open": _heading,
        "heading_close": _heading,
        "link_open": _link_open,
        "table_open": _table_open,
        "table_close": _table_close,
        "th_open": _cell_open,
        "td_open": _cell_open,
    }
    for name, rule in rules.items():
        parser.add_render_rule(name, rule)
    return parser


_PARSER = _parser()
