"""A program that measures rows: its options, table, JSON output and exit status."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import report
from rustloader.tools.harness.machine import machine, sentence
from rustloader.tools.harness.progress import say
from rustloader.tools.harness.rounds import Failure, Rounds, interleave


class Program:
    """A program in benches/.

    Its options are ``--rows``, ``--rounds`` and ``--save``. With ``docs`` there is also ``--docs``, which writes the
    table between two marks in a document. ``option`` adds an option. ``run`` measures row by row, and prints each line
    of the table as soon as it is known.

    Args:
        text: purpose of the program, for ``--help``.
        rows: names of all rows.
        rounds: default number of rounds.
        docs: the document, and the mark before and after the table in it.
    """

    def __init__(
        self, text: str | None, rows: Sequence[str], rounds: int = 5, docs: tuple[Path, str] | None = None
    ) -> None:
        self.parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.option, self.rows = self.parser.add_argument, list(rows)
        self.option(
            "--rows", metavar="NAME,...", help=f"measure only these rows, out of {', '.join(rows)}".replace("%", "%%")
        )
        self.option("--rounds", type=int, default=rounds, help="rounds per row (default: %(default)s)")
        self.option("--save", type=Path, metavar="FILE", help="write the results as JSON")
        if docs is not None:
            self.option("--docs", action="store_true", help=f"write the table into {docs[0].name}")
        self._docs = docs
        self.options = argparse.Namespace()
        self.results: list[dict[str, Any]] = []
        self.failed = False
        self.table: list[str] = []

    def parse(self) -> argparse.Namespace:
        """Parses the command line. Returns the options, with ``rows`` as a list of names."""
        self.options = options = self.parser.parse_args()
        options.rows = self.rows if options.rows is None else options.rows.split(",")
        if unknown := [name for name in options.rows if name not in self.rows]:
            self.parser.error(f"no such row: {', '.join(unknown)}; the rows are {', '.join(self.rows)}")
        if options.rounds < 1:
            self.parser.error("--rounds must be at least 1")
        return options

    def run(self, measure: Callable[[str], object], head: Sequence[str] = ()) -> int:
        """Calls ``measure`` with the name of each requested row. ``head`` has the headings of the table.

        Returns 1 if a row failed or missed its goal, else 0.
        """
        import torch

        options = self.options if vars(self.options) else self.parse()
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # as in a worker
        print(f"{sentence()}; medians of {options.rounds} rounds\n")
        if head:
            self.head(*head)
        for name in options.rows:
            self.attempt(name, lambda name=name: measure(name))  # type: ignore[misc]
        if options.save:
            options.save.write_text(json.dumps({"machine": machine(), "results": self.results}, indent=1) + "\n")
        if self._docs and options.docs:
            path, mark = self._docs
            report.write(path, "\n".join(self.table), mark)
        return int(self.failed)

    def attempt(self, name: str, measure: Callable[[], object]) -> None:
        """Calls ``measure`` for a row. If it raises a ``Failure``, prints the failure as the row's line."""
        try:
            measure()
        except Failure as failure:
            self.failed = True
            say("")
            print(report.line([name, f"FAILED: {failure}"]), flush=True)

    def interleave(self, sides: dict[str, Callable[[], Any]], label: str, **arguments: Any) -> Rounds:
        """Calls ``rounds.interleave`` with the number of rounds from the command line."""
        return interleave(sides, self.options.rounds, label, **arguments)

    def head(self, *cells: str) -> None:
        """Starts a table with these headings."""
        self._show(("\n" if self.table else "") + report.head(cells))

    def line(self, row: str, *cells: object, held: bool | None = None, **figures: Any) -> None:
        """Prints a line of the table, and adds a row to the JSON output.

        Args:
            row: name of the row in the JSON output.
            cells: the cells of the line.
            held: whether the row met its goal; None if it has no goal.
            figures: the other values of the row in the JSON output.
        """
        self._show(report.line(cells))
        if held is False:
            self.failed = True
        self.results.append({"row": row, **figures, **({} if held is None else {"held": held})})

    def _show(self, text: str) -> None:
        self.table += text.splitlines()
        print(text, flush=True)


def missed(held: bool | None) -> str:
    """Returns the last cell of a line with a goal: "missed", or an empty string."""
    return "missed" if held is False else ""


def main(program: Program, measure: Callable[[str], object], *head: str) -> None:
    """Runs a program and exits with its status."""
    sys.exit(program.run(measure, head))
