"""From text to token stores. Batches are made in `logpast.data.batching`, the only module here that needs torch."""

from logpast.data.prepare import open_tokens
from logpast.data.store import Counts, Documents, TokenizerInfo, TokenStore, is_store
from logpast.data.tokenizers import Tokenizer, load_tokenizer, train_bpe

__all__ = [
    "Counts",
    "Documents",
    "TokenStore",
    "Tokenizer",
    "TokenizerInfo",
    "is_store",
    "load_tokenizer",
    "open_tokens",
    "train_bpe",
]
