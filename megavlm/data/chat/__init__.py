"""Turn conversations into tokens and loss masks with chat templates, and split conversations that are too long."""

from megavlm.data.chat.expand import EncodedConversation, EncodedTurn, Piece, Split, split
from megavlm.data.chat.format import ChatFormat

__all__ = ["ChatFormat", "EncodedConversation", "EncodedTurn", "Piece", "Split", "split"]
