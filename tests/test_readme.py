"""The README: its examples run, its table of presets is the library's, its commands and files exist."""
import pathlib
import re

import pytest

from linen_stack import commands
from linen_stack.config import StackConfig
from linen_stack.policies import PRESETS

README = pathlib.Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
SHELL = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)


def test_examples_run_in_order():
  blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
  assert len(blocks) >= 4
  names = {"__name__": "readme"}
  for block in blocks:
    exec(compile(block, "README.md", "exec"), names)  # pylint: disable=exec-used


def test_the_table_of_presets_is_that_of_the_library():
  shown = re.search(r"<!-- presets.*?-->\n(.*?)<!-- end of presets -->", README, re.DOTALL).group(1)
  rows = [f"| `{name}` | {preset.note} |" for name, preset in PRESETS.items()]
  table = ["| preset | what it does |", "| --- | --- |", *rows]
  assert shown == "\n".join(table) + "\n"


@pytest.mark.parametrize("name", re.findall(r"python -m linen_stack (\w+)", README))
def test_commands_exist(name):
  assert name in commands.COMMANDS


def test_the_two_commands_are_one_line_each():
  assert SHELL[0].count("\n") == SHELL[1].count("\n") == 1
  assert "train tiny" in SHELL[0] and "pytest" in SHELL[1]


@pytest.mark.parametrize("name", re.findall(r"linen_stack (?:plan|train) ([\w-]+)", README))
def test_configs_exist(name):
  StackConfig.from_yaml(name)
