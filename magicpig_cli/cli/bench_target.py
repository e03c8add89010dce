"""Results of `bench`: where they go, in which form, and what they are compared with."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicpig_cli.cli.outputs import want_one_of, want_writable, write
from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.files import is_stream

if TYPE_CHECKING:
    from magicpig_cli.bench.compare import Earlier
    from magicpig_cli.bench.report import Results

FORMATS = ("table", "md", "csv", "json", "jsonl")
_FORMAT_OF = {".md": "md", ".csv": "csv", ".json": "json", ".jsonl": "jsonl"}  # by the end of --output


@dataclass(frozen=True, slots=True)
class Target:
    """Where results go, in which form, and what they are compared with."""

    form: str  # one of FORMATS
    output: Path | None  # None: stdout
    earlier: Earlier | None
    plot: str | None  # a file; `-`: the terminal
    quiet: bool

    def keep(self, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Save the rows that there are so far; a pipe gets all of them at the end. Raises MagicpigError."""
        if self.output is not None and not is_stream(self.output):
            self._save(meta, rows)

    def _save(self, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Replace the output file, if there is one, by these rows. Raises MagicpigError."""
        if self.output is not None:
            write(self.output, self._document(self._results(meta, rows)).encode("utf-8", errors="replace"))

    def deliver(self, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Write or print everything: document, notes, plot. There is at least one row. Raises MagicpigError."""
        from magicpig_cli.ui import bench as page
        from magicpig_cli.ui import console

        results = self._results(meta, rows)
        try:
            self._save(meta, rows)
        except MagicpigError:  # a full disk
            print(self._document(results), end="")
            raise
        if self.output is not None and not self.quiet:
            console.say(f"{len(rows)} rows in {self.output}")
        try:
            if self.plot is not None and self.plot != "-":
                self._draw(Path(self.plot), results)
        finally:
            self._print(results)
        for text in results.warnings():
            console.warn(text)
        if self.plot == "-":
            page.print_plot(results)

    def _print(self, results: Results) -> None:
        """The results where no file has them."""
        from magicpig_cli.ui import bench as page

        if self.output is None and self.form == "table":
            page.print_tables(results)
        elif self.output is None:
            print(self._document(results), end="")

    def _draw(self, path: Path, results: Results) -> None:
        from magicpig_cli.bench.plot import image

        write(path, image(results.meta, results.rows, path.suffix.lower()))

    def _results(self, meta: dict[str, Any], rows: list[dict[str, Any]]) -> Results:
        from magicpig_cli.bench.compare import compare
        from magicpig_cli.bench.report import Results

        return Results(meta, rows, None if self.earlier is None else compare(self.earlier, meta, rows))

    def _document(self, results: Results) -> str:
        """The text of an output file, or of stdout where that is for programs."""
        from magicpig_cli.bench import report
        from magicpig_cli.ui import bench as page

        if self.form == "table":
            with contextlib.redirect_stdout(io.StringIO()) as text:  # no terminal: neither colours nor a width
                page.print_tables(results)
            return text.getvalue() + "".join(f"warning: {line}\n" for line in results.warnings())
        writers = {"md": report.as_markdown, "csv": report.as_csv, "json": report.as_json, "jsonl": report.as_jsonl}
        return writers[self.form](results)


def chosen_target(
    output_format: str | None, output: Path | None, compare: Path | None, plot: str | None, quiet: bool
) -> Target:
    """Everything about results that can be checked before there are any. Raises UsageError."""
    if output == Path("-"):
        output = None
    form = output_format or (_FORMAT_OF.get(output.suffix.lower(), "md") if output else "table")
    want_one_of("--output-format", form, FORMATS)
    if plot is not None:
        _check_plot(plot, output, form)
    if output is not None:
        want_writable("--output", output)
    earlier = None
    if compare is not None:
        from magicpig_cli.bench import compare as comparing

        earlier = comparing.load(compare)
    return Target(form, output, earlier, plot, quiet)


def _check_plot(plot: str, output: Path | None, form: str) -> None:
    from magicpig_cli.bench.plot import refuse

    refuse(plot)
    if plot == "-":
        if output is None and form != "table":
            raise UsageError(
                f"--plot - and --output-format {form} would both go to stdout", hint="--output FILE, or --plot FILE.png"
            )
        return
    if output is not None and output.resolve() == Path(plot).resolve():
        raise UsageError(f"--output and --plot both name {plot}", hint="--output FILE.json --plot FILE.png")
    want_writable("--plot", Path(plot))
