"""What several commands share: the config with its overrides, and the model that it describes."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import flags
from flax import linen as nn
from flax.errors import FlaxError

from linen_stack import training
from linen_stack.commands import plain_errors
from linen_stack.config import StackConfig
from linen_stack.models import families


def define_set(values: flags.FlagValues) -> None:
  """The flag --set, for any key of the config."""
  flags.DEFINE_multi_string(
      "set", [], "KEY=VALUE replaces a key of the config, as in --set stack.remat=minimal",
      flag_values=values)


def load_config(name: str, assignments: Sequence[str]) -> StackConfig:
  """The config of that name or path, with keys replaced. Raises CommandError."""
  with plain_errors(ValueError, TypeError, OSError):
    return StackConfig.from_yaml(name).override(assignments)


def build(config: StackConfig) -> tuple[nn.Module, Any]:
  """The language model of a config, and its variables as shapes. Raises CommandError for one that cannot be."""
  with plain_errors(ValueError, TypeError, FlaxError):
    model = families.language_model(config)
    return model, training.abstract_variables(model)
