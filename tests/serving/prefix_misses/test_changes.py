# SPDX-License-Identifier: Apache-2.0
"""Classification of the first difference between two texts."""

import pytest

from vllm_metal.serving.prefix_misses import changes

CASES = {
    "a day": ("date", "Today is 2026-11-25. You are", "Today is 2026-11-26. You are", "2026-11-25"),
    "a timestamp": (
        *("date", "now=2026-11-30T23:59:59.5Z; you are", "now=2026-12-01T00:00:04Z; you are"),
        "2026-11-30T23:59:59.5Z",
    ),
    "what `date` prints": (
        *(
            "date",
            "It is Wed Nov 25 10:32:05 UTC 2026. Go",
            "It is Thu Nov 26 11:00:01 UTC 2026. Go",
        ),
        "Wed Nov 25 10:32:05",
    ),
    "a day in words": (
        *("date", "Date: November 25, 2026. Be brief.", "Date: December 1, 2026. Be brief."),
        "November 25, 2026",
    ),
    "a time of day": ("date", "at 10:05 PM, answer", "at 9:15 AM, answer", "10:05 PM"),
    "seconds since 1970": ("date", "t=1764153600, answer", "t=1764157777, answer", "1764153600"),
    "a countdown": ("counter", "left: 199,500 tokens to", "left: 98,211 tokens to", "199,500"),
    "one more digit": ("counter", "turn 9 of the talk", "turn 10 of the talk", "9"),
    "a digest": ("identifier", "cch=ab12f901; version 2", "cch=77fe0d1a; version 2", "ab12f901"),
    "a UUID": (
        *("identifier", "id 7b1c2d3e-1111-2222-3333-444455556666, for"),
        *("id 7b1c2d3e-9111-2222-3333-444455556abc, for", "7b1c2d3e-1111-2222-3333-444455556666"),
    ),
    "a word": ("edit", "The user likes cats so much", "The user likes dogs so much", "cat"),
    "a word of letters a to f": ("edit", "the facade was grey", "the feed was grey", "acade"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_named(case):
    kind, before, now, what = CASES[case]
    found = changes.first(before, now)
    assert (found.kind, found.before, found.matches_after) == (kind, what, True)


def test_a_date_in_place_of_a_word_is_an_edit():
    assert changes.first("today: 2026-11-25, so", "today: unknown, so").kind == "edit"


def test_texts_that_never_meet_again_say_so():
    found = changes.first("Q: what is a whale?", "Q: who wrote Faust, and when?")
    assert (found.kind, found.matches_after) == ("edit", False)


def test_a_text_that_ends_where_the_other_goes_on():
    found = changes.first("one two", "one two three")
    assert (found.before, found.now, found.matches_after) == ("", " three", False)
