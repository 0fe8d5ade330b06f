"""What a run tells people and scripts: files of records (`sinks`), a live line (`progress`), speeds (`throughput`)."""
