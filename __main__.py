"""`python -m deltazoo`: the `deltazoo` command, for environments whose scripts are not on PATH."""

from deltazoo.cli import main

if __name__ == "__main__":
    main()
