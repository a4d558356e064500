"""W&B's sweeps without a server: files, searches, early stopping, and the processes of trials."""
