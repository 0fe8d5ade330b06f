"""Start a run on many machines: check its options here, submit the job to a scheduler, and record its attempts."""
