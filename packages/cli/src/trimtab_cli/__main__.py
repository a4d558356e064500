"""The command as a module, without the time that `import trimtab_lm` takes."""

import sys

from trimtab_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
