"""The presets of remat policies: names, and what each costs. `RematPolicy.register` adds to the table."""
from __future__ import annotations

import dataclasses

# Separate, fused, low-rank (MLA) and expert spellings of one projection: a layer has the ones that it has.
_QUERY_KEY_VALUE = ("query_proj", "key_proj", "value_proj", "qkv_proj", "kv_proj",
                    "mla_q", "mla_kv", "query_wa_proj", "kv_wa_proj")
# Products of experts are sorted by expert, so that they can be read only with the choice that sorted them (moe_routing).
_MLP_IN = ("mlpwi", "mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1", "moe_routing")
_MLP_OUT = ("mlpwo", "moe_mlpwo", "moe_routing")
_PROJECTIONS = (*_QUERY_KEY_VALUE, "out_proj", *_MLP_IN, *_MLP_OUT)


@dataclasses.dataclass(frozen=True)
class Preset:
  """Names of a preset and a line that says what it costs and when to take it. A layer needs only some of the names."""

  note: str
  save: tuple[str, ...] = ()
  offload: tuple[str, ...] = ()
  remat: bool = True


PRESETS: dict[str, Preset] = {
    "none": Preset(
        "No remat: every intermediate value stays on device. Fastest; for models that fit with room to spare.",
        remat=False),
    "full": Preset(
        "Saves only each layer's input and runs the layer again backward: least memory, a third more FLOPs."),
    "minimal": Preset(
        "Saves every projection, recomputes attention and elementwise work: few extra FLOPs, much memory.",
        _PROJECTIONS),
    "minimal_with_context": Preset(
        "`minimal`, and the attention kernel's output, so that the kernel does not run again.",
        (*_PROJECTIONS, "context")),
    "minimal_with_quantization": Preset(
        "`minimal`, and quantised operands and scales; under scan each of them is a buffer per layer.",
        (*_PROJECTIONS, "quantization")),
    "minimal_with_context_and_quantization": Preset(
        "`minimal_with_context` and `minimal_with_quantization` in one.",
        (*_PROJECTIONS, "context", "quantization")),
    "save_dot_with_context_except_mlp": Preset(
        "Saves the attention block's projections and context; recomputes the MLP: for long sequences.",
        (*_QUERY_KEY_VALUE, "out_proj", "context")),
    "save_dot_except_mlpwi": Preset(
        "Saves all projections but the wide MLP ones: most of `minimal` at a third of the size.",
        (*_QUERY_KEY_VALUE, "out_proj", *_MLP_OUT)),
    "save_dot_except_mlp": Preset(
        "Saves the attention block's projections; recomputes the MLP and the attention kernel.",
        (*_QUERY_KEY_VALUE, "out_proj")),
    "save_qkv_proj": Preset("Saves query, key and value: the smallest step up from `full`.", _QUERY_KEY_VALUE),
    "save_out_proj": Preset(
        "Saves the attention block's result: the MLP's backward pass need not rerun attention.",
        ("out_proj",)),
    "qkv_proj_offloaded": Preset(
        "`save_qkv_proj` in host memory: device memory of `full`, traffic over the host link.",
        offload=_QUERY_KEY_VALUE),
    "minimal_offloaded": Preset(
        "`minimal` in host memory: FLOPs of `minimal`, where the host link keeps up.",
        offload=_PROJECTIONS),
}
