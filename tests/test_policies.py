"""`RematPolicy`: presets, equality, one line, joins, what is refused, and what stacks check before they run."""
import collections
import dataclasses
import functools
import itertools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest

import linen_stack as ls
from linen_stack.policies import CARRY_NAME, CARRY_TAG, PRESETS
from tests.tagged import TaggedLayer, abstract, plan, spec

P = ls.RematPolicy
jax_policies = jax.checkpoint_policies


def named(value):
  """A test id without the addresses of functions, which differ between workers."""
  return value.__name__ if callable(value) and hasattr(value, "__name__") else str(value).split(" at 0x")[0]


# Presets --------------------------------------------------------------------------------------------------------------

NAMES = ("none", "full", "minimal", "minimal_with_context", "minimal_with_quantization",
         "minimal_with_context_and_quantization", "save_dot_with_context_except_mlp", "save_dot_except_mlpwi",
         "save_dot_except_mlp", "save_qkv_proj", "save_out_proj", "qkv_proj_offloaded", "minimal_offloaded")
ATTENTION = ("query_proj", "key_proj", "value_proj", "qkv_proj", "kv_proj", "mla_q", "mla_kv", "query_wa_proj",
             "kv_wa_proj")
MLP_IN = ("mlpwi", "mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1", "moe_routing")
MLP_OUT = ("mlpwo", "moe_mlpwo", "moe_routing")
MINIMAL = tuple(sorted({*ATTENTION, "out_proj", *MLP_IN, *MLP_OUT}))


@pytest.fixture
def own_presets():
  """Takes presets that a test registers out of the table again."""
  before = dict(PRESETS)
  yield
  PRESETS.clear()
  PRESETS.update(before)


def test_names_of_presets():
  assert P.presets() == NAMES == tuple(PRESETS)


@pytest.mark.parametrize("name", NAMES)
def test_each_preset_has_a_note_of_one_line(name):
  note = PRESETS[name].note
  assert len(note) > 20 and note.endswith(".") and "\n" not in note and "|" not in note


@pytest.mark.parametrize("name, save, offload", [
    ("none", (), ()),
    ("full", (), ()),
    ("minimal", MINIMAL, ()),
    ("minimal_with_context", (*MINIMAL, "context"), ()),
    ("minimal_with_quantization", (*MINIMAL, "quantization"), ()),
    ("minimal_with_context_and_quantization", (*MINIMAL, "context", "quantization"), ()),
    ("save_dot_with_context_except_mlp", (*ATTENTION, "out_proj", "context"), ()),
    ("save_dot_except_mlpwi", (*ATTENTION, "out_proj", *MLP_OUT), ()),
    ("save_dot_except_mlp", (*ATTENTION, "out_proj"), ()),
    ("save_qkv_proj", ATTENTION, ()),
    ("save_out_proj", ("out_proj",), ()),
    ("qkv_proj_offloaded", (), ATTENTION),
    ("minimal_offloaded", (), MINIMAL),
])
def test_names_in_presets(name, save, offload):
  policy = P(name)
  assert (policy.save, policy.offload) == (tuple(sorted({*save})), tuple(sorted({*offload})))
  assert policy.optional == {*save, *offload} and policy.offloads == bool(offload) and policy.remat == (name != "none")


@pytest.mark.parametrize("tag", MINIMAL)
def test_a_preset_needs_one_of_its_alternatives(tag):
  for name in ("minimal", "minimal_offloaded"):
    P(name).check({tag, "other"})
    with pytest.raises(ValueError, match=f"preset {name}: none of its names .*; tags there: other"):
      P(name).check({"other"})


def test_none_is_no_remat_and_full_is_remat_that_saves_nothing():
  assert not P("none").remat and P("full").remat and P("none") != P("full") == P()
  assert P("none").resolve() is jax_policies.everything_saveable
  assert P("full").resolve() is jax_policies.nothing_saveable


def test_register(own_presets):
  P.register("mine", save=["b", "a"], offload=(name for name in "c"), note="Costs little.")
  assert P("mine") == P(save=["a", "b"], offload=["c"]) and P.presets()[-1] == "mine"
  assert str(P("mine")) == "mine" and PRESETS["mine"].note == "Costs little."
  P("mine").check({"c"})
  with pytest.raises(ValueError, match="none of its names"):
    P("mine").check({"d"})
  ls.StackedDecoder(plan("flat"), remat="mine")


def test_a_registered_preset_may_offload_the_carry(own_presets):
  P.register("carried", offload=[CARRY_NAME, "context"])
  P.register("carry alone", offload=[CARRY_NAME])
  assert P("carried") == P(offload=["context"], carry="offload")
  assert P("carry alone") == P(carry="offload") and str(P("carry alone")) == "carry alone, carry offload"
  P("carry alone").check(set())  # the stack tags the carry itself
  with pytest.raises(ValueError, match="none of its names"):
    P("carried").check({"out_proj"})


