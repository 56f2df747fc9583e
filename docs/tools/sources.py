"""Each page's Markdown inside the site, for its "view source" link; a hook of mkdocs."""

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

_texts: dict[str, str] = {}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> None:
    """Notes the text, and where the link leads, unless there is a repository to lead to."""
    if not config.repo_url:
        place = f"sources/{page.file.src_uri}.txt"
        _texts[place] = markdown
        page.edit_url = get_relative_url(place, page.url)


def on_post_build(config: MkDocsConfig) -> None:
    """Writes the texts."""
    for place, text in _texts.items():
        path = Path(config.site_dir) / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
