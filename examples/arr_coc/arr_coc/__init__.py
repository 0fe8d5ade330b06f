"""ARR-COC as an extension: thirteen channels of texture, three scorers, and an allocator of image tokens.

`--extension arr_coc --vision-input texture --projector-kind arr_coc --set model.vision.in_channels=13`
"""

from __future__ import annotations

from arr_coc.connector import ARR_COC
from megavlm.extension import Entry, Extension

EXTENSION = Extension(connectors=(ARR_COC,), inputs=(Entry("texture", "arr_coc.texture:TEXTURE"),))
