"""The memory table: peak device bytes of an optimizer step against TRL, on the pretend accelerator."""
