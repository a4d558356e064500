"""The command as a module, for launchers: `accelerate launch -m trimtab_lm dpo --config dpo.yaml`."""

import sys

from trimtab_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
