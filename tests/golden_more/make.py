"""Makes the checkpoints of this folder: small random models, with logits and tokens of the reference implementation.

Needs torch and transformers 5, which nothing else here does: python make.py FOLDER
"""
import pathlib
import sys

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM, DeepseekV3Config, Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig,
    LlamaConfig, MistralConfig,
    Qwen2Config, Qwen3Config, Qwen3NextConfig)

SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=12, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512)
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def make(name, config, cls=None, seq=20, prompt=8, new=12, scale=1.5, padding=(), **options):
  """Writes the folder `name`: weights wide enough that logits and tokens depend on every one of them.

  scale: the wider, the more rounding errors grow from layer to layer.
  padding: slices of each row that are padding, for a second run whose logits are written beside the first one's.
  """
  torch.manual_seed(len(name))
  config._attn_implementation = "eager"
  model = (cls(config) if cls else AutoModelForCausalLM.from_config(config)).eval().float()
  with torch.no_grad():
    for key, weight in model.named_parameters():
      if weight.ndim == 1:
        weight.add_(torch.randn_like(weight) * 0.1)
      else:
        weight.copy_(torch.randn_like(weight) * (0.5 if "embed" in key else scale / weight.shape[-1] ** 0.5))
    for key, buffer in model.named_buffers():
      if "score_correction" in key:
        buffer.copy_(torch.randn_like(buffer) * 0.2)
    folder = pathlib.Path(sys.argv[1]) / name
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(3, SIZES["vocab_size"], (2, seq))
    logits = model(input_ids=ids).logits
    tokens = ids[:1, :prompt]
    for _ in range(new):  # without a cache
      tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
    padded = np.zeros((2, seq), bool)
    for row, part in enumerate(padding):
      padded[row, part] = True
    with_padding = {"padding": padded, "padded_logits": model(
        input_ids=ids, attention_mask=torch.from_numpy(~padded).long()).logits.numpy()} if padding else {}
  np.savez_compressed(folder / "expected.npz", input_ids=ids, logits=logits.numpy(), greedy_prompt=ids[:1, :prompt],
                      greedy_tokens=tokens, **with_padding)


# Biases, tied embeddings, heads that are not embed / num_heads wide, the rotary scaling of Llama 3.
make("llama_biases", LlamaConfig(
    **{**SIZES, "num_hidden_layers": 2}, head_dim=10, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
    rms_norm_eps=1e-5, rope_parameters=dict(rope_type="llama3", rope_theta=5000.0, factor=8.0, low_freq_factor=1.0,
                                            high_freq_factor=4.0, original_max_position_embeddings=32)))
# One layer, as many key heads as query heads, YaRN, several files.
make("llama_shards", LlamaConfig(
    **{**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 4},
    rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=128)),
     max_shard_size="3KB")
make("mistral", MistralConfig(**{**SIZES, "num_hidden_layers": 2}, sliding_window=6, head_dim=8))
make("qwen2", Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1,
                          tie_word_embeddings=True))
make("qwen3_windows", Qwen3Config(
    **{**SIZES, "num_hidden_layers": 5}, head_dim=8, use_sliding_window=True, sliding_window=5, attention_bias=True,
    layer_types=[LOCAL, GLOBAL] * 2 + [LOCAL]))
# A cycle of four that starts after one layer and ends in its middle; global layers with a rotary scaling.
make("gemma3_scaled", Gemma3TextConfig(
    **{**SIZES, "num_hidden_layers": 11}, head_dim=6, sliding_window=6, query_pre_attn_scalar=20, attention_bias=True,
    layer_types=[GLOBAL] + ([LOCAL] * 3 + [GLOBAL]) * 2 + [LOCAL] * 2, final_logit_softcapping=10.0,
    tie_word_embeddings=False, rope_parameters={GLOBAL: dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                                                LOCAL: dict(rope_type="default", rope_theta=1e4)}))
# The text model inside one for text and images.
make("gemma3_images", Gemma3Config(
    text_config=dict(**{**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 1}, head_dim=8, sliding_window=5,
                     layer_types=[LOCAL, GLOBAL]),
    vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8,
                       patch_size=4, vision_use_head=False),
    mm_tokens_per_image=4, image_token_index=31, boi_token_index=30, eoi_token_index=29),
     Gemma3ForConditionalGeneration)
EXPERTS = {**SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 8, "qk_rope_head_dim": 4}
# Experts from the first layer on, queries that are not of low rank, planes of halves, weights that are not normalised.
make("deepseek_direct", DeepseekV3Config(
    **EXPERTS, q_lora_rank=None, kv_lora_rank=12, qk_nope_head_dim=6, v_head_dim=4, first_k_dense_replace=0,
    n_routed_experts=5, num_experts_per_tok=3, n_group=1, topk_group=1, n_shared_experts=2, norm_topk_prob=False,
    routed_scaling_factor=0.8, rope_interleave=False, rms_norm_eps=1e-2, tie_word_embeddings=True))
# Two dense layers, groups of two, YaRN, which sharpens the softmax here, and latents that a long prompt expands.
make("deepseek_yarn", DeepseekV3Config(
    **{**EXPERTS, "num_hidden_layers": 4}, q_lora_rank=9, kv_lora_rank=16, qk_nope_head_dim=3, v_head_dim=2,
    first_k_dense_replace=2, n_routed_experts=6, num_experts_per_tok=2, n_group=3, topk_group=2,
    rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, beta_fast=8,
                         beta_slow=1, mscale=0.7, mscale_all_dim=1.3)))
# A cycle of four that starts after one layer, which is dense, and ends in its middle; three value heads to a key head,
# half of a head rotated, weights of experts that do not add up to 1; longer than the chunks of the delta rule.
LINEAR, FULL = "linear_attention", "full_attention"
make("qwen3_next_middle", Qwen3NextConfig(
    **{**SIZES, "num_hidden_layers": 11, "num_key_value_heads": 1}, head_dim=12, attention_bias=True,
    layer_types=[LINEAR, FULL] + [LINEAR, LINEAR, LINEAR, FULL] * 2 + [LINEAR], mlp_only_layers=[0], num_experts=5,
    num_experts_per_tok=3, norm_topk_prob=False, moe_intermediate_size=4, shared_expert_intermediate_size=6,
    linear_conv_kernel_dim=3, linear_key_head_dim=6, linear_value_head_dim=4, linear_num_key_heads=2,
    linear_num_value_heads=6, tie_word_embeddings=True, rms_norm_eps=1e-2,
    rope_parameters=dict(rope_type="default", rope_theta=5e4, partial_rotary_factor=0.5)),
     seq=70, scale=1.0, padding=(slice(0, 9), slice(66, 70)))
