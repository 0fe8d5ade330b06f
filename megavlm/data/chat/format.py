"""Apply a chat template and a tokenizer to conversations, and compute which tokens are trained (`ChatFormat`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megavlm.data.chat.expand import EncodedConversation, EncodedTurn, expand
from megavlm.data.chat.spans import (
    Kind,
    Skeleton,
    TurnSpans,
    by_prefixes,
    field_of_thoughts,
    image_style,
    openings_of,
    silence_of,
    skeleton,
    source_of,
    takes_system_in_parts,
)
from megavlm.data.chat.template import EMPTY_THOUGHTS, ChatTemplate, Message, TemplateError
from megavlm.data.tokenizers import TextTokenizer
from megavlm.data.types import Conversation, Turn, VideoRef, Visual
from megavlm.errors import UserError
from megavlm.families import CHAT_TEMPLATES
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Prompt

TrainOn = Literal["assistant", "last", "all"]
_LETTERS = 2**22  # most characters of a conversation: to tokenize a million takes seconds and 300 MB
_TURNS = 2048  # most turns of a conversation: the template is rendered for the prefix of each answer
_SHAPES = 1024  # most conversation shapes that are cached
# Of Qwen and others, of gpt-oss (before each of its channels), of Gemma 4.
_THOUGHT_ENDS = ("</think>", "<|message|>", "<channel|>")


@dataclass(frozen=True)
class ChatFormat:
    """Encodes conversations to the same tokens as Transformers with this template, tokenizer and processor.

    `placeholder` represents an image in the rendered text. If `in_parts`, the template writes it for each part
    {"type": "image"} of a message (of a system turn if `system_in_parts`); else the message's text contains it. Videos
    are passed to templates as images, or as text parts with the placeholder if `videos_as_text`; only the text that
    replaces the placeholder differs from an image's. `reserved` are further texts that no turn may contain, such as the
    video token.
    """

    template: ChatTemplate | None
    tokenizer: TextTokenizer
    placeholder: str
    in_parts: bool = False
    system_in_parts: bool = False
    thoughts: str | None = None  # see `field_of_thoughts`
    train_on: TrainOn = "assistant"
    openings: tuple[tuple[str, str], ...] = ()  # see `openings_of`
    reserved: tuple[str, ...] = ()
    videos_as_text: bool = False
    end_of_turn: str = ""  # text after an answer that is trained with it; empty if the template has none
    _skeletons: dict[tuple[Kind, ...], Skeleton] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        tokenizer: TextTokenizer,
        *,
        template: str = "auto",
        placeholder: str = "<image>",
        train_on: TrainOn = "assistant",
        enable_thinking: bool | None = None,
        model_type: str | None = None,
        reserved: tuple[str, ...] = (),
        videos_as_text: bool = False,
    ) -> ChatFormat:
        """Return the format with the template that `--chat-template` names.

        `placeholder` is the image processor's, `model_type` that of the tokenizer's folder. The template's variable
        `enable_thinking` is set unless it is None. If `auto` finds no template, the format encodes plain text only.
        Raises UserError if the template is missing or cannot be used.
        """
        source = source_of(tokenizer, template, model_type)
        if source is None:
            return cls(None, tokenizer, tokenizer.image_text, train_on=train_on, reserved=reserved)
        names: dict[str, str | bool] = {**tokenizer.specials}
        if enable_thinking is not None:
            names["enable_thinking"] = names["thinking"] = enable_thinking  # Kimi's name for it
        chosen = ChatTemplate(source, tuple(sorted(names.items())))
        try:
            in_parts, written = image_style(chosen, placeholder, tokenizer.image_text)
            of_system = in_parts and takes_system_in_parts(chosen)
            openings, end_of_turn = openings_of(chosen, in_parts, system_in_parts=of_system)
            chosen = replace(chosen, silence=silence_of(chosen, in_parts))
        except TemplateError as error:
            raise UserError(
                f"--chat-template {template} cannot be trained on: {error}; choose one of {', '.join(CHAT_TEMPLATES)}"
            ) from error
        return cls(
            chosen,
            tokenizer,
            written,
            in_parts,
            of_system,
            thoughts=field_of_thoughts(chosen, in_parts),
            train_on=train_on,
            openings=openings,
            reserved=reserved,
            videos_as_text=videos_as_text,
            end_of_turn=end_of_turn,
        )

    def encode(self, conversation: Conversation, prompts: Sequence[Prompt]) -> EncodedConversation:
        """Encode a conversation for training; its images are replaced by `prompts`, one for each, in order.

        Raises BadSample if the assistant says nothing, if it has more than 4 million letters or 2,048 turns, if the
        template refuses the conversation, or if a text contains the image token; UserError if there is no template.
        """
        assert len(prompts) == len(conversation.images)
        _check_texts(conversation, (self.placeholder, self.tokenizer.image_text, *self.reserved))
        roles = {turn.role for turn in conversation.turns}
        if roles == {"text"}:
            return self._text(conversation, prompts)
        if "text" in roles:
            raise BadSample(Reason.NOT_A_RECORD, "its turns mix chat roles and plain text")
        if "assistant" not in roles:
            raise BadSample(Reason.EMPTY, "the assistant says nothing")
        rendered, spans = self._render(self._template(), conversation)
        mark = self.end_of_turn.strip()  # an answer of this mark alone is usually a tool call
        roles_of_answers = [turn.role for turn in conversation.turns if turn.speaker == "assistant"]
        spoken = zip(spans.answers, roles_of_answers[-len(spans.answers) :], strict=False)
        said = [(span, role) for span, role in spoken if rendered[slice(*span)].strip() != mark]
        if not said:
            raise BadSample(Reason.EMPTY, "the assistant says nothing")
        answers = [span for span, role in said[-1 if self.train_on == "last" else 0 :] if role == "assistant"]
        if self.train_on == "all":
            answers = [(0, len(rendered))]
        return expand(
            rendered,
            prompts,
            placeholder=self.placeholder,
            tokenizer=self.tokenizer,
            trained=answers,
            cuts=(spans.opening, *spans.cuts),
            begins=self._writes_begin,
        )

    @property
    def thought_ends(self) -> tuple[int, ...]:
        """Return the tokens behind the last of which an answer follows its thoughts; () if the template has none."""
        source = self.template.source if self.template is not None else ""
        marks = (self.tokenizer.encode(mark).ids.tolist() for mark in _THOUGHT_ENDS if mark in source)
        return tuple(ids[0] for ids in marks if len(ids) == 1)

    def prompt(self, conversation: Conversation, prompts: Sequence[Prompt]) -> NDArray[np.int64]:
        """Return the tokens [L] of a conversation that ends with a question, followed by the generation prompt.

        They are a prefix of the tokens that `encode` returns for the conversation with its answer. Raises BadSample and
        UserError as `encode` does.
        """
        _check_texts(conversation, (self.placeholder, self.tokenizer.image_text, *self.reserved))
        try:
            rendered = self._template().render(self._messages(conversation)[0], generate=True)
        except TemplateError as error:
            raise BadSample(Reason.NOT_A_RECORD, f"the chat template cannot render it: {error}") from error
        encoded = expand(
            rendered,
            prompts,
            placeholder=self.placeholder,
            tokenizer=self.tokenizer,
            trained=(),
            cuts=(0,),
            begins=self._writes_begin,
        )
        return encoded.tokens

    @cached_property
    def video_text(self) -> str | None:
        """Return what the template writes for a part {"type": "video"}; None if nothing, or if it takes no parts."""
        said = {"type": "text", "text": "\ue000"}
        own = {"type": "text", "text": self.placeholder} if self.videos_as_text else {"type": "image"}
        try:
            given = [[{"role": "user", "content": [part, said]}] for part in (own, {"type": "video"})]
            image, video = (self._template().render(each) if self.in_parts else "" for each in given)
        except TemplateError:
            return None
        before, _, after = image.partition(self.placeholder)
        written = video.removeprefix(before).removesuffix(after)
        return written if written and f"{before}{written}{after}" == video else None

    @property
    def _writes_begin(self) -> bool:
        """Return whether the template writes the begin-of-sequence token, by its name or its text."""
        names = ("bos_token", self.tokenizer.specials.get("bos_token", "bos_token"))
        return self.template is not None and any(name in self.template.source for name in names)

    @property
    def _empties_thoughts(self) -> bool:
        """Return whether the template writes empty thoughts before each answer, and none of a field (Kimi-K2.5)."""
        return self.thoughts is None and self.template is not None and EMPTY_THOUGHTS in self.template.source

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise UserError(
                "the tokenizer has no chat template, and --datasets have conversations: set --chat-template to "
                f"one of {', '.join(CHAT_TEMPLATES)}, or to a .jinja file"
            )
        return self.template

    def _messages(self, conversation: Conversation) -> tuple[list[Message], tuple[Kind, ...], list[str]]:
        """Return a conversation as messages for a template, the shape of its turns, and its texts in order."""
        messages: list[Message] = []
        shape: list[Kind] = []
        texts: list[str] = []
        for number, turn in enumerate(conversation.turns, start=1):
            said, thoughts = _apart(turn) if self.thoughts or self._empties_thoughts else (turn, None)
            if thoughts and self._empties_thoughts and number == len(conversation.turns):  # not of earlier answers
                first, *others = said.parts
                said = replace(said, parts=(f"<think>{thoughts}</think>{first}", *others))
            content: Any
            if self.system_in_parts if turn.role == "system" else self.in_parts:
                parts = self._parts(said)
                texts += [part for part in parts if isinstance(part, str)]
                content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
                shape.append((turn.speaker, tuple(part["type"] for part in content)))
            else:
                content = _joined(said, self.placeholder)
                texts.append(content)
                shape.append((turn.speaker, None))
            more = {self.thoughts: thoughts} if self.thoughts and thoughts is not None else {}
            messages.append({"role": turn.speaker, "content": content, **more})
        return messages, tuple(shape), texts

    def _parts(self, turn: Turn) -> tuple[str | Visual, ...]:
        parts = _parts(turn)
        if not self.videos_as_text:
            return parts
        return tuple(self.placeholder if isinstance(part, VideoRef) else part for part in parts)

    def _render(self, template: ChatTemplate, conversation: Conversation) -> tuple[str, TurnSpans]:
        messages, shape, texts = self._messages(conversation)
        if self._empties_thoughts and self.train_on != "last":
            earlier = [turn for turn in conversation.turns[:-1] if turn.role == "assistant"]
            if any(_apart(turn)[1] for turn in earlier):
                complaint = "the chat template writes no thoughts before earlier answers: set --train-on last"
                raise BadSample(Reason.NOT_A_RECORD, complaint)
        try:
            rendered = template.render(messages)
            thinks = self.thoughts is not None and any(message.get(self.thoughts) for message in messages)
            spans = None if thinks else self._skeleton(template, shape).spans(rendered, texts)
            if spans is None:
                spans = by_prefixes(template, messages, rendered, only_last=self.train_on == "last")
        except TemplateError as error:
            raise BadSample(Reason.NOT_A_RECORD, f"the chat template cannot render it: {error}") from error
        return rendered, spans

    def _skeleton(self, template: ChatTemplate, shape: tuple[Kind, ...]) -> Skeleton:
        found = self._skeletons.get(shape)
        if found is None:
            found = _with_opening(skeleton(template, shape), shape, self.openings)
            if len(self._skeletons) < _SHAPES:
                self._skeletons[shape] = found
        return found

    def _text(self, conversation: Conversation, prompts: Sequence[Prompt]) -> EncodedConversation:
        """Encode plain text and the end token: all tokens but images are trained, and any but images may be split."""
        parts = [part for turn in conversation.turns for part in turn.parts]
        rendered = "".join(part if isinstance(part, str) else self.placeholder for part in parts)
        if not rendered.strip():
            raise BadSample(Reason.EMPTY, "it has no text")
        whole = expand(
            rendered,
            prompts,
            placeholder=self.placeholder,
            tokenizer=self.tokenizer,
            trained=((0, len(rendered)),),
            cuts=(0,),
            divisible=True,
        )
        end = EncodedTurn(np.array([self.tokenizer.eos]), np.array([True]), 0, divisible=True)
        return EncodedConversation(whole.opening, (*whole.turns, end))


def _with_opening(found: Skeleton, shape: Sequence[Kind], openings: Sequence[tuple[str, str]]) -> Skeleton:
    system = shape[0][0] == "system"
    if system and len(openings) == 2 and found.order[:1] == (0,):
        before, after = openings[1]
        fits = found.gaps[0] == before and found.gaps[1].startswith(after)
        place = (1, len(after))
    elif not system and openings:
        fits, place = found.gaps[0].startswith(openings[0][0]), (0, len(openings[0][0]))
    else:
        return found
    return replace(found, opening=place) if fits else found


def _check_texts(conversation: Conversation, reserved: Sequence[str]) -> None:
    if len(conversation.turns) > _TURNS:
        raise BadSample(Reason.TOO_LONG, f"it has {len(conversation.turns)} turns, more than {_TURNS}: divide it")
    letters = sum(len(part) for turn in conversation.turns for part in turn.parts if isinstance(part, str))
    if letters > _LETTERS:
        raise BadSample(Reason.TOO_LONG, f"its texts have {letters} letters, more than {_LETTERS}: divide it")
    for turn in conversation.turns:
        for part in turn.parts:
            if isinstance(part, str) and (found := [word for word in reserved if word in part]):
                raise BadSample(Reason.IMAGE_COUNT, f"the text of a turn contains {found[0]}, which marks images")


def _apart(turn: Turn) -> tuple[Turn, str | None]:
    """Return an answer without the thoughts at its beginning, between <think> and </think>, and these; None: none."""
    first, *others = turn.parts or ("",)
    begun = first.lstrip() if isinstance(first, str) and turn.speaker == "assistant" else ""
    if not begun.startswith("<think>") or "</think>" not in begun:
        return turn, None
    thoughts, _, answer = begun.removeprefix("<think>").partition("</think>")
    return replace(turn, parts=(answer.lstrip("\n"), *others)), thoughts.strip("\n")


def _parts(turn: Turn) -> tuple[str | Visual, ...]:
    """Return a turn's parts without line breaks next to images: templates that accept image parts write their own."""
    parts: list[str | Visual] = []
    for number, part in enumerate(turn.parts):
        if isinstance(part, str):
            if number and not isinstance(turn.parts[number - 1], str):
                part = part.lstrip("\n")
            if number + 1 < len(turn.parts) and not isinstance(turn.parts[number + 1], str):
                part = part.rstrip("\n")
            if not part:
                continue
        parts.append(part)
    return tuple(parts) or ("",)


def _joined(turn: Turn, placeholder: str) -> str:
    """Return a turn's text with placeholders for images; a line break is added after an image unless white space
    follows.
    """
    text = ""
    for number, part in enumerate(turn.parts):
        if not isinstance(part, str):
            text += placeholder
        else:
            after = number and not isinstance(turn.parts[number - 1], str)
            text += f"\n{part}" if after and part and not part[0].isspace() else part
    return text
