"""JSON of which every text can be written again."""

import json
from typing import Any


def parse_json(text: str, **options: Any) -> Any:
    """What ``json.loads`` gives.

    Raises:
        ValueError: If the text is no JSON, or holds ``"\\ud800"`` or the like: JSON can say half a
            character, and no file, table or terminal takes one.
        RecursionError: If it is nested too deeply.
    """
    content = json.loads(text, **options)
    json.dumps(content, ensure_ascii=False).encode()
    return content
