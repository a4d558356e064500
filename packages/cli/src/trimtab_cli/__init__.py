"""The command `trimtab`: trains, sweeps, and looks at models. It imports what a subcommand needs alone."""
