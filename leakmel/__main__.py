"Run the command line as `python -m leakmel`."

import os
import sys
from contextlib import suppress

# `-m` puts the current folder at the front of the module path; it may be a folder of recordings from someone else
with suppress(OSError):  # the folder was removed
    if sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(__file__)):
        del sys.path[0]

from leakmel.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
