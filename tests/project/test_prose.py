"Messages use no word of the avoid list; the counts of everything else are printed by `make house`."

import pytest
from prose import avoided, words_in

pytestmark = pytest.mark.site


def test_messages_have_no_word_of_the_avoid_list():
    found = [f for f in avoided() if f.kind == "message"]
    assert [f"{f.path}:{f.line}: {f.word}: {f.text}" for f in found] == []


def test_the_words_are_found_whatever_their_case():
    assert words_in("Anew, and judged by whoever heard it") == ["anew", "judged", "whoever", "heard"]
    assert words_in("a townhouse is beneath") == []
