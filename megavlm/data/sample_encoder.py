"""Encode a record: tokens, a mask of trained tokens, and the layouts of its images, later their patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megavlm.arch.image_tokens import TileGroup
from megavlm.arch.objectives import objective_of
from megavlm.config.derived import has_vision
from megavlm.config.schema import Config
from megavlm.data.chat import ChatFormat, Piece, split
from megavlm.data.costs import CostModel
from megavlm.data.preprocessors import model_type, processor_for, tokenizer_for, tokenizer_path
from megavlm.data.types import (
    NEGATIVE,
    POSITIVE,
    QUERY,
    Conversation,
    EncodedSample,
    Member,
    Sample,
    Turn,
    Visual,
)
from megavlm.data.visuals import Visuals, stored
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Layout, Prompt
from megavlm.inputs.processor import Processor
from megavlm.inputs.video import Budget
from megavlm.rules.defaults import resolve

_ROLES = {"query": QUERY, "positive": POSITIVE, "negative": NEGATIVE}


class Encoder:
    """Encodes conversations and texts for a model: chat template, tokenizer and image processor."""

    def __init__(self, config: Config) -> None:
        """Load the tokenizer, the chat template and the image processor.

        Raises UserError if one of them is missing or does not fit the model.
        """
        self.processor: Processor = processor_for(config)
        self.tokenizer = tokenizer_for(config, image_text=self.processor.image_token)
        objective = objective_of(config.model)
        self.embeds, self.compares, self.rates = objective.embeds, objective.compares, objective.rates
        self.scores = objective.scores
        self.config = config = resolve(config, vocab_size=self.tokenizer.vocab_size)
        self.chat = ChatFormat.of(
            self.tokenizer,
            template=config.data.chat_template,
            placeholder=self.processor.placeholder,
            train_on="last" if self.compares else config.data.train_on,
            enable_thinking=config.data.enable_thinking,
            model_type=model_type(tokenizer_path(config)),
            reserved=tuple(each.text for each in (self.processor.video, self.processor.sounds) if each is not None),
            videos_as_text=self.processor.video is not None and self.processor.video.as_text,
        )
        self.vocab_size = config.model.language.vocab_size
        self.image_token = self.tokenizer.image
        takes_images, model = has_vision(config.model), config.model
        read = (self.image_token, *filter(None, [model.video_token, model.audio_token]))
        self.feature_tokens = read if takes_images else ()
        self.pad_token = self.tokenizer.pad
        self.max_pixels = config.data.max_image_pixels
        budget, with_sound = _budget(self.processor, config), config.data.video_sound
        self.visuals = Visuals(self.processor, self.max_pixels, budget, takes_images, with_sound)
        self._costs = CostModel.of(config.model)

    def encoded(self, record: Conversation, *, source: int) -> tuple[tuple[EncodedSample, ...], str]:
        """Return the samples of a record, and a description of the parts that were dropped because they are too long.

        The description is "" if nothing was dropped. Raises BadSample if no part of the record can be used.
        """
        if 0 in record.answers and not self.rates:
            raise BadSample(Reason.NOT_A_RECORD, "it has one rated answer, which --objective kto reads")
        layouts = [layout for text in record.texts() for layout in self.visuals.layouts(text.images)]
        if self.embeds:
            sample, dropped = self._encoded_pairs(record, layouts, source=source)
            return (sample,), f"{dropped} of its negatives" if dropped else ""
        if self.compares:
            return (self._encoded_answers(record, layouts, source=source),), ""
        if record.answers:
            raise BadSample(Reason.NOT_A_RECORD, "it has two answers, which --objective dpo compares")
        encoded = self.chat.encode(record, [layout.prompt for layout in layouts])
        fitted = split(encoded, self.config.train.seq_length)
        samples = tuple(self._encoded(piece, layouts, source=source) for piece in fitted.pieces)
        return samples, f"{fitted.dropped} of its turns" if fitted.dropped else ""

    def _encoded_pairs(
        self, record: Conversation, layouts: Sequence[Layout], *, source: int
    ) -> tuple[EncodedSample, int]:
        """Return the texts of a record of pairs as one sample, and the number of negatives that do not fit a sequence.

        Each text follows its instruction and ends with the end token. Raises BadSample if the query and the positives
        together are longer than a sequence.
        """
        if not record.identities:
            raise BadSample(Reason.NOT_A_RECORD, "it has no query and positives, which --objective compares")
        texts: list[NDArray[np.int64]] = []
        members: list[Member] = []
        image, length = 0, self.config.train.seq_length
        room = length
        for turn, identity in zip(record.turns, record.identities, strict=True):
            own = layouts[image : image + len(turn.images)]
            text = self._text_tokens(turn, own)
            if len(text) > room:
                if turn.role == "negative":
                    break
                raise BadSample(
                    Reason.TOO_LONG, f"its query and positives do not fit --seq-length {length} together: raise it"
                )
            room -= len(text)
            image += len(own)
            texts.append(text)
            members.append(_member(_ROLES[turn.role], identity, len(text), own))
        tokens = np.concatenate(texts)
        piece = Piece(tokens, np.zeros(len(tokens), dtype=np.bool_), range(image))
        return self._of_members(piece, layouts, members, source=source), len(record.turns) - len(members)

    def _encoded_answers(self, record: Conversation, layouts: Sequence[Layout], *, source: int) -> EncodedSample:
        """Return the conversations of a preference as one sample; only the last answer of each is trained.

        Raises BadSample if the conversations together do not fit a sequence.
        """
        if not record.answers:
            raise BadSample(Reason.NOT_A_RECORD, "it has no chosen and rejected answer, which --objective compares")
        roles = [role for role, turns in zip((POSITIVE, NEGATIVE), record.answers, strict=True) if turns]
        if self.scores and len(roles) == 1:
            roles = [QUERY]  # it is no part of a pair
        members, encoded, image = [], [], 0
        for one, identity, role in zip(record.conversations(), record.identities, roles, strict=True):
            own = layouts[image : image + len(one.images)]
            image += len(own)
            encoded.append(self.chat.encode(one, [layout.prompt for layout in own]))
            member = _member(role, identity, len(encoded[-1].tokens), own)
            members.append(replace(member, margin=record.margin) if role == POSITIVE else member)
        tokens, trained = (np.concatenate([getattr(each, name) for each in encoded]) for name in ("tokens", "trained"))
        if len(tokens) > (length := self.config.train.seq_length):
            raise BadSample(
                Reason.TOO_LONG, f"its answers with their prompts do not fit --seq-length {length} together: raise it"
            )
        return self._of_members(Piece(tokens, trained, range(image)), layouts, members, source=source)

    def _of_members(
        self, piece: Piece, layouts: Sequence[Layout], members: Sequence[Member], *, source: int
    ) -> EncodedSample:
        """Return a sample of several texts (`members`), which do not attend to one another."""
        whole = self._encoded(piece, layouts, source=source)
        language = sum(self._costs.cost(length=each.length, grids=(), images=0).language for each in members)
        return replace(whole, members=tuple(members), cost=replace(whole.cost, language=language))

    def _text_tokens(self, text: Turn, layouts: Sequence[Layout]) -> NDArray[np.int64]:
        """Return the tokens [L] of a query or document: its instruction, the text and the end token, or those of a
        chat that an answer would follow.

        Raises BadSample for a text without content.
        """
        options = self.config.model.objective
        prefix = options.query_prefix if text.role == "query" else options.document_prefix
        prompts = [layout.prompt for layout in layouts]
        if options.pooling == "chat":
            instruction = (Turn("system", (prefix,)),) if prefix else ()
            return self.chat.prompt(Conversation((*instruction, Turn("user", text.parts))), prompts)
        parts = (prefix, *text.parts) if prefix else text.parts
        return self.chat.encode(Conversation((Turn("text", parts),)), prompts).tokens

    def prompt(self, conversation: Conversation) -> Sample:
        """Encode a conversation that ends with a question as a prompt, with its images. Raises BadSample."""
        layouts = self.visuals.layouts(conversation.images)
        tokens = self.chat.prompt(conversation, [layout.prompt for layout in layouts])
        return self._loaded(tokens, conversation.images, layouts)

    def prompt_tokens(self, conversation: Conversation) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens of a conversation that ends with a question, unexpanded and expanded.

        In the unexpanded form, each image or video is what the chat template writes for it, and each sound is one token
        between its marks; servers expand them. The expanded form is the model's input. Raises BadSample.
        """
        layouts, single = self.visuals.layouts(conversation.images), list[Prompt]()
        for prompt, layout in ((each.prompt, each) for each in layouts):
            written = self.chat.placeholder if layout.tiles else self.tokenizer.image_text.join(prompt.texts)
            if layout.film is not None and self.chat.video_text is not None:
                prompt, written = replace(prompt, number=None), self.chat.video_text
            texts = tuple(written.split(self.tokenizer.image_text))
            single.append(replace(prompt, texts=texts, runs=(1,) * (len(texts) - 1), each=()))
        expanded = [layout.prompt for layout in layouts]
        return self.chat.prompt(conversation, single), self.chat.prompt(conversation, expanded)

    def embedded(self, text: Turn) -> Sample:
        """Encode a query or a document, depending on the turn's role, as a sample to embed. Raises BadSample."""
        layouts = self.visuals.layouts(text.images)
        tokens = self._text_tokens(text, layouts)
        sample = self._loaded(tokens, text.images, layouts)
        return replace(sample, members=(_member(QUERY, 0, len(tokens), layouts),))

    def _loaded(self, tokens: NDArray[np.int64], images: Sequence[Visual], layouts: Sequence[Layout]) -> Sample:
        """Return a sample without trained tokens, with the patches of all its images. Raises BadSample."""
        wanted = [stored(*each) for each in enumerate(layouts)]
        return Sample(
            tokens=tokens,
            trained=np.zeros(len(tokens), dtype=np.bool_),
            images=tuple(self.visuals.load(images, each) for each in wanted if each.grids),
            tile_groups=self._tile_groups(layouts),
            sounds=tuple(self.visuals.sound(images, each) for each in wanted if each.frames),
        )

    @property
    def answer_ends(self) -> tuple[int, ...]:
        """Return the tokens that end an answer: the tokenizer's end token and the chat template's end-of-turn token."""
        mark = self.chat.end_of_turn.strip()
        ids = self.tokenizer.encode(mark).ids.tolist() if mark else []
        return tuple(sorted({self.tokenizer.eos, *(ids if len(ids) == 1 else [])}))

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated tokens, without special tokens."""
        return self.tokenizer.decode(token_ids, special=False).strip()

    def _encoded(self, piece: Piece, layouts: Sequence[Layout], *, source: int) -> EncodedSample:
        shown = [(number, layouts[number]) for number in piece.images]
        images = tuple(stored(number, layout) for number, layout in shown)
        return EncodedSample(
            tokens=piece.tokens,
            trained=piece.trained,
            images=images,
            tile_groups=self._tile_groups([layout for _, layout in shown]),
            source=source,
            cost=self._costs.cost(
                length=len(piece),
                grids=[grid for image in images for grid in image.grids],
                images=sum(bool(image.grids) for image in images),
                sounds=[image.frames for image in images if image.frames],
            ),
        )

    def _tile_groups(self, layouts: Sequence[Layout]) -> tuple[TileGroup, ...]:
        """Return the tile group of each image for a model that tiles images (AnyRes), else ()."""
        if not self.processor.anyres:
            return ()
        return tuple(group for layout in layouts for group in layout.tile_groups)


def _member(role: int, identity: int, length: int, layouts: Sequence[Layout]) -> Member:
    """Return the member that a text with images, videos and sounds of these layouts is."""
    images, sounds = sum(bool(each.tiles) for each in layouts), sum(bool(each.frames) for each in layouts)
    return Member(role, identity, length, images, sounds)


def _budget(processor: Processor, config: Config) -> Budget:
    """Return the budget of each video: frame rate, frames and tokens from the options, else the model's defaults."""
    usual, data = Budget() if processor.video is None else processor.video.usual, config.data
    return replace(
        usual,
        fps=data.video_fps or usual.fps,
        max_frames=data.video_max_frames or usual.max_frames,
        max_tokens=data.video_max_tokens or config.train.seq_length // 2,
    )
