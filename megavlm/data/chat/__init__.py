"""Turn conversations into tokens and loss masks: chat templates, and how long conversations are split."""

from megavlm.data.chat.encoded import EncodedConversation, EncodedTurn
from megavlm.data.chat.format import ChatFormat
from megavlm.data.chat.split import Piece, Split, split

__all__ = ["ChatFormat", "EncodedConversation", "EncodedTurn", "Piece", "Split", "split"]
