"""Configs: what they build, and what they refuse with which words."""
import ast
import dataclasses
import pathlib

from flax import linen as nn
import jax.numpy as jnp
import pytest

import linen_stack as ls
from linen_stack import config as config_lib
from linen_stack.config import StackConfig
from linen_stack.models import DecoderLayer
from linen_stack.models import families

SIZES = {"mlp": 24, "num_heads": 2}


class OwnLayer(nn.Module):
  """A layer that no family has."""

  width: int
  scale: float = 1.0
  names: tuple[str, ...] = ()
  dtype: object = jnp.float32

  @nn.compact
  def __call__(self, x, *, deterministic=True):
    return x + self.scale * nn.Dense(self.width, dtype=self.dtype)(x)


NOT_A_CLASS = 3


def make(**sections):
  model = {"vocab": 32, "embed": 16, "family": "decoder", "args": SIZES, "num_layers": 3}
  return {"model": {**model, **sections.pop("model", {})}, **sections}


def own(**model):
  return {"model": {"layer": f"{__name__}:OwnLayer", "args": {"width": 8}, "num_layers": 2, **model}}


@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid", "llama3-8b"])
def test_shipped_configs_build_and_survive_a_round_trip(name):
  config = StackConfig.from_yaml(name)
  plan, stack = config.build()
  assert stack.plan == plan and plan.num_layers == config.model.num_layers
  assert StackConfig.from_dict(config.to_dict()) == config
  assert families.language_model(config).vocab == config.model.vocab


def test_stack_options_are_those_of_the_stack():
  ours = {field.name: field.default for field in dataclasses.fields(config_lib.StackOptions)}
  theirs = {field.name: field.default for field in dataclasses.fields(ls.StackedDecoder)}
  assert ours == {name: default for name, default in theirs.items() if name not in ("plan", "parent", "name")}


def test_the_core_knows_no_model():
  tree = ast.parse(pathlib.Path(config_lib.__file__).read_text())
  imported = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
  assert not [module for module in imported if module and module.startswith("linen_stack.models")]


def test_one_spec():
  plan, stack = StackConfig.from_dict(make(stack={"remat": "minimal", "param_axis": 1})).build()
  assert plan == ls.Plan.homogeneous(ls.LayerSpec(DecoderLayer, embed=16, **SIZES), 3)
  assert (stack.remat, stack.param_axis) == (ls.RematPolicy("minimal"), 1)


def test_pattern_with_num_layers_is_a_cycle_and_without_one_spec_per_layer():
  specs = {"local": {"args": {"window": 4}}, "wide": {"args": {"mlp": 48}}}
  local = ls.LayerSpec(DecoderLayer, "local", embed=16, window=4, **SIZES)
  wide = ls.LayerSpec(DecoderLayer, "wide", embed=16, num_heads=2, mlp=48)
  pattern = ["local", "local", "wide"]
  cycle = StackConfig.from_dict(make(model={"specs": specs, "pattern": pattern, "num_layers": 8})).plan()
  assert cycle == ls.Plan.cycle([local, local, wide], 8)
  listed = StackConfig.from_dict(make(model={"specs": specs, "pattern": pattern, "num_layers": None})).plan()
  assert listed.layers == (local, local, wide)


def test_segments_of_named_and_inline_specs():
  segments = [{"name": "first", "block": [{"layer": f"{__name__}:OwnLayer", "args": {"width": 16}}]},
              {"name": "rest", "block": ["plain", {"args": {"window": 2}}], "repeats": 3}]
  plan = StackConfig.from_dict(make(model={"specs": {"plain": {}}, "segments": segments, "num_layers": None})).plan()
  plain = ls.LayerSpec(DecoderLayer, "plain", embed=16, **SIZES)
  windowed = ls.LayerSpec(DecoderLayer, embed=16, window=2, **SIZES)
  first = ls.Segment("first", ls.LayerSpec(OwnLayer, width=16))
  assert plan == ls.Plan.of(first, ls.Segment("rest", (plain, windowed), 3))


