"""`told_at`: an error says where the user typed the option that caused it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_at(place: str) -> Iterator[None]:
    """Put `place` before the message of a ValueError that is raised inside.

    What reads a source then names only its own options, and its caller says which source it is:

        with told_at("data.init_args.sources[1]"):
            raise ValueError("columns names 'gold', but the file has 'answer'")
        # data.init_args.sources[1]: columns names 'gold', but the file has 'answer'

    Args:
        place: the option that holds those which are named inside, as the user types it.

    Raises:
        ValueError: the one that was raised inside, with `place` before its message.
    """
    try:
        yield
    except ValueError as error:
        # The traceback stays the first one's: the command line asks it who raised the error.
        told = ValueError(f"{place}: {error}").with_traceback(error.__traceback__)
        raise told from error.__cause__
