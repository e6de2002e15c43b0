"Comparison keys: what a reader cannot see makes no difference, and everything else does."

import sys
import unicodedata

import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from leakmel.core.errors import match_texts, show_path, text_key
from leakmel.recordings.naming import likely_leaks

quick = settings(max_examples=300, deadline=None, derandomize=True, database=None)

# of each kind some, by their numbers: the module has no list in common with this one
INVISIBLE = [
    "\u00ad",  # soft hyphen
    "\u034f",  # combining grapheme joiner
    "\u061c",
    "\u115f",  # Hangul filler
    "\u180e",
    "\u200b",  # zero-width space
    "\u200c",
    "\u200d",
    "\u200e",
    "\u202e",  # right to left from here on
    "\u2060",
    "\u2066",
    "\u3164",
    "\ufe0f",  # variation selector
    "\ufeff",  # byte order mark
    "\x00",
    "\x07",
    "\x7f",
    "\U000e0020",  # tag
    "\U000e0101",  # variation selector of ideographs
]
BLANKS = [" ", "\t", "\n", "\r\n", "\x0b", "\u00a0", "\u2007", "\u202f", "\u3000", "\u2800", "\u0085"]
letters = st.characters(
    categories=["Lu", "Ll", "Lo", "Nd", "Pd"], exclude_characters="\u115f\u1160\u3164\uffa0"
)
words = st.text(letters, min_size=1, max_size=8).map(lambda s: unicodedata.normalize("NFC", s))


@pytest.mark.slow
@quick
@given(words, st.data())
def test_what_cannot_be_seen_makes_no_difference(word, data):
    form = unicodedata.normalize(data.draw(st.sampled_from(["NFC", "NFD"])), word)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(form)))
        form = form[:at] + data.draw(st.sampled_from(INVISIBLE)) + form[at:]
    blanks = st.text(st.sampled_from([b for b in BLANKS if len(b) == 1]), max_size=3)
    form = data.draw(blanks) + form + data.draw(blanks)
    assert text_key(form) == text_key(word) == word
    assert text_key(f"{form}/{form}") == f"{word}/{word}", "of folders, too"


@quick
@given(words, words)
def test_other_texts_have_other_keys(one, other):
    assert (text_key(one) == text_key(other)) == (one == other), "also where they differ only in case"


@quick
@given(st.text(st.characters(exclude_characters="\\", exclude_categories=["Cs"]), max_size=20))
def test_a_name_that_was_made_printable_has_the_same_key(text):
    "As the class names of data sets and the sensors of histories are."
    assert text_key(show_path(text)) == text_key(text)


def test_other_backslashes_stay():
    for text in ("LEAK\\a.wav", r"\xe9", r"\u00e4", r"C:\U12", "\\"):
        assert text_key(text) == text


@quick
@given(st.text(st.characters(exclude_characters="\\"), max_size=20))
def test_a_key_is_its_own_key_and_printable(text):
    key = text_key(text)
    assert text_key(key) == key
    assert all(c == " " or not c.isspace() for c in key)
    assert not {unicodedata.category(c) for c in key} & {"Cc", "Cf"}


def test_all_format_characters_and_controls_are_left_out():
    for c in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.category(c) in ("Cc", "Cf") and not c.isspace():
            assert text_key(f"a{c}b") == "ab", ascii(c)
        elif unicodedata.category(c) in ("Zs", "Zl", "Zp"):
            assert text_key(f"{c}a{c}{c}b{c}") == "a b", ascii(c)


def test_names_that_are_not_utf8_keep_their_bytes():
    assert text_key("caf\udce9 ") == "caf\udce9"


def test_the_text_that_another_one_means():
    known = ["a.wav", "b.wav", "c .wav", "d\u200b.wav", "d.wav\u00a0", "e.wav"]
    wanted = ["a.wav", "b.wav ", "\ufeffc\u00a0.wav", "d.wav", "e.wav", "e.wav ", "f.wav"]
    assert match_texts(wanted, known) == {
        "a.wav": "a.wav",
        "b.wav ": "b.wav",
        "\ufeffc\u00a0.wav": "c .wav",
        "e.wav": "e.wav",
    }, "nothing where two could be meant, or the other one is named itself"
    assert match_texts([], known) == match_texts(wanted, []) == {}


@each(
    ("labels", "named"),
    [
        ("LEAK, NO_LEAK", "LEAK"),
        ("leak, no-leak", "leak"),
        ("kein Leck, Leck", "Leck"),
        ("Leckage, keine Leckage", "Leckage"),
        ("fuite, sans fuite", "fuite"),
        ("pas de fuite, anomalie", ""),
        ("perdita, nessuna perdita", "perdita"),
        ("fuga, sin fuga", "fuga"),
        ("vazamento, não vazamento", "vazamento"),
        ("lek, geen lek", "lek"),
        ("background, leak noise, pump leak", "leak noise, pump leak"),
        ("LEAK_small, LEAK_large, NOLEAK", "LEAK_small, LEAK_large"),
        ("noisy leak, north", "noisy leak"),
        ("leak free, faulty", ""),
        ("Leckfrei, undicht", ""),
        ("unleaked, bleak, Elektromotor, bomba_centrifuga, outburst", ""),
        ("L, NL", ""),
        ("normal, abnormal", ""),
        ("clips_5s, recordings", ""),
        ("NOLEAK", ""),
    ],
)
def test_a_label_names_leaks_by_a_word_of_its_own(labels: str, named: str) -> None:
    assert ", ".join(likely_leaks(labels.split(", "))) == named
