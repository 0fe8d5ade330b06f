"""`Talk`: a conversation with a model, turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megavlm.data.decode import size_of
from megavlm.data.records.media import video_below
from megavlm.data.types import Conversation, ImageRef, Turn, Visual
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Film
from megavlm.programs.inference.assistant import Assistant, Sampling


class Talk:
    """Keeps what was said. Each answer is generated from the whole conversation, with its images and videos."""

    def __init__(self, assistant: Assistant, sampling: Sampling, *, system: str | None = None) -> None:
        self._assistant = assistant
        self._sampling = sampling
        self._opening = (Turn("system", (system,)),) if system else ()
        self.reset()

    def reset(self) -> None:
        """Forget all turns, images and videos; the system turn stays."""
        self._turns: tuple[Turn, ...] = self._opening
        self._images: list[Visual] = []

    def add_image(self, path: str) -> tuple[int, int]:
        """Show an image with the next message; return its height and width. Raises BadSample if it is no image."""
        file = Path(path).expanduser()
        if not file.is_file():
            what = "is an address: download it first" if "://" in path else "is not a file"
            raise BadSample(Reason.MISSING, f"{path} {what}")
        try:
            size = size_of(file)
        except BadSample as error:
            raise BadSample(error.reason, f"{path}: {error.detail}") from error
        self._images.append(ImageRef(file))
        return size

    def add_video(self, path: str) -> Film:
        """Show a clip, or a folder of frames, with the next message; return which frames the model sees.

        Raises BadSample if it is no video, or the model reads none.
        """
        file = Path(path).expanduser().resolve()
        if not file.exists():
            raise BadSample(Reason.MISSING, f"{path} is not a file or folder")
        video = video_below(file.parent, file.name)
        try:
            film = self._assistant.source.film_of(video)
        except BadSample as error:
            raise BadSample(error.reason, f"{path}: {error.detail}") from error
        self._images.append(video)
        return film

    def answer(self, message: str, show: Callable[[str], None]) -> str:
        """Return the answer to a message, and show it piece by piece.

        Raises BadSample for a message that cannot be asked; the conversation is then as it was. An answer that Ctrl-C
        stops (KeyboardInterrupt) is not kept either.
        """
        question = Turn("user", (*self._images, message))
        turns = (*self._turns, question)
        sample = self._assistant.source.prompt(Conversation(turns))
        self._assistant.check_length(sample)
        text = self._assistant.stream(sample, self._sampling, show)
        self._turns, self._images = (*turns, Turn("assistant", (text,))), []
        return text
