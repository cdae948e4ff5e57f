"""What hides the fetching of weights, read from the text of scheduled programs."""
import pytest

from linen_stack.inspect.overlap import overlap

PROGRAM = """HloModule jit_f, is_scheduled=true, entry_computation_layout={()->bf16[8,8]{1,0:T(8,128)(2,1)}}

%product (p: bf16[8,8], q: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0:T(8,128)(2,1)} parameter(0)
  %q = bf16[8,8]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = bf16[8,8]{1,0:T(8,128)(2,1)} convolution(%p, %q), dim_labels=bf_io->bf
}

%gather (s: bf16[2,8]) -> bf16[8,8] {
  %s = bf16[2,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.9 = bf16[8,8]{1,0:T(8,128)(2,1)} all-gather(%s), channel_id=9, dimensions={0}
}

%product_and_gather (p: bf16[8,8], q: bf16[8,8], s: bf16[2,8]) -> (bf16[8,8], bf16[8,8]) {
  %p.1 = bf16[8,8]{1,0:T(8,128)(2,1)} parameter(0)
  %q.1 = bf16[8,8]{1,0:T(8,128)(2,1)} parameter(1)
  %s.1 = bf16[2,8]{1,0:T(8,128)(2,1)} parameter(2)
  %convolution.2 = bf16[8,8]{1,0:T(8,128)(2,1)} convolution(%p.1, %q.1), dim_labels=bf_io->bf
  %all-gather.8 = bf16[8,8]{1,0:T(8,128)(2,1)} all-gather(%s.1), channel_id=9, dimensions={0}
  ROOT %tuple.8 = (bf16[8,8]{1,0:T(8,128)(2,1)}, bf16[8,8]{1,0:T(8,128)(2,1)}) tuple(%convolution.2, %all-gather.8)
}

%inner_body (t: (bf16[8,8], bf16[8,8])) -> (bf16[8,8], bf16[8,8]) {
  %t = (bf16[8,8]{1,0:T(8,128)(2,1)}, bf16[8,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %h = bf16[8,8]{1,0:T(8,128)(2,1)} get-tuple-element(%t), index=0
  %w = bf16[8,8]{1,0:T(8,128)(2,1)} get-tuple-element(%t), index=1
  %fusion.1 = bf16[8,8]{1,0:T(8,128)(2,1)} fusion(%h, %w), kind=kOutput, calls=%product
  %fusion.2 = bf16[8,8]{1,0:T(8,128)(2,1)} fusion(%fusion.1, %w), kind=kOutput, calls=%product
  ROOT %tuple.1 = (bf16[8,8]{1,0:T(8,128)(2,1)}, bf16[8,8]{1,0:T(8,128)(2,1)}) tuple(%fusion.2, %w)
}

%body (t: (s32[], bf16[8,8], bf16[8,8], bf16[4,8,8])) -> (s32[], bf16[8,8], bf16[8,8], bf16[4,8,8]) {
  %t.1 = (s32[]{:T(128)}, bf16[8,8]{1,0:T(8,128)(2,1)}, bf16[8,8]{1,0:T(8,128)(2,1)}, /*index=3*/bf16[4,8,8]{2,1,0:T(8,128)(2,1)S(5)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  %h.1 = bf16[8,8]{1,0:T(8,128)(2,1)} get-tuple-element(%t.1), index=1
  %w.1 = bf16[8,8]{1,0:T(8,128)(2,1)} get-tuple-element(%t.1), index=2
  %stack = bf16[4,8,8]{2,1,0:T(8,128)(2,1)S(5)} get-tuple-element(%t.1), index=3
BODY
  ROOT %tuple.2 = (s32[]{:T(128)}, bf16[8,8]{1,0:T(8,128)(2,1)}, bf16[8,8]{1,0:T(8,128)(2,1)}, /*index=3*/bf16[4,8,8]{2,1,0:T(8,128)(2,1)S(5)}) tuple(%i, %out, %next, %stack)
}

ENTRY %main (a: bf16[8,8], b: bf16[4,8,8]) -> bf16[8,8] {
  %while.9 = (s32[]{:T(128)}, bf16[8,8]{1,0:T(8,128)(2,1)}, bf16[8,8]{1,0:T(8,128)(2,1)}, bf16[4,8,8]{2,1,0:T(8,128)(2,1)S(5)}) while(%tuple.9), condition=%condition, body=%body
}
"""