@pytest.mark.parametrize("args, kwargs, error, message", [
    (("minimal",), {}, ValueError, "a preset 'minimal' exists already"),
    (("",), {}, TypeError, "name must be a non-empty string"),
    ((3,), {}, TypeError, "name must be a non-empty string, not 3"),
    (("mine",), {"save": "query_proj"}, TypeError, r"not the string 'query_proj'; write save=\['query_proj'\]"),
    (("mine",), {"save": ["a"], "offload": ["a"]}, ValueError, "both saved and offloaded: a"),
    (("mine",), {"save": [1]}, TypeError, "save must hold names"),
])
def test_register_refuses(own_presets, args, kwargs, error, message):
  with pytest.raises(error, match=message):
    P.register(*args, **kwargs)
  assert P.presets() == NAMES


# One meaning, one value -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a, b", [
    (P("full"), P()),
    (P(save=["a", "b"]), P(save=("b", "a", "b"))),
    (P(save={"a"}), P(save=iter(["a"]))),
    (P("save_out_proj"), P(save=["out_proj"])),
    (P("minimal"), P(save=MINIMAL)),
    (P("minimal_with_context"), P("minimal", save=["context"])),
    (P(offload=[CARRY_NAME]), P(carry="offload")),
    (P(offload=[CARRY_NAME, "a"]), P(offload=["a"], carry="offload")),
    (P(levels=[4, 2]), P(levels=(4, 2))),
    (P(prevent_cse=(True, True)), P(prevent_cse=True)),
    (P(prevent_cse=(False, False)), P(prevent_cse=False)),
    (P(base=jax_policies.nothing_saveable), P("full")),
    (P.of(jax_policies.dots_saveable), P(base=jax_policies.dots_saveable)),
    (P("none"), P(remat=False)),
    (P("minimal", offload=MINIMAL), P("minimal_offloaded")),
    (P("minimal_offloaded", save=MINIMAL), P("minimal")),
], ids=named)
def test_equal_when_it_means_the_same(a, b):
  assert a == b and hash(a) == hash(b) and a.resolve() is b.resolve()


DIFFERENT = [
    P("none"), P("full"), P("minimal"), P(save=["a"]), P(save=["b"]), P(offload=["a"]), P(save=["a"], offload=["b"]),
    P(carry="offload"), P(every=2), P(levels=(2, 2)), P(levels=(2, 4)), P(prevent_cse=True), P(prevent_cse=False),
    P(prevent_cse=(True, False)), P(prevent_cse=(False, True)), P(base=jax_policies.dots_saveable),
    P(offload=["a"], offload_dst="unpinned_host")]


def test_different_when_it_does_not():
  assert len(set(DIFFERENT)) == len(DIFFERENT) == len({str(policy) for policy in DIFFERENT})


def test_policies_are_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    P("minimal").save = ()


@pytest.mark.parametrize("policy, line", [
    *((P(name), name) for name in NAMES),
    (P(), "full"),
    (P(save=["b", "a"]), "save a b"),
    (P(offload=["a"]), "offload a"),
    (P(save=["b"], offload=["a"]), "save b, offload a"),
    (P("minimal", save=["attention_out"]), "minimal, save attention_out"),
    (P("minimal", offload=["query_proj", "context"]), "minimal, offload context query_proj"),
    (P(carry="offload"), "full, carry offload"),
    (P("minimal", carry="offload"), "minimal, carry offload"),
    (P(levels=(4, 2)), "full, levels 4x2"),
    (P("save_out_proj", every=4), "save_out_proj, every 4"),
    (P(prevent_cse=False), "full, prevent_cse False"),
    (P(prevent_cse=(False, True)), "full, prevent_cse (False, True)"),
    (P(save=["a"], base=jax_policies.dots_saveable), "save a, base dots_saveable"),
    (P(base=functools.partial(jax_policies.dots_saveable)), "base dots_saveable"),
    (P(base=lambda *_, **__: False), "base <lambda>"),
    (P.of(jax_policies.dots_saveable) | jax_policies.everything_saveable,
     "base dots_saveable | everything_saveable"),
    (P(offload=["a"], offload_dst="unpinned_host"), "offload a, to unpinned_host"),
    (P("save_out_proj") | P(offload=["context"], every=2), "save out_proj, offload context, every 2"),
    (P(save=["a"], offload=["b"], carry="offload", every=3, prevent_cse=True, base=jax_policies.dots_saveable,
       offload_dst="unpinned_host"),
     "save a, offload b, base dots_saveable, carry offload, every 3, prevent_cse True, to unpinned_host"),
])
def test_one_readable_line(policy, line):
  assert str(policy) == line


@pytest.mark.parametrize("base, name", [
    (jax_policies.save_any_names_but_these("a"), "saveany"),  # a function in some versions, a class in others
    (jax_policies.offload_dot_with_no_batch_dims("device", "pinned_host"), "offloaddotwithnobatchdims"),
    (type("Own", (), {"__call__": lambda *_, **__: False})(), "own"),
])
def test_line_of_a_jax_policy_that_has_no_name(base, name):
  line = str(P(save=["a"], base=base))
  assert line.startswith("save a, base ") and name in line.lower().replace("_", "")
  assert "\n" not in line and "0x" not in line and "<locals>" not in line