def test_what_the_model_says_reaches_the_layers_unless_they_say_otherwise():
  model = {"dtype": "bfloat16", "norm_eps": 1e-5}
  (said,) = set(StackConfig.from_dict(make(model=model)).plan().layers)
  assert (said.kwargs["dtype"], said.kwargs["norm_eps"]) == (jnp.dtype("bfloat16"), 1e-5)
  (overridden,) = set(StackConfig.from_dict(make(model={**model, "args": {**SIZES, "dtype": "float32"}})).plan().layers)
  assert overridden.kwargs["dtype"] == jnp.dtype("float32")
  (unsaid,) = set(StackConfig.from_dict(own()).plan().layers)
  assert dict(unsaid.kwargs) == {"width": 8}


def test_arguments_of_an_own_layer_are_checked_against_its_annotations():
  (spec,) = set(StackConfig.from_dict(own(args={"width": 8, "scale": 2, "names": ["a"]})).plan().layers)
  assert spec.kwargs["scale"] == 2.0 and isinstance(spec.kwargs["scale"], float) and spec.kwargs["names"] == ("a",)


@pytest.mark.parametrize("remat, expected", [
    ("full", ls.RematPolicy("full")),
    ({"save": ["context"], "offload": ["mlpwo"], "prevent_cse": [False, True]},
     ls.RematPolicy(save=["context"], offload=["mlpwo"], prevent_cse=(False, True))),
    ({"preset": "save_qkv_proj", "carry": "offload"}, ls.RematPolicy("save_qkv_proj", carry="offload")),
    ({"layers": {"save": ["context"]}}, {"layers": ls.RematPolicy(save=["context"])}),
])
def test_remat_forms(remat, expected):
  assert StackConfig.from_dict(make(stack={"remat": remat})).build()[1].remat == expected


def test_offload_params_may_name_a_function():
  _, stack = StackConfig.from_dict(make(stack={"offload_params": "operator:contains"})).build()
  assert callable(stack.offload_params)


def test_override_sets_any_key_in_yaml():
  config = StackConfig.from_dict(make())
  changed = config.override(["stack.remat={save: [context]}", "train.learning_rate=1e-3", "model.args.window=4",
                             "model.num_layers=5", "stack.scan=false"])
  assert changed.stack.remat == {"save": ["context"]} and changed.train.learning_rate == 1e-3
  assert changed.model.args == {**SIZES, "window": 4} and changed.model.num_layers == 5 and changed.stack.scan is False
  assert config == StackConfig.from_dict(make())  # the original is as it was


def test_override_reaches_into_lists():
  segments = [{"name": "a", "block": [{}], "repeats": 2}]
  config = StackConfig.from_dict(make(model={"segments": segments, "num_layers": None}))
  assert config.override(["model.segments.0.repeats=7"]).plan().num_layers == 7


