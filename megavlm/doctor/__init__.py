"""What a machine offers a run, what it lacks, and the command that brings that (`tools/doctor.py`)."""
