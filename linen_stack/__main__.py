"""`python -m linen_stack`: the commands, see `linen_stack.commands`."""
import sys

from linen_stack.commands import main

if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
