"""The planner: equal to brute force, the plans of known models, names, and bad input."""
import random

from hypothesis import given, settings, strategies as st
import pytest

from linen_stack.plan import LayerSpec, Plan
from linen_stack.planner import plan_layers


class Layer:
  """Stands in for a module class: plans do not look inside."""


SPECS = {kind: LayerSpec(Layer, name=kind) for kind in "abcdefgh"}


def plan_of(kinds, **kwargs):
  """The plan of layers given as letters."""
  return Plan.from_layers([SPECS[kind] for kind in kinds], **kwargs)


def shape(plan):
  """The plan as [(name, block as letters, repeats)]."""
  return [(s.name, "".join(spec.name for spec in s.block), s.length) for s in plan]


def cuts_of(plan):
  return [(plan.offset(s.name), len(s.block), s.length) for s in plan]


# Brute force.


def num_runs(block):
  return 1 + sum(a != b for a, b in zip(block, block[1:]))


def rules(kinds, cuts):
  """What the planner promises to minimise, in order, for segments (start, block length, repeats)."""
  most = max(repeats for _, _, repeats in cuts)
  return (sum(num_runs(kinds[start:start + size]) for start, size, _ in cuts), len(cuts), -most,
          min(start for start, _, repeats in cuts if repeats == most), [-size * repeats for _, size, repeats in cuts])


def no_worse_plans(kinds, traced, segments):
  """Every way to cut the layers that traces at most `traced` bodies, and with that many has at most `segments`."""
  cuts, plans = [], []
  rest = [len(set(kinds[start:])) for start in range(len(kinds) + 1)]  # a kind that is left takes a body at least

  def extend(start, bodies):
    if start == len(kinds):
      plans.append(list(cuts))
      return
    if (bodies + rest[start], len(cuts) + 1) > (traced, segments):
      return
    for size in range(1, len(kinds) - start + 1):
      block = kinds[start:start + size]
      runs = num_runs(block)
      if bodies + runs > traced:
        break
      if runs == 1 < size:  # a run is repeats of one layer, never a block of several
        continue
      repeats = 1
      while kinds[start + (repeats - 1) * size:start + repeats * size] == block:
        cuts.append((start, size, repeats))
        extend(start + repeats * size, bodies + runs)
        cuts.pop()
        repeats += 1

  extend(0, 0)
  return plans


def check_against_brute_force(kinds):
  plan = plan_of(kinds)
  assert "".join(spec.name for spec in plan.layers) == kinds
  cuts = cuts_of(plan)
  assert plan.traced_layers == rules(kinds, cuts)[0]
  others = no_worse_plans(kinds, plan.traced_layers, len(cuts))
  assert cuts in others
  best = min(others, key=lambda other: rules(kinds, other))
  assert cuts == best, f"{kinds}: planned {cuts}, best {best}"


def sequences(length, kinds):
  """All sequences of `length` letters up to renaming: letters appear first in alphabetical order."""
  found = [""]
  for _ in range(length):
    found = [s + letter for s in found for letter in kinds[:len(set(s)) + 1]]
  return found


@pytest.mark.parametrize("length", range(1, 11))
def test_equals_brute_force_on_every_sequence_of_three_kinds(length):
  for kinds in sequences(length, "abc"):
    check_against_brute_force(kinds)


@given(st.text("ab", min_size=11, max_size=14) | st.text("abcd", min_size=9, max_size=11))
@settings(max_examples=60, deadline=None)
def test_equals_brute_force_on_longer_sequences(kinds):
  check_against_brute_force(kinds)


@given(st.text("abc", min_size=1, max_size=4), st.integers(8, 15), st.lists(st.tuples(st.integers(0, 14),
       st.sampled_from("abc")), max_size=2))
@settings(max_examples=60, deadline=None)
def test_equals_brute_force_on_interrupted_cycles(cycle, length, interruptions):
  kinds = list((cycle * length)[:length])
  for at, kind in interruptions:
    kinds[at % length] = kind
  check_against_brute_force("".join(kinds))


