"""`train`: a model on text, from a config to a checkpoint and held-out bits per byte."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
import pathlib
import time
from typing import Any

from absl import flags
from flax.errors import FlaxError
import jax

from linen_stack import checkpoints, training
from linen_stack import text as text_lib
from linen_stack.commands import CommandError, options, plain_errors, used
from linen_stack.commands import plan as plan_command
from linen_stack.commands.progress import Progress
from linen_stack.config import StackConfig
from linen_stack.specs import LayerSpec

# Keys of the config that decide what stands in a checkpoint and what its numbers mean.
_LAYOUT = ("model", "stack.scan", "stack.param_axis")
# Of the model section, the keys that say which layers there are, in which segments.
_ARRANGEMENT = ("family", "layer", "args", "num_layers", "specs", "segments", "pattern")


@dataclasses.dataclass(frozen=True)
class Result:
  """What training came to."""

  losses: dict[int, float]
  """Loss of each step done by this run, in nats per byte; the first step is 1."""
  held_out_bits: float
  byte_entropy: float
  checkpoint: pathlib.Path


def define_flags(values: flags.FlagValues) -> None:
  options.define_set(values)
  flags.DEFINE_string("text", None, "a file, or a folder of files, to train on; by default the source of Python's "
                      "standard library", flag_values=values)
  flags.DEFINE_integer("steps", None, "stop after this step; the learning rate's schedule stays that of train.steps",
                       lower_bound=1, flag_values=values)
  flags.DEFINE_string("out", None, "folder of the checkpoints; by default runs/<name of the config>",
                      flag_values=values)
  flags.DEFINE_boolean("resume", False, "go on from the last checkpoint in that folder", flag_values=values)


def run(values: flags.FlagValues, args: Sequence[str]) -> None:
  config = options.load_config(args[0], values.set)
  out = pathlib.Path(values.out if values.out is not None else pathlib.Path("runs", pathlib.Path(args[0]).stem))
  train(config, out, text_path=values.text, stop=values.steps, resume=values.resume)


def train(config: StackConfig, out: pathlib.Path, *, text_path: str | None = None, stop: int | None = None,
          resume: bool = False) -> Result:
  """Trains up to step `stop` (default: train.steps), writes checkpoints to `out`, and measures on held-out text.

  Raises CommandError for everything that the user can set right.
  """
  stop = config.train.steps if stop is None else stop
  found = checkpoints.steps(out) if out.is_dir() else []
  if found and not resume:
    raise CommandError(f"{out} holds a checkpoint of step {found[-1]}; --resume goes on from it, "
                       "--out takes another folder")
  if out.exists() and not out.is_dir():
    raise CommandError(f"{out} is a file; --out takes a folder")
  with plain_errors(checkpoints.CheckpointError):
    last = checkpoints.find(out) if resume else None
    checkpoints.check_writable(out)  # before the work of which it would keep the result
  text = _text(config, text_path)
  model, variables = options.build(config)
  print(f"{plan_command.describe(config, model, variables)}\n")
  print(f"text: {text.origin}; {text.train.size:,} bytes to train on, {text.held_out.size:,} held out")

  tx = training.optimizer(config.train, model.stack.plan)
  with plain_errors(ValueError):
    on_host = training.host_bytes(training.abstract_state(model, tx))
  if on_host:
    print(f"in host memory: {on_host / 2**20:,.1f} MiB of parameters and of the optimiser's state")
  with plain_errors(jax.errors.JaxRuntimeError):
    if last is None:
      state = training.init_state(model, tx, config.train.seed)
    else:
      with plain_errors(checkpoints.CheckpointError):
        _check_same(config, text, last)
        state = checkpoints.load(last, training.abstract_state(model, tx))
      print(f"resumed from {last}")
    losses, state = _steps(config, model, tx, state, text, out, stop)
    bits = _evaluate(config, model, state, text)
  entropy = text_lib.byte_entropy(text.held_out)
  print(f"held out: {bits:.4f} bits per byte; entropy of single bytes: {entropy:.4f}")
  checkpoint = checkpoints.find(out)
  print(f"checkpoint: {checkpoint}\n"
        f"try: python -m linen_stack generate {out} --prompt 'def ' --tokens 200 --temperature 0.7")
  return Result(losses, bits, entropy, checkpoint)


def _text(config: StackConfig, path: str | None) -> text_lib.Text:
  if config.model.vocab is not None and config.model.vocab < 256:
    raise CommandError(f"model.vocab must be at least 256 to train on bytes, not {config.model.vocab}")
  with plain_errors(OSError, ValueError):
    text = text_lib.read(path)
  needed = config.train.seq + 1
  if text.train.size < needed or text.held_out.size < 2:
    raise CommandError(f"the text is too short: {text.origin} leaves {text.train.size} bytes to train on, and one "
                       f"sequence takes {needed}; take more text, or a smaller train.seq")
  return text


def _check_same(config: StackConfig, text: text_lib.Text, checkpoint: pathlib.Path) -> None:
  """Raises where a checkpoint is of another model or text; says what else differs."""
  other = checkpoints.load_config(checkpoint)
  ours, theirs = _flat(config.to_dict()), _flat(other.to_dict())
  changed = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
  said = {key: f"{key} (there {theirs.get(key)!r}, here {ours.get(key)!r})" for key in changed}
  layout = [key for key in changed if any(key == part or key.startswith(f"{part}.") for part in _LAYOUT)]
  listed = ", ".join(said[key] for key in layout)
  if layout and _layers(config) == _layers(other):
    how = ["--config CONFIG"] * any(key.startswith("model.") for key in layout)
    how += [f"--set {key}={str(ours[key]).lower()}" for key in layout if key.startswith("stack.")]
    raise CommandError(f"cannot resume from {checkpoint}: its layers are laid out in another way: {listed}. "
                       f"`python -m linen_stack convert {checkpoint} NEW {' '.join(how)}` lays them out as here")
  if layout:
    raise CommandError(f"cannot resume from {checkpoint}: it is of another model: {listed}")
  if not (checkpoint / "optimizer").is_dir():
    raise CommandError(f"cannot resume from {checkpoint}: it holds a model alone, without the state of its training")
  trained_on = checkpoints.load_text(checkpoint)
  if trained_on != text.fingerprint():
    raise CommandError(f"cannot resume from {checkpoint}: it was trained on another text "
                       f"({trained_on['bytes']:,} bytes there, {text.fingerprint()['bytes']:,} here); "
                       "pass the same --text")
  for key in changed:
    print(f"note: differs from the checkpoint: {said[key]}")


def _layers(config: StackConfig) -> Any:
  """What a model computes, however its layers are arranged in segments."""
  around = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(config.model)
            if field.name not in _ARRANGEMENT}
  with plain_errors(ValueError, TypeError):
    return [LayerSpec(spec.cls, **spec.kwargs) for spec in config.plan().layers], around


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  out: dict[str, Any] = {}
  for key, value in config.items():
    out |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
  return out


def _steps(config: StackConfig, model: Any, tx: Any, state: training.State, text: text_lib.Text, out: pathlib.Path,
           stop: int) -> tuple[dict[int, float], training.State]:
  """Runs steps up to `stop`; the last one always leaves a checkpoint."""
  settings, start, losses = config.train, int(state["step"]), {}
  if start >= stop:
    print(f"nothing is left to train: {start} steps are done, of {stop}")
    return losses, state

  def batch(step):
    return text_lib.batch(text.train, settings.batch, settings.seq, settings.seed, step)

  began = time.perf_counter()
  with plain_errors(ValueError, TypeError, FlaxError):
    lowered = training.train_step(model, tx, settings.seed).lower(state, batch(start))
  traced = time.perf_counter()
  step_fn = lowered.compile()
  compiled = time.perf_counter()
  print(f"trace {traced - began:.1f} s, compile {compiled - traced:.1f} s", flush=True)

  step = start
  try:
    with Progress("step", start, stop, settings.batch * settings.seq) as progress:
      for step in range(start + 1, stop + 1):
        state, loss = step_fn(state, batch(step - 1))
        losses[step] = float(loss)
        if not math.isfinite(losses[step]):
          raise CommandError(f"the loss of step {step} is {losses[step]}; {_last(out)}. "
                             "A lower train.learning_rate or more train.warmup may help")
        progress.step(step, f"loss {losses[step]:.6f}")
        if step == stop or (settings.checkpoint_every and step % settings.checkpoint_every == 0):
          with plain_errors(checkpoints.CheckpointError):
            checkpoints.save(out, state, config, text.fingerprint())
  except KeyboardInterrupt:
    raise CommandError(f"interrupted in step {step}; {_last(out)}", status=130) from None
  seconds = time.perf_counter() - compiled
  tokens = len(losses) * settings.batch * settings.seq
  print(f"{len(losses)} steps in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s")
  print(used.describe(step_fn))
  return losses, state


def _last(out: pathlib.Path) -> str:
  found = checkpoints.steps(out)
  if not found:
    return "there is no checkpoint yet"
  return f"the last whole checkpoint is {out / str(found[-1])} (--resume goes on from it)"


def _evaluate(config: StackConfig, model: Any, state: training.State, text: text_lib.Text) -> float:
  with Progress("held-out byte", 0, text.held_out.size - 1, 1) as progress:
    return training.held_out_bits(
        model, state["variables"], text.held_out, config.train.batch, config.train.seq, progress.step)
