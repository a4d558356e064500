"""The command of trimtab-cli, for launchers: `accelerate launch -m trimtab_lm dpo --config dpo.yaml`."""

import sys
from importlib.util import find_spec

if __name__ == "__main__":
    if find_spec("trimtab_cli") is None:
        sys.exit("python -m trimtab_lm runs the command trimtab, which is not installed: pip install trimtab-cli")
    from trimtab_cli.main import main

    sys.exit(main())
