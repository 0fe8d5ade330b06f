"""Turn conversations into tokens and loss masks: chat templates, and how long conversations are split."""

from megavlm.data.chat.expand import EncodedConversation, EncodedTurn, Piece, Split, split
from megavlm.data.chat.format import ChatFormat

__all__ = ["ChatFormat", "EncodedConversation", "EncodedTurn", "Piece", "Split", "split"]
