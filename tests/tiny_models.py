"""Tiny random models of many architectures, each built in a moment and each the same at every call.

`tiny_model(name)` gives a float32 model in eval mode on the CPU, with weights large enough that greedy text
wanders instead of repeating one token, and with no end of text. `TINY` are those that the engine must
reproduce token for token; `REFUSED` maps those that it must refuse to why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VOCAB_SIZE = 160
WINDOW = 8
"""The sliding window of the models that have one: shorter than the texts of the tests."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

# name: (configuration class, its arguments beside _COMMON and _SHAPE)
_CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_dynamic_rope": (
        "LlamaConfig",
        # Past 32 positions dynamic NTK scaling changes every frequency, the earlier positions' too.
        {"max_position_embeddings": 32, "rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 4.0}},
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 24,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3Config", {"rope_parameters": _ROPE, "original_max_position_embeddings": 512}),
    "phi3_longrope": (
        "Phi3Config",
        {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                **_ROPE,
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0],
                "original_max_position_embeddings": 16,
                "factor": 4.0,
            },
        },
    ),
    "phi": ("PhiConfig", {}),
    "gpt2": ("GPT2Config", {"n_positions": 512, "n_embd": 64, "n_layer": 3, "n_head": 4}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4, "do_layer_norm_before": True},
    ),
    "olmo2": ("Olmo2Config", {}),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "sliding_window": None},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _ROPE,
        },
    ),
    "cohere2": (
        "Cohere2Config",
        {
            "logit_scale": 1.0,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "stablelm": ("StableLmConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3, "logits_scaling": 0.5}),
    # What must be refused.
    "mamba": ("MambaConfig", {"state_size": 8, "num_key_value_heads": 4}),
    "rwkv": ("RwkvConfig", {"context_length": 512, "attention_hidden_size": 64}),
    "mpt": (
        "MptConfig",
        {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512, "expansion_ratio": 2},
    ),
    "bloom": ("BloomConfig", {"n_layer": 3, "n_head": 4}),
    "falcon_alibi": ("FalconConfig", {"alibi": True, "new_decoder_architecture": False, "multi_query": True}),
    "llama4": (
        "Llama4TextConfig",
        {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 100},
    ),
    "gptj": ("GPTJConfig", {"n_positions": 512, "n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}

REFUSED = {
    "mamba": "recurrent state",
    "rwkv": "recurrent state",
    "mpt": "ALiBi",
    "bloom": "ALiBi",
    "falcon_alibi": "ALiBi",
    "llama4": "attention in chunks",
    "gptj": "ignores AttentionInterface in transformers 5.17",
    "deepseek_v3": "keys and values of different head sizes",
}
TINY = tuple(name for name in _CONFIGURATIONS if name not in REFUSED)


def tiny_config(name: str) -> Any:
    class_name, own = _CONFIGURATIONS[name]
    return getattr(transformers, class_name)(**{**_COMMON, **_SHAPE, **own})


def tiny_model(name: str, *, seed: int = 3) -> PreTrainedModel:
    """The model `name`: float32, eval mode, on the CPU, its weights a function of `name` and `seed` alone."""
    config = tiny_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # transformers 5.17 lets gemma2 use SDPA, which leaves out the soft cap: eager attention is the truth.
        exact = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **exact)
        _scale(model)
    model.generation_config.pad_token_id = 0
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """One token a printable ASCII character, within `VOCAB_SIZE`: <pad> 0, <bos> 1, <eos> 2, <unk> 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, "Ġ", "Ċ", *map(chr, range(33, 127))])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def _scale(model: PreTrainedModel) -> None:
    """Draw the weights anew, wide enough that attention chooses and logits differ.

    The residual stream is to consist of what the layers add, not of the last token's embedding; vectors get
    small offsets that show whether they are used.
    """
    draw: Callable[..., torch.Tensor] = torch.nn.init.normal_
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter is model.get_output_embeddings().weight:
                draw(parameter, std=0.5)
            elif parameter is model.get_input_embeddings().weight:
                draw(parameter, std=0.2)
            elif parameter.ndim >= 2:
                draw(parameter, std=2.0 / math.sqrt(parameter.shape[-1]))
            elif name.endswith("bias") or "sinks" in name:
                draw(parameter, std=0.3)
