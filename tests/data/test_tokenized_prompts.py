"""Prompts keep the columns of their rows, their numbers and their sources."""

from __future__ import annotations

from logra_lightning.data import Part, TokenizedPrompts


def test_columns_are_those_of_all_rows_and_none_where_a_row_has_none() -> None:
    nested = {"a": [1, None]}
    rows = [{"x": 1}, {"y": nested}, {"x": None, "z": 3}]
    ragged = TokenizedPrompts([[1], [2], [3]], rows, [0, 1, 2])
    batch = ragged.batch([2, 1, 0])
    assert ragged.columns == ["x", "y", "z"]
    assert batch.columns == {"x": [None, None, 1], "y": [None, nested, None], "z": [3, None, None]}
    assert batch.columns["y"][1] is nested
    assert ragged.with_columns(["w"]).batch([0]).columns["w"] == [None]


def test_what_is_left_out_leaves_numbers_and_parts_as_they_were() -> None:
    prompts = TokenizedPrompts(
        [[i + 1] for i in range(11)],
        [{"x": i} for i in range(11)],
        list(range(11)),
        [Part("few", 0), Part("many", 3)],
    )
    left = prompts.without({0, 4})
    assert left.prompt_ids == [[2], [3], [4], [6], [7], [8], [9], [10], [11]]
    assert left.numbers == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert left.sizes == [2, 7]
    assert [left.row_name(i) for i in (0, 2, 3)] == [
        "row 1 of 'few'",
        "row 0 of 'many'",
        "row 2 of 'many'",
    ]
    one_source = TokenizedPrompts([[1], [2], [3]], [{}, {}, {}], [0, 1, 2])
    assert one_source.without({1}).row_name(1) == "row 2"