def test_what_is_said_beside_a_preset_replaces_what_the_preset_says():
  policy = P("minimal", offload=["query_proj", "context"])
  assert policy.offload == ("context", "query_proj") and "query_proj" not in policy.save and "key_proj" in policy.save
  assert P("qkv_proj_offloaded", save=["key_proj"]).save == ("key_proj",)
  assert policy.optional == {*MINIMAL} - {"query_proj"}
  with pytest.raises(ValueError, match="names 'context', which is not tagged"):
    policy.check({"query_proj", "key_proj"})
  with pytest.raises(ValueError, match="names 'query_proj', which is not tagged"):
    policy.check({"context", "key_proj"})
  policy.check({"context", "query_proj"})  # which is one of the preset's names


@pytest.mark.parametrize("policy", [P("minimal", every=4), P("minimal", levels=(2, 2)), P("none"),
                                    P(offload=["a"], offload_dst="unpinned_host", levels=(2, 2)),
                                    P(carry="offload", offload_dst="unpinned_host", levels=(2, 2))], ids=named)
def test_policies_of_inner_regions(policy):
  assert (policy.alone.levels, policy.alone.every) == (None, 1) and policy.alone.names == policy.names
  assert policy.alone.optional == policy.optional and policy.alone.alternatives == policy.alternatives
  within = policy.within
  assert (within.levels, within.every, within.carry) == (None, 1, "save")
  assert within == P("none") if policy.every > 1 else within.names == policy.names


# Joins ----------------------------------------------------------------------------------------------------------------

SAID = {"save": P(save=["a"]), "offload": P(offload=["a"]), "recompute": P(save=["other"])}


def what_happens_to_a(policy):
  return "save" if "a" in policy.save else "offload" if "a" in policy.offload else "recompute"


@pytest.mark.parametrize("overlap", ["error", "save", "offload"])
@pytest.mark.parametrize("one, two", itertools.product(SAID, SAID))
def test_precedence_of_names(one, two, overlap):
  join = lambda: SAID[one].join(SAID[two], overlap=overlap)
  if {one, two} == {"save", "offload"}:
    if overlap == "error":
      with pytest.raises(ValueError, match=r"both saved and offloaded: a, by .*overlap='save'"):
        join()
      with pytest.raises(ValueError, match="both saved and offloaded: a"):
        SAID[one] | SAID[two]  # pylint: disable=pointless-statement
      return
    expected = overlap
  else:  # over recomputation each of the two wins
    expected = next((said for said in (one, two) if said != "recompute"), "recompute")
  assert what_happens_to_a(join()) == expected


@pytest.mark.parametrize("one, two", itertools.permutations([P(save=[CARRY_NAME]), P(carry="offload")]))
def test_precedence_of_the_carry(one, two):
  with pytest.raises(ValueError, match=f"both saved and offloaded: {CARRY_NAME}"):
    one | two  # pylint: disable=pointless-statement
  assert one.join(two, overlap="save") == P(save=[CARRY_NAME])
  assert one.join(two, overlap="offload") == P(carry="offload")
  assert P() | P(carry="offload") == P(carry="offload") == P(carry="offload") | P("full")


def test_overlap_settles_all_names():
  saved, offloaded = P("minimal_with_context"), P("minimal_offloaded", carry="offload")
  assert saved.join(offloaded, overlap="save") == P("minimal_with_context", carry="offload")
  assert saved.join(offloaded, overlap="offload") == P(save=["context"], offload=MINIMAL, carry="offload")
  assert saved.join(P("minimal_offloaded", offload_dst="unpinned_host"), overlap="save") == saved


@pytest.mark.parametrize("a, b, joined", [
    (P(save=["a"]), P(save=["b"]), P(save=["a", "b"])),
    (P(save=["a"]), P(offload=["b"]), P(save=["a"], offload=["b"])),
    (P("save_out_proj"), "save_qkv_proj", P("save_dot_except_mlp")),
    (P("full"), "minimal", P("minimal")),
    (P(every=2), P(save=["a"]), P(save=["a"], every=2)),
    (P(levels=(2, 2)), P(levels=(2, 2), carry="offload"), P(levels=(2, 2), carry="offload")),
    (P(prevent_cse=False), P(save=["a"]), P(save=["a"], prevent_cse=False)),
    (P(offload=["a"], offload_dst="unpinned_host"), P(save=["b"]),
     P(save=["b"], offload=["a"], offload_dst="unpinned_host")),
    (P(save=["a"]), jax_policies.dots_saveable, P(save=["a"], base=jax_policies.dots_saveable)),
    (P.of(jax_policies.dots_saveable), jax_policies.dots_saveable, P(base=jax_policies.dots_saveable)),
    (P.of(jax_policies.dots_saveable), jax_policies.nothing_saveable, P(base=jax_policies.dots_saveable)),
    (P("none"), "minimal", P("none")),
    (P("none"), "full", P("none")),
    (P("none"), "none", P("none")),
    (P("none"), jax_policies.dots_saveable, P("none")),
], ids=named)
def test_joins(a, b, joined):
  assert a | b == joined == P.of(b) | a
  assert hash(a | b) == hash(P.of(b) | a)


