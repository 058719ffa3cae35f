"""`python -m probes` is the command `headwater`."""

from .cli.main import main

if __name__ == "__main__":
    main()
