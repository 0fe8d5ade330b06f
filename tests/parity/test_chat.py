"""Chats in tokens: ours, and the template rendered by Transformers, its images written out, and tokenised whole."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megavlm.data.chat import ChatFormat, EncodedConversation, split
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megavlm.data.types import Conversation, ImageRef, Turn
from megavlm.errors import UserError
from megavlm.families import CHAT_TEMPLATES
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Prompt
from tests.support.hostile import reason_of
from tests.support.processors import CASES as WHOLE
from tests.support.processors import ours_of
from tests.support.tokenizers import TEMPLATES, byte_level, tokenizers_in


@dataclass(frozen=True)
class Case:
    template: str
    tokenizer: str  # the name of one of `folders`
    prompt: Prompt
    placeholder: str = "<image>"
    stop: str = "<|im_end|>"
    opening: str = ""  # of a conversation without a system turn
    in_parts: bool = True


IMAGE = Prompt("<image>", ("", ""), (5,))
HELPFUL = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
CURIOUS = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. "
)
HELPFUL_EYES = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
# What a template writes at the end of an answer, and before a conversation without a system turn.
OF_PROCESSORS = {
    "llava": ("", "<s>"),
    "onevision": ("<|im_end|>", ""),
    "internvl": ("<|im_end|>", ""),
    "qwen2.5-vl": ("<|im_end|>", HELPFUL),
    "qwen3-vl": ("<|im_end|>", ""),
    "exaone4.5": ("<|endofturn|>", ""),
    "aya": ("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),
    "smolvlm": ("<end_of_utterance>", "<|im_start|>"),
    "glm4v": ("", "[gMASK]<sop>"),
    "deepseek-vl": ("<｜end▁of▁sentence｜>", f"<｜begin▁of▁sentence｜>{HELPFUL_EYES}\n\n"),
    "paddleocr-vl": ("</s>", "<|begin_of_sentence|>"),
    "video-llama-3": ("<|im_end|>", ""),
    "kimi": ("<|im_end|>", ""),
    "mistral3": ("</s>", "<s>[SYSTEM_PROMPT]You see.[/SYSTEM_PROMPT]"),
}


def of_processor(name: str, stop: str, opening: str) -> Case:
    """Return a case of a family with what its processor writes for a picture, of several tiles where it makes any."""
    whole, processor = WHOLE[name], ours_of(name)
    prompt = processor.layout(60, 80).prompt
    return Case(whole.template, whole.tokenizer, prompt, processor.placeholder, stop=stop, opening=opening)


CASES = {
    **{name: of_processor(name, *marks) for name, marks in OF_PROCESSORS.items()},
    "qwen2": Case(TEMPLATES["qwen2"], "qwen", IMAGE, opening=HELPFUL, in_parts=False),
    "llama3": Case(
        TEMPLATES["llama3"], "llama3", IMAGE, stop="<|eot_id|>", opening="<|begin_of_text|>", in_parts=False
    ),
    "mistral": Case(TEMPLATES["mistral"], "llama", IMAGE, stop="</s>", opening="<s>", in_parts=False),
    "vicuna": Case(TEMPLATES["vicuna"], "llama", IMAGE, stop="</s>", opening="<s>" + CURIOUS, in_parts=False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tokenizers_in(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def chat(case: Case, folders: dict[str, Path]) -> ChatFormat:
    return format_of(case, folders)


def format_of(case: Case, folders: dict[str, Path], **options: Any) -> ChatFormat:
    tokenizer = HuggingFaceTokenizer.of(folders[case.tokenizer], image_text=case.prompt.token)
    tokenizer.chat_template = case.template
    return ChatFormat.of(tokenizer, placeholder=case.placeholder, **options)


transformers_tokenizer = lru_cache(AutoTokenizer.from_pretrained)


def reference(case: Case, folder: Path, conversation: Conversation) -> list[int]:
    """As Transformers' processors do it: render, write images out, add the begin mark where none is written."""
    tokenizer = transformers_tokenizer(folder)
    messages = []
    for turn in conversation.turns:
        if case.in_parts:
            parts = [
                {"type": "image"} if isinstance(part, ImageRef) else {"type": "text", "text": part.strip("\n")}
                for part in turn.parts
            ]
            messages.append({"role": turn.role, "content": parts})
        else:
            text = "".join(case.placeholder if isinstance(part, ImageRef) else part for part in turn.parts)
            messages.append({"role": turn.role, "content": text})
    text = tokenizer.apply_chat_template(messages, chat_template=case.template, tokenize=False)
    text = text.replace(case.placeholder, str(case.prompt))
    begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer(text, add_special_tokens=not begins)["input_ids"]
    return ids


