"""Reference models: a decoder layer, the language model around a stack, and generation with caches."""
from linen_stack.models.decoder import DecoderLayer
from linen_stack.models.generate import generate, init_cache
from linen_stack.models.language_model import LanguageModel
from linen_stack.models.layers import Attention, Projection, RMSNorm, SwiGLU

__all__ = ["Attention", "DecoderLayer", "LanguageModel", "Projection", "RMSNorm", "SwiGLU", "generate", "init_cache"]
