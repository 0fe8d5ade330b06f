"""What the options of `preprocessor_config.json` may be, by name: types, and ranges far beyond any model of today."""

from __future__ import annotations

from megavlm.json_files import FLAG, OBJECT, Expected, listed, mapped, number, whole

_AREA = whole(1, 2**26)  # pixels; larger pictures are not made on the way either
_FRAMES = whole(1, 2**18)
_FPS = number(1e-3, 1e3)
_COLOURS = number(-1e3, 1e3)
_ANY_SIZE = _AREA | listed(_AREA, 1, 2) | mapped(_AREA)
_SIZE = Expected("a number of pixels up to 67108864, two of them, or an object of them", _ANY_SIZE.fits)
OPTIONS: dict[str, Expected] = {
    "do_resize": FLAG,
    "do_rescale": FLAG,
    "do_convert_rgb": FLAG,
    "do_normalize": FLAG,
    "do_center_crop": FLAG,
    "do_pad": FLAG,
    "do_image_splitting": FLAG,
    "resample": whole(0, 5),
    "rescale_factor": number(0, 1e3),
    "image_mean": listed(_COLOURS, 3, 3),
    "image_std": listed(number(1e-6, 1e3), 3, 3),
    "size": _SIZE,
    "crop_size": _SIZE,
    "patch_size": _SIZE,
    "max_image_size": _SIZE,
    "merge_size": whole(1, 64),
    "temporal_patch_size": whole(1, 64),
    "fps": _FPS,
    "num_frames": _FRAMES,
    "min_frames": _FRAMES,
    "max_frames": _FRAMES,
    "max_duration": number(1e-3, 1e6),
    "spatial_merge_size": whole(1, 64),
    "min_pixels": _AREA,
    "max_pixels": _AREA,
    "min_patches": whole(1, 256),
    "max_patches": whole(1, 256),
    "image_grid_pinpoints": listed(listed(whole(1, 2**14), 2, 2), 1, 1_024),
    "video_sampling": OBJECT,
}
# Of `video_sampling`.
VIDEO_SAMPLING: dict[str, Expected] = {"fps": _FPS, "max_frames": _FRAMES, "video_size": _SIZE}