@pytest.mark.parametrize("a, b, message", [
    (P(every=2), P(every=3), "every=2 and every=3"),
    (P(levels=(2, 2)), P(levels=(4, 2)), r"levels=\(2, 2\) and levels=\(4, 2\)"),
    (P(levels=(2, 2)), P(every=2), r"levels=\(2, 2\) and every=2 exclude each other"),
    (P(prevent_cse=True), P(prevent_cse=False), "prevent_cse=True and prevent_cse=False"),
    (P(offload=["a"], offload_dst="unpinned_host"), P(offload=["b"]),
     "offload_dst='unpinned_host' and offload_dst='pinned_host'"),
    (P("none"), P("minimal_offloaded"), "cannot join 'none' and minimal_offloaded: .*overlap='save'"),
    (P("none"), P(carry="offload"), "cannot join 'none' and full, carry offload"),
    (P("none"), P(every=2), "cannot join 'none' and full, every 2"),
    (P("none"), P(levels=(2, 2)), "cannot join 'none'"),
    (P("none"), P(prevent_cse=True), "cannot join 'none'"),
], ids=named)
def test_joins_that_contradict(a, b, message):
  with pytest.raises(ValueError, match=message):
    a | b  # pylint: disable=pointless-statement
  with pytest.raises(ValueError):
    b | a  # pylint: disable=pointless-statement


def test_none_with_offload_is_settled_by_saving_only():
  assert P("none").join("minimal_offloaded", overlap="save") == P("none")
  with pytest.raises(ValueError, match="every value stays on device"):
    P("none").join("minimal_offloaded", overlap="offload")


@pytest.mark.parametrize("overlap", ["recompute", None, True])
def test_bad_overlap(overlap):
  with pytest.raises(ValueError, match="overlap must be 'error', 'save' or 'offload'"):
    P("minimal").join("full", overlap=overlap)


@pytest.mark.parametrize("other", [None, 3, ["minimal"]])
def test_only_policies_can_be_joined(other):
  with pytest.raises(TypeError, match="remat must be the name of a preset, a RematPolicy or a JAX checkpoint policy"):
    P("minimal") | other  # pylint: disable=expression-not-assigned


JOINED = [
    P("full"), P("none"), P("minimal"), P("save_out_proj"), P("minimal_offloaded"), P(save=["context"]),
    P(offload=["context"], carry="offload"), P(save=["a"], prevent_cse=False), P(every=2), P(levels=(2, 2)),
    P(base=jax_policies.dots_saveable), P(save=["a"], base=jax_policies.everything_saveable),
    P(offload=["b"], offload_dst="unpinned_host")]


def tried(join):
  try:
    return join()
  except ValueError:
    return None


@pytest.mark.parametrize("overlap", ["error", "save"])
def test_joins_are_commutative_and_associative_where_defined(overlap):
  defined = 0
  for a, b, c in itertools.product(JOINED, repeat=3):
    left = tried(lambda: a.join(b, overlap).join(c, overlap))  # pylint: disable=cell-var-from-loop
    right = tried(lambda: a.join(b.join(c, overlap), overlap))  # pylint: disable=cell-var-from-loop
    swapped = tried(lambda: c.join(b, overlap).join(a, overlap))  # pylint: disable=cell-var-from-loop
    if left is not None and right is not None:
      defined += 1
      assert left == right and left.alternatives == right.alternatives and left.optional == right.optional
    assert (swapped is None) == (right is None) and swapped == right
  assert defined > 500


def test_a_name_that_one_of_the_two_requires_is_required():
  joined = P("minimal") | P(save=["query_proj"])
  with pytest.raises(ValueError, match="names 'query_proj'"):
    joined.check({"key_proj"})
  joined.check({"query_proj"})


def test_each_of_joined_presets_needs_a_tag():
  joined = P("save_qkv_proj") | "save_out_proj"
  joined.check({"key_proj", "out_proj"})
  with pytest.raises(ValueError, match=r"preset save_out_proj: none of its names \(out_proj\)"):
    joined.check({"key_proj"})
  with pytest.raises(ValueError, match="preset save_qkv_proj: none of its names"):
    joined.check({"out_proj"})


# What the resolved policy does, read from a program ------------------------------------------------------------------

TAGS = {"a": (1, 2), "b": (1, 3), "c": (1, 4), CARRY_TAG: (1, 5)}
NAME_OF = {shape: name for name, shape in TAGS.items()} | {(9, 9): "dot"}
X = jnp.linspace(0.1, 0.9, 9)


