"""Formulas as MathML, which browsers show without a script or a font; a hook of mkdocs."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replaces what arithmatex has marked."""
    content = _INLINE.sub(lambda match: _mathml(match[1], "inline"), content)
    return _BLOCK.sub(
        lambda match: f'<div class="formula">{_mathml(match[1], "block")}</div>', content
    )


def _mathml(latex: str, display: str) -> str:
    return convert(html.unescape(latex).strip(), display=display)
