"""python -m jaxspec: the command line."""

from jaxspec.cli import main

raise SystemExit(main())
