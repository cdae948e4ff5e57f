"""`generate`: continues a text, byte by byte, with a model from a checkpoint."""
from __future__ import annotations

from collections.abc import Sequence

from absl import flags
import jax
import numpy as np

from linen_stack import checkpoints, models, training
from linen_stack.commands import CommandError, UsageError, options, plain_errors


def define_flags(values: flags.FlagValues) -> None:
  flags.DEFINE_string("prompt", None, "the text to continue", flag_values=values)
  flags.DEFINE_integer("tokens", 200, "how many bytes to add", lower_bound=1, flag_values=values)
  flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest byte; above 0, bytes are drawn", lower_bound=0.0,
                     flag_values=values)
  flags.DEFINE_integer("seed", 0, "for the draws", lower_bound=0, flag_values=values)


def run(values: flags.FlagValues, args: Sequence[str]) -> None:
  if values.prompt is None:
    raise UsageError("generate needs --prompt TEXT")
  print(generate(args[0], values.prompt, values.tokens, values.temperature, values.seed))


def generate(checkpoint: str, prompt: str, tokens: int, temperature: float = 0.0, seed: int = 0) -> str:
  """The prompt and `tokens` bytes more, as text; bytes that are not UTF-8 become U+FFFD. Raises CommandError."""
  if not prompt:
    raise CommandError("--prompt is empty; there must be at least one byte to go on from")
  with plain_errors(checkpoints.CheckpointError):
    path = checkpoints.find(checkpoint)
    config = checkpoints.load_config(path)
    model, _ = options.build(config)
    abstract = training.abstract_state(model, training.optimizer(config.train, model.stack.plan))
    variables = checkpoints.load(path, {"variables": abstract["variables"]})["variables"]
  given = prompt.encode("utf-8", "surrogateescape")
  ids = np.frombuffer(given, np.uint8).astype(np.int32)[None]
  with plain_errors(ValueError, TypeError, jax.errors.JaxRuntimeError):
    new = models.generate(model, variables, ids, tokens, temperature=temperature, key=jax.random.key(seed))
  # A vocabulary may be larger than the bytes; what is no byte shows as one that is not UTF-8.
  return (given + bytes(min(int(token), 255) for token in np.asarray(new)[0])).decode("utf-8", "replace")
