import sys

from jaxspec.compile_check.check import main

if __name__ == "__main__":
    sys.exit(main())