def tagged(x):
  total = jnp.sum(jnp.sin(jnp.dot(x[:, None], x[None, :])))
  for name, (_, size) in TAGS.items():
    total += jnp.sum(jnp.sin(checkpoint_name(jnp.sin(x[None, :size]), name)))
  return total


def kept(policy):
  """The values that wait for the backward pass, by name, with the memory that they wait in."""
  fn = jax.checkpoint(tagged, policy=policy.resolve())
  program = jax.make_jaxpr(lambda x: jax.vjp(fn, x)[1])(X).jaxpr
  own = [var.aval for var in program.outvars if var not in program.invars and var.aval.shape in NAME_OF]
  places = {(NAME_OF[aval.shape], "host" if "host" in str(aval.memory_space).lower() else "device") for aval in own}
  assert len(places) == len(dict(places))  # no value in both
  return dict(places)


dots = jax_policies.dots_saveable
dots_offloaded = jax_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
only_b = jax_policies.save_only_these_names("b")
b_offloaded = jax_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["c"], names_which_can_be_offloaded=["b"], offload_src="device", offload_dst="pinned_host")


@pytest.mark.parametrize("policy, expected", [
    (P("full"), {}),
    (P(save=["a"]), {"a": "device"}),
    (P(offload=["a"]), {"a": "host"}),
    (P(save=["a", "c"], offload=["b"]), {"a": "device", "b": "host", "c": "device"}),
    (P(carry="offload"), {CARRY_TAG: "host"}),
    (P(save=["a"]) | P(offload=["b"]), {"a": "device", "b": "host"}),
    (P(save=["a"]) | P(offload=["b"]) | P(offload=["c"], carry="offload"),
     {"a": "device", "b": "host", "c": "host", CARRY_TAG: "host"}),
    (P(save=["a", "b"]).join(P(offload=["b", "c"]), overlap="save"), {"a": "device", "b": "device", "c": "host"}),
    (P(save=["a", "b"]).join(P(offload=["b", "c"]), overlap="offload"), {"a": "device", "b": "host", "c": "host"}),
    (P.of(dots), {"dot": "device"}),
    (P(base=dots, save=["a"], offload=["b"]), {"dot": "device", "a": "device", "b": "host"}),
    (P(save=["a"]) | dots, {"dot": "device", "a": "device"}),
    (P(offload=["a"]) | dots_offloaded, {"dot": "host", "a": "host"}),
    (P(carry="offload") | dots, {"dot": "device", CARRY_TAG: "host"}),
    (P.of(dots) | only_b, {"dot": "device", "b": "device"}),
    (P.of(dots) | only_b | P(offload=["a"]), {"dot": "device", "b": "device", "a": "host"}),
    (P.of(dots) | b_offloaded, {"dot": "device", "b": "host", "c": "device"}),
    (P.of(b_offloaded), {"b": "host", "c": "device"}),
    (P.of(only_b).join(b_offloaded, overlap="save"), {"b": "device", "c": "device"}),
    (P.of(only_b).join(b_offloaded, overlap="offload"), {"b": "host", "c": "device"}),
    (P.of(b_offloaded).join(only_b, overlap="save"), {"b": "device", "c": "device"}),
    (P(save=["b"], base=b_offloaded), {"b": "device", "c": "device"}),  # names go before what `base` says
    (P(save=["b"]) | jax_policies.nothing_saveable, {"b": "device"}),
    (P("none").join(P(offload=["a"]), overlap="save"), {name: "device" for name in (*TAGS, "dot")}),
], ids=named)
def test_resolved_policies_keep_what_they_say(policy, expected):
  assert kept(policy) == expected
  gradient = jax.jit(jax.grad(jax.checkpoint(tagged, policy=policy.resolve())))(X)
  assert jnp.allclose(gradient, jax.grad(tagged)(X), rtol=1e-6)


@pytest.mark.parametrize("one, two", itertools.permutations([only_b, b_offloaded]))
def test_jax_policies_that_disagree_about_a_name(one, two):
  with pytest.raises(ValueError, match="both saved and offloaded: b, by .*overlap="):
    P.of(one) | two


@pytest.mark.parametrize("one, two", itertools.permutations([dots, dots_offloaded]))
def test_jax_policies_that_disagree_about_products(one, two):
  with pytest.raises(ValueError, match="both saved and offloaded.*dot_general values, by the JAX policies .*overlap="):
    kept(P.of(one) | two)


def test_jax_policies_that_offload_to_two_places():
  elsewhere = jax_policies.offload_dot_with_no_batch_dims("device", "unpinned_host")
  with pytest.raises(ValueError, match="offload_dst='pinned_host' and offload_dst='unpinned_host'"):
    P(offload=["a"]) | elsewhere
  with pytest.raises(ValueError, match="offloaded to two places: dot_general values"):
    kept(P.of(dots_offloaded).join(elsewhere, overlap="offload"))
  with pytest.raises(ValueError, match="two places: 'pinned_host' by this policy, 'unpinned_host' by its base"):
    P(offload=["a"], base=elsewhere)


