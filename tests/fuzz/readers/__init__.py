"""Every reader of a file that a user may have from someone else, by name."""

from tests.fuzz.readers import checkpoints, data, models

READERS = {**checkpoints.READERS, **models.READERS, **data.READERS}
