"""Put pictures into a page, which then needs no other file."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_QUALITY = 80  # of a JPEG
_TINY = 128  # pixels of the longer side up to which a picture is a PNG, which browsers enlarge without blurring


def picture(pixels: NDArray[np.uint8], *, side: int) -> str:
    """Return an image [height, width, 3] as an <img> that holds its bytes, reduced to `side` pixels at most."""
    height, width = pixels.shape[:2]
    image = Image.fromarray(pixels)
    image.thumbnail((side, side))
    kind = "png" if max(image.size) <= _TINY else "jpeg"
    file = BytesIO()
    image.save(file, format=kind, **({"quality": _QUALITY} if kind == "jpeg" else {}))
    data = b64encode(file.getvalue()).decode("ascii")
    sides = f'width="{image.width}" height="{image.height}"'
    return f'<img {sides} alt="{height}×{width} pixels" src="data:image/{kind};base64,{data}">'
