"""The command `trimtab`: trains, sweeps, and inspects models. Imports only what a subcommand needs."""
