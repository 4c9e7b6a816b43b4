"""`leap bench`: what was measured, as tables."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from leap.bench import attention_report, decode_report, report, stream_report
from leap.bench.attention import BenchConfig
from leap.bench.attention import measure as measure_attention
from leap.bench.decode import DecodeConfig
from leap.bench.decode import measure as measure_decode
from leap.bench.run import Progress as ProgressCallback
from leap.bench.stream import StreamBenchConfig
from leap.bench.stream import measure as measure_stream
from leap.cli.table import show_table


def attention(config: BenchConfig) -> None:
    """Measure, print the tables, and say where the files are."""
    report.make_folder(config.output)
    with stages_shown() as progress:
        measured = measure_attention(config, progress)
    show_page(attention_report.page(measured), config.output)


def decode(config: DecodeConfig) -> None:
    """Measure, print the tables, and say where the files are."""
    report.make_folder(config.output)
    with stages_shown() as progress:
        measured = measure_decode(config, progress)
    show_page(decode_report.page(measured), config.output)


def stream(config: StreamBenchConfig) -> None:
    """Measure, print the tables, and say where the files are."""
    report.make_folder(config.output)
    with stages_shown() as progress:
        measured = measure_stream(config, progress)
    show_page(stream_report.page(measured), config.output)


def show_page(page: report.Page, folder: Path) -> None:
    """Print a bench's tables, write its files, and say where they are."""
    for table in page.tables:
        show_table(table.columns, table.rows, table.title)
    print(page.description)
    for path in report.write(page, folder):
        print(f"wrote {path}")


@contextmanager
def stages_shown() -> Iterator[ProgressCallback]:
    """Show how far a bench is: a bar on a terminal, elsewhere a line for each stage."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _LinePerStage(console)
        return
    bar = Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("")

        def show(done: int, total: int, doing: str) -> None:
            bar.update(task, completed=done, total=total, description=doing)

        yield show


class _LinePerStage:
    """For a log: one line when a length or a context begins, in place of a moving bar."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.stage = ""

    def __call__(self, done: int, total: int, doing: str) -> None:
        stage = doing.partition(":")[0]
        if stage != self.stage and ":" in doing:
            self.console.print(f"{done}/{total}  {stage}", highlight=False)
            self.stage = stage
