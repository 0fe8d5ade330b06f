"""A family of models that Transformers reads with the folder's own code, which megavlm never runs.

`--extension acme_vlm --init-from FOLDER` trains one: a SigLIP tower, an MLP and a Llama under names of their own.
"""

from __future__ import annotations

from megavlm.extension import Entry, Extension

EXTENSION = Extension(families=(Entry("acme_vlm", "acme_vlm.family:FAMILY"),))
