"""`leap bench`: what was measured, as tables."""

from collections.abc import Callable
from typing import Any

from leap.bench import (
    attention_report,
    decode_report,
    runtime_report,
    serve_report,
    stream_report,
)
from leap.bench.attention import BenchConfig
from leap.bench.attention import measure as measure_attention
from leap.bench.decode import DecodeConfig
from leap.bench.decode import measure as measure_decode
from leap.bench.report import Page
from leap.bench.runtime import RuntimeConfig
from leap.bench.runtime import measure as measure_runtime
from leap.bench.serve import ServeBenchConfig
from leap.bench.serve import measure as measure_serve
from leap.bench.stream import StreamBenchConfig
from leap.bench.stream import measure as measure_stream
from leap.bench.train import TrainBenchConfig
from leap.bench.train import measure as measure_train
from leap.bench.train import page as train_page
from leap.cli.progress import progress_shown
from leap.cli.table import show_table
from leap.reports.files import write_report


def attention(config: BenchConfig) -> None:
    """Measure, print the tables, and say where the files are."""
    run_bench(config, measure_attention, attention_report.page)


def decode(config: DecodeConfig) -> None:
    """Measure, print the tables, and say where the files are."""
    run_bench(config, measure_decode, decode_report.page)


def runtime(config: RuntimeConfig) -> None:
    """Measure, print the tables, and say where the files are."""
    run_bench(config, measure_runtime, runtime_report.page)


def serve(config: ServeBenchConfig) -> None:
    """Measure, print the tables, and say where the files are."""
    run_bench(config, measure_serve, serve_report.page)


def train(config: TrainBenchConfig) -> None:
    """Measure, print the tables, and say where the files are."""
    run_bench(config, measure_train, train_page)


def stream(config: StreamBenchConfig) -> None:
    """Measure, print the tables, and say where the files are."""
    run_bench(config, measure_stream, stream_report.page)


def run_bench(config: Any, measure: Callable[..., Any], page: Callable[[Any], Page]) -> None:
    """Measure as a config says, print the tables, write the files, and say where they are."""
    write_report(config.output, {})
    with progress_shown() as progress:
        measured = measure(config, progress)
    shown = page(measured)
    for table in shown.tables:
        show_table(table)
    print(shown.description)
    for path in shown.write(config.output):
        print(f"wrote {path}")
