"""What a model consists of, and what each part holds and costs. Importing it registers the connectors."""

import megavlm.arch.connectors  # noqa: F401