@pytest.mark.parametrize("config, error, words", [
    (make(stack={"remta": "full"}), ValueError, ["'stack.remta'", "did you mean 'remat'"]),
    (make(trian={}), ValueError, ["'trian'", "did you mean 'train'"]),
    ({}, ValueError, ["'model' is missing"]),
    (3, TypeError, ["a config must be a mapping"]),
    (make(stack=None), TypeError, ["stack must be a mapping"]),
    (make(stack={"scan": 1}), TypeError, ["stack.scan must be true or false, not 1"]),
    (make(stack={"param_axis": True}), TypeError, ["stack.param_axis must be an int, not True"]),
    (make(stack={"shared_rngs": "dropout"}), TypeError, ["stack.shared_rngs must be a list"]),
    (make(stack={"remat": "minimall"}), ValueError, ["stack.remat", "did you mean 'minimal'"]),
    (make(stack={"remat": None}), TypeError, ["stack.remat", "preset's name"]),
    (make(stack={"remat": {"sav": ["a"]}}), ValueError, ["sav", "did you mean 'save'"]),
    (make(stack={"remat": {"save": ["a"], "offlod": ["b"]}}), ValueError, ["'offlod'", "did you mean 'offload'"]),
    (make(stack={"remat": {"save": ["a"], "offload": ["a"]}}), ValueError,
     ["stack.remat", "both saved and offloaded: a"]),
    (make(stack={"remat": {"layers": {"evry": 2}}}), ValueError, ["layers", "'evry'", "did you mean 'every'"]),
    (make(train={"steps": 0}), ValueError, ["train.steps must be at least 1"]),
    (make(train={"steps": 2.5}), TypeError, ["train.steps must be an int, not 2.5"]),
    (make(train={"learning_rate": "fast"}), TypeError, ["train.learning_rate must be a number"]),
    (make(train={"learning_rate": float("nan")}), ValueError, ["train.learning_rate must be a finite number above 0"]),
    (make(train={"warmup": 1}), ValueError, ["train.warmup must be at least 0 and below 1"]),
    (make(train={"checkpoint_every": "often"}), TypeError, ["train.checkpoint_every must be an int or null"]),
    (make(model={"num_layers": 0}), ValueError, ["model.num_layers must be at least 1"]),
    (make(model={"num_layers": None}), ValueError, ["model.num_layers is missing"]),
    (make(model={"dtype": "bfloat"}), ValueError, ["model.dtype", "did you mean 'bfloat16'"]),
    (make(model={"specs": {"a": {}}}), ValueError, ["model.specs", "nothing uses them"]),
    (make(model={"pattern": [], "specs": {}}), ValueError, ["model.pattern is empty"]),
    (make(model={"pattern": ["a"], "specs": {"a": {}, "b": {}}}), ValueError, ["model.specs.b"]),
    (make(model={"pattern": ["a"], "specs": {"a": {}}, "segments": [{"name": "x", "block": ["a"]}]}), ValueError,
     ["exclude each other"]),
    (make(model={"segments": [{"name": "x", "block": [{}]}]}), ValueError, ["model.num_layers: the segments say"]),
    (make(model={"segments": [{"name": "x", "block": [{}], "repats": 2}], "num_layers": None}), ValueError,
     ["'model.segments.0.repats'", "did you mean 'repeats'"]),
    (make(model={"pattern": ["lcal"], "specs": {"local": {}}, "num_layers": 2}), ValueError,
     ["model.pattern.0", "no spec 'lcal'", "did you mean 'local'"]),
    (make(model={"segments": [{"name": "x", "block": [{}, "b"]}], "num_layers": None}), ValueError,
     ["model.segments.0.block.1", "no spec 'b'"]),
    (make(model={"segments": [{"name": "x", "block": [{"args": 3}]}], "num_layers": None}), TypeError,
     ["model.segments.0.block.0.args must be a mapping"]),
    (make(model={"segments": [{"name": "x", "block": [{"family": "decoder"}]}], "num_layers": None}), ValueError,
     ["model.family", "no layer takes this"]),
])
def test_refused_when_read(config, error, words):
  with pytest.raises(error) as raised:
    StackConfig.from_dict(config)
  assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize("config, error, words", [
    (make(model={"args": {**SIZES, "mpl": 3}}), ValueError, ["model.args.mpl", "did you mean 'mlp'"]),
    (make(model={"args": {"mlp": 24}}), ValueError, ["model.args.num_heads is missing"]),
    (make(model={"args": {**SIZES, "mlp": "wide"}}), TypeError, ["model.args.mlp must be an int, not 'wide'"]),
    (make(model={"args": {**SIZES, "window": "w"}}), TypeError, ["model.args.window must be an int or null, not 'w'"]),
    (make(model={"args": {**SIZES, "num_heads": 3}}), ValueError, ["model.args", "not a multiple of num_heads 3"]),
    (make(model={"args": {**SIZES, "dtype": "float31"}}), ValueError, ["model.args.dtype", "did you mean 'float32'"]),
    (make(model={"family": "decodr"}), ValueError, ["model.family", "did you mean 'decoder'"]),
    (make(model={"family": None}), ValueError, ["family and layer", "neither"]),
    (make(model={"layer": "a:B"}), ValueError, ["family and layer", "both"]),
    (make(model={"segments": [{"name": "x", "block": [{}], "repeats": 0}], "num_layers": None}), ValueError,
     ["model", "segment 'x'", "length must be at least 1"]),
    (make(stack={"remat": {"layer": "full"}}), ValueError, ["stack.remat.layer", "did you mean 'layers'"]),
    (make(stack={"unroll": 0}), ValueError, ["stack", "unroll must be at least 1"]),
    (make(stack={"offload_params": "operator:contain"}), ValueError,
     ["stack.offload_params", "did you mean 'contains'"]),
    (own(layer="nowhere_at_all:OwnLayer"), ValueError, ["model.layer", "no module 'nowhere_at_all'", "sys.path"]),
    (own(layer="linen_stack.modls:X"), ValueError, ["no module 'linen_stack.modls'", "did you mean 'models'"]),
    (own(layer="linen_stack.plan.part:X"), ValueError, ["linen_stack.plan is a module, not a package"]),
    (own(layer=f"{__name__}:OwnLayr"), ValueError, ["has no 'OwnLayr'", "did you mean 'OwnLayer'"]),
    (own(layer="OwnLayer"), ValueError, ["write package.module:Name"]),
    (own(layer=f"{__name__}:NOT_A_CLASS"), TypeError, ["is no layer class"]),
])
def test_refused_when_built(config, error, words):
  with pytest.raises(error) as raised:
    StackConfig.from_dict(config).build()
  assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize("assignment, words", [
    ("stack.remat", ["write KEY=VALUE"]),
    ("=3", ["write KEY=VALUE"]),
    ("stack.remta=full", ["'stack.remta'"]),
    ("train.batch.x=1", ["train.batch is 16, which has no keys"]),
    ("train.batch=[", ["train.batch is not valid YAML"]),
    ("model.family.0=x", ["model.family is 'decoder', which has no keys"]),
])
def test_refused_overrides(assignment, words):
  with pytest.raises((ValueError, TypeError)) as raised:
    StackConfig.from_dict(make()).override([assignment])
  assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize("text, words", [
    ("model: {vocab: 3, vocab: 4}", ["'vocab' is given twice", "line 1"]),
    ("model: [", ["not valid YAML"]),
    ("1: 2", ["a key must be a string"]),
    ("", ["a config must be a mapping"]),
])
def test_refused_files(tmp_path, text, words):
  path = tmp_path / "c.yml"
  path.write_text(text)
  with pytest.raises((ValueError, TypeError)) as raised:
    StackConfig.from_yaml(path)
  assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize("text", [
    "root:secret:19000::\nsys:secret:19000::\n", "a:secret::\na:secret::\n", "secret", "- secret", "secret word " * 9,
    "model: {args: secret secret secret secret secret secret}", "model: {specs: {a: [secret]}}"])
def test_files_that_are_no_configs_are_not_repeated(tmp_path, text):
  (tmp_path / "c.yml").write_text(text)
  with pytest.raises((TypeError, ValueError), match="must be a mapping|unknown key|is given twice") as raised:
    StackConfig.from_yaml(tmp_path / "c.yml")
  assert "secret" not in str(raised.value)


def test_a_config_that_does_not_exist_names_the_nearest():
  with pytest.raises(FileNotFoundError, match="did you mean 'tiny'"):
    StackConfig.from_yaml("tinny")


def test_a_language_model_needs_sizes():
  with pytest.raises(ValueError, match="'model.vocab' is missing"):
    families.language_model(StackConfig.from_dict(own()))
