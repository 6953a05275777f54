"""`Parser`: the parser of the command line, with short errors that say where and what is near."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from logra_lightning.config_files import Key, places_of

PROGRAM = "python -m logra_lightning"


class Parser(LightningArgumentParser):
    """Lightning's parser, with short errors that name the nearest valid option.

    Attributes:
        words: the arguments that are parsed, also by the parsers of nested options.
    """

    words: Sequence[str] = ()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the reason in a few lines and exit with status 2."""
        # The reason of a nested option stands last, after what was tried before it.
        reason = re.sub(r"\n\s*\n+", "\n", str(message)).strip()
        unknown = re.search(
            r"does not accept (?:nested )?option '([^']+)'|[Uu]nrecognized arguments: --([^\s=]+)"
            r"|Key '([^']+)' is not expected|Option '([^']+)' is not accepted",
            reason,
        )
        wrong = unknown or re.search(r'Parser key "([^"]+)"', reason)
        if wrong:
            name = next(group for group in wrong.groups() if group)
            places = []
            if not any(word.partition("=")[0] == f"--{name}" for word in self.words):
                places = places_of(self.words, name, self._option_names())
            reason = "\n".join([reason, *map(str, places)])
            if unknown:
                reason += f"\n{self._hint(name, places)}"
        program = self.prog if self.prog.startswith(PROGRAM) else PROGRAM
        self.exit(2, f"error: {reason}\nsee {program} --help\n")
        raise AssertionError  # exit does not return

    def _hint(self, name: str, places: list[Key]) -> str:
        """The nearest valid name with as many parts, or all that are valid in its place."""
        names = {n for n in self._option_names() if n.count(".") == name.count(".")}
        parent = name.rpartition(".")[0]
        siblings = {n for n in names if n.rpartition(".")[0] == parent}
        close = difflib.get_close_matches(name, siblings or names, n=1, cutoff=0.6)
        if close:
            # In a nested parser a name is only its last part.
            full = places[0].path if len(places) == 1 else name
            within = full.removesuffix(name) if "." not in name else ""
            return f"did you mean {within + close[0]!r}?"
        return f"valid here: {', '.join(sorted(siblings))}" if siblings and parent else ""

    def _option_names(self) -> set[str]:
        """Names of all options and of the groups that they lie in."""
        names: set[str] = set()
        for action in self._actions:
            for option in [action.dest, *(o.lstrip("-") for o in action.option_strings)]:
                parts = option.split(".")
                names |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
            for parser in getattr(action, "_name_parser_map", {}).values():
                names |= parser._option_names()
        return names
