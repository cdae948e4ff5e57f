"""Runs traced programs equation by equation.

Compiling a program takes seconds and running it takes none; sweeps over many programs therefore run what JAX traced
(the scans, remats and calls, as they stand in the jaxpr) one primitive at a time, which JAX compiles once per shape; what
NumPy computes to the same bits is left to NumPy.
"""
import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from linen_stack.inspect.origins import loop_counts


# As (arguments, parameters of the primitive) -> result.
_NUMPY = {
    "add": lambda args, _: np.add(*args), "add_any": lambda args, _: np.add(*args), "sub": lambda args, _: np.subtract(*args),
    "mul": lambda args, _: np.multiply(*args), "div": lambda args, _: np.divide(*args),
    "neg": lambda args, _: np.negative(args[0]), "copy": lambda args, _: args[0],
    "transpose": lambda args, params: np.transpose(args[0], params["permutation"]),
    "reshape": lambda args, params: np.reshape(args[0], params["new_sizes"]),
    "squeeze": lambda args, params: np.squeeze(args[0], params["dimensions"]),
    "concatenate": lambda args, params: np.concatenate(args, params["dimension"]),
    "slice": lambda args, params: args[0][tuple(map(slice, params["start_indices"], params["limit_indices"],
                                                    params["strides"] or [1] * args[0].ndim))],
}


def run(fn, *args):
  """`jax.jit(fn)(*args)`, interpreted."""
  program, out = jax.make_jaxpr(fn, return_shape=True)(*args)
  results = _eval(program.jaxpr, program.consts, jax.tree.leaves(args))
  return jax.tree.unflatten(jax.tree.structure(out), results)


def value_and_grad(fn, has_aux=False):
  return lambda *args: run(jax.value_and_grad(fn, has_aux=has_aux), *args)


def _eval(jaxpr, consts, args):
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))
  read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]
  for eqn in jaxpr.eqns:
    out = _call(eqn, [read(atom) for atom in eqn.invars])
    values.update(zip(eqn.outvars, out))
  return [read(atom) for atom in jaxpr.outvars]


def _closed(inner):
  return (inner.jaxpr, inner.consts) if isinstance(inner, core.ClosedJaxpr) else (inner, [])


def _call(eqn, args):
  name, params = eqn.primitive.name, eqn.params
  if name == "scan":
    return _scan(eqn, args)
  for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    if key in params:
      jaxpr, consts = _closed(params[key])
      return _eval(jaxpr, consts, args)
  dtype = eqn.outvars[0].aval.dtype if name in _NUMPY else None
  if dtype in (np.float32, np.float64) and all(var.aval.dtype == dtype for var in eqn.invars):
    return [np.asarray(_NUMPY[name](list(map(np.asarray, args)), params), dtype)]
  out = eqn.primitive.bind(*args, **params)
  return out if eqn.primitive.multiple_results else [out]


def _scan(eqn, args):
  params = eqn.params
  jaxpr, closed = _closed(params["jaxpr"])
  num_consts, num_carry = loop_counts(eqn)
  consts, carry, xs = args[:num_consts], args[num_consts:num_consts + num_carry], args[num_consts + num_carry:]
  ys = [None] * params["length"]
  xs = [_rows(x) for x in xs]
  for i in reversed(range(params["length"])) if params["reverse"] else range(params["length"]):
    out = _eval(jaxpr, closed, [*consts, *carry, *(x[i] for x in xs)])
    carry, ys[i] = out[:num_carry], out[num_carry:]
  return [*carry, *map(_stack, zip(*ys))]


# NumPy takes rows and stacks them: JAX would compile a program for every shape and row.


def _rows(x):
  return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x)


def _stack(column):
  return (jnp if jnp.issubdtype(column[0].dtype, jax.dtypes.extended) else np).stack(column)