@pytest.mark.parametrize("base, policy", [
    (only_b, P(save=["b"])),
    (b_offloaded, P(save=["c"], offload=["b"])),
    (jax_policies.save_from_both_policies(only_b, dots), P(save=["b"], base=dots)),
    (jax_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[CARRY_NAME], offload_src="device",
        offload_dst="pinned_host"), P(carry="offload")),
], ids=["save", "offload", "both", "carry"])
def test_names_in_a_jax_policy_are_names_like_any_others(base, policy):
  assert P.of(base) == policy and P.of(base).resolve() is policy.resolve()
  assert P.of(base).offloads == policy.offloads
  if policy.names:
    with pytest.raises(ValueError, match="not tagged by any layer of the plan"):
      P.of(base).check({"bb"})


def test_names_that_a_jax_policy_leaves_out_must_exist():
  all_but = jax_policies.save_any_names_but_these("contex")
  for policy in (P.of(all_but), P.of(dots) | all_but):
    policy.check({"contex"})
    with pytest.raises(ValueError, match="'contex', which is not tagged.*did you mean 'context'"):
      policy.check({"context"})


def test_a_jax_policy_that_offloads_products_counts_as_one_that_offloads():
  assert P.of(dots_offloaded).offloads and (P.of(dots) | dots_offloaded).offloads and not P.of(dots).offloads
  elsewhere = P.of(jax_policies.offload_dot_with_no_batch_dims("device", "unpinned_host"))
  assert elsewhere.offload_dst == "unpinned_host" and str(elsewhere).endswith(", to unpinned_host")


def test_values_of_low_rank_stay_on_device():
  def low(x):
    return jnp.sum(jnp.sin(checkpoint_name(jnp.sin(x), "a"))) + jnp.sin(checkpoint_name(jnp.sin(x).sum(), "b"))

  for policy in (P(offload=["a", "b"]), P(save=["a"], offload=["b"])):
    program = jax.make_jaxpr(lambda x: jax.vjp(jax.checkpoint(low, policy=policy.resolve()), x)[1])(X).jaxpr
    own = [var.aval for var in program.outvars if var not in program.invars]
    assert {aval.shape for aval in own} == {(9,), ()}
    assert not any("host" in str(aval.memory_space).lower() for aval in own)


def test_a_jax_policy_that_ignores_its_names_is_refused():
  with pytest.raises(ValueError, match="saves everything, also the names"):
    P.of(jax_policies.save_anything_except_these_names("a"))


