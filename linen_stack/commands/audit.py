"""`audit`: what the remat policies of a model do with each tagged value, from shapes alone."""
from __future__ import annotations

from collections.abc import Sequence

from absl import flags
from flax.errors import FlaxError
import jax
import jax.numpy as jnp

from linen_stack.commands import CommandError, options, plain_errors
from linen_stack.config import StackConfig
from linen_stack.inspect import AuditReport, audit, render
from linen_stack.models import families
from linen_stack.plan import Plan


def define_flags(values: flags.FlagValues) -> None:
  options.define_set(values)
  flags.DEFINE_integer("batch", None, "sequences per step; by default train.batch", lower_bound=1, flag_values=values)
  flags.DEFINE_integer("seq", None, "tokens per sequence; by default train.seq", lower_bound=1, flag_values=values)


def run(values: flags.FlagValues, args: Sequence[str]) -> None:
  config = options.load_config(args[0], values.set)
  text, report = describe(config, values.batch, values.seq)
  print(text)
  errors = sum(finding.severity == "error" for finding in report.findings)
  if errors:
    raise CommandError(f"the audit of {args[0]} found {render.plural(errors, 'error')}")


def describe(config: StackConfig, batch: int | None = None, seq: int | None = None) -> tuple[str, AuditReport]:
  """The report on a config's model for tokens `[batch, seq]`, as text with the policies before it, and itself.

  Raises CommandError for a model that cannot be. Policies whose names do not meet the layers' are in the report.
  """
  shape = (config.train.batch if batch is None else batch, config.train.seq if seq is None else seq)
  with plain_errors(ValueError, TypeError, FlaxError):
    # Not `options.build`: to initialise the model would raise the errors that the report is to tell.
    model = families.language_model(config)
    report = audit(model, jax.ShapeDtypeStruct(shape, jnp.int32))
  plan: Plan = model.stack.plan
  policies = [f"policy of {segment.name}: {model.stack.policy(segment.name)}" for segment in plan]
  return "\n".join([f"batch {shape[0]}, seq {shape[1]}", *policies, "", str(report)]), report