@given(st.text("abc", min_size=1, max_size=40), st.permutations("abc"))
@settings(max_examples=100, deadline=None)
def test_plans_do_not_depend_on_what_the_kinds_are(kinds, letters):
  renamed = kinds.translate(str.maketrans("abc", "".join(letters)))
  assert [s[::2] for s in shape(plan_of(kinds))] == [s[::2] for s in shape(plan_of(renamed))]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_layer_is_lost(widths):
  specs = [LayerSpec(Layer, width=width) for width in widths]  # equal specs that are not one object
  plan = Plan.from_layers(specs)
  assert list(plan.layers) == specs and plan.num_layers == len(specs)
  assert plan.traced_layers <= num_runs(widths)


# What the rules come to.


@pytest.mark.parametrize("kinds, expected", [
    ("a", [("layers", "a", 1)]),
    ("aaaa", [("layers", "a", 4)]),
    ("ab", [("layers", "ab", 1)]),
    ("abab", [("layers", "ab", 2)]),
    ("aabaab", [("layers", "aab", 2)]),
    # layers that never repeat are one segment, whose runs are stacked
    ("aaabbbb", [("layers", "aaabbbb", 1)]),
    # the cycle first, then the remainder
    ("ababa", [("layers", "ab", 2), ("layers_remainder", "a", 1)]),
    ("abcabcab", [("layers", "abc", 2), ("layers_remainder", "ab", 1)]),
    ("aabaabaa", [("layers", "aab", 2), ("layers_remainder", "a", 2)]),
    # a prefix before the cycle
    ("cababab", [("layers_prefix", "c", 1), ("layers", "ab", 3)]),
    ("cdababab", [("layers_prefix", "cd", 1), ("layers", "ab", 3)]),
    # the block may start inside a run of equal layers
    ("aabaaabaaaba", [("layers", "aaba", 3)]),
    # more repeats before an earlier cut
    ("abababcdcd", [("layers", "ab", 3), ("layers_1", "cd", 2)]),
    # names by place where there is more than a prefix, a cycle and a remainder
    ("abab" "e" "abababab" "cdcd", [("layers_0", "ab", 2), ("layers_1", "e", 1), ("layers", "ab", 4),
                                    ("layers_3", "cd", 2)]),
])
def test_known_plans(kinds, expected):
  assert shape(plan_of(kinds)) == expected


def test_deepseek_v3():
  plan = plan_of("a" * 3 + "b" * 58)
  assert plan.traced_layers == 2
  assert [(run.name, run.count) for run in plan["layers"].runs] == [("a", 3), ("b", 58)]


def test_gemma_3_27b():
  plan = plan_of(("a" * 5 + "b") * 10 + "aa")
  assert shape(plan) == [("layers", "aaaaab", 10), ("layers_remainder", "a", 2)]
  assert plan.traced_layers == 3


def test_gemma_3_1b_has_a_remainder_of_two():
  assert shape(plan_of(("a" * 5 + "b") * 4 + "aa")) == [("layers", "aaaaab", 4), ("layers_remainder", "a", 2)]


def test_qwen3_next():
  plan = plan_of("aaab" * 12)
  assert shape(plan) == [("layers", "aaab", 12)] and plan.traced_layers == 2


def test_hybrid_with_three_prefixes():
  """One dense layer, three of linear attention, one MLA, then cycles of seven linear and one MLA with experts."""
  plan = plan_of("a" + "bbb" + "c" + ("d" * 7 + "e") * 4)
  assert shape(plan) == [("layers_prefix", "abbbc", 1), ("layers", "ddddddde", 4)]
  assert plan.traced_layers == 5


def test_a_dense_layer_in_place_of_the_first_of_a_cycle():
  plan = plan_of("cbba" + "bbba" * 11)
  assert shape(plan) == [("layers_prefix", "cbba", 1), ("layers", "bbba", 11)] and plan.traced_layers == 5


@pytest.mark.parametrize("at", [0, 1, 7, 14, 15])
def test_a_special_layer_between_equal_ones(at):
  plan = plan_of("a" * at + "e" + "a" * (15 - at))
  assert plan.traced_layers == len(plan["layers"].runs) == (2 if at in (0, 15) else 3)


def test_special_layers_at_even_distances_are_a_cycle():
  assert shape(plan_of("aaaaea" * 4)) == [("layers", "aaaaea", 4)]