def test_joined_jax_policies_are_equal_and_traced_once():
  join = lambda: P.of(dots) | only_b
  assert join() == join() and hash(join()) == hash(join()) and join().resolve() is not None
  traces = collections.Counter()

  @functools.partial(jax.jit, static_argnums=1)
  def gradient(x, policy):
    traces[policy] += 1
    return jax.grad(jax.checkpoint(tagged, policy=policy.resolve()))(x)

  for _ in range(3):
    gradient(X, join())
  assert list(traces.values()) == [1]


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs, error, message", [
    ({"preset": "minimall"}, ValueError, "unknown remat preset 'minimall'; did you mean 'minimal'?"),
    ({"preset": "qkv_offloaded"}, ValueError, "did you mean 'qkv_proj_offloaded'?"),
    ({"preset": "zzz"}, ValueError, "unknown remat preset 'zzz'; known: 'none', 'full', 'minimal'"),
    ({"preset": 3}, TypeError, "preset must be the name of a preset, not 3"),
    ({"preset": ["minimal"]}, TypeError, "preset must be the name of a preset, not"),
    ({"save": [3]}, TypeError, r"save must hold names \(non-empty strings\), not 3"),
    ({"offload": ["a", None]}, TypeError, r"offload must hold names \(non-empty strings\), not None"),
    ({"save": [""]}, TypeError, "save must hold names"),
    ({"save": b"ab"}, TypeError, "save must hold names"),
    ({"save": "query_proj"}, TypeError,
     r"save must be a list of names, not the string 'query_proj'; write save=\['query_proj'\]"),
    ({"offload": "context"}, TypeError, r"write offload=\['context'\]"),
    ({"save": 3}, TypeError, "save must be a list of names, not 3"),
    ({"offload": None}, TypeError, "offload must be a list of names, not None"),
    ({"save": ["a", "b"], "offload": ["b", "c"]}, ValueError,
     r"both saved and offloaded: b \(save=\['a', 'b'\], offload=\['b', 'c'\]\); name each value in one of the two"),
    ({"preset": "minimal", "save": ["a"], "offload": ["a"]}, ValueError, "both saved and offloaded: a"),
    ({"preset": "minimal", "save": ["mlpwo"], "offload": ["mlpwo"]}, ValueError, "both saved and offloaded: mlpwo"),
    ({"save": [CARRY_NAME], "carry": "offload"}, ValueError, f"both saved and offloaded: {CARRY_NAME}"),
    ({"save": [CARRY_NAME], "offload": [CARRY_NAME]}, ValueError, f"both saved and offloaded: {CARRY_NAME}"),
    ({"levels": (2, 2), "every": 2}, ValueError, r"levels=\(2, 2\) and every=2 exclude each other"),
    ({"levels": 4}, TypeError, r"levels must be a tuple of ints such as \(8, 8\), not 4"),
    ({"levels": "44"}, TypeError, "levels must be a tuple of ints"),
    ({"levels": (4,)}, ValueError, r"levels must name at least two levels, not \(4,\)"),
    ({"levels": ()}, ValueError, "levels must name at least two levels"),
    ({"levels": (4, 0)}, ValueError, "each of levels must be at least 1, not 0"),
    ({"levels": (4, 2.0)}, TypeError, "each of levels must be an int, not 2.0"),
    ({"every": 0}, ValueError, "every must be at least 1, not 0"),
    ({"every": True}, TypeError, "every must be an int"),
    ({"every": "2"}, TypeError, "every must be an int, not '2'"),
    ({"carry": "remat"}, ValueError, "carry must be 'save' or 'offload', not 'remat'"),
    ({"carry": None}, ValueError, "carry must be 'save' or 'offload', not None"),
    ({"prevent_cse": 1}, TypeError, "prevent_cse must be a bool, a pair of bools .* or None, not 1"),
    ({"prevent_cse": "auto"}, TypeError, "prevent_cse must be a bool"),
    ({"prevent_cse": (True,)}, TypeError, "prevent_cse must be a bool, a pair of bools"),
    ({"prevent_cse": (True, 0)}, TypeError, "prevent_cse must be a bool, a pair of bools"),
    ({"base": "dots_saveable"}, TypeError, "base must be a JAX checkpoint policy, not 'dots_saveable'"),
    ({"base": jax_policies.save_only_these_names}, TypeError, "save_only_these_names makes policies and is none; call it"),
    ({"offload": ["a"], "offload_dst": None}, TypeError, "offload_dst must be the name of a memory kind, not None"),
    ({"offload": ["a"], "offload_dst": "device"}, ValueError, "offload_dst must be a memory that values move to"),
    ({"save": ["a"], "offload_dst": "unpinned_host"}, ValueError, "but the policy offloads nothing"),
    ({"remat": "none"}, TypeError, "remat must be True or False, not 'none'"),
    ({"preset": "minimal", "remat": False}, ValueError, "remat=False is the preset 'none', and goes with no other"),
])
def test_refused(kwargs, error, message):
  with pytest.raises(error, match=message):
    P(**kwargs)


@pytest.mark.parametrize("option", [
    {"save": ["a"]}, {"offload": ["a"]}, {"carry": "offload"}, {"levels": (2, 2)}, {"every": 2}, {"prevent_cse": True},
    {"base": dots}, {"offload": ["a"], "offload_dst": "unpinned_host"}])
@pytest.mark.parametrize("none", [{"preset": "none"}, {"remat": False}])
def test_none_takes_no_option(none, option):
  with pytest.raises(ValueError, match="'none' means no remat and takes no other option; 'full' is remat that saves"):
    P(**none, **option)


# What a stack checks when it is built ---------------------------------------------------------------------------------


def segments():
  """`first` with the tags of the reference layer, `second` with the same, each with `moe_` in front."""
  return ls.Plan.homogeneous(spec("plain"), 2, "first") + ls.Plan.homogeneous(spec("other", prefix="moe_"), 2, "second")


@pytest.mark.parametrize("remat", [None, True, 0, ["minimal"], {"first": None, "second": "full"}], ids=named)
def test_what_is_no_policy(remat):
  with pytest.raises(TypeError, match="remat must be the name of a preset, a RematPolicy or a JAX checkpoint policy, "
                                      "not .*'none' is no remat, 'full' is remat that saves nothing"):
    ls.StackedDecoder(segments(), remat=remat)


@pytest.mark.parametrize("remat, message", [
    ("minimal_ofloaded", "unknown remat preset 'minimal_ofloaded'; did you mean 'minimal_offloaded'?"),
    ({"first": "full", "second": "ful"}, "unknown remat preset 'ful'; did you mean 'full'?"),
    ({"frst": "minimal", "first": "full", "second": "full"},
     "remat names segment 'frst', which the plan does not have; did you mean 'first'?"),
    ({"layers": "minimal"}, "remat names segment 'layers', which the plan does not have; known: 'first', 'second'"),
    ({3: "minimal"}, "remat names segment 3, which the plan does not have"),
    ({"first": "minimal"}, "remat gives no policy for segment 'second'; name one for each of first, second"),
    ({}, "remat gives no policy for segment 'first'"),
    (P(every=3), "segment 'first' of 2 repeats"),
    (P(levels=(2, 2)), "multiply to 4, but segment 'first' of 2 repeats needs 2"),
])
def test_policies_that_do_not_fit_the_plan(remat, message):
  with pytest.raises(ValueError, match=message):
    ls.StackedDecoder(segments(), remat=remat)


