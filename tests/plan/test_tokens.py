"""plan/tokens.py: languages, kinds and sums."""

import pytest

from hitsend.plan.tokens import add_up, count_text, kind_of, language_of, num_words

TEXTS = {
    "en": "The quick brown fox is in the house and it was on the table.",
    "de": "Das ist nicht der Weg zu dem Haus und die Leute sind auch nicht da.",
    "fr": "Le chat est dans la maison et les enfants ne sont pas sur la table avec le chien.",
    "es": "El perro está en la casa y los niños no se van por la calle con una pelota.",
    "ja": "これは日本語の文章です。",
    "zh": "这是一个中文句子。",
    "ko": "이것은 한국어 문장입니다.",
    "ru": "Это предложение на русском языке.",
    "el": "Αυτή είναι μια πρόταση.",
    "unknown": "Lorem ipsum dolor",
}


@pytest.mark.parametrize("language", TEXTS)
def test_languages(language):
    assert language_of(TEXTS[language]) == language


def test_no_letters_are_no_language():
    assert language_of("12 + 34 = 46") == "unknown"
    assert language_of("") == "unknown"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", '{"a": [1, 2]}'),
        ("code", "def f(x):\n    return x\n\nimport os\nclass A:\n    pass\n"),
        ("code", "int main() {\n  return 0;\n}\n"),
        ("numbers", "1 2 3 4 5 6 7 8 9 a"),
        ("prose", "A sentence, and another one; it is short."),
        ("prose", "{not json at all"),
        ("prose", ""),
    ],
)
def test_kinds(kind, text):
    assert kind_of(text) == kind


def test_scripts_without_blanks_count_their_letters():
    assert num_words("这是一个中文句子。", "zh") == 8
    assert num_words("two words", "en") == 2


def test_sums_keep_every_token_and_come_dearest_first():
    counts = [count_text(TEXTS["en"], 16), count_text(TEXTS["de"], 40), count_text(TEXTS["en"], 14)]
    groups = add_up(counts)
    assert [(one.language, one.texts, one.tokens) for one in groups] == [("de", 1, 40), ("en", 2, 30)]
    assert sum(one.num_bytes for one in groups) == sum(len(TEXTS[name].encode()) for name in ("en", "de", "en"))
    assert groups[0].fertility == 40 / 15


def test_an_empty_text_has_no_fertility():
    empty = count_text("", 0)
    assert (empty.fertility, empty.characters_per_token, empty.bytes_per_token) == (None, None, None)
    assert add_up([empty])[0].tokens == 0