# A thousand layers.


def thue_morse(n):
  return "".join("ab"[bin(i).count("1") % 2] for i in range(n))


def interrupted(n):
  kinds = list(("aabaccb" * n)[:n])
  for at in (200, 500, 777):
    kinds[at] = "d"
  return "".join(kinds)


@pytest.mark.parametrize("kinds, traced, segments", [
    ("a" * 1000, 1, 1),
    ("ab" * 500, 2, 1),
    ("aaaaaaaaab" * 100, 2, 1),
    ("aaaab" * 199 + "aaaac", 4, 2),
    ("a" * 500 + "b" * 500, 2, 1),
    (interrupted(1000), None, None),
    (thue_morse(1000), None, None),
    ("".join(random.Random(0).choices("abc", k=1000)), None, None),
], ids=["equal", "alternating", "nine and one", "almost", "halves", "interrupted", "thue-morse", "random"])
def test_a_thousand_layers(kinds, traced, segments):
  plan = plan_of(kinds)
  assert "".join(spec.name for spec in plan.layers) == kinds
  if traced is None:
    assert plan.traced_layers < num_runs(kinds)
  else:
    assert (plan.traced_layers, len(plan.segments)) == (traced, segments)


def test_a_thousand_different_layers():
  specs = [LayerSpec(Layer, width=width) for width in range(1000)]
  plan = plan_layers(specs)
  assert plan.traced_layers == 1000 and list(plan.layers) == specs


# Names and bad input.


def test_names_are_made_from_name_or_given():
  assert [s.name for s in plan_of("caabaaba", name="blocks")] == ["blocks_prefix", "blocks", "blocks_remainder"]
  assert [s.name for s in plan_of("caabaaba", names=["dense", "body", "tail"])] == ["dense", "body", "tail"]
  assert [s.name for s in plan_of("aa", names=("only",))] == ["only"]
  plans = plan_of("ababc", name="encoder") + plan_of("ababc", name="decoder")
  assert len(plans.segments) == 4


def test_any_iterable_of_specs_will_do():
  assert plan_layers(SPECS[k] for k in "abab") == plan_layers(tuple(SPECS[k] for k in "abab")) == plan_of("abab")


@pytest.mark.parametrize("specs, kwargs, error, message", [
    ([], {}, ValueError, "specs is empty; a plan needs at least one layer"),
    (SPECS["a"], {}, TypeError, "specs must be a list with one LayerSpec per layer, not LayerSpec"),
    (None, {}, TypeError, "specs must be a list with one LayerSpec per layer, not None"),
    ([SPECS["a"], Layer], {}, TypeError, r"specs\[1\] must be a LayerSpec, not .*Layer.*write ls.LayerSpec"),
    ([SPECS["a"], SPECS["b"], None], {}, TypeError, r"specs\[2\] must be a LayerSpec, not None"),
    ("ab", {}, TypeError, r"specs\[0\] must be a LayerSpec, not 'a'"),
    ([SPECS[k] for k in "cabab"], {"names": ["one"]}, ValueError,
     r"names has 1 entries, but these layers make 2 segments; name each of them:\n(?s:.*)layers_prefix +0 (?s:.*)1-4"),
    ([SPECS["a"]], {"names": ["one", "two"]}, ValueError, "names has 2 entries, but these layers make 1 segment;"),
    ([SPECS["a"]], {"names": "one"}, TypeError, "names must be a list of strings, one per segment, not 'one'"),
    ([SPECS["a"]], {"names": 3}, TypeError, "names must be a list of strings"),
    ([SPECS["a"]], {"names": ["a/b"]}, ValueError, "a segment's name must be .* without '/'"),
    ([SPECS["a"]], {"name": ""}, ValueError, "a segment's name must be a non-empty string"),
    ([SPECS["a"]], {"name": None}, ValueError, "a segment's name must be a non-empty string"),
    ([SPECS[k] for k in "cabab"], {"names": ["one", "one"]}, ValueError, "two segments are named 'one'"),
])
def test_bad_input(specs, kwargs, error, message):
  with pytest.raises(error, match=message):
    Plan.from_layers(specs, **kwargs)
