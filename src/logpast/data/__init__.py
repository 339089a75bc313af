"""Text in, token stores out. What a model is shown of them is in `logpast.data.windows`, with torch."""

from logpast.data.preparation import open_tokens, prepare
from logpast.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from logpast.data.tokens import Counts, Documents, TokenizerInfo, TokenStore, is_store

__all__ = [
    "Counts",
    "Documents",
    "TokenStore",
    "Tokenizer",
    "TokenizerInfo",
    "is_store",
    "load_tokenizer",
    "open_tokens",
    "prepare",
    "train_bpe",
]
