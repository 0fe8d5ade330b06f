"""Report what a run measures: files of records, the progress line, trackers, and pages of samples."""
