"""The command `trimtab`: trains, sweeps, and looks at models and machines. It imports what a subcommand needs alone."""
