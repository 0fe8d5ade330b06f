"""Talk to a trained model in a terminal: `megavlm chat RUN_DIR` or a Hugging Face folder, `--image cat.png`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megavlm.command_line.commands import Parser, reported
from megavlm.errors import UserError
from megavlm.inference.assistant import Talk
from megavlm.inference.folders import model_folder
from megavlm.inputs.bad_sample import BadSample
from megavlm.programs.model_options import add_model_options, assistant_of, memory_reported, sampling_of
from megavlm.rules.extensions import without_extensions

_KINDS = ("image", "video", "audio")
_COMMANDS = "/image, /video or /audio FILE adds one to the next message, /reset begins anew, /quit or Ctrl-D ends"


@reported("chat")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument is wrong or cannot be used (reported in one line)."""
    try:
        given = _parser().parse_args(without_extensions(argv))
        sampling = sampling_of(given)
        found = model_folder(given.model)
        talk = Talk(assistant_of(given, found), sampling, system=given.system)
        _show_first(given, talk)
        with memory_reported():
            if given.prompt is None:
                _converse(talk)
            else:
                talk.answer(given.prompt, _show)
                print()
    except BadSample as error:
        raise UserError(error.detail) from error
    return 0


def _show_first(given: argparse.Namespace, talk: Talk) -> None:
    """Add the files of the options to the first message. Raises UserError for an unusable file."""
    for kind in _KINDS:
        for path in getattr(given, kind):
            try:
                talk.add(path, kind=kind)
            except BadSample as error:
                raise UserError(f"--{kind} {error.detail}: name another file, or leave it out") from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Talk to a trained model in a terminal.",
        epilog=f"In a conversation {_COMMANDS}; Ctrl-C stops an answer.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="Image of the first message; may be repeated."
    )
    parser.add_argument(
        "--video",
        action="append",
        default=[],
        metavar="FILE",
        help="Video of the first message, or a folder of its frames; may be repeated.",
    )
    parser.add_argument(
        "--audio", action="append", default=[], metavar="FILE", help="Sound of the first message; may be repeated."
    )
    parser.add_argument("--prompt", metavar="TEXT", help="Print the answer to this message and end.")
    add_model_options(parser, max_new_tokens=512)
    return parser


def _converse(talk: Talk) -> None:
    """Read messages and commands until the input ends; print only answers where the input is no terminal."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        import readline  # noqa: F401 - `input` edits lines with it

        _note(_COMMANDS)
    while True:
        try:
            line = input("> " if at_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        try:
            _take(talk, line)
        except BadSample as error:
            _note(error.detail)
        except KeyboardInterrupt:
            _note("\n(stopped; the message is not kept)")


def _take(talk: Talk, line: str) -> None:
    """Carry out a command, or answer a message. Raises BadSample for a file or message that cannot be used."""
    command, _, rest = line.partition(" ")
    if (kind := command.removeprefix("/")) in _KINDS and command != kind and rest.strip():
        _note(f"({talk.add(rest.strip(), kind=kind)}, with the next message)")
    elif command == "/reset":
        talk.reset()
    elif command.startswith("/") and "/" not in command[1:]:
        _note(f"unknown command {command}: {_COMMANDS}")
    elif line:
        talk.answer(line, _show)
        print()


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
