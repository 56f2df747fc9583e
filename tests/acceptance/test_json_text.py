import pytest

from tinyllm.acceptance.json_text import parse_json


def test_is_json() -> None:
    assert parse_json('{"a": [1, "é", "\\ud83d\\ude00"]}') == {"a": [1, "é", "\U0001f600"]}


@pytest.mark.parametrize("text", ["", "{", '["\\ud800"]', '{"\\udfff": 1}'])
def test_refuses_what_cannot_be_written_again(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|surrogates"):
        parse_json(text)
