"""Metrics of a run: files of records (`sinks`), the progress line (`progress`), throughput (`throughput`)."""
