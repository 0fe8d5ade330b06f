"""Start a run on many machines: check it here, describe the job to a scheduler, and keep account of its attempts."""