WEIGHTS = "bf16[8,8]{1,0:T(8,128)(2,1)}"
TYPE = "((bf16[4,8,8]{2,1,0:T(8,128)(2,1)S(5)}, s32[]{:T(128)}), bf16[8,8]{1,0:T(8,128)(2,1)}, u32[]{:S(2)})"
START = f"%dynamic-slice-start.1 = {TYPE} dynamic-slice-start(%stack, %i), dynamic_slice_sizes={{1,8,8}}"
DONE = f"%next = {WEIGHTS} dynamic-slice-done(%dynamic-slice-start.1)"
COMPUTE = f"%out = {WEIGHTS} fusion(%h.1, %w.1), kind=kOutput, calls=%product"
LOOP = [f"%while.1 = ({WEIGHTS}, {WEIGHTS}) while(%tuple.3), condition=%once, body=%inner_body",
        f"%out = {WEIGHTS} get-tuple-element(%while.1), index=0"]
COPY = f"%copy-start.1 = ({WEIGHTS}, bf16[8,8]{{1,0:T(8,128)(2,1)S(5)}}, u32[]{{:S(2)}}) copy-start(%row)"
GATHER = [f"%async-start = ((bf16[2,8]{{1,0}}), {WEIGHTS}) async-start(%shard), calls=%gather",
          f"%next = {WEIGHTS} async-done(%async-start)"]
# Of a compiler that has the products take the gather along.
TAKEN = [f"%async-collective-start.1 = (bf16[2,8]{{1,0}}, {WEIGHTS}) fusion(%shard), kind=kCustom, calls=%gather",
         f"%fusion.5 = ({WEIGHTS}, {WEIGHTS}) fusion(%h.1, %w.1, %shard), kind=kOutput, calls=%product_and_gather",
         f"%out = {WEIGHTS} get-tuple-element(%fusion.5), index=0",
         f"%next = {WEIGHTS} fusion(%shard, %fusion.5), kind=kCustom, calls=%gather"]


def program(*lines):
  return PROGRAM.replace("BODY", "\n".join(f"  {line}" for line in lines))


@pytest.mark.parametrize("lines, kind, products, ahead", [
    ([START, COMPUTE, DONE], "host", 1, True),
    ([COMPUTE, START, DONE], "host", 0, True),
    ([START, DONE, COMPUTE], "host", 0, True),
    ([START, *LOOP, DONE], "host", 2, True),
    ([START, DONE, COMPUTE.replace("%w.1", "%next")], "host", 0, False),
    ([START, DONE, f"%other = {WEIGHTS} copy(%next)", COMPUTE.replace("%w.1", "%other")], "host", 0, False),
    ([f"%row = bf16[8,8]{{1,0:T(8,128)(2,1)S(5)}} bitcast(%stack)", COPY, COMPUTE,
      f"%next = {WEIGHTS} copy-done(%copy-start.1)"], "host", 1, True),
    ([GATHER[0], COMPUTE, GATHER[1]], "all-gather", 1, True),
    ([f"%all-gather-start.1 = (bf16[2,8]{{1,0}}, {WEIGHTS}) all-gather-start(%shard), dimensions={{0}}", COMPUTE,
      f"%next = {WEIGHTS} all-gather-done(%all-gather-start.1)"], "all-gather", 1, True),
    ([COMPUTE, f"%next = {WEIGHTS} all-gather(%shard), dimensions={{0}}"], "all-gather", 0, True),
    (TAKEN, "all-gather", 1, True), ([TAKEN[0], TAKEN[3], COMPUTE], "all-gather", 0, True),
    ([TAKEN[0], COMPUTE, *TAKEN[1:], COMPUTE.replace("%out", "%end").replace("%w.1", "%next")], "all-gather", 2, False),
])
def test_what_is_brought_and_what_runs_meanwhile(lines, kind, products, ahead):
  (body,) = overlap(program(*lines))
  (transfer,) = body.transfers
  assert (transfer.kind, transfer.products, transfer.ahead) == (kind, products, ahead)
  assert body.hidden == (ahead and products > 0)
  assert ("not hidden" not in str(body)) == body.hidden and transfer.name in str(body)


def test_what_is_not_brought_in():
  """Gradients that leave for the host, copies within the device, values that stay on the host."""
  out = f"%dus = (bf16[4,8,8]{{2,1,0:S(5)}}, {WEIGHTS}) dynamic-update-slice-start(%stack, %h.1, %i)"
  near = f"%copy-start.2 = ({WEIGHTS}, {WEIGHTS}, u32[]{{:S(2)}}) copy-start(%h.1)"
  stays = f"%next = bf16[8,8]{{1,0:T(8,128)(2,1)S(5)}} dynamic-slice-done(%dynamic-slice-start.1)"
  assert overlap(program(out, near, START, COMPUTE, stays)) == ()


def test_programs_that_are_not_scheduled_are_refused():
  with pytest.raises(ValueError, match="is_scheduled=true.*compile"):
    overlap(program(START, COMPUTE, DONE).replace(", is_scheduled=true", ""))
