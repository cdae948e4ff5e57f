"""What `memory` and `tune` share: the train step of a config as a program for a TPU that is not there."""
from __future__ import annotations

from collections.abc import Sequence
import contextlib
import dataclasses
import os
import pathlib
import tempfile

from absl import flags
from flax.errors import FlaxError
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from linen_stack import training
from linen_stack.commands import CommandError, UsageError, options, plain_errors
from linen_stack.config import StackConfig
from linen_stack.inspect import audit, chips, programs
from linen_stack.inspect.programs import Program
from linen_stack.models import families
from linen_stack.models.language_model import LanguageModel
from linen_stack.policies import RematPolicy


@dataclasses.dataclass(frozen=True)
class Subject:
  """A config's model, its train step on a mesh, and the machine."""

  config: StackConfig
  model: LanguageModel
  program: Program
  topology: chips.Topology
  batch: int
  seq: int

  def check(self, policy: RematPolicy | None) -> str | None:
    """What is wrong with a policy for this model, from shapes alone; None: nothing. No policy: that of the config."""
    try:
      model = self.model if policy is None else self.model.clone(stack=self.model.stack.clone(remat=policy))
      report = audit(model, jax.ShapeDtypeStruct((self.batch, self.seq), jnp.int32))
    except (ValueError, TypeError) as error:
      return str(error)
    errors = [finding for finding in report.findings if finding.severity == "error"]
    return str(errors[0]) if errors else None


def define_flags(values: flags.FlagValues) -> None:
  options.define_set(values)
  flags.DEFINE_string("topology", None, "the TPU to compile for: a generation and the chips along each dimension, such as "
                      "v5p:2x2x1 or v6e:4x4", flag_values=values)
  flags.DEFINE_integer("slices", 1, "how many of them, joined by the data centre's network", lower_bound=1,
                       flag_values=values)
  flags.DEFINE_integer("batch", None, "sequences per step, over all devices; by default train.batch", lower_bound=1,
                       flag_values=values)
  flags.DEFINE_integer("seq", None, "tokens per sequence; by default train.seq", lower_bound=1, flag_values=values)
  flags.DEFINE_float("limit", 1800.0, "seconds after which compiling one program is given up", lower_bound=1.0,
                     flag_values=values)
  flags.DEFINE_boolean("cache", True, "keep what compiling told, and use what is kept ($LINEN_STACK_CACHE says where)",
                       flag_values=values)


def subject(values: flags.FlagValues, name: str, command: str) -> Subject:
  """The model of the config `name` as the flags say. Raises CommandError before anything is traced, where it can."""
  if values.topology is None:
    raise UsageError(f"{command} needs --topology; some that there are: {', '.join(chips.known())}")
  with plain_errors(ValueError):
    topology = chips.topology(values.topology, values.slices)
  config = options.load_config(name, values.set)
  batch = config.train.batch if values.batch is None else values.batch
  seq = config.train.seq if values.seq is None else values.seq
  with plain_errors(ValueError, TypeError, FlaxError):
    mesh = programs.as_mesh(config.mesh.axes, topology)
    rules = programs.as_rules(config.mesh.rules, mesh)
    model = families.language_model(config)
    program = step_program(config, model, mesh, rules, batch, seq)
  return Subject(config, model, program, topology, batch, seq)


def step_program(config: StackConfig, model: LanguageModel, mesh: jax.sharding.AbstractMesh, rules: programs.Rules,
                 batch: int, seq: int) -> Program:
  """The step that `train` runs, parameters and optimiser updated in place. Allocates nothing.

  Raises ValueError where the mesh does not divide the batch or a parameter.
  """
  spec = programs.batch_spec(rules)
  tokens = programs.placed(jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32), spec, mesh, f"a batch of {batch} sequences,")
  boxed, watch = programs.variables_of(model, jax.ShapeDtypeStruct((1, min(seq, 8)), jnp.int32))
  tx = training.optimizer(config.train, model.stack.plan)
  optimizer = jax.eval_shape(tx.init, boxed["params"])
  scalar = programs.placed(jax.ShapeDtypeStruct((), jnp.int32), PartitionSpec(), mesh, "step")
  state = {"variables": programs.place_variables(boxed, watch, mesh, rules),
           "optimizer": programs.place_variables(optimizer, watch, mesh, rules, "optimizer"), "step": scalar}

  def loss(state, tokens):
    logits = model.apply(state["variables"], tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

  step = training.train_step(model, tx, config.train.seed).__wrapped__  # without its own placement on one device
  return Program(step, (state, tokens), mesh, rules,
                 (programs.shardings(state), None), donate=(0,), loss=loss, stacks=tuple(watch.stacks.values()))


def check_writable(path: str | None, flag: str, endings: Sequence[str]) -> None:
  """Raises CommandError where no file could be written there, or its name has none of the endings."""
  if path is None:
    return
  target = pathlib.Path(path)
  if target.suffix not in endings:
    raise CommandError(f"--{flag} {path}: the name must end in {' or '.join(endings)}")
  if target.is_dir():
    raise CommandError(f"--{flag} {path}: this is a folder")
  if not target.parent.is_dir():
    raise CommandError(f"--{flag} {path}: there is no folder {target.parent}")
  try:
    tempfile.TemporaryFile(dir=target.parent).close()
  except OSError as error:
    raise CommandError(f"--{flag} {path}: cannot write into {target.parent}: {error.strerror or error}") from error


@contextlib.contextmanager
def replacing(path: str):
  """A temporary name beside `path`, which becomes `path` when all went well."""
  part = f"{path}.part{os.getpid()}"
  try:
    yield part
    os.replace(part, path)
  finally:
    pathlib.Path(part).unlink(missing_ok=True)
