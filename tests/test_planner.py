"""The planner: equal to brute force, the plans of known models, names, and bad input."""
import random

from hypothesis import given, settings, strategies as st
import pytest

from linen_stack.plan import LayerSpec, Plan
from linen_stack.planner import plan_layers


class Layer:
  """Stands in for a module class: plans do not look inside."""

  def __init__(self, name=None, width=0):
    raise AssertionError("a plan makes no layers")


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


def is_segment(block, repeats):
  """Equal layers are repeats of one; a cycle's block has different layers and is repeated."""
  return len(block) == 1 if len(set(block)) == 1 else repeats > 1


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
      for repeats in range(1, (len(kinds) - start) // size + 1):
        end = start + size * repeats
        if kinds[start:end] == block * repeats and is_segment(block, repeats):
          cuts.append((start, size, repeats))
          extend(end, bodies + runs)
          cuts.pop()

  extend(0, 0)
  return plans


def with_remainders(kinds, cuts):
  """Rule 6: the most segments of equal layers after a cycle that begin its block, and do not fill it, become one."""
  for k, (start, size, repeats) in enumerate(cuts):
    for last in range(len(cuts) - 1, k + 1, -1):
      end = start + size * repeats
      left_over = kinds[end:cuts[last][0] + cuts[last][1] * cuts[last][2]]
      if (all(block == 1 for _, block, _ in cuts[k + 1:last + 1]) and len(left_over) < size
          and kinds[start:start + size].startswith(left_over)):
        return cuts[:k + 1] + [(end, len(left_over), 1)] + with_remainders(kinds, cuts[last + 1:])
  return cuts


def check_against_brute_force(kinds):
  plan = plan_of(kinds)
  assert "".join(spec.name for spec in plan.layers) == kinds
  # A remainder counts as the segments of equal layers that it is made of.
  segments = sum(len(segment.runs) if segment.length == 1 else 1 for segment in plan)
  best = min(no_worse_plans(kinds, plan.traced_layers, segments), key=lambda cuts: rules(kinds, cuts))
  assert plan.traced_layers == rules(kinds, best)[0]
  assert cuts_of(plan) == with_remainders(kinds, best), f"{kinds}: best {best}"


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
    # equal layers are a segment, and so is every other layer that never repeats
    ("ab", [("layers", "a", 1), ("layers_1", "b", 1)]),
    ("aaabbbb", [("layers_prefix", "a", 3), ("layers", "b", 4)]),
    ("aaaeaaaa", [("layers_0", "a", 3), ("layers_1", "e", 1), ("layers", "a", 4)]),
    ("abab", [("layers", "ab", 2)]),
    ("aabaab", [("layers", "aab", 2)]),
    # the cycle first, then the remainder
    ("ababa", [("layers", "ab", 2), ("layers_remainder", "a", 1)]),
    ("abcabcab", [("layers", "abc", 2), ("layers_remainder", "ab", 1)]),
    ("aabaabaa", [("layers", "aab", 2), ("layers_remainder", "a", 2)]),
    # a remainder is one segment with several runs, as far as the block goes
    ("aabc" * 2 + "aab", [("layers", "aabc", 2), ("layers_remainder", "aab", 1)]),
    ("abbbc" * 2 + "abb", [("layers", "abbbc", 2), ("layers_remainder", "abb", 1)]),
    ("abc" * 2 + "abd", [("layers", "abc", 2), ("layers_remainder", "ab", 1), ("layers_2", "d", 1)]),
    ("abc" * 2 + "abbb", [("layers", "abc", 2), ("layers_remainder", "a", 1), ("layers_2", "b", 3)]),
    ("abc" * 2 + "ac", [("layers", "abc", 2), ("layers_remainder", "a", 1), ("layers_2", "c", 1)]),
    # and cycles that are not the longest have remainders too
    ("abc" * 2 + "ab" + "de" * 5, [("layers_0", "abc", 2), ("layers_1", "ab", 1), ("layers", "de", 5)]),
    # a remainder may be a cycle of its own
    ("ababc" * 3 + "abab", [("layers", "ababc", 3), ("layers_remainder", "ab", 2)]),
    # a prefix before the cycle
    ("cababab", [("layers_prefix", "c", 1), ("layers", "ab", 3)]),
    ("cdababab", [("layers_0", "c", 1), ("layers_1", "d", 1), ("layers", "ab", 3)]),
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
  assert shape(plan) == [("layers_prefix", "a", 3), ("layers", "b", 58)] and plan.traced_layers == 2


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
  assert shape(plan) == [("layers_0", "a", 1), ("layers_1", "b", 3), ("layers_2", "c", 1), ("layers", "ddddddde", 4)]
  assert plan.traced_layers == 5


def test_a_dense_layer_in_place_of_the_first_of_a_cycle():
  plan = plan_of("cbba" + "bbba" * 11)
  assert shape(plan)[:2] == [("layers_0", "c", 1), ("layers_1", "b", 2)]
  assert shape(plan)[2:] == [("layers", "abbb", 11), ("layers_remainder", "a", 1)]
  assert plan.traced_layers == 5


@pytest.mark.parametrize("at", [0, 1, 7, 14])
def test_a_special_layer_between_equal_ones(at):
  plan = plan_of("a" * at + "e" + "a" * (15 - at))
  assert [block for _, block, _ in shape(plan)] == list("aea" if at else "ea")
  assert plan["layers"].length == max(at, 15 - at)


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
    ("aaaab" * 199 + "aaaac", 4, 3),
    ("a" * 500 + "b" * 500, 2, 2),
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
