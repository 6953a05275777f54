"""Functions get what their signatures name, and nothing else."""

from __future__ import annotations

from functools import partial

import pytest

from logra_lightning.rewards.parameters import Parameters

GIVEN = {"completion": "a", "answer": "b", "level": 3}


class Scorer:
    def __call__(self, completion: str, *, level: int = 1) -> None: ...


@pytest.mark.parametrize(
    ("function", "needed", "optional", "takes_all", "among"),
    [
        (lambda completion: 0, ["completion"], [], False, ["completion"]),
        (lambda completion, hint=1: 0, ["completion"], ["hint"], False, ["completion"]),
        (lambda *others, answer: 0, ["answer"], [], False, ["answer"]),
        (lambda answer, **others: 0, ["answer"], [], True, list(GIVEN)),
        (lambda missing: 0, ["missing"], [], False, []),
        (Scorer(), ["completion"], ["level"], False, ["completion", "level"]),
        (partial(Scorer(), level=2), ["completion"], ["level"], False, ["completion", "level"]),
    ],
)
def test_arguments_are_chosen_by_name(
    function: object, needed: list, optional: list, takes_all: bool, among: list
) -> None:
    parameters = Parameters.of(function)  # type: ignore[arg-type]
    assert parameters == Parameters(needed, optional, takes_all)
    assert parameters.among(GIVEN) == {name: GIVEN[name] for name in among}