@pytest.mark.parametrize("policy, word", [(P(levels=(2, 1)), "levels"), (P(every=2), "every")], ids=["levels", "every"])
@pytest.mark.parametrize("option", [{"scan": False}, {"unroll": 2}], ids=named)
def test_steps_need_the_loop(policy, word, option):
  with pytest.raises(ValueError, match=f"segment 'first': '?{word}'? shapes the loop"):
    ls.StackedDecoder(segments(), remat=policy, **option)


@pytest.mark.parametrize("policy", [P(offload=["context"], offload_dst="host_pinned"),
                                    P(carry="offload", offload_dst="host_pinned")], ids=named)
@pytest.mark.parametrize("by_segment", [False, True])
def test_a_memory_that_the_backend_lacks(policy, by_segment):
  kinds = ", ".join(sorted(memory.kind for memory in jax.local_devices()[0].addressable_memories()))
  remat = {"first": "full", "second": policy} if by_segment else policy
  with pytest.raises(ValueError, match=f"offloads to 'host_pinned', which cpu devices do not have; they have {kinds}"):
    ls.StackedDecoder(segments(), remat=remat)


def test_policy_of_a_segment():
  stack = ls.StackedDecoder(segments(), remat={"first": "minimal", "second": dots})
  assert stack.policy("first") == P("minimal") and stack.policy("second") == P(base=dots)
  assert ls.StackedDecoder(segments(), remat="none").policy("second") == P("none")


# ... and when it is initialised ---------------------------------------------------------------------------------------

ERRORS = [
    (P(save=["contxt"]),
     "remat policy names 'contxt', which is not tagged by any layer of the plan; did you mean 'context'?"),
    (P(offload=["out_prj"]), "names 'out_prj', .*did you mean 'out_proj'?"),
    (P("minimal", save=["contxt"]), "did you mean 'context'?"),
    (P(save=["zzz"]), "names 'zzz', which is not tagged by any layer of the plan; known: .*'query_proj'"),
    ({"first": P(save=["moe_context"]), "second": "full"},
     "names 'moe_context', which is not tagged by the layers of segment 'first'"),
    ({"first": "full", "second": P(offload=["context"])},
     "names 'context', which is not tagged by the layers of segment 'second'; did you mean 'moe_context'?"),
    ({"first": "full", "second": "save_out_proj"},
     r"remat preset save_out_proj: none of its names \(out_proj\) is tagged by the layers of segment 'second'; "
     "tags there: moe_.*or take 'full' or 'none'"),
]


@pytest.mark.parametrize("remat, message", ERRORS)
def test_names_that_no_layer_tags(remat, message):
  stack = ls.StackedDecoder(segments(), remat=remat)
  with pytest.raises(ValueError, match=message):
    abstract(stack)


@pytest.mark.parametrize("remat", ["minimal", P(save=["no_such_tag"])], ids=named)
@pytest.mark.parametrize("options", [{}, {"scan": False}], ids=named)
def test_layers_without_any_tag_of_the_policy(remat, options):
  bare = ls.Plan.homogeneous(spec(prefix="own_"), 2)
  message = "preset minimal: none of its names" if remat == "minimal" else "names 'no_such_tag'"
  with pytest.raises(ValueError, match=f"{message}.* is (not )?tagged by any layer of the plan"):
    abstract(ls.StackedDecoder(bare, remat=remat, **options))


@pytest.mark.parametrize("remat", [
    P(save=["moe_context"], offload=["query_proj"]),  # each of one segment alone
    "save_out_proj",
    {"first": P(save=["context"]), "second": P(save=["moe_context"])},
    {"first": "minimal", "second": "none"},
    P(save=[CARRY_NAME]),
    P(carry="offload"),
], ids=named)
def test_names_that_some_layer_tags(remat):
  _, variables = abstract(ls.StackedDecoder(segments(), remat=remat))
  assert set(variables["params"]) == {"first", "second"}


def test_apply_does_not_check():
  x, variables = abstract(ls.StackedDecoder(segments()))
  stack = ls.StackedDecoder(segments(), remat=P(save=["contxt"]))
  assert jax.eval_shape(stack.apply, variables, x).shape == x.shape


def test_a_single_layer_is_checked_as_well():
  with pytest.raises(ValueError, match="did you mean 'context'?"):
    abstract(ls.StackedDecoder(ls.Plan.homogeneous(ls.LayerSpec(TaggedLayer), 1), remat=P(save=["contxt"])))


def test_a_base_that_offloads_by_itself_has_no_saved_form():
  base = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
  with pytest.raises(ValueError, match="offload_dot_with_no_batch_dims.* offloads by itself; give a base that saves"):
    _ = ls.RematPolicy(base=base).saved
