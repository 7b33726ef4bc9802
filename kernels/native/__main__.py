"""`python -m umbra.kernels.native`: builds the library if needed and says what runs here, or why nothing does."""

import sys

from . import isa, isas, threads
from .build import BuildError, library


def main() -> int:
    try:
        path = library()
    except BuildError as error:
        print(error, file=sys.stderr)
        if error.output:
            print(error.output, file=sys.stderr)
        return 1
    print(f"{path}\ninstruction sets: {', '.join(isas())}; in use: {isa()}; threads: {threads()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
