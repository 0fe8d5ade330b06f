"""Shared options of commands that load a trained model: model folder, data type, device, sampling."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from megavlm.command_line.commands import count
from megavlm.errors import UserError
from megavlm.inference.assistant import Assistant, Sampling
from megavlm.inference.folders import ModelFolder
from megavlm.inference.model import TYPES


def add_folder_options(parser: argparse.ArgumentParser) -> None:
    """Add the folder of the model, --dtype and --device to a parser."""
    parser.add_argument(
        "model",
        metavar="RUN_DIR|HF_DIR",
        help="Folder of a run, whose newest checkpoint is exported once to RUN_DIR/exports, or a Hugging Face folder, "
        "also a URL or a name on the hub.",
    )
    parser.add_argument(
        "--dtype", choices=TYPES, default="auto", help="Type of the weights; default: auto, that of the files."
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, …; default: cuda if there is a GPU.")


def add_model_options(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """Add the folder of the model, --dtype, --device and the options of generation to a parser."""
    add_folder_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="System turn; default: the chat template's own, if any.")
    parser.add_argument(
        "--max-new-tokens", type=count, default=max_new_tokens, metavar="N", help="Most tokens of an answer."
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="Sampling temperature; default: 0, which takes the most likely token each time.",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of sampling.")
    parser.add_argument(
        "--chat-template",
        metavar="NAME|FILE",
        help="Chat template, as in training; default: that of the run, or of the folder.",
    )


def sampling_of(given: argparse.Namespace) -> Sampling:
    """Return the options of generation. Raises UserError for a temperature out of range."""
    if not 0 <= given.temperature < float("inf"):
        raise UserError(f"--temperature {given.temperature} must be 0 or more")
    return Sampling(given.max_new_tokens, given.temperature, given.seed)


def device_of(name: str | None, *, local_rank: int = 0) -> torch.device:
    """Return the device of `--device`, by default this process's GPU or the CPU. Raises UserError for a wrong name."""
    if name is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name} is unknown: use cpu, cuda, or cuda:1 for the second GPU") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {name}: this machine has {torch.cuda.device_count()} GPUs; use cpu or another number"
        )
    return device


@contextmanager
def memory_reported(batch_size: int = 1) -> Iterator[None]:
    """Raise UserError with a remedy for a device without memory, as of questions answered `batch_size` at a time."""
    try:
        yield
    except torch.OutOfMemoryError:
        smaller = f"give a smaller --batch-size than {batch_size}, " if batch_size > 1 else "use "
        raise UserError(f"out of memory: {smaller}--dtype bfloat16, or --device cpu") from None


def assistant_of(given: argparse.Namespace, found: ModelFolder, *, local_rank: int = 0) -> Assistant:
    """Load the model of a folder with the given options. Raises UserError if a folder or option cannot be used."""
    data = replace(found.data, chat_template=given.chat_template) if given.chat_template else found.data
    return Assistant.load(found.folder, data, device=device_of(given.device, local_rank=local_rank), dtype=given.dtype)
