"""Tiny random models of each family that memories are attached to."""

from pathlib import Path
from typing import Any

import torch

from logpast.data import train_bpe

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = SIZES | {"head_dim": 8, "sliding_window": 7, "pad_token_id": 0}
FAMILIES = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY,
                      "bos_token_id": 1, "eos_token_id": 2}),
    "llama": ("Llama", SIZES | {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", SIZES),
    "mistral": ("Mistral", SIZES | {"sliding_window": 32}),
    "gemma2": ("Gemma2", GEMMA | {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
}  # fmt: skip


def tiny(family: str = "llama") -> Any:
    """A random model with weights large enough for its predictions to differ between contexts."""
    import transformers

    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(**settings)
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return made.eval()


def save_tiny(folder: Path, texts: list[str]) -> Path:
    """A tiny Llama and a tokenizer of its own, as a folder that `transformers` loads."""
    import transformers

    train_bpe(texts, 300).save(folder)
    _, settings = FAMILIES["llama"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        **settings | {"vocab_size": 320, "bos_token_id": tokenizer.bos_token_id, "max_position_embeddings": 512}
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
