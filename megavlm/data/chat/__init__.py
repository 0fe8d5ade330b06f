"""From conversations to trained tokens: chat templates, what is trained on, and where long ones are cut."""

from megavlm.data.chat.encoded import EncodedConversation, EncodedTurn
from megavlm.data.chat.format import ChatFormat
from megavlm.data.chat.split import Piece, Split, split

__all__ = ["ChatFormat", "EncodedConversation", "EncodedTurn", "Piece", "Split", "split"]
