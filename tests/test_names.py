"""Messages list the first few names and count the others."""

from __future__ import annotations

from logra_lightning.names import listed, named


def test_the_first_names_are_quoted_and_the_others_counted() -> None:
    assert named([]) == "none"
    assert named(["a"]) == "'a'"
    assert named(["a", "b", "c"]) == "'a', 'b', 'c'"
    assert named(["a", "b", "c", "d"]) == "'a', 'b', 'c' and 1 more"
    assert named(dict.fromkeys("abcde"), limit=1) == "'a' and 4 more"


def test_things_that_are_no_names_are_listed_without_quotes() -> None:
    assert listed([]) == "none"
    assert listed(["row 1", "row 2", "row 3"], limit=2) == "row 1, row 2 and 1 more"