def talk(*turns: tuple[str, Any]) -> Conversation:
    image = ImageRef(b"")
    made = []
    for role, said in turns:
        parts = [said] if isinstance(said, str) else [image if part is None else part for part in said]
        made.append(Turn(role, tuple(parts)))  # type: ignore[arg-type]
    return Conversation(tuple(made))


LONG = talk(
    ("system", "You see."),
    ("user", [None, "\nWhat is in the picture?"]),
    ("assistant", "A cat and  a dog."),
    ("user", ["Which of ", None, "\nand ", None, "\nis the largest?"]),
    ("assistant", "It is blue.\n\nYes, 3 + 4 = 7 é 猫"),
    ("user", "How many?"),
    ("assistant", "7"),
)


def encode(chat: ChatFormat, case: Case, conversation: Conversation) -> EncodedConversation:
    return chat.encode(conversation, [case.prompt] * len(conversation.images))


def trained_texts(chat: ChatFormat, encoded: EncodedConversation) -> list[str]:
    """What is trained, each stretch as text."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], encoded.trained, [0]))))
    return [chat.tokenizer.decode(encoded.tokens[start:end]) for start, end in edges.reshape(-1, 2)]


def test_the_tokens_are_those_of_transformers(case: Case, chat: ChatFormat, folders: dict[str, Path]) -> None:
    assert chat.in_parts == case.in_parts
    encoded = encode(chat, case, LONG)
    assert encoded.tokens.tolist() == reference(case, folders[case.tokenizer], LONG)
    image = chat.tokenizer.image
    assert (encoded.tokens == image).sum() == 3 * sum(case.prompt.runs)
    assert not encoded.trained[encoded.tokens == image].any()


@pytest.mark.parametrize("name", ["llava", "vicuna"])
def test_the_begin_mark_in_a_turn_does_not_replace_the_one_at_the_beginning(
    name: str, folders: dict[str, Path]
) -> None:
    """LLaVA's template leaves it to the tokenizer, Vicuna's writes it; `<s>` is also a tag of HTML."""
    case = CASES[name]
    chat, said = format_of(case, folders), talk(("user", "What is <s>?"), ("assistant", "A tag."))
    encoded = encode(chat, case, said)
    assert encoded.tokens.tolist() == reference(case, folders[case.tokenizer], said)
    text = chat.encode(Conversation((Turn("text", ("A tag, <s>, is what?",)),)), [])
    assert [(each.tokens == chat.tokenizer.begin).sum() for each in (encoded, text)] == [2, 2]


def test_answers_and_their_end_marks_are_trained(case: Case, chat: ChatFormat) -> None:
    answers = [str(turn.parts[0]) for turn in LONG.turns if turn.role == "assistant"]
    found = trained_texts(chat, encode(chat, case, LONG))
    assert [text.lstrip() for text in found] == [answer + case.stop for answer in answers]
    assert chat.end_of_turn.strip() == case.stop


def test_a_turn_without_words_is_not_trained(case: Case, chat: ChatFormat) -> None:
    encoded = encode(chat, case, talk(("user", "a?"), ("assistant", ""), ("user", "b?"), ("assistant", "Yes.")))
    assert [text.lstrip() for text in trained_texts(chat, encoded)] == ["Yes." + case.stop]


def test_an_answer_that_is_not_trained_is_written_alike(case: Case, chat: ChatFormat) -> None:
    said = [("user", "a?"), ("assistant", "No."), ("user", "b?"), ("assistant", "Yes.")]
    encoded = encode(chat, case, talk(said[0], ("untrained", "No."), *said[2:]))
    assert encoded.tokens.tolist() == encode(chat, case, talk(*said)).tokens.tolist()
    assert [text.lstrip() for text in trained_texts(chat, encoded)] == ["Yes." + case.stop]


@pytest.mark.parametrize("name", CASES)
def test_other_choices_of_what_is_trained(name: str, folders: dict[str, Path]) -> None:
    case = CASES[name]
    last = format_of(case, folders, train_on="last")
    assert [text.lstrip() for text in trained_texts(last, encode(last, case, LONG))] == ["7" + case.stop]
    everything = format_of(case, folders, train_on="all")
    encoded = encode(everything, case, LONG)
    apart = len(set(everything.tokenizer.encode("".join(case.prompt.texts)).ids.tolist()))
    untrained = encoded.tokens[~encoded.trained]
    assert (untrained == everything.tokenizer.image).sum() == 3 * sum(case.prompt.runs)
    assert len(set(untrained.tolist())) <= 1 + 1 + apart + 4  # images, what surrounds them, the begin mark
    assert "What is in the picture?" in everything.tokenizer.decode(encoded.tokens[encoded.trained])


def test_a_conversation_falls_apart_at_the_ends_of_its_answers(case: Case, chat: ChatFormat) -> None:
    bare = talk(*((turn.role, list(turn.parts)) for turn in talk(("user", "How many?"), ("assistant", "7")).turns * 3))
    encoded = encode(chat, case, bare)
    decode = chat.tokenizer.decode
    assert decode(encoded.opening.tokens).replace(" ", "") == case.opening.replace(" ", "")
    assert len(encoded.turns) == 3
    again = {decode(turn.tokens).strip() for turn in encoded.turns}
    assert len(again) == 1
    assert "How many?" in again.pop()


def test_a_piece_is_what_its_exchanges_alone_would_be(case: Case, chat: ChatFormat) -> None:
    """Without images; the system turn is said again where the template keeps it apart."""
    exchanges = [("user", "What is it?"), ("assistant", "A dog."), ("user", "How many?"), ("assistant", "3 + 4")] * 2
    whole = encode(chat, case, talk(*exchanges))
    opening = len(whole.opening)
    pieces = split(whole, opening + (len(whole) - opening) * 2 // 3).pieces
    assert len(pieces) > 1
    alone = [encode(chat, case, talk(*exchanges[start : start + 2])) for start in range(0, 8, 2)]
    at = 0
    for piece in pieces:
        tokens = alone[at].opening.tokens.tolist()
        while at < 4 and len(tokens) < len(piece):
            tokens += alone[at].turns[0].tokens.tolist()
            at += 1
        texts = [chat.tokenizer.decode(ids).replace("  ", " ").strip() for ids in (piece.tokens, tokens)]
        assert texts[0] == texts[1]  # but for a space between exchanges, which belongs to the next word


SAID = st.text(st.sampled_from("abc .,\n é猫:"), max_size=12).filter(str.strip)


@settings(max_examples=8, deadline=None)
@given(turns=st.lists(st.tuples(SAID, SAID, st.booleans()), min_size=1, max_size=4))
def test_whatever_is_said(turns: list[tuple[str, str, bool]], folders: dict[str, Path]) -> None:
    for case in CASES.values():
        chat = FORMATS.setdefault(case.template, format_of(case, folders))
        said = [
            turn
            for question, answer, image in turns
            for turn in (
                ("user", [None, "\n" + question.strip()] if image else question.strip()),
                ("assistant", answer),
            )
        ]
        if case.in_parts:  # where Transformers gets no line breaks at the ends, for an image may be there
            said = [(role, said.strip("\n") if isinstance(said, str) else said) for role, said in said]
        conversation = talk(*said)
        encoded = encode(chat, case, conversation)
        assert encoded.tokens.tolist() == reference(case, folders[case.tokenizer], conversation)
        assert len(trained_texts(chat, encoded)) == len(turns)


FORMATS: dict[str, ChatFormat] = {}


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_built_in_formats(name: str, folders: dict[str, Path]) -> None:
    folders_of = {
        "chatml": "qwen",
        "glm4v": "glm",
        "exaone4_5": "exaone",
        "smolvlm": "smol",
        "mistral_v7": "mistral",
        "deepseek_vl": "deepseek",
        "paddleocr_vl": "ernie",
        "kimi_vl": "kimi",
    }
    folder = folders_of.get(name, name if name in folders else "llama")
    image_text = "<|media_pad|>" if name.startswith("kimi") else "<image>"
    tokenizer = HuggingFaceTokenizer.of(folders[folder], image_text=image_text)
    chat = ChatFormat.of(tokenizer, template=name)
    assert chat.end_of_turn
    said = ("user", [None, "\nWhat is it?"]), ("assistant", "A cat."), ("user", "So?"), ("assistant", "No.")
    conversation = talk(*said)
    encoded = chat.encode(conversation, [IMAGE])
    answers = trained_texts(chat, encoded)
    assert [text.strip() for text in answers] == ["A cat." + chat.end_of_turn.strip(), "No." + chat.end_of_turn.strip()]
    assert (encoded.tokens == tokenizer.image).sum() == 5
    text = tokenizer.decode(encoded.tokens)
    theirs = {"gemma": "gemma3"}.get(name, name)
    if theirs in ("vicuna", "smolvlm", "gemma3", "gemma4", "kimi"):
        tokenizer.chat_template = TEMPLATES[theirs]
        assert text == tokenizer.decode(ChatFormat.of(tokenizer).encode(conversation, [IMAGE]).tokens)


def test_a_built_in_format_needs_its_tokens(folders: dict[str, Path]) -> None:
    tokenizer = HuggingFaceTokenizer.of(folders["llama"])
    with pytest.raises(UserError, match=r"--chat-template chatml needs the tokens <\|im_start\|> <\|im_end\|>"):
        ChatFormat.of(tokenizer, template="chatml")
    with pytest.raises(UserError, match="--chat-template vicunia is unknown"):
        ChatFormat.of(tokenizer, template="vicunia")


def test_reasoning_that_a_template_rewrites(folders: dict[str, Path]) -> None:
    """The last answer is trained with its thoughts; with thoughts in earlier answers, only --train-on last can be."""
    case = Case(TEMPLATES["qwen3_thinking"], "qwen", IMAGE, in_parts=False)
    chat = format_of(case, folders)
    one = talk(("user", "3 + 4?"), ("assistant", "<think>\nIt is blue.\n</think>\n\n7"))
    assert trained_texts(chat, encode(chat, case, one)) == ["<think>\nIt is blue.\n</think>\n\n7<|im_end|>"]
    plain = talk(("user", "3 + 4?"), ("assistant", "7"), ("user", "So?"), ("assistant", "Yes."))
    assert trained_texts(chat, encode(chat, case, plain)) == ["7<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"]
    quick = format_of(case, folders, enable_thinking=False)
    assert trained_texts(quick, encode(quick, case, plain)) == ["7<|im_end|>", "Yes.<|im_end|>"]
    assert quick.tokenizer.decode(quick.prompt(talk(("user", "So?")), [])).endswith("<think>\n\n</think>\n\n")
    two = Conversation(one.turns * 2)
    with pytest.raises(BadSample, match="chat template"):
        encode(chat, case, two)
    last = format_of(case, folders, train_on="last")
    assert len(trained_texts(last, encode(last, case, two))) == 1


KIMI = Case(TEMPLATES["kimi"], "kimi", Prompt("<|media_pad|>", ("", ""), (5,)), "<|media_pad|>")
ASKS = "<|im_assistant|>assistant<|im_middle|><think>"


@pytest.mark.parametrize(("enable_thinking", "trained"), [(None, "</think>Yes.<|im_end|>"), (False, "Yes.<|im_end|>")])
def test_empty_thoughts_of_kimi_are_part_of_the_prompt(enable_thinking, trained, folders):
    """Its published template asks for thoughts, unless its variable `thinking` is false."""
    asks = "'<|im_middle|><think>' + ('</think>' if thinking is defined and thinking is false else '')"
    template = TEMPLATES["kimi"].replace("<|im_middle|><think></think>'", f"' + {asks}")
    case = replace(KIMI, template=template)
    chat = format_of(case, folders, enable_thinking=enable_thinking)
    assert trained_texts(chat, encode(chat, case, talk(("user", "So?"), ("assistant", "Yes.")))) == [trained]
    assert [chat.tokenizer.decode([end]) for end in chat.thought_ends] == ["</think>"]


def test_thoughts_take_the_place_of_the_empty_ones_of_kimi(folders: dict[str, Path]) -> None:
    template = TEMPLATES["kimi"].replace("<|im_assistant|>assistant<|im_middle|><think></think>'", f"{ASKS}'")
    chat, last = (format_of(replace(KIMI, template=template), folders, train_on=on) for on in ("assistant", "last"))
    asked, answered = talk(("user", "So?")), talk(("assistant", "<think>\nIt is blue.\n</think>\n\nYes."))
    encoded = encode(chat, KIMI, Conversation(asked.turns + answered.turns))
    assert trained_texts(chat, encoded) == ["It is blue.</think>Yes.<|im_end|>"]
    text = chat.tokenizer.decode(encoded.tokens)
    assert text == chat.tokenizer.decode(chat.prompt(asked, [])) + "It is blue.</think>Yes.<|im_end|>"
    twice = Conversation((asked.turns + answered.turns) * 2)
    told = last.tokenizer.decode(encode(last, KIMI, twice).tokens)
    assert told == text.replace("<think>It is blue.", "<think>") + text  # as answers of the past are in `chat`
    with pytest.raises(BadSample, match="set --train-on last"):
        encode(chat, KIMI, twice)


def test_thoughts_that_a_template_takes_apart_from_the_answer(folders: dict[str, Path]) -> None:
    """The template of Qwen3.8 has a field for thoughts, and renders those of all answers."""
    case = Case(TEMPLATES["qwen3_8"], "qwen", IMAGE, in_parts=False)
    chat = format_of(case, folders)
    said = talk(("user", "3 + 4?"), ("assistant", "<think>\nIt is blue.\n</think>\n\n7"), ("user", "So?"))
    encoded = encode(chat, case, Conversation((*said.turns, Turn("assistant", ("Yes.",)))))
    ends = ["It is blue.\n</think>\n\n7<|im_end|>", "\n</think>\n\nYes.<|im_end|>"]
    assert trained_texts(chat, encoded) == ends
    asked = chat.tokenizer.decode(chat.prompt(said, []))
    assert asked.count("<think>") == 2
    assert chat.tokenizer.decode(encoded.tokens).startswith(asked)
    (end,) = chat.thought_ends
    assert chat.tokenizer.decode([end]) == "</think>"
    assert format_of(CASES["qwen2"], folders).thought_ends == ()


def test_answers_of_muse_begin_with_their_recipient(folders: dict[str, Path]) -> None:
    """Its published template leaves the recipient to the model."""
    prompt = Prompt("<|patch|>", ("<|image_start|>", "<|image_end|>"), (5,))
    case = Case(TEMPLATES["muse"], "muse", prompt, "<|patch|>")
    chat = format_of(case, folders)
    encoded = encode(chat, case, LONG)
    assert encoded.tokens.tolist() == reference(case, folders["muse"], LONG)
    assert trained_texts(chat, encoded)[-1] == " to=user<|message|>7<|eot|>"


GEMMA4 = Case(TEMPLATES["gemma4"], "gemma4", Prompt("<|image|>", ("", ""), (5,)), "<|image|>")


@pytest.mark.parametrize(("enable_thinking", "thoughts"), [(None, "<|channel>thought\n<channel|>"), (True, "")])
def test_answers_follow_the_prompt_of_gemma4(enable_thinking, thoughts, folders):
    """Its published template writes empty thoughts there, and none before answers: a server asks with the former."""
    asks = "'<|turn>model\\n' + ('' if enable_thinking else '<|channel>thought\\n<channel|>')"
    case = replace(GEMMA4, template=GEMMA4.template.replace("{{ '<|turn>model\\n' }}", f"{{{{ {asks} }}}}"))
    chat = format_of(case, folders, enable_thinking=enable_thinking)
    said = talk(("user", "So?"), ("assistant", "Yes."), ("user", "Why?"), ("assistant", "No."))
    encoded = encode(chat, case, said)
    text = chat.tokenizer.decode(encoded.tokens)
    turn = "<|turn>user\n{}<turn|>\n<|turn>model\n" + thoughts + "{}<turn|>\n"
    assert text == "<bos>" + turn.format("So?", "Yes.") + turn.format("Why?", "No.")
    assert trained_texts(chat, encoded) == ["Yes.<turn|>", "No.<turn|>"]
    assert text.startswith(chat.tokenizer.decode(chat.prompt(Conversation(said.turns[:3]), [])) + "No.")
    assert [chat.tokenizer.decode([end]) for end in chat.thought_ends] == ["<channel|>"]


def test_a_system_turn_that_a_template_takes_as_a_text(folders: dict[str, Path]) -> None:
    chat = format_of(GEMMA4, folders)
    encoded = encode(chat, GEMMA4, talk(("system", "You see."), ("user", [None, "How many?"]), ("assistant", "7")))
    assert chat.in_parts
    assert chat.tokenizer.decode(encoded.opening.tokens) == "<bos><|turn>system\nYou see.<turn|>\n"
    assert trained_texts(chat, encoded) == ["7<turn|>"]


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        (talk(("user", "Who?")), Reason.EMPTY),
        (talk(("user", "Who?"), ("assistant", " ")), Reason.EMPTY),
        (talk(("user", "Who wrote <image>?"), ("assistant", "Me.")), Reason.IMAGE_COUNT),
        (talk(("assistant", "Hm."), ("user", "a"), ("assistant", "b")), Reason.NOT_A_RECORD),
        (talk(("user", "a"), ("text", "b")), Reason.NOT_A_RECORD),
        (talk(("text", " \n")), Reason.EMPTY),
    ],
)
def test_conversations_that_cannot_be_written(conversation, reason, folders):
    assert reason_of(format_of(CASES["mistral"], folders).encode, conversation, []) == reason


def test_plain_text_is_trained_whole(folders: dict[str, Path]) -> None:
    chat = format_of(CASES["llava"], folders)
    encoded = chat.encode(talk(("text", "A cat and a dog.")), [])
    assert chat.tokenizer.decode(encoded.tokens) == "<s> A cat and a dog.</s>"
    assert encoded.trained.tolist() == [False] + [True] * (len(encoded) - 1)
    pictured = chat.encode(talk(("text", ["A cat ", None, " and a dog ", None])), [IMAGE, IMAGE])
    assert [turn.images for turn in pictured.turns] == [0, 1, 0, 1, 0]
    assert (pictured.tokens == chat.tokenizer.image).sum() == 10
    assert trained_texts(chat, pictured)[-1] == "</s>"


def test_without_a_template_only_text_can_be_encoded(folders: dict[str, Path]) -> None:
    chat = ChatFormat.of(HuggingFaceTokenizer.of(folders["llama"]))
    assert len(chat.encode(talk(("text", "A cat.")), []))
    with pytest.raises(UserError, match="--chat-template"):
        chat.encode(talk(("user", "a"), ("assistant", "b")), [])
    assert ChatFormat.of(HuggingFaceTokenizer.of(folders["llama"]), model_type="llava").template is not None


@pytest.mark.parametrize(
    "template", ["{{ messages[0]", "{{ 'nothing' }}", "{% for m in messages %}{{ m.content.upper(1) }}{% endfor %}"]
)
def test_templates_that_cannot_be_used(template: str, folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(template)
    with pytest.raises(UserError, match=r"mine\.jinja cannot be trained on") as caught:
        ChatFormat.of(HuggingFaceTokenizer.of(folders["llama"]), template=str(file))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        ChatFormat.of(HuggingFaceTokenizer.of(folders["llama"]), template=str(tmp_path / "none.jinja"))


def test_a_format_travels_to_other_processes(case: Case, chat: ChatFormat) -> None:
    moved = pickle.loads(pickle.dumps(chat))
    assert encode(moved, case, LONG).tokens.tolist() == encode(chat, case, LONG).tokens.tolist()


def test_the_image_token_is_the_models(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its number may be a token's that is no special one, or one beyond the tokenizer's."""
    tokenizer = byte_level(("<s>", "</s>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no <image>.*--image-token"):
        HuggingFaceTokenizer.of(tmp_path)
    size = tokenizer.get_vocab_size()
    beyond = HuggingFaceTokenizer.of(tmp_path, image=size + 9)
    assert beyond.vocab_size == size + 10
    assert beyond.encode("a<image>b").ids.tolist() == [*beyond.encode("a").ids, size + 9, *beyond.encode("b").ids]
    assert beyond.decode([size + 9]) == "<image>"
    assert HuggingFaceTokenizer.of(tmp_path, image=tokenizer.token_to_id("~")).image_text == "~"
    with pytest.raises(UserError, match="--image-token"):
        HuggingFaceTokenizer.of(folders["llama"], image=9999)
