"""Report the metrics of a run: files of records, the progress line, trackers, and pages of samples."""
