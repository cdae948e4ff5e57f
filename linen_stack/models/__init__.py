"""Reference layers, one family a file, the language model around a stack, and generation with caches."""
from linen_stack.models.decoder import DecoderLayer
from linen_stack.models.deepseek import DeepseekLayer
from linen_stack.models.gemma3 import Gemma3Layer
from linen_stack.models.generate import generate, init_cache
from linen_stack.models.language_model import LanguageModel
from linen_stack.models.layers import Attention, Projection, RMSNorm, SwiGLU
from linen_stack.models.moe import MoE
from linen_stack.models.qwen3_next import Qwen3NextLayer

__all__ = ["Attention", "DecoderLayer", "DeepseekLayer", "Gemma3Layer", "LanguageModel", "MoE", "Projection",
           "Qwen3NextLayer", "RMSNorm", "SwiGLU", "generate", "init_cache"]
